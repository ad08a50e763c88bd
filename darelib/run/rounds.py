"""Jobs in threads: all of a round before the next. Compiled functions let them run side by side."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from darelib.core.interrupts import Interrupts
from darelib.core.tuning import TUNING
from darelib.plan.plan import Job
from darelib.run.worker import Abandoned, Outcome, Worker, Write


def limit_blas(threads: int) -> AbstractContextManager[Any]:
    """No more threads for each product of matrices, until it is closed."""
    return _find_libraries(len(sys.modules)).limit(limits=threads, user_api="blas")


@lru_cache(1)  # looking through all that is loaded takes as long as merging a small model
def _find_libraries(_modules: int) -> ThreadpoolController:
    """The libraries that are loaded now: another comes with another module."""
    return ThreadpoolController()


def keep_freed_memory() -> None:
    """Have glibc keep the memory that chunks free, for the next ones. Elsewhere, this does nothing.

    It does so with arrays up to the size of the largest that was ever freed, but for those above
    32 MB; the system would fill each page with zeros.
    """
    np.empty(31 << 20, np.uint8)


def run_rounds(
    rounds: Iterable[Iterator[Job]],
    worker: Worker,
    write: Write,
    note: Callable[[Job, Outcome | None], None],
    interrupts: Interrupts,
) -> None:
    """Run all jobs of a round before the next. note is called with each job and what it found, one
    at a time.

    Of several failures, the first in the jobs' order is raised.
    """
    keep_freed_memory()
    threads = worker.plan.threads
    lock = threading.Lock()
    stop = threading.Event()
    failures: dict[int, BaseException] = {}
    running: set[Future[None]] = set()

    def loop(jobs: Iterator[Job]) -> None:
        order = -1
        try:
            while not stop.is_set():
                with lock:
                    job = next(jobs, None)
                if job is None:
                    return
                order = job.order
                outcome = worker.run(job, write)
                with lock:
                    note(job, outcome)
        except Abandoned:
            pass
        except BaseException as error:
            failures[order] = error
            stop.set()

    # Each job has one core: BLAS would start as many threads as there are cores for each of them.
    with limit_blas(1), ThreadPoolExecutor(threads) as pool:
        try:
            for jobs in rounds:
                running = {pool.submit(loop, jobs) for _ in range(threads)}
                while running:
                    running = wait(running, TUNING.poll_seconds).not_done
                    interrupts.check()
                if failures:
                    raise failures[min(failures)]
        except BaseException as error:
            stop.set()
            worker.abandoned.set()
            is_signal = not isinstance(error, Exception)
            if is_signal and wait(running, TUNING.silent_seconds).not_done:
                print("stopping", file=sys.stderr, flush=True)
            raise


def measure_rate(
    rounds: Iterable[Iterator[Job]], worker: Worker, interrupts: Interrupts
) -> tuple[int, float, list[Outcome]]:
    """The bytes that the first jobs read, the seconds they took, and what they found. If one fails,
    so would the merge.
    """
    done: list[tuple[Job, Outcome | None]] = []
    first = next(iter(rounds), iter(()))

    def run(most_seconds: float) -> float:
        started = time.perf_counter()

        def list_some() -> Iterator[Job]:
            for job in first:
                yield job
                if time.perf_counter() - started > most_seconds:
                    return

        note = done.append
        run_rounds([list_some()], worker, lambda *_: None, lambda *found: note(found), interrupts)
        return time.perf_counter() - started

    warm_up = run(0)  # it may load Numba, and compile
    unmeasured = sum(job.bytes_read for job, _ in done)
    seconds = run(TUNING.sample_seconds)
    size = sum(job.bytes_read for job, _ in done)
    outcomes = [outcome for _, outcome in done if outcome]
    if size == unmeasured:  # there was one job
        return size, warm_up, outcomes
    return size - unmeasured, seconds, outcomes
