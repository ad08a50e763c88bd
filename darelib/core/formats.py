"""The stored number types: their sizes and ranges, their names, and their values as floats."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Bits per element of every type that safetensors knows.
STORED_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64,
}  # fmt: skip
# Trim finds its threshold 16 bits of the magnitude at a time, by counting how many entries have
# each value of them.
DIGIT_BITS: Final = 16
NO_PREFIX: Final = (1 << 64) - 1  # of no entry
# What people and config.json call the types that can be merged.
DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
SHORT_DTYPES: Final = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

# What positions, masks and counters are stored as, and what torch calls that; another file may
# have them as floats.
COUNTED: Final = {"BOOL": "bool", "I16": "int16", "I32": "int32", "I64": "int64"}


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


def widen(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored values as float32, or float64 where that is what is stored."""
    import numpy as np

    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    real = raw.view(FORMATS[dtype].real)
    return real.astype(np.float32) if dtype == "F16" else real


def is_counted(name: str, dtypes: Iterable[str]) -> bool:
    """Whether a tensor that some have as integers was never trained, and is no quantised weight."""
    is_weight = name.endswith(("weight", "bias"))
    return not is_weight and not {*COUNTED, *COUNTED.values()}.isdisjoint(dtypes)
