"""Find good merge settings with your own evaluation: merge every combination, score it, and say which is best.

    uv run python examples/sweep.py --config c.toml --drop-rate 0.5 0.7 0.8 0.9 0.95 --method linear ties \\
        --lambda 0.5 1 --seeds 3 --evaluate 'python my_eval.py {model}'

or from Python, with a function in place of the command:

    result = sweep("base.safetensors", ["a.safetensors", "b.safetensors"], Grid(drop_rate=(0.5, 0.9)), my_score)
    print(result, result.best.settings)

The base, each fine-tune alone and the plain average without dropping are always scored too: what does not beat the
average is not worth its randomness. Every score is kept in a file at once, so that the same command continues a sweep
that was interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

import dare
from dare import ConfigError, DareConfig, DareError, DareMerger, Rule

# In the head of every file that is written here, so that a file without it is known to be somebody else's.
MARK: Final = "Written by examples/sweep.py"
# How sure to be, after allowing for the choice among many, before the best is said to beat the baseline.
SIGNIFICANT: Final = 0.05
# How much of an evaluation's output is looked at, from its end, in bytes; and of its complaint shown, in characters.
OUTPUT_TAIL: Final = 1 << 20
COMPLAINT: Final = 300
LOG: Final = logging.getLogger("dare.sweep")

# ---------------------------------------------------------------------------------------------------------------------
# What is compared
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """The values to combine. None: as the configuration has it."""

    drop_rate: Sequence[Any] | None = None
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
                dare.check_setting(name, value, flag)

    def axes(self) -> dict[str, Sequence[Any]]:
        """The settings that are varied, with their values."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "seeds"}
        return {name: values for name, values in given.items() if values is not None}


@dataclass(frozen=True)
class Candidate:
    """A row of the table: one combination of settings, or a model alone."""

    name: str
    kind: str  # "grid", "baseline" or "alone"
    models: tuple[dare.Source, ...]
    configs: tuple[DareConfig, ...]  # one for each seed; none: the model is scored as it is

    @property
    def settings(self) -> DareConfig:
        return self.configs[0]

    @property
    def is_random(self) -> bool:
        return len(self.configs) > 0 and drops(self.configs[0])


def drops(config: DareConfig) -> bool:
    """Whether anything is dropped anywhere; if not, the seed means nothing."""
    rates = [config.drop_rate, *(rule.drop_rate for rule in config.checked_rules)]
    return any(any(rate) if isinstance(rate, tuple) else bool(rate) for rate in rates)


def fitted(config: DareConfig, **chosen: Any) -> DareConfig:
    """The configuration with other settings, less what means nothing to the method: that would be an error."""
    method = chosen.get("method", config.method)
    rules = config.checked_rules
    if method != "ties":
        chosen["keep_ratio"] = None
        # Its own lambda is what a rule that set nothing else is left with: without it, later rules would match.
        plain = {"lambda_coeff": chosen.get("lambda_coeff", config.lambda_coeff)}
        rules = tuple(
            Rule(r.match, **({k: v for k, v in r.as_table().items() if k not in ("match", "keep_ratio")} or plain))
            for r in rules
        )
    if method != "slerp":
        chosen["slerp_t"] = None
    return dataclasses.replace(config, **{"rules": rules, "verbose": False, **chosen})


def plain_average(config: DareConfig, count: int) -> DareConfig:
    """The baseline: no dropping anywhere. What rules say of lambda stays, such as which parts to leave alone."""
    weights = config.weights if config.method == "linear" else None
    if config.method == "ties" and config.weights:  # which are relative there
        weights = tuple(weight / math.fsum(config.weights) for weight in config.weights)
    rules = tuple(Rule(rule.match, drop_rate=0.0, lambda_coeff=rule.lambda_coeff) for rule in config.checked_rules)
    plain: dict[str, Any] = {"method": "linear", "drop_rate": 0.0, "lambda_coeff": 1.0, "rescale_q": None}
    average = fitted(config, **plain, rescale=True, weights=weights, rules=rules)
    average.check_models(count)
    return average


