"""Scores by EleutherAI's lm-evaluation-harness, lm-eval: of each task, the main metric."""

import gc
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from darelib.commands.sweep.scores import EvaluationFailed, Objective
from darelib.core.text import ConfigError, DareError, install_hint, list_names, nearest

PREFIX: Final = "lm-eval:"
SCORE: Final = "score"  # the mean over what the user names
# More are no faster on a CPU, and need more memory. On a GPU lm-eval finds how many fit.
CPU_BATCH: Final = 4
# Endings of the files that tasks are made of. Some that others include are called _default_yaml.
TASK_FILES: Final = ("yaml", ".py")
SEED: Final = 1234  # lm-eval's own: tasks may draw examples, shuffle answers or sample words
MOST: Final = 300  # characters of an error: transformers and datasets write pages


@dataclass(frozen=True)
class Harness:
    """An evaluation of models in directories."""

    library: Any  # the module lm_eval
    tasks: Mapping[str, Any]  # and groups, as lm-eval has loaded them
    metrics: Mapping[str, str]  # of those that the user names

    def __call__(self, model: Any, _: Any) -> dict[str, float]:
        import torch

        problem = ""
        with quiet():
            try:
                results = self._evaluate(str(model))
            except Exception as error:  # if it were kept, so would be the model
                problem = describe(error)
            finally:
                gc.collect()  # models have circles
                torch.cuda.empty_cache()
        if problem:
            raise EvaluationFailed(problem)
        scores = {name: read(results, name, metric) for name, metric in self.metrics.items()}
        return {SCORE: fmean(scores.values())} | scores

    def _evaluate(self, folder: str) -> Any:
        """What lm-eval reports. No code that comes with a model is run."""
        import torch
        import transformers

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self.library.models.huggingface.HFLM(
            folder,
            device=device,
            batch_size=CPU_BATCH if device == "cpu" else "auto",
            trust_remote_code=False,
            use_safetensors=True,
        )
        transformers.set_seed(SEED)
        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(SEED)
        # simple_evaluate would also ask git and pip about this machine, every time.
        found = self.library.evaluate(model, self.tasks, log_samples=False, bootstrap_iters=0)
        return found["results"]


def find_harness(
    text: str, folder: Path | None, objectives: Sequence[Objective]
) -> tuple[Harness, str]:
    """An evaluation by tasks, whose data are loaded, and its label. folder: of tasks besides
    lm-eval's own.
    """
    names = list(filter(None, map(str.strip, text.removeprefix(PREFIX).split(","))))
    if not names:
        raise ConfigError(f"--evaluate {text!r} names no task", "like lm-eval:arc_easy,hellaswag")
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"there is no folder {str(folder)!r}", "--lm-eval-tasks takes a folder of YAML files"
        )
    library = load_library()
    with quiet():
        manager = library.tasks.TaskManager(include_path=folder)
        tasks = load_tasks(manager, names)
    is_averaged = SCORE in [objective.name for objective in objectives]
    metrics = {name: find_metric(name, tasks, is_averaged) for name in names}
    label = f"{PREFIX}{','.join(names)} {library.__version__}"
    label += f" {digest_tasks(folder)}" if folder else ""
    return Harness(library, tasks, metrics), label


def load_library() -> Any:
    try:
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise DareError(f"lm-eval cannot be imported: {error}", install_hint("lm-eval")) from None
    return lm_eval


@contextmanager
def quiet() -> Iterator[None]:
    """Print nothing of what lm-eval prints: progress, warnings, prompts."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST]


def load_tasks(manager: Any, names: Sequence[str]) -> dict[str, Any]:
    """Tasks, groups, and all tasks that have a tag, with their data."""
    import transformers

    if odd := next((name for name in names if name not in manager.task_index), None):
        raise ConfigError(f"lm-eval has no task {odd!r}", nearest(odd, manager.all_tasks))
    transformers.set_seed(SEED)
    try:
        return manager.load(names)
    except Exception as error:  # whatever tasks and data sets come up with
        raise DareError(
            f"lm-eval cannot load {list_names(names)}: {describe(error)}",
            "check the tasks, and whether their data can be found",
        ) from None


def find_metric(name: str, tasks: Mapping[str, Any], is_averaged: bool) -> str:
    """The main metric of a task or a group: the first that it lists."""
    group = tasks["groups"].get(name)
    task = tasks["tasks"].get(name)
    if group:
        metrics = [each.metric for each in group.aggregate_metric_list or ()]
    else:
        metrics = list(task.aggregation()) if task else []
    if not metrics:
        raise ConfigError(
            f"{name!r} of lm-eval is a tag, or a group without a metric of its own",
            f"name tasks: {list_names([*tasks['tasks']])}",
        )
    members = group.get_all_tasks() if group else [task]
    if is_averaged and any(each.higher_is_better().get(metrics[0]) is False for each in members):
        raise ConfigError(
            f"of {name!r}, a lower {metrics[0]} is better, so that it has no part in a mean score",
            f"name each score: --objectives {name}:min",
        )
    return metrics[0]


def read(results: Mapping[str, Any], task: str, metric: str) -> float:
    """The value of a metric; of several filters of answers, with the first."""
    for key, value in results[task].items():
        if key.startswith(f"{metric},"):
            return value
    raise EvaluationFailed(f"lm-eval reports no {metric!r} of {task!r}")


def digest_tasks(folder: Path) -> str:
    """Another one when a file that tasks are made of is another."""
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(TASK_FILES))
    files = [
        (path.relative_to(folder).as_posix(), path.read_bytes()) for path in paths if path.is_file()
    ]
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]
