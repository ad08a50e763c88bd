"""The report of --dry-run: the plan of a merge, with its needs of memory, disk and time."""

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self

from darelib.arithmetic.engine import is_compiled
from darelib.commands.report import Report, Section, Table
from darelib.commands.summary import AdapterFit, say_what
from darelib.config import TENSOR_SETTINGS, DareConfig, Rule
from darelib.core.drops import EXPECTATION, RANDOM
from darelib.core.interrupts import Interrupts
from darelib.core.text import clip, count_of, duration, human, printable
from darelib.core.tuning import TUNING
from darelib.methods import METHODS
from darelib.models.checkpoint import Checkpoint
from darelib.output.matched import PlannedMatch
from darelib.output.prepare import FilePlan, is_share
from darelib.plan.tensorplan import TensorPlan
from darelib.requests.configfile import as_literal
from darelib.run import estimate_matching
from darelib.run.products import estimate_products, open_worker, set_ranks
from darelib.run.rounds import measure_rate
from darelib.run.solving import estimate_matrices, estimate_solving
from darelib.run.worker import count_work

# What a merge holds besides its chunks, as measured: the process with all that it has loaded, with
# Numba or without, and what is known of each tensor of each model.
PROCESS_BYTES: Final = 56_000_000
NUMBA_BYTES: Final = 112_000_000
TENSOR_BYTES: Final = 900

# How many files a plan names before it says "and 12 more", and how many characters a line of names
# has.
MAX_FILES: Final = 6
LINE_WIDTH: Final = 100
# What a plan does not mention, because it goes without saying.
USUAL: Final = {"lambda_coeff": 1.0, "rescale": EXPECTATION, "drop": RANDOM, "keep_ratio": 1.0}


@dataclass(frozen=True)
class Estimate:
    """How long a merge's reading and computing will take, by the rate of its first jobs."""

    seconds: float
    sampled_bytes: int
    sampled_seconds: float


@dataclass(frozen=True)
class PlannedInput:
    """A model as it was found: the base or a fine-tune."""

    name: str
    size: int  # of its files
    files: int
    types: Mapping[str, int]  # how many tensors there are of each
    tensors: int
    parameters: int
    note: str  # such as what kind of adapter it is

    @classmethod
    def of(cls, model: Checkpoint) -> Self:
        stored = model.stored
        return cls(
            name=model.name,
            size=model.size,
            files=len(model.files),
            types=dict(Counter(info.dtype for info in stored).most_common()),
            tensors=len(stored),
            parameters=sum(info.count for info in stored),
            note=model.note,
        )

    @property
    def kind(self) -> str:
        types = [f"{dtype} {count:,}" for dtype, count in self.types.items()]
        words = types if len(types) > 1 else list(self.types)
        return ", ".join([*words, self.note] if self.note else words)


@dataclass(frozen=True)
class PlannedRule:
    """The tensors that a rule is for, or that none is for, and how they are merged."""

    match: tuple[str, ...]  # its patterns; none where there is no rule
    tensors: int
    parameters: int
    settings: Mapping[str, Any]  # what is set, as in TOML


