"""Which folders of a pipeline are merged: those that fine-tuning changes, unless others are asked
for. All else is the base's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from darelib.config import DareConfig
from darelib.core.formats import FORMATS
from darelib.core.text import ConfigError, list_names, nearest
from darelib.models.directories import MERGED_COMPONENTS
from darelib.models.encodings import Described

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is read of a component to see whether a fine-tune changed it.
SAMPLED_TENSORS: Final = 16
SAMPLED_VALUES: Final = 1024
# By type: how far apart, relative to the larger one, a value may be as this type and as a finer
# one; and what float16 rounds to nothing.
STEPS: Final = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 2.0**-52}
SMALLEST: Final = 2.0**-24


def find_kept(config: DareConfig, base: Described) -> set[str]:
    """The components of a pipeline that stay the base's; none of any other model."""
    known = base.components
    usual = [name for name in known if name.startswith(MERGED_COMPONENTS)]
    chosen = usual if config.components is None else config.components
    for name in chosen:
        if name not in known:
            what = f"has no component {name!r} with weights" if known else "is no pipeline"
            raise ConfigError(
                f"components names {name!r}, and {base.name!r} {what}",
                nearest(name, known) if known else "leave components out",
            )
    if known and not chosen:
        raise ConfigError(
            f"{base.name!r} has none of the components that are merged by themselves "
            f"({', '.join(MERGED_COMPONENTS)}), but {list_names(known)}",
            "name those to merge: --components NAME...",
        )
    return {*known} - {*chosen}


def check_merged(kept: set[str], base: Described, model: Described) -> None:
    """Refuse a model of which nothing would be merged."""
    common = (name for name in model.tensors if kept and name in base.tensors)
    folders = {base.tensors[name].folder for name in common}
    if folders and folders <= kept:
        raise ConfigError(
            f"{model.name!r} has nothing but {list_names(sorted(folders))}, which is not merged",
            f"ask for it: --components {' '.join(sorted(folders))}",
        )


def find_unmerged_changes(kept: set[str], inputs: Sequence[Described]) -> Iterator[str]:
    """What to tell of models that change what is not merged."""
    base, *models = inputs
    for model in models:
        differing = [folder for folder in sorted(kept) if is_changed(folder, base, model)]
        if differing:
            yield (
                f"{model.name} has another {list_names(differing)} than {base.name}, which the "
                "output keeps; --components names all that is to be merged"
            )


def is_changed(folder: str, base: Described, model: Described) -> bool:
    """Whether a model has other values in a folder, by the first ones of some tensors."""
    mine = {name: info for name, info in base.tensors.items() if info.folder == folder}
    common = [name for name, info in mine.items() if name in model.tensors and info.count]
    for name in common[:: max(1, len(common) // SAMPLED_TENSORS)]:
        own, theirs = mine[name], model.tensors[name]
        if model.partial or own.shape != theirs.shape:
            return True
        if {own.dtype, theirs.dtype} <= FORMATS.keys():
            count = min(SAMPLED_VALUES, own.count)
            samples = [m.sample(name, m.tensors[name], 0, count) for m in (base, model)]
            if differ(samples, {own.dtype, theirs.dtype}):
                return True
    return False


def differ(samples: Sequence[NDArray[Any]], dtypes: Collection[str]) -> bool:
    import numpy as np

    mine, theirs = samples
    if len(dtypes) == 1:
        return not np.array_equal(mine, theirs)
    step = max(STEPS[dtype] for dtype in dtypes)
    return not np.allclose(mine, theirs, rtol=step, atol=SMALLEST)
