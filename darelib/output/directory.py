"""What a model directory has besides its tensors: configuration, tokenizer, index, card, recipe."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from darelib.config import DareConfig
from darelib.core.drops import DROPS, L1, NONE, RANDOM, Thinning
from darelib.core.families import find_merge_method
from darelib.core.methods import METHODS, TensorSettings
from darelib.core.text import DareError, as_text, count_of
from darelib.models.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, part_name
from darelib.models.jsonfile import MAX_JSON, read_json
from darelib.models.source import Source, recorded_name
from darelib.models.tensorfile import TensorInfo
from darelib.output.destination import digest_of, is_weights, list_files
from darelib.output.recipe import RECIPE_FILE, recipe_text, seal
from darelib.output.tokenizer import SideFiles, TokenizerChoice, place_tokenizer
from darelib.plan.plan import find_seeds
from darelib.plan.tensors import PlannedFile

CARD_FILE: Final = "README.md"
# Besides weights: what belongs to the base's own page or training, and not to a merged model.
NOT_COPIED: Final = re.compile(
    r"(?i)\..*|README\.md|dare_recipe\.toml|adapter_config\.json|trainer_state\.json"
    r"|checkpoint-\d+|global_step\d+|runs|wandb|__pycache__"
)
# As the Hugging Face Hub wants it.
CARD: Final = """\
---
base_model:
{models}
base_model_relation: merge
library_name: transformers
tags:
- merge
- dare
---

# A DARE merge of {count}

Merged from `{base}` and models fine-tuned from it by {drops} {method}.

| model | seed | dropped | kept deltas are divided by | weight |
| --- | --- | --- | --- | --- |
{table}

The merged delta is multiplied by {lambda_coeff:g} and added to the base.
{remarks}
This recipe makes the same tensors again, byte for byte, from the same inputs:

