"""The coefficients of slerp: to the bit, on every machine."""

import math
from functools import lru_cache
from typing import Final

# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
# Angles, sines and cosines are whole numbers of 2^-FRACTION_BITS where slerp computes with them.
FRACTION_BITS: Final = 128
PI: Final = 0x3243F6A8885A308D313198A2E03707344


@lru_cache(64)
def slerp_weights(first: float, second: float, product: float, t: float) -> tuple[float, float]:
    """The coefficients of two vectors in their slerp at t.

    first, second: their squared lengths; product: their scalar product. Sines are by series in
    whole numbers: libraries differ in the last bit of theirs, and the output must not.
    """
    cosine = product / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else 1.0
    if not abs(cosine) <= SLERP_LINEAR:  # also where it is no number, which the merge will report
        return 1 - t, t
    angle = _fix(math.acos(cosine))
    wanted = _fix(cosine)
    one = 1 << FRACTION_BITS
    whole = math.isqrt(one * one - wanted * wanted)
    # Newton's method, from the library's angle to one of twice as many digits. By halves of the
    # angle, as cos x = 1 - 2 (sin x/2)^2.
    reached = one - (_sine(angle // 2) ** 2 >> FRACTION_BITS - 1)
    angle += ((reached - wanted) << FRACTION_BITS) // whole
    share = _fix(t) * angle >> FRACTION_BITS
    return _sine(angle - share) / whole, _sine(share) / whole


def _fix(x: float) -> int:
    top, bottom = x.as_integer_ratio()
    return (top << FRACTION_BITS) // bottom


def _sine(x: int) -> int:
    x = min(x, PI - x)
    square = x * x >> FRACTION_BITS
    term = total = x
    n = 1
    while term:
        term = (term * square >> FRACTION_BITS) // -((n + 1) * (n + 2))
        total += term
        n += 2
    return total
