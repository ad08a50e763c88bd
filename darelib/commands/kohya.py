"""`dare.py convert` of adapters: PEFT's to the names of kohya's trainer, and LoRA files to PEFT's,
value for value.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from darelib.core.text import ConfigError, DareError, list_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import ADAPTER_CONFIG, ADAPTER_FILE, Layout, part_name
from darelib.models.inputs import open_models
from darelib.models.lora import LowRankTensor
from darelib.models.lorafile import ALPHA, DOWN, UP, find_lora_file, name_modules
from darelib.models.peft import describe_lora, find_adapter, read_settings, sort_keys
from darelib.models.source import Source
from darelib.models.tensorfile import TensorInfo, header_bytes, read_json
from darelib.output.directory import card_name
from darelib.output.scratch import write_new_file, write_new_folder

# By name: a tensor, and its bytes; where there are none, they are those that it has in the old
# file.
Parts: TypeAlias = dict[str, tuple[TensorInfo, bytes]]

PAIR: Final = ("lora_A", "lora_B")
NOT_LOADED: Final = ("first_stage_model.", "vae/")  # no program has LoRAs of a VAE


def is_adapter(old: Source) -> bool:
    return find_adapter(old) is not None or find_lora_file(old) is not None


def convert_adapter(old: Source, new: Path, base: Source | None) -> int:
    """Write an adapter in the other format. Gives how many tensors it has."""
    layout = find_adapter(old)
    if layout:
        return _convert_to_kohya(old, layout, new)
    if new.suffix == ".safetensors":
        raise ConfigError(
            f"{old.name!r} is a LoRA file, and becomes a directory of PEFT's",
            f"give the name of a directory, like {new.stem}",
        )
    if base is None:
        raise ConfigError(
            f"only the base of {old.name!r} tells which tensors its names mean",
            "give --base MODEL",
        )
    with open_models([base, old]) as [model, adapter]:
        parts, config = _name_for_peft(adapter, model)
        text = json.dumps(config, indent=2).encode()
        files = {ADAPTER_FILE: encode_file(adapter, parts), ADAPTER_CONFIG: iter([text])}
        write_new_folder(new, files)
    return len(parts)


def _convert_to_kohya(old: Source, layout: Layout, new: Path) -> int:
    if new.suffix != ".safetensors":
        raise ConfigError(
            f"{old.name!r} is an adapter of PEFT's, and becomes a file of kohya's",
            f"give the name of a file, like {new.name}.safetensors",
        )
    with closing(Checkpoint(old, layout)) as adapter:
        if new.exists() and new.samefile(adapter.files[0].path):
            raise ConfigError(f"{str(new)!r} is the input", "choose another name")
        parts = _name_for_kohya(adapter)
        write_new_file(new, encode_file(adapter, parts))
    return len(parts)


def _name_for_kohya(adapter: Checkpoint) -> Parts:
    path = adapter.files[0].path.with_name(ADAPTER_CONFIG)
    settings = read_settings(read_json(path, part_name(adapter.source, path)), adapter.name)
    pairs, whole = sort_keys(adapter.tensors, adapter.name, settings.use_dora)
    settings = settings.match(list(pairs), adapter.name)
    odd = [*whole, *(module for module, pair in pairs.items() if {*pair} != {*PAIR})]
    odd += [module for module in pairs if module.startswith(NOT_LOADED)]
    if odd or settings.fan_in_fan_out or not pairs:
        which = repr(odd[0]) if odd else "layers of GPT-2" if pairs else "nothing"
        raise DareError(
            f"{adapter.name!r} holds {which}, which has no place in a LoRA file of kohya's",
            "merge it as it is",
        )
    parts: Parts = {}
    names = name_modules(pairs)
    for module, pair in pairs.items():
        name = names[module]
        rank = settings.rank_pattern.get(module, settings.r)
        a, b = (pair[part] for part in PAIR)
        is_pair = len(a.shape) == len(b.shape) and a.shape[:1] == b.shape[1:2] == (rank,)
        if not is_pair or f"{name}.{DOWN}" in parts:
            raise DareError(
                f"{module!r} of {adapter.name!r} is not of rank {rank}, or another module has its "
                "name with underscores for dots",
                "save the adapter again",
            )
        alpha = _find_alpha(settings.scale(module, rank), rank)
        dtype, stored = ("F32", "<f4") if float(np.float32(alpha)) == alpha else ("F64", "<f8")
        parts[f"{name}.{DOWN}"] = (a, b"")
        parts[f"{name}.{UP}"] = (b, b"")
        parts[f"{name}.{ALPHA}"] = (TensorInfo(dtype, ()), np.array(alpha, stored).tobytes())
    return parts


def _name_for_peft(adapter: Checkpoint, base: Checkpoint) -> tuple[Parts, dict[str, Any]]:
    """The tensors by the names of PEFT, and its configuration."""
    parts: Parts = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    if adapter.unused:
        raise DareError(
            f"{adapter.name!r} changes what {base.name!r} lacks: {list_names(adapter.unused)}",
            "give the model that it was trained on",
        )
    for name, info in adapter.tensors.items():
        shape = base.tensors[name].shape
        if not isinstance(info, LowRankTensor) or info.transposed or info.magnitudes:
            raise DareError(
                f"{name!r} of {adapter.name!r} is DoRA, of a layer of GPT-2, or has other names "
                "in this base, for which there is no place in what it would become",
                "merge it as it is",
            )
        if info.shape != shape:
            raise DareError(
                f"{name!r} is {list(info.shape)} in {adapter.name!r} and {list(shape)} in "
                f"{base.name!r}",
                "give the model that it was trained on",
            )
        module = name.removesuffix(".weight")
        points = [1] * (len(shape) - 2)
        a = replace(info.right, shape=(info.rank, *shape[1:]))
        b = replace(info.left, shape=(shape[0], info.rank, *points))
        for part, stored in zip(PAIR, (a, b), strict=True):
            parts[f"base_model.model.{module}.{part}.weight"] = (stored, b"")
        ranks[module] = info.rank
        alphas[module] = _find_alpha(info.scale, info.rank)
    return parts, describe_lora(card_name(base.source), ranks, alphas)


def _find_alpha(scale: float, rank: int) -> float:
    """What through the rank is the scale, as short as it was where that is possible."""
    alpha = scale * rank
    short = float(np.float32(alpha))
    return short if short / rank == scale else alpha


def encode_file(model: Checkpoint, parts: Parts) -> Iterator[bytes | memoryview]:
    """A safetensors file, tensor by tensor."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for name, (info, _) in parts.items():
        infos[name] = TensorInfo(info.dtype, info.shape, offset)
        offset += info.nbytes
    yield header_bytes(infos, {"format": "pt"})
    for info, made in parts.values():
        raw = bytearray(made or info.nbytes)
        if not made:
            model.read(info, 0, info.count, np.frombuffer(raw, np.uint8))
        yield memoryview(raw)
