"""The files of an output: which tensors each holds, and where."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from darelib.core.formats import STORED_BITS
from darelib.models.checkpoint import WEIGHTS_FILE
from darelib.models.tensorfile import header_bytes
from darelib.models.tensors import TensorInfo
from darelib.plan.tensors import TensorPlan


@dataclass(frozen=True)
class PlannedFile:
    """A file of tensors that will be written."""

    name: str
    header: bytes
    size: int


def assign_offsets(
    tensors: Sequence[TensorPlan], limit: int, metadata: dict[str, str], name: str | None
) -> tuple[list[TensorPlan], list[PlannedFile]]:
    """Give each tensor its place: in order, in a new file where the next one would exceed the
    limit.

    name: of the only file; None: they are named as transformers names them.
    """
    shards = divide_tensors(tensors, limit)
    count = len(shards)
    names = [name or WEIGHTS_FILE]
    if count > 1:
        names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    placed: list[TensorPlan] = []
    files: list[PlannedFile] = []
    for number, own in enumerate(shards):
        places, size = place_tensors(own, number)
        for tensor in own:
            outputs = {output: places[output] for output in tensor.outputs}
            placed.append(dataclasses.replace(tensor, outputs=outputs))
        header = header_bytes(places, metadata)
        files.append(PlannedFile(names[number], header, len(header) + size))
    return placed, files


def divide_tensors(tensors: Sequence[TensorPlan], limit: int) -> list[list[TensorPlan]]:
    """The tensors of each file. One that is larger than the limit has a file of its own."""
    shards: list[list[TensorPlan]] = [[]]
    used = 0
    for tensor in tensors:
        size = sum(info.nbytes for info in tensor.outputs.values())
        if used and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def place_tensors(tensors: Sequence[TensorPlan], file: int) -> tuple[dict[str, TensorInfo], int]:
    """What a file holds, one after the other, and how many bytes that are."""
    wanted = [pair for tensor in tensors for pair in tensor.outputs.items()]
    if any(len(tensor.outputs) > 1 for tensor in tensors):
        # Behind an odd number of bytes, loaders could not map wider values.
        wanted.sort(key=lambda pair: -STORED_BITS[pair[1].dtype])
    places: dict[str, TensorInfo] = {}
    offset = 0
    for name, info in wanted:
        places[name] = dataclasses.replace(info, file=file, offset=offset)
        offset += info.nbytes
    return places, offset
