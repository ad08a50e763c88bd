"""The report of a merge: plain data that prints as a table, with the ranks of an adapter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from darelib.commands.report import Report, Section, Table
from darelib.config import as_toml
from darelib.core.drops import DROPS, EXPECTATION, RANDOM
from darelib.core.mask import MASK_BITS
from darelib.core.text import LISTED, count_of, human, printable, shorten_names
from darelib.core.tuning import TUNING
from darelib.output.prepare import FilePlan
from darelib.requests.configfile import as_literal
from darelib.run.worker import Outcome, Tally, explain_copied, sum_fields

if TYPE_CHECKING:
    from darelib.output.judged import LambdaChoice
    from darelib.output.matched import MatchReport

# A fine-tune's delta is a small part of its weights; two unrelated models differ by more than
# either weighs, which is refused.
DOUBTFUL_RATIO: Final = 0.5


@dataclass(frozen=True)
class AdapterFit:
    """How much of the changes' energy (the sum of their squares) is kept. Prints as a line."""

    ranks: tuple[int, int]  # the least and the most
    kept: float  # share of the energy of all changes
    largest_error: float  # relative, by norm
    worst: str  # of which tensor
    tensors: Mapping[str, float]  # the share that is kept of each; in a plan, of some

    @classmethod
    def of(cls, plan: FilePlan, outcomes: Sequence[Outcome]) -> Self | None:
        """None: the output is no adapter, or nothing is known."""
        known = {outcome.tensor: outcome.energy for outcome in outcomes if outcome.energy}
        energies = {name: known[name] for name in sorted(known)}
        if not energies:
            return None
        shares = {name: kept / total if total else 1.0 for name, (kept, total) in energies.items()}
        worst = min(shares, key=lambda name: shares[name])
        ranks = [plan.modules[name].rank for name in shares]
        total = math.fsum(each for _, each in energies.values())
        kept = math.fsum(each for each, _ in energies.values())
        return cls(
            ranks=(min(ranks), max(ranks)),
            kept=kept / total if total else 1.0,
            largest_error=math.sqrt(max(0.0, 1 - shares[worst])),
            worst=worst,
            tensors=shares,
        )

    def __str__(self) -> str:
        ranks = " to ".join(map(str, dict.fromkeys(self.ranks)))
        return (
            f"rank {ranks} keeps {self.kept:.2%} of the energy of "
            f"{count_of(len(self.tensors), 'change')}; the largest relative error is "
            f"{self.largest_error:.3g}, of {printable(self.worst)}"
        )


@dataclass(frozen=True)
class ModelReport:
    """What the merge found in one fine-tune and did with it."""

    name: str
    seed: int
    parameters: int
    drop_rate: float  # as asked for, rules apart
    drop: str
    exact_drop_rate: float  # what the masks' thresholds amount to, over all tensors
    dropped_share: float  # what the mask really dropped; trim comes on top
    mean_delta: float
    largest_delta: float
    share_above_threshold: float
    missing_tensors: tuple[str, ...]
    extra_tensors: tuple[str, ...]
    mismatched_tensors: tuple[str, ...]

    @property
    def cells(self) -> list[str]:
        """A line of the table.

        Of drop rates, what was asked for and, where rules or layers change it, what it comes to.
        """
        varies = abs(self.exact_drop_rate - self.drop_rate) > 1 / (1 << MASK_BITS)
        drop = f" by {self.drop}" if self.drop != RANDOM else ""
        exact = f" ({self.exact_drop_rate:.3g} in all)" if varies else ""
        return [
            printable(self.name),
            str(self.seed),
            f"{self.parameters:,}",
            f"{self.drop_rate:g}{drop}{exact}",
            f"{self.dropped_share:.3%}",
            f"{self.mean_delta:.3g}",
            f"{self.largest_delta:.3g}",
            f"{self.share_above_threshold:.2%}",
        ]


@dataclass(frozen=True)
class MergeReport(Report):
    """What a merge did. Prints as a table; to_dict gives plain data."""

    ROWS: ClassVar = "models"
    output: str
    method: str
    lambda_coeff: Any  # a number, or a gradient, as asked for, rules apart
    files: tuple[str, ...]  # of tensors
    side_files: tuple[str, ...]  # of a model directory: all the others
    tensors: int
    copied_tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    delta_threshold: float
    models: tuple[ModelReport, ...]
    warnings: tuple[str, ...]
    adapter: AdapterFit | None  # where one was written
    matching: MatchReport | None  # where it was matched with examples
    choice: LambdaChoice | None  # where examples have chosen lambda

    def parts(self) -> list[Section]:
        return [*(self._list_models() if self.models else ()), self._summarize()]

    def _list_models(self) -> Iterator[Section]:
        titles = "model,seed,parameters,drop rate,dropped,mean |delta|,largest,above"
        yield Table([titles.split(","), *(model.cells for model in self.models)])
        is_number = isinstance(self.lambda_coeff, float)
        factor = f"{self.lambda_coeff:g}" if is_number else as_literal(self.lambda_coeff)
        yield (
            f"(method {self.method}, lambda {factor}; "
            f"above: share of parameters with |delta| > {self.delta_threshold:g})"
        )
        if self.adapter:
            yield str(self.adapter)
        if self.matching:
            yield str(self.matching)
        if self.choice:
            yield str(self.choice)

    def _summarize(self) -> str:
        copied = f" ({self.copied_tensors:,} copied)" if self.copied_tensors else ""
        moved = self.bytes_read + self.bytes_written
        rate = f" ({human(moved / self.seconds)}/s)" if moved > TUNING.least_for_rate else ""
        return (
            f"{say_what('merged', len(self.models))} {printable(self.output)}: "
            f"{count_of(self.tensors, 'tensor')}{copied}, {human(self.bytes_read)} read, "
            f"{human(self.bytes_written)} written in {self.seconds:.2f} s{rate}"
        )


