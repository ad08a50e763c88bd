"""What the figures of an analysis say about how to merge: advice, each with its figure."""

import fnmatch
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import combinations
from typing import Any, Final, NamedTuple

from darelib.commands.analyze.measure import DeltaStats, ModelAnalysis, PairAnalysis, kind_of
from darelib.config import DareConfig, Gradient, Rule, as_toml
from darelib.core.drops import EXPECTATION, is_random
from darelib.core.methods import LINEAR, METHODS, WUDI
from darelib.core.text import count_of, list_names
from darelib.core.tuning import TUNING
from darelib.plan.plan import MergePlan
from darelib.requests.configfile import format_table

# How much a fine-tune may differ from its base, |delta| / |weights| by Euclidean norm. Instruction
# tuning stays well below the first; two models of one shape that have nothing in common are at
# sqrt(2).
RELATED_NORM: Final = 0.15
UNRELATED_NORM: Final = 0.5
BASE_TEXTS: Final = {
    "identical": "{model} is identical to the base and only dilutes an average: leave it out",
    "wrong": "{base} does not look like the base of {model}: {figure}, where unrelated models have "
    "141% and fine-tunes a few percent; find the model that it was trained from",
    "doubtful": "{base} may not be the base of {model}: {figure}, which is more than fine-tuning "
    "usually changes; it was trained for very long, or from another version",
    "unknown": "whether {base} is the base of {model} cannot be told from its deltas, since an "
    "adapter has the same ones on any base: {figure}",
    "right": "the base of {model} looks right: {figure}",
}
# Deltas whose mean is so many times delta_threshold cannot be dropped; those with this share above
# it have a tail.
HUGE_RATIO: Final = 5.0
TAIL_SHARE: Final = 0.05
# By the size of the deltas: what fine-tunes tolerate to be dropped at random, and adapters, which
# hold no more than training needed; why.
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
# Of several models: by the experiment of docs/evidence.md the start that needs no search, with
# nothing dropped but what packed models lack. It was of networks up to so large, whose fine-tunes
# change mostly the same entries.
START_METHOD: Final = WUDI
START_LAMBDAS: Final = {"whole": 1.0, "packed": 0.6}
# What a sweep should try first: also what is best of the plain average, with which it compares.
SEARCHED: Final = {"lambda_coeff": {"low": 0.3, "high": 2.0}}
START_SETTINGS: Final = ("ridge", "norm_limit")  # of that method, which the user may have chosen
LARGEST_TRIED: Final = 312_000_000
LEAST_OVERLAP: Final = 0.5
METHOD_REASONS: Final = {
    "whole": "in this project's experiment 5.8 points ahead of the plain average, each with its "
    "best lambda (3.9 on transformers); it takes longer (--dry-run says how long): if that is too "
    "long, take linear and search its lambda from 0.7 to 2.5",
    "packed": "in this project's experiment ahead of the plain average after dropping, too, by 4.5 "
    "points at 0.5 and 1.8 at 0.9, each with its best lambda; it takes longer (--dry-run says how "
    "long)",
    "weights": "so that your weights mean what they did",
}
WHOLE_TEXT: Final = (
    "drop nothing at first: once lambda was searched for, dropping half at random made no method "
    "better on the whole in this project's experiment (wudi lost 3.7 points, linear 2.2)"
)
LAMBDA_TEXTS: Final = {
    "whole": "a lambda_coeff of 1 to begin with, but first search from 0.3 to 1.5: the best went "
    "from 0.4 to 1.5 by network, in the median; for fine-tunes in each other's way 1 was too much "
    "by far; and the larger it is, the more is forgotten of what the base knew",
    "packed": "a lambda_coeff of 0.6 to begin with, since of packed models much is dropped, but "
    "first search from 0.3 to 1: that is where the best was, in the median; 1 was 10 points behind "
    "the plain average of whole models at a drop rate of 0.5, and 32 at 0.9",
}
KEPT_SETTINGS: Final = (
    "seed",
    "lambda_coeff",
    "dtype",
    "keep_fp8",
    "components",
    "mismatch",
    "any_base",
    "part_of",
    "max_shard_size",
    "delta_threshold",
)


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
    text: str
    rate: Callable[[float], float]  # from that of the others
    match: Callable[[], list[str]]  # patterns, which take long where there are many tensors


