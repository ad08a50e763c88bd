"""The table of a merge. A row is one tensor of the base: which models change it, by which settings,
what is written for it, and where in which file. Nothing is refused here; plan/checks reads the
finished table.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple, Self

from darelib.config import Chooser, DareConfig, Rule
from darelib.core.arrays import Matrices, find_matrices
from darelib.core.formats import DTYPES, FORMATS, STORED_BITS
from darelib.methods import METHODS, average_only, choose_looks, keep_only
from darelib.methods.looks import BASE, Found, Look, TensorSettings
from darelib.models.checkpoint import (
    EMBEDDINGS,
    HEADS,
    module_of,
    quantised_modules,
    ties_embeddings,
)
from darelib.models.directories import MERGED_COMPONENTS, OWN_STEM
from darelib.models.forms import PLAIN, Entry, Form
from darelib.models.tensor import Described, Tensor
from darelib.models.tensorfile import header_bytes, parse_header


@dataclass(frozen=True, slots=True)  # there may be very many
class TensorPlan:
    """One tensor of the output."""

    name: str
    base: Tensor
    finetuned: tuple[tuple[int, Tensor], ...]  # of each model that has it, by its index
    mask_names: tuple[str, ...]  # the names that draw their masks: of tied weights, the owner's
    # All that is written for it, by name, itself first. Offsets count from the end of the header.
    outputs: Mapping[str, Entry]
    merged: bool  # False: copied from the base
    settings: TensorSettings
    dtype: str  # of the merged values
    quantised: bool
    buffer: str  # what happens to a buffer (see AVERAGED); "": it is a weight
    rule: Rule | None  # that matches it first
    form: Form  # of the output

    @property
    def output(self) -> Entry:
        return self.outputs[self.name]

    @property
    def real(self) -> str:
        """The type to compute in: float32, or float64 where any side is."""
        types = {self.base.dtype, self.dtype, *(info.dtype for _, info in self.finetuned)}
        return "F64" if "F64" in types else "F32"

    @property
    def models(self) -> list[int]:
        return [i for i, _ in self.finetuned]

    def move(self, file: int) -> Self:
        return self.place({name: replace(info, file=file) for name, info in self.outputs.items()})

    def place(self, places: Mapping[str, Entry]) -> Self:
        return replace(self, outputs={name: places[name] for name in self.outputs})

    def is_thinned(self, row: int) -> bool:
        """Whether a model was thinned before, exactly as it is to be thinned now."""
        i, info = self.finetuned[row]
        thinning = self.settings.thinnings[i]
        is_random = not thinning.scheme.ends and not thinning.scheme.thresholds
        return info.base is self.base and is_random and info.drop_rate == thinning.drop_rate

    @property
    def is_simple(self) -> bool:
        """Whether all models' changes are used whole, and computed in float32."""
        is_whole = all(info.shape == self.base.shape for _, info in self.finetuned)
        drops = any(self.settings.thinnings[i].drop_rate for i in self.models)
        return is_whole and not drops and self.real == "F32"

    @property
    def adds_ranks(self) -> bool:
        """Whether only adapters change it, and the rank of the merged change is at most the sum of
        their ranks.
        """
        are_products = all(info.added_rank for _, info in self.finetuned)
        adds = METHODS[self.settings.method].adds_ranks and self.settings.origin == BASE
        return are_products and self.is_simple and adds

    @property
    def looks(self) -> list[type[Look]]:
        """The looks before it is merged, in order."""
        if not self.merged or not self.base.count:
            return []
        kinds = choose_looks(self.settings, self.models) if self.finetuned else []
        return [*kinds, *self.form.looks]

    @property
    def matrices(self) -> Matrices | None:
        """Its matrices, if its method takes them whole."""
        is_whole = self.merged and METHODS[self.settings.method].whole
        return find_matrices(self.mask_names[0], self.base.shape) if is_whole else None

    def list_passes(self) -> list[tuple[Look, int]]:
        """The looks before it is merged, with each pass that they take."""
        found = Found(width=self.base.width)
        bits = FORMATS[self.real].bits
        passes: list[tuple[Look, int]] = []
        for kind in self.looks:
            look = kind(self.settings, self.models, self.base.count, bits, found)
            passes += [(look, k) for k in range(kind.count_passes(bits))]
        return passes

    @property
    def ranks(self) -> bool:
        """Whether a drop decides by the entries' ranks."""
        own = [self.settings.thinnings[i] for i in self.models]
        return self.merged and any(thinning.scheme.thresholds for thinning in own)

    @property
    def needs_rows(self) -> bool:
        return self.ranks or any(look.of_rows for look in self.looks)

    @property
    def length(self) -> int:
        """What jobs divide: its elements or, if it is copied, its bytes."""
        return self.base.count if self.merged else self.base.nbytes

    @property
    def bytes_read(self) -> int:
        return self.base.stored_bytes + sum(info.stored_bytes for _, info in self.finetuned)


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedFile:
    name: str
    header: bytes
    size: int

    def replace_metadata(self, metadata: Mapping[str, str]) -> Self:
        data = self.size - len(self.header)
        tensors, _ = parse_header(self.header[8:].decode(), 0, data)
        header = header_bytes(tensors, metadata)
        return replace(self, header=header, size=len(header) + data)


