"""One merge on a Ray cluster of three nodes: the bytes of one machine, whatever is killed."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dare import ConfigError, DareConfig, DareError, DareMerger
from darelib.output.files import Journal
from darelib.run.ray import load_ray
from tests.scene import Contents, contents, launch, wait_for
from tests.support import (
    BF16,
    HERE,
    Patch,
    make_models,
    random_model,
    save_directories,
    save_directory,
    to_hub_cache,
)

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = (
    "0"  # which makes Ray stay at 127.0.0.1, on all systems
)
try:
    ray = load_ray()
except DareError:
    pytest.skip("could not import 'ray'", allow_module_level=True)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(os.name == "nt", reason="POSIX"),
]
SHAPES = {f"model.layers.{k}.weight": (256, 256) for k in range(12)}
SETTINGS: dict[str, Any] = {
    "method": "ties",
    "keep_ratio": 0.5,
    "max_shard_size": "100kB",
    "engine": "plain",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(tmp_path_factory.getbasetemp() / "hub-of-the-nodes"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("PYTHONPATH", str(HERE))
        patch.setenv("RAY_health_check_period_ms", "1000")  # so that a lost node is missed soon
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(3):
            made.add_node(num_cpus=1, object_store_memory=80_000_000)
        made.wait_for_nodes()
        yield made
        made.shutdown()


@pytest.fixture
def merger(tmp_path: Path) -> DareMerger:
    base, *paths = save_directories(tmp_path, make_models(2, BF16, SHAPES), torch_dtype="bfloat16")
    return DareMerger(base, paths, DareConfig(verbose=False, **SETTINGS))


@pytest.fixture
def whole(merger: DareMerger, tmp_path: Path) -> Contents:
    merger.merge(tmp_path / "whole")
    made = contents(tmp_path / "whole")
    assert len([name for name in made if name.endswith(".safetensors")]) == 12
    return made


def arguments(folder: Path, cluster: Any, *flags: str) -> list[str]:
    models = ["-b", folder / "base", "-m", folder / "math", folder / "code", "-o", folder / "out"]
    settings = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items()]
    return [
        "-q",
        *map(str, models),
        *settings,
        "--runner",
        "ray",
        "--ray-address",
        cluster.address,
        *flags,
    ]


def finished(folder: Path) -> int:
    return sum(bool(Journal(path).done) for path in (folder / "out.partial").glob("*/journal-*"))


def test_a_cluster_makes_the_bytes_and_the_figures_of_one_machine(
    cluster: Any, merger: DareMerger, tmp_path: Path, whole: Contents
) -> None:
    report = merger.merge(tmp_path / "out", runner="ray", ray_address=cluster.address)
    assert contents(tmp_path / "out") == whole
    assert report.models == merger.merge(tmp_path / "whole").models
    assert not (tmp_path / "out.partial").exists()


def test_nodes_may_have_a_cache_of_the_hub_of_their_own(
    cluster: Any, merger: DareMerger, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for hub in (tmp_path / "hub", Path(os.environ["HF_HUB_CACHE"])):
        for name, commit in (("base", "b" * 40), ("math", "c" * 40)):
            to_hub_cache(hub, f"org/{name}", tmp_path / name, commit)
    monkeypatch.chdir(tmp_path)
    named = DareMerger("org/base", ["org/math"], merger.config)
    named.merge("whole")
    named.merge("out", runner="ray", ray_address=cluster.address)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


SLOW = """
import darelib.run.ray as runner
real = runner.make_elsewhere
def make_elsewhere(order, number):
    import time
    time.sleep(1)
    return real(order, number)
