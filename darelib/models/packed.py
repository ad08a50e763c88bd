"""Packed models: of a fine-tune, only the entries that a mask keeps. The mask needs no storage: it is drawn again."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.config import is_count
from darelib.core.formats import FORMATS
from darelib.core.mask import MASK_BITS, MASK_NAME, keep_threshold, mask_key
from darelib.core.text import DareError
from darelib.kernels.plain import draw_mask
from darelib.models.checkpoint import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Checkpoint, Layout
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, MAX_HEADER, TensorInfo, open_regular

PACKED_KEY: Final = "dare_packed"  # in the metadata of a file
PACKED_FILE: Final = "packed.safetensors"  # in a model directory
IN_METADATA: Final = re.compile(
    rf'"{PACKED_KEY}"\s*:\s*"'.encode()
)  # a text, and no tensor of that name
VERSION: Final = 1
COUNTED_BLOCK: Final = 1 << 20  # elements between two counts of the entries that are kept before


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor(TensorInfo):
    """A tensor of which only the entries are stored that a mask keeps."""

    stored: TensorInfo  # the entries, one after the other
    drop_rate: float
    threshold: int  # of the mask: an entry is stored where its bits are below it
    mask_name: str  # what the mask is drawn by
    counts: tuple[int, ...]  # the entries before each block, and all of them

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes

    def seen(self, start: int, stop: int) -> int:
        """How many elements of a range it holds; where no count begins or ends it, about as many."""
        if start % COUNTED_BLOCK == 0 and (stop % COUNTED_BLOCK == 0 or stop == self.count):
            return self.counts[-(-stop // COUNTED_BLOCK)] - self.counts[start // COUNTED_BLOCK]
        return round((stop - start) * self.threshold / (1 << MASK_BITS))


def find_packed(source: Source) -> Layout | None:
    """The file of a packed model; None: the source is something else, or cannot be read, which its reader explains."""
    folder = source.path if source.path.is_dir() else None
    if folder and any((folder / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)):
        return None
    path, header = source.path / PACKED_FILE if folder else source.path, b""
    with suppress(OSError), open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length if length <= MAX_HEADER else 0)
    if not IN_METADATA.search(header):
        return None
    if folder is None and path.name == PACKED_FILE and (path.parent / CONFIG_FILE).exists():
        folder = path.parent
    return Layout((path,), folder)


class PackedModel(Checkpoint):
    """A packed model, open for reading: where it holds no entry, it has the base's value."""

    keeps_metadata = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"the base {source.name!r} is a packed model",
                "give the model that it was packed against",
            )
        super().__init__(source, layout)
        try:
            self._understand(self.files[0].metadata.pop(PACKED_KEY, ""), base)
        except BaseException:
            self.close()
            raise
        self._held = threading.local()

    def _understand(self, text: str, base: Checkpoint) -> None:
        try:
            table = json.loads(text)
            version, mask = table["version"], table["mask"]
            if (version, mask) != (VERSION, MASK_NAME):
                raise DareError(
                    f"{self.name!r} is packed in format {version!r} with mask {mask!r}, not known to this version",
                    "use the version of dare that packed it",
                )
            self.seed = self._check(table["seed"], is_count(table["seed"], 0), "seed")
            packed = {
                name: self._read_entry(name, entry, base)
                for name, entry in table["tensors"].items()
            }
            stated, self._tied = dict(table["base"]), table.get("tie_word_embeddings")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            words = "something in its table is missing, or of another type than it should be"
            raise DareError(
                f"{self.name!r} is not a sound packed model: {words}", AGAIN_HINT
            ) from None
        for key, value in base.fingerprint.items():
            if stated.get(key) != value:
                raise DareError(
                    f"{self.name!r} was packed against {stated.get('file')!r}, and {base.name!r} is another base: "
                    f"its {key} is {value}, not {stated.get(key)}",
                    "give the base that it was packed against",
                )
        self.tensors |= packed
        rates = sorted({tensor.drop_rate for tensor in packed.values()})
        span = " to ".join(f"{rate:g}" for rate in dict.fromkeys((*rates[:1], *rates[-1:])))
        self.note = f"packed at drop rate {span}, seed {self.seed}" if rates else "packed"
        self.sample = f"{self.name} is packed, so its figures are those of the entries that it holds, a random sample"

    @cached_property
    def config(self) -> dict[str, Any]:
        """That of its directory; what decides about its head was stored with it."""
        tied = {"tie_word_embeddings": self._tied} if isinstance(self._tied, bool) else {}
        found: dict[str, Any] = Checkpoint.config.func(self)  # type: ignore[attr-defined]
        return found | tied

    def _check(self, value: Any, sound: bool, what: str) -> Any:
        if not sound:
            raise DareError(
                f"{self.name!r} is not a sound packed model: its {what} is {value!r}", AGAIN_HINT
            )
        return value

    def _read_entry(self, name: str, entry: Mapping[str, Any], base: Checkpoint) -> PackedTensor:
        """One tensor. Everything that reading relies on is checked, since such files may come from anywhere."""
        stored = self.tensors.get(name)
        if stored is None:
            raise DareError(f"{self.name!r} lacks its tensor {name!r}", AGAIN_HINT)
        shape, rate, mask_name = (
            tuple(entry["shape"]),
            entry["drop_rate"],
            entry.get("mask_name", name),
        )
        self._check(
            shape, name in base.tensors and shape == base.tensors[name].shape, f"shape of {name!r}"
        )
        self._check(rate, isinstance(rate, int | float) and 0 <= rate < 1, f"drop rate of {name!r}")
        self._check(mask_name, isinstance(mask_name, str), f"mask of {name!r}")
        mask_name.encode()  # half of a surrogate pair is no text
        counts, whole = tuple(entry["counts"]), TensorInfo(stored.dtype, shape)
        blocks = -(-whole.count // COUNTED_BLOCK)
        ends = (
            [min(COUNTED_BLOCK, whole.count - k * COUNTED_BLOCK) for k in range(blocks)]
            if blocks == len(counts) - 1
            else []
        )
        steps = [after - before for before, after in itertools.pairwise(counts)]
        sound = (
            len(counts) == blocks + 1
            and all(is_count(count, 0) for count in counts)
            and counts[0] == 0
        )
        sound = sound and all(0 <= step <= end for step, end in zip(steps, ends, strict=True))
        sound = sound and stored.dtype in FORMATS and stored.shape == (counts[-1],)
        self._check(counts[-3:], sound, f"counts of {name!r}")
        return PackedTensor(
            dtype=stored.dtype,
            shape=shape,
            stored=stored,
            drop_rate=rate,
            threshold=keep_threshold(rate),
            mask_name=mask_name,
            counts=counts,
        )

    def read(
        self, info: TensorInfo, start: int, count: int, into: NDArray[Any] | memoryview
    ) -> None:
        """Of a packed tensor: its next entries from one element on, as many as fit; take says how many were used."""
        if not isinstance(info, PackedTensor):
            super().read(info, start, count, into)
            return
        held, item, block = self._held, FORMATS[info.dtype].itemsize, start // COUNTED_BLOCK
        if getattr(held, "key", None) != (info, start):
            held.used, skipped = 0, start % COUNTED_BLOCK
            if skipped:  # the chunks before are somebody else's
                key = mask_key(self.seed or 0, info.mask_name)
                held.used = int(
                    np.count_nonzero(draw_mask(key, info.threshold, start - skipped, skipped))
                )
        before, after = info.counts[block : block + 2]
        held.start, held.total = start, after - before
        size = max(0, min(count, held.total - held.used)) * item
        self.read_bytes(
            np.frombuffer(into, np.uint8)[:size].data, info.stored, (before + held.used) * item
        )

    def take(self, info: TensorInfo, count: int, used: int) -> None:
        """So many entries belonged to the chunk that was read last."""
        held = self._held
        held.used, stop = held.used + used, held.start + count
        ends = stop % COUNTED_BLOCK == 0 or stop == info.count
        if held.used > held.total or (ends and held.used != held.total):
            raise DareError(
                f"{self.name!r} does not hold the entries that its mask keeps", AGAIN_HINT
            )
        held.key = info, stop
        held.used = 0 if stop % COUNTED_BLOCK == 0 else held.used
