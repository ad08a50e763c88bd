"""Refusals: what cannot be merged, once the table says what would become of each tensor; and bases
whose weights show that the models were not fine-tuned from them.
"""

from collections.abc import Sequence
from typing import Final

from darelib.config import LAYER, DareConfig
from darelib.core.drops import RANDOM
from darelib.core.formats import FORMATS, is_counted
from darelib.core.text import ConfigError, DareError, count_of, list_names, nearest
from darelib.methods import METHODS
from darelib.models.checkpoint import (
    HEADS,
    QUANTISE_HINT,
    compare_configs,
    module_of,
    quantised_modules,
)
from darelib.models.directories import MERGED_COMPONENTS
from darelib.models.fp8 import UNREAD_HINTS
from darelib.models.tensor import Described, Tensor
from darelib.plan.tensorplan import (
    COPIED,
    Match,
    TensorPlan,
    TensorTable,
    choose_components,
    find_buffer,
    is_quantised,
)

# A longer row would take more memory than all else.
MAX_RANKED: Final = 1 << 20
# The ways out if only the number of rows differs, and if other sides do.
ROWS_HINT: Final = (
    "for added tokens, --tokenizer union keeps them, --mismatch overlap merges the rows that both "
    "have, --mismatch base keeps the base's tensor; otherwise check that this is the right base"
)
WIDTH_HINT: Final = (
    "check that this is the right base; if it is (an inpainting model has more input channels), "
    "--mismatch base keeps the base's tensor and merges the others"
)


def check_table(
    config: DareConfig, inputs: Sequence[Described], table: TensorTable, looks_only: bool
) -> None:
    """Refuse what cannot be merged. If there are several faults, the most basic one is named.

    looks_only: nothing is merged, so models of other kinds are only warned of, and rules need not
    make sense.
    """
    base, *models = inputs
    check_components(config, base)
    if not (config.any_base or looks_only):
        check_kinds(inputs)
    check_quantised(inputs, table.kept)  # which changes names, too
    for model in models:
        check_names(config, base, model)
        check_merged(table.kept, base, model)
    check_plain(config, base)
    for tensor in table.tensors:
        for match in table.matches[tensor.name] if tensor.buffer != COPIED else ():
            check_shape(config, base, models[match.model], tensor, match)
            check_type(base, models[match.model], tensor, match)
    check_layers(config, inputs, table)
    for tensor in table.tensors:
        check_scaled(base, tensor, len(models))
        for row, i in enumerate(tensor.models):
            check_mask(models[i], tensor, row)
            check_drop(models[i], tensor, row)
    if not looks_only:
        check_rules(config, table.tensors)


# --- models --------------------------------------------------------------------------------------


def check_components(config: DareConfig, base: Described) -> None:
    """Refuse folders that a pipeline does not have, and a pipeline of which nothing is merged."""
    known = base.components
    chosen = choose_components(config, base)
    for name in chosen:
        if name not in known:
            what = f"has no component {name!r} with weights" if known else "is no pipeline"
            raise ConfigError(
                f"components names {name!r}, and {base.name!r} {what}",
                nearest(name, known) if known else "leave components out",
            )
    if known and not chosen:
        raise ConfigError(
            f"{base.name!r} has none of the components that are merged by themselves "
            f"({', '.join(MERGED_COMPONENTS)}), but {list_names(known)}",
            "name those to merge: --components NAME...",
        )


def check_kinds(inputs: Sequence[Described]) -> None:
    """Refuse models of another architecture: tensors of the same names and shapes may mean
    something else there.
    """
    base, *models = inputs
    for model in models:
        known = {**model.config, **model.base_config}
        for key, words in compare_configs(base.config, known).items():
            if key.endswith("model_type"):
                raise DareError(
                    f"{model.name!r} is another kind of model than {base.name!r}: {words}",
                    "give the base that it was fine-tuned from, or add --any-base if you know that "
                    "they fit",
                )


