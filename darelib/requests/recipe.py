"""The recipe of a merged model as a request: its settings, and its inputs where they are now."""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from darelib.core.text import DareError, list_names
from darelib.models.directories import KNOWN_FILES
from darelib.models.inputs import open_models
from darelib.models.packed import PACKED_KEY
from darelib.models.source import (
    RECIPE_FILE,
    Source,
    download,
    last_parts,
    list_recorded_parts,
    recorded_name,
)
from darelib.models.tensorfile import AGAIN_HINT, TensorFile, file_sha256
from darelib.models.vocabulary import digest_tokenizer
from darelib.output.destination import RECIPE_KEY
from darelib.output.directory import (
    UNKNOWN_HINT,
    check_seal,
    explain_damage,
    recipe_metadata,
)
from darelib.requests.readers import check_recipe, load_request, parse_request
from darelib.requests.request import Request


def find_merged(given: str | Path) -> Path:
    """A merged model: a directory may be named by its recipe or its index."""
    path = Path(os.path.expanduser(given))
    is_inside = path.name == RECIPE_FILE or (path.name in KNOWN_FILES and path.suffix == ".json")
    return path.parent if is_inside and path.is_file() else path


def read_recipe(path: Path) -> Request:
    """The recipe of a merged file or directory, as a request to merge it again."""
    path = find_merged(path)
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
        raise explain_packed(path)
    if recipe is None:
        raise DareError(f"{str(path)!r} has no recipe", UNKNOWN_HINT)
    if file.metadata != recipe_metadata(recipe):
        raise explain_damage(path)
    request = parse_request(recipe, f"the recipe of {path}", path.parent)
    check_recipe(request, path)
    return request


def explain_packed(path: Path) -> DareError:
    return DareError(
        f"{str(path)!r} is a packed model", "it can only be merged: give it to --merge"
    )


def locate_inputs(request: Request, given: Sequence[str], path: Path) -> Request:
    """A recipe's request, with its inputs where they are now: among the models given, or by name.

    Paths are looked for beside the merged model (or the recipe's file, path), from the folder above
    and in the working directory. Only what is what it was is accepted, by its fingerprint.
    """
    if request.packed:
        raise explain_packed(path)
    folder = Path(os.path.abspath(path)).parent
    folders = (folder.parent if path.name == RECIPE_FILE else folder, Path.cwd())
    inputs: list[Source] = []
    used: set[str] = set()
    for entry in request.inputs:
        fitting = _find_input(entry, given, folders, inputs[:1])
        used |= {source.name for source in fitting}
        name = str(entry.get("file", ""))
        inputs.append(dataclasses.replace(download(fitting[0]), recorded=name))
    sources = [source for source in (request.base, *request.merge) if source]
    if sum(len(source.models) for source in sources) != len(inputs):
        raise DareError(f"the recipe of {str(path)!r} names other models than inputs", AGAIN_HINT)
    found = iter(inputs)
    base, *merge = [source.find_models(lambda _: next(found)) for source in sources]
    for name in given:
        if name not in used:
            raise DareError(
                f"{name!r} is none of the models that the recipe was made with",
                "leave it out; to merge other models, give a configuration of your own",
            )
    return dataclasses.replace(
        request,
        base=base,
        merge=tuple(merge),
        tokenizer=_locate("tokenizer", request.tokenizer, inputs),
        chat_template=_locate("chat_template", request.chat_template, inputs),
    )


def check_examples(request: Request) -> None:
    """Refuse other examples than a recipe was made with: it holds no text of them."""
    base, *models = [entry.get("examples") for entry in request.inputs]
    sources = [request.base_examples, *request.examples]
    given = [None if source is None else source.path for source in sources]
    wanted = [base, *models] if any(models) else [None]
    names = [str(entry.get("file")) for entry in wanted if isinstance(entry, dict)]
    if [each is None for each in given] != [each is None for each in wanted]:
        raise DareError(
            f"the recipe was matched with {list_names(names)}"
            if names
            else "the recipe was made without examples",
            "give them with --examples and --base-examples" if names else "leave --examples out",
        )
    for entry, path in zip(wanted, given, strict=True):
        is_known = path and isinstance(entry, dict) and path.is_file()
        if path and entry and is_known and file_sha256(path) != entry.get("sha256"):
            raise DareError(
                f"{path.name!r} is not the {entry.get('file')!r} that the recipe was matched with",
                "give that file, in the same order; for other examples, use no recipe",
            )


