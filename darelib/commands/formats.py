"""`dare.py convert` between the formats of other programs, value for value.

Adapters: PEFT's to the names of kohya's trainer, and LoRA files to PEFT's. Diffusion models: a
directory of diffusers as one file with the names of original ones, and back, into the form of a
directory that is given.
"""

import json
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.commands.options import Flags, MergerClass, make_merger, merge_to_end
from darelib.commands.summary import MergeReport
from darelib.core.text import ConfigError, DareError, list_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import ADAPTER_CONFIG, ADAPTER_FILE, STATED_KEY, part_name
from darelib.models.inputs import open_models
from darelib.models.lora import ALPHA
from darelib.models.lorafile import find_lora_file, name_modules
from darelib.models.peft import PREFIX, describe_lora, find_adapter, read_settings, sort_keys
from darelib.models.source import Source
from darelib.models.tensorfile import PICKLE_SUFFIXES, TensorInfo, convert_hint, read_json
from darelib.models.translation import count_used, find_homes, name_originally
from darelib.output.directory import card_name, find_side_files
from darelib.output.scratch import write_new_folder
from darelib.output.tensors import Contents, encode_file, list_contents, write_tensors

DOWN: Final = "lora_down.weight"
UP: Final = "lora_up.weight"
NOT_LOADED: Final = ("first_stage_model.", "vae/")  # no program has LoRAs of a VAE
MAIN: Final = ("unet/", "transformer/")  # without which a file is of no use

# --- adapters ------------------------------------------------------------------------------------


def is_adapter(old: Source) -> bool:
    return find_adapter(old) is not None or find_lora_file(old) is not None


def convert_adapter(old: Source, new: Path, base: Source | None) -> int:
    """Write an adapter in the other format. Gives how many tensors it has."""
    layout = find_adapter(old)
    if layout:
        with closing(Checkpoint(old, layout)) as adapter:
            contents = _name_for_kohya(adapter)
            write_tensors(new, contents, layout.files)
            return len(contents)
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
        contents, config = _name_for_peft(adapter, model)
        text = json.dumps(config, indent=2).encode()
        write_new_folder(new, {ADAPTER_FILE: encode_file(contents), ADAPTER_CONFIG: [text]})
        return len(contents)


def _name_for_kohya(adapter: Checkpoint) -> Contents:
    path = adapter.files[0].path.with_name(ADAPTER_CONFIG)
    config = read_json(path, part_name(adapter.source, path))
    settings = read_settings(config, adapter.name)
    pairs, whole = sort_keys(adapter.tensors, adapter.name)
    settings = settings.match(list(pairs), adapter.name)
    odd = [module for module, pair in pairs.items() if pair.is_embedding or pair.magnitudes]
    odd += [*whole, *(module for module in pairs if module.startswith(NOT_LOADED))]
    if odd or settings.fan_in_fan_out or not pairs:
        which = list_names(odd) if odd else "layers of GPT-2, or nothing"
        raise DareError(
            f"{adapter.name!r} holds {which}, which has no place in a LoRA file of kohya's",
            "merge it as it is",
        )
    contents: Contents = {}
    folder = Path(str(config.get(STATED_KEY))).name
    for module, name in name_modules(pairs, folder).items():
        if f"{name}.{DOWN}" in contents:
            raise DareError(
                f"two modules of {adapter.name!r} are {name!r} with underscores for dots",
                "merge it as it is",
            )
        pair = pairs[module]
        alpha = _find_alpha(settings.find_scale(module, pair), pair.rank)
        dtype, stored = ("F32", "<f4") if float(np.float32(alpha)) == alpha else ("F64", "<f8")
        number = np.array(alpha, stored).tobytes()
        contents |= list_contents(adapter, {f"{name}.{DOWN}": pair.a, f"{name}.{UP}": pair.b})
        contents[f"{name}.{ALPHA}"] = (TensorInfo(dtype, ()), [number])
    return contents


