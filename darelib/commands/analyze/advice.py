"""What the figures of an analysis say about how to merge: a table of rules, each with the figure that it rests on."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from darelib.config import DareConfig, Rule, as_toml
from darelib.core.drops import EXPECTATION, RANDOM
from darelib.core.gradients import Gradient
from darelib.core.methods import LINEAR, METHODS, RAM, TensorSettings
from darelib.core.text import count_of, list_names
from darelib.core.tuning import TUNING

if TYPE_CHECKING:
    from darelib.commands.analyze.report import DeltaStats, ModelAnalysis, PairAnalysis
    from darelib.plan.plan import MergePlan

# How much a fine-tune may differ from its base, |delta| / |weights| by Euclidean norm. Instruction tuning stays well
# below the first; two models of one shape that have nothing in common are at sqrt(2).
RELATED_NORM: Final = 0.15
UNRELATED_NORM: Final = 0.5
BASE_TEXTS: Final = {
    "identical": "{model} is identical to the base and only dilutes an average: leave it out",
    "wrong": "{base} does not look like the base of {model}: {figure}, where unrelated models have 141% and fine-tunes "
    "a few percent; find the model that it was trained from",
    "doubtful": "{base} may not be the base of {model}: {figure}, which is more than fine-tuning usually changes; it "
    "was trained for very long, or from another version",
    "unknown": "whether {base} is the base of {model} cannot be told from its deltas, since an adapter has the same "
    "ones on any base: {figure}",
    "right": "the base of {model} looks right: {figure}",
}
# Deltas whose mean is so many times delta_threshold cannot be dropped; those with this share above it have a tail.
HUGE_RATIO: Final = 5.0
TAIL_SHARE: Final = 0.05
# By the size of the deltas: what fine-tunes tolerate to be dropped at random, and adapters, which hold no more than
# training needed; why.
DROP_RATES: Final = {
    "huge": (
        (0.0, 0.0),
        "{mean}, {ratio:.3g} times what dropping tolerates ({threshold:g}): average instead",
    ),
    "large": (
        (0.5, 0.5),
        "{mean}, and {above}: what was learned is in many entries, and dropping more would lose it",
    ),
    "tailed": ((0.8, 0.75), "{mean}, which dropping tolerates, but {above}"),
    "small": ((0.9, 0.85), "{mean} and {above}: dropping tolerates that well"),
}
HOT_LAYERS: Final = 8  # at most; if more of them have large deltas, the model has
OPPOSED_COSINE: Final = -0.1
# Of several models: by the experiment of docs/evidence.md the start that needs no search, with nothing dropped. It was
# of networks up to so large, whose fine-tunes change mostly the same entries. (What only one changes, ram keeps whole.)
START_METHOD: Final = RAM
START_LAMBDA: Final = 1.5
LARGEST_TRIED: Final = 101_000_000
LEAST_OVERLAP: Final = 0.5
FAINT_SHARE: Final = 0.05
METHOD_REASONS: Final = {
    RAM: "significantly ahead of the plain average in both families of this project's experiment",
    "weights": "so that your weights mean what they did",
    "packed": "so that what a packed model lacks does not count",
    "faint": "to ram, a |delta| below {least:g} is none, and too much of a model is below",
}
KEPT_SETTINGS: Final = (
    "seed", "lambda_coeff", "dtype", "mismatch", "any_base", "max_shard_size", "delta_threshold",
)  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """One piece of advice, with its reason."""

    about: str  # base, drop_rate, rules, method, lambda or balance
    verdict: str
    model: str | None  # None: all of them
    text: str


class TensorRule(NamedTuple):
    """Tensors of which less should be dropped than of the others."""

    verdict: str
    title: str
    match: list[str]
    rate: Callable[[float], float]  # from that of the others
    text: str


class Evidence:
    """What advice rests on, and the choices that follow from it."""

    def __init__(
        self,
        base: str,
        task: MergePlan,
        models: Sequence[ModelAnalysis],
        pairs: Sequence[PairAnalysis],
    ) -> None:
        from darelib.commands.analyze.measure import kind_of

        self.base, self.config, self.models = base, task.config, models
        self.parameters = sum(tensor.base.count for tensor in task.tensors if tensor.merged)
        changed = {stats.name for model in models for stats in model.tensors if stats.largest}
        self.vectors = [t.name for t in task.changed if t.name in changed and len(t.base.shape) < 2]
        self.matrices = [
            t.name for t in task.changed if t.name in changed and len(t.base.shape) > 1
        ]
        self.embeddings = [name for name in self.matrices if kind_of(name) == "embedding"]
        self.threshold = max(self.config.delta_threshold, sys.float_info.min)
        self.cosine = min((pair.cosine for pair in pairs), default=1.0)
        # Of the worst pair: that some two of many models differ at a position is likely by chance alone.
        self.conflict = max((pair.weighted_sign_conflict for pair in pairs), default=0.0)
        self.levels = [find_level(model.total, self.threshold) for model in models]
        # What is packed cannot be merged at a lower drop rate.
        self.least_rates = [0.0] * len(models)
        for i, info in (each for tensor in task.tensors for each in tensor.finetuned):
            self.least_rates[i] = max(self.least_rates[i], info.drop_rate)
        self.rates = [
            DROP_RATES[level][0][model.adapter]
            for level, model in zip(self.levels, models, strict=True)
        ]
        self.hot_layers = find_hot_layers(self)
        self.tensor_rules = tuple(find_tensor_rules(self)) if any(self.rates) else ()
        self.several = sum(model.total.largest > 0 for model in models) > 1
        self.start_rates = (
            self.least_rates if self.several else [*map(max, self.rates, self.least_rates)]
        )
        scopes: tuple[DareConfig | Rule, ...] = (self.config, *self.config.typed_rules)
        self.weighted = any(scope.weights for scope in scopes)
        self.reason = choose_method(self)
        self.method = START_METHOD if self.several and self.reason == START_METHOD else LINEAR
        self.alike = all(map(are_alike, combinations(models, 2), pairs)) and all(
            map(is_near, models, self.levels)
        )
        own = self.weighted or any(
            scope.lambda_coeff not in (None, DareConfig.lambda_coeff) for scope in scopes
        )
        self.scales = self.method == START_METHOD and self.alike and not own


def find_level(total: DeltaStats, threshold: float) -> str:
    """How large a model's deltas are."""
    if total.mean > threshold:
        return "huge" if total.mean > HUGE_RATIO * threshold else "large"
    return "tailed" if total.share_above_threshold > TAIL_SHARE else "small"


