"""What a process does that compiles kernels: compile, load as the tool will, prove, and store."""

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

    how: object, for what is stored in them; here, for what Numba runs itself, where they only say
    that it was proved.
    """
    gc.disable()  # a compiler makes many objects, and lives for a few seconds
    paths = [Path(name) for name in names]
    try:
        for number, path in enumerate(paths):
            if not path.parent.is_dir():
                break  # somebody has removed what was to be kept there
            for unfinished in paths[number:]:
                with suppress(OSError):  # most were not announced
                    os.utime(unfinished.with_suffix(MAKING))
            _make(how, path)
    except EngineUnavailable as error:
        raise SystemExit(str(error)) from None
    except Exception as error:  # of a compiler, which says much
        raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from None
    finally:
        for path in paths:
            withdraw(path)


def _make(how: str, path: Path) -> None:
    code = code_of(path.name)
    if how == "here":
        machine_code = b""
        function = cpu.run_here(code)
    else:
        machine_code = cpu.compile_object(code, target_machine())
        function = load_object(code, machine_code)
    prove_function(code, function)
    store(machine_code, path)
