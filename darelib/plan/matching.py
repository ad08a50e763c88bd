"""Which models change which tensors of the base, and how: names, shapes, types, tied heads, quantised modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from darelib.config import Chooser, DareConfig, Rule
from darelib.core.drops import RANDOM
from darelib.core.formats import DTYPES, FORMATS, is_counted
from darelib.core.methods import METHODS, Found, Look, TensorSettings, choose_looks
from darelib.core.text import LISTED, DareError, count_of
from darelib.kernels import KernelSpec
from darelib.models.checkpoint import EMBEDDINGS, HEADS, QUANTISE_HINT, module_of, quantised_modules
from darelib.models.fp8 import FP8, ScaledTensor, Scales, is_activation_scale
from darelib.models.inputs import Input
from darelib.models.tensorfile import TensorInfo
from darelib.output.fp8 import PeakLook

# A longer row would take more memory than all else.
MAX_RANKED: Final = 1 << 20
SCALE_HINT: Final = "an F8_E4M3 weight needs a weight_scale or weight_scale_inv of F32 or BF16"


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorPlan:
    """One tensor of the output: where it comes from, how it is made and where it goes."""

    name: str
    base: TensorInfo
    finetuned: tuple[tuple[int, TensorInfo], ...]  # the models that have it, by number
    mask_names: tuple[
        str, ...
    ]  # what their masks are drawn by: its name, or the one whose values they share
    output: TensorInfo  # its file is one of the plan's, its offset counts from the end of that file's header
    merged: bool  # False: copied from the base
    settings: TensorSettings
    spec: KernelSpec  # the kernel that merges it
    quantised: bool
    rule: Rule | None = None  # that the settings come from; None: from no rule
    scales: Scales | None = None  # where they go, if it is written in FP8

    @property
    def scaled(self) -> ScaledTensor | None:
        """The base's tensor, where it is written in FP8 again."""
        return self.base if self.scales and isinstance(self.base, ScaledTensor) else None

    @property
    def models(self) -> list[int]:
        return [i for i, _ in self.finetuned]

    @property
    def outputs(self) -> dict[str, TensorInfo]:
        """All that is written for it, by name."""
        return {self.name: self.output} | (
            {self.scales.name: self.scales.info} if self.scales else {}
        )

    def move(self, file: int) -> TensorPlan:
        """The same in another file of the output."""
        scales = self.scales and replace(self.scales, info=replace(self.scales.info, file=file))
        return replace(self, output=replace(self.output, file=file), scales=scales)

    def look_spec(self, look: Look) -> KernelSpec:
        if look.merges:
            return self.spec
        return KernelSpec(look.kernel, self.base.dtype, self.spec.finetuned, self.spec.real)

    def list_passes(self) -> list[tuple[Look, int]]:
        """How it must be looked at before it is merged: the looks, one after the other, and the passes of each."""
        if not self.merged or not self.base.count:
            return []
        found, bits = Found(), FORMATS[self.spec.real].bits
        kinds = choose_looks(self.settings, self.models) if self.finetuned else []
        kinds = [*kinds, PeakLook] if self.scales and self.scales.whole else kinds
        looks = [kind(self.settings, self.models, self.base.count, bits, found) for kind in kinds]
        return [(look, number) for look in looks for number in range(look.passes)]

    @property
    def rank_spec(self) -> KernelSpec | None:
        """The kernel that ranks its entries, if a drop wants that."""
        if not self.merged or not any(
            self.settings.thinnings[i].scheme.thresholds for i in self.models
        ):
            return None
        return KernelSpec("rank", self.base.dtype, self.spec.finetuned, self.spec.real)

    @property
    def length(self) -> int:
        """What jobs divide: its elements, or its bytes where it is copied."""
        return self.base.count if self.merged else self.base.nbytes

    @property
    def bytes_read(self) -> int:
        """What must be read of it, once."""
        return self.base.stored_bytes + sum(info.stored_bytes for _, info in self.finetuned)


