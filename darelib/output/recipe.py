"""The recipe that a merged model carries: all that is needed to make the same tensors again."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.core.mask import MASK_NAME
from darelib.core.text import ConfigError, DareError
from darelib.core.tomlfile import MAX_TOML
from darelib.models.checkpoint import Checkpoint
from darelib.models.source import recorded_name
from darelib.models.tensorfile import open_regular
from darelib.output.tokenizer import TokenizerChoice
from darelib.plan.plan import find_seeds

RECIPE_KEY: Final = "dare_recipe"  # in the metadata of a file of tensors
RECIPE_FILE: Final = "dare_recipe.toml"  # in a model directory
RECIPE_SEAL: Final = "# SHA-256 of what is above: "
UNKNOWN_HINT: Final = "only what this tool has merged has a recipe"


def recipe_text(
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    version: str,
    tokenizer: TokenizerChoice,
    files: Mapping[str, str] | None = None,
    packed: bool = False,
) -> str:
    """Every setting that determines the output, as a configuration that makes it again.

    Models are called by the last part of their path, so that the same merge gives the same bytes
    from any place, and no path of this machine leaves it. files: the digests of a directory's
    other files. packed: it is a packed model's.
    """
    import tomli_w

    names = [recorded_name(model.source) for model in inputs]
    dare = config.recipe_settings()
    models: dict[str, Any] = {"base_file": names[0], "merge_files": names[1:]}
    recipe: dict[str, Any] = {
        "version": version,
        "mask": MASK_NAME,
        "seeds": list(find_seeds(config, inputs)),
        "inputs": [
            {"file": name, **model.fingerprint} for name, model in zip(names, inputs, strict=True)
        ],
    }
    if tokenizer.unites:
        models["tokenizer"] = tokenizer.name
    if files is not None:
        models |= tokenizer.settings
        dare["max_shard_size"] = config.max_shard_size
        recipe["files"] = dict(files)
    if packed:
        recipe["packed"] = True
    rules = [rule.as_table() for rule in config.typed_rules]
    listed = {"rules": rules} if rules else {}
    text = tomli_w.dumps({"dare": dare, "models": models, **listed, "recipe": recipe})
    if len(text.encode()) > MAX_TOML - 200:  # with its seal
        raise ConfigError(
            f"the recipe would be longer than {MAX_TOML:,} bytes",
            "give fewer rules, or larger shards",
        )
    return text


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
        raise explain_damage(folder)


def explain_damage(path: Path) -> DareError:
    return DareError(
        f"{str(path)!r} is not what its recipe makes: the recipe itself is damaged", "merge again"
    )
