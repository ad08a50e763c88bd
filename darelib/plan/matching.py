"""Which models change which tensors of the base, and how: names, shapes, types, tied heads,
quantised modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from darelib.config import Chooser, DareConfig
from darelib.core.drops import RANDOM
from darelib.core.formats import DTYPES, FORMATS, is_counted
from darelib.core.mask import keep_threshold
from darelib.core.methods import TensorSettings
from darelib.core.text import LISTED, DareError, count_of, list_names
from darelib.models.checkpoint import EMBEDDINGS, HEADS, QUANTISE_HINT, module_of, quantised_modules
from darelib.models.fp8 import UNREAD_HINTS
from darelib.models.tensors import PLAIN, Described, TensorInfo
from darelib.plan.tensors import TensorPlan, choose_kernel

# A longer row would take more memory than all else.
MAX_RANKED: Final = 1 << 20


class Matcher:
    """Decides for each tensor of the base which models change it and how, and remembers what did
    not fit.
    """

    def __init__(self, config: DareConfig, inputs: Sequence[Described]) -> None:
        self.config = config
        self.base = inputs[0]
        self.models = inputs[1:]
        # Per model: what has another shape in the base, and its shape there; by tensor that it
        # lacks, the one that stands in for it.
        self.mismatched: list[dict[str, tuple[int, ...]]] = [{} for _ in self.models]
        self.tied: list[dict[str, str]] = [{} for _ in self.models]
        self._chooser = Chooser(config, self.base.tensors, len(self.models))
        self._quantised = quantised_modules(self.base.tensors)
        self._embeddings = [name for name in self.base.tensors if name.endswith(EMBEDDINGS)]
        for model in self.models:
            self._check_common(model)
            self._check_quantised(model)
        self._check_plain()
        self.tensors = [
            self._match(name, info)
            for name, info in self.base.tensors.items()
            if info.encoding.merges or not config.dtype  # else of no use to weights in that type
        ]

    def warnings(self) -> Iterator[str]:
        merged = {tensor.name for tensor in self.tensors if tensor.merged}
        for model, mismatched, tied in zip(self.models, self.mismatched, self.tied, strict=True):
            shapes = [
                f"{name!r} ({list(shape)})" for name, shape in mismatched.items() if name in merged
            ]
            if shapes:
                overlap = self.config.mismatch == "overlap"
                what = "their common rows are merged" if overlap else "the base's are kept"
                more = f" and {len(shapes) - LISTED:,} more" if len(shapes) > LISTED else ""
                listed = f"{', '.join(shapes[:LISTED])}{more}"
                yield f"{model.name} has tensors of other shapes: {listed}; {what}"
            yield from model.warnings
            for head, embedding in tied.items():
                yield (
                    f"{model.name} lacks {head!r}, which is tied to {embedding!r} and merged like "
                    "it"
                )

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

    def _check_common(self, model: Described) -> None:
        if not model.tensors.keys() & self.base.tensors.keys():
            mine = list_names(list(self.base.tensors)) or "none"
            theirs = list_names(list(model.tensors)) or "none"
            raise DareError(
                f"{model.name!r} has no tensor in common with {self.base.name!r}",
                f"the base has {mine}, and it {theirs}",
            )

    def _match(self, name: str, info: TensorInfo) -> TensorPlan:
        quantised = self._is_quantised(name)
        finetuned: list[tuple[int, TensorInfo]] = []
        mask_names: list[str] = []
        owner = self._find_owner(name, info)
        for i, model in enumerate(self.models):
            theirs = model.tensors.get(name)
            mask_name = owner
            if theirs is None and (stand_in := self._find_stand_in(name, info, model)):
                theirs = model.tensors[stand_in]
                mask_name = stand_in
                self.tied[i][name] = stand_in
            if theirs is not None:
                self._check_fits(name, info, theirs, i)
                self._check_mask(name, theirs, mask_name, model)
                finetuned.append((i, theirs))
                mask_names.append(mask_name)
        if self.config.mismatch == "base" and any(name in names for names in self.mismatched):
            finetuned = []
        known = [theirs.dtype in FORMATS for _, theirs in finetuned]
        merged = info.dtype in FORMATS and not quantised and all(known)
        dtype = DTYPES[self.config.dtype] if merged and self.config.dtype else info.dtype
        encoding = PLAIN if self.config.dtype else info.encoding
        # Where all models' heads are their embeddings, the merged head is the merged embedding.
        rule, settings = self._chooser.choose(mask_names[0] if len(set(mask_names)) == 1 else owner)
        for i, theirs in finetuned:
            self._check_drop(name, theirs, i, settings)
        others = [theirs for _, theirs in finetuned]
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple(finetuned),
            mask_names=tuple(mask_names) if finetuned else (),
            outputs=encoding.list_outputs(name, TensorInfo(dtype, info.shape)),
            merged=merged,
            settings=settings,
            spec=choose_kernel(self.config.method, info, others, dtype),
            quantised=quantised,
            rule=rule,
            encoding=encoding,
        )

    def _find_owner(self, name: str, info: TensorInfo) -> str:
        """The tensor that it must stay equal to, and is merged as; itself, unless they are tied.

        A head is tied to the embedding if the base's configuration says so, or if both are one
        tensor in memory, in the base and in all models.
        """
        if ties_embeddings(self.base.config):
            return self._embedding_like(name, info) or name
        for twin in self.base.find_twins(name)[:1]:
            having = [model for model in self.models if name in model.tensors]
            if all(twin in model.find_twins(name) for model in having):
                return twin
        return name

    def _find_stand_in(self, name: str, info: TensorInfo, model: Described) -> str | None:
        """What a model has in place of a tensor that it lacks: another name of it, or its
        embedding.
        """
        for twin in self.base.find_twins(name):
            if twin in model.tensors:
                return twin
        return self._tied_embedding(name, info, model)

    def _check_fits(self, name: str, info: TensorInfo, theirs: TensorInfo, i: int) -> None:
        model = self.models[i]
        if theirs.shape != info.shape:
            self._check_shapes(name, info, theirs, model)
            self.mismatched[i][name] = theirs.shape
        mixed = (theirs.dtype in FORMATS) != (info.dtype in FORMATS)
        if mixed and not is_counted(name, (info.dtype, theirs.dtype)):
            raise DareError(
                f"tensor {name!r} is {info.dtype} in {self.base.name!r} and {theirs.dtype} in "
                f"{model.name!r}",
                f"only {', '.join(FORMATS)} tensors can be merged, with one another",
            )

    def _check_mask(self, name: str, theirs: TensorInfo, mask_name: str, model: Described) -> None:
        """A packed model's mask was drawn when it was packed, and its head may have been tied then,
        or not.
        """
        if theirs.mask_name not in (None, mask_name):
            raise DareError(
                f"{model.name!r} was packed with {name!r} thinned like {theirs.mask_name!r}, and "
                "now it is merged like "
                f"{mask_name!r}: the base's configuration says otherwise about tied embeddings",
                "give the base with the configuration that it had then, or the model itself",
            )

    def _check_drop(self, name: str, theirs: TensorInfo, i: int, settings: TensorSettings) -> None:
        """Refuse a drop that must see more of a tensor than there is, or keep more.

        Less is possible: masks nest.
        """
        thinning, width = settings.thinnings[i], self.base.tensors[name].width
        if theirs.mask_name is not None and (thinning.drop != RANDOM or thinning.restores_sum):
            what = "rescale l1" if thinning.drop == RANDOM else f"drop {thinning.drop}"
            raise DareError(
                f"{self.models[i].name!r} is packed, and {what} must see all of {name!r}",
                "give the model itself, or use drop random with another rescale",
            )
        if thinning.scheme.thresholds and theirs.count and width > MAX_RANKED:
            raise DareError(
                f"drop {thinning.drop} ranks the entries of a row, and those of {name!r} have "
                f"{width:,}, "
                f"more than {MAX_RANKED:,}",
                f"give it another drop: --rule '{name}:drop=\"{RANDOM}\"'",
            )
        rate = theirs.drop_rate
        if thinning.threshold > keep_threshold(rate):
            raise DareError(
                f"{self.models[i].name!r} holds what a drop rate of {rate:g} has left of {name!r}, "
                "so it cannot be "
                f"merged at {settings.drop_rates[i]:g}",
                f"use a drop rate of {rate:g} or more, or the model itself",
            )

    def _check_shapes(
        self, name: str, info: TensorInfo, theirs: TensorInfo, model: Described
    ) -> None:
        """Refuse tensors of different shapes, unless the user has said what to do with them and
        that can be done.
        """
        by_rows = len(info.shape) == len(theirs.shape) > 0 and info.shape[1:] == theirs.shape[1:]
        if self.config.mismatch == "base" or (self.config.mismatch == "overlap" and by_rows):
            return
        message = (
            f"tensor {name!r} is {list(info.shape)} in {self.base.name!r} and {list(theirs.shape)} "
            f"in {model.name!r}"
        )
        if self.config.mismatch == "overlap":
            raise DareError(
                f"{message}: more than the number of rows differs",
                "--mismatch base keeps the base's tensor",
            )
        if not by_rows:
            raise DareError(
                message,
                "check that this is the right base; if it is (an inpainting model has more input "
                "channels), "
                "--mismatch base keeps the base's tensor and merges the others",
            )
        more = theirs.shape[0] - info.shape[0]
        raise DareError(
            f"{message}, {count_of(abs(more), 'row')} {'more' if more > 0 else 'fewer'}",
            "for added tokens, --tokenizer union keeps them, --mismatch overlap merges the rows "
            "that both have, "
            "--mismatch base keeps the base's tensor; otherwise check that this is the right base",
        )

    def _tied_embedding(self, name: str, info: TensorInfo, model: Described) -> str | None:
        """The embedding that a model, by its or the base's configuration, uses as the output head
        that it lacks.
        """
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
        info = self.base.tensors.get(name)
        if info is not None and not info.encoding.merges:
            return True
        return module_of(name) in self._quantised and not name.endswith("bias")

    def _check_quantised(self, model: Described) -> None:
        """Refuse to merge a quantised model with one that is not, or is in another way."""
        quantised = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = self.base.tensors.get(name)
            alike = mine is not None and (mine.dtype, mine.shape) == (info.dtype, info.shape)
            if self._is_quantised(name):
                if not alike:
                    hint = UNREAD_HINTS.get(mine.dtype, QUANTISE_HINT) if mine else QUANTISE_HINT
                    raise DareError(
                        f"{self.base.name!r} is quantised, and {model.name!r} is not in the same "
                        f"way: see {name!r}",
                        hint,
                    )
            elif module_of(name) in quantised and not name.endswith("bias"):
                self._refuse_quantised(name, model)

    def _refuse_quantised(self, name: str, model: Described) -> NoReturn:
        weight = self.base.tensors.get(f"{module_of(name)}.weight")
        if weight is not None and weight.encoding.hint:
            raise DareError(
                f"{name!r} of {model.name!r} is quantised in a way that is not read",
                weight.encoding.hint,
            )
        raise DareError(
            f"{model.name!r} is quantised, and {self.base.name!r} is not: see {name!r}",
            QUANTISE_HINT,
        )

    def _check_plain(self) -> None:
        """Refuse to write half of a quantised model in another type: it would be neither one nor
        the other.
        """
        if not self.config.dtype:
            return
        weights = [name for name in self.base.tensors if name.endswith("weight")]
        odd = next(filter(self._is_quantised, weights), None)
        if odd and any(info.encoding.kind for info in self.base.tensors.values()):
            raise DareError(
                f"{odd!r} of {self.base.name!r} is quantised in a way that is not read, so not all "
                f"can be {self.config.dtype}",
                "leave --dtype out",
            )


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Whether a model's configuration says that its output head is its input embedding; None: it
    does not say.
    """
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(table.get("tie_word_embeddings"), bool):
            return bool(table["tie_word_embeddings"])
    return None
