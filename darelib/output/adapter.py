"""An adapter as the output: which modules it changes, and at which rank; what is saved whole; and
what lies beside that, as PEFT loads it.
"""

import dataclasses
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from darelib import __version__
from darelib.config import DareConfig
from darelib.config.settings import LEAVE_OUT
from darelib.config.values import FULL
from darelib.core.formats import DTYPES
from darelib.core.text import ConfigError, DareError, count_of, list_names
from darelib.core.tuning import TUNING
from darelib.models.checkpoint import (
    ARCHITECTURE,
    EMBEDDINGS,
    HEADS,
    Checkpoint,
    module_of,
    ties_embeddings,
)
from darelib.models.directories import ADAPTER_CONFIG, ADAPTER_FILE, is_folder
from darelib.models.forms import PLAIN, Entry
from darelib.models.lora import find_transposed, find_ways
from darelib.models.peft import PREFIX, describe_lora, last_part
from darelib.models.source import HUB_NAME, recorded_name
from darelib.models.tensor import Tensor
from darelib.output.destination import Destination
from darelib.output.directory import (
    CARD_FILE,
    CardKind,
    add_recipe,
    card_name,
    model_card,
    recipe_metadata,
)
from darelib.output.prepare import FilePlan, Module, is_share, plan_files
from darelib.output.tokenizer import SideFiles, TokenizerChoice
from darelib.plan.tensorplan import TensorPlan, assign_offsets

# Tables of vectors, of which a change is no product of matrices: tokens', positions', distances'.
TABLE: Final = re.compile(
    r"(.*\.)?(w[tp]e|shared|[^.]*emb|[^.]*embed[^.]*|relative_attention_bias)\.weight"
)
# Of these kinds of models, PEFT has no factors for these modules, whose kernels read the weights.
STATE_SPACES: Final = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
FUSED: Final = (".out_proj.weight", ".dt_proj.weight", ".conv1d.weight")
# The first names in models that see, which transformers keeps one level deeper than it stores them.
SEEING: Final = ("visual.", "vision_tower.", "language_model.", "multi_modal_projector.")
WITH_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
# Models that are stored without the name under which a model with a head holds them.
BARE: Final = {"gpt2": "transformer.", "bloom": "transformer."}
CARD_KIND: Final = CardKind(
    "adapter", "peft", ("lora",), ", as a LoRA adapter", is_exact=False, names_all=False
)
REST_HINT: Final = "add --adapter-rest leave-out, or merge into a model"


def choose_planner(config: DareConfig) -> Callable[..., FilePlan]:
    return plan_files if config.adapter_rank is None else plan_adapter


def check_adapter(
    inputs: Sequence[Checkpoint], destination: Destination, tokenizer: TokenizerChoice
) -> None:
    """Refuse what no adapter can be made of, or can hold."""
    if not destination.directory:
        raise ConfigError("an adapter is a directory, not a file", "name a directory")
    if tokenizer.settings:
        [setting, *_] = tokenizer.settings
        raise ConfigError(f"{setting} means nothing to an adapter", "leave it out")
    if len(inputs) == 1:
        raise ConfigError(
            "an adapter holds the changes of models, and there are no models",
            "give --merge MODEL...",
        )
    if parts := inputs[0].components:
        raise ConfigError(
            f"{inputs[0].name!r} is a pipeline, and an adapter changes one model",
            f"give one of its folders, and the same of the others: {list_names(parts)}",
        )
    recorded_name(inputs[0].source)  # which layers of several models do not have: it refuses them


