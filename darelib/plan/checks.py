"""What cannot be merged: other shapes and types, quantised modules, drops that must see more; and
what a user should know, though nothing is wrong enough to refuse it.
"""

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from darelib.config import DareConfig, Rule, count_layers
from darelib.core.drops import DROPS, NONE, RANDOM, Thinning
from darelib.core.formats import FORMATS, is_counted
from darelib.core.text import DareError, count_of, list_names
from darelib.methods import DEFAULT, METHODS
from darelib.models.checkpoint import (
    QUANTISE_HINT,
    compare_configs,
    module_of,
    quantised_modules,
)
from darelib.models.encodings import Described, TensorInfo
from darelib.models.fp8 import UNREAD_HINTS
from darelib.plan.buffers import AVERAGED, COPIED
from darelib.plan.tensors import TensorPlan

# A longer row would take more memory than all else.
MAX_RANKED: Final = 1 << 20
# What to do about tensors of other shapes: where only the number of rows differs, and elsewhere.
ROWS_HINT: Final = (
    "for added tokens, --tokenizer union keeps them, --mismatch overlap merges the rows that both "
    "have, --mismatch base keeps the base's tensor; otherwise check that this is the right base"
)
WIDTH_HINT: Final = (
    "check that this is the right base; if it is (an inpainting model has more input channels), "
    "--mismatch base keeps the base's tensor and merges the others"
)


class Refusals:
    """Checks models, and what they have of each tensor, against one base."""

    def __init__(self, config: DareConfig, base: Described) -> None:
        self.config = config
        self.base = base
        self._quantised = quantised_modules(base.tensors)

    def check_names(self, model: Described) -> None:
        """Refuse a model that shares less than half of the names with the base: what it has under
        other names would be left out. An adapter has looked for its own.
        """
        common = len(model.tensors.keys() & self.base.tensors.keys())
        fewest = min(len(model.tensors), len(self.base.tensors))
        if common and (model.partial or self.config.any_base or 2 * common >= fewest):
            return
        mine, theirs = (
            list_names([name for name in one.tensors if name not in other.tensors]) or "none"
            for one, other in ((self.base, model), (model, self.base))
        )
        words = f"only {common:,} of its {len(model.tensors):,} tensors" if common else "no tensor"
        insist = "; add --any-base to merge only what both have" if common else ""
        raise DareError(
            f"{model.name!r} has {words} in common with {self.base.name!r}",
            f"the base has {mine}, and it {theirs}{insist}",
        )

    def check_shapes(
        self, name: str, info: TensorInfo, theirs: TensorInfo, model: Described
    ) -> None:
        """Refuse tensors of different shapes, unless the user has said what to do with them and
        that can be done.
        """
        by_rows = len(info.shape) == len(theirs.shape) > 0 and info.shape[1:] == theirs.shape[1:]
        is_allowed = self.config.mismatch == "base" or (
            self.config.mismatch == "overlap" and by_rows
        )
        if info.shape == theirs.shape or is_allowed:
            return
        hint = WIDTH_HINT
        if model.partial:
            hint = "give the model that the adapter was trained on"
        elif by_rows:
            hint = ROWS_HINT
        raise DareError(
            f"tensor {name!r} is {list(info.shape)} in {self.base.name!r} and {list(theirs.shape)} "
            f"in {model.name!r}",
            hint,
        )

    def check_types(
        self, name: str, info: TensorInfo, theirs: TensorInfo, model: Described
    ) -> None:
        mixed = (theirs.dtype in FORMATS) != (info.dtype in FORMATS)
        if mixed and not is_counted(name, (info.dtype, theirs.dtype)):
            raise DareError(
                f"tensor {name!r} is {info.dtype} in {self.base.name!r} and {theirs.dtype} in "
                f"{model.name!r}",
                f"only {', '.join(FORMATS)} tensors can be merged, with one another",
            )

    def check_mask(self, name: str, theirs: TensorInfo, mask_name: str, model: Described) -> None:
        """A packed model's mask was drawn when it was packed, and its head may have been tied then,
        or not.
        """
        known = theirs.encoding.mask_name
        if known not in (None, mask_name):
            raise DareError(
                f"{model.name!r} was packed with {name!r} thinned like {known!r}, and "
                f"now it is merged like {mask_name!r}: the base's configuration says otherwise "
                "about tied embeddings",
                "give the base with the configuration that it had then, or the model itself",
            )

    def check_drop(
        self, name: str, theirs: TensorInfo, model: Described, method: str, thinning: Thinning
    ) -> None:
        """Refuse a drop or a method that must see more of a tensor than there is."""
        needy = {
            f"drop {thinning.drop}": thinning.drop != RANDOM,
            "rescale l1": thinning.restores_sum,
            f"method {method}": theirs.encoding.drop_rate and METHODS[method].sees_dropped,
        }
        what = next((what for what, sees_all in needy.items() if sees_all), None)
        if what and theirs.encoding.mask_name is not None:
            raise DareError(
                f"{model.name!r} is packed, and {what} must see all of {name!r}",
                "give the model itself, or use other settings",
            )
        width = self.base.tensors[name].width
        if thinning.scheme.thresholds and theirs.count and width > MAX_RANKED:
            raise DareError(
                f"drop {thinning.drop} ranks the entries of a row, and those of {name!r} have "
                f"{width:,}, more than {MAX_RANKED:,}",
                f"give it another drop: --rule '{name}:drop=\"{RANDOM}\"'",
            )

    def is_quantised(self, name: str) -> bool:
        info = self.base.tensors.get(name)
        is_part = module_of(name) in self._quantised and not name.endswith("bias")
        return is_part or (info is not None and not info.encoding.merges)

    def check_quantised(self, model: Described, kept: Collection[str]) -> None:
        """Refuse to merge a quantised model with one that is not, or is in another way.

        kept: the folders of a pipeline that are not merged.
        """
        quantised = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = self.base.tensors.get(name)
            if (mine or info).folder in kept:
                continue
            first, second, stored = (model, self.base, info)
            is_odd = module_of(name) in quantised and not name.endswith("bias")
            if self.is_quantised(name):
                first, second, stored = (self.base, model, mine or info)
                is_odd = mine is None or (mine.dtype, mine.shape) != (info.dtype, info.shape)
            if is_odd:
                weight = self.base.tensors.get(f"{module_of(name)}.weight", stored)
                hint = weight.encoding.hint or UNREAD_HINTS.get(stored.dtype, QUANTISE_HINT)
                raise DareError(
                    f"{first.name!r} is quantised, and {second.name!r} is not in the same way: "
                    f"see {name!r}",
                    hint,
                )

    def check_plain(self) -> None:
        """Refuse to write half of a quantised model in another type: it would be neither one nor
        the other.
        """
        weights = [name for name in self.base.tensors if name.endswith("weight")]
        odd = next(filter(self.is_quantised, weights), None)
        is_read = any(info.encoding.kind for info in self.base.tensors.values())
        if self.config.dtype and odd and is_read:
            raise DareError(
                f"{odd!r} of {self.base.name!r} is quantised in a way that is not read, so not all "
                f"can be {self.config.dtype}",
                "leave --dtype out",
            )


