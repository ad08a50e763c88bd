"""Who does the jobs of a merge: the runners, one module each."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from darelib.text import ConfigError, nearest

Run: TypeAlias = Callable[[Any], list[Any]]  # an Output to Outcomes
# The module of each runner. Its prepare(plan, inputs, interrupts, elsewhere) checks all that can be checked before
# anything is written. It gives a function that, given the output, runs all jobs that are not done yet and gives what
# all of them found, those of an earlier run that is continued included.
RUNNERS: Final = {"threads": "darelib.run.threads", "ray": "darelib.run.ray"}


def load_runner(name: str = "threads") -> Any:
    if name not in RUNNERS:
        raise ConfigError(f"there is no runner {name!r}", nearest(str(name), RUNNERS))
    return importlib.import_module(RUNNERS[name])
