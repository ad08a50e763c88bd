"""One tensor in memory: the same merge, bit for bit, by torch's operations on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import torch

from darelib.core.mask import TILE
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
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.kernels import plain

Tensor = torch.Tensor
Draw = Callable[
    [tuple[int, int], int, int], Tensor
]  # the mask's bits, by key, first tile and tiles


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
    """One tensor's merge: the operations of darelib.kernels.plain in their order, so that the bits
    are the same.

    parts: of the models that have it, by number; flat, with as many elements as the base.
    keys: of their masks. draw: draws these on the base's device, if not as plain does.
    """

    def __init__(
        self,
        name: str,
        settings: TensorSettings,
        base: Tensor,
        parts: Mapping[int, Tensor],
        keys: Mapping[int, tuple[int, int]],
        draw: Draw | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.base = base
        self.flat = base.reshape(-1)
        self.parts = parts
        self.keys = keys
        self.draw = draw or partial(
            plain.draw_bits, arange=partial(torch.arange, device=base.device)
        )
        self.found = Found()

    def run(self, output: Tensor) -> None:
        self.dtype = output.dtype
        types = {self.dtype, self.base.dtype, *(part.dtype for part in self.parts.values())}
        self.real = torch.float64 if torch.float64 in types else torch.float32
        models = list(self.parts)
        # The output may be the base, of which ranks need whole rows.
        ranked = any(thinning.scheme.thresholds for thinning in self.settings.thinnings)
        at_once = output.is_contiguous() and not ranked
        target = output.view(-1) if at_once else torch.empty_like(self.flat, dtype=self.dtype)
        if models and self.flat.numel():
            for look in choose_looks(self.settings, models):
                FINDERS[look](self, self.flat)
        coefficients = METHODS[self.settings.method].weigh(self.settings, models, self.found)
        for start, base in self._chunks(self.flat):
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
        thinning = self.settings.thinnings[i]
        stop = start + len(base)
        bits = self.draw(self.keys[i], start // TILE, -(-len(base) // TILE))[: len(base)]
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
        """One of them, counted from the largest down: finding it is faster than sorting all, except
        on a GPU.
        """
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


FINDERS: Final[dict[type[Look], Callable[[TensorMerge, Tensor], None]]] = {
    BoundsLook: TensorMerge._find_bounds,
    SumsLook: TensorMerge._find_sums,
    TrimLook: TensorMerge._find_floors,
    ArcLook: TensorMerge._find_products,
}
