"""The models of a merge, called as one module: matched, judged, and scaled by lambda. Files of
models and state dicts differ in where weights and examples come from, and in nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from darelib.config import DareConfig
from darelib.config.settings import naming
from darelib.core.interrupts import Interrupts
from darelib.core.text import DareError, progress
from darelib.models.examples import divide
from darelib.models.tensor import Described
from darelib.output.judged import (
    ROWS,
    Judgement,
    LambdaChoice,
    explain_best,
    explain_order,
    list_costs,
)
from darelib.plan.plan import MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan
from darelib.run.in_memory import TORCH_TYPES
from darelib.run.matching.judging import LAMBDAS, Judge, Make, Streams, list_lambdas
from darelib.run.matching.network import BASE, START, Network
from darelib.run.matching.walk import (
    MANY,
    RIDGE,
    Matched,
    Participant,
    Stream,
    Walk,
    explain_memory,
    explain_unmatched,
    find_tied,
)


class WeightSource(Protocol):
    """Tensors of models in float32, or as they are stored."""

    def make(self, who: int, names: Sequence[str]) -> dict[str, Tensor]: ...


class Spool:
    """Tensors in float32, in a file without a name, which goes when it is closed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self.explained():
            self.file = TemporaryFile(dir=folder)  # noqa: SIM115
        self.size = 0
        self.places: dict[str, tuple[int, torch.Size]] = {}

    def close(self) -> None:
        with suppress(OSError):  # the user knows that there was no room
            self.file.close()

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DareError(
                f"what is merged cannot be kept until it is judged: {error.strerror}",
                f"make room in {str(self.folder)!r}",
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self.places

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        values = np.ascontiguousarray(tensor.numpy())
        self.places[name] = self.size, tensor.shape
        with self.explained():
            self.file.seek(self.size)
            self.file.write(values.data)
        self.size += values.nbytes

    def __getitem__(self, name: str) -> Tensor:
        start, shape = self.places[name]
        values = torch.empty(shape)
        with self.explained():
            self.file.seek(start)
            self.file.readinto(values.numpy().reshape(-1).view(np.uint8).data)
        return values


Store: TypeAlias = dict[str, Tensor] | Spool  # of what is solved, until it is used
Keep: TypeAlias = Callable[[str, Tensor], None]


class Names:
    """What a module calls the tensors of a checkpoint, and how it makes its parameters of them:
    transformers renames some when it loads them, and stacks the experts of mixtures.
    """

    def __init__(self, module: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of the checkpoint's tensors, by name."""
        self.module = module
        self._groups: dict[str, list[str]] = {}  # tensors that go together, by what they become
        self._patterns: dict[str, str] = {}  # by tensor, where it is converted
        self._converters: dict[str, Any] = {}
        wanted = {name for name, _ in module.named_parameters()}
        place = self._name_as_loaded() if wanted - shapes.keys() else lambda name: (name, None)
        for name in shapes:
            group, pattern = place(name)
            self._groups.setdefault(group, []).append(name)
            if pattern:
                self._patterns[name] = pattern
        empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        made = {group: self._convert(group, empty) for group in self._groups}
        # By parameter: what it becomes part of.
        self._owners = {parameter: group for group, found in made.items() for parameter in found}
        if lost := sorted(wanted - self._owners.keys()):
            raise DareError(
                f"the base has no tensor for {lost[0]!r} of the module that transformers makes",
                "install another version of transformers, or merge without examples",
            )

    def _name_as_loaded(self) -> Callable[[str], tuple[str, str | None]]:
        from transformers import conversion_mapping, core_model_loading

        steps = conversion_mapping.get_model_conversion_mapping(self.module)
        renamings = [e for e in steps if isinstance(e, core_model_loading.WeightRenaming)]
        converters = [e for e in steps if isinstance(e, core_model_loading.WeightConverter)]
        rename = core_model_loading.rename_source_key
        self._converters = {k: each for each in converters for k in each.source_patterns}
        state = self.module.state_dict()
        prefix = self.module.base_model_prefix
        return lambda name: rename(name, renamings, converters, prefix, state)

    def _convert(self, group: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters that some tensors become."""
        names = self._groups[group]
        if names[0] not in self._patterns:
            return {group: tensors[names[0]]}
        converter = copy.deepcopy(self._converters[self._patterns[names[0]]])
        for name in sorted(names, key=natural):
            converter.add_tensor(group, name, self._patterns[name], tensors[name])
        made = converter.convert(group, model=self.module, config=self.module.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def find_tensor(self, parameter: str) -> str:
        """The one tensor that a parameter is; "": it is made of several, or of a part of one."""
        names = self._groups.get(self._owners.get(parameter, ""), [])
        return names[0] if len(names) == 1 and names[0] not in self._patterns else ""

    def list_tensors(self, parameters: Iterable[str]) -> list[str]:
        """All that some parameters are made of."""
        groups = dict.fromkeys(self._owners[each] for each in parameters if each in self._owners)
        return [name for group in groups for name in self._groups[group]]

    def assemble(
        self, parameters: Iterable[str], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        groups = dict.fromkeys(self._owners[each] for each in parameters if each in self._owners)
        made = [self._convert(group, tensors) for group in groups]
        return {name: each for found in made for name, each in found.items()}


def natural(name: str) -> list[tuple[int, str]]:
    """Names in the order of the numbers in them."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


class Models:
    """The base, the models and merges of them. Examples of each, and what these are called, are by
    its number; the base's come last.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: MergePlan,
        inputs: Sequence[Described],
        weights: WeightSource,
        interrupts: Interrupts,
    ) -> None:
        self.inputs = inputs
        self.interrupts = interrupts
        self.use(plan, weights)
        self.names = Names(module, {name: info.shape for name, info in inputs[0].tensors.items()})
        self.network = Network(module, device)
        self.tied = find_tied(module)
        self.examples: dict[int, list[Any]] = {}
        self.titles: dict[int, str] = {}

    def use(self, plan: MergePlan, weights: WeightSource) -> None:
        """Merge as this plan says."""
        self.config = plan.config
        self.rows = {tensor.name: tensor for tensor in plan.tensors}
        self.weights = weights

    def make_streams(self, examples: Sequence[Any]) -> list[Stream]:
        return list(examples)

    def divide(self, is_divided: bool) -> tuple[Streams, Streams]:
        """Examples that match, and those that judge: all, unless some are held out."""
        used: Streams = {}
        held: Streams = {}
        for who, own in self.examples.items():
            matching = judging = own
            if is_divided:
                with naming(f"{self.titles[who]}: "):
                    matching, judging = divide(own, self.config.judged_share)
            used[who] = self.make_streams(matching)
            held[who] = self.make_streams(judging)
        return used, held

    def load(self, who: int, parameters: Sequence[str]) -> dict[str, Tensor]:
        return self._assemble(
            parameters, self.weights.make(who, self.names.list_tensors(parameters))
        )

    def _assemble(
        self, parameters: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        found = self.names.assemble(parameters, tensors)
        return {name: each for name, each in found.items() if each.is_floating_point()}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While the module is called: by blocks, if it can be called so with the first example."""
        [first, *_] = self.examples.values()
        with self.network.opened(), explain_memory():
            self.choose_way(self.make_streams(first[:1])[0].batch)
            yield

    def choose_way(self, batch: Any) -> None:
        self.network.choose_way(self.load, batch)

    def explain_left(self, parameter: str) -> str:
        """Why a matrix is not to be matched, or ""."""
        name = self.names.find_tensor(parameter)
        if not name:
            return MANY
        return explain_unmatched(self.rows.get(name), parameter in self.tied, self.config)

    def match(self, participants: Sequence[Participant]) -> Iterator[Matched]:
        """Of each segment, what is solved is gone at the next."""
        walk = Walk(
            self.network,
            self.load,
            participants,
            ridge=self.config.match_ridge or RIDGE,
            excluded=self.explain_left,
            check=self.interrupts.check,
        )
        steps = len(self.network.segments)
        with progress("matching", steps, self.config.verbose) as advance:
            for result in walk.run():
                yield result
                result.solved = dict.fromkeys(result.solved, torch.empty(0))
                advance(1)

    def match_into(self, keep: Keep, participants: Sequence[Participant]) -> list[Matched]:
        """Match, and keep what is solved, by the names of tensors."""
        results = []
        for result in self.match(participants):
            for name, each in result.solved.items():
                keep(self.names.find_tensor(name), each)
            results.append(result)
        return results

    def scale(
        self, configs: Sequence[DareConfig], solved: Store | None = None, keeps: bool = False
    ) -> Make:
        """Merges that differ in lambda alone, as they would be written. solved: of lambda 1, the
        matrices that were matched; all else is added to it, if it keeps that.
        """
        store: Store = {} if solved is None else solved
        tables = [
            {row.name: row for row in plan_merge(config, self.inputs).tensors} for config in configs
        ]

        def make(parameters: Sequence[str]) -> Iterator[dict[str, Tensor]]:
            names = self.names.list_tensors(parameters)
            known = [name for name in names if name in store]
            base = self.weights.make(BASE, names)
            start = self.weights.make(START, [name for name in names if name not in known])
            for name, each in start.items():
                if keeps and each.is_floating_point():
                    store[name] = each
            start |= {name: store[name] for name in known}
            for rows in tables:
                made = {name: mix(base[name], start[name], rows[name]) for name in names}
                yield self._assemble(parameters, made)

        return make

    @contextmanager
    def judging(self, tests: Streams, count: int) -> Iterator[Judge]:
        """While so many models are judged, with the module opened."""
        for who, streams in tests.items():
            if not any(each.answers is None or each.answers[:, 1:].any() for each in streams):
                raise DareError(
                    f"no answer of {self.titles[who]!r} is among the tokens that are used",
                    "give a larger --max-tokens, or shorter prompts",
                )
        steps = (len(tests) + count) * len(self.network.segments)
        with progress("judging", steps, self.config.verbose) as advance:

            def step() -> None:
                self.interrupts.check()
                advance(1)

            yield Judge(self.network, self.load, tests, self.titles, step)

    def choose_lambda(self, held: Streams, solved: Store | None = None) -> LambdaChoice:
        """The lambda with which the merge is best on examples. solved: matrices that were
        matched.
        """
        skills = {who: own for who, own in held.items() if who != BASE}
        with self.judging(skills, len(LAMBDAS)) as judge:
            scores = judge.score(self.scale(list_lambdas(self.config), solved))
        return LambdaChoice.of(LAMBDAS, scores, judge.describe(scores[0]))

    def compare(
        self,
        held: Streams,
        others: Sequence[str],
        merges: Sequence[DareConfig] = (),
        solved: Store | None = None,
    ) -> Judgement:
        """Judge the base, the models, others by these names, and merges that differ in lambda: of
        several, the best.
        """
        count = len(self.inputs) - 1
        judged = [BASE, *range(count + len(others))]
        with self.judging(held, len(judged) + len(merges)) as judge:
            scores = [judge.score_one(who) for who in judged]
            tried = judge.score(self.scale(merges, solved)) if merges else []
        files = judge.describe(scores[0])
        skills = files[:count]
        costs = [list_costs(row[:count]) for row in scores]
        base, *models = ([score.mean_loss for score in row[:count]] for row in scores[: 1 + count])
        losses = [[row[k] for row in models] for k in range(count)]
        own = [row[k] for k, row in enumerate(losses)]
        has_loss = skills[0].kind != ROWS
        remarks = [*explain_order([e.name for e in skills], base, own, losses)] if has_loss else []
        if others and not remarks:
            remarks.append(explain_best(["base", *others], [costs[0], *costs[1 + count :]]))
        choice = None
        if len(merges) > 1:
            choice = LambdaChoice.of(LAMBDAS, [row[:count] for row in tried], skills)
            tried = [tried[LAMBDAS.index(choice.chosen)]]
        return Judgement(files, (*scores, *tried), choice, tuple(remarks))


def mix(base: Tensor, start: Tensor, row: TensorPlan) -> Tensor:
    """A tensor with its lambda, rounded as it is written."""
    if not start.is_floating_point() or not row.finetuned:
        return start
    before = base.float()
    made = before + row.settings.lambda_coeff * (start.to(base.device) - before)
    return made.to(TORCH_TYPES.get(row.output.dtype, torch.float32)).float()
