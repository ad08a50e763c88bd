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

from darelib.arithmetic.chunks import put_kept
from darelib.arithmetic.definition import draw_mask
from darelib.config import is_count
from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_NAME, TILE, keep_threshold, mask_key
from darelib.core.text import DareError
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Layout
from darelib.models.source import Source
from darelib.models.tensor import Known, Tensor
from darelib.models.tensorfile import AGAIN_HINT, peek_header

Array = Any

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


class LastDigest(threading.local):
    """The last part of a base that a thread has digested: several models may be packed against it,
    and want the same.
    """

    base: Tensor | None = None
    place = (0, 0)  # the first element of the part, and the one after its last
    digest = xxhash.xxh3_64()  # of the block up to there

    def follow(self, base: Tensor, begin: int, start: int, stop: int) -> int:
        """The digest of a block of the base from its beginning up to an element."""
        if self.place != (start, stop) or self.base is not base:
            # At a beginning, or where somebody else has read what comes before.
            if start == begin or self.place[1] != start or self.base is not base:
                self.digest = xxhash.xxh3_64()
                add_values(self.digest, base, begin, start)
            self.base = base
            self.place = (start, stop)
            add_values(self.digest, base, start, stop)
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
        rates = sorted({tensor.drop_rate for tensor in packed.values()})
        span = " to ".join(f"{rate:g}" for rate in dict.fromkeys(rates[:1] + rates[-1:]))
        self.note = f"packed at drop rate {span}, seed {self.seed}" if packed else "packed"

    def _read_table(self, table: dict[str, Any]) -> dict[str, Tensor]:
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

    def _read_entry(self, name: str, entry: Mapping[str, Any]) -> Tensor:
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
        return Packed(
            stored.dtype if len(types) == 1 else wide,
            base.shape,
            drop_rate=rate,
            share=counts[-1] / base.count if base.count else 1.0,
            base=base,
            mask_name=mask_name,
            stored=stored,
            counts=counts,
            digests=digests,
            owner=self,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed(Tensor):
    """A tensor that is the base's, but for the entries that a mask keeps, which are stored."""

    drop_rate: float
    share: float
    base: Tensor
    mask_name: str
    stored: Tensor  # the entries, one after the other
    counts: tuple[int, ...]  # the entries before each block, and all of them
    digests: tuple[int, ...]  # of the base's blocks; none in files of earlier versions
    owner: PackedModel = field(repr=False)

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        skipped = start % TILE
        if skipped:  # masks are drawn by whole tiles
            return self.read(start - skipped, skipped + count)[skipped:]
        is_known = known and known.tensor is self.base and len(known.values) == count
        base = known.values if known and is_known else self.base.read(start, count)
        values = np.empty(count, np.float64 if self.dtype == "F64" else np.float32)
        base = base.astype(values.dtype, copy=False)
        for begin in range(start - start % COUNTED_BLOCK, start + count, COUNTED_BLOCK):
            first = max(begin, start)
            part = slice(first - start, begin + COUNTED_BLOCK - start)
            self._compare_base(begin, first, first + len(values[part]))
            self._fill(first, base[part], values[part])
        return values

    def _fill(self, start: int, base: Array, values: Array) -> None:
        """Make values of a block, or a part of one, of the base's and of the entries."""
        owner = self.owner
        scratch = owner.scratch
        threshold = keep_threshold(self.drop_rate)
        key = mask_key(owner.seed or 0, self.mask_name)
        block, skipped = divmod(start, COUNTED_BLOCK)
        if scratch.block != (self, block):
            before, after = self.counts[block : block + 2]
            entries = self.stored.read(before, after - before)
            scratch.entries = entries.astype(values.dtype, copy=False)
            scratch.block = self, block
            scratch.end = start - skipped
            scratch.used = 0
        if scratch.end != start:  # the elements before are another thread's
            mask = draw_mask(key, threshold, start - skipped, skipped)
            scratch.used = int(np.count_nonzero(mask))
        entries = scratch.entries[scratch.used :]
        kept = put_kept(base, entries, *key, threshold, start // TILE, values)
        scratch.end = start + len(values)
        scratch.used += kept
        is_end = scratch.end % COUNTED_BLOCK == 0 or scratch.end == self.count
        if kept > len(entries) or (is_end and kept != len(entries)):
            raise DareError(
                f"{owner.name!r} does not hold the entries that its mask keeps", AGAIN_HINT
            )

    def _compare_base(self, begin: int, start: int, stop: int) -> None:
        """Refuse other values of the base than it was packed against, once a block is complete."""
        if not self.digests:
            return
        owner = self.owner
        digest = LAST.follow(self.base, begin, start, stop)
        is_end = stop in (begin + COUNTED_BLOCK, self.count)
        if is_end and digest != self.digests[begin // COUNTED_BLOCK]:
            name = next(name for name, each in owner.tensors.items() if each is self)
            raise DareError(
                f"{owner.name!r} was packed against another base than {owner.base.name!r}: "
                f"tensor {name!r} differs at {self.place_of(begin)} or after it",
                BASE_HINT,
            )


def add_values(digest: xxhash.xxh3_64, tensor: Tensor, start: int, stop: int) -> None:
    """What tells one block from another: it is fast, and no secret."""
    item = FORMATS[tensor.dtype].itemsize
    for first in range(start * item, stop * item, DIGESTED_BYTES):
        digest.update(tensor.read_raw(first, min(DIGESTED_BYTES, stop * item - first)).data)
