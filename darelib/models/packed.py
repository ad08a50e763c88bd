"""Packed models: the entries of a fine-tune that a mask keeps. The mask is drawn again."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from darelib.kernels import Kernel, KernelSpec, fallback
from darelib.kernels.plain import decode, draw_mask
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Layout
from darelib.models.encodings import Derived, Input, TensorInfo
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, peek_header

PACKED_KEY: Final = "dare_packed"  # in the metadata of a file
PACKED_FILE: Final = "packed.safetensors"  # in a model directory
VERSION: Final = 1
COUNTED_BLOCK: Final = 1 << 20  # elements between two counts of the entries that are kept before
DIGESTS_KEY: Final = "base_xxh3"
DIGESTED_BYTES: Final = 1 << 18  # at a time, so that they stay in the caches
BASE_HINT: Final = "give the base that it was packed against"


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

    block: tuple[Packed, int] | None = None  # which one
    entries: NDArray[Any]
    end = 0  # the element that its last read ended at
    used = 0  # the entries before that

    def __init__(self) -> None:
        # For the widest type: what is not used takes no memory, and new room for each block would
        # be asked of the system each time.
        self.room = np.empty(8 * COUNTED_BLOCK, np.uint8)


class LastDigest(threading.local):
    """The last part of a base that a thread has digested: several models may be packed against it,
    and want the same.
    """

    info: TensorInfo | None = None
    place = (0, 0)  # the first element of the part, and the one after its last
    digest = xxhash.xxh3_64()  # of the block up to there

    def follow(
        self, model: Input, info: TensorInfo, begin: int, start: int, part: NDArray[Any]
    ) -> int:
        """The digest of a block of the base from its beginning. part: its values from start on."""
        place = (start, start + len(part))
        if self.place != place or self.info is not info:
            # At a beginning, or where somebody else has read what comes before.
            if start == begin or self.place[1] != start or self.info is not info:
                self.digest = digest_values(model, info, begin, start)
            self.info = info
            self.place = place
            self.digest.update(part.data)
        return self.digest.intdigest()


LAST: Final = LastDigest()


class PackedModel(Checkpoint):
    """A packed model, open for reading: it has the base's values wherever it holds no entry."""

    keeps_metadata = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"{source.name!r} is a packed model, where a whole one is needed",
                "give the model that it was packed against, or the fine-tune itself",
            )
        super().__init__(source, layout)
        self.base = base
        self.scratch = Scratch()
        try:
            packed = self._read_table(json.loads(self.files[0].metadata.pop(PACKED_KEY, "")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.close()
            fault = "something in its table is missing, or of another type than it should be"
            if type(error) is ValueError:
                fault = str(error)
            raise DareError(
                f"{self.name!r} is not a sound packed model: {fault}", AGAIN_HINT
            ) from None
        except DareError:
            self.close()
            raise
        self.tensors |= packed
        self.specs = frozenset(find_spec(tensor.dtype) for tensor in packed.values())
        # Until there are faster kernels: some values are read before a merge begins.
        self.prepare(fallback.load_kernels(self.specs), 1)
        rates = sorted({tensor.encoding.drop_rate for tensor in packed.values()})
        span = " to ".join(f"{rate:g}" for rate in dict.fromkeys(rates[:1] + rates[-1:]))
        self.note = f"packed at drop rate {span}, seed {self.seed}" if packed else "packed"

    def _read_table(self, table: dict[str, Any]) -> dict[str, TensorInfo]:
        version = table["version"]
        mask = table["mask"]
        if (version, mask) != (VERSION, MASK_NAME):
            raise DareError(
                f"{self.name!r} is packed in format {version!r} with mask {mask!r}, "
                "not known to this version",
                "use the version of dare that packed it",
            )
        stated = dict(table["base"])
        for key, value in self.base.fingerprint.items():
            if stated.get(key) != value:
                raise DareError(
                    f"{self.name!r} was packed against {stated.get('file')!r}, and "
                    f"{self.base.name!r} is another base: its {key} is {value}, not "
                    f"{stated.get(key)}",
                    BASE_HINT,
                )
        self.seed = table["seed"]
        if not is_count(self.seed, 0):
            raise ValueError(f"its seed is {self.seed!r}")
        self._tied = table.get("tie_word_embeddings")
        return {name: self._read_entry(name, entry) for name, entry in table["tensors"].items()}

    @cached_property
    def config(self) -> dict[str, Any]:
        """That of its directory; what decides about its head was stored with it."""
        tied = {"tie_word_embeddings": self._tied} if isinstance(self._tied, bool) else {}
        return super().config | tied

    def _read_entry(self, name: str, entry: Mapping[str, Any]) -> TensorInfo:
        """One tensor. All that reading relies on is checked: such files may come from anywhere."""
        stored = self.tensors[name]
        base = self.base.tensors[name]
        rate = entry["drop_rate"]
        mask_name = entry.get("mask_name", name)
        mask_name.encode()  # fails for half of a surrogate pair
        counts = tuple(entry["counts"])
        digests = tuple(entry.get(DIGESTS_KEY, ()))
        steps = [after - before for before, after in pairwise(counts)]
        blocks = [min(COUNTED_BLOCK, base.count - k) for k in range(0, base.count, COUNTED_BLOCK)]
        are_counts = len(steps) == len(blocks) and all(is_count(count, 0) for count in counts)
        sound = {
            "shape": tuple(entry["shape"]) == base.shape,
            "drop rate": isinstance(rate, int | float) and 0 <= rate < 1,
            "counts": are_counts
            and counts[:1] == (0,)
            and all(0 <= step <= block for step, block in zip(steps, blocks, strict=True))
            and stored.dtype in FORMATS
            and stored.shape == counts[-1:],
            "digests": len(digests) in (0, len(blocks))
            and all(type(digest) is int for digest in digests),
        }
        for what, is_sound in sound.items():
            if not is_sound:
                raise ValueError(f"see its {what} of {name!r}")
        types = {stored.dtype, base.dtype}
        wide = "F64" if "F64" in types else "F32"
        encoding = Packed(
            drop_rate=rate,
            share=counts[-1] / base.count if base.count else 1.0,
            base=base,
            mask_name=mask_name,
            stored=stored,
            counts=counts,
            digests=digests,
            owner=self,
        )
        dtype = stored.dtype if len(types) == 1 else wide
        return TensorInfo(dtype, base.shape, encoding=encoding)

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], inputs: int) -> None:
        self.kernels = kernels


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed(Derived):
    """A tensor that is the base's, but for the entries that a mask keeps, which are stored."""

    base: TensorInfo
    mask_name: str
    stored: TensorInfo  # the entries, one after the other
    counts: tuple[int, ...]  # the entries before each block, and all of them
    digests: tuple[int, ...]  # of the base's blocks; none in files of earlier versions
    owner: PackedModel = field(repr=False)

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.stored.nbytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        skipped = start % TILE
        if skipped:  # masks are drawn by whole tiles
            whole = np.empty((skipped + count) * FORMATS[info.dtype].itemsize, np.uint8)
            self.read(model, info, start - skipped, skipped + count, whole)
            into[:] = whole[-len(into) :]
            return
        base = np.empty(count * FORMATS[self.base.dtype].itemsize, np.uint8)
        self.owner.base.read(self.base, start, count, base)
        self.read_over(model, info, start, count, into, base)

    def read_over(
        self,
        model: Input,
        info: TensorInfo,
        start: int,
        count: int,
        into: NDArray[np.uint8],
        base: NDArray[np.uint8],
    ) -> None:
        if start % TILE:
            self.read(model, info, start, count, into)
            return
        values = into.view(FORMATS[info.dtype].raw)
        given = base.view(FORMATS[self.base.dtype].raw)
        known = convert(given, self.base.dtype, info.dtype)
        for begin in range(start - start % COUNTED_BLOCK, start + count, COUNTED_BLOCK):
            first = max(begin, start)
            part = slice(first - start, begin + COUNTED_BLOCK - start)
            self._compare_base(info, begin, first, given[part])
            self._fill(info, first, known[part], values[part])

    def _fill(self, info: TensorInfo, start: int, base: NDArray[Any], values: NDArray[Any]) -> None:
        """Make values of a block, or a part of one, of the base's and of the entries."""
        owner = self.owner
        scratch = owner.scratch
        threshold = keep_threshold(self.drop_rate)
        key = mask_key(owner.seed or 0, self.mask_name)
        block, skipped = divmod(start, COUNTED_BLOCK)
        if scratch.block != (self, block):
            before, after = self.counts[block : block + 2]
            stored = self.stored.dtype
            raw = scratch.room[: (after - before) * FORMATS[stored].itemsize]
            owner.read(self.stored, before, after - before, raw)
            scratch.entries = convert(raw.view(FORMATS[stored].raw), stored, info.dtype)
            scratch.block = self, block
            scratch.end = start - skipped
            scratch.used = 0
        if scratch.end != start:  # the elements before are another thread's
            mask = draw_mask(key, threshold, start - skipped, skipped)
            scratch.used = int(np.count_nonzero(mask))
        entries = scratch.entries[scratch.used :]
        unpack = owner.kernels[find_spec(info.dtype)]
        kept = unpack(base, entries, values, key, threshold, start // TILE)
        scratch.end = start + len(values)
        scratch.used += kept
        is_end = scratch.end % COUNTED_BLOCK == 0 or scratch.end == info.count
        if kept > len(entries) or (is_end and kept != len(entries)):
            raise DareError(
                f"{owner.name!r} does not hold the entries that its mask keeps", AGAIN_HINT
            )

    def _compare_base(self, info: TensorInfo, begin: int, start: int, part: NDArray[Any]) -> None:
        """Refuse other values of the base than it was packed against, once a block is complete."""
        if not self.digests:
            return
        owner = self.owner
        found = LAST.follow(owner.base, self.base, begin, start, part)
        is_end = start + len(part) in (begin + COUNTED_BLOCK, info.count)
        if is_end and found != self.digests[begin // COUNTED_BLOCK]:
            name = next(name for name, each in owner.tensors.items() if each is info)
            raise DareError(
                f"{owner.name!r} was packed against another base than {owner.base.name!r}: "
                f"tensor {name!r} differs at {info.place_of(begin)} or after it",
                BASE_HINT,
            )


def find_spec(dtype: str) -> KernelSpec:
    return KernelSpec("unpack", dtype, dtype, dtype)


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


def convert(raw: NDArray[Any], dtype: str, wanted: str) -> NDArray[Any]:
    """Stored values in a type that has all of them, as they would be stored in that."""
    if dtype == wanted:
        return raw
    with np.errstate(all="ignore"):  # what is not finite is found in the result
        return decode(raw, dtype, wanted).view(FORMATS[wanted].raw)
