"""`dare.py convert` of PyTorch pickles, without running what is in them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from darelib.core.text import ConfigError, DareError, install_hint
from darelib.models.source import Source
from darelib.models.tensorfile import (
    AGAIN_HINT,
    TensorInfo,
    explain_os_error,
    open_regular,
    peek_header,
    read_json,
)
from darelib.output.tensors import Contents, write_tensors

if TYPE_CHECKING:
    import torch

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


def describe(name: str, tensor: torch.Tensor) -> TensorInfo:
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
    return TensorInfo(dtype, tuple(tensor.shape))


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
