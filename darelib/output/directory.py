"""The other files of a merged model: a recipe and, in a directory, a card, an index, a
configuration.
"""

import codecs
import hashlib
import io
import itertools
import json
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.core.drops import DROPS, RANDOM
from darelib.core.mask import MASK_NAME
from darelib.core.text import MAX_TOML, ConfigError, DareError, as_text, count_of, printable
from darelib.methods import METHODS
from darelib.methods.looks import TensorSettings
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import CONFIG_FILE, find_parts
from darelib.models.forms import Entry
from darelib.models.source import RECIPE_FILE, Source, last_parts, recorded_name
from darelib.models.tensorfile import AGAIN_HINT, MAX_JSON, open_regular
from darelib.models.vocabulary import MAX_TOKENIZER, TOKENIZER_FILE
from darelib.output.destination import MATCHED_KEY, RECIPE_KEY, digest_of, is_weights, list_files
from darelib.output.tokenizer import (
    GENERATION_FILE,
    SPECIAL_MAP,
    TOKENIZER_CONFIG,
    SideFiles,
    TokenizerChoice,
    check_readable,
)
from darelib.plan.plan import find_seeds
from darelib.plan.tensorplan import PlannedFile

RECIPE_SEAL: Final = "# SHA-256 of what is above: "
UNKNOWN_HINT: Final = "only what this tool has merged has a recipe"
CARD_FILE: Final = "README.md"
TYPE_KEYS: Final = ("dtype", "torch_dtype")
PIECE: Final = 1 << 20  # bytes
SHARD: Final = re.compile(r"(.+)-\d{5,}-of-\d{5,}\.safetensors")
# What every loader parses.
TABLES: Final = (CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG, SPECIAL_MAP)
# Besides weights: what belongs to the base's own page or training, and not to a merged model.
NOT_COPIED: Final = re.compile(
    r"(?i)\..*|README\.md|dare_recipe\.toml|adapter_config\.json|trainer_state\.json"
    r"|checkpoint-\d+|global_step\d+|runs|wandb|__pycache__"
)
DARE: Final = "dare"
EQUAL: Final = "byte for byte"
NEARLY_EQUAL: Final = "byte for byte on the same machine and nearly so on others"
# As the Hugging Face Hub wants it.
CARD: Final = """\
---
base_model:
{front}
base_model_relation: {relation}
library_name: {library}
tags:
{tags}
---

# {title}{kind}

{story}

The recipe has every setting. It makes the same tensors again, {equal}, from the same inputs:

```toml
{recipe}
```
"""

STORY: Final = """\
Merged from {base} and models fine-tuned from it by {ways}: {drops} {method}.

{models}"""
MATCHED_STORY: Final = """

Then matched: with a few examples of each skill, each matrix is solved for, so that it gives what
the matrix of the model with that skill gives."""
STACK_STORY: Final = """\
Made of {base}: layers one after the other, {method}."""


def find_side_files(folder: Path | None, home: Path | None = None) -> dict[str, Path]:
    """What a model directory has besides weights: configuration, tokenizer, code, licences.

    home: the model's, of a directory below it.
    """
    side = {}
    parts = find_parts(folder) if folder else {}
    for path in sorted(folder.iterdir()) if folder else ():
        if NOT_COPIED.fullmatch(path.name) or is_weights(path.name.lower()):
            continue
        if path.is_file():
            check_readable(home or path.parent, [path])
            side[path.name] = path
        elif path.is_dir() and not path.is_symlink():
            weights = list(filter(is_weights, list_files(path)))
            is_other = weights and path.name not in parts
            found = {} if is_other else find_side_files(path, home or folder)
            if not parts.get(path.name, True):  # which cannot be merged
                found |= {name: path / name for name in weights}
            side |= {f"{path.name}/{name}": below for name, below in found.items()}
    return side


def find_linked(folder: Path | None) -> list[str]:
    """The folders in a model's that are links: they may lead anywhere, and are not followed."""
    return [
        path.name
        for path in sorted(folder.iterdir() if folder else ())
        if path.is_symlink() and path.is_dir() and not NOT_COPIED.fullmatch(path.name)
    ]


