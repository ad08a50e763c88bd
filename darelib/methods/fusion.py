"""arcee_fusion: the entries whose importance is an outlier.

Importance is |delta| times how far the softmax of the row moves. It is that of the fine-tune as it
is: a drop thins the chosen entries. Exponentials and logarithms are the library's, whose last bits
differ between machines.
"""

from collections.abc import Sequence
from typing import Final

from darelib.core.arrays import Array, divide, library
from darelib.core.drops import End
from darelib.methods.looks import Coefficients, Piece, RowLook, ScoreLook
from darelib.methods.method import Family, Method, Operation, add_rows

SOFTMAX_EPSILON: Final = 1e-8  # mergekit adds it to every share
ROWS_AT_ONCE: Final = 1 << 22  # elements of whole rows


def take_softmax(rows: Array) -> Array:
    lib = library(rows)
    powers = lib.exp(rows - lib.amax(rows, 1)[:, None])
    return powers / powers.sum(1)[:, None] + SOFTMAX_EPSILON


class DivergenceLook(RowLook):
    """How far the fine-tune's softmax of each row is from the base's, after Kullback and Leibler.

    In float64, some rows at a time, and in the end in float32.
    """

    name = "divergences"

    def measure(self, piece: Piece) -> Array:
        lib = library(piece.base)
        [delta] = piece.rows
        step = max(1, ROWS_AT_ONCE // piece.width) * piece.width
        found = []
        for start in range(0, len(piece.base), step):
            values = piece.base[start : start + step]
            moved = values + delta[start : start + step]
            wide = [lib.asarray(each, dtype=lib.float64) for each in (values, moved)]
            before, after = (take_softmax(each.reshape(-1, piece.width)) for each in wide)
            sums = (after * lib.log(after / before)).sum(1)
            found.append(lib.asarray(sums.clip(0), dtype=lib.float32))
        return lib.concatenate(found)


class ImportanceLook(ScoreLook):
    """The smallest |delta| that is important enough, in each row.

    mergekit takes the quartiles of a million entries at random, where a tensor has more; these are
    of all.
    """

    ends = 3
    counters = 3 << 16
    sees_dropped = True

    def score(self, piece: Piece) -> Array:
        [delta] = piece.rows
        return abs(delta) * piece.spread(self.found.extra["divergences"])

    def number(self, model: int, survivors: int) -> tuple[int, ...]:
        return tuple(survivors - int(share * (survivors - 1)) for share in (0.25, 0.5, 0.75))

    def record(self, found: Sequence[Sequence[End]]) -> None:
        """The |delta| from which |delta| * divergence is an outlier; in float32."""
        low, middle, high = (end.size for end in found[0])
        least = middle + 1.5 * (high - low)
        divergences = self.found.extra["divergences"]
        floors = divergences * 0 + least
        # Else all entries reach it. A number over an array of torch's would be a product with the
        # inverse.
        self.found.extra["floors"] = divide(floors, divergences) if least > 0 else floors


def fuse(piece: Piece, own: Coefficients) -> Array:
    """Floors are of deltas as they are: here they are scaled like these."""
    merged = add_rows(piece, own)
    if not piece.rows:  # nothing is known of rows either
        return merged
    floors = own.scales[0] * piece.spread(own.extra["floors"])
    return library(merged).where(abs(merged) >= floors, merged, 0.0)


FUSION: Final = Method(
    "arcee_fusion",
    card=lambda _: (
        "added to the base where their size, times how far the row's softmax moves, is an outlier"
    ),
    operation=Operation("arcee_fusion", fuse),
    looks=lambda _: (DivergenceLook, ImportanceLook),
    models=(1, 1),
    any_drop=False,
    sees_dropped=True,
    returns_model=lambda _: False,
    exact=False,
    mergekit={"arcee_fusion": Family(others=(1, 1))},
)