def plan_adapter(
    config: DareConfig,
    inputs: Sequence[Checkpoint],
    destination: Destination,
    tokenizer: TokenizerChoice,
    with_side_files: bool = True,
) -> FilePlan:
    """What of the merge goes where. Ranks that depend on the changes are the largest there can be.

    with_side_files: as plan_files has it; here they are few, and always made.
    """
    check_adapter(inputs, destination, tokenizer)
    whole = plan_files(config, inputs, destination, tokenizer, with_side_files=False)
    changed = [tensor for tensor in whole.tensors if is_changed(tensor)]
    if not changed:
        raise DareError(
            "no model changes anything, so there is nothing to put in an adapter",
            "check the inputs and, if there are any, the patterns of --match and of rules",
        )
    names = NameMap(inputs)
    modules = find_modules(changed, inputs, names, config)
    if not modules:
        raise DareError(
            f"no matrix changes, only {list_names([tensor.name for tensor in changed])}, and PEFT "
            "loads no adapter without one",
            "merge into a model",
        )
    others = [tensor for tensor in changed if tensor.name not in modules]
    rest = [tensor.name for tensor in others if not is_beyond(tensor)]
    is_saved = config.adapter_rest != LEAVE_OUT
    saved = find_saved(rest, modules, inputs[0]) if is_saved else set()
    chosen = []
    for tensor in whole.tensors:
        if tensor.name in modules:
            chosen.append(dataclasses.replace(tensor, dtype=tensor.real, form=PLAIN))
        elif module_of(tensor.name) in saved or (is_saved and tensor.name in rest):
            chosen.append(hold(tensor, names, modules, inputs[0]))
    held = {tensor.name for tensor in chosen}
    notes = [
        f"{count_of(len(some), 'tensor')} that no low rank can hold "
        f"{'is' if len(some) == 1 else 'are'} {how}: {list_names(some)}"
        for some, how in (
            ([tensor.name for tensor in others if tensor.name in held], "saved whole"),
            ([tensor.name for tensor in others if tensor.name not in held], "left out"),
        )
        if some
    ]
    warnings = (*whole.warnings, *notes, *find_renamed(inputs))
    plan = dataclasses.replace(whole, tensors=tuple(chosen), warnings=warnings, modules=modules)
    return place_factors(plan, inputs)


def find_renamed(inputs: Sequence[Checkpoint]) -> Iterator[str]:
    """What to warn of where PEFT may look for modules by other names, and no input knows them."""
    base, *models = inputs
    found = [name for name in base.tensors if name.startswith(SEEING)]
    if found and not any(model.modules for model in models):
        yield (
            f"transformers may call modules of {base.name} otherwise than it stores them (see "
            f"{found[0]!r}): use the adapter only if PEFT loads it without a word of missing keys"
        )


def is_beyond(tensor: TensorPlan) -> bool:
    """Whether an adapter has a tensor at most beside others of its module, or not at all."""
    return bool(tensor.buffer or tensor.base.folder)


def hold(
    tensor: TensorPlan, names: "NameMap", modules: Mapping[str, Module], base: Checkpoint
) -> TensorPlan:
    """A tensor that is held whole, under all names that PEFT gives it."""
    own = names.find(tensor.name)
    if f"{module_of(tensor.name)}.weight" in modules:
        own = own.replace(".bias", ".base_layer.bias")
    twins = [own, *map(names.find, list_twins(tensor.name, base))]
    head = find_tied_head(base) if own.endswith(EMBEDDINGS) else ""
    if HEADS[-1] in (own, head):  # which has a bias, too, that is another tensor
        raise DareError(
            f"{tensor.name!r} changed, and no adapter can hold the head that is tied to it",
            REST_HINT,
        )
    twins += [head] if head else []
    # Newer versions of transformers call all heads so, whatever they are stored as.
    twins += HEADS[:1] if HEADS[1] in twins else ()
    info = Entry(tensor.dtype, tensor.base.shape)
    outputs = {f"{PREFIX}{name}": info for name in twins}
    return dataclasses.replace(tensor, outputs=outputs, form=PLAIN)


class NameMap:
    """What an adapter calls the base's modules: as those among the inputs do, if there are any, or
    as transformers does, since a base may lack the name under which a model with a head holds it.
    """

    def __init__(self, inputs: Sequence[Checkpoint]) -> None:
        pairs = [pair for model in inputs[1:] for pair in model.modules.items()]
        self._old = ""
        self._new = find_bare(inputs[0])
        for name, module in pairs[:1]:
            target = f"{module}.weight"
            self._old = name.removesuffix(target) if name.endswith(target) else ""
            self._new = "" if name.endswith(target) else target.removesuffix(name)

    def find(self, name: str) -> str:
        is_head = f"{name.removesuffix('.weight')}.weight" in HEADS
        return name if is_head else self._new + name.removeprefix(self._old)


def find_bare(base: Checkpoint) -> str:
    """What the names of a base lack that its class has; empty: nothing, as far as is known."""
    prefix = BARE.get(str(base.config.get("model_type")), "")
    is_inner = base.config.get(ARCHITECTURE) in (None, "GPT2Model", "BloomModel")
    is_named = any(name.startswith(prefix) for name in base.tensors)
    return "" if is_inner or is_named else prefix


def find_tied_head(base: Checkpoint) -> str:
    """The output head that is the input embedding, and has no tensor of its own: PEFT would leave
    it as it was. Empty: there is none.
    """
    kind = base.config.get(ARCHITECTURE)  # without one: PEFT ignores what a model does not have
    is_model = kind is None or str(kind).endswith(WITH_HEADS)
    is_stored = any(name.endswith(HEADS) for name in base.tensors)
    if not is_model or is_stored or ties_embeddings(base.config) is False:
        return ""
    roots = {name.partition(".")[0] for name in base.tensors}
    return next((head for head in HEADS if head.partition(".")[0] in roots), HEADS[0])


