"""What the figures of an analysis say about how to merge: advice, each with its figure."""

import fnmatch
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any, Final, NamedTuple

from darelib.commands.analyze.measure import DeltaStats, ModelAnalysis, PairAnalysis, kind_of
from darelib.config import CHECKS, DareConfig, Gradient, Rule, as_toml
from darelib.core.drops import DROP_SETTINGS, EXPECTATION, is_random
from darelib.core.text import count_of
from darelib.core.tuning import TUNING
from darelib.methods import DEFAULT, METHOD_SETTINGS, METHODS, RECOMMENDED
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
# Of several models: by the experiment of docs/evidence.md the start that needs no search, with
# nothing dropped but what packed models lack.
START_METHOD: Final = RECOMMENDED
START_LAMBDAS: Final = {"whole": 1.0, "packed": 0.6}
# What a sweep should try first: also what is best of the plain average, with which it compares.
SEARCHED: Final = {"lambda_coeff": {"low": 0.3, "high": 2.0}}
LARGEST_TRIED: Final = 312_000_000  # parameters, in that experiment
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
# What a suggestion has of its own, and what is about one machine.
REPLACED: Final = frozenset(
    {
        *("method", "drop_rate", "drop", *DROP_SETTINGS, "rescale", "rescale_q"),
        *("threads", "engine", "verbose"),
    }
)


@dataclass(frozen=True)
class Advice:
    """One piece of advice, with its reason."""

    about: str  # base, drop_rate, rules, method, start or lambda
    verdict: str
    model: str | None  # None: all of them
    text: str


class TensorRule(NamedTuple):
    """Tensors of which less should be dropped than of the others."""

    verdict: str
    title: str
    text: str
    match: list[str]  # patterns
    rates: list[float]  # one for each model


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
        self.threshold = self.config.delta_threshold
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
        self.packed_rates = {
            tensor.name: {i: info.encoding.drop_rate for i, info in tensor.finetuned}
            for tensor in task.tensors
        }
        self.least_rates = self.limit_rates([0.0] * len(models))
        self.start_rates = self.least_rates if self.several else self.limit_rates(self.rates)
        # Of several models nothing more is dropped, of any tensor.
        has_rules = any(self.rates) and not self.several
        found = find_tensor_rules(self) if has_rules else ()
        self.tensor_rules = tuple(rule for rule in found if rule.rates != self.start_rates)
        self.start = choose_start(self)
        is_linear = self.start == "weights" or not self.several
        self.method = DEFAULT if is_linear else START_METHOD
        # That of another method is too much or too little here.
        is_own = self.config.method == self.method
        is_set = is_own and self.config.lambda_coeff != DareConfig.lambda_coeff
        self.sets_lambda = self.method == START_METHOD and not is_set

    def limit_rates(self, rates: Sequence[float], match: Sequence[str] = ("*",)) -> list[float]:
        """The lowest from these up at which the tensors that match can be merged."""
        rule = Rule(tuple(match), drop_rate=0.0)
        packed = [own for name, own in self.packed_rates.items() if rule.matches(name)]
        return [max([rate, *(own.get(i, 0.0) for own in packed)]) for i, rate in enumerate(rates)]


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
    weighted = [scope for scope in scopes if scope.weights]
    if any((scope.method or config.method) != START_METHOD for scope in weighted):
        return "weights"
    return "packed" if any(evidence.least_rates) else "whole"


