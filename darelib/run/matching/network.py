"""A torch module, called with weights from outside, in segments: what comes before its blocks, each
block, what comes after them. Only finding the blocks is special.

The module's own forward supplies each block's arguments, masks and positions among them. Blocks
that are done give what the last of them gave; the one that is reached takes what it was called
with. Where that is not what the module itself would do, it is one segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from darelib.core.text import LOG

Weights: TypeAlias = Mapping[str, Tensor]  # by the names that the module has for them
# The weights of these names: of a model, by its number, or of START or BASE.
Load: TypeAlias = Callable[[int, Sequence[str]], dict[str, Tensor]]
START = -2  # the merged model before it is matched
BASE = -1
# Why a parameter is not matched.
VECTORS = "norms and biases"
EMBEDDINGS = "embeddings"
OTHERS = "no plain matrices"
OFTEN = "used more than once"
WHOLE = -2  # the number of a segment that is all of the module
BEFORE = -1  # of the one before the first block
NOT_CALLED = "its blocks are not called"
# Arguments that are the same if they are equal.
PLAIN = bool | int | float | str | torch.Size | torch.device | torch.dtype


class Reached(Exception):
    """The forward has come to the block that is wanted."""

    def __init__(self, arguments: Any) -> None:
        super().__init__()
        self.arguments = arguments


@dataclass(frozen=True)
class Segment:
    name: str
    number: int  # of a block
    parameters: list[str]
    matrices: dict[str, nn.Module]  # by the names of their weights
    others: dict[str, str]  # all else, and why it is not matched


def is_matrix(module: nn.Module) -> bool:
    """Whether a module multiplies by a matrix: torch's own, or GPT-2's, which is transposed."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def find_blocks(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Lists of modules that hold two matrices or more, each a module that is called; the longest
    first.
    """
    found = []
    kinds = getattr(model, "_no_split_modules", None) or ()
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        blocks = list(module)
        known = all(type(block).__name__ in kinds for block in blocks)
        called = not any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks)
        full = all(sum(map(is_matrix, block.modules())) > 1 for block in blocks)
        if called and (known or full) and len({*blocks}) == len(blocks) > 1:
            found.append((name, blocks))
    return sorted(found, key=lambda each: -len(each[1]))


def find_names(model: nn.Module) -> list[str]:
    """Of what is stored of a module: parameters, then buffers."""
    stored = model.state_dict().keys()
    buffers = [name for name, _ in model.named_buffers() if name in stored]
    return [*(name for name, _ in model.named_parameters()), *buffers]


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a module is called with, as arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, tuple | list) else ((batch,), {})


def move(tree: Any, device: torch.device) -> Any:
    def move_one(each: Any) -> Any:
        # What goes into main memory is waited for.
        is_later = device.type != "cpu"
        return each.to(device, non_blocking=is_later) if isinstance(each, Tensor) else each

    return pytree.tree_map(move_one, tree)


def copy_tensors(tree: Any) -> Any:
    return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, tree)


def put_aside(tree: Any) -> Any:
    """The same, to be used later: where a GPU is half full, in main memory."""

    def put_one(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.is_cuda:
            return each
        half = find_size(each.device) // 2
        return each if torch.cuda.memory_allocated(each.device) <= half else bring(each)

    return pytree.tree_map(put_one, tree)


def bring(tree: Any) -> Any:
    """The same in main memory, which a GPU fills ten times as fast where it is pinned."""

    def bring_one(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.is_cuda:
            return each
        empty = torch.empty(each.shape, dtype=each.dtype, device="cpu", pin_memory=True)
        return empty.copy_(each)

    return pytree.tree_map(bring_one, tree)


def find_size(device: torch.device) -> int:
    """The bytes of a GPU that this process may have."""
    size = torch.cuda.get_device_properties(device).total_memory
    return int(size * torch.cuda.get_per_process_memory_fraction())


def find_needed(tree: Any, weights: Weights) -> list[str]:
    """The weights that tensors were computed from."""
    nodes = [each.grad_fn for each in find_tensors(tree) if each.grad_fn]
    seen = {*nodes}
    found: set[int] = set()
    while nodes:
        node = nodes.pop()
        found.add(id(getattr(node, "variable", None)))
        new = {each for each, _ in node.next_functions if each} - seen
        seen |= new
        nodes += new
    return [name for name, each in weights.items() if id(each) in found]


@contextmanager
def fast_products() -> Iterator[None]:
    """A GPU multiplies numbers of 19 bits, and adds in float32: four times as fast, and nothing
    that is matched is worse for it.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def find_tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same, so far as that can be known."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def is_near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, 1e-4, 1e-5)


def first_tensor(tree: Any) -> Tensor:
    return find_tensors(tree)[0]


