# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[plot]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Look at the example's models before they are merged: a script that opens as a notebook, too.

uv run examples/analyze_models.py
"""

# %% The models, and the settings that we have in mind
import sys
import tempfile
from pathlib import Path

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, DareError, DareMerger, plot_analysis

models = Path(__file__).resolve().parent / "models"
base, *experts = (models / f"{name}.safetensors" for name in ("base", "rotated", "covered"))
merger = DareMerger(base, experts, DareConfig(drop_rate=0.9, verbose=False))

# %% One pass over all deltas
report = merger.analyze()
for model in report.models:
    total = model.total
    above = f"{total.share_above_threshold:.1%} above 0.002"
    print(f"{model.label}: mean |delta| {total.mean:.2g}, {above}")
    noise = f"{total.relative_noise:.1%} of the weights"
    print(f"  dropping {model.drop_rate:g} adds noise of {noise}; by layer:")
    for layer in model.layers:
        print(f"    {layer.name:<5} {layer.relative_noise:6.1%}")

# %% How the two lie to one another: chance gives a cosine near 0, and half of the signs in conflict
(pair,) = report.pairs
conflict = f"{pair.weighted_sign_conflict:.1%} of what both change"
print(f"cosine {pair.cosine:.3f}; signs conflict in {conflict}")

# %% What follows from that
for advice in report.advice:
    print(f"- {advice}")
print(report.confidence)
print(report.suggestion)

# %% A picture, if matplotlib is there
with tempfile.TemporaryDirectory() as folder:
    picture = Path(folder) / "analysis.png"
    try:
        plot_analysis(report, picture)
        print(f"drew {picture.stat().st_size:,} bytes")
    except DareError as error:
        print(f"no picture: {error}; {error.hint}")

# %% And what the merge would do
with tempfile.TemporaryDirectory() as folder:
    print(merger.plan(Path(folder) / "merged.safetensors"))
