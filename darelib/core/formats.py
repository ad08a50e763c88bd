"""The stored number types: their sizes, their ranges and their names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Every type that safetensors knows: its bits per element, and what torch calls it, if it has it.
STORED: Final = {
    "BOOL": (8, "bool"), "U8": (8, "uint8"), "I8": (8, "int8"), "U16": (16, "uint16"),
    "I16": (16, "int16"), "U32": (32, "uint32"), "I32": (32, "int32"), "U64": (64, "uint64"),
    "I64": (64, "int64"), "C64": (64, "complex64"), "F4": (4, ""), "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""), "F8_E5M2": (8, "float8_e5m2"), "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"), "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"), "F16": (16, "float16"), "BF16": (16, "bfloat16"),
    "F32": (32, "float32"), "F64": (64, "float64"),
}  # fmt: skip
STORED_BITS: Final = {name: bits for name, (bits, _) in STORED.items()}
TORCH_NAMES: Final = {torch: name for name, (_, torch) in STORED.items() if torch}
INTEGERS: Final = tuple(name for name in STORED if name[0] in "IU")
# Trim finds its threshold 16 bits of the magnitude at a time, by counting how many entries have
# each value of them.
DIGIT_BITS: Final = 16
NO_PREFIX: Final = (1 << 64) - 1  # of no entry
# An analysis counts |delta| by size: 16 bins to each doubling, the first for all below 2^-40. A bin
# is the pattern of a float32 without its lowest bits.
BINS: Final = 1024
BINS_PER_OCTAVE: Final = 16
FIRST_BIN: Final = (127 - 40) * BINS_PER_OCTAVE - 1
# What people and config.json call the types that can be merged.
DTYPES: Final = {STORED[name][1]: name for name in ("F32", "F16", "BF16", "F64")}
SHORT_DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

# What positions, masks and counters are stored as, and what torch calls that; another file may
# have them as floats.
COUNTED: Final = {name: STORED[name][1] for name in ("BOOL", "I16", "I32", "I64")}


@dataclass(frozen=True)
class Format:
    """A type of tensor that can be merged."""

    bits: int
    limit: float  # the smallest magnitude that rounds to infinity

    @property
    def itemsize(self) -> int:
        return self.bits // 8

    @property
    def raw(self) -> str:
        """NumPy's name of the unsigned integers in which it is stored."""
        return f"u{self.itemsize}"

    @property
    def real(self) -> str:
        return f"f{self.itemsize}"


FORMATS: Final = {
    "BF16": Format(16, 2.0**128 - 2.0**119),
    "F16": Format(16, 65520.0),
    "F32": Format(32, 2.0**128 - 2.0**103),
    "F64": Format(64, math.inf),
}


def is_counted(name: str, dtypes: Iterable[str]) -> bool:
    """Whether a tensor that some have as integers was never trained, and is no quantised weight."""
    is_weight = name.endswith(("weight", "bias"))
    return not is_weight and not {*COUNTED, *COUNTED.values()}.isdisjoint(dtypes)
