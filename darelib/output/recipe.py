"""The recipe that a merged model carries: all that is needed to make the same tensors again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.mask import MASK_NAME
from darelib.models import Input
from darelib.models.tensorfile import TensorFile, open_regular
from darelib.readers import MAX_TOML, Request, Source, load_request, parse_request
from darelib.text import ConfigError, DareError, as_text

RECIPE_KEY: Final = "dare_recipe"  # in the metadata of a file of tensors
RECIPE_FILE: Final = "dare_recipe.toml"  # in a model directory
RECIPE_SEAL: Final = "# SHA-256 of what is above: "
UNKNOWN_HINT: Final = "only what this tool has merged can be verified"


def recipe_text(
    config: DareConfig, inputs: Sequence[Input], version: str, place: Path | None = None,
    files: Mapping[str, str] | None = None, tokenizer: Source | None = None,
) -> str:  # fmt: skip
    """Every setting that determines the tensors, and nothing else, as a configuration that makes them again.

    place: the directory that the recipe is for. Paths then lead from there to the models, and what determines the
    directory's other files is in it too, with their digests (files).
    """
    import tomli_w

    names = [path_from(model.source, place) for model in inputs]
    dare, models = config.recipe_settings(), {"base_file": names[0], "merge_files": names[1:]}
    recipe: dict[str, Any] = {
        "version": version,
        "mask": MASK_NAME,
        "seeds": [config.seed + i for i in range(len(inputs) - 1)],
        "inputs": [{"file": model.source.pinned or model.name, **model.fingerprint} for model in inputs],
    }
    if place is not None:
        dare["max_shard_size"] = config.max_shard_size
        models |= {"tokenizer_from": path_from(tokenizer, place)} if tokenizer else {}
        recipe["files"] = dict(files or {})
    rules = [rule.as_table() for rule in config.typed_rules]
    text = tomli_w.dumps({"dare": dare, "models": models, **({"rules": rules} if rules else {}), "recipe": recipe})
    if len(text.encode()) > MAX_TOML - 200:  # with its seal
        raise ConfigError(f"the recipe would be longer than {MAX_TOML:,} bytes", "give fewer rules, or larger shards")
    return text


def path_from(source: Source, place: Path | None) -> str:
    """What a recipe calls a model: what the user called it; in a directory, a path that leads from there to it."""
    if source.pinned or place is None or os.path.isabs(os.path.expanduser(source.name)):
        return source.pinned or source.name
    physical = source.path.parent.resolve() / source.path.name  # a link itself is kept: what it leads to may move
    try:
        path = Path(os.path.relpath(physical, place)).as_posix()
    except ValueError:  # on another drive
        path = str(physical)
    return as_text(path)


def recipe_metadata(recipe: str) -> dict[str, str]:
    """The metadata of a merged file. The digest reveals damage to the recipe itself."""
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    return {"format": "pt", RECIPE_KEY: recipe, f"{RECIPE_KEY}_sha256": digest}


def seal(recipe: bytes) -> bytes:
    """The recipe of a directory with a last line that reveals damage to it."""
    return recipe + f"{RECIPE_SEAL}{hashlib.sha256(recipe).hexdigest()}\n".encode()


def check_seal(folder: Path) -> None:
    """Refuse a directory whose recipe is missing or damaged."""
    path = folder / RECIPE_FILE
    try:
        with open_regular(path) as file:
            content = file.read(MAX_TOML + 1)
    except FileNotFoundError:
        raise DareError(f"{str(folder)!r} has no {RECIPE_FILE}", UNKNOWN_HINT) from None
    except OSError as error:
        raise DareError(f"cannot read {str(path)!r}: {error.strerror}", "merge again") from None
    if seal(content.rpartition(RECIPE_SEAL.encode())[0]) != content:
        raise _damaged(folder)


def read_recipe(path: Path) -> Request:
    """The recipe of a merged file or directory, as a request to merge it again."""
    if os.path.isdir(path):
        check_seal(path)
        return load_request(path / RECIPE_FILE)
    try:
        file = TensorFile(path, str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DareError(f"cannot read {str(path)!r}: {reason}", "give a merged model, a file or a directory") from None
    file.close()
    recipe = file.metadata.get(RECIPE_KEY)
    if recipe is None:
        raise DareError(f"{str(path)!r} has no recipe", UNKNOWN_HINT)
    if file.metadata != recipe_metadata(recipe):
        raise _damaged(path)
    return parse_request(recipe, f"the recipe of {path}", Path())


def _damaged(path: Path) -> DareError:
    return DareError(f"{str(path)!r} is not what its recipe makes: the recipe itself is damaged", "merge again")


def check_fingerprints(inputs: Sequence[Input], fingerprints: Sequence[Mapping[str, Any]]) -> None:
    """Refuse inputs other than those that a recipe was made with. fingerprints: its [[recipe.inputs]], if any."""
    for model, entry in zip(inputs, fingerprints, strict=False):
        for key, value in model.fingerprint.items():
            if entry.get(key, value) != value:
                difference = f"its {key} is {value}, not {entry[key]}"
                raise DareError(
                    f"{model.name!r} is not the file that the recipe was made with: {difference}",
                    "find that file, or remove the [recipe] table to merge this one",
                )
