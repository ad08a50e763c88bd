"""The user's request, before any model is opened, and flags over it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from darelib.config import SETTINGS, Rule, check_setting, name_flag
from darelib.core.text import ConfigError, list_names, nearest, read_toml
from darelib.models.source import Source

if TYPE_CHECKING:
    from darelib.requests.mergekitfile import MergekitFile

# What other tools and the papers call our settings.
FOREIGN_KEYS: Final = {
    "density": "drop_rate = 1 - density",
    "weight_mask_rate": "drop_rate, the same number",
    "merge_method": 'method: dare_linear is "linear", dare_ties is "ties"',
    "weight": "weights, a list with one number per model",
    "lambda": "lambda_coeff",
    "scaling_coefficient": "lambda_coeff",
    "t": "slerp_t",
    "out_dtype": "dtype",
    "torch_dtype": "dtype",
    "random_seed": "seed",
    "base_model": "base_file under [models]",
    "tokenizer_source": "tokenizer under [models]",
    "tokenizer_from": "tokenizer",
    "q": "rescale_q",
    "slices": 'base_file under [models]: [{model = "models/a", layers = [0, 16]}, ...]',
    "passthrough": 'method = "passthrough"',
}

# What --bake says: the base, and what each model changes times its weight.
BAKED: Final = {"method": "linear", "drop_rate": 0.0, "normalize": False, "lambda_coeff": 1.0}


@dataclass(frozen=True)
class Request:
    """What a configuration file, with flags on top, asks for."""

    dare: dict[str, Any] = field(default_factory=dict)
    base: Source | None = None
    merge: tuple[Source, ...] = ()
    output: Path | None = None
    tokenizer: Source | None = None
    chat_template: Source | None = None
    rules: tuple[Rule, ...] = ()
    # Fingerprints of base and models, where the file is a recipe.
    inputs: tuple[dict[str, Any], ...] = ()
    version: str = ""  # of the tool that made the recipe
    packed: bool = False  # whether that is a packed model
    sweep: Mapping[str, Any] = field(default_factory=dict)  # what a search may choose
    examples: tuple[Source, ...] = ()  # of each model's skill, if a merge is matched with some
    base_examples: Source | None = None


class SeveralDocuments(ConfigError):
    """A file of several merges, which is no single request."""

    def __init__(self, path: str, files: Sequence[MergekitFile]) -> None:
        super().__init__(
            f"{path} holds {len(files)} documents, each a merge of its own",
            "merge takes such a file; for anything else, give it a file with one of them",
        )
        self.files = files  # each after those that it refers to


def explain_key(key: str, known: Collection[str]) -> str:
    """What a key of another tool is called here, or the known key that is spelled most like it."""
    if key in FOREIGN_KEYS:
        return f"here it is {FOREIGN_KEYS[key]}"
    return nearest(key, known) if known else ""


def layer_flags(request: Request, flags: Mapping[str, Any]) -> Request:
    """Flags over a configuration. Rules given by flags come before those of the file, and win."""
    dare = dict(request.dare)
    for name in filter(flags.__contains__, SETTINGS):
        value = flags[name]
        if isinstance(value, list) and len(value) == 1 and not SETTINGS[name].check.is_list:
            [value] = value  # which is for all models
        check_setting(name, value, name_flag(name))
        dare[name] = value
    names = ("tokenizer", "chat_template")
    changes: dict[str, Any] = {name: Source.of(flags[name]) for name in names if name in flags}
    # Models that are given with a recipe say where its own are.
    if "base" in flags and not request.inputs:
        changes["base"] = Source.of_model(flags["base"])
    if "merge" in flags and not request.inputs:
        changes["merge"] = tuple(map(Source.of_model, flags["merge"]))
    if "output" in flags:
        changes["output"] = Source.of(flags["output"]).path
    if "examples" in flags:
        changes["examples"] = tuple(map(Source.of, flags["examples"]))
    if "base_examples" in flags:
        changes["base_examples"] = Source.of(flags["base_examples"])
    rules = (*map(parse_rule, flags.get("rules", ())), *request.rules)
    if "bake" in flags:
        dare |= bake(dare, flags.keys(), len(changes.get("merge", request.merge)))
        check_baked(rules)
    return replace(request, dare=dare, rules=rules, **changes)


def bake(dare: Mapping[str, Any], flags: Collection[str], count: int) -> dict[str, Any]:
    """The settings that add so many models to the base, each at full strength unless it has a
    weight. dare: the settings with those given by flags.
    """
    for name, value in BAKED.items():
        if name in flags and dare[name] != value:
            raise ConfigError(
                f"--bake and this {name_flag(name)} contradict each other",
                "leave one out; --bake is --method linear --drop-rate 0 --no-normalize --lambda 1",
            )
    return BAKED | ({} if "weights" in dare or not count else {"weights": [1.0] * count})


def check_baked(rules: Iterable[Rule]) -> None:
    """Refuse rules that merge otherwise than --bake does; weights are its strengths."""
    for k, rule in enumerate(rules, 1):
        for name, value in BAKED.items():
            if getattr(rule, name) not in (None, value):
                raise ConfigError(
                    f"--bake and {name} of rule {k} ({list_names(rule.match)}) contradict each "
                    "other",
                    "leave one out; with --bake, rules may have weights",
                )


def parse_axes(texts: Iterable[str]) -> dict[str, Any]:
    """What a search may choose, as flags: settings with their values or ranges, as in TOML."""
    axes: dict[str, Any] = {}
    for text in texts:
        try:
            axes |= read_toml(text)
        except (ValueError, RecursionError):
            raise ConfigError(
                f"--vary {text!r} must be SETTING=VALUES", "like --vary 'drop_rate=[0, 0.5]'"
            ) from None
    return axes


def parse_rule(text: str) -> Rule:
    """A rule as a flag: the pattern, a colon, and settings as in TOML, with commas between them."""
    pattern, colon, assignments = text.rpartition(":")
    example = "like --rule '*embed_tokens*:drop_rate=0.5'"
    if not colon:
        raise ConfigError(f"--rule {text!r} has no colon after its pattern", example)
    try:
        # A line end could begin another key.
        [table] = tomllib.loads(f"rule = {{ {assignments} }}").values()
    except (ValueError, RecursionError):
        raise ConfigError(
            f"--rule {text!r} must be PATTERN:SETTING=VALUE",
            f'{example}; words in quotes, like drop="magnitude"',
        ) from None
    return Rule.of({**table, "match": pattern}, f"--rule {text!r}")
