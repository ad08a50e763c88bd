"""One tensor of a merge: where it comes from, how it is made, what is written for it; and which
tensors each file of the output holds, and where.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

from darelib.config import Rule
from darelib.core.arrays import Matrices, find_matrices
from darelib.core.formats import FORMATS, STORED_BITS
from darelib.kernels import KernelSpec
from darelib.methods import METHODS, choose_looks
from darelib.methods.coefficients import BASE, Found, TensorSettings
from darelib.methods.looks import Look
from darelib.models.directories import OWN_STEM
from darelib.models.encodings import Encoding, TensorInfo
from darelib.models.tensorfile import header_bytes, parse_header


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorPlan:
    """One tensor of the output."""

    name: str
    base: TensorInfo
    finetuned: tuple[tuple[int, TensorInfo], ...]  # of each model that has it, by its index
    mask_names: tuple[str, ...]  # the names that draw their masks: of tied weights, the owner's
    # All that is written for it, by name, itself first. Offsets count from the end of the header.
    outputs: Mapping[str, TensorInfo]
    merged: bool  # False: copied from the base
    settings: TensorSettings
    spec: KernelSpec  # the kernel that merges it
    quantised: bool
    buffer: str  # what happens to a buffer (see plan/matching); "": it is a weight
    rule: Rule | None  # that matches it first
    encoding: Encoding  # of the output

    @property
    def output(self) -> TensorInfo:
        return self.outputs[self.name]

    @property
    def models(self) -> list[int]:
        return [i for i, _ in self.finetuned]

    def move(self, file: int) -> Self:
        return self.place({name: replace(info, file=file) for name, info in self.outputs.items()})

    def place(self, places: Mapping[str, TensorInfo]) -> Self:
        return replace(self, outputs={name: places[name] for name in self.outputs})

    def look_spec(self, look: Look) -> KernelSpec:
        own = KernelSpec(look.kernel, self.base.dtype, self.spec.finetuned, self.spec.real)
        return self.spec if look.merges else own

    def is_thinned(self, row: int) -> bool:
        """Whether a model was thinned before, exactly as it is to be thinned now."""
        i, info = self.finetuned[row]
        thinning = self.settings.thinnings[i]
        is_random = not thinning.scheme.ends and not thinning.scheme.thresholds
        known = info.encoding
        return known.base == self.base and is_random and known.drop_rate == thinning.drop_rate

    @property
    def is_simple(self) -> bool:
        """Whether all models' changes are used whole, and computed in float32."""
        is_whole = all(info.shape == self.base.shape for _, info in self.finetuned)
        drops = any(self.settings.thinnings[i].drop_rate for i in self.models)
        return is_whole and not drops and self.spec.real == "F32"

    @property
    def adds_ranks(self) -> bool:
        """Whether only adapters change it, and the rank of the merged change is at most the sum of
        their ranks.
        """
        are_products = all(info.added_rank for _, info in self.finetuned)
        adds = METHODS[self.settings.method].adds_ranks and self.settings.origin == BASE
        return are_products and self.is_simple and adds

    @property
    def looks(self) -> list[type[Look]]:
        """The looks before it is merged, in order."""
        if not self.merged or not self.base.count:
            return []
        kinds = choose_looks(self.settings, self.models) if self.finetuned else []
        return [*kinds, *self.encoding.looks]

    @property
    def matrices(self) -> Matrices | None:
        """Its matrices, if its method takes them whole."""
        is_whole = self.merged and METHODS[self.settings.method].whole
        return find_matrices(self.mask_names[0], self.base.shape) if is_whole else None

    def list_passes(self) -> list[tuple[Look, int]]:
        """The looks before it is merged, with each pass that they take."""
        found = Found(width=self.base.width)
        bits = FORMATS[self.spec.real].bits
        passes: list[tuple[Look, int]] = []
        for kind in self.looks:
            look = kind(self.settings, self.models, self.base.count, bits, found)
            passes += [(look, k) for k in range(kind.count_passes(bits))]
        return passes

    @property
    def rank_spec(self) -> KernelSpec | None:
        thinnings = [self.settings.thinnings[i] for i in self.models]
        if not self.merged or not any(thinning.scheme.thresholds for thinning in thinnings):
            return None
        return KernelSpec("rank", self.base.dtype, self.spec.finetuned, self.spec.real)

    @property
    def needs_rows(self) -> bool:
        return self.rank_spec is not None or any(look.of_rows for look in self.looks)

    @property
    def length(self) -> int:
        """What jobs divide: its elements or, if it is copied, its bytes."""
        return self.base.count if self.merged else self.base.nbytes

    @property
    def bytes_read(self) -> int:
        return self.base.stored_bytes + sum(info.stored_bytes for _, info in self.finetuned)


