"""The kernels for CUDA GPUs, written for Triton: many tensors in one launch, at the speed of the device's memory.

The arithmetic is that of darelib.kernels.plain, to the bit: nothing is contracted to a fused multiply-add, divisions
are rounded to nearest, and constants above 2^31 are arrays of uint32, since a literal would become an int64. A lane
draws one Philox block, whose eight pieces belong to elements 128 apart, so that lanes side by side load elements side
by side. A program loads all that it needs before it computes anything: the memory is busy while masks are drawn. What
Triton compiles is marked `# compiled`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, islice, pairwise, repeat
from typing import Any, Final, Protocol

import numpy as np
import torch

from darelib.core.formats import DTYPES, FORMATS
from darelib.core.mask import ROUNDS, TILE, mask_key
from darelib.core.methods import (
    METHODS,
    SLERP,
    ArcLook,
    Coefficients,
    Found,
    TensorSettings,
    TrimLook,
    choose_looks,
    weigh_for_look,
)

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
Tensor = torch.Tensor
constexpr: Any = tl.constexpr

SHORT_NAMES: Final = {getattr(torch, name): short for name, short in DTYPES.items()}
TYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
MOST_MODELS: Final = 16  # a kernel is unrolled over them
MOST_ELEMENTS: Final = 1 << 31  # of a tensor: what 32 bits can count
BATCH_ELEMENTS: Final = (
    1 << 28
)  # of the tensors in one launch, while which the next one is prepared
WARPS: Final = 4  # of a program
# Trim looks for its floor some bits at a time: from which bit on it counts in each pass, and how many. Many values are
# equal, and adding to one counter takes turns: so there are several of each.
DIGITS: Final = ((20, 11), (10, 10), (0, 10))
REPLICAS: Final = 64
COUNTED_ROWS: Final = 64  # models of tensors in one launch that counts: 32 MB

PIECES = constexpr(8)
LANES = constexpr(TILE // 8)
TILE_SIZE = constexpr(TILE)
PHILOX_ROUNDS = constexpr(ROUNDS)
BINS, COPIES = constexpr(1 << 11), constexpr(REPLICAS)
# Of a tensor's row in a table, the first places: addresses and sizes; coefficients. A model's follow, three each.
PLACES = constexpr(5)  # base, output, elements, first program, first sum
NUMBERS = constexpr(4)  # lambda, base share, first share, what the output type rounds to infinity


# --- compiled ---------------------------------------------------------------------------------------------------------


@triton.jit
def draw(key, block):  # compiled
    """The Philox block of each lane: four words, of two pieces each."""
    x0, x1 = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    x2, x3 = tl.zeros_like(x0), tl.zeros_like(x0)
    k0, k1 = key.to(tl.uint32) + x2, (key >> 32).to(tl.uint32) + x2
    m0, m1 = tl.full(x0.shape, 0xD2511F53, tl.uint32), tl.full(x0.shape, 0xCD9E8D57, tl.uint32)
    w0, w1 = tl.full(x0.shape, 0x9E3779B9, tl.uint32), tl.full(x0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(PHILOX_ROUNDS):
        p0, p1 = x0 * m0, x2 * m1
        x0, x2 = tl.umulhi(x2, m1) ^ x1 ^ k0, tl.umulhi(x0, m0) ^ x3 ^ k1
        x1, x3 = p1, p0
        k0, k1 = k0 + w0, k1 + w1
    return x0, x1, x2, x3


@triton.jit
def locate(owners, places, lanes, WIDTH: constexpr, EVEN: constexpr, GROUP: constexpr):  # compiled
    """Which tensor this program works on, its row of places, the first tile, how many elements are left; the lanes'."""
    program = tl.program_id(0)
    tensor = tl.load(owners + program).to(tl.int64)
    place = places + tensor * WIDTH
    tile = (program - tl.load(place + 3)) * GROUP
    # Wide loads give several neighbours to one thread. Lanes that are loaded, too, draw the mask in that very thread.
    lane = tl.arange(0, GROUP * LANES)
    lane = tl.load(lanes + lane) if EVEN else lane
    left = tl.minimum(tl.load(place + 2) - tile * TILE_SIZE, GROUP * TILE_SIZE).to(tl.int32)
    return (
        tensor,
        place,
        tile,
        left,
        tile * LANES + lane,
        tl.arange(0, GROUP * LANES) // LANES * TILE_SIZE + tl.arange(0, GROUP * LANES) % LANES,
    )


