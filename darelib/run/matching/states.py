"""State dicts in memory, matched and judged by any torch module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from darelib.config import DareConfig
from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, ConfigError
from darelib.models.states import StateDict
from darelib.output.judged import Judgement
from darelib.plan.plan import plan_merge
from darelib.run.in_memory import merge_tensors
from darelib.run.matching.models import Models, mix
from darelib.run.matching.network import BASE, START, find_names
from darelib.run.matching.walk import Stream, enlist, start_from, summarize

MASK: Final = "attention_mask"
ALONE: Final = DareConfig(drop_rate=0.0, any_base=True, mismatch="base")
State: TypeAlias = Mapping[str, Tensor]


def read_batches(batches: Iterable[Any]) -> list[Stream]:
    """What a module is called with. Padding is what an attention mask says."""
    streams = []
    for given in batches:
        # What tokenizers give is no dictionary.
        plain = dict(given) if isinstance(given, Mapping) else given
        batch = pytree.tree_map(widen, plain)
        mask = batch.get(MASK) if isinstance(batch, Mapping) else None
        streams.append(Stream(batch, None if mask is None or mask.dim() != 2 else mask > 0))
    return streams


def widen(value: Any) -> Any:
    """As the weights are, which are used in float32."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_real else value


class StateWeights:
    """The tensors of state dicts. What one lacks, under all names that it has in the base, is the
    base's.
    """

    def __init__(self, states: dict[int, State], base: StateDict) -> None:
        self.states = states
        self.base = base

    def make(self, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: self._find(self.states[who], name).detach() for name in names}

    def _find(self, own: State, name: str) -> Tensor:
        known = (own[each] for each in (name, *self.base.find_twins(name)) if each in own)
        return next(known, self.states[BASE][name])


class States(Models):
    """A base, models and merges of them in memory."""

    def __init__(
        self,
        model: nn.Module,
        base: State,
        finetuned: Sequence[State],
        batches: Sequence[Iterable[Any]],
        base_batches: Iterable[Any] | None,
        config: DareConfig,
    ) -> None:
        if not finetuned:
            raise ConfigError("there are no models", "give at least one state dict")
        if isinstance(batches, Mapping) or len(batches) != len(finetuned):
            raise ConfigError(
                f"there are batches for {len(batches)} of {len(finetuned)} models",
                "give a list of batches for each model, in the same order",
            )
        if lost := [name for name in find_names(model) if name not in base]:
            raise ConfigError(
                f"the base has no tensor {lost[0]!r}, which the module has",
                "give the state dict of such a module",
            )
        inputs = [StateDict(f"state {k}", each) for k, each in enumerate((base, *finetuned))]
        for state in inputs:
            state.describe()
        self.states = {BASE: base, **dict(enumerate(finetuned))}
        device = next(iter(base.values())).device
        plan = plan_merge(replace(config, verbose=False), inputs)
        weights = StateWeights(self.states, inputs[0])
        super().__init__(model, device, plan, inputs, weights, Interrupts())
        own = [*enumerate(batches), *([] if base_batches is None else [(BASE, base_batches)])]
        self.examples = {who: read_batches(some) for who, some in own}
        self.titles = {who: f"batches {k}" for k, who in enumerate(self.examples)}
        if not all(self.examples.values()):
            raise ConfigError("a model has no batches", "give at least one, of what it can do")


def judge_tensors(
    model: nn.Module,
    base: State,
    finetuned: Sequence[State],
    batches: Sequence[Iterable[Any]],
    merges: Sequence[State],
    base_batches: Iterable[Any] | None = None,
) -> Judgement:
    """Base, models and merges, beside the models on their batches."""
    if isinstance(merges, Mapping):
        raise ConfigError("merges must be a list of state dicts", "put it in brackets")
    models = States(model, base, finetuned, batches, base_batches, ALONE)
    models.states |= dict(enumerate(merges, len(finetuned)))
    _, held = models.divide(False)
    with models.opened():
        return models.compare(held, [f"merge {k}" for k in range(len(merges))])


def match_tensors(
    model: nn.Module,
    base: State,
    finetuned: Sequence[State],
    batches: Sequence[Iterable[Any]],
    config: DareConfig,
    base_batches: Iterable[Any] | None = None,
    out: State | None = None,
) -> dict[str, Tensor]:
    """The merged state dict, matched with what the module is called with."""
    config.check_examples(True)
    models = States(model, base, finetuned, batches, base_batches, config)
    models.states[START] = merge_tensors(base, finetuned, start_from(config).without_examples())
    used, held = models.divide(bool(config.is_auto or config.held_out))
    solved: dict[str, Tensor] = {}

    def keep(name: str, each: Tensor) -> None:
        solved[name] = each.clone()  # in memory that is not pinned

    with models.opened():
        if config.matches:
            LOG.info(str(summarize(models.match_into(keep, enlist(used)))))
        if config.is_auto:
            choice = models.choose_lambda(held, solved)
            LOG.info(str(choice))
            for warning in choice.warnings:
                LOG.warning(warning)
            config = config.settle_lambda(choice.chosen)
    del models.states[START]
    rows = {tensor.name: tensor for tensor in plan_merge(config, models.inputs).tensors}
    merged = merge_tensors(base, finetuned, config.without_examples(), out, warns=False)
    for name, each in solved.items():
        merged[name].copy_(mix(base[name].detach(), each, rows[name]))
    return merged
