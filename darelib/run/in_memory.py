"""Tensors in memory: the plan of a merge of files, run by torch's operations, or by a GPU's own
kernels.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from darelib.arithmetic.definition import draw_bits
from darelib.arithmetic.torch_tensors import Draw, Solutions, TensorMerge, explain_broken
from darelib.config import DareConfig
from darelib.core.formats import DTYPES
from darelib.core.mask import mask_key
from darelib.core.text import LOG, ConfigError, DareError
from darelib.methods import DEFAULT, METHODS
from darelib.methods.looks import TensorSettings
from darelib.models.inputs import ENCODINGS
from darelib.models.states import STATE_DICT_HINT, StateDict, check_state_dict
from darelib.plan.checks import check_sample
from darelib.plan.plan import MergePlan, plan_merge
from darelib.plan.tensorplan import TensorPlan, find_buffer
from darelib.run.worker import explain_copied, explain_quantised

Tensor = torch.Tensor
MOST_PLANS: Final = 8  # that are kept: searches merge the same tensors again and again
TORCH_TYPES: Final = {stored: getattr(torch, name) for name, stored in DTYPES.items()}


def drop_deltas(deltas: Mapping[str, Tensor], config: DareConfig) -> dict[str, Tensor]:
    """Deltas, thinned: a merge of one model whose base is 0.

    Buffers, and tensors that are not floats, are left as they are.
    """
    check_state_dict("the task vector", deltas)
    floats = {
        name: delta
        for name, delta in deltas.items()
        if delta.is_floating_point() and not find_buffer(name, tuple(delta.shape))
    }
    thinned: dict[str, Tensor] = {}
    if floats:
        zeros = {name: delta.new_zeros(()).expand(delta.shape) for name, delta in floats.items()}
        thinned = merge_tensors(zeros, [floats], config, warns=False)
    return {name: thinned.get(name, delta) for name, delta in deltas.items()}


def merge_tensors(
    base: Mapping[str, Tensor],
    finetuned: Sequence[Mapping[str, Tensor]],
    config: DareConfig,
    out: Mapping[str, Tensor] | None = None,
    warns: bool = True,
    solutions: Solutions | None = None,
) -> dict[str, Tensor]:
    """The merged state dict. out: tensors to write it into, which may be the base's.

    Tensors in an encoding are read as those of files are, and the merged ones are plain: where the
    base's are in FP8, they are float32, and have no scales.

    solutions: of earlier merges of the same tensors, where several are made.
    """
    if not isinstance(finetuned, Sequence) or isinstance(finetuned, str):
        raise ConfigError("finetuned must be a list of state dicts", "put it in brackets")
    config.check_models(len(finetuned))
    config.check_examples(False)
    for name in ("adapter_rank", "part_of", "pad_vocabulary"):
        if getattr(config, name) is not None:
            raise ConfigError(f"{name} is for files", "leave it out, or use DareMerger")
    given = {"the base": base} | {f"model {i}": model for i, model in enumerate(finetuned)}
    for what, state in given.items() if out is None else [*given.items(), ("out", out)]:
        check_state_dict(what, state)
    if not base:
        raise ConfigError("the base has no tensors", STATE_DICT_HINT)
    states = [StateDict(name, state) for name, state in given.items()]
    plan = find_plan(config, states)
    if [state.addresses for state in states] != plan.compared:
        check_sample(config, plan.merge.changed, states)
        plan.compared[:] = [state.addresses for state in states]
    for warning in plan.merge.warnings if warns else ():
        LOG.warning(warning)
    with torch.no_grad():
        return StateMerge(plan, states, out, solutions).run()


def on_device(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where torch makes tensors that name no device: beside one, whatever its default is."""
    is_usual = torch.get_default_device().type == "cpu"
    return nullcontext() if is_usual else tensor.device


@dataclass(frozen=True)
class StatePlan:
    """A merge of state dicts of some names, shapes and types."""

    merge: MergePlan
    encoded: bool  # whether any of them has tensors in an encoding
    tied: Mapping[str, str]  # by name: the tensor that has the same values everywhere
    # What a GPU's kernels may merge: what all models have, in the base's shape, under its name.
    common: Sequence[TensorPlan]
    names: tuple[str, ...]
    mask_names: Sequence[str]
    settings: Sequence[TensorSettings]
    # The addresses that were last found to be fit for results: checked once, for the same reason.
    places: list[Any] = field(default_factory=list)
    compared: list[Any] = field(default_factory=list)  # those of the models last compared