def check_quantised(inputs: Sequence[Described], kept: set[str]) -> None:
    """Refuse to merge a quantised model with one that is not, or is in another way."""
    base, *models = inputs
    modules = quantised_modules(base.tensors)
    for model in models:
        theirs = quantised_modules(model.tensors)
        for name, info in model.tensors.items():
            mine = base.tensors.get(name)
            if (mine or info).folder in kept:
                continue
            first = model
            second = base
            stored = info
            is_odd = module_of(name) in theirs and not name.endswith("bias")
            if is_quantised(name, base.tensors, modules):
                first = base
                second = model
                stored = mine or info
                is_odd = mine is None or (mine.dtype, mine.shape) != (info.dtype, info.shape)
            if is_odd:
                weight = base.tensors.get(f"{module_of(name)}.weight", stored)
                hint = weight.hint or UNREAD_HINTS.get(stored.dtype, QUANTISE_HINT)
                raise DareError(
                    f"{first.name!r} is quantised, and {second.name!r} is not in the same way: "
                    f"see {name!r}",
                    hint,
                )


def check_names(config: DareConfig, base: Described, model: Described) -> None:
    """Refuse a model that shares less than half of the names with the base. Its other tensors
    would be left out. Adapters match their own names.
    """
    common = len(model.tensors.keys() & base.tensors.keys())
    fewest = min(len(model.tensors), len(base.tensors))
    if common and (model.partial or config.any_base or 2 * common >= fewest):
        return
    mine, theirs = (
        list_names([name for name in one.tensors if name not in other.tensors]) or "none"
        for one, other in ((base, model), (model, base))
    )
    words = f"only {common:,} of its {len(model.tensors):,} tensors" if common else "no tensor"
    insist = "; add --any-base to merge only what both have" if common else ""
    raise DareError(
        f"{model.name!r} has {words} in common with {base.name!r}",
        f"the base has {mine}, and it {theirs}{insist}",
    )


def check_merged(kept: set[str], base: Described, model: Described) -> None:
    """Refuse a model of which nothing would be merged."""
    common = (name for name in model.tensors if kept and name in base.tensors)
    folders = {base.tensors[name].folder for name in common}
    if folders and folders <= kept:
        raise ConfigError(
            f"{model.name!r} has nothing but {list_names(sorted(folders))}, which is not merged",
            f"ask for it: --components {' '.join(sorted(folders))}",
        )


def check_plain(config: DareConfig, base: Described) -> None:
    """Refuse to write half of a quantised model in another type."""
    is_read = any(info.kind for info in base.tensors.values())
    if not config.dtype or not is_read:
        return
    modules = quantised_modules(base.tensors)
    for name in base.tensors:
        if name.endswith("weight") and is_quantised(name, base.tensors, modules):
            raise DareError(
                f"{name!r} of {base.name!r} is quantised in a way that is not read, so not all "
                f"can be {config.dtype}",
                "leave --dtype out",
            )


def check_layers(config: DareConfig, inputs: Sequence[Described], table: TensorTable) -> None:
    """Refuse a base that lacks weights of its own layers which all models have.

    Adapters, packed models and parts of models do not say what a whole model has.
    """
    base, *models = inputs
    whole = [
        i
        for i, model in enumerate(models)
        if not model.partial and not model.outside and model.seed is None
    ]
    if config.any_base or not whole:
        return
    common = set.intersection(*(set(table.extra[i]) for i in whole))
    first = models[whole[0]]
    missing = [name for name in first.tensors if name in common]
    if not missing:
        return
    modules = {module_of(name) for name in base.tensors}
    layers = {match[0] for match in map(LAYER.match, base.tensors) if match}
    own = [name for name in missing if is_own(name, first.tensors[name], modules, layers)]
    if own:
        raise DareError(
            f"{base.name!r} lacks {count_of(len(own), 'tensor')} of its own layers: "
            f"{list_names(own)}; every model has them",
            "give the complete base, or add --any-base to leave them out",
        )


