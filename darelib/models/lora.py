"""LoRA adapters: two small matrices for each tensor that they change, seen as tensors of the base.

An element is scale * (left @ right), with the products added in the order of the rank, so that it
has the same bits whatever range of elements is read. DoRA also sets the length of each output, its
magnitude. Its elements are those of the changed tensor:
magnitude / length * (base + scale * (left @ right)).
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from darelib.arithmetic.chunks import add_product
from darelib.core.formats import FORMATS
from darelib.core.text import DareError, count_of
from darelib.core.tuning import TUNING
from darelib.models.checkpoint import EMBEDDINGS, HEADS, QUANTISE_HINT, Checkpoint
from darelib.models.directories import Layout
from darelib.models.source import Source
from darelib.models.tensor import FactorPair, Factors, Known, Tensor, drop_ones
from darelib.models.tensorfile import AGAIN_HINT

Array = Any

UNLOAD_HINT: Final = (
    "merge it into its base with the program that made it (PEFT: merge_and_unload), and use the "
    "result as a model"
)
# By module: whether the matrices in it are stored as inputs x outputs, as GPT-2's.
Ways: TypeAlias = Mapping[str, set[bool]]
# Elements at a time whose squares are added. The sums' last bits depend on it.
SQUARED_ELEMENTS: Final = 1 << 16
MATRICES_AT_ONCE: Final = 4  # of which as many elements are held as there is room for
# How the name of a tensor ends that is a part of a LoRA. Between a letter and "weight" may stand
# what PEFT calls the adapter.
PART: Final = re.compile(
    r"(?:[._]lora[._](?:linear_layer\.)?((?:embedding_)?[AB]|down|up|magnitude_vector)"
    r"(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?|\.(alpha|dora_scale))$"
)
KOHYA_PARTS: Final = {"down": "A", "up": "B"}  # and what PEFT calls them
ALPHA: Final = "alpha"
MAGNITUDES: Final = ("magnitude_vector", "dora_scale")  # of DoRA: PEFT's; kohya's and LyCORIS's
# What torch.tensor makes of an alpha without a decimal point.
INTEGER_ALPHAS: Final = {"I64": "<i8", "I32": "<i4"}
# What XLabs' trainer and old versions of diffusers called modules: by their processors.
OLD_NAMES: Final = (
    *(
        (f"processor.{part}_lora{k}.", f"{side}_attn.{part}.lora_")
        for part in ("qkv", "proj")
        for k, side in ((1, "img"), (2, "txt"))
    ),
    ("processor.proj_lora.", "linear2.lora_"),
    (".processor.", "."),
    ("self_attn.to_out_lora", "self_attn.out_proj_lora"),
    ("to_out_lora", "to_out.0_lora"),
    *((f"self_attn.to_{x}_lora", f"self_attn.{x}_proj_lora") for x in "qkv"),
)
# What makes an adapter something else than a product of two matrices, and what people call it.
OTHER_PARTS: Final = {
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.lora_mid\.": "a LoCon of three matrices",
    r"\.oft_": "OFT",
    r"\.on_input$": "(IA)^3",
    r"\.[ab][12]\.weight$": "GLoRA",
}


class LoraAdapter(Checkpoint):
    """A LoRA adapter of any format: its tensors are those of the base that it changes."""

    partial = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"{source.name!r} is a LoRA adapter, where a model is needed",
                "give the model that it was trained on",
            )
        super().__init__(source, layout)
        self.base = base
        try:
            changes = self._find_changes(base)
        except BaseException:
            self.close()
            raise
        self.tensors = {name: info for name, info in changes.items() if name in base.tensors}
        self.unused = tuple(name for name in changes if name not in base.tensors)
        self._describe(base)

    def _find_changes(self, base: Checkpoint) -> dict[str, Tensor]:
        """The changed tensors by the base's names, and those that the base lacks by other names."""
        raise NotImplementedError

    @cached_property
    def _ways(self) -> Ways:
        """Which way the base's matrices are stored."""
        return find_ways(self.base.tensors)

    def _describe(self, base: Checkpoint) -> None:
        """Set what others ask about this kind of input."""
        known = [(info, info.product) for info in self.tensors.values()]
        pairs = [(info, product) for info, product in known if product]
        # All of the right matrix is held to read a product.
        sizes = (FORMATS[info.dtype].itemsize * product.right.count for info, product in pairs)
        self.held_bytes = max(sizes, default=0)
        ranks = sorted({product.rank for _, product in pairs})
        ends = " to ".join(map(str, sorted({*ranks[:1], *ranks[-1:]})))
        kind = "DoRA" if any(product.magnitudes for _, product in pairs) else "LoRA"
        kind += f" of rank {ends}" if ends else ""
        self.note = f"{kind}, changes {count_of(len(self.tensors), 'tensor')}"
        whole = [
            name
            for name, info in self.tensors.items()
            if name.endswith(EMBEDDINGS) and not info.product
        ]
        if whole and not any(name.endswith(HEADS) for name in base.tensors):
            self.warnings += (
                f"{self.name} has its own {whole[0]!r}, and the base uses that as its output head "
                "too: both change, where PEFT would leave the head as it was",
            )

    def close(self) -> None:
        MATRICES.forget(self)
        super().close()


