"""One merge on Ray clusters of one and of two nodes with one CPU each, on this machine: for benchmark.py --nodes."""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(files: list[Path], method: str, repeat: int) -> None:
    """Measure in turn, and print how many times as fast two nodes are. Ray is started, and the processes are warm."""
    sys.path.insert(0, str(ROOT))
    dare = importlib.import_module("dare")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # which makes Ray stay at 127.0.0.1, on all systems
    ray, cluster_utils = importlib.import_module("ray"), importlib.import_module("ray.cluster_utils")
    shard = f"{files[0].stat().st_size // 24 // 1000}kB"
    config = dare.DareConfig(method=method, max_shard_size=shard, threads=1, verbose=False)
    merger, output = dare.DareMerger(files[0], files[1:], config), files[0].parents[1] / "merged"
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    ray.init(cluster.address, log_to_driver=False)
    taken: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeat):
        for nodes, seconds in taken.items():
            more = cluster.add_node(num_cpus=1) if nodes == 2 else None
            cluster.wait_for_nodes()
            for timed in (False, True):
                started = time.perf_counter()
                merger.merge(output, runner="ray")
                seconds += [time.perf_counter() - started] if timed else []
                shutil.rmtree(output)
            if more:
                cluster.remove_node(more)
    ray.shutdown()
    cluster.shutdown()
    one, two = map(statistics.median, taken.values())
    print(
        f"{method}, {len(files) - 1} models: {one:.2f} s on one node, {two:.2f} s on two, {one / two:.2f} times as fast"
    )
