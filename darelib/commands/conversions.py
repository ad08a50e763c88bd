"""`dare.py convert` between the formats of other programs, value for value.

Adapters: PEFT's to the names of kohya's trainer, and LoRA files to PEFT's. Diffusion models: a
directory of diffusers as one file with the names of original ones, and back, into the form of a
directory that is given. PyTorch's pickles, without running what is in them.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from darelib.commands.options import Flags, MergerClass, make_merger, merge_to_end
from darelib.commands.summary import MergeReport
from darelib.core.text import ConfigError, DareError, install_hint, list_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import ADAPTER_CONFIG, ADAPTER_FILE, STATED_KEY, part_name
from darelib.models.forms import Entry
from darelib.models.inputs import open_models
from darelib.models.lora import ALPHA
from darelib.models.lorafile import find_lora_file, name_modules
from darelib.models.peft import PREFIX, describe_lora, find_adapter, read_settings, sort_keys
from darelib.models.source import Source
from darelib.models.tensor import Tensor
from darelib.models.tensorfile import (
    AGAIN_HINT,
    PICKLE_SUFFIXES,
    convert_hint,
    explain_os_error,
    open_regular,
    peek_header,
    read_json,
)
from darelib.models.translation import count_used, find_homes, name_originally
from darelib.output.directory import card_name, find_side_files
from darelib.output.new_files import (
    Contents,
    encode_file,
    list_contents,
    write_new_folder,
    write_tensors,
)

if TYPE_CHECKING:
    import torch

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
        contents |= list_contents({f"{name}.{DOWN}": pair.a, f"{name}.{UP}": pair.b})
        contents[f"{name}.{ALPHA}"] = (Entry(dtype, ()), [number])
    return contents


def _name_for_peft(adapter: Checkpoint, base: Checkpoint) -> tuple[Contents, dict[str, Any]]:
    """The tensors by the names of PEFT, and its configuration."""
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    if adapter.unused:
        raise DareError(
            f"{adapter.name!r} changes what {base.name!r} lacks: {list_names(adapter.unused)}",
            "give the model that it was trained on",
        )
    for name, info in adapter.tensors.items():
        shape = base.tensors[name].shape
        product = info.product
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
    return list_contents(tensors), config


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
        write_tensors(new, list_contents(tensors), [file.path for file in model.files])
    return len(tensors), left_out


# Where training scripts put the weights, beside optimizer states and counters.
WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
MAX_DEPTH: Final = 4  # of such tables in each other
# What a directory of transformers' time before safetensors holds.
PICKLE_FILES: Final = ("pytorch_model.bin.index.json", "pytorch_model.bin")
PIECE_BYTES: Final = 1 << 24  # of a tensor that must be copied, the bytes that are copied at a time
STORED_TYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
SAVE_HINT: Final = (
    "where it was made, load it and save the weights alone: torch.save(model.state_dict(), FILE)"
)


def convert_pickles(old: Source, new: Path) -> tuple[int, list[str]]:
    """Write the tensors of a pickled file, or of a directory of them, as one file. Gives how many
    there are, and what is no tensor.
    """
    contents: Contents = {}
    left_out: list[str] = []
    paths = find_pickles(old.path)
    for path in paths:
        for name, value in find_weights(load_pickle(path)).items():
            if hasattr(value, "untyped_storage"):
                contents[str(name)] = (describe(str(name), value), tensor_bytes(value))
            else:
                left_out.append(str(name))
    if not contents:
        raise DareError(
            f"{old.name!r} holds no table of tensors",
            f"its weights should be under one of {', '.join(WRAPPERS)}; of a whole module, save "
            "the state_dict()",
        )
    write_tensors(new, contents, paths)
    return len(contents), left_out


def find_pickles(path: Path) -> list[Path]:
    """The files of a model: itself, or what its directory or its index names."""
    if peek_header(path) != ((), {}):  # whatever it is called
        raise ConfigError(f"{str(path)!r} is safetensors already", "merge it as it is")
    if path.is_dir():
        inside = [path / name for name in PICKLE_FILES if (path / name).exists()]
        if not inside:
            raise DareError(
                f"{str(path)!r} has neither of {', '.join(PICKLE_FILES)}",
                "name the file to convert; safetensors files need no conversion",
            )
        path = inside[0]
    if path.suffix != ".json":
        return [path]
    weight_map = read_json(path, path.name).get("weight_map")
    if not isinstance(weight_map, dict):
        raise DareError(f"{str(path)!r} is JSON without a weight_map", "name the file to convert")
    return [path.parent / Path(name).name for name in sorted(set(map(str, weight_map.values())))]


def load_pickle(path: Path) -> Any:
    """What a pickle holds: tensors as views of the file, and nothing that is not plain data."""
    try:
        import torch
    except ModuleNotFoundError:
        raise DareError("to convert pickles, torch is needed", install_hint("torch")) from None

    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What torch saved before 1.6 is no archive, and cannot be mapped.
            zipped = zipfile.is_zipfile(file)
            if zipped and any(each.compress_type for each in zipfile.ZipFile(file).infolist()):
                raise DareError(f"{str(path)!r} is compressed", "save it with torch.save")
            file.seek(0)
            # By its suffix, torch would take a path for a safetensors file.
            mapped = zipped and path.suffix != ".safetensors"
            return torch.load(
                path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
            )
    except DareError:
        raise
    except OSError as error:
        raise explain_os_error(error, str(path), "give the file to convert first") from None
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = named[1] if named else "more than plain data"
        raise DareError(
            f"{str(path)!r} holds {what}, which could run any code, so it is not loaded", SAVE_HINT
        ) from None
    except Exception:  # torch raises all kinds of them for damaged files
        raise DareError(f"{str(path)!r} is no PyTorch file, or a damaged one", AGAIN_HINT) from None


def find_weights(content: Any) -> Mapping[Any, Any]:
    """The entries of a state dict, wherever in the content it is."""
    table: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    for _ in range(MAX_DEPTH):
        inside = (table[key] for key in WRAPPERS if isinstance(table.get(key), Mapping))
        table = next(inside, table)
    return table


def describe(name: str, tensor: torch.Tensor) -> Entry:
    """What a safetensors file says of a tensor; those that share values each have their own."""
    if name == "__metadata__" or not name.isprintable():
        raise DareError(f"a tensor is called {name!r}", "safetensors files have no such names")
    dtype = STORED_TYPES.get(str(tensor.dtype).removeprefix("torch."))
    is_plain = str(tensor.layout) == "torch.strided" and not tensor.is_quantized
    if dtype is None or not is_plain or tensor.is_meta:
        raise DareError(
            f"tensor {name!r} is {tensor.dtype} ({tensor.layout})",
            "safetensors files have no such type",
        )
    return Entry(dtype, tuple(tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor; of one that must be copied, as it is spread or repeats, in pieces."""
    import torch

    if tensor.is_contiguous() or tensor.nbytes <= PIECE_BYTES:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().data
        return
    axis = next(axis for axis, size in enumerate(tensor.shape) if size > 1)
    for half in tensor.chunk(2, axis):
        yield from tensor_bytes(half)