def is_own(name: str, info: Tensor, modules: set[str], layers: set[str]) -> bool:
    """Whether a weight that the base lacks belongs to one of its modules or numbered layers.

    Heads are no such modules: some libraries store their biases twice. Scalars are rarely used.
    """
    is_weight = info.shape and info.merges and info.dtype in FORMATS
    if not is_weight or find_buffer(name, info.shape):
        return False
    module = module_of(name)
    layer = LAYER.match(name)
    is_head = f"{module}.weight".endswith(HEADS)
    return (module in modules and not is_head) or bool(layer and layer[0] in layers)


# --- tensors -------------------------------------------------------------------------------------


def check_shape(
    config: DareConfig, base: Described, model: Described, tensor: TensorPlan, match: Match
) -> None:
    """Refuse tensors of different shapes, unless the user has said what to do with them and
    that can be done.
    """
    mine = tensor.base.shape
    theirs = match.info.shape
    by_rows = len(mine) == len(theirs) > 0 and mine[1:] == theirs[1:]
    is_allowed = config.mismatch == "base" or (config.mismatch == "overlap" and by_rows)
    if mine == theirs or is_allowed:
        return
    hint = WIDTH_HINT
    if model.partial:
        hint = "give the model that the adapter was trained on"
    elif by_rows:
        hint = ROWS_HINT
    raise DareError(
        f"tensor {tensor.name!r} is {list(mine)} in {base.name!r} and {list(theirs)} "
        f"in {model.name!r}",
        hint,
    )


def check_type(base: Described, model: Described, tensor: TensorPlan, match: Match) -> None:
    mine = tensor.base.dtype
    theirs = match.info.dtype
    is_mixed = (theirs in FORMATS) != (mine in FORMATS)
    if is_mixed and not is_counted(tensor.name, (mine, theirs)):
        raise DareError(
            f"tensor {tensor.name!r} is {mine} in {base.name!r} and {theirs} in {model.name!r}",
            f"only {', '.join(FORMATS)} tensors can be merged, with one another",
        )


def check_scaled(base: Described, tensor: TensorPlan, models: int) -> None:
    """Refuse to scale a quantised tensor of a base that is alone."""
    keeps_base = METHODS[tensor.settings.method].keeps_base(tensor.settings)
    if tensor.quantised and not models and not keeps_base:
        raise DareError(
            f"tensor {tensor.name!r} of {base.name!r} is quantised, so it cannot be scaled",
            "leave its scale out, or scale the model before it is quantised",
        )


def check_mask(model: Described, tensor: TensorPlan, row: int) -> None:
    """Refuse a packed model whose mask was drawn by another name: its head was tied when it was
    packed and is not now, or the other way round.
    """
    _, theirs = tensor.finetuned[row]
    known = theirs.mask_name
    if known not in (None, tensor.mask_names[row]):
        raise DareError(
            f"{model.name!r} was packed with {tensor.name!r} thinned like {known!r}, "
            f"and now it is merged like {tensor.mask_names[row]!r}: the base's configuration says "
            "otherwise about tied embeddings",
            "give the base with the configuration that it had then, or the model itself",
        )


def check_drop(model: Described, tensor: TensorPlan, row: int) -> None:
    """Refuse a drop or a method that needs entries which a packed model does not hold, and a drop
    that ranks too long rows.
    """
    i, theirs = tensor.finetuned[row]
    method = tensor.settings.method
    thinning = tensor.settings.thinnings[i]
    needy = {
        f"drop {thinning.drop}": thinning.drop != RANDOM,
        "rescale l1": thinning.restores_sum,
        f"method {method}": theirs.drop_rate and METHODS[method].sees_dropped,
    }
    what = next((what for what, sees_all in needy.items() if sees_all), None)
    if what and theirs.mask_name is not None:
        raise DareError(
            f"{model.name!r} is packed, and {what} must see all of {tensor.name!r}",
            "give the model itself, or use other settings",
        )
    width = tensor.base.width
    if thinning.scheme.thresholds and theirs.count and width > MAX_RANKED:
        raise DareError(
            f"drop {thinning.drop} ranks the entries of a row, and those of {tensor.name!r} have "
            f"{width:,}, more than {MAX_RANKED:,}",
            f"give it another drop: --rule '{tensor.name}:drop=\"{RANDOM}\"'",
        )