def choose_method(evidence: Evidence) -> str:
    """What several models begin with, or what speaks for linear."""
    if evidence.weighted and evidence.config.method != START_METHOD:
        return "weights"
    if any(evidence.least_rates):
        return "packed"
    for model in evidence.models if evidence.config.threshold is None else ():
        sizes = [(size, size * count) for size, count in model.histogram]
        faint = sum(share for size, share in sizes if size < TensorSettings.threshold)
        if faint > FAINT_SHARE * sum(share for _, share in sizes):
            return "faint"
    return START_METHOD


def are_alike(models: Sequence[ModelAnalysis], pair: PairAnalysis) -> bool:
    """Whether two models change mostly the same entries."""
    one, other = ({stats.name: stats.parameters for stats in model.tensors} for model in models)
    both = pair.share_both * sum(count for name, count in one.items() if name in other)
    changed = [(1 - model.total.share_zero) * model.total.parameters for model in models]
    return both >= LEAST_OVERLAP * max(changed) or not min(changed)


def is_near(model: ModelAnalysis, level: str) -> bool:
    """Whether a model is as near to its base as fine-tunes are."""
    return level != "huge" and (model.adapter or model.total.relative_norm <= RELATED_NORM)


def find_hot_layers(evidence: Evidence) -> dict[str, float]:
    """The layers in which some model's deltas are large, though they are not on the whole, and their mean |delta|."""
    found: dict[str, float] = {}
    for model, level in zip(evidence.models, evidence.levels, strict=True):
        for stats in model.layers if level in ("small", "tailed") else ():
            matrices = (
                stats.parameters > stats.tensors * 100_000
                or stats.parameters * 20 > model.total.parameters
            )
            if stats.mean > evidence.threshold and matrices:
                found[stats.name] = max(found.get(stats.name, 0.0), stats.mean)
    return found if len(found) <= HOT_LAYERS else {}


