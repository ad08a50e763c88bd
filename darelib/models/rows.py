"""Models whose tokens have other numbers, or more of them: embeddings and heads with their rows in one common order."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.core.formats import FORMATS
from darelib.core.text import DareError, InputChanged, list_names
from darelib.kernels.plain import decode, encode
from darelib.models.checkpoint import EMBEDDINGS, HEADS, Checkpoint
from darelib.models.fp8 import ScaledTensor
from darelib.models.tensorfile import CHANGED_HINT, TensorInfo
from darelib.models.vocabulary import Union, Vocabulary, digest_tokenizer, read_vocabulary, unite

Values: TypeAlias = NDArray[Any]  # floats
Fill: TypeAlias = Callable[[int, int, str], Values]  # makes up elements, by start, count and type

# What has a row for each token.
ROW_TENSORS: Final = (*EMBEDDINGS, *HEADS, "lm_head.bias", "embed_out.bias", "cls.predictions.bias")
NO_ROW: Final = -1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the rows of a rearranged tensor come from."""

    stored: TensorInfo
    numbers: NDArray[np.int64]  # of the stored row, for each row
    width: int  # elements of a row
    fill: Fill  # for rows that are not stored


class Rearranged:
    """A model with the rows of some tensors in another order. Everything else is as the model has it."""

    def __init__(self, model: Checkpoint, added: tuple[dict[str, Any], ...]) -> None:
        self.model, self.added = model, added  # the tokens that models added to the base's
        self.tensors, self.heights = dict(model.tensors), (0, 0)
        self._tokenizer = digest_tokenizer(model.folder)
        self._rows: dict[int, Rows] = {}  # by the identity of what is known of the tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The tokenizer decides which rows are merged."""
        return self.model.fingerprint | (
            {"tokenizer_sha256": self._tokenizer} if self._tokenizer else {}
        )

    def check_unchanged(self) -> None:
        self.model.check_unchanged()
        if digest_tokenizer(self.model.folder) != self._tokenizer:
            raise InputChanged(
                f"the tokenizer of {self.model.name!r} changed while it was merged", CHANGED_HINT
            )

    def rearrange(self, name: str, rows: Rows, dtype: str) -> None:
        info = dataclasses.replace(
            rows.stored, dtype=dtype, shape=(len(rows.numbers), *rows.stored.shape[1:])
        )
        self.tensors[name] = info
        self._rows[id(info)] = rows

    def read(
        self, info: TensorInfo, start: int, count: int, into: NDArray[Any] | memoryview
    ) -> None:
        """Read elements of a tensor, as bytes of its type, into exactly as many bytes."""
        rows = self._rows.get(id(info))
        if rows is None:
            self.model.read(info, start, count, into)
            return
        raw, item, real = (
            np.frombuffer(into, np.uint8),
            FORMATS[info.dtype].itemsize,
            wider(info, rows.stored),
        )
        for first, last in find_runs(rows, start, start + count):
            part = raw[(first - start) * item : (last - start) * item]
            row, column = int(rows.numbers[first // rows.width]), first % rows.width
            if row == NO_ROW:
                part[:] = encode(rows.fill(first, last - first, real), info.dtype).view(np.uint8)
            elif rows.stored.dtype == info.dtype:
                self.model.read(rows.stored, row * rows.width + column, last - first, part)
            else:
                values = read_values(
                    self.model, rows.stored, row * rows.width + column, last - first, real
                )
                part[:] = encode(values, info.dtype).view(np.uint8)


def wider(*infos: TensorInfo) -> str:
    """The type to compute in."""
    return "F64" if "F64" in [info.dtype for info in infos] else "F32"


def read_values(
    model: Checkpoint | Rearranged, info: TensorInfo, start: int, count: int, real: str
) -> Values:
    stored = np.empty(count * FORMATS[info.dtype].itemsize, np.uint8)
    model.read(info, start, count, stored)
    return np.asarray(decode(stored, info.dtype, real))


def find_runs(rows: Rows, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that lie one after the other in the stored tensor, or are all to be made up."""
    first = start // rows.width
    numbers = rows.numbers[first : -(-stop // rows.width)]
    stored, follows = numbers != NO_ROW, np.diff(numbers) == 1
    breaks = np.flatnonzero((stored[:-1] | stored[1:]) & ~(stored[:-1] & follows))
    yield from itertools.pairwise(
        [start, *((first + 1 + int(k)) * rows.width for k in breaks), stop]
    )


def unite_tokens(inputs: Sequence[Checkpoint]) -> list[Any]:
    """The base and its fine-tunes with the tokens of all of them, each token with the same number everywhere."""
    base, *models = inputs
    vocabulary = read_vocabulary(base.folder, base.name)
    if vocabulary is None:
        raise DareError(
            f"{base.name!r} has no tokenizer.json",
            "for --tokenizer union, give a base with a tokenizer",
        )
    union = unite(
        vocabulary, [(model.name, read_vocabulary(model.folder, model.name)) for model in models]
    )
    united = [Rearranged(model, union.added) for model in inputs]
    embedding = next(
        (name for name, info in base.tensors.items() if name.endswith(EMBEDDINGS) and info.count),
        None,
    )
    if embedding is None:
        raise DareError(
            f"{base.name!r} has no embedding that is known by its name", "use --tokenizer base"
        )
    height = base.tensors[embedding].shape[:1]
    for name, info in base.tensors.items():
        if name.endswith(ROW_TENSORS) and info.shape[:1] == height and info.dtype in FORMATS:
            if isinstance(info, ScaledTensor):
                raise DareError(f"{name!r} of {base.name!r} is in FP8, so that it cannot have more rows",
                    "use --tokenizer base, or a base whose embedding and head are not quantised")  # fmt: skip
            _rearrange(name, embedding, united, union)
    united[0].heights = height[0], united[0].tensors[embedding].shape[0]
    return united


def _rearrange(name: str, embedding: str, united: Sequence[Rearranged], union: Union) -> None:
    """Put the rows of one tensor into the order of the union, in all models.

    A token that the base lacks has the mean of the rows of the models that have it, and a model that lacks a token has
    not changed the base's row. So only what base and model both have can differ, and is merged.
    """
    base, *models = united
    info = base.tensors[name]
    height, width = max(info.shape[0], union.size), info.count // info.shape[0]
    givers: list[tuple[Rearranged, Rows]] = []

    def average(start: int, count: int, real: str) -> Values:
        made = np.zeros(count, FORMATS[real].real)
        for row in range(start // width, -(-(start + count) // width)):
            first, last = max(start, row * width), min(start + count, (row + 1) * width)
            part, having = (
                made[first - start : last - start],
                [g for g in givers if g[1].numbers[row] != NO_ROW],
            )
            for giver, rows in having:
                place = int(rows.numbers[row]) * width + first % width
                part += read_values(giver.model, rows.stored, place, last - first, real)
            part /= len(having)
        return made

    new = [entry["id"] for entry in union.added]
    numbers = number_rows(union, union.base, height, info.shape[0], base.name)
    base.rearrange(name, Rows(info, numbers, width, average), info.dtype)
    for model, vocabulary in zip(models, union.models, strict=True):
        stored = model.model.tensors
        theirs = stored.get(name) or (
            stored.get(embedding) if name.endswith(HEADS) else None
        )  # a head may be tied
        if theirs is not None and theirs.mask_name is not None:
            raise DareError(
                f"{model.name!r} is packed, so that its rows cannot be moved",
                "give the model itself",
            )
        if theirs is None or theirs.dtype not in FORMATS or theirs.shape[1:] != info.shape[1:]:
            continue
        if vocabulary is None and theirs.shape[0] != info.shape[0]:
            raise DareError(
                f"{model.name!r} has {theirs.shape[0]:,} rows where the base has {info.shape[0]:,}, and no "
                "tokenizer.json that says what they stand for",
                "put its tokenizer.json beside it",
            )
        numbers = number_rows(union, vocabulary or union.base, height, theirs.shape[0], model.name)
        as_base: Fill = lambda *where: read_values(base, base.tensors[name], *where)  # noqa: E731
        no_change: Fill = lambda _, count, real: np.zeros(count, FORMATS[real].real)  # noqa: E731
        givers += (
            [] if theirs.is_delta else [(model, Rows(theirs, numbers.copy(), width, no_change))]
        )
        numbers[new] = (
            NO_ROW  # where the base has what the models give, none of them differs from it
        )
        rows = Rows(theirs, numbers, width, no_change if theirs.is_delta else as_base)
        exact = theirs.is_delta or theirs.dtype == info.dtype or bool((numbers != NO_ROW).all())
        model.rearrange(name, rows, theirs.dtype if exact else wider(theirs, info))
    orphans = [union.tokens[n] for n in new if all(rows.numbers[n] == NO_ROW for _, rows in givers)]
    if orphans:
        raise DareError(
            f"no model has a row of {name!r} for {list_names(orphans)}", "use --tokenizer base"
        )


def number_rows(
    union: Union, model: Vocabulary, height: int, own: int, name: str
) -> NDArray[np.int64]:
    """For each row of the union, the model's own row for that token. A row without a token stays where it is."""
    if model.size > own:
        raise DareError(f"the tokenizer of {name!r} has {model.size:,} tokens, and its embedding {own:,} rows",
            "its tokenizer belongs to another model")  # fmt: skip
    taken = set(model.numbers.values())
    numbers = np.full(height, NO_ROW, np.int64)
    free = [k for k in range(min(height, own)) if k not in taken and k not in union.tokens]
    numbers[free] = free
    for number, token in union.tokens.items():
        numbers[number] = model.numbers.get(token, NO_ROW)
    return numbers
