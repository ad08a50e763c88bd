# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[plot]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Find good merge settings with your own evaluation: merge every combination, score it, and say which is best.

    uv run examples/sweep.py --config c.toml --drop-rate 0.5 0.7 0.8 0.9 0.95 --method linear ties \\
        --lambda 0.5 1 --seeds 3 --evaluate 'python my_eval.py {model}'

or from Python, with a function in place of the command:

    result = sweep("base.safetensors", ["a.safetensors", "b.safetensors"], Grid(drop_rate=(0.5, 0.9)), my_score)
    print(result, result.best.settings)

The base, each fine-tune alone and the plain average without dropping are always scored too: what does not beat the
average is not worth its randomness. Every score is written to a file at once, so that the same command continues a
sweep that was interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import re
import signal
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

import tomli_w
from sweep_command import Command, EvaluationFailed
from sweep_plot import draw, load_matplotlib, show

from dare import ConfigError, DareConfig, DareError, DareMerger, Rule
from darelib.drops import DROPS, EXPECTATION
from darelib.gradients import value_at
from darelib.methods import METHODS

# In the head of every file that is written here, so that files of others are not overwritten.
MARK: Final = "Written by examples/sweep.py"
# How sure to be, after allowing for the choice among many, before the best is said to beat the baseline.
SIGNIFICANT: Final = 0.05
# Names on the Hugging Face Hub, and what not to take from there: weights of other frameworks.
HUB_NAME: Final = r"[\w.-]+/[\w.-]+(@[\w./-]+)?"
UNWANTED: Final = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]
LOG: Final = logging.getLogger("dare.sweep")