def find_tensor_rules(evidence: Evidence) -> Iterator[TensorRule]:
    vectors, embeddings, hot = evidence.vectors, evidence.embeddings, evidence.hot_layers
    if vectors:
        text = (
            f"nothing of norms and biases should be dropped: they are {count_of(len(vectors), 'tensor')} of one "
            "dimension, with too few values for what is dropped to average out"
        )
        match = make_patterns(vectors, evidence.matrices)
        yield TensorRule("vectors", "norms and biases", match, lambda rate: 0.0, text)
    if embeddings:
        stats = (
            (stats, model.label)
            for model in evidence.models
            for stats in model.kinds
            if model.total.largest
        )
        zero, label = max(
            (found.share_zero, label) for found, label in stats if found.name == "embedding"
        )
        rest = (
            f"; {zero:.1%} of those of {label} are unchanged, so the rest carries everything"
            if 0 < zero < 1
            else ""
        )
        count = count_of(len(embeddings), "tensor")
        text = f"less of the embeddings should be dropped ({count}): a token's row is all that the model knows of it{rest}"
        match = make_patterns(embeddings, set(evidence.matrices) - set(embeddings))
        yield TensorRule(
            "embeddings", "embeddings", match, lambda rate: round(max(0.0, rate - 0.2), 2), text
        )
    if hot:
        text = (
            f"less of {list_names(list(hot))} should be dropped: the mean |delta| there is up to "
            f"{max(hot.values()):.2g}, above {evidence.threshold:g}, unlike elsewhere"
        )
        match = [
            f"{escape(layer)}{end}"
            for layer in hot
            for end in (".*", "")
            if end or layer in evidence.matrices
        ]
        yield TensorRule(
            "layers", "layers with large deltas", match, lambda rate: min(0.5, rate), text
        )


def advise_on_base(evidence: Evidence) -> Iterator[Advice]:
    for model in evidence.models:
        norm, is_changed = model.total.relative_norm, model.total.largest > 0
        related = (
            "wrong" if norm > UNRELATED_NORM else "doubtful" if norm > RELATED_NORM else "right"
        )
        related = "unknown" if model.adapter else related
        verdict, figure = (
            related if is_changed else "identical",
            f"its delta is {norm:.2%} of the weights by norm",
        )
        text = BASE_TEXTS[verdict].format(base=evidence.base, model=model.label, figure=figure)
        yield Advice("base", verdict, model.label, text)


def advise_on_rates(evidence: Evidence) -> Iterator[Advice]:
    threshold = evidence.threshold
    for model, level, rate in zip(evidence.models, evidence.levels, evidence.rates, strict=True):
        mean, above = (
            model.total.mean,
            f"{model.total.share_above_threshold:.1%} are above {threshold:g}",
        )
        figures = {
            "mean": f"the mean |delta| is {mean:.2g}",
            "above": above,
            "ratio": mean / threshold,
        }
        reason = DROP_RATES[level][1].format(**figures, threshold=threshold)
        what = "a LoRA adapter, which has less to spare: " if model.adapter and rate else ""
        if model.total.largest:
            text = f"{model.label} tolerates a drop rate of {rate:g}: {what}{reason}"
            yield Advice("drop_rate", level, model.label, text)


def advise_on_choices(evidence: Evidence) -> Iterator[Advice]:
    """What is chosen already: for some tensors, and how to combine."""
    yield from (Advice("rules", rule.verdict, None, rule.text) for rule in evidence.tensor_rules)
    if not evidence.several:
        yield Advice(
            "method", LINEAR, None, "method linear: no more than one model differs from the base"
        )
        return
    most, cancel = (
        "up to " if len(evidence.models) > 2 else "",
        ", so much cancels, whatever the method",
    )
    reason = METHOD_REASONS[evidence.reason].format(least=TensorSettings.threshold)
    text = (
        f"method {evidence.method}: {reason}; signs conflict in {most}{evidence.conflict:.1%} of what both change, by "
        f"magnitude; cosine {evidence.cosine:.2f}{cancel if evidence.cosine < OPPOSED_COSINE else ''}"
    )
    yield Advice("method", evidence.method, None, text)
    if not any(evidence.start_rates):
        text = (
            "drop nothing at first: once lambda was searched for, dropping at random made neither ram nor linear "
            "better in this project's experiment"
        )
        yield Advice("start", "whole", None, text)
    if evidence.scales:
        text = (
            f"a lambda_coeff of {START_LAMBDA:g} to begin with: with that, ram was ahead of the plain average in each "
            "network of the experiment; what was best went from 1.1 to 2.1, in the median, so search for it first"
        )
        yield Advice("lambda", "start", None, text)


def advise_on_balance(evidence: Evidence) -> Iterator[Advice]:
    norms = [
        (model.total.relative_norm, model.label)
        for model in evidence.models
        if model.total.relative_norm
    ]
    (least, small), (most, large) = min(norms, default=(0.0, "")), max(norms, default=(0.0, ""))
    if most > 3 * least:
        text = f"the delta of {large} is {most / least:.1f} times that of {small}; weights can balance them"
        yield Advice("balance", "uneven", None, text)


RULES: Final = (advise_on_base, advise_on_rates, advise_on_choices, advise_on_balance)


