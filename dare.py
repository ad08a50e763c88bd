"""DARE: merge fine-tuned models into one, by dropping most of what each has learned and rescaling the rest.

    delta_i = finetuned_i - base                     what fine-tuning changed
    kept_i  = mask_i * delta_i / r_i                 drop at random, keep a share r_i, rescale by 1 / r_i
    merged  = combine(kept_1 ... kept_n)             by default the sum of w_i * kept_i with w_i = 1 / n
    output  = base + lambda * merged

Dropping changes no expectation, and fine-tuned models bear it surprisingly well: Yu et al., "Language Models are
Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", ICML 2024, arXiv:2311.03099.

This one file is the whole tool, in the order in which it is best read: constants and errors, configuration, the mask,
the arithmetic kernels, reading checkpoints, writing checkpoints, the plan and the jobs, analysis, the merger, tensors
in memory, the command line. Each section depends only on those above it.

    python dare.py --config merge_config.toml        from the shell
    python dare.py analyze --config ...              look before you merge
    from dare import DareConfig, DareMerger          from a script
"""

from __future__ import annotations

import os
import signal

if __name__ == "__main__":
    # Until main looks after signals, there is nothing to tidy up; an interrupt in the imports below shows no traceback.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import codecs
import ctypes
import dataclasses
import decimal
import difflib
import errno
import fnmatch
import hashlib
import importlib
import io
import json
import logging
import math
import re
import shutil
import stat
import struct
import sys
import textwrap
import threading
import time
import tomllib
import warnings
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__version__ = "0.1.0"
__all__ = [
    "AnalysisReport", "ConfigError", "DareConfig", "DareError", "DareMerger", "Estimate", "MergeReport", "ModelReport",
    "Plan", "Rule", "VerifyReport", "dare_drop", "dare_merge", "dare_sparsify", "plot_analysis",
]  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# Constants and errors
# ---------------------------------------------------------------------------------------------------------------------

# Elements that one mask tile and one pass of the kernels span. Part of the mask's definition: never change it.
TILE: Final = 1024
# Philox4x32 passes its authors' statistical batteries from 7 rounds on. Part of the mask's definition too.
ROUNDS: Final = 7
# A keep decision compares this many random bits with a threshold. Part of the mask's definition too.
MASK_BITS: Final = 16
MASK_NAME: Final = "philox4x32-7/16"

# A chunk, the elements that are read, merged and written at a time, is small enough for its buffers to stay in the
# caches, and large enough that calls cost nothing; a job is several chunks, so that what Python does for it does not.
# Chunks depend on threads and models; jobs do not, so that a merge can be resumed with others.
MAX_CHUNK: Final = 1 << 18
MIN_CHUNK: Final = 1 << 14
JOB_ELEMENTS: Final = 1 << 22
# Elements of the tensors that are looked at and then merged in one go, where a method must look first.
BATCH_ELEMENTS: Final = 1 << 28
# All the buffers of all the threads together; with the interpreter, NumPy and LLVM the process stays near 100 MB.
BUFFER_BYTES: Final = 64 << 20
# What a merge holds besides, as measured: the process with all that it has loaded, and what is known of each tensor of
# each model.
PROCESS_BYTES: Final = 92_000_000
TENSOR_BYTES: Final = 900

# Elements of all adapters' matrices that all threads together hold at a time: 16 MB.
EXPAND_ELEMENTS: Final = 1 << 22

# How long to let writes gather before they are sent to the disk, and before it is noted what has arrived there.
FLUSH_SECONDS: Final = 0.1
JOURNAL_SECONDS: Final = 1.0
# How often to look whether somebody wants the merge to stop.
POLL_SECONDS: Final = 0.05
# Bytes from which a rate says something of the merge, and not of what comes before it.
LEAST_FOR_RATE: Final = 100_000_000
# How long to try jobs out, to say how long all of them will take.
SAMPLE_SECONDS: Final = 0.5

# A fine-tune's delta is a small part of its weights; two unrelated models differ by more than either weighs.
UNRELATED_RATIO: Final = 0.5
# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
HALF_PI: Final = Decimal("1.57079632679489661923132169163975144209858469968755291")
# How many names a message lists before it says "and 12 more".
LISTED: Final = 3
# How many characters of a message are shown: names may be as long as a header.
SHOWN: Final = 4000
# How many characters of a name the plan's tables show, how many files it names before it says "and 12 more", and how
# many characters a line of names has.
SHOWN_IN_TABLES: Final = 56
SHOWN_FILES: Final = 6
SHOWN_ACROSS: Final = 100

RECIPE_KEY: Final = "dare_recipe"
LEFT_BEHIND: Final = "dare: compiling"
LOG: Final = logging.getLogger("dare")


class DareError(Exception):
    """Something a person can mend: one sentence that says what is wrong, and a hint that says what to do."""

    status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class InputChanged(DareError):
    """What was read of an input, and all that was made of it, is worth nothing."""


class ConfigError(DareError):
    """Wrong usage or configuration, as opposed to files that cannot be merged."""

    status = 2


def as_text(name: str | Path) -> str:
    """A name that may hold bytes that are no text, as text."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def printable(text: str) -> str:
    """Text with nothing in it that could upset a terminal: names may hold escape sequences, or reverse what follows."""
    text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def is_terminal(stream: IO[str]) -> bool:
    """Whether a stream is a terminal that obeys control characters."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def in_colour(stream: IO[str]) -> bool:
    """Whether a stream shows colours, and nobody minds them (https://no-color.org)."""
    known = os.name != "nt" or "WT_SESSION" in os.environ or "ANSICON" in os.environ
    return known and is_terminal(stream) and not os.environ.get("NO_COLOR")


# As terminals number them.
COLOURS: Final = {"error": 31, "warning": 33, "hint": 36}


def labelled(kind: str, text: str, stream: IO[str]) -> str:
    """An error, a warning or a hint as one harmless line, with its first word in colour where that can be seen."""
    label = f"\x1b[{COLOURS[kind]}m{kind}:\x1b[0m" if in_colour(stream) else f"{kind}:"
    return f"{label} {printable(text)}"


def listed(names: Sequence[str]) -> str:
    """The first few names, quoted so that nothing in them can upset a terminal, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED:,} more"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint with the known word that is spelled most like this one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def human(size: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def duration(seconds: float) -> str:
    """A time that is only known roughly."""
    if seconds < 1:
        return "under a second"
    if seconds < 120:
        return f"about {seconds:.2g} s" if seconds < 10 else f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"


@contextmanager
def held_interrupts() -> Iterator[Callable[[], None]]:
    """Let signals wait, so that nothing is torn in two. Gives the function that lets one through, if there is one."""
    caught: list[tuple[int, Any]] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other gets signals
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda *received: caught.append(received))

    def let_through() -> None:
        if caught:
            received, frame = caught.pop(0)
            before[received](received, frame)

    try:
        yield let_through
    finally:
        for which, handler in before.items():
            if signal.getsignal(which) is not signal.SIG_IGN:  # as it is once a signal has been let through
                signal.signal(which, handler)
    let_through()


def waited_for(work: Callable[[], Any], let_interrupts_through: Callable[[], None]) -> Any:
    """The result of work done in a thread that is left behind if an interrupt comes: compilers cannot be stopped."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=LEFT_BEHIND, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        let_interrupts_through()
    if failure:
        raise failure[0]
    return result[0]


def load_numpy() -> None:
    """Bind np at first use: importing it takes longer than --help should."""
    global np
    import numpy as np


# ---------------------------------------------------------------------------------------------------------------------
# Configuration: defaults, then TOML, then flags
# ---------------------------------------------------------------------------------------------------------------------


METHODS: Final = ("linear", "ties", "slerp")
MISMATCHES: Final = ("error", "overlap", "base")
SIZE_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}
DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
SHORT_DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
# The words that a setting may be, where it is one.
CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "method": METHODS,
    "dtype": (*DTYPES, *SHORT_DTYPES),
    "mismatch": MISMATCHES,
}
# A size below this that names no unit was meant in another one: nobody wants files of five bytes.
LEAST_BARE_SIZE: Final = 1000


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _one_or_each(value: object, accepts: Callable[[Any], bool]) -> bool:
    return all(map(accepts, value)) and len(value) > 0 if isinstance(value, list | tuple) else accepts(value)


def parse_size(given: object) -> int:
    """Bytes, from a number of them or from text like 5GB (powers of 1000) or 4.5GiB (of 1024). 0: it is neither."""
    if isinstance(given, str) and (found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", given.strip())):
        return int(Decimal(found[1]) * SIZE_UNITS.get(found[2].upper(), 0))
    return given if isinstance(given, int) and _is_count(given, 1) else 0


# For each setting: what it must be, in words, and the test for it.
CHECKS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "method": (f"one of {', '.join(METHODS)}", lambda v: isinstance(v, str) and v in METHODS),
    "drop_rate": (
        "a number from 0 up to but not including 1, or one such number per model",
        lambda v: _one_or_each(v, lambda p: _is_number(p) and 0 <= p < 1),
    ),
    "weights": (
        "a list of numbers, one per model",
        lambda v: isinstance(v, list | tuple) and _one_or_each(v, _is_number),
    ),
    "lambda_coeff": ("a number", _is_number),
    "rescale": ("true or false", lambda v: isinstance(v, bool)),
    "rescale_q": (
        "a number above 0 and at most 1, or one such number per model",
        lambda v: _one_or_each(v, lambda q: _is_number(q) and 0 < q <= 1),
    ),
    "keep_ratio": ("a number above 0 and at most 1", lambda v: _is_number(v) and 0 < v <= 1),
    "slerp_t": ("a number from 0 to 1", lambda v: _is_number(v) and 0 <= v <= 1),
    "dtype": (
        f"one of {', '.join(DTYPES)} (or {', '.join(SHORT_DTYPES)})",
        lambda v: isinstance(v, str) and v in CHOICES["dtype"],
    ),
    "mismatch": (f"one of {', '.join(MISMATCHES)}", lambda v: isinstance(v, str) and v in MISMATCHES),
    "max_shard_size": ("a size like 5GB or 500MiB, or a number of bytes", lambda v: parse_size(v) > 0),
    "delta_threshold": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda v: _is_count(v, 0)),
    "threads": ("a whole number from 1 up", lambda v: _is_count(v, 1)),
    "verbose": ("true or false", lambda v: isinstance(v, bool)),
}
# What a rule may set for the tensors that it matches.
RULE_SETTINGS: Final = ("drop_rate", "rescale_q", "lambda_coeff", "keep_ratio")


def check_setting(name: str, value: object, where: str) -> None:
    wanted, accepts = CHECKS[name]
    if not accepts(value):
        is_word = isinstance(value, str) and name in CHOICES
        hint = nearest(str(value).lower(), CHOICES[name]) if is_word else "--help says what it does"
        raise ConfigError(f"{where} must be {wanted}, not {value!r}", hint)
    size = parse_size(value) if name == "max_shard_size" else LEAST_BARE_SIZE
    if size < LEAST_BARE_SIZE and not re.search("[A-Za-z]", str(value)):
        raise ConfigError(
            f"{where} would be {counted(size, 'byte')}", f"say {str(value).strip()}GB, or {size}B if you mean it"
        )


@dataclass(frozen=True)
class Rule:
    """Other settings for the tensors whose names match one of some glob patterns. None: as for all the others."""

    match: tuple[str, ...]
    drop_rate: float | tuple[float, ...] | None = None
    rescale_q: float | tuple[float, ...] | None = None
    lambda_coeff: float | None = None
    keep_ratio: float | None = None

    def __post_init__(self) -> None:
        match = (self.match,) if isinstance(self.match, str) else self.match
        if not isinstance(match, list | tuple) or not match or not all(isinstance(p, str) for p in match):
            raise ConfigError("match must be a pattern or a list of patterns", 'like match = ["*lm_head*"]')
        object.__setattr__(self, "match", tuple(match))
        for name in RULE_SETTINGS:
            if getattr(self, name) is not None:
                check_setting(name, getattr(self, name), name)
                object.__setattr__(self, name, _frozen(getattr(self, name)))
        if all(getattr(self, name) is None for name in RULE_SETTINGS):
            raise ConfigError("it sets nothing", f"give it one of {', '.join(RULE_SETTINGS)}")

    @classmethod
    def of(cls, table: Any, where: str) -> Rule:
        """From a TOML table, or a dictionary like one."""
        if isinstance(table, Rule):
            return table
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table, not {table!r}", 'like {match = "*norm*", drop_rate = 0.5}')
        for key in table:
            if key not in ("match", *RULE_SETTINGS):
                raise ConfigError(f"{where} has no key {key!r}", nearest(key, ("match", *RULE_SETTINGS)))
        try:
            return cls(**{"match": (), **table})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}", error.hint) from None

    def as_table(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in RULE_SETTINGS if getattr(self, name) is not None}
        return {"match": list(self.match), **{name: _numbers(value) for name, value in given.items()}}

    def matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.match)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _numbers(value: Any) -> Any:
    """Numbers as floats, so that 1 and 1.0 make the same recipe."""
    if isinstance(value, tuple):
        return [float(number) for number in value]
    return float(value) if isinstance(value, int) else value


@dataclass(frozen=True)
class TensorSettings:
    """How to merge one tensor, all rules considered."""

    drop_rates: tuple[float, ...]  # one per model
    divisors: tuple[float | None, ...]  # what to divide the kept deltas by; None: the keep rate that the mask honours
    lambda_coeff: float
    keep_ratio: float

    def gives_back(self, weights: Sequence[float]) -> bool:
        """Whether the merge of a single model is that model: base + 1 * (finetuned - base).

        It is then taken as it is; computing it would lose bits where the base is much larger.
        """
        kept_whole = self.drop_rates == (0,) and self.divisors[0] in (None, 1) and self.keep_ratio == 1
        return kept_whole and self.lambda_coeff == 1 and list(weights) == [1]


@dataclass(frozen=True)
class DareConfig:
    """How to merge. Every field is also a key of [dare] in TOML (rules: [[rules]]) and a flag of the command."""

    method: str = "linear"  # how the thinned deltas are combined: linear, ties or slerp
    drop_rate: float | Sequence[float] = 0.9  # share of each delta to drop; one for all models, or one per model
    weights: Sequence[float] | None = None  # None: 1/n each (linear), equal (ties)
    lambda_coeff: float = 1.0  # scale of the merged delta
    rescale: bool = True  # False: drop without rescaling
    rescale_q: float | Sequence[float] | None = None  # DAREx-q: divide by this instead of by the keep rate
    keep_ratio: float | None = None  # ties: share of the surviving entries that trim keeps; None: all
    slerp_t: float | None = None  # slerp: position between the two models; None: 0.5
    dtype: str | None = None  # output type of float tensors, kept by its long name; None: the base's
    mismatch: str = "error"  # tensors of another shape: error; overlap: merge the common rows; base: keep the base's
    max_shard_size: str | int = "5GB"  # of each file's tensors, where the output is a directory
    delta_threshold: float = 0.002  # warn where deltas are larger; the paper's limit for safe dropping
    seed: int = 42  # the first model's seed; model i draws its mask with seed + i
    threads: int | None = None  # None: all cores that this process may use
    verbose: bool = True  # progress and summary
    rules: Sequence[Rule | dict[str, Any]] = ()  # the first that matches a tensor's name wins

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if setting.name in CHECKS and (value is not None or setting.default is not None):
                check_setting(setting.name, value, setting.name)
            object.__setattr__(self, setting.name, _frozen(value))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(self.dtype, self.dtype))
        if not isinstance(self.rules, list | tuple):
            raise ConfigError(
                f"rules must be a list, not {self.rules!r}", 'like [{"match": "*norm*", "drop_rate": 0.5}]'
            )
        rules = tuple(Rule.of(rule, f"rule {k}") for k, rule in enumerate(self.rules, 1))
        object.__setattr__(self, "rules", rules)
        self._check_sense()

    def _check_sense(self) -> None:
        """Refuse settings that mean nothing together, rather than ignore one of them."""
        trims = self.keep_ratio is not None or any(rule.keep_ratio is not None for rule in self.checked_rules)
        has_q = self.rescale_q is not None or any(rule.rescale_q is not None for rule in self.checked_rules)
        if self.slerp_t is not None and self.method != "slerp":
            raise ConfigError(f"slerp_t means nothing to method {self.method}", "use method slerp, or leave it out")
        if trims and self.method != "ties":
            raise ConfigError(f"keep_ratio means nothing to method {self.method}", "use method ties, or leave it out")
        if self.weights is not None and self.method == "slerp":
            raise ConfigError("weights mean nothing to method slerp", "use slerp_t to lean towards one of the models")
        if has_q and not self.rescale:
            raise ConfigError("rescale_q means nothing when rescale is off", "leave one of the two out")

    @property
    def checked_rules(self) -> tuple[Rule, ...]:
        return cast(tuple[Rule, ...], self.rules)

    def check_models(self, count: int) -> None:
        """Refuse settings that do not fit this number of models."""
        if self.method == "slerp" and count != 2:
            raise ConfigError(f"method slerp goes between two models, not {count}", "use linear or ties")
        for where, holder in [("", self), *((f"rule {k}: ", rule) for k, rule in enumerate(self.checked_rules, 1))]:
            for name in ("drop_rate", "weights", "rescale_q"):
                value = getattr(holder, name, None)
                if isinstance(value, tuple) and len(value) != count:
                    raise ConfigError(
                        f"{where}{name} has {len(value)} values for {count} models", "give one for each model"
                    )
        if self.method == "ties" and self.weights is not None and (min(self.weights) < 0 or not any(self.weights)):
            raise ConfigError(
                "ties weights must not be negative nor all 0", "they are shares; lambda_coeff sets the size"
            )
        for rule in (None, *self.checked_rules):
            self.for_rule(rule, count)

    @property
    def position(self) -> float:
        """Where slerp stops between its two models."""
        return 0.5 if self.slerp_t is None else float(self.slerp_t)

    def general(self, count: int) -> TensorSettings:
        """The settings of the tensors that no rule matches."""
        return self.for_rule(None, count)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches a tensor's name."""
        return next((rule for rule in self.checked_rules if rule.matches(name)), None)

    def for_tensor(self, name: str, count: int) -> TensorSettings:
        """The settings of one tensor, by the first rule that matches its name."""
        return self.for_rule(self.rule_for(name), count)

    def for_rule(self, rule: Rule | None, count: int) -> TensorSettings:
        """The settings of the tensors that a rule is for."""

        def chosen(name: str) -> Any:
            own = getattr(rule, name, None)
            return getattr(self, name) if own is None else own

        def each(value: Any) -> tuple[Any, ...]:
            return value if isinstance(value, tuple) else (value,) * count

        rates, given = each(chosen("drop_rate")), each(chosen("rescale_q"))
        for p, q in zip(rates, given, strict=True):
            # The tolerance forgives that 1 - 0.9 is a little less than 0.1.
            if q is not None and q < 1 - p - 1e-9:
                raise ConfigError(
                    f"rescale_q {q:g} is below 1 - drop_rate = {1 - p:g}, which would more than undo the dropping",
                    "DAREx-q wants 1 - drop_rate <= q <= 1; a rule with a drop rate of its own may need its own q",
                )
        divisors = given if self.rescale else (1.0,) * count
        ratio = chosen("keep_ratio")
        return TensorSettings(rates, divisors, float(chosen("lambda_coeff")), 1.0 if ratio is None else float(ratio))

    def resolved(self) -> dict[str, Any]:
        """The settings that determine the output's bytes, as a [dare] table."""
        chosen: dict[str, Any] = {"method": self.method, "drop_rate": _numbers(self.drop_rate), "seed": self.seed}
        chosen |= {"lambda_coeff": float(self.lambda_coeff), "rescale": self.rescale}
        if self.method == "slerp":
            chosen["slerp_t"] = self.position
        for name in ("weights", "rescale_q", "keep_ratio", "dtype"):
            if getattr(self, name) is not None:
                chosen[name] = _numbers(getattr(self, name))
        if self.mismatch != "error":
            chosen["mismatch"] = self.mismatch
        return chosen

    def shares(self, count: int) -> tuple[float, ...]:
        """The models' weights."""
        if self.weights is not None and (self.method != "ties" or count > 1):  # a share of one is the whole
            return tuple(float(weight) for weight in self.weights)
        return (1.0,) * count if self.method == "ties" else (1 / count,) * count


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and where that is on this machine."""

    name: str
    path: Path
    pinned: str = ""  # for a model of the Hub: its name with the commit

    @classmethod
    def of(cls, given: str | Path | Source, folder: Path | None = None) -> Source:
        if isinstance(given, Source):
            return given
        if not str(given):
            raise ConfigError("the path of a model is empty", "perhaps a variable of the shell is not set")
        name = as_text(given)  # the recipe, which names it, must be text
        path = Path(given)
        with suppress(ValueError):  # of what cannot be a path, as will be found when it is used
            path = Path(os.path.expanduser(given))
        return cls(name, Path(folder or "", path))


@dataclass(frozen=True)
class Settings:
    """What a TOML file, or a TOML file with flags on top, asks for."""

    dare: dict[str, Any] = field(default_factory=dict)
    base: Source | None = None
    merge: tuple[Source, ...] = ()
    output: Path | None = None
    tokenizer_from: Source | None = None
    rules: tuple[Rule, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()  # fingerprints of base and models, where the file is a recipe
    version: str = ""  # of the tool that made the recipe


# So that a hostile one takes little memory and time. Python's reader needs a kilobyte for each part of a dotted key,
# and the square of their number for a key.
MAX_TOML: Final = 1 << 20  # bytes
TOO_LONG: Final = f"it is longer than {MAX_TOML:,} bytes"
MAX_TOML_DOTS: Final = 50_000  # outside of strings
TOML_STRINGS: Final = re.compile(
    r""""{3}(?:[^"\\]++|\\.|"(?!""))*+"{0,5}|'{3}(?:[^']++|'(?!''))*+'{0,5}|"(?:[^"\\\n]++|\\.)*+"?|'[^'\n]*+'?"""
    r"|#[^\n]*+",
    re.DOTALL,
)
TOML_LONG_KEY: Final = re.compile(r"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){16}")
# The keys that each table of a configuration may have. [recipe] is there so that a recipe is itself a configuration.
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "dare": tuple(CHECKS),
    "models": ("base_file", "merge_files", "output_file", "tokenizer_from"),
    "rules": ("match", *RULE_SETTINGS),
    "recipe": ("version", "mask", "seeds", "inputs", "files"),
}


def load_settings(path: Path) -> Settings:
    """Read a TOML configuration, or a recipe taken out of a merged file. Paths in it are relative to it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TOML + 1)
        if len(data) > MAX_TOML:
            raise ValueError(TOO_LONG)
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", "give --config a TOML file") from None
    except ValueError as error:
        hint = "see merge_config.toml for an example"
        if path.suffix == ".safetensors":
            hint = f"the recipe of a merged model is in its metadata, as {RECIPE_KEY}; save that to a file first"
        raise ConfigError(f"{path} is not valid TOML: {error}", hint) from None
    return parse_settings(text, str(path), path.parent)


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says; what is not TOML, or would take too much memory or time, is a ValueError."""
    if len(text.encode(errors="replace")) > MAX_TOML:
        raise ValueError(TOO_LONG)
    bare = TOML_STRINGS.sub("s", text)
    if bare.count(".") > MAX_TOML_DOTS or TOML_LONG_KEY.search(bare):
        raise ValueError("its keys have too many parts")
    return tomllib.loads(text)


