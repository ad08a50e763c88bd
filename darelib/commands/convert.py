"""`dare.py convert`: PyTorch pickles as safetensors files, without running what is in them.

Adapters and diffusion models, which it converts between the formats of two programs, have rooms of
their own.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from darelib.commands.options import Flags, MergerClass, Options, Report, show
from darelib.core.text import (
    LOG,
    ConfigError,
    DareError,
    count_of,
    human,
    install_hint,
    list_names,
    printable,
)
from darelib.models.source import Source
from darelib.models.tensorfile import TensorInfo, header_bytes, open_regular, read_json
from darelib.output.scratch import write_new_file

if TYPE_CHECKING:
    import torch

OPTIONS: Final[Options] = {
    "old": {
        "metavar": "OLD",
        "help": "a .bin, .pt, .pth or .ckpt file, or a directory with pytorch_model.bin; a LoRA "
        "adapter of PEFT's or a LoRA file; or a diffusion model: one file, or of diffusers",
    },
    "new": {
        "metavar": "NEW",
        "nargs": "?",
        "help": "the .safetensors file to write; of a LoRA file, the directory; with a base "
        "for a diffusion model, either",
    },
    "--base": {
        "metavar": "MODEL",
        "help": "that a LoRA file was trained on, or in whose form a diffusion model is written",
    },
    "--force": {"action": "store_true", "help": "replace an existing file"},
}
# Where training scripts put the weights, beside optimizer states and counters.
WRAPPERS: Final = ("state_dict", "model_state_dict", "model", "module")
MAX_DEPTH: Final = 4  # of such tables in each other
# What a directory of transformers' time before safetensors holds.
PICKLE_FILE: Final = "pytorch_model.bin"
PICKLE_INDEX: Final = "pytorch_model.bin.index.json"
ZIP_START: Final = b"PK\x03\x04"
# In a file of before 1.6: a mark, a version, the system, the table, its keys.
OLD_PICKLES: Final = 5
PIECE_BYTES: Final = 1 << 24  # of a tensor that must be copied, the bytes that are copied at a time
STORED_TYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


@dataclass(frozen=True)
class ConvertReport(Report):
    """What a conversion did. Prints as a line; as_dict gives plain data."""

    output: str
    tensors: int
    bytes_written: int
    left_out: tuple[str, ...]  # entries that are no tensors, or have no place
    seconds: float

    def __str__(self) -> str:
        written = f"{count_of(self.tensors, 'tensor')}, {human(self.bytes_written)}"
        return f"wrote {printable(self.output)}: {written}, in {self.seconds:.2f} s"


def run(flags: Flags, merger_class: MergerClass) -> None:
    from darelib.commands.diffusion import convert_to_base, convert_to_original, is_diffusion
    from darelib.commands.kohya import convert_adapter, is_adapter

    old = Source.of(flags["old"])
    has_adapter = is_adapter(old)
    has_model = not has_adapter and is_diffusion(old)
    if not has_adapter and not has_model:
        check_old(old.path)
    if "new" not in flags:
        raise ConfigError("the file to write, NEW, is missing", "like convert OLD NEW.safetensors")
    force = "force" in flags
    if has_model and "base" in flags:
        convert_to_base(flags, merger_class)
        return
    if has_adapter or has_model:
        started = time.perf_counter()
        new = check_new(flags["new"], force)
        base = Source.of(flags["base"]) if "base" in flags else None
        tensors, left_out = (
            (convert_adapter(old, new, base), ()) if has_adapter else convert_to_original(old, new)
        )
        size = sum(path.stat().st_size for path in ([new] if new.is_file() else new.iterdir()))
        seconds = time.perf_counter() - started
        report = ConvertReport(flags["new"], tensors, size, left_out, seconds)
    else:
        report = convert(flags["old"], flags["new"], force=force)
    show(report, flags, flags.get("verbose", True))


class Inert:
    """Stands for whatever else a pickle names, such as a trainer's callbacks: it does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


def convert(old: str | Path, new: str | Path, *, force: bool = False) -> ConvertReport:
    """Write the tensors of a pickled file, or of a directory of them, as one safetensors file."""
    started = time.perf_counter()
    target = check_new(new, force)
    folder = target.absolute().parent
    if target.suffix != ".safetensors":
        raise ConfigError(
            f"{str(new)!r} does not end in .safetensors", "give the name of the new file last"
        )
    weights: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    for path in find_pickles(Path(os.path.expanduser(old))):
        if path.exists() and target.exists() and path.samefile(target):
            raise ConfigError(f"{str(new)!r} is the input", "choose another name")
        for name, value in find_weights(load_pickle(path)).items():
            if hasattr(value, "untyped_storage"):
                weights[str(name)] = value
            else:
                left_out.append(str(name))
    if not weights:
        raise DareError(
            f"{str(old)!r} holds no table of tensors",
            f"its weights should be under one of {', '.join(WRAPPERS)}; of a whole module, save "
            "the state_dict()",
        )
    infos = place_tensors(weights)
    header = header_bytes(infos, {"format": "pt"})
    size = len(header) + sum(info.nbytes for info in infos.values())
    if size > (free := shutil.disk_usage(folder).free):
        raise DareError(
            f"the output needs {human(size)} and there are {human(free)} free", "make room"
        )
    pieces = (piece for tensor in weights.values() for piece in tensor_bytes(tensor))
    write_new_file(target, itertools.chain([header], pieces))
    if left_out:
        LOG.warning(f"left out what is not a tensor: {list_names(left_out)}")
    return ConvertReport(
        output=str(new),
        tensors=len(weights),
        bytes_written=size,
        left_out=tuple(left_out),
        seconds=time.perf_counter() - started,
    )


