"""A merge into files: what will lie where, beside what; all that can be refused before a byte is
written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import numpy as np

from darelib import __version__
from darelib.arithmetic.stored import decode
from darelib.config import DareConfig, parse_size
from darelib.core.formats import FORMATS, STORED_BITS
from darelib.core.text import ConfigError, DareError, human, list_names
from darelib.core.tuning import TUNING
from darelib.methods import METHODS
from darelib.models.checkpoint import CLASS_KEY, Checkpoint
from darelib.models.directories import CONFIG_FILE, DIFFUSERS_STEM, part_name
from darelib.models.forms import PLAIN, Entry
from darelib.models.inputs import explain_read_errors
from darelib.models.peft import PREFIX
from darelib.models.source import RECIPE_FILE
from darelib.models.tensor import Tensor
from darelib.models.tensorfile import read_json
from darelib.output.destination import (
    Destination,
    check_apart,
    check_replaceable,
    explain_place_errors,
    is_weights,
    list_files,
)
from darelib.output.directory import (
    CARD_FILE,
    DIFFUSERS_CARD,
    MODEL_CARD,
    TYPE_KEYS,
    add_recipe,
    check_tables,
    find_linked,
    find_side_files,
    list_tables,
    make_indexes,
    model_card,
    recipe_metadata,
    recipe_text,
    update_config,
)
from darelib.output.tokenizer import (
    SideFiles,
    TokenizerChoice,
    compare_generation,
    compare_tokenizers,
    place_generation,
    place_tokenizer,
)
from darelib.plan.checks import check_sample
from darelib.plan.plan import MergePlan, count_threads, plan_merge
from darelib.plan.tensorplan import TensorPlan, assign_offsets

if TYPE_CHECKING:
    from darelib.output.judged import LambdaChoice
    from darelib.output.matched import MatchReport

Array = Any
# Of stored and made values, as bytes, and their type: how many differ, and the first that differs
# by too much.
Comparison: TypeAlias = Callable[[memoryview, memoryview, str], tuple[int, int | None]]
# Of the mean |value|, by bits: below that, values may differ that were solved on another machine.
TOLERANCES: Final = {8: 0.0, 16: 2.0**-16, 32: 2.0**-22, 64: 2.0**-22}


def compare_values(stored: Array, made: Array, dtype: str) -> tuple[int, int | None]:
    """How many stored values differ, and the first that differs by more than one unit in the last
    place, and more than next to nothing of the mean.
    """
    bits = STORED_BITS[dtype]
    raw = np.dtype(f"u{bits // 8}")
    first, second = (np.frombuffer(each, raw) for each in (stored, made))
    places = [order_patterns(each, bits) for each in (first, second)]
    is_far = np.abs(places[0] - places[1]) > 1
    if dtype in FORMATS:
        values = [decode(each, dtype).astype(np.float64) for each in (first, second)]
        is_far &= np.abs(values[0] - values[1]) > TOLERANCES[bits] * np.abs(values[1]).mean()
    beyond = np.flatnonzero(is_far)
    return int(np.count_nonzero(first != second)), int(beyond[0]) if len(beyond) else None


def order_patterns(raw: Array, bits: int) -> Array:
    """Bit patterns of floats as numbers in the order of the values: neighbours differ by 1."""
    sign = raw >> raw.dtype.type(bits - 1)
    size = (raw & raw.dtype.type((1 << (bits - 1)) - 1)).astype(np.int64)
    return np.where(sign, -size, size)


# By norm: two factors of one change, each made by products of matrices. Directions that are equally
# strong may come out in any order, and differ.
LARGEST_DISTANCE: Final = 0.01


def compare_factors(stored: memoryview, made: memoryview, dtype: str) -> tuple[int, int | None]:
    """The same of factors: they differ as a whole."""
    first, second = (
        decode(np.frombuffer(each, np.uint8), dtype).astype(np.float64) for each in (stored, made)
    )
    distance = np.abs(first - second)
    is_far = np.linalg.norm(distance) > LARGEST_DISTANCE * np.linalg.norm(second)
    return int(np.count_nonzero(distance)), int(distance.argmax()) if is_far else None


class Module(NamedTuple):
    """A matrix of the base that an adapter changes by a product of two thin ones."""

    name: str  # as the adapter calls it
    rank: int
    is_transposed: bool  # whether it is stored as inputs x outputs

    def list_outputs(self, shape: tuple[int, ...], dtype: str) -> dict[str, Entry]:
        """The two factors, as PEFT has them: of a convolution, with its kernel in the first."""
        outputs, *inputs = reversed(shape) if self.is_transposed else shape
        points = (1,) * (len(shape) - 2)
        return {
            f"{PREFIX}{self.name}.lora_A.weight": Entry(dtype, (self.rank, *inputs)),
            f"{PREFIX}{self.name}.lora_B.weight": Entry(dtype, (outputs, self.rank, *points)),
        }


@dataclass(frozen=True)
class FilePlan(MergePlan):
    output: Destination = dataclasses.field(kw_only=True)
    tokenizer: TokenizerChoice = dataclasses.field(kw_only=True)
    recipe: str = dataclasses.field(kw_only=True)  # in each file of tensors
    # The other files of a model directory: their content, or what to copy.
    side: Mapping[str, bytes | Path] = dataclasses.field(default_factory=dict)
    free: int = 0  # bytes on the output's disk
    unfinished: bool = False  # whether an earlier merge to the same place left something
    replaces: int = 0  # bytes of what is at that place
    # Of an adapter: the matrices that become factors, by tensor. Its other tensors are held whole.
    modules: Mapping[str, Module] = dataclasses.field(default_factory=dict)
    matching: MatchReport | None = None  # where it was matched with examples
    choice: LambdaChoice | None = None  # where examples have chosen lambda

    @property
    def own_recipe(self) -> str:
        """That of the output itself, which of a directory also names the files."""
        written = self.side.get(RECIPE_FILE)
        return written.decode() if isinstance(written, bytes) else self.recipe

    @cached_property
    def size(self) -> int:
        sizes = [s.stat().st_size if isinstance(s, Path) else len(s) for s in self.side.values()]
        return sum(sizes) + sum(file.size for file in self.files)

    def find_comparison(self, tensor: TensorPlan) -> Comparison | None:
        """How values of a tensor are compared that are not the same everywhere; None: they are."""
        if tensor.name in self.modules:
            return compare_factors
        is_solved = tensor.merged and tensor.finetuned
        is_exact = METHODS[tensor.settings.method].exact
        return compare_values if is_solved and not is_exact else None

    @property
    def is_measured(self) -> bool:
        """Whether the ranks of an adapter depend on the changes."""
        return bool(self.modules) and is_share(self.config.adapter_rank)

    def list_starts(self, tensor: TensorPlan) -> range:
        """A tensor of an adapter is one job, which makes all that is written for it."""
        whole = range(0, tensor.length, max(1, tensor.length))
        return whole if self.modules else super().list_starts(tensor)

    def part(self, chosen: Sequence[int]) -> Self:
        """Some of the files, without what lies beside them: a tensor lies in one file, and files
        share nothing.
        """
        own = [tensor for tensor in self.tensors if tensor.output.file in chosen]
        return dataclasses.replace(
            self,
            tensors=tuple(tensor.move(chosen.index(tensor.output.file)) for tensor in own),
            files=tuple(self.files[file] for file in chosen),
            side={},
            threads=count_threads(self.config, own),
        )

    def identity(self, inputs: Sequence[Checkpoint]) -> dict[str, Any]:
        """What must be equal for this merge to be the continuation of another."""
        recipe = tomllib.loads(self.recipe)
        # What the models' configurations and settings, all rules considered, come to for each
        # tensor.
        decided = hashlib.sha256()
        for t in self.tensors:
            parts = (t.name, t.base, t.finetuned, t.mask_names, t.merged, t.settings)
            decided.update(repr(parts).encode("utf-8", "replace"))
        whole = {
            **{key: recipe.get(key, {}) for key in ("dare", "rules", "models")},
            "inputs": describe_files(inputs),
            "recipe": recipe["recipe"],
            "files": {f.name: [f.size, hashlib.sha256(f.header).hexdigest()] for f in self.files},
            "way to merge the tensors": decided.hexdigest(),
            "delta_threshold": self.config.delta_threshold,  # by which what is noted was counted
            "jobs": TUNING.job_elements,
        }
        return dict(json.loads(json.dumps(whole)))


def is_share(rank: float | str | None) -> bool:
    """Whether a rank stands for a share of the energy."""
    return isinstance(rank, float) and rank < 1


def describe_files(inputs: Sequence[Checkpoint]) -> dict[str, dict[str, int]]:
    """Size and time of each file of the inputs, by where it is."""
    statuses: dict[str, dict[str, int]] = {}
    parts = [part for model in inputs for part in model.parts]
    for model in parts:
        pinned = model.source.pinned
        for file in model.files:
            # What the Hub has pinned is the same in every cache; all else is where it really is.
            folder = pinned or os.path.realpath(file.path.parent)
            time = {} if pinned else {"modification time": file.status.st_mtime_ns}
            path = os.path.join(folder, file.path.name)
            statuses[path] = {"size": file.status.st_size, **time}
    return statuses


def plan_files(
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    destination: Destination,
    tokenizer: TokenizerChoice,
    with_side_files: bool = True,
) -> FilePlan:
    """What goes where. with_side_files: also what a model directory has besides its tensors."""
    if tokenizer.settings and not destination.directory:
        [setting, *_] = tokenizer.settings
        raise ConfigError(f"{setting} means nothing to an output of one file", "name a directory")
    plan = plan_merge(config, inputs)
    own = tuple(tensor for tensor in plan.tensors if not tensor.base.folder)
    if not destination.directory and own:  # which has no place for other modules
        plan = dataclasses.replace(plan, tensors=own)
    elif not destination.directory and inputs[0].components and with_side_files:
        raise ConfigError(
            f"{inputs[0].name!r} is a pipeline of several models, and the output is one file",
            "name a directory; `convert` makes one file of that",
        )
    recipe = recipe_text(plan.config, inputs, __version__, tokenizer)
    limit = parse_size(config.max_shard_size) if destination.directory else sys.maxsize
    name = None if destination.directory else destination.path.name
    metadata = recipe_metadata(recipe)
    tensors, files = assign_offsets(plan.tensors, limit, metadata, name, inputs[0].stems)
    placed = FilePlan(
        base=plan.base,
        models=plan.models,
        config=plan.config,
        tensors=tuple(tensors),
        threads=plan.threads,
        seeds=plan.seeds,
        warnings=plan.warnings,
        missing=plan.missing,
        extra=plan.extra,
        mismatched=plan.mismatched,
        repeats_base=plan.repeats_base,
        embedding_rows=plan.embedding_rows,
        files=tuple(files),
        output=destination,
        tokenizer=tokenizer,
        recipe=recipe,
    )
    if not with_side_files:
        return placed
    warnings = [*plan.warnings, *compare_tokenizers(tokenizer, inputs, destination.directory)]
    side: SideFiles = {}
    if destination.directory:
        side, notes = make_side_files(placed, inputs)
        warnings += notes
    return dataclasses.replace(placed, side=side, warnings=tuple(warnings))


def make_side_files(plan: FilePlan, inputs: Sequence[Checkpoint]) -> tuple[SideFiles, list[str]]:
    """What a model directory has besides its tensors, and what to say about it."""
    base = inputs[0]
    # Encodings that are not kept, with what goes with them.
    lost = [t.base for t in plan.tensors if t.base.kind and t.form is PLAIN]
    left_out = {name for tensor in lost for name in tensor.files}
    found = find_side_files(base.folder)
    side: SideFiles = {name: path for name, path in found.items() if name not in left_out}
    beside = (base.folder or base.files[0].path.parent) / CONFIG_FILE
    if beside.is_file():
        side[CONFIG_FILE] = beside
    voice, notes = place_tokenizer(side, plan.tokenizer, inputs, plan.embedding_rows)
    changes = place_generation(side, voice)
    notes += compare_generation(side, voice, changes)
    for own in (CONFIG_FILE, *(f"{folder}/{CONFIG_FILE}" for folder in base.components)):
        config = side.get(own)
        if isinstance(config, Path):
            name = part_name(base.source, config)
            table = read_json(config, name)  # it must be sound, copied or not
            spoken = changes if own == CONFIG_FILE else {}
            if new := spoken | list_changes(plan, base, lost, table):
                side[own] = update_config(table, new, name)
    if CONFIG_FILE not in side and not base.components:
        notes.append(
            f"{base.name} has no {CONFIG_FILE} beside it, so the output has none: "
            "loaders will want one"
        )
    if copied := list(filter(is_weights, side)):
        notes.append(f"{list_names(copied)} of {base.name} is copied, and not merged")
    if linked := find_linked(base.folder):
        notes.append(
            f"{list_names(linked)} of {base.name} leads to a folder, and is left out: "
            "links to folders are not followed"
        )
    outputs = {name: info for t in plan.tensors for name, info in t.outputs.items()}
    side |= make_indexes(outputs, plan.files)
    check_tables(side)
    is_diffusers = base.components or DIFFUSERS_STEM in base.stems.values()
    kind = DIFFUSERS_CARD if is_diffusers else MODEL_CARD
    side[CARD_FILE] = model_card(plan.config, inputs, plan.recipe, kind).encode()
    add_recipe(side, plan.config, inputs, __version__, plan.tokenizer, plan.files)
    return dict(sorted(side.items())), notes


def record_matched(
    plan: FilePlan, inputs: Sequence[Checkpoint], digests: Mapping[str, str]
) -> FilePlan:
    """The plan with the digests of its matched tensors in its recipe, wherever that stands."""
    recipe = recipe_text(plan.config, inputs, __version__, plan.tokenizer, matched=digests)
    metadata = recipe_metadata(recipe)
    files = tuple(file.replace_metadata(metadata) for file in plan.files)
    side = dict(plan.side)
    if side.pop(RECIPE_FILE, None):
        card = side[CARD_FILE]
        assert isinstance(card, bytes)
        side[CARD_FILE] = card.replace(plan.recipe.rstrip().encode(), recipe.rstrip().encode())
        add_recipe(side, plan.config, inputs, __version__, plan.tokenizer, files, matched=digests)
    side = dict(sorted(side.items()))
    return dataclasses.replace(plan, recipe=recipe, files=files, side=side)


def list_changes(
    plan: FilePlan, base: Checkpoint, lost: Sequence[Tensor], config: dict[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Old and new values of settings in config.json. lost: tensors whose encoding is not kept."""
    changes: dict[str, tuple[Any, Any]] = {
        key: (None, None) for tensor in lost for key in tensor.config_keys
    }
    changes |= base.list_changes(list_tables(config))
    if base.heights[1]:
        changes["vocab_size"] = base.heights
    stated = [each[key] for each in list_tables(config) for key in TYPE_KEYS if key in each]
    if CLASS_KEY not in config:  # where diffusers has no such setting
        stated = stated or [None]
    if plan.config.dtype and any(dtype != plan.config.dtype for dtype in stated):
        changes["torch_dtype"] = None, plan.config.dtype
    return changes


