"""The table of a merge: for each tensor of the base, which models change it, by which settings and
kernel, and what is written for it. Nothing is refused here; plan/checks reads the finished table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from darelib.config import Chooser, DareConfig
from darelib.core.formats import DTYPES, FORMATS
from darelib.methods import METHODS, average_only, keep_only
from darelib.models.checkpoint import (
    EMBEDDINGS,
    HEADS,
    module_of,
    quantised_modules,
    ties_embeddings,
)
from darelib.models.directories import MERGED_COMPONENTS
from darelib.models.encodings import PLAIN, Described, TensorInfo
from darelib.plan.tensorplan import TensorPlan, choose_kernel

# --- buffers -------------------------------------------------------------------------------------

# What happens to buffers, which training does not learn: they are averaged over the models, or
# copied from the base. They are never thinned or scaled.
AVERAGED, COPIED = "averaged", "copied"
# The statistics of normalisation layers. (Their counters of batches are copied.)
STATISTICS: Final = re.compile(r"(^|\.)running_(mean|var)$")
CONSTANT: Final = re.compile(
    r"(^|\.)(num_batches_tracked|(position|token_type)_ids|relative_position_index"
    r"|(original_)?inv_freq|(cos|sin)_cached|freqs_cis|masked_bias|(causal|attn|attention)_mask"
    # The noise schedules of diffusion models.
    r"|betas|\w*alphas_cumprod(_prev)?|posterior_(variance|log_variance_clipped|mean_coef[12])"
    r"|lvlb_weights|denoiser\.sigmas)$"
)
# GPT-2's causal mask, unless its shape is that of a real bias.
MASK: Final = re.compile(r"att(entio)?n\.bias$")


def find_buffer(name: str, shape: tuple[int, ...]) -> str:
    """What happens to a buffer; "": the tensor is a weight."""
    if STATISTICS.search(name):
        return AVERAGED
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return COPIED if CONSTANT.search(name) or (is_mask and MASK.search(name)) else ""


# --- components of a pipeline --------------------------------------------------------------------


def choose_components(config: DareConfig, base: Described) -> Sequence[str]:
    """The folders of a pipeline to merge: those that are usually fine-tuned, or those asked for."""
    usual = [name for name in base.components if name.startswith(MERGED_COMPONENTS)]
    return usual if config.components is None else config.components


def find_kept(config: DareConfig, base: Described) -> set[str]:
    """The folders of a pipeline that stay the base's."""
    return {*base.components} - {*choose_components(config, base)}


# --- the table -----------------------------------------------------------------------------------


class Match(NamedTuple):
    """What one model has for a tensor of the base."""

    model: int
    info: TensorInfo
    stand_in: str  # the tied tensor that the model has instead; "": it has this one


@dataclass(frozen=True)
class Table:
    """What becomes of each tensor."""

    tensors: Sequence[TensorPlan]
    # By tensor. They include those of other shapes, which the merge may not use.
    matches: Mapping[str, Sequence[Match]]
    kept: set[str]  # the folders of a pipeline that stay the base's
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    mismatched: tuple[tuple[str, ...], ...]  # per model: tensors of another shape in the base


def is_quantised(name: str, tensors: Mapping[str, TensorInfo], modules: set[str]) -> bool:
    """Whether a name belongs to a quantised module. modules: those among the tensors."""
    is_part = module_of(name) in modules and not name.endswith("bias")
    return is_part or (name in tensors and not tensors[name].encoding.merges)