class Matcher:
    """Decides for each tensor of the base which models change it and how, and remembers what did not fit."""

    def __init__(self, config: DareConfig, inputs: Sequence[Input]) -> None:
        self.config, self.base, self.models = config, inputs[0], inputs[1:]
        self.mismatched: list[dict[str, tuple[int, ...]]] = [
            {} for _ in self.models
        ]  # and their shapes
        self.tied: list[dict[str, str]] = [
            {} for _ in self.models
        ]  # by head: the embedding that stands in for it
        self._chooser = Chooser(config, self.base.tensors, len(self.models))
        self._quantised = quantised_modules(self.base.tensors)
        self._embeddings = [name for name in self.base.tensors if name.endswith(EMBEDDINGS)]
        for model in self.models:
            self._check_quantised(model)
        self._check_plain()
        # Weights that are no longer FP8 have no use for what scales activations.
        plain = config.dtype is not None
        names = [
            n
            for n in self.base.tensors
            if not (plain and is_activation_scale(n, self.base.tensors))
        ]
        self.tensors = [self._match(name, self.base.tensors[name]) for name in names]

    def warnings(self) -> Iterator[str]:
        merged = {tensor.name for tensor in self.tensors if tensor.merged}
        for model, mismatched, tied in zip(self.models, self.mismatched, self.tied, strict=True):
            shapes = [
                f"{name!r} ({list(shape)})" for name, shape in mismatched.items() if name in merged
            ]
            if shapes:
                what = (
                    "their common rows are merged"
                    if self.config.mismatch == "overlap"
                    else "the base's are kept"
                )
                more = f" and {len(shapes) - LISTED:,} more" if len(shapes) > LISTED else ""
                yield f"{model.name} has tensors of other shapes: {', '.join(shapes[:LISTED])}{more}; {what}"
            yield from model.warnings
            for head, embedding in tied.items():
                yield f"{model.name} lacks {head!r}, which is tied to {embedding!r} and merged like it"

    def missing(self, i: int) -> tuple[str, ...]:
        """The tensors that a model should have and does not."""
        model = self.models[i]
        if model.partial:
            return ()
        return tuple(
            n for n in self.base.tensors if n not in model.tensors and n not in self.tied[i]
        )

    def extra(self, i: int) -> tuple[str, ...]:
        """The tensors that the base has no place for."""
        model = self.models[i]
        return (*(name for name in model.tensors if name not in self.base.tensors), *model.unused)

    def embedding_rows(self) -> int:
        """How many tokens the base has room for, or 0 where that is unknown."""
        shapes = [self.base.tensors[name].shape for name in self._embeddings]
        return next((shape[0] for shape in shapes if shape), 0)

    def _match(self, name: str, info: TensorInfo) -> TensorPlan:
        quantised = self._is_quantised(name)
        merged = info.dtype in FORMATS and not quantised
        found, mask_names = [], []
        # A head that the base's configuration ties to the embedding must stay equal to it, so it is merged as that is.
        own = (ties_embeddings(self.base.config) and self._embedding_like(name, info)) or name
        for i, model in enumerate(self.models):
            theirs, mask_name = model.tensors.get(name), own
            if theirs is None and (embedding := self._tied_embedding(name, info, model)):
                theirs, mask_name = model.tensors[embedding], embedding
                self.tied[i][name] = embedding
            if theirs is not None:
                self._check_fits(name, info, theirs, i)
                self._check_mask(name, theirs, mask_name, model)
                found.append((i, theirs))
                mask_names.append(mask_name if theirs.mask_name is None else theirs.mask_name)
        if self.config.mismatch == "base" and any(name in names for names in self.mismatched):
            found = []
        merged &= all(theirs.dtype in FORMATS for _, theirs in found)
        dtype = DTYPES[self.config.dtype] if merged and self.config.dtype else info.dtype
        scales = info.scales if isinstance(info, ScaledTensor) and not self.config.dtype else None
        # Where all models' heads are their embeddings, the merged head is the merged embedding.
        known = mask_names[0] if len(set(mask_names)) == 1 else own
        rule, settings = self._chooser.choose(known)
        for i, theirs in found:
            self._check_drop(name, theirs, i, settings)
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple(found),
            mask_names=tuple(mask_names),
            output=TensorInfo(FP8 if scales else dtype, info.shape),
            merged=merged,
            settings=settings,
            spec=choose_kernel(self.config.method, info, [theirs for _, theirs in found], dtype),
            quantised=quantised,
            rule=rule,
            scales=scales,
        )

    def _check_fits(self, name: str, info: TensorInfo, theirs: TensorInfo, i: int) -> None:
        model = self.models[i]
        if theirs.shape != info.shape:
            self._check_shapes(name, info, theirs, model)
            self.mismatched[i][name] = theirs.shape
        mixed = (theirs.dtype in FORMATS) != (info.dtype in FORMATS)
        if mixed and not is_counted(name, (info.dtype, theirs.dtype)):
            raise DareError(
                f"tensor {name!r} is {info.dtype} in {self.base.name!r} and {theirs.dtype} in {model.name!r}",
                f"only {', '.join(FORMATS)} tensors can be merged, with one another",
            )

    def _check_mask(self, name: str, theirs: TensorInfo, mask_name: str, model: Input) -> None:
        """A packed model's mask was drawn when it was packed, and its head may have been tied then, or not."""
        if theirs.mask_name not in (None, mask_name):
            raise DareError(
                f"{model.name!r} was packed with {name!r} thinned like {theirs.mask_name!r}, and now it is merged like "
                f"{mask_name!r}: the base's configuration says otherwise about tied embeddings",
                "give the base with the configuration that it had then, or the model itself",
            )

    def _check_drop(self, name: str, theirs: TensorInfo, i: int, settings: TensorSettings) -> None:
        """Refuse a drop that must see more of a tensor than there is, or keep more. Less is possible: masks nest."""
        thinning, width = settings.thinnings[i], self.base.tensors[name].width
        if theirs.mask_name is not None and (thinning.drop != RANDOM or thinning.restores_sum):
            what = "rescale l1" if thinning.drop == RANDOM else f"drop {thinning.drop}"
            raise DareError(
                f"{self.models[i].name!r} is packed, and {what} must see all of {name!r}",
                "give the model itself, or use drop random with another rescale",
            )
        if thinning.scheme.thresholds and theirs.count and width > MAX_RANKED:
            raise DareError(
                f"drop {thinning.drop} ranks the entries of a row, and those of {name!r} have {width:,}, "
                f"more than {MAX_RANKED:,}",
                f"give it another drop: --rule '{name}:drop=\"{RANDOM}\"'",
            )
        if settings.thinnings[i].threshold > theirs.threshold:
            rate = theirs.drop_rate
            raise DareError(
                f"{self.models[i].name!r} holds what a drop rate of {rate:g} has left of {name!r}, so it cannot be "
                f"merged at {settings.drop_rates[i]:g}",
                f"use a drop rate of {rate:g} or more, or the model itself",
            )

    def _check_shapes(self, name: str, info: TensorInfo, theirs: TensorInfo, model: Input) -> None:
        """Refuse tensors of different shapes, unless the user has said what to do with them and that can be done."""
        by_rows = len(info.shape) == len(theirs.shape) > 0 and info.shape[1:] == theirs.shape[1:]
        if self.config.mismatch == "base" or (self.config.mismatch == "overlap" and by_rows):
            return
        message = f"tensor {name!r} is {list(info.shape)} in {self.base.name!r} and {list(theirs.shape)} in {model.name!r}"
        if self.config.mismatch == "overlap":
            raise DareError(
                f"{message}: more than the number of rows differs",
                "--mismatch base keeps the base's tensor",
            )
        if not by_rows:
            raise DareError(
                message,
                "check that this is the right base; if it is (an inpainting model has more input channels), "
                "--mismatch base keeps the base's tensor and merges the others",
            )
        more = theirs.shape[0] - info.shape[0]
        raise DareError(
            f"{message}, {count_of(abs(more), 'row')} {'more' if more > 0 else 'fewer'}",
            "for added tokens, --tokenizer union keeps them, --mismatch overlap merges the rows that both have, "
            "--mismatch base keeps the base's tensor; otherwise check that this is the right base",
        )

    def _tied_embedding(self, name: str, info: TensorInfo, model: Input) -> str | None:
        """The embedding that a model, by its or the base's configuration, uses as the output head that it lacks."""
        stated = [
            setting
            for setting in map(ties_embeddings, (self.base.config, model.config))
            if setting is not None
        ]
        known = (
            stated or self.base.config or model.config
        )  # where nothing is stated, a head that is missing is tied
        embedding = self._embedding_like(name, info)
        return embedding if known and False not in stated and embedding in model.tensors else None

    def _embedding_like(self, name: str, info: TensorInfo) -> str | None:
        """For an output head, the base's input embedding of the same shape."""
        names = self._embeddings if name.endswith(HEADS) else ()
        return next(
            (other for other in names if self.base.tensors[other].shape == info.shape), None
        )

    def _is_quantised(self, name: str) -> bool:
        if is_activation_scale(name, self.base.tensors):
            return True
        return module_of(name) in self._quantised and not name.endswith("bias")

    def _check_quantised(self, model: Input) -> None:
        """Refuse to merge a quantised model with one that is not, or is in another way."""
        theirs = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = self.base.tensors.get(name)
            alike = mine is not None and (mine.dtype, mine.shape) == (info.dtype, info.shape)
            if self._is_quantised(name) and not alike:
                raise DareError(
                    f"{self.base.name!r} is quantised, and {model.name!r} is not in the same way: see {name!r}",
                    f"{QUANTISE_HINT}; {SCALE_HINT}"
                    if mine is not None and mine.dtype == FP8
                    else QUANTISE_HINT,
                )
            if (
                module_of(name) in theirs
                and not self._is_quantised(name)
                and not name.endswith("bias")
            ):
                if isinstance(self.base.tensors.get(f"{module_of(name)}.weight"), ScaledTensor):
                    raise DareError(
                        f"{name!r} of {model.name!r} is quantised in a way that is not read",
                        SCALE_HINT,
                    )
                raise DareError(
                    f"{model.name!r} is quantised, and {self.base.name!r} is not: see {name!r}",
                    QUANTISE_HINT,
                )

    def _check_plain(self) -> None:
        """Refuse to write half of a quantised model in another type: it would be neither one nor the other."""
        odd = next(
            filter(self._is_quantised, (n for n in self.base.tensors if n.endswith("weight"))), None
        )
        if (
            self.config.dtype
            and odd
            and any(isinstance(info, ScaledTensor) for info in self.base.tensors.values())
        ):
            raise DareError(
                f"{odd!r} of {self.base.name!r} is quantised in a way that is not read, so not all can be "
                f"{self.config.dtype}",
                "leave --dtype out",
            )


def choose_kernel(
    method: str, base: TensorInfo, finetuned: Sequence[TensorInfo], output: str
) -> KernelSpec:
    """The kernel that merges tensors of these types: fine-tunes of several types are read as floats."""
    types = {info.dtype for info in finetuned} or {base.dtype}
    if any(info.count < base.count for info in finetuned):
        types.add(base.dtype)  # which stands in for the rows that a model lacks
    wide = "F64" in types | {base.dtype, output}
    common = types.pop() if len(types) == 1 else "F64" if wide else "F32"
    return KernelSpec(METHODS[method].kernel, base.dtype, common, output)


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Whether a model's configuration says that its output head is its input embedding; None: it does not say."""
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(table.get("tie_word_embeddings"), bool):
            return bool(table["tie_word_embeddings"])
    return None
