"""FP8 models: F8_E4M3 weights with scales for blocks, rows or tensors, and FP8 without scales.

Scaled weights are read as float32, and written in FP8 again once all values that share a scale are
there. Unscaled ones are read as bfloat16, and written in FP8 again only if asked for.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from darelib.config import DareConfig, is_count
from darelib.core.formats import FORMATS, widen
from darelib.core.mask import TILE
from darelib.core.text import ConfigError, DareError, clip
from darelib.kernels import float8, plain
from darelib.methods import METHODS
from darelib.methods.looks import Look
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint, module_of, quantised_modules
from darelib.models.directories import CONFIG_FILE
from darelib.models.encodings import Derived, Encoding, Input, Target, TensorInfo, Writer

Array = NDArray[Any]

FP8: Final = "F8_E4M3"
SCALE_TYPES: Final = ("F32", "BF16")
# What stands in place of "weight" in the name of its scale; ComfyUI's is the last.
SCALE_NAMES: Final = ("weight_scale_inv", "weight_scale", "scale_weight")
# Activation scales (of a module's input or output, and of attention's cache), and ComfyUI's note
# beside an FP8 weight.
ACTIVATION_SCALES: Final = {
    "input_scale", "input_scale_ub", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale",
    "scale_input", "comfy_quant",
}  # fmt: skip
MARKER: Final = "scaled_fp8"  # a tensor that tells ComfyUI of scales
# How the last part of a name looks where a tensor may be a scale.
SCALE_LIKE: Final = re.compile(r"scale|amax|absmax|quant|zero_?point|zeros|fp8|extra_state")
# Weights with such names: the norms of Flux and Chroma, CLIP's logit_scale, the tables of PixArt
# and LTX, and the scale of latents that old training code leaves.
LAYER_SCALE: Final = re.compile(
    r"norm[^.]*(\.\d+)?\.scale$"
    r"|(^|\.)(logit_scale|layer_?scale(_parameter)?|scale_factor|timestep_scale_multiplier)$"
    r"|scale_shift_table[^.]*$"
)
DEFAULT_BLOCK: Final = (128, 128)  # where a configuration does not say
SCALE_HINT: Final = "an F8_E4M3 weight needs a weight_scale or weight_scale_inv of F32 or BF16"
# By type: what to do about a weight whose encoding is not known.
UNREAD_HINTS: Final = {
    dtype: "if nothing in its file looks like a scale, a merge with --dtype bfloat16 or --keep-fp8 "
    f"reads it, and with --method passthrough only converts it; {hint}"
    for dtype, hint in ((FP8, f"{QUANTISE_HINT}; {SCALE_HINT}"), ("F8_E5M2", QUANTISE_HINT))
}
MAX_GROUP: Final = 1 << 24  # elements of a row of blocks, which is held in memory


@dataclass(frozen=True, eq=False)
class Fp8(Derived):
    """A matrix in FP8, that is read as float32. Its scales are a tensor themselves."""

    kind: ClassVar[str] = "FP8"
    rereads: ClassVar[bool] = False
    hint: ClassVar[str] = SCALE_HINT
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config", "compression_config")
    files: ClassVar[tuple[str, ...]] = ("hf_quant_config.json",)

    stored: TensorInfo
    scale_name: str
    scales: TensorInfo
    block: tuple[int, int]  # the rows and columns that share a scale
    grid: tuple[int, int]  # how many scales there are
    powers: bool  # whether the configuration wants powers of two (scale_fmt ue8m0)

    @property
    def whole(self) -> bool:
        """Whether one scale is for all of the tensor."""
        return self.grid == (1, 1)

    @property
    def looks(self) -> tuple[type[Look], ...]:
        return (PeakLook,) if self.whole else ()

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.stored.nbytes + self.scales.nbytes

    def list_outputs(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        return {name: TensorInfo(FP8, info.shape), self.scale_name: self.scales}

    def move(self, files: int, rename: Callable[[str], str]) -> Encoding:
        stored, scales = (
            dataclasses.replace(info, file=info.file + files) for info in (self.stored, self.scales)
        )
        name = rename(self.scale_name)
        return dataclasses.replace(self, stored=stored, scales=scales, scale_name=name)

    def find_step(self, info: TensorInfo) -> int:
        """Rows of blocks that are whole tiles, so that each job finds its scales alone."""
        return TILE if self.whole else math.lcm(self.block[0] * info.width, TILE)

    def count_group(self, info: TensorInfo, chunk: int) -> int:
        """Elements that are gathered before they are written: whole rows of blocks, a chunk if they
        fit.
        """
        if self.whole:
            return chunk
        row = self.block[0] * info.width
        return min(max(1, chunk // row) * row, info.count)

    def count_held(self, info: TensorInfo, chunk: int) -> int:
        """Merged values that wait for their scales, and the base's, once more while they are
        encoded.
        """
        return 24 * self.count_group(info, chunk)

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        return Fp8Writer(self, target, start, chunk, look)

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        stored = np.empty(count, np.uint8)
        values = np.frombuffer(into, np.float32)
        model.read_bytes(stored.data, self.stored, start)
        float8.decode(stored, values)
        width = info.width
        stop = start + count
        first_row = min(-(-start // width) * width, stop)
        last_row = max(stop // width * width, start)
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            # The rest of a row, whole rows, and the start of one.
            for first, last in itertools.pairwise(sorted({start, first_row, last_row, stop})):
                self._scale(model, width, values[first - start : last - start], first)

    def _scale(self, model: Input, width: int, values: Array, start: int) -> None:
        row, column = divmod(start, width)
        part = values.reshape(-1, min(width, len(values)))
        raw = self.read_scales(model, row, len(part))
        scales = widen(raw, self.scales.dtype).reshape(-1, self.grid[1])
        for rows, factors in float8.spread(scales, self.block, row, len(part), width):
            one = factors.shape[-1] == 1
            part[rows] *= factors if one else factors[..., column : column + part.shape[1]]

    def read_scales(self, model: Input, row: int, rows: int) -> NDArray[np.uint8]:
        """The scales of the blocks that rows of the tensor are in, as bytes."""
        first = row // self.block[0]
        last = -(-(row + rows) // self.block[0])
        item = self.grid[1] * (self.scales.nbytes // self.scales.count)
        raw = np.empty((last - first) * item, np.uint8)
        model.read_bytes(raw.data, self.scales, first * item)
        return raw


@dataclass(frozen=True, eq=False)
class Unscaled(Derived):
    """A tensor in FP8 without a scale. All its values are bfloat16, too."""

    kind: ClassVar[str] = "FP8"

    stored: TensorInfo

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.stored.nbytes

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        stored = np.empty(count, np.uint8)
        self.stored.encoding.read_stored(model, self.stored, start, stored.data)
        brains = float8.list_brains(self.stored.dtype)[stored]
        if info.dtype == "F32":
            into.view(np.uint32)[:] = brains.astype(np.uint32) << 16
        else:
            into.view(np.uint16)[:] = brains


@dataclass(frozen=True, eq=False)
class Kept(Unscaled):
    """The same, read as float32, and written in FP8 again."""

    def list_outputs(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        return {name: TensorInfo(FP8, info.shape)}

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        return KeptWriter(target, start)


class KeptWriter(Writer):
    def __init__(self, target: Target, start: int) -> None:
        super().__init__(target, start)
        self._place = start

    def add(self, merged: NDArray[np.uint8], base: NDArray[np.uint8], count: int) -> None:
        values = merged.view(np.float32)[:count]
        if (np.abs(values) > float8.LARGEST).any():
            raise DareError(
                f"{self._target.name!r} has merged values above {float8.LARGEST:g}, "
                "which FP8 has not",
                "leave --keep-fp8 out, and write --dtype bfloat16",
            )
        self._target.put(self._target.name, float8.encode(values).data, self._place)
        self._place += count


@dataclass(frozen=True, eq=False)
class ActivationScale(Encoding):
    """An activation scale of an FP8 module: of no use once its weights are not FP8."""

    merges: ClassVar[bool] = False


def recognise_fp8(model: Checkpoint) -> None:
    """Give the FP8 weights of a model that have scales their encoding, and hide the scales."""
    pairs = find_pairs(model.tensors)
    if not pairs:
        return
    tables = model.read_tables() if model.folder else []
    stated = (table.get("quantization_config") for table in tables)
    settings = next((each for each in stated if isinstance(each, dict)), {})
    block = settings.get("weight_block_size") or DEFAULT_BLOCK
    is_pair = isinstance(block, list | tuple) and len(block) == 2
    if not is_pair or not all(is_count(side, 1) for side in block):
        raise DareError(
            f"{model.name!r}: weight_block_size in {CONFIG_FILE} is {clip(repr(block))}",
            "it should be two sides, like [128, 128]",
        )
    powers = settings.get("scale_fmt") == "ue8m0"
    for name, scale_name in pairs.items():
        model.tensors[name] = _make_tensor(model, name, scale_name, (block[0], block[1]), powers)
        del model.tensors[scale_name]
    for name, info in model.tensors.items():
        if is_activation_scale(name, pairs) or f".{name}".endswith(f".{MARKER}"):
            model.tensors[name] = dataclasses.replace(info, encoding=ActivationScale())


def is_activation_scale(name: str, weights: Mapping[str, str]) -> bool:
    module, _, last = name.rpartition(".")
    return last in ACTIVATION_SCALES and any(
        f"{module}{own}.weight" in weights for own in ("", ".k_proj", ".q_proj")
    )


def find_pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The FP8 weights of modules that are quantised in no other way, and the names of their
    scales.
    """
    pairs = {}
    for name, info in tensors.items():
        is_matrix = info.dtype == FP8 and len(info.shape) == 2 and info.count
        if is_matrix and f".{name}".endswith(".weight"):
            module = name.removesuffix("weight")
            scales = [module + own for own in SCALE_NAMES if module + own in tensors]
            if len(scales) == 1 and tensors[scales[0]].dtype in SCALE_TYPES:
                pairs[name] = scales[0]
    rest = {name: tensors[name] for name in tensors.keys() - pairs.keys() - {*pairs.values()}}
    others = quantised_modules(rest) if pairs else set()
    return {name: scale for name, scale in pairs.items() if module_of(name) not in others}