@triton.jit
def point(address, tile, TYPE: constexpr, EVEN: constexpr):  # compiled
    """To the first element of a tile. EVEN: addresses are fit for wide loads, and programs have no element too many."""
    pointer = address.to(tl.pointer_type(TYPE)) + tile * TILE_SIZE
    return tl.multiple_of(pointer, 16) if EVEN else pointer


@triton.jit
def load_pieces(pointer, start, left, EVEN: constexpr):  # compiled
    """The eight pieces of what a program works on, as they are stored."""
    pieces = ()
    for h in tl.static_range(PIECES):
        at = start + h * LANES
        pieces = pieces + (
            tl.load(pointer + at) if EVEN else tl.load(pointer + at, mask=at < left, other=0.0),
        )
    return pieces


@triton.jit
def open_inputs(
    place, tile, block, start, left, BASE: constexpr, TYPES: constexpr, EVEN: constexpr
):  # compiled
    """The base's values; of each model its values, the mask's limit as the upper half of a word, its Philox blocks."""
    bases, values, models = (
        load_pieces(point(tl.load(place), tile, BASE, EVEN), start, left, EVEN),
        (),
        (),
    )
    for i in tl.static_range(len(TYPES)):
        pointer = point(tl.load(place + PLACES + 3 * i), tile, TYPES[i], EVEN)
        values = values + (load_pieces(pointer, start, left, EVEN),)
    for i in tl.static_range(len(TYPES)):
        mine = place + PLACES + 3 * i
        models = models + (
            (values[i], tl.load(mine + 2).to(tl.uint32), draw(tl.load(mine + 1), block)),
        )
    return bases, models


@triton.jit
def load_numbers(number, N: constexpr):  # compiled
    """Of each model: its scale, its weight and its floor."""
    numbers = ()
    for i in tl.static_range(N):
        own = number + NUMBERS + 3 * i
        numbers = numbers + ((tl.load(own), tl.load(own + 1), tl.load(own + 2)),)
    return numbers


