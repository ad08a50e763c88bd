"""What nobody would write: for the tests of files and settings that may hold anything."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

THOROUGH = True  # whether slow tests are run, too
DATA = bytes(range(40))


def examples(count: int) -> settings:
    """How many Hypothesis makes up: a third of them where slow tests are left out. Each may write and read files."""
    usual = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(
        max_examples=count if THOROUGH else -(-count // 3),
        deadline=None,
        suppress_health_check=usual,
    )


def with_header(header: bytes | str, data: bytes = DATA, length: int | None = None) -> bytes:
    """The bytes of a safetensors file that has this header, and says that it is of that length."""
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[Any]], Any], whole: bytes) -> bytes:
    """Bytes of which a few are changed, taken out or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place, length = draw(st.integers(0, max(len(content) - 1, 0))), draw(st.integers(0, 3))
        content[place : place + length] = draw(
            st.binary(max_size=3)
            | st.sampled_from(list(b'{}[]",:0-9e \\')).map(lambda b: bytes([b]))
        )
    return bytes(content)
