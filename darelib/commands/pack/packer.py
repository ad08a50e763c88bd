"""What `dare.py pack` does: a fine-tune as the entries that its mask keeps, which is all that a merge needs of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from darelib import __version__
from darelib.config import DareConfig, Rule
from darelib.core.drops import RANDOM
from darelib.core.formats import FORMATS, widen
from darelib.core.interrupts import Interrupts
from darelib.core.mask import MASK_NAME, TILE, mask_key
from darelib.core.text import ConfigError, DareError, as_text, count_of, human, printable
from darelib.core.tuning import TUNING
from darelib.kernels import KernelSpec
from darelib.kernels.engines import load_kernels
from darelib.kernels.records import Buffers
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import check_unchanged, explain_read_errors, open_models
from darelib.models.packed import COUNTED_BLOCK, PACKED_FILE, PACKED_KEY, VERSION
from darelib.models.source import Source, recorded_name
from darelib.models.tensorfile import TensorInfo, header_bytes
from darelib.output.destination import (
    check_replaceable,
    digest_of,
    explain_place_errors,
    find_output,
)
from darelib.output.directory import CARD_FILE, card_name, find_side_files
from darelib.output.prepare import FilePlan, check_place, plan_files
from darelib.output.publish import Output, explain_write_errors
from darelib.output.recipe import RECIPE_FILE, recipe_text, seal
from darelib.output.tokenizer import SideFiles, TokenizerChoice
from darelib.plan.files import PlannedFile
from darelib.plan.matching import ties_embeddings
from darelib.plan.plan import Job, check_kinds
from darelib.plan.tensors import TensorPlan
from darelib.requests.request import Request
from darelib.run.outcomes import Outcome
from darelib.run.threads import run_merge
from darelib.run.worker import BROKEN_HINT, JobWorker, Write

SETTINGS: Final = ("drop_rate", "seed", "mismatch", "any_base", "threads", "engine", "verbose")
# The bits that are all set in what is not finite.
EXPONENTS: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000, "F64": 0x7FF0_0000_0000_0000}


@dataclasses.dataclass(frozen=True)
class PackReport:
    """What a packing did. Prints as a line; as_dict gives plain data."""

    output: str
    tensors: int
    bytes_before: int
    bytes_written: int
    seconds: float
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        share = self.bytes_written / max(self.bytes_before, 1)
        return (
            f"packed {count_of(self.tensors, 'tensor')} into {printable(self.output)}: {human(self.bytes_written)}, "
            f"{share:.1%} of {human(self.bytes_before)}, in {self.seconds:.2f} s"
        )


def choose_settings(request: Request) -> DareConfig:
    """What decides which entries are kept. A configuration may also say how to merge, which does not matter here."""
    others = [
        drop for drop in (request.dare.get("drop"), *(rule.drop for rule in request.rules)) if drop
    ]
    if other := next((drop for drop in others if drop != RANDOM), None):
        raise ConfigError(
            f"pack keeps entries at random, and this configuration has drop {other}",
            "set drop to random, or merge the model as it is: such a drop must see all of it",
        )
    used = {name: value for name, value in request.dare.items() if name in SETTINGS}
    rate = used.get("drop_rate", DareConfig.drop_rate)
    rules = tuple(
        Rule(rule.match, rate if rule.drop_rate is None else rule.drop_rate)
        for rule in request.rules
    )
    config = DareConfig(**used, rules=rules)
    config.check_models(1)
    return config


def pack(
    base: Source,
    model: Source,
    config: DareConfig,
    output_file: str | Path,
    *,
    force: bool = False,
    resume: bool = False,
) -> PackReport:
    """Write what drop rates, seed and rules leave of a fine-tune, as a file or as a model directory."""
    started = time.perf_counter()
    destination = find_output(output_file)
    with open_models([base, model]) as inputs, Interrupts() as interrupts:
        if inputs[1].partial or inputs[1].seed is not None:
            kind = (
                "a LoRA adapter, which is small already" if inputs[1].partial else "packed already"
            )
            raise DareError(f"{model.name!r} is {kind}", "merge it as it is")
        for each in inputs:
            for info in each.tensors.values():
                if info.encoding.kind:
                    raise DareError(
                        f"{each.name!r} is in {info.encoding.kind}, which cannot be packed",
                        "merge it as it is",
                    )
        if not config.any_base:
            check_kinds(inputs)
        with explain_place_errors(destination.name):  # before there is any work
            check_replaceable(destination, force)
        with explain_read_errors():
            plan = plan_files(config, inputs, destination, TokenizerChoice(), with_side_files=False)
            plan = keep_own_tensors(plan, inputs[1])
        worker = Packer(plan, inputs, interrupts)
        worker.count_entries(interrupts)
        with explain_read_errors():
            worker.plan = plan = place_entries(plan, inputs, worker)
        plan = check_place(plan, inputs, force)
        identity = plan.identity(inputs)
        with (
            explain_write_errors(destination, resume),
            Output(destination, plan.files, identity, resume) as output,
        ):
            run_merge(plan, worker, output, interrupts)
            output.publish(
                plan.side, plan.digests, lambda: check_unchanged(inputs), force, interrupts
            )
        size = inputs[1].size
    seconds = time.perf_counter() - started
    return PackReport(str(output_file), len(plan.tensors), size, plan.size, seconds, plan.warnings)


class Packer(JobWorker):
    """Runs jobs: each writes the entries that the mask keeps of one range, or copies one that is not thinned."""

    def __init__(
        self, plan: FilePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts
    ) -> None:
        super().__init__(plan)
        self.model = inputs[1]
        specs = {pack_spec(tensor) for tensor in plan.tensors if is_thinned(tensor)}
        self.kernels = load_kernels(specs, plan.config.engine, interrupts)
        self.before: dict[
            tuple[str, int], int
        ] = {}  # by tensor and place: how many entries are kept before it

    def make_buffers(self) -> Buffers:
        return Buffers(1, (self.plan.chunk + 1) * self.plan.itemsize, ())

    def count_entries(self, interrupts: Interrupts) -> None:
        """Find out how many entries are kept before each block, each job and in all, without reading anything."""
        step, local = min(COUNTED_BLOCK, TUNING.job_elements), threading.local()
        thinned = [tensor for tensor in self.plan.tensors if is_thinned(tensor)]
        jobs = [
            Job(0, t, at, min(at + step, t.length))
            for t in thinned
            for at in range(0, t.length, step)
        ]

        def count(job: Job) -> int:
            local.buffers = getattr(local, "buffers", None) or self.make_buffers()
            return sum(
                self._pick(job, start, width, local.buffers) for start, width in self.chunks(job)
            )

        with ThreadPoolExecutor(self.plan.threads) as pool:
            try:
                for job, kept in zip(jobs, pool.map(count, jobs), strict=True):
                    interrupts.check()
                    self.before.setdefault((job.tensor.name, 0), 0)
                    self.before[job.tensor.name, job.stop] = (
                        self.before[job.tensor.name, job.start] + kept
                    )
            except BaseException:
                self.abandoned.set()
                raise

    def counts(self, tensor: TensorPlan) -> list[int]:
        """The entries before each block, and all of them."""
        return [
            self.before.get((tensor.name, at), 0)
            for at in (*range(0, tensor.length, COUNTED_BLOCK), tensor.length)
        ]

    def run(self, job: Job, buffers: Buffers, write: Write) -> Outcome:
        tensor = job.tensor
        [(_, theirs)] = tensor.finetuned
        item, place = (
            FORMATS[theirs.dtype].itemsize if tensor.merged else 1,
            self.place_of(tensor.output) + job.start,
        )
        if tensor.merged:
            place = self.place_of(tensor.output) + self.before[tensor.name, job.start] * item
        for start, width in self.chunks(job):
            row = buffers.finetuned[0] if tensor.merged else buffers.output
            self.model.read_bytes(row[: width * item].data, theirs, start * item)
            if tensor.merged:
                self._check_finite(tensor, start, row[: width * item].view(f"u{item}"))
            kept = self._pick(job, start, width, buffers) if tensor.merged else width
            write(tensor.output.file, buffers.output.data[: kept * item], place)
            place += kept * item
        return Outcome(tensor.name, job.start, job.bytes_read)

    def _check_finite(self, tensor: TensorPlan, start: int, raw: NDArray[Any]) -> None:
        """What is dropped is never seen again, so that nobody else could tell that the model is broken."""
        dtype = tensor.finetuned[0][1].dtype
        bad = np.flatnonzero((raw & raw.dtype.type(EXPONENTS[dtype])) == EXPONENTS[dtype])
        if bad.size:
            value, place = widen(raw[bad[:1]], dtype)[0], tensor.base.place_of(start + int(bad[0]))
            raise DareError(
                f"{self.model.name!r}: tensor {tensor.name!r} holds {value} at {place}",
                BROKEN_HINT,
            )

    def _pick(self, job: Job, start: int, width: int, buffers: Buffers) -> int:
        """Put what is kept of a chunk at the start of the output's row. Gives how many that are."""
        tensor, record = job.tensor, buffers.models[0]
        record["key_0"], record["key_1"] = mask_key(self.plan.seeds[0], tensor.mask_names[0])
        record["limit"] = tensor.settings.thinnings[0].threshold - 1
        self.kernels[pack_spec(tensor)](buffers, width, 1, start // TILE)
        return int(record["kept"])


def is_thinned(tensor: TensorPlan) -> bool:
    """Whether only what the mask keeps is stored of it; else it is whole, as where it has another shape."""
    return (
        tensor.merged
        and len(tensor.finetuned) == 1
        and tensor.finetuned[0][1].shape == tensor.base.shape
    )


def pack_spec(tensor: TensorPlan) -> KernelSpec:
    dtype = tensor.finetuned[0][1].dtype
    return KernelSpec("pack", dtype, dtype, dtype)


def keep_own_tensors(plan: FilePlan, model: Checkpoint) -> FilePlan:
    """The tensors that the model has itself: thinned, or whole."""
    known = {tensor.name: tensor for tensor in plan.tensors}
    example, tensors = plan.tensors[0], []
    for name, info in model.tensors.items():
        tensor = known.get(name)
        if tensor is None or not is_thinned(tensor):
            tensor = dataclasses.replace(
                example, name=name, base=info, finetuned=((0, info),), merged=False
            )
        tensors.append(tensor)
    return dataclasses.replace(plan, tensors=tuple(tensors))


def place_entries(plan: FilePlan, inputs: Sequence[Checkpoint], packer: Packer) -> FilePlan:
    """Where everything goes, now that it is known how much of it there is."""
    tensors, described, offset = [], {}, 0
    for tensor in plan.tensors:
        [(_, theirs)] = tensor.finetuned
        output = TensorInfo(theirs.dtype, theirs.shape, offset)
        if tensor.merged:
            counts, rate = packer.counts(tensor), float(tensor.settings.drop_rates[0])
            output = TensorInfo(theirs.dtype, (counts[-1],), offset)
            described[tensor.name] = {
                "shape": list(theirs.shape),
                "drop_rate": rate,
                "counts": counts,
            }
            if tensor.mask_names[0] != tensor.name:
                described[tensor.name]["mask_name"] = tensor.mask_names[0]
        tensors.append(dataclasses.replace(tensor, outputs={tensor.name: output}))
        offset += output.nbytes
    base = {"file": recorded_name(inputs[0].source), **inputs[0].fingerprint}
    table = {
        "version": VERSION,
        "mask": MASK_NAME,
        "seed": plan.seeds[0],
        "base": base,
        "tensors": described,
    }
    if (tied := ties_embeddings(inputs[1].config)) is not None:
        table["tie_word_embeddings"] = tied
    metadata = {"format": "pt", PACKED_KEY: json.dumps(table, separators=(",", ":"))}
    header = header_bytes({tensor.name: tensor.output for tensor in tensors}, metadata)
    name = PACKED_FILE if plan.output.directory else plan.output.path.name
    file = PlannedFile(name, header, len(header) + offset)
    side = make_side_files(plan, inputs, file) if plan.output.directory else {}
    digests = {
        name: digest_of(content) for name, content in side.items() if isinstance(content, Path)
    }
    return dataclasses.replace(
        plan, tensors=tuple(tensors), files=(file,), side=side, digests=digests
    )


def make_side_files(plan: FilePlan, inputs: Sequence[Checkpoint], file: PlannedFile) -> SideFiles:
    """What lies beside the model itself, with a card and a recipe that say how it was packed."""
    side: SideFiles = dict(find_side_files(inputs[1].folder))
    base, model = (card_name(i.source) for i in inputs)
    rate = plan.config.general(1).drop_rates[0]
    side[CARD_FILE] = (
        f"---\nbase_model: {json.dumps(base)}\ntags:\n- dare\n- packed\n---\n\n# {model}, packed\n\n"
        f"What a drop rate of {rate:g} leaves of `{model}`, a fine-tune of `{base}`: the kept entries of its tensors. "
        f"It is an input for DARE merges with this base, at drop rates from {rate:g} up, and is not loaded by itself.\n"
    ).encode()
    written = {as_text(name): digest_of(content) for name, content in side.items()}
    written[file.name] = hashlib.sha256(file.header).hexdigest()
    files = dict(sorted(written.items()))
    side[RECIPE_FILE] = seal(
        recipe_text(
            plan.config, inputs, __version__, TokenizerChoice(), files, packed=True
        ).encode()
    )
    return side
