# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Search for the example's best drop rate from Python, cell by cell: a script that editors also open as a notebook.

uv run examples/sweep_settings.py
"""

# %% The models, and how well a merge of them does: any function of a path will do
from pathlib import Path

from digits import MODELS, TASKS, accuracies, held_out, load_model
from sweep import Grid, sweep

base, *experts = (MODELS / f"{name}.safetensors" for name in ("base", *TASKS))
images = held_out()


def score(path: Path) -> float:
    """The mean accuracy over the tasks, on held-out images."""
    return accuracies(load_model(path), images)["mean"]


# %% Every combination, three masks each, beside the average without dropping and each model alone
result = sweep(base, experts, Grid(method=("linear", "ties"), drop_rate=(0, 0.5, 0.9), seeds=3), score)
print(result)

# %% The best, and whether that is more than luck
print(result.best.name, f"{result.best.mean:.4f}", result.distinguishable)