def list_tables(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A model's configuration, and those of its parts."""
    tables = [config]
    for table in tables:
        tables += [
            part
            for key, part in table.items()
            if key.endswith("_config") and key != "quantization_config" and isinstance(part, dict)
        ]
    return tables


def update_config(
    config: dict[str, Any], changes: Mapping[str, tuple[Any, Any]], name: str
) -> bytes:
    """A model's config.json with other values of some settings, wherever it has the old one.

    An old value of None: any. A new value of None: without the setting.
    """
    tables = list_tables(config)
    for key, (old, value) in changes.items():
        # All versions of transformers read the older of the two names of the type.
        keys = TYPE_KEYS if key == "torch_dtype" else (key,)
        present = [
            (table, each)
            for table in tables
            for each in keys
            if each in table and old in (None, table[each])
        ]
        for table, each in present or [(config, key)]:
            table[each] = value
            if value is None:
                del table[each]
    written = io.StringIO()
    try:
        for piece in json.JSONEncoder(indent=2).iterencode(config):
            if written.tell() > MAX_JSON:  # of what is deep inside, most is the space before it
                raise RecursionError
            written.write(piece)
    except RecursionError:
        raise DareError(f"{name!r} is nested too deeply", "fix it") from None
    return written.getvalue().encode() + b"\n"


def check_tables(side: SideFiles) -> None:
    """Refuse what loaders could not parse, whether it was copied or put together."""
    for name in filter(side.__contains__, TABLES):
        content = side[name]
        shown = repr(str(content)) if isinstance(content, Path) else f"{name!r} of the output"
        try:
            if isinstance(content, Path):
                with open_regular(content) as file:
                    content = file.read(MAX_TOKENIZER + 1)
            check_json(content)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise DareError(f"{shown} is no JSON: {reason}", AGAIN_HINT) from None


def check_json(data: bytes) -> None:
    """Refuse what is no JSON, in as little memory as a tokenizer of some ten megabytes allows."""
    if len(data) > MAX_TOKENIZER:
        raise ValueError("it is larger than any model's")
    pieces = (data[start : start + PIECE] for start in range(0, len(data), PIECE))
    for _ in codecs.iterdecode(pieces, "utf-8"):
        pass
    # What is UTF-8 has the same syntax as Latin-1, which needs a quarter of the memory.
    json.loads(data.decode("latin-1"), object_pairs_hook=lambda _: None)


def make_indexes(tensors: Mapping[str, Entry], files: Sequence[PlannedFile]) -> dict[str, bytes]:
    """By name: the indexes of a model, or of components, in several files."""
    sharded: dict[str, dict[str, Entry]] = {}
    for name, info in tensors.items():
        if shard := SHARD.fullmatch(files[info.file].name):
            sharded.setdefault(shard[1], {})[name] = info
    return {
        f"{stem}.safetensors.index.json": make_index(own, files, stem[: stem.rfind("/") + 1])
        for stem, own in sharded.items()
    }


def make_index(tensors: Mapping[str, Entry], files: Sequence[PlannedFile], folder: str) -> bytes:
    """An index as transformers writes it. folder: what it is in, with a slash."""
    index = {
        "metadata": {
            "total_parameters": sum(tensor.count for tensor in tensors.values()),
            "total_size": sum(tensor.nbytes for tensor in tensors.values()),
        },
        "weight_map": {
            name.removeprefix(folder): files[tensor.file].name.removeprefix(folder)
            for name, tensor in tensors.items()
        },
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def recipe_text(
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    version: str,
    tokenizer: TokenizerChoice,
    files: Mapping[str, str] | None = None,
    packed: bool = False,
    matched: Mapping[str, str] | None = None,
) -> str:
    """Every setting that determines the output, as a configuration that makes it again.

    No absolute path of this machine leaves it. files: the digests of a directory's other files.
    packed: it is a packed model's. matched: the digests of tensors that were matched with examples.
    """
    import tomli_w

    dare = config.recipe_settings(directory=files is not None)
    base, *others = [describe_source(model.source) for model in inputs]
    models: dict[str, Any] = {"base_file": base, "merge_files": others}
    recipe: dict[str, Any] = {
        "version": version,
        "mask": MASK_NAME,
        "seeds": list(find_seeds(config, inputs)),
        "inputs": [
            {"file": name, **part.fingerprint}
            for model in inputs
            for name, part in zip(name_parts(model.source).values(), model.parts, strict=True)
        ],
    }
    if inputs[0].heights[1]:  # it decides which rows are merged
        models["tokenizer"] = tokenizer.settings.get("tokenizer", tokenizer.name)
    if files is not None:
        models |= tokenizer.settings
        recipe["files"] = dict(files)
    if packed:
        recipe["packed"] = True
    if matched:
        recipe[MATCHED_KEY] = dict(matched)
    rules = [rule.as_table() for rule in config.typed_rules]
    listed = {"rules": rules} if rules else {}
    text = tomli_w.dumps({"dare": dare, "models": models, **listed, "recipe": recipe})
    if len(text.encode()) > MAX_TOML - 200:  # with its seal
        raise ConfigError(
            f"the recipe would be longer than {MAX_TOML:,} bytes",
            "give fewer rules, or larger shards",
        )
    return text


def name_parts(source: Source) -> dict[Source, str]:
    """What a recipe calls the models that another is made of: no two by the same name."""
    names: dict[Source, str] = {}
    for part in source.models:
        name = recorded_name(part)
        same = [known for known in names if recorded_name(known) == name]
        names[part] = f"{name}~{len(same) + 1}" if same else name
    return names


def describe_source(source: Source) -> Any:
    """A model as a recipe has it: its name, or the layers that it is made of."""
    names = name_parts(source)
    return [each.as_table(names[each.source]) for each in source.slices] or names[source]


def recipe_metadata(recipe: str) -> dict[str, str]:
    """The metadata of a merged file. The digest reveals damage to the recipe itself."""
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    return {"format": "pt", RECIPE_KEY: recipe, f"{RECIPE_KEY}_sha256": digest}


def seal(recipe: bytes) -> bytes:
    """The recipe of a directory with a last line that reveals damage to it."""
    return recipe + f"{RECIPE_SEAL}{hashlib.sha256(recipe).hexdigest()}\n".encode()


def check_seal(folder: Path) -> None:
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


def add_recipe(
    side: SideFiles,
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    version: str,
    tokenizer: TokenizerChoice,
    files: Sequence[PlannedFile],
    packed: bool = False,
    matched: Mapping[str, str] | None = None,
) -> None:
    """Add the recipe to the files of a model directory, with the digests of all others."""
    written = {as_text(name): digest_of(content) for name, content in side.items()}
    written |= {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
    digests = dict(sorted(written.items()))
    recipe = recipe_text(config, inputs, version, tokenizer, digests, packed, matched)
    side[RECIPE_FILE] = seal(recipe.encode())


@dataclass(frozen=True)
class CardKind:
    relation: str = "merge"  # to the base
    library: str = "transformers"
    tags: tuple[str, ...] = ()
    words: str = ""  # in the title
    is_exact: bool = True  # whether it has the same bytes everywhere
    names_all: bool = True  # whether it is made of all inputs, and not only for the base


MODEL_CARD: Final = CardKind()
DIFFUSERS_CARD: Final = CardKind(library="diffusers")


def model_card(
    config: DareConfig, inputs: Sequence[Checkpoint], recipe: str, kind: CardKind = MODEL_CARD
) -> str:
    """A README.md with the recipe in words and as it is."""
    base, *models = [as_code(card_name(model.source)) for model in inputs]
    settings = config.general(len(models))
    resolved = config.resolve_all(len(models))
    examples = [model.parts[0].examples for model in inputs]
    are_exact = all(METHODS[own.method].exact for own in resolved) and not any(examples)
    is_exact = kind.is_exact and are_exact
    drops = list_drops(resolved)
    methods = [METHODS[name] for name in dict.fromkeys(own.method for own in resolved)]
    # Of random drops it is known by the paper's name.
    words = [DARE if drop == RANDOM else drop for drop in drops] + [each.name for each in methods]
    papers = [DROPS[drop].card[0] for drop in drops] + [each.paper or each.name for each in methods]
    own = inputs if kind.names_all else inputs[:1]
    listed = [pair for model in own for pair in name_parts(model.source).items()]
    # Of a model with an adapter on top, both: the Hub knows no others.
    named = [show_name(n).split("+") if each.joined else [show_name(n)] for each, n in listed]
    title = f"A merge of {count_of(len(models), 'model')} by {' and '.join(words)}"
    if not models:
        title = f"Layers of {count_of(len(listed), 'model')}"
    story = STORY if models else STACK_STORY
    return CARD.format(
        front="\n".join(f"- {as_yaml(name)}" for name in dict.fromkeys(itertools.chain(*named))),
        relation=kind.relation,
        library=kind.library,
        tags="\n".join(f"- {tag}" for tag in ("merge", *words, *kind.tags)),
        title=title,
        kind=kind.words,
        story=story.format(
            base=base,
            ways=" and ".join(papers),
            drops=describe_drops(drops),
            method=METHODS[settings.method].card(settings),
            models="\n".join(f"- {name}" for name in models),
        )
        + (MATCHED_STORY if any(examples) else ""),
        equal=EQUAL if is_exact else NEARLY_EQUAL,
        recipe=recipe.rstrip("\n"),
    )


def list_drops(resolved: Sequence[TensorSettings]) -> list[str]:
    """The drops that leave something out."""
    used = [thinning for own in resolved for thinning in own.thinnings if thinning.drop_rate]
    return list(dict.fromkeys(thinning.drop for thinning in used))


def describe_drops(drops: Sequence[str]) -> str:
    """What is dropped of the deltas, up to "... and what is left is"."""
    if not drops:
        return "what each fine-tune changed is"
    how = ", or ".join(DROPS[drop].card[1] for drop in drops)
    return f"most of what each fine-tune changed is dropped {how}, and what is left is"


def card_name(source: Source) -> str:
    names = {part: show_name(name) for part, name in name_parts(source).items()}
    slices = [f"{names[each.source]}[{each.start}:{each.stop}]" for each in source.slices]
    return " + ".join(slices) or names[source]


def show_name(recorded: str) -> str:
    """What a card calls a model: its name on the Hub, or the last part of its path."""
    pinned = re.split(r"(?<![^+])([^+/@]+/[^+/@]+)@[^+]*", printable(recorded))
    # Every second one is a name on the Hub, without its commit.
    shown = [part if k % 2 else last_parts(part) for k, part in enumerate(pinned)]
    return "".join(shown).removesuffix(".safetensors")


def as_code(name: str) -> str:
    """A printable name in Markdown, also in a table: no sign in it is markup."""
    if not {"`", "|"} & {*name}:
        return f"`{name}`"
    signs = (f"&#{ord(sign)};" if sign in string.punctuation else sign for sign in name)
    return f"<code>{''.join(signs)}</code>"


def as_yaml(name: str) -> str:
    """A printable name in YAML: a string of JSON but for pairs of surrogates, which it lacks."""
    return json.dumps(name, ensure_ascii=False)