def parse_settings(text: str, path: str, folder: Path) -> Settings:
    """A configuration from its text. path: what to call it; folder: what paths in it are relative to."""
    tables = _parse_toml(text, path)
    dare, models, recipe = (tables.get(name, {}) for name in ("dare", "models", "recipe"))
    for key, value in dare.items():
        check_setting(key, value, f"{path}: [dare] {key}")
    for key in ("base_file", "output_file", "tokenizer_from"):
        if not isinstance(models.get(key, ""), str):
            raise ConfigError(f"{path}: [models] {key} must be a path in quotes, not {models[key]!r}")
    files = models.get("merge_files", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ConfigError(
            f"{path}: [models] merge_files must be a list of paths, not {files!r}",
            'write it as merge_files = ["first.safetensors", "second.safetensors"]',
        )
    return Settings(
        dare=dare,
        base=Source.of(models["base_file"], folder) if "base_file" in models else None,
        merge=tuple(Source.of(file, folder) for file in files),
        output=Source.of(models["output_file"], folder).path if "output_file" in models else None,
        tokenizer_from=Source.of(models["tokenizer_from"], folder) if "tokenizer_from" in models else None,
        rules=tuple(Rule.of(rule, f"{path}: rule {k}") for k, rule in enumerate(tables.get("rules", ()), 1)),
        inputs=_fingerprints(path, recipe),
        version=str(recipe.get("version", "")),
    )


def _parse_toml(text: str, path: str) -> dict[str, Any]:
    try:
        tables = read_toml(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "see merge_config.toml for an example") from None
    for name, table in tables.items():
        if name not in TABLES:
            home = next(
                (f"put {name} under [{t}]" for t, keys in TABLES.items() if name in keys), nearest(name, TABLES)
            )
            raise ConfigError(f"{path}: there is no table [{name}]", home)
        if not isinstance(table, list if name == "rules" else dict):
            header = "[[rules]]" if name == "rules" else f"[{name}]"
            kind = "a list of tables" if name == "rules" else "a table"
            raise ConfigError(f"{path}: {name} must be {kind}", f"write {header} on a line of its own")
        for key in table if isinstance(table, dict) else ():
            if key not in TABLES[name]:
                raise ConfigError(f"{path}: there is no key {key!r} in [{name}]", nearest(key, TABLES[name]))
    return tables


def _fingerprints(path: str, recipe: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The sizes and header digests that a recipe holds its inputs to."""
    mask = recipe.get("mask", MASK_NAME)
    if mask != MASK_NAME:
        raise ConfigError(
            f"{path}: this recipe draws its mask with {mask!r}, and this version of dare with {MASK_NAME!r}",
            "run it with the version of dare that it names, or take its [recipe] table out",
        )
    inputs = recipe.get("inputs", [])
    if not isinstance(inputs, list) or not all(isinstance(entry, dict) for entry in inputs):
        raise ConfigError(f"{path}: [recipe] inputs must be a list of tables", "take the [recipe] table out")
    return tuple(inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The mask: a pure function of (seed, tensor name, element position) and of the drop rate
# ---------------------------------------------------------------------------------------------------------------------


def keep_threshold(drop_rate: float) -> int:
    """T: an element is kept where its 16 random bits are below T. At least 1, so that the honoured rate is not 0."""
    return max(1, round((1.0 - drop_rate) * (1 << MASK_BITS)))


def keep_rate(drop_rate: float) -> float:
    """The keep rate that the mask honours exactly, and by which the merge therefore rescales."""
    return keep_threshold(drop_rate) / (1 << MASK_BITS)


def divisor_of(settings: TensorSettings, model: int) -> float:
    """What a model's kept deltas are divided by: what was asked for, or the keep rate that the mask honours."""
    asked = settings.divisors[model]
    return keep_rate(settings.drop_rates[model]) if asked is None else asked


def mask_key(seed: int, name: str) -> tuple[int, int]:
    """Philox's key for one model and one tensor: a digest, so that related seeds and names give unrelated masks."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    low, high = struct.unpack("<II", digest)
    return low, high


def draw(bits: Any, tile: int, k0: Any, k1: Any) -> None:  # compiled
    """Fill bits[0:TILE] with the 16 random bits of each element of a tile, by Philox4x32.

    Block b of the tensor is Philox at counter (b mod 2^32, b div 2^32, 0, 0) and gives eight 16-bit pieces. A tile has
    128 blocks; piece h of its block l belongs to its element 128 h + l, so that compilers can work on many blocks at
    once and store without shuffling. Arithmetic on 32-bit words is done in 64 bits: that is what they vectorise.
    """
    low = np.uint64(0xFFFFFFFF)
    first = np.uint64(tile) * np.uint64(TILE // 8)
    for lane in range(TILE // 8):
        x0 = (first & low) + np.uint64(lane)
        x1 = first >> np.uint64(32)
        x2 = np.uint64(0)
        x3 = np.uint64(0)
        a = k0
        b = k1
        for _ in range(ROUNDS):
            p0 = (x0 & low) * np.uint64(0xD2511F53)
            p1 = (x2 & low) * np.uint64(0xCD9E8D57)
            x0, x1 = (p1 >> np.uint64(32)) ^ x1 ^ a, p1 & low
            x2, x3 = (p0 >> np.uint64(32)) ^ x3 ^ b, p0 & low
            a = (a + np.uint64(0x9E3779B9)) & low
            b = (b + np.uint64(0xBB67AE85)) & low
        bits[lane] = x0
        bits[lane + 128] = x0 >> np.uint64(16)
        bits[lane + 256] = x1
        bits[lane + 384] = x1 >> np.uint64(16)
        bits[lane + 512] = x2
        bits[lane + 640] = x2 >> np.uint64(16)
        bits[lane + 768] = x3
        bits[lane + 896] = x3 >> np.uint64(16)


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic kernels: compiled with Numba at first use, kept on disk as machine code
# ---------------------------------------------------------------------------------------------------------------------

# The functions up to build_merge are written for Numba, one tile at a time. Their loops are what LLVM vectorises well:
# a fixed number of turns, slices rather than offsets, no output that could be an input under another name.


def decode_bf16(raw: Any) -> Any:  # compiled
    return np.uint32(np.uint32(raw) << np.uint32(16)).view(np.float32)


def decode_f16(raw: Any) -> Any:  # compiled
    magnitude = np.uint32(raw) & np.uint32(0x7FFF)
    sign = (np.uint32(raw) & np.uint32(0x8000)) << np.uint32(16)
    shifted = magnitude << np.uint32(13)
    # Subnormals by way of a float that is 2^-14 too large: exact, and never a subnormal float32 on the way.
    small = np.float32(np.uint32(shifted + np.uint32(0x38800000)).view(np.float32)) - np.float32(2.0**-14)
    normal = shifted + (np.uint32(224 << 23) if magnitude >= np.uint32(0x7C00) else np.uint32(112 << 23))
    value = np.float32(small).view(np.uint32) if magnitude < np.uint32(0x400) else normal
    return np.uint32(np.uint32(value) | sign).view(np.float32)


def decode_f32(raw: Any) -> Any:  # compiled
    return np.uint32(raw).view(np.float32)


def decode_f64(raw: Any) -> Any:  # compiled
    return np.uint64(raw).view(np.float64)


def round_to_odd(value: Any) -> Any:  # compiled
    """float64 to a float32 that rounds on to 16 bits just as the float64 would: truncate, and mark what was cut off."""
    near = np.float32(value)
    bits = np.float32(near).view(np.uint32)
    if abs(np.float64(near)) > abs(value):
        bits = np.uint32(bits - np.uint32(1))
    if np.float64(np.uint32(bits).view(np.float32)) != value:
        bits = np.uint32(bits | np.uint32(1))
    return np.uint32(bits).view(np.float32)


def encode_bf16(value: Any) -> Any:  # compiled
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def encode_f16(value: Any) -> Any:  # compiled
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Subnormals: adding 0.5 leaves the wanted bits, rounded to nearest even, at the low end of the float.
    nudged = np.float32(np.uint32(magnitude).view(np.float32)) + np.float32(0.5)
    small = np.float32(nudged).view(np.uint32) - np.uint32(0x3F000000)
    rounding = np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(magnitude + rounding - np.uint32(112 << 23)) >> np.uint32(13)
    return np.uint16((small if magnitude < np.uint32(0x38800000) else normal) | sign)


def encode_f32(value: Any) -> Any:  # compiled
    return np.float32(value).view(np.uint32)


def encode_f64(value: Any) -> Any:  # compiled
    return np.float64(value).view(np.uint64)


def elect(kept: Any, models: int, reals: Any, merged: Any, total: Any, share: Any) -> None:  # compiled
    """Ties: elect each position's sign by the sum, then average, by weight, the models that agree with it."""
    zero = kept.dtype.type(0)  # a plain 0 would make float64 of float32
    for j in range(TILE):
        total[j] = zero
        share[j] = zero
    for i in range(models):
        row = kept[i]
        for j in range(TILE):
            merged[j] += row[j]
    for i in range(models):
        row = kept[i]
        weight = kept.dtype.type(reals[i, WEIGHT])
        for j in range(TILE):
            agrees = (row[j] > 0) if merged[j] >= 0 else (row[j] < 0)
            total[j] += row[j] if agrees else zero
            share[j] += weight if agrees else zero
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else zero


def fold(values: Any) -> Any:  # compiled
    """The sum of a tile, by halves: it vectorises, and it loses less than a running sum. Overwrites the tile."""
    half = TILE // 2
    while half > 0:
        for j in range(half):
            values[j] += values[j + half]
        half //= 2
    return values[0]


def pad(rows: Any, start: int, stop: int) -> None:  # compiled
    """Zeros for the rest of a last tile, so that the loops need not stop within one."""
    for row in range(len(rows)):
        for j in range(start, stop):
            rows[row, j] = 0


def fold_neighbours(values: Any) -> Any:
    """A sum by pairs of neighbours: the same for a tensor in one piece as for pieces of 2^k values summed again."""
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        for k in range(half):
            values[k] = values[2 * k] + (values[2 * k + 1] if 2 * k + 1 < count else 0.0)
        count = half
    return values[0]


@dataclass(frozen=True)
class Format:
    """A type of tensor that can be merged, seen as the unsigned integers in which it is stored."""

    decode: Callable[[Any], Any]
    encode: Callable[[Any], Any]
    bits: int
    limit: float  # the smallest magnitude that rounds to infinity

    @property
    def raw(self) -> str:
        return f"u{self.bits // 8}"

    @property
    def real(self) -> str:
        return f"f{self.bits // 8}"


FORMATS: Final = {
    "BF16": Format(decode_bf16, encode_bf16, 16, 2.0**128 - 2.0**119),
    "F16": Format(decode_f16, encode_f16, 16, 65520.0),
    "F32": Format(decode_f32, encode_f32, 32, 2.0**128 - 2.0**103),
    "F64": Format(decode_f64, encode_f64, 64, math.inf),
}

# What kernels are told and what they tell is in two tables, with a row for each model and one for the whole.
# SLOT: which of slerp's two ends the model is; for trim, the prefix found so far. AGAINST: the row of scratch that
# makes its values deltas: the base, or zeros where they are deltas already. PEAK: the pattern of the largest.
KEY_0, KEY_1, LIMIT, SLOT, AGAINST, PEAK, ABOVE, KEPT, WORDS = range(9)
SCALE, WEIGHT, FLOOR, SUM, REALS = range(5)
LAMBDA, PULL, THRESHOLD = range(3)  # of the last row of REALS, whose SUM is the base's
# Rows of scratch before the models' kept deltas, and their width. Rows of exactly 4 KiB would share cache sets.
BASE_ROW: Final = 1
ZERO_ROW: Final = 6
SCRATCH_ROWS: Final = 7
SCRATCH_WIDTH: Final = TILE + 80
# Trim finds its threshold 16 bits of the magnitude at a time, by counting how many entries have each value of them.
DIGIT_BITS: Final = 16
# An analysis counts |delta| by size: 16 bins to each doubling, the first for all below 2^-40. Neighbours are counted in
# different lanes, since adding to what was just added to would wait for it.
BINS: Final = 1024
BINS_PER_OCTAVE: Final = 16
FIRST_BIN: Final = (127 - 40) * BINS_PER_OCTAVE - 1  # as the float32 pattern without its low bits
LANES: Final = 4
# Its figures: a row for each model, one for the base, one for all models together, and one for each pair of them.
ZEROS, OVER, SIZE, SQUARES = range(4)  # of a model or the base
PRODUCT, OPPOSED, BOTH, OPPOSED_SIZE, BOTH_SIZE, FIGURES = range(6)  # of a pair


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: what it does, and the stored types that it reads and writes."""

    # linear or ties: merge a chunk; angle: what slerp must know of it; count: what trim must; measure: what an analysis
    # wants to know; expand: LoRA.
    kind: str
    base: str
    finetuned: str
    output: str

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        return "F64" if "F64" in (self.base, self.finetuned, self.output) else "F32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.base}-{self.finetuned}-{self.output}"


def host_features() -> str:
    """What this processor can do, as LLVM names it.

    Where it has vectors of 512 bits, LLVM would use half of them, for fear of a lower clock; the kernels gain by all.
    """
    import llvmlite.binding as llvm

    features: str = llvm.get_host_cpu_features().flatten()
    return f"{features},-prefer-256-bit" if "+avx512f" in features else features


@cache
def load_numba() -> Any:
    """Numba, with the whole width of the vectors, unless somebody told it what to use.

    It asks when the process compiles for the first time. If that was before, the kernels are as right, and slower.
    """
    numba: Any = importlib.import_module("numba")
    features = host_features()
    if "+avx512f" in features and numba.config.ENABLE_AVX and numba.config.CPU_FEATURES is None:
        numba.config.CPU_FEATURES = features
    return numba


@cache
def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it. Once for all kernels: it takes Numba a while."""
    options = {"forceinline": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return load_numba().njit(**options)(function)


class Parts:
    """What all kernels of a spec are made of: the types, and the inner functions, ready to be compiled in."""

    def __init__(self, spec: KernelSpec) -> None:
        self.numba = load_numba()
        wide = spec.real == "F64"
        self.real: Any = np.float64 if wide else np.float32
        self.unsigned: Any = np.uint64 if wide else np.uint32
        self.raw = [np.dtype(FORMATS[name].raw).type for name in (spec.base, spec.finetuned, spec.output)]
        self.decode = inline(FORMATS[spec.base].decode)
        self.encode = inline(FORMATS[spec.output].encode)
        if wide and FORMATS[spec.output].bits == 16:
            self.encode = self._encode_by_odd(self.encode)
        self.decode_finetuned = inline(FORMATS[spec.finetuned].decode)
        self.thin = self._thin_model(self.decode_finetuned, spec.kind == "ties")

    def _encode_by_odd(self, encode: Any) -> Any:
        narrow = inline(round_to_odd)

        def encode_by_odd(value: Any) -> Any:  # compiled
            return encode(narrow(value))

        return inline(encode_by_odd)

    def _thin_model(self, decode: Any, apart: bool) -> Any:
        """The heart of all kernels: one tile of one model, from its stored values to its thinned deltas.

        They are added to a row, or, for ties, are what the row holds then.
        """
        draw_bits, real, unsigned = inline(draw), self.real, self.unsigned

        def thin_model(  # compiled
            raw: Any, tile: int, words: Any, reals: Any, base: Any, bits: Any, size: Any, row: Any, threshold: Any
        ) -> None:
            draw_bits(bits, tile, words[KEY_0], words[KEY_1])
            limit, floor, scale = np.uint16(words[LIMIT]), real(reals[FLOOR]), real(reals[SCALE])
            peak = unsigned(words[PEAK])
            above = np.uint32(0)
            survivors = np.uint32(0)
            for j in range(TILE):
                delta = decode(raw[j]) - base[j]
                magnitude = abs(delta)
                size[j] = magnitude
                # Compared as integers, a NaN or an infinity is the largest of all, and the loop vectorises.
                pattern = real(magnitude).view(unsigned)
                peak = pattern if pattern > peak else peak
                above = np.uint32(above + np.uint32(magnitude > threshold))
                survives = bits[j] <= limit
                survivors = np.uint32(survivors + np.uint32(survives))
                if apart:
                    row[j] = delta * scale if survives and magnitude >= floor else real(0)
                else:
                    row[j] += delta * scale if survives else real(0)
            words[PEAK] = peak
            words[ABOVE] += np.uint64(above)
            words[KEPT] += np.uint64(survivors)

        return inline(thin_model)

    def compile(self, function: Callable[..., None]) -> Any:
        """All kernels have one signature: seven addresses and five whole numbers."""
        types = self.numba.types
        return self.numba.cfunc(types.void(*[types.voidptr] * 7, *[types.intp] * 5))(function)


def build_merge(spec: KernelSpec) -> Any:
    """Compile the loop that merges one chunk: decode, subtract, mask, combine, encode, tile by tile in the cache."""
    parts = Parts(spec)
    carray, real, unsigned, decode, encode = parts.numba.carray, parts.real, parts.unsigned, parts.decode, parts.encode
    base_raw, finetuned_raw, output_raw = parts.raw
    thin_model, decode_finetuned, fold_tile, pad_rows = parts.thin, parts.decode_finetuned, inline(fold), inline(pad)
    elect_signs, is_ties = inline(elect), spec.kind == "ties"

    def merge_chunk(  # compiled
        base_at: Any, finetuned_at: Any, output_at: Any, words_at: Any, reals_at: Any, scratch_at: Any, _: Any,
        count: int, stride: int, models: int, first_tile: int, exact: int,
    ) -> None:  # fmt: skip
        tiles = (count + TILE - 1) // TILE
        base_all = carray(base_at, (1, tiles * TILE), base_raw)
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        output_all = carray(output_at, (1, tiles * TILE), output_raw)
        words = carray(words_at, (models + 1, WORDS), np.uint64)
        reals = carray(reals_at, (models + 1, REALS), np.float64)
        scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
        bits = carray(scratch_at, (1, TILE), np.uint16)[0]
        base, merged, size, kept = scratch[BASE_ROW], scratch[2], scratch[3], scratch[SCRATCH_ROWS:]
        threshold = real(reals[models, THRESHOLD])
        lambda_coeff, pull = real(reals[models, LAMBDA]), real(reals[models, PULL])
        pad_rows(base_all, count, tiles * TILE)
        pad_rows(finetuned_all, count, tiles * TILE)
        pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[0, start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                size[j] = abs(value)
                merged[j] = pull * value
            reals[models, SUM] += fold_tile(size)
            for i in range(models):
                raw_finetuned = finetuned_all[i, start : start + TILE]
                against = scratch[np.int64(words[i, AGAINST])]
                row = kept[i] if is_ties else merged
                thin_model(raw_finetuned, first_tile + tile, words[i], reals[i], against, bits, size, row, threshold)
                reals[i, SUM] += fold_tile(size)
                # Of a last tile, what pads it was counted too.
                for j in range(count - start, TILE):
                    words[i, KEPT] -= np.uint64(bits[j] <= np.uint16(words[i, LIMIT]))
            if is_ties:
                elect_signs(kept, models, reals, merged, scratch[4], scratch[5])
            if exact:
                raw_finetuned = finetuned_all[0, start : start + TILE]
                for j in range(TILE):
                    base[j] = decode_finetuned(raw_finetuned[j])
                    merged[j] = 0
            output = output_all[0, start : start + TILE]
            peak = unsigned(words[models, PEAK])
            for j in range(TILE):
                change = lambda_coeff * merged[j]
                sum_ = base[j] + change
                value = base[j] if change == 0 else sum_  # base + 0 would turn -0.0 into 0.0
                pattern = real(abs(value)).view(unsigned)
                peak = pattern if pattern > peak else peak
                output[j] = encode(value)
            words[models, PEAK] = peak

    return parts.compile(merge_chunk)


def build_angle(spec: KernelSpec) -> Any:
    """Compile the loop that gives slerp |end 0|^2, |end 1|^2 and end 0 . end 1, where an end is base + kept."""
    parts = Parts(spec)
    carray, real, decode, thin_model = parts.numba.carray, parts.real, parts.decode, parts.thin
    base_raw, finetuned_raw, _ = parts.raw
    fold_tile, fold_pairs, pad_rows = inline(fold), inline(fold_neighbours), inline(pad)

    def angle_chunk(  # compiled
        base_at: Any, finetuned_at: Any, output_at: Any, words_at: Any, reals_at: Any, scratch_at: Any, _: Any,
        count: int, stride: int, models: int, first_tile: int, _flag: int,
    ) -> None:  # fmt: skip
        tiles = (count + TILE - 1) // TILE
        base_all = carray(base_at, (1, tiles * TILE), base_raw)
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        sums = carray(output_at, (3, tiles), np.float64)
        words = carray(words_at, (models + 1, WORDS), np.uint64)
        reals = carray(reals_at, (models + 1, REALS), np.float64)
        scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
        bits = carray(scratch_at, (1, TILE), np.uint16)[0]
        products = carray(scratch_at, (SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)[SCRATCH_ROWS + models]
        base, size, ends = scratch[BASE_ROW], scratch[3], scratch[4:6]
        pad_rows(base_all, count, tiles * TILE)
        pad_rows(finetuned_all, count, tiles * TILE)
        pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[0, start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                ends[0, j] = value
                ends[1, j] = value
            for i in range(models):
                raw_finetuned = finetuned_all[i, start : start + TILE]
                against = scratch[np.int64(words[i, AGAINST])]
                end = ends[np.int64(words[i, SLOT])]
                thin_model(raw_finetuned, first_tile + tile, words[i], reals[i], against, bits, size, end, real(0))
            for which in range(3):
                left, right = ends[1 if which == 1 else 0], ends[0 if which == 0 else 1]
                for j in range(TILE):
                    products[j] = np.float64(left[j]) * np.float64(right[j])
                sums[which, tile] = fold_tile(products)
        for which in range(3):
            reals[models, which] = fold_pairs(sums[which])

    return parts.compile(angle_chunk)


def build_count(spec: KernelSpec) -> Any:
    """Compile the loop that counts, for trim, the surviving |delta| by 16 bits of their pattern.

    shift says which bits; only patterns that continue the model's prefix, found by the calls before, are counted. Few
    entries survive, so they are picked first, and only their deltas are computed.
    """
    parts = Parts(spec)
    carray, real, unsigned, decode = parts.numba.carray, parts.real, parts.unsigned, parts.decode
    base_raw, finetuned_raw, _ = parts.raw
    draw_bits, decode_finetuned = inline(draw), parts.decode_finetuned

    def count_chunk(  # compiled
        base_at: Any, finetuned_at: Any, _output_at: Any, words_at: Any, _reals_at: Any, scratch_at: Any,
        counts_at: Any, count: int, stride: int, models: int, first_tile: int, shift: int,
    ) -> None:  # fmt: skip
        base_all = carray(base_at, (1, count), base_raw)
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        words = carray(words_at, (models + 1, WORDS), np.uint64)
        counts = carray(counts_at, (models, 1 << DIGIT_BITS), np.uint32)
        rows = carray(scratch_at, (3, 2 * TILE), np.uint16)
        bits, survives, picked = rows[0], rows[1], rows[2]
        for start in range(0, count, TILE):
            width = count - start
            for i in range(models):
                draw_bits(bits, first_tile + start // TILE, words[i, KEY_0], words[i, KEY_1])
                limit, prefix, minus_base = np.uint16(words[i, LIMIT]), words[i, SLOT], words[i, AGAINST] == BASE_ROW
                for j in range(TILE):
                    survives[j] = np.uint16(1) if bits[j] <= limit else np.uint16(0)
                # Pick them without a branch, which no processor could predict.
                found = np.uint64(0)
                for j in range(TILE):
                    picked[found] = j
                    found += np.uint64(survives[j])
                for k in range(found):
                    place = np.int64(picked[k])
                    if place < width:
                        delta = real(decode_finetuned(finetuned_all[i, start + place]))
                        if minus_base:
                            delta = real(delta - real(decode(base_all[0, start + place])))
                        pattern = np.uint64(real(abs(delta)).view(unsigned)) >> np.uint64(shift)
                        if pattern >> np.uint64(DIGIT_BITS) == prefix:
                            counts[i, np.int64(pattern & np.uint64(0xFFFF))] += np.uint32(1)

    return parts.compile(count_chunk)


def compare_signs(one: Any, other: Any, opposed: Any, both: Any, figures: Any) -> None:  # compiled
    """How many positions two models pull in opposite directions, how many they both change, and by how much."""
    zero = opposed.dtype.type(0)
    against = np.uint32(0)
    shared = np.uint32(0)
    for j in range(TILE):
        a, b = one[j], other[j]
        is_opposed = (a > 0 and b < 0) or (a < 0 and b > 0)
        is_both = a != 0 and b != 0
        against = np.uint32(against + np.uint32(is_opposed))
        shared = np.uint32(shared + np.uint32(is_both))
        size = abs(a) + abs(b)
        opposed[j] = size if is_opposed else zero
        both[j] = size if is_both else zero
    figures[OPPOSED] += np.float64(against)
    figures[BOTH] += np.float64(shared)


def build_measure(spec: KernelSpec) -> Any:
    """Compile the loop that gathers an analysis' figures. Zeros that pad a last tile are counted with the others."""
    parts = Parts(spec)
    carray, real, unsigned, decode = parts.numba.carray, parts.real, parts.unsigned, parts.decode
    base_raw, finetuned_raw, _ = parts.raw
    decode_finetuned, fold_tile, pad_rows = parts.decode_finetuned, inline(fold), inline(pad)
    signs = inline(compare_signs)

    def measure_chunk(  # compiled
        base_at: Any, finetuned_at: Any, figures_at: Any, words_at: Any, reals_at: Any, scratch_at: Any,
        counts_at: Any, count: int, stride: int, models: int, _first_tile: int, _flag: int,
    ) -> None:  # fmt: skip
        tiles = (count + TILE - 1) // TILE
        pairs = models * (models - 1) // 2
        base_all = carray(base_at, (1, tiles * TILE), base_raw)
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        figures = carray(figures_at, (models + 2 + pairs, FIGURES), np.float64)
        words = carray(words_at, (models + 1, WORDS), np.uint64)
        reals = carray(reals_at, (models + 1, REALS), np.float64)
        counts = carray(counts_at, (models, LANES, BINS), np.uint32)
        scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
        bins = carray(scratch_at, (1, TILE), np.uint16)[0]
        base, left, right, size, deltas = scratch[BASE_ROW], scratch[2], scratch[3], scratch[4], scratch[SCRATCH_ROWS:]
        products = scratch[5]
        threshold = real(reals[models, THRESHOLD])
        pad_rows(base_all, count, tiles * TILE)
        pad_rows(finetuned_all, count, tiles * TILE)
        pad_rows(scratch[ZERO_ROW : ZERO_ROW + 1], 0, TILE)
        for tile in range(tiles):
            start = tile * TILE
            raw = base_all[0, start : start + TILE]
            for j in range(TILE):
                value = decode(raw[j])
                base[j] = value
                size[j] = abs(value)
                products[j] = value * value
            figures[models, SIZE] += fold_tile(size)
            figures[models, SQUARES] += fold_tile(products)
            for i in range(models):
                raw_finetuned = finetuned_all[i, start : start + TILE]
                against = scratch[np.int64(words[i, AGAINST])]
                delta_row = deltas[i]
                peak = unsigned(words[i, PEAK])
                zeros = np.uint32(0)
                over = np.uint32(0)
                for j in range(TILE):
                    delta = decode_finetuned(raw_finetuned[j]) - against[j]
                    magnitude = abs(delta)
                    delta_row[j] = delta
                    size[j] = magnitude
                    products[j] = delta * delta
                    pattern = real(magnitude).view(unsigned)
                    peak = pattern if pattern > peak else peak
                    zeros = np.uint32(zeros + np.uint32(magnitude == 0))
                    over = np.uint32(over + np.uint32(magnitude > threshold))
                    place = np.float32(magnitude).view(np.uint32) >> np.uint32(19)
                    place = place if place > np.uint32(FIRST_BIN) else np.uint32(FIRST_BIN)
                    place = np.uint32(place - np.uint32(FIRST_BIN))
                    bins[j] = np.uint16(place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1))
                words[i, PEAK] = peak
                figures[i, ZEROS] += np.float64(zeros)
                figures[i, OVER] += np.float64(over)
                figures[i, SIZE] += fold_tile(size)
                figures[i, SQUARES] += fold_tile(products)
                for j in range(0, TILE, LANES):
                    for lane in range(LANES):
                        counts[i, lane, bins[j + lane]] += np.uint32(1)
            row = models + 2
            for i in range(models):
                for k in range(i + 1, models):
                    signs(deltas[i], deltas[k], left, right, figures[row])
                    figures[row, OPPOSED_SIZE] += fold_tile(left)
                    figures[row, BOTH_SIZE] += fold_tile(right)
                    one, other = deltas[i], deltas[k]
                    for j in range(TILE):
                        products[j] = one[j] * other[j]
                    figures[row, PRODUCT] += fold_tile(products)
                    row += 1
            # Where any two of all models pull in opposite directions; with two models, their pair says it.
            if models > 2:
                for j in range(TILE):
                    left[j] = 0
                    right[j] = 0
                    size[j] = 0
                for i in range(models):
                    delta_row = deltas[i]
                    for j in range(TILE):
                        left[j] += real(delta_row[j] > 0)
                        right[j] += real(delta_row[j] < 0)
                        size[j] += abs(delta_row[j])
                mixed = np.uint32(0)
                several = np.uint32(0)
                for j in range(TILE):
                    is_mixed = left[j] > 0 and right[j] > 0
                    is_several = left[j] + right[j] > 1
                    mixed = np.uint32(mixed + np.uint32(is_mixed))
                    several = np.uint32(several + np.uint32(is_several))
                    left[j] = size[j] if is_mixed else real(0)
                    right[j] = size[j] if is_several else real(0)
                figures[models + 1, OPPOSED] += np.float64(mixed)
                figures[models + 1, BOTH] += np.float64(several)
                figures[models + 1, OPPOSED_SIZE] += fold_tile(left)
                figures[models + 1, BOTH_SIZE] += fold_tile(right)

    return parts.compile(measure_chunk)


def build_expand(spec: KernelSpec) -> Any:
    """Compile the loop that multiplies an adapter's two matrices, for a range of the product's elements.

    The products are added in the order of the rank, whatever the range: no library promises the same bits twice.
    """
    parts = Parts(spec)
    carray, real = parts.numba.carray, parts.real

    def expand_chunk(  # compiled
        left_at: Any, right_at: Any, output_at: Any, _words: Any, _reals: Any, _scratch: Any, _: Any,
        count: int, columns: int, rank: int, first: int, ranks_before: int,
    ) -> None:  # fmt: skip
        rows = (first + count + columns - 1) // columns
        left_all = carray(left_at, (rows, rank), real)
        right = carray(right_at, (rank, columns), real)
        output = carray(output_at, (1, count), real)[0]
        place, done = first, 0
        for row in range(rows):
            left = left_all[row]
            while place < columns and done < count:
                width = min(columns - place, count - done, TILE)
                part = output[done : done + width]
                if ranks_before == 0:
                    for j in range(width):
                        part[j] = 0
                k = 0
                while k + 4 <= rank:  # four at a time, so that the sum stays in registers for longer
                    f0, f1, f2, f3 = left[k], left[k + 1], left[k + 2], left[k + 3]
                    r0, r1 = right[k, place : place + width], right[k + 1, place : place + width]
                    r2, r3 = right[k + 2, place : place + width], right[k + 3, place : place + width]
                    for j in range(width):
                        part[j] = (((part[j] + f0 * r0[j]) + f1 * r1[j]) + f2 * r2[j]) + f3 * r3[j]
                    k += 4
                while k < rank:
                    factor, others = left[k], right[k, place : place + width]
                    for j in range(width):
                        part[j] += factor * others[j]
                    k += 1
                place, done = place + width, done + width
            place = 0

    return parts.compile(expand_chunk)


BUILDERS: Final = {
    "linear": build_merge, "ties": build_merge, "angle": build_angle, "count": build_count, "measure": build_measure,
    "expand": build_expand,
}  # fmt: skip


KernelCall = Callable[..., Any]


def compile_object(spec: KernelSpec, machine: Any) -> bytes:
    """The kernel as an object file that needs nothing of Numba to run.

    Loading Numba takes longer than merging a billion parameters. So Numba compiles once, and what is kept is the bare
    function: status = merge_chunk(return slot, exception slot, arguments...), its wrappers for Python left behind.
    """
    import llvmlite.binding as llvm

    function = BUILDERS[spec.kind](spec)
    module = llvm.parse_assembly(function.inspect_llvm())
    bare = function.native_name.removeprefix("cfunc.")
    for other in module.functions:
        if other.name != bare and not other.is_declaration:
            other.linkage = "internal"
    module.get_function(bare).name = "kernel"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    code: bytes = machine.emit_object(module)
    return code


def cache_folder() -> Path | None:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR, or beside this file, or in the user's cache."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    beside = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__pycache__")
    users = os.path.expanduser(os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "dare"))
    for folder in [chosen] if chosen else [beside, users]:
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            if os.access(folder, os.W_OK):
                return Path(folder)
    return None


def cached_object(spec: KernelSpec, machine: Any) -> bytes:
    """The kernel's object code, from disk where this very source was compiled for this very processor before."""
    import llvmlite
    import llvmlite.binding as llvm

    made_for = (llvmlite.__version__, machine.triple, llvm.get_host_cpu_name(), host_features())
    identity = hashlib.sha256(repr(made_for).encode() + Path(__file__).read_bytes()).hexdigest()[:16]
    folder = cache_folder()
    path = folder / f"dare.{spec}.{identity}.o" if folder else None
    if path is not None:
        with suppress(OSError):
            stored = path.read_bytes()
            # A file that a crash cut short must not be run.
            if hashlib.sha256(stored[32:]).digest() == stored[:32]:
                return stored[32:]
    LOG.info("compiling the %s kernel for this machine; later runs start at once", spec.kind)
    code = compile_object(spec, machine)
    if path is not None:
        with suppress(OSError):
            partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
            partial.write_bytes(hashlib.sha256(code).digest() + code)
            partial.replace(path)
    return code


@cache
def load_kernel(spec: KernelSpec) -> KernelCall:
    """The compiled kernel, as a function of addresses and numbers that runs without the interpreter's lock."""
    import llvmlite.binding as llvm

    load_numpy()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=host_features(), opt=3, codemodel="jitdefault"
    )
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(cached_object(spec, machine)))
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 9, *[ctypes.c_ssize_t] * 5)
    function = prototype(engine.get_function_address("kernel"))
    slots = ctypes.create_string_buffer(16)
    where = ctypes.addressof(slots)

    # The engine owns the code, and the function writes to its slots: both must live as long as the function does.
    owners = (engine, slots)
    return lambda *arguments, _owners=owners: function(where, where + 8, *arguments)


def widen(raw: NDArray[Any], name: str) -> NDArray[Any]:
    """Stored values as floats, in plain NumPy: for messages, and where fine-tunes are of different types."""
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32) if name == "F16" else raw.view(FORMATS[name].real)


# ---------------------------------------------------------------------------------------------------------------------
# Reading checkpoints
# ---------------------------------------------------------------------------------------------------------------------

# Bits per element of every type that safetensors knows.
STORED_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
# The safetensors library refuses larger headers; nothing honest comes near.
MAX_HEADER: Final = 100_000_000
# So that memory stays small whatever a file claims. The largest models there are have half as many tensors.
MAX_TENSORS: Final = 250_000
MAX_NAME: Final = 65_536  # characters
MAX_NAMES: Final = 1 << 25  # bytes in memory, of all names of a model: a wide letter makes all letters of a name wide
MAX_METADATA: Final = 1 << 23  # characters in all
MAX_JSON: Final = 1 << 24  # bytes of a configuration
MAX_JSON_VALUES: Final = 500_000
JSON_PIECE: Final = 1 << 20

WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
ADAPTER_FILE: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"
CONFIG_FILE: Final = "config.json"

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Weights of any framework, and what training leaves behind: none of it belongs to a merged model.
WEIGHT_SUFFIXES: Final = (
    ".safetensors", ".index.json", *PICKLE_SUFFIXES, ".h5", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data", ".ot",
    ".tflite", ".mlmodel", ".mlpackage", ".npz", ".npy", ".distcp", ".nemo", ".partial",
)  # fmt: skip
CONVERT_HINT: Final = (
    'pickles can run any code, so convert it first: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load(open('{}', 'rb'), weights_only=True), '{}')\""
)
CONVERT_DIRECTORY_HINT: Final = (
    "pickles can run any code, so convert it first: load it with transformers and save it again with save_pretrained"
)
QUANTISE_HINT: Final = "merge the models before quantising them, then quantise the result"

BINARY: Final = getattr(os, "O_BINARY", 0)  # so that Windows leaves line ends alone
# Where the system has no positioned reads and writes, seeking and reading must not be parted by another thread.
SEEK_LOCK: Final = threading.Lock()


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorInfo:
    """Where one tensor lies in a checkpoint, or how to make it from those that do."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    file: int = 0  # which of the checkpoint's files
    low_rank: LowRank | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.count * STORED_BITS[self.dtype] // 8)

    @property
    def stored_bytes(self) -> int:
        """What must be read for it."""
        if self.low_rank is None:
            return self.nbytes
        whole = self.low_rank.whole
        return self.low_rank.left.nbytes + self.low_rank.right.nbytes + (whole.nbytes if whole else 0)


@dataclass(frozen=True)
class LowRank:
    """A tensor, or a change to one, that is scale * left @ right; the stored matrices may have to be transposed."""

    left: TensorInfo  # rows x rank, or rank x rows
    right: TensorInfo  # rank x columns, or columns x rank
    rank: int
    columns: int
    transposed: bool
    scale: float
    whole: TensorInfo | None = None  # the tensor that it changes, where that was saved with it; None: the base's

    def read_left(self, model: Checkpoint, rows: slice, ranks: slice, dtype: Any) -> NDArray[Any]:
        """rows x rank"""
        if self.transposed:
            return np.ascontiguousarray(model.read_matrix(self.left, ranks, rows).T, dtype)
        return np.ascontiguousarray(model.read_matrix(self.left, rows, ranks), dtype)

    def read_right(self, model: Checkpoint, ranks: slice, dtype: Any) -> NDArray[Any]:
        """rank x columns"""
        columns = slice(0, self.columns)
        if self.transposed:
            return np.ascontiguousarray(model.read_matrix(self.right, columns, ranks).T, dtype)
        return np.ascontiguousarray(model.read_matrix(self.right, ranks, columns), dtype)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into view from a position, and say how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with SEEK_LOCK:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


class TensorFile:
    """One safetensors file, open for reading: what is in it, and its bytes by position."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        try:
            regular_file(path, name)  # opening a pipe would wait for somebody to write to it
            self.descriptor = os.open(path, os.O_RDONLY | BINARY)
            self.status = os.fstat(self.descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DareError(f"cannot read {name!r}: {error.strerror}", "check its permissions") from None
        try:
            self.tensors, self.metadata, self.header_sha256 = self._parse(self._header_length())
        except BaseException:
            self.close()
            raise

    def _header_length(self) -> int:
        """What the first eight bytes of the file say."""
        size = self.status.st_size
        start = bytearray(min(8, size))
        self.read_into(memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if size < 8:
            raise self._not_safetensors("it is too short for a header")
        if length > MAX_HEADER:
            raise self._not_safetensors(f"its header would be {length:,} bytes long")
        if 8 + length > size:
            raise self._not_safetensors(f"its header should be {length:,} bytes long and it has {size - 8:,}")
        return length

    def _parse(self, length: int) -> tuple[dict[str, TensorInfo], dict[str, str], str]:
        """The tensors, in the order in which they are stored, the metadata, and the digest of the header.

        Every rule of the format is checked. The safetensors library would map the whole file into memory for this, and
        lets names be given twice.
        """
        digest = hashlib.sha256(length.to_bytes(8, "little"))
        try:
            found, metadata = parse_header(JsonReader(self._header_text(length, digest)))
        except (ValueError, RecursionError) as error:
            reason = "its header is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise self._not_safetensors(reason) from None
        tensors, place = {}, 0
        for name in sorted(found, key=lambda name: found[name][2:]):
            dtype, shape, begin, end = found.pop(name)
            info = TensorInfo(dtype, shape, 8 + length + begin)
            if begin != place or end - begin != info.nbytes:
                wrong = "leaves a hole or overlaps" if begin != place else f"is not {info.nbytes:,} bytes long"
                raise self._not_safetensors(f"tensor {name!r} at [{begin}, {end}] {wrong}")
            tensors[name], place = info, end
        there = self.status.st_size - 8 - length
        if place != there:
            raise self._not_safetensors(f"its tensors take {place:,} bytes, and {there:,} are there")
        return tensors, metadata, digest.hexdigest()

    def _header_text(self, length: int, digest: hashlib._Hash) -> Iterator[str]:
        """The header, piece by piece; the digest sees it too."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, length, JSON_PIECE):
            piece = bytearray(min(JSON_PIECE, length - start))
            self.read_into(memoryview(piece), 8 + start)
            digest.update(piece)
            yield decoder.decode(bytes(piece), start + len(piece) == length)

    def _not_safetensors(self, reason: str) -> DareError:
        """What a file that is not safetensors is instead, and what to do about it."""
        start = bytearray(9)
        found = bytes(start[: read_at(self.descriptor, memoryview(start), 0)])
        if not found:
            return DareError(f"{self.name!r} is empty", "download or save it again")
        pickled = found[:4] == b"PK\x03\x04" or (found[:1] == b"\x80" and found[8:] != b"{")
        if pickled or self.path.suffix in PICKLE_SUFFIXES:
            return DareError(f"{self.name!r} is a PyTorch pickle, not a safetensors file", self._convert_hint())
        if found[:4] == b"vers":
            return DareError(f"{self.name!r} looks like a Git LFS pointer, not the file itself", "run git lfs pull")
        if found[:4] == b"GGUF":
            return DareError(f"{self.name!r} is a GGUF file", "merge the original model, then convert the result")
        return DareError(f"{self.name!r} is not a complete safetensors file: {reason}", "download or save it again")

    def _convert_hint(self) -> str:
        """A command for any shell, with the file's name in it unless a shell could take that for something else."""
        name = self.path.as_posix()
        if not re.fullmatch(r"[\w ./:@+,=-]+", name):
            return CONVERT_HINT.format("in.bin", "out.safetensors")
        made = name.removesuffix(self.path.suffix) if self.path.suffix in PICKLE_SUFFIXES else f"{name}.converted"
        return CONVERT_HINT.format(name, f"{made}.safetensors")

    def read_into(self, view: memoryview, offset: int) -> None:
        try:
            while view:
                done = read_at(self.descriptor, view, offset)
                if done == 0:
                    raise InputChanged(
                        f"{self.name!r} became shorter while it was read", "leave it alone during a merge"
                    )
                view, offset = view[done:], offset + done
        except OSError as error:
            raise DareError(f"cannot read {self.name!r}: {error.strerror}", "check the disk that it is on") from None

    def check_unchanged(self) -> None:
        """Refuse to go on if the file is not what it was when it was opened."""
        try:
            now = [os.fstat(self.descriptor), self.path.stat()]
        except OSError:
            raise InputChanged(
                f"{self.name!r} vanished while it was merged", "leave inputs alone; merge again"
            ) from None
        for status in now:
            if identity_of(status) != identity_of(self.status):
                raise InputChanged(f"{self.name!r} changed while it was merged", "leave inputs alone; merge again")

    def close(self) -> None:
        with suppress(OSError):  # nothing was written
            os.close(self.descriptor)


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class JsonReader:
    """A JSON text that is read piece by piece, so that memory does not grow with it, whatever it holds.

    What is not JSON, or is larger than it may be, is a ValueError.
    """

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces, self._ended = pieces, False
        self._text, self._place = "", 0  # what was read last, and how much of it was taken
        self._before = 0  # characters before that

    @property
    def position(self) -> int:
        return self._before + self._place

    def _look(self, ahead: int) -> None:
        """Have so many characters ahead, as far as there are any."""
        if len(self._text) - self._place >= ahead or self._ended:
            return
        self._before += self._place
        parts = [self._text[self._place :]]
        there = len(parts[0])
        while there < ahead and not self._ended:
            part = next(self._pieces, None)
            self._ended = part is None
            parts.append(part or "")
            there += len(parts[-1])
        self._text, self._place = "".join(parts), 0

    def peek(self) -> str:
        """The next character that is not white space; nothing at the end."""
        while True:
            found = self._text[self._place : self._place + 1]
            if found > " ":
                return found
            self._place = cast(re.Match[str], WHITE_SPACE.match(self._text, self._place)).end()
            if self._place < len(self._text) or self._ended:
                return self._text[self._place : self._place + 1]
            self._look(1)

    def take(self, wanted: str) -> str:
        """The next character, which must be one of these."""
        found = self.peek()
        if found not in tuple(wanted):
            raise ValueError(f"it is not JSON: at {self.position:,} there should be one of {' '.join(wanted)}")
        self._place += 1
        return found

    def members(self) -> Iterator[str]:
        """The keys of a table; the value of each is to be taken before the next is asked for."""
        comma = self.take("{")
        while comma != "}":
            if comma == "{" and self.peek() == "}":
                self.take("}")
                return
            name = self.string(MAX_NAME)
            self.take(":")
            yield name
            comma = self.take(",}")

    def elements(self) -> Iterator[None]:
        """As often as a list has elements; each is to be taken before the next is asked for."""
        comma = self.take("[")
        while comma != "]":
            if comma == "[" and self.peek() == "]":
                self.take("]")
                return
            yield
            comma = self.take(",]")

    def string(self, limit: int) -> str:
        if self.peek() != '"':
            raise ValueError(f"it is not JSON: at {self.position:,} there should be a string")
        text: str = self.value(limit)
        text.encode()  # half a surrogate pair is no text
        return text

    def value(self, limit: int) -> Any:
        """The next value, if it takes no more characters than that."""
        self.peek()
        ahead = min(limit, 1000)
        while True:
            self._look(ahead + 1)
            # What reaches to the end of what was read may go on behind it.
            whole = self._ended or len(self._text) - self._place > limit
            try:
                value, end = JSON_DECODER.raw_decode(self._text, self._place)
                # A number may seem to end before its point, or its exponent with a sign.
                if end + 2 < len(self._text) or self._ended or (whole and end - self._place <= limit):
                    break
            except json.JSONDecodeError as error:
                # What is cut off is wrong at its very end, or a string.
                cut = error.pos + 20 > len(self._text) or error.msg.startswith("Unterminated")
                if self._ended or not cut:
                    raise ValueError(f"it is not JSON: {error.msg} (character {self._before + error.pos:,})") from None
            if whole:
                end = self._place + limit + 1
                break
            ahead = min(limit, max(2 * ahead, len(self._text) - self._place))
        if end - self._place > limit:
            raise ValueError(f"what is at {self.position:,} is longer than {limit:,} characters")
        self._place = end
        return value

    def skip(self) -> None:
        """Leave out the next value, of any size."""
        opened = self.peek()
        for _ in self.members() if opened == "{" else self.elements() if opened == "[" else ():
            self.skip()
        if opened not in ("{", "["):
            self.value(MAX_METADATA)

    def match(self, pattern: re.Pattern[str], limit: int) -> str | None:
        """Take what matches, which is to be no longer than that."""
        self.peek()
        self._look(limit)
        if matched := pattern.match(self._text, self._place):
            self._place = matched.end()
        return matched and matched[0]

    def end(self) -> None:
        if self.peek():
            raise ValueError(f"there is something behind its end, at {self.position:,}")


# An entry of a header has no braces within, and is short. What does not look like that is not even parsed.
ENTRY_LENGTH: Final = 5000
HEADER_ENTRY: Final = re.compile(rf"\{{[^{{}}]{{0,{ENTRY_LENGTH}}}\}}")
WHITE_SPACE: Final = re.compile(r"[ \t\r\n]*")
HeaderEntry = tuple[str, tuple[int, ...], int, int]  # type, shape, and where it begins and ends


def parse_header(header: JsonReader) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """The entries of a header, in its order, and the metadata; anything against the format is a ValueError."""
    if header.peek() != "{" or header.position:
        raise ValueError("its header does not start with {")
    entries: dict[str, HeaderEntry] = {}
    metadata: dict[str, str] | None = None
    room = MAX_NAMES
    for name in header.members():
        if name in entries or (name == "__metadata__" and metadata is not None):
            raise ValueError(f"{name!r} is in it twice")
        if name == "__metadata__":
            metadata = _header_metadata(header)
            continue
        found = header.match(HEADER_ENTRY, ENTRY_LENGTH + 2)
        try:
            entries[name] = _header_entry(ENTRY_DECODER.decode(found) if found else None)
        except ValueError as error:
            raise ValueError(f"the entry of tensor {name!r} is wrong: {error}") from None
        room -= sys.getsizeof(name)
        if len(entries) > MAX_TENSORS or room < 0:
            raise ValueError(f"it has more than {MAX_TENSORS:,} tensors, or longer names than any model")
    header.end()
    return entries, metadata or {}


def _header_metadata(header: JsonReader) -> dict[str, str]:
    if header.peek() == "n" and header.value(4) is None:
        return {}
    if header.peek() != "{":
        raise ValueError("its metadata is not a table of strings")
    told: dict[str, str] = {}
    room = MAX_METADATA
    for name in header.members():
        if header.peek() != '"':
            raise ValueError("its metadata is not a table of strings")
        if name in told:
            raise ValueError(f"{name!r} is in it twice")
        told[name] = header.string(room)
        room -= len(name) + len(told[name])
        if room < 0 or len(told) > MAX_TENSORS:
            raise ValueError("its metadata is larger than any that it should have")
    return told


def _whole(text: str) -> int:
    if not text.isdigit():  # as -0 is not, nor NaN
        raise ValueError(f"{text} is no number that a header may have")
    return int(text)


def _header_entry(entry: Any) -> HeaderEntry:
    fields = entry if isinstance(entry, dict) and len(entry) == 3 else {}
    dtype, shape, ends = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    numbers: list[Any] = [*shape, *ends] if isinstance(shape, list) and isinstance(ends, list) else [None]
    sound = set(map(type, numbers)) == {int} and max(numbers) < 1 << 63  # and none is negative, see _whole
    if not isinstance(dtype, str) or not sound or len(ends or ()) != 2:
        raise ValueError("it is not a type, a shape and two offsets")
    if dtype not in STORED_BITS:
        raise ValueError(f"{dtype!r} is an unknown type")
    bits = STORED_BITS[dtype]
    for side in shape or ():
        bits *= side
        if bits >> 64:
            raise ValueError("its shape is beyond all bounds")
    if bits % 8:
        raise ValueError("it does not end at a byte")
    return dtype, tuple(shape or ()), *(ends or (0, 0))


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The table of these pairs, if no key is given twice."""
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is in it twice")
    return table


JSON_DECODER: Final = json.JSONDecoder(object_pairs_hook=distinct)
ENTRY_DECODER: Final = json.JSONDecoder(object_pairs_hook=distinct, parse_int=_whole, parse_constant=_whole)


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object in which no key is given twice; anything else, or too much of it, is a ValueError."""
    values = sum(map(data.count, (b",", b"{", b"[")))  # at most: some may be in strings
    if len(data) > MAX_JSON or values > MAX_JSON_VALUES:
        raise ValueError("it is larger than any configuration")
    found = JSON_DECODER.decode(data.decode())
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON file beside a model's weights. name is what to call it."""
    with refused_json(name):
        regular_file(path, name)
        with path.open("rb") as file:
            return parse_json(file.read(MAX_JSON + 1))


def read_weight_map(path: Path, name: str) -> dict[str, Any]:
    """Which tensor is in which file, by the index of a model; nothing where it does not say."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    same: dict[str, str] = {}  # so that each file's name is in memory once
    room = 2 * MAX_NAMES
    with refused_json(name):
        regular_file(path, name)
        with path.open(encoding="utf-8", newline="") as file:
            index = JsonReader(iter(lambda: file.read(JSON_PIECE), ""))
            if index.peek() != "{":
                raise ValueError("it is not a JSON object")
            for key in index.members():
                if key in seen:
                    raise ValueError(f"{key!r} is in it twice")
                seen.add(key)
                if len(seen) > 100:
                    raise ValueError("it has more keys than any index")
                if key != "weight_map" or index.peek() != "{":
                    index.value(JSON_PIECE)
                    continue
                for tensor in index.members():
                    if tensor in found:
                        raise ValueError(f"{tensor!r} is in it twice")
                    place = index.value(MAX_NAME)
                    if not isinstance(place, str):
                        return {tensor: place}  # for which it will be refused
                    room -= sys.getsizeof(tensor) + (0 if place in same else sys.getsizeof(place))
                    found[tensor] = same.setdefault(place, place)
                    if len(found) > MAX_TENSORS or room < 0:
                        raise ValueError(f"it has more than {MAX_TENSORS:,} tensors, or longer names than any model")
            index.end()
    return found


@contextmanager
def refused_json(name: str) -> Iterator[None]:
    """Say what is wrong with a JSON file, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise DareError(f"cannot read {name!r}: {error.strerror}", "check its permissions") from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DareError(f"{name!r} is not valid: {reason}", "download or save it again") from None


def regular_file(path: Path, name: str) -> os.stat_result:
    """The status of a file that can be read at any place, which a pipe cannot."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DareError(f"{name!r} is not a regular file", "give a .safetensors file or a model directory")
    return status


@dataclass(frozen=True)
class Layout:
    """Which files make up a model, and what is where according to its index."""

    files: tuple[Path, ...]
    folder: Path | None = None  # the model directory, where it has one
    weight_map: Mapping[str, str] = field(default_factory=dict)
    adapter: bool = False


def find_layout(source: Source) -> Layout:
    """Look at what the user named: a file, a model directory, an index, or an adapter."""
    path = source.path
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DareError(f"there is no file or directory {source.name!r}", _where(source)) from None
    except OSError as error:
        raise DareError(f"cannot read {source.name!r}: {error.strerror}", _where(source)) from None
    except ValueError as error:
        raise DareError(f"{source.name!r} is not a path: {error}", "give a .safetensors file or a directory") from None
    if stat.S_ISDIR(status.st_mode):
        return _directory_layout(source, path)
    folder = path.parent
    if path.name in (ADAPTER_FILE, ADAPTER_CONFIG):
        return _adapter_layout(source, folder)
    if path.suffix == ".json":
        return _index_layout(source, path)
    # A file of another name may lie among any others; this one belongs to what is around it.
    is_model = path.name == WEIGHTS_FILE and (folder / CONFIG_FILE).exists()
    return Layout((path,), folder if is_model else None)


def part_name(source: Source, path: Path) -> str:
    """What to call a file of a model, in terms of the name that the user gave."""
    if source.path == path:
        return source.name
    folder = source.path if source.path.is_dir() else source.path.parent
    inside = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    return f"{source.name}/{inside}" if source.path.is_dir() else os.path.join(os.path.dirname(source.name), inside)


def _where(source: Source) -> str:
    """Relative paths are the usual cause of a missing file."""
    return f"looked for {str(source.path.absolute())!r}; paths in TOML are relative to the TOML file"


def _directory_layout(source: Source, folder: Path) -> Layout:
    weights, index, adapter = folder / WEIGHTS_FILE, folder / INDEX_FILE, folder / ADAPTER_CONFIG
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DareError(f"cannot read {source.name!r}: {error.strerror}", "check its permissions") from None
    has_model = weights.exists() or index.exists()
    if adapter.exists() and has_model:
        raise DareError(
            f"{source.name!r} holds a model and an adapter", f"name the one that you mean, like {weights.name}"
        )
    if adapter.exists() or (ADAPTER_FILE in names and not has_model):
        return _adapter_layout(source, folder)
    if weights.exists():
        return Layout((weights,), folder)
    if index.exists():
        return _index_layout(source, index)
    raise _no_weights(source, names)


def _adapter_layout(source: Source, folder: Path) -> Layout:
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).exists():
            pickled = (folder / "adapter_model.bin").exists()
            raise DareError(
                f"the adapter {source.name!r} has no {name}",
                "load and save it with a current PEFT" if pickled else "download or save it again",
            )
    return Layout((folder / ADAPTER_FILE,), folder, adapter=True)


def _no_weights(source: Source, names: list[str]) -> DareError:
    """What a directory without a model has instead."""
    tensors = [name for name in names if name.endswith(".safetensors")]
    broken = [name for name in (WEIGHTS_FILE, INDEX_FILE) if name in names]
    if broken:
        return DareError(f"{broken[0]!r} in {source.name!r} is a link to nothing", "download the model again")
    if tensors:
        return DareError(
            f"the directory {source.name!r} has neither {WEIGHTS_FILE} nor {INDEX_FILE}, but {listed(tensors)}",
            "name the file, or put the index beside its shards",
        )
    if any(name.endswith(".gguf") for name in names):
        return DareError(f"{source.name!r} holds GGUF files", "merge the original model, then convert the result")
    if any(name.endswith(PICKLE_SUFFIXES) for name in names):
        return DareError(f"{source.name!r} holds PyTorch pickles, not safetensors files", CONVERT_DIRECTORY_HINT)
    return DareError(f"the directory {source.name!r} holds no model", f"it should have {WEIGHTS_FILE} or {INDEX_FILE}")


def _index_layout(source: Source, path: Path) -> Layout:
    shown = part_name(source, path)
    weight_map = read_weight_map(path, shown)
    if not weight_map:
        raise DareError(f"{shown!r} is JSON without a weight_map", "give a model directory or its index file")
    plain: dict[str, str] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not (file in plain or is_inside(file)):
            raise DareError(
                f"{shown!r} says that tensor {tensor!r} is in {file!r}, which is no file beside it",
                "such an index may lead anywhere, so it is not followed; get the model from somewhere you trust",
            )
        plain[file] = plain.get(file) or PurePosixPath(file).as_posix()
    places = {tensor: plain[file] for tensor, file in weight_map.items()}
    return Layout(tuple(path.parent / name for name in sorted(set(plain.values()))), path.parent, places)


def is_inside(name: str) -> bool:
    """Whether a name can only lead into the directory that it is relative to, on any system."""
    flavours = (PurePosixPath(name), PureWindowsPath(name))
    leaves = any(path.anchor or ".." in path.parts for path in flavours)
    return not leaves and bool(PurePosixPath(name).parts) and as_text(name).isprintable() and as_text(name) == name


# What is asked for of a model's configuration.
CONFIG_KEYS: Final = ("model_type", "num_hidden_layers", "hidden_size", "tie_word_embeddings")


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float) and sys.getsizeof(value) < 1000


class Checkpoint:
    """A model, open for reading: the tensors of all its files, by name."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source, self.name, self.folder = source, source.name, layout.folder
        self.adapter = layout.adapter
        self.files: list[TensorFile] = []
        self.config_sha256: str | None = None  # of an adapter's configuration
        self.extra: tuple[str, ...] = ()  # of an adapter: what it holds that the base has no place for
        try:
            allow_open_files(len(layout.files))
            count, room = 0, MAX_NAMES
            for path in layout.files:
                self.files.append(self._open(path))
                self.files[-1].metadata.clear()  # which may be large, and means nothing to a merge
                count += len(self.files[-1].tensors)
                room -= sum(map(sys.getsizeof, self.files[-1].tensors))
                if count > MAX_TENSORS or room < 0:
                    raise DareError(
                        f"{self.name!r} has more than {MAX_TENSORS:,} tensors, or longer names than any model",
                        "get the model from somewhere you trust",
                    )
            self.tensors = self._gathered(layout)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> TensorFile:
        try:
            return TensorFile(path, part_name(self.source, path))
        except FileNotFoundError:
            raise DareError(f"{self.name!r} lacks its file {path.name!r}", "download or save it again") from None

    def _gathered(self, layout: Layout) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for number, file in enumerate(self.files):
            for name, info in file.tensors.items():
                if name in tensors:
                    first = self.files[tensors[name].file].path.name
                    raise DareError(
                        f"tensor {name!r} of {self.name!r} is in {first!r} and in {file.path.name!r}",
                        "a tensor must be in one file; save the model again",
                    )
                tensors[name] = dataclasses.replace(info, file=number) if number else info
        for name, expected in layout.weight_map.items():
            if name not in tensors or self.files[tensors[name].file].path != Path(layout.folder or "", expected):
                raise DareError(
                    f"the index of {self.name!r} says that tensor {name!r} is in {expected!r}, and it is not",
                    "download or save the model again",
                )
        return tensors

    @property
    def size(self) -> int:
        return sum(file.status.st_size for file in self.files)

    @cached_property
    def header_sha256(self) -> str:
        """Of the header; of the headers' digests, where there are several."""
        digests = [file.header_sha256 for file in self.files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a recipe remembers of an input, besides its name."""
        found: dict[str, Any] = {"size": self.size, "header_sha256": self.header_sha256}
        return found | ({"config_sha256": self.config_sha256} if self.config_sha256 else {})

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json, if it has one that can be read."""
        if self.folder is None or self.adapter:
            return {}
        try:
            table = read_json(self.folder / CONFIG_FILE, CONFIG_FILE)
        except DareError:
            return {}
        # Only what is asked for is kept: of each of many models there may be a lot.
        kept = {key: table[key] for key in CONFIG_KEYS if _is_short(table.get(key))}
        text = table.get("text_config")
        inner = {key: text[key] for key in CONFIG_KEYS if _is_short(text.get(key))} if isinstance(text, dict) else {}
        return {"text_config": inner, **kept} if table else {}

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()

    def read_into(self, view: memoryview, info: TensorInfo, start: int) -> None:
        """Bytes of a tensor, from one of them on."""
        self.files[info.file].read_into(view, info.offset + start)

    def read_matrix(self, info: TensorInfo, rows: slice, columns: slice) -> NDArray[Any]:
        """A part of a stored matrix (of what is left of one when its later dimensions are one), as floats."""
        width, item = info.count // max(info.shape[0], 1), STORED_BITS[info.dtype] // 8
        height, wanted = rows.stop - rows.start, columns.stop - columns.start
        whole_rows = 2 * wanted >= width
        raw = np.empty((height, width if whole_rows else wanted, item), np.uint8)
        if whole_rows:
            self.read_into(raw.reshape(-1).data, info, rows.start * width * item)
            raw = np.ascontiguousarray(raw[:, columns])
        else:
            for k in range(height):
                self.read_into(raw[k].reshape(-1).data, info, ((rows.start + k) * width + columns.start) * item)
        return widen(raw.reshape(-1), info.dtype).reshape(height, wanted)

    def close(self) -> None:
        for file in self.files:
            file.close()


def allow_open_files(count: int) -> None:
    """Systems let a process open few files at a time unless it asks; models may have hundreds of shards."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = soft + count
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if hard < 0 else min(wanted, hard), hard))


# What marks a module as quantised: the names of the layouts of GPTQ, AWQ, bitsandbytes, FP8 and compressed-tensors.
QUANTISED_NAMES: Final = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|SCB|weight_format|weight_packed|weight_shape|weight_zero_point"
    r"|weight_(global_)?scale(_inv|_2)?|weight\.(absmax|quant_map|nested_\w+|quant_state\..+))$"
)
QUANTISED_TYPES: Final = ("F4", "F6_", "F8_")
INTEGERS: Final = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")


def module_of(name: str) -> str:
    """The module that a tensor belongs to: its name without its last part (bitsandbytes has more after the weight)."""
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0] or name


def quantised_modules(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The modules whose tensors only make sense together, and cannot be averaged."""
    return {
        module_of(name)
        for name, info in tensors.items()
        if info.dtype.startswith(QUANTISED_TYPES)
        or (info.dtype in INTEGERS and name.endswith("weight"))
        or (info.dtype == "U8" and name.endswith(("_blocks", "_scales")))
        or QUANTISED_NAMES.search(name)
    }


# Settings of PEFT that make an adapter something else than scale * B @ A, by what people call them.
OTHER_ADAPTERS: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow",
    "monteclora_config": "MonteCLoRA",
    "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "LoRA with biases",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "LoRA on parameters that are not modules",
}
# Ways to start training that leave the base alone. The others (PiSSA, OLoRA, LoftQ, ...) change it, so that the
# adapter is not a change to the base that the user has.
PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
LORA_KEY: Final = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?", re.DOTALL)


@dataclass(frozen=True)
class AdapterConfig:
    """What of an adapter_config.json determines the weights."""

    name: str  # of the adapter
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    compiled: dict[str, tuple[re.Pattern[str], Intricacy]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, table: dict[str, Any], name: str) -> AdapterConfig:
        kind = table.get("peft_type")
        if kind != "LORA":
            raise DareError(f"the adapter {name!r} is of type {kind!r}", "only LoRA adapters can be merged")
        for key, words in OTHER_ADAPTERS.items():
            if table.get(key):
                raise DareError(
                    f"the adapter {name!r} uses {words} ({key}), which is not a product of two matrices",
                    "merge it into the base with PEFT's merge_and_unload, and use the result as a model",
                )
        start = table.get("init_lora_weights")
        if start not in PLAIN_STARTS:
            raise DareError(
                f"the adapter {name!r} was started by {start!r}, which may also have changed the base",
                "convert it to a plain LoRA, as PEFT's save_pretrained with path_initial_model_for_weight_conversion",
            )
        tests: dict[str, Callable[[Any], bool]] = {
            "r": lambda v: _is_count(v, 1),
            "lora_alpha": _is_number,
            "use_rslora": lambda v: isinstance(v, bool),
            "fan_in_fan_out": lambda v: isinstance(v, bool),
            "rank_pattern": lambda v: isinstance(v, dict) and all(_is_count(rank, 1) for rank in v.values()),
            "alpha_pattern": lambda v: isinstance(v, dict) and all(map(_is_number, v.values())),
        }
        given = {key: table[key] for key in tests if table.get(key) is not None}
        for key, value in given.items():
            if not tests[key](value):
                raise DareError(f"the adapter {name!r} has {key} = {value!r}", f"mend its {ADAPTER_CONFIG}")
        return cls(name, **given)

    def rank(self, module: str) -> int:
        return int(self._of_module(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        alpha = float(self._of_module(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _of_module(self, pattern: Mapping[str, float], module: str, default: float) -> float:
        """As PEFT looks it up: the first pattern that matches the end of the module's name."""
        for key, value in pattern.items():
            compiled, intricacy = self._compiled(key)
            if intricacy.choices(module) > MAX_CHOICES or time.monotonic() > self.started + PATTERN_SECONDS:
                raise self._too_intricate(key)
            if compiled.match(module):
                return value
        return default

    def _compiled(self, key: str) -> tuple[re.Pattern[str], Intricacy]:
        if key not in self.compiled:
            intricacy = Intricacy.of(key)
            if intricacy is None or len(key) > MAX_PATTERN or len(self.compiled) >= MAX_PATTERNS:
                raise self._too_intricate(key)
            try:
                with warnings.catch_warnings(action="ignore"):  # Python's, about brackets that may mean more some day
                    self.compiled[key] = re.compile(rf"(.*\.)?({key})$"), intricacy
            except (re.error, OverflowError, RecursionError) as error:
                raise DareError(
                    f"a pattern in the {ADAPTER_CONFIG} of {self.name!r} is no regular expression: {error}", "mend it"
                ) from None
        return self.compiled[key]

    def _too_intricate(self, key: str) -> DareError:
        return DareError(f"the pattern {key!r} in the {ADAPTER_CONFIG} of {self.name!r} is too intricate", "mend it")


MAX_PATTERN: Final = 10_000  # characters
MAX_PATTERNS: Final = 20_000
MAX_CHOICES: Final = 100_000_000  # a second or two of a processor, if a pattern makes the most of them
PATTERN_SECONDS: Final = 60  # for all patterns and modules of an adapter
# The parts of a regular expression that matter to how long it may take.
PATTERN_PART: Final = re.compile(
    r"(?P<digits>(?:\\d|\[0-9\])(?:[*+]|\{[^}]*\}))|\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]|(?P<group>\((?:\?(?P<kind>.))?)"
    r"|(?P<many>[*+{])|(?P<one>\?)|(?P<or>\|)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Intricacy:
    """How many ways there may be to try a regular expression that repeats no groups: the product of its choices."""

    fixed: int  # of alternatives, and of what may be left out
    many: int  # repetitions of a character
    digits: int  # repetitions of a digit

    @classmethod
    def of(cls, key: str) -> Intricacy | None:
        """None: it could take forever."""
        if re.search(r"[*+}]\)*[*+{]|\)[*+{]", key):  # repetitions of repetitions
            return None
        fixed, many, digits, alternatives = 1, 0, 0, 1
        for part in PATTERN_PART.finditer(key):
            if part["kind"] and part["kind"] not in ":=!<P":  # flags, and comments, which hide what they stand between
                return None
            digits += part["digits"] is not None
            many += part["many"] is not None
            fixed *= 2 if part["one"] else 1
            alternatives += part["or"] is not None
            if part["group"]:  # a group's alternatives are as many as there are bars, at most, before the next group
                fixed, alternatives = fixed * alternatives, 1
            if fixed > MAX_CHOICES:
                return None
        return cls(fixed * alternatives, many, digits)

    def choices(self, name: str) -> int:
        """For a name of that length, with so many dots behind which it may begin, and so many digits in a row."""
        if self.many > 20 or self.digits > 20:
            return MAX_CHOICES + 1
        longest = max(map(len, re.findall(r"\d+", name)), default=0) if self.digits else 0
        most: int = self.fixed * (len(name) + 1) ** self.many * (longest + 1) ** self.digits
        return most * (name.count(".") + 2)


# The tensors that share the input embedding's values where a model's configuration ties them, and the embeddings.
HEADS: Final = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
EMBEDDINGS: Final = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")


def open_regular(path: Path) -> io.BufferedReader:
    """A file to be read. Anything else is an OSError: a pipe would wait for somebody to write, a device never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.open("rb")


def file_sha256(path: Path) -> str | None:
    """Of what a file holds; None if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


class Adapter(Checkpoint):
    """A LoRA adapter, seen as the tensors of the base that it changes."""

    # The base's matrices that are not square and have a bias, and how many before each are stored as inputs x outputs.
    _oblong: tuple[list[str], list[int]] | None = None

    def __init__(self, source: Source, layout: Layout, base: Checkpoint) -> None:
        super().__init__(source, layout)
        try:
            assert layout.folder is not None
            config_path = layout.folder / ADAPTER_CONFIG
            self.settings = AdapterConfig.of(read_json(config_path, part_name(source, config_path)), self.name)
            self.config_path, self.config_sha256 = config_path, file_sha256(config_path)
            self.tensors, self.extra = self._changes(base)
        except BaseException:
            self.close()
            raise

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if file_sha256(self.config_path) != self.config_sha256:
            raise InputChanged(f"{self.name!r} changed while it was merged", "leave inputs alone; merge again")

    def _changes(self, model: Checkpoint) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
        base = model.tensors
        pairs, whole = self._sorted_keys()
        if not pairs and not whole:
            raise DareError(f"the adapter {self.name!r} is empty", "download or save it again")
        targets = [f"{module}.weight" for module in pairs]
        in_base = _naming(targets or list(whole), base)
        found = {in_base(name): info for name, info in whole.items()}
        for module, target in zip(pairs, targets, strict=True):
            name = in_base(target)
            if name not in base:
                if module_of(name) in quantised_modules(base):
                    raise DareError(
                        f"{model.name!r} is quantised, and the adapter {self.name!r} changes {target!r}", QUANTISE_HINT
                    )
                tied = target.endswith(HEADS) and any(other.endswith(EMBEDDINGS) for other in base)
                raise DareError(
                    f"the adapter {self.name!r} changes {target!r}, which the base does not have",
                    "the base uses its embedding as the output head, and changing only one of them unties them; merge "
                    "the adapter with PEFT's merge_and_unload, and use the result as a model"
                    if tied
                    else f"check the base; it has {listed(list(base))}",
                )
            found[name] = self._low_rank(module, pairs[module], name, base, found.get(name))
        extra = tuple(name for name in found if name not in base)
        return {name: info for name, info in found.items() if name in base}, extra

    def _sorted_keys(self) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo]]:
        """The pairs of matrices by module, and the tensors that are stored whole."""
        pairs: dict[str, dict[str, TensorInfo]] = {}
        whole: dict[str, TensorInfo] = {}
        for stored, info in self.tensors.items():
            key = stored.removeprefix("base_model.model.")
            if ".original_module." in key:  # the base's, which PEFT may save beside the one that replaces it
                continue
            if matched := LORA_KEY.fullmatch(key):
                if info.dtype not in FORMATS:
                    raise DareError(f"tensor {stored!r} of the adapter {self.name!r} is {info.dtype}", QUANTISE_HINT)
                module, part = matched.groups()
                if part in pairs.setdefault(module, {}):
                    raise DareError(
                        f"{self.name!r} holds several adapters: {stored!r} is one of two", "save each by itself"
                    )
                pairs[module][part] = info
            elif "lora_" in key or "trainable_tokens" in key:
                raise DareError(
                    f"the adapter {self.name!r} holds {stored!r}, which is not a part of a plain LoRA",
                    "merge it into the base with PEFT's merge_and_unload, and use the result as a model",
                )
            else:
                whole[re.sub(r"\.base_layer(?=\.)|\.modules_to_save(\.default)?(?=\.)", "", key)] = info
        return pairs, whole

    def _is_transposed(self, name: str, base: Mapping[str, TensorInfo]) -> bool:
        """Whether a square matrix is stored as inputs x outputs, by its neighbours that are not square.

        The configuration says so too, but PEFT writes there what is true of the last module that it looked at.
        """
        if self._oblong is None:
            found = []
            for other, info in base.items():
                bias = base.get(f"{other.removesuffix('weight')}bias")
                if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1]:
                    found.append((other, bias.shape == info.shape[1:]))
            found.sort()
            self._oblong = [other for other, _ in found], [0, *accumulate(turned for _, turned in found)]
        names, turned = self._oblong
        around = name.removesuffix(".weight").rpartition(".")[0]
        first, last = bisect_left(names, f"{around}."), bisect_left(names, f"{around}/")  # which comes after the dot
        count = turned[last] - turned[first]
        return count > 0 if first < last and count in (0, last - first) else self.settings.fan_in_fan_out

    def _low_rank(
        self,
        module: str,
        parts: dict[str, TensorInfo],
        name: str,
        base_tensors: Mapping[str, TensorInfo],
        whole: TensorInfo | None,
    ) -> TensorInfo:
        base = base_tensors[name]
        embedding = "lora_embedding_A" in parts
        prefix = "lora_embedding_" if embedding else "lora_"
        a, b = parts.get(f"{prefix}A"), parts.get(f"{prefix}B")
        if a is None or b is None or len(parts) != 2:
            raise DareError(f"{self.name!r} has no pair of matrices A and B for {module!r}", "save the adapter again")
        rank = self.settings.rank(module)
        # PEFT stores A as rank x inputs and B as outputs x rank, with the sizes of a convolution's kernel behind.
        if a.count == 0 or b.count == 0 or a.shape[:1] != (rank,) or b.shape[1:2] != (rank,) or b.count % rank:
            raise DareError(
                f"the matrices {list(a.shape)} and {list(b.shape)} of {module!r} in {self.name!r} are not of rank "
                f"{rank}",
                f"its {ADAPTER_CONFIG} belongs to other weights",
            )
        inputs, outputs = a.count // rank, b.count // rank
        rows = base.shape[0] if base.shape else 1
        there = (rows, base.count // max(rows, 1))
        # Embeddings, and the layers of GPT-2, are stored as inputs x outputs.
        transposed = embedding or (
            self._is_transposed(name, base_tensors) if inputs == outputs else there == (inputs, outputs)
        )
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        if whole is not None and whole.shape != shape:
            raise DareError(f"{module!r} is {list(whole.shape)} and {list(shape)} in {self.name!r}", "save it again")
        left, right = (a, b) if transposed else (b, a)
        change = LowRank(left, right, rank, shape[1], transposed, self.settings.scale(module), whole)
        dtype = "F64" if base.dtype == "F64" else "F32"
        return TensorInfo(dtype, base.shape if shape == there else shape, 0, low_rank=change)


def _naming(targets: Sequence[str], base: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """How an adapter's names become the base's: as they are, or without or with what stands before them in the base.

    Checkpoints of a bare model lack the name under which a model with a head holds it, and adapters may be of either.
    """
    first = f"{targets[0].partition('.')[0]}."
    ends = [name.removesuffix(targets[0]) for name in base if name.endswith(f".{targets[0]}")]
    ways = [("", ""), (first, ""), *(("", end) for end in ends)]  # what to take away, and what to put in its place
    fitting = [
        (old, new)
        for old, new in ways
        if all(target.startswith(old) and new + target.removeprefix(old) in base for target in targets)
    ]
    if len(fitting) > 1 and fitting[0] != ("", ""):
        raise DareError(
            f"an adapter for {targets[0]!r} may mean several tensors: {listed([end + targets[0] for end in ends])}",
            "save it with the names of the base",
        )
    old, new = fitting[0] if fitting else ("", "")

    def in_base(name: str) -> str:
        renamed = new + name.removeprefix(old)
        return renamed if name.startswith(old) and renamed in base else name

    return in_base


# org/name, or org/name@revision
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def fetched(source: Source, wanted: Sequence[str] | None = None) -> Source:
    """The model on this machine: itself or, where there is no such path, what the Hugging Face Hub has by that name.

    wanted: patterns for the files that are needed; None: all of a model that is not weights of another framework.
    """
    matched = HUB_NAME.fullmatch(source.name)
    if not matched or os.path.lexists(source.path) or source.name.endswith((".safetensors", ".json", *PICKLE_SUFFIXES)):
        return source
    repository, _, revision = source.name.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise DareError(
            f"there is no file or directory {source.name!r}",
            f"{_where(source)}; to take models from the Hugging Face Hub, install dare-merge[hub] (uv run --extra hub)",
        ) from None
    others = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix not in (".safetensors", ".index.json")]
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(wanted) if wanted else None,
            ignore_patterns=[*others, "original/*", "consolidated*"],
        )
    except Exception as error:  # of the network, of its libraries, of the Hub: there are dozens of kinds
        reason = re.split(r"(?<=\.)\s|\n", str(error).strip())[0] or type(error).__name__
        here = os.listdir(source.path.parent) if source.path.parent.is_dir() else []
        raise DareError(
            f"there is no file or directory {source.name!r}, and the Hugging Face Hub does not give a model of that "
            f"name: {reason}",
            nearest(source.path.name, here)
            if here
            else f"{_where(source)}; for the Hub, check the name, the network, HF_TOKEN and HF_HUB_OFFLINE",
        ) from None
    # The snapshot's directory has the name of its commit: what a recipe must say, since branches move.
    return Source(source.name, Path(folder), f"{repository}@{Path(folder).name}")


def open_model(source: Source, base: Checkpoint | None = None) -> Checkpoint:
    """A model of any layout, open for reading. Without a base it is the base."""
    layout = find_layout(source)
    if layout.adapter and base is None:
        raise DareError(f"the base {source.name!r} is a LoRA adapter", "give the model that it was trained on as base")
    return Adapter(source, layout, base) if layout.adapter and base is not None else Checkpoint(source, layout)


# ---------------------------------------------------------------------------------------------------------------------
# Writing checkpoints
# ---------------------------------------------------------------------------------------------------------------------

RECIPE_FILE: Final = "dare_recipe.toml"
RECIPE_SEAL: Final = "# SHA-256 of what is above: "
CARD_FILE: Final = "README.md"
NOT_COPIED: Final = re.compile(
    r"\..*|README\.md|dare_recipe\.toml|adapter_config\.json|trainer_state\.json|checkpoint-\d+|global_step\d+|runs"
    r"|wandb|__pycache__|.*(" + "|".join(map(re.escape, WEIGHT_SUFFIXES)) + ")",
    re.IGNORECASE,
)
TOKENIZER_PATTERNS: Final = (
    "tokenizer*", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "tekken.json", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "bpe.codes", "normalizer.json", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip
TOKENIZER_FILES: Final = re.compile("|".join(map(fnmatch.translate, TOKENIZER_PATTERNS)))


@dataclass(frozen=True)
class PlannedFile:
    """A file of tensors that will be written."""

    name: str
    header: bytes
    size: int


@dataclass(frozen=True)
class Destination:
    """Where the merged model goes: a file, or a model directory."""

    name: str  # as the user has it
    path: Path  # with links followed
    directory: bool

    @property
    def partial(self) -> Path:
        """The folder beside it in which it is made. Names may be as long as the filesystem allows."""
        name = self.path.name
        if len(os.fsencode(name)) > 200:
            name = f"{name[:40]}.{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
        return self.path.with_name(f"{name}.partial")


def find_output(path: Path) -> Destination:
    """Where an output goes, if something can be written there at all."""
    shown = repr(str(path))
    if path.suffix in (".gguf", ".json", ".toml", *PICKLE_SUFFIXES):
        raise ConfigError(
            f"the output {shown} does not end in .safetensors", "name it like merged.safetensors, or a directory"
        )
    try:
        target = path.resolve()
        target.exists()  # which fails where the name is too long
        folder = target.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DareError(f"the output {shown} cannot be used: {reason}", "give another path") from None
    if not folder:
        raise DareError(f"the output's directory {str(target.parent)!r} does not exist", "create it first")
    if not os.access(target.parent, os.W_OK):
        raise DareError(f"the output's directory {str(target.parent)!r} is not writable", "choose another directory")
    return Destination(str(path), target, path.suffix.lower() != ".safetensors")


def check_output(destination: Destination, inputs: Sequence[tuple[str, Path]], force: bool) -> None:
    """Refuse an output that must not be written. inputs: their names, and their files and directories."""
    for name, used in inputs:
        if relation := entangled(destination.path, used.resolve()):
            raise ConfigError(
                f"the output {destination.name!r} {relation} the input {name!r}", "inputs are never overwritten"
            )
    check_replaceable(destination, force)


def entangled(target: Path, used: Path) -> str:
    """Whether an output is, holds or lies inside an input, by whatever names and links: in words, or not at all."""
    if target.exists():
        status = target.stat()
        if os.path.samestat(status, used.stat()):
            return "is"
        if any(os.path.samestat(status, parent.stat()) for parent in used.parents):
            return "holds"
    above = (parent for parent in target.parents if used.is_dir() and parent.exists())
    return "lies inside" if any(os.path.samestat(used.stat(), parent.stat()) for parent in above) else ""


def check_replaceable(destination: Destination, force: bool) -> None:
    """Refuse to replace what somebody else made; even if forced to, what is no model at all."""
    target, shown = destination.path, repr(destination.name)
    if not target.exists():
        return
    if target.is_dir() and not destination.directory:
        raise DareError(f"the output {shown} is a directory", "give another name, like merged.safetensors")
    if destination.directory and not target.is_dir():
        raise DareError(f"the output {shown} is a file", "give a directory, or a file like merged.safetensors")
    if not destination.directory:
        if not force and not made_by_dare(target):
            raise DareError(f"the output {shown} exists and was not made by this tool", "add --force to replace it")
        return
    names = os.listdir(target)
    if os.path.samestat(target.stat(), os.stat(os.curdir)):
        raise DareError(f"the output {shown} is the working directory", "name a directory in it")
    is_model = any(name in names for name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE, RECIPE_FILE))
    is_model |= CONFIG_FILE in names and any(map(is_weights, names))
    if names and (not is_model or ".git" in names):
        raise DareError(f"the output {shown} is a directory with other things in it", "give a new name")
    if not names or force:
        return
    ours = made_here(target)
    if not ours:
        raise DareError(f"the output {shown} exists and was not made by this tool", "add --force to replace it all")
    others = [
        name for name in files_in(target) if name != RECIPE_FILE and ours.get(as_text(name)) != digest_of(target / name)
    ]
    if others:
        raise DareError(
            f"the output {shown} also holds {listed(others)}, which this tool did not write, or not like that",
            "move that elsewhere, or add --force to replace it all",
        )


def made_by_dare(path: Path) -> bool:
    """Whether a file says in its metadata that this tool made it."""
    try:
        file = TensorFile(path, str(path))
    except (DareError, OSError):
        return False
    file.close()
    return RECIPE_KEY in file.metadata


def made_here(folder: Path) -> dict[str, str]:
    """The files of a directory that this tool wrote, with their digests, by what its recipe says."""
    try:
        with open_regular(folder / RECIPE_FILE) as file:
            files = read_toml(file.read(MAX_TOML + 1).decode())["recipe"]["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def digest_of(content: Path | bytes) -> str:
    """What to know a file by: the digest of its content or, of tensors, of their header."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    if content.suffix != ".safetensors":
        return file_sha256(content) or ""
    try:
        file = TensorFile(content, content.name)
    except (DareError, OSError):
        return ""
    file.close()
    return file.header_sha256


def files_in(folder: Path) -> list[str]:
    """All files of a directory and those below it, by their names relative to it."""
    found = []
    for place, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        found += [Path(place, name).relative_to(folder).as_posix() for name in (*names, *links)]
        if not folders and not names and place != str(folder):
            found.append(f"{Path(place).relative_to(folder).as_posix()}/")  # an empty directory
    return sorted(found)


def side_files(folder: Path | None) -> dict[str, Path]:
    """What a model directory has besides weights, by name: configuration, tokenizer, templates, code, licences."""
    if folder is None:
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        if NOT_COPIED.fullmatch(path.name):
            continue
        if path.is_file():
            if not os.access(path, os.R_OK):  # to be known before the merge, not after it
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            found[path.name] = path
        elif path.is_dir() and not path.is_symlink() and not any(map(is_weights, files_in(path))):
            found |= {f"{path.name}/{name}": below for name, below in side_files(path).items()}
    return found


def is_weights(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def updated_config(config: dict[str, Any], dtype: str) -> bytes:
    """A model's config.json with another type of tensors in it, wherever it names one."""

    def update(table: dict[str, Any]) -> bool:
        keys = [key for key in ("dtype", "torch_dtype") if key in table]
        table |= dict.fromkeys(keys, dtype)
        parts = [value for key, value in table.items() if key.endswith("_config") and isinstance(value, dict)]
        return any([bool(keys), *(update(part) for part in parts if part is not table.get("quantization_config"))])

    if not update(config):
        config["torch_dtype"] = dtype  # the name that all versions of transformers read
    written = io.StringIO()
    for piece in json.JSONEncoder(indent=2).iterencode(config):
        if written.tell() > MAX_JSON:
            raise RecursionError  # with what is deep inside, the white space before it takes most of it
        written.write(piece)
    return written.getvalue().encode() + b"\n"


def shard_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Which shard each tensor goes to: in order, a new one where the next tensor would not fit."""
    shards, number, used = [], 0, 0
    for size in sizes:
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        shards.append(number)
    return shards


def shard_names(count: int) -> list[str]:
    if count <= 1:
        return [WEIGHTS_FILE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def header_bytes(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> bytes:
    """A safetensors header for tensors whose offsets count from the start of the data."""
    text = bytearray(8)  # for its length
    text += f'{{"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'.encode()
    # One by one: as a table, the entries would take many times the memory.
    for name, info in tensors.items():
        shape, ends = ",".join(map(str, info.shape)), f"{info.offset},{info.offset + info.nbytes}"
        text += f',{json.dumps(name)}:{{"dtype":"{info.dtype}","shape":[{shape}],"data_offsets":[{ends}]}}'.encode()
    text += b"}" + b" " * (-(len(text) + 1) % 8)
    text[:8] = struct.pack("<Q", len(text) - 8)
    return bytes(text)


MADE: Final = "output"
LOCK_FILE: Final = "lock"
LOCK_WORDS: Final = "dare is merging here: process"
REPLACED: Final = "replaced"
JOURNAL_FILE: Final = "journal"


class Lock:
    """The right to write a destination: a locked file in the folder in which it is made. It ends with its process."""

    def __init__(self, folder: Path, destination: str) -> None:
        self.folder, self.path = folder, folder / LOCK_FILE
        self.descriptor = -1
        made = False
        try:
            while True:
                with suppress(FileExistsError):
                    os.mkdir(folder)
                    made = True
                self._check_ours()
                try:
                    self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | BINARY, 0o666)
                except FileNotFoundError:  # whoever had it has just finished
                    continue
                if not try_lock(self.descriptor):
                    raise DareError(
                        f"another merge ({self._holder()}) is writing {destination!r}",
                        "wait for it, or give another output",
                    )
                if self._still_there():
                    break
                self.close()
            length = os.write(self.descriptor, f"{LOCK_WORDS} {os.getpid()}\n".encode())
            os.ftruncate(self.descriptor, length)
        except BaseException as error:
            if made and isinstance(error, OSError) and self.descriptor >= 0:
                self.release(keep=False)
            elif made:
                with suppress(OSError):
                    os.rmdir(folder)
            self.close()
            raise

    def _holder(self) -> str:
        words = os.read(self.descriptor, 100).decode(errors="replace").split()
        return f"process {words[-1]}" if words else "of a process unknown"

    def _check_ours(self) -> None:
        """Refuse to take somebody's folder, which only happens to have that name, for one of ours."""
        try:
            names = os.listdir(self.folder)
            content = b""
            if LOCK_FILE in names:
                with open_regular(self.path) as file:
                    content = file.read(len(LOCK_WORDS))
            words, alone = LOCK_WORDS.encode(), set(names) <= {LOCK_FILE}
            ours = content.startswith(words) or (words.startswith(content) and alone)  # it may have been cut short
        except FileNotFoundError:  # it has just been removed, unless it is a link to nothing
            ours = not os.path.islink(self.folder)
        except OSError:
            ours = False
        if not ours:
            raise DareError(f"{str(self.folder)!r} is in the way", "it is not of this tool; move it elsewhere")

    def _still_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def leftovers(self) -> bool:
        """Whether somebody began here and did not finish."""
        return any(name != LOCK_FILE for name in os.listdir(self.folder))

    def clear(self) -> None:
        """Remove all but the lock, as far as the system lets us."""
        with suppress(OSError):
            for name in os.listdir(self.folder):
                path = self.folder / name
                if path.is_dir() and not path.is_symlink():
                    remove(path)
                elif name != LOCK_FILE:
                    with suppress(OSError):
                        os.unlink(path)

    def release(self, keep: bool) -> None:
        """Give up the lock, and the folder with it unless there is something in it to be kept."""
        with suppress(OSError):
            keep = keep and self.leftovers()
        if not keep:
            self.clear()  # while nobody else can have begun in it
            if os.name == "nt":  # where open files cannot be removed
                self.close()
            with suppress(OSError):
                if not self.leftovers():  # what could not be removed stays recognisable by its lock
                    self.path.unlink(missing_ok=True)
                os.rmdir(self.folder)
        self.close()

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process, unless another has it."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # far behind the words, which others must be able to read
            try:
                msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            finally:
                os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a filesystem without locks: better to merge than to refuse
        pass
    return True


class Journal:
    """What is known to be on the disk of a merge in the making: a line for what it is, then lines for what is done.

    Each line begins with a checksum, so that one cut off by a crash ends the journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity: dict[str, Any] | None = None
        self.done: list[Any] = []
        self.length = 0  # of what is sound
        with suppress(OSError, ValueError, RecursionError), open_regular(path) as file:
            for line in file:
                check, _, text = line.partition(b" ")
                if check != b"%08x" % zlib.crc32(text.rstrip(b"\n")) or not line.endswith(b"\n"):
                    break
                entry = json.loads(text)
                if self.identity is None and isinstance(entry, dict):
                    self.identity = entry
                elif self.identity is not None and isinstance(entry, list):
                    self.done += entry
                else:
                    break
                self.length += len(line)

    def append(self, entry: Any) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        try:
            write_all(descriptor, b"%08x %s\n" % (zlib.crc32(text), text))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


# What is reserved first, and the rate, in bytes a second, above which it is not done by writing.
RESERVED_BYTES: Final = 1 << 26
ZEROS_PER_SECOND: Final = 8e9


def reserve(descriptor: int, size: int) -> None:
    """Make a file as long as it will be and, where the system can, take the room for it on the disk at once.

    A disk notes that in no time. Where it takes as long as writing zeros (on tmpfs it is just that), it is soon left.
    """
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    function = getattr(libc, "fallocate64", None) or getattr(libc, "fallocate", None)
    place, step = 0, RESERVED_BYTES
    while function is not None and place < size:
        piece, started = min(step, size - place), time.perf_counter()
        failed = function(ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(place), ctypes.c_int64(piece))
        if failed and ctypes.get_errno() == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if failed or time.perf_counter() - started > piece / ZEROS_PER_SECOND:
            break
        place, step = place + piece, 2 * step
    os.ftruncate(descriptor, size)


class Output:
    """A model in the making: in a folder of its own beside its destination, and renamed to it when it is complete."""

    def __init__(
        self, destination: Destination, files: Sequence[PlannedFile], identity: dict[str, Any], resume: bool
    ) -> None:
        """identity: all that must be equal for a merge begun earlier to be continued."""
        self.destination, self.files, self.resume = destination, files, resume
        self.lock = Lock(destination.partial, destination.name)
        self.folder = self.lock.folder
        self.made = self.folder / MADE
        self.journal = Journal(self.folder / JOURNAL_FILE)
        self.descriptors: list[int] = []
        self._dirty: set[int] = set()
        self._finished: list[Any] = []  # what is written
        self._on_disk: list[Any] = []  # what is synced, and not yet in the journal
        self._begun = False
        self._mutex = threading.Lock()
        self._stopped = threading.Event()
        self._flush_error: OSError | None = None
        self._flusher = threading.Thread(target=self._flush, daemon=True)
        try:
            self._restore_replaced()
            if not self._continue(files, identity):
                self._begun = True
                self._begin(files, identity)
            self._flusher.start()
        except BaseException:
            self.discard(keep=not self._begun)  # what an earlier run left is not ours to remove
            raise

    @property
    def done(self) -> list[Any]:
        """What an earlier run noted as done."""
        return self.journal.done

    def _restore_replaced(self) -> None:
        """Undo what a crash between two renames left: the destination's old content without its name."""
        old, target = self.folder / REPLACED, self.destination.path
        if not old.exists():
            return
        if target.is_dir() and not os.listdir(target):
            os.rmdir(target)
        if not target.exists():
            os.rename(old, target)
        elif self.made.exists():  # so the new one was not put there, but something else was
            raise DareError(f"the model that was at {str(target)!r} is in {str(old)!r}", "move one of them elsewhere")

    def _path(self, file: PlannedFile) -> Path:
        return self.made / file.name if self.destination.directory else self.made

    def _continue(self, files: Sequence[PlannedFile], identity: dict[str, Any]) -> bool:
        """Take up what an earlier run left, if that is wanted and can be done."""
        if not self.lock.leftovers():
            if self.resume:
                LOG.info("there is no unfinished merge to resume; starting from the beginning")
            return False
        whole = self.journal.identity is not None and all(
            self._path(file).is_file() and self._path(file).stat().st_size == file.size for file in files
        )
        if not self.resume or self.journal.identity is None:
            what = "is removed (--resume would continue it)" if whole else "is removed"
            LOG.warning(f"an unfinished merge in {self.folder} {what}")
            return False
        if different := difference(self.journal.identity, identity):
            raise DareError(
                f"the unfinished merge in {str(self.folder)!r} is another one: {different}",
                "run without --resume to remove it and start again",
            )
        if not whole:
            LOG.warning(f"the unfinished merge in {self.folder} cannot be continued: its files are not complete")
            return False
        allow_open_files(len(files))
        os.truncate(self.journal.path, self.journal.length)
        for file in files:
            self.descriptors.append(os.open(self._path(file), os.O_RDWR | BINARY))
        return True

    def _begin(self, files: Sequence[PlannedFile], identity: dict[str, Any]) -> None:
        self.lock.clear()
        self.journal = Journal(self.journal.path)
        allow_open_files(len(files))
        if self.destination.directory:
            os.mkdir(self.made)
        for file in files:
            self.descriptors.append(os.open(self._path(file), os.O_RDWR | os.O_CREAT | os.O_EXCL | BINARY, 0o666))
            reserve(self.descriptors[-1], file.size)
        for number, file in enumerate(files):
            self.write_at(number, memoryview(file.header), 0)
        for descriptor in self.descriptors:
            os.fsync(descriptor)
        self.journal.append(identity)

    def note(self, finished: Any) -> None:
        """Remember that something is written; once it is on the disk, the journal says so."""
        if self._flush_error is not None:
            raise self._flush_error
        with self._mutex:
            self._finished.append(finished)

    def _flush(self) -> None:
        """Send to the disk what is written, while more is computed, so that little is left to wait for at the end."""
        noted = time.monotonic()
        while not self._stopped.wait(FLUSH_SECONDS):
            try:
                self._sync()
                if time.monotonic() - noted > JOURNAL_SECONDS:
                    self._note_on_disk()
                    noted = time.monotonic()
            except OSError as error:  # the system tells it only once, so it must not be lost
                self._flush_error = error
                return

    def _sync(self) -> None:
        with self._mutex:
            finished, self._finished = self._finished, []
            dirty, self._dirty = self._dirty, set()
        for descriptor in dirty:
            os.fsync(descriptor)
        self._on_disk += finished

    def _note_on_disk(self) -> None:
        if self._on_disk:
            self._check_still_ours()
            self.journal.append(self._on_disk)
            self._on_disk = []

    def _check_still_ours(self) -> None:
        """Somebody may have removed the folder by hand, and another merge may have begun in one of the same name."""
        try:
            paths = [self._path(file) for file in self.files]
            pairs = [(os.fstat(self.lock.descriptor), self.lock.path.stat())]
            pairs += [(os.fstat(fd), path.stat()) for fd, path in zip(self.descriptors, paths, strict=True)]
        except FileNotFoundError:
            pairs = []
        if not pairs or not all(os.path.samestat(*pair) for pair in pairs):
            raise OSError(errno.ENOENT, f"somebody removed {self.folder} in the meantime")

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        descriptor = self.descriptors[file]
        while view:
            if hasattr(os, "pwrite"):
                done = os.pwrite(descriptor, view, offset)
            else:
                with SEEK_LOCK:
                    os.lseek(descriptor, offset, os.SEEK_SET)
                    done = os.write(descriptor, view)
            view, offset = view[done:], offset + done
        with self._mutex:
            self._dirty.add(descriptor)

    def write_file(self, name: str, content: bytes | Path) -> None:
        """A small file of a model directory: of this content, or a copy of that file."""
        path = self.made / name
        for parent in reversed(path.relative_to(self.made).parents):
            with suppress(FileExistsError):
                os.mkdir(self.made / parent)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
        try:
            for piece in pieces_of(content):
                write_all(descriptor, piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def commit(self, force: bool) -> None:
        """Make the bytes durable, then the name."""
        self._stop_flusher()
        if self._flush_error is not None:
            raise self._flush_error
        for descriptor in self.descriptors:
            os.fsync(descriptor)
        self._check_still_ours()
        while self.descriptors:
            os.close(self.descriptors.pop())
        if self.destination.directory:
            for place, _, _ in os.walk(self.made, topdown=False):
                sync_directory(Path(place))
        check_replaceable(self.destination, force)  # somebody may have put something there meanwhile
        # From here on what lies in the folder may be the old model, which nobody must continue.
        self.journal.path.unlink()
        sync_directory(self.folder)
        replace(self.made, self.destination.path)
        sync_directory(self.destination.path.parent)

    def discard(self, keep: bool = False) -> None:
        """Give up what is left, which may be what was replaced; or keep it, to be continued."""
        self._stop_flusher()
        if keep and self.descriptors and self._flush_error is None:
            with suppress(OSError):
                self._sync()
                self._note_on_disk()
        while self.descriptors:
            with suppress(OSError):
                os.close(self.descriptors.pop())
        try:
            self._restore_replaced()
        except (OSError, DareError):
            keep = True  # the old model is still in the folder
        self.lock.release(keep)

    def _stop_flusher(self) -> None:
        self._stopped.set()
        if self._flusher.is_alive():
            self._flusher.join()


def pieces_of(content: bytes | Path) -> Iterator[bytes]:
    """What is to be written: it as it is, or what a file holds, a piece at a time."""
    if isinstance(content, bytes):
        yield content
        return
    try:
        with open(content, "rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise InputChanged(f"cannot read {str(content)!r} any more: {error.strerror}", "merge again") from None


def difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What tells two merges apart, in words, or nothing."""
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key):
            if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
                return difference(
                    {f"{key}.{k}": v for k, v in old[key].items()}, {f"{key}.{k}": v for k, v in new[key].items()}
                )
            return f"its {key} is {old.get(key)!r}, not {new.get(key)!r}"
    return ""


def remove(folder: Path) -> None:
    """Remove a directory and what is in it, as far as the system lets us."""
    for place, folders, names in os.walk(folder, topdown=False):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            with suppress(OSError):
                (os.unlink if os.path.islink(path) or name in names else os.rmdir)(path)
    with suppress(OSError):
        os.rmdir(folder)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Not every system lets a directory be opened or synced."""
    with suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def replace(made: Path, target: Path) -> None:
    """Give what was made its name. What had that name goes, at the same instant, to where the new one was made."""
    if not made.is_dir() or not target.exists():
        os.replace(made, target)
    elif not exchange(made, target):
        # Without a way to exchange names there is an instant in which neither has it; what was replaced is put back
        # if the second step fails, now or, after a crash, by the next run.
        os.rename(target, made.with_name(REPLACED))
        os.rename(made, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, if this system can."""
    for function, arguments in (
        ("renameat2", (-100, os.fsencode(one), -100, os.fsencode(other), 2)),  # Linux: AT_FDCWD, RENAME_EXCHANGE
        ("renamex_np", (os.fsencode(one), os.fsencode(other), 2)),  # macOS: RENAME_SWAP
    ):
        with suppress(AttributeError, OSError, TypeError):
            return bool(getattr(ctypes.CDLL(None), function)(*arguments) == 0)
    return False


# ---------------------------------------------------------------------------------------------------------------------
# The plan and the jobs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A look at a whole tensor: slerp's angle, or a digit of trim's threshold, before it is merged; or an analysis."""

    kind: str
    shift: int = 0


LOOKS: Final = {"slerp": Stage("angle"), "analyze": Stage("measure")}


@cache
def merging_spec(method: str, base: str, finetuned: str, output: str) -> KernelSpec:
    """The kernel of a method. Slerp, once the angle is known, is linear."""
    return KernelSpec("ties" if method == "ties" else "linear", base, finetuned, output)


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorPlan:
    """One tensor of the output: where it comes from, how it is made and where it goes."""

    name: str
    base: TensorInfo
    finetuned: tuple[tuple[int, TensorInfo], ...]  # the models that have it, by number
    mask_names: tuple[str, ...]  # what their masks are drawn by: its name, or the one whose values they share
    output: TensorInfo  # its file is one of the plan's, its offset counts from the end of that file's header
    merged: bool  # False: copied from the base
    settings: TensorSettings
    method: str
    quantised: bool
    rule: Rule | None = None  # that the settings come from; None: from no rule

    @property
    def spec(self) -> KernelSpec:
        """The kernel that merges it."""
        types = {info.dtype for _, info in self.finetuned} or {self.base.dtype}
        if any(info.count < self.base.count for _, info in self.finetuned):
            types.add(self.base.dtype)  # which stands in for the rows that a model lacks
        wide = "F64" in types | {self.base.dtype, self.output.dtype}
        common = types.pop() if len(types) == 1 else "F64" if wide else "F32"
        return merging_spec(self.method, self.base.dtype, common, self.output.dtype)

    @property
    def bytes_read(self) -> int:
        """What must be read of it, once."""
        return self.base.nbytes + sum(info.stored_bytes for _, info in self.finetuned)

    def survey_spec(self, stage: Stage) -> KernelSpec:
        return dataclasses.replace(self.spec, kind=stage.kind, output=self.spec.real)

    @property
    def stages(self) -> tuple[Stage, ...]:
        if not self.merged or not self.finetuned or not self.base.count:
            return ()
        if self.method in LOOKS:
            return (LOOKS[self.method],)
        digits = range(FORMATS[self.spec.real].bits - DIGIT_BITS, -1, -DIGIT_BITS)
        return tuple(Stage("count", shift) for shift in digits) if self.settings.keep_ratio < 1 else ()


@dataclass(frozen=True)
class Job:
    """A range of one tensor's elements (of its bytes, where it is copied): read ranges, compute, write one range."""

    number: int
    tensor: TensorPlan
    start: int
    stop: int
    stage: Stage | None = None  # None: merge and write; else only look

    @property
    def bytes_read(self) -> int:
        whole = self.tensor.base.count if self.tensor.merged else self.tensor.base.nbytes
        return self.tensor.bytes_read * (self.stop - self.start) // whole


@dataclass(frozen=True)
class Task:
    """What is to be read and computed, in what pieces: what a merge and an analysis have in common."""

    base: str
    models: tuple[str, ...]
    config: DareConfig
    tensors: tuple[TensorPlan, ...]
    files: tuple[PlannedFile, ...]  # that will be written
    threads: int

    @cached_property
    def itemsize(self) -> int:
        """Bytes of the widest element that a buffer has to hold."""
        specs = {tensor.spec for tensor in self.tensors if tensor.merged}
        return max([FORMATS[name].bits // 8 for s in specs for name in (s.base, s.finetuned, s.output)], default=1)

    @cached_property
    def chunk(self) -> int:
        """Elements at a time: what fits the buffers' budget, as a power of two. The output does not depend on it."""
        buffers = self.threads * (len(self.models) + 2)
        fitting = BUFFER_BYTES // (buffers * self.itemsize)
        return max(MIN_CHUNK, min(MAX_CHUNK, 1 << max(fitting.bit_length() - 1, 0)))

    @property
    def bytes_to_read(self) -> int:
        return sum((1 + len(t.stages)) * t.bytes_read for t in self.tensors)

    @cached_property
    def computed(self) -> tuple[TensorPlan, ...]:
        """The tensors that kernels work on."""
        return tuple(tensor for tensor in self.tensors if tensor.merged and tensor.base.count)

    def specs(self) -> set[KernelSpec]:
        """The kernels that it takes."""
        specs = {spec for t in self.computed for spec in (t.spec, *(t.survey_spec(stage) for stage in t.stages))}
        return specs | {expand_spec(info) for t in self.computed for _, info in t.finetuned if info.low_rank}

    def surveys(self) -> Mapping[str, Surveyed]:
        return {t.name: Survey(t, self.config.position) for t in self.computed if t.stages}

    def _starts(self, tensor: TensorPlan) -> range:
        return range(0, tensor.base.count if tensor.merged else tensor.base.nbytes, JOB_ELEMENTS)

    def _jobs(
        self, tensors: Sequence[TensorPlan], done: Collection[tuple[str, int]], stage: int | None = None
    ) -> Iterator[Job]:
        number = 0
        for tensor in tensors:
            for start in self._starts(tensor):
                if (tensor.name, start) not in done:
                    stop = min(start + JOB_ELEMENTS, self._starts(tensor).stop)
                    yield Job(number, tensor, start, stop, None if stage is None else tensor.stages[stage])
                    number += 1


@dataclass(frozen=True)
class PlannedInput:
    """A model as it was found: the base, a fine-tune, or an adapter."""

    name: str
    size: int  # of its files
    files: int
    types: Mapping[str, int]  # how many tensors there are of each
    tensors: int
    parameters: int
    ranks: tuple[int, ...] = ()  # of an adapter
    changes: int = 0  # how many tensors of the base an adapter changes

    @classmethod
    def of(cls, model: Checkpoint) -> PlannedInput:
        stored = [info for file in model.files for info in file.tensors.values()]
        found = cls(
            name=model.name,
            size=model.size,
            files=len(model.files),
            types=dict(Counter(info.dtype for info in stored).most_common()),
            tensors=len(stored),
            parameters=sum(info.count for info in stored),
        )
        if not model.adapter:
            return found
        ranks = {info.low_rank.rank for info in model.tensors.values() if info.low_rank}
        return dataclasses.replace(found, ranks=tuple(sorted(ranks)), changes=len(model.tensors))

    @property
    def kind(self) -> str:
        """Its types and, where it is an adapter, what sort of one."""
        if not self.changes:
            return types_of(self.types)
        rank = f" of rank {' to '.join(map(str, dict.fromkeys((self.ranks[0], self.ranks[-1]))))}" if self.ranks else ""
        return f"{types_of(self.types)}, LoRA{rank}, changes {counted(self.changes, 'tensor')}"


def types_of(types: Mapping[str, int]) -> str:
    return next(iter(types)) if len(types) == 1 else ", ".join(f"{dtype} {count:,}" for dtype, count in types.items())


def clipped(name: str, most: int = SHOWN_IN_TABLES) -> str:
    """A name for a table: harmless, and with its end, where names differ, if it is long."""
    text = printable(name)
    return text if len(text) <= most else f"{text[:8]}...{text[11 - most :]}"


@dataclass(frozen=True)
class PlannedRule:
    """The tensors that a rule is for, or that none is for, and how they are merged."""

    match: tuple[str, ...]  # its patterns; none where there is no rule
    tensors: int
    parameters: int
    settings: TensorSettings
    rescale: bool

    def __str__(self) -> str:
        """The settings that count."""
        if self.settings.lambda_coeff == 0:
            return "lambda 0: as in the base"
        rates = [f"{rate:g}" for rate in self.settings.drop_rates]
        words = [f"drop rate {', '.join(rates if len(set(rates)) > 1 else rates[:1])}"]
        divisors = [f"{q:g}" for q in self.settings.divisors if q is not None]
        if not self.rescale:
            words.append("not rescaled")
        elif divisors:
            words.append(f"rescale_q {', '.join(divisors if len(set(divisors)) > 1 else divisors[:1])}")
        words += [f"lambda {self.settings.lambda_coeff:g}"] if self.settings.lambda_coeff != 1 else []
        words += [f"keep_ratio {self.settings.keep_ratio:g}"] if self.settings.keep_ratio < 1 else []
        return "; ".join(words)


@dataclass(frozen=True)
class Replaced:
    """What is where the output will be."""

    size: int
    made_by_dare: bool


@dataclass(frozen=True)
class Estimate:
    """How long a merge's reading and computing will take, by some of its jobs."""

    seconds: float
    sampled_bytes: int
    sampled_seconds: float


@dataclass(frozen=True)
class Plan(Task):
    """Everything that a merge will do, known before a byte is written. Prints as such; as_dict gives plain data."""

    output: Destination
    recipe: str
    side: Mapping[str, bytes | Path]  # the other files of a model directory: their content, or what to copy
    digests: Mapping[str, str]  # of the files that are copied
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    mismatched: tuple[tuple[str, ...], ...]  # per model: tensors that have another shape in the base
    warnings: tuple[str, ...]
    inputs: tuple[PlannedInput, ...]  # the base first
    free: int = 0  # bytes on the output's disk
    replaces: Replaced | None = None
    unfinished: bool = False  # whether an earlier merge to the same place left something
    estimate: Estimate | None = None  # where it was asked for

    @cached_property
    def size(self) -> int:
        side = sum(s.stat().st_size if isinstance(s, Path) else len(s) for s in self.side.values())
        return sum(file.size for file in self.files) + side

    def identity(self, inputs: Sequence[Checkpoint]) -> dict[str, Any]:
        """What must be equal for this merge to be the continuation of another."""
        recipe = tomllib.loads(self.recipe)
        files = {file.name: [file.size, hashlib.sha256(file.header).hexdigest()] for file in self.files}
        statuses = {
            str(file.path.absolute()): {"size": file.status.st_size, "modification time": file.status.st_mtime_ns}
            for checkpoint in inputs
            for file in checkpoint.files
        }
        settings = {key: recipe.get(key, {}) for key in ("dare", "rules", "models")}
        # What the models' configurations and settings, all rules considered, come to for each tensor.
        decided = hashlib.sha256()
        for t in self.tensors:
            parts = (t.name, t.finetuned, t.mask_names, t.merged, t.settings)
            decided.update(repr(parts).encode("utf-8", "replace"))
        found = {**settings, "inputs": statuses, "recipe": recipe["recipe"], "files": files}
        found |= {"way to merge the tensors": decided.hexdigest(), "jobs": JOB_ELEMENTS}
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def rounds(self, done: Collection[tuple[str, int]] = ()) -> Iterator[Iterator[Job]]:
        """Sets of jobs, each to be finished before the next: for a batch of tensors, look, look again, merge.

        done: the tensors and starts of the jobs that need not be run again.
        A batch is small enough to be read again from the system's cache, and large enough to keep all threads busy.
        """
        batch: list[TensorPlan] = []
        elements = 0
        for tensor in self.tensors:
            if not all((tensor.name, start) in done for start in self._starts(tensor)):
                batch.append(tensor)
                elements += tensor.base.count
            if batch and (tensor is self.tensors[-1] or (tensor.stages and elements >= BATCH_ELEMENTS)):
                for k in range(max(len(t.stages) for t in batch)):
                    yield self._jobs([t for t in batch if k < len(t.stages)], (), k)
                yield self._jobs(batch, done)
                batch, elements = [], 0

    def sample(self) -> Iterator[Job]:
        """All jobs, in an order whose every beginning is spread evenly over the whole."""
        jobs = [job for jobs in self.rounds() for job in jobs]
        near = int(len(jobs) * (math.sqrt(5) - 1) / 2)  # steps of the golden ratio leave no large gaps
        step = next((k for k in range(max(near, 1), len(jobs) + 1) if math.gcd(k, len(jobs)) == 1), 1)
        return (jobs[k * step % len(jobs)] for k in range(len(jobs)))

    @property
    def memory(self) -> int:
        """About what the process will take: what it always does, what is known of the tensors, and the buffers."""
        known = TENSOR_BYTES * len(self.tensors) * len(self.inputs)
        return PROCESS_BYTES + known + self.threads * (self._workspace_bytes + self._expanded_bytes)

    @property
    def _workspace_bytes(self) -> int:
        models = len(self.models)
        trims = any(stage.kind == "count" for tensor in self.tensors for stage in tensor.stages)
        rows = (models + 2) * self.chunk * self.itemsize + (models * 4 << DIGIT_BITS if trims else 0)
        return rows + 8 * ((models + 1) * (WORDS + REALS) + (SCRATCH_ROWS + models + 1) * SCRATCH_WIDTH)

    @property
    def _expanded_bytes(self) -> int:
        """Of adapters' matrices: at most the budget, and no more than the largest of each adapter."""
        largest = [0] * len(self.models)
        for i, info in (found for tensor in self.tensors for found in tensor.finetuned):
            if info.low_rank:
                largest[i] = max(largest[i], info.low_rank.rank * info.low_rank.columns * FORMATS[info.dtype].bits // 8)
        return min(sum(largest), EXPAND_ELEMENTS * 4 // self.threads)

    @cached_property
    def rules(self) -> tuple[PlannedRule, ...]:
        """How many tensors each rule is for; last, those that no rule is for."""
        counts = {rule: [0, 0] for rule in (*self.config.checked_rules, None)}
        for tensor in self.tensors:
            if tensor.merged:
                counts[tensor.rule][0] += 1
                counts[tensor.rule][1] += tensor.base.count
        models, rescale = len(self.models), self.config.rescale
        return tuple(
            PlannedRule(rule.match if rule else (), tensors, parameters, self.config.for_rule(rule, models), rescale)
            for rule, (tensors, parameters) in counts.items()
            if rule or tensors
        )

    @property
    def copied(self) -> tuple[TensorPlan, ...]:
        return tuple(tensor for tensor in self.tensors if not tensor.merged)

    def as_dict(self) -> dict[str, Any]:
        found = {
            "output": self.output.name,
            "directory": self.output.directory,
            "config": self.config.resolved(),
            "seeds": [self.config.seed + i for i in range(len(self.models))],
            "models": [dataclasses.asdict(model) for model in self.inputs],
            "missing_tensors": self.missing,
            "extra_tensors": self.extra,
            "mismatched_tensors": self.mismatched,
            "rules": [dataclasses.asdict(rule) for rule in self.rules],
            "copied_tensors": [tensor.name for tensor in self.copied],
            "files": [{"name": file.name, "size": file.size} for file in self.files],
            "side_files": list(self.side),
            "replaces": dataclasses.asdict(self.replaces) if self.replaces else None,
            "unfinished": self.unfinished,
            "bytes_to_read": self.bytes_to_read,
            "bytes_to_write": self.size,
            "bytes_free": self.free,
            "memory": self.memory,
            "threads": self.threads,
            "estimate": dataclasses.asdict(self.estimate) if self.estimate else None,
            "warnings": self.warnings,
        }
        data: dict[str, Any] = json.loads(json.dumps(found))
        return data

    def __str__(self) -> str:
        models = counted(len(self.models), "model")
        first = f"would merge {models} into {printable(self.output.name)}"
        needs = "\n".join(f"{label:8}{words}" for label, words in self._needs())
        return "\n\n".join([first, self._models_table(), self._how(), self._rules_table(), needs])

    def _models_table(self) -> str:
        rows = [["model", "size", "tensors", "parameters", "type"]]
        for model in self.inputs:
            rows.append(
                [clipped(model.name), human(model.size), f"{model.tensors:,}", f"{model.parameters:,}", model.kind]
            )
        rows[1][-1] += ", the base"
        notes = []
        for i, name in enumerate(self.models):
            found = {"lacks": self.missing[i], "has more than the base:": self.extra[i]}
            found |= {f"has in other shapes ({self.config.mismatch}):": self.mismatched[i]}
            notes += [f"{clipped(name)} {words} {counted(len(of), 'tensor')}" for words, of in found.items() if of]
        return "\n".join([table(rows, {0, 4}), *notes])

    def _how(self) -> str:
        """What is the same for all tensors."""
        words = [f"method {self.config.method}", f"seeds {self._seeds()}"]
        if self.config.method == "slerp":
            words.append(f"t {self.config.position:g}")
        else:
            words.append(f"weights {', '.join(f'{share:.4g}' for share in self.config.shares(len(self.models)))}")
        return "; ".join([*words, *([f"output type {self.config.dtype}"] if self.config.dtype else [])])

    def _rules_table(self) -> str:
        rows = [["tensors", "number", "parameters", "settings"]]
        others = "all others" if self.config.rules else "all"
        for rule in self.rules:
            more = f" and {len(rule.match) - 1} more" if len(rule.match) > 1 else ""
            name = clipped(rule.match[0]) + more if rule.match else others
            rows.append([name, f"{rule.tensors:,}", f"{rule.parameters:,}", str(rule)])
        if self.copied:
            types = types_of(dict(Counter(tensor.base.dtype for tensor in self.copied).most_common()))
            parameters = sum(tensor.base.count for tensor in self.copied)
            rows.append(["not merged", f"{len(self.copied):,}", f"{parameters:,}", f"{types}: as in the base"])
        return table(rows, {0, 3})

    def _needs(self) -> Iterator[tuple[str, str]]:
        """What will be written, and what that takes."""
        more = f" and {len(self.files) - SHOWN_FILES + 1:,} more" if len(self.files) > SHOWN_FILES else ""
        for k, file in enumerate(self.files[: SHOWN_FILES - 1 if more else SHOWN_FILES]):
            yield "" if k else "write", f"{printable(file.name)}, {human(file.size)}"
        if more:
            yield "", f"...{more}: {human(sum(file.size for file in self.files[SHOWN_FILES - 1 :]))}"
        names = ", ".join(printable(name) for name in self.side)
        yield from (("", line) for line in textwrap.wrap(names, SHOWN_ACROSS, break_on_hyphens=False))
        if self.replaces:
            whose = "made by this tool" if self.replaces.made_by_dare else "NOT made by this tool"
            yield "replace", f"{human(self.replaces.size)} that are there, {whose}"
        if self.unfinished:
            begun = printable(self.output.partial.name)
            yield "remove", f"{begun}, an unfinished merge (or continue it, with --resume)"
        yield "disk", f"{human(self.size)} needed, {human(self.free)} free"
        yield "memory", f"about {human(round(self.memory, -6))}"
        work = f"to read {human(self.bytes_to_read)} and compute on {counted(self.threads, 'thread')}"
        if self.estimate:
            sampled, seconds = human(self.estimate.sampled_bytes), self.estimate.sampled_seconds
            yield "time", f"{duration(self.estimate.seconds)} {work}, by a sample of {sampled} in {seconds:.2g} s;"
        else:
            yield "work", f"{work};"
        yield "", f"writing {human(self.size)} comes on top, as fast as the disk is"

    def _seeds(self) -> str:
        return ", ".join(str(self.config.seed + i) for i in range(len(self.models)))


def replaced(destination: Destination, force: bool) -> Replaced | None:
    """What a merge to a destination that it may write to would replace."""
    path = destination.path
    names = files_in(path) if destination.directory else [""] if path.exists() else []
    if not names:
        return None
    ours = True
    if force:
        try:
            check_replaceable(destination, False)
        except DareError:
            ours = False
    return Replaced(sum((path / name).lstat().st_size for name in names), ours)


def place_of(element: int, shape: tuple[int, ...]) -> list[int]:
    """Where an element is in its tensor."""
    places = []
    for side in reversed(shape):
        element, place = divmod(element, side)
        places.append(place)
    return places[::-1]


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass
class Tally:
    """What the kernels counted, for one model and one or all tensors."""

    parameters: int = 0
    sum: float = 0.0
    peak: float = 0.0
    above: int = 0
    kept: int = 0
    expected: float = 0.0  # what the masks' thresholds say should be kept
    base_sum: float = 0.0

    def add(self, other: Tally) -> None:
        self.parameters += other.parameters
        self.sum += other.sum
        self.peak = max(self.peak, other.peak)
        self.above += other.above
        self.kept += other.kept
        self.expected += other.expected
        self.base_sum += other.base_sum

    @property
    def mean(self) -> float:
        return self.sum / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class ModelReport:
    """What the merge found in one fine-tune and did with it."""

    name: str
    seed: int
    parameters: int
    drop_rate: float  # as asked for, rules apart
    honoured_drop_rate: float  # what the masks' thresholds amount to, over all tensors
    dropped_share: float  # what the mask really dropped; trim comes on top
    mean_delta: float
    largest_delta: float
    share_above_threshold: float
    missing_tensors: tuple[str, ...]
    extra_tensors: tuple[str, ...]
    mismatched_tensors: tuple[str, ...]

    @property
    def drop_rates(self) -> str:
        """The rate that was asked for and, where rules have it otherwise, what it comes to."""
        by_rules = abs(self.honoured_drop_rate - self.drop_rate) > 1 / (1 << MASK_BITS)
        return f"{self.drop_rate:g}" + (f" ({self.honoured_drop_rate:.3g} by rules)" if by_rules else "")


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. Prints as a table; as_dict gives plain data."""

    output: str
    method: str
    lambda_coeff: float  # as asked for, rules apart
    files: tuple[str, ...]  # of tensors
    side_files: tuple[str, ...]  # of a model directory: all the others
    tensors: int
    copied_tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    delta_threshold: float
    models: tuple[ModelReport, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return data

    def __str__(self) -> str:
        rows = [["model", "seed", "parameters", "drop rate", "dropped", "mean |delta|", "largest", "above"]]
        for model in self.models:
            rows.append(
                [
                    printable(model.name),
                    str(model.seed),
                    f"{model.parameters:,}",
                    model.drop_rates,
                    f"{model.dropped_share:.3%}",
                    f"{model.mean_delta:.3g}",
                    f"{model.largest_delta:.3g}",
                    f"{model.share_above_threshold:.2%}",
                ]
            )
        models, tensors = counted(len(self.models), "model"), counted(self.tensors, "tensor")
        copied = f" ({self.copied_tensors:,} copied)" if self.copied_tensors else ""
        moved = self.bytes_read + self.bytes_written
        rate = f" ({human(moved / self.seconds)}/s)" if moved > LEAST_FOR_RATE else ""
        return (
            f"{table(rows)}\n(method {self.method}, lambda {self.lambda_coeff:g}; "
            f"above: share of parameters with |delta| > {self.delta_threshold:g})\n"
            f"merged {models} into {printable(self.output)}: {tensors}{copied}, "
            f"{human(self.bytes_read)} read, {human(self.bytes_written)} written in {self.seconds:.2f} s{rate}"
        )


def table(rows: list[list[str]], texts: Collection[int] = (0,)) -> str:
    """Aligned columns: those of texts to the left, numbers to the right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[c]) if c in texts else cell.rjust(widths[c]) for c, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros that start a cache line: vectors that straddle two of them cost half the kernels' speed."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    found: NDArray[Any] = room[start : start + size].view(dtype).reshape(shape)
    return found


class Workspace:
    """One thread's buffers, made once and used for every job."""

    def __init__(self, plan: Task) -> None:
        models, row = len(plan.models), plan.chunk * plan.itemsize
        kinds = {stage.kind for tensor in plan.tensors for stage in tensor.stages}
        self.base = aligned((row,), np.uint8)
        self.finetuned = aligned((models, row), np.uint8)
        self.figures = np.zeros(0)
        if "measure" in kinds:
            self.figures = aligned((models + 2 + models * (models - 1) // 2, FIGURES), np.float64)
        self.output = self.figures.view(np.uint8) if len(self.figures) else aligned((row,), np.uint8)
        self.words = aligned((models + 1, WORDS), np.uint64)
        self.reals = aligned((models + 1, REALS), np.float64)
        self.scratch = aligned((SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)
        width = 1 << DIGIT_BITS if "count" in kinds else LANES * BINS if "measure" in kinds else 0
        self.counts = aligned((models, width), np.uint32)
        self.sums: dict[int, NDArray[np.float64]] = {}  # slerp's three products, by chunk
        self.right: dict[Checkpoint, tuple[Any, NDArray[Any]]] = {}  # adapters' matrices: of which tensor, and itself
        buffers = (self.base, self.finetuned, self.output, self.words, self.reals, self.scratch, self.counts)
        self.addresses = tuple(buffer.ctypes.data for buffer in buffers)


@dataclass
class Outcome:
    """What one job found: a tally per model that has the tensor, or the models that differ from a copied base."""

    tensor: str
    start: int
    bytes_read: int
    looked: bool = False  # nothing was written
    tallies: dict[int, Tally] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, job: Job, tallies: dict[int, Tally] | None = None) -> Outcome:
        return cls(job.tensor.name, job.start, job.bytes_read, job.stage is not None, tallies or {})

    def as_entry(self) -> list[Any]:
        """For the journal."""
        tallies = {str(i): list(dataclasses.astuple(tally)) for i, tally in self.tallies.items()}
        return [self.tensor, self.start, self.bytes_read, tallies, sorted(self.differing)]

    @classmethod
    def of_entry(cls, entry: list[Any]) -> Outcome:
        tensor, start, bytes_read, tallies, differing = entry
        return cls(tensor, start, bytes_read, False, {int(i): Tally(*t) for i, t in tallies.items()}, set(differing))


class Ledger:
    """What all jobs found, per model: the tally of each merged tensor, and the copied tensors that differ."""

    def __init__(self, models: int) -> None:
        self.tallies: list[dict[str, Tally]] = [{} for _ in range(models)]
        self.differing: list[set[str]] = [set() for _ in range(models)]

    def add(self, outcome: Outcome) -> None:
        name = outcome.tensor
        for i, tally in outcome.tallies.items():
            self.tallies[i].setdefault(name, Tally()).add(tally)
        for i in outcome.differing:
            self.differing[i].add(name)

    def total(self, model: int) -> Tally:
        total = Tally()
        for tally in self.tallies[model].values():
            total.add(tally)
        return total


class Survey:
    """What is known of one tensor before it is merged: made by its stages in turn, each of them jobs in any order."""

    def __init__(self, tensor: TensorPlan, slerp_t: float) -> None:
        self.tensor, self.slerp_t = tensor, slerp_t
        self.jobs = -(-tensor.base.count // JOB_ELEMENTS)
        self.floors = [0.0] * len(tensor.finetuned)  # trim keeps what is at least as large
        self.ends = (0.0, 0.0)  # slerp's coefficients of base + kept
        self.prefixes = [0] * len(tensor.finetuned)
        self._ranks = [0] * len(tensor.finetuned)
        self._arrived: dict[int, NDArray[Any]] = {}
        self._counted = 0

    def add(self, job: Job, work: Workspace) -> None:
        """Take what a job found; with the tensor's last job, draw the stage's conclusion."""
        assert job.stage is not None
        self._counted += 1
        if job.stage.kind == "angle":
            self._arrived |= work.sums
        else:
            total = self._arrived.setdefault(0, np.zeros((len(self.floors), 1 << DIGIT_BITS), np.int64))
            total += work.counts[: len(self.floors)]
        if self._counted == self.jobs:
            found, self._arrived, self._counted = self._arrived, {}, 0
            if job.stage.kind == "angle":
                self._conclude_angle(np.stack([found[start] for start in sorted(found)]))
            else:
                for row, counts in enumerate(found[0]):
                    self._conclude_digit(row, counts, job.stage.shift)

    def _conclude_angle(self, sums: NDArray[np.float64]) -> None:
        first, second, product = (float(fold_neighbours(sums[:, k].copy())) for k in range(3))
        self.ends = slerp_ends(first, second, product, self.slerp_t)

    def _conclude_digit(self, row: int, counts: NDArray[np.int64], shift: int) -> None:
        """The digit in which the last entry to be kept lies, counting from the largest down."""
        top = FORMATS[self.tensor.spec.real].bits - DIGIT_BITS
        downwards = np.cumsum(counts[::-1])
        if shift == top:
            self._ranks[row] = max(1, int(self.tensor.settings.keep_ratio * int(downwards[-1])))
        place = int(np.searchsorted(downwards, self._ranks[row]))
        if place == len(counts):  # nothing survived the drop, so there is nothing to trim
            return
        self._ranks[row] -= int(downwards[place - 1]) if place else 0
        self.prefixes[row] = self.prefixes[row] << DIGIT_BITS | (len(counts) - 1 - place)
        if shift == 0:
            wide = self.tensor.spec.real == "F64"
            self.floors[row] = struct.unpack(
                "<d" if wide else "<f", struct.pack("<Q" if wide else "<I", self.prefixes[row])
            )[0]


class Unsurveyed(Survey):
    """Stands in for a survey where a few jobs are tried: nothing can be concluded from them.

    What is merged then is nothing that the merge would not bear: the base where it trims, a straight line for slerp.
    """

    def __init__(self, tensor: TensorPlan, slerp_t: float) -> None:
        super().__init__(tensor, slerp_t)
        self.floors = [math.inf] * len(tensor.finetuned)
        self.ends = (1 - slerp_t, slerp_t)

    def add(self, job: Job, work: Workspace) -> None:
        pass


def slerp_ends(first: float, second: float, product: float, t: float) -> tuple[float, float]:
    """The coefficients of two vectors, of these squared lengths and this scalar product, in their slerp at t.

    Sines by series in decimal arithmetic: libraries differ in the last bit of theirs, and the output must not.
    """
    cosine = product / math.sqrt(first) / math.sqrt(second) if first > 0 and second > 0 else 1.0
    if not abs(cosine) <= SLERP_LINEAR:  # also where it is not a number, which the merge itself will report
        return 1 - t, t
    with decimal.localcontext() as context:
        context.prec = 50
        angle = Decimal(math.acos(cosine))
        for _ in range(2):  # Newton's method, from the library's angle to one that is right to all digits
            angle += (_sine(angle + HALF_PI) - Decimal(cosine)) / _sine(angle)
        whole, share = _sine(angle), Decimal(t) * angle
        return float(_sine(angle - share) / whole), float(_sine(share) / whole)


def _sine(x: Decimal) -> Decimal:
    term, total, n = x, x, 1
    while abs(term) > Decimal(10) ** -45:
        term *= -x * x / ((n + 1) * (n + 2))
        total, n = total + term, n + 2
    return total


def is_delta(info: TensorInfo) -> bool:
    """Whether its values are changes to the base already, and not the changed tensor."""
    return info.low_rank is not None and info.low_rank.whole is None


def expand_spec(info: TensorInfo) -> KernelSpec:
    return KernelSpec("expand", info.dtype, info.dtype, info.dtype)


class Surveyed(Protocol):
    """What is told of what jobs found, one job at a time."""

    def add(self, job: Job, work: Workspace) -> None: ...


class Writable(Protocol):
    """What jobs write to: an output, or something that compares."""

    def write_at(self, file: int, view: memoryview, offset: int) -> None: ...


class Nowhere:
    """For jobs that write nothing that is wanted."""

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        pass


class Abandoned(Exception):
    """A job that was told to stop."""


class Worker:
    """Runs jobs of one task: any of them, in any order, in any thread that brings its own workspace."""

    def __init__(self, plan: Task, base: Checkpoint, models: Sequence[Checkpoint]) -> None:
        self.plan, self.base, self.models = plan, base, models
        self.abandoned = threading.Event()  # set to make all jobs stop at once
        self.kernels = {spec: load_kernel(spec) for spec in sorted(plan.specs(), key=str)}
        self.surveyed = plan.surveys()
        self.weights = plan.config.shares(len(models))

    def run(self, job: Job, work: Workspace, output: Writable) -> Outcome:
        if job.stage is not None:
            return self._look(job, work)
        return self._merge(job, work, output) if job.tensor.merged else self._copy(job, work, output)

    def _chunks(self, job: Job) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(job.start, job.stop, self.plan.chunk):
            if self.abandoned.is_set():
                raise Abandoned
            yield start, min(self.plan.chunk, job.stop - start)

    def _look(self, job: Job, work: Workspace) -> Outcome:
        assert job.stage is not None
        kernel = self.kernels[job.tensor.survey_spec(job.stage)]
        self._tell(job, work)
        work.counts[:] = 0
        work.figures[:] = 0
        work.sums = {}
        for start, count in self._chunks(job):
            kernel(*work.addresses, *self._load(job.tensor, start, count, work), job.stage.shift)
            if job.stage.kind == "angle":
                work.sums[start] = work.reals[len(job.tensor.finetuned), :3].copy()
        if job.stage.kind == "measure" and not np.isfinite(self._peaks(job, work)).all():
            self._explain_non_finite(job, work)
        return Outcome.of(job)

    def _peaks(self, job: Job, work: Workspace) -> NDArray[np.float64]:
        """The largest |delta| of each model and, where it is merged, the largest of the result."""
        real = FORMATS[job.tensor.spec.real]
        patterns = work.words[: len(job.tensor.finetuned) + 1, PEAK].astype(real.raw)
        return patterns.view(real.real).astype(np.float64)

    def _merge(self, job: Job, work: Workspace, output: Writable) -> Outcome:
        tensor, spec = job.tensor, job.tensor.spec
        kernel, item = self.kernels[spec], FORMATS[spec.output].bits // 8
        is_whole = len(tensor.finetuned) == 1 and not is_delta(tensor.finetuned[0][1])
        exact = int(is_whole and tensor.settings.gives_back(self.weights))
        offset = self._offset(tensor)
        self._tell(job, work)
        for start, count in self._chunks(job):
            kernel(*work.addresses, *self._load(tensor, start, count, work), exact)
            output.write_at(tensor.output.file, work.output.data[: count * item], offset + start * item)
        models = len(tensor.finetuned)
        peaks = self._peaks(job, work)
        if not (peaks[models] < FORMATS[spec.output].limit and np.isfinite(peaks).all()):
            self._explain_non_finite(job, work)
        tallies = {i: self._tally(job, work, row, float(peaks[row])) for row, (i, _) in enumerate(tensor.finetuned)}
        return Outcome.of(job, tallies)

    def _offset(self, tensor: TensorPlan) -> int:
        return len(self.plan.files[tensor.output.file].header) + tensor.output.offset

    def _survey(self, tensor: TensorPlan) -> Survey | None:
        """What is known of a tensor that is to be merged."""
        found = self.surveyed.get(tensor.name)
        return found if isinstance(found, Survey) else None

    def _tell(self, job: Job, work: Workspace) -> None:
        """Set what the kernels must know, and clear what they count."""
        tensor, survey = job.tensor, self._survey(job.tensor)
        for row, (i, info) in enumerate(tensor.finetuned):
            slot = survey.prefixes[row] if survey and job.stage and job.stage.kind == "count" else i
            limit = keep_threshold(tensor.settings.drop_rates[i]) - 1
            against = ZERO_ROW if is_delta(info) else BASE_ROW
            work.words[row] = (
                *mask_key(self.plan.config.seed + i, tensor.mask_names[row]),
                limit,
                slot,
                against,
                0,
                0,
                0,
            )
            work.reals[row] = (*self._scales(tensor, row, i, survey, job.stage), 0.0)
        pull = sum(survey.ends) - 1 if survey and tensor.method == "slerp" else 0.0
        work.words[len(tensor.finetuned)] = 0
        work.reals[len(tensor.finetuned)] = tensor.settings.lambda_coeff, pull, self.plan.config.delta_threshold, 0.0

    def _load(self, tensor: TensorPlan, start: int, count: int, work: Workspace) -> tuple[int, ...]:
        """Read a chunk of every input. Gives the numbers that the kernels want."""
        wanted = FORMATS[tensor.spec.finetuned]
        base = self._read(self.base, tensor.base, start, count, work.base, work)
        for row, (i, info) in enumerate(tensor.finetuned):
            there = max(0, min(count, info.count - start))  # less, where the model has fewer rows
            values, item = work.finetuned[row], wanted.bits // 8
            stored = self._read(self.models[i], info, start, there, values, work)
            if info.dtype != tensor.spec.finetuned:
                values.view(wanted.real)[:there] = widen(stored.copy(), info.dtype)
            if is_delta(info):
                values[there * item : count * item] = 0
            elif there < count and tensor.base.dtype == tensor.spec.finetuned:
                values[there * item : count * item] = base[there * item :]
            elif there < count:
                values.view(wanted.real)[there:count] = widen(base, tensor.base.dtype)[there:]
        return count, work.finetuned.shape[1] // (wanted.bits // 8), len(tensor.finetuned), start // TILE

    def _scales(
        self, tensor: TensorPlan, row: int, i: int, survey: Survey | None, stage: Stage | None
    ) -> tuple[float, float, float]:
        """What model i's kept deltas are multiplied by, its weight, and the least that trim lets pass."""
        divisor = divisor_of(tensor.settings, i)
        if stage is not None:
            return 1 / divisor, 1.0, 0.0
        weight = survey.ends[i] if survey and tensor.method == "slerp" else self.weights[i]
        return weight / divisor, weight, survey.floors[row] if survey else 0.0

    def _tally(self, job: Job, work: Workspace, row: int, peak: float) -> Tally:
        i, info = job.tensor.finetuned[row]
        count = max(0, min(job.stop, info.count) - job.start)  # what the model has of it
        rate = keep_rate(job.tensor.settings.drop_rates[i])
        above, kept = int(work.words[row, ABOVE]), int(work.words[row, KEPT])
        kept -= round((job.stop - job.start - count) * rate)  # what stands in for rows that it lacks is not its own
        sums = float(work.reals[row, SUM]), float(work.reals[len(job.tensor.finetuned), SUM])
        return Tally(count, sums[0], peak, above, min(count, max(0, kept)), count * rate, sums[1])

    def _copy(self, job: Job, work: Workspace, output: Writable) -> Outcome:
        outcome, tensor = Outcome.of(job), job.tensor
        for start, size in self._chunks(job):
            mine, theirs = work.base.data[:size], work.output.data[:size]
            self.base.read_into(mine, tensor.base, start)
            for i, info in tensor.finetuned:
                alike = (info.dtype, info.shape) == (tensor.base.dtype, tensor.base.shape)
                if alike:
                    self.models[i].read_into(theirs, info, start)
                if not alike or not np.array_equal(work.base[:size], work.output[:size]):
                    outcome.differing.add(i)
            output.write_at(tensor.output.file, mine, self._offset(tensor) + start)
        if outcome.differing and tensor.quantised:
            name = self.models[min(outcome.differing)].name
            raise DareError(
                f"tensor {tensor.name!r} is part of a quantised module ({tensor.base.dtype}) and differs in {name!r}",
                QUANTISE_HINT,
            )
        return outcome

    def _read(
        self,
        model: Checkpoint,
        info: TensorInfo,
        start: int,
        count: int,
        buffer: NDArray[np.uint8],
        work: Workspace,
    ) -> NDArray[np.uint8]:
        """Elements of a tensor, stored or expanded, as raw bytes at the start of buffer."""
        item = FORMATS[info.dtype].bits // 8
        part = buffer[: count * item]
        if info.low_rank is None:
            model.read_into(part.data, info, start * item)
        else:
            self._expand(model, info, info.low_rank, start, part.view(FORMATS[info.dtype].real), work)
        return part

    def _expand(
        self, model: Checkpoint, info: TensorInfo, low: LowRank, start: int, made: NDArray[Any], work: Workspace
    ) -> None:
        """Fill made with elements of scale * left @ right, by as many ranks at a time as fit the budget."""
        if not len(made):
            return
        kernel = self.kernels[expand_spec(info)]
        rows = slice(start // low.columns, -(-(start + len(made)) // low.columns))
        room = EXPAND_ELEMENTS // (self.plan.threads * (1 + len(self.plan.models)))
        step = max(1, room // max(low.columns, rows.stop - rows.start))
        for k in range(0, low.rank, step):
            ranks = slice(k, min(k + step, low.rank))
            left = low.read_left(model, rows, ranks, made.dtype)
            known, right = work.right.get(model, (None, left))
            if known != (info, ranks):
                right = low.read_right(model, ranks, made.dtype)
                work.right[model] = (info, ranks), right  # the tensor's next chunk needs it again
            addresses = [array.ctypes.data for array in (left, right, made)]
            kernel(*addresses, 0, 0, 0, 0, len(made), low.columns, left.shape[1], start % low.columns, k)
        with np.errstate(over="ignore"):  # what is beyond all bounds is told with its place
            made *= made.dtype.type(low.scale)
        if low.whole is not None:
            raw = np.empty(made.size * STORED_BITS[low.whole.dtype] // 8, np.uint8)
            made += widen(self._read(model, low.whole, start, made.size, raw, work), low.whole.dtype)

    def _explain_non_finite(self, job: Job, work: Workspace) -> NoReturn:
        """Name the first value that no merge can use. Off the fast path, so it reads again and looks with NumPy."""
        tensor = job.tensor
        for checkpoint, info in [(self.base, tensor.base), *((self.models[i], info) for i, info in tensor.finetuned)]:
            for start, count in self._chunks(job):
                there = max(0, min(count, info.count - start))
                values = widen(self._read(checkpoint, info, start, there, work.base, work), info.dtype)
                bad = np.flatnonzero(~np.isfinite(values))
                if bad.size:
                    place = place_of(start + int(bad[0]), tensor.base.shape)
                    raise DareError(
                        f"{checkpoint.name!r}: tensor {tensor.name!r} holds {values[bad[0]]} at {place}",
                        "such a model is broken; use a checkpoint from before that happened",
                    )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of {tensor.output.dtype}",
            "lower lambda_coeff, the weights or the drop rate, or choose a wider dtype",
        )


def run_jobs(
    jobs: Iterator[Job],
    worker: Worker,
    spaces: list[Workspace],
    output: Writable,
    done: Callable[[Outcome], None],
    let_interrupts_through: Callable[[], None],
) -> None:
    """Run the jobs, a thread per workspace. Of several failures, the first in the jobs' order is raised."""
    lock, failures = threading.Lock(), dict[int, BaseException]()
    stop = threading.Event()

    def loop(work: Workspace) -> None:
        number = -1
        try:
            while not stop.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                number = job.number
                outcome = worker.run(job, work, output)
                with lock:
                    if job.stage is not None:
                        worker.surveyed[job.tensor.name].add(job, work)
                    done(outcome)
        except Abandoned:
            pass
        except BaseException as error:
            failures[number] = error
            stop.set()

    threads = [threading.Thread(target=loop, args=(work,)) for work in spaces]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                let_interrupts_through()
    except BaseException:
        worker.abandoned.set()
        raise
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[min(failures)]


def estimated(plan: Plan, worker: Worker, let_interrupts_through: Callable[[], None]) -> Estimate:
    """How long the plan's jobs take, by running some of them. Where one fails, so would the merge."""
    worker.surveyed = {t.name: Unsurveyed(t, plan.config.position) for t in plan.computed if t.stages}
    spaces = [Workspace(plan) for _ in range(plan.threads)]
    outcomes: list[Outcome] = []
    started = time.perf_counter()

    def until_time_is_up() -> Iterator[Job]:
        for job in plan.sample():
            yield job
            if time.perf_counter() - started > SAMPLE_SECONDS:
                return

    run_jobs(until_time_is_up(), worker, spaces, Nowhere(), outcomes.append, let_interrupts_through)
    seconds, sampled = time.perf_counter() - started, sum(outcome.bytes_read for outcome in outcomes)
    return Estimate(seconds * plan.bytes_to_read / max(sampled, 1), sampled, seconds)


@contextmanager
def progress(what: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes, rate and time left on stderr, if that is a terminal. Gives the function that advances it."""
    if not (shown and is_terminal(sys.stderr)):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (what, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True, no_color=bool(os.environ.get("NO_COLOR")))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda amount: bar.advance(task, amount)


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Whether a model's configuration says that its output head is its input embedding; None: it does not say."""
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(table.get("tie_word_embeddings"), bool):
            return bool(table["tie_word_embeddings"])
    return None


class TensorPlanner:
    """Decides for each tensor of the base which models change it and how, and remembers what did not fit."""

    def __init__(self, config: DareConfig, base: Checkpoint, models: list[Checkpoint]) -> None:
        self.config, self.base, self.models = config, base, models
        self.mismatched: list[dict[str, tuple[int, ...]]] = [{} for _ in models]  # and their shapes
        self.tied: list[dict[str, str]] = [{} for _ in models]  # by head: the embedding that stands in for it
        self.warnings: list[str] = []
        self._settings: dict[Rule | None, TensorSettings] = {}
        self._quantised = quantised_modules(base.tensors)
        self._embeddings = [name for name in base.tensors if name.endswith(EMBEDDINGS)]
        for model in models:
            self._check_quantised(model)

    def tensors(self) -> list[TensorPlan]:
        planned = [self._plan_tensor(name, info) for name, info in self.base.tensors.items()]
        merged = {tensor.name for tensor in planned if tensor.merged}
        for model, mismatched, tied in zip(self.models, self.mismatched, self.tied, strict=True):
            shapes = [f"{name!r} ({list(shape)})" for name, shape in mismatched.items() if name in merged]
            if shapes:
                what = "their common rows are merged" if self.config.mismatch == "overlap" else "the base's are kept"
                more = f" and {len(shapes) - LISTED:,} more" if len(shapes) > LISTED else ""
                shapes = shapes[:LISTED]
                self.warnings.append(f"{model.name} has tensors of other shapes: {', '.join(shapes)}{more}; {what}")
            whole = [n for n, info in model.tensors.items() if n.endswith(EMBEDDINGS) and not info.low_rank]
            if model.adapter and whole and not any(n.endswith(HEADS) for n in self.base.tensors):
                self.warnings.append(
                    f"{model.name} has its own {whole[0]!r}, and the base uses that as its output head too: both "
                    "change, where PEFT would leave the head as it was"
                )
            for head, embedding in tied.items():
                self.warnings.append(f"{model.name} lacks {head!r}, which is tied to {embedding!r} and merged like it")
        return planned

    def missing(self, i: int) -> tuple[str, ...]:
        """The tensors that a model should have and does not. An adapter has none that it should have."""
        model = self.models[i]
        if model.adapter:
            return ()
        return tuple(n for n in self.base.tensors if n not in model.tensors and n not in self.tied[i])

    def embedding_rows(self) -> int:
        """How many tokens the base has room for, or 0 where that cannot be told."""
        return next(
            (info.shape[0] for n, info in self.base.tensors.items() if n.endswith(EMBEDDINGS) and info.shape), 0
        )

    def _plan_tensor(self, name: str, info: TensorInfo) -> TensorPlan:
        quantised = self._is_quantised(name)
        merged = info.dtype in FORMATS and not quantised
        found, mask_names = [], []
        # A head that the base's configuration ties to the embedding must stay equal to it, so it is merged as that is.
        own = (ties_embeddings(self.base.config) and self._embedding_like(name, info)) or name
        for i, model in enumerate(self.models):
            theirs, mask_name = model.tensors.get(name), own
            if theirs is None and (embedding := self._tied_embedding(name, info, model)):
                theirs, mask_name = model.tensors[embedding], embedding
                self.tied[i][name] = embedding
            if theirs is None:
                continue
            if theirs.shape != info.shape:
                self._check_shapes(name, info, theirs, model)
                self.mismatched[i][name] = theirs.shape
            if (theirs.dtype in FORMATS) != (info.dtype in FORMATS):
                raise DareError(
                    f"tensor {name!r} is {info.dtype} in {self.base.name!r} and {theirs.dtype} in {model.name!r}",
                    f"only {', '.join(FORMATS)} tensors can be merged, with one another",
                )
            found.append((i, theirs))
            mask_names.append(mask_name)
        if self.config.mismatch == "base" and any(name in names for names in self.mismatched):
            found = []
        dtype = DTYPES[self.config.dtype] if merged and self.config.dtype else info.dtype
        # Where all models' heads are their embeddings, the merged head is the merged embedding.
        rule = self.config.rule_for(mask_names[0] if len(set(mask_names)) == 1 else own)
        if rule not in self._settings:
            self._settings[rule] = self.config.for_rule(rule, len(self.models))
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple(found),
            mask_names=tuple(mask_names),
            output=TensorInfo(dtype, info.shape, 0),
            merged=merged,
            settings=self._settings[rule],
            method=self.config.method,
            quantised=quantised,
            rule=rule,
        )

    def _check_shapes(self, name: str, info: TensorInfo, theirs: TensorInfo, model: Checkpoint) -> None:
        """Refuse tensors of different shapes, unless the user has said what to do with them and that can be done."""
        by_rows = len(info.shape) == len(theirs.shape) > 0 and info.shape[1:] == theirs.shape[1:]
        if self.config.mismatch == "base" or (self.config.mismatch == "overlap" and by_rows):
            return
        message = (
            f"tensor {name!r} is {list(info.shape)} in {self.base.name!r} and {list(theirs.shape)} in {model.name!r}"
        )
        if self.config.mismatch == "overlap":
            raise DareError(
                f"{message}: more than the number of rows differs", "--mismatch base keeps the base's tensor"
            )
        if not by_rows:
            raise DareError(message, "only models fine-tuned from this very base can be merged")
        more = theirs.shape[0] - info.shape[0]
        raise DareError(
            f"{message}, {counted(abs(more), 'row')} {'more' if more > 0 else 'fewer'}",
            "for added tokens, --mismatch overlap merges the rows that both have, --mismatch base keeps the base's "
            "tensor; otherwise check that this is the right base",
        )

    def _tied_embedding(self, name: str, info: TensorInfo, model: Checkpoint) -> str | None:
        """The embedding that a model, by its or the base's configuration, uses as the output head that it lacks."""
        said = [setting for setting in map(ties_embeddings, (self.base.config, model.config)) if setting is not None]
        known = said or self.base.config or model.config  # where nothing is said, a head that is not there is tied
        embedding = self._embedding_like(name, info)
        return embedding if known and False not in said and embedding in model.tensors else None

    def _embedding_like(self, name: str, info: TensorInfo) -> str | None:
        """For an output head, the base's input embedding of the same shape."""
        names = self._embeddings if name.endswith(HEADS) else ()
        return next((other for other in names if self.base.tensors[other].shape == info.shape), None)

    def _is_quantised(self, name: str) -> bool:
        return module_of(name) in self._quantised and not name.endswith("bias")

    def _check_quantised(self, model: Checkpoint) -> None:
        """Refuse to merge a quantised model with one that is not, or is in another way."""
        theirs = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = self.base.tensors.get(name)
            alike = mine is not None and (mine.dtype, mine.shape) == (info.dtype, info.shape)
            if self._is_quantised(name) and not alike:
                raise DareError(
                    f"{self.base.name!r} is quantised, and {model.name!r} is not in the same way: see {name!r}",
                    QUANTISE_HINT,
                )
            if module_of(name) in theirs and not self._is_quantised(name) and not name.endswith("bias"):
                raise DareError(
                    f"{model.name!r} is quantised, and {self.base.name!r} is not: see {name!r}", QUANTISE_HINT
                )


def laid_out(
    tensors: Sequence[TensorPlan], limit: int, metadata: dict[str, str]
) -> tuple[list[TensorPlan], list[PlannedFile]]:
    """Give each tensor its place in a file, in order, with no more than limit bytes of tensors to a file."""
    numbers = shard_sizes([tensor.output.nbytes for tensor in tensors], limit)
    names = shard_names(numbers[-1] + 1 if numbers else 1)
    used, placed = [0] * len(names), []
    held: list[dict[str, TensorInfo]] = [{} for _ in names]
    for tensor, number in zip(tensors, numbers, strict=True):
        output = dataclasses.replace(tensor.output, file=number, offset=used[number])
        placed.append(dataclasses.replace(tensor, output=output))
        held[number][tensor.name] = output
        used[number] += output.nbytes
    files = []
    for name, infos, size in zip(names, held, used, strict=True):
        header = header_bytes(infos, metadata)
        files.append(PlannedFile(name, header, len(header) + size))
    return placed, files


def recipe_metadata(recipe: str) -> dict[str, str]:
    """The metadata of a merged file. The digest is there so that damage to the recipe itself can be told."""
    return {"format": "pt", RECIPE_KEY: recipe, f"{RECIPE_KEY}_sha256": digest_of(recipe.encode())}


def index_bytes(tensors: Sequence[TensorPlan], files: Sequence[PlannedFile]) -> bytes:
    """The index of a model in several files, as transformers writes it."""
    index = {
        "metadata": {
            "total_parameters": sum(tensor.output.count for tensor in tensors),
            "total_size": sum(tensor.output.nbytes for tensor in tensors),
        },
        "weight_map": {tensor.name: files[tensor.output.file].name for tensor in tensors},
    }
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def path_from(source: Source, place: Path | None) -> str:
    """What to call a model in a recipe: as the user did; in a directory, by a path that leads there from it."""
    if source.pinned or place is None or os.path.isabs(os.path.expanduser(source.name)):
        return source.pinned or source.name
    physical = source.path.parent.resolve() / source.path.name  # a link itself is kept: what it leads to may move
    try:
        path = Path(os.path.relpath(physical, place)).as_posix()
    except ValueError:  # on another drive
        path = str(physical)
    return as_text(path)


def tokenizer_files(source: Source) -> dict[str, Path]:
    """The files of a model that make up its tokenizer."""
    found = {name: path for name, path in side_files(source.path).items() if TOKENIZER_FILES.fullmatch(name)}
    if not found:
        raise DareError(f"there is no tokenizer in {source.name!r}", "tokenizer_from wants a model directory")
    return found


def _odd_directory(
    base: Checkpoint, destination: Destination, planner: TensorPlanner, tokenizer: Source | None
) -> Iterator[str]:
    if destination.directory and (base.folder is None or not (base.folder / CONFIG_FILE).exists()):
        yield f"{base.name} has no {CONFIG_FILE} beside it, so the output has none: loaders will want one"
    if destination.directory and tokenizer is not None:
        yield from _odd_tokenizer(tokenizer_files(tokenizer), planner.embedding_rows())


def _odd_tokenizer(files: dict[str, Path], rows: int) -> Iterator[str]:
    """A tokenizer may know tokens that the model has no rows for."""
    if rows == 0 or "tokenizer.json" not in files:
        return
    with suppress(DareError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        highest = highest_token(files["tokenizer.json"])
        if highest >= rows:
            yield f"the tokenizer knows tokens up to {highest:,}, and the merged model has rows for {rows:,} tokens"


def highest_token(path: Path) -> int:
    """The largest number of a token in a tokenizer.json, which may have 50 MB and is read piece by piece."""
    numbers: dict[str, int] = {}
    with path.open(encoding="utf-8", newline="") as file:
        tokenizer = JsonReader(iter(lambda: file.read(JSON_PIECE), ""))
        for key in tokenizer.members():
            if key == "added_tokens":
                numbers[key] = max((tokenizer.value(MAX_NAME)["id"] for _ in tokenizer.elements()), default=-1)
            elif key == "model":
                for part in tokenizer.members():
                    if part != "vocab":
                        tokenizer.skip()
                    elif tokenizer.peek() == "{":
                        numbers[part] = max((tokenizer.value(MAX_NAME) for _ in tokenizer.members()), default=-1)
                    else:
                        for numbers[part], _ in enumerate(tokenizer.elements()):  # the number is the place
                            tokenizer.skip()
                    if len(numbers) == 2:  # as a rule before the merges, which are most of it
                        return max(numbers.values())
            else:
                tokenizer.skip()
    return max(numbers.values(), default=-1)


COMBINED: Final = {
    "linear": "summed up by weight and added to the base",
    "ties": "averaged over the models that agree on a sign, and added to the base",
    "slerp": "interpolated along the arc between the two",
}


def model_card(config: DareConfig, inputs: Sequence[Checkpoint], recipe: str) -> str:
    """A README.md as the Hugging Face Hub wants it, with the recipe in words and as it is."""
    names = [card_name(checkpoint.source) for checkpoint in inputs]
    models = names[1:]
    settings = config.general(len(models))
    lines = ["---", "base_model:", *(f"- {json.dumps(name)}" for name in dict.fromkeys(names))]
    lines += ["base_model_relation: merge", "library_name: transformers", "tags:", "- merge", "- dare", "---", ""]
    lines += [f"# A DARE merge of {counted(len(models), 'model')}", ""]
    lines += [
        f"Merged from `{names[0]}` and models fine-tuned from it by [DARE](https://arxiv.org/abs/2311.03099) (drop and "
        "rescale): most of what each fine-tune changed is dropped at random, the rest is rescaled, and what is left is "
        f"{COMBINED[config.method]}.",
        "",
        "| model | seed | dropped | kept deltas are divided by | weight |",
        "| --- | --- | --- | --- | --- |",
    ]
    shares = [f"{share:.4g}" for share in config.shares(len(models))]
    weights = [f"slerp at {config.position:g}"] * 2 if config.method == "slerp" else shares
    for i, name in enumerate(models):
        divisor, rate = divisor_of(settings, i), settings.drop_rates[i]
        lines.append(f"| `{name}` | {config.seed + i} | {rate:.4g} | {divisor:.4g} | {weights[i]} |")
    lines += ["", f"The merged delta is multiplied by {config.lambda_coeff:g} and added to the base."]
    if settings.keep_ratio < 1:
        lines.append(f"Of what survives the drop, the largest {settings.keep_ratio:.4g} of each tensor is kept.")
    if config.rules:
        lines.append("Some tensors have settings of their own; they are in the recipe.")
    again = "This recipe makes the same tensors again, byte for byte, from the same inputs"
    lines += ["", f"{again} (`{RECIPE_FILE}` has it with paths):", ""]
    lines += ["```toml", recipe.rstrip("\n"), "```", ""]
    return "\n".join(lines)


def card_name(source: Source) -> str:
    """What to call a model on a card: its name on the Hub, or the last part of its path."""
    if source.pinned:
        return source.pinned.partition("@")[0]
    path = Path(os.path.abspath(source.path))
    belongs = path.name in (WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE, ADAPTER_CONFIG)
    name = path.parent.name if belongs else path.name.removesuffix(".safetensors")
    return as_text(name)


@dataclass(frozen=True)
class VerifyReport:
    """A merged model that is, byte for byte, what its recipe makes. Prints as a line; as_dict gives plain data."""

    output: str
    tensors: int
    bytes_compared: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return (
            f"verified {printable(self.output)}: {self.tensors:,} tensors, {human(self.bytes_compared)}, "
            f"are what the recipe makes, in {self.seconds:.2f} s"
        )


class Comparison:
    """An output that is there already: what jobs write is compared with it."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self.descriptors: list[int] = []
        self._buffers = threading.local()
        try:
            allow_open_files(len(plan.files))
            for file in plan.files:
                self._open(file)
        except BaseException:
            self.close()
            raise

    def _open(self, file: PlannedFile) -> None:
        path = self.plan.output.path / file.name if self.plan.output.directory else self.plan.output.path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise self._differs(f"{file.name!r} is not a regular file")
            self.descriptors.append(os.open(path, os.O_RDONLY | BINARY))
            size = os.fstat(self.descriptors[-1]).st_size
        except FileNotFoundError:
            raise self._differs(f"{file.name!r} is not there") from None
        except OSError as error:
            raise DareError(f"cannot read {str(path)!r}: {error.strerror}", "nothing is known of it") from None
        if size != file.size:
            raise self._differs(f"{file.name!r} is {size:,} bytes long, not {file.size:,}")
        found = bytearray(len(file.header))
        self._read(len(self.descriptors) - 1, memoryview(found), 0)
        if found != file.header:
            raise self._differs(f"the header of {file.name!r} differs")

    def check_side_files(self, moved: bool) -> None:
        """Where inputs have moved, the card and the recipe, which name them, are held to what the recipe notes."""
        folder = self.plan.output.path
        # The recipe has the digests of the others, so it comes last.
        for name, content in sorted(self.plan.side.items(), key=lambda item: item[0] == RECIPE_FILE):
            found = file_sha256(folder / name)
            if found is None:
                raise self._differs(f"{name!r} cannot be read")
            if moved and name in (CARD_FILE, RECIPE_FILE):  # the recipe itself has a seal, which is unbroken
                same = name == RECIPE_FILE or made_here(folder).get(name) == found
            else:
                same = found == digest_of(content)
            if not same:
                raise self._differs(f"{name!r} differs")

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        if not hasattr(self._buffers, "found"):
            self._buffers.found = bytearray(self.plan.chunk * self.plan.itemsize)
        found = memoryview(self._buffers.found)[: len(view)]
        self._read(file, found, offset)
        differs = np.frombuffer(found, np.uint8) != np.frombuffer(view, np.uint8)
        if differs.any():
            raise self._tensor_differs(file, offset + int(differs.argmax()))

    def _read(self, file: int, view: memoryview, offset: int) -> None:
        while view:
            done = read_at(self.descriptors[file], view, offset)
            if done == 0:
                raise self._differs(f"{self.plan.files[file].name!r} became shorter while it was read")
            view, offset = view[done:], offset + done

    def _tensor_differs(self, file: int, place: int) -> DareError:
        """Name the tensor that a byte of a file belongs to, and the element."""
        start = place - len(self.plan.files[file].header)
        for tensor in self.plan.tensors:
            info = tensor.output
            if info.file == file and info.offset <= start < info.offset + info.nbytes:
                element = (start - info.offset) * 8 // STORED_BITS[info.dtype]
                return self._differs(f"tensor {tensor.name!r} differs at {place_of(element, info.shape)}")
        raise AssertionError("no tensor has that byte")

    def _differs(self, how: str) -> DareError:
        return DareError(
            f"{self.name!r} is not what its recipe makes: {how}",
            "it was damaged or changed after it was merged, or the inputs were; merge again",
        )

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


# ---------------------------------------------------------------------------------------------------------------------
# Analysis: what the models are like, and what that says about how to merge them
# ---------------------------------------------------------------------------------------------------------------------

# What tensors do, by their names: the first pattern that is found in one.
KINDS: Final = {
    "norm": re.compile(r"norm|(^|[._])ln(_?\w+)?\.|(^|\.)bn\d*\.", re.IGNORECASE),
    "head": re.compile(r"(^|\.)(lm_head|head|classifier|score|embed_out|output_projection|predictions|cls)\."),
    "embedding": re.compile(r"embed|(^|\.)(wte|wpe|shared)\."),
    "attention": re.compile(r"att(entio)?n|(^|\.)(q|k|v|o|qkv|query|key|value)(_proj)?\.", re.IGNORECASE),
    "MLP": re.compile(
        r"mlp|ffn|feed_?forward|expert|(^|\.)(fc\w*|gate|router|dense|intermediate|w[io123])(_\w+)?\.|dense"
    ),
}
OTHER_KIND: Final = "other"
LOOKED_AT: Final = 200  # characters
# A bin's middle, by ratio, is at most this far from any value in it.
BIN_ERROR: Final = math.sqrt(1 + 1 / BINS_PER_OCTAVE) - 1
# How much a fine-tune may differ from its base, |delta| / |weights| by Euclidean norm. Instruction tuning stays well
# below the first; two models of one shape that have nothing in common are at sqrt(2).
RELATED_NORM: Final = 0.15
UNRELATED_NORM: Final = 0.5
# Drop rates by the size of the deltas against delta_threshold, for fine-tunes and for adapters, which are already the
# least that their training needed: all small; small but for a tail; large on average; beyond what dropping can do.
DROP_RATES: Final = {"small": (0.9, 0.85), "tailed": (0.8, 0.75), "large": (0.5, 0.5), "huge": (0.0, 0.0)}
TAIL_SHARE: Final = 0.05
HUGE_RATIO: Final = 5.0
EMBEDDING_RATE: Final = 0.2  # less than that of other tensors
HOT_LAYERS: Final = 8  # of which a rule is suggested; more of them are the model
# Unrelated deltas conflict in half of all positions.
CONFLICTING: Final = 0.35
OPPOSED_COSINE: Final = -0.1
TIES_ADDS: Final = "; after dropping it adds up more than it averages, so try a lambda_coeff below 1"
SMALL_MODEL: Final = 100_000_000


def short_names(names: Sequence[str]) -> list[str]:
    """What to call models in tables: the last parts of their paths, as many as tell them apart."""
    for parts in range(1, 4):
        plain = [name.replace(os.sep, "/").removesuffix("/").removesuffix(".safetensors") for name in names]
        short = ["/".join(name.split("/")[-parts:]) for name in plain]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def kind_of(name: str) -> str:
    """By the end of a name: the patterns take the square of its length."""
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name[-LOOKED_AT:])), OTHER_KIND)


def layer_of(name: str) -> str:
    """Where in the model a tensor is: its name up to the first number, or its module where there is none."""
    found = re.match(r"(?:.*?\.)?\d+(?=\.)", name)
    return found[0] if found else module_of(name)


def natural(name: str) -> tuple[bool, list[tuple[str, int, str]]]:
    """A key to sort layers by: numbers as numbers, however long, and what has none behind them."""
    parts = re.findall(r"(\D*)0*(\d*)", name)
    return not name[-1:].isdigit(), [(text, len(number), number) for text, number in parts]


def bin_range(place: int) -> tuple[float, float]:
    """Where a bin of |delta| begins and ends. The first holds all that is smaller, too, the last all that is larger."""
    low, high = (np.uint32((FIRST_BIN + k) << 19).view(np.float32) for k in (place, place + 1))
    return float(low), float(high)


def bin_of(size: float) -> int:
    pattern = int(np.float32(size).view(np.uint32)) >> 19
    return min(max(pattern - FIRST_BIN, 0), BINS - 1)


@dataclass(slots=True)  # there may be very many
class Deltas:
    """The sums over some tensors' deltas of one model."""

    tensors: int = 0
    parameters: int = 0
    zeros: int = 0
    above: int = 0
    size: float = 0.0  # sum of |delta|
    squares: float = 0.0
    peak: float = 0.0
    base_squares: float = 0.0
    noise_squares: float = 0.0  # what dropping is expected to add

    @classmethod
    def of(cls, parts: Iterable[Deltas]) -> Deltas:
        """All of them together."""
        total = cls()
        for part in parts:
            for name in ("tensors", "parameters", "zeros", "above", "size", "squares", "base_squares", "noise_squares"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.peak = max(total.peak, part.peak)
        return total

    @property
    def mean(self) -> float:
        return self.size / max(self.parameters, 1)

    def stats(self, name: str, counts: NDArray[np.int64]) -> DeltaStats:
        """counts: how many are in each bin of |delta|."""
        count, mean = max(self.parameters, 1), self.mean
        p50, p95, p99 = (self._percentile(share, counts) for share in (0.5, 0.95, 0.99))
        weights = math.sqrt(self.base_squares)
        return DeltaStats(
            name=name,
            tensors=self.tensors,
            parameters=self.parameters,
            share_zero=self.zeros / count,
            mean=mean,
            standard_deviation=math.sqrt(max(0.0, self.squares / count - mean * mean)),
            largest=self.peak,
            p50=p50,
            p95=p95,
            p99=p99,
            share_above_threshold=self.above / count,
            share_below_1_percent=self._share_below(self.peak / 100, counts),
            relative_norm=math.sqrt(self.squares) / weights if weights else 0.0,
            relative_noise=math.sqrt(self.noise_squares) / weights if weights else 0.0,
        )

    def _percentile(self, share: float, counts: NDArray[np.int64]) -> float:
        """The |delta| that this share of the parameters does not exceed: the middle, by ratio, of its bin."""
        rank = math.ceil(share * self.parameters)
        if rank <= self.zeros:
            return 0.0
        place = int(np.searchsorted(np.cumsum(counts), rank))
        low, high = bin_range(place)
        return min(math.sqrt(low * high), self.peak)

    def _share_below(self, limit: float, counts: NDArray[np.int64]) -> float:
        """The share of the parameters whose |delta| is below a limit; within the limit's bin, in proportion."""
        if not limit:
            return 0.0
        place = bin_of(limit)
        low, high = bin_range(place)
        inside = int(counts[place]) - (self.zeros if place == 0 else 0)
        below = self.zeros if place == 0 else int(counts[:place].sum())
        part = min(max((limit - low) / (high - low), 0.0), 1.0)
        return (below + part * inside) / max(self.parameters, 1)


@dataclass(frozen=True, slots=True)  # there may be very many
class DeltaStats:
    """What one model changed in some tensors. Percentiles come from counts by size and are within 3.1%."""

    name: str
    tensors: int
    parameters: int
    share_zero: float
    mean: float  # of |delta|, as all up to the percentiles
    standard_deviation: float
    largest: float
    p50: float
    p95: float
    p99: float
    share_above_threshold: float
    share_below_1_percent: float  # of the largest
    relative_norm: float  # |delta| / |weights|
    relative_noise: float  # what dropping is expected to add, / |weights|


@dataclass(frozen=True)
class ModelAnalysis:
    """What one model changed: in all, by layer, by kind of tensor, and tensor by tensor."""

    name: str
    label: str  # a shorter name
    adapter: bool
    drop_rate: float  # as it is set now, rules apart
    expected_noise: float  # of dropping at that rate, / |delta|: sqrt(p / (1 - p)) where it is rescaled
    total: DeltaStats
    kinds: tuple[DeltaStats, ...]
    layers: tuple[DeltaStats, ...]
    cells: Mapping[str, Mapping[str, float]]  # mean |delta| by layer and kind
    histogram: tuple[tuple[float, int], ...]  # where a bin of |delta| begins, and how many are in it; zeros apart
    tensors: tuple[DeltaStats, ...]


@dataclass(frozen=True)
class PairAnalysis:
    """How two models' changes lie to one another."""

    models: tuple[str, str]
    cosine: float  # of their task vectors
    share_both: float  # of the parameters, that both change
    sign_conflict: float  # of those, the share that they change in opposite directions
    weighted_sign_conflict: float  # the same, each counted by how much they change it


@dataclass(frozen=True)
class Advice:
    """One piece of advice, with its reason."""

    about: str  # base, drop_rate, rules, method or balance
    verdict: str
    model: str | None  # None: all of them
    text: str


@dataclass(frozen=True)
class AnalysisReport:
    """What the models are like, and what that says about how to merge them. Prints as tables; as_dict is plain data."""

    base: str
    parameters: int
    copied_tensors: int  # integers and quantised modules, which are not looked at
    delta_threshold: float
    models: tuple[ModelAnalysis, ...]
    pairs: tuple[PairAnalysis, ...]
    sign_conflict: float  # between any two of the models, of the parameters that at least two of them change
    weighted_sign_conflict: float
    advice: tuple[Advice, ...]
    confidence: str
    suggestion: str  # a [dare] table and its rules, as TOML
    bytes_read: int
    seconds: float
    warnings: tuple[str, ...]

    def as_dict(self, per_tensor: bool = False) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        if not per_tensor:
            for model in data["models"]:
                del model["tensors"]
        return data

    def __str__(self) -> str:
        return self.text()

    def text(self, per_tensor: bool = False) -> str:
        parts = [self._models()]
        for model in self.models:
            groups = [("kind", model.kinds), ("layer", model.layers)]
            for what, stats in groups + ([("tensor", model.tensors)] if per_tensor else []):
                title = f"{printable(model.label)}, by {what}"
                parts.append(f"{title}\n{self._stats([what, *STATS_HEADINGS], stats)}")
        if self.pairs:
            parts.append(self._pairs())
        advice = "\n".join(f"- {printable(advice.text)}" for advice in self.advice)
        parts.append(f"Advice\n{advice}\n{printable(self.confidence)}")
        parts.append(f"Suggested settings\n\n{self.suggestion.rstrip()}")
        rate = human(self.bytes_read / max(self.seconds, 1e-9))
        parts.append(f"{human(self.bytes_read)} read in {self.seconds:.2f} s, {rate}/s")
        return "\n\n".join(parts)

    def _models(self) -> str:
        lines = [
            self._stats(["model", *STATS_HEADINGS], [model.total for model in self.models]),
            f"(of |delta|; percentiles within {BIN_ERROR:.1%}; above {self.delta_threshold:g}; < 1%: about what is "
            "below 1% of the largest; norm: |delta| / |weights|; noise: what dropping adds, / |weights|)",
        ]
        for model in self.models:
            lines.append(
                f"{printable(model.label)}: dropping {model.drop_rate:g} is expected to add noise of "
                f"{model.expected_noise:.3g} times its delta, which is {model.total.relative_noise:.3g} of the weights"
            )
        return "\n".join(lines)

    def _stats(self, headings: list[str], rows: Iterable[DeltaStats]) -> str:
        return table([headings, *([printable(stats.name), *stats_cells(stats)] for stats in rows)])

    def _pairs(self) -> str:
        rows = [["models", "cosine", "both change", "signs conflict", "by magnitude"]]
        for pair in self.pairs:
            shares = (pair.share_both, pair.sign_conflict, pair.weighted_sign_conflict)
            names = " and ".join(printable(name) for name in pair.models)
            rows.append([names, f"{pair.cosine:.3f}", *(f"{share:.1%}" for share in shares)])
        if len(self.models) > 2:
            chance = f"any two (by chance: {1 - 2.0 ** (1 - len(self.models)):.1%})"
            rows.append([chance, "", "", f"{self.sign_conflict:.1%}", f"{self.weighted_sign_conflict:.1%}"])
        return f"{table(rows)}\n(signs conflict: of the parameters that both change; 50% is what chance gives a pair)"


STATS_HEADINGS: Final = (
    "parameters", "zero", "mean", "std", "largest", "p50", "p95", "p99", "above", "< 1%", "norm", "noise",
)  # fmt: skip


def stats_cells(stats: DeltaStats) -> list[str]:
    sizes = (stats.mean, stats.standard_deviation, stats.largest, stats.p50, stats.p95, stats.p99)
    return [
        f"{stats.parameters:,}",
        f"{stats.share_zero:.1%}",
        *(f"{size:.2g}" for size in sizes),
        f"{stats.share_above_threshold:.1%}",
        f"{stats.share_below_1_percent:.1%}",
        f"{stats.relative_norm:.2g}",
        f"{stats.relative_noise:.2g}",
    ]


class Measurement:
    """What jobs find in one tensor. Sums are added in the order of the jobs' places, so that they never differ."""

    def __init__(self, tensor: TensorPlan, findings: Findings) -> None:
        self.tensor, self.findings = tensor, findings
        self.jobs = -(-tensor.base.count // JOB_ELEMENTS)
        self.arrived: dict[int, NDArray[np.float64]] = {}
        self.counts = np.zeros((0, BINS), np.int64)  # made when a job arrives, and given up with the last
        self.peaks = np.zeros(len(tensor.finetuned))

    def add(self, job: Job, work: Workspace) -> None:
        models = len(self.tensor.finetuned)
        found = work.figures[: models + 2 + models * (models - 1) // 2].copy()
        counts = work.counts[:models].reshape(models, LANES, BINS).sum(1, dtype=np.int64)
        # Zeros pad the last tile, and stand in for the rows that a model lacks.
        for row, (_, info) in enumerate(self.tensor.finetuned):
            surplus = -(job.stop - job.start) % TILE + max(0, job.stop - max(info.count, job.start))
            found[row, ZEROS] -= surplus
            counts[row, 0] -= surplus
        self.counts = self.counts + counts if self.arrived else counts
        self.arrived[job.start] = found
        real = FORMATS[self.tensor.spec.real]
        self.peaks = np.maximum(self.peaks, work.words[:models, PEAK].astype(real.raw).view(real.real))
        if len(self.arrived) == self.jobs:
            self._conclude(np.sum([self.arrived[start] for start in sorted(self.arrived)], axis=0))
            self.counts, self.arrived = self.counts[:0].copy(), {}

    def _conclude(self, figures: NDArray[np.float64]) -> None:
        tensor, models = self.tensor, len(self.tensor.finetuned)
        if not np.isfinite(figures).all():
            raise DareError(
                f"the values of tensor {tensor.name!r} are so large that their squares are beyond the range of "
                f"{tensor.spec.real}",
                "no trained model has such values; a merge can be made without an analysis",
            )
        for row, (i, info) in enumerate(tensor.finetuned):
            zeros, above, size, squares = figures[row, : SQUARES + 1].tolist()
            deltas = Deltas(
                tensors=1,
                parameters=min(info.count, tensor.base.count),
                zeros=int(zeros),
                above=int(above),
                size=size,
                squares=squares,
                peak=float(self.peaks[row]),
                base_squares=float(figures[models, SQUARES]),
                noise_squares=squares * noise_of(tensor.settings, i) ** 2,
            )
            self.findings.take(i, tensor.name, deltas, self.counts[row])
        if models == 2:  # their pair says it all
            figures[models + 1] = figures[models + 2]
        if models > 1:
            self.findings.between[tensor.name] = [i for i, _ in tensor.finetuned], figures[models + 1 :].copy()


class Findings:
    """What an analysis has found so far."""

    def __init__(self, models: int) -> None:
        self.deltas: list[dict[str, Deltas]] = [{} for _ in range(models)]  # per model, by tensor
        self.stats: list[dict[str, DeltaStats]] = [{} for _ in range(models)]
        # By tensor: which models have it, and the figures of all of them together and of each pair.
        self.between: dict[str, tuple[list[int], NDArray[np.float64]]] = {}
        self._counts: list[dict[tuple[str, str], NDArray[np.int64]]] = [{} for _ in range(models)]

    def take(self, model: int, name: str, deltas: Deltas, counts: NDArray[np.int64]) -> None:
        """Counts by size are kept for groups of tensors only: there may be very many tensors."""
        self.deltas[model][name] = deltas
        self.stats[model][name] = deltas.stats(name, counts)
        for group in (("", ""), ("kind", kind_of(name)), ("layer", layer_of(name))):
            self._counts[model].setdefault(group, np.zeros(BINS, np.int64))
            self._counts[model][group] += counts

    def analysis(
        self, model: int, label: str, task: Inspection, adapter: bool, settings: TensorSettings
    ) -> ModelAnalysis:
        """What was found in one model. Sums are made in the order of the tensors."""
        deltas = {t.name: self.deltas[model][t.name] for t in task.looked_at if t.name in self.deltas[model]}
        counts = self._counts[model]
        groups: dict[tuple[str, str], list[Deltas]] = {}
        cells: dict[str, dict[str, list[Deltas]]] = {}
        for tensor, found in deltas.items():
            kind, layer = kind_of(tensor), layer_of(tensor)
            groups.setdefault(("kind", kind), []).append(found)
            groups.setdefault(("layer", layer), []).append(found)
            cells.setdefault(layer, {}).setdefault(kind, []).append(found)
        stats = {group: Deltas.of(parts).stats(group[1], counts[group]) for group, parts in groups.items()}
        layers = sorted(cells, key=lambda layer: ("embedding" not in cells[layer], *natural(layer)))
        total = Deltas.of(deltas.values())
        sizes = counts.get(("", ""), np.zeros(BINS, np.int64)).copy()
        sizes[0] -= total.zeros
        return ModelAnalysis(
            name=task.models[model],
            label=label,
            adapter=adapter,
            drop_rate=settings.drop_rates[model],
            expected_noise=noise_of(settings, model),
            total=total.stats(label, counts.get(("", ""), sizes)),
            kinds=tuple(stats["kind", kind] for kind in (*KINDS, OTHER_KIND) if ("kind", kind) in stats),
            layers=tuple(stats["layer", layer] for layer in layers),
            cells={layer: {kind: Deltas.of(parts).mean for kind, parts in cells[layer].items()} for layer in layers},
            histogram=tuple((bin_range(k)[0] if k else 0.0, int(n)) for k, n in enumerate(sizes) if n),
            tensors=tuple(self.stats[model][tensor] for tensor in deltas),
        )

    def compared(self, labels: Sequence[str], order: list[str]) -> tuple[list[PairAnalysis], float, float]:
        """Every pair of models, and how much any two of them conflict: plainly, and by magnitude."""
        count = len(labels)
        figures, shared, any_two = np.zeros((count, count, FIGURES)), np.zeros((count, count, 3)), np.zeros(FIGURES)
        for name in (name for name in order if name in self.between):
            numbers, found = self.between[name]
            pairs = [(i, k) for place, i in enumerate(numbers) for k in numbers[place + 1 :]]
            deltas = {i: self.deltas[i][name] for i in numbers}
            place = tuple(zip(*pairs, strict=True))
            figures[place] += found[1:]
            shared[place] += [(deltas[i].squares, deltas[k].squares, deltas[i].parameters) for i, k in pairs]
            any_two += found[0]
        pairs = [(i, k) for i in range(count) for k in range(i + 1, count)]
        return [pair_analysis((labels[i], labels[k]), figures[i, k], shared[i, k]) for i, k in pairs], *conflicts(
            any_two
        )


def pair_analysis(names: tuple[str, str], figures: NDArray[np.float64], shared: NDArray[np.float64]) -> PairAnalysis:
    """shared: of the tensors that both have, the squares of each one's delta, and the number of parameters."""
    first, second, parameters = shared.tolist()
    # A norm of 0 has no direction.
    cosine = figures[PRODUCT] / math.sqrt(first) / math.sqrt(second) if first and second else 0.0
    return PairAnalysis(names, float(cosine), float(figures[BOTH]) / max(parameters, 1), *conflicts(figures))


def conflicts(figures: NDArray[np.float64]) -> tuple[float, float]:
    """The share of the positions that are pulled in both directions, plain and by magnitude."""
    plain = figures[OPPOSED] / figures[BOTH] if figures[BOTH] else 0.0
    weighted = figures[OPPOSED_SIZE] / figures[BOTH_SIZE] if figures[BOTH_SIZE] else 0.0
    return float(plain), float(weighted)


def noise_of(settings: TensorSettings, model: int) -> float:
    """The expected distance of a thinned delta from the delta, relative to it: sqrt(p / (1 - p)) if rescaled."""
    kept, divisor = keep_rate(settings.drop_rates[model]), divisor_of(settings, model)
    return math.sqrt(kept * (1 / divisor - 1) ** 2 + 1 - kept)


@dataclass(frozen=True)
class Inspection(Task):
    """An analysis: one look at every tensor that a merge would change."""

    findings: Findings

    @property
    def bytes_to_read(self) -> int:
        return sum(tensor.bytes_read for tensor in self.looked_at)

    @cached_property
    def looked_at(self) -> list[TensorPlan]:
        return [tensor for tensor in self.computed if tensor.stages]

    def specs(self) -> set[KernelSpec]:
        merging = {tensor.spec for tensor in self.computed}
        return super().specs() - merging

    def surveys(self) -> Mapping[str, Surveyed]:
        return {tensor.name: Measurement(tensor, self.findings) for tensor in self.looked_at}

    def jobs(self) -> Iterator[Job]:
        return self._jobs(self.looked_at, (), 0)


class Adviser:
    """Draws conclusions from what an analysis found: each in a sentence, with the figure behind it."""

    def __init__(
        self, base: str, config: DareConfig, models: Sequence[ModelAnalysis], pairs: Sequence[PairAnalysis],
        vectors: Sequence[str], matrices: Sequence[str],
    ) -> None:  # fmt: skip
        """vectors: the changed tensors of one dimension; matrices: those of more."""
        self.base, self.config, self.models, self.pairs = base, config, models, pairs
        self.vectors, self.matrices = vectors, matrices
        self.embeddings = [name for name in matrices if kind_of(name) == "embedding"]
        self.doubts: list[str] = []
        self.threshold = max(config.delta_threshold, sys.float_info.min)
        self.rates = [self._rate(model) for model in models]
        self.method, self._why_method = self._choose_method()
        self.hot = self._hot_layers()

    def advice(self) -> Iterator[Advice]:
        for model in self.models:
            yield self._about_base(model)
        for model, (level, rate) in zip(self.models, self.rates, strict=True):
            if model.total.largest:
                yield self._about_rate(model, level, rate)
        yield from self._about_rules()
        yield Advice("method", self.method, None, self._why_method)
        yield from self._about_balance()

    def _about_base(self, model: ModelAnalysis) -> Advice:
        norm, figure = model.total.relative_norm, f"its delta is {model.total.relative_norm:.2%} of the weights by norm"
        if model.total.largest == 0:
            text = f"{model.label} is identical to the base: it only dilutes the others; leave it out"
            return Advice("base", "identical", model.label, text)
        if norm > UNRELATED_NORM:
            text = (
                f"{self.base} does not look like the base of {model.label}: {figure}, where unrelated models have 141% "
                "and fine-tunes a few; find the model that it was trained from"
            )
            return Advice("base", "wrong", model.label, text)
        if norm > RELATED_NORM:
            text = (
                f"{self.base} may not be the base of {model.label}: {figure}, more than fine-tuning changes as a rule; "
                "it was trained for very long, or from another version"
            )
            return Advice("base", "doubtful", model.label, text)
        return Advice("base", "right", model.label, f"the base of {model.label} is right, by all signs: {figure}")

    def _rate(self, model: ModelAnalysis) -> tuple[str, float]:
        """How large a model's deltas are, and the drop rate that goes with it."""
        threshold, total = self.threshold, model.total
        if 2 / 3 < total.mean / threshold < 3 / 2 or 2 / 3 < total.share_above_threshold / TAIL_SHARE < 3 / 2:
            self.doubts.append(f"the deltas of {model.label} are close to where the advice changes")
        if total.mean > HUGE_RATIO * threshold:
            level = "huge"
        elif total.mean > threshold:
            level = "large"
        else:
            level = "tailed" if total.share_above_threshold > TAIL_SHARE else "small"
        return level, DROP_RATES[level][model.adapter]

    def _about_rate(self, model: ModelAnalysis, level: str, rate: float) -> Advice:
        threshold, total = self.threshold, model.total
        mean, above = (
            f"the mean |delta| is {total.mean:.2g}",
            f"{total.share_above_threshold:.1%} are above {threshold:g}",
        )
        reason = {
            "small": f"{mean} and {above}: dropping bears it well",
            "tailed": f"{mean}, which dropping bears, but {above}",
            "large": f"{mean}, and {above}: what was learned is in many entries, and dropping more would lose it",
            "huge": f"{mean}, {total.mean / threshold:.3g} times what dropping bears ({threshold:g}): average instead",
        }[level]
        what = "a LoRA adapter, which has less to spare: " if model.adapter and rate else ""
        return Advice("drop_rate", level, model.label, f"drop {rate:g} of {model.label}: {what}{reason}")

    def _about_rules(self) -> Iterator[Advice]:
        dropping = any(rate for _, rate in self.rates)
        if self.vectors and dropping:
            text = (
                f"drop nothing of norms and biases: they are {counted(len(self.vectors), 'tensor')} of one dimension, "
                "with too few values for what is dropped to average out"
            )
            yield Advice("rules", "vectors", None, text)
        if self.embeddings and dropping:
            zero, label = max((self._embedding_zeros(model), model.label) for model in self.models)
            rest = f"; {zero:.1%} of those of {label} are unchanged, so that the rest carries it all" if zero else ""
            count = counted(len(self.embeddings), "tensor")
            text = f"drop less of the embeddings ({count}): a token's row is all that the model knows of it{rest}"
            yield Advice("rules", "embeddings", None, text)
        if self.hot and dropping:
            worst = max(self.hot, key=lambda layer: self.hot[layer])
            text = (
                f"drop less of {listed(list(self.hot))}: the mean |delta| there is up to {self.hot[worst]:.2g}, above "
                f"{self.threshold:g}, unlike elsewhere"
            )
            yield Advice("rules", "layers", None, text)

    def _embedding_zeros(self, model: ModelAnalysis) -> float:
        return next((stats.share_zero for stats in model.kinds if stats.name == "embedding"), 0.0)

    def _hot_layers(self) -> dict[str, float]:
        """The layers in which some model's deltas are large, though they are not on the whole."""
        found: dict[str, float] = {}
        for model, (level, _) in zip(self.models, self.rates, strict=True):
            for stats in model.layers if level in ("small", "tailed") else ():
                matrices = stats.parameters > stats.tensors * 100_000 or stats.parameters * 20 > model.total.parameters
                if stats.mean > self.threshold and matrices:
                    found[stats.name] = max(found.get(stats.name, 0.0), stats.mean)
        return found if len(found) <= HOT_LAYERS else {}

    def _choose_method(self) -> tuple[str, str]:
        count, cosine = len(self.models), min((pair.cosine for pair in self.pairs), default=1.0)
        # Of the pairs: that some two of many models differ at a position is likely by chance alone.
        conflict = max((pair.weighted_sign_conflict for pair in self.pairs), default=0.0)
        most = "up to " if count > 2 else ""
        adds = TIES_ADDS if any(rate for _, rate in self.rates) else ""
        figure = f"signs conflict in {most}{conflict:.1%} of what both change, by magnitude; cosine {cosine:.2f}"
        if count == 1:
            return "linear", "method linear: there is one model, so there is nothing to reconcile"
        if count > 2 and CONFLICTING * 0.8 < conflict < CONFLICTING * 1.25:
            self.doubts.append("the share of conflicting signs is close to where the advice changes")
        if cosine < OPPOSED_COSINE:
            return "ties", f"method ties: the models pull against one another ({figure}), and cancel{adds}"
        if count == 2:
            return "linear", f"method linear: of two models that do not oppose one another ({figure}), both can be kept"
        if conflict >= CONFLICTING:
            return "ties", f"method ties: {count} models that go in different directions ({figure}){adds}"
        return "linear", f"method linear: {count} models that mostly agree ({figure})"

    def _about_balance(self) -> Iterator[Advice]:
        norms = [(model.total.relative_norm, model.label) for model in self.models if model.total.relative_norm]
        (least, small), (most, large) = min(norms, default=(0.0, "")), max(norms, default=(0.0, ""))
        if most > 3 * least:
            text = (
                f"mind the balance: the delta of {large} is {most / least:.1f} times that of {small}; weights can even "
                "it out"
            )
            yield Advice("balance", "uneven", None, text)

    def confidence(self, parameters: int) -> str:
        doubts = list(self.doubts)
        if any(model.total.relative_norm > RELATED_NORM for model in self.models):
            doubts.insert(0, "a base is in doubt, and with it all the rest")
        if parameters < SMALL_MODEL:
            doubts.append(
                f"these rules come from models of billions of parameters, and smaller ones ({parameters:,}) bear less "
                "dropping"
            )
        if not doubts:
            return "How sure: fairly, no figure is near a limit; but only an evaluation can tell (examples/sweep.py)."
        return f"How sure: not very, because {', and '.join(doubts)}. Let an evaluation decide (examples/sweep.py)."

    def suggestion(self) -> str:
        """A [dare] table and its rules, as TOML: what is advised, and what the user has set besides."""
        import tomli_w

        rates = [rate for _, rate in self.rates]
        kept = {key: getattr(self.config, key) for key in KEPT_SETTINGS} | {"weights": self._kept_weights()}
        kept |= {"keep_ratio": self.config.keep_ratio if self.method == "ties" else None}
        plain = {key: value for key, value in kept.items() if value != getattr(DareConfig, key)}
        rules = [("as set before", self._kept_rule(rule)) for rule in self.config.checked_rules]
        rules = [(what, rule) for what, rule in rules if len(rule) > 1]
        if any(rates):
            lower, embeddings = [round(max(0.0, rate - EMBEDDING_RATE), 2) for rate in rates], set(self.embeddings)
            advised = (
                ("norms and biases", patterns_of(self.vectors, self.matrices), [0.0]),
                ("embeddings", patterns_of(self.embeddings, [n for n in self.matrices if n not in embeddings]), lower),
                (
                    "layers with large deltas",
                    [
                        p
                        for layer in self.hot
                        for p in (f"{escaped(layer)}.*", *([escaped(layer)] * (layer in self.matrices)))
                    ],
                    [min(0.5, r) for r in rates],
                ),
            )
            rules += [(what, {"match": match, "drop_rate": one_or_all(each)}) for what, match, each in advised if match]
        text = tomli_w.dumps({"dare": {"method": self.method, "drop_rate": one_or_all(rates), **plain}})
        for what, table in rules:
            text += f"\n[[rules]]  # {what}\n{tomli_w.dumps(table)}"
        return text

    def _kept_weights(self) -> list[float] | None:
        """The user's weights, as far as they mean the same to the method: to ties they are shares."""
        weights = list(self.config.weights or ())
        if not any(weights) or (self.method == "ties" and min(weights) < 0):
            return None
        if self.method == "linear" and self.config.method == "ties":
            return [weight / math.fsum(weights) for weight in weights]
        return weights

    def _kept_rule(self, rule: Rule) -> dict[str, Any]:
        """What of a user's rule still means something: a q belongs to the drop rate that it was found for."""
        wanted = ("match", "drop_rate", "lambda_coeff", *(("keep_ratio",) if self.method == "ties" else ()))
        return {key: value for key, value in rule.as_table().items() if key in wanted}


KEPT_SETTINGS: Final = ("seed", "lambda_coeff", "rescale", "dtype", "mismatch", "max_shard_size", "delta_threshold")


def one_or_all(values: list[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else values


def patterns_of(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Patterns for some tensors and no others: their names, with a star for each number where that suits no other."""
    starred = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", escaped(name)) for name in names}
    changed = {pattern for name, pattern in starred.items() if pattern != escaped(name)}
    wide = {pattern for pattern in changed if fnmatch.filter(others, pattern)}
    return list(dict.fromkeys(escaped(name) if pattern in wide else pattern for name, pattern in starred.items()))


def escaped(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)


def analysis_report(
    task: Inspection, adapters: Sequence[bool], warnings: tuple[str, ...], seconds: float
) -> AnalysisReport:
    found, config, count = task.findings, task.config, len(task.models)
    order = [tensor.name for tensor in task.looked_at]
    general = config.general(count)
    base, *labels = short_names([task.base, *task.models])
    models = tuple(found.analysis(i, label, task, adapters[i], general) for i, label in enumerate(labels))
    pairs, plain, weighted = found.compared(labels, order)
    changed = {name for deltas in found.deltas for name, these in deltas.items() if these.peak}
    vectors = [t.name for t in task.looked_at if t.name in changed and len(t.base.shape) < 2]
    matrices = [t.name for t in task.looked_at if t.name in changed and len(t.base.shape) > 1]
    adviser = Adviser(base, config, models, pairs, vectors, matrices)
    parameters = sum(tensor.base.count for tensor in task.tensors if tensor.merged)
    return AnalysisReport(
        base=task.base,
        parameters=parameters,
        copied_tensors=sum(not tensor.merged for tensor in task.tensors),
        delta_threshold=config.delta_threshold,
        models=models,
        pairs=tuple(pairs),
        sign_conflict=plain,
        weighted_sign_conflict=weighted,
        advice=tuple(adviser.advice()),
        confidence=adviser.confidence(parameters),
        suggestion=adviser.suggestion(),
        bytes_read=task.bytes_to_read,
        seconds=seconds,
        warnings=warnings,
    )


# Colours that colour-blind people can tell apart (Okabe and Ito, 2008); lines differ in style, too, for print.
PLOT_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PLOT_LINES: Final = ("-", "--", "-.", ":")
PLOTTED: Final = 6  # models; more would not be readable
SHOWN_IN_PLOTS: Final = 24  # characters of a name
PLOT_SUFFIXES: Final = (".png", ".svg", ".pdf")


def load_pyplot(path: Path) -> Any:
    """matplotlib, for a picture at this path; to be called before any work is done for it."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(
            f"a plot cannot be written to {str(path)!r}", f"its name should end in {', '.join(PLOT_SUFFIXES)}"
        )
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no directory for {str(path)!r}", "make it first")
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError(
            "plots need matplotlib", "install it: uv sync --extra plot, or pip install matplotlib"
        ) from None
    matplotlib.use("Agg")  # which needs no display
    return importlib.import_module("matplotlib.pyplot")


def plot_analysis(report: AnalysisReport, path: str | Path) -> None:
    """A picture of an analysis: |delta| by size, where in the models it is, and how the models' signs conflict."""
    pyplot = load_pyplot(Path(path))
    models = [drawable(model) for model in report.models[:PLOTTED]]
    heights = [3.2, *(0.7 + 0.27 * len(model.kinds) for model in models)]
    figure = pyplot.figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    grid = figure.add_gridspec(len(heights), 3, height_ratios=heights)
    with_pairs = len(models) > 1
    _plot_sizes(figure.add_subplot(grid[0, : 2 if with_pairs else 3]), report, models)
    if with_pairs:
        _plot_conflicts(figure, figure.add_subplot(grid[0, 2]), report, models)
    means = [mean for model in models for kinds in model.cells.values() for mean in kinds.values() if mean]
    high = max(means, default=1.0)
    # No wider than a factor of 1000, nor so narrow that small differences look large.
    limits = (min(high / 10, max(high / 1000, min(means, default=1.0))), high)
    axes = [figure.add_subplot(grid[1 + k, :]) for k in range(len(models))]
    for axis, model in zip(axes, models, strict=True):
        image = _plot_cells(axis, model, limits)
    figure.colorbar(image, ax=axes, label="mean |delta|", pad=0.01)
    more = f" (the first {PLOTTED} of {len(report.models)} models)" if len(report.models) > PLOTTED else ""
    figure.suptitle(f"What was fine-tuned: {report.parameters:,} parameters{more}")
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "choose another place for the plot") from None
    finally:
        pyplot.close(figure)


def drawable(model: ModelAnalysis) -> ModelAnalysis:
    """With a label that is shown as it is: not taken for a formula, nor left out, nor too long."""
    label = clipped(model.label, SHOWN_IN_PLOTS).replace("$", r"\$")
    return dataclasses.replace(model, label=f" {label}" if label.startswith("_") else label)


def _plot_sizes(axis: Any, report: AnalysisReport, models: Sequence[ModelAnalysis]) -> None:
    """Shares of the parameters by |delta|, on a log scale, by doublings: finer steps show how floats are stored."""
    for k, model in enumerate(models):
        shares: dict[int, float] = {}
        for low, count in model.histogram:
            # The first bin is one of its own; then every 16 begin at a power of two.
            place = -(-bin_of(low) // BINS_PER_OCTAVE)
            shares[place] = shares.get(place, 0.0) + 100 * count / max(model.total.parameters, 1)
        seen = [place for place, share in shares.items() if share > 0.02] or [1]
        places = range(min(seen) - 1, max(seen) + 2)
        edges = [bin_range(max(place - 1, 0) * BINS_PER_OCTAVE + 1)[0] for place in places]
        label = f"{model.label} ({model.total.share_zero:.0%} unchanged)"
        style = {"color": PLOT_COLOURS[k], "linestyle": PLOT_LINES[k % len(PLOT_LINES)], "linewidth": 1.8}
        axis.step(edges, [shares.get(place, 0.0) for place in places], where="post", label=label, **style)
    axis.axvline(report.delta_threshold, color="black", linestyle=":", label=f"threshold {report.delta_threshold:g}")
    axis.set(xscale="log", xlabel="|delta|", ylabel="% of the parameters", title="How large the changes are")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left", fontsize=9)


def _plot_conflicts(figure: Any, axis: Any, report: AnalysisReport, models: Sequence[ModelAnalysis]) -> None:
    labels = [model.label for model in models]
    shares = np.full((len(models), len(models)), np.nan)
    pairs = iter(report.pairs)
    for i in range(len(report.models)):
        for k, pair in zip(range(i + 1, len(report.models)), pairs, strict=False):
            if k < len(models):
                shares[i, k] = shares[k, i] = 100 * pair.weighted_sign_conflict
    image = axis.imshow(shares, cmap="cividis", vmin=0, vmax=100)
    for i, k in zip(*np.nonzero(~np.isnan(shares)), strict=True):
        axis.text(
            k, i, f"{shares[i, k]:.0f}%", ha="center", va="center", color="white" if shares[i, k] < 60 else "black"
        )
    places = range(len(models))
    axis.set_xticks(places, labels, rotation=30, ha="right", fontsize=9)
    axis.set_yticks(places, labels, fontsize=9)
    axis.set_title("Where both change,\nsigns conflict (by magnitude)")
    figure.colorbar(image, ax=axis, label="% (chance: 50)", shrink=0.8)


def _plot_cells(axis: Any, model: ModelAnalysis, limits: tuple[float, float]) -> Any:
    """Mean |delta| by layer and kind; what the model does not have, or did not change, is left white."""
    layers = list(model.cells) or ["nothing"]
    kinds = [stats.name for stats in model.kinds] or [OTHER_KIND]
    means = np.array([[model.cells.get(layer, {}).get(kind) or np.nan for layer in layers] for kind in kinds])
    scale = importlib.import_module("matplotlib.colors").LogNorm(*limits)
    image = axis.imshow(means, cmap="cividis", norm=scale, aspect="auto", interpolation="nearest")
    names = [clipped(layer.rpartition(".")[2], SHOWN_IN_PLOTS).replace("$", r"\$") for layer in layers]
    every = -(-len(layers) // 32)
    leaning = {} if max(map(len, names)) < 4 else {"rotation": 30, "ha": "right"}
    axis.set_xticks(range(0, len(layers), every), names[::every], fontsize=8, **leaning)
    if len(layers) <= 12:
        for (row, column), mean in np.ndenumerate(means):
            dark = scale(mean) < 0.6
            if mean > 0:
                axis.text(column, row, f"{mean:.2g}", ha="center", va="center", color="white" if dark else "black")
    axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axis.set_title(f"Where {model.label} changed", fontsize=10)
    return image


# ---------------------------------------------------------------------------------------------------------------------
# The merger
# ---------------------------------------------------------------------------------------------------------------------


class DareMerger:
    """Merges models fine-tuned from one base: DareMerger(base, [first, second], config).merge(output)."""

    def __init__(
        self,
        base_file: str | Path | Source,
        merge_files: Sequence[str | Path | Source],
        config: DareConfig | None = None,
        *,
        tokenizer_from: str | Path | Source | None = None,
        fingerprints: Sequence[dict[str, Any]] = (),
    ) -> None:
        """A model is a file, a model directory, an index, a name on the Hub or, to be merged, a LoRA adapter.

        tokenizer_from: the model whose tokenizer an output directory gets, instead of the base's.
        fingerprints: what a recipe says of its inputs, base first; other files are then refused.
        """
        if isinstance(merge_files, str | Path):
            raise ConfigError("merge_files must be a list of files, not a single path", "put it in brackets")
        if not merge_files:
            raise ConfigError("there are no models to merge", "name at least one fine-tuned model")
        self.base = Source.of(base_file)
        self.models = tuple(Source.of(file) for file in merge_files)
        self.tokenizer_from = None if tokenizer_from is None else Source.of(tokenizer_from)
        if config is not None and not isinstance(config, DareConfig):
            raise ConfigError("config must be a DareConfig", "like DareConfig(drop_rate=0.9)")
        self.config = config or DareConfig()
        self.config.check_models(len(self.models))
        self.fingerprints = tuple(fingerprints)
        self.version = __version__  # that recipes name

    def analyze(self) -> AnalysisReport:
        """Look at every delta once, and say what the models are like and how they might be merged; write nothing."""
        started = time.perf_counter()
        with self._opened() as (base, models), held_interrupts() as let_interrupts_through:
            task, warnings = self._inspection(base, models)
            worker = waited_for(lambda: Worker(task, base, models), let_interrupts_through)
            with progress("analyzing", task.bytes_to_read, self.config.verbose) as advance:
                spaces = [Workspace(task) for _ in range(task.threads)]
                run_jobs(
                    task.jobs(), worker, spaces, Nowhere(), lambda o: advance(o.bytes_read), let_interrupts_through
                )
            for checkpoint in (base, *models):
                checkpoint.check_unchanged()
        for warning in warnings:
            LOG.warning(warning)
        return analysis_report(task, [model.adapter for model in models], warnings, time.perf_counter() - started)

    def _inspection(self, base: Checkpoint, models: list[Checkpoint]) -> tuple[Inspection, tuple[str, ...]]:
        """What an analysis has to do, and what it warns of before it begins."""
        self._check_inputs(base, models)
        planner = TensorPlanner(self.config, base, models)
        tensors = tuple(dataclasses.replace(tensor, method="analyze") for tensor in planner.tensors())
        most = sum(-(-tensor.base.count // JOB_ELEMENTS) for tensor in tensors)
        threads = max(1, min(self.config.threads or usable_cores(), most))
        names = tuple(model.name for model in models)
        task = Inspection(base.name, names, self.config, tensors, (), threads, Findings(len(models)))
        missing = tuple(planner.missing(i) for i in range(len(models)))
        extra = tuple((*(n for n in m.tensors if n not in base.tensors), *m.extra) for m in models)
        return task, (*_odd_inputs(base, models), *_odd_names(models, missing, extra), *planner.warnings)

    def plan(self, output_file: str | Path, *, force: bool = False, estimate: bool = False) -> Plan:
        """Check everything and say what merge would do; write nothing.

        estimate: also try some of the jobs, for half a second, to say how long all of them will take.
        """
        destination = find_output(Source.of(output_file).path)
        with self._opened() as (base, models):
            plan = self._plan_new(base, models, destination, force)
            plan = dataclasses.replace(plan, replaces=replaced(destination, force))
            if not estimate:
                return plan
            with held_interrupts() as let_interrupts_through:
                worker = waited_for(lambda: Worker(plan, base, models), let_interrupts_through)
                return dataclasses.replace(plan, estimate=estimated(plan, worker, let_interrupts_through))

    def merge(self, output_file: str | Path, *, force: bool = False, resume: bool = False) -> MergeReport:
        """Merge into a file (if its name ends in .safetensors) or a model directory, and say what was done.

        force replaces an existing output that this tool did not make. resume continues an unfinished merge, and leaves
        one behind that can be continued if it is itself interrupted.
        """
        started = time.perf_counter()
        destination = find_output(Source.of(output_file).path)
        with self._opened() as (base, models):
            plan = self._plan_new(base, models, destination, force)
            try:
                ledger = self._run(plan, base, models, force, resume)
            except OSError as error:
                raise DareError(
                    f"cannot write {str(output_file)!r}: {error.strerror or error}",
                    "what was there before is unchanged; mend that and "
                    + (f"run again: what is done is in {plan.output.partial}" if resume else "retry"),
                ) from None
        warnings = (*plan.warnings, *findings(plan, ledger))
        for warning in warnings:
            LOG.warning(warning)
        return MergeReport(
            output=str(output_file),
            method=self.config.method,
            lambda_coeff=float(self.config.lambda_coeff),
            files=tuple(file.name for file in plan.files),
            side_files=tuple(plan.side),
            tensors=len(plan.tensors),
            copied_tensors=sum(not tensor.merged for tensor in plan.tensors),
            bytes_read=plan.bytes_to_read,
            bytes_written=plan.size,
            seconds=time.perf_counter() - started,
            delta_threshold=self.config.delta_threshold,
            models=tuple(model_report(plan, i, ledger.total(i)) for i in range(len(models))),
            warnings=warnings,
        )

    def verify(self, output_file: str | Path, *, moved: bool = False) -> VerifyReport:
        """Make an output again, without writing, and compare: the first difference is raised as an error.

        moved: the inputs are no longer where they were, so the paths in a directory's recipe are not compared.
        """
        started = time.perf_counter()
        path = Path(os.path.expanduser(output_file)).resolve()
        with self._opened() as (base, models), held_interrupts() as let_interrupts_through:
            tokenizer = self._tokenizer()
            plan = self._plan(base, models, Destination(str(output_file), path, path.is_dir()), tokenizer)
            worker = waited_for(lambda: Worker(plan, base, models), let_interrupts_through)
            comparison = Comparison(plan, str(output_file))
            try:
                comparison.check_side_files(moved)
                with progress("verifying", plan.bytes_to_read, self.config.verbose) as advance:
                    spaces = [Workspace(plan) for _ in range(plan.threads)]
                    for jobs in plan.rounds():
                        run_jobs(
                            jobs, worker, spaces, comparison, lambda o: advance(o.bytes_read), let_interrupts_through
                        )
            finally:
                comparison.close()
        return VerifyReport(str(output_file), len(plan.tensors), plan.size, time.perf_counter() - started)

    @contextmanager
    def _opened(self) -> Iterator[tuple[Checkpoint, list[Checkpoint]]]:
        opened: list[Checkpoint] = []
        load_numpy()
        try:
            for source in (self.base, *self.models):
                opened.append(open_model(fetched(source), opened[0] if opened else None))
            yield opened[0], opened[1:]
        except OSError as error:  # of what lies around the weights; the weights' own errors are told where they arise
            where = f" {as_text(error.filename)!r}" if isinstance(error.filename, str) else ""
            raise DareError(f"cannot read{where}: {error.strerror or error}", "check its permissions") from None
        except RecursionError:
            raise DareError("something in the models' directories is nested too deeply", "remove it") from None
        finally:
            for checkpoint in opened:
                checkpoint.close()

    def _plan_new(self, base: Checkpoint, models: list[Checkpoint], destination: Destination, force: bool) -> Plan:
        """A plan for an output that may be written, on a disk that has room for it."""
        tokenizer = self._tokenizer()
        inputs = [(c.name, path) for c in (base, *models) for path in (c.folder, *(f.path for f in c.files)) if path]
        inputs += [(tokenizer.name, tokenizer.path)] if tokenizer else []
        check_output(destination, inputs, force)
        plan = self._plan(base, models, destination, tokenizer)
        begun = [destination.partial / name for name in files_in(destination.partial)]
        held = sum(getattr(path.lstat(), "st_blocks", 0) * 512 for path in begun)  # which is used again, or removed
        free = shutil.disk_usage(plan.output.path.parent).free + held
        if plan.size > free:
            raise DareError(
                f"the output needs {human(plan.size)} and {str(plan.output.path.parent)!r} has {human(free)} free",
                "make room, or write to another disk",
            )
        return dataclasses.replace(plan, free=free, unfinished=bool(begun))

    def _tokenizer(self) -> Source | None:
        """The directory that the tokenizer is to come from."""
        if self.tokenizer_from is None:
            return None
        source = fetched(self.tokenizer_from, TOKENIZER_PATTERNS)
        if os.path.isfile(source.path):
            source = dataclasses.replace(source, path=source.path.parent)
        if not os.path.isdir(source.path):
            raise DareError(f"there is no file or directory {source.name!r}", _where(source))
        return source

    def _plan(
        self, base: Checkpoint, models: list[Checkpoint], destination: Destination, tokenizer: Source | None
    ) -> Plan:
        inputs = [base, *models]
        self._check_inputs(base, models)
        planner = TensorPlanner(self.config, base, models)
        limit = parse_size(self.config.max_shard_size) if destination.directory else sys.maxsize
        recipe = self._recipe(inputs)
        tensors, files = laid_out(planner.tensors(), limit, recipe_metadata(recipe))
        if not destination.directory:
            files = [dataclasses.replace(files[0], name=destination.path.name)]
        side = self._side_files(inputs, destination, tensors, files, tokenizer)
        missing = tuple(planner.missing(i) for i in range(len(models)))
        extra = tuple((*(n for n in m.tensors if n not in base.tensors), *m.extra) for m in models)
        # More threads than jobs would only take memory.
        most = sum(-(-max(t.base.count, t.base.nbytes * (not t.merged)) // JOB_ELEMENTS) for t in tensors)
        return Plan(
            output=destination,
            base=base.name,
            models=tuple(model.name for model in models),
            config=self.config,
            tensors=tuple(tensors),
            recipe=recipe,
            files=tuple(files),
            side=side,
            digests={name: digest_of(content) for name, content in side.items() if isinstance(content, Path)},
            threads=max(1, min(self.config.threads or usable_cores(), most)),
            missing=missing,
            extra=extra,
            mismatched=tuple(tuple(shapes) for shapes in planner.mismatched),
            warnings=(
                *_odd_inputs(base, models),
                *_odd_names(models, missing, extra),
                *self._odd_settings(base),
                *planner.warnings,
                *_odd_directory(base, destination, planner, tokenizer),
            ),
            inputs=tuple(map(PlannedInput.of, inputs)),
        )

    def _side_files(
        self,
        inputs: list[Checkpoint],
        destination: Destination,
        tensors: Sequence[TensorPlan],
        files: Sequence[PlannedFile],
        tokenizer: Source | None,
    ) -> dict[str, bytes | Path]:
        """What a model directory has besides its tensors."""
        if not destination.directory:
            if tokenizer is not None:
                raise ConfigError(
                    "tokenizer_from means nothing to an output of one file", "name a directory, or leave it out"
                )
            return {}
        base = inputs[0]
        side: dict[str, bytes | Path] = dict(side_files(base.folder))
        if tokenizer is not None:
            side = {name: path for name, path in side.items() if not TOKENIZER_FILES.fullmatch(name)}
            side |= tokenizer_files(tokenizer)
        config = side.get(CONFIG_FILE)
        if isinstance(config, Path):
            table = read_json(config, part_name(base.source, config))
            if self.config.dtype and any(tensor.output.dtype != tensor.base.dtype for tensor in tensors):
                try:
                    side[CONFIG_FILE] = updated_config(table, self.config.dtype)
                except RecursionError:
                    raise DareError(f"{part_name(base.source, config)!r} is nested too deeply", "mend it") from None
        if len(files) > 1:
            side[INDEX_FILE] = index_bytes(tensors, files)
        side[CARD_FILE] = model_card(self.config, inputs, self._recipe(inputs)).encode()
        written = {as_text(name): digest_of(content) for name, content in side.items()}
        written |= {file.name: hashlib.sha256(file.header).hexdigest() for file in files}
        recipe = self._recipe(inputs, destination.path, dict(sorted(written.items())), tokenizer).encode()
        side[RECIPE_FILE] = recipe + f"{RECIPE_SEAL}{digest_of(recipe)}\n".encode()
        return dict(sorted(side.items()))

    def _odd_settings(self, base: Checkpoint) -> Iterator[str]:
        used = [
            next((k for k, rule in enumerate(self.config.checked_rules) if rule.matches(n)), None) for n in base.tensors
        ]
        for k, rule in enumerate(self.config.checked_rules):
            if k not in used:
                shadowed = any(rule.matches(name) for name in base.tensors)
                why = "matches only tensors that an earlier rule takes" if shadowed else "matches no tensor"
                yield f"rule {k + 1} ({listed(rule.match)}) {why}"
        highest = max(rate for n in base.tensors for rate in self.config.for_tensor(n, len(self.models)).drop_rates)
        if not self.config.rescale and highest > 0:
            yield (
                f"rescale is off: with {highest:g} of a delta dropped, what is left is "
                f"{1 / keep_rate(highest):.3g} times too weak"
            )

    def _check_inputs(self, base: Checkpoint, models: list[Checkpoint]) -> None:
        self._check_fingerprints([base, *models])
        for model in models:
            if not model.tensors.keys() & base.tensors.keys():
                raise DareError(
                    f"{model.name!r} has no tensor in common with {base.name!r}",
                    f"the base has {listed(list(base.tensors)) or 'none'}, and it "
                    f"{listed(list(model.tensors)) or 'none'}",
                )

    def _check_fingerprints(self, inputs: list[Checkpoint]) -> None:
        for checkpoint, entry in zip(inputs, self.fingerprints, strict=False):
            for key, value in checkpoint.fingerprint.items():
                if entry.get(key, value) != value:
                    raise DareError(
                        f"{checkpoint.name!r} is not the file that the recipe was made with: its {key} is {value}, "
                        f"not {entry[key]}",
                        "find that file, or take the [recipe] table out to merge this one",
                    )

    def _recipe(
        self,
        inputs: list[Checkpoint],
        place: Path | None = None,
        files: Mapping[str, str] | None = None,
        tokenizer: Source | None = None,
    ) -> str:
        """Every setting that determines the tensors, and nothing else, as a configuration that makes them again.

        For a file at a place on disk, with paths that lead from there to the models, and what determines the other
        files of a directory.
        """
        import tomli_w

        names = [path_from(checkpoint.source, place) for checkpoint in inputs]
        dare, models = self.config.resolved(), {"base_file": names[0], "merge_files": names[1:]}
        recipe: dict[str, Any] = {
            "version": self.version,
            "mask": MASK_NAME,
            "seeds": [self.config.seed + i for i in range(len(self.models))],
            "inputs": [{"file": c.source.pinned or c.name, **c.fingerprint} for c in inputs],
        }
        if place is not None:
            dare["max_shard_size"] = self.config.max_shard_size
            models |= {"tokenizer_from": path_from(tokenizer, place)} if tokenizer else {}
            recipe["files"] = dict(files or {})
        rules = [rule.as_table() for rule in self.config.checked_rules]
        text = tomli_w.dumps({"dare": dare, "models": models, **({"rules": rules} if rules else {}), "recipe": recipe})
        if len(text.encode()) > MAX_TOML - 200:  # with its seal
            raise ConfigError(
                f"the recipe would be longer than {MAX_TOML:,} bytes, and could not be read again",
                "give fewer rules, or larger shards",
            )
        return text

    def _run(self, plan: Plan, base: Checkpoint, models: list[Checkpoint], force: bool, resume: bool) -> Ledger:
        ledger = Ledger(len(models))
        with held_interrupts() as let_interrupts_through:
            # Compiled first: so long as nothing is written, there is nothing to tidy up.
            worker = waited_for(lambda: Worker(plan, base, models), let_interrupts_through)
            output = Output(plan.output, plan.files, plan.identity([base, *models]), resume)
            keep = False
            try:
                self._work(plan, worker, output, ledger, let_interrupts_through)
                for name, content in plan.side.items():
                    let_interrupts_through()
                    output.write_file(name, content)
                for checkpoint in (base, *models):
                    checkpoint.check_unchanged()
                for name, digest in plan.digests.items():
                    if digest_of(output.made / name) != digest:
                        raise DareError(f"{name!r} changed while it was merged", "leave inputs alone; merge again")
                output.commit(force)
            except BaseException as error:
                keep = resume and not isinstance(error, InputChanged)
                raise
            finally:
                output.discard(keep)
        return ledger

    def _work(
        self,
        plan: Plan,
        worker: Worker,
        output: Output,
        ledger: Ledger,
        let_interrupts_through: Callable[[], None],
    ) -> None:
        """Run all jobs that are not done yet."""
        with progress("merging", plan.bytes_to_read, self.config.verbose) as advance:
            earlier = [Outcome.of_entry(entry) for entry in output.done]
            for outcome in earlier:
                ledger.add(outcome)
                advance(outcome.bytes_read)
            if earlier:
                LOG.info(
                    "continuing: %s of %s are done",
                    human(sum(o.bytes_read for o in earlier)),
                    human(plan.bytes_to_read),
                )

            def done(outcome: Outcome) -> None:
                advance(outcome.bytes_read)
                if not outcome.looked:
                    ledger.add(outcome)
                    output.note(outcome.as_entry())

            spaces = [Workspace(plan) for _ in range(plan.threads)]
            for jobs in plan.rounds({(outcome.tensor, outcome.start) for outcome in earlier}):
                run_jobs(jobs, worker, spaces, output, done, let_interrupts_through)


def findings(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """What a person should know about each model, in a sentence or two at most."""
    for i, name in enumerate(plan.models):
        if ledger.differing[i]:
            names = sorted(ledger.differing[i])
            yield f"{name} differs from the base in tensors that are copied, not merged: {listed(names)}"
        yield from delta_findings(plan, name, ledger.tallies[i], ledger.total(i))


def delta_findings(plan: Plan, name: str, tallies: dict[str, Tally], total: Tally) -> Iterator[str]:
    threshold = plan.config.delta_threshold
    large = sorted(((tally.mean, tensor) for tensor, tally in tallies.items() if tally.mean > threshold), reverse=True)
    if total.parameters and total.peak == 0:
        yield f"{name} is identical to the base {plan.base}: it only dilutes the others; leave it out"
    elif total.sum > UNRELATED_RATIO * total.base_sum:
        yield (
            f"{plan.base} does not look like the base of {name}: the mean |delta| is {total.mean:.3g} where the mean "
            f"|weight| is {total.base_sum / total.parameters:.3g}; check that {name} was fine-tuned from it"
        )
    elif large:
        worst = ", ".join(f"{tensor!r} ({mean:.3g})" for mean, tensor in large[:LISTED])
        yield (
            f"{name} has large deltas: the mean |delta| exceeds {threshold:g} in {len(large):,} of {len(tallies):,} "
            f"tensors, and {total.above / total.parameters:.1%} of its parameters do; worst: {worst}. DARE may lose "
            "what it learned: lower the drop rate, and check that the base is the right one"
        )


def model_report(plan: Plan, i: int, total: Tally) -> ModelReport:
    count, rate = max(total.parameters, 1), plan.config.general(len(plan.models)).drop_rates[i]
    return ModelReport(
        name=plan.models[i],
        seed=plan.config.seed + i,
        parameters=total.parameters,
        drop_rate=rate,
        honoured_drop_rate=1 - total.expected / total.parameters if total.parameters else rate,
        dropped_share=(total.parameters - total.kept) / count,
        mean_delta=total.mean,
        largest_delta=total.peak,
        share_above_threshold=total.above / count,
        missing_tensors=plan.missing[i],
        extra_tensors=plan.extra[i],
        mismatched_tensors=plan.mismatched[i],
    )


def _odd_inputs(base: Checkpoint, models: list[Checkpoint]) -> Iterator[str]:
    for i, model in enumerate(models):
        if same_files(model, base):
            yield f"{model.name} is the base itself, given as a model to merge"
        if any(same_files(model, earlier) for earlier in models[:i]):
            yield f"{model.name} is given more than once; each time gets its own mask and counts fully"
        for key in CONFIG_KEYS[:3]:
            mine, theirs = base.config.get(key), model.config.get(key)
            if mine is not None and theirs is not None and mine != theirs:
                yield (
                    f"{model.name} is another kind of model than {base.name}: its {key} is {theirs!r}, not {mine!r}; "
                    "check that it was fine-tuned from it"
                )
                break


def _odd_names(
    models: list[Checkpoint], missing: Sequence[tuple[str, ...]], extra: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    for i, model in enumerate(models):
        if missing[i]:
            count = counted(len(missing[i]), "tensor")
            yield f"{model.name} lacks {count} of the base: {listed(missing[i])}; unchanged"
        if extra[i]:
            count = counted(len(extra[i]), "tensor")
            yield f"{model.name} has {count} that the base lacks: {listed(extra[i])}; ignored"


def same_files(one: Checkpoint, other: Checkpoint) -> bool:
    pairs = zip(one.files, other.files, strict=False)
    return len(one.files) == len(other.files) and all(os.path.samestat(a.status, b.status) for a, b in pairs)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors in memory: the same merge, bit for bit, on dictionaries of torch tensors on any device
# ---------------------------------------------------------------------------------------------------------------------

# Elements at a time: enough to keep a GPU busy, few enough that little is held beside the tensors themselves.
MEMORY_CHUNK: Final = 1 << 24


def dare_drop(
    task_vector: Mapping[str, torch.Tensor], drop_rate: float = 0.9, seed: int = 42, rescale: bool = True
) -> dict[str, torch.Tensor]:
    """Thin deltas: drop entries at random and rescale the rest. Tensors that are not floats are left as they are."""
    config = DareConfig(drop_rate=drop_rate, seed=seed, rescale=rescale)
    config.check_models(1)
    zeros = {name: delta.new_zeros(()).expand(delta.shape) for name, delta in task_vector.items()}
    return {
        name: MemoryMerge(config, 1, name, zeros[name], {0: delta}).run()
        if delta.is_floating_point()
        else delta.clone()
        for name, delta in task_vector.items()
    }


def dare_sparsify(
    pretrained: Mapping[str, torch.Tensor],
    finetuned: Mapping[str, torch.Tensor],
    drop_rate: float = 0.9,
    seed: int = 42,
) -> dict[str, torch.Tensor]:
    """One fine-tuned model with its changes from the pretrained one thinned."""
    return dare_merge(pretrained, [finetuned], DareConfig(drop_rate=drop_rate, seed=seed))


def dare_merge(
    base: Mapping[str, torch.Tensor],
    finetuned: Sequence[Mapping[str, torch.Tensor]],
    config: DareConfig | None = None,
) -> dict[str, torch.Tensor]:
    """The merged state dict, by any method and rules: the bits that DareMerger writes for these names and settings."""
    config = config or DareConfig()
    if isinstance(finetuned, Mapping) or not finetuned:
        raise ConfigError("finetuned must be a list of state dicts with at least one in it", "put it in brackets")
    config.check_models(len(finetuned))
    for i, model in enumerate(finetuned):
        if not model.keys() & base.keys():
            raise DareError(f"model {i} has no tensor in common with the base", f"the base has {listed(list(base))}")
    merged = {}
    for name, tensor in base.items():
        parts = {i: model[name] for i, model in enumerate(finetuned) if name in model}
        for i, part in parts.items():
            if part.shape != tensor.shape or part.is_floating_point() != tensor.is_floating_point():
                raise DareError(
                    f"tensor {name!r} is {list(tensor.shape)} of {tensor.dtype} in the base and {list(part.shape)} of "
                    f"{part.dtype} in model {i}",
                    "only models fine-tuned from this very base can be merged",
                )
        quantised = tensor.element_size() == 1  # copied where equal, else refused
        if tensor.is_floating_point() and not (quantised and all(_same_bytes(tensor, p) for p in parts.values())):
            merged[name] = MemoryMerge(config, len(finetuned), name, tensor, parts).run()
        else:
            merged[name] = tensor.clone()
    return merged


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    import torch

    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.to(one.device).view(torch.uint8))


class MemoryMerge:
    """One tensor's merge, in torch. The operations and their order are the kernels', so that the bits are too."""

    def __init__(
        self, config: DareConfig, count: int, name: str, base: torch.Tensor, parts: dict[int, torch.Tensor]
    ) -> None:
        import torch

        self.config, self.count, self.name = config, count, name
        self.settings = config.for_tensor(name, count)
        self.base = base.detach()
        self.parts = {i: part.detach().to(base.device).reshape(-1) for i, part in parts.items()}
        self.dtype = getattr(torch, config.dtype) if config.dtype else base.dtype
        types = {self.dtype, base.dtype, *(part.dtype for part in parts.values())}
        known = {getattr(torch, kind) for kind in DTYPES}
        if not types <= known:
            raise DareError(f"tensor {name!r} is of a type that cannot be merged: {types - known}", "convert it first")
        self.real = torch.float64 if torch.float64 in types else torch.float32
        self.weights = list(config.shares(count))
        self.floors = dict.fromkeys(self.parts, 0.0)
        self.pull = 0.0

    def run(self) -> torch.Tensor:
        import torch

        flat = self.base.reshape(-1)
        output = torch.empty(flat.shape, dtype=self.dtype, device=flat.device)
        if self.parts and flat.numel():
            self._look(flat)
        for start in range(0, flat.numel(), MEMORY_CHUNK):
            base = flat[start : start + MEMORY_CHUNK].to(self.real)
            values = self._chunk(base, start)
            result = self._encode(values)
            if not bool(torch.isfinite(result).all()):
                raise DareError(
                    f"tensor {self.name!r} holds or gives a value that is not finite in {self.dtype}",
                    "such a model is broken, or the drop rate too high for the type",
                )
            output[start : start + MEMORY_CHUNK] = result
        return output.reshape(self.base.shape)

    def _chunk(self, base: torch.Tensor, start: int) -> torch.Tensor:
        import torch

        kept = [self._thin(i, base, start, self.weights[i], self.floors[i]) for i in self.parts]
        change = self._scalar(self.settings.lambda_coeff, base) * self._combine(base, kept)
        if len(self.parts) == 1 and self.settings.gives_back(self.weights):
            return self.parts[0][start : start + len(base)].to(self.real)
        return torch.where(change == 0, base, base + change)

    def _combine(self, base: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        import torch

        merged = self._scalar(self.pull, base) * base
        for row in kept:
            merged = merged + row
        if self.config.method != "ties":
            return merged
        total, share, zero = torch.zeros_like(base), torch.zeros_like(base), self._scalar(0.0, base)
        for i, row in zip(self.parts, kept, strict=True):
            agrees = torch.where(merged >= 0, row > 0, row < 0)
            total = total + torch.where(agrees, row, zero)
            share = share + torch.where(agrees, self._scalar(self.weights[i], base), zero)
        return torch.where(share > 0, total / share, zero)

    def _thin(self, i: int, base: torch.Tensor, start: int, weight: float, floor: float) -> torch.Tensor:
        import torch

        delta, mask = self._delta_and_mask(i, base, start)
        if not bool(torch.isfinite(delta).all()):
            raise DareError(
                f"tensor {self.name!r} of the base or of model {i} holds a value that is not finite",
                "such a model is broken; use a checkpoint from before that happened",
            )
        passing = mask & (delta.abs() >= self._scalar(floor, base))
        scale = self._scalar(weight / divisor_of(self.settings, i), base)
        return torch.where(passing, delta * scale, self._scalar(0.0, base))

    def _delta_and_mask(self, i: int, base: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        delta = self.parts[i][start : start + len(base)].to(self.real) - base
        bits = torch_bits(mask_key(self.config.seed + i, self.name), start, len(base), base.device)
        return delta, bits < keep_threshold(self.settings.drop_rates[i])

    def _scalar(self, value: float, like: torch.Tensor) -> torch.Tensor:
        return like.new_tensor(value)

    def _look(self, flat: torch.Tensor) -> None:
        """What slerp and trim must know of the whole tensor."""
        if self.config.method == "slerp":
            first, second, product = self._products(flat)
            self.weights = list(slerp_ends(first, second, product, self.config.position))
            self.pull = sum(self.weights) - 1
        elif self.settings.keep_ratio < 1:
            self.floors = {i: self._floor(i, flat) for i in self.parts}

    def _floor(self, i: int, flat: torch.Tensor) -> float:
        import torch

        survivors = []
        for start in range(0, flat.numel(), MEMORY_CHUNK):
            delta, mask = self._delta_and_mask(i, flat[start : start + MEMORY_CHUNK].to(self.real), start)
            survivors.append(delta[mask].abs())
        sizes = torch.cat(survivors)
        if not len(sizes):
            return 0.0
        place = len(sizes) - max(1, int(self.settings.keep_ratio * len(sizes)))
        # Finding one value is faster than sorting all, except on a GPU.
        return float(sizes.sort().values[place] if sizes.is_cuda else torch.kthvalue(sizes, place + 1).values)

    def _products(self, flat: torch.Tensor) -> list[float]:
        """|end 0|^2, |end 1|^2 and end 0 . end 1, added up in the kernels' order."""
        import torch

        sums: list[list[torch.Tensor]] = [[], [], []]
        for start in range(0, flat.numel(), MEMORY_CHUNK):
            base = flat[start : start + MEMORY_CHUNK].to(self.real)
            ends = [base + self._thin(i, base, start, 1.0, 0.0) if i in self.parts else base for i in range(2)]
            for collected, (left, right) in zip(sums, ((0, 0), (1, 1), (0, 1)), strict=True):
                tiles = torch.nn.functional.pad(ends[left].double() * ends[right].double(), (0, -len(base) % TILE))
                tiles = tiles.reshape(-1, TILE)
                while tiles.shape[1] > 1:
                    half = tiles.shape[1] // 2
                    tiles = tiles[:, :half] + tiles[:, half:]
                collected.append(tiles[:, 0])
        totals = [torch.cat(parts) for parts in sums]
        while len(totals[0]) > 1:  # as fold_neighbours does
            totals = [torch.nn.functional.pad(total, (0, len(total) % 2)) for total in totals]
            totals = [total[::2] + total[1::2] for total in totals]
        return [float(total) for total in totals]

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        import torch

        if self.real == torch.float64 and self.dtype in (torch.bfloat16, torch.float16):
            # torch rounds float64 to 16 bits by way of float32, twice; round_to_odd says why this does not.
            bits = values.to(torch.float32).view(torch.int32)
            bits = bits - (bits.view(torch.float32).double().abs() > values.abs()).to(torch.int32)
            bits = bits | (bits.view(torch.float32).double() != values).to(torch.int32)
            values = bits.view(torch.float32)
        return values.to(self.dtype)


def torch_bits(key: tuple[int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """What draw gives, for count elements from a multiple of TILE on: the 16 random bits of each."""
    import torch

    tiles, low = -(-count // TILE), 0xFFFFFFFF
    block = torch.arange(start // 8, start // 8 + tiles * (TILE // 8), device=device)
    x0, x1, x2, x3 = block & low, block >> 32, torch.zeros_like(block), torch.zeros_like(block)
    a, b = key
    for _ in range(ROUNDS):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = ((p1 >> 32) & low) ^ x1 ^ a, p1 & low
        x2, x3 = ((p0 >> 32) & low) ^ x3 ^ b, p0 & low
        a, b = (a + 0x9E3779B9) & low, (b + 0xBB67AE85) & low
    pieces = torch.stack([piece.to(torch.int32) for x in (x0, x1, x2, x3) for piece in (x & 0xFFFF, x >> 16)])
    return pieces.reshape(8, tiles, TILE // 8).transpose(0, 1).reshape(-1)[:count]


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        numbers = "only numbers, with spaces between them, go there; files go after --merge"
        raise ConfigError(message, numbers if "invalid float" in message else f"see {self.prog} --help")


def build_parser() -> Parser:
    parser = Parser(
        prog="dare.py" if sys.argv[0].endswith(".py") else "dare",
        usage="%(prog)s [merge | analyze] [options]",
        description="Merge models fine-tuned from the same base by DARE: drop most of each delta at random, "
        "rescale the rest, average, add to the base. Or analyze them: see what they are like, and how they might be "
        "merged.",
        epilog="Flags beat TOML, TOML beats defaults. Paths in TOML are relative to the TOML file. "
        "Exit status: 0 done, 1 the merge failed, 2 wrong usage or configuration, 130 interrupted (143 by SIGTERM).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    # As argparse has it, -1e-3 looks like an option.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    add = parser.add_argument
    each: dict[str, Any] = {"type": float, "nargs": "+"}
    add("-c", "--config", metavar="FILE", type=Path, help="TOML configuration, or the recipe of an earlier merge")
    add("-b", "--base", metavar="MODEL", help="the model that the others were fine-tuned from")
    add("-m", "--merge", metavar="MODEL", nargs="+", action="extend", help="the fine-tuned models, or LoRA adapters")
    add("-o", "--output", metavar="PATH", help="where to write: a .safetensors file, or a model directory")
    add("--method", metavar="NAME", help="how to combine: linear (default), ties or slerp")
    add(
        "--drop-rate",
        **each,
        metavar="P",
        help="share of each delta to drop, 0 <= P < 1 (default 0.9); one or one each",
    )
    add("--weights", **each, metavar="W", help="one per model; linear: default 1/n each; ties: relative, default equal")
    add("--lambda", dest="lambda_coeff", metavar="X", type=float, help="scale of the merged delta (default 1)")
    add("--no-rescale", action="store_false", dest="rescale", help="drop without rescaling (for study)")
    add(
        "--rescale-q",
        **each,
        metavar="Q",
        help="DAREx-q: divide by Q, 1 - P <= Q <= 1, instead of 1 - P; one or one each",
    )
    add(
        "--keep-ratio", metavar="R", type=float, help="ties: share of the surviving entries that trim keeps (default 1)"
    )
    add("--slerp-t", metavar="T", type=float, help="slerp: position between the two models (default 0.5)")
    add(
        "--dtype",
        metavar="NAME",
        help="output type: float32, float16, bfloat16 or float64, or fp32, fp16, bf16, fp64 (default: the base's)",
    )
    add(
        "--mismatch",
        metavar="HOW",
        help="tensors of other shapes: error (default), overlap (merge common rows) or base",
    )
    add("--max-shard-size", metavar="SIZE", help="largest size of one file of an output directory (default 5GB)")
    add("--tokenizer-from", metavar="MODEL", help="take the output directory's tokenizer from here, not from the base")
    add("--rule", dest="rules", metavar="RULE", action="append", help="PATTERN:SETTING=VALUE,... for matching tensors")
    add("--delta-threshold", metavar="X", type=float, help="warn where deltas are larger than this (default 0.002)")
    add("--seed", metavar="N", type=int, help="the first model's seed; model i uses N + i (default 42)")
    add("--threads", metavar="N", type=int, help="threads to use (default: all cores this process may use)")
    add("--force", action="store_true", help="replace an existing output that this tool did not make")
    add("--resume", action="store_true", help="continue an unfinished merge; if interrupted, leave one to continue")
    add("--verify", metavar="PATH", help="make a merged model again from its recipe, and compare; write nothing")
    add("--per-tensor", action="store_true", help="analyze: also list every tensor")
    add("--plot", metavar="FILE", type=Path, help="analyze: draw what was found, to a .png, .svg or .pdf file")
    add("--write-config", metavar="FILE", type=Path, help="analyze: write the suggested settings as a configuration")
    add("--dry-run", action="store_true", help="print the plan, with an estimate of the time, and write nothing")
    add("--json", action="store_true", help="print what was done, planned, verified or found as JSON")
    add("-v", "--verbose", action="store_true", help="show progress and summary (default)")
    add("-q", "--quiet", action="store_false", dest="verbose", help="no progress or summary, only warnings and errors")
    add("--version", action="version", version=f"dare {__version__}")
    return parser


# The first word of the command, and the options that only mean something after one of them.
COMMANDS: Final = ("merge", "analyze")
OPTIONS_OF: Final = {
    "merge": ("force", "resume", "verify", "dry_run"),
    "analyze": ("per_tensor", "plot", "write_config"),
}


def parse_flags(arguments: Sequence[str] | None) -> tuple[str, dict[str, Any]]:
    """The command, merge where none is given, and the options."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and words[0] in COMMANDS else "merge"
    parser = build_parser()
    flags, unknown = parser.parse_known_args(words)
    for other, options in OPTIONS_OF.items():
        for option in options:
            if option in flags and other != command and not (option == "force" and "write_config" in flags):
                name = f"--{option.replace('_', '-')}"
                raise ConfigError(f"{name} means nothing to {command}", f"it belongs to {parser.prog} {other}")
    late = next((word for word in COMMANDS if word in unknown or word in getattr(flags, "merge", ())), None)
    if late and not os.path.exists(late):
        raise ConfigError(f"the word {late!r} is not where it belongs", f"it comes first: {parser.prog} {late} ...")
    if unknown and not unknown[0].startswith("-"):
        hint = "files go after --config, --base, --merge or --output"
        if close := difflib.get_close_matches(unknown[0], COMMANDS, cutoff=0.5):
            hint = f"did you mean {parser.prog} {close[0]}?"
        raise ConfigError(f"{unknown[0]!r} is not expected here", hint)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ConfigError(f"there is no option {unknown[0]!r}", nearest(unknown[0].split("=")[0], known))
    return command, vars(flags)


def layered(flags: dict[str, Any]) -> Settings:
    """Flags over TOML. Rules given by flags come before those of the file, so that they win."""
    settings = load_settings(flags["config"]) if "config" in flags else Settings()
    dare = dict(settings.dare)
    for name in CHECKS:
        if name in flags:
            value = flags[name]
            # One number is for all models; weights are a list even where there is one model.
            value = value[0] if isinstance(value, list) and len(value) == 1 and name != "weights" else value
            flag = "--lambda" if name == "lambda_coeff" else f"--{name.replace('_', '-')}"
            check_setting(name, value, flag)
            dare[name] = value
    other_models = "base" in flags or "merge" in flags
    return Settings(
        dare=dare,
        base=Source.of(flags["base"]) if "base" in flags else settings.base,
        merge=tuple(Source.of(file) for file in flags["merge"]) if "merge" in flags else settings.merge,
        output=Source.of(flags["output"]).path if "output" in flags else settings.output,
        tokenizer_from=(Source.of(flags["tokenizer_from"]) if "tokenizer_from" in flags else settings.tokenizer_from),
        rules=(*(parse_rule(text) for text in flags.get("rules", ())), *settings.rules),
        inputs=() if other_models else settings.inputs,
    )


def parse_rule(text: str) -> Rule:
    """A rule as a flag: the pattern, a colon, and settings as in TOML, with commas between them."""
    pattern, colon, assignments = text.rpartition(":")
    example = "like --rule '*embed_tokens*:drop_rate=0.5'"
    if not colon:
        raise ConfigError(f"--rule {text!r} has no colon after its pattern", example)
    try:
        table = tomllib.loads(f"rule = {{ {assignments} }}")["rule"]
    except (ValueError, RecursionError):
        raise ConfigError(f"--rule {text!r} must be PATTERN:SETTING=VALUE", example) from None
    return Rule.of({**table, "match": pattern}, f"--rule {text!r}")


# What may be said besides --verify: where the inputs are now, and how to go about it.
VERIFY_FLAGS: Final = ("verify", "base", "merge", "tokenizer_from", "threads", "verbose", "json")


def verify(flags: dict[str, Any]) -> VerifyReport:
    """Check a merged model by its own recipe. Its inputs are called as they were then, wherever they are now."""
    for name in flags:
        if name not in VERIFY_FLAGS:
            allowed = ", ".join(f"--{known.replace('_', '-')}" for known in VERIFY_FLAGS[1:5])
            raise ConfigError(
                f"--verify takes its settings from the recipe, not from --{name.replace('_', '-')}",
                f"besides it there may be {allowed}",
            )
    path = Path(os.path.expanduser(flags["verify"]))
    settings = stored_recipe(path)
    config = DareConfig(
        **settings.dare | {k: flags[k] for k in ("threads", "verbose") if k in flags}, rules=settings.rules
    )
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if not settings.inputs:
        raise DareError(
            f"the recipe of {str(path)!r} names no inputs", "only what this tool has merged can be verified"
        )
    given = [flags.get("base") or settings.base, *(flags.get("merge") or settings.merge)]
    if len(given) != len(settings.inputs) or None in given:
        raise ConfigError(
            f"the recipe of {str(path)!r} has {len(settings.inputs) - 1} models", "give as many, in the same order"
        )
    called = [str(entry.get("file", "")) for entry in settings.inputs]
    sources = [dataclasses.replace(Source.of(source), name=name) for source, name in zip(given, called, strict=True)]
    tokenizer = Source.of(flags["tokenizer_from"]) if "tokenizer_from" in flags else settings.tokenizer_from
    merger = DareMerger(sources[0], sources[1:], config, tokenizer_from=tokenizer, fingerprints=settings.inputs)
    merger.version = settings.version
    return merger.verify(path, moved=any(name in flags for name in ("base", "merge", "tokenizer_from")))


def stored_recipe(path: Path) -> Settings:
    """The recipe that a merged model carries."""
    if os.path.isdir(path):
        return _directory_recipe(path)
    try:
        file = TensorFile(path, str(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DareError(f"cannot read {str(path)!r}: {reason}", "give a merged model after --verify") from None
    file.close()
    recipe = file.metadata.get(RECIPE_KEY)
    if recipe is None:
        raise DareError(f"{str(path)!r} has no recipe", "only what this tool has merged can be verified")
    if file.metadata != recipe_metadata(recipe):
        raise DareError(f"{str(path)!r} is not what its recipe makes: the recipe itself is damaged", "merge again")
    return parse_settings(recipe, f"the recipe of {path}", Path())


def _directory_recipe(path: Path) -> Settings:
    if not os.path.exists(path / RECIPE_FILE):
        raise DareError(f"{str(path)!r} has no {RECIPE_FILE}", "only what this tool has merged can be verified")
    try:
        with open_regular(path / RECIPE_FILE) as file:
            content = file.read(MAX_TOML + 1)
    except OSError as error:
        raise DareError(f"cannot read {str(path / RECIPE_FILE)!r}: {error.strerror}", "merge again") from None
    if len(content) > MAX_TOML:
        raise DareError(f"{str(path / RECIPE_FILE)!r} cannot be used: {TOO_LONG}", "merge again")
    text, seal, digest = content.rpartition(RECIPE_SEAL.encode())
    if not seal or digest.decode(errors="replace") != f"{digest_of(text)}\n":
        raise DareError(f"{str(path)!r} is not what its recipe makes: the recipe itself is damaged", "merge again")
    return load_settings(path / RECIPE_FILE)


def tell(result: str | dict[str, Any]) -> None:
    """Print what came out, as text or as JSON. That nobody can read it does not undo it."""
    try:
        print(result if isinstance(result, str) else json.dumps(result, indent=2), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        LOG.warning(f"cannot print what was done: {error.strerror}")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (so that the interpreter's last flush finds a home)


def analyze(merger: DareMerger, settings: Settings, flags: dict[str, Any]) -> None:
    """Look at the models, and tell, draw and write what that says."""
    plot, written, force = flags.get("plot"), flags.get("write_config"), "force" in flags
    if plot is not None:
        load_pyplot(plot)
        check_apart(plot, (merger.base, *merger.models))
    if written is not None:
        if not written.absolute().parent.is_dir():
            raise ConfigError(f"there is no directory for {str(written)!r}", "make it first")
        if not force and os.path.lexists(written):
            raise ConfigError(f"{str(written)!r} is there already", "choose another name, or add --force to replace it")
        check_apart(written, (merger.base, *merger.models))
    report = merger.analyze()
    per_tensor = "per_tensor" in flags
    if "json" in flags or merger.config.verbose:  # first: a disk that is full must not cost what was found
        tell(report.as_dict(per_tensor) if "json" in flags else report.text(per_tensor))
    if plot is not None:
        plot_analysis(report, plot)
        LOG.info(f"drew {plot}")
    if written is not None:
        write_suggestion(report, merger, settings.output, written)


def check_apart(path: Path, inputs: Iterable[Source]) -> None:
    """Refuse to write where an input is, whatever the flags."""
    for source in inputs:
        layout = find_layout(fetched(source))
        for used in (layout.folder, *layout.files):
            if used and (relation := entangled(path.resolve(), used.resolve())):
                raise ConfigError(f"{str(path)!r} {relation} the input {source.name!r}", "inputs are never overwritten")


def write_suggestion(report: AnalysisReport, merger: DareMerger, output: Path | None, path: Path) -> None:
    """The suggested settings as a complete configuration, with the reasons in comments."""
    import tomli_w

    place = path.absolute().parent.resolve()
    base, *models = map(fetched, (merger.base, *merger.models))
    to_directory = os.path.isdir(base.path) or merger.tokenizer_from is not None
    own = f"{path.stem}_merged{'' if to_directory else '.safetensors'}"
    names: dict[str, Any] = {"base_file": path_from(base, place)}
    names |= {"merge_files": [path_from(model, place) for model in models]}
    names |= {"output_file": path_from(Source(str(output), output), place) if output else own}
    if merger.tokenizer_from is not None:
        names["tokenizer_from"] = path_from(fetched(merger.tokenizer_from, TOKENIZER_PATTERNS), place)
    reasons = "".join(f"# - {printable(advice.text)}\n" for advice in report.advice)
    text = (
        f"# Suggested by an analysis of the models:\n{reasons}# {printable(report.confidence)}\n\n"
        f"{report.suggestion}\n{tomli_w.dumps({'models': names})}"
    )
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8") as file:  # what has that name already is not ours
            file.write(text)
        partial.replace(path)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            partial.unlink(missing_ok=True)
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "choose another place for it") from None
    LOG.info(f"wrote {path}")


def run(arguments: Sequence[str] | None) -> None:
    command, flags = parse_flags(arguments)
    as_json = flags.get("json", False)
    if "verify" in flags:
        report = verify(flags)
        if as_json or flags.get("verbose", True):
            tell(report.as_dict() if as_json else str(report))
        return
    settings = layered(flags)
    config = DareConfig(**settings.dare, rules=settings.rules)
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if settings.base is None:
        raise ConfigError("there is no base model", "give --base MODEL, or base_file in [models] of a --config file")
    if not settings.merge:
        raise ConfigError("there are no models to merge", "give --merge MODEL..., or merge_files in [models]")
    if settings.output is None and command == "merge":
        raise ConfigError("there is no output", "give --output PATH, or output_file in [models]")
    merger = DareMerger(
        settings.base, settings.merge, config, tokenizer_from=settings.tokenizer_from, fingerprints=settings.inputs
    )
    if command == "analyze":
        analyze(merger, settings, flags)
        return
    assert settings.output is not None
    force = "force" in flags
    if "dry_run" in flags:
        plan = merger.plan(settings.output, force=force, estimate=True)
        for warning in plan.warnings:
            LOG.warning(warning)
        tell(plan.as_dict() if as_json else str(plan))
        return
    merged = merger.merge(settings.output, force=force, resume="resume" in flags)
    if as_json or config.verbose:
        tell(merged.as_dict() if as_json else str(merged))


class Messages(logging.StreamHandler[IO[str]]):
    """Warnings and notes on stderr, one to a line, as the command's errors are."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return labelled("warning", text, self.stream) if record.levelno >= logging.WARNING else printable(text)


class Terminated(BaseException):
    """Somebody sent SIGTERM: to be handled like an interrupt."""


def _stop(number: int, _: object) -> NoReturn:
    """The first signal stops the merge; more of them must not stop it from tidying up."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives the exit status."""
    return guarded(lambda: run(arguments))


def guarded(run: Callable[[], None], interrupted: str = "interrupted") -> int:
    """Run a command: errors become a sentence and a status, signals stop it, and no traceback reaches a user."""
    # Closed by the caller, as after >&- or 2>&-, they are None; they stay open here as long as the process lives.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal lacks letters for is no error
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # only a main thread may take signals
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, _stop)
    try:
        run()
        sys.stdout.flush()
        return 0
    except DareError as error:
        print(labelled("error", str(error), sys.stderr), file=sys.stderr)
        if error.hint:
            print(labelled("hint", error.hint, sys.stderr), file=sys.stderr)
        return error.status
    except (KeyboardInterrupt, Terminated) as stopped:
        print(interrupted, file=sys.stderr)
        status = 143 if isinstance(stopped, Terminated) else 130
        if any(thread.name == LEFT_BEHIND for thread in threading.enumerate()):
            sys.stderr.flush()
            os._exit(status)  # a compiler at work would crash on the way out
        return status
    except ModuleNotFoundError as error:
        print(labelled("error", f"{error.name} is not installed for {sys.executable}", sys.stderr), file=sys.stderr)
        print(labelled("hint", "use uv run python dare.py ..., or pip install . first", sys.stderr), file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read our output has read enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (so that the interpreter's last flush finds a home)
        return 0
    except Exception as error:
        if os.environ.get("DARE_TRACEBACK"):
            raise
        print(labelled("error", f"unexpected {type(error).__name__}: {error}", sys.stderr), file=sys.stderr)
        report = "this is a bug; run again with DARE_TRACEBACK=1 set and report what it shows"
        print(labelled("hint", report, sys.stderr), file=sys.stderr)
        return 1
    finally:
        LOG.removeHandler(messages)
        LOG.propagate = True
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
