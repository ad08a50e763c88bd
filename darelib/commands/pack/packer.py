"""The command pack: it stores the entries of a fine-tune that a mask keeps."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from darelib import __version__
from darelib.arithmetic.chunks import take_kept
from darelib.arithmetic.definition import draw_bits
from darelib.arithmetic.stored import decode
from darelib.commands.report import Report
from darelib.config import DareConfig
from darelib.core.formats import FORMATS
from darelib.core.interrupts import Interrupts
from darelib.core.mask import MASK_NAME, TILE, mask_key
from darelib.core.text import DareError, count_of, human, printable
from darelib.core.tuning import TUNING
from darelib.models.checkpoint import Checkpoint, ties_embeddings
from darelib.models.forms import Entry
from darelib.models.inputs import explain_read_errors, open_models
from darelib.models.packed import (
    COUNTED_BLOCK,
    DIGESTS_KEY,
    PACKED_FILE,
    PACKED_KEY,
    VERSION,
    add_values,
)
from darelib.models.source import Source, recorded_name
from darelib.output.destination import (
    check_replaceable,
    explain_place_errors,
    find_output,
)
from darelib.output.directory import (
    CARD_FILE,
    add_recipe,
    as_code,
    as_yaml,
    card_name,
    check_tables,
    find_side_files,
    recipe_metadata,
    recipe_text,
)
from darelib.output.prepare import FilePlan, check_place, plan_files
from darelib.output.publish import Output
from darelib.output.tokenizer import SideFiles, TokenizerChoice
from darelib.plan.checks import check_sample
from darelib.plan.plan import COPY, LOOK, MERGE, Job
from darelib.plan.tensorplan import PlannedFile, TensorPlan, assign_offsets, find_kept
from darelib.run.reading import BROKEN_HINT
from darelib.run.rounds import run_rounds
from darelib.run.threads import Made, Order, publish, run_merge
from darelib.run.worker import Outcome, Worker, Write

# The bits that are all set in infinities and NaNs.
EXPONENTS: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}


@dataclasses.dataclass(frozen=True)
class PackReport(Report):
    output: str
    tensors: int
    bytes_before: int
    bytes_written: int
    seconds: float
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"packed {count_of(self.tensors, 'tensor')} into {printable(self.output)}: "
            f"{human(self.bytes_written)}, {self.bytes_written / max(self.bytes_before, 1):.1%} "
            f"of {human(self.bytes_before)}, in {self.seconds:.2f} s"
        )


def pack(
    base: Source,
    model: Source,
    config: DareConfig,
    output_file: str | Path,
    *,
    force: bool = False,
    resume: bool = False,
) -> PackReport:
    """Write the entries of a fine-tune that drop rates, seed and rules keep, as a file or as a
    directory.
    """
    started = time.perf_counter()
    destination = find_output(output_file)
    with open_models([base, model]) as inputs, Interrupts() as interrupts:
        check_packable(inputs)
        with explain_read_errors():
            files: dict[str, str] | None = {} if destination.directory else None
            choice = TokenizerChoice()
            recipe = recipe_text(config, inputs, __version__, choice, files, packed=True)
        with explain_place_errors(destination.name):  # before there is any work
            check_replaceable(destination, force, recipe)
        with explain_read_errors():
            plan = plan_files(config, inputs, destination, choice, with_side_files=False)
            check_sample(plan.config, plan.changed, inputs)
            plan = dataclasses.replace(keep_own_tensors(plan, *inputs), recipe=recipe)
        packer = Packer(plan, inputs)
        packer.count_entries(interrupts)
        with explain_read_errors():
            plan = place_entries(plan, inputs, packer)
        plan = check_place(plan, inputs, force)
        packer.worker.plan = plan
        order = Order(plan, inputs, interrupts, force, resume)

        def make(output: Output) -> Made:
            return plan, run_merge(plan, packer.worker, output, interrupts)

        publish(order, make)
        return PackReport(
            output=str(output_file),
            tensors=len(plan.tensors),
            bytes_before=inputs[1].size,
            bytes_written=plan.size,
            seconds=time.perf_counter() - started,
            warnings=plan.warnings,
        )


def check_packable(inputs: Sequence[Checkpoint]) -> None:
    model = inputs[1]
    if model.partial or model.seed is not None:
        kind = "a LoRA adapter, which is small already" if model.partial else "packed already"
        raise DareError(f"{model.name!r} is {kind}", "merge it as it is")
    for each in inputs:
        if kind := max((info.kind for info in each.tensors.values()), default=""):
            raise DareError(
                f"{each.name!r} is in {kind}, which cannot be packed", "merge it as it is"
            )


class Packer:
    """What jobs do: first count what the mask keeps of a range, then write that. Tensors that are
    not thinned are copied.
    """

    def __init__(self, plan: FilePlan, inputs: Sequence[Checkpoint]) -> None:
        self._model = inputs[1]
        self._thinned = [tensor for tensor in plan.tensors if tensor.merged]
        self.worker = Worker(plan, inputs, {})
        self.worker.tasks = {LOOK: self.count, MERGE: self.write, COPY: self.copy}
        self._kept: dict[tuple[str, int], int] = {}  # entries of each chunk, by tensor and start
        # The entries of a tensor that are kept before each chunk, and before its end.
        self.before: dict[tuple[str, int], int] = {}
        self.digests: dict[tuple[str, int], int] = {}  # of the base's blocks, by tensor and start

    def count_entries(self, interrupts: Interrupts) -> None:
        """Find out how many entries are kept, and against which values of the base."""
        plan = self.worker.plan
        rounds = [plan.jobs(self._thinned, kind=LOOK)]
        run_rounds(rounds, self.worker, lambda *_: None, lambda *_: None, interrupts)
        step = min(plan.chunk, TUNING.job_elements)
        for tensor in self._thinned:
            before = 0
            for start in range(0, tensor.length, step):
                self.before[tensor.name, start] = before
                before += self._kept[tensor.name, start]
            self.before[tensor.name, tensor.length] = before

    def count(self, job: Job, write: Write) -> None:
        for start, width in self.worker.chunks(job):
            bits = draw_bits(self._find_key(job.tensor), start // TILE, -(-width // TILE))[:width]
            kept = bits < job.tensor.settings.thinnings[0].threshold
            self._kept[job.tensor.name, start] = int(np.count_nonzero(kept))
        self._digest_blocks(job)

    def write(self, job: Job, write: Write) -> Outcome:
        tensor = job.tensor
        [(_, theirs)] = tensor.finetuned
        first = self.worker.place_of(tensor.output)
        item = FORMATS[theirs.dtype].itemsize
        threshold = tensor.settings.thinnings[0].threshold
        for start, width in self.worker.chunks(job):
            raw = theirs.read_raw(start * item, width * item).view(f"u{item}")
            self._check_finite(tensor, start, raw)
            kept = take_kept(raw, *self._find_key(tensor), threshold, start // TILE)
            place = first + self.before[tensor.name, start] * item
            write(tensor.output.file, kept.view(np.uint8).data, place)
        return Outcome(tensor.name, job.start, job.bytes_read)

    def copy(self, job: Job, write: Write) -> Outcome:
        [(_, theirs)] = job.tensor.finetuned
        first = self.worker.place_of(job.tensor.output)
        for start, size in self.worker.chunks(job):
            write(job.tensor.output.file, theirs.read_raw(start, size).data, first + start)
        return Outcome(job.tensor.name, job.start, job.bytes_read)

    def _find_key(self, tensor: TensorPlan) -> tuple[int, int]:
        return mask_key(self.worker.plan.seeds[0], tensor.mask_names[0])

    def _digest_blocks(self, job: Job) -> None:
        """Digest the base's blocks that start in a job, each to its end."""
        tensor = job.tensor
        first = -(-job.start // COUNTED_BLOCK) * COUNTED_BLOCK
        for start in range(first, job.stop, COUNTED_BLOCK):
            stop = min(start + COUNTED_BLOCK, tensor.length)
            digest = xxhash.xxh3_64()
            add_values(digest, tensor.base, start, stop)
            self.digests[tensor.name, start] = digest.intdigest()

    def _check_finite(self, tensor: TensorPlan, start: int, raw: NDArray[Any]) -> None:
        """Refuse infinities and NaNs: once dropped, nobody sees that the model is broken."""
        dtype = tensor.finetuned[0][1].dtype
        bad = np.flatnonzero((raw & raw.dtype.type(EXPONENTS[dtype])) == EXPONENTS[dtype])
        if bad.size:
            value = decode(raw[bad[:1]], dtype)[0]
            raise DareError(
                f"{self._model.name!r}: tensor {tensor.name!r} holds {value} at "
                f"{tensor.base.place_of(start + int(bad[0]))}",
                BROKEN_HINT,
            )


def keep_own_tensors(plan: FilePlan, base: Checkpoint, model: Checkpoint) -> FilePlan:
    """The tensors that the model stores: thinned or, if the base has another shape, whole."""
    kept = find_kept(plan.config, base)
    own = {name: info for name, info in model.tensors.items() if info.folder not in kept}
    shapes = {name: info.shape for name, info in own.items()}
    thinned = {t.name: t for t in plan.tensors if t.merged and shapes.get(t.name) == t.base.shape}
    whole = dataclasses.replace(plan.tensors[0], merged=False)
    tensors = tuple(
        thinned.get(name)
        or dataclasses.replace(whole, name=name, base=info, finetuned=((0, info),))
        for name, info in own.items()
    )
    return dataclasses.replace(plan, tensors=tensors)


def place_entries(plan: FilePlan, inputs: Sequence[Checkpoint], packer: Packer) -> FilePlan:
    """Give each tensor its place, by the entries that were counted."""
    kept = []
    described = {}
    for tensor in plan.tensors:
        [(_, theirs)] = tensor.finetuned
        output = Entry(theirs.dtype, theirs.shape)
        if tensor.merged:
            blocks = (*range(0, tensor.length, COUNTED_BLOCK), tensor.length)
            counts = [packer.before[tensor.name, place] for place in blocks]
            output = Entry(theirs.dtype, (counts[-1],))
            described[tensor.name] = {
                "shape": list(theirs.shape),
                "drop_rate": float(tensor.settings.drop_rates[0]),
                "counts": counts,
                DIGESTS_KEY: [packer.digests[tensor.name, start] for start in blocks[:-1]],
            }
            if tensor.mask_names[0] != tensor.name:
                described[tensor.name]["mask_name"] = tensor.mask_names[0]
        kept.append(dataclasses.replace(tensor, outputs={tensor.name: output}))
    table = {
        "version": VERSION,
        "mask": MASK_NAME,
        "seed": plan.seeds[0],
        "base": {"file": recorded_name(inputs[0].source), **inputs[0].fingerprint},
        "tensors": described,
    }
    if (tied := ties_embeddings(inputs[1].config)) is not None:
        table["tie_word_embeddings"] = tied
    packed = {PACKED_KEY: json.dumps(table, separators=(",", ":"))}
    metadata = recipe_metadata(plan.recipe) | packed
    name = PACKED_FILE if plan.output.directory else plan.output.path.name
    tensors, files = assign_offsets(kept, sys.maxsize, metadata, name)
    side = make_side_files(plan, inputs, files[0]) if plan.output.directory else {}
    return dataclasses.replace(plan, tensors=tuple(tensors), files=tuple(files), side=side)


def make_side_files(plan: FilePlan, inputs: Sequence[Checkpoint], file: PlannedFile) -> SideFiles:
    """The model's other files, with a card and a recipe that say how it was packed."""
    side: SideFiles = dict(find_side_files(inputs[1].folder))
    check_tables(side)
    base, model = (card_name(i.source) for i in inputs)
    rate = plan.config.general(1).drop_rates[0]
    side[CARD_FILE] = (
        f"---\nbase_model: {as_yaml(base)}\ntags:\n- dare\n- packed\n---\n\n"
        f"# {as_code(model)}, packed\n\n"
        f"What a drop rate of {rate:g} leaves of {as_code(model)}, a fine-tune of "
        f"{as_code(base)}: the kept entries of its tensors. It is an input for DARE merges with "
        f"this base, at drop rates from {rate:g} up, and is not loaded by itself.\n"
    ).encode()
    add_recipe(side, plan.config, inputs, __version__, TokenizerChoice(), [file], packed=True)
    return side
