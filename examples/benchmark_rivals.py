"""What benchmark.py runs in processes of their own: a copy of the files, and a merge and an analysis in plain torch.

    python benchmark_rivals.py copy THREADS OUTPUT INPUT...
    python benchmark_rivals.py torch_merge METHOD DENSITY OUTPUT BASE MODEL...
    python benchmark_rivals.py torch_analyze BASE MODEL...
    python benchmark_rivals.py launch COMMAND...

Modules that only one of them needs are imported there, so that the others start as fast as they can.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all others together
if TYPE_CHECKING:
    from typing import Any

CHUNK = 2 << 20


def launch() -> None:
    """Run a command, and print its exit status, wall time, CPU time and peak memory as JSON.

    A process's peak begins with the size of the process that started it, so this one has to be small.
    """
    import json
    import subprocess

    # Should memory run out, the system is to take it from the command, not from others.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    started = time.perf_counter()
    status = subprocess.call(sys.argv[1:], stdout=sys.stderr)
    run = {"wall_s": time.perf_counter() - started, "cpu_s": None, "peak_bytes": None}
    with suppress(ImportError):  # on Windows
        import resource

        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        run["cpu_s"] = usage.ru_utime + usage.ru_stime
        run["peak_bytes"] = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([status, run]))


def copy_share(inputs: list[str], output: str, first: int, step: int) -> None:
    """Take every `step`-th chunk: read it from all inputs into one buffer, and write what the last one had."""
    buffer, size = memoryview(bytearray(CHUNK)), os.path.getsize(inputs[-1])
    with ExitStack() as stack:
        files = [stack.enter_context(open(name, "rb", buffering=0)) for name in inputs]
        target = stack.enter_context(open(output, "r+b", buffering=0)) if output else None
        for offset in range(first * CHUNK, size, step * CHUNK):
            for file in files:
                file.seek(offset)
                count = file.readinto(buffer)
            if target:
                target.seek(offset)
                target.write(buffer[:count])


def copy() -> None:
    """Read all inputs and write one copy of the last, or nothing if the output is an empty name."""
    threads, output, inputs = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if output:
        with open(output, "wb") as file:
            file.truncate(os.path.getsize(inputs[-1]))
    workers = [threading.Thread(target=copy_share, args=(inputs, output, n, threads)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if output:
        with open(output, "r+b") as file:
            os.fsync(file.fileno())


def torch_analyze() -> None:
    """What an analysis finds, as one would write it with torch: tensor by tensor, with a histogram for percentiles."""
    import torch
    from safetensors import safe_open

    opened: list[Any] = [safe_open(name, framework="pt") for name in sys.argv[1:]]
    base, *models = opened
    found: dict[Any, Any] = {}
    for name in base.keys():  # noqa: SIM118 (not a dictionary)
        weights = base.get_tensor(name).float()
        deltas = [model.get_tensor(name).float() - weights for model in models]
        norm = weights.norm()
        for i, delta in enumerate(deltas):
            size = delta.abs()
            largest = size.max()
            counts = torch.histc(size.clamp(min=2.0**-40).log2(), 1024, -40, 24).cumsum(0) / size.numel()
            shares = [which.float().mean() for which in (size == 0, size > 0.002, size < largest / 100)]
            percentiles = [int((counts < share).sum()) for share in (0.5, 0.95, 0.99)]
            found[name, i] = (size.mean(), size.std(), largest, *shares, *percentiles, delta.norm() / norm)
            for k, other in enumerate(deltas[:i]):
                both, opposed = (delta != 0) & (other != 0), delta.sign() * other.sign() < 0
                sums = size + other.abs()
                weighted = sums[both].sum(), sums[opposed].sum()
                found[name, i, k] = ((delta * other).sum(), both.sum(), opposed.sum(), *weighted)
    print(len(found))


def torch_merge() -> None:
    """DARE as one writes it from the paper's formulas: load the models, go through their tensors, save the result."""
    import torch
    from safetensors.torch import load_file, save_file

    method, density, output, *files = sys.argv[1:]
    base, *models = map(load_file, files)
    merged = {}
    for name, weights in base.items():
        start, kept = weights.float(), []
        for model in models:
            delta = model[name].float() - start
            mask = torch.bernoulli(torch.full_like(delta, float(density)))
            kept.append(mask * delta / float(density))
        if method == "linear":
            result = start + sum(kept) / len(kept)
        elif method == "ties":
            deltas = torch.stack(kept)
            agreed = deltas * deltas.sum(0).sign() > 0
            result = start + (deltas * agreed).sum(0) / agreed.sum(0).clamp(min=1)
        else:
            one, other = start + kept[0], start + kept[1]
            cosine = (one / one.norm() * (other / other.norm())).sum()
            angle = cosine.clamp(-1, 1).acos()
            halves = 0.5 if cosine > 0.9995 else (angle / 2).sin() / angle.sin()
            result = halves * one + halves * other
        merged[name] = result.to(weights.dtype)
    save_file(merged, output, metadata={"format": "pt"})


if __name__ == "__main__":
    {"launch": launch, "copy": copy, "torch_analyze": torch_analyze, "torch_merge": torch_merge}[sys.argv.pop(1)]()