def judge_confidence(evidence: Evidence) -> str:
    doubts, count = [], evidence.parameters
    alone = () if evidence.several else evidence.models
    if any(
        model.total.relative_norm > RELATED_NORM and not model.adapter for model in evidence.models
    ):
        doubts.append("a base is in doubt, and with it all the rest")
    for model in alone:
        ratios = (
            model.total.mean / evidence.threshold,
            model.total.share_above_threshold / TAIL_SHARE,
        )
        if any(2 / 3 < ratio < 3 / 2 for ratio in ratios):
            doubts.append(f"the deltas of {model.label} are close to where the advice changes")
    if evidence.several and not evidence.alike:
        doubts.append(
            "fine-tunes that differ as much, from one another or from the base, were not tried"
        )
    if evidence.several and count > LARGEST_TRIED:
        doubts.append(
            f"what to begin with was tried on models of up to {LARGEST_TRIED:,} parameters"
        )
    if alone and count < TUNING.small_model:
        doubts.append(
            f"these rules are for models of billions of parameters; one of {count:,} tolerates less dropping"
        )
    if not doubts:
        return "How sure: fairly; but only an evaluation can tell (dare.py sweep)."
    return f"How sure: not very, because {', and '.join(doubts)}. Let an evaluation decide (dare.py sweep)."


def suggest(evidence: Evidence) -> str:
    """A [dare] table and its rules, as TOML: what is advised, and what else the user has set."""
    import tomli_w

    config = evidence.config
    kept: dict[str, Any] = {key: getattr(config, key) for key in KEPT_SETTINGS}
    kept |= keep_weights(evidence, config)
    if (
        config.drop == RANDOM
    ):  # the advice is about that; what goes with other drops need not go with it
        kept["rescale"] = None if config.rescale in (True, EXPECTATION) else config.rescale
    kept |= {"lambda_coeff": START_LAMBDA} if evidence.scales else {}
    kept |= {"threshold": config.threshold} if evidence.method == RAM else {}
    kept = {
        key: as_toml(value) if isinstance(value, Gradient | tuple) else value
        for key, value in kept.items()
    }
    table = {key: value for key, value in kept.items() if value != getattr(DareConfig, key)}
    text = tomli_w.dumps(
        {"dare": {"method": evidence.method, "drop_rate": compact(evidence.start_rates), **table}}
    )
    own: list[dict[str, Any]] = []
    for rule in config.typed_rules:  # not with a rescale_q, which was found for another drop rate
        random = (
            not evidence.several and (config.drop if rule.drop is None else rule.drop) == RANDOM
        )
        keys = ("match", "lambda_coeff", *["drop_rate"] * random)
        own.append({key: value for key, value in rule.as_table().items() if key in keys})
    for rule, settings in zip(config.typed_rules, own, strict=True):
        settings |= {
            key: as_toml(value)
            for key, value in keep_weights(evidence, rule).items()
            if value is not None
        }
    rules = [("as set before", rule) for rule in own if len(rule) > 1]
    for found in () if evidence.several else evidence.tensor_rules:
        rates = [*map(max, map(found.rate, evidence.rates), evidence.least_rates)]
        if rates != evidence.start_rates:
            rules.append((found.title, {"match": found.match, "drop_rate": compact(rates)}))
    return text + "".join(f"\n[[rules]]  # {title}\n{tomli_w.dumps(rule)}" for title, rule in rules)


def keep_weights(evidence: Evidence, given: DareConfig | Rule) -> dict[str, Any]:
    """The user's weights, with the same meaning to linear: what were shares of a whole are divided by it."""
    if evidence.method != LINEAR:  # so there are none, or they were for it
        return {"weights": given.weights or None}
    normalize = evidence.config.normalize if given.normalize is None else given.normalize
    were_shares = METHODS[evidence.config.method].normalize if normalize is None else normalize
    return {
        "weights": given.weights or None,
        "normalize": True if were_shares and given.weights else given.normalize,
    }


def compact(values: list[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else values


def make_patterns(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Patterns for some tensors and no others: their names, with a star for each number where that fits no other."""
    starred = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", escape(name)) for name in names}
    changed = {pattern for name, pattern in starred.items() if pattern != escape(name)}
    wide = {pattern for pattern in changed if fnmatch.filter(others, pattern)}
    return list(
        dict.fromkeys(
            escape(name) if pattern in wide else pattern for name, pattern in starred.items()
        )
    )


def escape(name: str) -> str:
    """A name as a pattern that matches it alone."""
    return re.sub(r"([*?[])", r"[\1]", name)
