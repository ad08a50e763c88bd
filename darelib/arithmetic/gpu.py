"""Merges of tensors on CUDA GPUs: which of them share a launch, and the tables that it reads.

There may be thousands of tensors, so whatever is done for each is done in bulk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import chain, islice, pairwise, repeat
from typing import Any, Final, Protocol

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from darelib.arithmetic.gpu_kernels import (
    BINS,
    COPIES,
    LANES,
    NUMBERS,
    PLACES,
    bits_kernel,
    count_kernel,
    merge_kernel,
    products_kernel,
)
from darelib.core.formats import DTYPES, FORMATS
from darelib.core.mask import TILE, mask_key
from darelib.methods import METHODS, choose_looks, returns_model
from darelib.methods.looks import (
    ArcLook,
    Coefficients,
    Found,
    TensorSettings,
    TrimLook,
    weigh_for_look,
)

Array = NDArray[Any]
Tensor = torch.Tensor

SHORT_NAMES: Final = {getattr(torch, name): short for name, short in DTYPES.items()}
TYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
MOST_MODELS: Final = 16  # a kernel is unrolled over them
MOST_ELEMENTS: Final = 1 << 31  # of a tensor: what 32 bits can count
# Of the tensors in one launch, while which the next one is prepared.
BATCH_ELEMENTS: Final = 1 << 28
WARPS: Final = 4  # of a program
# Trim looks for its floor some bits at a time: from which bit on it counts in each pass, and how
# many.
DIGITS: Final = ((20, 11), (10, 10), (0, 10))
MERGED: Final = ("sum", "elect", "average")  # ways to combine that there is a kernel for
COUNTED_ROWS: Final = 64  # models of tensors in one launch that counts: 32 MB


def draw_bits(key: tuple[int, int], first_tile: int, tiles: int, device: torch.device) -> Tensor:
    """Those of darelib.arithmetic.definition, in one launch instead of a hundred."""
    bits = torch.empty(tiles * TILE, dtype=torch.int32, device=device)
    # With a sign, so that all are of 32 bits.
    low, high = (word - (word >> 31 << 32) for word in key)
    with torch.cuda.device(device):
        bits_kernel[(tiles,)](bits, low, high, first_tile)
    return bits


@lru_cache
def can_merge_on(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def find_way(settings: TensorSettings) -> tuple[str | None, bool, bool] | None:
    """What to find out first, whether the model is the result, whether shares are only counted.

    None: there is no kernel for these settings, which are not random drops combined as usual.
    """
    method = METHODS[settings.method]
    schemes = [thinning.scheme for thinning in settings.thinnings]
    looks = choose_looks(settings, range(len(schemes)))
    fits = {*looks} <= {TrimLook, ArcLook} and method.operation.name in MERGED
    if not fits or any(scheme.ends or scheme.thresholds for scheme in schemes):
        return None
    exact = returns_model(settings)
    look = None if exact or not looks else looks[0]
    counts = method.operation.name != "sum" and settings.normalize and set(settings.weights) == {1}
    return look.kernel if look else None, exact, counts and len(settings.weights) <= 5


def find_kind(
    columns: int, even: bool, dense: bool, way: Any, *traits: Any
) -> tuple[Any, ...] | None:
    """What those share that one launch merges; None: no kernel can.

    traits: of all columns, or of any of them.
    """
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
    dense: tuple[bool, ...]


class Columns:
    """What must be known of all tensors, by base, models and output.

    names: what their masks are drawn by.
    """

    def __init__(
        self, names: Sequence[str], columns: Sequence[Column], settings: Sequence[TensorSettings]
    ) -> None:
        self.names = names
        self.settings = settings
        self.method = METHODS[settings[0].method]
        self.models = range(len(columns) - 2)
        # Tiles of a program, whose sums slerp folds.
        self.group = 4 if ArcLook in self.method.looks(settings[0]) else 2
        self.table = np.array([column.addresses for column in columns], np.uint64)
        self.counts = np.array(list(map(Tensor.numel, columns[0].values)))
        even = (self.counts % (self.group * TILE) == 0) & (self.table % 16 == 0).all(0)
        dense = map(all, zip(*(column.dense for column in columns), strict=True))
        ids = list(map(id, settings))  # they are few, and to compare them takes long
        known = dict(zip(ids, settings, strict=True))
        order = dict(zip(known, range(len(known)), strict=True))
        self.distinct = list(known.values())
        self.picks = np.array(list(map(order.__getitem__, ids)))
        ways = {own: find_way(each) for own, each in known.items()}
        traits = [(column.shapes, column.dtypes, column.devices) for column in columns]
        alike = traits.count(traits[0]) == len(traits)
        each = chain.from_iterable(traits[:1] if alike else traits)
        find = cache(partial(find_kind, len(columns)))
        self.kinds = list(map(find, even.tolist(), dense, map(ways.__getitem__, ids), *each))


@lru_cache
def number_lanes(device: torch.device, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


@lru_cache(64)  # searches merge the same tensors again and again
def name_owners(device: torch.device, programs: tuple[int, ...]) -> Tensor:
    """For each program, the tensor that it works on."""
    owners = np.repeat(np.arange(len(programs), dtype=np.int32), programs)
    return torch.from_numpy(owners).to(device)


class Batch:
    """Tensors that one launch merges: all of one kind."""

    places: Tensor
    numbers: Tensor
    flags: Tensor

    def __init__(self, columns: Columns, rows: list[int], kind: tuple[Any, ...]) -> None:
        self.columns = columns
        self.rows = rows
        self.device, even, (self.look, exact, counts), base, *types, output = kind
        self.options = {
            "BASE": TYPES[base],
            "FINETUNED": tuple(map(TYPES.__getitem__, types)),
            "EVEN": even,
            "GROUP": columns.group,
            "num_warps": WARPS,
            "enable_fp_fusion": False,
        }
        self.ways = {
            "ELECTS": columns.method.operation.name == "elect",
            "AVERAGES": columns.method.operation.name == "average",
            "COUNTS": counts,
            "TRIMS": self.look == "count" or columns.method.operation.name == "average",
            "EXACT": exact,
            "OUTPUT": TYPES[output],
        }
        self.lanes = number_lanes(self.device, columns.group * LANES.value)
        self.limit = FORMATS[SHORT_NAMES[output]].limit
        elements = columns.counts[rows]
        programs = -(-elements // (columns.group * TILE))
        self.programs = int(programs.sum())
        self.owners = name_owners(self.device, tuple(programs.tolist()))
        self.first_programs = programs.cumsum() - programs
        self.first_sums: Any = 0
        if self.look == "products":
            self._place_sums(-(-elements // TILE))

    def _place_sums(self, tiles: Array) -> None:
        """Let each tensor's sums of tiles begin at a multiple of what they take, a power of two.

        So all tensors' can be folded at once, by pairs of neighbours.
        """
        self.depths = np.array([(count - 1).bit_length() for count in tiles.tolist()])
        order = np.argsort(-self.depths, kind="stable")
        sizes = 1 << self.depths[order]
        self.first_sums = np.zeros(len(sizes), np.int64)
        self.first_sums[order] = sizes.cumsum() - sizes
        self.sums = -(-int(sizes.sum()) // int(sizes[0])) * int(sizes[0])

    def _upload(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    def _launch(self, kernel: Any, *tables: Any, **options: Any) -> None:
        with torch.cuda.device(self.device):
            kernel[(self.programs,)](
                self.owners, self.places, self.lanes, *tables, **options, **self.options
            )

    def find_products(self) -> Tensor:
        """Queue what slerp must find out before the merge: a row for each tensor."""
        sums = torch.zeros((3, self.sums), dtype=torch.float64, device=self.device)
        self._launch(products_kernel, self.numbers, sums, self.sums)
        levels = [sums]
        for _ in range(max(self.depths)):
            levels.append(levels[-1][:, 0::2] + levels[-1][:, 1::2])
        starts = np.cumsum([0, *(level.shape[1] for level in levels)])
        wanted = starts[self.depths] + (self.first_sums >> self.depths)
        return torch.cat(levels, dim=1)[:, self._upload(wanted)].T

    def _find_floors(self) -> Tensor:
        """The smallest |delta| that trim keeps, for each tensor and model."""
        kept = [self.columns.settings[row].options["keep_ratio"] for row in self.rows]
        ratios = self._upload(np.repeat(kept, len(self.columns.models)))
        prefixes = ranks = torch.zeros(len(ratios), dtype=torch.int64, device=self.device)
        shape = (len(ratios), COPIES.value, BINS.value)
        counts = torch.empty(shape, dtype=torch.int32, device=self.device)
        for shift, width in DIGITS:
            counts.zero_()
            self._launch(count_kernel, prefixes, counts, SHIFT=shift, WIDTH=width)
            downwards = counts.sum(1, dtype=torch.int32).flip(1).cumsum(1)
            if shift == DIGITS[0][0]:
                ranks = (ratios * downwards[:, -1]).long().clamp(min=1)
            place = torch.searchsorted(downwards, ranks[:, None]).clamp(max=BINS.value - 1)
            before = downwards.gather(1, (place - 1).clamp(min=0))
            ranks = ranks - torch.where(place > 0, before, 0)[:, 0]
            prefixes = (prefixes << width) | (BINS.value - 1 - place[:, 0])
        return prefixes.int().view(torch.float32).reshape(len(self.rows), -1)

    def merge(self, products: Sequence[Any] = ()) -> None:
        """Queue the merge. products: what slerp has found, for each tensor."""
        if products:
            weigh = self.columns.method.weigh
            rows = []
            for row, found in zip(self.rows, products, strict=True):
                own = self.columns.settings[row]
                weighed = weigh(own, self.columns.models, Found(products=found))
                rows.append(list_numbers(own, weighed, self.limit))
            self.numbers = self._upload(round_numbers(rows))
        if self.look == "count":
            self.numbers[: len(self.rows), NUMBERS.value + 2 :: 3] = self._find_floors()
        self._launch(merge_kernel, self.numbers, self.flags, **self.ways)


def make_batches(columns: Columns) -> Iterator[Batch]:
    """Tensors of one kind: so many that the next batch is made while they are merged."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, kind in enumerate(columns.kinds):
        if kind:
            groups.setdefault(kind, []).append(row)
    for kind, rows in groups.items():
        look, *_ = kind[2]
        # What is counted takes memory for each tensor, however small.
        least = BATCH_ELEMENTS * len(columns.models) // COUNTED_ROWS if look == "count" else 0
        numbers = (columns.counts[rows].clip(least).cumsum() - 1) // BATCH_ELEMENTS
        if not look:
            numbers = numbers.clip(max=1)  # what comes after the first waits for nothing
        starts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for start, stop in pairwise([0, *starts, len(rows)]):
            yield Batch(columns, rows[start:stop], kind)