def find_tensor_rules(evidence: Evidence) -> Iterator[TensorRule]:
    matrices = evidence.matrices
    if evidence.vectors:
        patterns = make_patterns(evidence.vectors, matrices)
        yield TensorRule(
            verdict="vectors",
            title="norms and biases",
            text="nothing of norms and biases should be dropped: they are "
            f"{count_of(len(evidence.vectors), 'tensor')} of one dimension, with too few values "
            "for what is dropped to average out",
            match=patterns,
            rates=evidence.limit_rates([0.0] * len(evidence.models), patterns),
        )
    if embeddings := [name for name in matrices if kind_of(name) == "embedding"]:
        patterns = make_patterns(embeddings, set(matrices) - set(embeddings))
        lower = [round(max(0.0, rate - 0.2), 2) for rate in evidence.rates]
        yield TensorRule(
            verdict="embeddings",
            title="embeddings",
            text="less of the embeddings should be dropped "
            f"({count_of(len(embeddings), 'tensor')}): a token's row is all that the model knows "
            "of it",
            match=patterns,
            rates=evidence.limit_rates(lower, patterns),
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
        yield Advice("method", DEFAULT, None, text)
        return
    most = "up to " if len(evidence.models) > 2 else ""
    yield Advice(
        "method",
        evidence.method,
        None,
        f"method {evidence.method}: {METHOD_REASONS[evidence.start]}; signs conflict in "
        f"{most}{evidence.conflict:.1%} of what both change, by magnitude; cosine "
        f"{evidence.cosine:.2f}",
    )
    if not any(evidence.start_rates):
        yield Advice("start", "whole", None, WHOLE_TEXT)
    if evidence.sets_lambda:
        yield Advice("lambda", "start", None, LAMBDA_TEXTS[evidence.start])


RULES: Final = (advise_on_base, advise_on_rates, advise_on_choices)


def judge_confidence(evidence: Evidence) -> str:
    if doubts := ", and ".join(find_doubts(evidence)):
        return f"How sure: not very, because {doubts}. Let an evaluation decide (dare sweep)."
    return "How sure: fairly; but only an evaluation can tell (dare sweep)."


def find_doubts(evidence: Evidence) -> Iterator[str]:
    whole = [model.total for model in evidence.models if not model.adapter]
    if any(total.relative_norm > RELATED_NORM for total in whole):
        yield "a base is in doubt, and with it all the rest"
    if evidence.several:
        if evidence.parameters > LARGEST_TRIED:
            yield (
                f"what to begin with was tried on models of up to {LARGEST_TRIED:,} parameters; "
                "at 3 to 8 billion, others found little that beats the plain average "
                "(arXiv:2511.21437)"
            )
    elif evidence.parameters < TUNING.small_model:
        yield (
            "these rules are for models of billions of parameters; one of "
            f"{evidence.parameters:,} tolerates less dropping"
        )


def suggest(evidence: Evidence) -> str:
    """Tables as TOML: what is advised, what else the user has set, and what to search."""
    config = evidence.config
    dare = {"method": evidence.method, "drop_rate": compact(evidence.start_rates)}
    kept = keep_settings(evidence, config)
    if evidence.sets_lambda:
        kept["lambda_coeff"] = START_LAMBDAS[evidence.start]
    dare |= {name: value for name, value in kept.items() if value != getattr(DareConfig, name)}
    rules: list[tuple[str, dict[str, Any]]] = []
    for rule in config.typed_rules:
        if kept := keep_settings(evidence, rule):
            rules.append(("as set before", {"match": rule.match} | kept))
    for found in evidence.tensor_rules:
        rules.append((found.title, {"match": found.match, "drop_rate": compact(found.rates)}))
    texts = [format_table(f"[[rules]]  # {title}", table) for title, table in rules]
    if evidence.several:
        texts.append(format_table("[sweep]  # what to search first", SEARCHED))
    return "\n".join([format_table("[dare]", dare), *texts])


def keep_settings(evidence: Evidence, given: DareConfig | Rule) -> dict[str, Any]:
    """What the user has set, as far as it means the same to what is advised."""
    config = evidence.config
    method = METHODS[given.method or config.method]
    advised = METHODS[evidence.method]
    kept = {}
    for name in CHECKS:
        value = getattr(given, name, None)
        fits = name not in METHOD_SETTINGS or (method is advised and name in advised.settings)
        if fits and name not in REPLACED and value is not None:
            kept[name] = as_toml(value) if isinstance(value, Gradient | tuple) else value
    if is_random(given.drop or config.drop):  # what goes with other drops need not fit the advice
        if given.rescale not in (None, True, EXPECTATION):
            kept["rescale"] = given.rescale
        if isinstance(given, Rule) and given.drop_rate is not None and not evidence.several:
            kept["drop_rate"] = as_toml(given.drop_rate)
    if given.weights and evidence.method == DEFAULT:  # to others, they may be shares of a whole
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
