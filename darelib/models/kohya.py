"""LoRA files of kohya's trainer and its kin: of diffusion models, with a scale of its own for each pair of matrices.

A pair is named after its module with underscores for dots, so that only the base's names tell what is meant. A change
is alpha / rank * (up @ down), where the rank is that of the matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from darelib.core.formats import FORMATS, widen
from darelib.core.text import DareError, count_of, list_names
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint, Layout
from darelib.models.lora import LoraAdapter, LowRankTensor
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, MAX_HEADER, TensorInfo, open_regular

# What stands before a module's name in such a file, and what may stand before it in a base.
PREFIXES: Final = {
    "lora_unet_": ("", "model.diffusion_model.", "unet.", "diffusion_model."),
    "lora_te_": ("", "cond_stage_model.transformer.", "text_encoder."),
    "lora_te1_": ("conditioner.embedders.0.transformer.", "text_encoder."),
    "lora_te2_": ("conditioner.embedders.1.transformer.", "text_encoder_2."),
}
# A tensor of such a file, in a header: a key with an object behind it, and not a word in the metadata.
KEY: Final = re.compile(rb'[{,]\s*"lora_(?:unet|te\d*)_[^".]+\.[^"]+"\s*:\s*\{')
DOWN: Final = "lora_down.weight"
UP: Final = "lora_up.weight"
ALPHA: Final = "alpha"
# How the tensors begin that make an adapter something else than a product of two matrices, and what people call it.
OTHER_PARTS: Final = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "dora_scale": "DoRA",
    "lora_mid": "a LoCon of three matrices",
}
BAKE_HINT: Final = (
    "merge it into its base with the program that made it, and use the result as a model"
)
INTEGER_ALPHAS: Final = {
    "I64": "<i8",
    "I32": "<i4",
}  # what torch.tensor makes of an alpha without a decimal point


def find_kohya(source: Source) -> Layout | None:
    """The file of an adapter; None: the source is something else, or cannot be read, which its reader explains."""
    header = b""
    with suppress(OSError), open_regular(source.path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length if length <= MAX_HEADER else 0)
    return Layout((source.path,)) if KEY.search(header) else None


class KohyaAdapter(LoraAdapter):
    """A LoRA file, open for reading."""

    def _find_changes(self, base: Checkpoint) -> dict[str, TensorInfo]:
        modules: dict[str, dict[str, TensorInfo]] = {}
        for name, info in self.tensors.items():
            module, _, part = name.partition(".")
            self._check_part(name, part, info)
            modules.setdefault(module, {})[part] = info
        places = self._find_places(list(modules), base)
        found: dict[str, TensorInfo] = {}
        for module, parts in modules.items():
            name = places[module]
            if name in found:
                raise DareError(
                    f"the adapter {self.name!r} changes {name!r} twice: see {module!r}", BAKE_HINT
                )
            found[name] = self._make_tensor(module, parts, base.tensors[name])
        return found

    def _check_part(self, name: str, part: str, info: TensorInfo) -> None:
        """Refuse what is not a part of a plain LoRA."""
        for start, words in OTHER_PARTS.items():
            if part.startswith(start):
                raise DareError(
                    f"the adapter {self.name!r} is {words}, which is not a product of two matrices: see {name!r}",
                    BAKE_HINT,
                )
        if part not in (DOWN, UP, ALPHA):
            raise DareError(
                f"the adapter {self.name!r} holds {name!r}, which is not a part of a plain LoRA",
                BAKE_HINT,
            )
        if info.dtype not in FORMATS and not (part == ALPHA and info.dtype in INTEGER_ALPHAS):
            raise DareError(
                f"tensor {name!r} of the adapter {self.name!r} is {info.dtype}", QUANTISE_HINT
            )

    def _find_places(self, modules: Sequence[str], base: Checkpoint) -> dict[str, str]:
        """By module: the tensor of the base that it changes."""
        places: dict[str, list[str]] = {}
        for name in base.tensors:
            for kind, before in PREFIXES.items() if name.endswith(".weight") else ():
                for prefix in before:
                    if name.startswith(prefix):
                        module = kind + name[len(prefix) :].removesuffix(".weight").replace(
                            ".", "_"
                        )
                        places.setdefault(module, []).append(name)
        homeless = [module for module in modules if module not in places]
        if homeless:
            count = f"{len(homeless):,} of {count_of(len(modules), 'module')}"
            raise DareError(
                f"{base.name!r} has no tensors for {count} of the adapter {self.name!r}: {list_names(homeless)}",
                f"the base has {list_names(_list_alike(homeless[0], base))}; take a base whose names, with underscores "
                "for dots, are the adapter's (for names like down_blocks, a model in the format of diffusers), or "
                "convert the adapter to the names of this base",
            )
        for module in modules:
            if len(places[module]) > 1:
                raise DareError(
                    f"{module!r} of the adapter {self.name!r} may mean several tensors: {list_names(places[module])}",
                    "give a base with one model of each kind",
                )
        return {module: places[module][0] for module in modules}

    def _make_tensor(
        self, module: str, parts: Mapping[str, TensorInfo], base: TensorInfo
    ) -> LowRankTensor:
        down, up = parts.get(DOWN), parts.get(UP)
        if down is None or up is None:
            raise DareError(
                f"{self.name!r} has no pair of matrices up and down for {module!r}", AGAIN_HINT
            )
        rank, outputs = (*down.shape, 0)[0], (*up.shape, 0)[0]
        # A convolution's kernel is in the first matrix that it applies; the second one's is a single point.
        if (
            len(down.shape) < 2
            or down.count == 0
            or up.count != outputs * rank
            or up.shape[1:2] != (rank,)
        ):
            raise DareError(
                f"the matrices {list(down.shape)} and {list(up.shape)} of {module!r} in {self.name!r} are no pair",
                AGAIN_HINT,
            )
        shape = (outputs, *down.shape[1:])
        return LowRankTensor(
            dtype="F64" if base.dtype == "F64" else "F32",
            # A convolution of a single point is a matrix, and may be stored as either.
            shape=base.shape if _strip_ones(shape) == _strip_ones(base.shape) else shape,
            is_delta=True,
            left=up,
            right=down,
            rank=rank,
            columns=down.count // rank,
            transposed=False,
            scale=self._read_alpha(module, parts[ALPHA]) / rank if ALPHA in parts else 1.0,
            whole=None,
        )

    def _read_alpha(self, module: str, info: TensorInfo) -> float:
        raw = np.empty(info.nbytes if info.count == 1 else 0, np.uint8)
        self.read_bytes(raw.data, info, 0)
        values = (
            raw.view(INTEGER_ALPHAS[info.dtype])
            if info.dtype in INTEGER_ALPHAS
            else widen(raw, info.dtype)
        )
        if not values.size or not np.isfinite(values[0]):
            raise DareError(
                f"the alpha of {module!r} in {self.name!r} is not a finite number", AGAIN_HINT
            )
        return float(values[0])


def _strip_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the sides of a kernel that is a single point."""
    return shape[:2] if set(shape[2:]) <= {1} else shape


def _list_alike(module: str, base: Checkpoint) -> list[str]:
    """The base's tensors in the part of the model that a module is of, if it is known; else all."""
    before = next((prefixes for kind, prefixes in PREFIXES.items() if module.startswith(kind)), ())
    return [name for name in base.tensors if name.startswith(tuple(filter(None, before)))] or list(
        base.tensors
    )
