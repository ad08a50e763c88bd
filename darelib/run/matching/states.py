"""State dicts in memory, matched by any torch module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from darelib.config import DareConfig
from darelib.core.text import LOG, ConfigError
from darelib.models.encodings import StateDict
from darelib.plan.plan import plan_merge
from darelib.run.in_memory import merge_tensors
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


def match_tensors(
    model: nn.Module,
    base: Mapping[str, Tensor],
    finetuned: Sequence[Mapping[str, Tensor]],
    batches: Sequence[Iterable[Any]],
    config: DareConfig,
    base_batches: Iterable[Any] | None = None,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The merged state dict, matched with what the module is called with."""
    if isinstance(batches, Mapping) or len(batches) != len(finetuned):
        raise ConfigError(
            f"there are batches for {len(batches)} of {len(finetuned)} models",
            "give a list of batches for each model, in the same order",
        )
    start = merge_tensors(base, finetuned, start_from(config))
    states = {START: start, BASE: base, **dict(enumerate(finetuned))}
    participants = [Participant(i, make_streams(own)) for i, own in enumerate(batches)]
    if base_batches is not None:
        participants.append(Participant(BASE, make_streams(base_batches)))
    if not all(participant.streams for participant in participants):
        raise ConfigError("a model has no batches", "give at least one, of what it can do")
    described = [StateDict(f"state {k}", each) for k, each in enumerate((base, *finetuned))]
    for state in described:
        state.describe()
    plan = plan_merge(config, described)
    rows = {tensor.name: tensor for tensor in plan.tensors}
    if lost := [name for name, _ in model.named_parameters() if name not in rows]:
        raise ConfigError(
            f"the base has no tensor {lost[0]!r}, which the module has",
            "give the state dict of such a module",
        )
    tied = find_tied(model)

    def load(who: int, names: Sequence[str]) -> dict[str, Tensor]:
        found = {name: states[who].get(name, base.get(name)) for name in names}
        return {
            name: each.detach().float()
            for name, each in found.items()
            if each is not None and each.is_floating_point()
        }

    device = next(iter(base.values())).device
    network = Network(model, device)
    solved: dict[str, Tensor] = {}
    results: list[Matched] = []
    with network.opened(), explain_memory():
        network.choose_way(load, participants[0].streams[0].batch)
        walk = Walk(
            network,
            load,
            participants,
            ridge=config.match_ridge or RIDGE,
            excluded=lambda name: explain_unmatched(rows.get(name), name in tied, config),
        )
        for result in walk.run():
            solved |= result.solved
            results.append(result)
    factors = {name: rows[name].settings.lambda_coeff for name in solved}
    # Before out is written, which may be the base.
    matched = scale_changes(base, solved, factors, config.dtype)
    merged = merge_tensors(base, finetuned, config, out, warns=False)
    for name, each in matched.items():
        merged[name] = each if out is None else merged[name].copy_(each)
    LOG.info(str(summarize(results)))
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
