"""What the example's two scripts share: the network, the images, the two tasks, the accuracy.

The images are scikit-learn's bundled digits (8x8 pixels, 1797 of them), so nothing is downloaded. A
third of them is held out: training never sees those images, in any form, and accuracy is measured
on nothing else.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

try:
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import Tensor, nn
except ModuleNotFoundError as error:
    raise SystemExit(
        f"The example needs torch, safetensors and scikit-learn, and {error.name} is missing."
    ) from None

MODELS = Path(__file__).resolve().parent / "models"

# Wide hidden layers: the wider a layer, the less each single weight has to move, and the better the
# random drops of DARE cancel out. In bfloat16 the file stays under 1 MiB.
WIDTHS = (64, 1024, 384, 10)

# The rotated task turns a digit by an angle in this range; the covered task hides this many columns
# on the right.
DEGREES = (25.0, 45.0)
HIDDEN_COLUMNS = 3

# Accuracy is taken over this many evenly spaced angles per held-out image, so that it does not hang
# on one angle.
COPIES = 10

Split = tuple[Tensor, Tensor]
Task = Callable[[Tensor, Tensor], Tensor]


def network() -> nn.Sequential:
    """The network of base, experts and merges; its tensors are named fc1.weight, fc1.bias, ..."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(WIDTHS), start=1):
        if number > 1:
            layers[f"relu{number - 1}"] = nn.ReLU()
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
    return nn.Sequential(layers)


def load_split() -> tuple[Split, Split]:
    """The training and the held-out (images, labels), pixels in 0..1; always the same split."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target, dtype=torch.long)
    train, test = train_test_split(
        range(len(labels)), test_size=1 / 3, random_state=1, stratify=digits.target
    )
    return (images[train], labels[train]), (images[test], labels[test])


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Turn every image about its centre by its own angle, counter-clockwise."""
    angles = torch.deg2rad(degrees)
    cos = angles.cos()
    sin = angles.sin()
    zero = torch.zeros_like(angles)
    turns = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
    grid = nn.functional.affine_grid(turns, [len(images), 1, 8, 8], align_corners=False)
    return nn.functional.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def rotated(images: Tensor, draws: Tensor) -> Tensor:
    """The first task: digits that lean to one side; draws in 0..1 choose each image's angle."""
    low, high = DEGREES
    return rotate(images, low + (high - low) * draws)


def covered(images: Tensor, draws: Tensor) -> Tensor:
    """The second task: digits whose right side is hidden, always the same columns."""
    result = images.clone()
    result[:, :, -HIDDEN_COLUMNS:] = 0
    return result


TASKS: dict[str, Task] = {"rotated": rotated, "covered": covered}


def held_out() -> dict[str, Split]:
    """Each task's distorted held-out images and their labels, with no chance involved."""
    _, (images, labels) = load_split()
    draws = ((torch.arange(COPIES) + 0.5) / COPIES).repeat_interleave(len(images))
    copies = images.repeat(COPIES, 1, 1)
    return {name: (task(copies, draws), labels.repeat(COPIES)) for name, task in TASKS.items()}


def load_model(path: Path) -> nn.Sequential:
    """Read a safetensors file into the network, as float32; ValueError says why it cannot be."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as a safetensors file ({error}).") from None
    model = network()
    check_tensors(path, tensors, model.state_dict())
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


def check_tensors(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise ValueError unless the tensors are the network's: names, shapes, floating point."""
    if odd := sorted(tensors.keys() ^ expected.keys()):
        state = "lacks" if odd[0] in expected else "has the unknown"
        raise ValueError(f"{path}: not a model of this example, it {state} tensor {odd[0]}.")
    for name, tensor in tensors.items():
        wanted = list(expected[name].shape)
        if list(tensor.shape) != wanted or not tensor.is_floating_point():
            found = f"{list(tensor.shape)} {tensor.dtype}"
            raise ValueError(
                f"{path}: not a model of this example, "
                f"tensor {name} is {found}, not float {wanted}."
            )


def accuracies(model: nn.Module, tests: dict[str, Split]) -> dict[str, float]:
    """The share of right answers on each task, and under "mean" the average of those shares."""
    with torch.inference_mode():
        scores = {
            task: (model(images).argmax(1) == labels).float().mean().item()
            for task, (images, labels) in tests.items()
        }
    return scores | {"mean": math.fsum(scores.values()) / len(scores)}
