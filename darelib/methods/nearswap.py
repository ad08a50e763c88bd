"""nearswap: all of a small delta, and no more than a bound of a large one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from darelib.methods.looks import Found
from darelib.methods.mergekit import Family
from darelib.methods.method import Coefficients, Method, weigh
from darelib.methods.settings import TensorSettings


def weigh_near(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    return replace(weigh(settings, models, found), bound=settings.options["swap_t"])


NEARSWAP: Final = Method(
    "nearswap",
    card=lambda settings: (
        f"added to the base, at most {settings.options['swap_t']:g} of each entry: what lies near "
        "is swapped"
    ),
    kernel="near",
    settings={"swap_t": 1e-4},
    weigh=weigh_near,
    models=(1, 1),
    returns_model=lambda _: False,
    mergekit={"nearswap": Family(shared={"t": "swap_t"}, others=(1, 1))},
)
