# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Merge the example's models at several drop rates, and see how well each merge does.

uv run examples/drop_rates.py
"""

import sys
import tempfile
from pathlib import Path

from digits import MODELS, TASKS, accuracies, held_out, load_model

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, DareMerger

DROP_RATES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
SEEDS = (1, 11, 21)  # two models use seed and seed + 1, so that these share no mask


def main() -> None:
    base, *experts = (MODELS / f"{name}.safetensors" for name in ("base", *TASKS))
    tests = held_out()
    print(
        f"{'drop rate':>9}"
        + "".join(f"{task:>10}" for task in (*TASKS, "mean"))
        + "   (mean of 3 masks)"
    )
    with tempfile.TemporaryDirectory() as folder:
        merged = Path(folder) / "merged.safetensors"
        for drop_rate in DROP_RATES:
            scores = []
            for seed in SEEDS:
                config = DareConfig(drop_rate=drop_rate, seed=seed, verbose=False)
                DareMerger(base, experts, config).merge(merged, force=True)
                scores.append(accuracies(load_model(merged), tests))
            means = [
                sum(score[column] for score in scores) / len(scores) for column in (*TASKS, "mean")
            ]
            print(f"{drop_rate:>9}" + "".join(f"{mean:>10.1%}" for mean in means))


if __name__ == "__main__":
    main()
