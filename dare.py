"""DARE: merge fine-tuned models into one, by dropping most of what each has learned and rescaling the rest.

    delta_i = finetuned_i - base                     what fine-tuning changed
    kept_i  = mask_i * delta_i / r                   drop at random, keep a share r, rescale by 1 / r
    merged  = sum of w_i * kept_i                    combine the models, in the order given
    output  = base + merged

Dropping changes no expectation, and fine-tuned models bear it surprisingly well: Yu et al., "Language Models are
Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", ICML 2024, arXiv:2311.03099.

This one file is the whole tool, in the order in which it is best read: constants and errors, configuration, the mask,
the arithmetic kernels, reading checkpoints, writing checkpoints, the plan and the merger, the command line. Each
section depends only on those above it.

    python dare.py --config merge_config.toml        from the shell
    from dare import DareConfig, DareMerger          from a script
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import difflib
import hashlib
import importlib
import json
import logging
import math
import os
import secrets
import shutil
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__version__ = "0.1.0"
__all__ = ["ConfigError", "DareConfig", "DareError", "DareMerger", "MergeReport", "ModelReport", "Plan"]

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

# Jobs are chunks of at most a million elements: large enough that calls cost nothing, small enough for the caches.
MAX_CHUNK: Final = 1 << 20
MIN_CHUNK: Final = 1 << 14
# All the buffers of all the threads together; with the interpreter and NumPy the process stays near 150 MB.
BUFFER_BYTES: Final = 64 << 20

# A fine-tune's delta is a small part of its weights; two unrelated models differ by more than either weighs.
UNRELATED_RATIO: Final = 0.5
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 1 << 63


# For each setting: what it must be, in words, and the test for it. Every NaN fails its comparison.
CHECKS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "drop_rate": ("a number from 0 up to but not including 1", lambda v: _is_number(v) and 0 <= v < 1),
    "delta_threshold": ("a number above 0", lambda v: _is_number(v) and v > 0),
    "seed": ("a whole number from 0 to 2^63 - 1", lambda v: _is_count(v, 0)),
    "threads": ("a whole number from 1 up", lambda v: _is_count(v, 1)),
    "verbose": ("true or false", lambda v: isinstance(v, bool)),
}


def check_setting(name: str, value: object, where: str) -> None:
    wanted, accepts = CHECKS[name]
    if not accepts(value):
        raise ConfigError(f"{where} must be {wanted}, not {value!r}", "--help says what it does")


@dataclass(frozen=True)
class DareConfig:
    """How to merge. Every field is also a key of [dare] in TOML and a flag of the command."""

    drop_rate: float = 0.9  # share of each delta to drop
    delta_threshold: float = 0.002  # warn where deltas are larger; the paper's limit for safe dropping
    seed: int = 42  # the first model's seed; model i draws its mask with seed + i
    threads: int | None = None  # None: all cores that this process may use
    verbose: bool = True  # progress and summary

    def __post_init__(self) -> None:
        for setting in dataclasses.fields(self):
            value = getattr(self, setting.name)
            if value is not None or setting.default is not None:
                check_setting(setting.name, value, setting.name)


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and where that is on this machine."""

    name: str
    path: Path

    @classmethod
    def of(cls, given: str | Path | Source, folder: Path | None = None) -> Source:
        if isinstance(given, Source):
            return given
        return cls(str(given), Path(folder or "", Path(given).expanduser()))


@dataclass(frozen=True)
class Settings:
    """What a TOML file, or a TOML file with flags on top, asks for."""

    dare: dict[str, Any] = field(default_factory=dict)
    base: Source | None = None
    merge: tuple[Source, ...] = ()
    output: Path | None = None
    inputs: tuple[dict[str, Any], ...] = ()  # fingerprints of base and models, where the file is a recipe


# The keys that each table of a configuration may have. [recipe] is there so that a recipe is itself a configuration.
TABLES: Final[dict[str, tuple[str, ...]]] = {
    "dare": tuple(CHECKS),
    "models": ("base_file", "merge_files", "output_file"),
    "recipe": ("version", "mask", "seeds", "inputs"),
}


