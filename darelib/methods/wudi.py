"""wudi: matrix by matrix, so that each change keeps its effect on its own inputs and outputs.

A change of a linear layer is a sum of outer products, error signals times inputs: its rows lie
where its task's inputs lie, its columns where its error signals lie. The merge keeps what each
change does there. With t_i the changes, w_i their weights (which add up to 1), from the columns'
side:

    G_i = t_i' t_i;   G_i <- G_i / mean(diag G_i) + ridge * I
    M   = (sum of w_i t_i G_i) (sum of w_i G_i)^-1

and the mean of that and of the same from the rows' side. It solves the objective of WUDI-Merging
exactly (Cheng et al., ICML 2025, arXiv:2503.08099); the ridge, in both factors, makes the weighted
average the limit of a large one. Then M is resized, so that lambda 1 is a good choice: so that on
average it holds each change in full, the mean of <M, t_i> / |t_i|^2 being 1, but to no more than
norm_limit times the mean |t_i|. `define` is this definition.

In `merge_matrices`, t_i is scaled by a power of two, and the part that both sides need is computed
once: t_i t_i' t_i is the one product of three in either.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from darelib.core.arrays import LONGEST_SIDE, Array, Factors, Matrices, find_span, library
from darelib.core.pieces import multiply
from darelib.methods.looks import MatrixLook, Options
from darelib.methods.method import SUM, Method, WholeMerge

# In float32, what lies where no change is comes out too large, by about this times the unit
# roundoff, times the mean eigenvalue (by size) of the Gram matrix, divided by the ridge: measured.
ERROR_FACTOR: Final = 4 * 2.0**-24
LEAST_EXPONENT: Final = -120  # of a change's largest entry: float32 holds 2^120, and not 2^128
BLOCK_SIDE: Final = 128  # of the blocks that are inverted by themselves
PRODUCT_SIDE: Final = 512  # of the largest in which rows are multiplied by each other
LARGEST_ERROR: Final = 5e-5  # relative, by norm; where more is expected, float64 is used


@dataclass(frozen=True)
class Change:
    """One model's change of a matrix."""

    unit: Array  # the change, times a power of two that makes its largest entry about 1
    scale: float  # by which the unit is multiplied to give the change
    square: float  # the sum of the unit's squared entries
    weight: float


class TooRough(Exception):
    """float32 would be off by too much."""


def merge_matrices(
    deltas: Sequence[Array], weights: Sequence[float], options: Options, precise: bool
) -> Array:
    """The merged change of one matrix, in the deltas' type. These are overwritten.

    weights: of the deltas; what is left to 1 is that of models without a change. precise: computed
    in float64.
    """
    lib = library(deltas[0])
    changes = [change for change in map(measure, deltas, weights) if change.square]
    if not changes:
        return lib.zeros_like(deltas[0])
    shape = deltas[0].shape
    if not precise and deltas[0].dtype != lib.float64:
        try:
            return solve(changes, shape, options, LARGEST_ERROR)
        except TooRough:
            pass
    wide = [replace(each, unit=lib.asarray(each.unit, dtype=lib.float64)) for each in changes]
    return lib.asarray(solve(wide, shape, options, math.inf), dtype=deltas[0].dtype)


def merge_spaces(factors: Sequence[Factors], weights: Sequence[float], options: Options) -> Factors:
    """The merged change itself as such a product, in float64.

    All that happens, happens in the space that the factors span together: nothing there is larger
    than the sum of the ranks (Panariello et al., NeurIPS 2025), and the result is the same.
    """
    lib = library(factors[0][0])
    left_space, lefts = find_span([left for left, _ in factors])
    right_space, rights = find_span([right.T for _, right in factors])
    cores = [left @ right.T for left, right in zip(lefts, rights, strict=True)]
    changes = [change for change in map(measure, cores, weights) if change.square]
    shape = (len(left_space), len(right_space))
    if not changes:
        return lib.zeros((shape[0], 0)), lib.zeros((0, shape[1]))
    return left_space @ solve(changes, shape, options, math.inf), right_space.T


def measure(delta: Array, weight: float) -> Change:
    """A change, scaled in place."""
    peak = max(float(delta.max()), -float(delta.min()))
    exponent = max(math.frexp(peak)[1], LEAST_EXPONENT)
    delta *= 2.0**-exponent
    flat = delta.reshape(-1)
    return Change(delta, 2.0**exponent, float(flat @ flat), weight)


