"""TOML from anybody: what would take too much memory or time to read is refused."""

import re
import tomllib
from typing import Any, Final

MAX_TOML: Final = 1 << 20  # bytes, so that a hostile file takes little memory and time
TOO_LONG: Final = f"it is longer than {MAX_TOML:,} bytes"
# Python's parser takes memory and time with the square of the number of parts of a dotted key.
LONG_KEY: Final = re.compile(  # of bare or quoted parts
    r"""(?<![\w\\-])(?:(?:[\w-]++|"(?:[^"\\\n]++|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){64}"""
)


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says; what is not TOML, or too much to read, is a ValueError."""
    if len(text.encode(errors="replace")) > MAX_TOML:
        raise ValueError(TOO_LONG)
    if LONG_KEY.search(text):
        raise ValueError("one of its keys has too many parts")
    return tomllib.loads(text)