```toml
{recipe}
```
"""


def collect_side_files(
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    version: str,
    files: Sequence[PlannedFile],
    changes: Mapping[str, tuple[Any, Any]],
    left_out: Collection[str],
    tokenizer: TokenizerChoice,
    rows: int,
    index: bytes | None,
) -> tuple[SideFiles, list[str]]:
    """All files of a model directory besides the tensors, and what to tell about them.

    changes: old and new values of settings in config.json. left_out: files of the base that the
    output has no use for. rows: of the embedding, 0 if unknown. index: where there are several.
    """
    base = inputs[0]
    found = find_side_files(base.folder)
    side: SideFiles = {name: path for name, path in found.items() if name not in left_out}
    notes = place_tokenizer(side, tokenizer, inputs, rows)
    path = (base.folder or base.files[0].path.parent) / CONFIG_FILE
    if path.is_file():
        side[CONFIG_FILE] = path
        name = part_name(base.source, path)
        table = read_json(path, name)  # it must be sound, copied or not
        if changes:
            side[CONFIG_FILE] = update_config(table, changes, name)
    else:
        notes.append(
            f"{base.name} has no {CONFIG_FILE} beside it, so the output has none: "
            "loaders will want one"
        )
    if index is not None:
        side[INDEX_FILE] = index
    recipe = recipe_text(config, inputs, version, tokenizer)
    side[CARD_FILE] = model_card(config, inputs, recipe).encode()
    written = {as_text(name): digest_of(content) for name, content in side.items()}
    written |= {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
    recipe = recipe_text(config, inputs, version, tokenizer, dict(sorted(written.items())))
    side[RECIPE_FILE] = seal(recipe.encode())
    return dict(sorted(side.items())), notes


def find_side_files(folder: Path | None) -> dict[str, Path]:
    """What a model directory has besides weights: configuration, tokenizer, code, licences."""
    side = {}
    for path in sorted(folder.iterdir()) if folder else ():
        if NOT_COPIED.fullmatch(path.name) or is_weights(path.name.lower()):
            continue
        if path.is_file():
            if not os.access(path, os.R_OK):  # to be known before the merge, not after it
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            side[path.name] = path
        elif path.is_dir() and not path.is_symlink() and not any(map(is_weights, list_files(path))):
            side |= {f"{path.name}/{name}": below for name, below in find_side_files(path).items()}
    return side


def update_config(
    config: dict[str, Any], changes: Mapping[str, tuple[Any, Any]], name: str
) -> bytes:
    """A model's config.json with other values of some settings, wherever it has the old one.

    An old value of None: any. A new value of None: without the setting.
    """
    tables = [config]  # and those of its parts
    for table in tables:
        tables += [
            part
            for key, part in table.items()
            if key.endswith("_config") and key != "quantization_config" and isinstance(part, dict)
        ]
    for key, (old, value) in changes.items():
        # All versions of transformers read the older of the two names of the type.
        keys = ("dtype", "torch_dtype") if key == "torch_dtype" else (key,)
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


def make_index(tensors: Mapping[str, TensorInfo], files: Sequence[PlannedFile]) -> bytes:
    """The index of a model in several files, as transformers writes it."""
    metadata = {
        "total_parameters": sum(tensor.count for tensor in tensors.values()),
        "total_size": sum(tensor.nbytes for tensor in tensors.values()),
    }
    weight_map = {name: files[tensor.file].name for name, tensor in tensors.items()}
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def model_card(config: DareConfig, inputs: Sequence[Checkpoint], recipe: str) -> str:
    """A README.md with the recipe in words and as it is."""
    method = METHODS[config.method]
    seeds = find_seeds(config, inputs)
    base, *models = [card_name(model.source) for model in inputs]
    settings = config.general(len(models))
    used = [t for own in config.resolve_all(len(models)) for t in own.thinnings if t.drop_rate]
    rows = []
    for i, name in enumerate(models):
        dropped, divisor = describe_thinning(settings.thinnings[i])
        weight = method.show_weight(settings, i)
        rows.append(f"| `{name}` | {seeds[i]} | {dropped} | {divisor} | {weight} |")
    remarks = []
    if settings.keep_ratio < 1:
        remarks.append(
            f"Of what survives the drop, the largest {settings.keep_ratio:.4g} of each tensor "
            "is kept.\n"
        )
    if config.rules:
        remarks.append("Some tensors have settings of their own; they are in the recipe.\n")
    if config.has_gradients:
        remarks.append(
            "Some settings change over the layers, as the recipe says; here they are as outside "
            "of them.\n"
        )
    if words := describe_for_mergekit(settings, {thinning.drop for thinning in used}):
        mergekit = "[mergekit](https://github.com/arcee-ai/mergekit)"
        remarks.append(f"\nIn the words of {mergekit}: {words}.\n")
    return CARD.format(
        models="\n".join(f"- {json.dumps(name)}" for name in dict.fromkeys([base, *models])),
        count=count_of(len(models), "model"),
        base=base,
        drops=describe_drops(used),
        method=method.card(settings),
        table="\n".join(rows),
        lambda_coeff=settings.lambda_coeff,
        remarks="".join(remarks),
        recipe=recipe.rstrip("\n"),
    )


def describe_drops(used: Sequence[Thinning]) -> str:
    """What is dropped of the deltas, up to "... and what is left is".

    used: all that drop something.
    """
    cards = [DROPS[drop].card for drop in dict.fromkeys(t.drop for t in used)]
    if not used:
        whose, _ = DROPS[RANDOM].card
        return f"{whose}: here nothing is dropped, and all that each fine-tune changed is"
    whose = " and ".join(whose for whose, _ in cards)
    how = ", or ".join(how for _, how in cards)
    rescaled = "the rest is rescaled, " if any(t.rescale != NONE for t in used) else ""
    return (
        f"{whose}: most of what each fine-tune changed is dropped {how}, {rescaled}"
        "and what is left is"
    )


def describe_thinning(thinning: Thinning) -> tuple[str, str]:
    """What is dropped of a model, and what the rest is divided by."""
    dropped = f"{thinning.drop_rate:.4g}"
    if thinning.drop != RANDOM:
        names = DROPS[thinning.drop].settings
        own = [f", {name} {getattr(thinning, name):.4g}" for name in names]
        dropped += f" ({thinning.drop}{''.join(own)})"
    if thinning.rescale == L1 and thinning.drop_rate:
        return dropped, "what restores the sum of sizes"
    if thinning.divides_each:
        return dropped, "the probability to keep each"
    return dropped, f"{thinning.divisor:.4g}"


def describe_for_mergekit(settings: TensorSettings, drops: Collection[str]) -> str:
    """The method and its densities as mergekit has them; empty where it has no such method."""
    [drop, *others] = drops or ("",)
    name = find_merge_method(settings.method, drop)
    trimmed = settings.keep_ratio < 1  # which is all the dropping that its ties does
    if others or name is None or (trimmed and drop):
        return ""
    if name == "slerp":
        return "`merge_method: slerp`"
    kept = [settings.keep_ratio if trimmed else 1 - rate for rate in settings.drop_rates]
    densities = ", ".join(dict.fromkeys(f"{density:.4g}" for density in kept))
    return (
        f"`merge_method: {name}`, `density: {densities}`, `lambda: {settings.lambda_coeff:g}`, "
        f"`normalize: {str(settings.normalize).lower()}`"
    )


def card_name(source: Source) -> str:
    """What a card calls a model: its name on the Hub, or the last part of its path."""
    name = recorded_name(source)
    return name.partition("@")[0] if "/" in name else name.removesuffix(".safetensors")