def count_of(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def printable(text: str) -> str:
    """Text without anything that a terminal obeys."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


# ---- What is compared -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model as the user named it, and where it is."""

    name: str
    path: Path
    pinned: str = ""  # for a model of the Hub: its name with the commit

    @classmethod
    def of(cls, given: str | Path | Model, folder: Path = Path()) -> Model:
        """Find a model, on this machine or on the Hugging Face Hub. If there is none, the plan of a merge says why."""
        if isinstance(given, Model):
            return given
        name, path = str(given), folder / Path(given).expanduser()
        if not path.exists() and re.fullmatch(HUB_NAME, name):
            with suppress(Exception):
                from huggingface_hub import snapshot_download

                repository, _, revision = name.partition("@")
                path = Path(snapshot_download(repository, revision=revision or None, ignore_patterns=UNWANTED))
                return cls(name, path, f"{repository}@{path.name}")
        return cls(name, path)

    @property
    def folder(self) -> Path | None:
        """The directory of a model that is more than one file."""
        if self.path.is_dir():
            return self.path
        beside = {"model.safetensors": "config.json", "adapter_model.safetensors": "adapter_config.json"}
        companion = self.path.parent / beside.get(self.path.name, "")
        return self.path.parent if self.path.suffix == ".json" or companion.is_file() else None

    def identify(self) -> list[Any]:
        """By what it is recognised: its files' names, sizes and modification times, wherever they are."""
        files = [self.path] if self.folder is None else sorted(p for p in self.folder.rglob("*") if p.is_file())
        found = [(path.relative_to(self.folder or path.parent).as_posix(), path.stat()) for path in files]
        return [[name, status.st_size, status.st_mtime_ns] for name, status in found]

    def path_from(self, place: Path) -> str:
        """What to call it in a configuration that lies there."""
        if self.pinned or Path(self.name).expanduser().is_absolute():
            return self.pinned or self.name
        with suppress(ValueError):  # on another drive
            return Path(os.path.relpath(self.path.parent.resolve() / self.path.name, place)).as_posix()
        return str(self.path.absolute())


@dataclass(frozen=True)
class Grid:
    """The values to combine. None: as the configuration has it."""

    drop_rate: Sequence[Any] | None = None
    drop: Sequence[Any] | None = None
    method: Sequence[str] | None = None
    lambda_coeff: Sequence[float] | None = None
    rescale_q: Sequence[Any] | None = None
    keep_ratio: Sequence[float] | None = None
    seeds: int = 3  # how many masks to draw for each combination

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"--seeds must be at least 1, not {self.seeds}", "3 or more show the spread")
        for name, values in self.axes().items():
            flag = "--lambda" if name == "lambda_coeff" else f"--{name.replace('_', '-')}"
            for value in values:
                try:
                    DareConfig(**{"method": "ties", name: value})  # to which all of them mean something
                except ConfigError as error:
                    raise ConfigError(str(error).replace(name, flag, 1), error.hint) from None

    def axes(self) -> dict[str, Sequence[Any]]:
        """The settings that are varied, with their values."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "seeds"}
        return {name: values for name, values in given.items() if values is not None}


@dataclass(frozen=True)
class Candidate:
    """A row of the table: one combination of settings, or a model alone."""

    name: str
    kind: str  # "grid", "baseline" or "alone"
    models: tuple[Model, ...]
    configs: tuple[DareConfig, ...]  # one for each seed; none: the model is scored as it is

    @property
    def settings(self) -> DareConfig:
        return self.configs[0]

    @property
    def is_random(self) -> bool:
        return len(self.configs) > 0 and draws(self.configs[0])


def rules_of(config: DareConfig) -> tuple[Rule, ...]:
    return tuple(rule for rule in config.rules if isinstance(rule, Rule))  # which all of them are


def drops(config: DareConfig) -> bool:
    """Whether anything is dropped anywhere."""
    rates = [config.drop_rate, *(rule.drop_rate for rule in rules_of(config))]
    return any(any(rate) if isinstance(rate, tuple) else bool(rate) for rate in rates)


def draws(config: DareConfig) -> bool:
    """Whether anything is dropped at random; if not, the seed means nothing."""
    given = [config.drop, *(rule.drop for rule in rules_of(config))]
    names = {name for drop in given for name in ((drop,) if isinstance(drop, str) else drop or ())}
    return drops(config) and any(DROPS[name].rescale == EXPECTATION for name in names)


def fit(config: DareConfig, **chosen: Any) -> DareConfig:
    """The configuration with other settings, less what means nothing to the method: that would be an error."""
    method, rules = METHODS[chosen.get("method", config.method)], rules_of(config)
    if odd := {"keep_ratio", "slerp_t", "threshold"} - set(method.settings):
        chosen |= dict.fromkeys(odd)
        # Its own lambda is what a rule that set nothing else is left with: without it, later rules would match.
        plain = {"lambda_coeff": chosen.get("lambda_coeff", config.lambda_coeff)}
        own = [{k: v for k, v in rule.as_table().items() if k not in ("match", *odd)} for rule in rules]
        rules = tuple(Rule(rule.match, **(settings or plain)) for rule, settings in zip(rules, own, strict=True))
    return dataclasses.replace(config, **{"rules": rules, "verbose": False, **chosen})


def plain_average(config: DareConfig, count: int) -> DareConfig:
    """The baseline: no dropping anywhere. What rules say of lambda stays, such as which parts to leave alone."""
    weights = value_at(config.weights, 0.0)
    if config.method == "ties" and config.is_normalized and weights:  # which are relative there
        weights = tuple(weight / math.fsum(weights) for weight in weights)
    rules = tuple(Rule(rule.match, drop_rate=0.0, lambda_coeff=rule.lambda_coeff) for rule in rules_of(config))
    plain: dict[str, Any] = {"method": "linear", "drop_rate": 0.0, "lambda_coeff": 1.0, "rescale_q": None}
    plain |= {"drop": "random", "gamma": None, "epsilon": None, "rescale": None}
    average = fit(config, **plain, weights=weights, rules=rules)
    average.check_models(count)
    return average


def meaning(config: DareConfig) -> dict[str, Any]:
    """The same for two spellings of one merge."""
    settings = config.recipe_settings() | {"rules": [rule.as_table() for rule in rules_of(config)]}
    if not drops(config):
        odd = ("seed", "drop_rate", "rescale", "rescale_q", "drop", "gamma", "epsilon")  # q may only be 1 there
        settings = {name: value for name, value in settings.items() if name not in odd}
        settings["rules"] = [{k: v for k, v in rule.items() if k not in odd} for rule in settings["rules"]]
    return {name: value for name, value in settings.items() if (name, value) != ("keep_ratio", 1)}


def name_of(config: DareConfig) -> str:
    values = {"drop": config.drop_rate, "lambda": config.lambda_coeff, "q": config.rescale_q, "keep": config.keep_ratio}
    given = (f"{name} {show(value)}" for name, value in values.items() if value is not None)
    drop = config.drop if isinstance(config.drop, str) else "/".join(config.drop)
    return ", ".join((config.method, *([drop] if drop != "random" else []), *given))


def combinations(grid: Grid, config: DareConfig, models: tuple[Model, ...]) -> Iterator[Candidate]:
    """The baseline, and every combination that makes sense, once. Those that do not are left out, with a warning."""
    average = plain_average(config, len(models))
    name = "plain average (baseline, with the rules' lambdas)" if average.rules else "plain average (baseline)"
    yield Candidate(name, "baseline", models, (average,))
    axes, seen, left_out, made = grid.axes(), [meaning(average)], list[str](), 0
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen.get("drop_rate", config.drop_rate) == 0:
            chosen.pop("rescale_q", None)  # which means nothing where nothing is dropped
        try:
            first = fit(config, **chosen)
            first.check_models(len(models))
            # Model i draws with seed + i, so that seeds which share no mask are as far apart as there are models.
            seeds = [first.seed + k * len(models) for k in range(grid.seeds if draws(first) else 1)]
            configs = tuple(dataclasses.replace(first, seed=seed) for seed in seeds)
        except ConfigError as error:
            left_out.append(str(error))
            continue
        made += 1
        if meaning(first) not in seen:
            seen.append(meaning(first))
            yield Candidate(name_of(first), "grid", models, configs)
    if not made:
        raise ConfigError(f"no combination makes sense: {left_out[0]}", "see examples/sweep.py --help")
    if left_out:
        reasons = "; ".join(dict.fromkeys(left_out))
        LOG.warning(f"left out {count_of(len(left_out), 'combination')} that cannot be merged: {reasons}")


def alone(source: Model, config: DareConfig) -> Candidate:
    """A model by itself. An adapter is no model until it is merged into its base."""
    plain = fit(config, method="linear", drop_rate=0.0, lambda_coeff=1.0, rescale_q=None, rescale=None, rules=())
    plain = dataclasses.replace(plain, rescale=None, weights=None, rules=())
    is_adapter = source.folder is not None and (source.folder / "adapter_config.json").exists()
    return Candidate(f"{source.name} alone", "alone", (source,), (plain,) if is_adapter else ())


# ---- The results file -----------------------------------------------------------------------------------------------


class Results:
    """The scores so far, by key; with a file, also those of earlier sweeps. One JSON object to a line."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.scores = path, dict[str, float]()
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if path and path.exists() else ""
        except OSError as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}", "give another --results") from None
        first = text[:9].partition("\n")[0]  # which may have been cut short, too
        if text and not (first and '{"key": "'.startswith(first)):
            raise ConfigError(f"{str(path)!r} is not a results file of a sweep", "give another name after --results")
        for line in text.splitlines():
            with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):  # of a damaged line
                entry = json.loads(line)
                if math.isfinite(entry["score"]):  # what failed has none, and is tried again
                    self.scores[entry["key"]] = float(entry["score"])
        if text and not text.endswith("\n"):
            self.append("\n")

    def add(self, key: str, score: float | None, **details: Any) -> None:
        if score is not None:
            self.scores[key] = score
        self.append(json.dumps({"key": key, "score": score, **details}) + "\n")

    def append(self, text: str) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DareError(f"cannot write {str(self.path)!r}: {error.strerror}", "give another --results") from None


