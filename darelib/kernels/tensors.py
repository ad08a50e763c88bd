"""Tensors in memory: the same merge, bit for bit, by torch's operations on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from darelib.config import DareConfig
from darelib.formats import DTYPES
from darelib.mask import ROUNDS, TILE, mask_key
from darelib.methods import METHODS, ArcLook, Coefficients, TrimLook, rank_of_floor, weigh_for_look
from darelib.text import ConfigError, DareError, list_names
from darelib.tuning import TUNING

Tensor = torch.Tensor


def drop_deltas(deltas: Mapping[str, Tensor], config: DareConfig) -> dict[str, Tensor]:
    """Deltas, thinned: a merge of one model whose base is 0. Tensors that are not floats are left as they are."""
    config.check_models(1)
    zeros = {name: delta.new_zeros(()).expand(delta.shape) for name, delta in deltas.items()}
    return {
        name: TensorMerge(config, 1, name, zeros[name], {0: delta}).run()
        if delta.is_floating_point()
        else delta.clone()
        for name, delta in deltas.items()
    }


def merge_tensors(
    base: Mapping[str, Tensor], finetuned: Sequence[Mapping[str, Tensor]], config: DareConfig
) -> dict[str, Tensor]:
    """The merged state dict."""
    if isinstance(finetuned, Mapping) or not finetuned:
        raise ConfigError("finetuned must be a list of state dicts with at least one in it", "put it in brackets")
    config.check_models(len(finetuned))
    for i, model in enumerate(finetuned):
        if not model.keys() & base.keys():
            raise DareError(
                f"model {i} has no tensor in common with the base", f"the base has {list_names(list(base))}"
            )
    merged = {}
    for name, tensor in base.items():
        parts = {i: model[name] for i, model in enumerate(finetuned) if name in model}
        for i, part in parts.items():
            _check_alike(name, tensor, i, part)
        quantised = tensor.element_size() == 1  # copied where equal, else refused
        if tensor.is_floating_point() and not (quantised and all(_same_bytes(tensor, p) for p in parts.values())):
            merged[name] = TensorMerge(config, len(finetuned), name, tensor, parts).run()
        else:
            merged[name] = tensor.clone()
    return merged


def _check_alike(name: str, tensor: Tensor, i: int, part: Tensor) -> None:
    if part.shape != tensor.shape or part.is_floating_point() != tensor.is_floating_point():
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
        flat = self.base.reshape(-1)
        output = torch.empty(flat.shape, dtype=self.dtype, device=flat.device)
        coefficients = self._look(flat)
        for start, base in self._chunks(flat):
            result = self._encode(self._merge_chunk(base, start, coefficients))
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

    def _look(self, flat: Tensor) -> Coefficients:
        """What must be known of the whole tensor, and the coefficients that follow from it."""
        look = None
        if self.parts and flat.numel():
            bits = 64 if self.real == torch.float64 else 32
            look = self.method.look(self.settings, list(self.parts), flat.numel(), bits)
        if look is not None:
            LOOKS[look.kernel](self, look, flat)
        return self.method.weigh(self.settings, list(self.parts), look)

    def _merge_chunk(self, base: Tensor, start: int, coefficients: Coefficients) -> Tensor:
        rows = [
            self._thin(i, base, start, scale, floor)
            for i, scale, floor in zip(self.parts, coefficients.scales, coefficients.floors, strict=True)
        ]
        if len(self.parts) == 1 and self.settings.returns_model:
            return self.parts[0][start : start + len(base)].to(self.real)
        merged = base.new_tensor(coefficients.base_share) * base
        for row in rows:
            merged = merged + row
        if self.method.kernel == "elect":
            merged = self._elect(merged, rows, coefficients.weights)
        change = base.new_tensor(self.settings.lambda_coeff) * merged
        return torch.where(change == 0, base, base + change)

    def _elect(self, merged: Tensor, rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        total, share, zero = torch.zeros_like(merged), torch.zeros_like(merged), merged.new_tensor(0.0)
        for row, weight in zip(rows, weights, strict=True):
            agrees = torch.where(merged >= 0, row > 0, row < 0)
            total = total + torch.where(agrees, row, zero)
            share = share + torch.where(agrees, merged.new_tensor(weight), zero)
        return torch.where(share > 0, total / share, zero)

    def _thin(self, i: int, base: Tensor, start: int, scale: float, floor: float = 0.0) -> Tensor:
        delta, mask = self._delta_and_mask(i, base, start)
        if not bool(torch.isfinite(delta).all()):
            raise DareError(
                f"tensor {self.name!r} of the base or of model {i} holds a value that is not finite",
                "such a model is broken; use a checkpoint from before that happened",
            )
        kept = mask & (delta.abs() >= base.new_tensor(floor))
        return torch.where(kept, delta * base.new_tensor(scale), base.new_tensor(0.0))

    def _delta_and_mask(self, i: int, base: Tensor, start: int) -> tuple[Tensor, Tensor]:
        delta = self.parts[i][start : start + len(base)].to(self.real) - base
        bits = draw_bits(mask_key(self.seed + i, self.name), start, len(base), base.device)
        return delta, bits < self.settings.drop.threshold(self.settings.drop_rates[i])

    def _find_floors(self, look: TrimLook, flat: Tensor) -> None:
        """Trim: finding one value is faster than sorting all, except on a GPU."""
        for row, i in enumerate(self.parts):
            found = (self._delta_and_mask(i, base, start) for start, base in self._chunks(flat))
            sizes = torch.cat([delta[mask].abs() for delta, mask in found])
            if len(sizes):
                place = len(sizes) - rank_of_floor(self.settings.keep_ratio, len(sizes))
                value = sizes.sort().values[place] if sizes.is_cuda else torch.kthvalue(sizes, place + 1).values
                look.floors[row] = float(value)

    def _find_products(self, look: ArcLook, flat: Tensor) -> None:
        """Slerp: |end 0|^2, |end 1|^2 and end 0 . end 1, added up in the fixed order."""
        sums: list[list[Tensor]] = [[], [], []]
        scales = dict(zip(self.parts, weigh_for_look(self.settings, list(self.parts)).scales, strict=True))
        for start, base in self._chunks(flat):
            ends = [base + self._thin(i, base, start, scales[i]) if i in self.parts else base for i in range(2)]
            for tiles, (left, right) in zip(sums, ((0, 0), (1, 1), (0, 1)), strict=True):
                tiles.append(_fold_tiles(ends[left].double() * ends[right].double()))
        look.conclude(*(_fold_neighbours(torch.cat(tiles)) for tiles in sums))

    def _encode(self, values: Tensor) -> Tensor:
        if self.real == torch.float64 and self.dtype in (torch.bfloat16, torch.float16):
            # torch rounds float64 to 16 bits by way of float32, twice; plain.round_to_odd says why this does not.
            bits = values.to(torch.float32).view(torch.int32)
            bits = bits - (bits.view(torch.float32).double().abs() > values.abs()).to(torch.int32)
            bits = bits | (bits.view(torch.float32).double() != values).to(torch.int32)
            values = bits.view(torch.float32)
        return values.to(self.dtype)


# How a look is done here, by the kernel that would do it.
LOOKS: Final[dict[str, Callable[[TensorMerge, Any, Tensor], None]]] = {
    TrimLook.kernel: TensorMerge._find_floors,
    ArcLook.kernel: TensorMerge._find_products,
}


def _fold_tiles(values: Tensor) -> Tensor:
    tiles = torch.nn.functional.pad(values, (0, -len(values) % TILE)).reshape(-1, TILE)
    while tiles.shape[1] > 1:
        half = tiles.shape[1] // 2
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def _fold_neighbours(sums: Tensor) -> float:
    while len(sums) > 1:
        sums = torch.nn.functional.pad(sums, (0, len(sums) % 2))
        sums = sums[::2] + sums[1::2]
    return float(sums)


def draw_bits(key: tuple[int, int], start: int, count: int, device: torch.device) -> Tensor:
    """The 16 random bits of count elements from a multiple of TILE on: what plain.draw_bits gives."""
    tiles, low = -(-count // TILE), 0xFFFFFFFF
    block = torch.arange(start // 8, start // 8 + tiles * (TILE // 8), device=device)
    x0, x1, x2, x3 = block & low, block >> 32, torch.zeros_like(block), torch.zeros_like(block)
    a, b = key
    for _ in range(ROUNDS):
        p0, p1 = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1 = ((p1 >> 32) & low) ^ x1 ^ a, p1 & low
        x2, x3 = ((p0 >> 32) & low) ^ x3 ^ b, p0 & low
        a, b = (a + 0x9E3779B9) & low, (b + 0xBB67AE85) & low
    pieces = torch.stack([piece.to(torch.int32) for x in (x0, x1, x2, x3) for piece in (x & 0xFFFF, x >> 16)])
    return pieces.reshape(8, tiles, TILE // 8).transpose(0, 1).reshape(-1)[:count]
