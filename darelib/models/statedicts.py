"""State dicts in memory, as inputs of a merge: the same names, shapes and types that files have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from darelib.core.formats import DTYPES
from darelib.core.text import ConfigError
from darelib.models.encodings import Described, TensorInfo

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

STATE_DICT_HINT: Final = (
    "give what model.state_dict() or safetensors.torch.load_file gives; DareMerger takes files"
)
# What safetensors calls torch's types.
STORED_NAMES: Final = {
    **DTYPES,
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
}


def check_state_dict(what: str, given: object) -> None:
    from torch import Tensor

    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{what} must be a state dict, not of type {type(given).__name__}", STATE_DICT_HINT
        )
    kinds = {*map(type, given.values())}  # few, where there are many tensors
    if {*map(type, given)} <= {str} and all(issubclass(kind, Tensor) for kind in kinds):
        if any(map(attrgetter("is_meta"), given.values())):
            raise ConfigError(
                f"{what} has tensors without values, on the device meta",
                "load all of the model, without offloading",
            )
        return
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(
                f"{what} must map names to tensors, not {name!r} to {type(value).__name__}",
                STATE_DICT_HINT,
            )


class StateDict(Described):
    """A state dict. What is known of its tensors is read in bulk: there may be thousands, and
    little time.
    """

    def __init__(self, name: str, state: Mapping[str, torch.Tensor]) -> None:
        from torch import Tensor

        self.name = name
        self.state = state
        self.names = tuple(state)
        self.values = list(state.values())
        self.shapes = tuple(map(attrgetter("shape"), self.values))
        self.dtypes = tuple(map(attrgetter("dtype"), self.values))
        self.devices = tuple(map(attrgetter("device"), self.values))
        self.addresses = tuple(map(Tensor.data_ptr, self.values))

    def choose(self, names: tuple[str, ...]) -> StateDict:
        if names == self.names:
            return self
        return StateDict(self.name, {name: self.state[name] for name in names})

    @cached_property
    def dense(self) -> tuple[bool, ...]:
        """Whether each tensor's values lie one after the other."""
        from torch import Tensor

        return tuple(map(Tensor.is_contiguous, self.values))

    def describe(self) -> None:
        """Make what a plan wants to know: for many tensors, that takes longer than to merge
        them.
        """
        # C64: another complex type, which is only copied.
        types = (STORED_NAMES.get(str(each).removeprefix("torch."), "C64") for each in self.dtypes)
        self.tensors = {
            name: TensorInfo(dtype, tuple(shape))
            for name, dtype, shape in zip(self.names, types, self.shapes, strict=True)
        }

    @cached_property
    def twins(self) -> tuple[tuple[str, ...], ...]:
        if len(set(self.addresses)) == len(self.addresses):
            return ()
        groups: dict[Any, list[str]] = {}
        for name, tensor in self.state.items():
            if tensor.numel():
                values = tensor.data_ptr(), tensor.shape, tensor.stride()
                groups.setdefault((*values, tensor.dtype, tensor.device), []).append(name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)

    def find_twins(self, name: str) -> tuple[str, ...]:
        return self._twins_by_name.get(name, ())

    @cached_property
    def _twins_by_name(self) -> dict[str, tuple[str, ...]]:
        return {name: names for names in self.twins for name in names}

    def is_same_as(self, other: StateDict) -> bool:
        mine = self.addresses, self.names, self.shapes
        return mine == (other.addresses, other.names, other.shapes)

    def sample(self, name: str, info: TensorInfo, start: int, count: int) -> NDArray[Any]:
        import torch

        tensor = self.state[name].detach()
        places = torch.arange(start, start + count, device=tensor.device)
        return tensor.take(places).cpu().double().numpy()
