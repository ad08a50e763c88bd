# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "safetensors", "scikit-learn"]
# ///
"""Print how well each model reads the digits of each task, on images that no training ever saw.

    uv run examples/evaluate.py [--json] [MODEL.safetensors ...]

Without models: the base, the two experts, and the merged model if there is one. With --json the
figures are shares from 0 to 1, and for a single model "score" is its mean over the tasks, so that a
search over merge settings can use this script to judge a merge.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path

from digits import MODELS, TASKS, accuracies, held_out, load_model

Scores = dict[str, dict[str, float]]

MERGED = MODELS / "merged.safetensors"
IMAGES = cache(held_out)
HINT = "No merged model yet; make it with: uv run python dare.py --config merge_config.toml"


def default_models() -> list[Path]:
    """The example's own models; the merged one only if it has been made."""
    own = [MODELS / f"{name}.safetensors" for name in ("base", *TASKS)]
    return [*own, MERGED] if MERGED.exists() else own


def names_of(paths: list[Path]) -> list[str]:
    """What to call each model: its file's name, or its whole path where two files share a name."""
    stems = [path.stem for path in paths]
    return [
        stem if stems.count(stem) == 1 else str(path)
        for stem, path in zip(stems, paths, strict=True)
    ]


def score(path: Path) -> dict[str, float]:
    """One model's accuracies and, as "score", their mean: for `dare sweep`."""
    figures = accuracies(load_model(Path(path)), IMAGES())
    return figures | {"score": figures["mean"]}


def score_all(paths: list[Path]) -> Scores:
    """Every model's accuracy on each task, and the mean."""
    # All are read before any is judged, so that a bad file is reported at once.
    models = [load_model(path) for path in paths]
    tests = IMAGES()
    return {
        name: accuracies(model, tests) for name, model in zip(names_of(paths), models, strict=True)
    }


def table(scores: Scores) -> str:
    """The scores in percent, one model to a line."""
    columns = [*TASKS, "mean"]
    width = max(len("model"), *(len(name) for name in scores))
    lines = [f"{'model':{width}}" + "".join(f"{column:>10}" for column in columns)]
    for name, figures in scores.items():
        lines.append(f"{name:{width}}" + "".join(f"{figures[column]:>10.1%}" for column in columns))
    return "\n".join(lines)


def as_json(scores: Scores) -> str:
    """The scores as JSON; a single model's mean also stands at the top as "score"."""
    result: dict[str, object] = {"models": scores}
    if len(scores) == 1:
        (figures,) = scores.values()
        result["score"] = figures["mean"]
    return json.dumps(result, indent=2)


def main() -> int:
    """Judge the models; 0 if all could be, 1 with a sentence on stderr if not."""
    parser = argparse.ArgumentParser(
        description="Accuracy of models on the example's two tasks, on held-out images."
    )
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", type=Path, help="safetensors files (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    try:
        scores = score_all(options.models or default_models())
    except ValueError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 1
    print(as_json(scores) if options.json else table(scores))
    if not options.models and not MERGED.exists():
        # On stderr, so that the output stays a table, or valid JSON, and nothing else.
        print(HINT, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
