"""Tensors in memory: the same merge, bit for bit, by torch's operations on any device, or a GPU's own kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any, Final

import torch

from darelib.config import Chooser, DareConfig
from darelib.core.formats import DTYPES, is_counted
from darelib.core.mask import TILE, mask_key
from darelib.core.methods import (
    METHODS,
    ArcLook,
    BoundsLook,
    Found,
    Look,
    SumsLook,
    TensorSettings,
    TrimLook,
    choose_looks,
    find_factors,
    fold_columns,
    rank_of_floor,
)
from darelib.core.text import LOG, ConfigError, DareError, list_names
from darelib.core.tuning import TUNING
from darelib.kernels import plain

Tensor = torch.Tensor
TRAITS: Final = attrgetter("shape"), attrgetter("dtype"), attrgetter("device")
KNOWN: Final = {getattr(torch, kind) for kind in DTYPES}
STATE_DICT_HINT: Final = (
    "give what model.state_dict() or safetensors.torch.load_file gives; DareMerger takes files"
)


def drop_deltas(deltas: Mapping[str, Tensor], config: DareConfig) -> dict[str, Tensor]:
    """Deltas, thinned: a merge of one model whose base is 0. Tensors that are not floats are left as they are."""
    check_state_dict("the task vector", deltas)
    zeros = {
        n: d.new_zeros(()).expand(d.shape) if d.is_floating_point() else d
        for n, d in deltas.items()
    }
    return merge_tensors(zeros, [deltas], config) if deltas else {}


def merge_tensors(
    base: Mapping[str, Tensor], finetuned: Sequence[Mapping[str, Tensor]], config: DareConfig,
    out: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The merged state dict. out: tensors to write it into, which may be the base's."""
    if not isinstance(finetuned, Sequence) or isinstance(finetuned, str) or not finetuned:
        raise ConfigError(
            "finetuned must be a list of state dicts with at least one in it", "put it in brackets"
        )
    config.check_models(len(finetuned))
    check_state_dict("the base", base)
    if not base:
        raise ConfigError("the base has no tensors", STATE_DICT_HINT)
    for i, model in enumerate(finetuned):
        check_state_dict(f"model {i}", model)
        if base.keys().isdisjoint(model):
            raise DareError(
                f"model {i} has no tensor in common with the base",
                f"the base has {list_names(list(base))}",
            )
    return StateMerge(base, finetuned, config, out).run()


@cache
def _load_gpu() -> Any:
    """The kernels for GPUs, or None and, the first time, a warning."""
    try:
        return importlib.import_module("darelib.kernels.gpu")
    except ImportError as error:
        LOG.warning(
            f"Triton cannot be used ({error}), so torch's operations merge: the same result, far slower"
        )
        return None


