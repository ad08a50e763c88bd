"""LoRA files: pairs of matrices in one file, by the names of kohya's trainer, diffusers and others.

A module's name says which part of a pipeline it is in, and what it is called there; kohya's files
have underscores for its dots, so that only the base's names tell what is meant. A change is
alpha / rank * (up @ down), where the rank is that of the matrices.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final

import numpy as np

from darelib.core.text import DareError, list_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import ADAPTER_CONFIG, PIPELINE_FILE, Layout, find_weights
from darelib.models.lora import (
    ALPHA,
    INTEGER_ALPHAS,
    OTHER_PARTS,
    PART,
    UNLOAD_HINT,
    LoraAdapter,
    Pair,
    find_transposed,
    make_pair,
    make_product,
    sort_parts,
)
from darelib.models.peft import LoraConfig, match_names, read_settings
from darelib.models.source import Source
from darelib.models.tensor import Tensor
from darelib.models.tensorfile import AGAIN_HINT, peek_header

FOLDER_FILE: Final = "pytorch_lora_weights.safetensors"  # as diffusers saves it
# What may stand before the names of each part of a pipeline, in models and in LoRA files; nothing,
# where a model is that part alone. A folder's name ends with a dot here. "": it is not known which
# part it is. T5 is the second text encoder of Flux, and the third of SD 3 and of kohya's files.
COMPONENTS: Final = {
    "": ("",),
    "unet": ("model.diffusion_model.", "diffusion_model.", "unet.", "transformer.", ""),
    "text_encoder": (
        "cond_stage_model.transformer.",
        "conditioner.embedders.0.transformer.",
        "text_encoders.clip_l.transformer.",
        "text_encoder.",
        "",
    ),
    "text_encoder_2": (
        "conditioner.embedders.1.transformer.",
        "conditioner.embedders.1.model.",
        "text_encoders.clip_g.transformer.",
        "text_encoder_2.",
        "text_encoders.t5xxl.transformer.",
    ),
    "text_encoder_3": ("text_encoders.t5xxl.transformer.", "text_encoder_3.", "text_encoder_2."),
}
# What kohya's trainer and its kin write instead, with underscores for all dots after it.
KOHYA: Final = {
    "lora_unet_": "unet",
    "lora_transformer_": "unet",
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
}
# Which text encoder a directory is by itself, only its name tells.
FIRST_TEXT: Final = "text_encoder"
OTHER_TEXTS: Final = ("text_encoder_2", "text_encoder_3")
# How modules begin where a transformer has diffusers' names, and what becomes of that.
TRANSFORMER_BLOCKS: Final = ("lora_unet_transformer_blocks", "lora_unet_single_transformer_blocks")
TRANSFORMER_KIND: Final = ("lora_unet_", "lora_transformer_")
KOHYA_KEY: Final = re.compile(rf"(?:{'|'.join(KOHYA)})[^.]+\..", re.DOTALL)
# By what stands before a module's name in a LoRA file: the part that it is in.
STARTS: Final = KOHYA | {
    prefix: component
    for component in reversed(COMPONENTS)
    for prefix in filter(None, COMPONENTS[component])
}
WRAPPERS: Final = re.compile(r"base_model\.model\.|lycoris_")  # of models, before all names
TEXT_PARTS: Final = ("text_encoder", "text_encoder_2")
TEXT_MODULES: Final = "text_model."  # how they begin in a text encoder by itself
# All that the names of a LoRA file have in them, where they are not kohya's.
ANY_PART: Final = re.compile(
    "|".join((PART.pattern, r"\.lora_|_lora\d\.|\.diff(_b)?$", *OTHER_PARTS))
)
NOTED_KEY: Final = "lora_adapter_metadata"  # where diffusers notes PEFT's configurations


def find_lora_file(source: Source) -> Layout | None:
    """The file of an adapter; None: the source is something else, or cannot be read."""
    path = source.path
    folder = path if path.is_dir() else None
    if folder:
        has_model = (folder / PIPELINE_FILE).exists() or find_weights(folder)
        path = folder if has_model else folder / FOLDER_FILE
    names, _ = peek_header(path)
    is_lora = any(map(KOHYA_KEY.match, names)) or (
        all(WRAPPERS.match(name) or ANY_PART.search(name) for name in names)
        and any(map(ANY_PART.search, names))
    )
    return Layout((path,), folder) if is_lora else None


class LoraFile(LoraAdapter):
    keeps_metadata = True

    def _find_changes(self, base: Checkpoint) -> dict[str, Tensor]:
        modules = sort_parts(self.tensors, self.name)
        self._configs = self._read_configs(modules)
        targets = self._find_targets(modules, base)
        if any(self._is_unscaled(module, parts) for module, parts in modules.items()):
            self.warnings += (
                f"{self.name} comes without an {ADAPTER_CONFIG}, which says how it is scaled: "
                "alpha = r is assumed",
            )
        names = {id(info): name for name, info in self.tensors.items()}
        changes: dict[str, Tensor] = {}
        for module, parts in modules.items():
            target = targets.get(module)
            if target is None:
                first = next(iter(parts.values()))
                changes[names[id(first)]] = first
                continue
            if target in changes:
                raise DareError(
                    f"the adapter {self.name!r} changes {target!r} twice: see {module!r}",
                    UNLOAD_HINT,
                )
            is_turned = bool(find_transposed(target, self._ways))
            pair = make_pair(module, parts, self.name)
            scale = self._find_scale(module, pair)
            changes[target] = make_product(self, pair, base.tensors[target], scale, is_turned)
        return changes

    def _read_configs(self, modules: Collection[str]) -> dict[str, LoraConfig]:
        """By part of a pipeline, the configurations that diffusers noted."""
        tables = defaultdict[str, dict[str, Any]](lambda: {"peft_type": "LORA"})
        try:
            noted = json.loads(self.files[0].metadata.get(NOTED_KEY, "{}"))
            for key, value in noted.items():
                start, _, setting = key.partition(".")
                tables[start][setting] = value
        except (ValueError, RecursionError, AttributeError):
            raise DareError(
                f"the {NOTED_KEY} in the header of {self.name!r} is no table in JSON", AGAIN_HINT
            ) from None
        self.files[0].metadata.clear()
        names = defaultdict[str, list[str]](list)
        for component, name in map(_split_module, modules):
            names[component].append(name)
        parts = {STARTS.get(f"{start}.", start): table for start, table in tables.items()}
        return {
            part: read_settings(table, self.name).match(names[part], self.name)
            for part, table in parts.items()
            if part in names
        }

    def _is_unscaled(self, module: str, parts: Collection[str]) -> bool:
        """Whether nothing says how a module of PEFT's is scaled."""
        component, _ = _split_module(module)
        is_pefts = bool(WRAPPERS.match(module)) or not component
        return is_pefts and ALPHA not in parts and component not in self._configs

    def _find_targets(self, modules: Collection[str], base: Checkpoint) -> dict[str, str]:
        """By module, of those that the base has: the tensor that it changes."""
        known = _index_names(base.tensors)
        targets: dict[str, str] = {}
        others: dict[str, str] = {}  # by module: what a tensor of a language model may be called
        for module in modules:
            component, name = _split_module(module)
            if component == FIRST_TEXT and base.files[0].path.parent.name in OTHER_TEXTS:
                continue  # by its names, it could be any of them
            searched = [component] if component else COMPONENTS
            keys = [_make_key(each, name) for each in searched]
            found = next((known[key] for key in keys if key in known), [])
            # A tensor may have several names, but what stands before them differs.
            same = [target for prefix, target in found if prefix == found[0][0]]
            if len(same) > 1:
                raise DareError(
                    f"{module!r} of the adapter {self.name!r} may mean several tensors: "
                    f"{list_names(same)}",
                    "give a base with one model of each kind",
                )
            if same:
                targets[module] = same[0]
            elif not component:
                others[module] = f"{name}.weight"
        to_base = match_names(list(others.values()), base.tensors) if others else str
        renamed = {module: to_base(name) for module, name in others.items()}
        targets |= {module: name for module, name in renamed.items() if name in base.tensors}
        if not targets:
            raise DareError(
                f"{base.name!r} has none of the modules that the adapter {self.name!r} changes: "
                f"{list_names(list(modules))}",
                f"the base has {list_names(list(base.tensors))}; take the model that the adapter "
                "was trained on, or convert the adapter to the names of this base",
            )
        return targets

    def _find_scale(self, module: str, pair: Pair) -> float:
        info = pair.alpha
        if info is None:
            component, name = _split_module(module)
            config = self._configs.get(component)
            return config.find_scale(name, pair) if config else 1.0
        integer = INTEGER_ALPHAS.get(info.dtype)
        count = min(info.count, 1)
        raw = info.read_raw(0, info.nbytes if integer and count else 0)
        values = raw.view(integer) if integer else info.read(0, count)
        if info.count != 1 or not np.isfinite(values[0]):
            raise DareError(f"the alpha of {pair.title} is not a finite number", AGAIN_HINT)
        return float(values[0]) / pair.rank