def meaning(config: DareConfig) -> dict[str, Any]:
    """What determines a merge's tensors, so that two spellings of one merge are known to be one."""
    settings = config.resolved() | {"rules": [rule.as_table() for rule in config.checked_rules]}
    if not drops(config):
        for name in ("seed", "rescale", "rescale_q"):  # q may only be 1 there
            settings.pop(name, None)
        settings["rules"] = [
            {k: v for k, v in r.items() if k not in ("drop_rate", "rescale_q")} for r in settings["rules"]
        ]
    if settings.get("keep_ratio") == 1:
        del settings["keep_ratio"]
    return settings


def name_of(config: DareConfig) -> str:
    values = {"drop": config.drop_rate, "lambda": config.lambda_coeff, "q": config.rescale_q, "keep": config.keep_ratio}
    given = (f"{name} {shown(value)}" for name, value in values.items() if value is not None)
    return ", ".join((config.method, *given))


def shown(value: Any) -> str:
    return "/".join(f"{number:g}" for number in value) if isinstance(value, tuple) else f"{value:g}"


def combinations(grid: Grid, config: DareConfig, models: tuple[dare.Source, ...]) -> Iterator[Candidate]:
    """The baseline, and every combination that makes sense, once. Those that do not are left out, and said."""
    average = plain_average(config, len(models))
    name = "plain average (baseline, with the rules' lambdas)" if average.rules else "plain average (baseline)"
    yield Candidate(name, "baseline", models, (average,))
    axes, seen, left_out = grid.axes(), [meaning(average)], list[str]()
    made = 0
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        if chosen.get("drop_rate", config.drop_rate) == 0:
            chosen.pop("rescale_q", None)  # which means nothing where nothing is dropped
        try:
            first = fitted(config, **chosen)
            first.check_models(len(models))
            # Model i draws with seed + i, so that seeds which share no mask are as far apart as there are models.
            seeds = [first.seed + k * len(models) for k in range(grid.seeds if drops(first) else 1)]
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
        LOG.warning(f"left out {dare.counted(len(left_out), 'combination')} that cannot be merged: {reasons}")


def alone(source: dare.Source, config: DareConfig) -> Candidate:
    """A model by itself. An adapter is no model until it is merged into its base."""
    kept = {name: getattr(config, name) for name in ("dtype", "mismatch", "max_shard_size", "threads")}
    adapter = dare.find_layout(source).adapter
    configs = (DareConfig(drop_rate=0.0, verbose=False, **kept),) if adapter else ()
    return Candidate(f"{source.name} alone", "alone", (source,), configs)


# ---------------------------------------------------------------------------------------------------------------------
# Scoring by a command
# ---------------------------------------------------------------------------------------------------------------------


class EvaluationFailed(DareError):
    """This model has no score; others may have one."""


ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER: Final = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?!\.?\w)",
    re.I,
)


def score_in(output: str) -> float:
    """The "score" of the last JSON object that has one, or else the last number of all."""
    text = ESCAPES.sub("", output)
    found: dict[str, Any] = {}
    decoder, position = json.JSONDecoder(), 0
    for start in re.finditer(r"^[ \t]*(?=\{)", text, re.MULTILINE):
        if start.end() < position:  # inside the one before
            continue
        with suppress(ValueError, RecursionError):
            table, position = decoder.raw_decode(text, start.end())
            found = table if "score" in table else found
    if found:
        score = found["score"]
        if isinstance(score, bool) or not isinstance(score, int | float):  # some other number would be a guess
            raise EvaluationFailed(f'its "score" is no number but {score!r}')
        return float(score)
    numbers = NUMBER.findall(text)
    if not numbers:
        raise EvaluationFailed("it printed no number")
    return float(numbers[-1].replace(",", ""))