def load_settings(path: Path) -> Settings:
    """Read a TOML configuration, or a recipe taken out of a merged file. Paths in it are relative to it."""
    tables = _read_toml(path)
    dare, models, recipe = (tables.get(name, {}) for name in TABLES)
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
        inputs=_fingerprints(path, recipe),
    )


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}", "check the path after --config") from None
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", "give --config a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", "see merge_config.toml for an example") from None
    for name, table in tables.items():
        if name not in TABLES:
            raise ConfigError(f"{path}: there is no table [{name}]", nearest(name, TABLES))
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table", f"write [{name}] on a line of its own")
        for key in table:
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


def mask_key(seed: int, name: str) -> tuple[int, int]:
    """Philox's key for one model and one tensor: a digest, so that related seeds and names give unrelated masks."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    low, high = struct.unpack("<II", digest)
    return low, high


def draw(bits: Any, tile: int, k0: Any, k1: Any) -> None:
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


def decode_bf16(raw: Any) -> Any:
    return np.uint32(np.uint32(raw) << np.uint32(16)).view(np.float32)


def decode_f16(raw: Any) -> Any:
    magnitude = np.uint32(raw) & np.uint32(0x7FFF)
    sign = (np.uint32(raw) & np.uint32(0x8000)) << np.uint32(16)
    shifted = magnitude << np.uint32(13)
    # Subnormals by way of a float that is 2^-14 too large: exact, and never a subnormal float32 on the way.
    small = np.float32(np.uint32(shifted + np.uint32(0x38800000)).view(np.float32)) - np.float32(2.0**-14)
    normal = shifted + (np.uint32(0x7F800000) if magnitude >= np.uint32(0x7C00) else np.uint32(112 << 23))
    value = np.float32(small).view(np.uint32) if magnitude < np.uint32(0x400) else normal
    return np.uint32(np.uint32(value) | sign).view(np.float32)


def decode_f32(raw: Any) -> Any:
    return np.uint32(raw).view(np.float32)


def decode_f64(raw: Any) -> Any:
    return np.uint64(raw).view(np.float64)


def same(value: Any) -> Any:
    return value


def round_to_odd(value: Any) -> Any:
    """float64 to a float32 that rounds on to 16 bits just as the float64 would: truncate, and mark what was cut off."""
    near = np.float32(value)
    bits = np.float32(near).view(np.uint32)
    if abs(np.float64(near)) > abs(value):
        bits = np.uint32(bits - np.uint32(1))
    if np.float64(np.uint32(bits).view(np.float32)) != value:
        bits = np.uint32(bits | np.uint32(1))
    return np.uint32(bits).view(np.float32)


def encode_bf16(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


def encode_f16(value: Any) -> Any:
    bits = np.float32(value).view(np.uint32)
    sign = np.uint32((bits & np.uint32(0x80000000)) >> np.uint32(16))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # Subnormals: adding 0.5 leaves the wanted bits, rounded to nearest even, at the low end of the float.
    nudged = np.float32(np.uint32(magnitude).view(np.float32)) + np.float32(0.5)
    small = np.float32(nudged).view(np.uint32) - np.uint32(0x3F000000)
    rounding = np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(magnitude + rounding - np.uint32(112 << 23)) >> np.uint32(13)
    return np.uint16((small if magnitude < np.uint32(0x38800000) else normal) | sign)


def encode_f32(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


def encode_f64(value: Any) -> Any:
    return np.float64(value).view(np.uint64)


def thin(finetuned: Any, base: Any, bits: Any, limit: Any, scale: Any, size: Any, kept: Any) -> None:
    """One tile of one model: |delta| into size; scale * delta where the mask keeps it, 0 elsewhere, into kept."""
    for j in range(TILE):
        delta = finetuned[j] - base[j]
        size[j] = abs(delta)
        kept[j] = delta * scale if bits[j] <= limit else 0


def combine_linear(kept: Any, models: int, merged: Any) -> None:
    for j in range(TILE):
        merged[j] = 0
    for i in range(models):
        row = kept[i]
        for j in range(TILE):
            merged[j] += row[j]


def fold(values: Any) -> Any:
    """The sum of a tile, by halves: it vectorises, and it loses less than a running sum. Overwrites the tile."""
    half = TILE // 2
    while half > 0:
        for j in range(half):
            values[j] += values[j + half]
        half //= 2
    return values[0]


def larger_or_inf(peak: Any, value: Any) -> Any:
    """A running maximum that turns to infinity at a NaN, and so cannot lose it."""
    if value < np.inf:
        return value if value > peak else peak
    return np.inf


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


FORMATS: Final = {
    "BF16": Format(decode_bf16, encode_bf16, 16, 2.0**128 - 2.0**119),
    "F16": Format(decode_f16, encode_f16, 16, 65520.0),
    "F32": Format(decode_f32, encode_f32, 32, 2.0**128 - 2.0**103),
    "F64": Format(decode_f64, encode_f64, 64, math.inf),
}

# Columns of a merge kernel's statistics. Row i is model i; the last row has the base's sum and the output's peak.
SUM, PEAK, ABOVE, KEPT = range(4)
# Rows of scratch before the models' kept deltas, and their width. Rows of exactly 4 KiB would share cache sets.
SCRATCH_ROWS: Final = 5
SCRATCH_WIDTH: Final = TILE + 80


@dataclass(frozen=True)
class KernelSpec:
    """Which merge kernel: the stored types that it reads and writes."""

    base: str
    finetuned: str
    output: str

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        return "F64" if "F64" in (self.base, self.finetuned, self.output) else "F32"

    def __str__(self) -> str:
        return f"linear-{self.base}-{self.finetuned}-{self.output}"


def build_merge(spec: KernelSpec) -> Any:
    """Compile the loop that merges one chunk: decode, subtract, mask, accumulate, encode, tile by tile in the cache."""
    numba: Any = importlib.import_module("numba")
    types, carray = numba.types, numba.carray
    inline = numba.njit(forceinline=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
    wide = spec.real == "F64"
    real: Any = np.float64 if wide else np.float32
    unsigned: Any = np.uint64 if wide else np.uint32
    base_raw, finetuned_raw, output_raw = (
        np.dtype(FORMATS[name].raw).type for name in (spec.base, spec.finetuned, spec.output)
    )
    decode_base, decode_finetuned = inline(FORMATS[spec.base].decode), inline(FORMATS[spec.finetuned].decode)
    encode = inline(FORMATS[spec.output].encode)
    narrow = inline(round_to_odd if wide and FORMATS[spec.output].bits == 16 else same)
    draw_tile, thin_tile, combine, fold_tile = inline(draw), inline(thin), inline(combine_linear), inline(fold)
    larger = inline(larger_or_inf)

    def merge_chunk(
        base_at: Any,
        finetuned_at: Any,
        output_at: Any,
        keys_at: Any,
        scales_at: Any,
        scratch_at: Any,
        stats_at: Any,
        count: int,
        stride: int,
        models: int,
        first_tile: int,
        copy_finetuned: int,
        threshold: float,
    ) -> None:
        base_all = carray(base_at, (count,), base_raw)
        finetuned_all = carray(finetuned_at, (models, stride), finetuned_raw)
        output_all = carray(output_at, (count,), output_raw)
        keys = carray(keys_at, (models, 3), np.uint64)
        scales = carray(scales_at, (models,), np.float64)
        stats = carray(stats_at, (models + 1, 4), np.float64)
        scratch = carray(scratch_at, (SCRATCH_ROWS + models, SCRATCH_WIDTH), real)
        bits = carray(scratch_at, (TILE,), np.uint16)
        base, finetuned, merged, size = scratch[1], scratch[2], scratch[3], scratch[4]
        kept = scratch[SCRATCH_ROWS:]
        above_this = real(threshold)
        for start in range(0, count, TILE):
            width = TILE if count - start > TILE else count - start
            if width < TILE:
                base[:] = 0
                finetuned[:] = 0
            raw = base_all[start : start + width]
            for j in range(width):
                base[j] = decode_base(raw[j])
            for j in range(TILE):
                size[j] = abs(base[j])
            stats[models, SUM] += fold_tile(size)
            for i in range(models):
                limit = np.uint16(keys[i, 2])
                draw_tile(bits, first_tile + start // TILE, keys[i, 0], keys[i, 1])
                raw_finetuned = finetuned_all[i, start : start + width]
                for j in range(width):
                    finetuned[j] = decode_finetuned(raw_finetuned[j])
                thin_tile(finetuned, base, bits, limit, real(scales[i]), size, kept[i])
                # Compared as integers, a NaN or an infinity is the largest of all, and the loop vectorises.
                peak = unsigned(0)
                above = np.uint32(0)
                for j in range(TILE):
                    pattern = real(size[j]).view(unsigned)
                    peak = pattern if pattern > peak else peak
                    above = np.uint32(above + np.uint32(size[j] > above_this))
                survivors = np.uint32(0)
                for j in range(width):
                    survivors = np.uint32(survivors + np.uint32(bits[j] <= limit))
                stats[i, SUM] += fold_tile(size)
                stats[i, PEAK] = larger(stats[i, PEAK], np.float64(unsigned(peak).view(real)))
                stats[i, ABOVE] += above
                stats[i, KEPT] += survivors
            combine(kept, models, merged)
            peak = unsigned(0)
            for j in range(TILE):
                change = merged[j]
                total = base[j] + change
                # base + 0 would turn -0.0 into 0.0; and finetuned itself is what base + (finetuned - base) stands for.
                value = base[j] if change == 0 else total
                value = finetuned[j] if copy_finetuned else value
                merged[j] = value
                pattern = real(abs(value)).view(unsigned)
                peak = pattern if pattern > peak else peak
            stats[models, PEAK] = larger(stats[models, PEAK], np.float64(unsigned(peak).view(real)))
            output = output_all[start : start + width]
            for j in range(width):
                output[j] = encode(narrow(merged[j]))

    address, number, decimal = types.voidptr, types.intp, types.float64
    return numba.cfunc(types.void(*[address] * 7, *[number] * 5, decimal))(merge_chunk)


KernelCall = Callable[..., int]


def compile_object(spec: KernelSpec, machine: Any) -> bytes:
    """The kernel as an object file that needs nothing of Numba to run.

    Loading Numba takes longer than merging a billion parameters. So Numba compiles once, and what is kept is the bare
    function: status = merge_chunk(return slot, exception slot, arguments...), its wrappers for Python left behind.
    """
    import llvmlite.binding as llvm

    function = build_merge(spec)
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
    LOG.info("compiling the merge kernel for this machine; later runs start at once")
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
    address, number, decimal = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_double
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, *[address] * 9, *[number] * 5, decimal)
    function = prototype(engine.get_function_address("kernel"))
    slots = ctypes.create_string_buffer(16)
    where = ctypes.addressof(slots)

    # The engine owns the code, and the function writes to its slots: both must live as long as the function does.
    owners = (engine, slots)
    return lambda *arguments, _owners=owners: int(function(where, where + 8, *arguments))


def widen(raw: NDArray[Any], name: str) -> NDArray[Any]:
    """Stored values as floats, in plain NumPy: for messages, and where fine-tunes are of different types."""
    if name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32) if name == "F16" else raw.view(f"f{FORMATS[name].bits // 8}")


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
    except (OSError, RuntimeError):
        raise DareError(f"the output {shown} is a link that leads nowhere", "give another path") from None
    for checkpoint in inputs:
        if target.exists() and os.path.samestat(target.stat(), checkpoint.status):
            raise ConfigError(f"the output {shown} is the input {checkpoint.name!r}", "inputs are never overwritten")
    if target.is_dir():
        raise DareError(f"the output {shown} is a directory", "name a file in it, like merged.safetensors")
    if not target.parent.is_dir():
        raise DareError(f"the output's directory {str(path.parent)!r} does not exist", "create it first")
    if not os.access(target.parent, os.W_OK):
        raise DareError(f"the output's directory {str(path.parent)!r} is not writable", "choose another directory")
    if target.exists() and not force and not made_by_dare(target):
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
        try:
            os.ftruncate(self.descriptor, size)
        except BaseException:
            self.discard()
            raise

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

    def _close(self) -> None:
        if self.descriptor is not None:
            descriptor, self.descriptor = self.descriptor, None
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# The plan and the merger
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the output: where it comes from and where it goes."""

    name: str
    base: TensorInfo
    finetuned: tuple[tuple[int, TensorInfo], ...]  # the models that have it, by number
    output: TensorInfo
    merged: bool  # False: copied from the base

    @cached_property
    def spec(self) -> KernelSpec:
        types = {info.dtype for _, info in self.finetuned} or {self.base.dtype}
        wide = "F64" in types | {self.base.dtype}
        return KernelSpec(
            self.base.dtype, types.pop() if len(types) == 1 else "F64" if wide else "F32", self.base.dtype
        )


