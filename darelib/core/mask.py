"""Which entries are kept: a pure function of seed, tensor name, element position and drop rate."""

import hashlib
import struct
from functools import lru_cache
from typing import Final

# All of these are part of the mask's definition: never change them. Elements that one tile spans;
# Philox4x32 passes its authors' statistical tests from 7 rounds on; a decision compares this many
# random bits with a threshold.
TILE: Final = 1024
ROUNDS: Final = 7
MASK_BITS: Final = 16
KEEP_ALL: Final = 1 << MASK_BITS  # the threshold below which all bits are
MASK_NAME: Final = "philox4x32-7/16"


def keep_threshold(drop_rate: float) -> int:
    """T: an element is kept where its 16 random bits are below T. At least 1, for a keep rate."""
    return max(1, round((1.0 - drop_rate) * (1 << MASK_BITS)))


def keep_rate(drop_rate: float) -> float:
    """The exact rate at which the mask keeps elements; the merge rescales by it."""
    return keep_threshold(drop_rate) / (1 << MASK_BITS)


@lru_cache(1 << 14)  # a search merges the same tensors again and again
def mask_key(seed: int, name: str) -> tuple[int, int]:
    """Philox's key for a model's tensor: a digest, so that related names have unrelated masks."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    low, high = struct.unpack("<II", digest)
    return low, high