runner.make_elsewhere = make_elsewhere
"""


def test_the_files_of_a_node_that_is_killed_are_made_elsewhere(
    cluster: Any, merger: DareMerger, tmp_path: Path, whole: Contents
) -> None:
    node = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    process = launch(SLOW, *arguments(tmp_path, cluster))
    wait_for(lambda: finished(tmp_path) >= 2, 60)
    cluster.remove_node(node, allow_graceful=False)
    printed = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert contents(tmp_path / "out") == whole


def test_a_merge_whose_driver_is_killed_is_resumed_with_what_is_finished(
    cluster: Any, merger: DareMerger, tmp_path: Path, whole: Contents
) -> None:
    process = launch(SLOW, *arguments(tmp_path, cluster, "--resume"))
    wait_for(lambda: finished(tmp_path) >= 3, 60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    kept = finished(tmp_path)
    assert kept >= 3
    count = (
        "from darelib.run import ray\nreal = ray.run_tasks\n"
        "ray.run_tasks = lambda ray, numbers, *more: (say(ray, numbers), real(ray, numbers, "
        "*more))[1]\n"
        "def say(ray, numbers): print('to do', len(numbers), 'sent', "
        "ray.get_runtime_context().runtime_env)\n"
    )
    again = launch(count, *arguments(tmp_path, cluster, "--resume"))
    printed = again.communicate(timeout=120)
    assert again.returncode == 0, printed
    assert contents(tmp_path / "out") == whole
    assert (
        0 < int(printed[0].partition("to do ")[2].split()[0]) <= 12 - kept + 1
    )  # one may have been in the making
    assert (
        "sent {}" in printed[0]
    )  # not the current folder, which Ray takes along for whoever uses `uv run`


def test_a_node_that_sees_another_input_stops_the_merge_with_the_reason(
    cluster: Any, merger: DareMerger, tmp_path: Path, monkeypatch: Patch
) -> None:
    from darelib.run import ray as runner

    real = runner.run_tasks

    def change(*given: Any) -> Any:
        os.utime(tmp_path / "math" / "model.safetensors", (1, 1))
        return real(*given)

    monkeypatch.setattr(runner, "run_tasks", change)
    with pytest.raises(DareError, match=r"sees another merge than .*modification time"):
        merger.merge(tmp_path / "out", runner="ray", ray_address=cluster.address)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "code", "math"]


def test_a_process_that_is_connected_already_makes_several_merges(
    cluster: Any, merger: DareMerger, tmp_path: Path, whole: Contents
) -> None:
    """Tasks of a merge that has failed may still be there when another one begins in the same
    place."""
    broken = random_model(dtype=BF16, shapes=SHAPES)
    broken["model.layers.0.weight"][3, 4] = float("nan")
    save_directory(tmp_path / "broken", broken)
    models = [tmp_path / "broken", *merger.models]
    ray.init(cluster.address, log_to_driver=False)
    try:
        for name in ("first", "second"):
            merger.merge(tmp_path / name, runner="ray")
            assert contents(tmp_path / name) == whole
        for _ in range(10):
            with pytest.raises(DareError, match="holds nan"):
                DareMerger(merger.base, models, merger.config).merge(
                    tmp_path / "third", force=True, runner="ray"
                )
            merger.merge(tmp_path / "third", runner="ray")
            assert contents(tmp_path / "third") == whole
        with pytest.raises(ConfigError, match="no node of the cluster has 4 CPUs"):
            DareMerger(merger.base, models, replace(merger.config, threads=4)).merge(
                tmp_path / "out", runner="ray"
            )
    finally:
        ray.shutdown()


def test_a_signal_stops_the_driver(cluster: Any, merger: DareMerger, tmp_path: Path) -> None:
    process = launch(SLOW, *arguments(tmp_path, cluster, "--resume"))
    wait_for(lambda: finished(tmp_path) >= 1, 60)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=60)
    assert process.returncode == 143, printed
    assert "interrupted\n" in printed[1], printed  # Ray may have its say before
    assert (tmp_path / "out.partial").exists()


def test_addresses_where_nobody_is_are_named(
    merger: DareMerger, tmp_path: Path, monkeypatch: Patch
) -> None:
    for address in ("127.0.0.1:9", "127.0.0.1", "nowhere.invalid:6379", "ray://", ":"):
        with pytest.raises(DareError, match=f"no Ray cluster at '{address}'"):
            merger.merge(tmp_path / "out", runner="ray", ray_address=address)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(DareError, match=r"no Ray cluster at '127.0.0.1:9'"):
        merger.merge(tmp_path / "out", runner="ray")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "code", "math"]


def test_one_output_file_and_a_machine_without_ray_are_refused(
    merger: DareMerger, tmp_path: Path, monkeypatch: Patch
) -> None:
    with pytest.raises(ConfigError, match="a single file"):
        merger.merge(tmp_path / "out.safetensors", runner="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DareError, match="needs ray"):
        merger.merge(tmp_path / "out", runner="ray")
