"""`dare.py pack`: its options; packer does the work."""

from typing import Any, Final

from darelib.commands.options import (
    FORCE,
    RESUME,
    SHARED,
    Flags,
    MergerClass,
    Options,
    show,
)
from darelib.config import DareConfig, Rule, name_flag
from darelib.core.drops import is_random
from darelib.core.text import LOG, ConfigError
from darelib.methods.method import DARE_RATE
from darelib.requests.readers import load_request
from darelib.requests.request import Request, layer_flags

# Those of merge, as far as they decide what is kept, in other words.
CHANGES: Final[Options] = {
    "--config": {"help": "TOML configuration with such settings"},
    "--base": {"help": "the model that it was fine-tuned from"},
    "--merge": {"action": "store", "help": "the fine-tuned model"},
    "--output": {},
    "--drop-rate": {"nargs": 1, "help": "share to drop (default 0.9); merges need this or more"},
    "--seed": {"help": "the seed of its mask, for all merges (default 42)"},
    "--rule": {"help": "PATTERN:drop_rate=P for matching tensors"},
    "--components": {},
    "--mismatch": {"help": "tensors of other shapes: error (default), or overlap (kept whole)"},
    "--any-base": {"help": "pack a model of another model_type than the base's"},
    "--threads": {},
    "--engine": {},
}
OPTIONS: Final[Options] = {
    **{name: SHARED[name] | changes for name, changes in CHANGES.items()},
    "--force": FORCE,
    "--resume": RESUME
    | {"help": "continue an unfinished packing; if interrupted, leave one to continue"},
}


def run(flags: Flags, _: MergerClass) -> None:
    request = layer_flags(load_request(flags["config"]) if "config" in flags else Request(), flags)
    if request.base is None or not request.merge or request.output is None:
        raise ConfigError(
            "pack needs a base, a model and an output",
            "give --base MODEL --merge MODEL --output PATH",
        )
    if len(request.merge) > 1:
        raise ConfigError(
            f"pack takes one model, not {len(request.merge)}", "pack one after the other"
        )
    config = choose_settings(request)
    from darelib.commands.pack.packer import pack

    report = pack(
        request.base,
        request.merge[0],
        config,
        request.output,
        force="force" in flags,
        resume="resume" in flags,
    )
    for warning in report.warnings:
        LOG.warning(warning)
    show(report, flags, flags.get("verbose", True))


def choose_settings(request: Request) -> DareConfig:
    """The settings that decide which entries are kept. All others are ignored."""
    drops = [request.dare.get("drop"), *(rule.drop for rule in request.rules)]
    if others := [drop for drop in drops if drop and not is_random(drop)]:
        raise ConfigError(
            f"pack keeps entries at random, and this configuration has drop {others[0]}",
            "set drop to random, or merge the model as it is: other drops need all entries",
        )
    used: dict[str, Any] = {
        name: value
        for name, value in request.dare.items()
        if name_flag(name) in OPTIONS or name == "verbose"
    }
    rate = used.setdefault("drop_rate", DARE_RATE)
    rules = (
        Rule(rule.match, drop_rate=rate if rule.drop_rate is None else rule.drop_rate)
        for rule in request.rules
    )
    config = DareConfig(**used, rules=tuple(rules))
    config.check_models(1)
    return config
