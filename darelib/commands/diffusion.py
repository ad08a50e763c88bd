"""`dare.py convert` of diffusion models: a directory of diffusers as one file with the names of
original ones, value for value; and back, into the form of a directory that is given.
"""

from contextlib import suppress
from pathlib import Path
from typing import Final

from darelib.commands.merge import run as run_merge
from darelib.commands.options import Flags, MergerClass
from darelib.core.text import ConfigError, DareError
from darelib.models.inputs import open_models
from darelib.models.pieces import count_used
from darelib.models.source import Source
from darelib.models.translation import find_homes, name_originally
from darelib.output.tensors import list_contents, write_tensors

MAIN: Final = ("unet/", "transformer/")  # without which a file is of no use


def is_diffusion(old: Source) -> bool:
    if old.path.exists():  # else it may be a name on the Hub
        with suppress(DareError), open_models([old]) as [model]:
            return bool(find_homes(model.tensors))
    return False


def convert_to_base(flags: Flags, merger_class: MergerClass) -> None:
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
    run_merge(wanted, merger_class)


def convert_to_original(old: Source, new: Path) -> tuple[int, list[str]]:
    """Write a model of diffusers as one file. Gives how many tensors it has, and what has no place
    in it.
    """
    with open_models([old]) as [model]:
        tensors = name_originally(model.tensors, old)
        if tensors.keys() <= model.tensors.keys():
            raise ConfigError(
                f"{old.name!r} has the names of original files already",
                "a directory of diffusers has settings that no file of weights has: give one of "
                "the same kind as --base MODEL, and the result is that with these weights",
            )
        used = count_used(tensors.values())
        left_out = [name for name, info in model.tensors.items() if id(info) not in used]
        lost = [name for name in left_out if name.startswith(MAIN)]
        if lost:
            raise DareError(
                f"no original name is known for {lost[0]!r} of {old.name!r}",
                "SD 1 to 3.5, SDXL and Flux are known, where their tensors are whole",
            )
        write_tensors(new, list_contents(model, tensors), [file.path for file in model.files])
    return len(tensors), left_out
