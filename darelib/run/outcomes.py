"""The outcomes of jobs: counts and sums, which add up to those of the whole merge."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, Self, TypeVar

from numpy.typing import NDArray

from darelib.core.text import list_names
from darelib.models.encodings import Described
from darelib.plan.checks import check_distance
from darelib.plan.plan import MergePlan

Sums = TypeVar("Sums", bound=NamedTuple)


class Tally(NamedTuple):
    """What the kernels counted, for one model and one or all tensors."""

    parameters: int = 0
    sum: float = 0.0
    peak: float = 0.0
    above: int = 0
    kept: int = 0
    expected: float = 0.0  # entries that the keep rates say should be kept
    base_sum: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.parameters if self.parameters else 0.0


def sum_fields(parts: Iterable[Sums]) -> Sums:
    """Sums of one kind, added up one after the other; of peaks, the largest.

    Not by sum(), whose rounding depends on the version of Python.
    """
    first, *others = parts
    rows = zip(first._fields, zip(first, *others, strict=True), strict=True)
    return first._make(max(r) if name == "peak" else reduce(operator.add, r) for name, r in rows)


@dataclass
class Outcome:
    """What one job found: a tally per model that has the tensor, or the models that differ from a
    copied base.
    """

    tensor: str
    start: int
    bytes_read: int
    tallies: dict[int, Tally] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)
    # Of a change that was written as a product: the sums of squares that it keeps, and of all.
    energy: tuple[float, float] | None = None
    rank: int | None = None  # that holds enough of a change, where that is to be found out

    def as_entry(self) -> list[Any]:
        """For the journal."""
        tallies = {str(i): list(tally) for i, tally in self.tallies.items()}
        differing = sorted(self.differing)
        return [self.tensor, self.start, self.bytes_read, tallies, differing, self.energy]

    @classmethod
    def of_entry(cls, entry: list[Any]) -> Self:
        tensor, start, bytes_read, tallies, differing, energy = entry
        read = {int(i): Tally(*tally) for i, tally in tallies.items()}
        kept = (energy[0], energy[1]) if energy else None
        return cls(tensor, start, bytes_read, read, set(differing), kept)


@dataclass
class MatrixChange:
    """The merged change of a tensor that is solved by matrices, and what was counted: by the first
    element of each matrix.
    """

    parts: dict[int, NDArray[Any]] = field(default_factory=dict)
    tallies: dict[int, dict[int, Tally]] = field(default_factory=dict)

    def sum_tallies(self) -> dict[int, Tally]:
        """The tallies of the whole tensor, by model."""
        counted = [self.tallies[start] for start in sorted(self.tallies)]
        return {i: sum_fields(each[i] for each in counted) for i in counted[0]}


def check_related(
    plan: MergePlan, inputs: Sequence[Described], outcomes: Sequence[Outcome]
) -> None:
    """Refuse a base if all its weights show that it is another model's."""
    base, *models = inputs
    for i, model in enumerate(models):
        tallies = [outcome.tallies[i] for outcome in outcomes if i in outcome.tallies]
        total = sum_fields([Tally(), *tallies])
        weight = total.base_sum / max(total.parameters, 1)
        check_distance(plan.config, base, model, total.parameters, total.mean, weight)


def explain_copied(model: str, names: Sequence[str]) -> str:
    return (
        f"{model} differs from the base in tensors that are copied, not merged: {list_names(names)}"
    )
