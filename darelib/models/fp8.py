"""FP8 models: F8_E4M3 weights with scales for blocks, rows or tensors, read as the float32 that they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib.config import is_count
from darelib.core.formats import widen
from darelib.core.text import DareError, clip
from darelib.kernels.fp8 import decode, spread
from darelib.models.checkpoint import (
    CONFIG_FILE,
    Checkpoint,
    Layout,
    module_of,
    part_name,
    quantised_modules,
)
from darelib.models.jsonfile import read_json
from darelib.models.source import Source
from darelib.models.tensorfile import TensorInfo

FP8: Final = "F8_E4M3"
SCALE_TYPES: Final = ("F32", "BF16")
SCALE_NAMES: Final = ("_scale_inv", "_scale")  # what a weight's name is followed by
ACTIVATION_SCALES: Final = {f"{of}_scale" for of in ("input", "output", "q", "k", "v", "kv")} | {
    "input_scale_ub"
}
DEFAULT_BLOCK: Final = (128, 128)  # where a configuration does not say
MAX_GROUP: Final = 1 << 24  # elements of a row of blocks, which is held in memory


@dataclass(frozen=True, slots=True)
class Scales:
    """The scales of a tensor, which are a tensor themselves."""

    name: str
    info: TensorInfo
    block: tuple[int, int]  # the rows and columns that share one
    grid: tuple[int, int]  # how many there are
    powers: bool = (
        False  # whether they are powers of two, as the configuration says (scale_fmt ue8m0)
    )

    @property
    def whole(self) -> bool:
        """Whether one is for all of the tensor."""
        return self.grid == (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledTensor(TensorInfo):
    """A matrix in FP8, that is read as float32."""

    stored: TensorInfo
    scales: Scales

    @property
    def stored_bytes(self) -> int:
        return self.stored.nbytes + self.scales.info.nbytes


def is_activation_scale(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor scales what comes into or out of an FP8 module, or what attention remembers of it."""
    module, _, last = name.rpartition(".")
    if last not in ACTIVATION_SCALES:
        return False
    return any(
        isinstance(tensors.get(f"{module}{own}.weight"), ScaledTensor)
        for own in ("", ".k_proj", ".q_proj")
    )


def open_checkpoint(source: Source, layout: Layout, _: Checkpoint | None) -> Any:
    """A checkpoint, as it is or, where it has FP8 weights with scales, as what these stand for."""
    model = Checkpoint(source, layout)
    try:
        pairs = find_pairs(model.tensors)
        return ScaledModel(model, pairs) if pairs else model
    except BaseException:
        model.close()
        raise


