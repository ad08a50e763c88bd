"""Models in files, as the walk wants them: the module that they are weights of, their weights by
plans of merges, their examples as tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darelib.config import DareConfig
from darelib.config.settings import naming
from darelib.core.formats import DTYPES
from darelib.core.interrupts import Interrupts
from darelib.core.text import DareError, progress
from darelib.methods.passthrough import PASSTHROUGH
from darelib.models.checkpoint import Checkpoint
from darelib.models.encodings import PLAIN, TensorInfo
from darelib.models.examples import divide
from darelib.output.judged import ANSWERS, TOKENS, JudgedFile
from darelib.plan.plan import Job, MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan, assign_offsets
from darelib.run.matching.judging import Judge, Make, Test
from darelib.run.matching.language import (
    ExampleReader,
    Names,
    Tokens,
    count_batch,
    make_module,
    make_streams,
)
from darelib.run.matching.network import BASE, START, Network
from darelib.run.matching.walk import Stream, explain_memory, find_tied, start_from
from darelib.run.rounds import run_rounds
from darelib.run.solving import make_worker
from darelib.run.worker import Outcome, Tally

STORED_TYPES: Final = {stored: getattr(torch, name) for name, stored in DTYPES.items()}
PREDICTING: Final = ("ForCausalLM", "LMHeadModel")  # the next token, so that answers can be judged


class Inputs:
    """The weights of base, models and start: each is a merge of its own, into memory."""

    def __init__(
        self,
        config: DareConfig,
        inputs: Sequence[Checkpoint],
        interrupts: Interrupts,
        others: Sequence[Checkpoint] = (),
    ) -> None:
        """others: models that are only judged; their numbers follow those of the merge's models."""
        self.inputs = inputs
        self.interrupts = interrupts
        # What was counted of the start, by tensor and the start of each job.
        self.found: dict[str, dict[int, dict[int, Tally]]] = {}
        alone = DareConfig(
            drop_rate=0.0,
            mismatch=config.mismatch,
            components=config.components,
            any_base=True,
            dtype="float32",
            threads=config.threads,
            engine=config.engine,
        )
        base, *models = inputs
        self._plans: dict[int, tuple[MergePlan, Sequence[Checkpoint]]] = {
            START: (plan_merge(start_from(config), inputs), inputs),
            BASE: (plan_merge(replace(alone, method=PASSTHROUGH.name), [base]), [base]),
        }
        for i, model in enumerate((*models, *others)):
            self._plans[i] = plan_merge(alone, [base, model]), [base, model]

    def plan_of(self, who: int) -> MergePlan:
        return self._plans[who][0]

    def make(self, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors in float32, or as they are stored."""
        plan, inputs = self._plans[who]
        wanted = {*names}
        chosen = [tensor for tensor in plan.tensors if tensor.name in wanted]
        model = inputs[-1]
        plain = [t for t in chosen if who != START and is_plain(model.tensors.get(t.name), t.base)]
        with ThreadPoolExecutor(plan.threads) as pool:
            read = list(pool.map(partial(read_plain, model), [t.name for t in plain]))
        found = {tensor.name: each for tensor, each in zip(plain, read, strict=True)}
        left = [tensor for tensor in chosen if tensor.name not in found]
        return found | (self._merge(who, left) if left else {})

    def _merge(self, who: int, chosen: Sequence[TensorPlan]) -> dict[str, Tensor]:
        plan, inputs = self._plans[who]
        tensors, [file] = assign_offsets(chosen, sys.maxsize, {}, "memory")
        part = replace(plan, tensors=tuple(tensors), files=(file,))
        head = len(file.header)
        made = np.empty(file.size - head, np.uint8)

        def put(_: int, view: memoryview, place: int) -> None:
            made[place - head : place - head + len(view)] = view

        def note(job: Job, outcome: Outcome | None) -> None:
            if outcome and who == START:
                self.found.setdefault(outcome.tensor, {})[job.start] = outcome.tallies

        worker = make_worker(part, inputs, self.interrupts)
        run_rounds(part.rounds(), worker, put, note, self.interrupts)
        return {tensor.name: as_floats(made, tensor.output) for tensor in tensors}


def is_plain(info: TensorInfo | None, base: TensorInfo) -> bool:
    """Whether a model's own tensor is what it stores, and can be read as it is."""
    return bool(
        info
        and info.encoding is PLAIN
        and info.shape == base.shape
        and info.dtype in STORED_TYPES
        and info.count
    )


def read_plain(model: Checkpoint, name: str) -> Tensor:
    info = model.tensors[name]
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    model.read(info, 0, info.count, raw.numpy())
    return raw.view(STORED_TYPES[info.dtype]).reshape(info.shape)


def as_floats(made: NDArray[np.uint8], info: TensorInfo) -> Tensor:
    """A tensor among the bytes of all. Others than floats come as they are stored, flat."""
    raw = torch.from_numpy(made[info.offset : info.offset + info.nbytes])
    return raw.view(torch.float32).reshape(info.shape) if info.dtype == "F32" else raw


class Spool:
    """Tensors in float32, in a file without a name, which goes when it is closed."""

    def __init__(self, folder: Path | None = None) -> None:
        """folder: None: the system's, for what is temporary."""
        self.where = repr(str(folder)) if folder else "for temporary files (TMPDIR names a folder)"
        with self.explained():
            self.file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.close = self.file.close
        self.size = 0
        self.places: dict[str, tuple[int, torch.Size]] = {}

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DareError(
                f"what is merged cannot be kept until it is judged: {error.strerror}",
                f"make room {self.where}",
            ) from None

    def put(self, name: str, tensor: Tensor) -> None:
        view = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data
        self.places[name] = self.size, tensor.shape
        self.size += len(view)
        with self.explained():
            self.file.seek(self.places[name][0])
            while view:  # the system may take less than it is given
                view = view[self.file.write(view) :]

    def get(self, name: str) -> Tensor:
        start, shape = self.places[name]
        raw = torch.empty(shape)
        view = raw.numpy().reshape(-1).view(np.uint8).data
        with self.explained():
            self.file.seek(start)
            while view:
                view = view[self.file.readinto(view) or len(view) :]
        return raw


class ModelFiles:
    """The models of a merge, as one module can be called with them."""

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Checkpoint],
        interrupts: Interrupts,
        others: Sequence[Checkpoint] = (),
    ) -> None:
        self.plan = plan
        self.config = plan.config
        self.inputs = inputs
        self.interrupts = interrupts
        base = inputs[0]
        self.weights = Inputs(plan.config, inputs, interrupts, others)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = make_module(base.folder or base.files[0].path.parent, base.name)
        for own in module.modules():
            for name, buffer in own._buffers.items():
                own._buffers[name] = None if buffer is None else buffer.to(device)
        self.names = Names(module, {name: info.shape for name, info in base.tensors.items()})
        self.network = Network(module, device)
        self.kind = type(module).__name__
        self.rows = {tensor.name: tensor for tensor in plan.tensors}
        self.tied = find_tied(module)

    @property
    def predicts(self) -> bool:
        return self.kind.endswith(PREDICTING)

    @property
    def owners(self) -> dict[int, Checkpoint]:
        """Of examples: the models, and the base as the last."""
        base, *models = self.inputs
        return {**dict(enumerate(models)), BASE: base}

    def read_examples(self) -> dict[int, list[Tokens]]:
        base = self.inputs[0]
        rows = self.plan.embedding_rows
        return {
            who: ExampleReader([model.folder, base.folder], model.name, rows).read(examples)
            for who, model in self.owners.items()
            if (examples := model.parts[0].examples)
        }

    def with_config(self, config: DareConfig) -> Self:
        """The same models, to be merged otherwise."""
        other = copy.copy(self)
        other.plan = plan_merge(config, self.inputs)
        other.config = other.plan.config
        other.weights = Inputs(other.config, self.inputs, self.interrupts)
        other.rows = {tensor.name: tensor for tensor in other.plan.tensors}
        return other

    def hold_out(self) -> tuple[dict[int, list[Tokens]], dict[int, list[Tokens]]]:
        """Examples that match, and examples that judge."""
        parts = {}
        for who, tokens in self.read_examples().items():
            with naming(f"{self.name_examples(who)}: "):
                parts[who] = divide(tokens, self.config.judged_share)
        used = {who: own for who, (own, _) in parts.items()}
        return used, {who: held for who, (_, held) in parts.items()}

    def list_warnings(self, others: Sequence[Checkpoint]) -> list[str]:
        """Of the merge's plan, and of models that are only judged."""
        first = len(self.inputs) - 1
        plans = [self.weights.plan_of(first + k) for k in range(len(others))]
        return list(dict.fromkeys(each for plan in (self.plan, *plans) for each in plan.warnings))

    def name_examples(self, who: int) -> str:
        """Its file, and where several have one name, its owner, too."""
        names = {
            k: used.name for k, each in self.owners.items() if (used := each.parts[0].examples)
        }
        is_known = list(names.values()).count(names[who]) > 1
        return f"{self.owners[who].name}: {names[who]}" if is_known else names[who]

    def check_predicts(self) -> None:
        """Refuse what examples cannot judge, before it is matched."""
        if not self.predicts:
            raise DareError(
                f"examples can judge models that predict the next token, and {self.kind} does not",
                "judge it by --evaluate of a sweep; in Python, dare_evaluate takes any module",
            )

    def make_streams(self, tokens: Sequence[Tokens]) -> list[Stream]:
        return make_streams(tokens, count_batch(self.network.device))

    def make_tests(
        self, examples: Mapping[int, Sequence[Tokens]]
    ) -> tuple[list[Test], list[JudgedFile]]:
        """What models are judged by."""
        tests = []
        files = []
        for who, tokens in examples.items():
            tests.append(Test(who, self.make_streams(tokens)))
            judged = sum(max(0, len(each.ids) - each.answered) for each in tokens)
            if not judged:
                raise DareError(
                    f"no answer of {self.name_examples(who)!r} is among the tokens that are used",
                    "give a larger --max-tokens, or shorter prompts",
                )
            kind = ANSWERS if any(each.answered > 1 for each in tokens) else TOKENS
            files.append(JudgedFile(self.name_examples(who), len(tokens), judged, kind))
        return tests, files

    @contextmanager
    def judging(
        self, examples: Mapping[int, Sequence[Tokens]], count: int
    ) -> Iterator[tuple[Judge, list[JudgedFile]]]:
        """While so many models are judged, with the module opened."""
        tests, files = self.make_tests(examples)
        steps = (len(tests) + count) * len(self.network.segments)
        with progress("judging", steps, self.config.verbose) as advance:

            def step() -> None:
                self.interrupts.check()
                advance(1)

            yield Judge(self.network, self.load, tests, step), files

    def load(self, who: int, parameters: Sequence[str]) -> dict[str, Tensor]:
        tensors = self.weights.make(who, self.names.list_tensors(parameters))
        return self._assemble(parameters, tensors)

    def _assemble(
        self, parameters: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        found = self.names.assemble(parameters, tensors)
        return {name: each for name, each in found.items() if each.is_floating_point()}

    def scale(
        self, configs: Sequence[DareConfig], solved: Spool | None = None, keeps: bool = False
    ) -> Make:
        """Merges that differ in lambda alone, as they would be written. solved: of lambda 1, the
        matrices that were matched; all else is added to it, if it keeps that.
        """
        tables = [
            {row.name: row for row in plan_merge(config, self.inputs).tensors} for config in configs
        ]

        def make(parameters: Sequence[str]) -> Iterator[dict[str, Tensor]]:
            names = self.names.list_tensors(parameters)
            known = {name for name in names if solved and name in solved.places}
            base = self.weights.make(BASE, names)
            start = self.weights.make(START, [name for name in names if name not in known])
            if solved:
                for name, each in start.items():
                    if keeps and each.is_floating_point():
                        solved.put(name, each)
                start |= {name: solved.get(name) for name in known}
            for rows in tables:
                made = {name: mix(base[name], start[name], rows[name]) for name in names}
                yield self._assemble(parameters, made)

        return make

    @contextmanager
    def opened(self, examples: Mapping[int, Sequence[Tokens]]) -> Iterator[None]:
        """While the module is called: by blocks, if it can be called so with one of these."""
        [first, *_] = examples.values()
        with self.network.opened(), explain_memory():
            self._choose_way(self.make_streams(first[:1])[0].batch)
            yield

    def _choose_way(self, batch: Mapping[str, Tensor]) -> None:
        try:
            self.network.choose_way(self.load, batch)
        except IndexError:
            raise DareError(
                "an example has more tokens, or others, than the model can be called with",
                "give a smaller --max-tokens, or examples by the model's own tokenizer",
            ) from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DareError(
                f"{self.inputs[0].name!r} cannot be called with tokens alone: {error}",
                "merge without examples; in Python, dare_match takes any module",
            ) from None


def mix(base: Tensor, start: Tensor, row: TensorPlan) -> Tensor:
    """A tensor with its lambda, rounded as it is written."""
    if not start.is_floating_point() or not row.finetuned:
        return start
    made = base.float() + row.settings.lambda_coeff * (start - base.float())
    return made.to(STORED_TYPES.get(row.output.dtype, torch.float32)).float()
