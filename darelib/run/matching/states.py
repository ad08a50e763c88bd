"""State dicts in memory, matched and judged by any torch module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from darelib.config import DareConfig
from darelib.core.text import LOG, ConfigError
from darelib.models.encodings import StateDict
from darelib.models.examples import divide
from darelib.output.judged import (
    ROWS,
    JudgedFile,
    Judgement,
    LambdaChoice,
    Scores,
    explain_best,
    list_costs,
)
from darelib.plan.plan import plan_merge
from darelib.run.in_memory import merge_tensors
from darelib.run.matching.judging import LAMBDAS, Judge, Make, Test, list_lambdas
from darelib.run.matching.network import BASE, START, Network
from darelib.run.matching.walk import (
    RIDGE,
    Matched,
    Participant,
    Stream,
    Walk,
    explain_memory,
    explain_unmatched,
    find_tied,
    start_from,
    summarize,
)

MASK = "attention_mask"
State = Mapping[str, Tensor]


def make_streams(batches: Iterable[Any]) -> list[Stream]:
    """What a module is called with. Padding is what an attention mask says."""
    streams = []
    for given in batches:
        batch = pytree.tree_map(widen, given)
        mask = batch.get(MASK) if isinstance(batch, Mapping) else None
        is_plain = mask is not None and mask.dim() == 2
        streams.append(Stream(batch, mask > 0 if mask is not None and is_plain else None))
    return streams


def widen(value: Any) -> Any:
    """As the weights are, which are used in float32."""
    is_real = isinstance(value, Tensor) and value.is_floating_point()
    return value.float() if is_real else value


class States:
    """A base, models and merges of them, as a module can be called with them."""

    def __init__(
        self,
        model: nn.Module,
        base: State,
        finetuned: Sequence[State],
        batches: Sequence[Iterable[Any]],
        base_batches: Iterable[Any] | None,
    ) -> None:
        if not finetuned:
            raise ConfigError("there are no models", "give at least one state dict")
        if isinstance(batches, Mapping) or len(batches) != len(finetuned):
            raise ConfigError(
                f"there are batches for {len(batches)} of {len(finetuned)} models",
                "give a list of batches for each model, in the same order",
            )
        self.base = base
        self.states = {BASE: base, **dict(enumerate(finetuned))}
        self.streams = {who: make_streams(own) for who, own in enumerate(batches)}
        if base_batches is not None:
            self.streams[BASE] = make_streams(base_batches)
        if not all(self.streams.values()):
            raise ConfigError("a model has no batches", "give at least one, of what it can do")
        self.described = [
            StateDict(f"state {k}", each) for k, each in enumerate((base, *finetuned))
        ]
        for state in self.described:
            state.describe()
        if lost := [name for name, _ in model.named_parameters() if name not in base]:
            raise ConfigError(
                f"the base has no tensor {lost[0]!r}, which the module has",
                "give the state dict of such a module",
            )
        self.tied = find_tied(model)
        self.network = Network(model, next(iter(base.values())).device)

    def load(self, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        found = {name: self.states[who].get(name, self.base.get(name)) for name in names}
        return {
            name: each.detach().float()
            for name, each in found.items()
            if each is not None and each.is_floating_point()
        }

    def choose_way(self) -> None:
        self.network.choose_way(self.load, self.streams[0][0].batch)

    def match(self, config: DareConfig, streams: Mapping[int, list[Stream]]) -> Iterator[Matched]:
        """Match what the method gives: the state START."""
        rows = {tensor.name: tensor for tensor in plan_merge(config, self.described).tensors}
        walk = Walk(
            self.network,
            self.load,
            [Participant(who, own) for who, own in streams.items()],
            ridge=config.match_ridge or RIDGE,
            excluded=lambda name: explain_unmatched(rows.get(name), name in self.tied, config),
        )
        yield from walk.run()

    def judge(self, streams: Mapping[int, list[Stream]]) -> Judge:
        return Judge(self.network, self.load, [Test(who, own) for who, own in streams.items()])

    def scale(self, config: DareConfig, solved: State) -> Make:
        """The merge with each lambda."""
        plans = [plan_merge(each, self.described) for each in list_lambdas(config)]

        def make(names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
            base = self.load(BASE, names)
            start = self.load(START, names)
            start |= {name: solved[name] for name in names if name in solved}
            for plan in plans:
                factors = {row.name: row.settings.lambda_coeff for row in plan.tensors}
                yield {
                    name: each + factors[name] * (start[name].to(each.device) - each)
                    for name, each in base.items()
                }

        return make


def describe_files(scores: Scores) -> tuple[JudgedFile, ...]:
    return tuple(
        JudgedFile(f"batches {k}", len(score.tokens), int(score.tokens.sum()), ROWS)
        for k, score in enumerate(scores)
    )


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
    states = States(model, base, finetuned, batches, base_batches)
    count = len(finetuned)
    states.states |= {count + k: each for k, each in enumerate(merges)}
    with states.network.opened(), explain_memory():
        states.choose_way()
        judge = states.judge(states.streams)
        own = [BASE, *range(count + len(merges))]
        scores = tuple(judge.score_one(who) for who in own)
    files = describe_files(scores[0])
    compared = [scores[0], *scores[1 + count :]] if merges else []
    costs = [list_costs(row[:count], files[:count]) for row in compared]
    names = ["base", *(f"merge {k}" for k in range(len(merges)))]
    return Judgement(files, scores, None, tuple(explain_best(names, costs)))


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
    states = States(model, base, finetuned, batches, base_batches)
    states.states[START] = merge_tensors(base, finetuned, start_from(config).without_examples())
    used = states.streams
    held: dict[int, list[Stream]] = {}
    if config.is_auto or config.held_out:
        parts = {who: divide(own, config.judged_share) for who, own in used.items()}
        used = {who: own for who, (own, _) in parts.items()}
        held = {who: own for who, (_, own) in parts.items() if who != BASE}
    solved: dict[str, Tensor] = {}
    with states.network.opened(), explain_memory():
        states.choose_way()
        if config.matches:
            results = []
            for result in states.match(config, used):
                solved |= result.solved
                results.append(result)
            LOG.info(str(summarize(results)))
        if config.is_auto:
            scores = states.judge(held).score(states.scale(config, solved))
            choice = LambdaChoice.of(LAMBDAS, scores, describe_files(scores[0]))
            LOG.info(str(choice))
            for warning in choice.warnings:
                LOG.warning(warning)
            config = config.settle_lambda(choice.chosen)
    rows = {tensor.name: tensor for tensor in plan_merge(config, states.described).tensors}
    factors = {name: rows[name].settings.lambda_coeff for name in solved}
    # Before out is written, which may be the base.
    matched = scale_changes(base, solved, factors, config.dtype)
    merged = merge_tensors(base, finetuned, config.without_examples(), out, warns=False)
    for name, each in matched.items():
        merged[name] = each if out is None else merged[name].copy_(each)
    return merged


def scale_changes(
    base: Mapping[str, Tensor],
    solved: Mapping[str, Tensor],
    factors: Mapping[str, float],
    dtype: str | None,
) -> dict[str, Tensor]:
    """What is solved, with its change from the base multiplied by lambda."""
    found: dict[str, Tensor] = {}
    for factor in dict.fromkeys(factors.values()):
        own = [name for name in solved if factors[name] == factor]
        last = DareConfig(drop_rate=0.0, lambda_coeff=factor, dtype=dtype, any_base=True)
        changed = {name: solved[name].to(base[name].device) for name in own}
        found |= merge_tensors({name: base[name] for name in own}, [changed], last, warns=False)
    return found
