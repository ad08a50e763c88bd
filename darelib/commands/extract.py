"""`dare.py extract`: the changes of a fine-tune, as a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from darelib.commands.merge import run as run_merge
from darelib.commands.options import FORCE, RESUME, SHARED, Flags, MergerClass, Options
from darelib.commands.report import Report
from darelib.core.text import ConfigError, count_of, human, printable

if TYPE_CHECKING:
    from darelib.commands.summary import AdapterFit, MergeReport

# Those of merge that mean something to one whole model, in other words.
CHANGES: Final[Options] = {
    "--base": {"help": "the model that it was fine-tuned from"},
    "--merge": {"action": "store", "nargs": None, "help": "the fine-tuned model"},
    "--output": {"help": "the directory to write the adapter to"},
    "--adapter-rank": {"help": "of the adapter; 0.95: ranks that keep this share of the energy"},
    "--adapter-rest": {},
    "--dtype": {"help": "type of the adapter (default float32)"},
    "--mismatch": {},
    "--any-base": {},
    "--threads": {},
    "--engine": {},
}
OPTIONS: Final[Options] = {
    **{name: SHARED[name] | changes for name, changes in CHANGES.items()},
    "--match": {
        "metavar": "PATTERN",
        "nargs": "+",
        "help": "only tensors whose names match one of these, like '*q_proj*' (default all)",
    },
    "--force": FORCE,
    "--resume": RESUME,
    "--dry-run": {"action": "store_true", "help": "print the plan, and write nothing"},
}


@dataclass(frozen=True)
class ExtractReport(Report):
    """What an extraction did. Prints as a line or two; to_dict gives plain data."""

    output: str
    model: str
    tensors: int
    bytes_written: int
    seconds: float
    adapter: AdapterFit | None  # None: nothing was changed that a low rank holds
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, made: MergeReport) -> Self:
        return cls(
            made.output,
            made.models[0].name,
            made.tensors,
            made.bytes_written,
            made.seconds,
            made.adapter,
            made.warnings,
        )

    def __str__(self) -> str:
        fit = f"{self.adapter}\n" if self.adapter else ""
        return (
            f"{fit}extracted what {printable(self.model)} changed into {printable(self.output)}: "
            f"{count_of(self.tensors, 'tensor')}, {human(self.bytes_written)}, "
            f"in {self.seconds:.2f} s"
        )


def run(flags: Flags, merger_class: MergerClass) -> None:
    """The merge of one model, of which nothing is dropped; what is not matched is the base's."""
    for name in ("merge", "output", "adapter_rank"):
        if name not in flags:
            raise ConfigError(
                f"extract needs --{name.replace('_', '-')}",
                "give --base MODEL --merge MODEL --adapter-rank 64 --output PATH",
            )
    wanted = dict(flags)
    patterns = wanted.pop("match", [])
    wanted |= {"merge": [wanted["merge"]], "drop_rate": 0.0}
    if patterns:
        chosen = [f"{pattern}:lambda_coeff=1.0" for pattern in patterns]
        wanted["rules"] = [*chosen, "*:lambda_coeff=0.0"]
    run_merge(wanted, merger_class, ExtractReport.of)
