"""Who does the jobs of a merge: the runners, each a module with run_merge(plan, worker, output, interrupts)."""

from typing import Final

RUNNERS: Final = {"threads": "darelib.run.threads"}
