# /// script
# requires-python = ">=3.11"
# dependencies = ["torch", "safetensors", "scikit-learn"]
# ///
"""Train the example's models from nothing: a base and two experts, one for each task.

    uv run examples/train_digits.py [--output DIR]

The base learns plain digits, hardly turned and never covered. Each expert starts from the base and
learns one task: `rotated` reads digits that lean, `covered` reads digits whose right side is
hidden. Every seed is fixed, so the same machine and the same torch give the same bytes every time.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from digits import MODELS, TASKS, Split, Task, load_split, network, rotate
from safetensors.torch import save_file
from torch import Tensor, nn

BATCH = 64


@dataclass(frozen=True)
class Recipe:
    """How one training run goes; see BASE and EXPERT for why the numbers are what they are."""

    steps: int
    rate: float
    gentle_rate: float
    smoothing: float
    pull: float


# Strong label smoothing keeps the base unsure of its answers. In a plain average of two models each
# expert's change counts by half only, and half a change can overrule an unsure base but not an
# over-confident one.
BASE = Recipe(steps=200, rate=5e-4, gentle_rate=5e-4, smoothing=0.8, pull=0.0)

# DARE needs small changes: the fewer and the larger the weights that carry a skill, the more a
# random drop destroys. So the learning rate is low, a quadratic pull holds the expert near the
# base, and the tensors with few entries (the biases and the output layer), where dropping leaves
# next to nothing, move slower still.
EXPERT = Recipe(steps=400, rate=1e-4, gentle_rate=3e-5, smoothing=0.5, pull=0.01)
WIDE_TENSORS = {"fc1.weight", "fc2.weight"}


def plain(images: Tensor, draws: Tensor) -> Tensor:
    """What the base learns from: digits turned by at most 15 degrees either way."""
    return rotate(images, 30 * draws - 15)


def fresh_network() -> nn.Sequential:
    """A network with random weights (He initialisation, zero biases), the same on every call."""
    generator = torch.Generator().manual_seed(0)
    model = network()
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(tensor)
        else:
            nn.init.kaiming_normal_(tensor, nonlinearity="relu", generator=generator)
    return model


def squared_distance(model: nn.Module, start: dict[str, Tensor]) -> Tensor:
    """The squared length of the change from where the training started."""
    return torch.stack(
        [(tensor - start[name]).square().sum() for name, tensor in model.named_parameters()]
    ).sum()


def optimizer_for(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Adam with the recipe's rate for the wide tensors and its gentle rate for all others."""
    named = list(model.named_parameters())
    wide = [tensor for name, tensor in named if name in WIDE_TENSORS]
    others = [tensor for name, tensor in named if name not in WIDE_TENSORS]
    return torch.optim.Adam(
        [{"params": wide, "lr": recipe.rate}, {"params": others, "lr": recipe.gentle_rate}]
    )


def batch_source(data: Split, task: Task, seed: int) -> Callable[[], Split]:
    """A function that draws the next random batch of images, distorted anew each time."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Split:
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)
        return task(images[chosen], torch.rand(BATCH, generator=generator)), labels[chosen]

    return draw


def train(
    weights: dict[str, Tensor], data: Split, task: Task, recipe: Recipe, seed: int
) -> dict[str, Tensor]:
    """Train a network that starts from the given weights and return its weights as bfloat16."""
    model = network()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    optimizer = optimizer_for(model, recipe)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=recipe.smoothing)
    draw = batch_source(data, task, seed)
    for _ in range(recipe.steps):
        images, labels = draw()
        loss = loss_of(model(images), labels) + recipe.pull * squared_distance(model, start)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return {name: tensor.detach().bfloat16() for name, tensor in model.named_parameters()}


def write(weights: dict[str, Tensor], path: Path) -> None:
    """Write one model and say so."""
    save_file(weights, path, metadata={"format": "pt"})
    print(f"wrote {path} ({path.stat().st_size:,} bytes)", flush=True)


def main() -> None:
    """Train the three models and write them."""
    parser = argparse.ArgumentParser(description="Train the example's base and its two experts.")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        default=MODELS,
        help="where to write (default: %(default)s)",
    )
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    # One thread: sums are then taken in the same order every time, whatever the number of cores.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    data, _ = load_split()
    base = train(fresh_network().state_dict(), data, plain, BASE, seed=1)
    write(base, output / "base.safetensors")
    for seed, (name, task) in enumerate(TASKS.items(), start=2):
        write(train(base, data, task, EXPERT, seed), output / f"{name}.safetensors")


if __name__ == "__main__":
    main()
