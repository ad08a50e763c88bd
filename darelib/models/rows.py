"""Models with other tokens or token ids: embeddings and heads with their rows in one order."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.stored import round_to
from darelib.core.formats import FORMATS
from darelib.core.text import DareError, list_names
from darelib.models.checkpoint import EMBEDDINGS, HEADS, Checkpoint
from darelib.models.tensor import Known, Tensor
from darelib.models.vocabulary import (
    UNITE_HINT,
    Union,
    Vocabulary,
    check_gaps,
    digest_tokenizer,
    read_vocabulary,
    unite,
)

Values: TypeAlias = NDArray[Any]  # floats
Fill: TypeAlias = Callable[[int, int, str], Values]  # makes up elements: start, count, type

# What has a row for each token.
ROW_TENSORS: Final = (
    *EMBEDDINGS,
    *HEADS,
    "lm_head.bias",
    "embed_out.bias",
    "cls.predictions.bias",
)
NO_ROW: Final = -1
MEAN_CHUNK: Final = 1 << 20  # elements that are read at once


@dataclasses.dataclass(frozen=True, eq=False)
class Rows(Tensor):
    """The rows of a stored tensor in another order, some of them made up."""

    stored: Tensor
    width_of_rows: int
    order: NDArray[np.int64] = dataclasses.field(repr=False)  # for each row, the stored one
    # For rows that are not stored.
    fill: Fill = dataclasses.field(repr=False)

    @property
    def is_delta(self) -> bool:
        return self.stored.is_delta

    @property
    def stored_bytes(self) -> int:
        return self.stored.stored_bytes if self.is_delta else self.nbytes

    def read(self, start: int, count: int, known: Known | None = None) -> Values:
        real = choose_real(self, self.stored)
        values = np.empty(count, real)
        is_exact = self.stored.dtype == self.dtype
        for first, last in self._find_runs(start, start + count):
            row = int(self.order[first // self.width_of_rows])
            place = row * self.width_of_rows + first % self.width_of_rows
            size = last - first
            part = self.fill(first, size, real) if row == NO_ROW else self.stored.read(place, size)
            if row == NO_ROW or not is_exact:
                part = round_to(part, self.dtype)
            values[first - start : last - start] = part
        return values

    def _find_runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Ranges of elements that lie one after the other in the stored tensor, or are all to be
        made up.
        """
        width = self.width_of_rows
        first = start // width
        order = self.order[first : -(-stop // width)]
        stored = order != NO_ROW
        follows = np.diff(order) == 1
        breaks = np.flatnonzero((stored[:-1] | stored[1:]) & ~(stored[:-1] & follows))
        ends = [(first + 1 + int(k)) * width for k in breaks]
        yield from itertools.pairwise([start, *ends, stop])


def choose_real(*tensors: Tensor) -> str:
    return "f8" if "F64" in [tensor.dtype for tensor in tensors] else "f4"


def make_zeros(_: int, count: int, real: str) -> Values:
    return np.zeros(count, real)


def read_as(tensor: Tensor, start: int, count: int, real: str) -> Values:
    return tensor.read(start, count).astype(real, copy=False)


def unite_tokens(
    inputs: Sequence[Checkpoint], owner: Checkpoint | None = None, multiple: int = 0
) -> None:
    """Give the base and its fine-tunes the same tokens, with the same ids: the tokens of all of
    them, or those of one (owner).

    multiple: the number of rows becomes a multiple of this; 0: of any number.
    """
    base, *models = inputs
    names = [n for n, info in base.tensors.items() if n.endswith(EMBEDDINGS) and info.count]
    for model in inputs:
        check_alike(model)
    try:
        vocabulary, *others = (read_vocabulary(model.folder, model.name) for model in inputs)
    except DareError:
        if owner and not multiple:  # rows are merged as they are, with a warning
            return
        raise
    if owner and not multiple and not (vocabulary and names):
        return
    if vocabulary is None or not names:
        what = "embedding that is known by its name" if vocabulary else "tokenizer.json"
        raise DareError(f"{base.name!r} has no {what}", UNITE_HINT)
    named = [(model.name, tokens) for model, tokens in zip(models, others, strict=True)]
    if owner:
        own = [vocabulary, *others][inputs.index(owner)]
        union = Union(vocabulary, tuple(others), owner=own)
    else:
        union = unite(vocabulary, named)
    if not union.moves and not multiple:
        return
    check_gaps([("the base", vocabulary), *named])
    embedding = names[0]
    height = base.tensors[embedding].shape[0]
    for name, info in dict(base.tensors).items():
        has_rows = name.endswith(ROW_TENSORS) and info.shape[:1] == (height,)
        if has_rows and info.dtype in FORMATS:
            if info.kind:
                raise DareError(
                    f"{name!r} of {base.name!r} is in {info.kind}, so that it cannot have "
                    "more rows",
                    "use --tokenizer base, or a base whose embedding and head are not quantised",
                )
            Arrangement(name, embedding, inputs, union, multiple).arrange()
    for model in inputs:
        model.added = union.added
        model.tokenizer_sha256 = digest_tokenizer(model.folder)
    base.heights = height, base.tensors[embedding].shape[0]


def check_alike(model: Checkpoint) -> None:
    """Refuse a stack of layers of models with different token ids: its head may be of any."""
    first, *others = model.parts
    if not others:
        return
    tokens = read_vocabulary(first.folder, first.name)
    for part in others:
        theirs = read_vocabulary(part.folder, part.name)
        if (theirs and theirs.ids) != (tokens and tokens.ids):
            raise DareError(
                f"{first.name!r} and {part.name!r} have different tokenizers, so their layers "
                "cannot be put together with another one's",
                "use --tokenizer base, which leaves all rows as they are",
            )


@dataclasses.dataclass(frozen=True)
class Padding:
    """Fills rows after the last token with the mean of a model's rows, as mergekit does."""

    tokens: Tensor  # the rows that have one
    width: int
    fill: Fill  # of these

    def __call__(self, start: int, count: int, real: str) -> Values:
        before = min(max(self.tokens.count - start, 0), count)
        columns = np.arange(start + before, start + count) % self.width
        padding = self.mean[columns].astype(real)
        return np.concatenate([self.fill(start, before, real), padding]) if before else padding

    @cached_property
    def mean(self) -> Values:
        """Of the rows with tokens, some at a time: all of them may not fit into memory."""
        total = np.zeros(self.width)
        step = max(1, MEAN_CHUNK // self.width) * self.width
        for start in range(0, self.tokens.count, step):
            count = min(step, self.tokens.count - start)
            values = read_as(self.tokens, start, count, "f8")
            total += values.reshape(-1, self.width).sum(0)
        return total / self.tokens.shape[0]


class Arrangement:
    """Puts the rows of one tensor into the order of the union, in all models.

    A token that the base lacks has the mean of the rows of the models that have it, and a model
    that lacks a token has not changed the base's row. So only what base and model both have can
    differ, and is merged.
    """

    def __init__(
        self,
        name: str,
        embedding: str,
        inputs: Sequence[Checkpoint],
        union: Union,
        multiple: int = 0,
    ) -> None:
        self.name = name
        self.union = union
        self.base, *self.models = inputs
        self.info = self.base.tensors[name]
        self.height = union.size if union.owner else max(self.info.shape[0], union.size)
        if multiple:
            self.height = -(-union.size // multiple) * multiple
        # The rows from here on are padding.
        self.end = union.size if multiple else self.height
        self.width = self.info.count // self.info.shape[0]
        self.givers: list[
            tuple[Tensor, NDArray[np.int64]]
        ] = []  # the models with rows for new tokens
        self.new = [n for n, token in union.tokens.items() if token not in union.base.ids]
        # A head may be tied.
        self.names = (name, embedding) if name.endswith(HEADS) else (name,)

    def arrange(self) -> None:
        order = self._find_rows(self.union.base, self.info, self.base.name)
        self._replace(self.base, self.info, order, self._average, self.info.dtype)
        for model, vocabulary in zip(self.models, self.union.models, strict=True):
            stored = [model.tensors[name] for name in self.names if name in model.tensors]
            if stored:
                self._arrange_model(model, stored[0], vocabulary)
        orphans = [self.union.tokens[n] for n in self.new if not self._find_givers(n)]
        if orphans:
            raise DareError(
                f"no model has a row of {self.name!r} for {list_names(orphans)}",
                "use --tokenizer base",
            )

    def _find_givers(self, row: int) -> list[tuple[Tensor, NDArray[np.int64]]]:
        return [giver for giver in self.givers if giver[1][row] != NO_ROW]

    def _arrange_model(
        self, model: Checkpoint, theirs: Tensor, vocabulary: Vocabulary | None
    ) -> None:
        if theirs.mask_name is not None:
            raise DareError(
                f"{model.name!r} is packed, so that its rows cannot be moved",
                "give the model itself",
            )
        if theirs.dtype not in FORMATS or theirs.shape[1:] != self.info.shape[1:]:
            return
        if vocabulary is None and theirs.shape[0] != self.info.shape[0]:
            raise DareError(
                f"{model.name!r} has {theirs.shape[0]:,} rows where the base has "
                f"{self.info.shape[0]:,}, and no tokenizer.json that names their tokens",
                "put its tokenizer.json beside it",
            )
        order = self._find_rows(vocabulary or self.union.base, theirs, model.name)
        if not theirs.is_delta:
            self.givers.append((theirs, order.copy()))
        # Where the base has what the models give, none of them differs from it.
        order[self.new] = NO_ROW
        united = self.base.tensors[self.name]
        fill = make_zeros if theirs.is_delta else partial(read_as, united)
        exact = theirs.is_delta or theirs.dtype == self.info.dtype or NO_ROW not in order
        wide = "F64" if "F64" in (theirs.dtype, self.info.dtype) else "F32"
        self._replace(model, theirs, order, fill, theirs.dtype if exact else wide)

    def _replace(
        self, model: Checkpoint, stored: Tensor, order: NDArray[np.int64], fill: Fill, dtype: str
    ) -> None:
        shape = (self.height, *stored.shape[1:])
        rows = Rows(dtype, shape, stored, self.width, order, fill, folder=stored.folder)
        if self.end < self.height:
            tokens = dataclasses.replace(rows, shape=(self.end, *shape[1:]))
            rows = dataclasses.replace(rows, fill=Padding(tokens, self.width, fill))
        model.tensors[self.name] = rows

    def _average(self, start: int, count: int, real: str) -> Values:
        made = np.zeros(count, real)
        for row in range(start // self.width, -(-(start + count) // self.width)):
            first = max(start, row * self.width)
            last = min(start + count, (row + 1) * self.width)
            part = made[first - start : last - start]
            givers = self._find_givers(row)
            for stored, order in givers:
                place = int(order[row]) * self.width + first % self.width
                part += stored.read(place, last - first)
            part /= len(givers)
        return made

    def _find_rows(self, model: Vocabulary, info: Tensor, name: str) -> NDArray[np.int64]:
        """For each row of the union, the model's own row for that token.

        A row without a token stays where it is.
        """
        own = info.shape[0]
        if model.size > own:
            raise DareError(
                f"the tokenizer of {name!r} has {model.size:,} tokens, and its embedding {own:,} "
                "rows",
                "its tokenizer belongs to another model",
            )
        taken = {*model.ids.values(), *self.union.tokens}
        order = np.full(self.height, NO_ROW, np.int64)
        free = [row for row in range(min(self.end, own)) if row not in taken]
        order[free] = free
        for token_id, token in self.union.tokens.items():
            order[token_id] = model.ids.get(token, NO_ROW)
        return order
