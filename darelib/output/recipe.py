"""The recipe that a merged model carries: all that is needed to make the same tensors again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.mask import MASK_NAME
from darelib.models import Input, open_models
from darelib.models.checkpoint import INDEX_FILE
from darelib.models.hub import download
from darelib.models.packed import PACKED_KEY
from darelib.models.tensorfile import TensorFile, open_regular
from darelib.models.vocabulary import digest_tokenizer
from darelib.output.tokenizer import TokenizerChoice
from darelib.readers import MAX_TOML, Request, Source, load_request, parse_request, recorded_name
from darelib.text import ConfigError, DareError

RECIPE_KEY: Final = "dare_recipe"  # in the metadata of a file of tensors
RECIPE_FILE: Final = "dare_recipe.toml"  # in a model directory
RECIPE_SEAL: Final = "# SHA-256 of what is above: "
UNKNOWN_HINT: Final = "only what this tool has merged has a recipe"


def recipe_text(
    config: DareConfig, inputs: Sequence[Input], version: str, tokenizer: TokenizerChoice,
    files: Mapping[str, str] | None = None, packed: bool = False,
) -> str:  # fmt: skip
    """Every setting that determines the output, and nothing else, as a configuration that makes it again.

    Models are called by the last part of their path, so that the same merge gives the same bytes from any place, and
    no path of this machine leaves it. files: the digests of a directory's other files. packed: it is a packed model's.
    """
    import tomli_w

    names = [recorded_name(model.source) for model in inputs]
    dare, models = config.recipe_settings(), {"base_file": names[0], "merge_files": names[1:]}
    recipe: dict[str, Any] = {
        "version": version,
        "mask": MASK_NAME,
        "seeds": list(find_seeds(config, inputs)),
        "inputs": [{"file": name, **model.fingerprint} for name, model in zip(names, inputs, strict=True)],
    }
    if tokenizer.unites:
        models["tokenizer"] = tokenizer.name
    if files is not None:
        models |= tokenizer.settings
        dare["max_shard_size"] = config.max_shard_size
        recipe |= {"files": dict(files)} | ({"packed": True} if packed else {})
    rules = [rule.as_table() for rule in config.typed_rules]
    text = tomli_w.dumps({"dare": dare, "models": models, **({"rules": rules} if rules else {}), "recipe": recipe})
    if len(text.encode()) > MAX_TOML - 200:  # with its seal
        raise ConfigError(f"the recipe would be longer than {MAX_TOML:,} bytes", "give fewer rules, or larger shards")
    return text


def find_seeds(config: DareConfig, inputs: Sequence[Input]) -> tuple[int, ...]:
    """The seed of each model's mask: the first one's and up, unless it was decided before."""
    return tuple(config.seed + i if model.seed is None else model.seed for i, model in enumerate(inputs[1:]))


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
    if path.name in (RECIPE_FILE, INDEX_FILE) and path.is_file():
        path = path.parent
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
    if PACKED_KEY in file.metadata:
        raise DareError(f"{str(path)!r} is a packed model", "it can only be merged: give it to --merge")
    if recipe is None:
        raise DareError(f"{str(path)!r} has no recipe", UNKNOWN_HINT)
    if file.metadata != recipe_metadata(recipe):
        raise _damaged(path)
    return parse_request(recipe, f"the recipe of {path}", path.parent)


def _damaged(path: Path) -> DareError:
    return DareError(f"{str(path)!r} is not what its recipe makes: the recipe itself is damaged", "merge again")


def locate_inputs(request: Request, given: Sequence[str], path: Path) -> Request:
    """A recipe's request, with its inputs where they are now: among the models given, or by name.

    Names are looked for beside the merged model (or the recipe's file, path) and in the working directory. Only what is
    what it was is accepted, by its fingerprint.
    """
    if request.packed:
        raise DareError(f"{str(path)!r} is a packed model", "it can only be merged: give it to --merge")
    if not request.inputs:
        raise DareError(f"the recipe of {str(path)!r} names no inputs", UNKNOWN_HINT)
    folder = Path(os.path.abspath(path)).parent
    places = (folder.parent if path.name == RECIPE_FILE else folder, Path.cwd())
    found, used = list[Source](), set[str]()
    for entry in request.inputs:
        name = str(entry.get("file", ""))
        paths = [path for place in places for path in (place / name, place) if name and path.name == name]
        candidates = [*map(Source.of, given), *(Source(str(path), path) for path in paths if os.path.exists(path))]
        candidates += [Source.of(name)] if "@" in name and "/" in name else []  # on the Hub
        fitting, reasons = list[Source](), list[str]()
        for candidate in candidates:
            if fitting and candidate.name not in given:
                break
            if difference := describe_difference(candidate, entry, found[:1]):
                reasons.append(f"{candidate.name!r} is another one: {difference}")
            else:
                fitting.append(candidate)
        if not fitting:
            looked = " nor in ".join(repr(str(place)) for place in dict.fromkeys(places))
            why = reasons[-1] if reasons else f"it is {'not' if places[0] == places[1] else 'neither'} in {looked}"
            raise DareError(
                f"cannot find {name!r}, which the recipe was made with: {why}",
                "say where the models are with --base and --merge; to merge others, give a configuration of your own",
            )
        used |= {source.name for source in fitting}
        found.append(dataclasses.replace(download(fitting[0]), recorded=name))
    if strange := [name for name in given if name not in used]:
        raise DareError(
            f"{strange[0]!r} is none of the models that the recipe was made with",
            "leave it out; to merge other models, give a configuration of your own",
        )
    return dataclasses.replace(
        request,
        base=found[0],
        merge=tuple(found[1:]),
        tokenizer=_locate("tokenizer", request.tokenizer, found, places),
        chat_template=_locate("chat_template", request.chat_template, found, places),
    )


def _locate(what: str, source: Source | None, inputs: Sequence[Source], places: Sequence[Path]) -> Source | None:
    """Where a tokenizer or a chat template is that a recipe names: it may be an input's."""
    if source is None or source.is_word:
        return source
    known = [model for model in inputs if model.recorded == source.name]
    there = [Source(source.name, place / source.name) for place in places if os.path.exists(place / source.name)]
    given = [source] if os.path.exists(source.path) else []  # by a flag
    if not known + there + given:
        raise DareError(
            f"cannot find {source.name!r}, the {what} of the recipe, beside it or in {str(places[1])!r}",
            f"say where it is with --{what.replace('_', '-')}",
        )
    return (given + known + there)[0]


def describe_difference(source: Source, entry: Mapping[str, Any], base: Sequence[Source]) -> str:
    """What is not as a recipe says of an input; empty: it is that very model."""
    try:
        with open_models([*base, source]) as inputs:
            found = dict(inputs[-1].fingerprint)
            if "tokenizer_sha256" in entry:
                found["tokenizer_sha256"] = digest_tokenizer(inputs[-1].folder)
            for key, value in found.items():
                if entry.get(key, value) != value:
                    return f"its {key} is {value}, not {entry[key]}"
    except DareError as error:
        return str(error)
    return ""