@dataclass(frozen=True)
class Command:
    """An evaluation that is a command: its words, one or more of them with {model} in it."""

    words: tuple[str, ...]
    timeout: float | None = None

    @classmethod
    def of(cls, text: str, timeout: float | None = None) -> Command:
        """Split as a shell would, but run without one, so that no path can be mistaken for more than a word."""
        try:
            words = shlex.split(text, posix=os.name != "nt")
        except ValueError as error:
            raise ConfigError(f"--evaluate {text!r} cannot be split into words: {error}", "check its quotes") from None
        if os.name == "nt":  # where a backslash is no escape, and quotes stay
            words = [word.strip("\"'") for word in words]
        if not any("{model}" in word for word in words):
            raise ConfigError(f"--evaluate {text!r} has no {{model}}", "write {model} where the model's path belongs")
        if shutil.which(words[0]) is None:
            raise ConfigError(
                f"there is no command {words[0]!r}", "check the first word after --evaluate, and the PATH"
            )
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"--timeout must be above 0, not {timeout:g}", "it is in seconds")
        return cls(tuple(words), timeout)

    @property
    def label(self) -> str:
        """What its scores are kept under: a script that was edited is another evaluation."""
        scripts = [Path(word) for word in self.words[1:] if word.endswith((".py", ".sh")) and os.path.isfile(word)]
        digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in scripts]
        return " ".join([shlex.join(self.words), *digests])

    def __call__(self, model: Path) -> float:
        words = [word.replace("{model}", str(model)) for word in self.words]
        words[0] = shutil.which(words[0]) or words[0]
        # Files, not pipes: a process that outlives its parent would hold a pipe open, and this would wait for it.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints, start_new_session=True
            )
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                raise EvaluationFailed(f"it took longer than {self.timeout:g} s{last_line(complaints)}") from None
            finally:
                end(process)
            if status:
                how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
                raise EvaluationFailed(f"it {how}{last_line(complaints)}")
            try:
                return score_in(tail(output))
            except EvaluationFailed as error:
                raise EvaluationFailed(f"{error}{last_line(complaints)}") from None


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, and all that it has started."""
    if process.poll() is not None:
        return
    if os.name == "nt":
        subprocess.run(["taskkill", "/T", "/F", "/PID", str(process.pid)], capture_output=True, check=False)
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def tail(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - OUTPUT_TAIL))
    return file.read().decode(errors="replace")


def last_line(complaints: IO[bytes]) -> str:
    lines = ESCAPES.sub("", tail(complaints)).strip().splitlines()
    return f": {lines[-1].strip()[-COMPLAINT:]}" if lines else ""


# ---------------------------------------------------------------------------------------------------------------------
# The results file
# ---------------------------------------------------------------------------------------------------------------------


class Results:
    """The scores so far, by key; with a file, also those of earlier sweeps. One JSON object to a line."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.scores = path, dict[str, float]()
        text = self._read()
        if not '{"key": "'.startswith(text[:9]):  # the first line, too, may have been cut short
            raise ConfigError(f"{str(path)!r} is not a results file of a sweep", "give another name after --results")
        for line in text.splitlines():
            with suppress(
                ValueError, KeyError, TypeError, OverflowError, RecursionError
            ):  # of a line that was cut short
                entry = json.loads(line)
                if math.isfinite(entry["score"]):  # what failed has none, and is tried again
                    self.scores[entry["key"]] = float(entry["score"])
        if text and not text.endswith("\n"):
            self._append("\n")

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace") if self.path else ""
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigError(f"cannot read {str(self.path)!r}: {error.strerror}", "give another --results") from None

    def add(self, key: str, score: float | None, **details: Any) -> None:
        if score is not None:
            self.scores[key] = score
        if self.path:
            self._append(json.dumps({"key": key, "score": score, **details}) + "\n")

    def _append(self, text: str) -> None:
        assert self.path is not None
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DareError(
                f"cannot write {str(self.path)!r}: {error.strerror}", "give another --results file"
            ) from None


def identity(source: dare.Source) -> list[Any]:
    """By what a model is known again: its files' names, sizes and modification times, wherever they are."""
    layout = dare.find_layout(source)
    paths = {path.name: path for path in layout.files} | (dare.side_files(layout.folder) if layout.folder else {})
    if layout.adapter and layout.folder:
        paths[dare.ADAPTER_CONFIG] = layout.folder / dare.ADAPTER_CONFIG
    found = [(name, path.stat()) for name, path in sorted(paths.items())]
    return [[name, status.st_size, status.st_mtime_ns] for name, status in found]