def assign_offsets(
    tensors: Sequence[TensorPlan],
    limit: int,
    metadata: dict[str, str],
    name: str | None,
    stems: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[TensorPlan], list[PlannedFile]]:
    """Give each tensor its place: in order, in a new file if the next one would exceed the limit.

    name: of the only file; None: files are named as their library names them, and folders are kept.
    stems: by folder that may have several files, how their names begin.
    """
    folders: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        folders.setdefault("" if name else tensor.base.folder, []).append(tensor)
    placed: list[TensorPlan] = []
    files: list[PlannedFile] = []
    for folder, inside in (folders or {"": []}).items():
        is_whole = folder and folder not in stems
        shards = [inside] if is_whole else divide_tensors(inside, limit)
        names = [name] if name else name_files(stems.get(folder, OWN_STEM), len(shards))
        prefix = f"{folder}/" if folder else ""
        for own, file_name in zip(shards, names, strict=True):
            places, size = place_tensors(own, len(files))
            placed += [tensor.place(places) for tensor in own]
            stored = {key.removeprefix(prefix): info for key, info in places.items()}
            header = header_bytes(stored, metadata)
            files.append(PlannedFile(f"{prefix}{file_name}", header, len(header) + size))
    return placed, files


def name_files(stem: str, count: int) -> list[str]:
    """The names of the files of one model, or of one folder of a pipeline."""
    several = [f"{stem}-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    return several if count > 1 else [f"{stem}.safetensors"]


def divide_tensors(tensors: Sequence[TensorPlan], limit: int) -> list[list[TensorPlan]]:
    """The tensors of each file. One that is larger than the limit has a file of its own."""
    shards: list[list[TensorPlan]] = [[]]
    used = 0
    for tensor in tensors:
        size = sum(info.nbytes for info in tensor.outputs.values())
        if used and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += size
    return shards


def place_tensors(tensors: Sequence[TensorPlan], file: int) -> tuple[dict[str, Entry], int]:
    """The places of tensors in a file, one after the other, and the bytes that they take."""
    wanted = [pair for tensor in tensors for pair in tensor.outputs.items()]
    if any(len(tensor.outputs) > 1 for tensor in tensors):
        # Behind an odd number of bytes, loaders could not map wider values.
        wanted.sort(key=lambda pair: -STORED_BITS[pair[1].dtype])
    places: dict[str, Entry] = {}
    offset = 0
    for name, info in wanted:
        places[name] = replace(info, file=file, offset=offset)
        offset += info.nbytes
    return places, offset


# --- buffers -------------------------------------------------------------------------------------

# What happens to buffers, which training does not learn: they are averaged over the models, or
# copied from the base. They are never thinned or scaled.
AVERAGED = "averaged"
COPIED = "copied"
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
    info: Tensor
    stand_in: str  # the tied tensor that the model has instead; "": it has this one


@dataclass(frozen=True)
class TensorTable:
    """What becomes of each tensor."""

    tensors: Sequence[TensorPlan]
    # By tensor. They include those of other shapes, which the merge may not use.
    matches: Mapping[str, Sequence[Match]]
    kept: set[str]  # the folders of a pipeline that stay the base's
    missing: tuple[tuple[str, ...], ...]  # per model: tensors of the base that it lacks
    extra: tuple[tuple[str, ...], ...]  # per model: tensors that the base lacks
    mismatched: tuple[tuple[str, ...], ...]  # per model: tensors of another shape in the base


def is_quantised(name: str, tensors: Mapping[str, Tensor], modules: set[str]) -> bool:
    """Whether a name belongs to a quantised module. modules: those among the tensors."""
    is_part = module_of(name) in modules and not name.endswith("bias")
    return is_part or (name in tensors and not tensors[name].merges)


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

    def make_table(self) -> TensorTable:
        chosen = {
            name: info
            for name, info in self.base.tensors.items()
            if info.merges or not self.config.dtype  # weights of that type need no scales
        }
        matches = {name: self._match(name, info) for name, info in chosen.items()}
        compared = [self._compare_names(i, matches) for i in range(len(self.models))]
        mismatched: list[list[str]] = [[] for _ in self.models]
        for name, own in matches.items():
            for match in own:
                if match.info.shape != chosen[name].shape:
                    mismatched[match.model].append(name)
        return TensorTable(
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

    def _match(self, name: str, info: Tensor) -> list[Match]:
        """What the models have for a tensor."""
        matches: list[Match] = []
        for i, model in enumerate(() if info.folder in self._kept else self.models):
            stand_in = "" if name in model.tensors else self._find_stand_in(name, info, model)
            theirs = model.tensors.get(stand_in or name)
            if theirs is not None:
                matches.append(Match(i, theirs, stand_in))
        return matches

    def _find_stand_in(self, name: str, info: Tensor, model: Described) -> str:
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

    def _find_embedding(self, name: str, info: Tensor) -> str:
        """For an output head, the base's input embedding of the same shape."""
        names = self._embeddings if name.endswith(HEADS) else ()
        return next((other for other in names if self.base.tensors[other].shape == info.shape), "")

    def _find_owner(self, name: str, info: Tensor) -> str:
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

    def _plan(self, name: str, info: Tensor, matches: Sequence[Match]) -> TensorPlan:
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
        form = PLAIN if config.dtype else info.form
        # If all models' heads are their embeddings, the merged head is the merged embedding.
        chosen_by = mask_names[0] if len(set(mask_names)) == 1 else owner
        rule, settings = self._chooser.choose(chosen_by, info.shape if used else ())
        if info.folder in self._kept:
            rule = None
            settings = keep_only(len(self.models))
        elif buffer == AVERAGED and self.models:
            settings = average_only(settings)
        if METHODS[settings.method].keeps_base(settings):
            merged &= dtype != info.dtype or bool(info.kind)
        # What was dropped before stays so: masks nest.
        rates = {match.model: match.info.drop_rate for match in used}
        if any(rates.values()):
            thinnings = enumerate(settings.thinnings)
            raised = tuple(own.raise_to(rates.get(i, 0.0)) for i, own in thinnings)
            settings = replace(settings, thinnings=raised)
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple((match.model, match.info) for match in used),
            mask_names=tuple(mask_names),
            outputs=form.list_entries(name, Entry(dtype, info.shape)),
            merged=merged,
            settings=settings,
            dtype=dtype,
            quantised=quantised,
            buffer=buffer,
            rule=rule,
            form=form,
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