def find_factor(merged: Array, changes: Sequence[Change], norm_limit: float) -> float:
    """What the merged change is multiplied by, to hold each change in full within the limit.

    At most by how many they are: what is left of changes that cancel out is not blown up.
    """
    flat = merged.reshape(-1)
    size = float(flat @ flat) ** 0.5
    if not norm_limit or not size:
        return 1.0
    total = sum(each.weight for each in changes)
    shares = [
        each.weight * float(flat @ each.unit.reshape(-1)) / (each.square * each.scale)
        for each in changes
    ]
    mean = sum(each.weight * each.scale * each.square**0.5 for each in changes) / total
    held = max(sum(shares) / total, 1 / len(changes))
    return min(1 / held, norm_limit * mean / size)


def solve(
    changes: Sequence[Change],
    shape: tuple[int, int],
    options: Options,
    largest_error: float,
) -> Array:
    """The merged change: the mean of the solutions from both sides, or the one from the side that
    is not too long, resized.

    shape: of the matrix; that of the units is smaller where they are its cores in another space.
    """
    lib = library(changes[0].unit)
    short = int(shape[0] >= shape[1])  # the axis of the shorter side
    means = lib.zeros_like(changes[0].unit)
    cubes = lib.zeros_like(means)
    gram = make_gram(means, short)
    for each in changes:
        own = make_gram(means, short)
        add_products(own, each.unit, short)
        mirror(own)
        weight = each.weight * each.scale
        means += weight * each.unit
        cubes += weight / each.square * multiply_side(own, each.unit, short)
        own *= each.weight * shape[short] / each.square
        gram += own
    del own
    merged = shape[short] * cubes
    merged += options["ridge"] * means
    solve_side(gram, merged, short, options["ridge"], largest_error)
    long = 1 - short
    if shape[long] <= LONGEST_SIDE:
        gram = make_gram(means, long)
        for each in changes:
            add_products(gram, each.unit, long, each.weight * shape[long] / each.square)
        cubes *= shape[long]
        means *= options["ridge"]
        cubes += means
        solve_side(gram, cubes, long, options["ridge"], largest_error)
        merged += cubes
        merged /= 2
    merged *= find_factor(merged, changes, options["norm_limit"])
    return merged


def make_gram(matrix: Array, axis: int) -> Array:
    """Zeros, for the products of all rows (axis 0) or columns of a matrix."""
    side = matrix.shape[axis]
    lib = library(matrix)
    if lib.__name__ == "torch":
        return matrix.new_zeros(side, side)
    return lib.zeros((side, side), matrix.dtype)


