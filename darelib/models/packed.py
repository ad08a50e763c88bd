"""Packed models: of a fine-tune, only the entries that a mask keeps; the mask is drawn again."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from darelib.config import is_count
from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_NAME, TILE, keep_threshold, mask_key
from darelib.core.text import DareError
from darelib.kernels import Kernel, KernelSpec
from darelib.kernels.plain import decode, draw_mask
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Layout
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, peek_header
from darelib.models.tensors import Input, TensorInfo

PACKED_KEY: Final = "dare_packed"  # in the metadata of a file
PACKED_FILE: Final = "packed.safetensors"  # in a model directory
VERSION: Final = 1
COUNTED_BLOCK: Final = 1 << 20  # elements between two counts of the entries that are kept before
DIGESTS_KEY: Final = "base_xxh3"
DIGESTED_BYTES: Final = 1 << 18  # at a time, so that they stay in the caches
BASE_HINT: Final = "give the base that it was packed against"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(TensorInfo):
    """A tensor that is the base's, but for the entries that a mask keeps, which are stored."""

    stored: TensorInfo  # the entries, one after the other
    base: TensorInfo
    drop_rate: float
    mask_name: str  # what the mask is drawn by
    counts: tuple[int, ...]  # the entries before each block, and all of them
    digests: tuple[int, ...]  # of the base's blocks; none in files of earlier versions

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes

    @property
    def share(self) -> float:
        return self.counts[-1] / self.count if self.count else 1.0

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec("unpack", self.dtype, self.dtype, self.dtype)


def find_packed(source: Source) -> Layout | None:
    """The file of a packed model; None: it is another kind, whose reader explains what is wrong."""
    folder = source.path if source.path.is_dir() else None
    if folder and any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return None
    path = folder / PACKED_FILE if folder else source.path
    _, metadata = peek_header(path)
    if PACKED_KEY not in metadata:
        return None
    if path.name == PACKED_FILE and (path.parent / CONFIG_FILE).exists():
        folder = path.parent
    return Layout((path,), folder)


class Scratch(threading.local):
    """What a thread keeps from one read to the next: the entries of a block, read at once."""

    block: tuple[PackedTensor, int] | None = None  # which one
    entries: NDArray[Any]
    end = 0  # the element that its last read ended at
    used = 0  # the entries before that
    room = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """Room for some bytes; new room each time would be asked of the system each time."""
        if len(self.room) < size:
            self.room = np.empty(size, np.uint8)
        return self.room[:size]


class LastDigest(threading.local):
    """The last part of a base that a thread has digested: several models may be packed against it,
    and want the same.
    """

    info: TensorInfo | None = None
    place = (0, 0)  # the first element of the part, and the one after its last
    digest = xxhash.xxh3_64()  # of the block up to there

    def follow(
        self,
        model: Input,
        info: TensorInfo,
        begin: int,
        place: tuple[int, int],
        part: NDArray[np.uint8],
    ) -> int:
        """The digest of a block of the base from its beginning. part: its values at a place."""
        if self.place != place or self.info is not info:
            start, _ = place
            if start == begin:
                self.digest = xxhash.xxh3_64()
            elif self.place[1] != start or self.info is not info:  # somebody else read the start
                self.digest = digest_values(model, info, begin, start)
            self.info = info
            self.place = place
            self.digest.update(part.data)
        return self.digest.intdigest()


LAST: Final = LastDigest()


def check_base(name: str, stated: Mapping[str, Any], base: Checkpoint) -> None:
    """Refuse another base than the one that a model was packed against."""
    for key, value in base.fingerprint.items():
        if stated.get(key) != value:
            raise DareError(
                f"{name!r} was packed against {stated.get('file')!r}, and {base.name!r} is another "
                f"base: its {key} is {value}, not {stated.get(key)}",
                BASE_HINT,
            )