class StateMerge:
    """The merge of all tensors: by a GPU's kernels where they are made for them, by torch's operations elsewhere."""

    def __init__(
        self, base: Mapping[str, Tensor], finetuned: Sequence[Mapping[str, Tensor]], config: DareConfig,
        out: Mapping[str, Tensor] | None,
    ) -> None:  # fmt: skip
        self.base, self.finetuned, self.config, self.out = base, finetuned, config, out
        self.states = [base, *finetuned] if out is None else [base, *finetuned, out]
        self.dtype = getattr(torch, config.dtype) if config.dtype else None
        self.merged: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}  # by name, as of a head: the tensor that has the same values
        self.places: dict[
            tuple[int | None, ...], str
        ] = {}  # by where the values are, in the base and in the models
        self.chooser = Chooser(config, base, len(finetuned))
        wanted = config.engine == "auto" and any(tensor.is_cuda for tensor in base.values())
        self.gpu = _load_gpu() if wanted else None

    @torch.no_grad()
    def run(self) -> dict[str, Tensor]:
        """All merged tensors, in the order of the base."""
        if self.out is not None:
            check_state_dict("out", self.out)
            self._check_places(self.out)
        if self.gpu:
            self._merge_on_gpu(self.gpu)
        for name in self.base:
            if name not in self.merged and name not in self.tied:
                self._merge_one(name)
        for name, same in self.tied.items():
            self.merged[name] = (
                self.merged[same] if self.out is None else self.out[name].copy_(self.merged[same])
            )
        return {name: self.merged[name] for name in self.base}

    def _merge_on_gpu(self, gpu: Any) -> None:
        """Merge the tensors that all models have, on one GPU, in the usual types."""
        if self._names and len(self.finetuned) <= gpu.MOST_MODELS:
            broken = gpu.merge_columns(self._find_columns(gpu, self._names), self.config.seed)
            if broken is not None:
                raise self._explain(broken)

    def _find_columns(self, gpu: Any, names: list[str]) -> Any:
        """What the kernels must know of some tensors, without those that they cannot or need not merge."""
        tensors, traits = self._columns
        outputs = tensors[-1]
        if self.out is None:
            outputs = list(map(self._make_place, names))
            tensors, traits = (
                [*tensors, outputs],
                [*traits, _read_traits(outputs) if self.dtype else traits[0]],
            )
        columns = gpu.Columns(names, tensors, traits, self.chooser.choose_all(names))
        if len(set(columns.addresses[0])) < len(names):  # some may be tied
            for k, (name, *places) in enumerate(zip(names, *columns.addresses[:-1], strict=True)):
                columns.kinds[k] = None if self._is_tied(name, tuple(places)) else columns.kinds[k]
        self.merged = {
            name: output
            for name, output, kind in zip(names, outputs, columns.kinds, strict=True)
            if kind
        }
        return columns

    @cached_property
    def _names(self) -> list[str]:
        """The tensors that all states have. What is one tensor in the base is merged once: all its names, or none."""
        if all(self.base.keys() <= state.keys() for state in self.states):
            return list(self.base)
        common = set(self.base).intersection(*self.states)
        return [
            name
            for name in self.base
            if name in common and common.issuperset(self._twins.get(name, ()))
        ]

    @cached_property
    def _columns(self) -> tuple[list[list[Tensor]], list[Any]]:
        """Those tensors by state, and their traits: one object for all states if they are alike."""
        tensors = [list(map(state.__getitem__, self._names)) for state in self.states]
        traits = list(map(_read_traits, tensors))
        return tensors, [traits[0]] * len(traits) if traits.count(traits[0]) == len(
            traits
        ) else traits

    def _is_tied(self, name: str, addresses: tuple[int | None, ...]) -> bool:
        """Whether an earlier tensor has the same values, in the base and in each model: as a head is its embedding."""
        first = self.places.setdefault(addresses, name) if self.base[name].numel() else name
        if first != name and self._locate(first) == self._locate(name):
            self.tied[name] = first
        return name in self.tied

    def _make_place(self, name: str) -> Tensor:
        if self.out is not None:
            return self.out[name]
        tensor = self.base[name]
        return torch.empty(tensor.shape, dtype=self.dtype or tensor.dtype, device=tensor.device)

    def _merge_one(self, name: str) -> None:
        tensor, parts = self.base[name], self._find_parts(name, self.base[name])
        every = [parts.get(i) for i in range(len(self.finetuned))]
        if self._is_tied(
            name,
            (tensor.data_ptr(), *(part if part is None else part.data_ptr() for part in every)),
        ):
            return
        quantised = tensor.element_size() == 1  # copied where equal, else refused
        floats = all(part.is_floating_point() for part in (tensor, *parts.values()))
        if not floats or (quantised and all(_same_bytes(tensor, p) for p in parts.values())):
            self.merged[name] = tensor.clone() if self.out is None else self.out[name].copy_(tensor)
            return
        self.merged[name] = self._make_place(name)
        moved = {i: part.detach().to(tensor.device) for i, part in parts.items()}
        merge = TensorMerge(
            name, self.chooser.choose(name)[1], self.config.seed, tensor.detach(), moved, self.gpu
        )
        merge.run(self.merged[name].detach())

    def _explain(self, name: str) -> DareError:
        """What is wrong with a tensor that has given a value that is not finite."""
        broken = (
            i
            for i, part in self._find_parts(name, self.base[name]).items()
            if not bool(part.isfinite().all())
        )
        return explain_broken(name, next(broken, None), self.merged[name].dtype)

    def _locate(self, name: str) -> tuple[object, ...]:
        """Where the values of a tensor are, in the base and in the models."""
        tensor = self.base[name]
        parts = self._find_parts(name, tensor)
        return (*parts, *map(_identify, (tensor, *parts.values())))

    def _name_in(self, model: Mapping[str, Tensor], name: str) -> str | None:
        """What a model calls a tensor: of names that are one tensor in the base, like a tied head, it may lack some."""
        return (
            name
            if name in model
            else next((twin for twin in self._twins.get(name, ()) if twin in model), None)
        )

    @cached_property
    def _twins(self) -> dict[str, list[str]]:
        """The names of each tensor that has several in the base."""
        names: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in self.base.items():
            if tensor.numel():
                names.setdefault(_identify(tensor), []).append(name)
        return {name: same for same in names.values() if len(same) > 1 for name in same}

    def _find_parts(self, name: str, tensor: Tensor) -> dict[int, Tensor]:
        parts = {
            i: model[own]
            for i, model in enumerate(self.finetuned)
            if (own := self._name_in(model, name)) is not None
        }
        for i, part in parts.items():
            if part.shape != tensor.shape or part.dtype != tensor.dtype:
                _check_alike(name, tensor, i, part)
        return parts

    def _check_places(self, out: Mapping[str, Tensor]) -> None:
        """Refuse what does not fit before anything is written: out may be the base."""
        if self.dtype is None and len(self._names) == len(self.base):
            (*_, places), traits = self._columns
            if traits.count(traits[0]) == len(traits) and len(
                set(map(Tensor.data_ptr, places))
            ) == len(places):
                return  # all is as it usually is
        owners: dict[
            tuple[object, ...], tuple[str, tuple[object, ...]]
        ] = {}  # by address: the name, and of what
        for name, tensor in self.base.items():
            inputs = self._locate(name)
            self._check_place(name, tensor, out)
            owner, its = owners.setdefault((out[name].device, out[name].data_ptr()), (name, inputs))
            if its != inputs and tensor.numel():
                raise DareError(
                    f"tensors {owner!r} and {name!r} of out share their memory, and the merged ones differ",
                    "give each of them memory of its own, or tie them in the base and in all models",
                )

    def _check_place(self, name: str, tensor: Tensor, out: Mapping[str, Tensor]) -> None:
        """Refuse to write a tensor where it does not fit."""
        place = out.get(name)
        wanted = self.config.dtype or str(tensor.dtype).removeprefix("torch.")
        if place is None:
            raise DareError(
                f"out has no tensor {name!r}", "give it a tensor for each of the base's"
            )
        if (
            place.shape != tensor.shape
            or place.device != tensor.device
            or place.dtype != getattr(torch, wanted)
        ):
            raise DareError(
                f"tensor {name!r} of out is {list(place.shape)} of {place.dtype} on {place.device}, and the merged one "
                f"is {list(tensor.shape)} of torch.{wanted} on {tensor.device}",
                "give it a tensor of that shape and type; the config's dtype sets the type",
            )