class Evidence:
    """What advice rests on, and the choices that follow from it."""

    def __init__(
        self,
        base: str,
        task: MergePlan,
        models: Sequence[ModelAnalysis],
        pairs: Sequence[PairAnalysis],
    ) -> None:
        self.base = base
        self.config = task.config
        self.models = models
        self.parameters = sum(tensor.base.count for tensor in task.tensors if tensor.merged)
        names = {stats.name for model in models for stats in model.tensors if stats.largest}
        changed = [tensor for tensor in task.changed if tensor.name in names]
        self.vectors = [tensor.name for tensor in changed if len(tensor.base.shape) < 2]
        self.matrices = [tensor.name for tensor in changed if len(tensor.base.shape) > 1]
        self.threshold = max(self.config.delta_threshold, sys.float_info.min)
        self.cosine = min((pair.cosine for pair in pairs), default=1.0)
        # Of the worst pair: that some two of many models differ somewhere is likely by chance.
        self.conflict = max((pair.weighted_sign_conflict for pair in pairs), default=0.0)
        self.several = sum(model.total.largest > 0 for model in models) > 1
        self.levels = [find_level(model.total, self.threshold) for model in models]
        self.rates = [
            DROP_RATES[level][0][model.adapter]
            for level, model in zip(self.levels, models, strict=True)
        ]
        # What is packed cannot be merged at a lower drop rate.
        self.least_rates = [0.0] * len(models)
        for tensor in task.tensors:
            for i, info in tensor.finetuned:
                self.least_rates[i] = max(self.least_rates[i], info.drop_rate)
        usable = [*map(max, self.rates, self.least_rates)]
        self.start_rates = self.least_rates if self.several else usable
        self.tensor_rules = tuple(find_tensor_rules(self)) if any(self.rates) else ()
        self.start = choose_start(self)
        is_linear = self.start == "weights" or not self.several
        self.method = LINEAR if is_linear else START_METHOD
        # That of another method is too much or too little here.
        is_own = self.config.method == self.method
        is_set = is_own and self.config.lambda_coeff != DareConfig.lambda_coeff
        self.sets_lambda = self.method == START_METHOD and not is_set
        self.alike = all(map(change_the_same, combinations(models, 2), pairs))


def find_level(total: DeltaStats, threshold: float) -> str:
    if total.mean > threshold:
        return "huge" if total.mean > HUGE_RATIO * threshold else "large"
    return "tailed" if total.share_above_threshold > TAIL_SHARE else "small"


def choose_start(evidence: Evidence) -> str:
    """What several models begin with: as whole ones, as packed ones, or as the user's weights
    mean it.
    """
    config = evidence.config
    scopes: tuple[DareConfig | Rule, ...] = (config, *config.typed_rules)
    if any(scope.weights and method_of(scope, config) != START_METHOD for scope in scopes):
        return "weights"
    return "packed" if any(evidence.least_rates) else "whole"


def method_of(scope: DareConfig | Rule, config: DareConfig) -> str:
    return scope.method or config.method


def change_the_same(models: Sequence[ModelAnalysis], pair: PairAnalysis) -> bool:
    one, other = ({stats.name: stats.parameters for stats in model.tensors} for model in models)
    both = pair.share_both * sum(count for name, count in one.items() if name in other)
    changed = [(1 - model.total.share_zero) * model.total.parameters for model in models]
    return both >= LEAST_OVERLAP * max(changed) or not min(changed)


def find_hot_layers(evidence: Evidence) -> dict[str, float]:
    """The layers in which some model's deltas are large, though they are not on the whole.

    Gives their mean |delta|.
    """
    layers: dict[str, float] = {}
    for model, level in zip(evidence.models, evidence.levels, strict=True):
        for stats in model.layers if level in ("small", "tailed") else ():
            has_matrices = stats.parameters > stats.tensors * 100_000
            is_weighty = stats.parameters * 20 > model.total.parameters
            if stats.mean > evidence.threshold and (has_matrices or is_weighty):
                layers[stats.name] = max(layers.get(stats.name, 0.0), stats.mean)
    return layers if len(layers) <= HOT_LAYERS else {}