# ---------------------------------------------------------------------------------------------------------------------
# The sweep
# ---------------------------------------------------------------------------------------------------------------------


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

    base: dare.Source
    tokenizer_from: dare.Source | None
    evaluate: Callable[[Path], float]
    label: str
    identities: dict[dare.Source, list[Any]]

    def trials(self, candidate: Candidate) -> Iterator[Trial]:
        """The key holds all that the score depends on, and nothing else, not even where the files are."""
        for config in candidate.configs or (None,):
            used = (self.base, *candidate.models) if config else candidate.models
            facts = {
                "settings": meaning(config) if config else None,
                "inputs": [self.identities[source] for source in used],
                "tokenizer_from": self.tokenizer_from.name if self.tokenizer_from else None,
                "mask": dare.MASK_NAME,
                "evaluation": self.label,
            }
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
            yield Trial(candidate, config, digest[:32])

    def merger(self, candidate: Candidate, config: DareConfig) -> DareMerger:
        return DareMerger(self.base, candidate.models, config, tokenizer_from=self.tokenizer_from)

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
            now = None
            with suppress(OSError, DareError):  # if it is gone
                now = identity(source)
            if now != before:
                files = [entry[0] for entry in now or [] if entry not in before] or [name for name, *_ in before]
                raise DareError(
                    f"{source.name!r} has changed during the sweep: {dare.listed(files)}",
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
    """Score what has no score yet. A failure is told and written down, and the rest goes on."""
    ahead = [trial for trial in trials if trial.key not in book.scores]
    merges = sum(trial.config is not None for trial in ahead)
    kept = f"; scores are kept in {book.path}" if book.path else ""
    kept += f", where {len(trials) - len(ahead)} of {len(trials)} are already" if len(ahead) < len(trials) else ""
    LOG.info(f"{dare.counted(merges, 'merge')} to make and {dare.counted(len(ahead), 'evaluation')} to run{kept}")
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
        raise DareError(f"the evaluation fails for every model alone: {complaint}", "mend it; nothing was merged")


def spell(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def sweep(
    base: str | Path | dare.Source,
    models: Sequence[str | Path | dare.Source],
    grid: Grid,
    evaluate: Callable[[Path], float],
    *,
    config: DareConfig | None = None,
    minimize: bool = False,
    results: str | Path | None = None,
    directory: str | Path | None = None,
    tokenizer_from: str | Path | dare.Source | None = None,
    label: str = "",
) -> SweepResult:
    """Score every combination with evaluate, which takes the path of a model and gives its score, or raises.

    config: what the grid does not vary. results: a file in which scores are kept, and found again under label, which
    says what evaluate does (default: its name). directory: where the merged model lies while it is scored.
    """
    config = config or DareConfig()
    source, *others = (dare.fetched(dare.Source.of(given)) for given in (base, *models))
    if not others:
        raise ConfigError("there are no models to merge", "name at least one fine-tuned model")
    merged = tuple(others)
    label = label or str(getattr(evaluate, "label", getattr(evaluate, "__qualname__", evaluate)))
    tokenizer = None if tokenizer_from is None else dare.Source.of(tokenizer_from)
    bench = Bench(source, tokenizer, evaluate, label, {one: identity(one) for one in (source, *merged)})
    average, *grown = combinations(grid, config, merged)
    # Models alone come first: nothing need be merged to see that an evaluation does not work.
    candidates = [*(alone(one, config) for one in (source, *merged)), average, *grown]
    trials = [trial for candidate in candidates for trial in bench.trials(candidate)]
    trials.sort(key=lambda trial: -1 if trial.seed is None else trial.seed)  # one stopped early has tried everything
    book = Results(Path(results) if results else None)
    directory = directory or (Path(results).absolute().parent if results else None)
    once = OnlyOnce()
    dare.LOG.addFilter(once)
    try:
        with tempfile.TemporaryDirectory(prefix="sweep-", dir=directory, ignore_cleanup_errors=True) as folder:
            bench.merger(average, average.settings).plan(bench.output(Path(folder)))  # to fail now rather than later
            run_trials(trials, bench, book, Path(folder))
    except OSError as error:
        raise DareError(
            f"cannot use {str(directory)!r}: {error.strerror or error}", "give another --directory"
        ) from None
    finally:
        dare.LOG.removeFilter(once)
    own = {id(candidate): [t.key for t in trials if t.candidate is candidate] for candidate in candidates}
    rows = [
        Row(c, tuple(book.scores[key] for key in own[id(c)] if key in book.scores), len(own[id(c)])) for c in candidates
    ]
    return SweepResult(ranked(rows, minimize), minimize, source, tokenizer, config)


# ---------------------------------------------------------------------------------------------------------------------
# What came out
# ---------------------------------------------------------------------------------------------------------------------


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
    def complete(self) -> bool:
        return len(self.scores) == self.wanted

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def spread(self) -> float | None:
        """The standard deviation over seeds (n - 1), where there are two or more."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None


def ranked(rows: Sequence[Row], minimize: bool) -> tuple[Row, ...]:
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
    base: dare.Source
    tokenizer_from: dare.Source | None
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
            why = (
                "all its seeds score the same" if best.spread == 0 else "there is only one seed; give --seeds 3 or more"
            )
            why = why if best.candidate.is_random else "neither drops anything"
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
        if self.best.candidate.is_random and all(
            row.candidate.is_random for row in self.merges if row is not self.baseline
        ):
            remarks.append("Whether it is the dropping that helps is not shown: put 0 among the drop rates.")
        if any(not row.complete for row in self.rows):
            remarks.append("Some evaluations failed; the same command tries them again.")
        remarks.append("The evaluation's own noise is unknown and not in these figures.")
        remarks.append("The best of many looks better than it is: confirm it on data that was not used here.")
        return remarks

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
            cells = [f"{rank:>{len(str(len(self.rows)))}}  {dare.printable(row.name)}"]
            if not row.scores:
                rows.append([*cells, "failed", "-", seeds, "-"])
                continue
            gain = row.mean - self.baseline.mean if self.baseline.scores and row is not self.baseline else None
            against = "-" if gain is None else f"{gain:+.{self.decimals}f}"
            seeds = seeds if row.complete else f"{len(row.scores)} of {seeds}"
            rows.append([*cells, self.number(row.mean), self.number(row.spread), seeds, against])
        better = "lower" if self.minimize else "higher"
        notes = f"({better} is better; spread: standard deviation over seeds)"
        return "\n".join([dare.table(rows), notes, "", *map(dare.printable, self.remarks)])


def winning_configuration(result: SweepResult, path: Path, output: Path | None = None, evaluation: str = "") -> str:
    """A configuration that makes the best merge again, for a file at this path.

    With the first seed, not the luckiest: the luck of a seed on one evaluation is not worth keeping.
    """
    import tomli_w

    best, place = result.best, path.absolute().parent.resolve()
    config, models = best.candidate.settings, best.candidate.models
    to_file = result.base.path.is_file() and result.tokenizer_from is None
    target = output or path.parent / ("merged.safetensors" if to_file else "merged")
    table: dict[str, Any] = {
        "base_file": dare.path_from(result.base, place),
        "merge_files": [dare.path_from(model, place) for model in models],
        "output_file": dare.path_from(dare.Source.of(target), place),
    }
    if result.tokenizer_from:
        table["tokenizer_from"] = dare.path_from(dare.fetched(result.tokenizer_from, dare.TOKENIZER_PATTERNS), place)
    settings = config.resolved() | {name: getattr(config, name) for name in ("max_shard_size", "delta_threshold")}
    settings |= {"verbose": result.config.verbose} | ({"threads": config.threads} if config.threads else {})
    rules = [rule.as_table() for rule in config.checked_rules]
    each = f"; by seed: {' '.join(map(result.number, best.scores))}" if len(best.scores) > 1 else ""
    comments = [
        f"{MARK}: the best of {dare.counted(len(result.merges), 'merge')}. Use it with dare.py --config {path.name}",
        "",
        f"settings: {best.name}",
        f"score: {result.number(best.mean)}, spread {result.number(best.spread)}{each}",
        f"plain average: {result.number(result.baseline.mean) if result.baseline.scores else 'failed'}",
        *([f"evaluation: {evaluation}"] if evaluation else []),
        *result.remarks,
    ]
    lines = [f"# {dare.printable(comment)}".rstrip() for comment in comments]
    toml = tomli_w.dumps({"models": table, "dare": settings, **({"rules": rules} if rules else {})})
    return "\n".join(lines) + "\n\n" + toml


def check_ours(path: Path, flag: str, force: bool) -> None:
    """Refuse to replace what was not written here, before hours are spent on what would replace it."""
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the directory of {flag} {str(path)!r} does not exist", "create it first")
    if path.is_dir():
        raise ConfigError(f"{flag} {str(path)!r} is a directory", "give the name of a file")
    if path.exists() and not force:
        with path.open("rb") as file:
            if MARK.encode() not in file.read(4096):
                raise DareError(
                    f"{str(path)!r} exists and was not written by a sweep", f"add --force, or another {flag}"
                )


# ---------------------------------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which colour-blind people can tell apart, less the yellow, which print loses. Lines also
# differ in mark and dash, for print without colour. As many as can be told apart are drawn.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS: Final = ("o", "s", "^", "D", "v", "P", "X")
DASHES: Final[tuple[Any, ...]] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1)), (0, (8, 3)), "-")


def load_matplotlib() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise DareError("a plot needs matplotlib, which is not installed", "uv sync --extra plot") from None


def place_on_axis(drop_rate: Any) -> float:
    """By the logarithm of what is kept: the noise of dropping grows with 1 / (1 - p), and 0.9 is far from 0.99."""
    rate = statistics.fmean(drop_rate) if isinstance(drop_rate, tuple) else drop_rate
    return -math.log10(1 - rate)


def line_of(row: Row) -> str:
    return re.sub(r"drop [^,]*, ", "", name_of(row.candidate.settings))


def lines_of(result: SweepResult) -> dict[str, list[Row]]:
    """The rows that differ in nothing but their drop rate, best line first."""
    lines: dict[str, list[Row]] = {}
    for row in result.merges:
        if row.scores and row.candidate.kind == "grid":
            lines.setdefault(line_of(row), []).append(row)
    undropped = any(not row.candidate.is_random for rows in lines.values() for row in rows)
    average = line_of(result.baseline)
    if undropped and average in lines and result.baseline.scores:  # the baseline stands for its point in the grid
        lines[average].append(result.baseline)
    for rows in lines.values():
        rows.sort(key=lambda row: place_on_axis(row.candidate.settings.drop_rate))
    return lines


def apart(places: Sequence[float], gap: float) -> list[float]:
    """Move the places of labels, in ascending order from 0 to 1, until none is nearer to the next than a gap."""
    moved = list(places)
    for _ in range(100):
        for k in range(1, len(moved)):
            if (lack := gap - (moved[k] - moved[k - 1])) > 0:
                moved[k - 1 : k + 1] = [moved[k - 1] - lack / 2, moved[k] + lack / 2]
        moved = [min(max(place, gap * k), 1 - gap * (len(moved) - 1 - k)) for k, place in enumerate(moved)]
    return moved


def draw(result: SweepResult, path: Path) -> None:
    """Score against drop rate, a line for each combination of the other settings, with its seeds as a band."""
    figure = load_matplotlib().Figure(figsize=(9.3, 5.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    lines = lines_of(result)
    faint = 0.16 if len(lines) <= 4 else 0.08
    for (name, rows), colour, mark, dash in zip(lines.items(), COLOURS, MARKS, DASHES, strict=False):
        x = [place_on_axis(row.candidate.settings.drop_rate) for row in rows]
        low, high = [min(row.scores) for row in rows], [max(row.scores) for row in rows]
        axes.fill_between(x, low, high, facecolor=(colour, faint), edgecolor=(colour, 3 * faint), linewidth=0.6)
        means = [row.mean for row in rows]
        axes.plot(
            x,
            means,
            color=colour,
            marker=mark,
            linestyle=dash,
            linewidth=2,
            markersize=7,
            markeredgecolor="white",
            label=name,
        )
    mark_drop_rates(axes, [row for rows in lines.values() for row in rows])
    mark_references(axes, result)
    axes.set_xlabel("drop rate (spaced by the logarithm of the share that is kept)", fontsize=12)
    axes.set_ylabel(f"score ({'lower' if result.minimize else 'higher'} is better)", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    seeds = max((row.wanted for rows in lines.values() for row in rows), default=1)
    title = f"Mean of {dare.counted(seeds, 'seed')}" + "; bands: lowest to highest" * (seeds > 1)
    if len(lines) > len(COLOURS):
        title += f"; the best {len(COLOURS)} of {len(lines)} lines"
    axes.set_title(title, fontsize=12, loc="left", color="#333333")
    if lines:
        columns = int(
            9.3 / (0.9 + 0.08 * max(map(len, lines)))
        )  # in inches: the picture, the sample of a line, a letter
        columns = min(max(columns, 1), len(lines))
        figure.legend(loc="outside lower center", ncols=columns, fontsize=11, frameon=False, handlelength=3)
    try:
        figure.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": MARK})
    except OSError as error:
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "give another file after --plot") from None


def mark_drop_rates(axes: Any, rows: Sequence[Row]) -> None:
    """A tick for every rate that was tried, and its figure where there is room."""
    rates = {place_on_axis(row.candidate.settings.drop_rate): row.candidate.settings.drop_rate for row in rows}
    places = sorted(rates)
    room = (places[-1] - places[0]) / 16 if places else 0
    labels, last = [], -math.inf
    for place in places:
        labels.append(shown(rates[place]) if place - last >= room else "")
        last = place if labels[-1] else last
    axes.set_xticks(places, labels)


def mark_references(axes: Any, result: SweepResult) -> None:
    """Lines for the baseline and for each model alone, named at their right ends.

    What is so far away that it would flatten everything else is only named, at the edge that it lies beyond.
    """
    rows = sorted((row for row in result.rows if row.candidate.kind != "grid" and row.scores), key=lambda row: row.mean)
    low, high = axes.get_ylim()
    for row in rows:
        average, far = row is result.baseline, not 2 * low - high < row.mean < 2 * high - low
        if average or not far:
            style = ("#333333", "-", 1.6) if average else ("#888888", (0, (2, 2)), 1)
            axes.axhline(row.mean, color=style[0], linestyle=style[1], linewidth=style[2], zorder=1)
    low, high = axes.get_ylim()
    shares = [min(max((row.mean - low) / (high - low), 0), 1) for row in rows]
    for row, share, place in zip(rows, shares, apart(shares, 0.047), strict=True):
        name = "plain average" if row is result.baseline else f"{Path(row.candidate.models[0].name).stem} alone"
        beyond = {0: " \u2193", 1: " \u2191"}.get(share, "")
        label = f"{name} {result.number(row.mean)}{beyond}"
        axes.text(1.01, place, label, transform=axes.transAxes, va="center", fontsize=10.5, color="#222222")


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def build_parser() -> dare.Parser:
    parser = dare.Parser(
        prog="sweep.py",
        description="Merge every combination of the given settings, score each with your own evaluation, and say which "
        "is best. What is not varied stays as the configuration has it. The base, each fine-tune alone and the plain "
        "average without dropping are scored too.",
        epilog="The evaluation is split into words as a shell would, but run without a shell, where you are; so quote "
        "it as a whole, and {model} needs no quotes of its own: --evaluate 'python my_eval.py --task \"a b\" {model}'. "
        'Its score is "score" in the last JSON object that it prints, or else the last number. Exit status: 0 done, 1 '
        "failed, 2 wrong usage, 130 interrupted (143 by SIGTERM).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-c", "--config", metavar="FILE", type=Path, help="TOML configuration: models, and what is not varied")
    add("-b", "--base", metavar="MODEL", help="the base, instead of the configuration's")
    add("-m", "--merge", metavar="MODEL", nargs="+", help="the fine-tuned models, instead of the configuration's")
    add("-e", "--evaluate", metavar="COMMAND", required=True, help="prints a score; {model} is replaced by a path")
    numbers: dict[str, Any] = {"type": float, "nargs": "+"}
    add("--drop-rate", metavar="P", **numbers, help="drop rates to try")
    add("--method", metavar="NAME", nargs="+", help="methods to try: linear, ties, slerp")
    add("--lambda", metavar="X", **numbers, dest="lambda_coeff", help="scales of the merged delta to try")
    add("--rescale-q", metavar="Q", **numbers, help="DAREx-q: divisors to try, where 1 - P <= Q <= 1")
    add("--keep-ratio", metavar="R", **numbers, help="ties: shares that trim keeps, to try")
    add("--seeds", metavar="N", type=int, default=3, help="masks to draw for each combination (default 3)")
    add("--minimize", action="store_true", help="lower scores are better")
    add("--timeout", metavar="S", type=float, help="seconds after which an evaluation is ended, and has failed")
    add(
        "--results",
        metavar="FILE",
        type=Path,
        help="scores so far (default: sweep_results.jsonl beside the configuration)",
    )
    add(
        "--write-config",
        metavar="FILE",
        type=Path,
        help="the best merge (default: sweep_best.toml beside the configuration)",
    )
    add("--plot", metavar="FILE", type=Path, help="draw score against drop rate: a .png or .svg file")
    add(
        "--directory",
        metavar="DIR",
        type=Path,
        help="where one merged model at a time lies (default: beside the results)",
    )
    add("--force", action="store_true", help="replace files that a sweep did not write")
    add("-q", "--quiet", action="store_true", help="no progress, only the result")
    return parser


def run(arguments: Sequence[str] | None) -> None:
    options = build_parser().parse_args(arguments)
    given = {name: getattr(options, name) for name in ("config", "base", "merge") if getattr(options, name) is not None}
    settings = dare.layered(given)
    LOG.setLevel(logging.WARNING if options.quiet else logging.INFO)
    if settings.base is None or not settings.merge:
        raise ConfigError("there are no models to merge", "give --config FILE, or --base MODEL and --merge MODEL...")
    command = Command.of(options.evaluate, options.timeout)
    beside = options.config.parent if options.config else Path()
    results, winner = (
        options.results or beside / "sweep_results.jsonl",
        options.write_config or beside / "sweep_best.toml",
    )
    check_ours(winner, "--write-config", options.force)
    if options.plot:
        if options.plot.suffix not in (".png", ".svg"):
            raise ConfigError(f"--plot {str(options.plot)!r} is neither .png nor .svg", "name it like sweep.png")
        check_ours(options.plot, "--plot", options.force)
        load_matplotlib()
    for path in (results, winner, *([options.plot] if options.plot else [])):
        dare.check_apart(path, (settings.base, *settings.merge))
    grid = Grid(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Grid)})
    result = sweep(
        settings.base,
        settings.merge,
        grid,
        command,
        config=DareConfig(**settings.dare, rules=settings.rules),
        minimize=options.minimize,
        results=results,
        directory=options.directory,
        tokenizer_from=settings.tokenizer_from,
    )
    print(result)
    toml = winning_configuration(result, winner, settings.output, options.evaluate)
    try:
        winner.write_text(toml, encoding="utf-8")
    except OSError as error:
        raise DareError(f"cannot write {str(winner)!r}: {error.strerror}", "give another --write-config") from None
    if options.plot:
        draw(result, options.plot)
    written = [f"all scores: {results}", f"the best merge: {winner}", *([f"plot: {options.plot}"] * bool(options.plot))]
    print("\n" + "\n".join(written))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives the exit status; no traceback reaches a user."""
    kept = "interrupted; what is scored is kept, and the same command continues"
    return dare.guarded(lambda: run(arguments), kept)


if __name__ == "__main__":
    sys.exit(main())