_plans: list[tuple[Any, StatePlan]] = []  # the latest last


def find_plan(config: DareConfig, states: Sequence[StateDict]) -> StatePlan:
    """The plan for states like these: made once, since it takes longer than a merge on a GPU."""
    same = [next(k for k, s in enumerate(states) if s.is_same_as(each)) for each in states]
    key = repr(config), same, [(s.names, s.shapes, s.dtypes, s.twins) for s in states]
    for known, plan in reversed(_plans):
        if known == key:
            for state in states if plan.encoded else ():
                state.read_encodings(ENCODINGS)  # the plan knows those of other states
            return plan
    plan = make_plan(config, states)
    _plans[:] = [*_plans[1 - MOST_PLANS :], (key, plan)]
    return plan


def make_plan(config: DareConfig, states: Sequence[StateDict]) -> StatePlan:
    for state in states:
        state.read_encodings(ENCODINGS)
    plan = plan_merge(config, states)
    base = states[0]
    known = {tensor.name: tensor for tensor in plan.tensors}
    usual = DEFAULT if METHODS[config.method].whole else config.method
    tied = {}
    common = []
    for tensor in plan.tensors:
        first = known[next(iter(base.find_twins(tensor.name)), tensor.name)]
        is_like = {*tensor.mask_names} <= {first.name} and tensor.models == first.models
        if first is not tensor and is_like:
            tied[tensor.name] = first.name
        elif tensor.merged and tensor.finetuned and len(tensor.finetuned) == len(states) - 1:
            is_whole = all(info.shape == tensor.base.shape for _, info in tensor.finetuned)
            has_names = all(tensor.name in state.state for state in states)
            is_plain = not any(tensor.name in state.encoded for state in states)
            # One launch merges by one method.
            is_usual = tensor.settings.method == usual and len({*tensor.mask_names}) == 1
            if is_whole and has_names and is_plain and is_usual:
                common.append(tensor)
    return StatePlan(
        merge=plan,
        encoded=any(state.encoded for state in states),
        tied=tied,
        common=common,
        names=tuple(tensor.name for tensor in common),
        mask_names=[tensor.mask_names[0] for tensor in common],
        settings=[tensor.settings for tensor in common],
    )


@cache
def _load_gpu() -> ModuleType | None:
    """The kernels for GPUs. Without Triton: None, and the first time a warning."""
    try:
        from darelib.arithmetic import gpu
    except ImportError as error:
        LOG.warning(
            f"Triton cannot be used ({error}), so torch's operations merge: the same result, far "
            "slower"
        )
        return None
    return gpu


