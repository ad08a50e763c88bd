"""What a process does that compiles kernels: compile, load as the tool will, prove, and only then store."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from pathlib import Path

from darelib.kernels import EngineUnavailable, cpu
from darelib.kernels.machine import target_machine
from darelib.kernels.native import load_object
from darelib.kernels.objects import MAKING, code_of, store, withdraw
from darelib.kernels.proof import prove_function


def work(how: str, *names: str) -> None:
    """Make object files.

    how: object, for what is stored in them; here, for what Numba runs itself, where they only say that it was proved.
    """
    gc.disable()  # a compiler makes many objects, and lives for a few seconds
    paths = [Path(name) for name in names]
    try:
        for number, path in enumerate(paths):
            if not path.parent.is_dir():
                break  # somebody has removed what was to be kept there
            _renew(paths[number:])
            code, made = code_of(path.name), b""
            if how == "here":
                function = cpu.run_here(code)
            else:
                made = cpu.compile_object(code, target_machine())
                function = load_object(code, made)
            prove_function(code, function)
            store(made, path)
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None
    except Exception as error:  # of a compiler, which says much
        raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
    finally:
        for path in paths:
            withdraw(path)


def _renew(paths: list[Path]) -> None:
    """Announce once more what was announced and is still to be made."""
    for path in paths:
        with suppress(OSError):
            os.utime(path.with_suffix(MAKING))
