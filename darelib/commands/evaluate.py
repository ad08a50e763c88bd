"""`dare.py evaluate`: base, fine-tunes and merges, judged by examples of each skill."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from darelib.commands.options import SHARED, Flags, MergerClass, Options, make_merger, show
from darelib.commands.report import Report, Section, Table
from darelib.config import Group
from darelib.core.text import ConfigError, list_names, printable, shorten_names
from darelib.run import load_matching

if TYPE_CHECKING:
    from darelib.core.interrupts import Interrupts
    from darelib.models.checkpoint import Checkpoint
    from darelib.output.judged import JudgedFile, LambdaChoice, Score, Scores
    from darelib.plan.plan import MergePlan

OPTIONS: Final[Options] = {
    **SHARED,
    "--model": {
        "metavar": "MODEL",
        "nargs": "+",
        "action": "extend",
        "help": "models to judge (default: the merge that the settings describe)",
        "group": Group.MODELS,
    },
}
WORST: Final = "*"
LOSS: Final = "loss: in bits a token; "
LEGEND: Final = (
    "same: how often what is likeliest is the fine-tune's; KL: from the fine-tune, in bits; "
    f"{WORST}: a model's worst skill"
)
MERGE: Final = "the merge"


@dataclass(frozen=True)
class EvaluationReport(Report):
    """How models do on each file of examples, beside the model whose examples these are. Prints as
    a table.
    """

    ROWS: ClassVar = "models"
    names: tuple[str, ...]  # the base, the fine-tunes, and what is judged beside them
    files: tuple[JudgedFile, ...]
    scores: tuple[Scores, ...]  # by model and file
    choice: LambdaChoice | None  # where examples have chosen lambda
    remarks: tuple[str, ...]

    def find_worst(self, scores: Scores) -> int:
        """The file on which a model is furthest from its owner."""
        return max(range(len(scores)), key=lambda k: scores[k].as_dict()["divergence"] or 0.0)

    def parts(self) -> list[Section]:
        has_loss = self.scores[0][0].as_dict()["loss"] is not None
        columns = f"{'loss' if has_loss else '':6} {'same':>7} {'KL':>8} ".lstrip()
        titles = [printable(file.title) for file in self.files]
        rows = [["", *titles], ["", *[columns] * len(titles)]]
        for name, scores in zip(self.names, self.scores, strict=True):
            worst = self.find_worst(scores) if len(scores) > 1 else None
            cells = [format_score(score, k == worst) for k, score in enumerate(scores)]
            rows.append([printable(name), *cells])
        lines = [
            f"({LOSS if has_loss else ''}{LEGEND})",
            *map(str, self.files),
            *([str(self.choice)] if self.choice else []),
            *self.remarks,
        ]
        return [Table(rows), "\n".join(map(printable, lines))]

    def to_dict(self) -> dict[str, Any]:
        names = [file.name for file in self.files]
        models = [
            {
                "model": name,
                "worst": names[self.find_worst(scores)],
                "scores": [as_json(score) for score in scores],
            }
            for name, scores in zip(self.names, self.scores, strict=True)
        ]
        return {
            "files": [asdict(file) for file in self.files],
            "models": models,
            "choice": asdict(self.choice) if self.choice else None,
            "remarks": list(self.remarks),
        }


def as_json(score: Score) -> dict[str, float | None]:
    """The means; None for what is infinite, which JSON does not have."""
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in score.as_dict().items()
    }


def format_score(score: Score, is_worst: bool) -> str:
    found = score.as_dict()
    loss = "" if found["loss"] is None else f"{found['loss']:.4f}"
    mark = WORST if is_worst and found["divergence"] else " "
    return f"{loss} {found['agreement']:7.1%} {found['divergence']:8.4f}{mark}"


def judge_models(
    plan: MergePlan,
    inputs: Sequence[Checkpoint],
    others: Sequence[Checkpoint],
    interrupts: Interrupts,
) -> EvaluationReport:
    """others: models to judge; none: the merge that the plan describes."""
    if not any(model.parts[0].examples for model in inputs):
        raise ConfigError("nothing judges the models", "give --examples FILE..., one for each")
    found = load_matching().judge(plan, inputs, others, interrupts)
    names = shorten_names([model.name for model in (*inputs, *others)])
    judged = names[len(inputs) :]
    found = replace(found, remarks=(*found.remarks, *find_biased(inputs, others, judged)))
    return EvaluationReport((*names, *(() if others else (MERGE,))), **vars(found))


def find_biased(
    inputs: Sequence[Checkpoint], others: Sequence[Checkpoint], names: Sequence[str]
) -> Iterator[str]:
    """Which models were matched with examples that judge them, as their recipes say."""
    from darelib.models.tensorfile import peek_header
    from darelib.output.destination import RECIPE_KEY

    digests = [each.sha256 for model in inputs if (each := model.parts[0].examples)]
    recipes = [peek_header(model.files[0].path)[1].get(RECIPE_KEY, "") for model in others]
    pairs = zip(names, recipes, strict=True)
    biased = [name for name, recipe in pairs if any(each in recipe for each in digests)]
    if biased:
        yield (
            "matched with these examples, and therefore better at them than elsewhere: "
            f"{list_names(biased)}"
        )


def run(flags: Flags, merger_class: MergerClass) -> None:
    merger, _ = make_merger(flags, merger_class)
    show(merger.evaluate(flags.get("model", ())), flags, True)