def check_new(new: str | Path, force: bool) -> Path:
    """Where to write, which must be free and in a folder."""
    target = Path(os.path.expanduser(new))
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {str(new)!r}", "make it first")
    if not force and os.path.lexists(target):
        raise ConfigError(
            f"{str(new)!r} exists already", "choose another name, or add --force to replace it"
        )
    return target


def check_old(path: Path) -> None:
    """Refuse what is no pickle but a model that can be merged. Names may lie."""
    from darelib.models.directories import find_weights
    from darelib.models.tensorfile import peek_header

    pickles = (path / PICKLE_INDEX, path / PICKLE_FILE)
    is_model = path.is_file() and peek_header(path) != ((), {})
    if path.is_dir() and not any(file.exists() for file in pickles):
        is_model = find_weights(path) is not None
    if is_model:
        raise ConfigError(f"{str(path)!r} is safetensors already", "merge it as it is")


def find_pickles(path: Path) -> list[Path]:
    """The files of a model: itself, or what its directory or its index names."""
    if path.is_dir():
        inside = (path / name for name in (PICKLE_INDEX, PICKLE_FILE))
        path = next((file for file in inside if file.exists()), path)
    if path.is_dir():
        raise DareError(
            f"{str(path)!r} has neither {PICKLE_FILE} nor {PICKLE_INDEX}",
            "name the file to convert",
        )
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
    from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

    try:
        with open_regular(path) as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What torch saved before 1.6 is no archive, and cannot be mapped.
            zipped = file.read(len(ZIP_START)) == ZIP_START
            file.seek(0)
            check_pickles(file, zipped, str(path))
            file.seek(0)
            others = get_unsafe_globals_in_checkpoint(path) if zipped else []
            # By its suffix, torch would take a path for a safetensors file.
            mapped = zipped and path.suffix != ".safetensors"
            with safe_globals([(Inert, name) for name in others]):
                return torch.load(
                    path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped
                )
    except DareError:
        raise
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
            f"{str(path)!r} could run any code, so it is not loaded: {reason}",
            "load it where it was made, and save only its state_dict with torch.save",
        ) from None
    except Exception:  # torch raises all kinds of them for damaged files
        raise DareError(
            f"{str(path)!r} is no PyTorch file, or a damaged one", "download or copy it again"
        ) from None


def check_pickles(file: IO[bytes], zipped: bool, name: str) -> None:
    """Refuse what no state dict has, and torch would make any amount of memory of."""
    import pickletools
    import zipfile

    contents: list[IO[bytes]] = [file] * OLD_PICKLES
    if zipped:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if any(member.compress_type for member in members):
                raise DareError(f"{name!r} is compressed", "save it with torch.save")
            pickles = [member for member in members if member.filename.endswith(".pkl")]
            contents = [io.BytesIO(archive.read(member)) for member in pickles]
    for content in contents:
        calls = [named for code, named, _ in pickletools.genops(content) if code.name == "GLOBAL"]
        if any(str(named).endswith(" bytearray") for named in calls):
            raise DareError(
                f"{name!r} holds a bytearray, which may be of any size, so it is not loaded",
                "load it where it was made, and save only its state_dict with torch.save",
            )


def find_weights(content: Any) -> Mapping[Any, Any]:
    """The entries of a state dict, wherever in the content it is."""
    table: Mapping[Any, Any] = content if isinstance(content, Mapping) else {}
    for _ in range(MAX_DEPTH):
        inside = (table[key] for key in WRAPPERS if isinstance(table.get(key), Mapping))
        table = next(inside, table)
    return table


def place_tensors(weights: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    """A place for each tensor, one after the other; those that share values each have their own."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for name, tensor in weights.items():
        if name == "__metadata__" or not name.isprintable():
            raise DareError(f"a tensor is called {name!r}", "safetensors files have no such names")
        dtype = STORED_TYPES.get(str(tensor.dtype).removeprefix("torch."))
        is_plain = str(tensor.layout) == "torch.strided" and not tensor.is_quantized
        if dtype is None or not is_plain or tensor.is_meta:
            raise DareError(
                f"tensor {name!r} is {tensor.dtype} ({tensor.layout})",
                "safetensors files have no such type",
            )
        infos[name] = TensorInfo(dtype, tuple(tensor.shape), offset)
        offset += infos[name].nbytes
    return infos


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
