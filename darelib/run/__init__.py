"""Who does the jobs of a merge: the runners, one module each."""

from __future__ import annotations

import importlib
from typing import Any, Final

# The module of each runner; its run_merge(plan, worker, output, interrupts) runs all jobs that are not done yet, and
# gives what all of them found, those of an earlier run that is continued included.
RUNNERS: Final = {"threads": "darelib.run.threads"}


def load_runner(name: str = "threads") -> Any:
    return importlib.import_module(RUNNERS[name])
