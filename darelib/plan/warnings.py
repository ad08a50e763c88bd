"""What a user should know of a merge before it runs, though nothing is wrong enough to refuse
it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from darelib.config import DareConfig, Rule
from darelib.core.drops import DROPS, NONE
from darelib.core.gradients import count_layers
from darelib.core.text import count_of, list_names
from darelib.models.checkpoint import compare_configs
from darelib.models.tensors import Described
from darelib.plan.matching import Matcher
from darelib.plan.tensors import TensorPlan


def find_odd_settings(
    config: DareConfig, inputs: Sequence[Described], tensors: Sequence[TensorPlan]
) -> Iterator[str]:
    used = {id(tensor.rule) for tensor in tensors}
    for k, rule in enumerate(config.typed_rules, 1):
        if id(rule) not in used:
            yield f"rule {k} ({list_names(rule.match)}) {explain_unused(rule, inputs[0])}"
    settings = {id(tensor.settings): tensor.settings for tensor in tensors}.values()
    thinnings = {thinning for each in settings for thinning in each.thinnings}
    weak = [t for t in thinnings if t.rescale == NONE != DROPS[t.drop].rescale and t.drop_rate > 0]
    if weak:
        most = max(weak, key=lambda thinning: thinning.drop_rate)
        yield (
            f"rescale is off: with {most.drop_rate:g} of a delta dropped, what is left is "
            f"{1 / most.keep_rate:.3g} times too weak"
        )
    if config.has_gradients and not count_layers(inputs[0].tensors):
        yield (
            "no tensor's name has the number of a layer in it, so each gradient has its first "
            "value everywhere"
        )


def explain_unused(rule: Rule, base: Described) -> str:
    if any(map(rule.matches, base.tensors)):
        return "matches only tensors that an earlier rule takes"
    for pattern in rule.match:
        if fnmatch.filter(base.tensors, f"*{pattern}*"):
            return f"matches no tensor; did you mean {f'*{pattern}*'!r}?"
    return "matches no tensor"


def find_odd_seeds(seeds: Sequence[int], inputs: Sequence[Described]) -> Iterator[str]:
    models = inputs[1:]
    for i, seed in enumerate(seeds):
        if seed in seeds[:i]:
            first = models[seeds.index(seed)].name
            yield (
                f"{first} and {models[i].name} have one seed, {seed}, so that the same entries are "
                "dropped of both; use another --seed, or pack again with one"
            )


def find_odd_inputs(config: DareConfig, inputs: Sequence[Described]) -> Iterator[str]:
    base, *models = inputs
    for i, model in enumerate(models):
        if model.is_same_as(base) and not config.averages:
            yield f"{model.name} is the base itself, given as a model to merge"
        if any(model.is_same_as(earlier) for earlier in models[:i]):
            yield f"{model.name} is given more than once; each time counts fully"
        if differences := compare_configs(base.config, model.config):
            yield (
                f"{model.name} is configured differently from {base.name}: "
                f"{', '.join(differences.values())}; check that it was fine-tuned from it"
            )


def find_odd_names(inputs: Sequence[Described], matcher: Matcher) -> Iterator[str]:
    for i, model in enumerate(inputs[1:]):
        if missing := matcher.missing(i):
            count = count_of(len(missing), "tensor")
            yield f"{model.name} lacks {count} of the base: {list_names(missing)}; unchanged"
        if extra := matcher.extra(i):
            count = count_of(len(extra), "tensor")
            yield f"{model.name} has {count} that the base lacks: {list_names(extra)}; ignored"


def find_samples(inputs: Sequence[Described]) -> Iterator[str]:
    for model in inputs:
        if any(info.share < 1 for info in model.tensors.values()):
            yield (
                f"{model.name} is packed, so its figures are those of the entries that it holds, a "
                "random sample"
            )
