"""One safetensors file of tensors from anywhere, as conversions write it."""

import logging
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from darelib.core.text import LOG, ConfigError, DareError, human, progress
from darelib.models.encodings import Input, TensorInfo
from darelib.models.tensorfile import header_bytes
from darelib.output.scratch import write_new_file

Bytes: TypeAlias = Iterable[bytes | memoryview]
# By name: what a tensor is, and its bytes, which are made when they are written.
Contents: TypeAlias = dict[str, tuple[TensorInfo, Bytes]]


def list_contents(model: Input, tensors: Mapping[str, TensorInfo]) -> Contents:
    """Tensors of a model, or that are made of such, by new names."""
    return {name: (info, _read(model, info)) for name, info in tensors.items()}


def _read(model: Input, info: TensorInfo) -> Iterator[memoryview]:
    raw = np.empty(info.nbytes, np.uint8)
    model.read(info, 0, info.count, raw)
    yield raw.data


def encode_file(contents: Contents) -> Iterator[bytes | memoryview]:
    """The file, tensor by tensor."""
    infos: dict[str, TensorInfo] = {}
    offset = 0
    for name, (info, _) in contents.items():
        infos[name] = TensorInfo(info.dtype, info.shape, offset)
        offset += info.nbytes
    yield header_bytes(infos, {"format": "pt"})
    with progress("writing", offset, LOG.isEnabledFor(logging.INFO)) as advance:
        for info, pieces in contents.values():
            yield from pieces
            advance(info.nbytes)


def write_tensors(new: Path, contents: Contents, inputs: Collection[Path]) -> None:
    """Write a file, which must not be one of the inputs."""
    if new.suffix != ".safetensors":
        raise ConfigError(
            f"what is written is one file, and {new.name!r} does not end in .safetensors",
            f"give the name of a file, like {new.name}.safetensors",
        )
    if new.exists() and any(new.samefile(path) for path in inputs):
        raise ConfigError(f"{str(new)!r} is the input", "choose another name")
    size = sum(info.nbytes for info, _ in contents.values())
    free = shutil.disk_usage(new.absolute().parent).free
    if size > free:
        raise DareError(
            f"the output needs {human(size)} and there are {human(free)} free", "make room"
        )
    write_new_file(new, encode_file(contents))