def list_twins(name: str, base: Checkpoint) -> list[str]:
    """The embeddings of an encoder and a decoder that are a shared one, and have no tensor of their
    own.
    """
    stem = name.removesuffix("shared.weight")
    if stem == name:
        return []
    parts = [
        f"{stem}{part}."
        for part in ("encoder", "decoder")
        if any(other.startswith(f"{stem}{part}.") for other in base.tensors)
    ]
    twins = [f"{part}embed_tokens.weight" for part in parts]
    return [twin for twin in twins if twin not in base.tensors]


def is_changed(tensor: TensorPlan) -> bool:
    """Whether a merge changes a tensor: models that have the base's values do not."""
    if not tensor.merged or not tensor.base.count or not tensor.settings.lambda_coeff:
        return False
    return any(differs(tensor.base, info) for _, info in tensor.finetuned)


def differs(base: Tensor, info: Tensor) -> bool:
    """Whether a model's tensor differs from the base's: all but equal ones do so at once."""
    if info.is_delta or info.shape != base.shape:
        return True
    step = TUNING.max_chunk // 8
    for start in range(0, base.count, step):
        size = min(step, base.count - start)
        if not np.array_equal(base.read(start, size), info.read(start, size), equal_nan=True):
            return True
    return False


def find_modules(
    changed: Sequence[TensorPlan],
    inputs: Sequence[Checkpoint],
    names: NameMap,
    config: DareConfig,
) -> dict[str, Module]:
    """The matrices that get factors. Heads do only where adapters change them; convolutions of
    which each output has an input of its own do not, since PEFT's factors see all inputs.
    """
    ways = find_ways(inputs[0].tensors)
    is_fused = inputs[0].config.get("model_type") in STATE_SPACES
    modules = {}
    for tensor in changed:
        shape = tensor.base.shape
        is_head = tensor.name.endswith(HEADS) and not tensor.adds_ranks
        is_matrix = tensor.name.endswith(".weight") and len(shape) > 1
        is_apart = len(shape) > 2 and shape[1] == 1
        is_apart |= is_fused and tensor.name.endswith(FUSED)
        is_table = TABLE.fullmatch(tensor.name) or is_beyond(tensor)
        if not is_matrix or is_head or is_apart or is_table:
            continue
        products = [info.product for _, info in tensor.finetuned]
        known = [product.transposed for product in products if product]
        stored = known[0] if known else find_transposed(tensor.name, ways)
        rank = choose_rank(tensor, inputs, config.adapter_rank)
        modules[tensor.name] = Module(names.find(module_of(tensor.name)), rank, bool(stored))
    if is_share(config.adapter_rank):
        return modules
    # One rank for all, where a smaller one would do, too: not all that load adapters, and PEFT not
    # for all experts, know of others.
    rank = max((module.rank for module in modules.values()), default=1)
    return {name: module._replace(rank=rank) for name, module in modules.items()}


