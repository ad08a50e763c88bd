"""Warnings: what a user should know of a merge that is not refused."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from darelib.config import DareConfig, Rule, count_layers
from darelib.core.drops import DROPS, NONE, RANDOM
from darelib.core.formats import FORMATS
from darelib.core.text import LISTED, count_of, list_names
from darelib.methods import DEFAULT
from darelib.models.checkpoint import compare_configs
from darelib.models.tensor import Described
from darelib.plan.tensorplan import AVERAGED, COPIED, TensorPlan, TensorTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What is read of a component to see whether a fine-tune changed it.
SAMPLED_TENSORS: Final = 16
SAMPLED_VALUES: Final = 1024
# By type: how far a value of this type may be from the same in a finer one, relative to the larger
# of both; and what float16 rounds to nothing.
STEPS: Final = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23, "F64": 2.0**-52}
SMALLEST: Final = 2.0**-24


def list_warnings(
    config: DareConfig,
    inputs: Sequence[Described],
    table: TensorTable,
    seeds: Sequence[int],
    looks_only: bool,
) -> Iterator[str]:
    """All warnings of a plan. looks_only: nothing is merged, so settings need not make sense."""
    base, *models = inputs
    yield from base.warnings
    yield from find_odd_inputs(config, inputs)
    for i, model in enumerate(models):
        yield from find_odd_names(model.name, table.missing[i], table.extra[i])
    if not looks_only:
        yield from find_odd_settings(config, inputs, table.tensors, seeds)
    yield from find_unmerged_changes(table.kept, inputs)
    for i, model in enumerate(models):
        yield from find_odd_shapes(config, model.name, i, table)
        yield from model.warnings
        yield from find_stand_ins(model.name, i, table)
    if looks_only:
        yield from find_samples(inputs)


def find_odd_settings(
    config: DareConfig,
    inputs: Sequence[Described],
    tensors: Sequence[TensorPlan],
    seeds: Sequence[int],
) -> Iterator[str]:
    base, *models = inputs
    used = {id(t.rule) for t in tensors if t.buffer != COPIED or not t.settings.lambda_coeff}
    for k, rule in enumerate(config.typed_rules, 1):
        if id(rule) not in used:
            yield f"rule {k} ({list_names(rule.match)}) {explain_unused(rule, base)}"
    if averaged := [t.name for t in tensors if t.merged and t.buffer == AVERAGED]:
        count = count_of(len(averaged), "running statistic")
        yield f"{count} of the models will be averaged, not thinned: {list_names(averaged)}"
    settings = {id(tensor.settings): tensor.settings for tensor in tensors}.values()
    thinnings = {thinning for each in settings for thinning in each.thinnings}
    weak = [t for t in thinnings if t.rescale == NONE != DROPS[t.drop].rescale and t.drop_rate > 0]
    if weak:
        most = max(weak, key=lambda thinning: thinning.drop_rate)
        yield (
            f"rescale is off: with {most.drop_rate:g} of a delta dropped, the rest is "
            f"{1 / most.keep_rate:.3g} times too weak"
        )
    yield from find_weak_adapters(config, models)
    if not models and (idle := list_idle(config)):
        verb = "have" if len(idle) > 1 else "has"
        yield f"{' and '.join(idle)} {verb} no effect: without models there are no deltas"
    if config.has_gradients and not count_layers(base.tensors):
        yield (
            "no tensor's name has the number of a layer in it, so each gradient has its first "
            "value everywhere"
        )
    for i, seed in enumerate(seeds):
        if seed in seeds[:i]:
            first = models[seeds.index(seed)].name
            yield (
                f"{first} and {models[i].name} have one seed, {seed}, so the same entries of both "
                "are dropped; give another --seed, or pack a packed model again with another seed"
            )


def list_idle(config: DareConfig) -> list[str]:
    """The settings of deltas that ask for something, for all tensors or by a rule."""
    plain: dict[str, tuple[object, ...]] = {
        "drop_rate": (0,),
        "drop": (RANDOM,),
        "rescale": (True,),
        "rescale_q": (),
        "lambda_coeff": (1,),
    }
    holders = (config, *config.typed_rules)
    return [
        name
        for name, values in plain.items()
        if any(getattr(holder, name) not in (None, *values) for holder in holders)
    ]


def find_weak_adapters(config: DareConfig, models: Sequence[Described]) -> Iterator[str]:
    """What the defaults, which are made for fine-tunes, do to adapters; flags that avoid it."""
    adapters = [model.name for model in models if model.partial]
    own = config.general(len(models))
    effects: list[str] = []
    flags: list[str] = []
    drops = config.drop_rate is None and any(own.drop_rates)
    if drops:
        rates = [0 if m.partial else rate for m, rate in zip(models, own.drop_rates, strict=True)]
        effects.append(f"lose {max(own.drop_rates):.0%} of the entries of their change")
        flags.append(f"--drop-rate {' '.join(map(str, rates if any(rates) else rates[:1]))}")
    is_shared = config.weights is None and not config.normalize and len(models) > 1
    if config.method == DEFAULT and is_shared:
        weights = [1 if m.partial else w for m, w in zip(models, own.weights, strict=True)]
        effects.append(f"are weighted by {own.weights[0]:.3g}")
        flags.append(f"--weights {' '.join(f'{weight:.4g}' for weight in weights)}")
    is_baked = config.method == DEFAULT and len(adapters) == len(models)
    if is_baked and drops:
        flags = ["--bake"]
    if adapters and effects:
        yield (
            f"LoRA adapters ({list_names(adapters)}) {' and '.join(effects)}; to bake them at "
            f"strength 1, add {' '.join(flags)}"
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


def find_odd_names(name: str, missing: Sequence[str], extra: Sequence[str]) -> Iterator[str]:
    if missing:
        count = count_of(len(missing), "tensor")
        yield f"{name} lacks {count} of the base: {list_names(missing)}; unchanged"
    if extra:
        count = count_of(len(extra), "tensor")
        yield f"{name} has {count} that the base lacks: {list_names(extra)}; left out"


def find_odd_shapes(config: DareConfig, name: str, i: int, table: TensorTable) -> Iterator[str]:
    merged = {tensor.name for tensor in table.tensors if tensor.merged}
    shapes = [
        f"{own!r} ({list(match.info.shape)})"
        for own in table.mismatched[i]
        for match in table.matches[own]
        if own in merged and match.model == i
    ]
    if shapes:
        is_overlap = config.mismatch == "overlap"
        what = "their common rows are merged" if is_overlap else "the base's are kept"
        more = f" and {len(shapes) - LISTED:,} more" if len(shapes) > LISTED else ""
        yield f"{name} has tensors of other shapes: {', '.join(shapes[:LISTED])}{more}; {what}"


def find_stand_ins(name: str, i: int, table: TensorTable) -> Iterator[str]:
    """Tied weights that a model stores once."""
    for head, matches in table.matches.items():
        for match in matches:
            if match.model == i and match.stand_in:
                yield (
                    f"{name} lacks {head!r}, which is tied to {match.stand_in!r} and merged like it"
                )


def find_samples(inputs: Sequence[Described]) -> Iterator[str]:
    for model in inputs:
        if any(info.share < 1 for info in model.tensors.values()):
            yield (
                f"{model.name} is packed, so its figures are those of a random sample: the entries "
                "that it holds"
            )


def explain_unused(rule: Rule, base: Described) -> str:
    if any(map(rule.matches, base.tensors)):
        return "matches only tensors that an earlier rule takes, or that are copied from the base"
    for pattern in rule.match:
        if fnmatch.filter(base.tensors, f"*{pattern}*"):
            return f"matches no tensor; did you mean {f'*{pattern}*'!r}?"
    return "matches no tensor"


# --- components of a pipeline --------------------------------------------------------------------


def find_unmerged_changes(kept: set[str], inputs: Sequence[Described]) -> Iterator[str]:
    """Models that change a component that is not merged."""
    base, *models = inputs
    for model in models:
        differing = [folder for folder in sorted(kept) if is_changed(folder, base, model)]
        if differing:
            yield (
                f"{model.name} has another {list_names(differing)} than {base.name}, which the "
                "output keeps; --components names all that is to be merged"
            )


def is_changed(folder: str, base: Described, model: Described) -> bool:
    """Whether a model has other values in a folder, by the first values of some tensors."""
    mine = {name: info for name, info in base.tensors.items() if info.folder == folder}
    common = [name for name, info in mine.items() if name in model.tensors and info.count]
    for name in common[:: max(1, len(common) // SAMPLED_TENSORS)]:
        own = mine[name]
        theirs = model.tensors[name]
        if model.partial or own.shape != theirs.shape:
            return True
        if {own.dtype, theirs.dtype} <= FORMATS.keys():
            count = min(SAMPLED_VALUES, own.count)
            samples = [m.sample(name, m.tensors[name], 0, count) for m in (base, model)]
            if differ(samples, {own.dtype, theirs.dtype}):
                return True
    return False


def differ(samples: Sequence[NDArray[Any]], dtypes: Collection[str]) -> bool:
    import numpy as np

    mine, theirs = samples
    if len(dtypes) == 1:
        return not np.array_equal(mine, theirs)
    step = max(STEPS[dtype] for dtype in dtypes)
    return not np.allclose(mine, theirs, rtol=step, atol=SMALLEST)