# ---- The sweep ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One thing to score: a candidate with one of its seeds."""

    candidate: Candidate
    config: DareConfig | None  # None: the model as it is
    key: str

    @property
    def seed(self) -> int | None:
        return self.config.seed if self.config and self.candidate.is_random else None

    def __str__(self) -> str:
        return self.candidate.name + (f", seed {self.seed}" if self.seed is not None else "")


@dataclass(frozen=True)
class Bench:
    """Where models are made and scored, one at a time."""

    base: Model
    tokenizer_from: Model | None
    evaluate: Callable[[Path], float]
    label: str
    identities: dict[Model, list[Any]]

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        """The key holds all that the score depends on, and nothing else, not even where the files are."""
        for config in candidate.configs or (None,):
            used = (self.base, *candidate.models) if config else candidate.models
            facts = {
                "settings": meaning(config) if config else None,
                "inputs": [self.identities[source] for source in used],
                "tokenizer_from": self.tokenizer_from.name if self.tokenizer_from else None,
                "evaluation": self.label,
            }
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
            yield Trial(candidate, config, digest[:32])

    def merger(self, candidate: Candidate, config: DareConfig) -> DareMerger:
        models = [model.path for model in candidate.models]
        tokenizer = self.tokenizer_from.path if self.tokenizer_from else None
        return DareMerger(self.base.path, models, config, tokenizer=tokenizer or "base")

    def output(self, folder: Path) -> Path:
        """Of the kind that the base is, so that what loads the base loads it."""
        is_file = self.base.path.is_file() and self.base.path.suffix == ".safetensors" and self.tokenizer_from is None
        return folder / ("merged.safetensors" if is_file else "merged")

    def score(self, trial: Trial, folder: Path) -> float:
        """Make the model, if it has to be made, and hand its path to the evaluation."""
        if trial.config is None:
            score = self.evaluate(trial.candidate.models[0].path.absolute())
        else:
            # In a folder of its own, so that whatever the evaluation puts beside the model goes with it.
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
                output = self.output(Path(place).absolute())
                self.merger(trial.candidate, trial.config).merge(output)
                score = self.evaluate(output)
        if not math.isfinite(score):
            raise EvaluationFailed(f"its score is {score}")
        return float(score)

    def check_unchanged(self) -> None:
        for source, before in self.identities.items():
            now: list[Any] = []
            with suppress(OSError):  # if it is gone
                now = source.identify()
            if now != before:
                files = [entry[0] for entry in now if entry not in before] or [name for name, *_ in before]
                raise DareError(
                    f"{source.name!r} has changed during the sweep: {', '.join(map(repr, files[:3]))}",
                    "run it again, old scores are not used; if your evaluation wrote that, let it write elsewhere",
                )