def choose_rank(
    tensor: TensorPlan, inputs: Sequence[Checkpoint], wanted: float | str | None
) -> int:
    """The rank of a tensor's factors; where it depends on the change, the largest it can be."""
    rows = tensor.base.shape[0]
    most = min(rows, tensor.base.count // rows)
    if tensor.adds_ranks:
        most = min(most, sum(info.added_rank for _, info in tensor.finetuned))
    elif wanted == FULL:
        raise DareError(
            f"the change of {tensor.name!r} is no product of the adapters' matrices: "
            f"{explain_rank(tensor, inputs)}",
            "give a number like --adapter-rank 64, or a share of the energy like 0.95",
        )
    if isinstance(wanted, float | int) and wanted >= 1:
        return min(most, int(wanted))
    return most


def explain_rank(tensor: TensorPlan, inputs: Sequence[Checkpoint]) -> str:
    """Why the models' changes of a tensor have no rank that could be added."""
    for i, info in tensor.finetuned:
        model = inputs[1 + i]
        product = info.product
        if not model.partial:
            return f"{model.name!r} is a model, not an adapter"
        if product and product.magnitudes:
            return f"{model.name!r} is DoRA"
        if not info.is_delta:
            return f"{model.name!r} saves that module whole"
        if not product:
            return f"{model.name!r} has other names than the base"
    return (
        "entries are dropped, the method is neither linear nor wudi, the origin is zero, or a type "
        "is float64"
    )


def find_saved(rest: Sequence[str], modules: Mapping[str, Module], base: Checkpoint) -> set[str]:
    """The modules that are held whole. A bias beside factors, or of a module with others inside,
    is held by itself.
    """
    above = {".".join(parts[:-2]) for parts in (name.split(".") for name in base.tensors)}
    saved = set()
    for name in rest:
        module = module_of(name)
        is_inner = module in above
        if not name.endswith((".weight", ".bias")) or (is_inner and not name.endswith(".bias")):
            raise DareError(f"{name!r} changed, and no adapter can hold it", REST_HINT)
        if not is_inner and f"{module}.weight" not in modules:
            saved.add(module)
    return saved


def place_factors(plan: FilePlan, inputs: Sequence[Checkpoint]) -> FilePlan:
    """Where everything goes, by the ranks of the modules."""
    dtype = DTYPES[plan.config.dtype] if plan.config.dtype else "F32"
    outputs = {
        tensor.name: plan.modules[tensor.name].list_outputs(tensor.base.shape, dtype)
        for tensor in plan.tensors
        if tensor.name in plan.modules
    }
    wanted = [
        dataclasses.replace(tensor, outputs=outputs.get(tensor.name, tensor.outputs))
        for tensor in plan.tensors
    ]
    metadata = recipe_metadata(plan.recipe)
    tensors, files = assign_offsets(wanted, sys.maxsize, metadata, ADAPTER_FILE)
    plan = dataclasses.replace(plan, tensors=tuple(tensors), files=tuple(files))
    table = json.dumps(describe_adapter(plan, inputs), indent=2).encode() + b"\n"
    side: SideFiles = {
        ADAPTER_CONFIG: table,
        CARD_FILE: model_card(plan.config, inputs, plan.recipe, CARD_KIND).encode(),
    }
    add_recipe(side, plan.config, inputs, __version__, TokenizerChoice(), files)
    return dataclasses.replace(plan, side=dict(sorted(side.items())))


def describe_adapter(plan: FilePlan, inputs: Sequence[Checkpoint]) -> dict[str, Any]:
    """The adapter_config.json: alpha is the rank, so that the product is the change itself."""
    base = inputs[0]
    ranks = {module.name: module.rank for module in plan.modules.values()}
    whole = [tensor for tensor in plan.tensors if tensor.name not in plan.modules]
    held = [name.removeprefix(PREFIX) for tensor in whole for name in tensor.outputs]
    modules = {module_of(name) for name in held if name.endswith(".weight")}
    biases = [n for n in held if n.endswith(".bias") and module_of(n) not in modules]
    saved = dict.fromkeys(module_of(name) for name in held if name not in biases)
    is_causal = str(base.config.get(ARCHITECTURE)).endswith(("ForCausalLM", "LMHeadModel"))
    return describe_lora(
        name_base(inputs),
        ranks,
        ranks,
        bias="all" if biases else "none",
        fan_in_fan_out=any(module.is_transposed for module in plan.modules.values()),
        modules_to_save=[*saved] or None,
        target_modules=shorten(list(ranks), base),
        # With the task of a classifier, PEFT insists on holding its head whole.
        task_type="CAUSAL_LM" if is_causal else None,
    )


def name_base(inputs: Sequence[Checkpoint]) -> str:
    """What the adapters call the base; where they disagree, its name on the Hub, also where it was
    given as a path into the Hub's cache; or the last part of its path.
    """
    base, *models = inputs
    path = base.folder or base.files[0].path
    cached = re.search(r"(?:^|[/\\])models--([^/\\]+)[/\\]snapshots[/\\]", os.path.abspath(path))
    own = cached[1].replace("--", "/") if cached else card_name(base.source)
    stated = {model.stated for model in models} - {""}
    if len(stated) > 1:
        stated = {name for name in stated if HUB_NAME.fullmatch(name) and not is_folder(name)}
    return min((name for name in stated if last_part(name) == last_part(own)), default=own)


def shorten(modules: Sequence[str], base: Checkpoint) -> list[str]:
    """Modules by the last parts of their names, where these mean all that are called so."""
    paths = {tuple(module_of(name).split(".")) for name in base.tensors}
    inner = {part for path in paths for part in path[:-1]}
    ends = Counter(path[-1] for path in paths)
    own = Counter(module.rpartition(".")[2] for module in modules)
    short = {end for end in own if own[end] == ends[end] and not end.isdigit()} - inner
    pairs = ((module, module.rpartition(".")[2]) for module in modules)
    return list(dict.fromkeys(end if end in short else module for module, end in pairs))