def _name_for_peft(adapter: Checkpoint, base: Checkpoint) -> tuple[Contents, dict[str, Any]]:
    """The tensors by the names of PEFT, and its configuration."""
    tensors: dict[str, TensorInfo] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    if adapter.unused:
        raise DareError(
            f"{adapter.name!r} changes what {base.name!r} lacks: {list_names(adapter.unused)}",
            "give the model that it was trained on",
        )
    for name, info in adapter.tensors.items():
        shape = base.tensors[name].shape
        product = info.encoding.product
        if not product or product.transposed or product.magnitudes:
            raise DareError(
                f"{name!r} of {adapter.name!r} is DoRA, of a layer of GPT-2, or has other names "
                "in this base, and the other format cannot hold that",
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
        a = replace(product.right, shape=(product.rank, *shape[1:]))
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        b = replace(product.left, shape=(shape[0], product.rank, *points))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b
        ranks[module] = product.rank
        alphas[module] = _find_alpha(product.scale, product.rank)
    config = describe_lora(card_name(base.source), ranks, alphas)
    return list_contents(adapter, tensors), config


def _find_alpha(scale: float, rank: int) -> float:
    """What through the rank is the scale, as short as it was where that is possible."""
    alpha = scale * rank
    short = float(np.float32(alpha))
    return short if short / rank == scale else alpha


# --- diffusion models ----------------------------------------------------------------------------


def is_diffusion(old: Source) -> bool:
    if old.path.exists():  # else it may be a name on the Hub
        with suppress(DareError), open_models([old]) as [model]:
            return bool(find_homes(model.tensors))
    return False


def convert_to_base(flags: Flags, merger_class: MergerClass) -> MergeReport:
    """Write a model in the form of another, which need not be its base: the merge of one model, of
    which nothing is dropped.
    """
    wanted = {key: value for key, value in flags.items() if key not in ("old", "new")}
    wanted |= {"merge": [flags["old"]], "output": flags["new"], "drop_rate": 0.0, "any_base": True}
    with open_models([Source.of(flags["base"])]) as [form]:
        if form.folder is None and not flags["new"].endswith(".safetensors"):
            raise ConfigError(
                f"{form.name!r} is one file, and so is what has its form",
                "name a .safetensors file, or give a directory of diffusers as --base",
            )
        if form.components:
            wanted["components"] = form.components
    merger, _ = make_merger(wanted, merger_class)
    return merge_to_end(merger, flags["new"], "nothing was written", force="force" in flags)


def convert_to_original(old: Source, new: Path) -> tuple[int, list[str]]:
    """Write a model of diffusers as one file. Gives how many tensors it has, and what has no place
    in it.
    """
    with open_models([old]) as [model]:
        tensors = name_originally(model.tensors, old)
        if tensors.keys() <= model.tensors.keys():
            raise ConfigError(
                f"{old.name!r} has the names of original files already",
                "a directory of diffusers also needs settings: give one of the same kind as "
                "--base MODEL, and NEW gets these weights and its settings",
            )
        used = count_used(tensors.values())
        left_out = [name for name, info in model.tensors.items() if id(info) not in used]
        side_files = find_side_files(model.folder)
        pickles = [name for name in side_files if name.endswith(PICKLE_SUFFIXES)]
        for name in pickles:
            if name.startswith("vae/"):
                raise DareError(
                    f"{name!r} of {old.name!r} is a PyTorch pickle, not a safetensors file",
                    convert_hint(side_files[name]),
                )
        left_out += pickles
        lost = [name for name in left_out if name.startswith(MAIN)]
        if lost:
            raise DareError(
                f"no original name is known for {lost[0]!r} of {old.name!r}",
                "SD 1 to 3.5, SDXL and Flux are known, where their tensors are whole",
            )
        write_tensors(new, list_contents(model, tensors), [file.path for file in model.files])
    return len(tensors), left_out
