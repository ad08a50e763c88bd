"""LoRA files of kohya's trainer and its kin, of diffusion models: each pair has its own scale.

A pair is named after its module with underscores for dots, so that only the base's names tell what
is meant. A change is alpha / rank * (up @ down), where the rank is that of the matrices.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from darelib.core.formats import FORMATS, widen
from darelib.core.text import DareError, count_of, list_names
from darelib.models.checkpoint import QUANTISE_HINT, Checkpoint
from darelib.models.directories import Layout
from darelib.models.lora import LoraAdapter, LowRankTensor
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, TensorInfo, peek_header

# What stands before a module's name in such a file, and what may stand before it in a base.
PREFIXES: Final = {
    "lora_unet_": ("", "model.diffusion_model.", "unet.", "diffusion_model."),
    "lora_te_": ("", "cond_stage_model.transformer.", "text_encoder."),
    "lora_te1_": ("conditioner.embedders.0.transformer.", "text_encoder."),
    "lora_te2_": ("conditioner.embedders.1.transformer.", "text_encoder_2."),
}
KEY: Final = re.compile(r"lora_(?:unet|te\d*)_[^.]+\..", re.DOTALL)  # a tensor of such a file
TEXT_MODULES: Final = "text_model."  # how they begin in a text encoder by itself
DOWN: Final = "lora_down.weight"
UP: Final = "lora_up.weight"
ALPHA: Final = "alpha"
# How the tensors begin that make an adapter something else than a product of two matrices, and
# what people call it.
OTHER_PARTS: Final = {
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "dora_scale": "DoRA",
    "lora_mid": "a LoCon of three matrices",
}
BAKE_HINT: Final = (
    "merge it into its base with the program that made it, and use the result as a model"
)
# What torch.tensor makes of an alpha without a decimal point.
INTEGER_ALPHAS: Final = {"I64": "<i8", "I32": "<i4"}


def find_kohya(source: Source) -> Layout | None:
    """The file of an adapter; None: the source is something else, or cannot be read."""
    names, _ = peek_header(source.path)
    return Layout((source.path,)) if any(map(KEY.match, names)) else None


class KohyaAdapter(LoraAdapter):
    """A LoRA file, open for reading."""

    def _find_changes(self, base: Checkpoint) -> dict[str, TensorInfo]:
        modules = defaultdict[str, dict[str, TensorInfo]](dict)
        for name, info in self.tensors.items():
            module, _, part = name.partition(".")
            self._check_part(name, part, info)
            modules[module][part] = info
        targets = self._find_targets(list(modules), base)
        changes: dict[str, TensorInfo] = {}
        for module, parts in modules.items():
            name = targets[module]
            if name in changes:
                raise DareError(
                    f"the adapter {self.name!r} changes {name!r} twice: see {module!r}", BAKE_HINT
                )
            changes[name] = self._make_tensor(module, parts, base.tensors[name])
        return changes

    def _check_part(self, name: str, part: str, info: TensorInfo) -> None:
        """Refuse what is not a part of a plain LoRA."""
        for start, words in OTHER_PARTS.items():
            if part.startswith(start):
                raise DareError(
                    f"the adapter {self.name!r} is {words}, which is not a product of two "
                    f"matrices: see {name!r}",
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

    def _find_targets(self, modules: Sequence[str], base: Checkpoint) -> dict[str, str]:
        """By module: the tensor of the base that it changes."""
        targets = defaultdict[str, list[str]](list)
        for name in base.tensors:
            for module in _list_modules(name):
                targets[module].append(name)
        unknown = [module for module in modules if module not in targets]
        if unknown:
            raise DareError(
                f"{base.name!r} has no tensors for {len(unknown):,} of "
                f"{count_of(len(modules), 'module')} of the adapter {self.name!r}: "
                f"{list_names(unknown)}",
                f"the base has {list_names(_list_alike(unknown[0], base))}; take a base whose "
                "names, with underscores for dots, are the adapter's (for names like down_blocks, "
                "a model in the format of diffusers), or convert the adapter to the names of this "
                "base",
            )
        for module in modules:
            if len(targets[module]) > 1:
                raise DareError(
                    f"{module!r} of the adapter {self.name!r} may mean several tensors: "
                    f"{list_names(targets[module])}",
                    "give a base with one model of each kind",
                )
        return {module: targets[module][0] for module in modules}

    def _make_tensor(
        self, module: str, parts: Mapping[str, TensorInfo], base: TensorInfo
    ) -> LowRankTensor:
        if not {DOWN, UP} <= parts.keys():
            raise DareError(
                f"{self.name!r} has no pair of matrices up and down for {module!r}", AGAIN_HINT
            )
        down = parts[DOWN]
        up = parts[UP]
        rank = down.shape[0] if down.shape else 0
        # A convolution's kernel is in the first matrix that it applies; the second one's is a
        # single point.
        is_pair = len(down.shape) > 1 and up.shape[1:2] == (rank,)
        if not is_pair or down.count == 0 or up.count != up.shape[0] * rank:
            raise DareError(
                f"the matrices {list(down.shape)} and {list(up.shape)} of {module!r} in "
                f"{self.name!r} are no pair",
                AGAIN_HINT,
            )
        shape = (up.shape[0], *down.shape[1:])
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
        )

    def _read_alpha(self, module: str, info: TensorInfo) -> float:
        raw = np.empty(info.nbytes if info.count == 1 else 0, np.uint8)
        self.read_bytes(raw.data, info, 0)
        integer = INTEGER_ALPHAS.get(info.dtype)
        values = raw.view(integer) if integer else widen(raw, info.dtype)
        if not values.size or not np.isfinite(values[0]):
            raise DareError(
                f"the alpha of {module!r} in {self.name!r} is not a finite number", AGAIN_HINT
            )
        return float(values[0])


def _list_modules(name: str) -> Iterator[str]:
    """What a tensor of the base may be called in such a file."""
    for kind, prefixes in PREFIXES.items():
        for prefix in prefixes:
            if name.startswith(prefix) and name.endswith(".weight"):
                yield kind + name[len(prefix) : -len(".weight")].replace(".", "_")


def name_module(module: str) -> str:
    """What such a file calls a module. A text encoder by itself is the only one."""
    known = [
        (prefix, kind)
        for kind, prefixes in PREFIXES.items()
        for prefix in prefixes
        if module.startswith(prefix)
    ]
    prefix, kind = max(known, key=lambda pair: len(pair[0]))
    if module.startswith(TEXT_MODULES):
        kind = "lora_te_"
    return kind + module[len(prefix) :].replace(".", "_")


def _strip_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the sides of a kernel that is a single point."""
    return shape[:2] if set(shape[2:]) <= {1} else shape


def _list_alike(module: str, base: Checkpoint) -> list[str]:
    """The base's tensors in the part of the model that a module is of, if it is known; else all."""
    prefixes = PREFIXES.get(module[: module.find("_", len("lora_")) + 1], ())
    starts = tuple(filter(None, prefixes))
    return [name for name in base.tensors if name.startswith(starts)] or list(base.tensors)