def check_rules(config: DareConfig, tensors: Sequence[TensorPlan]) -> None:
    """Refuse a rule that would thin buffers and matches no weight."""
    used = {id(tensor.rule) for tensor in tensors if not tensor.buffer}
    for tensor in tensors:
        rule = tensor.rule
        if rule and rule.drop_rate not in (None, 0) and id(rule) not in used:
            k = next(k for k, each in enumerate(config.typed_rules, 1) if each is rule)
            raise DareError(
                f"rule {k} drops entries of {tensor.name!r}, which is a buffer, not a weight: it "
                f"is {tensor.buffer}",
                "leave drop_rate out of that rule; weights and lambda_coeff apply to averaged "
                "buffers, and lambda_coeff = 0 keeps the base's",
            )


# --- whether a base is the models' own -----------------------------------------------------------

# Fine-tuning changes weights by a few percent. Two unrelated models differ by sqrt(2) times the
# size of either, and by more than the base's size even if the other is far smaller.
UNRELATED_RATIO: Final = 1.0
# A toy may be trained so long that nothing of its base is left: smaller models are only warned of.
LEAST_PARAMETERS: Final = 1_000_000
# What is read of each model before there is any work: about 1 MiB. So many values show a
# difference of one percent.
PAGES: Final = 16
PAGE_VALUES: Final = 1 << 14
# How many of the pages must show it: some tensors may have been trained anew.
FAR_PAGES: Final = 12


def check_distance(
    config: DareConfig,
    base: Described,
    model: Described,
    parameters: int,
    delta: float,
    weight: float,
) -> None:
    """Refuse a base whose weights are farther from a fine-tune's than zeros would be: it is surely
    another model's. delta and weight: their mean sizes.

    An adapter changes any base alike, and a base of zeros is given on purpose.
    """
    is_certain = not model.partial and parameters >= LEAST_PARAMETERS
    if is_certain and delta > UNRELATED_RATIO * weight > 0 and not config.any_base:
        raise DareError(
            f"{base.name!r} is not the base of {model.name!r}: the mean |delta| is {delta:.3g}, "
            f"and the mean |weight| {weight:.3g}",
            "give the model that it was fine-tuned from, or add --any-base (any_base = true) if "
            "you know that they fit",
        )


def check_sample(
    config: DareConfig, changed: Sequence[TensorPlan], inputs: Sequence[Described]
) -> None:
    """Refuse such a base before there is any work, if pages of the weights show it."""
    import numpy as np

    base, *models = inputs
    for i, model in enumerate(models):
        # A packed model has the digests of its base.
        common = [] if model.partial or model.seed is not None else list_common(changed, i)
        parameters = sum(mine.count for _, mine, _ in common)
        if config.any_base or parameters < LEAST_PARAMETERS:
            continue
        sizes = np.zeros((PAGES, 2))
        for k in range(PAGES):
            place, rest = divmod(k * len(common), PAGES)
            name, mine, theirs = common[place]
            length = min(PAGE_VALUES, mine.count)
            start = (mine.count - length) * rest // PAGES
            own = base.sample(name, mine, start, length)
            with np.errstate(all="ignore"):  # the merge finds values that are not finite
                delta = model.sample(name, theirs, start, length) - own
                sizes[k] = abs(delta).mean(dtype=float), abs(own).mean(dtype=float)
        if (sizes[:, 0] > UNRELATED_RATIO * sizes[:, 1]).sum() >= FAR_PAGES:
            check_distance(config, base, model, parameters, *sizes.mean(axis=0).tolist())


def list_common(changed: Sequence[TensorPlan], i: int) -> list[tuple[str, Tensor, Tensor]]:
    """The matrices that a model has by the base's name, in its shape."""
    return [
        (tensor.name, tensor.base, info)
        for tensor in changed
        for (k, info), own in zip(tensor.finetuned, tensor.mask_names, strict=True)
        if (k, own) == (i, tensor.name) and info.shape == tensor.base.shape and len(info.shape) > 1
    ]