class PackedModel(Checkpoint):
    """A packed model, open for reading: it has the base's values wherever it holds no entry."""

    keeps_metadata = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"the base {source.name!r} is a packed model",
                "give the model that it was packed against",
            )
        super().__init__(source, layout)
        self._base = base
        self._kernels: Mapping[KernelSpec, Kernel] = {}
        self._scratch = Scratch()
        try:
            packed = self._read_table(self.files[0].metadata.pop(PACKED_KEY, ""))
        except BaseException:
            self.close()
            raise
        self.tensors |= packed
        self.specs = frozenset(tensor.spec for tensor in packed.values())
        self.note = "packed"
        if packed:
            rates = [tensor.drop_rate for tensor in packed.values()]
            span = " to ".join(f"{rate:g}" for rate in sorted({min(rates), max(rates)}))
            self.note = f"packed at drop rate {span}, seed {self.seed}"

    def _read_table(self, text: str) -> dict[str, PackedTensor]:
        try:
            table = json.loads(text)
            version = table["version"]
            mask = table["mask"]
            if (version, mask) != (VERSION, MASK_NAME):
                raise DareError(
                    f"{self.name!r} is packed in format {version!r} with mask {mask!r}, "
                    "not known to this version",
                    "use the version of dare that packed it",
                )
            self.seed = table["seed"]
            self._check(self.seed, is_count(self.seed, 0), "seed")
            check_base(
                self.name, dict(table["base"]), self._base
            )  # before entries, which are of that one
            packed = {name: self._read_entry(name, e) for name, e in table["tensors"].items()}
            self._tied = table.get("tie_word_embeddings")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DareError(
                f"{self.name!r} is not a sound packed model: "
                "something in its table is missing, or of another type than it should be",
                AGAIN_HINT,
            ) from None
        return packed

    @cached_property
    def config(self) -> dict[str, Any]:
        """That of its directory; what decides about its head was stored with it."""
        tied = {"tie_word_embeddings": self._tied} if isinstance(self._tied, bool) else {}
        return super().config | tied

    def _check(self, value: Any, sound: bool, what: str) -> None:
        if not sound:
            raise DareError(
                f"{self.name!r} is not a sound packed model: its {what} is {value!r}", AGAIN_HINT
            )

    def _read_entry(self, name: str, entry: Mapping[str, Any]) -> PackedTensor:
        """One tensor. All that reading relies on is checked: such files may come from anywhere."""
        stored = self.tensors.get(name)
        if stored is None:
            raise DareError(f"{self.name!r} lacks its tensor {name!r}", AGAIN_HINT)
        base = self._base.tensors.get(name)
        shape = tuple(entry["shape"])
        if base is None or shape != base.shape:
            raise DareError(
                f"{self.name!r} is not a sound packed model: its shape of {name!r} is {shape!r}",
                AGAIN_HINT,
            )
        rate = entry["drop_rate"]
        self._check(rate, isinstance(rate, int | float) and 0 <= rate < 1, f"drop rate of {name!r}")
        mask_name = entry.get("mask_name", name)
        self._check(mask_name, isinstance(mask_name, str), f"mask of {name!r}")
        mask_name.encode()  # fails for half of a surrogate pair
        counts = tuple(entry["counts"])
        steps = [after - before for before, after in pairwise(counts)]
        blocks = [min(COUNTED_BLOCK, base.count - k) for k in range(0, base.count, COUNTED_BLOCK)]
        sound = (
            all(is_count(count, 0) for count in counts)
            and counts[:1] == (0,)
            and len(steps) == len(blocks)
            and all(0 <= step <= block for step, block in zip(steps, blocks, strict=True))
            and stored.dtype in FORMATS
            and stored.shape == counts[-1:]
        )
        self._check(counts[-3:], sound, f"counts of {name!r}")
        digests = tuple(entry.get(DIGESTS_KEY, ()))
        sound = all(type(digest) is int for digest in digests)
        self._check(
            digests[-3:],
            sound and len(digests) in (0, len(blocks)),
            f"digests of the base's {name!r}",
        )
        types = {stored.dtype, base.dtype}
        wide = "F64" if "F64" in types else "F32"
        return PackedTensor(
            dtype=stored.dtype if len(types) == 1 else wide,
            shape=shape,
            stored=stored,
            base=base,
            drop_rate=rate,
            mask_name=mask_name,
            counts=counts,
            digests=digests,
        )

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], inputs: int) -> None:
        self._kernels = kernels

    def read(
        self,
        info: TensorInfo,
        start: int,
        count: int,
        into: NDArray[np.uint8],
        base: NDArray[np.uint8] | None = None,
    ) -> None:
        if (
            isinstance(info, PackedTensor)
            and base is not None
            and info.base.dtype == info.dtype
            and start % TILE == 0
        ):
            compare_base(self, self._base, info, start, base[: len(into)])
            raw = FORMATS[info.dtype].raw
            self._fill_blocks(info, start, base[: len(into)].view(raw), into.view(raw))
        else:
            super().read(info, start, count, into)

    def read_bytes(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Of a packed tensor, the bytes that it would have if it were stored whole."""
        if not isinstance(info, PackedTensor):
            super().read_bytes(view, info, start)
            return
        values = np.frombuffer(view, FORMATS[info.dtype].raw)
        first = start // values.itemsize
        skipped = first % TILE
        if skipped:  # masks are drawn by whole tiles
            whole = np.empty(skipped + len(values), values.dtype)
            self.read(info, first - skipped, len(whole), whole.view(np.uint8))
            values[:] = whole[skipped:]
            return
        raw = np.empty(len(values) * FORMATS[info.base.dtype].itemsize, np.uint8)
        base = read_as(info.dtype, self._base, info.base, first, len(values), raw)
        compare_base(self, self._base, info, first, raw)
        self._fill_blocks(info, first, base, values)

    def _fill_blocks(
        self, info: PackedTensor, first: int, base: NDArray[Any], values: NDArray[Any]
    ) -> None:
        """Make values of the base's and of the entries."""
        first_block = first - first % COUNTED_BLOCK
        for block in range(first_block, first + len(values), COUNTED_BLOCK):
            start = max(block, first)
            part = slice(start - first, block + COUNTED_BLOCK - first)
            self._fill(info, start, base[part], values[part])

    def _fill(
        self, info: PackedTensor, start: int, base: NDArray[Any], values: NDArray[Any]
    ) -> None:
        """The same for a block, or a part of one."""
        scratch = self._scratch
        threshold = keep_threshold(info.drop_rate)
        key = mask_key(self.seed or 0, info.mask_name)
        block, skipped = divmod(start, COUNTED_BLOCK)
        if scratch.block != (info, block):
            before, after = info.counts[block : block + 2]
            room = scratch.take((after - before) * FORMATS[info.stored.dtype].itemsize)
            scratch.entries = read_as(info.dtype, self, info.stored, before, after - before, room)
            scratch.block = info, block
            scratch.end = start - skipped
            scratch.used = 0
        if scratch.end != start:  # the elements before are somebody else's
            mask = draw_mask(key, threshold, start - skipped, skipped)
            scratch.used = int(np.count_nonzero(mask))
        entries = scratch.entries[scratch.used :]
        kept = self._kernels[info.spec](base, entries, values, key, threshold, start // TILE)
        scratch.end = start + len(values)
        scratch.used += kept
        is_end = scratch.end % COUNTED_BLOCK == 0 or scratch.end == info.count
        if kept > len(entries) or (is_end and kept != len(entries)):
            raise DareError(
                f"{self.name!r} does not hold the entries that its mask keeps", AGAIN_HINT
            )


def compare_base(
    model: PackedModel, base: Input, info: PackedTensor, first: int, raw: NDArray[np.uint8]
) -> None:
    """Refuse other values of the base than it was packed against, once a block is complete.

    raw: the base's, from an element on.
    """
    if not info.digests:
        return
    itemsize = FORMATS[info.base.dtype].itemsize
    stop = first + len(raw) // itemsize
    for begin in range(first - first % COUNTED_BLOCK, stop, COUNTED_BLOCK):
        digest = info.digests[begin // COUNTED_BLOCK]
        start = max(begin, first)
        end = min(begin + COUNTED_BLOCK, stop)
        part = raw[(start - first) * itemsize : (end - first) * itemsize]
        found = LAST.follow(base, info.base, begin, (start, end), part)
        if end in (begin + COUNTED_BLOCK, info.count) and found != digest:
            name = next(name for name, each in model.tensors.items() if each is info)
            raise DareError(
                f"{model.name!r} was packed against another base than {base.name!r}: "
                f"tensor {name!r} differs at {info.place_of(begin)} or after it",
                BASE_HINT,
            )


def digest_values(model: Input, info: TensorInfo, start: int, stop: int) -> xxhash.xxh3_64:
    """What tells a block, or the beginning of one, from another: it is fast, and no secret."""
    itemsize = FORMATS[info.dtype].itemsize
    room = np.empty(min(DIGESTED_BYTES, (stop - start) * itemsize), np.uint8)
    digest = xxhash.xxh3_64()
    for first in range(start, stop, DIGESTED_BYTES // itemsize):
        part = room[: (stop - first) * itemsize]
        model.read(info, first, len(part) // itemsize, part)
        digest.update(part.data)
    return digest


def read_as(
    dtype: str,
    model: Input,
    info: TensorInfo,
    start: int,
    count: int,
    room: NDArray[np.uint8] | None = None,
) -> NDArray[Any]:
    """Elements of a tensor, in a type that has all their values. room: where to read them to."""
    raw = np.empty(count * FORMATS[info.dtype].itemsize, np.uint8) if room is None else room
    model.read(info, start, count, raw)
    if info.dtype != dtype:
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            raw = decode(raw, info.dtype, dtype)
    return raw.view(FORMATS[dtype].raw)
