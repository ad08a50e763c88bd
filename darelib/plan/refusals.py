"""What cannot be merged: other shapes and types, quantised modules, drops that must see more."""

from __future__ import annotations

from typing import Final, NoReturn

from darelib.config import DareConfig
from darelib.core.drops import RANDOM, Thinning
from darelib.core.formats import FORMATS, is_counted
from darelib.core.mask import keep_threshold
from darelib.core.text import DareError, count_of, list_names
from darelib.models.checkpoint import QUANTISE_HINT, module_of, quantised_modules
from darelib.models.fp8 import UNREAD_HINTS
from darelib.models.tensors import Described, TensorInfo

# A longer row would take more memory than all else.
MAX_RANKED: Final = 1 << 20


class Refusals:
    """Checks models, and what they have of each tensor, against one base."""

    def __init__(self, config: DareConfig, base: Described) -> None:
        self.config = config
        self.base = base
        self._quantised = quantised_modules(base.tensors)

    def check_common(self, model: Described) -> None:
        if not model.tensors.keys() & self.base.tensors.keys():
            mine = list_names(list(self.base.tensors)) or "none"
            theirs = list_names(list(model.tensors)) or "none"
            raise DareError(
                f"{model.name!r} has no tensor in common with {self.base.name!r}",
                f"the base has {mine}, and it {theirs}",
            )

    def check_shapes(
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
                "channels), --mismatch base keeps the base's tensor and merges the others",
            )
        more = theirs.shape[0] - info.shape[0]
        raise DareError(
            f"{message}, {count_of(abs(more), 'row')} {'more' if more > 0 else 'fewer'}",
            "for added tokens, --tokenizer union keeps them, --mismatch overlap merges the rows "
            "that both have, --mismatch base keeps the base's tensor; otherwise check that this is "
            "the right base",
        )

    def check_types(
        self, name: str, info: TensorInfo, theirs: TensorInfo, model: Described
    ) -> None:
        mixed = (theirs.dtype in FORMATS) != (info.dtype in FORMATS)
        if mixed and not is_counted(name, (info.dtype, theirs.dtype)):
            raise DareError(
                f"tensor {name!r} is {info.dtype} in {self.base.name!r} and {theirs.dtype} in "
                f"{model.name!r}",
                f"only {', '.join(FORMATS)} tensors can be merged, with one another",
            )

    def check_mask(self, name: str, theirs: TensorInfo, mask_name: str, model: Described) -> None:
        """A packed model's mask was drawn when it was packed, and its head may have been tied then,
        or not.
        """
        if theirs.mask_name not in (None, mask_name):
            raise DareError(
                f"{model.name!r} was packed with {name!r} thinned like {theirs.mask_name!r}, and "
                f"now it is merged like {mask_name!r}: the base's configuration says otherwise "
                "about tied embeddings",
                "give the base with the configuration that it had then, or the model itself",
            )

    def check_drop(
        self, name: str, theirs: TensorInfo, model: Described, thinning: Thinning
    ) -> None:
        """Refuse a drop that must see more of a tensor than there is, or keep more.

        Less is possible: masks nest.
        """
        width = self.base.tensors[name].width
        if theirs.mask_name is not None and (thinning.drop != RANDOM or thinning.restores_sum):
            what = "rescale l1" if thinning.drop == RANDOM else f"drop {thinning.drop}"
            raise DareError(
                f"{model.name!r} is packed, and {what} must see all of {name!r}",
                "give the model itself, or use drop random with another rescale",
            )
        if thinning.scheme.thresholds and theirs.count and width > MAX_RANKED:
            raise DareError(
                f"drop {thinning.drop} ranks the entries of a row, and those of {name!r} have "
                f"{width:,}, more than {MAX_RANKED:,}",
                f"give it another drop: --rule '{name}:drop=\"{RANDOM}\"'",
            )
        rate = theirs.drop_rate
        if thinning.threshold > keep_threshold(rate):
            raise DareError(
                f"{model.name!r} holds what a drop rate of {rate:g} has left of {name!r}, "
                f"so it cannot be merged at {thinning.drop_rate:g}",
                f"use a drop rate of {rate:g} or more, or the model itself",
            )

    def is_quantised(self, name: str) -> bool:
        info = self.base.tensors.get(name)
        if info is not None and not info.encoding.merges:
            return True
        return module_of(name) in self._quantised and not name.endswith("bias")

    def check_quantised(self, model: Described) -> None:
        """Refuse to merge a quantised model with one that is not, or is in another way."""
        quantised = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = self.base.tensors.get(name)
            alike = mine is not None and (mine.dtype, mine.shape) == (info.dtype, info.shape)
            if self.is_quantised(name):
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

    def check_plain(self) -> None:
        """Refuse to write half of a quantised model in another type: it would be neither one nor
        the other.
        """
        if not self.config.dtype:
            return
        weights = [name for name in self.base.tensors if name.endswith("weight")]
        odd = next(filter(self.is_quantised, weights), None)
        if odd and any(info.encoding.kind for info in self.base.tensors.values()):
            raise DareError(
                f"{odd!r} of {self.base.name!r} is quantised in a way that is not read, so not all "
                f"can be {self.config.dtype}",
                "leave --dtype out",
            )
