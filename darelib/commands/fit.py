"""What an adapter holds of the changes that it stands for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from darelib.core.text import count_of, printable
from darelib.output.prepare import FilePlan
from darelib.run.outcomes import Outcome


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