class OnlyOnce(logging.Filter):
    """Every merge warns of the same things; once is enough."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        new = record.getMessage() not in self.seen
        self.seen.add(record.getMessage())
        return new


def run_trials(trials: Sequence[Trial], bench: Bench, book: Results, folder: Path) -> None:
    """Score what has no score yet. A failure is reported and stored, and the rest goes on."""
    ahead = [trial for trial in trials if trial.key not in book.scores]
    merges = sum(trial.config is not None for trial in ahead)
    kept = f"; scores are kept in {book.path}" if book.path else ""
    kept += f", where {len(trials) - len(ahead)} of {len(trials)} are already" if len(ahead) < len(trials) else ""
    LOG.info(f"{count_of(merges, 'merge')} to make and {count_of(len(ahead), 'evaluation')} to run{kept}")
    begun = time.monotonic()
    for number, trial in enumerate(ahead, 1):
        started, score, complaint = time.monotonic(), None, ""
        try:
            score = bench.score(trial, folder)
        except Exception as error:  # whatever a merge or somebody's evaluation may come up with
            complaint = str(error) if isinstance(error, DareError) else f"{type(error).__name__}: {error}"
        bench.check_unchanged()
        seconds = time.monotonic() - started
        details: dict[str, Any] = {"name": trial.candidate.name, "seed": trial.seed, "seconds": round(seconds, 3)}
        details |= {"settings": meaning(trial.config)} if trial.config else {}
        details |= {"error": complaint} if score is None else {}
        book.add(trial.key, score, **details, evaluation=bench.label)
        left = (time.monotonic() - begun) / number * (len(ahead) - number)
        place = f"[{number}/{len(ahead)}] {trial}"
        if score is None:
            LOG.warning(f"{place} failed: {complaint}")
            if number == len(ahead) or ahead[number].candidate.kind != "alone":
                refuse_hopeless(ahead[:number], trials, book, complaint)
        else:
            LOG.info(f"{place}: {score:g} ({seconds:.1f} s, about {spell(left)} left)")


def refuse_hopeless(tried: Sequence[Trial], trials: Sequence[Trial], book: Results, complaint: str) -> None:
    """Stop where no model could be scored, not even alone: merges would only cost time."""
    known = any(trial.key in book.scores for trial in trials)
    if not known and all(trial.candidate.kind == "alone" for trial in tried):
        raise DareError(f"the evaluation fails for every model alone: {complaint}", "fix it; nothing was merged")


def spell(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def sweep(
    base: str | Path | Model,
    models: Sequence[str | Path | Model],
    grid: Grid,
    evaluate: Callable[[Path], float],
    *,
    config: DareConfig | None = None,
    minimize: bool = False,
    results: str | Path | None = None,
    directory: str | Path | None = None,
    tokenizer_from: str | Path | Model | None = None,
    label: str = "",
) -> SweepResult:
    """Score every combination with evaluate, which takes the path of a model and returns its score, or raises.

    config: what the grid does not vary. results: a file to which scores are written, and from which they are read again
    under label, which says what evaluate does (default: its name). directory: where the merged model lies while it is
    scored.
    """
    config = config or DareConfig()
    if not models:
        raise ConfigError("there are no models to merge", "name at least one fine-tuned model")
    label = label or str(getattr(evaluate, "label", getattr(evaluate, "__qualname__", evaluate)))
    tokenizer = None if tokenizer_from is None else Model.of(tokenizer_from)
    source, *merged = map(Model.of, (base, *models))
    bench = Bench(source, tokenizer, evaluate, label, {})
    average, *grown = combinations(grid, config, tuple(merged))
    book = Results(Path(results) if results else None)
    directory = directory or (Path(results).absolute().parent if results else None)
    logger, once = logging.getLogger("dare"), OnlyOnce()
    logger.addFilter(once)
    try:
        with tempfile.TemporaryDirectory(prefix="sweep-", dir=directory, ignore_cleanup_errors=True) as folder:
            bench.merger(average, average.settings).plan(bench.output(Path(folder)))  # to fail now rather than later
            bench.identities.update({model: model.identify() for model in (source, *merged)})
            # Models alone come first: nothing need be merged to see that an evaluation does not work.
            candidates = [*(alone(model, config) for model in (source, *merged)), average, *grown]
            trials = [trial for candidate in candidates for trial in bench.trials(candidate)]
            # One that is stopped early has tried everything.
            trials.sort(key=lambda trial: -1 if trial.seed is None else trial.seed)
            run_trials(trials, bench, book, Path(folder))
    except OSError as error:
        raise DareError(f"cannot use {str(directory)!r}: {error.strerror}", "give another --directory") from None
    finally:
        logger.removeFilter(once)
    rows = []
    for candidate in candidates:
        keys = [trial.key for trial in trials if trial.candidate is candidate]
        rows.append(Row(candidate, tuple(book.scores[key] for key in keys if key in book.scores), len(keys)))
    return SweepResult(rank(rows, minimize), minimize, source, tokenizer, config)


# ---- The outcome ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A candidate and its scores, in the order of its seeds."""

    candidate: Candidate
    scores: tuple[float, ...]
    wanted: int  # how many there should be

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def line(self) -> str:
        """All that it has in common with rows of other drop rates."""
        return re.sub(r"drop [^,]*, ", "", name_of(self.candidate.settings))

    @property
    def complete(self) -> bool:
        return len(self.scores) == self.wanted

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds (n - 1), where there are two or more."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None