def choose_kernel(
    method: str, base: TensorInfo, finetuned: Sequence[TensorInfo], output: str
) -> KernelSpec:
    """The kernel that merges tensors of these types: fine-tunes of several types are read as
    floats.
    """
    types = {info.dtype for info in finetuned} or {base.dtype}
    if any(info.count < base.count for info in finetuned):
        types.add(base.dtype)  # which stands in for the rows that a model lacks
    common = "F64" if "F64" in types | {base.dtype, output} else "F32"
    if len(types) == 1 and not METHODS[method].whole:  # a solved change is in floats
        [common] = types
    return KernelSpec(METHODS[method].operation.name, base.dtype, common, output)


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedFile:
    name: str
    header: bytes
    size: int

    def replace_metadata(self, metadata: Mapping[str, str]) -> Self:
        data = self.size - len(self.header)
        tensors, _ = parse_header(self.header[8:].decode(), 0, data)
        header = header_bytes(tensors, metadata)
        return replace(self, header=header, size=len(header) + data)


def assign_offsets(
    tensors: Sequence[TensorPlan],
    limit: int,
    metadata: dict[str, str],
    name: str | None,
    stems: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[TensorPlan], list[PlannedFile]]:
    """Give each tensor its place: in order, in a new file if the next one would exceed the limit.

    name: of the only file; None: files are named as their library names them, and folders are kept.
    stems: by folder that may have several files, how their names begin.
    """
    folders: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        folders.setdefault("" if name else tensor.base.folder, []).append(tensor)
    placed: list[TensorPlan] = []
    files: list[PlannedFile] = []
    for folder, inside in (folders or {"": []}).items():
        is_whole = folder and folder not in stems
        shards = [inside] if is_whole else divide_tensors(inside, limit)
        names = [name] if name else name_files(stems.get(folder, OWN_STEM), len(shards))
        prefix = f"{folder}/" if folder else ""
        for own, file_name in zip(shards, names, strict=True):
            places, size = place_tensors(own, len(files))
            placed += [tensor.place(places) for tensor in own]
            stored = {key.removeprefix(prefix): info for key, info in places.items()}
            header = header_bytes(stored, metadata)
            files.append(PlannedFile(f"{prefix}{file_name}", header, len(header) + size))
    return placed, files


def name_files(stem: str, count: int) -> list[str]:
    """The names of the files of one model, or of one folder of a pipeline."""
    several = [f"{stem}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    return several if count > 1 else [f"{stem}.safetensors"]


def divide_tensors(tensors: Sequence[TensorPlan], limit: int) -> list[list[TensorPlan]]:
    """The tensors of each file. One that is larger than the limit has a file of its own."""
    shards: list[list[TensorPlan]] = [[]]
    used = 0
    for tensor in tensors:
        size = sum(info.nbytes for info in tensor.outputs.values())
        if used and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def place_tensors(tensors: Sequence[TensorPlan], file: int) -> tuple[dict[str, TensorInfo], int]:
    """The places of tensors in a file, one after the other, and the bytes that they take."""
    wanted = [pair for tensor in tensors for pair in tensor.outputs.items()]
    if any(len(tensor.outputs) > 1 for tensor in tensors):
        # Behind an odd number of bytes, loaders could not map wider values.
        wanted.sort(key=lambda pair: -STORED_BITS[pair[1].dtype])
    places: dict[str, TensorInfo] = {}
    offset = 0
    for name, info in wanted:
        places[name] = replace(info, file=file, offset=offset)
        offset += info.nbytes
    return places, offset
