"""What a model directory has besides its tensors: configuration, tokenizer, index, model card, recipe."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.methods import METHODS
from darelib.models import Input
from darelib.models.checkpoint import ADAPTER_CONFIG, ADAPTER_FILE, CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, part_name
from darelib.models.jsonfile import MAX_JSON, read_json
from darelib.models.tensorfile import TensorInfo, open_regular
from darelib.output.destination import Destination, digest_of, is_weights, list_files
from darelib.output.publish import PlannedFile
from darelib.output.recipe import RECIPE_FILE, recipe_text, seal
from darelib.readers import Source
from darelib.text import ConfigError, DareError, as_text, count_of

CARD_FILE: Final = "README.md"
# Besides weights: what belongs to the base's own page or training, and not to a merged model.
NOT_COPIED: Final = re.compile(
    r"(?i)\..*|README\.md|dare_recipe\.toml|adapter_config\.json|trainer_state\.json|checkpoint-\d+|global_step\d+"
    r"|runs|wandb|__pycache__"
)
TOKENIZER_PATTERNS: Final = (
    "tokenizer*", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "tekken.json", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "bpe.codes", "normalizer.json", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip
TOKENIZER_FILES: Final = re.compile("|".join(map(fnmatch.translate, TOKENIZER_PATTERNS)))

MAX_TOKENIZER: Final = 1 << 26  # bytes; the largest known have 50 MB


def collect_side_files(
    config: DareConfig, inputs: Sequence[Input], version: str, destination: Destination, files: Sequence[PlannedFile],
    index: bytes | None = None, dtype: str | None = None, tokenizer: Source | None = None,
) -> dict[str, bytes | Path]:  # fmt: skip
    """All files of an output besides the tensors, by name: their content, or what to copy.

    index: for a model in several files. dtype: the type of the tensors, if it is not the base's.
    """
    if not destination.directory:
        if tokenizer is not None:
            raise ConfigError("tokenizer_from means nothing to an output of one file", "name a directory instead")
        return {}
    base = inputs[0]
    side: dict[str, bytes | Path] = dict(find_side_files(base.folder))
    if tokenizer is not None:
        side = {name: path for name, path in side.items() if not TOKENIZER_FILES.fullmatch(name)}
        side |= tokenizer_files(tokenizer)
    if CONFIG_FILE in side and base.folder is not None:
        name = part_name(base.source, base.folder / CONFIG_FILE)
        table = read_json(base.folder / CONFIG_FILE, name)  # also where it is copied: it must be sound
        if dtype is not None:
            side[CONFIG_FILE] = update_config(table, dtype, name)
    if index is not None:
        side[INDEX_FILE] = index
    side[CARD_FILE] = model_card(config, inputs, recipe_text(config, inputs, version)).encode()
    written = {as_text(name): digest_of(content) for name, content in side.items()}
    written |= {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
    recipe = recipe_text(config, inputs, version, destination.path, dict(sorted(written.items())), tokenizer)
    side[RECIPE_FILE] = seal(recipe.encode())
    return dict(sorted(side.items()))


def find_side_files(folder: Path | None) -> dict[str, Path]:
    """What a model directory has besides weights, by name: configuration, tokenizer, templates, code, licences."""
    found = {}
    for path in sorted(folder.iterdir()) if folder else ():
        if NOT_COPIED.fullmatch(path.name) or is_weights(path.name.lower()):
            continue
        if path.is_file():
            if not os.access(path, os.R_OK):  # to be known before the merge, not after it
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            found[path.name] = path
        elif path.is_dir() and not path.is_symlink() and not any(map(is_weights, list_files(path))):
            found |= {f"{path.name}/{name}": below for name, below in find_side_files(path).items()}
    return found


def tokenizer_files(source: Source) -> dict[str, Path]:
    """The files of a model that make up its tokenizer."""
    found = {name: path for name, path in find_side_files(source.path).items() if TOKENIZER_FILES.fullmatch(name)}
    if not found:
        raise DareError(f"there is no tokenizer in {source.name!r}", "tokenizer_from wants a model directory")
    return found


def update_config(config: dict[str, Any], dtype: str, name: str) -> bytes:
    """A model's config.json with another type of tensors in it, wherever it names one."""

    def update(table: dict[str, Any]) -> bool:
        keys = [key for key in ("dtype", "torch_dtype") if key in table]
        table |= dict.fromkeys(keys, dtype)
        parts = [value for key, value in table.items() if key.endswith("_config") and isinstance(value, dict)]
        return any([bool(keys), *(update(part) for part in parts if part is not table.get("quantization_config"))])

    written = io.StringIO()
    try:
        if not update(config):
            config["torch_dtype"] = dtype  # the name that all versions of transformers read
        for piece in json.JSONEncoder(indent=2).iterencode(config):
            if written.tell() > MAX_JSON:
                raise RecursionError  # with what is deep inside, the white space before it takes most of it
            written.write(piece)
    except RecursionError:
        raise DareError(f"{name!r} is nested too deeply", "fix it") from None
    return written.getvalue().encode() + b"\n"