@triton.jit
def find_delta(model, h: constexpr, base):  # compiled
    """For piece h: a model's values, their deltas, and whether the mask keeps them: its bits are at most the limit."""
    values, limit, words = model
    value, word = values[h].to(tl.float32), words[h // 2]
    return value, value - base, (word if h % 2 else word << 16) <= limit


@triton.jit
def turn(values, sign):  # compiled
    """The values, or their negatives where the sign's bit is set."""
    return (values.to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def divide_by_count(total, count, MOST: constexpr):  # compiled
    """A total divided by a whole number, or by 1 for 0: div_rn's bits, of which it needs more than half the time.

    The quotient is mended by its remainder, which is exact, in denormal numbers as well. Up to 5: of 6 and some others
    a remainder of one half would not be.
    """
    if MOST <= 2:
        return tl.where(count > 1, total * 0.5, total)
    count = tl.maximum(count, 1.0)
    inverse = 1.0 / count
    near = total * inverse
    return tl.fma(tl.fma(-near, count, total), inverse, near)


@triton.jit
def merge_kernel(  # compiled
    owners, places, lanes, numbers, flags, ELECTS: constexpr, COUNTS: constexpr, TRIMS: constexpr, EXACT: constexpr,
    BASE: constexpr, FINETUNED: constexpr, OUTPUT: constexpr, EVEN: constexpr, GROUP: constexpr,
):  # fmt: skip
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    number = numbers + tensor * (NUMBERS + 3 * N)
    lambda_coeff, base_share, first_share = (
        tl.load(number),
        tl.load(number + 1),
        tl.load(number + 2),
    )
    coefficients, output_at = load_numbers(number, N), point(tl.load(place + 1), tile, OUTPUT, EVEN)
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    zeros = tl.zeros(start.shape, tl.float32)
    zeros_or_nan, highest = zeros, zeros
    for h in tl.static_range(PIECES):
        base = bases[h].to(tl.float32)
        merged, value, rows = base_share * base, base, ()
        for i in tl.static_range(N):
            scale, _, floor = coefficients[i]
            value, delta, kept = find_delta(models[i], h, base)
            zeros_or_nan = tl.fma(delta, zeros, zeros_or_nan)  # 0 times what is not finite is NaN
            if TRIMS:
                kept &= tl.abs(delta) >= floor
            row = tl.where(kept, delta * scale, 0.0)
            merged += row
            rows = rows + (row,)
        if ELECTS:  # where the sum is negative, all is turned round
            sign = merged.to(tl.uint32, bitcast=True) & tl.full(merged.shape, 0x80000000, tl.uint32)
            total, share = zeros, zeros + first_share
            for i in tl.static_range(N):
                row = turn(rows[i], sign)
                total += tl.maximum(row, 0.0)
                share += tl.where(row > 0, 1.0 if COUNTS else coefficients[i][1], 0.0)
            merged = (
                divide_by_count(total, share, N)
                if COUNTS
                else tl.where(share > 0, tl.div_rn(total, share), 0.0)
            )
            merged = turn(merged, sign)
        if not EXACT:
            change = lambda_coeff * merged
            value = tl.where(change == 0, base, base + change)
        highest = tl.maximum(tl.abs(value), highest, propagate_nan=tl.PropagateNan.ALL)
        offset = start + h * LANES
        if EVEN:
            tl.store(output_at + offset, value.to(OUTPUT))
        else:
            tl.store(output_at + offset, value.to(OUTPUT), mask=offset < left)
    broken = tl.where((zeros_or_nan == 0) & (highest < tl.load(number + 3)), 0, 1)
    tl.atomic_or(flags + tensor + tl.zeros_like(broken), broken, mask=broken != 0)


@triton.jit
def fold_pieces(rows):  # compiled
    """The sum of eight pieces, by halves."""
    fours = (rows[0] + rows[4], rows[1] + rows[5], rows[2] + rows[6], rows[3] + rows[7])
    return (fours[0] + fours[2]) + (fours[1] + fours[3])


@triton.jit
def fold_tiles(first, second, product, GROUP: constexpr):  # compiled
    """Three sums of each tile, and one of them again, from their lanes by halves. A sum of two has no order."""
    values = tl.join(tl.join(first, second), tl.join(product, product))
    for k in tl.static_range(7):
        values = tl.sum(tl.reshape(values, (GROUP, 2, LANES >> (k + 1), 2, 2)), 1)
    return tl.permute(tl.reshape(values, (GROUP, 2, 2)), (0, 2, 1)).reshape((GROUP, 4))


@triton.jit
def products_kernel(  # compiled
    owners, places, lanes, numbers, sums, length, BASE: constexpr, FINETUNED: constexpr, EVEN: constexpr,
    GROUP: constexpr,
):  # fmt: skip
    """For slerp: for each tile |end 0|^2, |end 1|^2 and end 0 . end 1."""
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    coefficients = load_numbers(numbers + tensor * (NUMBERS + 3 * N), N)
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    firsts, seconds, products = (), (), ()
    for h in tl.static_range(PIECES):
        base = bases[h].to(tl.float32)
        first, second = base, base
        for i in tl.static_range(N):
            _, delta, kept = find_delta(models[i], h, base)
            end = base + tl.where(kept, delta * coefficients[i][0], 0.0)
            if i == 0:
                first = end
            else:
                second = end
        one, other = first.to(tl.float64), second.to(tl.float64)
        firsts, seconds, products = (
            firsts + (one * one,),
            seconds + (other * other,),
            products + (one * other,),
        )
    tiles, which = tile + tl.arange(0, GROUP)[:, None], tl.arange(0, 4)[None, :]
    inside = (tiles * TILE_SIZE < tl.load(place + 2)) & (which < 3)
    found = fold_tiles(fold_pieces(firsts), fold_pieces(seconds), fold_pieces(products), GROUP)
    tl.store(sums + tl.load(place + 4) + tiles + which * length, found, mask=inside)


@triton.jit
def count_kernel(  # compiled
    owners, places, lanes, prefixes, counts, SHIFT: constexpr, WIDTH: constexpr, BASE: constexpr,
    FINETUNED: constexpr, EVEN: constexpr, GROUP: constexpr,
):  # fmt: skip
    """For trim: count, by some bits of the pattern, the surviving |delta| whose higher bits are those found so far."""
    N: constexpr = len(FINETUNED)
    tensor, place, tile, left, block, start = locate(
        owners, places, lanes, PLACES + 3 * N, EVEN, GROUP
    )
    bases, models = open_inputs(place, tile, block, start, left, BASE, FINETUNED, EVEN)
    for h in tl.static_range(PIECES):
        for i in tl.static_range(N):
            _, delta, kept = find_delta(models[i], h, bases[h].to(tl.float32))
            pattern = tl.abs(delta).to(tl.uint32, bitcast=True) >> SHIFT
            kept &= (pattern >> WIDTH) == tl.load(prefixes + tensor * N + i).to(tl.uint32)
            if not EVEN:
                kept &= start + h * LANES < left
            row = counts + ((tensor * N + i) * COPIES + tl.program_id(0) % COPIES) * BINS
            digit = (pattern & ((1 << WIDTH) - 1)).to(tl.int32)
            tl.atomic_add(row + digit, tl.full(digit.shape, 1, tl.int32), mask=kept, sem="relaxed")


@triton.jit(do_not_specialize=["low", "high", "first"])
def bits_kernel(bits, low, high, first):  # compiled
    """The mask's bits of whole tiles, for what has no kernel of its own."""
    tile, lane = tl.program_id(0), tl.arange(0, LANES)
    key = low.to(tl.uint32).to(tl.uint64) | (high.to(tl.uint32).to(tl.uint64) << 32)
    words = draw(key, (first + tile).to(tl.int64) * LANES + lane)
    for h in tl.static_range(PIECES):
        piece = words[h // 2] >> 16 if h % 2 else words[h // 2] & 0xFFFF
        tl.store(bits + tile * TILE_SIZE + h * LANES + lane, piece.to(tl.int32))


def draw_bits(key: tuple[int, int], first_tile: int, tiles: int, device: torch.device) -> Tensor:
    """Those of darelib.kernels.plain, in one launch instead of a hundred."""
    bits = torch.empty(tiles * TILE, dtype=torch.int32, device=device)
    low, high = (
        word - (word >> 31 << 32) for word in key
    )  # with a sign, so that all are of 32 bits
    with torch.cuda.device(device):
        bits_kernel[(tiles,)](bits, low, high, first_tile)
    return bits


# --- batches ----------------------------------------------------------------------------------------------------------


@lru_cache
def can_merge_on(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def can_merge(settings: TensorSettings) -> bool:
    """Whether there are kernels for these settings: for random drops, and the usual ways to combine."""
    schemes = [thinning.scheme for thinning in settings.thinnings]
    looks = choose_looks(settings, range(len(schemes)))
    fitting = METHODS[settings.method].kernel in ("sum", "elect") and {*looks} <= {
        TrimLook,
        ArcLook,
    }
    return fitting and not any(scheme.ends or scheme.thresholds for scheme in schemes)


@lru_cache
def number_lanes(device: torch.device, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def find_way(settings: TensorSettings) -> tuple[str | None, bool, bool] | None:
    """What to find out first, whether the model is the result, whether shares are only counted; None: no kernel can."""
    method, exact = METHODS[settings.method], settings.returns_model
    look = None if exact else method.look(settings)
    kernel = look.kernel if look else None
    counts = method.kernel == "elect" and settings.normalize and set(settings.weights) == {1}
    return (kernel, exact, counts and len(settings.weights) <= 5) if can_merge(settings) else None


def find_kind(
    columns: int, even: bool, dense: bool, way: Any, *traits: Any
) -> tuple[Any, ...] | None:
    """What those share that one launch merges; None: no kernel can. traits: of all columns, or of any of them."""
    shapes, types, devices = traits[0::3], traits[1::3], traits[2::3]
    fits = way and dense and len({*shapes}) == len({*devices}) == 1 and {*types} <= TYPES.keys()
    fits = fits and 0 < math.prod(shapes[0]) < MOST_ELEMENTS and can_merge_on(devices[0])
    return (devices[0], even, way, *(types * columns)[:columns]) if fits else None


class Column(Protocol):
    """The tensors of the base, of one model or of the output, and their traits, in one order."""

    values: Sequence[Tensor]
    shapes: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    addresses: tuple[int, ...]


class Columns:
    """What must be known of all tensors, by base, models and output: read in bulk, since there may be thousands.

    names: what their masks are drawn by.
    """

    def __init__(
        self, names: Sequence[str], columns: Sequence[Column], settings: Sequence[TensorSettings]
    ) -> None:
        self.names, self.settings, self.method = names, settings, METHODS[settings[0].method]
        self.models = range(len(columns) - 2)
        self.group = (
            4 if settings[0].method == SLERP else 2
        )  # tiles of a program, whose sums slerp folds
        self.table = np.array([column.addresses for column in columns], np.uint64)
        self.counts = np.array(list(map(Tensor.numel, columns[0].values)))
        even = (self.counts % (self.group * TILE) == 0) & (self.table % 16 == 0).all(0)
        contiguous = [map(Tensor.is_contiguous, column.values) for column in columns]
        dense = map(all, zip(*contiguous, strict=True))
        ids = list(map(id, settings))  # they are few, and to compare them takes long
        known = dict(zip(ids, settings, strict=True))
        order = dict(zip(known, range(len(known)), strict=True))
        self.distinct, self.picks = (
            list(known.values()),
            np.array(list(map(order.__getitem__, ids))),
        )
        ways = {own: find_way(each) for own, each in known.items()}
        traits = [(column.shapes, column.dtypes, column.devices) for column in columns]
        alike = traits.count(traits[0]) == len(traits)
        each = chain.from_iterable(traits[:1] if alike else traits)
        find = cache(partial(find_kind, len(columns)))
        self.kinds = list(map(find, even.tolist(), dense, map(ways.__getitem__, ids), *each))


@lru_cache(64)
def name_owners(device: torch.device, programs: tuple[int, ...]) -> Tensor:
    """For each program, the tensor that it works on. Searches merge the same tensors again and again."""
    return torch.from_numpy(np.repeat(np.arange(len(programs), dtype=np.int32), programs)).to(
        device
    )


class Batch:
    """Tensors that one launch merges: all of one kind."""

    places: Tensor
    numbers: Tensor
    flags: Tensor

    def __init__(self, columns: Columns, rows: list[int], kind: tuple[Any, ...]) -> None:
        self.columns, self.rows, self.models, self.method = (
            columns,
            rows,
            columns.models,
            columns.method,
        )
        self.device, even, (self.look, exact, equal), base, *types, output = kind
        self.options = {
            "BASE": TYPES[base],
            "FINETUNED": tuple(TYPES[kind] for kind in types),
            "EVEN": even,
        }
        self.options |= {"GROUP": columns.group, "num_warps": WARPS, "enable_fp_fusion": False}
        self.ways = {
            "ELECTS": self.method.kernel == "elect",
            "COUNTS": equal,
            "TRIMS": self.look == "count",
        }
        self.ways |= {"EXACT": exact, "OUTPUT": TYPES[output]}
        self.lanes = number_lanes(self.device, columns.group * LANES.value)
        self.limit = FORMATS[SHORT_NAMES[output]].limit
        counts = columns.counts[rows]
        self.tiles, programs = -(-counts // TILE), -(-counts // (columns.group * TILE))
        self.programs, self.owners = (
            int(programs.sum()),
            name_owners(self.device, tuple(programs.tolist())),
        )
        self.first_programs = programs.cumsum() - programs
        self.first_sums: Any = self._place_sums() if self.look == "products" else 0
        self.floors: Tensor | None = None
        self.products: Tensor | None = None

    def _place_sums(self) -> Any:
        """Where each tensor's sums of tiles begin: at a multiple of what they take, a power of two.

        So all tensors' can be folded at once, by pairs of neighbours.
        """
        self.depths = [(tiles - 1).bit_length() for tiles in self.tiles.tolist()]
        first_sums, self.sums = np.zeros(len(self.rows), np.int64), 0
        for k in sorted(range(len(self.rows)), key=lambda k: -self.depths[k]):
            first_sums[k] = self.sums
            self.sums += 1 << self.depths[k]
        self.sums += -self.sums % (1 << max(self.depths))
        return first_sums

    def _upload(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _launch(self, kernel: Any, *tables: Any, **options: Any) -> None:
        with torch.cuda.device(self.device):
            kernel[(self.programs,)](
                self.owners, self.places, self.lanes, *tables, **options, **self.options
            )

    def find_out(self) -> None:
        """Queue what must be found out before the merge; nothing is waited for."""
        if self.look == "count":
            self.floors = self._find_floors()
        elif self.look == "products":
            self.products = self._find_products()

    def _find_products(self) -> Tensor:
        sums = torch.zeros((3, self.sums), dtype=torch.float64, device=self.device)
        self._launch(products_kernel, self.numbers, sums, self.sums)
        levels = [sums]
        for _ in range(max(self.depths)):
            levels.append(levels[-1][:, 0::2] + levels[-1][:, 1::2])
        starts = np.cumsum([0, *(level.shape[1] for level in levels)])
        wanted = starts[self.depths] + (self.first_sums >> self.depths)
        return torch.cat(levels, dim=1)[:, self._upload(wanted)].T

    def _find_floors(self) -> Tensor:
        """The smallest |delta| that trim keeps, for each tensor and model: some bits of its pattern in each pass."""
        ratios = self._upload(
            np.repeat([self.columns.settings[k].keep_ratio for k in self.rows], len(self.models))
        )
        prefixes = ranks = torch.zeros(len(ratios), dtype=torch.int64, device=self.device)
        counts = torch.empty(
            (len(ratios), REPLICAS, BINS.value), dtype=torch.int32, device=self.device
        )
        for shift, width in DIGITS:
            counts.zero_()
            self._launch(count_kernel, prefixes, counts, SHIFT=shift, WIDTH=width)
            downwards = counts.sum(1, dtype=torch.int32).flip(1).cumsum(1)
            if shift == DIGITS[0][0]:
                ranks = (ratios * downwards[:, -1]).long().clamp(min=1)
            place = torch.searchsorted(downwards, ranks[:, None]).clamp(max=BINS.value - 1)
            ranks = (
                ranks
                - torch.where(place > 0, downwards.gather(1, (place - 1).clamp(min=0)), 0)[:, 0]
            )
            prefixes = (prefixes << width) | (BINS.value - 1 - place[:, 0])
        return prefixes.int().view(torch.float32).reshape(-1, len(self.models))

    def merge(self, found: Sequence[Any] | None = None) -> None:
        """Queue the merge. found: what slerp has found, for each tensor."""
        if found:
            rows = []
            for own, each in zip(
                map(self.columns.settings.__getitem__, self.rows), found, strict=True
            ):
                weighed = self.method.weigh(own, self.models, Found(products=each))
                rows.append(list_numbers(own, weighed, self.limit))
            self.numbers = self._upload(round_numbers(rows))
        if self.floors is not None:
            self.numbers[: len(self.rows), NUMBERS.value + 2 :: 3] = self.floors
        self._launch(merge_kernel, self.numbers, self.flags, **self.ways)


def make_batches(columns: Columns) -> Iterator[Batch]:
    """Tensors of one kind: so many that the next batch is made while they are merged, and their sums take little."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for k, each in enumerate(columns.kinds):
        if each:
            groups.setdefault(each, []).append(k)
    for kind, rows in groups.items():
        look, *_ = kind[2]
        least = BATCH_ELEMENTS * len(columns.models) // COUNTED_ROWS if look == "count" else 0
        numbers = (columns.counts[rows].clip(least).cumsum() - 1) // BATCH_ELEMENTS
        numbers = (
            numbers if look else numbers.clip(max=1)
        )  # what comes after the first waits for nothing
        for start, stop in pairwise(
            [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
        ):
            yield Batch(columns, rows[start:stop], kind)


def upload_tables(
    columns: Columns, batches: Sequence[Batch], seed: int
) -> tuple[Any, list[Tensor]]:
    """Give batches their tables, all in one upload to a device. Gives the tensor of each flag, and devices' flags."""
    # Each batch's begin at a multiple of 16 bytes: else Triton would compile kernels once more.
    sizes = [-(-len(batch.rows) // 4) * 4 for batch in batches]
    padded = (
        batch.rows + [0] * (size - len(batch.rows))
        for batch, size in zip(batches, sizes, strict=True)
    )
    order = np.array(list(chain.from_iterable(padded)))
    names = list(map(columns.names.__getitem__, order.tolist()))
    addresses, picks = columns.table[:, order], columns.picks[order]
    places = np.zeros((len(order), PLACES.value + 3 * len(columns.models)), np.uint64)
    places[:, 0], places[:, 1], places[:, 2] = addresses[0], addresses[-1], columns.counts[order]
    for i in columns.models:
        limits = [(each.thinnings[i].threshold << 16) - 1 for each in columns.distinct]
        places[:, 5 + 3 * i] = addresses[1 + i]
        places[:, 6 + 3 * i] = [
            low | high << 32 for low, high in map(mask_key, repeat(seed + i), names)
        ]
        places[:, 7 + 3 * i] = np.array(limits, np.uint64)[picks]
    weigh = weigh_for_look if batches[0].look == "products" else columns.method.weigh
    rows = [
        list_numbers(each, weigh(each, columns.models, Found()), 0) for each in columns.distinct
    ]
    numbers = np.array(rows)[picks]
    start, flags = 0, np.zeros((len(order), 1), np.int32)
    for batch, size in zip(batches, sizes, strict=True):
        own = slice(start, start + len(batch.rows))
        places[own, 3], places[own, 4], numbers[own, 3] = (
            batch.first_programs,
            batch.first_sums,
            batch.limit,
        )
        start += size
    numbers = round_numbers(numbers)
    host = torch.from_numpy(
        np.concatenate([part.view(np.int32).reshape(-1) for part in (places, numbers, flags)])
    )
    all_flags = []
    for device in {batch.device for batch in batches}:
        first, second, third = host.to(device, non_blocking=True).split(
            [2 * places.size, numbers.size, flags.size]
        )
        tables = (
            first.view(torch.int64).view(places.shape),
            second.view(torch.float32).view(numbers.shape),
            third,
        )
        for batch, *each in zip(batches, *(table.split(sizes) for table in tables), strict=True):
            if batch.device == device:
                batch.places, batch.numbers, batch.flags = each
        all_flags.append(third)
    return order, all_flags


def list_numbers(settings: TensorSettings, each: Coefficients, limit: float) -> list[float]:
    models = zip(each.scales, each.weights, each.floors, strict=True)
    return [
        settings.lambda_coeff,
        each.base_share,
        each.first_share,
        limit,
        *chain.from_iterable(models),
    ]


def round_numbers(rows: Any) -> Any:
    with np.errstate(over="ignore"):  # no float32 is infinite before it is
        return np.asarray(rows).astype(np.float32)


def merge_columns(columns: Columns, seed: int) -> int | None:
    """Merge, and give the number of a tensor that turned out to hold or give a value that is not finite, if any does.

    The GPU is waited for once, at the end; where slerp must look first, once more.
    """
    batches, flags, looking = make_batches(columns), list[tuple[Any, list[Tensor]]](), []
    while part := list(
        islice(batches, None if flags else 1)
    ):  # the first is under way while others are made
        flags.append(upload_tables(columns, part, seed))
        for batch in part:
            batch.find_out()
            if batch.products is None:
                batch.merge()
            else:
                looking.append((batch, batch.products))
    for (batch, _), found in zip(
        looking, [products.tolist() for _, products in looking], strict=True
    ):
        batch.merge(found)
    broken = [
        row for order, found in flags for each in found for row in order[each.cpu().numpy() != 0]
    ]
    return int(min(broken)) if broken else None