class Network:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.names = find_names(model)
        self.lists = find_blocks(model)
        self._owners = {
            f"{path}.{own}" if path else own: (module, each)
            for path, module in model.named_modules()
            for own, each in module.named_parameters(recurse=False)
        }
        self._replaced = ExitStack()  # while blocks are
        self._use(*(self.lists or [("", [])])[0])
        # The arguments of one block, by batch: all but the hidden states stay the same.
        self._cached: tuple[int, dict[int, Any]] = WHOLE, {}
        self._at = WHOLE  # the block at which to stop
        self._known: Any = None  # what the last block that is done gave
        self._watch: Callable[[int, Any], Any] | None = None  # what runs blocks, where all are run

    def _use(self, prefix: str, blocks: list[nn.Module]) -> None:
        """Divide the module by these blocks."""
        self.blocks = blocks
        self.prefixes = [f"{prefix}.{k}." for k in range(len(blocks))]
        self.own = [name for name in self.names if not name.startswith(tuple(self.prefixes))]
        # What is needed there: all of it after the blocks, until that is known.
        self._before: list[str] = []
        self._after = self.own
        self._places: list[int] = []  # by block: of the hidden states among what it is given

    @property
    def segments(self) -> list[Segment]:
        if not self.blocks:
            return [self._make_segment("the model", WHOLE, self.names)]
        inside = [
            self._make_segment(prefix[:-1], k, [n for n in self.names if n.startswith(prefix)])
            for k, prefix in enumerate(self.prefixes)
        ]
        before = self._make_segment("before the blocks", BEFORE, self._before)
        after = self._make_segment("after the blocks", len(self.blocks), self._after)
        return [before, *inside, after]

    def _make_segment(self, name: str, number: int, parameters: list[str]) -> Segment:
        matrices: dict[str, nn.Module] = {}
        others: dict[str, str] = {}
        for each in (name for name in parameters if name in self._owners):  # all but buffers
            module, weight = self._owners[each]
            if is_matrix(module) and each.rpartition(".")[2] == "weight":
                if self.blocks and each in self._before and each in self._after:
                    others[each] = OFTEN
                else:
                    matrices[each] = module
            elif weight.dim() < 2:
                others[each] = VECTORS
            else:
                others[each] = EMBEDDINGS if isinstance(module, nn.Embedding) else OTHERS
        return Segment(name, number, parameters, matrices, others)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """While the module is called by blocks, nothing is trained and nothing kept, neither
        gradients nor what generates text.
        """
        modes = {module: module.training for module in self.model.modules()}
        configs: list[Any] = [getattr(module, "config", None) for module in modes]
        caching = [each for each in configs if getattr(each, "use_cache", False)]
        try:
            with torch.inference_mode(False), torch.no_grad(), fast_products(), self._replaced:
                self.model.eval()
                for each in caching:
                    each.use_cache = False
                yield
        finally:
            for each in caching:
                each.use_cache = True
            for module, mode in modes.items():
                module.training = mode

    @contextmanager
    def _replace_blocks(self) -> Iterator[None]:
        kept = [block.__dict__.get("forward") for block in self.blocks]
        self._forwards = [block.forward for block in self.blocks]
        replaced = list(self.blocks)
        for k, block in enumerate(replaced):
            block.forward = partial(self._enter, k)
        try:
            yield
        finally:
            for block, forward in zip(replaced, kept, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward

    def _enter(self, k: int, *args: Any, **kwargs: Any) -> Any:
        if self._watch:
            return self._watch(k, (args, kwargs))
        if k < self._at:
            return self._known
        raise Reached((args, kwargs))

    def _run_block(self, k: int, weights: Weights, arguments: Any) -> Any:
        prefix = self.prefixes[k]
        block = self.blocks[k]
        own = {name.removeprefix(prefix): each for name, each in weights.items()}
        entered = block.forward
        block.forward = self._forwards[k]
        try:
            return functional_call(block, own, *arguments)
        finally:
            block.forward = entered

    def call(self, segment: Segment, weights: Weights, batch: Any, known: Any) -> Any:
        """What a segment gives. known: what the one before it gave."""
        known = move(known, self.device)
        if 0 <= segment.number < len(self.blocks):
            arguments = self._find_arguments(segment.number, batch, known)
            return self._run_block(segment.number, weights, arguments)
        self._cached = WHOLE, {}
        # The whole module is called, and may look at what it does not need here.
        weights = self.make_empty() | dict(weights)
        if segment.number == BEFORE:
            return pytree.tree_leaves(self.reach(0, batch, None, weights))[self._places[0]]
        self._known = copy_tensors(known)
        self._at = segment.number
        return functional_call(self.model, weights, *split_batch(move(batch, self.device)))

    def _find_arguments(self, k: int, batch: Any, known: Any) -> Any:
        if self._cached[0] != k:
            self._cached = k, {}
        kept = self._cached[1]
        if id(batch) not in kept:
            leaves, shape = pytree.tree_flatten(self.reach(k, batch, known, self.make_empty()))
            leaves[self._places[k]] = None
            kept[id(batch)] = leaves, shape
        leaves, shape = kept[id(batch)]
        own = [*leaves]
        # A copy: a block may add to what it is given, in place.
        own[self._places[k]] = first_tensor(known).clone()
        return pytree.tree_unflatten(own, shape)

    def make_empty(self) -> dict[str, Tensor]:
        """Zeros in place of all weights outside the blocks, where nothing that is wanted depends on
        them: they take no memory.
        """
        own = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        zero = torch.zeros((), device=self.device)
        return {
            name: zero.expand(own[name].shape) for name in self.own if own[name].is_floating_point()
        }

    def reach(self, at: int, batch: Any, known: Any, weights: Weights) -> Any:
        """The arguments of a block. known: what the block before it gave."""
        self._at = at
        self._known = known
        try:
            functional_call(self.model, dict(weights), *split_batch(move(batch, self.device)))
        except Reached as reached:
            reached.__traceback__ = None  # it holds what was computed on the way
            return reached.arguments

    def choose_way(self, load: Load, batch: Any) -> None:
        """By blocks, if the module can be called so; else as a whole, as one segment."""
        reason = ""
        for prefix, blocks in self.lists:
            self._use(prefix, blocks)
            self._replaced.enter_context(self._replace_blocks())
            reason = self.find_obstacle(load, batch)
            if not reason:
                return
            self._replaced.close()
            if reason != NOT_CALLED:  # others may be: images have blocks of their own
                break
        self._use("", [])
        if reason:
            LOG.warning(f"the model is matched as a whole, which takes longer: {reason}")

    def find_obstacle(self, load: Load, batch: Any) -> str:
        """Why the module cannot be called block by block, or "": it is called as a whole, once, and
        then as the walk would, with what its blocks gave.
        """
        calls: list[tuple[int, list[Any], Any]] = []
        inside = [each for block in self.blocks for each in block.parameters()]
        if len({*map(id, inside)}) < len(inside):
            return "its blocks share weights"

        def watch(k: int, arguments: Any) -> Any:
            names = [name for name in self.names if name.startswith(self.prefixes[k])]
            given = self._run_block(k, self.take(load, BASE, names), copy_tensors(arguments))
            calls.append((k, pytree.tree_leaves(arguments), given))
            return given

        weights = self.take(load, BASE, self.own)
        after = self.segments[-1]
        try:
            self._watch = watch
            whole = self.call(after, weights, batch, None)
            self._watch = None
            if not calls:
                return NOT_CALLED
            if [k for k, _, _ in calls] != list(range(len(self.blocks))):
                return "its blocks are not called one after the other"
            known = None
            for k, wanted, given in calls:
                if not self._find_place(k, batch, known, wanted):
                    return "its blocks are given more than hidden states of the one before"
                known = given
            with torch.enable_grad():
                empty = {name: each.requires_grad_() for name, each in self.make_empty().items()}
                self._before = find_needed(self.reach(0, batch, None, empty), empty)
                self._after = find_needed(self.call(after, empty, batch, known), empty)
            before, *_, after = self.segments
            entering = self.call(before, self._choose(weights, self._before), batch, None)
            walked = self.call(after, self._choose(weights, self._after), batch, known)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of a module that expects something else
            return f"it fails: {error}"
        finally:
            self._watch = None
        if not is_near(calls[0][1][self._places[0]], entering):
            return "what comes into its blocks cannot be traced to its weights"
        same = zip(find_tensors(whole), find_tensors(walked), strict=True)
        are_near = all(is_near(one, other) for one, other in same)
        return "" if are_near else "its output depends on more than its last block"

    def _choose(self, weights: Weights, names: Sequence[str]) -> dict[str, Tensor]:
        return {name: weights[name] for name in names if name in weights}

    def _find_place(self, k: int, batch: Any, known: Any, wanted: list[Any]) -> bool:
        """Note where a block is given what the block before it gave. wanted: all its arguments. No
        other may depend on that, on weights outside the blocks or on what blocks have left: the
        rest is the same when it is reached with none of these.
        """
        other = copy_tensors(known)
        for each in find_tensors(other):
            each += 1
        given = pytree.tree_leaves(self.reach(k, batch, other, self.make_empty()))
        pairs = enumerate(zip_longest(given, wanted))
        places = [place for place, (one, two) in pairs if not is_same(one, two)]
        self._places += places
        return len(places) == 1 and (k == 0 or given[places[0]] is first_tensor(other))

    def take(self, load: Load, who: int, names: Sequence[str]) -> dict[str, Tensor]:
        return self.widen(load(who, names))

    def widen(self, weights: Weights) -> dict[str, Tensor]:
        """As they are used: in float32, on the device."""
        moved: dict[str, Tensor] = move(dict(weights), self.device)
        return {name: each.float() for name, each in moved.items()}
