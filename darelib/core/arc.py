"""Angles, sines and the coefficients of slerp: to the bit, on every machine.

By series in whole numbers: libraries differ in the last bit of theirs, and the output must not.
"""

import math
from functools import lru_cache
from typing import Final

# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
# Angles, sines and cosines are whole numbers of 2^-FRACTION_BITS here.
FRACTION_BITS: Final = 128
ONE: Final = 1 << FRACTION_BITS
PI: Final = 0x3243F6A8885A308D313198A2E03707344


@lru_cache(64)
def slerp_weights(first: float, second: float, product: float, t: float) -> tuple[float, float]:
    """The coefficients of two vectors in their slerp at t.

    first, second: their squared lengths; product: their scalar product.
    """
    cosine = product / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else 1.0
    if not abs(cosine) <= SLERP_LINEAR:  # also where it is no number, which the merge will report
        return 1 - t, t
    return divide_arc(cosine, t)


def divide_arc(cosine: float, t: float) -> tuple[float, float]:
    """The same, of directions with this cosine, which is neither 1 nor -1."""
    angle, whole = find_angle(cosine)
    share = fix(t) * angle >> FRACTION_BITS
    return find_sine(angle - share) / whole, find_sine(share) / whole


def find_angle(cosine: float) -> tuple[int, int]:
    """The angle of a cosine between -1 and 1, and its sine."""
    angle = fix(math.acos(cosine))
    wanted = fix(cosine)
    sine = math.isqrt(ONE * ONE - wanted * wanted)
    # Newton's method, from the library's angle to one of twice as many digits.
    angle += ((find_cosine(angle) - wanted) << FRACTION_BITS) // sine
    return angle, sine


def fix(x: float) -> int:
    top, bottom = x.as_integer_ratio()
    return (top << FRACTION_BITS) // bottom


def find_cosine(x: int) -> int:
    """By halves of the angle, as cos x = 1 - 2 (sin x/2)^2."""
    return ONE - (find_sine(x // 2) ** 2 >> FRACTION_BITS - 1)


def find_sine(x: int) -> int:
    x %= 2 * PI
    if x > PI:
        return -find_sine(x - PI)
    x = min(x, PI - x)
    square = x * x >> FRACTION_BITS
    term = total = x
    n = 1
    while term:
        term = (term * square >> FRACTION_BITS) // -((n + 1) * (n + 2))
        total += term
        n += 2
    return total
