"""DARE: merge fine-tuned models into one, by dropping most of what each has learned and rescaling the rest.

    delta_i = finetuned_i - base                     what fine-tuning changed
    kept_i  = mask_i * delta_i / r_i                 drop at random, keep a share r_i, rescale by 1 / r_i
    merged  = combine(kept_1 ... kept_n)             by default the sum of w_i * kept_i with w_i = 1 / n
    output  = base + lambda * merged

Dropping changes no expectation, and fine-tuned models bear it surprisingly well: Yu et al., "Language Models are
Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", ICML 2024, arXiv:2311.03099.

This one file is the whole tool, in the order in which it is best read: constants and errors, configuration, the mask,
the arithmetic kernels, reading checkpoints, writing checkpoints, the plan and the merger, tensors in memory, the
command line. Each section depends only on those above it.

    python dare.py --config merge_config.toml        from the shell
    from dare import DareConfig, DareMerger          from a script
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import decimal
import difflib
import fnmatch
import hashlib
import importlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import signal
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn, cast

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

__version__ = "0.1.0"
__all__ = [
    "ConfigError", "DareConfig", "DareError", "DareMerger", "MergeReport", "ModelReport", "Plan", "Rule",
    "dare_drop", "dare_merge", "dare_sparsify",
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
MAX_CHUNK: Final = 1 << 18
MIN_CHUNK: Final = 1 << 14
JOB_CHUNKS: Final = 16
# Elements of the tensors that are looked at and then merged in one go, where a method must look first.
BATCH_ELEMENTS: Final = 1 << 28
# All the buffers of all the threads together; with the interpreter, NumPy and LLVM the process stays near 100 MB.
BUFFER_BYTES: Final = 64 << 20

# How long to let writes gather before they are sent to the disk.
FLUSH_SECONDS: Final = 0.1

# A fine-tune's delta is a small part of its weights; two unrelated models differ by more than either weighs.
UNRELATED_RATIO: Final = 0.5
# Beyond this cosine two directions count as one, and slerp is linear.
SLERP_LINEAR: Final = 0.9995
HALF_PI: Final = Decimal("1.57079632679489661923132169163975144209858469968755291")
# How many names a message lists before it says "and 12 more".
LISTED: Final = 3

RECIPE_KEY: Final = "dare_recipe"
LOG: Final = logging.getLogger("dare")


class DareError(Exception):
    """Something a person can mend: one sentence that says what is wrong, and a hint that says what to do."""

    status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(DareError):
    """Wrong usage or configuration, as opposed to files that cannot be merged."""

    status = 2


def listed(names: Sequence[str]) -> str:
    """The first few names, quoted so that nothing in them can upset a terminal, and how many more there are."""
    shown = ", ".join(repr(name) for name in names[:LISTED])
    return shown if len(names) <= LISTED else f"{shown} and {len(names) - LISTED:,} more"


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint with the known word that is spelled most like this one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}?" if close else f"known here: {', '.join(sorted(known))}"


def load_numpy() -> None:
    """Bind np at first use: importing it takes longer than --help should."""
    global np
    import numpy as np


# ---------------------------------------------------------------------------------------------------------------------
# Configuration: defaults, then TOML, then flags
# ---------------------------------------------------------------------------------------------------------------------


METHODS: Final = ("linear", "ties", "slerp")
DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


def _one_or_each(value: object, accepts: Callable[[Any], bool]) -> bool:
    return all(map(accepts, value)) and len(value) > 0 if isinstance(value, list | tuple) else accepts(value)


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
    "dtype": (f"one of {', '.join(DTYPES)}", lambda v: isinstance(v, str) and v in DTYPES),
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
        raise ConfigError(f"{where} must be {wanted}, not {value!r}", "--help says what it does")


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
    dtype: str | None = None  # output type of float tensors; None: the base's
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
            self._settings(rule, count)

    @property
    def position(self) -> float:
        """Where slerp stops between its two models."""
        return 0.5 if self.slerp_t is None else float(self.slerp_t)

    def general(self, count: int) -> TensorSettings:
        """The settings of the tensors that no rule matches."""
        return self._settings(None, count)

    def for_tensor(self, name: str, count: int) -> TensorSettings:
        """The settings of one tensor, by the first rule that matches its name."""
        return self._settings(next((rule for rule in self.checked_rules if rule.matches(name)), None), count)

    def _settings(self, rule: Rule | None, count: int) -> TensorSettings:
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

    @classmethod
    def of(cls, given: str | Path | Source, folder: Path | None = None) -> Source:
        if isinstance(given, Source):
            return given
        # A name may hold bytes that are no text; the recipe, which names it, must be text.
        name = str(given).encode("utf-8", "backslashreplace").decode()
        return cls(name, Path(folder or "", os.path.expanduser(given)))


@dataclass(frozen=True)
class Settings:
    """What a TOML file, or a TOML file with flags on top, asks for."""

    dare: dict[str, Any] = field(default_factory=dict)
    base: Source | None = None
    merge: tuple[Source, ...] = ()
    output: Path | None = None
    rules: tuple[Rule, ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()  # fingerprints of base and models, where the file is a recipe


# The keys that each table of a configuration may have. [recipe] is there so that a recipe is itself a configuration.
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "dare": tuple(CHECKS),
    "models": ("base_file", "merge_files", "output_file"),
    "rules": ("match", *RULE_SETTINGS),
    "recipe": ("version", "mask", "seeds", "inputs"),
}


def load_settings(path: Path) -> Settings:
    """Read a TOML configuration, or a recipe taken out of a merged file. Paths in it are relative to it."""
    tables = _read_toml(path)
    dare, models, recipe = (tables.get(name, {}) for name in ("dare", "models", "recipe"))
    for key, value in dare.items():
        check_setting(key, value, f"{path}: [dare] {key}")
    for key in ("base_file", "output_file"):
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
        base=Source.of(models["base_file"], path.parent) if "base_file" in models else None,
        merge=tuple(Source.of(file, path.parent) for file in files),
        output=Source.of(models["output_file"], path.parent).path if "output_file" in models else None,
        rules=tuple(Rule.of(rule, f"{path}: rule {k}") for k, rule in enumerate(tables.get("rules", ()), 1)),
        inputs=_fingerprints(path, recipe),
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", "give --config a TOML file") from None
    except (ValueError, RecursionError) as error:
        hint = "see merge_config.toml for an example"
        if path.suffix == ".safetensors":
            hint = f"the recipe of a merged model is in its metadata, as {RECIPE_KEY}; save that to a file first"
        raise ConfigError(f"{path} is not valid TOML: {error}", hint) from None
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


def _fingerprints(path: Path, recipe: dict[str, Any]) -> tuple[dict[str, Any], ...]:
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


def combine_linear(kept: Any, models: int, _reals: Any, merged: Any, _total: Any, _share: Any) -> None:  # compiled
    """Add the models' kept deltas to merged."""
    for i in range(models):
        row = kept[i]
        for j in range(TILE):
            merged[j] += row[j]


