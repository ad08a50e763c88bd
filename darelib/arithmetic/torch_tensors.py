"""One tensor in memory: the same merge, bit for bit, by torch's operations on any device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from darelib.arithmetic import definition
from darelib.arithmetic.matrix_engine import merge_matrices
from darelib.arithmetic.stored import round_to_odd
from darelib.core.arrays import Matrices
from darelib.core.mask import TILE
from darelib.core.text import DareError
from darelib.core.tuning import TUNING
from darelib.methods import METHODS, returns_model
from darelib.methods.looks import Found, TensorSettings

Tensor = torch.Tensor
# The mask's bits, by key, first tile and tiles.
Draw = Callable[[tuple[int, int], int, int], Tensor]

# Settings whose solutions a search remembers: each takes as much memory as a model in float32.
MOST_SOLUTIONS: Final = 4


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


class Solutions:
    """The merged changes of matrices, for the next merge of the same tensors: all that differs only
    in lambda has the same.
    """

    def __init__(self) -> None:
        self._known: dict[object, dict[str, Tensor]] = {}  # by settings, the latest last
        self.changes: dict[str, Tensor] = {}  # of the settings that were chosen

    def open(self, key: object) -> None:
        """Choose those of some settings."""
        self.changes = self._known.pop(key, {})
        self._known[key] = self.changes
        if len(self._known) > MOST_SOLUTIONS:
            self._known.pop(next(iter(self._known)))

    def keep(self, name: str, change: Tensor) -> None:
        """Remember a change, so long as there is room for as much again."""
        free = torch.cuda.mem_get_info(change.device)[0] if change.is_cuda else change.nbytes * 2
        if change.nbytes * 2 <= free:
            self.changes[name] = change


@dataclass
class TensorMerge:
    """One tensor's merge: the definition's operations in their order, so that the bits are the
    same.
    """

    name: str
    settings: TensorSettings
    base: Tensor
    parts: Mapping[int, Tensor]  # of the models that have it; flat, of as many elements as the base
    keys: Mapping[int, tuple[int, int]]  # of their masks
    draw: Draw  # draws these, on the base's device
    matrices: Matrices | None  # what it consists of, where these are merged as a whole
    solutions: Solutions | None  # where their changes are remembered, in a search

    def run(self, output: Tensor) -> None:
        self.flat = self.base.reshape(-1)
        self.dtype = output.dtype
        types = {self.dtype, self.base.dtype, *(part.dtype for part in self.parts.values())}
        self.real = torch.float64 if torch.float64 in types else torch.float32
        models = list(self.parts)
        # The output may be the base, of which ranks need whole rows.
        ranked = any(thinning.scheme.thresholds for thinning in self.settings.thinnings)
        at_once = output.is_contiguous() and not ranked
        target = output.view(-1) if at_once else torch.empty_like(self.flat, dtype=self.dtype)
        width = self.base.shape[-1] if self.base.shape else 1
        bits = torch.finfo(self.real).bits
        count = len(self.flat)
        found = definition.look_up(self.settings, models, self._open_pieces, count, bits, width)
        own = METHODS[self.settings.method].weigh(self.settings, models, found)
        change = self.solutions.changes.get(self.name) if self.solutions else None
        if self.matrices and change is None:
            change = self._solve(found)
            if self.solutions:
                self.solutions.keep(self.name, change)
        for start, base in self._chunks():
            if change is None:
                kept = {i: self._open(i, start, base, found) for i in models}
                values = definition.merge_piece(self.settings, base, kept, own, start, width)
            else:
                part = change[start : start + len(base)]
                values = definition.add_change(base, part, self.settings.lambda_coeff)
            if models and returns_model(self.settings):
                values = self._read(self.parts[0], start, start + len(base))
            if self.real == torch.float64 and self.dtype.itemsize == 2:
                # On its own, torch goes by way of float32, and rounds twice.
                values = round_to_odd(values)
            result = values.to(self.dtype)
            if not bool(torch.isfinite(result).all()):
                raise explain_broken(self.name, None, self.dtype)
            target[start : start + len(base)] = result
        if not at_once:
            output.copy_(target.reshape(output.shape))

    def _solve(self, found: Found) -> Tensor:
        """The merged change of a tensor whose matrices are merged as a whole."""
        models = list(self.parts)
        deltas = torch.empty(
            (len(models), len(self.flat)), dtype=self.real, device=self.flat.device
        )
        place = 0
        for base, parts in self._open_pieces(models, found):
            thinned = definition.thin_for_look(self.settings, parts, found)
            for row, i in enumerate(models):
                deltas[row, place : place + len(base)] = thinned[i]
            place += len(base)
        weights = [self.settings.weights[i] for i in models]
        count, rows, columns = self.matrices or (1, 1, 1)
        shaped = deltas.view(len(models), count, rows, columns)
        merged = [
            merge_matrices(list(shaped[:, k]), weights, self.settings, self.dtype.itemsize > 2)
            for k in range(count)
        ]
        return torch.stack(merged).view(-1)

    def _read(self, flat: Tensor, start: int, stop: int) -> Tensor:
        return flat[start:stop].to(self.real)

    def _chunks(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.flat.numel(), TUNING.memory_chunk):
            yield start, self._read(self.flat, start, start + TUNING.memory_chunk)

    def _open_pieces(
        self, models: Sequence[int], found: Found
    ) -> Iterator[tuple[Tensor, dict[int, definition.Kept]]]:
        for start, base in self._chunks():
            yield base, {i: self._open(i, start, base, found) for i in models}

    def _open(self, i: int, start: int, base: Tensor, found: Found) -> definition.Kept:
        """A model's delta, and what is kept of it, for a chunk of the base."""
        stop = start + len(base)
        delta = self._read(self.parts[i], start, stop) - base
        if not bool(torch.isfinite(delta).all()):
            raise explain_broken(self.name, i, self.dtype)
        thinning = self.settings.thinnings[i]
        bits = self.draw(self.keys[i], start // TILE, -(-len(base) // TILE))[: len(base)]
        thresholds = thinning.threshold
        if thinning.scheme.thresholds:  # by ranks, which whole rows decide
            width = found.width
            first = start // width * width
            last = -(-stop // width) * width
            whole = self._read(self.parts[i], first, last) - self._read(self.flat, first, last)
            thresholds = definition.find_thresholds(thinning, whole, width)[
                start - first : stop - first
            ]
        bounds = dict(zip(self.parts, found.bounds, strict=False)).get(i)
        return definition.keep(delta, bits, thresholds, bounds, thinning.divides_each)
