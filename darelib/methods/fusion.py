"""arcee_fusion: the entries whose importance is an outlier.

Importance is |delta| times how far the softmax of the row moves. It is that of the fine-tune as it
is: a drop thins the chosen entries.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from darelib.core.drops import End
from darelib.methods.looks import BoundsLook, ChunkLook, Found
from darelib.methods.mergekit import Family
from darelib.methods.method import Coefficients, Method, weigh
from darelib.methods.settings import TensorSettings


class DivergenceLook(ChunkLook):
    """How far the fine-tune's softmax of each row is from the base's."""

    kernel = "diverge"
    of_rows = True

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        """count: of rows."""
        self._chunks[start] = buffers.by_entry[:count].copy()

    def conclude(self, number: int) -> None:
        import numpy as np

        found = [self._chunks.pop(start) for start in sorted(self._chunks)]
        self.found.by_row = np.concatenate(found)


class ImportanceLook(BoundsLook):
    """The smallest |delta| that is important enough, in each row.

    mergekit takes the quartiles of a million entries at random, where a tensor has more; these are
    of all.
    """

    kernel = "importance"
    ends = 3

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        return tuple(survivors - int(share * (survivors - 1)) for share in (0.25, 0.5, 0.75))

    def record(self, found: Sequence[Sequence[End]]) -> None:
        """The |delta| from which |delta| * divergence is an outlier; in float32."""
        import numpy as np

        low, middle, high = (end.size for end in found[0])
        least = middle + 1.5 * (high - low)
        floors = self.found.by_row * 0 + least
        if least > 0:  # else all entries reach it
            with np.errstate(divide="ignore", over="ignore"):
                # A number over an array of torch's would be a product with the inverse.
                floors = floors / self.found.by_row
        self.found.by_row = floors


def weigh_important(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """Floors are of deltas as they are: the bound scales them like what is kept."""
    weighed = weigh(settings, models, found)
    return replace(weighed, bound=weighed.scales[0] if models else 0.0)


FUSION: Final = Method(
    "arcee_fusion",
    card=lambda _: (
        "added to the base where their size, times how far the row's softmax moves, is an outlier"
    ),
    kernel="fuse",
    looks=lambda _: (DivergenceLook, ImportanceLook),
    weigh=weigh_important,
    models=(1, 1),
    any_drop=False,
    sees_dropped=True,
    returns_model=lambda _: False,
    mergekit={"arcee_fusion": Family(others=(1, 1))},
)