def upload_tables(
    columns: Columns, batches: Sequence[Batch], seed: int
) -> tuple[Array, list[Tensor]]:
    """Give batches their tables, all in one upload to a device.

    Gives the tensor of each flag, and the flags of each device.
    """
    # Each batch's begin at a multiple of 16 bytes: else Triton would compile kernels once more.
    sizes = [-(-len(batch.rows) // 4) * 4 for batch in batches]
    padded = (
        batch.rows + [0] * (size - len(batch.rows))
        for batch, size in zip(batches, sizes, strict=True)
    )
    order = np.array(list(chain.from_iterable(padded)))
    places = fill_places(columns, order, seed)
    weigh = weigh_for_look if batches[0].look == "products" else columns.method.weigh
    rows = [
        list_numbers(each, weigh(each, columns.models, Found()), 0) for each in columns.distinct
    ]
    numbers = np.array(rows)[columns.picks[order]]
    start = 0
    for batch, size in zip(batches, sizes, strict=True):
        own = slice(start, start + len(batch.rows))
        places[own, 3] = batch.first_programs
        places[own, 4] = batch.first_sums
        numbers[own, 3] = batch.limit
        start += size
    parts = (places, round_numbers(numbers), np.zeros((len(order), 1), np.int32))
    words = np.concatenate([part.view(np.int32).reshape(-1) for part in parts])
    host: Any = torch.from_numpy(words)
    all_flags = []
    for device in {batch.device for batch in batches}:
        first, second, flags = host.to(device, non_blocking=True).split(
            [part.nbytes // 4 for part in parts]
        )
        tables = (
            first.view(torch.int64).view(places.shape).split(sizes),
            second.view(torch.float32).view(numbers.shape).split(sizes),
            flags.split(sizes),
        )
        for batch, *own_tables in zip(batches, *tables, strict=True):
            if batch.device == device:
                batch.places, batch.numbers, batch.flags = own_tables
        all_flags.append(flags)
    return order, all_flags


def fill_places(columns: Columns, order: Array, seed: int) -> Array:
    """Addresses, sizes, keys and limits of tensors, a row each; see PLACES."""
    names = list(map(columns.names.__getitem__, order.tolist()))
    addresses = columns.table[:, order]
    places = np.zeros((len(order), PLACES.value + 3 * len(columns.models)), np.uint64)
    places[:, 0] = addresses[0]
    places[:, 1] = addresses[-1]
    places[:, 2] = columns.counts[order]
    for i in columns.models:
        keys = map(mask_key, repeat(seed + i), names)
        limits = [(each.thinnings[i].threshold << 16) - 1 for each in columns.distinct]
        places[:, 5 + 3 * i] = addresses[1 + i]
        places[:, 6 + 3 * i] = [low | high << 32 for low, high in keys]
        places[:, 7 + 3 * i] = np.array(limits, np.uint64)[columns.picks[order]]
    return places


def list_numbers(settings: TensorSettings, each: Coefficients, limit: float) -> list[float]:
    models = zip(each.scales, each.weights, each.floors, strict=True)
    shares = (each.base_share, each.first_share)
    return [settings.lambda_coeff, *shares, limit, *chain.from_iterable(models)]


def round_numbers(rows: Any) -> Array:
    with np.errstate(over="ignore"):  # no float32 is infinite before it is
        return np.asarray(rows).astype(np.float32)


def merge_columns(columns: Columns, seed: int) -> list[int]:
    """Merge, and give the numbers of tensors that hold or give what is not finite.

    The GPU is waited for once, at the end; where slerp must look first, once more.
    """
    batches = make_batches(columns)
    flags: list[tuple[Array, list[Tensor]]] = []
    looking: list[tuple[Batch, Tensor]] = []
    # The first is under way while others are made.
    while part := list(islice(batches, None if flags else 1)):
        flags.append(upload_tables(columns, part, seed))
        for batch in part:
            if batch.look == "products":
                looking.append((batch, batch.find_products()))
            else:
                batch.merge()
    found = [products.tolist() for _, products in looking]
    for (batch, _), products in zip(looking, found, strict=True):
        batch.merge(products)
    return sorted(
        int(row)
        for order, all_flags in flags
        for each in all_flags
        for row in order[each.cpu().numpy() != 0]
    )
