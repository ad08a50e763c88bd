"""nearswap: all of a small delta, and no more than a bound of a large one."""

from typing import Final

from darelib.core.arrays import Array, library
from darelib.methods.looks import Coefficients, Piece, weigh
from darelib.methods.method import Family, Method, Operation, add_rows

LEAST_DELTA: Final = 1e-6  # no smaller one is divided by


def swap_near(piece: Piece, own: Coefficients) -> Array:
    merged = add_rows(piece, own)
    size = abs(merged).clip(LEAST_DELTA)
    share = library(merged).full_like(merged, own.extra["swap_t"]) / size
    return share.clip(0, 1) * merged


NEARSWAP: Final = Method(
    "nearswap",
    card=lambda settings: (
        f"added to the base, at most {settings.options['swap_t']:g} of each entry: what lies near "
        "is swapped"
    ),
    operation=Operation("nearswap", swap_near),
    settings={"swap_t": 1e-4},
    weigh=lambda settings, models, found: weigh(settings, models, found, extra=settings.options),
    models=(1, 1),
    returns_model=lambda _: False,
    mergekit={"nearswap": Family(shared={"t": "swap_t"}, others=(1, 1))},
)