def plan_output(
    planner: Callable[..., FilePlan],
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    destination: Destination,
    tokenizer: TokenizerChoice,
    force: bool,
) -> FilePlan:
    """A plan for an output that may be written, on a disk that has room for it.

    planner: of the kind of output, as plan_files is.
    """
    with explain_read_errors():
        plan = planner(config, inputs, destination, tokenizer)
        check_sample(plan.config, plan.changed, inputs)
    return check_place(plan, inputs, force)


def check_place(plan: FilePlan, inputs: Sequence[Checkpoint], force: bool) -> FilePlan:
    """Refuse an output that would overwrite what it must not, or for which there is no room.

    Notes what is there.
    """
    destination = plan.output
    # Those that do not exist are made with the output.
    folder = next(filter(Path.exists, destination.path.parents), destination.path)
    used = [(model.name, path) for model in inputs for path in model.paths]
    with explain_place_errors(destination.name):
        check_apart(
            f"the output {destination.name!r}", destination.path, [*used, *plan.tokenizer.paths]
        )
        check_replaceable(destination, force, plan.own_recipe)
        begun = [destination.partial / name for name in list_files(destination.partial)]
        free = shutil.disk_usage(folder).free
        for path in begun:
            with suppress(FileNotFoundError):  # of another merge, which has just ended
                # Its blocks are used again, or removed.
                free += getattr(path.lstat(), "st_blocks", 0) * 512
        replaced = (destination.path, *destination.path.rglob("*"))
        replaces = sum(path.stat().st_size for path in replaced if path.is_file())
    with explain_read_errors():
        size = plan.size
    if size > free:
        raise DareError(
            f"the output needs {human(size)} and {str(folder)!r} has {human(free)} free",
            "make room, or write to another disk",
        )
    return dataclasses.replace(plan, free=free, unfinished=bool(begun), replaces=replaces)