def combine_ties(kept: Any, models: int, reals: Any, merged: Any, total: Any, share: Any) -> None:  # compiled
    """Elect each position's sign by the sum, then average, by weight, the models that agree with it."""
    for j in range(TILE):
        total[j] = 0
        share[j] = 0
    for i in range(models):
        row = kept[i]
        for j in range(TILE):
            merged[j] += row[j]
    for i in range(models):
        row = kept[i]
        weight = kept.dtype.type(reals[i, WEIGHT])
        for j in range(TILE):
            agrees = (row[j] > 0) if merged[j] >= 0 else (row[j] < 0)
            total[j] += row[j] if agrees else 0
            share[j] += weight if agrees else 0
    for j in range(TILE):
        merged[j] = total[j] / share[j] if share[j] > 0 else 0


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
# SLOT: which of slerp's two ends the model is; for trim, the prefix found so far. PEAK: the pattern of the largest.
KEY_0, KEY_1, LIMIT, SLOT, PEAK, ABOVE, KEPT, WORDS = range(8)
SCALE, WEIGHT, FLOOR, SUM, REALS = range(5)
LAMBDA, PULL, THRESHOLD = range(3)  # of the last row of REALS, whose SUM is the base's
# Rows of scratch before the models' kept deltas, and their width. Rows of exactly 4 KiB would share cache sets.
SCRATCH_ROWS: Final = 6
SCRATCH_WIDTH: Final = TILE + 80
# Trim finds its threshold 16 bits of the magnitude at a time, by counting how many entries have each value of them.
DIGIT_BITS: Final = 16


@dataclass(frozen=True)
class KernelSpec:
    """Which kernel: what it does, and the stored types that it reads and writes."""

    kind: str  # linear or ties: merge a chunk; angle: what slerp must know of it; count: what trim must know
    base: str
    finetuned: str
    output: str

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        return "F64" if "F64" in (self.base, self.finetuned, self.output) else "F32"

    def __str__(self) -> str:
        return f"{self.kind}-{self.base}-{self.finetuned}-{self.output}"


