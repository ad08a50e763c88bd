"""The recipe of a merged model as a request: its settings, and its inputs where they are now."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from darelib.core.text import DareError
from darelib.models.checkpoint import INDEX_FILE
from darelib.models.hub import download
from darelib.models.inputs import open_models
from darelib.models.packed import PACKED_KEY
from darelib.models.source import Source
from darelib.models.tensorfile import TensorFile
from darelib.models.vocabulary import digest_tokenizer
from darelib.output.recipe import (
    RECIPE_FILE,
    RECIPE_KEY,
    UNKNOWN_HINT,
    check_seal,
    explain_damage,
    recipe_metadata,
)
from darelib.requests.readers import load_request, parse_request
from darelib.requests.request import Request


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
        raise DareError(
            f"cannot read {str(path)!r}: {reason}", "give a merged model, a file or a directory"
        ) from None
    file.close()
    recipe = file.metadata.get(RECIPE_KEY)
    if PACKED_KEY in file.metadata:
        raise DareError(
            f"{str(path)!r} is a packed model", "it can only be merged: give it to --merge"
        )
    if recipe is None:
        raise DareError(f"{str(path)!r} has no recipe", UNKNOWN_HINT)
    if file.metadata != recipe_metadata(recipe):
        raise explain_damage(path)
    return parse_request(recipe, f"the recipe of {path}", path.parent)


def locate_inputs(request: Request, given: Sequence[str], path: Path) -> Request:
    """A recipe's request, with its inputs where they are now: among the models given, or by name.

    Names are looked for beside the merged model (or the recipe's file, path) and in the working directory. Only what is
    what it was is accepted, by its fingerprint.
    """
    if request.packed:
        raise DareError(
            f"{str(path)!r} is a packed model", "it can only be merged: give it to --merge"
        )
    if not request.inputs:
        raise DareError(f"the recipe of {str(path)!r} names no inputs", UNKNOWN_HINT)
    folder = Path(os.path.abspath(path)).parent
    places = (folder.parent if path.name == RECIPE_FILE else folder, Path.cwd())
    found, used = list[Source](), set[str]()
    for entry in request.inputs:
        name = str(entry.get("file", ""))
        paths = [
            path for place in places for path in (place / name, place) if name and path.name == name
        ]
        candidates = [
            *map(Source.of, given),
            *(Source(str(path), path) for path in paths if os.path.exists(path)),
        ]
        candidates += [Source.of(name)] if "@" in name and "/" in name else []  # on the Hub
        fitting, reasons = list[Source](), list[str]()
        for candidate in candidates:
            if fitting and candidate.name not in given:
                break
            if difference := find_difference(candidate, entry, found[:1]):
                reasons.append(f"{candidate.name!r} is another one: {difference}")
            else:
                fitting.append(candidate)
        if not fitting:
            looked = " nor in ".join(repr(str(place)) for place in dict.fromkeys(places))
            why = (
                reasons[-1]
                if reasons
                else f"it is {'not' if places[0] == places[1] else 'neither'} in {looked}"
            )
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


def _locate(
    what: str, source: Source | None, inputs: Sequence[Source], places: Sequence[Path]
) -> Source | None:
    """Where a tokenizer or a chat template is that a recipe names: it may be an input's."""
    if source is None or source.is_word:
        return source
    known = [model for model in inputs if model.recorded == source.name]
    there = [
        Source(source.name, place / source.name)
        for place in places
        if os.path.exists(place / source.name)
    ]
    given = [source] if os.path.exists(source.path) else []  # by a flag
    if not known + there + given:
        raise DareError(
            f"cannot find {source.name!r}, the {what} of the recipe, beside it or in {str(places[1])!r}",
            f"say where it is with --{what.replace('_', '-')}",
        )
    return (given + known + there)[0]


def find_difference(source: Source, entry: Mapping[str, Any], base: Sequence[Source]) -> str:
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
