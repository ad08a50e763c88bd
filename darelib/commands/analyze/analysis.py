"""The report of an analysis: advice and tables, a picture, a configuration to try."""

import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.commands.analyze.advice import (
    Verdict,
    choose_case,
    explain_advice,
    judge_confidence,
    may_match,
    suggest,
)
from darelib.commands.analyze.measure import DeltaStats, Findings, ModelAnalysis, PairAnalysis
from darelib.commands.analyze.overlaps import RANKS
from darelib.commands.report import Report, Section, Table
from darelib.core.text import ConfigError, clip, human, install_hint, printable, shorten_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import find_files
from darelib.models.source import Source, download
from darelib.output.destination import check_apart
from darelib.output.new_files import write_new_file
from darelib.plan.plan import MergePlan
from darelib.requests.configfile import STDOUT, check_new_config, check_new_file, write_config
from darelib.requests.request import Request

# Colours that colour-blind people can tell apart (Okabe and Ito, 2008); lines also differ in style,
# for print. More models would not be readable.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES: Final = ("-", "--", "-.", ":", "-", "--")
SUFFIXES: Final = (".png", ".svg", ".pdf")
# A picture shows sizes down to the largest, halved so often; what is smaller counts there.
HALVINGS: Final = 14


def load_figure(path: Path) -> Any:
    """matplotlib's class for a picture at this path; to be called before any work is done for it.

    Not by pyplot, which loads much more and would want a display.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"a plot cannot be written to {str(path)!r}",
            f"its name should end in {', '.join(SUFFIXES)}",
        )
    try:
        from matplotlib import figure
    except ImportError:
        raise ConfigError("plots need matplotlib", install_hint("plot")) from None
    return figure.Figure


def plot_deltas(
    path: Path,
    models: Sequence[ModelAnalysis],
    pairs: Sequence[PairAnalysis],
    threshold: float,
    title: str,
) -> None:
    """Draw |delta| by size, how the models' signs conflict, how much of their changes a low rank
    would keep, and where in the models they are.
    """
    figure_class = load_figure(path)
    if len(models) > len(COLOURS):
        title += f" (the first {len(COLOURS)} of {len(models)} models)"
    models = models[: len(COLOURS)]
    has_energy = any(model.energy for model in models)
    kinds = [0.7 + 0.27 * len(model.kinds) for model in models]
    heights = [3.2, *[0.9 + 0.27 * len(pairs)] * bool(pairs), *[2.4] * has_energy, *kinds]
    figure = figure_class(figsize=(11, sum(heights) + 0.6), layout="constrained")
    first, *others = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    _plot_sizes(first, models, threshold)
    if pairs:
        _plot_conflicts(others.pop(0), pairs)
    if has_energy:
        _plot_energy(others.pop(0), models)
    _plot_layers(figure, others, models)
    figure.suptitle(title)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | Path) -> None:
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=130, format=Path(path).suffix[1:].lower())
    write_new_file(Path(path), [drawn.getvalue()])


def make_label(name: str) -> str:
    """A name that matplotlib shows as it is: no formula, and not left out of a legend."""
    label = clip(name, 24).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def _plot_sizes(axis: Any, models: Sequence[ModelAnalysis], threshold: float) -> None:
    """Shares of the parameters by |delta|, by doublings: finer steps show how floats are stored."""
    highest = math.frexp(max(model.total.largest for model in models))[1]
    edges = 2.0 ** np.arange(highest - HALVINGS, highest + 1)
    for model, colour, line in zip(models, COLOURS, LINES, strict=False):
        sizes, counts = np.array(model.histogram).reshape(-1, 2).T
        axis.hist(
            np.maximum(sizes, edges[0]),
            edges,
            weights=100 * counts / max(model.total.parameters, 1),
            histtype="step",
            label=f"{make_label(model.label)} ({model.total.share_zero:.0%} unchanged)",
            color=colour,
            linestyle=line,
            linewidth=1.8,
        )
    axis.axvline(threshold, color="black", linestyle=":", label=f"threshold {threshold:g}")
    axis.set(
        xscale="log",
        xlabel="|delta|",
        ylabel="% of the parameters",
        title="How large the changes are",
    )
    axis.legend(loc="upper left", fontsize=9)
    axis.grid(alpha=0.3)


def _plot_conflicts(axis: Any, pairs: Sequence[PairAnalysis]) -> None:
    places = range(len(pairs))
    shares = [100 * pair.weighted_sign_conflict for pair in pairs]
    axis.bar_label(axis.barh(places, shares, 0.5, color="0.7"), fmt="%.0f%%", padding=3)
    names = [" and ".join(map(make_label, pair.models)) for pair in pairs]
    axis.set_yticks(places, names, fontsize=9)
    axis.axvline(50, color="black", linestyle=":")
    axis.set(xlim=(0, 100), xlabel="% (chance: 50)")
    axis.set_title("Where both change, signs conflict (by magnitude)")
    axis.grid(alpha=0.3)


def _plot_energy(axis: Any, models: Sequence[ModelAnalysis]) -> None:
    for model, colour, line in zip(models, COLOURS, LINES, strict=False):
        shares = [100 * share for share in model.energy.values()]
        style = {"color": colour, "linestyle": line, "marker": "o"}
        axis.plot(list(model.energy), shares, label=make_label(model.label), **style)
    axis.set(
        xlabel="rank",
        ylabel="% of the squares",
        title="How much of the changes of matrices a low rank would keep",
        ylim=(0, 105),
    )
    axis.legend(loc="lower right", fontsize=9)
    axis.grid(alpha=0.3)


def _plot_layers(figure: Any, axes: Sequence[Any], models: Sequence[ModelAnalysis]) -> None:
    """Mean |delta| by layer and kind. What a model lacks, or did not change, is left white."""
    from matplotlib.colors import LogNorm

    cells = [kinds for model in models for kinds in model.cells.values()]
    means = [mean for kinds in cells for mean in kinds.values() if mean] or [1.0]
    high = max(means)
    # No wider than a factor of 1000, nor so narrow that small differences look large.
    scale = LogNorm(min(high / 10, max(high / 1000, min(means))), high)
    for axis, model in zip(axes, models, strict=True):
        layers = list(model.cells) or ["nothing"]
        kinds = [stats.name for stats in model.kinds] or ["other"]
        columns = [model.cells.get(layer, {}) for layer in layers]
        rows = [[column.get(kind) or math.nan for column in columns] for kind in kinds]
        image = axis.imshow(
            rows, cmap="cividis", norm=scale, aspect="auto", interpolation="nearest"
        )
        every = -(-len(layers) // 32)
        names = [make_label(layer.rpartition(".")[2]) for layer in layers[::every]]
        axis.set_xticks(range(0, len(layers), every), names, fontsize=8)
        axis.set_yticks(range(len(kinds)), kinds, fontsize=9)
        axis.set_title(f"Where {make_label(model.label)} changed", fontsize=10)
    figure.colorbar(image, ax=axes, label="mean |delta|", pad=0.01)


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
VERDICT_TITLES: Final = ["model", "its base", "|delta| / |weights|", "mean |delta|", "may drop"]
PAIR_TITLES: Final = [
    "models",
    "cosine",
    "same space",
    "both change",
    "signs conflict",
    "by magnitude",
]


@dataclasses.dataclass(frozen=True)
class AnalysisReport(Report):
    """What the models are like, and what that says about how to merge them. Prints as tables."""

    base: str
    parameters: int
    copied_tensors: int  # integers and quantised modules, which are not looked at
    delta_threshold: float
    models: tuple[ModelAnalysis, ...]
    pairs: tuple[PairAnalysis, ...]
    verdicts: tuple[Verdict, ...]  # one for each model
    advice: tuple[str, ...]
    confidence: str
    suggestion: str  # a [dare] table and its rules, as TOML
    bytes_read: int
    seconds: float
    warnings: tuple[str, ...]

    def to_dict(self, per_tensor: bool = False) -> dict[str, Any]:
        data = super().to_dict()
        for model in () if per_tensor else data["models"]:
            del model["tensors"]
        return data

    def list_rows(self) -> list[dict[str, Any]]:
        return [
            {"model": model.label} | dataclasses.asdict(stats)
            for model in self.models
            for stats in model.tensors
        ]

    def plot(self, path: str | Path) -> None:
        title = f"What was fine-tuned: {self.parameters:,} parameters"
        plot_deltas(Path(path), self.models, self.pairs, self.delta_threshold, title)

    def text(self, full: bool = False, per_tensor: bool = False) -> str:
        return "\n".join(map(str, self.parts(full, per_tensor)))

    def parts(self, full: bool = False, per_tensor: bool = False) -> list[Section]:
        """full: what each model did by layer and low rank, and how they lie to one another."""
        rate = human(self.bytes_read / max(self.seconds, 1e-9))
        parts: list[Section] = [
            "Advice",
            Table([VERDICT_TITLES, *(verdict.cells for verdict in self.verdicts)], (0, 1)),
            *(f"- {printable(advice)}" for advice in self.advice),
            printable(self.confidence),
            f"\nSuggested settings\n\n{self.suggestion.rstrip()}",
        ]
        for model in self.models:
            groups = {"kind": (dataclasses.replace(model.total, name="all"), *model.kinds)}
            if full:
                groups["layer"] = model.layers
            if per_tensor:
                groups["tensor"] = model.tensors
            for what, stats in groups.items():
                parts += [f"\n{printable(model.label)}, by {what}", list_stats(what, stats)]
        parts.append(
            f"(of |delta|; percentiles within 3.1%; above {self.delta_threshold:g}; < 1%: about "
            "the share below 1% of the largest; norm: |delta| / |weights|; noise: error by "
            "dropping at random, / |weights|)"
        )
        if full:
            parts += [*self._list_energy(), *self._list_pairs()]
        return [*parts, f"\n{human(self.bytes_read)} read in {self.seconds:.2f} s, {rate}/s"]

    def _list_energy(self) -> Iterator[Section]:
        if any(model.energy for model in self.models):
            ranks = [str(rank) for rank in RANKS]
            rows = [["kept at rank", *ranks]]
            for model in self.models:
                cells = [f"{model.energy[rank]:.0%}" if model.energy else "-" for rank in ranks]
                rows.append([printable(model.label), *cells])
            yield from ("", Table(rows))
            yield (
                "(how much of the changes of matrices, by squares, an adapter of a rank would "
                "keep; from a sample, and rather too low than too high)"
            )

    def _list_pairs(self) -> Iterator[Section]:
        if self.pairs:
            rows = [PAIR_TITLES]
            for pair in self.pairs:
                shares = (pair.share_both, pair.sign_conflict, pair.weighted_sign_conflict)
                names = " and ".join(map(printable, pair.models))
                space = "-" if pair.shared_space is None else f"{pair.shared_space:.2f}"
                cells = (f"{share:.1%}" for share in shares)
                rows.append([names, f"{pair.cosine:.3f}", space, *cells])
            yield from ("", Table(rows))
            yield (
                "(same space: whether the rows of the changes of matrices lie in one, from 0 to 1; "
                "signs conflict: of the parameters that both change; 50% is what chance gives a "
                "pair)"
            )


def list_stats(what: str, groups: Sequence[DeltaStats]) -> Table:
    rows = [[what, *COLUMNS]]
    for stats in groups:
        cells = [format(getattr(stats, field), style) for field, style in COLUMNS.values()]
        rows.append([printable(stats.name), *cells])
    return Table(rows)


def report_analysis(
    task: MergePlan, inputs: Sequence[Checkpoint], findings: Findings, seconds: float
) -> AnalysisReport:
    base, *labels = shorten_names([task.base, *task.models])
    models = tuple(
        findings.describe_model(i, label, inputs[1 + i].partial) for i, label in enumerate(labels)
    )
    pairs = findings.compare(labels)
    verdicts = tuple(Verdict.of(model, task.config.delta_threshold) for model in models)
    case = choose_case(task, models)
    matches = may_match(inputs, case)
    parameters = sum(tensor.base.count for tensor in task.tensors if tensor.merged)
    return AnalysisReport(
        base=task.base,
        parameters=parameters,
        copied_tensors=sum(not tensor.merged for tensor in task.tensors),
        delta_threshold=task.config.delta_threshold,
        models=models,
        pairs=pairs,
        verdicts=verdicts,
        advice=tuple(explain_advice(base, verdicts, case, pairs, matches)),
        confidence=judge_confidence(parameters, verdicts, case),
        suggestion=suggest(task, models, verdicts, case, matches),
        bytes_read=findings.bytes_read,
        seconds=seconds,
        warnings=task.warnings,
    )


def plot_analysis(report: AnalysisReport, path: str | Path) -> None:
    """Draw what an analysis found, to a .png, .svg or .pdf file."""
    report.plot(path)


def check_places(
    sources: Sequence[Source], plot: Path | None, config: Path | None, force: bool
) -> None:
    """Refuse places where a picture or a configuration cannot be, before there is any work."""
    if plot is not None:
        load_figure(plot)
        check_new_file(plot, "picture", force)
    if config is not None:
        check_new_config(config, force)
    if plot and config and plot.absolute() == config.absolute():
        raise ConfigError(
            "the picture and the configuration have the same name", "choose another name for one"
        )
    new = [path for path in (plot, config) if path and path != STDOUT]
    for source in [part for each in sources for part in each.parts] if new else ():
        _, layout = find_files(download(source))
        used = [(source.name, place) for place in (layout.folder, *layout.files) if place]
        for path in new:
            check_apart(repr(str(path)), path, used)


def write_suggestion(report: AnalysisReport, request: Request, path: Path) -> None:
    """Write the suggested settings as a complete configuration, with the reasons in comments."""
    lines = [
        "# Suggested by an analysis of the models:",
        *(f"# - {printable(advice)}" for advice in report.advice),
        f"# {printable(report.confidence)}",
        "",
        report.suggestion,
    ]
    write_config(path, "\n".join(lines), request)
