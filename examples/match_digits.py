# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Merge the example's models with 256 images of each task, without their labels.

    uv run examples/match_digits.py

Any torch module works like this: match the merge, look how near it is to the models, let the images
choose lambda. The last merge is of tenths, of what each fine-tune changed: DARE dropped the rest.
"""

import sys
from pathlib import Path

import torch
from digits import MODELS, TASKS, accuracies, held_out, load_model, load_split, network

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, dare_evaluate, dare_match, dare_merge, dare_sparsify

COUNT = 256  # images of each task
BATCH = 16


def main() -> None:
    base, *experts = (
        load_model(MODELS / f"{n}.safetensors").state_dict() for n in ("base", *TASKS)
    )
    torch.manual_seed(0)
    (images, _), _ = load_split()
    batches = [
        task(images[torch.randperm(len(images))[:COUNT]], torch.rand(COUNT)).split(BATCH)
        for task in TASKS.values()
    ]
    average = DareConfig(drop_rate=0.0, lambda_coeff="auto", matched=False)
    wudi = DareConfig(method="wudi")
    tenths = [dare_sparsify(base, expert, seed=42 + i) for i, expert in enumerate(experts)]
    whole = DareConfig(drop_rate=0.0)  # nothing more is dropped
    merges = {
        "DARE's defaults": dare_merge(base, experts),
        "wudi": dare_merge(base, experts, wudi),
        "average, lambda auto": dare_match(network(), base, experts, batches, average),
        "wudi, matched": dare_match(network(), base, experts, batches, wudi),
        "tenths, matched": dare_match(network(), base, tenths, batches, whole),
    }
    print(dare_evaluate(network(), base, experts, batches, list(merges.values())), end="\n\n")
    tests = held_out()
    for name, state in {"base": base, **dict(zip(TASKS, experts, strict=True)), **merges}.items():
        model = network()
        model.load_state_dict(state)
        scores = accuracies(model.eval(), tests)
        print(f"{name:20}" + "".join(f"{score:>9.1%}" for score in scores.values()))


if __name__ == "__main__":
    main()
