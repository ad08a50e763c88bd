"""Which models change which tensors of the base, and how: by their names, and tied heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from darelib.config import Chooser, DareConfig
from darelib.core.formats import DTYPES, FORMATS
from darelib.core.text import LISTED, DareError
from darelib.methods import METHODS, average_only, keep_only
from darelib.models.checkpoint import EMBEDDINGS, HEADS, ties_embeddings
from darelib.models.encodings import PLAIN, Described, TensorInfo
from darelib.plan.buffers import AVERAGED, COPIED, find_buffer
from darelib.plan.checks import Refusals
from darelib.plan.components import check_merged, find_kept, find_unmerged_changes
from darelib.plan.tensors import TensorPlan, choose_kernel


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
        self._refusals = Refusals(config, self.base)
        self._kept = find_kept(config, self.base)
        self._embeddings = [name for name in self.base.tensors if name.endswith(EMBEDDINGS)]
        for model in self.models:
            self._refusals.check_quantised(model, self._kept)
            self._refusals.check_names(model)
            check_merged(self._kept, self.base, model)
        self._refusals.check_plain()
        self.tensors = [
            self._match(name, info)
            for name, info in self.base.tensors.items()
            if info.encoding.merges or not config.dtype  # else of no use to weights in that type
        ]

    def warnings(self) -> Iterator[str]:
        yield from find_unmerged_changes(self._kept, (self.base, *self.models))
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

    def compare_names(self, i: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The tensors that a model should have and does not, and those that the base has no place
        for.
        """
        model = self.models[i]
        unwanted = self.tied[i].keys() | model.outside
        wanted = () if model.partial else self.base.tensors.keys() - unwanted
        missing = tuple(
            name
            for name, info in self.base.tensors.items()
            if name in wanted and name not in model.tensors and info.folder not in self._kept
        )
        extra = (
            name
            for name, info in model.tensors.items()
            if name not in self.base.tensors and info.folder not in self._kept
        )
        return missing, (*extra, *model.unused)

    def embedding_rows(self) -> int:
        """How many tokens the base has room for, or 0 where that is unknown."""
        shapes = [self.base.tensors[name].shape for name in self._embeddings]
        return next((shape[0] for shape in shapes if shape), 0)

    def _match(self, name: str, info: TensorInfo) -> TensorPlan:
        quantised = self._refusals.is_quantised(name)
        buffer = find_buffer(name, info.shape)
        owner = self._find_owner(name, info)
        is_kept = info.folder in self._kept
        finetuned = [] if is_kept else self._find_finetuned(name, info, buffer)
        mask_names = [stand_in or owner for _, _, stand_in in finetuned]
        others = [theirs for _, theirs, _ in finetuned]
        is_float = all(each.dtype in FORMATS for each in (info, *others))
        # Where there are no models, there is nothing to average.
        is_copied = quantised or buffer == COPIED or (buffer and not self.models)
        merged = is_float and not is_copied
        dtype = DTYPES[self.config.dtype] if merged and self.config.dtype else info.dtype
        encoding = PLAIN if self.config.dtype else info.encoding
        # Where all models' heads are their embeddings, the merged head is the merged embedding.
        chosen_by = mask_names[0] if len(set(mask_names)) == 1 else owner
        rule, settings = self._chooser.choose(chosen_by, info.shape if finetuned else ())
        if is_kept:
            rule = None
            settings = keep_only(len(self.models))
        elif buffer == AVERAGED and self.models:
            settings = average_only(settings)
        if METHODS[settings.method].keeps_base(settings):
            merged &= dtype != info.dtype or bool(info.encoding.kind)
        elif quantised and not self.models:
            raise DareError(
                f"tensor {name!r} of {self.base.name!r} is quantised, so it cannot be scaled",
                "leave its scale out, or scale the model before it is quantised",
            )
        # What was dropped before stays so: masks nest.
        known = {i: theirs.encoding.drop_rate for i, theirs, _ in finetuned}
        rates = {i: rate for i, rate in known.items() if rate}
        if rates:
            numbered = enumerate(settings.thinnings)
            raised = tuple(own.raise_to(rates.get(i, 0.0)) for i, own in numbered)
            settings = replace(settings, thinnings=raised)
        for (i, theirs, _), mask_name in zip(finetuned, mask_names, strict=True):
            model = self.models[i]
            self._refusals.check_mask(name, theirs, mask_name, model)
            self._refusals.check_drop(name, theirs, model, settings.method, settings.thinnings[i])
        return TensorPlan(
            name=name,
            base=info,
            finetuned=tuple((i, theirs) for i, theirs, _ in finetuned),
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

    def _find_finetuned(
        self, name: str, info: TensorInfo, buffer: str
    ) -> list[tuple[int, TensorInfo, str | None]]:
        """The models that have a tensor, by number, and what stands in for it there, if anything.

        None, if one of them has it in another shape and the base's is to be kept.
        """
        found: list[tuple[int, TensorInfo, str | None]] = []
        for i, model in enumerate(self.models):
            theirs = model.tensors.get(name)
            stand_in = None
            if theirs is None and (stand_in := self._find_stand_in(name, info, model)):
                theirs = model.tensors[stand_in]
                self.tied[i][name] = stand_in
            if theirs is None:
                continue
            if theirs.shape != info.shape:
                self.mismatched[i][name] = theirs.shape
            if buffer != COPIED:
                self._refusals.check_shapes(name, info, theirs, model)
                self._refusals.check_types(name, info, theirs, model)
            found.append((i, theirs, stand_in))
        is_kept = self.config.mismatch == "base" and any(name in each for each in self.mismatched)
        return [] if is_kept else found

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
        """What a model has in place of a tensor that it lacks: another name of it, or the embedding
        that, by its or the base's configuration, is its output head too.
        """
        for twin in self.base.find_twins(name):
            if twin in model.tensors:
                return twin
        configs = (self.base.config, model.config)
        stated = {*map(ties_embeddings, configs)} - {None}
        # Where nothing is stated, a head that is missing is tied.
        is_tied = False not in stated if stated else any(configs)
        embedding = self._embedding_like(name, info)
        return embedding if is_tied and embedding in model.tensors else None

    def _embedding_like(self, name: str, info: TensorInfo) -> str | None:
        """For an output head, the base's input embedding of the same shape."""
        names = self._embeddings if name.endswith(HEADS) else ()
        return next(
            (other for other in names if self.base.tensors[other].shape == info.shape), None
        )
