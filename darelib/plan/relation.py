"""Whether a base is the model that another was fine-tuned from, by what their weights have in
common.
"""

from collections.abc import Sequence
from typing import Final

from darelib.config import DareConfig
from darelib.core.text import DareError
from darelib.models.encodings import Described, TensorInfo
from darelib.plan.plan import MergePlan

# Fine-tuning changes weights by a few percent. Two models that have nothing in common differ by
# sqrt(2) times what either weighs, and by more than the base weighs even if they weigh far less.
UNRELATED_RATIO: Final = 1.0
# A toy may be trained so long that nothing of its base is left: of smaller models, it is a warning.
LEAST_PARAMETERS: Final = 1_000_000
# What is read before there is any work: 1 MiB or so of each model. So many values show a difference
# of one percent.
PAGES: Final = 16
PAGE_VALUES: Final = 1 << 14
# How many of the pages must show it: others may be of tensors that were trained anew.
FAR_PAGES: Final = 12


def check_distance(
    config: DareConfig,
    base: Described,
    model: Described,
    parameters: int,
    delta: float,
    weight: float,
) -> None:
    """Refuse a base that is surely another model's: its weights are farther from a fine-tune's than
    zeros would be. delta and weight: their mean sizes.

    An adapter changes any base alike, and a base of zeros is given on purpose.
    """
    is_certain = not model.partial and parameters >= LEAST_PARAMETERS
    if is_certain and delta > UNRELATED_RATIO * weight > 0 and not config.any_base:
        raise DareError(
            f"{base.name!r} is not the base of {model.name!r}: the mean |delta| is {delta:.3g}, "
            f"and the mean |weight| {weight:.3g}",
            "give the model that it was fine-tuned from, or add --any-base (any_base = true) if "
            "you know that they fit",
        )


def check_sample(plan: MergePlan, inputs: Sequence[Described]) -> None:
    """Refuse such a base before there is any work, where pages of the weights show it."""
    import numpy as np

    base, *models = inputs
    for i, model in enumerate(models):
        # What is packed has the digests of its base.
        common = [] if model.partial or model.seed is not None else list_common(plan, i)
        parameters = sum(mine.count for _, mine, _ in common)
        if plan.config.any_base or parameters < LEAST_PARAMETERS:
            continue
        sizes = np.zeros((PAGES, 2))
        for k in range(PAGES):
            number, rest = divmod(k * len(common), PAGES)
            name, mine, theirs = common[number]
            length = min(PAGE_VALUES, mine.count)
            start = (mine.count - length) * rest // PAGES
            own = base.sample(name, mine, start, length)
            with np.errstate(all="ignore"):  # what is not finite is found by the merge
                delta = model.sample(name, theirs, start, length) - own
                sizes[k] = abs(delta).mean(dtype=float), abs(own).mean(dtype=float)
        if (sizes[:, 0] > UNRELATED_RATIO * sizes[:, 1]).sum() >= FAR_PAGES:
            check_distance(plan.config, base, model, parameters, *sizes.mean(axis=0).tolist())


def list_common(plan: MergePlan, i: int) -> list[tuple[str, TensorInfo, TensorInfo]]:
    """The matrices that a model has by the base's name, in its shape."""
    return [
        (tensor.name, tensor.base, info)
        for tensor in plan.changed
        for (k, info), own in zip(tensor.finetuned, tensor.mask_names, strict=True)
        if (k, own) == (i, tensor.name) and info.shape == tensor.base.shape and len(info.shape) > 1
    ]