def read_unscaled(model: Checkpoint, base: Checkpoint, config: DareConfig) -> None:
    """Let FP8 tensors of a model without scales be read as they are, if it is known in what type
    they are written: in the one that is asked for, or in the base's.
    """
    if config.dtype and config.keep_fp8:
        raise ConfigError("keep_fp8 and dtype contradict each other", "leave one out")
    for name, info in find_unscaled(model.tensors).items():
        mine = base.tensors.get(name)
        if config.keep_fp8 and model is base:
            model.tensors[name] = dataclasses.replace(info, dtype="F32", encoding=Kept(info))
        elif config.dtype or (mine and mine.dtype not in float8.TYPES):
            model.tensors[name] = dataclasses.replace(info, dtype="BF16", encoding=Unscaled(info))


def find_unscaled(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The FP8 tensors of a model that has FP8 matrices, and nothing that is quantised otherwise.

    Where others have scales, one without may have lost it.
    """
    stored = {name: info for name, info in tensors.items() if info.dtype in float8.TYPES}
    if not any(len(info.shape) > 1 for info in stored.values()):
        return {}
    others = {name: info for name, info in tensors.items() if name not in stored}
    is_read = any(info.encoding.kind for info in others.values())
    return {} if is_read or has_scales(tensors) or quantised_modules(others) else stored


def has_scales(tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether any tensor may be the scale of another: by its name, or because it lies beside an
    FP8 matrix and is no bias. Values without their scales would be merged as if they were right.
    """
    modules = {
        name.rpartition(".")[0]
        for name, info in tensors.items()
        if info.dtype in float8.TYPES and len(info.shape) > 1 and f".{name}".endswith(".weight")
    }
    for name in tensors:
        module, _, last = name.rpartition(".")
        is_beside = module in modules and last not in ("weight", "bias")
        if is_beside or (SCALE_LIKE.search(last) and not LAYER_SCALE.search(name)):
            return True
    return False


def _make_tensor(
    model: Checkpoint, name: str, scale_name: str, block: tuple[int, int], powers: bool
) -> TensorInfo:
    stored = model.tensors[name]
    scale = model.tensors[scale_name]
    rows, width = stored.shape
    if scale.shape in ((), (1,), (1, 1)):
        block = rows, width
    elif scale.shape in ((rows,), (rows, 1)):
        block = 1, width
    grid = -(-rows // block[0]), -(-width // block[1])
    if scale.shape not in ((), (1,), (1, 1), (rows,), grid):
        raise DareError(
            f"{model.name!r}: {scale_name!r} is {list(scale.shape)}, and {name!r} of "
            f"{list(stored.shape)} has {list(grid)} blocks of {list(block)}",
            "it should have a scale for each block, for each row, or one; check weight_block_size "
            "in config.json",
        )
    block = min(block[0], rows), min(block[1], width)
    if grid != (1, 1) and block[0] * width > MAX_GROUP:
        raise DareError(
            f"{model.name!r}: a row of blocks of {name!r} has more than {MAX_GROUP:,} elements",
            "no model has such weights; get it from somewhere you trust",
        )
    encoding = Fp8(stored, scale_name, scale, block, grid, powers)
    return TensorInfo("F32", stored.shape, encoding=encoding)


@dataclass(eq=False)
class PeakLook(Look):
    """The largest magnitude of a merged tensor that has one scale, and whether the merge changes
    anything.
    """

    merges = True
    peak = 0
    changed = False

    def __post_init__(self) -> None:
        self.kernel = METHODS[self.settings.method].operation.name

    def add_chunk(self, start: int, count: int, buffers: Any) -> None:
        merged = buffers.output.view(np.float32)[:count]
        if (merged != buffers.base.view(np.float32)[:count]).any():
            self.changed = True  # set only: another thread may have seen a change, too

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        self.peak = max(self.peak, int(buffers.tensor["peak"][0]))  # patterns are ordered as values

    @property
    def largest(self) -> np.float32:
        pattern = np.array([self.peak], f"u{self.bits // 8}")
        return np.float32(pattern.view(f"f{self.bits // 8}")[0])


class Fp8Writer(Writer):
    """Gathers the merged values of one job until those that share a scale are there, and writes
    them.

    look: where one scale is for all.
    """

    def __init__(
        self, encoding: Fp8, target: Target, start: int, chunk: int, look: Look | None
    ) -> None:
        super().__init__(target, start)
        self._encoding = encoding
        self._start = start
        self._look = look
        group = encoding.count_group(target.info, chunk)
        self._held = np.empty((2, group), np.float32)  # merged values, and the base's
        self._count = 0

    def add(self, merged: NDArray[np.uint8], base: NDArray[np.uint8], count: int) -> None:
        done = 0
        given = merged.view(np.float32)[:count], base.view(np.float32)[:count]
        while done < count:
            size = min(count - done, self._held.shape[1] - self._count)
            for held, values in zip(self._held, given, strict=True):
                held[self._count : self._count + size] = values[done : done + size]
            self._count += size
            done += size
            is_last = self._start + self._count == self._target.info.count
            if is_last or self._count == self._held.shape[1]:
                self.finish()

    def finish(self) -> None:
        """Write the values that are held: whole rows of blocks or, with one scale for all, any."""
        count = self._count
        if not count:
            return
        start = self._start
        self._start += count
        self._count = 0
        whole = self._encoding.whole
        width = count if whole else self._target.info.width
        block = (1, count) if whole else self._encoding.block
        merged, base = self._held[:, :count].reshape(2, -1, width)
        changed, divisors = self._write_scales(merged, base, 0 if whole else start // width, block)
        made: Array = np.empty(merged.shape, np.uint8)
        if changed.any():
            with np.errstate(all="ignore"):  # in blocks that keep the base's bytes
                for rows, factors in float8.spread(divisors, block, 0, len(merged), width):
                    merged[rows] /= factors
            made = float8.encode(merged)
        if not changed.all():
            stored = np.empty(merged.shape, np.uint8)
            self._target.model.read_bytes(stored.reshape(-1).data, self._encoding.stored, start)
            for rows, has_changed in float8.spread(changed, block, 0, len(merged), width):
                np.copyto(made[rows], stored[rows], where=~has_changed)
        self._target.put(self._target.name, made.reshape(-1).data, start)

    def _write_scales(
        self, merged: Array, base: Array, row: int, block: tuple[int, int]
    ) -> tuple[Array, Array]:
        """Which blocks have changed, and what each is to be divided by; the scales are written."""
        encoding = self._encoding
        dtype = encoding.scales.dtype
        if isinstance(self._look, PeakLook):
            changed = np.array([[self._look.changed]])
            peaks = np.array([[self._look.largest]])
        else:
            changed = float8.reduce_blocks(np.logical_or, merged != base, block)
            peaks = float8.reduce_blocks(np.maximum, np.abs(merged), block)
        old = encoding.read_scales(self._target.model, row, len(merged))
        old = old.view(FORMATS[dtype].raw).reshape(changed.shape)
        wanted = np.maximum(peaks / np.float32(float8.LARGEST), np.float32(float8.SMALLEST_SCALE))
        if encoding.powers:  # the next one up, as the base's are
            fractions, exponents = np.frexp(wanted)
            wanted = np.ldexp(np.float32(1), exponents - (fractions == 0.5))
        raw = np.where(changed & (peaks > 0), plain.encode(wanted, dtype), old)
        place = row // encoding.block[0] * raw.itemsize * encoding.grid[1]
        self._target.put(encoding.scale_name, raw.reshape(-1).view(np.uint8).data, place)
        return changed, widen(raw.reshape(-1), dtype).reshape(raw.shape)
