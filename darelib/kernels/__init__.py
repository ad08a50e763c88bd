"""The arithmetic: one definition (plain), and engines that give its very bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

Kernel = Callable[..., Any]
# The kinds that are compiled; of all others, NumPy's functions are used on every engine.
COMPILED: Final = (
    *("sum", "elect", "average", "products", "count", "sums"),
    *("rank", "measure", "expand", "pack", "unpack"),
)


class EngineUnavailable(Exception):
    """This engine cannot be used here; the reason is in the message."""


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: what it does, and the stored types that it reads and writes."""

    # sum, elect, average: merge a chunk; products: what arcs and spheres must know of it; count:
    # what drops by size and trim must; sums: what restores them; rank: what of the mask's bits is
    # kept of each element; measure: what an analysis wants to know; expand: multiply an adapter's
    # matrices; pack: what the mask keeps; unpack: put that in its places. Others are of methods
    # that decide about single entries.
    kind: str
    base: str
    finetuned: str
    output: str

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        return "F64" if "F64" in (self.base, self.finetuned, self.output) else "F32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.base}-{self.finetuned}-{self.output}"
