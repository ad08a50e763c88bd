# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Merge state dicts in memory, on a GPU if there is one, and time it.

    uv run examples/in_memory.py --parameters 1e9

First a small model is merged by every method on the CPU and on the device, and the bits are compared; then one of the
given size, in bf16 with two fine-tunes, is merged on the device.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

from dare import DareConfig, dare_merge

CONFIGS = {
    "linear": DareConfig(drop_rate=0.9),
    "ties": DareConfig(drop_rate=0.9, method="ties"),
    "ties with trim": DareConfig(drop_rate=0.5, method="ties", keep_ratio=0.5),
    "slerp": DareConfig(drop_rate=0.9, method="slerp"),
}
HIDDEN = 4096


def make_models(parameters: float, dtype: torch.dtype, device: str, count: int = 2) -> list[dict[str, torch.Tensor]]:
    """A base and fine-tunes with small random deltas, as square layers of 4096 and a rest."""
    generator = torch.Generator(device).manual_seed(0)
    layers, rest = divmod(int(parameters), HIDDEN * HIDDEN)
    shapes = {f"layer.{k}.weight": (HIDDEN, HIDDEN) for k in range(layers)} | {"rest": (rest,)}
    base = {
        name: (torch.randn(shape, generator=generator, device=device) * 0.02).to(dtype)
        for name, shape in shapes.items()
    }
    models = [base]
    for _ in range(count):
        models.append(
            {
                name: (tensor + torch.randn(tensor.shape, generator=generator, device=device) * 0.001).to(dtype)
                for name, tensor in base.items()
            }
        )
    return models


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compare(device: str) -> bool:
    """Whether the device gives the CPU's bits, for every method and type."""
    equal = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        models = make_models(300_001, dtype, "cpu")
        there = [{name: tensor.to(device) for name, tensor in model.items()} for model in models]
        for name, config in CONFIGS.items():
            here, other = digest(dare_merge(models[0], models[1:], config)), dare_merge(there[0], there[1:], config)
            equal &= here == digest(other)
            print(f"{dtype!s:15} {name:15} {'equal' if here == digest(other) else 'DIFFERENT'}  {here[:16]}")
    return equal


def measure(models: list[dict[str, torch.Tensor]], config: DareConfig, device: str, repeat: int = 3) -> float:
    """The best time of some merges, in seconds; the first, which warms the device up, is not counted."""
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        dare_merge(models[0], models[1:], config)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e7, help="size of the model to time (default 1e7)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help=f"where to merge (default here: {device})")
    arguments = parser.parse_args()
    equal = compare(arguments.device)
    models = make_models(arguments.parameters, torch.bfloat16, arguments.device)
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    print(f"\n{arguments.parameters:.3g} parameters in bf16, two fine-tunes, on {where}, torch {torch.__version__}")
    for name, config in CONFIGS.items():
        print(f"{name:15} {measure(models, config, arguments.device):8.3f} s")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