def check_kinds(inputs: Sequence[Described]) -> None:
    """Refuse models of another architecture: tensors of the same names and shapes may mean
    something else there.
    """
    base, *models = inputs
    for model in models:
        known = {**model.config, **model.base_config}
        for key, words in compare_configs(base.config, known).items():
            if key.endswith("model_type"):
                raise DareError(
                    f"{model.name!r} is another kind of model than {base.name!r}: {words}",
                    "give the base that it was fine-tuned from, or add --any-base if you know that "
                    "they fit",
                )


def check_rules(config: DareConfig, tensors: Sequence[TensorPlan]) -> None:
    """Refuse a rule that would thin what is no weight, where it is for nothing else."""
    weights = {id(tensor.rule) for tensor in tensors if not tensor.buffer}
    for tensor in tensors:
        rule = tensor.rule
        if rule and rule.drop_rate not in (None, 0) and id(rule) not in weights:
            number = next(k for k, each in enumerate(config.typed_rules, 1) if each is rule)
            raise DareError(
                f"rule {number} drops entries of {tensor.name!r}, which is no weight: it is "
                f"{tensor.buffer}",
                "leave drop_rate out of that rule; weights and lambda_coeff apply to what is "
                "averaged, and lambda_coeff = 0 keeps the base's",
            )


# --- warnings ------------------------------------------------------------------------------------


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
            f"rescale is off: with {most.drop_rate:g} of a delta dropped, what is left is "
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
                f"{first} and {models[i].name} have one seed, {seed}, so that the same entries are "
                "dropped of both; give another --seed, or if it is a packed one's, pack that again "
                "with another"
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
    """What defaults, which are made for fine-tunes, do to adapters, and what adds them whole."""
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
        yield f"{name} has {count} that the base lacks: {list_names(extra)}; ignored"


def find_samples(inputs: Sequence[Described]) -> Iterator[str]:
    for model in inputs:
        if any(info.encoding.share < 1 for info in model.tensors.values()):
            yield (
                f"{model.name} is packed, so its figures are those of the entries that it holds, a "
                "random sample"
            )


def explain_unused(rule: Rule, base: Described) -> str:
    if any(map(rule.matches, base.tensors)):
        return "matches only tensors that an earlier rule takes, or that are copied from the base"
    for pattern in rule.match:
        if fnmatch.filter(base.tensors, f"*{pattern}*"):
            return f"matches no tensor; did you mean {f'*{pattern}*'!r}?"
    return "matches no tensor"