def _split_module(module: str) -> tuple[str, str]:
    """The part of a pipeline that a module of a LoRA file is in, and what it is called there."""
    plain = WRAPPERS.sub("", module, count=1) if WRAPPERS.match(module) else module
    for start, component in STARTS.items():
        if plain.startswith(start):
            return component, plain[len(start) :]
    return "", plain


def _make_key(component: str, module: str) -> tuple[str, str]:
    """What names of one module have in common."""
    plain = module.replace(".", "_")
    # As text encoders are called within CLIP, and by new versions of transformers no longer.
    return component, plain.removeprefix("text_model_") if component in TEXT_PARTS else plain


def _index_names(names: Collection[str]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """By part of a pipeline and module there: the tensors of the base that it may mean, each after
    what stands before the module in its name.
    """
    found = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for name in names:
        plain = name.replace("/", ".", 1)
        if not plain.endswith(".weight"):
            continue
        for component, prefixes in COMPONENTS.items():
            for prefix in prefixes:
                if plain.startswith(prefix):
                    key = _make_key(component, plain[len(prefix) : -len(".weight")])
                    found[key].append((name[: -len(f"{key[1]}.weight")], name))
    return found


def name_modules(modules: Collection[str], folder: str) -> dict[str, str]:
    """What a file of kohya's calls modules. Those of a transformer by diffusers' names have a
    beginning of their own, without which loaders take them for original ones. folder: their base's.
    """
    start = f"{folder}." if folder in (FIRST_TEXT, *OTHER_TEXTS) else ""
    named = {module: _name_module(start + module.replace("/", ".", 1)) for module in modules}
    if any(name.startswith(TRANSFORMER_BLOCKS) for name in named.values()):
        return {module: name.replace(*TRANSFORMER_KIND) for module, name in named.items()}
    return named


def _name_module(module: str) -> str:
    """A text encoder by itself is the only one, or the first."""
    component, name = _split_module(module)
    kinds = {component: kind for kind, component in reversed(KOHYA.items())}
    kind = kinds[component or "unet"]
    if module.startswith(TEXT_MODULES):
        kind = "lora_te_"
    elif module.startswith("conditioner.embedders.0."):
        kind = "lora_te1_"
    if component in TEXT_PARTS and name.startswith("encoder.layers."):
        name = TEXT_MODULES + name  # which new versions of transformers leave out
    return kind + name.replace(".", "_")