def find_pairs(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The FP8 weights of modules that are quantised in no other way, and the names of their scales."""
    found = {}
    for name, info in tensors.items():
        if (
            info.dtype == FP8
            and len(info.shape) == 2
            and info.count
            and f".{name}".endswith(".weight")
        ):
            scales = [name + end for end in SCALE_NAMES if name + end in tensors]
            if len(scales) == 1 and tensors[scales[0]].dtype in SCALE_TYPES:
                found[name] = scales[0]
    used = {*found, *found.values()}
    others = (
        quantised_modules({name: info for name, info in tensors.items() if name not in used})
        if found
        else set()
    )
    return {name: scale for name, scale in found.items() if module_of(name) not in others}


class ScaledModel:
    """A checkpoint with some weights in FP8. Everything else is as the checkpoint has it."""

    def __init__(self, model: Checkpoint, pairs: Mapping[str, str]) -> None:
        self.model, hidden = model, set(pairs.values())
        settings = read_quantisation(model)
        block, powers = find_block(model, settings), settings.get("scale_fmt") == "ue8m0"
        self.tensors = {
            name: self._make_tensor(name, info, pairs[name], block, powers)
            if name in pairs
            else info
            for name, info in model.tensors.items()
            if name not in hidden
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def _make_tensor(
        self, name: str, info: TensorInfo, scale_name: str, block: tuple[int, int], powers: bool
    ) -> ScaledTensor:
        (rows, width), scale = info.shape, self.model.tensors[scale_name]
        if scale.shape in ((), (1,), (1, 1)):
            block = rows, width
        elif scale.shape in ((rows,), (rows, 1)):
            block = 1, width
        grid = -(-rows // block[0]), -(-width // block[1])
        if scale.shape not in ((), (1,), (1, 1), (rows,), grid):
            raise DareError(
                f"{self.model.name!r}: {scale_name!r} is {list(scale.shape)}, and {name!r} of {list(info.shape)} has "
                f"{list(grid)} blocks of {list(block)}",
                "it should have a scale for each block, for each row, or one; check weight_block_size in config.json",
            )
        block = min(block[0], rows), min(block[1], width)
        if grid != (1, 1) and block[0] * width > MAX_GROUP:
            raise DareError(
                f"{self.model.name!r}: a row of blocks of {name!r} has more than {MAX_GROUP:,} elements",
                "no model has such weights; get it from somewhere you trust",
            )
        return ScaledTensor(
            "F32", info.shape, stored=info, scales=Scales(scale_name, scale, block, grid, powers)
        )

    def read(
        self, info: TensorInfo, start: int, count: int, into: NDArray[Any] | memoryview
    ) -> None:
        """Read elements of a tensor, as bytes of its type, into exactly as many bytes."""
        if not isinstance(info, ScaledTensor):
            self.model.read(info, start, count, into)
            return
        stored, values = np.empty(count, np.uint8), np.frombuffer(into, np.float32)
        self.model.read_bytes(stored.data, info.stored, start)
        decode(stored, values)
        width, stop = info.width, start + count
        # The rest of a row, whole rows, and the start of one.
        ends = sorted(
            {start, min(-(-start // width) * width, stop), max(stop // width * width, start), stop}
        )
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            for first, last in itertools.pairwise(ends):
                self._scale(info, values[first - start : last - start], first)

    def _scale(self, info: ScaledTensor, values: NDArray[Any], start: int) -> None:
        """Multiply values by their scales: whole rows, or a part of one."""
        width, scales = info.width, info.scales
        row, column = divmod(start, width)
        part = values.reshape(-1, min(width, len(values)))
        found = widen(read_scales(self.model, scales, row, len(part)), scales.info.dtype).reshape(
            -1, scales.grid[1]
        )
        for rows, factors in spread(found, scales.block, row, len(part), width):
            part[rows] *= (
                factors if factors.shape[-1] == 1 else factors[..., column : column + part.shape[1]]
            )


def read_scales(model: Any, scales: Scales, row: int, rows: int) -> NDArray[np.uint8]:
    """The scales of the blocks that rows of the tensor are in, as bytes."""
    first, last = row // scales.block[0], -(-(row + rows) // scales.block[0])
    item = scales.grid[1] * (scales.info.nbytes // scales.info.count)
    found = np.empty((last - first) * item, np.uint8)
    model.read_bytes(found.data, scales.info, first * item)
    return found


def read_quantisation(model: Checkpoint) -> dict[str, Any]:
    """What a model's configuration says of how it is quantised."""
    if model.folder is None or not (model.folder / CONFIG_FILE).is_file():
        return {}
    config = read_json(
        model.folder / CONFIG_FILE, part_name(model.source, model.folder / CONFIG_FILE)
    )
    tables = [
        table.get("quantization_config")
        for table in (config, config.get("text_config"))
        if isinstance(table, dict)
    ]
    return next((table for table in tables if isinstance(table, dict)), {})


def find_block(model: Checkpoint, settings: Mapping[str, Any]) -> tuple[int, int]:
    """The size of blocks that a model's configuration states, or the usual one."""
    stated = settings.get("weight_block_size") or DEFAULT_BLOCK
    if (
        not isinstance(stated, list | tuple)
        or len(stated) != 2
        or not all(is_count(side, 1) for side in stated)
    ):
        raise DareError(
            f"{model.name!r}: weight_block_size in {CONFIG_FILE} is {clip(repr(stated))}",
            "it should be two sides, like [128, 128]",
        )
    return stated[0], stated[1]
