"""Who does the jobs of a merge: threads, parts on several machines, a Ray cluster; or torch, for
tensors in memory.
"""

from types import ModuleType
from typing import Any, Final

from darelib.core.text import ConfigError, DareError, install_hint, nearest

RUNNERS: Final = ("threads", "ray")


def check_runner(runner: str = "threads", part: Any = None, ray_address: str | None = None) -> None:
    """Refuse what does not go together, or does not exist."""
    if runner not in RUNNERS:
        raise ConfigError(f"there is no runner {runner!r}", nearest(str(runner), RUNNERS))
    if ray_address is not None and runner != "ray":
        raise ConfigError(
            "--ray-address means nothing without --runner ray", "add that, or leave it out"
        )
    if part is None:
        return
    if runner != "threads":
        raise ConfigError(f"--part and --runner {runner} both divide a merge", "choose one of them")
    is_pair = isinstance(part, tuple) and len(part) == 2 and {*map(type, part)} == {int}
    if not is_pair or not 1 <= part[0] <= part[1]:
        given = "/".join(map(str, part)) if is_pair else repr(part)
        raise ConfigError(
            f"there is no part {given}",
            "--part 3/16 is the third of sixteen; in Python, part=(3, 16)",
        )


def load_memory() -> ModuleType:
    """The room for tensors in memory, which needs torch."""
    try:
        from darelib.run import memory
    except ModuleNotFoundError:
        raise DareError("tensors in memory need torch", install_hint("torch")) from None
    return memory
