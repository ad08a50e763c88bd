"""Who does the jobs of a merge: threads, parts on several machines, a Ray cluster; or torch, for
tensors in memory.
"""

from __future__ import annotations

from types import ModuleType

from darelib.core.text import DareError, install_hint


def load_memory() -> ModuleType:
    """The room for tensors in memory, which needs torch."""
    try:
        from darelib.run import memory
    except ModuleNotFoundError:
        raise DareError("tensors in memory need torch", install_hint("torch")) from None
    return memory
