"""What commands share: their flags, the merger that flags ask for, and how results are printed."""

import argparse
import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from darelib.commands.report import Report
from darelib.config import DareConfig
from darelib.core.drops import DROPS
from darelib.core.text import LOG, ConfigError, nearest, print_result
from darelib.methods import METHODS
from darelib.methods.settings import BASE, ZERO
from darelib.models.directories import BASE_HINT
from darelib.models.vocabulary import TEMPLATES
from darelib.requests.readers import YAML_SUFFIXES, load_request
from darelib.requests.request import Request, explain_key, layer_flags

Options: TypeAlias = dict[str, dict[str, Any]]  # by name: what argparse's add_argument is given
Flags: TypeAlias = dict[str, Any]  # those that a user gives, by name
Merger: TypeAlias = Any  # a dare.DareMerger, which nothing in darelib imports
MergerClass: TypeAlias = Callable[..., Merger]

CONTINUES: Final = "the same command goes on from here"  # a hint after an interrupt
SHORT_NAMES: Final = {
    "--config": ("-c",),
    "--base": ("-b",),
    "--merge": ("-m",),
    "--output": ("-o",),
    "--verbose": ("-v",),
    "--quiet": ("-q",),
}
# What every command that computes takes.
MODELS: Final[Options] = {
    "--base": {
        "metavar": "MODEL",
        "help": "the model that the others were fine-tuned from; adapters may name it",
    },
    "--merge": {
        "metavar": "MODEL",
        "nargs": "+",
        "action": "extend",
        "help": "the fine-tuned models, LoRA adapters, or MODEL+ADAPTER",
    },
    "--threads": {
        "metavar": "N",
        "type": int,
        "help": "threads to use (default: all cores this process may use)",
    },
    "--engine": {
        "metavar": "NAME",
        "help": "what computes: auto (default), numba, or plain (NumPy: the same, but slow)",
    },
}


def place_config(words: list[str]) -> list[str]:
    """A configuration and perhaps an output as the first words, as mergekit has them, as flags."""
    if not words or not words[0].endswith((".yaml", ".yml", ".toml")):
        return words
    config, *rest = words
    output = ["--output"] if rest and not rest[0].startswith("-") else []
    return ["--config", config, *output, *rest]


