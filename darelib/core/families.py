"""mergekit's merge methods: what each is made of here, and mergekit's defaults for it."""

from dataclasses import dataclass
from typing import Final

from darelib.core.drops import BREADCRUMBS, DELLA, DROPS, MAGNITUDE, RANDOM
from darelib.core.methods import LINEAR, RAM, SLERP, TIES


@dataclass(frozen=True)
class Family:
    method: str
    drop: str = ""  # none: it drops nothing
    normalize: bool = False
    rescale: bool = False
    average: bool = False  # of models, the base's among them
    epsilon: float = 0.15

    def list_parameters(self) -> tuple[tuple[str, ...], ...]:
        """Those of each model, those that there is one of, and those without effect."""
        if self.method == SLERP:
            return (), ("t",), ("int8_mask",)
        if self.method == RAM:
            return (), ("epsilon",), ("int8_mask",)
        if self.average:
            return ("weight",), ("normalize",), ("int8_mask",)
        if not self.drop:
            return ("weight",), ("lambda", "normalize"), ("density", "rescale", "int8_mask")
        return (
            ("weight", "density", *DROPS[self.drop].settings),
            ("lambda", "normalize", "rescale"),
            ("int8_mask",),
        )


FAMILIES: Final = {
    "task_arithmetic": Family(LINEAR),
    "ties": Family(TIES, MAGNITUDE, normalize=True),
    "dare_linear": Family(LINEAR, RANDOM, rescale=True),
    "dare_ties": Family(TIES, RANDOM, rescale=True),
    "breadcrumbs": Family(LINEAR, BREADCRUMBS),
    "breadcrumbs_ties": Family(TIES, BREADCRUMBS),
    "della": Family(TIES, DELLA, normalize=True, rescale=True),
    "della_linear": Family(LINEAR, DELLA, rescale=True),
    "linear": Family(LINEAR, normalize=True, average=True),
    "slerp": Family(SLERP),
    "ram": Family(RAM, epsilon=1e-5),
}


def find_merge_method(method: str, drop: str) -> str | None:
    """What mergekit calls a method and a drop (none: "") together."""
    known = {
        (family.method, family.drop): name
        for name, family in FAMILIES.items()
        if not family.average
    }
    known[TIES, ""] = "ties"
    return known.get((method, drop))