@cache
def inline(function: Callable[..., Any]) -> Any:
    """A function that is compiled into the kernels that call it. Once for all kernels: it takes Numba a while."""
    numba: Any = importlib.import_module("numba")
    options = {"forceinline": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return numba.njit(**options)(function)


class Parts:
    """What all kernels of a spec are made of: the types, and the inner functions, ready to be compiled in."""

    def __init__(self, spec: KernelSpec) -> None:
        self.numba: Any = importlib.import_module("numba")
        wide = spec.real == "F64"
        self.real: Any = np.float64 if wide else np.float32
        self.unsigned: Any = np.uint64 if wide else np.uint32
        self.raw = [np.dtype(FORMATS[name].raw).type for name in (spec.base, spec.finetuned, spec.output)]
        self.decode = inline(FORMATS[spec.base].decode)
        self.encode = inline(FORMATS[spec.output].encode)
        if wide and FORMATS[spec.output].bits == 16:
            self.encode = self._encode_by_odd(self.encode)
        self.decode_finetuned = inline(FORMATS[spec.finetuned].decode)
        self.thin = self._thin_model(self.decode_finetuned)

    def _encode_by_odd(self, encode: Any) -> Any:
        narrow = inline(round_to_odd)

        def encode_by_odd(value: Any) -> Any:  # compiled
            return encode(narrow(value))

        return inline(encode_by_odd)

    def _thin_model(self, decode: Any) -> Any:
        """The heart of all kernels: one tile of one model, from its stored values to its thinned deltas."""
        draw_bits, real, unsigned = inline(draw), self.real, self.unsigned

        def thin_model(  # compiled
            raw: Any, tile: int, words: Any, reals: Any, base: Any, bits: Any, size: Any, kept: Any, threshold: Any
        ) -> None:
            draw_bits(bits, tile, words[KEY_0], words[KEY_1])
            limit, floor, scale = np.uint16(words[LIMIT]), real(reals[FLOOR]), real(reals[SCALE])
            peak = unsigned(words[PEAK])
            above = np.uint32(0)
            for j in range(TILE):
                delta = decode(raw[j]) - base[j]
                magnitude = abs(delta)
                size[j] = magnitude
                # Compared as integers, a NaN or an infinity is the largest of all, and the loop vectorises.
                pattern = real(magnitude).view(unsigned)
                peak = pattern if pattern > peak else peak
                above = np.uint32(above + np.uint32(magnitude > threshold))
                kept[j] = delta * scale if bits[j] <= limit and magnitude >= floor else 0
            words[PEAK] = peak
            words[ABOVE] += np.uint64(above)

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
    combine = inline(combine_ties if spec.kind == "ties" else combine_linear)

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
        base, merged, size, kept = scratch[1], scratch[2], scratch[3], scratch[SCRATCH_ROWS:]
        threshold = real(reals[models, THRESHOLD])
        lambda_coeff, pull = real(reals[models, LAMBDA]), real(reals[models, PULL])
        pad_rows(base_all, count, tiles * TILE)
        pad_rows(finetuned_all, count, tiles * TILE)
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
                thin_model(raw_finetuned, first_tile + tile, words[i], reals[i], base, bits, size, kept[i], threshold)
                reals[i, SUM] += fold_tile(size)
                limit = np.uint16(words[i, LIMIT])
                survivors = np.uint32(0)
                for j in range(TILE if tile < tiles - 1 else count - start):
                    survivors = np.uint32(survivors + np.uint32(bits[j] <= limit))
                words[i, KEPT] += np.uint64(survivors)
            combine(kept, models, reals, merged, scratch[4], scratch[5])
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
        base, size, ends, kept = scratch[1], scratch[3], scratch[4:6], scratch[SCRATCH_ROWS]
        pad_rows(base_all, count, tiles * TILE)
        pad_rows(finetuned_all, count, tiles * TILE)
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
                thin_model(raw_finetuned, first_tile + tile, words[i], reals[i], base, bits, size, kept, real(0))
                end = ends[np.int64(words[i, SLOT])]
                for j in range(TILE):
                    end[j] += kept[j]
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
                limit, prefix = np.uint16(words[i, LIMIT]), words[i, SLOT]
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
                        delta = real(decode_finetuned(finetuned_all[i, start + place])) - real(
                            decode(base_all[0, start + place])
                        )
                        pattern = np.uint64(real(abs(delta)).view(unsigned)) >> np.uint64(shift)
                        if pattern >> np.uint64(DIGIT_BITS) == prefix:
                            counts[i, np.int64(pattern & np.uint64(0xFFFF))] += np.uint32(1)

    return parts.compile(count_chunk)


BUILDERS: Final = {"linear": build_merge, "ties": build_merge, "angle": build_angle, "count": build_count}


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


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let signals wait: an exception that comes at a bad moment is swallowed by the compiler, and lost."""
    caught: list[tuple[int, Any]] = []
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *received: caught.append(received)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for received, frame in caught[:1]:
        handler = before[signal.Signals(received)]
        if callable(handler):
            handler(received, frame)


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

    made_for = (llvmlite.__version__, machine.triple, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())
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
    with deferred_interrupts():
        code = compile_object(spec, machine)
    if path is not None:
        with suppress(OSError):
            partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
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
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, codemodel="jitdefault"
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
QUANTISED: Final = ("F4", "F6_", "F8_")

PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CONVERT_HINT: Final = (
    'pickles can run any code, so convert it first: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('in.bin', weights_only=True), 'out.safetensors')\""
)

# Where the system has no positioned reads and writes, seeking and reading must not be parted by another thread.
SEEK_LOCK: Final = threading.Lock()


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return -(-self.count * STORED_BITS[self.dtype] // 8)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Read into view from a position, and say how many bytes there were."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    with SEEK_LOCK:
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(view))
    view[: len(data)] = data
    return len(data)


class Checkpoint:
    """One safetensors file, open for reading: what is in it, and its bytes by position."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.name = source.name
        self.status = _regular_file(source)
        try:
            self.descriptor = os.open(source.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise DareError(f"cannot read {source.name!r}: {error.strerror}", "check its permissions") from None
        try:
            self.tensors, self.metadata, self.header_sha256 = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> tuple[dict[str, TensorInfo], dict[str, str], str]:
        """Names, types and places of the tensors, as the safetensors library validates them."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.source.path, framework="np") as file:
                metadata = dict(file.metadata() or {})
                slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
                found = [(name, str(part.get_dtype()), tuple(part.get_shape())) for name, part in slices]
        except (SafetensorError, OSError, ValueError) as error:
            raise self._other_format(str(error)) from None
        # The format allows no holes, so places follow from the order.
        start = bytearray(8)
        self.read_into(memoryview(start), 0)
        header = bytearray(8 + struct.unpack("<Q", start)[0])
        self.read_into(memoryview(header), 0)
        tensors, offset = {}, len(header)
        for name, dtype, shape in found:
            if dtype not in STORED_BITS:
                raise DareError(f"{self.name!r}: tensor {name!r} has the unknown type {dtype}", "update dare")
            tensors[name] = TensorInfo(dtype, shape, offset)
            offset += tensors[name].nbytes
        return tensors, metadata, hashlib.sha256(header).hexdigest()

    def _other_format(self, reason: str) -> DareError:
        """What a file that is not safetensors is instead, and what to do about it."""
        start = bytearray(4)
        found = bytes(start[: read_at(self.descriptor, memoryview(start), 0)])
        if not found:
            return DareError(f"{self.name!r} is empty", "download or save it again")
        if found == b"PK\x03\x04" or found[:1] == b"\x80" or self.source.path.suffix in PICKLE_SUFFIXES:
            return DareError(f"{self.name!r} is a PyTorch pickle, not a safetensors file", CONVERT_HINT)
        if found == b"vers":
            return DareError(f"{self.name!r} looks like a Git LFS pointer, not the file itself", "run git lfs pull")
        if found[:1] == b"{":
            return DareError(f"{self.name!r} is JSON, not weights", "give a single .safetensors file")
        if found == b"GGUF":
            return DareError(f"{self.name!r} is a GGUF file", "merge the original model, then convert the result")
        return DareError(f"{self.name!r} is not a complete safetensors file: {reason}", "download or save it again")

    def read_into(self, view: memoryview, offset: int) -> None:
        try:
            while view:
                done = read_at(self.descriptor, view, offset)
                if done == 0:
                    raise DareError(f"{self.name!r} became shorter while it was read", "leave it alone during a merge")
                view, offset = view[done:], offset + done
        except OSError as error:
            raise DareError(f"cannot read {self.name!r}: {error.strerror}", "check the disk that it is on") from None

    def close(self) -> None:
        os.close(self.descriptor)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _regular_file(source: Source) -> os.stat_result:
    import stat

    try:
        status = source.path.stat()
    except FileNotFoundError:
        raise DareError(f"there is no file {source.name!r}", _where(source)) from None
    except OSError as error:
        raise DareError(f"cannot read {source.name!r}: {error.strerror}", _where(source)) from None
    except ValueError as error:
        raise DareError(f"{source.name!r} is not a path: {error}", "give the path of a .safetensors file") from None
    if stat.S_ISDIR(status.st_mode):
        raise DareError(f"{source.name!r} is a directory", "give the .safetensors file in it")
    if not stat.S_ISREG(status.st_mode):
        raise DareError(f"{source.name!r} is not a regular file", "give a .safetensors file")
    return status


def _where(source: Source) -> str:
    """Relative paths are the usual cause of a missing file."""
    return f"looked for {str(source.path.absolute())!r}; paths in TOML are relative to the TOML file"


# ---------------------------------------------------------------------------------------------------------------------
# Writing checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def check_output(path: Path, inputs: Sequence[Checkpoint], force: bool) -> Path:
    """Refuse an output that cannot or must not be written. Gives the path with links followed."""
    shown = repr(str(path))
    if path.suffix != ".safetensors":
        raise ConfigError(f"the output {shown} does not end in .safetensors", "name it like merged.safetensors")
    try:
        target = path.resolve()
        status = target.stat() if target.exists() else None
        folder = target.parent.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DareError(f"the output {shown} cannot be used: {reason}", "give another path") from None
    for checkpoint in inputs:
        if status is not None and os.path.samestat(status, checkpoint.status):
            raise ConfigError(f"the output {shown} is the input {checkpoint.name!r}", "inputs are never overwritten")
    if target.is_dir():
        raise DareError(f"the output {shown} is a directory", "name a file in it, like merged.safetensors")
    if not folder:
        raise DareError(f"the output's directory {str(target.parent)!r} does not exist", "create it first")
    if not os.access(target.parent, os.W_OK):
        raise DareError(f"the output's directory {str(target.parent)!r} is not writable", "choose another directory")
    if status is not None and not force and not made_by_dare(target):
        raise DareError(f"the output {shown} exists and was not made by this tool", "add --force to replace it")
    return target


def made_by_dare(path: Path) -> bool:
    """Whether a file says in its metadata that this tool made it."""
    try:
        with Checkpoint(Source.of(path)) as checkpoint:
            return RECIPE_KEY in checkpoint.metadata
    except DareError:
        return False


def header_bytes(tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> bytes:
    """A safetensors header for tensors whose offsets count from the start of the data."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    for name, info in tensors.items():
        ends = [info.offset, info.offset + info.nbytes]
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class OutputFile:
    """A file that appears under its name only when it is complete; until then it has a temporary name beside it."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        # Names may be as long as the filesystem allows: keep a part that people recognise.
        self.partial = path.with_name(f"{path.name[:40]}.{secrets.token_hex(4)}.partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        self.descriptor: int | None = os.open(self.partial, flags, 0o666)
        self._stopped = threading.Event()
        self._flush_error: OSError | None = None
        self._flusher = threading.Thread(target=self._flush, args=(self.descriptor,), daemon=True)
        try:
            os.ftruncate(self.descriptor, size)
            self._flusher.start()
        except BaseException:
            self.discard()
            raise

    def _flush(self, descriptor: int) -> None:
        """Send to the disk what is written, while more is computed, so that little is left to wait for at the end."""
        while not self._stopped.wait(FLUSH_SECONDS):
            try:
                os.fsync(descriptor)
            except OSError as error:  # the system tells it only once, so it must not be lost
                self._flush_error = error
                return

    def write_at(self, view: memoryview, offset: int) -> None:
        assert self.descriptor is not None
        while view:
            if hasattr(os, "pwrite"):
                done = os.pwrite(self.descriptor, view, offset)
            else:
                with SEEK_LOCK:
                    os.lseek(self.descriptor, offset, os.SEEK_SET)
                    done = os.write(self.descriptor, view)
            view, offset = view[done:], offset + done

    def commit(self) -> None:
        """Make the bytes durable, then the name."""
        assert self.descriptor is not None
        self._stop_flusher()
        if self._flush_error is not None:
            raise self._flush_error
        os.fsync(self.descriptor)
        self._close()
        self.partial.replace(self.path)
        with suppress(OSError):  # not every system lets a directory be opened or synced
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        self._close()
        self.partial.unlink(missing_ok=True)

    def _stop_flusher(self) -> None:
        self._stopped.set()
        if self._flusher.is_alive():
            self._flusher.join()

    def _close(self) -> None:
        self._stop_flusher()
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# The plan and the merger
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A look at a whole tensor that a method needs before it merges: slerp's angle, or a digit of trim's threshold."""

    kind: str
    shift: int = 0


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output: where it comes from, how it is made and where it goes."""

    name: str
    base: TensorInfo
    finetuned: tuple[tuple[int, TensorInfo], ...]  # the models that have it, by number
    output: TensorInfo
    merged: bool  # False: copied from the base
    settings: TensorSettings
    method: str

    @cached_property
    def spec(self) -> KernelSpec:
        """The kernel that merges it. Slerp, once the angle is known, is linear."""
        types = {info.dtype for _, info in self.finetuned} or {self.base.dtype}
        wide = "F64" in types | {self.base.dtype, self.output.dtype}
        common = types.pop() if len(types) == 1 else "F64" if wide else "F32"
        return KernelSpec("ties" if self.method == "ties" else "linear", self.base.dtype, common, self.output.dtype)

    def survey_spec(self, stage: Stage) -> KernelSpec:
        return dataclasses.replace(self.spec, kind=stage.kind, output=self.spec.real)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        if not self.merged or not self.finetuned or not self.base.count:
            return ()
        if self.method == "slerp":
            return (Stage("angle"),)
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

    def chunks(self, size: int) -> Iterator[tuple[int, int]]:
        """Where each chunk starts, and how long it is."""
        for start in range(self.start, self.stop, size):
            yield start, min(size, self.stop - start)

    @property
    def bytes_read(self) -> int:
        inputs = (self.tensor.base, *(info for _, info in self.tensor.finetuned))
        width = sum(STORED_BITS[info.dtype] // 8 for info in inputs) if self.tensor.merged else len(inputs)
        return (self.stop - self.start) * width


@dataclass(frozen=True)
class Plan:
    """Everything that a merge will do, known before a byte is written."""

    output: Path
    base: str
    models: tuple[str, ...]
    config: DareConfig
    tensors: tuple[TensorPlan, ...]
    header: bytes
    threads: int
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        last = self.tensors[-1].output if self.tensors else TensorInfo("U8", (0,), 0)
        return len(self.header) + last.offset + last.nbytes

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
        return sum((1 + len(t.stages)) * (t.base.nbytes + sum(i.nbytes for _, i in t.finetuned)) for t in self.tensors)

    def rounds(self) -> Iterator[Iterator[Job]]:
        """Sets of jobs, each to be finished before the next: for a batch of tensors, look, look again, merge.

        A batch is small enough to be read again from the system's cache, and large enough to keep all threads busy.
        """
        batch: list[TensorPlan] = []
        elements = 0
        for tensor in self.tensors:
            batch.append(tensor)
            elements += tensor.base.count
            if tensor is self.tensors[-1] or (tensor.stages and elements >= BATCH_ELEMENTS):
                for k in range(max(len(t.stages) for t in batch)):
                    yield self._jobs([t for t in batch if k < len(t.stages)], k)
                yield self._jobs(batch)
                batch, elements = [], 0

    def _jobs(self, tensors: list[TensorPlan], stage: int | None = None) -> Iterator[Job]:
        number = 0
        for tensor in tensors:
            length = tensor.base.count if tensor.merged else tensor.base.nbytes
            for start in range(0, length, JOB_CHUNKS * self.chunk):
                looking = None if stage is None else tensor.stages[stage]
                yield Job(number, tensor, start, min(start + JOB_CHUNKS * self.chunk, length), looking)
                number += 1

    def __str__(self) -> str:
        merged = [tensor for tensor in self.tensors if tensor.merged]
        parameters = sum(tensor.base.count for tensor in merged)
        rates = [f"{rate:g}" for rate in self.config.general(len(self.models)).drop_rates]
        lines = [
            f"would merge {len(self.models)} model{'s' * (len(self.models) != 1)} into {self.output}",
            f"  {len(merged):,} tensors merged ({parameters:,} parameters), {len(self.tensors) - len(merged):,} copied",
            f"  method {self.config.method}, drop rate {', '.join(dict.fromkeys(rates))}, seeds {self._seeds()}",
            f"  {human(self.bytes_to_read)} to read, {human(self.size)} to write, {self.threads} threads",
        ]
        for i, name in enumerate(self.models):
            lines.append(f"  {name}: {len(self.missing[i]):,} tensors missing, {len(self.extra[i]):,} extra")
        return "\n".join(lines)

    def _seeds(self) -> str:
        return ", ".join(str(self.config.seed + i) for i in range(len(self.models)))


def human(size: float) -> str:
    """Bytes for people, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


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


@dataclass(frozen=True)
class MergeReport:
    """What a merge did. Prints as a table; as_dict gives plain data."""

    output: str
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
        rows = [["model", "seed", "parameters", "dropped", "mean |delta|", "largest", "above", "missing"]]
        for model in self.models:
            rows.append(
                [
                    model.name,
                    str(model.seed),
                    f"{model.parameters:,}",
                    f"{model.dropped_share:.3%}",
                    f"{model.mean_delta:.3g}",
                    f"{model.largest_delta:.3g}",
                    f"{model.share_above_threshold:.2%}",
                    f"{len(model.missing_tensors):,}",
                ]
            )
        count = f"{len(self.models)} model{'s' * (len(self.models) != 1)}"
        return (
            f"{table(rows)}\n(above: share of parameters with |delta| > {self.delta_threshold:g})\n"
            f"merged {count} into {self.output}: {self.tensors:,} tensors ({self.copied_tensors:,} copied), "
            f"{human(self.bytes_read)} read, {human(self.bytes_written)} written in {self.seconds:.2f} s"
        )


def table(rows: list[list[str]]) -> str:
    """Aligned columns: the first to the left, numbers to the right."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
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

    def __init__(self, plan: Plan) -> None:
        models, row = len(plan.models), plan.chunk * plan.itemsize
        self.base = aligned((row,), np.uint8)
        self.finetuned = aligned((models, row), np.uint8)
        self.output = aligned((row,), np.uint8)
        self.words = aligned((models + 1, WORDS), np.uint64)
        self.reals = aligned((models + 1, REALS), np.float64)
        self.scratch = aligned((SCRATCH_ROWS + models + 1, SCRATCH_WIDTH), np.float64)
        trims = any(stage.kind == "count" for tensor in plan.tensors for stage in tensor.stages)
        self.counts = aligned((models, 1 << DIGIT_BITS) if trims else (1, 1), np.uint32)
        self.sums: dict[int, NDArray[np.float64]] = {}  # slerp's three products, by chunk
        buffers = (self.base, self.finetuned, self.output, self.words, self.reals, self.scratch, self.counts)
        self.addresses = tuple(buffer.ctypes.data for buffer in buffers)


@dataclass
class Outcome:
    """What one job found: a tally per model that has the tensor, or the models that differ from a copied base."""

    job: Job
    tallies: dict[int, Tally] = field(default_factory=dict)
    differing: set[int] = field(default_factory=set)


class Ledger:
    """What all jobs found, per model: the tally of each merged tensor, and the copied tensors that differ."""

    def __init__(self, models: int) -> None:
        self.tallies: list[dict[str, Tally]] = [{} for _ in range(models)]
        self.differing: list[set[str]] = [set() for _ in range(models)]

    def add(self, outcome: Outcome) -> None:
        name = outcome.job.tensor.name
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

    def __init__(self, tensor: TensorPlan, chunk: int, slerp_t: float) -> None:
        self.tensor, self.slerp_t = tensor, slerp_t
        self.jobs = -(-tensor.base.count // (JOB_CHUNKS * chunk))
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


class Worker:
    """Runs jobs of one plan: any of them, in any order, in any thread that brings its own workspace."""

    def __init__(self, plan: Plan, base: Checkpoint, models: Sequence[Checkpoint], output: OutputFile) -> None:
        self.plan, self.base, self.models, self.output = plan, base, models, output
        merged = [tensor for tensor in plan.tensors if tensor.merged and tensor.base.count]
        specs = {spec for t in merged for spec in (t.spec, *(t.survey_spec(stage) for stage in t.stages))}
        self.kernels = {spec: load_kernel(spec) for spec in sorted(specs, key=str)}
        self.surveys = {t.name: Survey(t, plan.chunk, plan.config.position) for t in merged if t.stages}
        self.weights = plan.config.shares(len(models))

    def run(self, job: Job, work: Workspace) -> Outcome:
        if job.stage is not None:
            return self._look(job, work)
        return self._merge(job, work) if job.tensor.merged else self._copy(job, work)

    def _look(self, job: Job, work: Workspace) -> Outcome:
        assert job.stage is not None
        kernel = self.kernels[job.tensor.survey_spec(job.stage)]
        self._tell(job, work)
        work.counts[:] = 0
        work.sums = {}
        for start, count in job.chunks(self.plan.chunk):
            kernel(*work.addresses, *self._load(job.tensor, start, count, work), job.stage.shift)
            if job.stage.kind == "angle":
                work.sums[start] = work.reals[len(job.tensor.finetuned), :3].copy()
        return Outcome(job)

    def _merge(self, job: Job, work: Workspace) -> Outcome:
        tensor, spec = job.tensor, job.tensor.spec
        kernel, item = self.kernels[spec], FORMATS[spec.output].bits // 8
        exact = int(len(tensor.finetuned) == 1 and tensor.settings.gives_back(self.weights))
        offset = len(self.plan.header) + tensor.output.offset
        self._tell(job, work)
        for start, count in job.chunks(self.plan.chunk):
            kernel(*work.addresses, *self._load(tensor, start, count, work), exact)
            self.output.write_at(work.output.data[: count * item], offset + start * item)
        models = len(tensor.finetuned)
        patterns = work.words[: models + 1, PEAK].astype(FORMATS[spec.real].raw)
        peaks = patterns.view(FORMATS[spec.real].real).astype(np.float64)
        if not (peaks[models] < FORMATS[spec.output].limit and np.isfinite(peaks).all()):
            self._explain_non_finite(job, work)
        tallies = {i: self._tally(job, work, row, float(peaks[row])) for row, (i, _) in enumerate(tensor.finetuned)}
        return Outcome(job, tallies)

    def _tell(self, job: Job, work: Workspace) -> None:
        """Set what the kernels must know, and clear what they count."""
        tensor, survey = job.tensor, self.surveys.get(job.tensor.name)
        for row, (i, _) in enumerate(tensor.finetuned):
            slot = survey.prefixes[row] if survey and job.stage and job.stage.kind == "count" else i
            limit = keep_threshold(tensor.settings.drop_rates[i]) - 1
            work.words[row] = (*mask_key(self.plan.config.seed + i, tensor.name), limit, slot, 0, 0, 0)
            work.reals[row] = (*self._scales(tensor, row, i, survey, job.stage), 0.0)
        pull = sum(survey.ends) - 1 if survey and tensor.method == "slerp" else 0.0
        work.words[len(tensor.finetuned)] = 0
        work.reals[len(tensor.finetuned)] = tensor.settings.lambda_coeff, pull, self.plan.config.delta_threshold, 0.0

    def _load(self, tensor: TensorPlan, start: int, count: int, work: Workspace) -> tuple[int, ...]:
        """Read a chunk of every input. Gives the numbers that the kernels want."""
        wanted = FORMATS[tensor.spec.finetuned]
        self._read(self.base, tensor.base, start, count, work.base)
        for row, (i, info) in enumerate(tensor.finetuned):
            stored = self._read(self.models[i], info, start, count, work.finetuned[row])
            if info.dtype != tensor.spec.finetuned:
                work.finetuned[row].view(wanted.real)[:count] = widen(stored.copy(), info.dtype)
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
        count, models = job.stop - job.start, len(job.tensor.finetuned)
        expected = count * keep_rate(job.tensor.settings.drop_rates[job.tensor.finetuned[row][0]])
        above, kept = int(work.words[row, ABOVE]), int(work.words[row, KEPT])
        return Tally(count, float(work.reals[row, SUM]), peak, above, kept, expected, float(work.reals[models, SUM]))

    def _copy(self, job: Job, work: Workspace) -> Outcome:
        outcome, tensor = Outcome(job), job.tensor
        for start, size in job.chunks(self.plan.chunk):
            mine, theirs = work.base.data[:size], work.output.data[:size]
            self.base.read_into(mine, tensor.base.offset + start)
            for i, info in tensor.finetuned:
                if info.dtype == tensor.base.dtype:
                    self.models[i].read_into(theirs, info.offset + start)
                if info.dtype != tensor.base.dtype or mine != theirs:
                    outcome.differing.add(i)
            self.output.write_at(mine, len(self.plan.header) + tensor.output.offset + start)
        if outcome.differing and tensor.base.dtype.startswith(QUANTISED):
            name = self.models[min(outcome.differing)].name
            raise DareError(
                f"tensor {tensor.name!r} is quantised ({tensor.base.dtype}) and differs in {name!r}",
                "merge the models before quantising them",
            )
        return outcome

    def _read(
        self, checkpoint: Checkpoint, info: TensorInfo, start: int, count: int, buffer: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        item = FORMATS[info.dtype].bits // 8
        part = buffer[: count * item]
        checkpoint.read_into(part.data, info.offset + start * item)
        return part

    def _explain_non_finite(self, job: Job, work: Workspace) -> NoReturn:
        """Name the first value that no merge can use. Off the fast path, so it reads again and looks with NumPy."""
        tensor = job.tensor
        for checkpoint, info in [(self.base, tensor.base), *((self.models[i], info) for i, info in tensor.finetuned)]:
            for start, count in job.chunks(self.plan.chunk):
                values = widen(self._read(checkpoint, info, start, count, work.base), info.dtype)
                bad = np.flatnonzero(~np.isfinite(values))
                if bad.size:
                    place = [int(k) for k in np.unravel_index(start + int(bad[0]), tensor.base.shape)]
                    raise DareError(
                        f"{checkpoint.name!r}: tensor {tensor.name!r} holds {values[bad[0]]} at {place}",
                        "such a model is broken; use a checkpoint from before that happened",
                    )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of {tensor.output.dtype}",
            "lower lambda_coeff, the weights or the drop rate, or choose a wider dtype",
        )


def run_jobs(jobs: Iterator[Job], worker: Worker, spaces: list[Workspace], done: Callable[[Outcome], None]) -> None:
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
                outcome = worker.run(job, work)
                with lock:
                    if job.stage is not None:
                        worker.surveys[job.tensor.name].add(job, work)
                    done(outcome)
        except BaseException as error:
            failures[number] = error
            stop.set()

    threads = [threading.Thread(target=loop, args=(work,)) for work in spaces]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # with a timeout, so that an interrupt reaches the main thread on every system
    finally:
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[min(failures)]


@contextmanager
def progress(total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes, rate and time left on stderr, if that is a terminal. Gives the function that advances it."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("merging", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("merging", total=total)
        yield lambda amount: bar.advance(task, amount)


class DareMerger:
    """Merges models fine-tuned from one base: DareMerger(base, [first, second], config).merge(output)."""

    def __init__(
        self,
        base_file: str | Path | Source,
        merge_files: Sequence[str | Path | Source],
        config: DareConfig | None = None,
        *,
        fingerprints: Sequence[dict[str, Any]] = (),
    ) -> None:
        """fingerprints: what a recipe says of its inputs, base first; other files are then refused."""
        if isinstance(merge_files, str | Path):
            raise ConfigError("merge_files must be a list of files, not a single path", "put it in brackets")
        if not merge_files:
            raise ConfigError("there are no models to merge", "name at least one fine-tuned model")
        self.base = Source.of(base_file)
        self.models = tuple(Source.of(file) for file in merge_files)
        if config is not None and not isinstance(config, DareConfig):
            raise ConfigError("config must be a DareConfig", "like DareConfig(drop_rate=0.9)")
        self.config = config or DareConfig()
        self.config.check_models(len(self.models))
        self.fingerprints = tuple(fingerprints)

    def plan(self, output_file: str | Path, *, force: bool = False) -> Plan:
        """Check everything and say what merge would do; write nothing."""
        with self._opened() as (base, models):
            return self._plan(base, models, Source.of(output_file).path, force)

    def merge(self, output_file: str | Path, *, force: bool = False) -> MergeReport:
        """Merge, and say what was done. force replaces an existing file that this tool did not make."""
        started = time.perf_counter()
        with self._opened() as (base, models):
            plan = self._plan(base, models, Source.of(output_file).path, force)
            try:
                ledger = self._run(plan, base, models)
            except OSError as error:
                raise DareError(
                    f"cannot write {str(output_file)!r}: {error.strerror or error}",
                    "nothing was changed; mend that and retry",
                ) from None
        warnings = (*plan.warnings, *findings(plan, ledger))
        for warning in warnings:
            LOG.warning(warning)
        return MergeReport(
            output=str(output_file),
            tensors=len(plan.tensors),
            copied_tensors=sum(not tensor.merged for tensor in plan.tensors),
            bytes_read=plan.bytes_to_read,
            bytes_written=plan.size,
            seconds=time.perf_counter() - started,
            delta_threshold=self.config.delta_threshold,
            models=tuple(model_report(plan, i, ledger.total(i)) for i in range(len(models))),
            warnings=warnings,
        )

    @contextmanager
    def _opened(self) -> Iterator[tuple[Checkpoint, list[Checkpoint]]]:
        opened: list[Checkpoint] = []
        load_numpy()
        try:
            for source in (self.base, *self.models):
                opened.append(Checkpoint(source))
            yield opened[0], opened[1:]
        finally:
            for checkpoint in opened:
                checkpoint.close()

    def _plan(self, base: Checkpoint, models: list[Checkpoint], output: Path, force: bool) -> Plan:
        self._check_fingerprints([base, *models])
        target = check_output(output, [base, *models], force)
        tensors, offset = [], 0
        for name in base.tensors:
            tensors.append(self._plan_tensor(name, base, models, offset))
            offset += tensors[-1].output.nbytes
        for model in models:
            if not model.tensors.keys() & base.tensors.keys():
                raise DareError(
                    f"{model.name!r} has no tensor in common with {base.name!r}",
                    f"the base has {listed(list(base.tensors))}; it has {listed(list(model.tensors))}",
                )
        # More threads than jobs would only take memory.
        most = sum(-(-max(t.base.count, t.base.nbytes * (not t.merged)) // (JOB_CHUNKS * MIN_CHUNK)) for t in tensors)
        recipe = self._recipe([base, *models])
        header = header_bytes({t.name: t.output for t in tensors}, {"format": "pt", RECIPE_KEY: recipe})
        plan = Plan(
            output=target,
            base=base.name,
            models=tuple(model.name for model in models),
            config=self.config,
            tensors=tuple(tensors),
            header=header,
            threads=max(1, min(self.config.threads or usable_cores(), most)),
            missing=tuple(tuple(n for n in base.tensors if n not in model.tensors) for model in models),
            extra=tuple(tuple(n for n in model.tensors if n not in base.tensors) for model in models),
            warnings=(*_odd_inputs(base, models), *self._odd_settings(base)),
        )
        free = shutil.disk_usage(target.parent).free
        if plan.size > free:
            raise DareError(
                f"the output needs {human(plan.size)} and {str(target.parent)!r} has {human(free)} free",
                "make room, or write to another disk",
            )
        return plan

    def _plan_tensor(self, name: str, base: Checkpoint, models: list[Checkpoint], offset: int) -> TensorPlan:
        info = base.tensors[name]
        merged = info.dtype in FORMATS
        found = []
        for i, model in enumerate(models):
            theirs = model.tensors.get(name)
            if theirs is None:
                continue
            if theirs.shape != info.shape:
                raise DareError(
                    f"tensor {name!r} is {list(info.shape)} in {base.name!r} "
                    f"and {list(theirs.shape)} in {model.name!r}",
                    "only models fine-tuned from this very base can be merged",
                )
            if (theirs.dtype in FORMATS) != merged:
                raise DareError(
                    f"tensor {name!r} is {info.dtype} in {base.name!r} and {theirs.dtype} in {model.name!r}",
                    f"only {', '.join(FORMATS)} tensors can be merged, with one another",
                )
            found.append((i, theirs))
        dtype = DTYPES[self.config.dtype] if merged and self.config.dtype else info.dtype
        settings = self.config.for_tensor(name, len(models))
        output = TensorInfo(dtype, info.shape, offset)
        return TensorPlan(name, info, tuple(found), output, merged, settings, self.config.method)

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

    def _check_fingerprints(self, inputs: list[Checkpoint]) -> None:
        for checkpoint, entry in zip(inputs, self.fingerprints, strict=False):
            found = {"size": checkpoint.status.st_size, "header_sha256": checkpoint.header_sha256}
            for key, value in found.items():
                if entry.get(key, value) != value:
                    raise DareError(
                        f"{checkpoint.name!r} is not the file that the recipe was made with: its {key} is {value}, "
                        f"not {entry[key]}",
                        "find that file, or take the [recipe] table out to merge this one",
                    )

    def _recipe(self, inputs: list[Checkpoint]) -> str:
        """Every setting that determines the bytes, and nothing else, as a configuration that makes them again."""
        import tomli_w

        return tomli_w.dumps(
            {
                "dare": self.config.resolved(),
                "models": {"base_file": self.base.name, "merge_files": [source.name for source in self.models]},
                **({"rules": [rule.as_table() for rule in self.config.checked_rules]} if self.config.rules else {}),
                "recipe": {
                    "version": __version__,
                    "mask": MASK_NAME,
                    "seeds": [self.config.seed + i for i in range(len(self.models))],
                    "inputs": [
                        {"file": c.name, "size": c.status.st_size, "header_sha256": c.header_sha256} for c in inputs
                    ],
                },
            }
        )

    def _run(self, plan: Plan, base: Checkpoint, models: list[Checkpoint]) -> Ledger:
        ledger = Ledger(len(models))
        output = OutputFile(plan.output, plan.size)
        try:
            output.write_at(memoryview(plan.header), 0)
            worker = Worker(plan, base, models, output)
            with progress(plan.bytes_to_read, self.config.verbose) as advance:

                def done(outcome: Outcome) -> None:
                    ledger.add(outcome)
                    advance(outcome.job.bytes_read)

                spaces = [Workspace(plan) for _ in range(plan.threads)]
                for jobs in plan.rounds():
                    run_jobs(jobs, worker, spaces, done)
            output.commit()
        finally:
            output.discard()
        return ledger


def findings(plan: Plan, ledger: Ledger) -> Iterator[str]:
    """What a person should know about each model, in a sentence or two at most."""
    for i, name in enumerate(plan.models):
        if plan.missing[i]:
            yield f"{name} lacks {len(plan.missing[i]):,} tensors of the base: {listed(plan.missing[i])}; unchanged"
        if plan.extra[i]:
            yield f"{name} has {len(plan.extra[i]):,} tensors that the base lacks: {listed(plan.extra[i])}; ignored"
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
    )


def _odd_inputs(base: Checkpoint, models: list[Checkpoint]) -> Iterator[str]:
    for i, model in enumerate(models):
        if os.path.samestat(model.status, base.status):
            yield f"{model.name} is the base itself, given as a model to merge"
        if any(os.path.samestat(model.status, earlier.status) for earlier in models[:i]):
            yield f"{model.name} is given more than once; each time gets its own mask and counts fully"


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
        description="Merge models fine-tuned from the same base by DARE: drop most of each delta at random, "
        "rescale the rest, average, add to the base.",
        epilog="Flags beat TOML, TOML beats defaults. Paths in TOML are relative to the TOML file. "
        "Exit status: 0 done, 1 the merge failed, 2 wrong usage or configuration, 130 interrupted.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    # As argparse has it, -1e-3 looks like an option.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    add = parser.add_argument
    each: dict[str, Any] = {"type": float, "nargs": "+"}
    add("-c", "--config", metavar="FILE", type=Path, help="TOML configuration, or the recipe of an earlier merge")
    add("-b", "--base", metavar="FILE", help="the model that the others were fine-tuned from")
    add("-m", "--merge", metavar="FILE", nargs="+", action="extend", help="the fine-tuned models to merge")
    add("-o", "--output", metavar="FILE", help="where to write the merged model")
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
    add("--dtype", metavar="NAME", help="output type: float32, float16, bfloat16 or float64 (default: the base's)")
    add("--rule", dest="rules", metavar="RULE", action="append", help="PATTERN:SETTING=VALUE,... for matching tensors")
    add("--delta-threshold", metavar="X", type=float, help="warn where deltas are larger than this (default 0.002)")
    add("--seed", metavar="N", type=int, help="the first model's seed; model i uses N + i (default 42)")
    add("--threads", metavar="N", type=int, help="threads to use (default: all cores this process may use)")
    add("--force", action="store_true", help="replace an existing file that this tool did not make")
    add("--dry-run", action="store_true", help="check everything but the values, print the plan, write nothing")
    add("-v", "--verbose", action="store_true", help="show progress and summary (default)")
    add("-q", "--quiet", action="store_false", dest="verbose", help="no progress or summary, only warnings and errors")
    add("--version", action="version", version=f"dare {__version__}")
    return parser


def parse_flags(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = build_parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("-"):
        hint = "files go after --config, --base, --merge or --output"
        raise ConfigError(f"{unknown[0]!r} is not expected here", hint)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ConfigError(f"there is no option {unknown[0]!r}", nearest(unknown[0].split("=")[0], known))
    return vars(flags)


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
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"--rule {text!r} must be PATTERN:SETTING=VALUE", example) from None
    return Rule.of({**table, "match": pattern}, f"--rule {text!r}")


def run(arguments: Sequence[str] | None) -> None:
    flags = parse_flags(arguments)
    settings = layered(flags)
    config = DareConfig(**settings.dare, rules=settings.rules)
    LOG.setLevel(logging.INFO if config.verbose else logging.WARNING)
    if settings.base is None:
        raise ConfigError("there is no base model", "give --base FILE, or base_file in [models] of a --config file")
    if not settings.merge:
        raise ConfigError("there are no models to merge", "give --merge FILE..., or merge_files in [models]")
    if settings.output is None:
        raise ConfigError("there is no output file", "give --output FILE, or output_file in [models]")
    merger = DareMerger(settings.base, settings.merge, config, fingerprints=settings.inputs)
    force = "force" in flags
    if "dry_run" in flags:
        plan = merger.plan(settings.output, force=force)
        for warning in plan.warnings:
            LOG.warning(warning)
        print(plan)
        return
    report = merger.merge(settings.output, force=force)
    if config.verbose:
        print(report)


class Messages(logging.StreamHandler[IO[str]]):
    """Warnings and notes on stderr, one to a line, as the command's errors are."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return f"warning: {text}" if record.levelno >= logging.WARNING else text


class Terminated(BaseException):
    """Somebody sent SIGTERM: to be handled like an interrupt."""


def _terminate(*_: object) -> NoReturn:
    raise Terminated


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives the exit status; no traceback reaches a user."""
    # Closed by the caller, as after >&- or 2>&-, they are None; they stay open here as long as the process lives.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal lacks letters for is no error
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    before = None
    with suppress(ValueError):  # only a main thread may take signals
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        run(arguments)
        sys.stdout.flush()
        return 0
    except DareError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.status
    except (KeyboardInterrupt, Terminated) as stopped:
        print("interrupted", file=sys.stderr)
        return 143 if isinstance(stopped, Terminated) else 130
    except BrokenPipeError:  # whoever read our output has read enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (so that the interpreter's last flush finds a home)
        return 0
    except Exception as error:
        if os.environ.get("DARE_TRACEBACK"):
            raise
        print(f"error: unexpected {type(error).__name__}: {error}", file=sys.stderr)
        print("hint: this is a bug; run again with DARE_TRACEBACK=1 set and report what it shows", file=sys.stderr)
        return 1
    finally:
        LOG.removeHandler(messages)
        LOG.propagate = True
        if before is not None:
            signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
