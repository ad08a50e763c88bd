"""Tensors that a merge in memory writes into: whether they fit, and share no memory with what is
still to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from darelib.core.formats import DTYPES
from darelib.core.text import DareError
from darelib.models.memory import StateDict
from darelib.plan.plan import MergePlan

TORCH_TYPES: Final = {stored: getattr(torch, name) for name, stored in DTYPES.items()}
APART_HINT: Final = "give each of them memory of its own"


def check_places(
    plan: MergePlan,
    tied: Mapping[str, str],
    states: Sequence[StateDict],
    out: StateDict,
) -> None:
    """Refuse what does not fit, before anything is written.

    A tensor may be an input's own, of the same name: it is read before it is written. Any other
    memory that is shared, among the tensors or with an input, would be written first. tied: by
    name, the tensor that has the same values everywhere.
    """
    base = states[0]
    lacking = next((name for name in base.names if name not in out.state), None)
    if lacking is not None:
        raise DareError(f"out has no tensor {lacking!r}", "give it a tensor for each of the base's")
    out = out.choose(base.names)
    check_shapes(plan, base, out)
    # What is tied is copied in the end, and may be one tensor.
    once = [name for name in out.names if name not in tied or not is_one(out, name, tied[name])]
    out = out.choose(tuple(once))
    for device in set(out.devices):
        check_apart(out, states, tied, device)


def is_one(out: StateDict, name: str, other: str) -> bool:
    return out.state[name].data_ptr() == out.state[other].data_ptr()


def check_shapes(plan: MergePlan, base: StateDict, out: StateDict) -> None:
    dtypes = tuple(
        TORCH_TYPES.get(tensor.output.dtype, dtype)
        for tensor, dtype in zip(plan.tensors, base.dtypes, strict=True)
    )
    wanted = base.shapes, dtypes, base.devices
    if (out.shapes, out.dtypes, out.devices) == wanted:
        return
    traits = zip(out.shapes, out.dtypes, out.devices, *wanted, strict=True)
    for name, (*mine, shape, dtype, device) in zip(out.names, traits, strict=True):
        if mine != [shape, dtype, device]:
            raise DareError(
                f"tensor {name!r} of out is {list(mine[0])} of {mine[1]} on {mine[2]}, and the "
                f"merged one is {list(shape)} of {dtype} on {device}",
                "give it a tensor of that shape and type; the config's dtype sets the type",
            )


def check_apart(
    out: StateDict, states: Sequence[StateDict], tied: Mapping[str, str], device: torch.device
) -> None:
    """Refuse memory of one device that is shared."""
    names, starts, ends = list_ranges(out, device)
    shared = np.flatnonzero(ends[:-1] > starts[1:])
    if len(shared):
        first, second = names[shared[0]], names[shared[0] + 1]
        raise DareError(
            f"tensors {first!r} and {second!r} of out share their memory, and the merged ones "
            "differ",
            f"{APART_HINT}, or tie them in the base and in all models",
        )
    if not len(names):
        return
    for state in states:
        theirs, firsts, lasts = list_ranges(state, device)
        # The last of ours that begins before the end of theirs.
        places = np.searchsorted(starts, lasts) - 1
        overlap = (places >= 0) & (ends[places] > firsts) & (lasts > firsts)
        for j in np.flatnonzero(overlap):
            mine = names[places[j]]
            if not is_own(out, state, mine, theirs[j], tied):
                raise DareError(
                    f"tensor {mine!r} of out shares its memory with {theirs[j]!r} of {state.name}",
                    APART_HINT,
                )


def is_own(
    out: StateDict, state: StateDict, mine: str, theirs: str, tied: Mapping[str, str]
) -> bool:
    """Whether a tensor of out is an input's own of that name, which is read before it is."""
    one = out.state[mine]
    other = state.state[theirs]
    is_same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return is_same and mine == tied.get(theirs, theirs) and one.dtype == other.dtype


def list_ranges(
    state: StateDict, device: torch.device
) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """The names of tensors on a device, and where their bytes begin and end, in the order of their
    places.
    """
    sizes = [tensor.nbytes for tensor in state.values]
    for k, tensor in enumerate(state.values):
        if not state.dense[k]:
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((side - 1) * stride for side, stride in sides)
            sizes[k] = (last + 1) * tensor.element_size() if tensor.numel() else 0
    here = np.array([own == device for own in state.devices], bool)
    starts = np.array(state.addresses, np.int64)[here]
    ends = starts + np.array(sizes, np.int64)[here]
    order = np.argsort(starts, kind="stable")
    return np.array(state.names, object)[here][order], starts[order], ends[order]
