"""What benchmark.py runs in processes of their own; the first argument is the name of the function.

Modules that only one of them needs are imported there, so that the others start as fast as they
can. What a function prints as JSON takes the place of what is measured from outside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

CHUNK = 2 << 20


def launch(*command: str) -> None:
    """Run a command, and print its exit status, wall time, CPU time and peak memory as JSON.

    A process's peak begins with the size of the process that started it, so this one has to be
    small.
    """
    import resource

    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE)
    wall = time.perf_counter() - started
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    run = {"wall_s": wall, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_bytes": peak}
    print(
        json.dumps([done.returncode, json.loads(done.stdout) if done.stdout[:1] == b"{" else run])
    )


def copy(threads: str, output: str, *names: str) -> None:
    """Read all inputs and write one copy of the last."""
    inputs = [os.open(name, os.O_RDONLY) for name in names]
    target = os.open(output, os.O_RDWR | os.O_CREAT)

    def copy_share(first: int) -> None:
        buffer = memoryview(bytearray(CHUNK))
        for offset in range(first * CHUNK, os.path.getsize(inputs[-1]), int(threads) * CHUNK):
            for file in inputs:
                count = os.preadv(file, [buffer], offset)
            os.pwrite(target, buffer[:count], offset)

    workers = [
        threading.Thread(target=copy_share, args=(number,)) for number in range(int(threads))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if output != os.devnull:
        os.fsync(target)


def install(cache: str, output: str, root: str) -> None:
    """Run the README's first command in a fresh copy of the tree: what it installs, how long."""
    import re
    import shutil
    from pathlib import Path

    command = re.findall(r"&& (uv run .+)", Path(root, "README.md").read_text())[0].split()
    settings = {
        "UV_CACHE_DIR": f"{output}/cache",
        "UV_PROJECT_ENVIRONMENT": ".venv",
        "NUMBA_CACHE_DIR": "",
    }
    for tree in (f"{output}/tree", f"{output}/again")[: 1 + (cache == "filled")]:
        shutil.copytree(
            root, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "uv.lock", "*.egg-info")
        )
        started = time.perf_counter()
        subprocess.run(command, cwd=tree, env=os.environ | settings, stdout=sys.stderr, check=True)
        taken = time.perf_counter() - started
    files = (f"{folder}/{name}" for folder, _, names in os.walk(f"{tree}/.venv") for name in names)
    print(
        json.dumps(
            {"wall_s": taken, "written_bytes": sum(os.lstat(file).st_size for file in files)}
        )
    )


def merge_inside(
    runner: str, count: str, method: str, output: str, base: str, *models: str
) -> None:
    """Merge twice in this process, and time the second: by threads, or by Ray's nodes."""
    import shutil

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import dare

    settings = {
        "method": method,
        "threads": int(count) if runner == "threads" else 1,
        "verbose": False,
    }
    if runner == "ray":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
            "0"  # which makes Ray stay at 127.0.0.1, on all systems
        )
        from darelib.run.ray import load_ray

        ray = load_ray()
        from ray.cluster_utils import Cluster

        settings["max_shard_size"] = f"{os.path.getsize(base) // 24 // 1000}kB"
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for _ in range(int(count) - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        ray.init(cluster.address, log_to_driver=False)
    for _ in range(2):
        shutil.rmtree(output, ignore_errors=True)
        started = time.perf_counter()
        dare.DareMerger(base, models, dare.DareConfig(**settings)).merge(output, runner=runner)
        taken = time.perf_counter() - started
    print(json.dumps({"wall_s": taken}))


def multiply(base: str, *models: str) -> None:
    """As many operations as it takes to merge whole matrices, by this machine's own products."""
    import numpy as np
    from safetensors import safe_open

    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from darelib.core.arrays import find_matrices
    from darelib.methods.wudi import count_operations

    side = 2048
    factor = np.ones((side, side), np.float32)
    with safe_open(base, "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    found = [find_matrices(name, shape) for name, shape in shapes.items()]
    operations = sum(count_operations(each, len(models)) for each in found if each)
    for _ in range(round(operations / (2 * side**3))):
        factor @ factor


def torch_analyze(*files: str) -> None:
    """What an analysis finds, as one would write it with torch: percentiles from a histogram."""
    import torch
    from safetensors.torch import load_file

    base, *models = map(load_file, files)
    found: list[torch.Tensor] = []
    for name, stored in base.items():
        weights = stored.float()
        deltas = [model[name].float() - weights for model in models]
        for i, delta in enumerate(deltas):
            size = delta.abs()
            counts = (
                torch.histc(size.clamp(min=2.0**-40).log2(), 1024, -40, 24).cumsum(0) / size.numel()
            )
            found += [(counts < share).sum() for share in (0.5, 0.95, 0.99)]
            found += [
                which.float().mean() for which in (size == 0, size > 0.002, size < size.max() / 100)
            ]
            found += [size.mean(), size.std(), size.max(), delta.norm() / weights.norm()]
            for other in deltas[:i]:
                both = (delta != 0) & (other != 0)
                opposed = delta.sign() * other.sign() < 0
                sums = size + other.abs()
                found += [
                    (delta * other).sum(),
                    both.sum(),
                    opposed.sum(),
                    sums[both].sum(),
                    sums[opposed].sum(),
                ]
    print(len(found))


def torch_merge(method: str, density: str, output: str, *files: str) -> None:
    """DARE as one writes it from the paper's formulas: load the models, merge, save the result."""
    import torch
    from safetensors.torch import load_file, save_file

    base, *models = map(load_file, files)
    merged = {}
    for name, weights in base.items():
        start = weights.float()
        kept = []
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
            one = start + kept[0]
            other = start + kept[1]
            cosine = (one / one.norm() * (other / other.norm())).sum()
            angle = cosine.clamp(-1, 1).acos()
            halves = 0.5 if cosine > 0.9995 else (angle / 2).sin() / angle.sin()
            result = halves * one + halves * other
        merged[name] = result.to(weights.dtype)
    save_file(merged, output, metadata={"format": "pt"})


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