def _find_input(
    entry: Mapping[str, Any], given: Sequence[str], folders: Sequence[Path], base: Sequence[Source]
) -> list[Source]:
    """What is an input of a recipe: all such models that are given, or else one by its name."""
    name = str(entry.get("file", ""))
    candidates = [*map(Source.of_model, given), *_find_named(name, folders)]
    # The last one is named where none fits.
    candidates.sort(key=lambda each: last_parts(recorded_name(each)) == last_parts(name))
    looked = " nor in ".join(repr(str(folder)) for folder in dict.fromkeys(folders))
    why = f"it is {'not' if folders[0] == folders[1] else 'neither'} in {looked}"
    fitting: list[Source] = []
    for candidate in candidates:
        if fitting and candidate.name not in given:
            break
        difference = find_difference(candidate, entry, base)
        if difference:
            why = f"{candidate.name!r} is another one: {difference}"
        else:
            fitting.append(candidate)
    if not fitting:
        raise DareError(
            f"cannot find {name!r}, which the recipe was made with: {why}",
            "say where the models are with --base and --merge; "
            "to merge others, give a configuration of your own",
        )
    return fitting


def _find_named(name: str, folders: Sequence[Path]) -> Iterator[Source]:
    """What has the name of an input, on the Hub or in these folders; also a model and an adapter
    that have it together.
    """
    for way in list_recorded_parts(name):
        found = [_find_part(part, folders) for part in way]
        for sources in itertools.product(*found):
            yield Source.join(*sources) if len(sources) > 1 else sources[0]


def _find_part(name: str, folders: Sequence[Path]) -> list[Source]:
    last = Path(name).name
    above = [folders[0].parent] if last != name else []  # adapters/math, for adapters/merged
    paths = [folder / name for folder in (*folders, *above)]
    paths += [path for folder in folders for path in (folder / last, folder)]  # which were moved
    unique = dict.fromkeys(paths)
    named = [path for path in unique if path.name == last and os.path.exists(path)]
    is_on_hub = "@" in name and "/" in name
    return [*(Source(str(path), path) for path in named), *([Source.of(name)] if is_on_hub else ())]


def _locate(what: str, source: Source | None, inputs: Sequence[Source]) -> Source | None:
    """Whose tokenizer or chat template a recipe asks for: an input's, or what a flag names."""
    if source is None or source.is_word or not source.recorded:
        return source
    parts = [part for model in inputs for part in (model, *model.joined)]
    for shorten in (str, last_parts):  # it may have been given by another path
        for part in parts:
            if shorten(recorded_name(part)) == shorten(source.name):
                return dataclasses.replace(part, recorded=source.name)
    raise DareError(
        f"the {what} of the recipe, {source.name!r}, is none of its inputs",
        f"say where it is with --{what.replace('_', '-')}",
    )


def find_difference(source: Source, entry: Mapping[str, Any], base: Sequence[Source]) -> str:
    """What is not as a recipe says of an input; empty: it is that very model."""
    try:
        with open_models([*base, source]) as inputs:
            fingerprint = dict(inputs[-1].fingerprint)
            if "tokenizer_sha256" in entry:
                fingerprint["tokenizer_sha256"] = digest_tokenizer(inputs[-1].folder)
            for key, value in fingerprint.items():
                if entry.get(key, value) != value:
                    return f"its {key} is {value}, not {entry[key]}"
    except DareError as error:
        return str(error)
    return ""