def align(rows: list[list[str]]) -> str:
    """Columns of a table: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(cells).rstrip() for cells in lines)


def rank(rows: Sequence[Row], minimize: bool) -> tuple[Row, ...]:
    """Best first; what has no score last. The sort is stable: of equals, the baseline is the first."""
    return tuple(sorted(rows, key=lambda row: (row.mean if minimize else -row.mean) if row.scores else math.inf))


def chance(t: float, freedom: int) -> float:
    """The chance that Student's t with so many degrees of freedom is above t >= 0: Abramowitz and Stegun, 26.7.3-4."""
    angle = math.atan(t / math.sqrt(freedom))
    term, total = (math.cos(angle), 0.0) if freedom % 2 else (1.0, 0.0)
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if freedom % 2 else inside)) / 2


@dataclass(frozen=True)
class SweepResult:
    """All rows, best first. Prints as a table and what to make of it."""

    rows: tuple[Row, ...]
    minimize: bool
    base: Model
    tokenizer_from: Model | None
    config: DareConfig  # with what was not varied

    @property
    def merges(self) -> tuple[Row, ...]:
        """The combinations, and the baseline among them."""
        return tuple(row for row in self.rows if row.candidate.kind != "alone")

    @cached_property
    def best(self) -> Row:
        """The merge with the best mean, of those that were scored with every seed."""
        for row in self.merges:
            if row.complete:
                return row
        raise DareError("no combination could be scored with every seed", "the results file has what went wrong")

    @property
    def baseline(self) -> Row:
        return next(row for row in self.rows if row.candidate.kind == "baseline")

    @cached_property
    def distinguishable(self) -> bool | None:
        """Whether the best beats the baseline by more than its seeds explain; None: that cannot be told.

        The baseline does not depend on a seed, so this is Student's one-sided t test of the seeds' mean against it; its
        p is multiplied by the number of combinations that the best was picked from (Bonferroni).
        """
        if self.best is self.baseline:
            return False
        if not self.baseline.scores or not self.best.spread:  # scores that never differ tell nothing of chance
            return None
        return self.probability <= SIGNIFICANT

    @property
    def probability(self) -> float:
        error = (self.best.spread or math.nan) / math.sqrt(len(self.best.scores))
        gain = abs(self.best.mean - self.baseline.mean)
        picked_from = sum(bool(row.scores) for row in self.merges) - 1
        return min(1.0, picked_from * chance(gain / error, len(self.best.scores) - 1))

    @property
    def verdict(self) -> str:
        best, baseline = self.best, self.baseline
        if best is baseline:
            return "No combination scores better than the plain average without dropping: there is no reason to drop."
        what = f"The best merge is {best.name}, with {self.number(best.mean)}"
        if not baseline.scores:
            return f"{what}. The baseline could not be scored, so there is nothing to compare it with."
        gain = f"{self.number(abs(best.mean - baseline.mean))} better than the plain average"
        if not best.spread:
            one = "there is only one seed; give --seeds 3 or more"
            why = "all its seeds score the same" if best.spread == 0 else one
            why = why if best.candidate.is_random else "neither drops anything at random"
            return f"{what}, {gain}. Whether that is more than chance cannot be told from seeds: {why}."
        test = f"t test over {len(best.scores)} seeds, p = {self.probability:.2g} with allowance for the choice"
        if self.distinguishable:
            return f"{what}, {gain}: more than its seeds' spread explains ({test})."
        return f"{what}, but it is not distinguishable from the plain average: {gain} ({test})."

    @property
    def remarks(self) -> list[str]:
        """What to make of it, a sentence to a line."""
        remarks = [self.verdict]
        first = self.rows[0]
        if first.candidate.kind == "alone" and first.mean != self.best.mean:
            remarks.append(f"No merge does as well as {first.name}.")
        others = [row for row in self.merges if row is not self.baseline]
        if self.best.candidate.is_random and all(row.candidate.is_random for row in others):
            remarks.append("Whether it is the dropping that helps is not shown: put 0 among the drop rates.")
        if any(not row.complete for row in self.rows):
            remarks.append("Some evaluations failed; the same command tries them again.")
        noise = "The evaluation's own noise is unknown and not in these figures."
        return [*remarks, noise, "The best of many looks better than it is: confirm it on data that was not used here."]

    @cached_property
    def decimals(self) -> int:
        """As many as show three or four figures of the differences."""
        scores = [score for row in self.rows for score in row.scores]
        width = max(scores) - min(scores) if scores else 0.0
        return min(max(3 - math.floor(math.log10(width)), 0), 9) if width else 4

    def number(self, value: float | None) -> str:
        return "-" if value is None else f"{value:.{self.decimals}f}"

    def __str__(self) -> str:
        rows = [["", "score", "spread", "seeds", "against baseline"]]
        for rank, row in enumerate(self.rows, 1):
            seeds = "-" if row.wanted == 1 and not row.candidate.is_random else str(row.wanted)
            cells = [f"{rank:>{len(str(len(self.rows)))}}  {printable(row.name)}"]
            if not row.scores:
                rows.append([*cells, "failed", "-", seeds, "-"])
                continue
            gain = row.mean - self.baseline.mean if self.baseline.scores and row is not self.baseline else None
            against = "-" if gain is None else f"{gain:+.{self.decimals}f}"
            seeds = seeds if row.complete else f"{len(row.scores)} of {seeds}"
            rows.append([*cells, self.number(row.mean), self.number(row.spread), seeds, against])
        notes = f"({'lower' if self.minimize else 'higher'} is better; spread: standard deviation over seeds)"
        return "\n".join([align(rows), notes, "", *map(printable, self.remarks)])


