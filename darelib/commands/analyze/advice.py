"""Advice on how to merge, from the figures of an analysis: a few cases, each with its reasons."""

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any, Final, NamedTuple, Self

from darelib.commands.analyze.measure import DeltaStats, ModelAnalysis, PairAnalysis, kind_of
from darelib.config import SETTINGS, DareConfig, Decides, Gradient, Group, Rule, as_toml
from darelib.core.text import clip, printable
from darelib.core.tuning import TUNING
from darelib.methods import DEFAULT, METHOD_SETTINGS, METHODS, RECOMMENDED
from darelib.models.checkpoint import Checkpoint
from darelib.plan.plan import MergePlan
from darelib.requests.configfile import format_table

# How much a fine-tune may differ from its base, |delta| / |weights| by Euclidean norm. Instruction
# tuning stays well below the first; two models of one shape that have nothing in common are at
# sqrt(2).
RELATED_NORM: Final = 0.15
UNRELATED_NORM: Final = 0.5
BASE_TEXTS: Final = {
    "identical": "{model} is identical to the base and only dilutes an average: leave it out",
    "wrong": "{base} does not look like the base of {model}: its delta is {norm:.0%} of the "
    "weights by norm, where unrelated models have 141% and fine-tunes a few percent; find the "
    "model that it was trained from",
    "doubtful": "{base} may not be the base of {model}: its delta is {norm:.0%} of the weights by "
    "norm, which is more than fine-tuning usually changes",
}
# Deltas whose mean is so many times delta_threshold cannot be dropped; those with this share above
# it have a tail.
HUGE_RATIO: Final = 5.0
TAIL_SHARE: Final = 0.05
# By the size of the deltas: what fine-tunes tolerate to be dropped at random, and adapters, which
# hold no more than training needed.
DROP_RATES: Final = {
    "huge": (0.0, 0.0),
    "large": (0.5, 0.5),
    "tailed": (0.8, 0.75),
    "small": (0.9, 0.85),
}
# What a sweep should try first: also what is best of the plain average, with which it compares.
SEARCHED: Final = {"lambda_coeff": {"low": 0.3, "high": 2.0}}
LARGEST_TRIED: Final = 312_000_000  # parameters, in the experiment of docs/evidence.md
DROP_NOTHING: Final = (
    "drop nothing at first: once lambda was searched for, dropping half at random made no method "
    "better on the whole in this project's experiment (wudi lost 3.7 points, linear 2.2)"
)
MATCHING: Final = (
    "with some hundred examples of each skill, answers included, merges kept more of it in this "
    "project's trials: --examples FILE..., one for each model (docs/examples.md)"
)
# What a suggestion has of its own, and what is about one machine.
REPLACED: Final = frozenset(
    name
    for name, row in SETTINGS.items()
    if name in ("method", "drop_rate") or row.group is Group.DROP or row.decides is Decides.NOTHING
)


class Case(NamedTuple):
    """What to begin with, and why."""

    method: str
    lambda_coeff: float | None  # None: what the user has set
    reasons: tuple[str, ...]


# By the experiment of docs/evidence.md, the starts that need no search.
CASES: Final = {
    "one": Case(
        DEFAULT,
        None,
        (
            "method linear: no more than one model differs from the base. Drop what its deltas "
            "tolerate, but nothing of norms, biases and embeddings",
        ),
    ),
    "whole": Case(
        RECOMMENDED,
        1.0,
        (
            "method wudi: in this project's experiment 5.8 points ahead of the plain average, each "
            "with its best lambda (3.9 on transformers). If it takes too long (--dry-run says how "
            "long), take linear and search its lambda from 0.7 to 2.5",
            DROP_NOTHING,
            "lambda_coeff 1 to begin with, but first search from 0.3 to 2: the best of wudi went "
            "from 0.4 to 1.5 by network, and the larger it is, the more the base's own knowledge "
            "suffers",
        ),
    ),
    "packed": Case(
        RECOMMENDED,
        0.6,
        (
            "method wudi: in this project's experiment ahead of the plain average after dropping, "
            "too, by 4.5 points at 0.5 and 1.8 at 0.9, each with its best lambda",
            "lambda_coeff 0.6 to begin with, but first search from 0.3 to 2: much of packed models "
            "is dropped, and 1 was 10 points behind the plain average of whole models at a drop "
            "rate of 0.5, and 32 at 0.9",
        ),
    ),
    "weights": Case(
        DEFAULT, None, ("method linear: so that your weights keep their meaning", DROP_NOTHING)
    ),
}