def say_what(verb: str, models: int) -> str:
    """What is done to so many models, up to where they go."""
    return f"{verb} {count_of(models, 'model')} into" if models else f"{verb} layers into"


def add_tallies(plan: FilePlan, outcomes: Sequence[Outcome]) -> list[dict[str, Tally]]:
    """What all jobs counted, per model and tensor; in the plan's order, so that no sum differs."""
    order = {tensor.name: k for k, tensor in enumerate(plan.tensors)}
    parts: list[dict[str, list[Tally]]] = [{} for _ in plan.models]
    for outcome in sorted(outcomes, key=lambda outcome: (order[outcome.tensor], outcome.start)):
        for i, tally in outcome.tallies.items():
            parts[i].setdefault(outcome.tensor, []).append(tally)
    return [{name: sum_fields(tallies) for name, tallies in tensors.items()} for tensors in parts]


def report_merge(
    plan: FilePlan, outcomes: Sequence[Outcome], output: str, seconds: float
) -> MergeReport:
    by_tensor = add_tallies(plan, outcomes)
    totals = [sum_fields([Tally(), *tallies.values()]) for tallies in by_tensor]
    warnings = list(plan.warnings)
    for i, name in enumerate(plan.models):
        if names := sorted({outcome.tensor for outcome in outcomes if i in outcome.differing}):
            warnings.append(explain_copied(name, names))
        if not plan.repeats_base[i]:  # of which the plan warns
            warnings += check_base(plan, i, totals[i])
    warnings += find_large_deltas(plan, by_tensor, totals)
    return MergeReport(
        output=output,
        method=plan.config.method,
        lambda_coeff=as_toml(plan.config.lambda_coeff),
        files=tuple(file.name for file in plan.files),
        side_files=tuple(plan.side),
        tensors=len(plan.tensors),
        copied_tensors=sum(not tensor.merged for tensor in plan.tensors),
        bytes_read=plan.bytes_to_read,
        bytes_written=plan.size,
        seconds=seconds,
        delta_threshold=plan.config.delta_threshold,
        models=tuple(report_model(plan, i, total) for i, total in enumerate(totals)),
        warnings=tuple(warnings),
        adapter=AdapterFit.of(plan, outcomes),
        matching=plan.matching,
        choice=plan.choice,
    )


def report_model(plan: FilePlan, i: int, total: Tally) -> ModelReport:
    count = max(total.parameters, 1)
    thinning = plan.config.general(len(plan.models)).thinnings[i]
    rate = 1 - total.expected / count if total.parameters else thinning.drop_rate
    return ModelReport(
        name=plan.models[i],
        seed=plan.seeds[i],
        parameters=total.parameters,
        drop_rate=thinning.drop_rate,
        drop=thinning.drop,
        exact_drop_rate=rate,
        dropped_share=(total.parameters - total.kept) / count,
        mean_delta=total.mean,
        largest_delta=total.peak,
        share_above_threshold=total.above / count,
        missing_tensors=plan.missing[i],
        extra_tensors=plan.extra[i],
        mismatched_tensors=plan.mismatched[i],
    )


def check_base(plan: FilePlan, i: int, total: Tally) -> Iterator[str]:
    name = plan.models[i]
    if total.parameters and total.peak == 0:
        yield (
            f"{name} is identical to the base {plan.base}: it only dilutes an average; leave it out"
        )
    elif is_doubtful(total):
        yield (
            f"{plan.base} does not look like the base of {name}: the mean |delta| is "
            f"{total.mean:.3g} where the mean |weight| is {total.base_sum / total.parameters:.3g}; "
            f"check that {name} was fine-tuned from it"
        )


def is_doubtful(total: Tally) -> bool:
    return total.sum > DOUBTFUL_RATIO * total.base_sum


def find_large_deltas(
    plan: FilePlan, by_tensor: Sequence[Mapping[str, Tally]], totals: Sequence[Tally]
) -> Iterator[str]:
    """One warning for all models. Where nothing is dropped, nothing can be lost; drops by size
    tolerate large deltas.
    """
    threshold = plan.config.delta_threshold
    found: list[tuple[float, str]] = []
    counts = []
    labels = shorten_names(plan.models)
    for i, (tallies, total) in enumerate(zip(by_tensor, totals, strict=True)):
        thinnings = (tensor.settings.thinnings[i] for tensor in plan.changed)
        at_random = any(DROPS[each.drop].rescale == EXPECTATION for each in thinnings)
        may_lose = at_random and total.kept < total.parameters and not is_doubtful(total)
        large = [(t.mean, name) for name, t in tallies.items() if may_lose and t.mean > threshold]
        if large:
            found += large
            counts.append(f"{len(large):,} of {len(tallies):,} tensors of {labels[i]}")
    if found:
        mean, worst = max(found)
        shown = ", ".join(counts[:LISTED]) + (" and others" if len(counts) > LISTED else "")
        yield (
            f"large deltas: the mean |delta| exceeds {threshold:g} in {shown} (most: {mean:.3g}, "
            f"{worst!r}); dropping may lose what was learned: lower the drop rate, check the base"
        )