@dataclass(frozen=True)
class Job:
    """A range of one tensor's elements (of its bytes, where it is copied): read ranges, compute, write one range."""

    number: int
    tensor: TensorPlan
    start: int
    stop: int

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
    recipe: str
    threads: int
    bytes_to_read: int
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        last = self.tensors[-1].output if self.tensors else TensorInfo("U8", (0,), 0)
        return len(self.header) + last.offset + last.nbytes

    @property
    def itemsize(self) -> int:
        """Bytes of the widest element that a buffer has to hold."""
        specs = [tensor.spec for tensor in self.tensors if tensor.merged]
        return max([FORMATS[name].bits // 8 for s in specs for name in (s.base, s.finetuned, s.output)], default=1)

    @property
    def chunk(self) -> int:
        """Elements per job: what fits the buffers' budget, as a power of two. The output does not depend on it."""
        buffers = self.threads * (len(self.models) + 2)
        fitting = BUFFER_BYTES // (buffers * self.itemsize)
        return max(MIN_CHUNK, min(MAX_CHUNK, 1 << max(fitting.bit_length() - 1, 0)))

    def jobs(self) -> Iterator[Job]:
        number = 0
        for tensor in self.tensors:
            length = tensor.base.count if tensor.merged else tensor.base.nbytes
            for start in range(0, length, self.chunk):
                yield Job(number, tensor, start, min(start + self.chunk, length))
                number += 1

    def __str__(self) -> str:
        merged = [tensor for tensor in self.tensors if tensor.merged]
        parameters = sum(tensor.base.count for tensor in merged)
        rate = self.config.drop_rate
        lines = [
            f"would merge {len(self.models)} model{'s' * (len(self.models) != 1)} into {self.output}",
            f"  {len(merged):,} tensors merged ({parameters:,} parameters), {len(self.tensors) - len(merged):,} copied",
            f"  drop rate {rate:g} (honoured: {1 - keep_rate(rate):.6f}), seeds {self._seeds()}",
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
    base_sum: float = 0.0

    def add(self, other: Tally) -> None:
        self.parameters += other.parameters
        self.sum += other.sum
        self.peak = max(self.peak, other.peak)
        self.above += other.above
        self.kept += other.kept
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
    drop_rate: float  # as asked for
    honoured_drop_rate: float  # what the mask's threshold amounts to
    dropped_share: float  # what was really dropped
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
        return dataclasses.asdict(self)

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


class Workspace:
    """One thread's buffers, made once and used for every job."""

    def __init__(self, plan: Plan) -> None:
        models, row = len(plan.models), plan.chunk * plan.itemsize
        self.base = np.empty(row, np.uint8)
        self.finetuned = np.empty((models, row), np.uint8)
        self.output = np.empty(row, np.uint8)
        self.keys = np.empty((models, 3), np.uint64)
        self.scales = np.empty(models, np.float64)
        self.scratch = np.zeros((SCRATCH_ROWS + models) * SCRATCH_WIDTH, np.float64)
        self.stats = np.empty((models + 1, 4), np.float64)
        buffers = (self.base, self.finetuned, self.output, self.keys, self.scales, self.scratch, self.stats)
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


class Worker:
    """Runs jobs of one plan: any of them, in any order, in any thread that brings its own workspace."""

    def __init__(self, plan: Plan, base: Checkpoint, models: Sequence[Checkpoint], output: OutputFile) -> None:
        self.plan, self.base, self.models, self.output = plan, base, models, output
        self.kernels = {spec: load_kernel(spec) for spec in {t.spec for t in plan.tensors if t.merged and t.base.count}}
        self.threshold = keep_threshold(plan.config.drop_rate)
        self.scale = 1 / len(models) / keep_rate(plan.config.drop_rate)

    def run(self, job: Job, work: Workspace) -> Outcome:
        return self._merge(job, work) if job.tensor.merged else self._copy(job, work)

    def _merge(self, job: Job, work: Workspace) -> Outcome:
        tensor, count = job.tensor, job.stop - job.start
        spec, models = tensor.spec, len(tensor.finetuned)
        self._read(self.base, tensor.base, job, work.base)
        for row, (i, info) in enumerate(tensor.finetuned):
            self._read(self.models[i], info, job, work.finetuned[row])
            if info.dtype != spec.finetuned:
                wide = widen(self._part(work.finetuned[row], info, count).copy(), info.dtype)
                work.finetuned[row].view(f"f{FORMATS[spec.finetuned].bits // 8}")[:count] = wide
            work.keys[row] = (*mask_key(self.plan.config.seed + i, tensor.name), self.threshold - 1)
            work.scales[row] = self.scale
        work.stats[: models + 1] = 0
        stride = work.finetuned.shape[1] // (FORMATS[spec.finetuned].bits // 8)
        # base + 1 * (finetuned - base) is the fine-tune; computing it would lose bits where base is much larger.
        exact = len(self.models) == models == 1 and self.scale == 1
        numbers = (count, stride, models, job.start // TILE, int(exact), self.plan.config.delta_threshold)
        self.kernels[spec](*work.addresses, *numbers)
        if (
            not work.stats[models, PEAK] < FORMATS[spec.output].limit
            or not np.isfinite(work.stats[:models, PEAK]).all()
        ):
            self._explain_non_finite(job, work)
        size = count * FORMATS[spec.output].bits // 8
        at = len(self.plan.header) + tensor.output.offset + job.start * FORMATS[spec.output].bits // 8
        self.output.write_at(work.output.data[:size], at)
        return Outcome(job, {i: _tally(work.stats, row, models, count) for row, (i, _) in enumerate(tensor.finetuned)})

    def _copy(self, job: Job, work: Workspace) -> Outcome:
        outcome, size = Outcome(job), job.stop - job.start
        mine = work.base.data[:size]
        self.base.read_into(mine, job.tensor.base.offset + job.start)
        for i, info in job.tensor.finetuned:
            theirs = work.output.data[:size]
            if info.dtype == job.tensor.base.dtype:
                self.models[i].read_into(theirs, info.offset + job.start)
            if info.dtype != job.tensor.base.dtype or mine != theirs:
                outcome.differing.add(i)
        if outcome.differing and job.tensor.base.dtype.startswith(QUANTISED):
            name = self.models[min(outcome.differing)].name
            raise DareError(
                f"tensor {job.tensor.name!r} is quantised ({job.tensor.base.dtype}) and differs in {name!r}",
                "merge the models before quantising them",
            )
        self.output.write_at(mine, len(self.plan.header) + job.tensor.output.offset + job.start)
        return outcome

    def _read(self, checkpoint: Checkpoint, info: TensorInfo, job: Job, buffer: NDArray[np.uint8]) -> None:
        item = FORMATS[info.dtype].bits // 8
        view = buffer.data[: (job.stop - job.start) * item]
        checkpoint.read_into(view, info.offset + job.start * item)

    def _part(self, buffer: NDArray[np.uint8], info: TensorInfo, count: int) -> NDArray[np.uint8]:
        return buffer[: count * FORMATS[info.dtype].bits // 8]

    def _explain_non_finite(self, job: Job, work: Workspace) -> NoReturn:
        """Name the first value that no merge can use. Off the fast path, so it reads again and looks with NumPy."""
        tensor, count = job.tensor, job.stop - job.start
        for checkpoint, info in [(self.base, tensor.base), *((self.models[i], info) for i, info in tensor.finetuned)]:
            self._read(checkpoint, info, job, work.base)
            values = widen(self._part(work.base, info, count), info.dtype)
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                place = [int(k) for k in np.unravel_index(job.start + int(bad[0]), tensor.base.shape)]
                raise DareError(
                    f"{checkpoint.name!r}: tensor {tensor.name!r} holds {values[bad[0]]} at {place}",
                    "such a model is broken; use a checkpoint from before that happened",
                )
        raise DareError(
            f"merging tensor {tensor.name!r} gives values beyond the range of {tensor.output.dtype}",
            "lower the drop rate, or merge models stored in a wider type",
        )


def _tally(stats: NDArray[np.float64], row: int, models: int, count: int) -> Tally:
    total, peak, above, kept = (float(value) for value in stats[row])
    return Tally(count, total, peak, int(above), int(kept), float(stats[models, SUM]))


def run_jobs(plan: Plan, worker: Worker, done: Callable[[Outcome], None]) -> None:
    """Run every job of the plan on its threads. Of several failures, the first in the plan's order is raised."""
    jobs, lock, failures = plan.jobs(), threading.Lock(), dict[int, BaseException]()
    stop = threading.Event()

    def loop() -> None:
        work = Workspace(plan)
        while not stop.is_set():
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            try:
                outcome = worker.run(job, work)
            except BaseException as error:
                failures[job.number] = error
                stop.set()
                return
            with lock:
                done(outcome)

    threads = [threading.Thread(target=loop, name=f"dare-{i}") for i in range(plan.threads)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)  # with a timeout, so that an interrupt reaches the main thread on every system
    finally:
        stop.set()
        for thread in threads:
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
        self.config = config or DareConfig()
        self.fingerprints = tuple(fingerprints)

    def plan(self, output_file: str | Path, *, force: bool = False) -> Plan:
        """Check everything and say what merge would do; write nothing."""
        with self._opened() as (base, models):
            return self._plan(base, models, Path(output_file), force)

    def merge(self, output_file: str | Path, *, force: bool = False) -> MergeReport:
        """Merge, and say what was done. force replaces an existing file that this tool did not make."""
        started = time.perf_counter()
        with self._opened() as (base, models):
            plan = self._plan(base, models, Path(output_file), force)
            try:
                ledger = self._run(plan, base, models)
            except OSError as error:
                raise DareError(
                    f"cannot write {str(output_file)!r}: {error.strerror}", "nothing was changed; mend that and retry"
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
        for name, info in base.tensors.items():
            tensors.append(_plan_tensor(name, base, models, offset))
            offset += info.nbytes
        for model in models:
            if not model.tensors.keys() & base.tensors.keys():
                raise DareError(
                    f"{model.name!r} has no tensor in common with {base.name!r}",
                    f"the base has {listed(list(base.tensors))}; it has {listed(list(model.tensors))}",
                )
        recipe = self._recipe([base, *models])
        header = header_bytes({t.name: t.output for t in tensors}, {"format": "pt", RECIPE_KEY: recipe})
        plan = Plan(
            output=target,
            base=base.name,
            models=tuple(model.name for model in models),
            config=self.config,
            tensors=tuple(tensors),
            header=header,
            recipe=recipe,
            threads=self.config.threads or usable_cores(),
            bytes_to_read=sum(t.base.nbytes + sum(info.nbytes for _, info in t.finetuned) for t in tensors),
            missing=tuple(tuple(n for n in base.tensors if n not in model.tensors) for model in models),
            extra=tuple(tuple(n for n in model.tensors if n not in base.tensors) for model in models),
            warnings=tuple(_odd_inputs(base, models)),
        )
        free = shutil.disk_usage(target.parent).free
        if plan.size > free:
            raise DareError(
                f"the output needs {human(plan.size)} and {str(target.parent)!r} has {human(free)} free",
                "make room, or write to another disk",
            )
        return plan

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
                "dare": {"drop_rate": float(self.config.drop_rate), "seed": self.config.seed},
                "models": {"base_file": self.base.name, "merge_files": [source.name for source in self.models]},
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

                run_jobs(plan, worker, done)
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
    count, rate = max(total.parameters, 1), plan.config.drop_rate
    return ModelReport(
        name=plan.models[i],
        seed=plan.config.seed + i,
        parameters=total.parameters,
        drop_rate=rate,
        honoured_drop_rate=1 - keep_rate(rate),
        dropped_share=(total.parameters - total.kept) / count,
        mean_delta=total.mean,
        largest_delta=total.peak,
        share_above_threshold=total.above / count,
        missing_tensors=plan.missing[i],
        extra_tensors=plan.extra[i],
    )


def _plan_tensor(name: str, base: Checkpoint, models: list[Checkpoint], offset: int) -> TensorPlan:
    info = base.tensors[name]
    merged = info.dtype in FORMATS
    found = []
    for i, model in enumerate(models):
        theirs = model.tensors.get(name)
        if theirs is None:
            continue
        if theirs.shape != info.shape:
            raise DareError(
                f"tensor {name!r} is {list(info.shape)} in {base.name!r} and {list(theirs.shape)} in {model.name!r}",
                "only models fine-tuned from this very base can be merged",
            )
        if (theirs.dtype in FORMATS) != merged:
            raise DareError(
                f"tensor {name!r} is {info.dtype} in {base.name!r} and {theirs.dtype} in {model.name!r}",
                "a float tensor can only be merged with float tensors",
            )
        found.append((i, theirs))
    return TensorPlan(name, info, tuple(found), dataclasses.replace(info, offset=offset), merged)


def _odd_inputs(base: Checkpoint, models: list[Checkpoint]) -> Iterator[str]:
    for i, model in enumerate(models):
        if os.path.samestat(model.status, base.status):
            yield f"{model.name} is the base itself, given as a model to merge"
        if any(os.path.samestat(model.status, earlier.status) for earlier in models[:i]):
            yield f"{model.name} is given more than once; each time gets its own mask and counts fully"


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, f"see {self.prog} --help")


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
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", type=Path, help="TOML configuration, or the recipe of an earlier merge")
    add("-b", "--base", metavar="FILE", help="the model that the others were fine-tuned from")
    add("-m", "--merge", metavar="FILE", nargs="+", action="extend", help="the fine-tuned models to merge")
    add("-o", "--output", metavar="FILE", help="where to write the merged model")
    add("--drop-rate", metavar="P", type=float, help="share of each delta to drop, 0 <= P < 1 (default 0.9)")
    add("--delta-threshold", metavar="X", type=float, help="warn where deltas are larger than this (default 0.002)")
    add("--seed", metavar="N", type=int, help="the first model's seed; model i uses N + i (default 42)")
    add("--threads", metavar="N", type=int, help="threads to use (default: all cores this process may use)")
    add("--force", action="store_true", help="replace an existing file that this tool did not make")
    add("--dry-run", action="store_true", help="check everything and print the plan; write nothing")
    add("-v", "--verbose", action="store_true", help="show progress and summary (default)")
    add("-q", "--quiet", action="store_false", dest="verbose", help="no progress or summary, only warnings and errors")
    add("--version", action="version", version=f"dare {__version__}")
    return parser


def parse_flags(arguments: Sequence[str] | None) -> dict[str, Any]:
    parser = build_parser()
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ConfigError(f"there is no option {unknown[0]!r}", nearest(unknown[0].split("=")[0], known))
    return vars(flags)


def layered(flags: dict[str, Any]) -> Settings:
    """Flags over TOML."""
    settings = load_settings(flags["config"]) if "config" in flags else Settings()
    dare = dict(settings.dare)
    for name in CHECKS:
        if name in flags:
            check_setting(name, flags[name], f"--{name.replace('_', '-')}")
            dare[name] = flags[name]
    other_models = "base" in flags or "merge" in flags
    return Settings(
        dare=dare,
        base=Source.of(flags["base"]) if "base" in flags else settings.base,
        merge=tuple(Source.of(file) for file in flags["merge"]) if "merge" in flags else settings.merge,
        output=Path(flags["output"]) if "output" in flags else settings.output,
        inputs=() if other_models else settings.inputs,
    )


def run(arguments: Sequence[str] | None) -> None:
    flags = parse_flags(arguments)
    settings = layered(flags)
    config = DareConfig(**settings.dare)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives the exit status; no traceback reaches a user."""
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    try:
        run(arguments)
        return 0
    except DareError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
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


if __name__ == "__main__":
    sys.exit(main())
