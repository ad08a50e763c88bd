"""`dare.py convert`: PyTorch pickles as safetensors files, without running what is in them."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from darelib.core.text import (
    ConfigError,
    DareError,
    count_of,
    human,
    install_hint,
    list_names,
    printable,
)
from darelib.models.jsonfile import read_json
from darelib.models.tensorfile import TensorInfo, header_bytes, open_regular
from darelib.output.newfile import write_new_file

if TYPE_CHECKING:
    import torch

# Where training scripts put the weights, beside optimizer states and counters.
WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
MAX_DEPTH: Final = 4  # of such tables in each other
# What a directory of transformers' time before safetensors holds.
PICKLE_FILE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
STORED_TYPES: Final = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
UNSAFE_HINT: Final = "load it where it was made, and save only its state_dict with torch.save"


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. Prints as a line; as_dict gives plain data."""

    output: str
    tensors: int
    bytes_written: int
    left_out: tuple[str, ...]  # entries that are no tensors
    seconds: float

    @property
    def warnings(self) -> list[str]:
        return (
            [f"left out what is not a tensor: {list_names(self.left_out)}"] if self.left_out else []
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        tensors = count_of(self.tensors, "tensor")
        return f"wrote {printable(self.output)}: {tensors}, {human(self.bytes_written)}, in {self.seconds:.2f} s"


def add_options(add: Callable[..., Any]) -> None:
    add(
        "old",
        metavar="OLD",
        help="a .bin, .pt, .pth or .ckpt file, or a directory with pytorch_model.bin",
    )
    add("new", metavar="NEW", help="the .safetensors file to write")
    add("--force", action="store_true", help="replace an existing file")


def run(flags: dict[str, Any]) -> ConvertReport:
    """The command."""
    return convert(flags["old"], flags["new"], force="force" in flags)


class Inert:
    """Stands for whatever else a pickle names, such as callbacks of a trainer: it takes everything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def convert(old: str | Path, new: str | Path, *, force: bool = False) -> ConvertReport:
    """Write the tensors of a pickled file, or of a directory of them, as one safetensors file."""
    started, target = time.perf_counter(), Path(os.path.expanduser(new))
    if target.suffix != ".safetensors":
        raise ConfigError(
            f"{str(new)!r} does not end in .safetensors", "give the name of the new file last"
        )
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {str(new)!r}", "make it first")
    if not force and os.path.lexists(target):
        raise ConfigError(
            f"{str(new)!r} exists already", "choose another name, or add --force to replace it"
        )
    weights: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    for path in find_pickles(Path(os.path.expanduser(old))):
        if path.exists() and target.exists() and path.samefile(target):
            raise ConfigError(f"{str(new)!r} is the input", "choose another name")
        for name, value in find_weights(load_pickle(path)):
            if hasattr(value, "untyped_storage"):
                weights[name] = value
            else:
                left_out.append(name)
    if not weights:
        hint = f"its weights should be under one of {', '.join(WRAPPERS)}; of a whole module, save the state_dict()"
        raise DareError(f"{str(old)!r} holds no table of tensors", hint)
    infos = place_tensors(weights)
    header = header_bytes(infos, {"format": "pt"})
    size = len(header) + sum(info.nbytes for info in infos.values())
    if size > (free := shutil.disk_usage(target.absolute().parent).free):
        raise DareError(
            f"the output needs {human(size)} and there are {human(free)} free", "make room"
        )
    write_new_file(target, (header, *map(tensor_bytes, weights.values())))
    return ConvertReport(
        str(new), len(weights), size, tuple(left_out), time.perf_counter() - started
    )


def find_pickles(path: Path) -> list[Path]:
    """The files of a model: itself, or what its directory or its index names."""
    if path.is_dir():
        path = next(
            (path / name for name in (PICKLE_INDEX, PICKLE_FILE) if (path / name).exists()), path
        )
    if path.suffix == ".json":
        weight_map = read_json(path, path.name).get("weight_map")
        if not isinstance(weight_map, dict):
            raise DareError(
                f"{str(path)!r} is JSON without a weight_map", "name the file to convert"
            )
        return [
            path.parent / Path(name).name for name in sorted(set(map(str, weight_map.values())))
        ]
    if path.is_dir():
        raise DareError(
            f"{str(path)!r} has neither {PICKLE_FILE} nor {PICKLE_INDEX}",
            "name the file to convert",
        )
    return [path]


def load_pickle(path: Path) -> Any:
    """What a pickle holds: tensors as views of the file, and nothing that is not plain data."""
    try:
        import torch
    except ModuleNotFoundError:
        raise DareError("to convert pickles, torch is needed", install_hint("torch")) from None
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        with open_regular(path) as file:
            zipped = (
                file.read(4) == b"PK\x03\x04"
            )  # else as torch saved before 1.6, which cannot be mapped
            file.seek(0)
            others = get_unsafe_globals_in_checkpoint(path) if zipped else []
            mapped = (
                zipped and path.suffix != ".safetensors"
            )  # by which torch takes a path for such a file
            with safe_globals([(Inert, name) for name in others]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.load(
                    path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
                )
    except FileNotFoundError:
        raise DareError(
            f"there is no file {str(path)!r}", "give the file to convert first"
        ) from None
    except OSError as error:
        raise DareError(
            f"cannot read {str(path)!r}: {error.strerror or error}", "check its permissions"
        ) from None
    except pickle.UnpicklingError as error:
        called = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it calls {called[1]}" if called else "it holds more than plain data"
        raise DareError(
            f"{str(path)!r} could run any code, so it is not loaded: {reason}", UNSAFE_HINT
        ) from None
    except Exception:  # torch raises all kinds of them for damaged files
        raise DareError(
            f"{str(path)!r} is no PyTorch file, or a damaged one", "download or copy it again"
        ) from None


def find_weights(content: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a state dict, wherever in the content it is."""
    for _ in range(MAX_DEPTH):
        known = content if isinstance(content, Mapping) else {}
        content = next(
            (known[key] for key in WRAPPERS if isinstance(known.get(key), Mapping)), known
        )
    yield from ((str(name), value) for name, value in content.items())


def place_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """A place for each tensor, one after the other. Tensors that share their values each get all of them."""
    infos, offset = {}, 0
    for name, tensor in weights.items():
        dtype = STORED_TYPES.get(str(tensor.dtype).removeprefix("torch."))
        if name == "__metadata__" or not name.isprintable():
            raise DareError(f"a tensor is called {name!r}", "safetensors files have no such names")
        if (
            dtype is None
            or str(tensor.layout) != "torch.strided"
            or tensor.is_quantized
            or tensor.is_meta
        ):
            raise DareError(
                f"tensor {name!r} is {tensor.dtype} ({tensor.layout})",
                "safetensors files have no such type",
            )
        infos[name] = TensorInfo(dtype, tuple(tensor.shape), offset)
        offset += infos[name].nbytes
    return infos


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .data
    )
