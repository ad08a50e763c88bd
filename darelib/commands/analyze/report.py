"""What an analysis gives: plain data that prints as tables."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from darelib.commands.analyze.advice import RULES, Advice, Evidence, judge_confidence, suggest
from darelib.commands.analyze.measure import DeltaStats, Findings, ModelAnalysis, PairAnalysis
from darelib.commands.options import Report
from darelib.core.drops import RANDOM
from darelib.core.text import human, printable, table
from darelib.models.checkpoint import Checkpoint
from darelib.plan.plan import MergePlan

# The columns of the tables: which field of DeltaStats, and its format.
COLUMNS: Final = {
    "parameters": ("parameters", ","),
    "zero": ("share_zero", ".1%"),
    "mean": ("mean", ".2g"),
    "std": ("standard_deviation", ".2g"),
    "largest": ("largest", ".2g"),
    "p50": ("p50", ".2g"),
    "p95": ("p95", ".2g"),
    "p99": ("p99", ".2g"),
    "above": ("share_above_threshold", ".1%"),
    "< 1%": ("share_below_1_percent", ".1%"),
    "norm": ("relative_norm", ".2g"),
    "noise": ("relative_noise", ".2g"),
}


@dataclass(frozen=True)
class AnalysisReport(Report):
    """What the models are like, and what that says about how to merge them. Prints as tables."""

    base: str
    parameters: int
    copied_tensors: int  # integers and quantised modules, which are not looked at
    delta_threshold: float
    models: tuple[ModelAnalysis, ...]
    pairs: tuple[PairAnalysis, ...]
    # Between any two of the models, of the parameters that at least two of them change.
    sign_conflict: float
    weighted_sign_conflict: float
    advice: tuple[Advice, ...]
    confidence: str
    suggestion: str  # a [dare] table and its rules, as TOML
    bytes_read: int
    seconds: float
    warnings: tuple[str, ...]

    def as_dict(self, per_tensor: bool = False) -> dict[str, Any]:
        data = super().as_dict()
        for model in () if per_tensor else data["models"]:
            del model["tensors"]
        return data

    def text(self, per_tensor: bool = False) -> str:
        parts = [self._models()]
        for model in self.models:
            groups = [("kind", model.kinds), ("layer", model.layers), ("tensor", model.tensors)]
            for what, stats in groups if per_tensor else groups[:2]:
                parts.append(f"{printable(model.label)}, by {what}\n{stats_table(what, stats)}")
        if self.pairs:
            parts.append(self._pairs())
        advice = "\n".join(f"- {printable(advice.text)}" for advice in self.advice)
        rate = human(self.bytes_read / max(self.seconds, 1e-9))
        parts += [
            f"Advice\n{advice}\n{printable(self.confidence)}",
            f"Suggested settings\n\n{self.suggestion.rstrip()}",
            f"{human(self.bytes_read)} read in {self.seconds:.2f} s, {rate}/s",
        ]
        return "\n\n".join(parts)

    __str__ = text

    def _models(self) -> str:
        lines = [
            stats_table("model", [model.total for model in self.models]),
            f"(of |delta|; percentiles within 3.1%; above {self.delta_threshold:g}; < 1%: about "
            "what is below 1% of the largest; norm: |delta| / |weights|; noise: what dropping "
            "adds, / |weights|)",
        ]
        for model in self.models:
            other = f"at random, instead of by {model.drop}, would"
            would = "is expected to" if model.drop == RANDOM else other
            lines.append(
                f"{printable(model.label)}: dropping {model.drop_rate:g} {would} add noise of "
                f"{model.expected_noise:.3g} times its delta, which is "
                f"{model.total.relative_noise:.3g} of the weights"
            )
        return "\n".join(lines)

    def _pairs(self) -> str:
        rows = [["models", "cosine", "both change", "signs conflict", "by magnitude"]]
        for pair in self.pairs:
            shares = (pair.share_both, pair.sign_conflict, pair.weighted_sign_conflict)
            names = " and ".join(map(printable, pair.models))
            rows.append([names, f"{pair.cosine:.3f}", *(f"{share:.1%}" for share in shares)])
        if len(self.models) > 2:
            chance = f"any two (by chance: {1 - 2.0 ** (1 - len(self.models)):.1%})"
            conflicts = [f"{self.sign_conflict:.1%}", f"{self.weighted_sign_conflict:.1%}"]
            rows.append([chance, "", "", *conflicts])
        return (
            f"{table(rows)}\n(signs conflict: of the parameters that both change; 50% is what "
            "chance gives a pair)"
        )


def stats_table(what: str, groups: Sequence[DeltaStats]) -> str:
    rows = [[what, *COLUMNS]]
    for stats in groups:
        cells = [format(getattr(stats, field), style) for field, style in COLUMNS.values()]
        rows.append([printable(stats.name), *cells])
    return table(rows)


def shorten_names(names: Sequence[str]) -> list[str]:
    """What to call models in tables: the last parts of their paths, as many as tell them apart."""
    plain = [
        name.replace(os.sep, "/").removesuffix("/").removesuffix(".safetensors") for name in names
    ]
    for parts in range(1, 4):
        short = ["/".join(name.split("/")[-parts:]) for name in plain]
        if len(set(short)) == len(set(names)):
            return short
    return list(names)


def report_analysis(
    task: MergePlan, inputs: Sequence[Checkpoint], findings: Findings, seconds: float
) -> AnalysisReport:
    base, *labels = shorten_names([task.base, *task.models])
    models = tuple(
        findings.describe_model(i, label, inputs[1 + i].partial) for i, label in enumerate(labels)
    )
    pairs, any_two = findings.compare(labels)
    evidence = Evidence(base, task, models, pairs)
    return AnalysisReport(
        base=task.base,
        parameters=evidence.parameters,
        copied_tensors=sum(not tensor.merged for tensor in task.tensors),
        delta_threshold=task.config.delta_threshold,
        models=models,
        pairs=pairs,
        sign_conflict=any_two.sign_conflict,
        weighted_sign_conflict=any_two.weighted_sign_conflict,
        advice=tuple(advice for rule in RULES for advice in rule(evidence)),
        confidence=judge_confidence(evidence),
        suggestion=suggest(evidence),
        bytes_read=findings.bytes_read,
        seconds=seconds,
        warnings=task.warnings,
    )