def winning_configuration(result: SweepResult, path: Path, output: Path | None = None, evaluation: str = "") -> str:
    """A configuration that makes the best merge again, for a file at this path.

    With the first seed, not the luckiest: the luck of a seed on one evaluation is not worth keeping.
    """
    best, place = result.best, path.absolute().parent.resolve()
    config, models = best.candidate.settings, best.candidate.models
    to_file = result.base.path.is_file() and result.tokenizer_from is None
    target = output or path.parent / ("merged.safetensors" if to_file else "merged")
    named: dict[str, Any] = {"base_file": result.base.path_from(place)}
    named |= {"merge_files": [model.path_from(place) for model in models]}
    named |= {"output_file": Model(str(target), target).path_from(place)}
    if result.tokenizer_from:
        named["tokenizer"] = result.tokenizer_from.path_from(place)
    tables: dict[str, Any] = {"models": named}
    tables["dare"] = config.recipe_settings() | {"verbose": result.config.verbose}
    tables["dare"] |= {name: getattr(config, name) for name in ("max_shard_size", "delta_threshold", "engine")}
    tables["dare"] |= {"threads": config.threads} if config.threads else {}
    if config.rules:
        tables["rules"] = [rule.as_table() for rule in rules_of(config)]
    each = f"; by seed: {' '.join(map(result.number, best.scores))}" if len(best.scores) > 1 else ""
    comments = [
        f"{MARK}: the best of {count_of(len(result.merges), 'merge')}. Use it with dare.py --config {path.name}",
        "",
        f"settings: {best.name}",
        f"score: {result.number(best.mean)}, spread {result.number(best.spread)}{each}",
        f"plain average: {result.number(result.baseline.mean) if result.baseline.scores else 'failed'}",
        *([f"evaluation: {evaluation}"] if evaluation else []),
        *result.remarks,
    ]
    lines = [f"# {printable(comment)}".rstrip() for comment in comments]
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(tables)


