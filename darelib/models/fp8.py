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

from darelib.arithmetic import float8
from darelib.arithmetic.stored import decode, encode
from darelib.config import DareConfig, is_count
from darelib.core.mask import TILE
from darelib.core.text import ConfigError, DareError, clip
from darelib.methods.looks import Chunk, Look
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint, module_of, quantised_modules
from darelib.models.directories import CONFIG_FILE
from darelib.models.forms import Entry, Form, Target, Writer
from darelib.models.tensor import Described, Known, Tensor

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
class Fp8(Tensor):
    """A matrix in FP8, that is read as float32. Its scales are a tensor themselves."""

    kind: ClassVar[str] = "FP8"
    hint: ClassVar[str] = SCALE_HINT
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config", "compression_config")
    files: ClassVar[tuple[str, ...]] = ("hf_quant_config.json",)

    stored: Tensor
    scale_name: str
    scales: Tensor
    block: tuple[int, int]  # the rows and columns that share a scale
    grid: tuple[int, int]  # how many scales there are
    powers: bool  # whether the configuration wants powers of two (scale_fmt ue8m0)

    @property
    def whole(self) -> bool:
        """Whether one scale is for all of the tensor."""
        return self.grid == (1, 1)

    @property
    def form(self) -> Form:
        return Fp8Form(self)

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes + self.scales.nbytes

    def rename(self, rename: Callable[[str], str]) -> Tensor:
        return dataclasses.replace(self, scale_name=rename(self.scale_name))

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        values = np.empty(count, np.float32)
        float8.decode(self.stored.read_raw(start, count), values)
        stop = start + count
        first_row = min(-(-start // self.width) * self.width, stop)
        last_row = max(stop // self.width * self.width, start)
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            # The rest of a row, whole rows, and the start of one.
            for first, last in itertools.pairwise(sorted({start, first_row, last_row, stop})):
                self._scale(values[first - start : last - start], first)
        return values

    def _scale(self, values: Array, start: int) -> None:
        row, column = divmod(start, self.width)
        part = values.reshape(-1, min(self.width, len(values)))
        scales = self.read_scales(row, len(part))
        for rows, factors in float8.spread(scales, self.block, row, len(part), self.width):
            one = factors.shape[-1] == 1
            part[rows] *= factors if one else factors[..., column : column + part.shape[1]]

    def read_scales(self, row: int, rows: int) -> Array:
        """The scales of the blocks that rows of the tensor are in."""
        first = row // self.block[0]
        last = -(-(row + rows) // self.block[0])
        scales = self.scales.read(first * self.grid[1], (last - first) * self.grid[1])
        return scales.reshape(-1, self.grid[1])


@dataclass(frozen=True, eq=False)
class Unscaled(Tensor):
    """A tensor in FP8 without a scale. All its values are bfloat16, too."""

    kind: ClassVar[str] = "FP8"

    stored: Tensor

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        stored = self.stored.read_raw(start, count)
        return decode(float8.list_brains(self.stored.dtype)[stored], "BF16")


class Kept(Unscaled):
    """The same, read as float32, and written in FP8 again."""

    @property
    def form(self) -> Form:
        return KEPT


@dataclass(frozen=True, eq=False)
class ActivationScale(Tensor):
    """An activation scale of an FP8 module: of no use once its weights are not FP8."""

    merges: ClassVar[bool] = False

    stored: Tensor

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        return self.stored.read(start, count)

    def read_raw(self, start: int, size: int) -> Array:
        return self.stored.read_raw(start, size)


def recognise_fp8(model: Described) -> None:
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
            model.tensors[name] = ActivationScale(info.dtype, info.shape, info, folder=info.folder)


def is_activation_scale(name: str, weights: Mapping[str, str]) -> bool:
    module, _, last = name.rpartition(".")
    return last in ACTIVATION_SCALES and any(
        f"{module}{own}.weight" in weights for own in ("", ".k_proj", ".q_proj")
    )


def find_pairs(tensors: Mapping[str, Tensor]) -> dict[str, str]:
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
            model.tensors[name] = Kept("F32", info.shape, info, folder=info.folder)
        elif config.dtype or (mine and mine.dtype not in float8.TYPES):
            model.tensors[name] = Unscaled("BF16", info.shape, info, folder=info.folder)


def find_unscaled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The FP8 tensors of a model that has FP8 matrices, and nothing that is quantised otherwise.

    Where others have scales, one without may have lost it.
    """
    stored = {name: info for name, info in tensors.items() if info.dtype in float8.TYPES}
    if not any(len(info.shape) > 1 for info in stored.values()):
        return {}
    others = {name: info for name, info in tensors.items() if name not in stored}
    is_read = any(info.kind for info in others.values())
    return {} if is_read or has_scales(tensors) or quantised_modules(others) else stored


def has_scales(tensors: Mapping[str, Tensor]) -> bool:
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
    model: Described, name: str, scale_name: str, block: tuple[int, int], powers: bool
) -> Tensor:
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
    return Fp8(
        "F32", stored.shape, stored, scale_name, scale, block, grid, powers, folder=stored.folder
    )


# --- written again --------------------------------------------------------------------------------


@dataclass(eq=False)
class PeakLook(Look):
    """The largest magnitude of a merged tensor that has one scale, and whether the merge changes
    anything.
    """

    merges = True
    peak = 0.0
    changed = False

    def observe(self, chunk: Chunk, number: int, noted: Any) -> tuple[float, bool]:
        peak, changed = noted or (0.0, False)
        has_changed = (chunk.merged.astype(np.float32) != chunk.base).any()
        return max(peak, chunk.peak), changed or bool(has_changed)

    def add(self, noted: tuple[float, bool]) -> None:
        self.peak = max(self.peak, noted[0])
        self.changed |= noted[1]


@dataclass(frozen=True)
class Fp8Form(Form):
    """FP8 with new scales, of the blocks that the base has."""

    tensor: Fp8

    rereads: ClassVar[bool] = False

    @property
    def looks(self) -> tuple[type[Look], ...]:
        return (PeakLook,) if self.tensor.whole else ()

    def list_entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        scales = self.tensor.scales
        return {
            name: Entry(FP8, entry.shape),
            self.tensor.scale_name: Entry(scales.dtype, scales.shape),
        }

    def find_step(self) -> int:
        """Rows of blocks that are whole tiles, so that each job finds its scales alone."""
        whole = self.tensor.whole
        return TILE if whole else math.lcm(self.tensor.block[0] * self.tensor.width, TILE)

    def count_group(self, chunk: int) -> int:
        """Elements that are gathered before they are written: whole rows of blocks, a chunk if they
        fit.
        """
        if self.tensor.whole:
            return chunk
        row = self.tensor.block[0] * self.tensor.width
        return min(max(1, chunk // row) * row, self.tensor.count)

    def count_held(self, chunk: int) -> int:
        """Merged values that wait for their scales, and the base's, once more while they are
        encoded.
        """
        return 24 * self.count_group(chunk)

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        return Fp8Writer(self, target, start, chunk, look)


class Fp8Writer(Writer):
    """Gathers the merged values of one job until those that share a scale are there, and writes
    them.

    look: where one scale is for all.
    """

    def __init__(
        self, form: Fp8Form, target: Target, start: int, chunk: int, look: Look | None
    ) -> None:
        super().__init__(target, start)
        self._tensor = form.tensor
        self._start = start
        self._look = look
        self._held = np.empty((2, form.count_group(chunk)), np.float32)  # merged, and the base's
        self._count = 0

    def add(self, merged: Array, base: Array) -> None:
        done = 0
        while done < len(merged):
            size = min(len(merged) - done, self._held.shape[1] - self._count)
            for held, values in zip(self._held, (merged, base), strict=True):
                held[self._count : self._count + size] = values[done : done + size]
            self._count += size
            done += size
            is_last = self._start + self._count == self._tensor.count
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
        whole = self._tensor.whole
        width = count if whole else self._tensor.width
        block = (1, count) if whole else self._tensor.block
        merged, base = self._held[:, :count].reshape(2, -1, width)
        changed, divisors = self._write_scales(merged, base, 0 if whole else start // width, block)
        made: Array = np.empty(merged.shape, np.uint8)
        if changed.any():
            with np.errstate(all="ignore"):  # in blocks that keep the base's bytes
                for rows, factors in float8.spread(divisors, block, 0, len(merged), width):
                    merged[rows] /= factors
            made = float8.encode(merged)
        if not changed.all():
            stored = self._tensor.stored.read_raw(start, count).reshape(merged.shape)
            for rows, has_changed in float8.spread(changed, block, 0, len(merged), width):
                np.copyto(made[rows], stored[rows], where=~has_changed)
        self._target.put(self._target.name, made.reshape(-1).data, start)

    def _write_scales(
        self, merged: Array, base: Array, row: int, block: tuple[int, int]
    ) -> tuple[Array, Array]:
        """Which blocks have changed, and what each is to be divided by; the scales are written."""
        tensor = self._tensor
        dtype = tensor.scales.dtype
        if isinstance(self._look, PeakLook):
            changed = np.array([[self._look.changed]])
            peaks = np.array([[self._look.peak]], np.float32)
        else:
            changed = float8.reduce_blocks(np.logical_or, merged != base, block)
            peaks = float8.reduce_blocks(np.maximum, np.abs(merged), block)
        old = tensor.read_scales(row, len(merged))
        wanted = np.maximum(peaks / np.float32(float8.LARGEST), np.float32(float8.SMALLEST_SCALE))
        if tensor.powers:  # the next one up, as the base's are
            fractions, exponents = np.frexp(wanted)
            wanted = np.ldexp(np.float32(1), exponents - (fractions == 0.5))
        raw = encode(np.where(changed & (peaks > 0), wanted, old).reshape(-1), dtype)
        place = row // tensor.block[0] * raw.itemsize * tensor.grid[1]
        self._target.put(tensor.scale_name, raw.view(np.uint8).data, place)
        return changed, decode(raw, dtype).reshape(peaks.shape)


class KeptForm(Form):
    """FP8 without scales."""

    def list_entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        return {name: Entry(FP8, entry.shape)}

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        return KeptWriter(target, start)


KEPT: Final = KeptForm()


class KeptWriter(Writer):
    def __init__(self, target: Target, start: int) -> None:
        super().__init__(target, start)
        self._place = start

    def add(self, merged: Array, base: Array) -> None:
        merged = merged.astype(np.float32, copy=False)
        if (np.abs(merged) > float8.LARGEST).any():
            raise DareError(
                f"{self._target.name!r} has merged values above {float8.LARGEST:g}, "
                "which FP8 has not",
                "leave --keep-fp8 out, and write --dtype bfloat16",
            )
        self._target.put(self._target.name, float8.encode(merged).data, self._place)
        self._place += len(merged)