def list_blocks(side: int) -> Iterator[tuple[int, int]]:
    """Where blocks of rows start and end: of a small matrix, many, to compute little twice."""
    step = max(BLOCK_SIDE, min(PRODUCT_SIDE, side // 8))
    starts = range(0, side, step)
    return ((start, min(start + step, side)) for start in starts)


def add_products(gram: Array, matrix: Array, axis: int, weight: float = 1.0) -> None:
    """Add the products of all rows (axis 0) or columns: those on and below the diagonal, which are
    half, and some above.
    """
    rows = matrix if axis == 0 else matrix.T
    for start, end in list_blocks(len(rows)):
        own = rows[start:end] if weight == 1 else weight * rows[start:end]
        gram[start:end, :end] += multiply(own, rows[:end].T)


def mirror(gram: Array) -> None:
    """Fill in what is above the diagonal."""
    for start, end in list_blocks(len(gram)):
        gram[:start, start:end] = gram[start:end, :start].T


def multiply_side(factor: Array, matrix: Array, axis: int) -> Array:
    """factor matrix, or of the transposed matrix (axis 1), transposed back."""
    return multiply(factor, matrix) if axis == 0 else multiply(matrix, factor.T)


def solve_side(gram: Array, right: Array, axis: int, ridge: float, largest_error: float) -> None:
    """Divide by a weighted sum of Gram matrices plus the ridge, in place. gram is overwritten."""
    mirror(gram)
    flat = gram.reshape(-1)
    if ERROR_FACTOR * float(flat @ flat) / len(gram) / ridge > largest_error:
        raise TooRough
    flat[:: len(gram) + 1] += ridge
    lib = library(gram)
    if lib.__name__ == "numpy":
        inverses = factorise(gram)
        divide(gram, inverses, right, axis)
        divide(gram, inverses, right, axis, backwards=True)
    else:
        rows = right if axis == 0 else right.T
        rows.copy_(lib.cholesky_solve(rows, lib.linalg.cholesky(gram)))


# Cholesky's factor L, and what is solved by it, by NumPy's products of halves: its own way to solve
# takes four times as long.


def factorise(gram: Array) -> list[Array]:
    """L, into what is below gram's diagonal, and the inverses of the blocks on it."""
    side = len(gram)
    if side <= BLOCK_SIDE:
        linalg = library(gram).linalg
        return [linalg.inv(linalg.cholesky(gram))]
    half = find_half(side)
    above = factorise(gram[:half, :half])
    below = gram[half:, :half]
    divide(gram[:half, :half], above, below, axis=1)
    add_products(gram[half:, half:], below, axis=0, weight=-1.0)
    return above + factorise(gram[half:, half:])


def divide(
    gram: Array, inverses: Sequence[Array], right: Array, axis: int, backwards: bool = False
) -> None:
    """Solve L X = right, or L' X = right (backwards), in place; axis 1: of right transposed."""
    side = len(gram)
    if side <= BLOCK_SIDE:
        [inverse] = inverses
        right[...] = multiply_side(inverse.T if backwards else inverse, right, axis)
        return
    half = find_half(side)
    first = right[:half] if axis == 0 else right[:, :half]
    second = right[half:] if axis == 0 else right[:, half:]
    below = gram[half:, :half]
    above = inverses[: half // BLOCK_SIDE]
    others = inverses[half // BLOCK_SIDE :]
    if backwards:
        divide(gram[half:, half:], others, second, axis, backwards)
        first -= multiply_side(below.T, second, axis)
        divide(gram[:half, :half], above, first, axis, backwards)
    else:
        divide(gram[:half, :half], above, first, axis)
        second -= multiply_side(below, first, axis)
        divide(gram[half:, half:], others, second, axis)


def find_half(side: int) -> int:
    """About half of a side: whole blocks."""
    return -(-side // (2 * BLOCK_SIDE)) * BLOCK_SIDE


# --- the definition -------------------------------------------------------------------------------


def define(deltas: Sequence[Array], weights: Sequence[float], options: Options) -> Array:
    """The merged delta of one matrix, in float64. Deltas may be of 0 only.

    The mean of what the definition gives from the columns' side and from the rows' side, times what
    makes its projections on the deltas 1 in the mean, within a limit of its size.
    """
    lib = library(deltas[0])
    ridge = options["ridge"]
    norm_limit = options["norm_limit"]
    wide = [lib.asarray(delta, dtype=lib.float64) for delta in deltas]
    sides = []
    if wide[0].shape[1] <= LONGEST_SIDE:
        sides.append(solve_columns(wide, weights, ridge))
    if wide[0].shape[0] <= LONGEST_SIDE:
        sides.append(solve_columns([delta.T for delta in wide], weights, ridge).T)
    merged: Array = sum(sides) / len(sides)
    pairs = [(weight, delta) for weight, delta in zip(weights, wide, strict=True) if delta.any()]
    if not norm_limit or not merged.any():
        return merged
    total = sum(weight for weight, _ in pairs)
    held = sum(weight * (merged * delta).sum() / (delta**2).sum() for weight, delta in pairs)
    mean = sum(weight * lib.linalg.norm(delta) for weight, delta in pairs) / total
    most = 1 / max(held / total, 1 / len(pairs))
    return merged * min(most, norm_limit * mean / lib.linalg.norm(merged))


def solve_columns(deltas: Sequence[Array], weights: Sequence[float], ridge: float) -> Array:
    """M = (sum of w_i t_i G_i) (sum of w_i G_i)^-1, where G_i is t_i' t_i with a mean diagonal of
    1, plus the ridge.
    """
    lib = library(deltas[0])
    unit = lib.eye(deltas[0].shape[1])
    grams = []
    for delta in deltas:
        gram = delta.T @ delta
        mean = gram.diagonal().mean()
        grams.append((gram / mean if mean else gram) + ridge * unit)
    parts = list(zip(weights, deltas, grams, strict=True))
    total = sum(weight * gram for weight, _, gram in parts)
    wanted = sum(weight * delta @ gram for weight, delta, gram in parts)
    return lib.linalg.solve(total, wanted.T).T


def count_operations(matrices: Matrices, models: int) -> int:
    """Floating-point operations to merge all: Gram matrices, cubes, factors and solutions."""
    products = sum(models * side + 2 * side for side in matrices.sides)
    cubes = 2 * models * min(matrices.rows, matrices.columns)
    factors = sum(side**3 for side in matrices.sides) // 3
    return matrices.number * (matrices.size * (products + cubes) + factors)


WUDI: Final = Method(
    "wudi",
    card=lambda settings: (
        "merged matrix by matrix, so that each keeps its effect on its own inputs and outputs "
        f"(ridge {settings.options['ridge']:g}), and added to the base"
    ),
    paper="[WUDI-Merging](https://arxiv.org/abs/2503.08099)",
    operation=SUM,
    settings={"weights": None, "ridge": 1.0, "norm_limit": 1.5},
    looks=lambda _: (MatrixLook,),
    normalize=True,
    shares_only=True,
    whole=WholeMerge(define, merge_matrices, merge_spaces, count_operations),
    adds_ranks=True,
    exact=False,
)