def parse_rank(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


NUMBERS: Final[dict[str, Any]] = {"type": float, "nargs": "+"}  # one for all models, or one each
# The models and the settings: what has a key in TOML, too.
SETTINGS: Final[Options] = {
    "--config": {
        "metavar": "FILE",
        "type": Path,
        "help": "TOML configuration, mergekit's YAML, or a merged model: its recipe",
    },
    "--lenient": {
        "action": "store_true",
        "help": "of mergekit's YAML, ignore the keys that mergekit ignores, with warnings",
    },
    **MODELS,
    "--output": {
        "metavar": "PATH",
        "help": "where to write: a .safetensors file, or a model directory",
    },
    "--method": {
        "metavar": "NAME",
        "help": f"how to combine: {', '.join(METHODS)} (default linear)",
    },
    "--drop-rate": {
        **NUMBERS,
        "metavar": "P",
        "help": "share of each delta to drop, 0 <= P < 1 (default 0.9); one or one each",
    },
    "--drop": {
        "metavar": "NAME",
        "nargs": "+",
        "help": f"what to drop: {', '.join(DROPS)} (default random); one or one each",
    },
    "--gamma": {
        **NUMBERS,
        "metavar": "G",
        "help": "breadcrumbs: share of the largest to drop as well (default 0.01)",
    },
    "--epsilon": {
        **NUMBERS,
        "metavar": "E",
        "help": "della: keep with 1 - P - E (smallest) to 1 - P + E (default 0.15)",
    },
    "--weights": {
        **NUMBERS,
        "metavar": "W",
        "help": "one per model; linear: default 1/n each; ties: relative, default equal",
    },
    "--normalize": {
        "action": argparse.BooleanOptionalAction,
        "help": "divide by the sum of the weights, in ties of the models that agree "
        "(default: ties, multislerp yes, linear no)",
    },
    "--origin": {
        "choices": (BASE, ZERO),
        "help": "combine the models' deltas (base) or their values (zero); default: by method",
    },
    "--lambda": {
        "dest": "lambda_coeff",
        "metavar": "X",
        "type": float,
        "help": "scale of the merged delta (default 1)",
    },
    "--rescale": {
        "metavar": "HOW",
        "help": "what is kept: expectation (default of random, della), l1 (restore the sum of "
        "|delta|) or none",
    },
    "--no-rescale": {
        "action": "store_false",
        "dest": "rescale",
        "help": "the same as --rescale none",
    },
    "--rescale-q": {
        **NUMBERS,
        "metavar": "Q",
        "help": "DAREx-q: divide by Q, 1 - P <= Q <= 1, instead of 1 - P; one or one each",
    },
    "--keep-ratio": {
        "metavar": "R",
        "type": float,
        "help": "ties: share of the surviving entries that trim keeps; sce: of those in which the "
        "models differ (default 1)",
    },
    "--slerp-t": {
        "metavar": "T",
        "type": float,
        "help": "slerp: position between the two models (default 0.5)",
    },
    "--max-iter": {
        "metavar": "N",
        "type": int,
        "help": "karcher: steps it may take (default 10)",
    },
    "--tol": {
        "metavar": "X",
        "type": float,
        "help": "karcher: a shorter step is the last (default 1e-5)",
    },
    "--threshold": {
        "metavar": "X",
        "type": float,
        "help": "ram, ramplus: a smaller |delta| counts as none (default 1e-5)",
    },
    "--swap-t": {
        "metavar": "T",
        "type": float,
        "help": "nearswap: how far an entry may move (default 0.0001)",
    },
    "--boost": {
        "metavar": "R",
        "type": float,
        "help": "ramplus: what one model changes gains R * (shared / own entries) (default 0.1)",
    },
    "--boost-limit": {
        "metavar": "A",
        "type": float,
        "help": "ramplus: that ratio is at most A (default 0.2)",
    },
    "--ridge": {
        "metavar": "X",
        "type": float,
        "help": "wudi: small keeps the models' deltas apart, large averages them (default 1)",
    },
    "--norm-limit": {
        "metavar": "X",
        "type": float,
        "help": "wudi: resize the merged delta, up to X times the models' mean size (default 1.5; "
        "0: not)",
    },
    "--scale": {
        "metavar": "X",
        "type": float,
        "help": "passthrough: what tensors are multiplied by (default 1)",
    },
    "--dtype": {
        "metavar": "NAME",
        "help": "output type: float32, float16, bfloat16 or float64, or fp32, fp16, bf16, fp64 "
        "(default: the base's)",
    },
    "--adapter-rank": {
        "metavar": "R",
        "type": parse_rank,
        "help": "write a LoRA adapter of rank R (full: exact for adapters; 0.95: a share of the "
        "energy)",
    },
    "--adapter-rest": {
        "metavar": "HOW",
        "help": "in it, what changed and no low rank holds: save (default) or leave-out",
    },
    "--keep-fp8": {
        "action": "store_true",
        "help": "write what is FP8 without scales in the base in FP8 again",
    },
    "--components": {
        "metavar": "NAME",
        "nargs": "+",
        "help": "of a diffusion pipeline, the folders to merge (default: transformer*, unet*, "
        "text_encoder*, prior*)",
    },
    "--mismatch": {
        "metavar": "HOW",
        "help": "tensors of other shapes: error (default), overlap (merge common rows) or base",
    },
    "--any-base": {
        "action": "store_true",
        "help": "merge even if the base is surely not the one that a model was trained from",
    },
    "--part-of": {
        "metavar": "PREFIX",
        "help": "what names begin with in the part of the base that the models are, or of them "
        "that the base is (default: it is found)",
    },
    "--max-shard-size": {
        "metavar": "SIZE",
        "help": "largest size of one file of an output directory (default 5GB)",
    },
    "--tokenizer": {
        "metavar": "WHICH",
        "help": "of an output directory: base (default), union (all tokens), or a model's",
    },
    "--chat-template": {
        "metavar": "WHICH",
        "help": f"of a model, a file, or {', '.join(TEMPLATES)} (default: the base's, else a "
        "model's)",
    },
    "--rule": {
        "dest": "rules",
        "metavar": "RULE",
        "action": "append",
        "help": "PATTERN:SETTING=VALUE,... for matching tensors",
    },
    "--delta-threshold": {
        "metavar": "X",
        "type": float,
        "help": "warn where deltas are larger than this (default 0.002)",
    },
    "--seed": {
        "metavar": "N",
        "type": int,
        "help": "the first model's seed; model i uses N + i (default 42)",
    },
}
# What only some commands take; each says in its own words what the last is for.
FORCE: Final = {
    "action": "store_true",
    "help": "replace an existing output of another recipe, or that this tool did not make",
}
RESUME: Final = {
    "action": "store_true",
    "help": "continue an unfinished merge; if interrupted, leave one to continue",
}
PLOT: Final = {
    "metavar": "FILE",
    "type": Path,
    "help": "draw what was found, to a .png, .svg or .pdf file",
}
WRITE_CONFIG: Final = {"metavar": "FILE", "type": Path}  # -: it is printed
# What every command takes.
COMMON: Final[Options] = {
    "--json": {
        "action": "store_true",
        "help": "print what was done, planned, verified or found as JSON",
    },
    "--verbose": {"action": "store_true", "help": "show progress and summary (default)"},
    "--quiet": {
        "action": "store_false",
        "dest": "verbose",
        "help": "no progress or summary, only warnings and errors",
    },
}


class Room(Protocol):
    """What every command has: its options, and what it does with the flags that are given."""

    OPTIONS: Options

    def run(self, flags: Flags, merger_class: MergerClass) -> None: ...


def explain_unknown(
    word: str, name: str, parser: argparse.ArgumentParser, rooms: Mapping[str, Room]
) -> ConfigError:
    """What is wrong with a word that a command does not take. rooms: of all commands."""
    if not word.startswith("-"):
        close = difflib.get_close_matches(word, rooms, cutoff=0.5)
        first = f"{parser.prog} {close[0]} ..." if close else f"one of {', '.join(rooms)}"
        return ConfigError(
            f"{word!r} is not expected here",
            "files go after --config, --base, --merge or --output; "
            f"the first word may be a command: {first}",
        )
    long = next((name for name, short in SHORT_NAMES.items() if word in short), word)
    for other, room in rooms.items():
        if long in room.OPTIONS:
            return ConfigError(
                f"{word} means nothing to {name}", f"it belongs to {parser.prog} {other}"
            )
    foreign = explain_key(word.lstrip("-").replace("-", "_"), ())
    hint = foreign or nearest(word, parser._option_string_actions)
    return ConfigError(f"there is no option {word!r}", hint)


def make_merger(flags: Flags, merger_class: MergerClass) -> tuple[Merger, Request]:
    """The merger that a configuration, or the recipe of a merged model, and flags ask for."""
    path = Path(os.path.expanduser(flags.get("config", "")))
    if "lenient" in flags and path.suffix not in YAML_SUFFIXES:
        raise ConfigError(
            "--lenient means nothing without a configuration of mergekit's",
            "leave it out; a key that is not known is an error in TOML",
        )
    if "config" not in flags:
        request = Request()
    elif path.suffix == ".safetensors" or path.is_dir():
        from darelib.requests.recipe import read_recipe

        request = read_recipe(path)
    else:
        options = {"lenient": True} if "lenient" in flags else {}
        request = load_request(path, **options)
    request = layer_flags(request, flags)
    if request.inputs:
        from darelib.requests.recipe import locate_inputs

        request = locate_inputs(request, list_models(flags), path)
    merger = merger_for(request, merger_class)
    return merger, dataclasses.replace(request, base=merger.base)  # which adapters may name


def list_models(flags: Flags) -> list[str]:
    """The models that are given by flags, the base first."""
    base = [flags["base"]] if "base" in flags else []
    return [*base, *flags.get("merge", [])]


def merger_for(request: Request, merger_class: MergerClass) -> Merger:
    config = DareConfig(**request.dare, rules=request.rules)
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if request.base is None and not request.merge:
        raise ConfigError("there is no base model", BASE_HINT)
    return merger_class(
        request.base,
        request.merge,
        config,
        tokenizer=request.tokenizer or "base",
        chat_template=request.chat_template,
    )


def show(report: Report, flags: Flags, verbose: bool) -> None:
    if "json" in flags or verbose:
        print_result(report.to_dict() if "json" in flags else str(report))