@dataclass(frozen=True)
class Plan(Report):
    """Everything that a merge will do. Prints as such; to_dict gives plain data."""

    ROWS: ClassVar = "models"
    output: str
    directory: bool
    config: dict[str, Any]
    seeds: tuple[int, ...]
    weights: tuple[float, ...]
    models: tuple[PlannedInput, ...]  # the base first
    missing_tensors: tuple[tuple[str, ...], ...]  # per model: those of the base that it lacks
    extra_tensors: tuple[tuple[str, ...], ...]  # per model: those that the base lacks
    mismatched_tensors: tuple[tuple[str, ...], ...]  # per model: those of another shape
    rules: tuple[PlannedRule, ...]  # last, the tensors that no rule is for
    averaged_tensors: tuple[str, ...]  # running statistics
    copied_tensors: tuple[str, ...]
    files: tuple[dict[str, Any], ...]  # of tensors: their names and sizes
    side_files: tuple[str, ...]  # of a model directory: all the others
    replaces: int  # bytes of what is at that place
    unfinished: bool  # whether an earlier merge to the same place left something
    resume: bool  # whether it would be continued
    bytes_to_read: int
    bytes_to_write: int
    bytes_free: int
    memory: int
    threads: int
    estimate: Estimate | None
    adapter: AdapterFit | None  # of a sample, where one would be written
    matching: PlannedMatch | None  # where it would be matched with examples
    warnings: tuple[str, ...]

    def parts(self) -> list[Section]:
        return [
            f"would {say_what('merge', len(self.models) - 1)} {printable(self.output)}\n",
            *self._list_models(),
            f"\n{self._how()}\n",
            self._list_rules(),
            "",
            *(f"{label:8}{words}" for label, words in self._needs()),
        ]

    def _list_models(self) -> Iterator[Section]:
        rows = [["model", "size", "tensors", "parameters", "type"]]
        for model in self.models:
            cells = [human(model.size), f"{model.tensors:,}", f"{model.parameters:,}"]
            rows.append([clip(model.name), *cells, model.kind])
        rows[1][-1] += ", the base"
        odd = {
            "lacks": self.missing_tensors,
            "has more than the base:": self.extra_tensors,
            f"has in other shapes ({self.config.get('mismatch')}):": self.mismatched_tensors,
        }
        yield Table(rows, {0, 4})
        for i, model in enumerate(self.models[1:]):
            for words, names in odd.items():
                if names[i]:
                    yield f"{clip(model.name)} {words} {count_of(len(names[i]), 'tensor')}"

    def _how(self) -> str:
        """What is the same for all tensors."""
        words = [f"method {self.config['method']}"]
        if self.seeds:
            words.append(f"seeds {', '.join(map(str, self.seeds))}")
        if "weights" in METHODS[self.config["method"]].settings:
            varies = any(isinstance(each, dict) for each in self.config.get("weights", ()))
            weights = ", ".join(f"{weight:.4g}" for weight in self.weights)
            words.append(f"weights {weights}{' in the first layer' if varies else ''}")
        if "dtype" in self.config:
            words.append(f"dtype {self.config['dtype']}")
        return "; ".join(words)

    def _list_rules(self) -> Table:
        rows = [["tensors", "number", "parameters", "settings"]]
        for rule in self.rules:
            label = "all others" if len(self.rules) > 1 else "all"
            if rule.match:
                more = f" and {len(rule.match) - 1} more" if len(rule.match) > 1 else ""
                label = clip(rule.match[0]) + more
            words = [f"{name} = {as_literal(value)}" for name, value in rule.settings.items()]
            rows.append([label, f"{rule.tensors:,}", f"{rule.parameters:,}", "; ".join(words)])
        if self.averaged_tensors:
            rows.append(["statistics", f"{len(self.averaged_tensors):,}", "", "averaged"])
        if self.copied_tensors:
            rows.append(["not merged", f"{len(self.copied_tensors):,}", "", "as in the base"])
        return Table(rows, {0, 3})

    def _needs(self) -> Iterator[tuple[str, str]]:
        """What will be written, and what that takes."""
        for k, file in enumerate(self.files[:MAX_FILES]):
            yield "" if k else "write", f"{printable(file['name'])}, {human(file['size'])}"
        if len(self.files) > MAX_FILES:
            yield "", f"... and {len(self.files) - MAX_FILES:,} more"
        names = ", ".join(map(printable, self.side_files))
        yield from (("", line) for line in textwrap.wrap(names, LINE_WIDTH, break_on_hyphens=False))
        if self.adapter:
            most = (
                "; its size is for the largest ranks"
                if is_share(self.config["adapter_rank"])
                else ""
            )
            yield "adapter", f"{self.adapter} (a sample{most})"
        if self.matching:
            yield "match", str(self.matching)
        if self.replaces:
            yield "replace", human(self.replaces)
        if self.unfinished and self.resume:
            yield "resume", "an unfinished merge, if it is the same one"
        elif self.unfinished:
            yield "remove", "an unfinished merge (or continue it, with --resume)"
        yield "disk", f"{human(self.bytes_to_write)} needed, {human(self.bytes_free)} free"
        yield "memory", f"about {human(round(self.memory, -6))}"
        threads = count_of(self.threads, "thread")
        work = f"to read {human(self.bytes_to_read)} and compute on {threads}"
        if self.estimate:
            work = f"{duration(self.estimate.seconds)} {work}, and what the disk takes to write"
        yield "time" if self.estimate else "work", work