def _read_traits(tensors: list[Tensor]) -> list[list[Any]]:
    return [list(map(read, tensors)) for read in TRAITS]


def _identify(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def check_state_dict(what: str, given: object) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{what} must be a state dict, not of type {type(given).__name__}", STATE_DICT_HINT
        )
    kinds = {*map(type, given)}, {*map(type, given.values())}
    if kinds[0] <= {str} and all(issubclass(kind, Tensor) for kind in kinds[1]):
        return
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = type(value).__name__
            raise ConfigError(
                f"{what} must map names to tensors, not {name!r} to {kind}", STATE_DICT_HINT
            )


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
    return one.dtype == other.dtype and torch.equal(
        one.view(torch.uint8), other.to(one.device).view(torch.uint8)
    )


def explain_broken(name: str, model: int | None, dtype: torch.dtype) -> DareError:
    """What to say of a value that is not finite: of a model's delta, or of the result."""
    if model is not None:
        return DareError(
            f"tensor {name!r} of the base or of model {model} holds a value that is not finite",
            "such a model is broken; use a checkpoint from before that happened",
        )
    return DareError(
        f"tensor {name!r} holds or gives a value that is not finite in {dtype}",
        "such a model is broken, or the drop rate too high for the type",
    )


class TensorMerge:
    """One tensor's merge: the operations of darelib.kernels.plain in their order, so that the bits are the same."""

    def __init__(
        self, name: str, settings: TensorSettings, seed: int, base: Tensor, parts: dict[int, Tensor], gpu: Any = None
    ) -> None:  # fmt: skip
        self.name, self.settings, self.seed, self.found = name, settings, seed, Found()
        self.draw = partial(plain.draw_bits, arange=partial(torch.arange, device=base.device))
        if gpu and gpu.can_merge_on(base.device):
            self.draw = partial(gpu.draw_bits, device=base.device)
        self.method, self.base, self.flat = METHODS[settings.method], base, base.reshape(-1)
        self.parts = {i: part.reshape(-1) for i, part in parts.items()}

    def run(self, output: Tensor) -> None:
        self.dtype = output.dtype
        types = {self.dtype, self.base.dtype, *(part.dtype for part in self.parts.values())}
        if not types <= KNOWN:
            unknown = types - KNOWN
            raise DareError(
                f"tensor {self.name!r} is of a type that cannot be merged: {unknown}",
                "convert it first",
            )
        self.real = torch.float64 if torch.float64 in types else torch.float32
        flat, models = self.flat, list(self.parts)
        # The output may be the base, of which ranks need whole rows.
        ranked = any(thinning.scheme.thresholds for thinning in self.settings.thinnings)
        at_once = output.is_contiguous() and not ranked
        target = output.view(-1) if at_once else torch.empty_like(flat, dtype=self.dtype)
        finders: dict[type[Look], Callable[[Tensor], None]]
        finders = {BoundsLook: self._find_bounds, SumsLook: self._find_sums}
        finders |= {TrimLook: self._find_floors, ArcLook: self._find_products}
        for look in choose_looks(self.settings, models) if models and flat.numel() else ():
            finders[look](flat)
        coefficients = self.method.weigh(self.settings, models, self.found)
        for start, base in self._chunks(flat):
            parts = (self._open(i, start, base) for i in models)
            values = plain.merge_parts(self.settings, base, parts, coefficients)
            if models and self.settings.returns_model:
                values = self.parts[0][start : start + len(base)].to(self.real)
            result = self._encode(values)
            if not bool(torch.isfinite(result).all()):
                raise explain_broken(self.name, None, self.dtype)
            target[start : start + len(base)] = result
        if not at_once:
            output.copy_(target.reshape(output.shape))

    def _chunks(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, flat.numel(), TUNING.memory_chunk):
            yield start, flat[start : start + TUNING.memory_chunk].to(self.real)

    def _open(self, i: int, start: int, base: Tensor) -> plain.Part:
        """A model's delta, and what is kept of it, for a chunk of the base."""
        delta = self.parts[i][start : start + len(base)].to(self.real) - base
        if not bool(torch.isfinite(delta).all()):
            raise explain_broken(self.name, i, self.dtype)
        thinning, stop = self.settings.thinnings[i], start + len(base)
        bits = self.draw(mask_key(self.seed + i, self.name), start // TILE, -(-len(base) // TILE))[
            : len(base)
        ]
        thresholds = thinning.threshold
        if thinning.scheme.thresholds:  # by ranks, which whole rows decide
            width = self.base.shape[-1] if self.base.shape else 1
            first = start // width * width
            rows = slice(first, -(-stop // width) * width)
            whole = self.parts[i][rows].to(self.real) - self.flat[rows].to(self.real)
            thresholds = plain.find_thresholds(thinning, whole, width)[start - first : stop - first]
        bounds = dict(zip(self.parts, self.found.bounds, strict=False)).get(i)
        return plain.keep(thinning, delta, bits, thresholds, bounds)

    def _find_size(self, sizes: Tensor, number: int) -> float:
        """One of them, counted from the largest down: finding it is faster than sorting all, except on a GPU."""
        if sizes.is_cuda:
            return float(sizes.sort().values[-number])
        return float(sizes.kthvalue(len(sizes) - number + 1).values)

    def _list_sizes(self, flat: Tensor, i: int) -> Tensor:
        """|delta| of what is kept of a model."""
        opened = (self._open(i, start, base) for start, base in self._chunks(flat))
        return torch.cat([abs(delta[mask]) for delta, mask, _ in opened])

    def _find_bounds(self, flat: Tensor) -> None:
        bounds = []
        for i in self.parts:
            thinning = self.settings.thinnings[i]
            ends = thinning.list_ends(flat.numel())
            sizes = self._list_sizes(flat, i) if ends else flat
            found = [
                plain.find_end(sizes, self._find_size(sizes, number), number) for number in ends
            ]
            bounds.append(thinning.find_bounds(found))
        self.found.bounds = tuple(bounds)

    def _find_sums(self, flat: Tensor) -> None:
        chunks = []
        for start, base in self._chunks(flat):
            parts = {i: self._open(i, start, base) for i in self.parts}
            chunks.append(
                tuple(plain.add_sizes(parts, plain.thin_for_look(self.settings, parts, self.found)))
            )
        self.found.factors = find_factors(self.settings, list(self.parts), fold_columns(chunks))

    def _find_floors(self, flat: Tensor) -> None:
        sizes = (self._list_sizes(flat, i) for i in self.parts)
        ranks = ((each, rank_of_floor(self.settings.keep_ratio, len(each))) for each in sizes)
        self.found.floors = tuple(
            self._find_size(each, rank) if len(each) else 0.0 for each, rank in ranks
        )

    def _find_products(self, flat: Tensor) -> None:
        chunks = []
        for start, base in self._chunks(flat):
            parts = {i: self._open(i, start, base) for i in self.parts}
            chunks.append(
                plain.multiply_ends(base, plain.thin_for_look(self.settings, parts, self.found))
            )
        self.found.products = fold_columns(chunks)

    def _encode(self, values: Tensor) -> Tensor:
        if self.real == torch.float64 and self.dtype in (torch.bfloat16, torch.float16):
            values = plain.round_to_odd(values)  # torch goes by way of float32 and rounds twice
        return values.to(self.dtype)