def find_tensor_rules(evidence: Evidence) -> Iterator[TensorRule]:
    matrices = evidence.matrices
    if evidence.vectors:
        yield TensorRule(
            verdict="vectors",
            title="norms and biases",
            text="nothing of norms and biases should be dropped: they are "
            f"{count_of(len(evidence.vectors), 'tensor')} of one dimension, with too few values "
            "for what is dropped to average out",
            rate=lambda rate: 0.0,
            match=lambda: make_patterns(evidence.vectors, matrices),
        )
    if embeddings := [name for name in matrices if kind_of(name) == "embedding"]:
        zero, label = max(
            (stats.share_zero, model.label)
            for model in evidence.models
            for stats in model.kinds
            if stats.name == "embedding" and model.total.largest
        )
        rest = f"; {zero:.1%} of those of {label} are unchanged, so the rest carries everything"
        yield TensorRule(
            verdict="embeddings",
            title="embeddings",
            text="less of the embeddings should be dropped "
            f"({count_of(len(embeddings), 'tensor')}): a token's row is all that the model knows "
            f"of it{rest if 0 < zero < 1 else ''}",
            rate=lambda rate: round(max(0.0, rate - 0.2), 2),
            match=lambda: make_patterns(embeddings, set(matrices) - set(embeddings)),
        )
    if hot := find_hot_layers(evidence):
        ends = [(layer, end) for layer in hot for end in (".*", "")]
        yield TensorRule(
            verdict="layers",
            title="layers with large deltas",
            text=f"less of {list_names(list(hot))} should be dropped: the mean |delta| there is up "
            f"to {max(hot.values()):.2g}, above {evidence.threshold:g}, unlike elsewhere",
            rate=lambda rate: min(0.5, rate),
            match=lambda: [escape(layer) + end for layer, end in ends if end or layer in matrices],
        )


def advise_on_base(evidence: Evidence) -> Iterator[Advice]:
    for model in evidence.models:
        norm = model.total.relative_norm
        verdict = ("right", "doubtful", "wrong")[bisect_left((RELATED_NORM, UNRELATED_NORM), norm)]
        if model.adapter:
            verdict = "unknown"
        if not model.total.largest:
            verdict = "identical"
        text = BASE_TEXTS[verdict].format(
            base=evidence.base,
            model=model.label,
            figure=f"its delta is {norm:.2%} of the weights by norm",
        )
        yield Advice("base", verdict, model.label, text)


def advise_on_rates(evidence: Evidence) -> Iterator[Advice]:
    threshold = evidence.threshold
    figures = (evidence.models, evidence.levels, evidence.rates, evidence.least_rates)
    for model, level, rate, least in zip(*figures, strict=True):
        total = model.total
        reason = DROP_RATES[level][1].format(
            mean=f"the mean |delta| is {total.mean:.2g}",
            above=f"{total.share_above_threshold:.1%} are above {threshold:g}",
            ratio=total.mean / threshold,
            threshold=threshold,
        )
        what = "a LoRA adapter, which has less to spare: " if model.adapter and rate else ""
        text = f"{model.label} tolerates a drop rate of {rate:g}: {what}{reason}"
        if total.largest and rate >= least:  # what is packed has no more to be dropped
            yield Advice("drop_rate", level, model.label, text)


def advise_on_choices(evidence: Evidence) -> Iterator[Advice]:
    """What is chosen already: for some tensors, and how to combine."""
    if not evidence.several:
        for rule in evidence.tensor_rules:
            yield Advice("rules", rule.verdict, None, rule.text)
        text = "method linear: no more than one model differs from the base"
        yield Advice("method", LINEAR, None, text)
        return
    most = "up to " if len(evidence.models) > 2 else ""
    opposed = evidence.cosine < OPPOSED_COSINE
    yield Advice(
        "method",
        evidence.method,
        None,
        f"method {evidence.method}: {METHOD_REASONS[evidence.start]}; signs conflict in "
        f"{most}{evidence.conflict:.1%} of what both change, by magnitude; cosine "
        f"{evidence.cosine:.2f}{', so much cancels, whatever the method' if opposed else ''}",
    )
    if not any(evidence.start_rates):
        yield Advice("start", "whole", None, WHOLE_TEXT)
    if evidence.sets_lambda:
        yield Advice("lambda", "start", None, LAMBDA_TEXTS[evidence.start])


def advise_on_balance(evidence: Evidence) -> Iterator[Advice]:
    changed = [model for model in evidence.models if model.total.relative_norm]
    norms = sorted((model.total.relative_norm, model.label) for model in changed)
    if norms and norms[-1][0] > 3 * norms[0][0]:
        least, small = norms[0]
        most, large = norms[-1]
        text = f"the delta of {large} is {most / least:.1f} times that of {small}"
        yield Advice("balance", "uneven", None, f"{text}; weights can balance them")


RULES: Final = (advise_on_base, advise_on_rates, advise_on_choices, advise_on_balance)


def judge_confidence(evidence: Evidence) -> str:
    if doubts := ", and ".join(find_doubts(evidence)):
        return f"How sure: not very, because {doubts}. Let an evaluation decide (dare sweep)."
    return "How sure: fairly; but only an evaluation can tell (dare sweep)."