class MatrixCache:
    """Matrices of adapters, read once and kept for a while: the next chunks, in any thread, need
    them too.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[LowRank, int, int], Array] = {}
        self._lock = threading.Lock()

    def find(self, key: tuple[LowRank, int, int], read: Callable[[], Array]) -> Array:
        with self._lock:
            matrix = self._kept.get(key)
        if matrix is None:
            matrix = read()
            with self._lock:
                self._kept[key] = matrix
                while sum(each.size for each in self._kept.values()) > TUNING.expand_elements:
                    del self._kept[next(iter(self._kept))]
        return matrix

    def forget(self, adapter: LoraAdapter) -> None:
        with self._lock:
            for key in [key for key in self._kept if key[0].adapter is adapter]:
                del self._kept[key]


MATRICES: Final = MatrixCache()


@dataclass(frozen=True, eq=False, kw_only=True)
class LowRank(Tensor):
    """The product of two matrices: a change, or added to the whole tensor that it changes."""

    product: FactorPair
    columns: int
    adapter: LoraAdapter = field(repr=False)
    # The tensor that it changes, where that was saved with it, or where DoRA needs its lengths.
    whole: Tensor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _factors: list[Array] = field(default_factory=list, repr=False)  # of DoRA, once found

    @property
    def real(self) -> str:
        return FORMATS[self.dtype].real

    @property
    def is_delta(self) -> bool:
        return self.whole is None

    @property
    def stored_bytes(self) -> int:
        parts = (self.product.left, self.product.right, self.whole, self.product.magnitudes)
        return sum(part.stored_bytes for part in parts if part)

    def read(self, start: int, count: int, known: Known | None = None) -> Array:
        made = self._expand(start, count, known)
        if count and self.product.magnitudes is not None:
            made *= self._spread_factors(start, count)
        return made

    def read_factors(self) -> Factors | None:
        if self.whole:
            return None
        product = self.product
        rows = slice(0, self.count // self.columns)
        ranks = slice(0, product.rank)
        left = self._read_matrix(product.left, rows, ranks)
        right = self._read_matrix(product.right, ranks, slice(0, self.columns))
        return left.astype(np.float64) * product.scale, right.astype(np.float64)

    def _expand(self, start: int, count: int, known: Known | None = None) -> Array:
        """Elements of the product, by as many ranks at a time as there is room for."""
        made = np.zeros(count, self.real)
        product = self.product
        rows = slice(start // self.columns, -(-(start + count) // self.columns))
        columns = slice(0, self.columns)
        room = TUNING.expand_elements // MATRICES_AT_ONCE
        step = max(1, room // max(self.columns, rows.stop - rows.start))
        for k in range(0, product.rank, step):
            ranks = slice(k, min(k + step, product.rank))
            left = self._read_matrix(product.left, rows, ranks)
            read_right = partial(self._read_matrix, product.right, ranks, columns)
            add_product(
                left, MATRICES.find((self, k, ranks.stop), read_right), made, start % self.columns
            )
        with np.errstate(over="ignore"):  # the merge finds what is out of range, and says where
            made *= made.dtype.type(product.scale)
        if self.whole is not None:
            is_known = known and known.tensor is self.whole and len(known.values) == count
            made += known.values if known and is_known else self.whole.read(start, count)
        return made

    def _spread_factors(self, start: int, count: int) -> Array:
        """For each element, the factor that gives its output its magnitude."""
        with self._lock:  # the first thread that needs them finds them
            if not self._factors:
                self._factors.append(self._find_factors())
        [factors] = self._factors
        rows = slice(start // self.columns, -(-(start + count) // self.columns))
        if self.product.transposed:
            spread = np.tile(factors, rows.stop - rows.start)
        else:
            spread = np.repeat(factors[rows], self.columns)
        return spread[start % self.columns :][:count]

    def _find_factors(self) -> Array:
        """For each output, its magnitude divided by its length, which is found by some whole rows
        at a time. An output is a row; of a transposed tensor, a column.
        """
        magnitudes = self.product.magnitudes
        assert magnitudes is not None
        squares = np.zeros(magnitudes.count)
        step = max(1, SQUARED_ELEMENTS // self.columns) * self.columns
        for start, stop in pairwise([*range(0, self.count, step), self.count]):
            made = self._expand(start, stop - start)
            squared = np.square(made.reshape(-1, self.columns), dtype=np.float64)
            if self.product.transposed:
                squares += squared.sum(axis=0)
            else:
                squares[start // self.columns : stop // self.columns] = squared.sum(axis=1)
        with np.errstate(all="ignore"):  # the merge finds what is not finite, and says where
            factors = magnitudes.read(0, magnitudes.count) / np.sqrt(squares)
            return factors.astype(self.real)

    def _read_matrix(self, stored: Tensor, rows: slice, columns: slice) -> Array:
        """A part of one of the two matrices, in the type that it is multiplied in.

        Of more than two dimensions, all after the first are its columns.
        """
        if self.product.transposed:
            rows, columns = columns, rows
        width = stored.count // stored.shape[0]
        count = columns.stop - columns.start
        if count == width:  # whole rows are one read
            values = stored.read(rows.start * width, (rows.stop - rows.start) * width)
        else:
            starts = range(rows.start * width + columns.start, rows.stop * width, width)
            values = np.concatenate([stored.read(start, count) for start in starts])
        matrix = values.reshape(-1, count)
        return np.ascontiguousarray(matrix.T if self.product.transposed else matrix, self.real)


# --- the matrices, by all names that they have --------------------------------------------------


class Pair(NamedTuple):
    """The matrices of one module, and what goes with them."""

    title: str  # the module and the adapter, in words
    a: Tensor
    b: Tensor
    is_embedding: bool
    alpha: Tensor | None
    magnitudes: Tensor | None  # of DoRA, one for each output

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def sort_parts(tensors: Mapping[str, Tensor], adapter: str) -> dict[str, dict[str, Tensor]]:
    """What an adapter has of each module; all that is not of a plain LoRA or DoRA is refused."""
    modules = defaultdict[str, dict[str, Tensor]](dict)
    for name, info in tensors.items():
        module, part = read_name(name, adapter)
        if info.dtype not in FORMATS and not (part == ALPHA and info.dtype in INTEGER_ALPHAS):
            raise DareError(
                f"tensor {name!r} of the adapter {adapter!r} is {info.dtype}", QUANTISE_HINT
            )
        if part in modules[module]:
            raise DareError(
                f"{adapter!r} holds several adapters: see {name!r}", "save each by itself"
            )
        modules[module][part] = info
    return modules


def read_name(name: str, adapter: str) -> tuple[str, str]:
    """The module and the part that a tensor is."""
    plain = name
    if "_lora" in name:
        for old, new in OLD_NAMES:
            plain = plain.replace(old, new)
    found = PART.search(plain)
    if not found:
        kinds = [words for part, words in OTHER_PARTS.items() if re.search(part, name)]
        kind = kinds[0] if kinds else "not a plain LoRA"
        raise DareError(f"the adapter {adapter!r} is {kind}: it holds {name!r}", UNLOAD_HINT)
    part = found[1] or found[2]
    return plain[: found.start()], KOHYA_PARTS.get(part, part)


def make_pair(module: str, parts: Mapping[str, Tensor], adapter: str) -> Pair:
    title = f"{module!r} of the adapter {adapter!r}"
    is_embedding = "embedding_A" in parts
    letters = ("embedding_A", "embedding_B") if is_embedding else ("A", "B")
    if parts.keys() - {ALPHA, *MAGNITUDES} != {*letters}:
        raise DareError(f"there is no pair of matrices A and B for {title}", AGAIN_HINT)
    a, b = (parts[letter] for letter in letters)
    rank = a.shape[0] if a.shape else 0
    is_pair = len(a.shape) > 1 and b.shape[1:2] == (rank,)
    if not is_pair or a.count == 0 or b.count != b.shape[0] * rank:
        raise DareError(
            f"the matrices {list(a.shape)} and {list(b.shape)} of {title} are no pair", AGAIN_HINT
        )
    magnitudes = next((parts[kind] for kind in MAGNITUDES if kind in parts), None)
    if magnitudes:
        # LyCORIS also has those of inputs, as [1, inputs]; PEFT's of convolutions are
        # [1, outputs, 1, 1].
        is_of_rows = "dora_scale" not in parts or magnitudes.shape[:1] == b.shape[:1]
        if not is_of_rows or magnitudes.count != b.shape[0]:
            raise DareError(
                f"the DoRA magnitudes {list(magnitudes.shape)} of {title} are not one for each "
                f"of its {b.shape[0]:,} outputs",
                UNLOAD_HINT,
            )
    return Pair(title, a, b, is_embedding, parts.get(ALPHA), magnitudes)


def make_product(
    adapter: LoraAdapter,
    pair: Pair,
    base: Tensor,
    scale: float,
    is_turned: bool,
    whole: Tensor | None = None,
) -> Tensor:
    """What a pair makes of a tensor of the base, or of the whole one that was saved with it.

    is_turned: whether a shape of inputs x outputs in the base is that, not another model's.
    """
    shape = (pair.b.shape[0], *pair.a.shape[1:])
    # Embeddings, and the layers of GPT-2, are stored as inputs x outputs.
    is_reverse = len(shape) == 2 and base.shape == shape[::-1]
    transposed = pair.is_embedding or (is_reverse and is_turned)
    shape = shape[::-1] if transposed else shape
    if whole and (whole.shape != shape or whole.dtype not in FORMATS):
        raise DareError(
            f"{pair.title} is {list(shape)}, but its saved weights are {list(whole.shape)} as "
            f"{whole.dtype}",
            AGAIN_HINT,
        )
    # A convolution of a single point is a matrix, and may be stored as either.
    fits = drop_ones(shape) == drop_ones(base.shape)
    if pair.magnitudes and not whole:
        if not fits:
            raise DareError(
                f"{pair.title} has another shape than in the base, and DoRA needs the base's rows",
                "give the model that it was trained on",
            )
        whole = base
    left, right = (pair.a, pair.b) if transposed else (pair.b, pair.a)
    return LowRank(
        "F64" if base.dtype == "F64" else "F32",
        base.shape if fits else shape,
        product=FactorPair(left, right, pair.rank, transposed, scale, pair.magnitudes),
        columns=right.count // pair.rank,
        adapter=adapter,
        whole=whole,
    )


# --- which way matrices are stored ---------------------------------------------------------------


def find_ways(tensors: Mapping[str, Tensor]) -> Ways:
    """By module: whether the matrices in it are stored as inputs x outputs, as biases show.

    A bias has a value for each output; of a square matrix, that shows nothing.
    """
    ways = defaultdict[str, set[bool]](set)
    for name, info in tensors.items():
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1]:
            for module in accumulate(name.split("."), "{}.{}".format):
                ways[module].add(bias.shape == info.shape[1:])
    return ways


def find_transposed(name: str, ways: Ways) -> bool | None:
    """Whether a matrix is stored as inputs x outputs, as are its neighbours; None: nobody knows."""
    parts = name.split(".")
    known = (ways[".".join(parts[:count])] for count in range(len(parts), 0, -1))
    found = next(filter(None, known), {True, False})
    return True in found if len(found) == 1 else None