class StateMerge:
    """The merge of all tensors: by a GPU's kernels where they are made for them, by torch's
    operations elsewhere.
    """

    def __init__(
        self,
        plan: StatePlan,
        states: Sequence[StateDict],
        out: Mapping[str, Tensor] | None,
        solutions: Solutions | None = None,
    ) -> None:
        self.plan = plan
        self.config = plan.merge.config
        base = states[0]
        if base.encoded:
            base = StateDict(base.name, {name: base.find(name) for name in base.tensors})
        self.base = base.state
        self.models = states[1:]
        self.states = [base, *self.models]
        self.out = out
        self.solutions = solutions
        if solutions:  # of whole matrices, in a search: lambda only multiplies them
            solutions.open(repr(replace(self.config, lambda_coeff=1.0)))
        self.places = None if out is None else StateDict("out", out)
        self.merged: dict[str, Tensor] = {}
        on_gpu = any(tensor.is_cuda for tensor in self.base.values())
        self.gpu: Any = _load_gpu() if on_gpu and self.config.engine == "auto" else None

    def run(self) -> dict[str, Tensor]:
        """All merged tensors, in the order of the base."""
        if self.places is not None:
            self._check_out(self.places)
        self._compare_copied()
        if self.gpu and self.plan.common and len(self.models) <= self.gpu.MOST_MODELS:
            self._merge_on_gpu(self.gpu)
        for tensor in self.plan.merge.tensors:
            if tensor.name not in self.merged and tensor.name not in self.plan.tied:
                with on_device(self.base[tensor.name]):
                    self.merged[tensor.name] = self._merge_one(tensor)
        for name, same in self.plan.tied.items():
            merged = self.merged[same]
            self.merged[name] = merged if self.out is None else self.out[name].copy_(merged)
        return {name: self.merged[name] for name in self.base}

    def _check_out(self, out: StateDict) -> None:
        """Refuse tensors that do not fit, or share memory that is still to be read."""
        addresses = [state.addresses for state in (*self.states, out)]
        places = [addresses, out.names, out.shapes, out.dtypes, out.devices]
        dense = all(all(state.dense) for state in (*self.states, out))
        if not dense or places != self.plan.places:
            check_places(self.plan.merge, self.plan.tied, self.states, out)
            self.plan.places[:] = places if dense else []

    def _compare_copied(self) -> None:
        """Report models that differ where the base is copied, and refuse quantised ones."""
        differing: dict[int, list[str]] = {}
        for tensor in (tensor for tensor in self.plan.merge.tensors if not tensor.merged):
            for i, part in self._find_parts(tensor).items():
                if not has_same_bytes(self.base[tensor.name], part):
                    if tensor.quantised:
                        raise explain_quantised(tensor, self.states[1 + i].name)
                    differing.setdefault(i, []).append(tensor.name)
        for i, names in sorted(differing.items()):
            LOG.warning(explain_copied(self.states[1 + i].name, names))

    def _merge_on_gpu(self, gpu: Any) -> None:
        """Merge what all models have, on one GPU, in the usual types."""
        plan = self.plan
        places = self.places
        if places is None:
            places = StateDict("out", {t.name: self._make_place(t) for t in plan.common})
        chosen = [state.choose(plan.names) for state in (*self.states, places)]
        columns = gpu.Columns(plan.mask_names, chosen, plan.settings)
        pairs = zip(plan.names, chosen[-1].values, columns.kinds, strict=True)
        self.merged = {name: output for name, output, kind in pairs if kind}
        for row in gpu.merge_columns(columns, self.config.seed):
            self._keep_mask(plan.common[row], self.merged[plan.common[row].name])

    def _keep_mask(self, tensor: TensorPlan, output: Tensor) -> None:
        """Keep a mask as the base has it, unless it was read where it is written."""
        mine = self.base[tensor.name]
        parts = self._find_parts(tensor)
        inputs = [each.data_ptr() for each in (mine, *parts.values())]
        flat = [part.reshape(-1) for part in parts.values()]
        if output.data_ptr() in inputs or not keeps_base(tensor.settings, mine, flat, output):
            broken = (i for i, part in parts.items() if not part.isfinite().all())
            raise explain_broken(tensor.name, next(broken, None), output.dtype)
        output.copy_(mine)

    def _make_place(self, tensor: TensorPlan) -> Tensor:
        mine = self.base[tensor.name]
        dtype = TORCH_TYPES.get(tensor.output.dtype, mine.dtype)
        return torch.empty(mine.shape, dtype=dtype, device=mine.device)

    def _merge_one(self, tensor: TensorPlan) -> Tensor:
        mine = self.base[tensor.name]
        if not tensor.merged:
            return mine.clone() if self.out is None else self.out[tensor.name].copy_(mine)
        output = self._make_place(tensor) if self.out is None else self.out[tensor.name]
        parts = {
            i: fit_rows(part.detach().to(mine.device), mine.detach())
            for i, part in self._find_parts(tensor).items()
        }
        keys = {
            i: mask_key(self.plan.merge.seeds[i], name)
            for i, name in zip(tensor.models, tensor.mask_names, strict=True)
        }
        draw: Draw = partial(draw_bits, arange=partial(torch.arange, device=mine.device))
        if self.gpu and self.gpu.can_merge_on(mine.device):
            draw = partial(self.gpu.draw_bits, device=mine.device)
        merge = TensorMerge(
            tensor.name,
            tensor.settings,
            mine.detach(),
            parts,
            keys,
            draw,
            tensor.matrices,
            self.solutions,
        )
        try:
            merge.run(output.detach())
        except DareError:
            if not keeps_base(tensor.settings, mine, [*parts.values()], output):
                raise
            output.copy_(mine)
        return output

    def _find_parts(self, tensor: TensorPlan) -> dict[int, Tensor]:
        """The models' tensors, by model. A tied one may be there under another of its names."""
        names = zip(tensor.models, tensor.mask_names, strict=True)
        pairs = [(i, self.models[i], own) for i, own in names]
        return {i: model.find(tensor.name, own) for i, model, own in pairs}


