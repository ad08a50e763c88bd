"""Pictures of the deltas of models, and the parts that pictures of sweeps share."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from darelib.commands.analyze.measure import ModelAnalysis, PairAnalysis
from darelib.core.text import ConfigError, clip, install_hint
from darelib.output.scratch import write_new_file

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