def find_doubts(evidence: Evidence) -> Iterator[str]:
    whole = [model.total for model in evidence.models if not model.adapter]
    if any(total.relative_norm > RELATED_NORM for total in whole):
        yield "a base is in doubt, and with it all the rest"
    if evidence.several:
        if not evidence.alike:
            yield "fine-tunes that change entries as different were not tried"
        if evidence.parameters > LARGEST_TRIED:
            yield (
                f"what to begin with was tried on models of up to {LARGEST_TRIED:,} parameters; "
                "at 3 to 8 billion, others found little that beats the plain average "
                "(arXiv:2511.21437)"
            )
        return
    for model in evidence.models:
        total = model.total
        ratios = (total.mean / evidence.threshold, total.share_above_threshold / TAIL_SHARE)
        if any(2 / 3 < ratio < 3 / 2 for ratio in ratios):
            yield f"the deltas of {model.label} are close to where the advice changes"
    if evidence.parameters < TUNING.small_model:
        yield (
            "these rules are for models of billions of parameters; one of "
            f"{evidence.parameters:,} tolerates less dropping"
        )


def suggest(evidence: Evidence) -> str:
    """Tables as TOML: what is advised, what else the user has set, and what to search."""
    config = evidence.config
    kept = {key: getattr(config, key) for key in KEPT_SETTINGS} | keep_weights(evidence, config)
    if is_random(config.drop):  # the advice is about that; what goes with others need not fit it
        kept["rescale"] = None if config.rescale in (True, EXPECTATION) else config.rescale
    if evidence.sets_lambda:
        kept["lambda_coeff"] = START_LAMBDAS[evidence.start]
    if evidence.method == config.method == START_METHOD:
        kept |= {key: getattr(config, key) for key in START_SETTINGS}
    dare = {"method": evidence.method, "drop_rate": compact(evidence.start_rates)}
    for key, value in kept.items():
        plain = as_toml(value) if isinstance(value, Gradient | tuple) else value
        if plain != getattr(DareConfig, key):
            dare[key] = plain
    tables = (keep_rule(evidence, rule) for rule in config.typed_rules)
    rules = [("as set before", table) for table in tables if len(table) > 1]
    for found in () if evidence.several else evidence.tensor_rules:
        rates = [*map(max, map(found.rate, evidence.rates), evidence.least_rates)]
        if rates != evidence.start_rates:
            rules.append((found.title, {"match": found.match(), "drop_rate": compact(rates)}))
    texts = [format_table(f"[[rules]]  # {title}", table) for title, table in rules]
    if evidence.several:
        texts.append(format_table("[sweep]  # what to search first", SEARCHED))
    return "\n".join([format_table("[dare]", dare), *texts])


def keep_rule(evidence: Evidence, rule: Rule) -> dict[str, Any]:
    """What stays of a rule of the user's; not its rescale_q, which was for another drop rate."""
    drop = evidence.config.drop if rule.drop is None else rule.drop
    rate = ("drop_rate",) if is_random(drop) and not evidence.several else ()
    keys = ("match", "lambda_coeff", *rate)
    if evidence.method == method_of(rule, evidence.config) == START_METHOD:
        keys += START_SETTINGS
    kept = {key: value for key, value in rule.as_table().items() if key in keys}
    weights = keep_weights(evidence, rule)
    return kept | {key: as_toml(value) for key, value in weights.items() if value is not None}


def keep_weights(evidence: Evidence, given: DareConfig | Rule) -> dict[str, Any]:
    """The user's weights, with the same meaning to linear: shares of a whole are divided by it."""
    kept: dict[str, Any] = {"weights": given.weights or None}
    if evidence.method == LINEAR:  # else there are no weights, or they were for this method
        normalize = evidence.config.normalize if given.normalize is None else given.normalize
        if normalize is None:
            normalize = METHODS[method_of(given, evidence.config)].normalize
        kept["normalize"] = True if normalize and given.weights else given.normalize
    return kept


def compact(values: list[float]) -> float | list[float]:
    return values[0] if len(set(values)) == 1 else values


def make_patterns(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Patterns for some tensors and no others: names, with a star for a number where that fits."""
    starred = {name: re.sub(r"(?<=\.)\d+(?=\.)", "*", escape(name)) for name in names}
    numbered = {pattern for name, pattern in starred.items() if pattern != escape(name)}
    wide = {pattern for pattern in numbered if fnmatch.filter(others, pattern)}
    exact = (escape(name) if pattern in wide else pattern for name, pattern in starred.items())
    return list(dict.fromkeys(exact))
