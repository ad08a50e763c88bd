"""The plan: what will be read, computed and written, all checked before a byte is written."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import itertools
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from darelib import __version__
from darelib.config import DareConfig, parse_size
from darelib.core.drops import DROPS, NONE
from darelib.core.formats import FORMATS, STORED_BITS
from darelib.core.gradients import count_layers
from darelib.core.methods import Look
from darelib.core.text import ConfigError, DareError, count_of, human, list_names
from darelib.core.tuning import TUNING, count_cores
from darelib.kernels import KernelSpec
from darelib.models.checkpoint import WEIGHTS_FILE, compare_configs
from darelib.models.fp8 import ScaledTensor
from darelib.models.inputs import Input, explain_read_errors
from darelib.models.tensorfile import TensorInfo, header_bytes
from darelib.output.destination import (
    Destination,
    Replaced,
    check_apart,
    check_replaceable,
    describe_replaced,
    digest_of,
    explain_place_errors,
    list_files,
)
from darelib.output.directory import collect_side_files, make_index
from darelib.output.fp8 import whole_blocks
from darelib.output.publish import PlannedFile
from darelib.output.recipe import recipe_metadata, recipe_text
from darelib.output.tokenizer import TokenizerChoice, compare_tokenizers
from darelib.plan.matching import Matcher
from darelib.plan.matching import TensorPlan as TensorPlan
from darelib.plan.seeds import find_seeds


@dataclass(frozen=True)
class Job:
    """A range of one tensor (of its bytes, where it is copied): read ranges, compute, write one range."""

    number: int
    tensor: TensorPlan
    start: int
    stop: int
    look_pass: int | None = None  # None: merge and write; else only look

    @property
    def bytes_read(self) -> int:
        return self.tensor.bytes_read * (self.stop - self.start) // self.tensor.length


@dataclass(frozen=True)
class Task:
    """What is to be read and computed, in what pieces: what a merge and an analysis have in common."""

    base: str
    models: tuple[str, ...]
    config: DareConfig
    tensors: tuple[TensorPlan, ...]
    files: tuple[PlannedFile, ...]  # that will be written
    threads: int
    seeds: tuple[int, ...]  # of each model's mask
    warnings: tuple[str, ...]

    @cached_property
    def itemsize(self) -> int:
        """Bytes of the widest element that a buffer has to hold."""
        specs = {tensor.spec for tensor in self.tensors if tensor.merged}
        return max(
            [FORMATS[name].itemsize for s in specs for name in (s.base, s.finetuned, s.output)],
            default=1,
        )

    @cached_property
    def chunk(self) -> int:
        """Elements at a time: what fits the buffers' budget, as a power of two. The output does not depend on it."""
        buffers = self.threads * (len(self.models) + 2)
        fitting = TUNING.buffer_bytes // (buffers * self.itemsize)
        most = TUNING.max_chunk * (4 if self.threads >= TUNING.many_threads else 1)
        return max(TUNING.min_chunk, min(most, 1 << max(fitting.bit_length() - 1, 0)))

    @cached_property
    def ranked(self) -> int:
        """Elements of the longest row that entries are ranked in, if any."""
        return max((tensor.base.width for tensor in self.tensors if tensor.rank_spec), default=0)

    @cached_property
    def changed(self) -> tuple[TensorPlan, ...]:
        """The tensors that some model changes."""
        return tuple(
            tensor
            for tensor in self.tensors
            if tensor.merged and tensor.base.count and tensor.finetuned
        )

    def jobs(
        self,
        tensors: Sequence[TensorPlan],
        done: Collection[tuple[str, int]] = (),
        look_pass: int | None = None,
    ) -> Iterator[Job]:
        """done: the tensors and starts of the jobs that need not be run again."""
        number = 0
        for tensor in tensors:
            # Looks add up by chunks, whose starts are the same for all tensors.
            starts = (
                self._starts(tensor)
                if look_pass is None
                else range(0, tensor.length, TUNING.job_elements)
            )
            for start in starts:
                if (tensor.name, start) not in done:
                    yield Job(
                        number, tensor, start, min(start + starts.step, tensor.length), look_pass
                    )
                    number += 1

    def _starts(self, tensor: TensorPlan) -> range:
        whole = whole_blocks(tensor.scaled) if tensor.scaled else 1
        return range(0, tensor.length, max(1, TUNING.job_elements // whole) * whole)


@dataclass(frozen=True)
class MergePlan(Task):
    """Everything that a merge will do."""

    output: Destination
    tokenizer: TokenizerChoice
    recipe: str
    side: Mapping[
        str, bytes | Path
    ]  # the other files of a model directory: their content, or what to copy
    digests: Mapping[str, str]  # of the files that are copied
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    mismatched: tuple[
        tuple[str, ...], ...
    ]  # per model: tensors that have another shape in the base
    repeats_base: tuple[bool, ...]  # per model: whether it is the base itself
    free: int = 0  # bytes on the output's disk
    unfinished: bool = False  # whether an earlier merge to the same place left something
    replaces: Replaced | None = None  # what is at that place

    @cached_property
    def size(self) -> int:
        side = sum(s.stat().st_size if isinstance(s, Path) else len(s) for s in self.side.values())
        return sum(file.size for file in self.files) + side

    @property
    def bytes_to_read(self) -> int:
        return sum((1 + self.passes(tensor)) * tensor.bytes_read for tensor in self.tensors)

    def passes(self, tensor: TensorPlan) -> int:
        """How often a tensor is looked at before it is merged."""
        return len(tensor.list_passes())

    def list_passes(self) -> dict[str, list[tuple[Look, int]]]:
        return {tensor.name: passes for tensor in self.tensors if (passes := tensor.list_passes())}

    def specs(self) -> set[KernelSpec]:
        """The kernels that merge, and those that rank what is merged."""
        merged = [tensor for tensor in self.tensors if tensor.merged and tensor.base.count]
        return {spec for tensor in merged for spec in (tensor.spec, tensor.rank_spec) if spec}

    def rounds(self, done: Collection[tuple[str, int]] = ()) -> Iterator[Iterator[Job]]:
        """Sets of jobs, each to be finished before the next: for a batch of tensors, look, look again, merge."""
        batch: list[TensorPlan] = []
        elements = 0
        for tensor in self.tensors:
            if not all((tensor.name, start) in done for start in self._starts(tensor)):
                batch.append(tensor)
                elements += tensor.base.count
            enough = TUNING.ranked_elements if self.ranked else TUNING.batch_elements
            full = elements >= enough and self.passes(tensor)
            if batch and (tensor is self.tensors[-1] or full):
                passes = {t.name: self.passes(t) for t in batch}
                for k in range(max(passes.values())):
                    yield self.jobs([t for t in batch if k < passes[t.name]], (), k)
                yield self.jobs(batch, done)
                batch, elements = [], 0

    def shards(self, numbers: Collection[int]) -> Iterator[MergePlan]:
        """Some of the files, each as a plan of its own: a tensor lies in one file, and files share nothing."""
        for number, tensors in itertools.groupby(self.tensors, lambda tensor: tensor.output.file):
            if number in numbers:
                yield self._keep([tensor.move(0) for tensor in tensors], [self.files[number]])

    def part(self, numbers: Collection[int]) -> MergePlan:
        """Some of the files, without what lies beside them."""
        own = [tensor for tensor in self.tensors if tensor.output.file in numbers]
        return self._keep(own, [self.files[number] for number in numbers])

    def _keep(self, tensors: Sequence[TensorPlan], files: Sequence[PlannedFile]) -> MergePlan:
        threads = count_threads(self.config, tensors)
        return dataclasses.replace(
            self, tensors=tuple(tensors), files=tuple(files), side={}, digests={}, threads=threads
        )

    def identity(self, inputs: Sequence[Input]) -> dict[str, Any]:
        """What must be equal for this merge to be the continuation of another."""
        recipe = tomllib.loads(self.recipe)
        files = {
            file.name: [file.size, hashlib.sha256(file.header).hexdigest()] for file in self.files
        }
        statuses: dict[str, dict[str, int]] = {}
        for source, file in ((model.source, file) for model in inputs for file in model.files):
            # What the Hub has pinned is the same in every cache; all else is where it really is, by whatever path.
            place = source.pinned or os.path.realpath(file.path.parent)
            found = statuses[os.path.join(place, file.path.name)] = {"size": file.status.st_size}
            if not source.pinned:
                found["modification time"] = file.status.st_mtime_ns
        settings = {key: recipe.get(key, {}) for key in ("dare", "rules", "models")}
        # What the models' configurations and settings, all rules considered, come to for each tensor.
        decided = hashlib.sha256()
        for t in self.tensors:
            parts: tuple[Any, ...] = (t.name, t.finetuned, t.mask_names, t.merged, t.settings)
            parts += (t.scales.block, t.scales.powers) if t.scales else ()
            decided.update(repr(parts).encode("utf-8", "replace"))
        whole = {**settings, "inputs": statuses, "recipe": recipe["recipe"], "files": files}
        whole |= {"way to merge the tensors": decided.hexdigest(), "jobs": TUNING.job_elements}
        plain: dict[str, Any] = json.loads(json.dumps(whole))
        return plain


def plan_analysis(config: DareConfig, inputs: Sequence[Input]) -> Task:
    """One look at every tensor that a merge would change."""
    matcher = match_inputs(config, inputs)
    names = [model.name for model in inputs]
    threads = count_threads(config, matcher.tensors)
    samples = [model.sample for model in inputs if model.sample]
    warnings = (
        *find_odd_inputs(config, inputs),
        *find_odd_names(inputs, matcher),
        *matcher.warnings(),
        *samples,
    )
    seeds = find_seeds(config, inputs)
    return Task(
        names[0], tuple(names[1:]), config, tuple(matcher.tensors), (), threads, seeds, warnings
    )


def plan_merge(
    config: DareConfig, inputs: Sequence[Input], destination: Destination, tokenizer: TokenizerChoice,
    version: str = __version__, with_side_files: bool = True,
) -> MergePlan:  # fmt: skip
    """What goes where. with_side_files: also what a model directory has besides its tensors."""
    matcher = match_inputs(config, inputs)
    recipe = recipe_text(config, inputs, version, tokenizer)
    limit = parse_size(config.max_shard_size) if destination.directory else sys.maxsize
    name = None if destination.directory else destination.path.name
    tensors, files = assign_offsets(matcher.tensors, limit, recipe_metadata(recipe), name)
    side, notes = dict[str, bytes | Path](), list[str]()
    if tokenizer.settings and not destination.directory:
        raise ConfigError(
            f"{next(iter(tokenizer.settings))} means nothing to an output of one file",
            "name a directory",
        )
    if with_side_files and destination.directory:
        index = (
            make_index(
                {name: info for tensor in tensors for name, info in tensor.outputs.items()}, files
            )
            if len(files) > 1
            else None
        )
        rows = matcher.embedding_rows()
        changes: dict[str, tuple[Any, Any]] = (
            {"vocab_size": inputs[0].heights} if tokenizer.unites else {}
        )
        scaled = bool(config.dtype) and any(
            isinstance(tensor.base, ScaledTensor) for tensor in tensors
        )
        if config.dtype and (
            scaled or any(tensor.output.dtype != tensor.base.dtype for tensor in tensors)
        ):
            changes["torch_dtype"] = None, config.dtype
        if scaled:
            changes |= dict.fromkeys(("quantization_config", "compression_config"), (None, None))
        side, notes = collect_side_files(
            config, inputs, version, files, changes, tokenizer, rows, index
        )
        if scaled:
            side.pop("hf_quant_config.json", None)
    models = range(len(inputs) - 1)
    return MergePlan(
        base=inputs[0].name,
        models=tuple(model.name for model in inputs[1:]),
        config=config,
        tensors=tuple(tensors),
        files=tuple(files),
        threads=count_threads(config, tensors),
        seeds=find_seeds(config, inputs),
        warnings=(
            *find_odd_inputs(config, inputs),
            *find_odd_names(inputs, matcher),
            *find_odd_settings(config, inputs, tensors),
            *find_odd_seeds(find_seeds(config, inputs), inputs),
            *matcher.warnings(),
            *(
                compare_tokenizers(tokenizer, inputs, destination.directory)
                if with_side_files
                else ()
            ),
            *notes,
        ),
        output=destination,
        tokenizer=tokenizer,
        recipe=recipe,
        side=side,
        digests={
            name: digest_of(content) for name, content in side.items() if isinstance(content, Path)
        },
        missing=tuple(map(matcher.missing, models)),
        extra=tuple(map(matcher.extra, models)),
        mismatched=tuple(map(tuple, matcher.mismatched)),
        repeats_base=tuple(have_same_files(model, inputs[0]) for model in inputs[1:]),
    )


def plan_output(
    config: DareConfig,
    inputs: Sequence[Input],
    destination: Destination,
    tokenizer: TokenizerChoice,
    force: bool,
) -> MergePlan:
    """A plan for an output that may be written, on a disk that has room for it."""
    if not config.any_base:
        check_kinds(inputs)
    with explain_read_errors():
        plan = plan_merge(config, inputs, destination, tokenizer)
    return check_place(plan, inputs, tokenizer, force)


def check_place(
    plan: MergePlan, inputs: Sequence[Input], tokenizer: TokenizerChoice, force: bool
) -> MergePlan:
    """Refuse an output that would overwrite what it must not, or for which there is no room. Notes what is there."""
    used = [(model.name, path) for model in inputs for path in model.paths]
    used += tokenizer.paths
    destination, folder = plan.output, plan.output.path.parent
    with explain_place_errors(destination.name):
        check_apart(f"the output {destination.name!r}", destination.path, used)
        check_replaceable(destination, force)
        begun = [destination.partial / name for name in list_files(destination.partial)]
        free = shutil.disk_usage(folder).free
        for path in begun:
            with suppress(FileNotFoundError):  # of another merge, which has just ended
                free += (
                    getattr(path.lstat(), "st_blocks", 0) * 512
                )  # which is used again, or removed
        replaces = describe_replaced(destination, force)
    with explain_read_errors():
        size = plan.size
    if size > free:
        raise DareError(
            f"the output needs {human(size)} and {str(folder)!r} has {human(free)} free",
            "make room, or write to another disk",
        )
    return dataclasses.replace(plan, free=free, unfinished=bool(begun), replaces=replaces)


def check_kinds(inputs: Sequence[Input]) -> None:
    """Refuse models of another architecture: tensors of the same names and shapes may mean something else there."""
    base, *models = inputs
    for model in models:
        differences = compare_configs(base.config, model.config)
        if words := [words for key, words in differences.items() if key.endswith("model_type")]:
            raise DareError(
                f"{model.name!r} is another kind of model than {base.name!r}: {words[0]}",
                "give the base that it was fine-tuned from, or add --any-base if you know that they fit",
            )


def match_inputs(config: DareConfig, inputs: Sequence[Input]) -> Matcher:
    base, *models = inputs
    for model in models:
        if not model.tensors.keys() & base.tensors.keys():
            mine, theirs = (list_names(list(m.tensors)) or "none" for m in (base, model))
            raise DareError(
                f"{model.name!r} has no tensor in common with {base.name!r}",
                f"the base has {mine}, and it {theirs}",
            )
    return Matcher(config, inputs)


def count_threads(config: DareConfig, tensors: Sequence[TensorPlan]) -> int:
    """As many as asked for, or as there are cores; more threads than jobs would only take memory."""
    jobs = sum(-(-max(t.base.count, t.length) // TUNING.job_elements) for t in tensors)
    return max(1, min(config.threads or count_cores(), jobs))


def assign_offsets(
    tensors: Sequence[TensorPlan], limit: int, metadata: dict[str, str], name: str | None
) -> tuple[list[TensorPlan], list[PlannedFile]]:
    """Give each tensor its place: in order, in a new file where the next one would exceed the limit.

    name: of the only file; None: they are named as transformers names them.
    """
    members: list[list[TensorPlan]] = [[]]
    used, placed = [0], list[TensorPlan]()
    for tensor in tensors:
        size = sum(info.nbytes for info in tensor.outputs.values())
        if used[-1] and used[-1] + size > limit:
            members.append([])
            used.append(0)
        members[-1].append(tensor)
        used[-1] += size
    shards = [place_tensors(own, number) for number, own in enumerate(members)]
    for shard, own in zip(shards, members, strict=True):
        for tensor in own:
            scales = tensor.scales and dataclasses.replace(
                tensor.scales, info=shard[tensor.scales.name]
            )
            placed.append(dataclasses.replace(tensor, output=shard[tensor.name], scales=scales))
    count = len(shards)
    names = [name or WEIGHTS_FILE]
    if count > 1:
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    headers = [header_bytes(shard, metadata) for shard in shards]
    return placed, [
        PlannedFile(n, h, len(h) + size) for n, h, size in zip(names, headers, used, strict=True)
    ]


def place_tensors(tensors: Sequence[TensorPlan], file: int) -> dict[str, TensorInfo]:
    """What a file holds, one after the other."""
    wanted = [pair for tensor in tensors for pair in tensor.outputs.items()]
    if any(tensor.scales for tensor in tensors):
        # Behind an odd number of FP8 values, loaders could not map wider ones.
        wanted.sort(key=lambda pair: -STORED_BITS[pair[1].dtype])
    placed, offset = dict[str, TensorInfo](), 0
    for name, info in wanted:
        placed[name] = dataclasses.replace(info, file=file, offset=offset)
        offset += info.nbytes
    return placed


def find_odd_settings(
    config: DareConfig, inputs: Sequence[Input], tensors: Sequence[TensorPlan]
) -> Iterator[str]:
    used = {id(tensor.rule) for tensor in tensors}
    for k, rule in enumerate(config.typed_rules, 1):
        if id(rule) not in used:
            shadowed = any(map(rule.matches, inputs[0].tensors))
            wide = next(
                (f"*{p}*" for p in rule.match if fnmatch.filter(inputs[0].tensors, f"*{p}*")), None
            )
            why = f"matches no tensor{f'; did you mean {wide!r}?' if wide else ''}"
            why = "matches only tensors that an earlier rule takes" if shadowed else why
            yield f"rule {k} ({list_names(rule.match)}) {why}"
    settings = {id(tensor.settings): tensor.settings for tensor in tensors}.values()
    thinnings = {thinning for s in settings for thinning in s.thinnings}
    weak = [t for t in thinnings if t.rescale == NONE != DROPS[t.drop].rescale and t.drop_rate > 0]
    if weak:
        most = max(weak, key=lambda thinning: thinning.drop_rate)
        rate, left = most.drop_rate, 1 / most.keep_rate
        yield f"rescale is off: with {rate:g} of a delta dropped, what is left is {left:.3g} times too weak"
    if config.has_gradients and not count_layers(inputs[0].tensors):
        yield "no tensor's name has the number of a layer in it, so each gradient has its first value everywhere"


def find_odd_seeds(seeds: Sequence[int], inputs: Sequence[Input]) -> Iterator[str]:
    for i, seed in enumerate(seeds):
        if seed in seeds[:i]:
            first, second = inputs[1 + seeds.index(seed)].name, inputs[1 + i].name
            words = f"{first} and {second} have one seed, {seed}, so that the same entries are dropped of both"
            yield f"{words}; use another --seed, or pack again with one"


def find_odd_inputs(config: DareConfig, inputs: Sequence[Input]) -> Iterator[str]:
    base, *models = inputs
    for i, model in enumerate(models):
        if have_same_files(model, base) and not config.averages:
            yield f"{model.name} is the base itself, given as a model to merge"
        if any(have_same_files(model, earlier) for earlier in models[:i]):
            yield f"{model.name} is given more than once; each time counts fully"
        if differences := compare_configs(base.config, model.config):
            words = f"configured differently from {base.name}: {', '.join(differences.values())}"
            yield f"{model.name} is {words}; check that it was fine-tuned from it"


def find_odd_names(inputs: Sequence[Input], matcher: Matcher) -> Iterator[str]:
    for i, model in enumerate(inputs[1:]):
        if missing := matcher.missing(i):
            yield f"{model.name} lacks {count_of(len(missing), 'tensor')} of the base: {list_names(missing)}; unchanged"
        if extra := matcher.extra(i):
            count = count_of(len(extra), "tensor")
            yield f"{model.name} has {count} that the base lacks: {list_names(extra)}; ignored"


def have_same_files(one: Input, other: Input) -> bool:
    pairs = zip(one.files, other.files, strict=False)
    return len(one.files) == len(other.files) and all(
        os.path.samestat(a.status, b.status) for a, b in pairs
    )
