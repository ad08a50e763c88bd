"""What benchmark.py runs in processes of their own: a copy of the files, and a merge and an analysis in plain torch.

The first argument is the name of the function. Modules that only one of them needs are imported there, so that the
others start as fast as they can.
"""

from __future__ import annotations

import os
import sys
import threading
import time

CHUNK = 2 << 20


def launch(*command: str) -> None:
    """Run a command, and print its exit status, wall time, CPU time and peak memory as JSON.

    A process's peak begins with the size of the process that started it, so this one has to be small.
    """
    import json
    import resource
    import subprocess

    started = time.perf_counter()
    status = subprocess.call(command, stdout=sys.stderr)
    wall, usage = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps([status, {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": peak}]))


def copy(threads: str, output: str, *names: str) -> None:
    """Read all inputs and write one copy of the last."""
    inputs, target = [os.open(name, os.O_RDONLY) for name in names], os.open(output, os.O_RDWR | os.O_CREAT)

    def copy_share(first: int) -> None:
        buffer = memoryview(bytearray(CHUNK))
        for offset in range(first * CHUNK, os.path.getsize(inputs[-1]), int(threads) * CHUNK):
            for file in inputs:
                count = os.preadv(file, [buffer], offset)
            os.pwrite(target, buffer[:count], offset)

    workers = [threading.Thread(target=copy_share, args=(number,)) for number in range(int(threads))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if output != os.devnull:
        os.fsync(target)


def torch_analyze(*files: str) -> None:
    """What an analysis finds, as one would write it with torch: tensor by tensor, with a histogram for percentiles."""
    import torch
    from safetensors.torch import load_file

    base, *models = map(load_file, files)
    found: list[torch.Tensor] = []
    for name, stored in base.items():
        weights = stored.float()
        deltas = [model[name].float() - weights for model in models]
        for i, delta in enumerate(deltas):
            size = delta.abs()
            counts = torch.histc(size.clamp(min=2.0**-40).log2(), 1024, -40, 24).cumsum(0) / size.numel()
            found += [(counts < share).sum() for share in (0.5, 0.95, 0.99)]
            found += [which.float().mean() for which in (size == 0, size > 0.002, size < size.max() / 100)]
            found += [size.mean(), size.std(), size.max(), delta.norm() / weights.norm()]
            for other in deltas[:i]:
                both, opposed, sums = (delta != 0) & (other != 0), delta.sign() * other.sign() < 0, size + other.abs()
                found += [(delta * other).sum(), both.sum(), opposed.sum(), sums[both].sum(), sums[opposed].sum()]
    print(len(found))


def torch_merge(method: str, density: str, output: str, *files: str) -> None:
    """DARE as one writes it from the paper's formulas: load the models, go through their tensors, save the result."""
    import torch
    from safetensors.torch import load_file, save_file

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
    globals()[sys.argv[1]](*sys.argv[2:])