@dataclass(frozen=True)
class Verdict:
    """Whether a model's base is the right one, and which drop rate its deltas tolerate."""

    model: str
    base: str  # right, doubtful, wrong, identical; of adapters, which fit any base, unknown
    relative_norm: float
    mean: float
    drop_rate: float

    @classmethod
    def of(cls, model: ModelAnalysis, threshold: float) -> Self:
        total = model.total
        limits = (RELATED_NORM, UNRELATED_NORM)
        base = ("right", "doubtful", "wrong")[bisect_left(limits, total.relative_norm)]
        if model.adapter:
            base = "unknown"
        if not total.largest:
            base = "identical"
        rate = DROP_RATES[find_level(total, threshold)][model.adapter]
        return cls(model.label, base, total.relative_norm, total.mean, rate)

    @property
    def cells(self) -> list[str]:
        figures = [f"{self.relative_norm:.2%}", f"{self.mean:.2g}", f"{self.drop_rate:g}"]
        return [clip(self.model), self.base, *figures]


def find_level(total: DeltaStats, threshold: float) -> str:
    if total.mean > threshold:
        return "huge" if total.mean > HUGE_RATIO * threshold else "large"
    return "tailed" if total.share_above_threshold > TAIL_SHARE else "small"


def choose_case(task: MergePlan, models: Sequence[ModelAnalysis]) -> Case:
    config = task.config
    scopes: tuple[DareConfig | Rule, ...] = (config, *config.typed_rules)
    methods = [scope.method or config.method for scope in scopes if scope.weights]
    if sum(model.total.largest > 0 for model in models) < 2:
        return CASES["one"]
    if any(method != RECOMMENDED for method in methods):
        return CASES["weights"]
    return CASES["packed" if any(find_packed_rates(task)) else "whole"]


def may_match(inputs: Sequence[Checkpoint], case: Case) -> bool:
    """Whether examples could help: there are none, and several models that transformers knows."""
    base, *models = inputs
    is_known = "model_type" in base.config
    are_given = any(model.parts[0].examples for model in models)
    return case is not CASES["one"] and is_known and not are_given


def explain_advice(
    base: str,
    verdicts: Sequence[Verdict],
    case: Case,
    pairs: Sequence[PairAnalysis],
    matches: bool,
) -> Iterator[str]:
    """matches: whether examples could help."""
    for verdict in verdicts:
        if verdict.base in BASE_TEXTS:
            text = BASE_TEXTS[verdict.base]
            yield text.format(base=base, model=verdict.model, norm=verdict.relative_norm)
    yield from case.reasons
    if matches:
        yield MATCHING
    if pairs:
        conflict = max(pair.weighted_sign_conflict for pair in pairs)
        cosine = min(pair.cosine for pair in pairs)
        yield (
            f"signs conflict in {'up to ' * (len(pairs) > 1)}{conflict:.1%} of what two models "
            f"change, by magnitude (chance: 50%); cosine {cosine:.2f}"
        )


def find_packed_rates(task: MergePlan, names: Collection[str] | None = None) -> list[float]:
    """The lowest drop rates at which these tensors, or all, can be merged: packed models lack the
    rest.
    """
    rates = [0.0] * len(task.models)
    for tensor in task.tensors:
        for i, info in tensor.finetuned if names is None or tensor.name in names else ():
            rates[i] = max(rates[i], info.drop_rate)
    return rates