def make_index(tensors: Mapping[str, TensorInfo], files: Sequence[PlannedFile]) -> bytes:
    """The index of a model in several files, as transformers writes it."""
    weight_map, outputs = {name: files[info.file].name for name, info in tensors.items()}, tensors.values()
    metadata = {"total_parameters": sum(t.count for t in outputs), "total_size": sum(t.nbytes for t in outputs)}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode() + b"\n"


def model_card(config: DareConfig, inputs: Sequence[Input], recipe: str) -> str:
    """A README.md as the Hugging Face Hub wants it, with the recipe in words and as it is."""
    names = [card_name(model.source) for model in inputs]
    models = names[1:]
    settings = config.general(len(models))
    lines = ["---", "base_model:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))]
    lines += ["base_model_relation: merge", "library_name: transformers", "tags:", "- merge", "- dare", "---", ""]
    lines += [
        f"# A DARE merge of {count_of(len(models), 'model')}",
        "",
        f"Merged from `{names[0]}` and models fine-tuned from it by [DARE](https://arxiv.org/abs/2311.03099) (drop and "
        "rescale): most of what each fine-tune changed is dropped at random, the rest is rescaled, and what is left is "
        f"{METHODS[config.method].card}.",
        "",
        "| model | seed | dropped | kept deltas are divided by | weight |",
        "| --- | --- | --- | --- | --- |",
    ]
    for i, name in enumerate(models):
        weight = METHODS[config.method].show_weight(settings, i)
        rate, divisor = settings.drop_rates[i], settings.divisors[i]
        lines.append(f"| `{name}` | {config.seed + i} | {rate:.4g} | {divisor:.4g} | {weight} |")
    lines += ["", f"The merged delta is multiplied by {config.lambda_coeff:g} and added to the base."]
    if settings.keep_ratio < 1:
        lines.append(f"Of what survives the drop, the largest {settings.keep_ratio:.4g} of each tensor is kept.")
    if config.rules:
        lines.append("Some tensors have settings of their own; they are in the recipe.")
    again = "This recipe makes the same tensors again, byte for byte, from the same inputs"
    lines += ["", f"{again} (`{RECIPE_FILE}` has it with paths):", "", "```toml", recipe.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def card_name(source: Source) -> str:
    """What a card calls a model: its name on the Hub, or the last part of its path."""
    if source.pinned:
        return source.pinned.partition("@")[0]
    path = Path(os.path.abspath(source.path))
    in_directory = path.name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE, ADAPTER_CONFIG)
    return as_text(path.parent.name if in_directory else path.name.removesuffix(".safetensors"))


def find_warnings(destination: Destination, base: Input, tokenizer: Source | None, rows: int) -> Iterator[str]:
    """What to warn of in an output directory. rows: of the merged model's embedding, 0 if unknown."""
    if not destination.directory:
        return
    if base.folder is None or not (base.folder / CONFIG_FILE).exists():
        yield f"{base.name} has no {CONFIG_FILE} beside it, so the output has none: loaders will want one"
    if tokenizer is not None and rows and (path := tokenizer_files(tokenizer).get("tokenizer.json")):
        highest = highest_token(path)
        if highest >= rows:
            yield f"the tokenizer knows tokens up to {highest:,}, and the merged model has rows for {rows:,} tokens"


def highest_token(path: Path) -> int:
    """The largest number of a token in a tokenizer.json; -1 if it is not known."""
    try:
        with open_regular(path) as file:
            tokenizer = json.loads(file.read(MAX_TOKENIZER))  # of a longer file, half is no JSON
        vocabulary, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or ()
        # In a vocabulary that is a list, the place of an entry is its number.
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return int(max([-1, *numbers, *(token["id"] for token in added)]))
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
        return -1
