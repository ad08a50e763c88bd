"""Models in files, as the walk wants them: the module that they are weights of, their weights by
plans of merges, their examples as tokens.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from darelib.config import DareConfig
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError, DareError, count_of
from darelib.methods.passthrough import PASSTHROUGH
from darelib.models.checkpoint import Checkpoint
from darelib.models.forms import Entry, Sized
from darelib.models.tensorfile import Stored
from darelib.plan.plan import Job, MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan, assign_offsets
from darelib.run.in_memory import TORCH_TYPES
from darelib.run.matching.language import (
    ExampleReader,
    Tokens,
    count_batch,
    make_module,
    make_streams,
)
from darelib.run.matching.models import Models
from darelib.run.matching.network import BASE, START
from darelib.run.matching.walk import Matched, Participant, Stream, start_from
from darelib.run.rounds import run_rounds
from darelib.run.solving import make_worker
from darelib.run.worker import Outcome, Tally

PREDICTING: Final = ("ForCausalLM", "LMHeadModel")  # the next token, so that answers can be judged
FEW: Final = 16  # examples, below which a merge is hardly better matched


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
        self.warnings: list[str] = []  # of models by themselves
        for i, model in enumerate((*models, *others)):
            plan = plan_merge(alone, [base, model])
            self._plans[i] = plan, [base, model]
            self.warnings += plan.warnings

    def make(self, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors in float32, or as they are stored."""
        plan, inputs = self._plans[who]
        wanted = {*names}
        chosen = [tensor for tensor in plan.tensors if tensor.name in wanted]
        model = inputs[-1]
        plain = [t for t in chosen if who != START and is_plain(model.tensors.get(t.name), t.base)]
        stored = [model.tensors[tensor.name] for tensor in plain]
        with ThreadPoolExecutor(plan.threads) as pool:
            read = list(pool.map(read_plain, stored))
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

        worker = make_worker(part, inputs)
        run_rounds(part.rounds(), worker, put, note, self.interrupts)
        return {tensor.name: as_floats(made, tensor.output) for tensor in tensors}


def is_plain(info: Any, base: Sized) -> bool:
    """Whether a model's own tensor is what it stores, and can be read as it is."""
    return bool(
        info
        and isinstance(info, Stored)
        and info.shape == base.shape
        and info.dtype in TORCH_TYPES
        and info.count
    )


def read_plain(tensor: Stored) -> Tensor:
    raw = torch.from_numpy(tensor.read_raw(0, tensor.nbytes))
    return raw.view(TORCH_TYPES[tensor.dtype]).reshape(tensor.shape)


def as_floats(made: NDArray[np.uint8], info: Entry) -> Tensor:
    """A tensor among the bytes of all. Others than floats come as they are stored, flat."""
    raw = torch.from_numpy(made[info.offset : info.offset + info.nbytes])
    return raw.view(torch.float32).reshape(info.shape) if info.dtype == "F32" else raw


class ModelFiles(Models):
    """The models of a merge of files."""

    inputs: Sequence[Checkpoint]
    weights: Inputs

    def __init__(
        self,
        plan: MergePlan,
        inputs: Sequence[Checkpoint],
        interrupts: Interrupts,
        others: Sequence[Checkpoint] = (),
    ) -> None:
        base, *models = inputs
        if base.heights[1]:
            raise ConfigError(
                "examples are read by the models' own tokenizers, and the output has other token "
                "ids",
                "leave --tokenizer and --pad-vocabulary out",
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        module = make_module(base.folder or base.files[0].path.parent, base.name)
        for own in module.modules():
            for name, buffer in own._buffers.items():
                own._buffers[name] = None if buffer is None else buffer.to(device)
        weights = Inputs(plan.config, inputs, interrupts, others)
        super().__init__(module, device, plan, inputs, weights, interrupts)
        self.kind = type(module).__name__
        owners = [*enumerate(models), (BASE, base)]
        used = {who: own for who, each in owners if (own := each.parts[0].examples)}
        names = [examples.name for examples in used.values()]
        for who, examples in used.items():
            model = dict(owners)[who]
            reader = ExampleReader([model.folder, base.folder], model.name, plan.embedding_rows)
            self.examples[who] = reader.read(examples)
            is_known = names.count(examples.name) > 1
            self.titles[who] = f"{model.name}: {examples.name}" if is_known else examples.name

    @property
    def predicts(self) -> bool:
        return self.kind.endswith(PREDICTING)

    def check_predicts(self) -> None:
        """Refuse what examples cannot judge, before it is matched."""
        if not self.predicts:
            raise DareError(
                f"examples can judge models that predict the next token, and {self.kind} does not",
                "judge it by --evaluate of a sweep; in Python, dare_evaluate takes any module",
            )

    def with_config(self, config: DareConfig) -> Self:
        """The same models, to be merged otherwise."""
        other = copy.copy(self)
        plan = plan_merge(config, self.inputs)
        other.use(plan, Inputs(plan.config, self.inputs, self.interrupts))
        return other

    def make_streams(self, examples: Sequence[Tokens]) -> list[Stream]:
        streams = make_streams(examples, count_batch(self.network.device))
        return streams if self.predicts else [replace(each, answers=None) for each in streams]

    def choose_way(self, batch: Mapping[str, Tensor]) -> None:
        try:
            super().choose_way(batch)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DareError(
                f"{self.inputs[0].name!r} cannot be called with tokens alone: {error}",
                "merge without examples; in Python, dare_match takes any module",
            ) from None

    def list_candidates(self) -> list[TensorPlan]:
        """All that may be matched."""
        names = [name for segment in self.network.segments for name in segment.matrices]
        free = [name for name in dict.fromkeys(names) if not self.explain_left(name)]
        return [self.rows[self.names.find_tensor(name)] for name in free]

    def match(self, participants: Sequence[Participant]) -> Iterator[Matched]:
        if not self.list_candidates():
            raise DareError("no matrix of the model can be matched", "merge without examples")
        for each in participants:
            if not each.watches and each.count < FEW:
                LOG.warning(
                    f"{self.titles[each.who]} has {count_of(each.count, 'example')}: with fewer "
                    f"than {FEW}, a merge is matched to little more than these"
                )
        yield from super().match(participants)
