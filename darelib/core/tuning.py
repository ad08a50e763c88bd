"""Sizes and times that change how fast a merge runs and never what it writes; small in tests."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONTROL_GROUPS = Path("/sys/fs/cgroup")


@dataclass
class Tuning:
    # A chunk, the elements that are read, merged and written at a time, is small enough for its
    # arrays to stay in the caches, and large enough that calls cost nothing. Powers of two.
    max_chunk: int = 1 << 18
    min_chunk: int = 1 << 14
    # With so many threads, chunks are four times as large: after each step a thread waits for
    # Python's lock, and to wake those that wait takes longer than what they are woken for.
    many_threads: int = 8
    # A job is several chunks, so that what Python does for it costs nothing. It does not depend on
    # the number of threads, so that a merge can be resumed with another one.
    job_elements: int = 1 << 22
    # Elements of the tensors that are looked at and then merged in one go, where a method must look
    # first: few enough to be read again from the system's cache, enough to keep all threads busy.
    batch_elements: int = 1 << 28
    # The same where entries are ranked, which takes longest of all: few enough that what was found
    # can be remembered, so far as there is room, until they are merged.
    ranked_elements: int = 1 << 24
    ranked_bytes: int = 64 << 20
    # The same where matrices are merged as a whole, each to be held in memory: enough that what is
    # read and written overlaps with what is solved. And how many may be read or solved at a time.
    matrix_elements: int = 1 << 26
    matrices_at_once: int = 2
    most_matrices: int = 4  # where a GPU solves them
    # The arrays of the chunks of all threads together. The interpreter, NumPy and Numba take more
    # than that.
    buffer_bytes: int = 64 << 20
    # Elements of all adapters' matrices that all threads together hold at a time: 16 MB.
    expand_elements: int = 1 << 22
    # Elements at a time of tensors in memory: enough to keep a GPU busy, few enough that little is
    # held beside them.
    memory_chunk: int = 1 << 24
    # Entries of models from which on Numba computes. It takes 0.7 seconds to load, in which NumPy
    # merges some 15 million.
    compiled_work: int = 1 << 24
    # How long writes gather before they are sent to the disk, and before the journal notes what has
    # arrived there.
    flush_seconds: float = 0.1
    journal_seconds: float = 1.0
    # How often to look whether somebody wants the merge to stop.
    poll_seconds: float = 0.05
    # How long it may take to stop without a word.
    silent_seconds: float = 0.2
    # Without a terminal: when the first line of progress is printed, and how far apart the last.
    first_line_seconds: float = 10.0
    last_line_seconds: float = 300.0
    # How long to run jobs, to estimate how long all of them will take.
    sample_seconds: float = 0.5
    # Bytes from which a rate describes the merge, and not its start.
    least_for_rate: int = 100_000_000
    # Parameters below which advice drawn from models of billions of them is doubtful.
    small_model: int = 100_000_000


TUNING: Final = Tuning()


def count_cores() -> int:
    """How many this process may use, by what it is bound to and its container's share of time."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores, math.ceil(min(_quotas(), default=cores))))


def _quotas() -> Iterator[float]:
    """The processor time that control groups grant, in cores."""
    with suppress(OSError, ValueError):  # version 2: this process's own group and all above it
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().strip("/")
        for folder in (CONTROL_GROUPS / group, *(CONTROL_GROUPS / group).parents):
            with suppress(OSError, ValueError):  # "max" is no number: there is no limit
                quota, period = (folder / "cpu.max").read_text().split()
                yield int(quota) / int(period)
    with suppress(OSError, ValueError):  # version 1
        files = (CONTROL_GROUPS / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
        quota, period = (file.read_text() for file in files)
        if int(quota) > 0:  # -1: no limit
            yield int(quota) / int(period)


def raise_open_file_limit() -> None:
    """Let this process open many files: systems allow few unless asked, and models have shards."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(10_240, hard) if hard >= 0 else 10_240  # for ten models of hundreds of shards
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
