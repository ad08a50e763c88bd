"""slerp, nuslerp, multislerp and karcher: means of directions.

They are sums of vectors, whose coefficients follow from their scalar products.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import combinations
from typing import Final

from darelib.methods.looks import (
    ZERO,
    ArcLook,
    Coefficients,
    Found,
    GramLook,
    TensorSettings,
    weigh_from_origin,
)
from darelib.methods.method import (
    COUNTED,
    FIRST,
    OPTIONAL,
    SUM,
    Family,
    Method,
    Weigh,
    average_weights,
    name_origin,
    sum_weights,
)

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


class Basis:
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


# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
LEAST_SQUARE: Final = 1e-16  # what mergekit takes for the square of a sine of 0
ADDED: Final = 1e-8  # what multislerp adds to lengths, so that it can divide by them


@lru_cache(64)
def slerp_weights(first: float, second: float, product: float, t: float) -> tuple[float, float]:
    """The coefficients of two vectors in their slerp at t.

    first, second: their squared lengths; product: their scalar product.
    """
    cosine = product / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else 1.0
    if not abs(cosine) <= SLERP_LINEAR:  # also where it is no number, which the merge will report
        return 1 - t, t
    return divide_arc(cosine, t)


@lru_cache(64)
def find_arc(products: Products, t: float) -> Products:
    """Slerp of two; unlike slerp_weights, up to the smallest angles, and from a vector of 0."""
    first, second = (max(length, LEAST_LENGTH) for length in Basis(products, 2).lengths)
    cosine = clip(products[2] / first / second)
    is_line = (1 - cosine) * (1 + cosine) <= LEAST_SQUARE
    return (1 - t, t) if is_line else divide_arc(cosine, t)


@lru_cache(64)
def find_direction(products: Products, weights: Products) -> Products:
    """The weighted mean of the directions, with the weighted mean of the lengths.

    What multislerp adds to it is 0: distances from a mean add up to that. Where the mean is 0, the
    vectors themselves are summed up, as mergekit does with two.
    """
    space = Basis(products, len(weights))
    pairs = list(zip(weights, space.lengths, strict=True))
    mean = [weight / (length + ADDED) for weight, length in pairs]
    size = space.measure(mean)
    if size < LEAST_LENGTH:
        return weights
    scale = math.fsum(weight * length for weight, length in pairs) / size
    return tuple(scale * coefficient for coefficient in mean)


@lru_cache(64)
def find_karcher(products: Products, count: int, max_iter: int, tol: float) -> Products:
    """The Karcher mean of the directions, which is nearest to all of them along the sphere, with
    the mean of the lengths. Vectors no longer than tol have no direction.
    """
    space = Basis(products, count)
    units = [1 / length if length > tol else 0.0 for length in space.lengths]
    used = [i for i, unit in enumerate(units) if unit]
    if not used:
        return tuple(units)
    mean = units
    if space.measure(units) < len(used) * max(tol, LEAST_LENGTH):
        mean = [unit if i == used[0] else 0.0 for i, unit in enumerate(units)]
    for _ in range(max_iter):
        mean = space.normalize(mean)
        tangent = [part / len(used) for part in add_ways(space, units, mean, tol)]
        size = space.measure(tangent)
        if size < tol:
            break
        ahead = find_cosine(fix(size)) / ONE
        aside = find_sine(fix(size)) / ONE / size
        mean = [ahead * one + aside * other for one, other in zip(mean, tangent, strict=True)]
    scale = math.fsum(space.lengths) / count
    return tuple(scale * coefficient for coefficient in space.normalize(mean))


def add_ways(
    space: Basis, units: Sequence[float], start: Sequence[float], tol: float
) -> list[float]:
    """The sum of the ways from a point on the sphere to all directions, each as long as its angle.

    A way is angle / sine * (direction - cosine * start).
    """
    both = zip(units, space.multiply(start), strict=True)
    cosines = [clip(unit * product) for unit, product in both]
    factors = [find_factor(cosine, tol) for cosine in cosines]
    back = math.fsum(map(float.__mul__, factors, cosines))
    all_three = zip(factors, units, start, strict=True)
    return [factor * unit - back * coefficient for factor, unit, coefficient in all_three]


def find_factor(cosine: float, tol: float) -> float:
    """An angle over its sine; 0 where the way is too short, or goes in no direction: products do
    not tell a smaller sine from rounding.
    """
    if (1 - cosine) * (1 + cosine) < LEAST_LENGTH**2:
        return 0.0
    angle, sine = find_angle(cosine)
    return angle / sine if angle / ONE >= tol else 0.0


# --- the methods ----------------------------------------------------------------------------------


def weigh_by_products(find: Callable[[TensorSettings, Products], Products]) -> Weigh:
    """The weights are found by the scalar products of the thinned models, or of their deltas."""

    def weigh_found(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
        weights = settings.weights
        # What no float can hold gives values that are not finite, which the merge will report.
        if found.products and all(map(math.isfinite, found.products)):
            with suppress(ArithmeticError, ValueError):
                weights = find(settings, found.products)
        return weigh_from_origin(settings, models, found, weights)

    return weigh_found


def weigh_slerp(settings: TensorSettings, models: Sequence[int], found: Found) -> Coefficients:
    """The arc goes from base + kept_0 to base + kept_1; the merged delta is added to the base."""
    weights = slerp_weights(*(found.products or (0.0,) * 3), settings.options["slerp_t"])
    return weigh_from_origin(settings, models, found, weights)


def share_arc(given: Sequence[float] | None, count: int, normalize: bool) -> tuple[float, ...]:
    """The middle, where weights add up to 0."""
    adds_up = given is not None and abs(sum_weights(given)) >= LEAST_PRODUCT
    return average_weights(given if adds_up else None, count, True)


def find_mean(own: TensorSettings, products: Products) -> Products:
    max_iter = int(own.options["max_iter"])
    return find_karcher(products, len(own.weights), max_iter, own.options["tol"])


SLERP: Final = Method(
    "slerp",
    card=lambda _: "interpolated along the arc between the two",
    operation=SUM,
    settings={"slerp_t": 0.5},
    looks=lambda _: (ArcLook,),
    weigh=weigh_slerp,
    shares=lambda settings: (1 - settings.options["slerp_t"], settings.options["slerp_t"]),
    models=(2, 2),
    any_drop=False,
    origin=ZERO,
    mergekit={"slerp": Family(shared={"t": "slerp_t"}, base=FIRST, others=(1, 1))},
)
NUSLERP: Final = Method(
    "nuslerp",
    card=lambda settings: f"interpolated along the arc between the two{name_origin(settings)}",
    operation=SUM,
    settings={"weights": None, "origin": None},
    share=share_arc,
    looks=lambda _: (GramLook,),
    weigh=weigh_by_products(lambda own, found: find_arc(found, own.weights[1])),
    models=(2, 2),
    mergekit={
        "nuslerp": Family(
            each={"weight": "weights"},
            ignored=("int8_mask", "nuslerp_row_wise"),  # which means nothing to flat tensors
            only={"nuslerp_flatten": (True, "a tensor is one vector, not one by row or column")},
            defaults={"nuslerp_flatten": True},
            base=OPTIONAL,
            others=(2, 2),
        ),
    },
)
MULTISLERP: Final = Method(
    "multislerp",
    card=lambda settings: (
        "merged as the weighted mean of their directions, with the weighted mean of their "
        f"lengths{name_origin(settings)}"
    ),
    operation=SUM,
    settings={"weights": None, "normalize": None, "origin": None},
    looks=lambda _: (GramLook,),
    weigh=weigh_by_products(lambda own, found: find_direction(found, own.weights)),
    normalize=True,
    mergekit={
        "multislerp": Family(
            each={"weight": "weights"},
            shared={"normalize_weights": "normalize"},
            ignored=("int8_mask", "eps"),
            defaults={"normalize_weights": True},
            base=OPTIONAL,
            others=(1, None),
        ),
    },
)
KARCHER: Final = Method(
    "karcher",
    card=lambda settings: (
        "merged as the Karcher mean of their directions, with the mean of their lengths"
        f"{name_origin(settings)}"
    ),
    operation=SUM,
    settings={"origin": None, "max_iter": 10.0, "tol": 1e-5},
    looks=lambda _: (GramLook,),
    weigh=weigh_by_products(find_mean),
    origin=ZERO,
    mergekit={
        "karcher": Family(
            shared={"max_iter": "max_iter", "tol": "tol"},
            defaults={"max_iter": 10, "tol": 1e-5},
            base=COUNTED,
        ),
    },
)