def check_ours(path: Path, flag: str, force: bool) -> None:
    """Refuse to replace what was not written here, before hours are spent on what would replace it."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the directory of {flag} {str(path)!r} does not exist", "create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {str(path)!r} is a directory", "give the name of a file")
    if path.exists() and not force:
        with path.open("rb") as file:
            if MARK.encode() not in file.read(4096):
                raise DareError(f"{str(path)!r} exists and was not written by a sweep", f"add --force, or other {flag}")


# ---- The command line -----------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, f"see {self.prog} --help")


def build_parser() -> Parser:
    parser = Parser(
        prog="sweep.py",
        description="Merge every combination of the given settings, score each with your own evaluation, and say which "
        "is best. What is not varied stays as the configuration has it. The base, each fine-tune alone and the plain "
        "average without dropping are scored too.",
        epilog="The evaluation is split into words as by a shell, but run without one, in your directory; so quote it "
        "as a whole, and {model} needs no quotes of its own: --evaluate 'python my_eval.py --task \"a b\" {model}'. "
        'Its score is "score" in the last JSON object that it prints, or else the last number. Exit status: 0 done, 1 '
        "failed, 2 wrong usage, 130 interrupted (143 by SIGTERM).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    file: dict[str, Any] = {"metavar": "FILE", "type": Path}
    numbers: dict[str, Any] = {"type": float, "nargs": "+"}
    add("-c", "--config", **file, help="TOML configuration: models, and what is not varied")
    add("-b", "--base", metavar="MODEL", help="the base, instead of the configuration's")
    add("-m", "--merge", metavar="MODEL", nargs="+", help="the fine-tuned models, instead of the configuration's")
    add("-e", "--evaluate", metavar="COMMAND", required=True, help="prints a score; {model} is replaced by a path")
    add("--drop-rate", metavar="P", **numbers, help="drop rates to try")
    add("--drop", metavar="NAME", nargs="+", help=f"what to drop, to try: {', '.join(DROPS)}")
    add("--method", metavar="NAME", nargs="+", help=f"methods to try: {', '.join(METHODS)}")
    add("--lambda", metavar="X", **numbers, dest="lambda_coeff", help="scales of the merged delta to try")
    add("--rescale-q", metavar="Q", **numbers, help="DAREx-q: divisors to try, where 1 - P <= Q <= 1")
    add("--keep-ratio", metavar="R", **numbers, help="ties: shares that trim keeps, to try")
    add("--seeds", metavar="N", type=int, default=3, help="masks to draw for each combination (default 3)")
    add("--minimize", action="store_true", help="lower scores are better")
    add("--timeout", metavar="S", type=float, help="seconds after which an evaluation is ended, and has failed")
    add("--results", **file, help="scores so far (default: sweep_results.jsonl beside the configuration)")
    add("--write-config", **file, help="the best merge (default: sweep_best.toml beside the configuration)")
    add("--plot", **file, help="draw score against drop rate: a .png or .svg file")
    add("--directory", metavar="DIR", type=Path, help="where one merged model at a time lies (default: the results')")
    add("--force", action="store_true", help="replace files that a sweep did not write")
    add("-q", "--quiet", action="store_true", help="no progress, only the result")
    return parser


def read_configuration(path: Path | None) -> tuple[dict[str, Any], DareConfig]:
    """The [models] table of a configuration, and how to merge."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig")) if path else {}
        return tables.get("models", {}), DareConfig(**tables.get("dare", {}), rules=tables.get("rules", ()))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {str(path)!r}", "check the path after --config") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.hint) from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot use {path}: {error}", "see merge_config.toml for an example") from None


