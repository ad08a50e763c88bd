"""FP8 models: F8_E4M3 weights with scales for blocks, rows or tensors, read as the float32 that
they stand for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from darelib.config import is_count
from darelib.core.formats import widen
from darelib.core.mask import TILE
from darelib.core.methods import Look
from darelib.core.text import DareError, clip
from darelib.kernels.fp8 import decode, spread
from darelib.models.checkpoint import (
    CONFIG_FILE,
    QUANTISE_HINT,
    Checkpoint,
    module_of,
    part_name,
    quantised_modules,
)
from darelib.models.fp8writer import Fp8Writer, PeakLook, Scales, read_scales
from darelib.models.jsonfile import read_json
from darelib.models.tensors import Encoding, Input, Target, TensorInfo, Writer

FP8: Final = "F8_E4M3"
SCALE_TYPES: Final = ("F32", "BF16")
SCALE_NAMES: Final = ("_scale_inv", "_scale")  # what a weight's name is followed by
# What scales activations: what comes into or out of a module, or what attention remembers of it.
ACTIVATION_SCALES: Final = {f"{of}_scale" for of in ("input", "output", "q", "k", "v", "kv")}
DEFAULT_BLOCK: Final = (128, 128)  # where a configuration does not say
SCALE_HINT: Final = "an F8_E4M3 weight needs a weight_scale or weight_scale_inv of F32 or BF16"
# By type: what to do about a weight whose encoding is not known.
UNREAD_HINTS: Final = {FP8: f"{QUANTISE_HINT}; {SCALE_HINT}"}
MAX_GROUP: Final = 1 << 24  # elements of a row of blocks, which is held in memory


@dataclass(frozen=True, eq=False)
class Fp8(Encoding):
    """A matrix in FP8, that is read as float32."""

    kind: ClassVar[str] = "FP8"
    rereads: ClassVar[bool] = False
    hint: ClassVar[str] = SCALE_HINT
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config", "compression_config")
    files: ClassVar[tuple[str, ...]] = ("hf_quant_config.json",)

    stored: TensorInfo
    scales: Scales

    @property
    def looks(self) -> tuple[type[Look], ...]:
        return (PeakLook,) if self.scales.whole else ()

    def stored_bytes(self, info: TensorInfo) -> int:
        return self.stored.nbytes + self.scales.info.nbytes

    def list_outputs(self, name: str, info: TensorInfo) -> dict[str, TensorInfo]:
        return {name: TensorInfo(FP8, info.shape), self.scales.name: self.scales.info}

    def find_step(self, info: TensorInfo) -> int:
        """Rows of blocks that are whole tiles, so that each job finds its scales alone."""
        if self.scales.whole:
            return TILE
        return math.lcm(self.scales.block[0] * info.width, TILE)

    def _count_group(self, info: TensorInfo, chunk: int) -> int:
        """Elements that are gathered before they are written: whole rows of blocks, a chunk if they
        fit.
        """
        if self.scales.whole:
            return chunk
        row = self.scales.block[0] * info.width
        return min(max(1, chunk // row) * row, info.count)

    def count_held(self, info: TensorInfo, chunk: int) -> int:
        """Merged values that wait for their scales, and the base's, once more while they are
        encoded.
        """
        return 24 * self._count_group(info, chunk)

    def open_writer(self, target: Target, start: int, chunk: int, look: Look | None) -> Writer:
        group = self._count_group(target.info, chunk)
        peak = look if isinstance(look, PeakLook) else None
        return Fp8Writer(target, self.stored, self.scales, start, group, peak)

    def read(
        self, model: Input, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        stored = np.empty(count, np.uint8)
        values = np.frombuffer(into, np.float32)
        model.read_bytes(stored.data, self.stored, start)
        decode(stored, values)
        width = info.width
        stop = start + count
        first_row = min(-(-start // width) * width, stop)
        last_row = max(stop // width * width, start)
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            # The rest of a row, whole rows, and the start of one.
            for first, last in itertools.pairwise(sorted({start, first_row, last_row, stop})):
                self._scale(model, width, values[first - start : last - start], first)

    def _scale(self, model: Input, width: int, values: NDArray[Any], start: int) -> None:
        """Multiply values by their scales: whole rows, or a part of one."""
        row, column = divmod(start, width)
        part = values.reshape(-1, min(width, len(values)))
        raw = read_scales(model, self.scales, row, len(part))
        scales = widen(raw, self.scales.info.dtype).reshape(-1, self.scales.grid[1])
        for rows, factors in spread(scales, self.scales.block, row, len(part), width):
            one = factors.shape[-1] == 1
            part[rows] *= factors if one else factors[..., column : column + part.shape[1]]


@dataclass(frozen=True, eq=False)
class ActivationScale(Encoding):
    """What scales activations of an FP8 module: of no use once its weights are not FP8."""

    merges: ClassVar[bool] = False


def recognise_fp8(model: Checkpoint) -> None:
    """Give the FP8 weights of a model that have scales their encoding, and hide the scales."""
    pairs = find_pairs(model.tensors)
    if not pairs:
        return
    settings = read_quantisation(model)
    block = find_block(model, settings)
    powers = settings.get("scale_fmt") == "ue8m0"
    for name, scale_name in pairs.items():
        model.tensors[name] = _make_tensor(model, name, scale_name, block, powers)
    for scale_name in pairs.values():
        del model.tensors[scale_name]
    for name, info in model.tensors.items():
        if is_activation_scale(name, pairs):
            model.tensors[name] = dataclasses.replace(info, encoding=ActivationScale())


def is_activation_scale(name: str, weights: Mapping[str, str]) -> bool:
    """Whether a tensor scales activations of a module whose weights are in FP8."""
    module, _, last = name.rpartition(".")
    if last not in ACTIVATION_SCALES and last != "input_scale_ub":
        return False
    return any(f"{module}{own}.weight" in weights for own in ("", ".k_proj", ".q_proj"))


def find_pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The FP8 weights of modules that are quantised in no other way, and the names of their
    scales.
    """
    pairs = {}
    for name, info in tensors.items():
        is_matrix = info.dtype == FP8 and len(info.shape) == 2 and info.count
        if is_matrix and f".{name}".endswith(".weight"):
            scales = [name + end for end in SCALE_NAMES if name + end in tensors]
            if len(scales) == 1 and tensors[scales[0]].dtype in SCALE_TYPES:
                pairs[name] = scales[0]
    if not pairs:
        return {}
    used = {*pairs, *pairs.values()}
    others = quantised_modules({n: info for n, info in tensors.items() if n not in used})
    return {name: scale for name, scale in pairs.items() if module_of(name) not in others}


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
    scales = Scales(scale_name, scale, block, grid, powers)
    return TensorInfo("F32", stored.shape, encoding=Fp8(stored, scales))


def read_quantisation(model: Checkpoint) -> dict[str, Any]:
    """What a model's configuration says of how it is quantised."""
    if model.folder is None or not (model.folder / CONFIG_FILE).is_file():
        return {}
    path = model.folder / CONFIG_FILE
    config = read_json(path, part_name(model.source, path))
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(table.get("quantization_config"), dict):
            return dict(table["quantization_config"])
    return {}


def find_block(model: Checkpoint, settings: Mapping[str, Any]) -> tuple[int, int]:
    """The size of blocks that a model's configuration states, or the usual one."""
    stated = settings.get("weight_block_size") or DEFAULT_BLOCK
    is_pair = isinstance(stated, list | tuple) and len(stated) == 2
    if not is_pair or not all(is_count(side, 1) for side in stated):
        raise DareError(
            f"{model.name!r}: weight_block_size in {CONFIG_FILE} is {clip(repr(stated))}",
            "it should be two sides, like [128, 128]",
        )
    return stated[0], stated[1]
