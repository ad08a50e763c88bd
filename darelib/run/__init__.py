"""Who does the jobs of a merge: the runners, one module each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from darelib.core.text import ConfigError, nearest

Run: TypeAlias = Callable[[Any], list[Any]]  # an Output to Outcomes
# The module of each runner. Its prepare(plan, inputs, interrupts, elsewhere) checks all that can be checked before
# anything is written. It gives a function that, given the output, runs all jobs that are not done yet and gives what
# all of them found, those of an earlier run that is continued included.
RUNNERS: Final = {"threads": "darelib.run.threads", "ray": "darelib.run.ray"}


def load_runner(name: str) -> Any:
    return importlib.import_module(RUNNERS[name])


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
    is_pair = (
        isinstance(part, tuple) and len(part) == 2 and all(type(number) is int for number in part)
    )
    if not (is_pair and 1 <= part[0] <= part[1]):
        said = "/".join(map(str, part)) if is_pair else repr(part)
        raise ConfigError(
            f"there is no part {said}",
            "--part 3/16 is the third of sixteen; in Python, part=(3, 16)",
        )