def describe_plan(
    plan: FilePlan, inputs: Sequence[Checkpoint], resume: bool, estimate: bool
) -> Plan:
    taken, fit = estimate_merge(plan, inputs) if estimate else (None, None)
    matching: PlannedMatch | None = estimate_matching(plan, inputs)
    memory = estimate_memory(plan, inputs)
    if matching:
        memory += matching.memory
        taken = taken and dataclasses.replace(taken, seconds=taken.seconds + matching.seconds)
    return Plan(
        output=plan.output.name,
        directory=plan.output.directory,
        config=plan.config.recipe_settings(),
        seeds=plan.seeds,
        weights=plan.config.general(len(plan.models)).weights,
        models=tuple(map(PlannedInput.of, inputs)),
        missing_tensors=plan.missing,
        extra_tensors=plan.extra,
        mismatched_tensors=plan.mismatched,
        rules=tuple(describe_rules(plan)),
        averaged_tensors=tuple(t.name for t in plan.tensors if t.merged and t.buffer),
        copied_tensors=tuple(tensor.name for tensor in plan.tensors if not tensor.merged),
        files=tuple({"name": file.name, "size": file.size} for file in plan.files),
        side_files=tuple(plan.side),
        replaces=plan.replaces,
        unfinished=plan.unfinished,
        resume=resume,
        bytes_to_read=plan.bytes_to_read,
        bytes_to_write=plan.size,
        bytes_free=plan.free,
        memory=memory,
        threads=plan.threads,
        estimate=taken,
        adapter=fit,
        matching=matching,
        warnings=plan.warnings,
    )


def estimate_merge(
    plan: FilePlan, inputs: Sequence[Checkpoint]
) -> tuple[Estimate, AdapterFit | None]:
    """How long it takes, by the first jobs and by what a product of matrices takes here; and how an
    adapter fits what they change.
    """
    entries = dataclasses.replace(plan, tensors=tuple(t for t in plan.tensors if not t.matrices))
    with Interrupts() as interrupts:
        worker = open_worker(entries, inputs, measures_ranks=True)
        size, seconds, outcomes = measure_rate(entries.rounds(), worker, interrupts)
    reading = seconds * entries.bytes_to_read / max(size, 1)
    plan = set_ranks(plan, outcomes)
    estimate = Estimate(reading + estimate_solving(plan), size, seconds)
    return estimate, AdapterFit.of(plan, outcomes)


def estimate_memory(plan: FilePlan, inputs: Sequence[Checkpoint]) -> int:
    """About what the process will hold: itself, what is known of the tensors, and chunks."""
    counters = max((4 * look.counters for t in plan.tensors for look in t.looks), default=0)
    own = (2 * len(plan.models) + 3) * plan.chunk * plan.itemsize + counters * len(plan.models)
    own += 2 * plan.ranked * plan.itemsize
    held = [model.held_bytes for model in inputs]
    kept = min(plan.threads * sum(held), TUNING.expand_elements * 4)
    waiting = [tensor.form.count_held(plan.chunk) for tensor in plan.tensors]
    threads = kept + plan.threads * (own + max(held) + max(waiting, default=0))
    known = TENSOR_BYTES * len(plan.tensors) * len(inputs)
    process = PROCESS_BYTES + is_compiled(plan.config.engine, count_work(plan)) * NUMBA_BYTES
    return process + known + threads + estimate_matrices(plan) + estimate_products(plan)


def describe_rules(plan: FilePlan) -> Iterator[PlannedRule]:
    """How many tensors each rule is for; last, those that no rule is for."""
    tensors: dict[int, list[TensorPlan]] = {}
    for tensor in plan.tensors:
        if tensor.merged and not tensor.buffer:
            tensors.setdefault(id(tensor.rule), []).append(tensor)
    for rule in (*plan.config.typed_rules, None):
        own = tensors.get(id(rule), [])
        if rule or own:
            yield PlannedRule(
                match=rule.match if rule else (),
                tensors=len(own),
                parameters=sum(tensor.base.count for tensor in own),
                settings=list_settings(plan.config, rule),
            )


def list_settings(config: DareConfig, rule: Rule | None) -> dict[str, Any]:
    """What a rule sets; or, for the tensors without one, what is set besides the first line's."""
    if rule:
        return {name: value for name, value in rule.as_table().items() if name != "match"}
    own = [name for name in TENSOR_SETTINGS if name not in ("method", "weights")]
    table = config.recipe_settings()
    return {name: table[name] for name in own if table.get(name) not in (None, USUAL.get(name))}