def judge_confidence(parameters: int, verdicts: Sequence[Verdict], case: Case) -> str:
    doubts = []
    alone = case is CASES["one"]
    if any(verdict.base in ("doubtful", "wrong") for verdict in verdicts):
        doubts.append("a base is in doubt, and with it all the rest")
    if not alone and parameters > LARGEST_TRIED:
        doubts.append(
            f"what to begin with was tried on models of up to {LARGEST_TRIED:,} parameters; at 3 "
            "to 8 billion, others found little that beats the plain average (arXiv:2511.21437)"
        )
    if alone and parameters < TUNING.small_model:
        doubts.append(
            "these rules are for models of billions of parameters; one of "
            f"{parameters:,} tolerates less dropping"
        )
    sure = f"not very, because {', and '.join(doubts)}." if doubts else "fairly."
    return f"How sure: {sure} Let an evaluation decide (dare sweep)."


def suggest(
    task: MergePlan,
    models: Sequence[ModelAnalysis],
    verdicts: Sequence[Verdict],
    case: Case,
    matches: bool,
) -> str:
    """Tables as TOML: what is advised, what else the user has set, and what to search; as a
    comment, where examples would stand.
    """
    config = task.config
    alone = case is CASES["one"]
    rates = find_packed_rates(task)
    if alone:
        rates = [max(verdict.drop_rate, rates[i]) for i, verdict in enumerate(verdicts)]
    kept = keep_settings(config, config, case)
    is_own = config.method == case.method and config.lambda_coeff != DareConfig.lambda_coeff
    if case.lambda_coeff is not None and not is_own:
        kept["lambda_coeff"] = case.lambda_coeff
    usual = {name: value for name, value in kept.items() if value != getattr(DareConfig, name)}
    dare = {"method": case.method, "drop_rate": compact(rates)} | usual
    texts = [format_table("[dare]", dare)]
    for rule in config.typed_rules:
        if kept := keep_settings(rule, config, case):
            texts.append(format_table("[[rules]]  # as set before", {"match": rule.match} | kept))
    delicate = find_delicate(task, models)
    least = find_packed_rates(task, delicate)
    if alone and delicate and least != rates:
        others = {tensor.name for tensor in task.changed} - {*delicate}
        rule_table = {"match": make_patterns(delicate, others), "drop_rate": compact(least)}
        texts.append(format_table("[[rules]]  # norms, biases and embeddings", rule_table))
    if not alone:
        texts.append(format_table("[sweep]  # what to search first", SEARCHED))
    if matches:
        files = [f"{printable(verdict.model)}.jsonl" for verdict in verdicts]
        table = format_table("[examples]  # of each model's skill", {"files": files})
        texts.append("".join(f"# {line}\n" for line in table.splitlines()))
    return "\n".join(texts)


def find_delicate(task: MergePlan, models: Sequence[ModelAnalysis]) -> list[str]:
    """Tensors of which nothing should be dropped: too few values for it to average out, or a
    token's row, which is all that the model knows of it.
    """
    changed = {stats.name for model in models for stats in model.tensors if stats.largest}
    return [
        tensor.name
        for tensor in task.changed
        if tensor.name in changed
        and (len(tensor.base.shape) < 2 or kind_of(tensor.name) == "embedding")
    ]


def keep_settings(given: DareConfig | Rule, config: DareConfig, case: Case) -> dict[str, Any]:
    """What the user has set, as far as it means the same to what is advised."""
    method = METHODS[given.method or config.method]
    advised = METHODS[case.method]
    kept = {}
    for name in SETTINGS:
        value = getattr(given, name, None)
        fits = name not in METHOD_SETTINGS or (method is advised and name in advised.settings)
        if fits and name not in REPLACED and value is not None:
            kept[name] = as_toml(value) if isinstance(value, Gradient | tuple) else value
    if given.weights and case.method == DEFAULT:  # to others, they may be shares of a whole
        asked = config.normalize if given.normalize is None else given.normalize
        normalize = method.normalize if asked is None else asked
        kept["weights"] = as_toml(given.weights)
        if normalize or given.normalize is not None:
            kept["normalize"] = normalize
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