def has_same_bytes(mine: Tensor, theirs: Tensor) -> bool:
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        return False
    one, other = (each.contiguous().reshape(-1).view(torch.uint8) for each in (mine, theirs))
    return torch.equal(one, other.to(one.device))


def keeps_base(
    settings: TensorSettings, mine: Tensor, parts: Sequence[Tensor], output: Tensor
) -> bool:
    """Whether a tensor is a mask that stays the base's: -inf is the only value that is not finite,
    and the output's type can hold it.
    """
    has_masks = all(bool(each.max() < torch.inf) for each in (mine, *parts))
    is_equal = all(torch.equal(part.to(mine.dtype), mine.reshape(-1)) for part in parts)
    fits = torch.equal(mine.to(output.dtype).isinf(), mine.isinf())
    return has_masks and fits and (is_equal or not settings.lambda_coeff)


def fit_rows(part: Tensor, base: Tensor) -> Tensor:
    """A model's tensor, flat, with as many elements as the base's: rows that it lacks are the
    base's.
    """
    flat = part.reshape(-1)[: base.numel()]
    missing = base.reshape(-1)[len(flat) :]
    if not len(missing):
        return flat
    real = torch.promote_types(flat.dtype, missing.dtype)
    return torch.cat([flat.to(real), missing.to(real)])


# --- tensors that a merge writes into ------------------------------------------------------------


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
    base = states[0].state
    for tensor in plan.tensors:
        if tensor.name not in out.state:
            raise DareError(
                f"out has no tensor {tensor.name!r}", "give it a tensor for each of the base's"
            )
        check_place(tensor, base[tensor.name], out.state[tensor.name])
    # What is tied is copied in the end, and may be one tensor.
    place_of = {name: out.state[name].data_ptr() for name in base}
    once = [name for name in base if name not in tied or place_of[name] != place_of[tied[name]]]
    chosen = out.choose(tuple(once))
    for state in (chosen, *states):
        check_apart(chosen, state, tied)


def check_place(tensor: TensorPlan, base: Tensor, out: Tensor) -> None:
    dtype = TORCH_TYPES.get(tensor.output.dtype, base.dtype)
    if (out.shape, out.dtype, out.device) != (base.shape, dtype, base.device):
        raise DareError(
            f"tensor {tensor.name!r} of out is {list(out.shape)} of {out.dtype} on {out.device}, "
            f"and the merged one is {list(base.shape)} of {dtype} on {base.device}",
            "give it a tensor of that shape and type; the config's dtype sets the type",
        )


def check_apart(out: StateDict, state: StateDict, tied: Mapping[str, str]) -> None:
    """Refuse memory of out that another tensor, of out or of an input, has as well."""
    names, starts, ends = list_ranges(out)
    others, firsts, lasts = list_ranges(state)
    # The last of ours that begins before the end of theirs: among themselves, each one itself.
    places = np.searchsorted(starts, lasts) - 1
    overlap = (places >= 0) & (ends[places] > firsts) & (lasts > firsts)
    for j in np.flatnonzero(overlap):
        mine = names[places[j]]
        one = out.state[mine]
        other = state.state[others[j]]
        is_same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
        is_named = tied.get(mine, mine) == tied.get(others[j], others[j])
        if not (is_same and is_named and one.dtype == other.dtype):
            raise DareError(
                f"tensor {mine!r} of out shares its memory with {others[j]!r} of {state.name}",
                "give each of them memory of its own, or tie them in the base and in all models",
            )


def list_ranges(state: StateDict) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]:
    """The names of tensors, and where their bytes begin and end, in the order of their places."""
    pairs = zip(state.values, state.dense, strict=True)
    sizes = [tensor.nbytes if dense else count_spanned(tensor) for tensor, dense in pairs]
    starts = np.array(state.addresses, np.int64)
    ends = starts + np.array(sizes, np.int64)
    order = np.argsort(starts, kind="stable")
    return np.array(state.names, object)[order], starts[order], ends[order]


def count_spanned(tensor: Tensor) -> int:
    """Bytes from the first value of a tensor to its last, wherever the others lie."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((side - 1) * stride for side, stride in sides)
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
