"""State dicts in memory: the same names, shapes and types that files have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from darelib.core.formats import STORED, TORCH_NAMES
from darelib.core.text import ConfigError
from darelib.models.tensor import Described, Tensor

if TYPE_CHECKING:
    import torch

Array = Any

STATE_DICT_HINT: Final = (
    "give what model.state_dict() or safetensors.torch.load_file gives; DareMerger takes files"
)


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

    encoded: Mapping[str, Tensor] = MappingProxyType({})  # tensors that an encoding stores

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
        types = (TORCH_NAMES.get(str(each).removeprefix("torch."), "C64") for each in self.dtypes)
        owner = weakref.ref(self)
        self.tensors = {
            name: InMemory(dtype, tuple(shape), name, owner)
            for name, dtype, shape in zip(self.names, types, self.shapes, strict=True)
        }

    def read_encodings(self, encodings: Iterable[Callable[[Described], None]]) -> None:
        """Describe it, and let encoded tensors be read as those of files are.

        Tensors that only belong to those, like activation scales, are left out.
        """
        self.describe()
        for recognise in encodings:
            recognise(self)
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if tensor.merges}
        known = self.tensors.items()
        self.encoded = {name: tensor for name, tensor in known if not isinstance(tensor, InMemory)}

    def find(self, *names: str) -> torch.Tensor:
        """The first of these tensors that it has; of an encoded one, its values."""
        name = next(name for name in names if name in self.state or name in self.encoded)
        if name not in self.encoded:
            return self.state[name]
        import torch

        tensor = self.encoded[name]
        values = torch.from_numpy(tensor.read(0, tensor.count)).reshape(tensor.shape)
        dtype = getattr(torch, STORED[tensor.dtype][1])
        return values.to(self.state.get(name, self.values[0]).device, dtype)

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

    def sample(self, name: str, tensor: Tensor, start: int, count: int) -> Array:
        if name in self.encoded:
            return self.encoded[name].read(start, count)
        import torch

        values = self.state[name].detach()
        places = torch.arange(start, start + count, device=values.device)
        return values.take(places).cpu().double().numpy()


@dataclass(frozen=True, eq=False)
class InMemory(Tensor):
    """A tensor of a state dict. A plan may outlive the state dict, and does not hold it."""

    name: str
    owner: weakref.ref[StateDict] = field(repr=False)

    def read(self, start: int, count: int, known: Any = None) -> Array:
        values = self._find().flatten()[start : start + count]
        return (values.double() if self.dtype == "F64" else values.float()).cpu().numpy()

    def read_raw(self, start: int, size: int) -> Array:
        import torch

        return self._find().flatten().view(torch.uint8)[start : start + size].cpu().numpy()

    def _find(self) -> torch.Tensor:
        state = self.owner()
        assert state
        return state.state[self.name].detach()