class Matcher:
    """Decides for each tensor of the base which models change it, and how."""

    def __init__(self, config: DareConfig, inputs: Sequence[Described]) -> None:
        self.config = config
        self.base = inputs[0]
        self.models = inputs[1:]
        self._chooser = Chooser(config, self.base.tensors, len(self.models))
        self._kept = find_kept(config, self.base)
        self._quantised = quantised_modules(self.base.tensors)
        self._embeddings = [name for name in self.base.tensors if name.endswith(EMBEDDINGS)]

    def make_table(self) -> Table:
        chosen = {
            name: info
            for name, info in self.base.tensors.items()
            if info.encoding.merges or not self.config.dtype  # weights of that type need no scales
        }
        matches = {name: self._match(name, info) for name, info in chosen.items()}
        compared = [self._compare_names(i, matches) for i in range(len(self.models))]
        mismatched: list[list[str]] = [[] for _ in self.models]
        for name, own in matches.items():
            for match in own:
                if match.info.shape != chosen[name].shape:
                    mismatched[match.model].append(name)
        return Table(
            tensors=[self._plan(name, chosen[name], own) for name, own in matches.items()],
            matches=matches,
            kept=self._kept,
            missing=tuple(missing for missing, _ in compared),
            extra=tuple(extra for _, extra in compared),
            mismatched=tuple(map(tuple, mismatched)),
        )

    def count_embedding_rows(self) -> int:
        """How many tokens the base has room for, or 0 where that is unknown."""
        shapes = [self.base.tensors[name].shape for name in self._embeddings]
        return next((shape[0] for shape in shapes if shape), 0)

    def _match(self, name: str, info: TensorInfo) -> list[Match]:
        """What the models have for a tensor."""
        matches: list[Match] = []
        for i, model in enumerate(() if info.folder in self._kept else self.models):
            stand_in = "" if name in model.tensors else self._find_stand_in(name, info, model)
            theirs = model.tensors.get(stand_in or name)
            if theirs is not None:
                matches.append(Match(i, theirs, stand_in))
        return matches

    def _find_stand_in(self, name: str, info: TensorInfo, model: Described) -> str:
        """What a model has in place of a tensor that it lacks: another name of the same tensor, or
        the embedding that is tied to its output head. "": nothing.
        """
        for twin in self.base.find_twins(name):
            if twin in model.tensors:
                return twin
        stated = [ties_embeddings(each.config) for each in (model, self.base)]
        # The model's own word counts first. If neither says anything, a missing head is tied.
        is_tied = next(
            (tied for tied in stated if tied is not None),
            bool(self.base.config or model.config),
        )
        embedding = self._find_embedding(name, info)
        return embedding if is_tied and embedding in model.tensors else ""

    def _find_embedding(self, name: str, info: TensorInfo) -> str:
        """For an output head, the base's input embedding of the same shape."""
        names = self._embeddings if name.endswith(HEADS) else ()
        return next((other for other in names if self.base.tensors[other].shape == info.shape), "")

    def _find_owner(self, name: str, info: TensorInfo) -> str:
        """The tensor that this one must stay equal to: itself, unless they are tied.

        A head is tied to the embedding if the base's configuration says so, or if both are one
        tensor in memory, in the base and in all models.
        """
        if ties_embeddings(self.base.config):
            return self._find_embedding(name, info) or name
        for twin in self.base.find_twins(name)[:1]:
            having = [model for model in self.models if name in model.tensors]
            if all(twin in model.find_twins(name) for model in having):
                return twin
        return name

    def _plan(self, name: str, info: TensorInfo, matches: Sequence[Match]) -> TensorPlan:
        config = self.config
        quantised = is_quantised(name, self.base.tensors, self._quantised)
        buffer = find_buffer(name, info.shape)
        has_other_shape = any(match.info.shape != info.shape for match in matches)
        used = () if has_other_shape and config.mismatch == "base" else matches
        owner = self._find_owner(name, info)
        mask_names = [match.stand_in or owner for match in used]
        others = [match.info for match in used]
        is_float = all(each.dtype in FORMATS for each in (info, *others))
        # Without models, there is nothing to average.
        is_copied = quantised or buffer == COPIED or (buffer and not self.models)
        merged = is_float and not is_copied
        dtype = DTYPES[config.dtype] if merged and config.dtype else info.dtype
        encoding = PLAIN if config.dtype else info.encoding
        # If all models' heads are their embeddings, the merged head is the merged embedding.
        chosen_by = mask_names[0] if len(set(mask_names)) == 1 else owner
        rule, settings = self._chooser.choose(chosen_by, info.shape if used else ())
        if info.folder in self._kept:
            rule = None
            settings = keep_only(len(self.models))
        elif buffer == AVERAGED and self.models:
            settings = average_only(settings)
        if METHODS[settings.method].keeps_base(settings):
            merged &= dtype != info.dtype or bool(info.encoding.kind)
        # What was dropped before stays so: masks nest.
        rates = {match.model: match.info.encoding.drop_rate for match in used}
        if any(rates.values()):
            thinnings = enumerate(settings.thinnings)
            raised = tuple(own.raise_to(rates.get(i, 0.0)) for i, own in thinnings)
            settings = replace(settings, thinnings=raised)
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple((match.model, match.info) for match in used),
            mask_names=tuple(mask_names),
            outputs=encoding.list_outputs(name, TensorInfo(dtype, info.shape)),
            merged=merged,
            settings=settings,
            spec=choose_kernel(settings.method, info, others, dtype),
            quantised=quantised,
            buffer=buffer,
            rule=rule,
            encoding=encoding,
        )

    def _compare_names(
        self, i: int, matches: Mapping[str, Sequence[Match]]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors of the base that a model lacks, and its tensors that the base lacks."""
        model = self.models[i]
        missing = (
            name
            for name, info in ({} if model.partial else self.base.tensors).items()
            if name not in model.tensors
            and name not in model.outside
            and info.folder not in self._kept
            and not any(match.model == i for match in matches.get(name, ()))
        )
        extra = (
            name
            for name, info in model.tensors.items()
            if name not in self.base.tensors and info.folder not in self._kept
        )
        return tuple(missing), (*extra, *model.unused)
