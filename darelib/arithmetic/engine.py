"""Which engine computes: functions that Numba compiles, or their definition in NumPy.

Both give the same bits. Numba takes most of a second to load, so small merges do without it.
"""

import importlib
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from darelib.core.text import LOG, DareError
from darelib.core.tuning import TUNING

P = ParamSpec("P")
R = TypeVar("R")

JITTED: Final = "darelib.arithmetic.jitted"


class Engine:
    """What this process computes with."""

    def __init__(self) -> None:
        self.jitted: Any = None  # the compiled functions, while they are used
        self._loaded: Any = None
        self._failure = ""  # why Numba cannot be used; what failed once is not tried again
        self._work = 0
        self._is_wanted = False  # by name, so that a failure is an error

    def choose(self, engine: str, work: int) -> None:
        """For so many entries of models: auto takes Numba once that pays for loading it."""
        self._work += work
        self._is_wanted = engine == "numba"
        self.jitted = self._load() if is_compiled(engine, self._work) else None

    def _load(self) -> Any:
        if self._failure:
            self.give_up(self._failure)
        elif self._loaded is None:
            try:
                self._loaded = importlib.import_module(JITTED)
            except Exception as error:  # of an import: anything
                self.give_up(error)
        return self._loaded

    def give_up(self, reason: object) -> None:
        """Let NumPy compute from now on."""
        self.jitted = None
        self._loaded = None
        is_new = not self._failure
        self._failure = str(reason).strip().partition("\n")[0] or type(reason).__name__
        if self._is_wanted:
            raise DareError(
                f"the engine numba cannot be used: {self._failure}", "use engine auto or plain"
            )
        if is_new:
            LOG.warning(
                f"Numba cannot be used ({self._failure}), so NumPy computes: the same result, many "
                "times slower"
            )


ENGINE: Final = Engine()


def is_compiled(engine: str, work: int) -> bool:
    """Whether Numba is to be taken for so many entries."""
    return engine == "numba" or (engine == "auto" and work >= TUNING.compiled_work)


@cache
def announce(name: str, function: Any) -> None:
    """Tell of the seconds that whoever needs a function first in an installation waits."""
    folder = function.stats.cache_path
    if folder is None:
        tell("compiling for this machine, each time: there is no place to keep it")
    elif not any(Path(folder).glob(f"jitted.{name}-*.nbi")):
        tell("compiling for this machine, once; later runs start at once")


@cache  # once
def tell(words: str) -> None:
    LOG.info(words)


def compiled(define: Callable[P, R]) -> Callable[P, R]:
    """Let the function of the same name in jitted.py compute, where it is used."""
    name = define.__name__

    @wraps(define)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        jitted = ENGINE.jitted  # another thread may give it up meanwhile
        if jitted is not None:
            try:
                function = getattr(jitted, name)
                announce(name, function)
                return function(*args, **kwargs)
            except Exception as error:  # of a compiler: compiled functions raise none
                ENGINE.give_up(error)
        with np.errstate(all="ignore"):  # what is not finite is found in the result
            return define(*args, **kwargs)

    return run
