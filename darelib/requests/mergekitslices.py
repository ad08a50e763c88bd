"""mergekit's slices: which models their layers make, and where a tensor of the output is in
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from darelib.config import LAYER, count_layers
from darelib.core.methods import METHODS
from darelib.core.text import LOG
from darelib.models.directories import INDEX_FILE, WEIGHTS_FILE
from darelib.models.inputs import open_models
from darelib.models.source import Slice, Source
from darelib.models.stack import BEFORE_LAYERS, put_layer
from darelib.requests.mergekitfile import MergekitFile, Part, Reference, Table


@dataclass(frozen=True)
class Place:
    """Where a tensor of the output is made."""

    part: int
    depth: float = 0.0  # in the part: from 0 in its first layer to 1 in its last
    names: tuple[str, ...] = ()  # what its models call it, where that may be otherwise


def locate(parts: Sequence[Part], name: str) -> Place:
    match = LAYER.match(name)
    if not match or not parts[0].ranges:
        return Place(0 if BEFORE_LAYERS.search(name) else len(parts) - 1)
    layer = int(match[2])
    number = 0
    while layer >= parts[number].depth:
        layer -= parts[number].depth
        number += 1
    part = parts[number]
    starts = [part.ranges[model][0] for model in part.columns[1:]]
    names = tuple(put_layer(start + layer, name) for start in starts)
    return Place(number, layer / (part.depth - 1) if part.depth > 1 else 1.0, names)


def list_sources(file: MergekitFile) -> list[Source]:
    """The base and the models of a merge: where there are slices, each made of one of a slice's."""
    count = 0 if METHODS[file.family.method].models == (0, 0) else len(file.models)
    given = file.read_base(file.content, "base_model")
    if count == 0 and given not in (None, file.base):
        LOG.warning(
            f"{file.path}: base_model does nothing: what is beside the tensors comes from "
            f"{file.base}, unless --tokenizer names a model"
        )
    columns = [[part.choose(i) for part in file.parts] for i in range(count + 1)]
    if not file.parts[0].ranges or is_whole(file, columns):
        others = [find_source(file, own, file.base) for [own, *_] in columns[1:]]
        return [find_source(file, file.base), *others]
    made = []
    for models in columns:
        pairs = zip(file.parts, models, strict=True)
        slices = [Slice(find_source(file, own), *part.ranges[own]) for part, own in pairs]
        made.append(Source.stack(slices))
    return made


def find_source(file: MergekitFile, model: Reference, base: Reference | None = None) -> Source:
    """A model, perhaps with an adapter on top; an adapter on the base is an input by itself."""
    if not model.lora:
        return file.find(model.path)
    adapter = file.find(model.lora)
    is_on_base = base == Reference(model.path)
    # What holds a whole model would be merged as one; joined, it is refused.
    is_model = any((adapter.path / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE))
    if is_on_base and not is_model and not adapter.path.is_file():
        return adapter
    return Source.join(file.find(model.path), adapter)


def allow_other_layers(file: MergekitFile) -> Table:
    """Layers of other numbers are as far from one another as models that were not fine-tuned."""
    differ = any(len({*part.ranges.values()}) > 1 for part in file.parts)
    return {"any_base": True} if differ else {}


def is_whole(file: MergekitFile, columns: Sequence[Sequence[Reference]]) -> bool:
    """Whether slices only tell parameters apart: they are all layers of the same models."""
    end = 0
    for part in file.parts:
        if {*part.ranges.values()} != {(end, end + part.depth)}:
            return False
        end += part.depth
    if any(len({*models}) > 1 for models in columns):
        return False
    with open_models([find_source(file, columns[0][0])]) as [base]:
        return [*count_layers(base.tensors).values()] == [end]