def check_files(options: argparse.Namespace, written: Sequence[Path], models: Sequence[Model]) -> None:
    """Refuse what could not be written, before hours are spent on it."""
    for path, flag in zip(written, ("--results", "--write-config", "--plot"), strict=False):
        if flag != "--results":
            check_ours(path, flag, options.force)
        for model in models:
            used, target = (model.folder or model.path).resolve(), path.resolve()
            if used == target or used in target.parents:
                how = "is" if used == target else "lies inside"
                raise ConfigError(f"{str(path)!r} {how} the input {model.name!r}", "inputs are never overwritten")
    if options.plot and options.plot.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot {str(options.plot)!r} is neither .png nor .svg", "name it like sweep.png")
    if options.plot:
        load_matplotlib()


def run(arguments: Sequence[str] | None) -> None:
    options = build_parser().parse_args(arguments)
    LOG.setLevel(logging.WARNING if options.quiet else logging.INFO)
    named, config = read_configuration(options.config)
    beside = options.config.parent if options.config else Path()
    given = [options.base or named.get("base_file", ""), *(options.merge or named.get("merge_files", ()))]
    folders = [
        Path() if options.base else beside,
        *itertools.repeat(Path() if options.merge else beside, len(given) - 1),
    ]
    if len(given) < 2 or not given[0]:
        raise ConfigError("there are no models to merge", "give --config FILE, or --base MODEL and --merge MODEL...")
    base, *models = map(Model.of, given, folders)
    command = Command.of(options.evaluate, options.timeout)
    results = options.results or beside / "sweep_results.jsonl"
    winner = options.write_config or beside / "sweep_best.toml"
    check_files(options, [results, winner, *([options.plot] if options.plot else [])], [base, *models])
    result = sweep(
        base,
        models,
        Grid(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Grid)}),
        command,
        config=config,
        minimize=options.minimize,
        results=results,
        directory=options.directory,
        tokenizer_from=Model.of(named["tokenizer"], beside) if "tokenizer" in named else None,
    )
    print(result)
    output = beside / named["output_file"] if "output_file" in named else None
    winner.write_text(winning_configuration(result, winner, output, options.evaluate), encoding="utf-8")
    if options.plot:
        draw(result, options.plot, MARK)
    written = [f"all scores: {results}", f"the best merge: {winner}", *([f"plot: {options.plot}"] * bool(options.plot))]
    print("\n" + "\n".join(written))


class Messages(logging.StreamHandler[IO[str]]):
    def format(self, record: logging.LogRecord) -> str:
        return "warning: " * (record.levelno >= logging.WARNING) + printable(record.getMessage())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Returns the exit status; no traceback reaches a user."""
    logger, messages = logging.getLogger("dare"), Messages()
    logger.addHandler(messages)
    try:
        run(arguments)
        return 0
    except DareError as error:
        print(f"error: {printable(str(error))}\nhint: {printable(error.hint)}", file=sys.stderr)
        return int(error.status)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what is scored is kept, and the same command continues", file=sys.stderr)
        return 130
    finally:
        logger.removeHandler(messages)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up
    sys.exit(main())
