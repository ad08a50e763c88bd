"""The two matrices of a LoRA, by all names that they have, and the tensor that they make.

A is rank x inputs and B outputs x rank; of a convolution, the sizes of its kernel are behind.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from darelib.core.formats import FORMATS
from darelib.core.text import DareError
from darelib.models.checkpoint import QUANTISE_HINT
from darelib.models.encodings import Product, TensorInfo, drop_ones
from darelib.models.lora import UNLOAD_HINT, LoraAdapter, LowRank
from darelib.models.tensorfile import AGAIN_HINT

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


class Pair(NamedTuple):
    """The matrices of one module, and what goes with them."""

    title: str  # the module and the adapter, in words
    a: TensorInfo
    b: TensorInfo
    is_embedding: bool
    alpha: TensorInfo | None
    magnitudes: TensorInfo | None  # of DoRA, one for each output

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def sort_parts(tensors: Mapping[str, TensorInfo], adapter: str) -> dict[str, dict[str, TensorInfo]]:
    """What an adapter has of each module; all that is not of a plain LoRA or DoRA is refused."""
    modules = defaultdict[str, dict[str, TensorInfo]](dict)
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


def make_pair(module: str, parts: Mapping[str, TensorInfo], adapter: str) -> Pair:
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
    base: TensorInfo,
    scale: float,
    is_turned: bool,
    whole: TensorInfo | None = None,
) -> TensorInfo:
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
            f"{pair.title} is {list(shape)}, and what was saved of it {list(whole.shape)} as "
            f"{whole.dtype}",
            AGAIN_HINT,
        )
    # A convolution of a single point is a matrix, and may be stored as either.
    fits = drop_ones(shape) == drop_ones(base.shape)
    if pair.magnitudes and not whole:
        if not fits:
            raise DareError(
                f"{pair.title} has another shape than in the base, and DoRA sets the magnitudes "
                "of what it changes",
                "give the model that it was trained on",
            )
        whole = base
    left, right = (pair.a, pair.b) if transposed else (pair.b, pair.a)
    encoding = LowRank(
        product=Product(left, right, pair.rank, transposed, scale, pair.magnitudes),
        columns=right.count // pair.rank,
        adapter=adapter,
        whole=whole,
        whole_is_base=whole is base,
    )
    dtype = "F64" if base.dtype == "F64" else "F32"
    return TensorInfo(dtype, base.shape if fits else shape, encoding=encoding)
