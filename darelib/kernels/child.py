"""What a process does that compiles kernels: compile, load as the tool will, prove, and only then store."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path

from darelib.kernels import EngineUnavailable, cpu
from darelib.kernels.machine import target_machine
from darelib.kernels.native import load_object
from darelib.kernels.objects import announce, code_of, is_announced, store, withdraw
from darelib.kernels.proof import prove_function


def work(how: str, folder: str, *names: str) -> None:
    """Compile what object files of these names hold.

    how: object, for them to be stored; here, for what Numba runs itself, where there is nothing to store.
    """
    gc.disable()  # a compiler makes many objects, and lives for a few seconds
    try:
        for number, name in enumerate(names):
            _say_again([Path(folder, name) for name in names[number:]])
            code = code_of(name)
            if how == "here":
                prove_function(code, cpu.run_here(code))
                continue
            made = cpu.compile_object(code, target_machine())
            prove_function(code, load_object(code, made))
            store(made, Path(folder, name))
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None
    except Exception as error:  # of a compiler, which says much
        raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
    finally:
        for name in names:
            withdraw(Path(folder, name))


def _say_again(paths: list[Path]) -> None:
    """That they are being made, where that was said at all."""
    for path in paths:
        with suppress(OSError):
            if is_announced(path):
                announce(path)
