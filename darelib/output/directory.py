"""What a model directory has besides its tensors: configuration, tokenizer, index, model card, recipe."""

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
from darelib.plan.files import PlannedFile
from darelib.plan.plan import find_seeds

CARD_FILE: Final = "README.md"
# Besides weights: what belongs to the base's own page or training, and not to a merged model.
NOT_COPIED: Final = re.compile(
    r"(?i)\..*|README\.md|dare_recipe\.toml|adapter_config\.json|trainer_state\.json|checkpoint-\d+|global_step\d+"
    r"|runs|wandb|__pycache__"
)


def collect_side_files(
    config: DareConfig, inputs: Sequence[Checkpoint], version: str, files: Sequence[PlannedFile],
    changes: Mapping[str, tuple[Any, Any]], tokenizer: TokenizerChoice, rows: int, index: bytes | None,
) -> tuple[SideFiles, list[str]]:  # fmt: skip
    """All files of a model directory besides the tensors, and what to tell about them.

    changes: old and new values of settings in config.json. rows: of the embedding, 0 if unknown. index: for a model in
    several files.
    """
    base = inputs[0]
    side: SideFiles = dict(find_side_files(base.folder))
    notes = place_tokenizer(side, tokenizer, inputs, rows)
    if CONFIG_FILE in side and base.folder is not None:
        name = part_name(base.source, base.folder / CONFIG_FILE)
        table = read_json(
            base.folder / CONFIG_FILE, name
        )  # also where it is copied: it must be sound
        if changes:
            side[CONFIG_FILE] = update_config(table, changes, name)
    else:
        notes.append(
            f"{base.name} has no {CONFIG_FILE} beside it, so the output has none: loaders will want one"
        )
    if index is not None:
        side[INDEX_FILE] = index
    side[CARD_FILE] = model_card(
        config, inputs, recipe_text(config, inputs, version, tokenizer)
    ).encode()
    written = {as_text(name): digest_of(content) for name, content in side.items()}
    written |= {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
    recipe = recipe_text(config, inputs, version, tokenizer, dict(sorted(written.items())))
    side[RECIPE_FILE] = seal(recipe.encode())
    return dict(sorted(side.items())), notes


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


def update_config(
    config: dict[str, Any], changes: Mapping[str, tuple[Any, Any]], name: str
) -> bytes:
    """A model's config.json with other values of some settings, wherever it has the old one (None: any).

    A new value of None: without the setting.
    """

    def update(table: dict[str, Any], keys: Sequence[str], old: Any, value: Any) -> bool:
        present = [key for key in keys if key in table and old in (None, table[key])]
        for key in present:
            if value is None:
                del table[key]
            else:
                table[key] = value
        parts = [
            part
            for key, part in table.items()
            if key.endswith("_config") and isinstance(part, dict)
        ]
        parts = [part for part in parts if part is not table.get("quantization_config")]
        return any([bool(present), *(update(part, keys, old, value) for part in parts)])

    written = io.StringIO()
    try:
        for key, (old, value) in changes.items():
            # All versions of transformers read the older of the two names of the type.
            if (
                not update(
                    config, ("dtype", "torch_dtype") if key == "torch_dtype" else (key,), old, value
                )
                and value is not None
            ):
                config[key] = value
        for piece in json.JSONEncoder(indent=2).iterencode(config):
            if written.tell() > MAX_JSON:
                raise RecursionError  # with what is deep inside, the white space before it takes most of it
            written.write(piece)
    except RecursionError:
        raise DareError(f"{name!r} is nested too deeply", "fix it") from None
    return written.getvalue().encode() + b"\n"


def make_index(tensors: Mapping[str, TensorInfo], files: Sequence[PlannedFile]) -> bytes:
    """The index of a model in several files, as transformers writes it."""
    weight_map, outputs = (
        {name: files[info.file].name for name, info in tensors.items()},
        tensors.values(),
    )
    metadata = {
        "total_parameters": sum(t.count for t in outputs),
        "total_size": sum(t.nbytes for t in outputs),
    }
    return (
        json.dumps(
            {"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True
        ).encode()
        + b"\n"
    )


def model_card(config: DareConfig, inputs: Sequence[Checkpoint], recipe: str) -> str:
    """A README.md as the Hugging Face Hub wants it, with the recipe in words and as it is."""
    names = [card_name(model.source) for model in inputs]
    models = names[1:]
    settings, seeds = config.general(len(models)), find_seeds(config, inputs)
    lines = ["---", "base_model:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))]
    lines += [
        "base_model_relation: merge",
        "library_name: transformers",
        "tags:",
        "- merge",
        "- dare",
        "---",
        "",
    ]
    used = [t for own in config.resolve_all(len(models)) for t in own.thinnings if t.drop_rate]
    lines += [
        f"# A DARE merge of {count_of(len(models), 'model')}",
        "",
        f"Merged from `{names[0]}` and models fine-tuned from it by {describe_drops(used)} "
        f"{METHODS[config.method].card(settings)}.",
        "",
        "| model | seed | dropped | kept deltas are divided by | weight |",
        "| --- | --- | --- | --- | --- |",
    ]
    for i, name in enumerate(models):
        weight = METHODS[config.method].show_weight(settings, i)
        dropped, divisor = describe_thinning(settings.thinnings[i])
        lines.append(f"| `{name}` | {seeds[i]} | {dropped} | {divisor} | {weight} |")
    lines += [
        "",
        f"The merged delta is multiplied by {settings.lambda_coeff:g} and added to the base.",
    ]
    if settings.keep_ratio < 1:
        lines.append(
            f"Of what survives the drop, the largest {settings.keep_ratio:.4g} of each tensor is kept."
        )
    if config.rules:
        lines.append("Some tensors have settings of their own; they are in the recipe.")
    if config.has_gradients:
        lines.append(
            "Some settings change over the layers, as the recipe says; here they are as outside of them."
        )
    if words := describe_for_mergekit(settings, {thinning.drop for thinning in used}):
        lines += ["", f"In the words of [mergekit](https://github.com/arcee-ai/mergekit): {words}."]
    again = "This recipe makes the same tensors again, byte for byte, from the same inputs"
    lines += ["", f"{again}:", "", "```toml", recipe.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def describe_drops(used: Sequence[Thinning]) -> str:
    """What is dropped of the deltas, up to "... and what is left is". used: all that drop something."""
    whose, how = zip(
        *(DROPS[drop].card for drop in dict.fromkeys(t.drop for t in used) or (RANDOM,)),
        strict=True,
    )
    if not used:
        return f"{whose[0]}: here nothing is dropped, and all that each fine-tune changed is"
    rescaled = "the rest is rescaled, " if any(t.rescale != NONE for t in used) else ""
    dropped = f"most of what each fine-tune changed is dropped {', or '.join(how)}, {rescaled}and what is left is"
    return f"{' and '.join(whose)}: {dropped}"


def describe_thinning(thinning: Thinning) -> tuple[str, str]:
    """What is dropped of a model, and what the rest is divided by."""
    own = "".join(
        f", {name} {getattr(thinning, name):.4g}" for name in DROPS[thinning.drop].settings
    )
    dropped = f"{thinning.drop_rate:.4g}" + (
        f" ({thinning.drop}{own})" if thinning.drop != RANDOM else ""
    )
    if thinning.rescale == L1 and thinning.drop_rate:
        return dropped, "what restores the sum of sizes"
    return (
        dropped,
        "the probability to keep each" if thinning.divides_each else f"{thinning.divisor:.4g}",
    )


def describe_for_mergekit(settings: TensorSettings, drops: Collection[str]) -> str:
    """The method and its densities as mergekit has them; empty where it has no such method."""
    [drop, *others] = drops or ("",)
    name = find_merge_method(settings.method, drop)
    trimmed = settings.keep_ratio < 1  # which is all the dropping that its ties does
    if others or name is None or (trimmed and drop):
        return ""
    densities = dict.fromkeys(
        f"{settings.keep_ratio if trimmed else 1 - rate:.4g}" for rate in settings.drop_rates
    )
    words = [
        f"merge_method: {name}",
        f"density: {', '.join(densities)}",
        f"lambda: {settings.lambda_coeff:g}",
    ]
    words += [f"normalize: {str(settings.normalize).lower()}"]
    return ", ".join(f"`{word}`" for word in words if name != "slerp" or word.startswith("merge"))


def card_name(source: Source) -> str:
    """What a card calls a model: its name on the Hub, or the last part of its path."""
    name = recorded_name(source)
    return name.partition("@")[0] if "/" in name else name.removesuffix(".safetensors")
