"""Sums of vectors, by coefficients that follow from their scalar products: to the bit, everywhere.

Of floats, only what every machine rounds alike is used: + - * / and square roots. Angles and sines
are found by series in whole numbers: libraries differ in the last bit of theirs. Vectors are lists
of coefficients here; products: of the vectors to be summed up, each with itself, then each with all
behind it.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Final

# Angles, sines and cosines are whole numbers of 2^-FRACTION_BITS here.
FRACTION_BITS: Final = 128
ONE: Final = 1 << FRACTION_BITS
PI: Final = 0x3243F6A8885A308D313198A2E03707344
# What mergekit takes for zero: a product of two lengths, and a length (below which products have
# lost all digits of a sum, too).
LEAST_PRODUCT: Final = 1e-6
LEAST_LENGTH: Final = 1e-7

Products = tuple[float, ...]


# --- angles ---------------------------------------------------------------------------------------


def divide_arc(cosine: float, t: float) -> tuple[float, float]:
    """The coefficients of two directions with this cosine, not 1 or -1, in their slerp at t."""
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


# --- sums -----------------------------------------------------------------------------------------


class Space:
    """What some vectors span."""

    def __init__(self, products: Products, count: int) -> None:
        self.lengths = [math.sqrt(square) for square in products[:count]]
        self.rows = [[0.0] * count for _ in range(count)]
        pairs = [*((i, i) for i in range(count)), *combinations(range(count), 2)]
        for (i, k), product in zip(pairs, products, strict=True):
            self.rows[i][k] = self.rows[k][i] = product

    def multiply(self, vector: Sequence[float]) -> list[float]:
        """Its scalar products with all vectors that span the space."""
        return [math.fsum(map(float.__mul__, row, vector)) for row in self.rows]

    def measure(self, vector: Sequence[float]) -> float:
        return math.sqrt(max(0.0, math.fsum(map(float.__mul__, self.multiply(vector), vector))))

    def normalize(self, vector: Sequence[float]) -> list[float]:
        length = self.measure(vector)
        return [coefficient / length for coefficient in vector]


def clip(cosine: float) -> float:
    return max(-1.0, min(1.0, cosine))
