"""The runner of a Ray cluster: a task for each file of the output.

Ray places them, and repeats those of lost nodes.
"""

import importlib
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

from darelib.config import DareConfig
from darelib.core.interrupts import Interrupts
from darelib.core.text import ConfigError, DareError, install_hint, progress
from darelib.core.tuning import TUNING, raise_open_file_limit
from darelib.models.inputs import explain_read_errors, open_models
from darelib.models.source import Source
from darelib.output.destination import Destination, explain_difference
from darelib.output.prepare import plan_files
from darelib.output.publish import Output
from darelib.output.tokenizer import TokenizerChoice
from darelib.run.threads import Made, Order, check_shards, list_done, make_part, publish
from darelib.run.worker import Outcome

# What a process of the cluster has open: one merge, for all tasks that Ray gives it.
OPENED: Final[dict[str, Any]] = {}
CONNECT_SECONDS: Final = 15
UV_VARIABLE: Final = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"


@dataclass(frozen=True)
class Task:
    """What another machine needs to plan a merge for itself, by its own view of the inputs."""

    sources: tuple[Source, ...]
    config: DareConfig
    tokenizer: TokenizerChoice
    output: Destination
    identity: dict[str, Any]  # that it must find


def run(order: Order) -> Made:
    ray = load_ray()
    plan = order.plan
    check_shards(plan, "--runner ray")
    sources = tuple(model.source.find_models(name_for_all) for model in order.inputs)
    identity = plan.identity(order.inputs)
    task = Task(sources, plan.config, plan.tokenizer, plan.output, identity)

    def run_shards(output: Output) -> Made:
        outcomes = list_done(plan, output)
        done = {(outcome.tensor, outcome.start) for outcome in outcomes}
        shards = [plan.part([file]) for file in range(len(plan.files))]
        todo = {
            file: shard.bytes_to_read
            for file, shard in enumerate(shards)
            if any(shard.jobs(shard.tensors, done))
        }
        own = {tensor.name for tensor in plan.tensors if tensor.output.file in todo}
        outcomes = [outcome for outcome in outcomes if outcome.tensor not in own]
        with (
            progress("merging", plan.bytes_to_read, plan.config.verbose) as advance,
            connect(ray, order.ray_address),
        ):
            order.interrupts.hold()
            advance(plan.bytes_to_read - sum(todo.values()))
            for file, entries in run_tasks(ray, list(todo), task, order.interrupts):
                outcomes += map(Outcome.of_entry, entries)
                advance(todo[file])
        return plan, outcomes

    return publish(order, run_shards)


def name_for_all(source: Source) -> Source:
    """A model as every node finds it: by its commit on the Hub, of which a node may have its own
    cache, or its path.
    """
    pinned = source.pinned
    source = replace(source, joined=tuple(map(name_for_all, source.joined)))
    return Source(pinned, Path(pinned)) if pinned else replace(source, path=source.path.absolute())


def load_ray() -> Any:
    # Where `uv run` started the process, Ray would send the current folder, models and all, to
    # every node. It reads this once, when it is imported.
    is_set = UV_VARIABLE in os.environ
    os.environ.setdefault(UV_VARIABLE, "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise DareError("--runner ray needs ray", install_hint("ray")) from None
    finally:
        if not is_set:
            del os.environ[UV_VARIABLE]


@contextmanager
def connect(ray: Any, address: str | None) -> Iterator[None]:
    """Use the cluster that the process is connected to already, the one at an address, or the one
    that Ray finds.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        host, _, port = (address or "").rpartition("/")[2].rpartition(":")
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        hint = f"an address is like 10.0.0.1:6379, HOST:PORT ({shorten(str(error), 200)})"
        raise DareError(f"there is no Ray cluster at {address or 'auto'!r}", hint) from None
    try:
        yield
    finally:
        ray.shutdown()


def run_tasks(
    ray: Any, files: Sequence[int], task: Task, interrupts: Interrupts
) -> Iterator[tuple[int, list[Any]]]:
    """Make these files. Gives each one and what was found, as they are finished.

    Where one fails, the others are not cancelled: that can end the driver (Ray takes a task for
    failed that turns out to be running). They end with the connection; if that was there before,
    they find another folder, or none.
    """
    sizes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    # As many as were asked for or, where there are more than files, an equal share that every node
    # has.
    share = min(sum(sizes) // max(len(files), 1), *filter(None, sizes), sys.maxsize)
    threads = task.config.threads or max(1, share)
    if threads > max(sizes, default=threads):
        raise ConfigError(
            f"no node of the cluster has {threads} CPUs", f"--threads can be {max(sizes)} at most"
        )
    task = replace(task, config=replace(task.config, threads=threads, verbose=False))
    remote = ray.remote(
        num_cpus=threads,
        retry_exceptions=[OSError],  # what else fails would fail again; a disk may recover
        scheduling_strategy="SPREAD",  # else some nodes wait while others work
    )
    make = remote(make_elsewhere)
    shared = ray.put(task)
    running = {make.remote(shared, file): file for file in files}
    try:
        while running:
            ready, _ = ray.wait(list(running), timeout=TUNING.poll_seconds)
            interrupts.check()
            for reference in ready:
                yield running.pop(reference), ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", error)
        if not isinstance(cause, ray.exceptions.RayError):
            raise cause from None  # of the task itself
        raise DareError(
            f"Ray cannot finish the merge: {shorten(str(cause), 200)}",
            "install this tool on each node; --resume keeps what is done, and continues",
        ) from None


def make_elsewhere(task: Task, file: int) -> list[Any]:
    """The task: one file of the output, made on the node that Ray chose.

    Gives what its jobs found, as entries.
    """
    with Interrupts() as interrupts:
        if OPENED.get("task") != task:
            OPENED.pop("open", ExitStack()).close()  # of the merge before
            OPENED.clear()
            OPENED.update(open_like(task), task=task)
        part = OPENED["plan"].part([file])
        outcomes = make_part(part, OPENED["inputs"], task.identity, interrupts)
    return [outcome.as_entry() for outcome in outcomes]


def open_like(task: Task) -> dict[str, Any]:
    """Open the inputs and plan the merge, and refuse what is not the merge of whoever asks for
    it.
    """
    host = socket.gethostname()
    raise_open_file_limit()
    with ExitStack() as opened:
        try:
            models = open_models(task.sources, task.tokenizer.source, task.config)
            inputs = opened.enter_context(models)
            with explain_read_errors():
                plan = plan_files(
                    task.config, inputs, task.output, task.tokenizer, with_side_files=False
                )
        except DareError as error:
            raise DareError(f"on {host}: {error}", error.hint) from None
        if difference := explain_difference(task.identity, plan.identity(inputs)):
            raise DareError(
                f"{host} sees another merge than the machine that started it: {difference}",
                "all nodes need the same version of this tool and must see the same files by the "
                "same paths, and nobody may change them",
            )
        return {"inputs": inputs, "plan": plan, "open": opened.pop_all()}
