"""Tensors in memory: the same merge, bit for bit, by torch's operations on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import torch

from darelib.config import DareConfig
from darelib.formats import DTYPES, is_counted
from darelib.kernels import plain
from darelib.mask import mask_key
from darelib.methods import METHODS, fold_columns, rank_of_floor
from darelib.text import ConfigError, DareError, list_names
from darelib.tuning import TUNING

Tensor = torch.Tensor
STATE_DICT_HINT: Final = "give what model.state_dict() or safetensors.torch.load_file gives; DareMerger takes files"


def drop_deltas(deltas: Mapping[str, Tensor], config: DareConfig) -> dict[str, Tensor]:
    """Deltas, thinned: a merge of one model whose base is 0. Tensors that are not floats are left as they are."""
    check_state_dict("the task vector", deltas)
    zeros = {n: d.new_zeros(()).expand(d.shape) if d.is_floating_point() else d for n, d in deltas.items()}
    return merge_tensors(zeros, [deltas], config) if deltas else {}


def merge_tensors(
    base: Mapping[str, Tensor], finetuned: Sequence[Mapping[str, Tensor]], config: DareConfig
) -> dict[str, Tensor]:
    """The merged state dict."""
    if not isinstance(finetuned, Sequence) or isinstance(finetuned, str) or not finetuned:
        raise ConfigError("finetuned must be a list of state dicts with at least one in it", "put it in brackets")
    config.check_models(len(finetuned))
    check_state_dict("the base", base)
    if not base:
        raise ConfigError("the base has no tensors", STATE_DICT_HINT)
    for i, model in enumerate(finetuned):
        check_state_dict(f"model {i}", model)
        if not model.keys() & base.keys():
            raise DareError(
                f"model {i} has no tensor in common with the base", f"the base has {list_names(list(base))}"
            )
    merged: dict[str, Tensor] = {}
    places: dict[
        tuple[object, ...], str
    ] = {}  # by where its values are, in the base and in the models: the tensor that was merged
    for name, tensor in base.items():
        parts = {i: model[name] for i, model in enumerate(finetuned) if name in model}
        place = tuple((t.device, t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, *parts.values()))
        if tensor.numel() and (same := places.setdefault((*parts, *place), name)) != name:
            merged[name] = merged[same]  # tied, as a head to its embedding
            continue
        for i, part in parts.items():
            _check_alike(name, tensor, i, part)
        quantised = tensor.element_size() == 1  # copied where equal, else refused
        floats = all(part.is_floating_point() for part in (tensor, *parts.values()))
        if floats and not (quantised and all(_same_bytes(tensor, p) for p in parts.values())):
            merged[name] = TensorMerge(config, len(finetuned), name, tensor, parts).run()
        else:
            merged[name] = tensor.clone()
    return merged


def check_state_dict(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what} must be a state dict, not of type {type(given).__name__}", STATE_DICT_HINT)
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ConfigError(f"{what} must map names to tensors, not {name!r} to {kind}", STATE_DICT_HINT)


def _check_alike(name: str, tensor: Tensor, i: int, part: Tensor) -> None:
    mixed = part.is_floating_point() != tensor.is_floating_point()
    types = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, part.dtype))
    if part.shape != tensor.shape or (mixed and not is_counted(name, types)):
        raise DareError(
            f"tensor {name!r} is {list(tensor.shape)} of {tensor.dtype} in the base and {list(part.shape)} of "
            f"{part.dtype} in model {i}",
            "only models fine-tuned from this very base can be merged",
        )


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.to(one.device).view(torch.uint8))


class TensorMerge:
    """One tensor's merge: the operations of darelib.kernels.plain in their order, so that the bits are the same."""

    def __init__(self, config: DareConfig, count: int, name: str, base: Tensor, parts: dict[int, Tensor]) -> None:
        self.seed, self.name = config.seed, name
        self.settings = config.for_tensor(name, count)
        self.method = METHODS[config.method]
        self.base = base.detach()
        self.parts = {i: part.detach().to(base.device).reshape(-1) for i, part in parts.items()}
        self.dtype = getattr(torch, config.dtype) if config.dtype else base.dtype
        types = {self.dtype, base.dtype, *(part.dtype for part in parts.values())}
        known = {getattr(torch, kind) for kind in DTYPES}
        if not types <= known:
            raise DareError(f"tensor {name!r} is of a type that cannot be merged: {types - known}", "convert it first")
        self.real = torch.float64 if torch.float64 in types else torch.float32

    def run(self) -> Tensor:
        flat, models = self.base.reshape(-1), list(self.parts)
        output = torch.empty(flat.shape, dtype=self.dtype, device=flat.device)
        look = self.method.look(self.settings) if models and flat.numel() else None
        finders: dict[str, Callable[[Tensor], Sequence[float]]]
        finders = {"count": self._find_floors, "products": self._find_products}
        coefficients = self.method.weigh(self.settings, models, finders[look.kernel](flat) if look else None)
        for start, base in self._chunks(flat):
            parts = (self._open(i, start, base) for i in models)
            values = plain.merge_parts(self.settings, base, parts, coefficients)
            if models and self.settings.returns_model:
                values = self.parts[0][start : start + len(base)].to(self.real)
            result = self._encode(values)
            if not bool(torch.isfinite(result).all()):
                raise DareError(
                    f"tensor {self.name!r} holds or gives a value that is not finite in {self.dtype}",
                    "such a model is broken, or the drop rate too high for the type",
                )
            output[start : start + len(base)] = result
        return output.reshape(self.base.shape)

    def _chunks(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, flat.numel(), TUNING.memory_chunk):
            yield start, flat[start : start + TUNING.memory_chunk].to(self.real)

    def _open(self, i: int, start: int, base: Tensor) -> tuple[Tensor, Tensor]:
        """A model's delta and mask for a chunk of the base."""
        delta = self.parts[i][start : start + len(base)].to(self.real) - base
        if not bool(torch.isfinite(delta).all()):
            raise DareError(
                f"tensor {self.name!r} of the base or of model {i} holds a value that is not finite",
                "such a model is broken; use a checkpoint from before that happened",
            )
        key, threshold = mask_key(self.seed + i, self.name), self.settings.thinnings[i].threshold
        return delta, plain.draw_mask(key, threshold, start, len(base), partial(torch.arange, device=base.device))

    def _find_floors(self, flat: Tensor) -> list[float]:
        """Trim: finding one value is faster than sorting all, except on a GPU."""
        floors = []
        for i in self.parts:
            opened = (self._open(i, start, base) for start, base in self._chunks(flat))
            sizes = torch.cat([abs(delta[mask]) for delta, mask in opened])
            rank = rank_of_floor(self.settings.keep_ratio, len(sizes))
            if not len(sizes):
                floors.append(0.0)
            elif sizes.is_cuda:
                floors.append(float(sizes.sort().values[-rank]))
            else:
                floors.append(float(sizes.kthvalue(len(sizes) - rank + 1).values))
        return floors

    def _find_products(self, flat: Tensor) -> tuple[float, ...]:
        chunks = [
            plain.find_products(self.settings, base, {i: self._open(i, start, base) for i in self.parts})
            for start, base in self._chunks(flat)
        ]
        return fold_columns(chunks)

    def _encode(self, values: Tensor) -> Tensor:
        if self.real == torch.float64 and self.dtype in (torch.bfloat16, torch.float16):
            values = plain.round_to_odd(values)  # torch goes by way of float32 and rounds twice
        return values.to(self.dtype)
