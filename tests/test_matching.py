"""Matching: each matrix is solved for, in forward order, for any torch module in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dare
from dare import ConfigError, DareConfig, DareError
from tests.support import Tensors, assert_same, examples, family_model, finetune, same_bits

Batches = list[list[Any]]
WIDTH = 6
MATRICES = ("embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head")


class Block(nn.Module):
    """A block as transformers have them: it adds something to what comes in."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor, more: Tensor | float = 0.0) -> Tensor:
        return x + more + self.share * self.down(self.up(self.norm(x)).tanh())


class Tower(nn.Module):
    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.Sequential(Block(share), Block(share))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


def draw(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def make_states(module: nn.Module, count: int = 2) -> list[Tensors]:
    """A base and fine-tunes of it."""
    base = {
        name: draw(*each.shape, seed=k, size=0.4) + (each.dim() == 1)  # norms are about 1
        for k, (name, each) in enumerate(module.named_parameters())
    }
    return [base, *(finetune(base, k, 0.2) for k in range(count))]


def make_batches(count: int = 2) -> Batches:
    return [[draw(2, 30, 5, seed=9 * k + b) for b in range(2)] for k in range(count)]


def configure(config: dict[str, Any]) -> DareConfig:
    return DareConfig(**{"drop_rate": 0.0, "any_base": True, **config})


def match(module: nn.Module, states: Sequence[Tensors], batches: Batches, **config: Any) -> Tensors:
    """dare_match, without dropping unless it is asked for; other keywords are its own."""
    own = {key: config.pop(key) for key in ("base_batches", "out") if key in config}
    return dare.dare_match(module, states[0], states[1:], batches, configure(config), **own)


def start_of(states: Sequence[Tensors], **config: Any) -> Tensors:
    """The same merge without examples."""
    return dare.dare_merge(states[0], states[1:], configure(config))


def is_near(one: Tensors, other: Tensors, share: float = 1e-4) -> bool:
    return all(torch.allclose(one[name], other[name], share, share) for name in one)


def give(module: nn.Module, state: Tensors, batch: Any) -> Tensor:
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    with torch.no_grad():
        given = torch.func.functional_call(module, state, args, kwargs)
    return getattr(given, "logits", given)


def find_deviation(
    module: nn.Module, merged: Tensors, models: Sequence[Tensors], batches: Batches
) -> float:
    """How far what a module gives is from what the models give, on the examples of each."""
    pairs = [(own, x) for own, some in zip(models, batches, strict=True) for x in some]
    return sum(float((give(module, merged, x) - give(module, own, x)).norm()) for own, x in pairs)


def compare(module: nn.Module, states: Sequence[Tensors], batches: Batches, **config: Any) -> float:
    """By how much deviations fall, of the merge with examples and of that without."""
    merges = match(module, states, batches, **config), start_of(states, **config)
    after, before = (find_deviation(module, made, states[1:], batches) for made in merges)
    return after / before


def find_changed(module: nn.Module, states: Sequence[Tensors], batches: Batches) -> list[str]:
    """Names of the tensors that matching changes."""
    made, start = match(module, states, batches), start_of(states)
    return [name for name in made if not same_bits(made[name], start[name])]


TOWER = Tower()
FLAT = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))  # without blocks
STATES = make_states(TOWER)
BASE, ONE, OTHER = STATES
BATCHES = make_batches()


# --- the solution ---------------------------------------------------------------------------------


def solve(inputs: list[Any], missing: list[Any], ridge: float) -> np.ndarray:
    """The change of a matrix, by least squares in float64: with the ridge as rows of its own."""
    left, right = [], []
    for x, m in zip(inputs, missing, strict=True):
        size = np.sqrt((x**2).sum(0).mean())
        least = np.sqrt(min(max(1.0, ridge), ridge * x.shape[1] / len(x)))
        left += [x / size, least * np.eye(x.shape[1])]
        right += [m / size, np.zeros((x.shape[1], m.shape[1]))]
    return np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)[0].T


def flat(tensor: Tensor) -> np.ndarray:
    return tensor.double().reshape(-1, tensor.shape[-1]).numpy()


@given(
    width=st.integers(1, 9),
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    ridge=st.floats(1e-2, 1e3),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
@examples(15)
def test_a_matrix_is_the_least_squares_solution_with_a_ridge(
    width: int, tokens: list[int], ridge: float, size: float
) -> None:
    module = nn.Linear(width, 3)
    states = make_states(module, len(tokens))
    inputs = [draw(count, width, seed=k, size=size) for k, count in enumerate(tokens)]
    made = match(module, states, [[x] for x in inputs], match_ridge=ridge)
    start = start_of(states)
    missing = [
        flat(give(module, own, x) - give(module, start, x))
        for own, x in zip(states[1:], inputs, strict=True)
    ]
    wanted = solve([flat(x) for x in inputs], missing, ridge)
    found = made["weight"].double().numpy() - start["weight"].double().numpy()
    assert np.abs(found - wanted).max() <= 1e-4 * max(np.abs(wanted).max(), 1e-2)
    assert same_bits(made["bias"], start["bias"])


@given(width=st.integers(1, 12), tokens=st.integers(1, 20), power=st.integers(-15, 15))
@examples(15)
def test_any_ridge_brings_outputs_nearer_and_a_huge_one_keeps_the_start(
    width: int, tokens: int, power: int
) -> None:
    module = nn.Linear(width, 3, bias=False)
    states = make_states(module)
    batches: Batches = [[draw(tokens, width, seed=k, size=10.0**k)] for k in range(2)]
    made = match(module, states, batches, match_ridge=10.0**power)
    start = start_of(states)
    before, after = (
        sum(find_deviation(module, each, [own], [some]) ** 2 / float(some[0].square().sum())
            for own, some in zip(states[1:], batches, strict=True))
        for each in (start, made)
    )  # fmt: skip
    assert after <= before * (1 + 1e-4)
    assert power < 10 or is_near(made, start, 1e-6)


def trace(own: Any, x: np.ndarray, share: float) -> list[tuple[np.ndarray, np.ndarray]]:
    """What comes into each matrix of a tower, and what is compared: what it gives or, of the last
    one of a block, what the block gives, which repairs the stream.
    """
    steps = []

    def multiply(name: str, x: np.ndarray) -> np.ndarray:
        steps.append((x, x @ own[f"{name}.weight"].T + own[f"{name}.bias"]))
        return steps[-1][1]

    stream = multiply("embed", x)
    for block in ("blocks.0", "blocks.1"):
        off = stream - stream.mean(1, keepdims=True)
        size = np.sqrt((off**2).mean(1, keepdims=True) + 1e-5)
        normal = off / size * own[f"{block}.norm.weight"] + own[f"{block}.norm.bias"]
        middle = np.tanh(multiply(f"{block}.up", normal))
        stream = stream + share * middle @ own[f"{block}.down.weight"].T
        steps.append((middle, stream / share))
    multiply("head", stream)
    return steps


def walk(states: list[Tensors], batches: Batches, share: float) -> dict[str, np.ndarray]:
    """The merged model: matrix after matrix, each with all those before it, in float64."""
    merged, *models = [
        {name: each.double().numpy() for name, each in state.items()}
        for state in [start_of(states), *states[1:]]
    ]
    inputs = [np.concatenate([flat(each) for each in some]) for some in batches]
    wanted = [trace(own, x, share) for own, x in zip(models, inputs, strict=True)]
    for k, name in enumerate(MATRICES):
        given = [trace(merged, x, share)[k] for x in inputs]
        missing = [own[k][1] - ours[1] for own, ours in zip(wanted, given, strict=True)]
        change = solve([ours[0] for ours in given], missing, 0.05)
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + change
    return merged


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_walk_is_a_plain_loop_that_repairs_the_stream_at_each_block(share: float) -> None:
    made = match(Tower(share), STATES, BATCHES)
    wanted = walk(STATES, BATCHES, share)
    start = start_of(STATES)
    for name in made:
        change = np.abs(wanted[name] - start[name].numpy()).max()
        assert np.abs(made[name].numpy() - wanted[name]).max() <= 1e-4 * change + 1e-6, name
        assert (change > 1e-3) == (name.removesuffix(".weight") in MATRICES)


# --- identities -----------------------------------------------------------------------------------


def test_models_that_are_the_base_give_the_base_to_the_bit() -> None:
    assert_same(match(TOWER, [BASE, BASE, BASE], BATCHES), BASE)


@pytest.mark.parametrize("count", [1, 3])
def test_models_that_are_one_give_that_one(count: int) -> None:
    made = match(TOWER, [BASE, *[ONE] * count], make_batches(count))
    assert is_near(made, ONE, 1e-5)


def test_lambda_multiplies_the_whole_change() -> None:
    whole = match(TOWER, STATES, BATCHES)
    for factor in (0.3, 1.7):
        made = match(TOWER, STATES, BATCHES, lambda_coeff=factor)
        wanted = {name: BASE[name] + factor * (whole[name] - BASE[name]) for name in BASE}
        assert is_near(made, wanted, 1e-5)
    assert_same(match(TOWER, STATES, BATCHES, lambda_coeff=0.0), BASE)


def test_neither_the_order_of_models_nor_that_of_examples_matters_and_twice_is_the_same() -> None:
    made = match(TOWER, STATES, BATCHES)
    turned = [some[::-1] for some in BATCHES[::-1]]
    assert is_near(made, match(TOWER, [BASE, OTHER, ONE], turned), 1e-4)
    out = {name: torch.empty_like(each) for name, each in BASE.items()}
    match(TOWER, STATES, BATCHES, out=out)
    assert_same(made, out)


@pytest.mark.parametrize("module", [TOWER, FLAT])
def test_models_of_which_half_is_dropped_are_matched(module: nn.Module) -> None:
    assert compare(module, make_states(module), BATCHES, drop_rate=0.5) < 0.9


def test_padding_counts_nowhere() -> None:
    first, second = BATCHES
    long, short = draw(1, 9, 5, seed=1), draw(1, 4, 5, seed=2)
    padded = torch.cat([short, torch.full((1, 5, 5), 1e3)], 1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4:] = 0
    one = {"x": torch.cat([long, padded]), "attention_mask": mask}
    made = match(TOWER, STATES, [[*first, long, short], second])
    assert is_near(made, match(TOWER, STATES, [[*first, one], second]), 1e-4)


# --- which matrices -------------------------------------------------------------------------------


class Odd(nn.Module):
    """Matrices that are used twice, never, by some of the tokens; and two with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.twice, self.never, self.some, self.tied, self.other = (
            nn.Linear(5, 5) for _ in range(6)
        )
        self.tied.weight = self.other.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.plain(x)))
        x = torch.cat([self.some(x[:, :1]), x[:, 1:]], 1)
        return self.tied(x) + self.other(x)


def test_a_matrix_that_is_not_used_once_by_every_token_stays() -> None:
    assert find_changed(Odd(), make_states(Odd()), BATCHES) == ["plain.weight"]


def test_a_tied_weight_is_found_by_any_of_its_names() -> None:
    states = [{**state, "other.weight": state["tied.weight"]} for state in make_states(Odd())]
    expected = match(Odd(), states, BATCHES)
    for state in states[1:]:
        del state["tied.weight"]
    assert_same(match(Odd(), states, BATCHES), expected)


class Around(Tower):
    """A matrix that is used before the blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.side(self.blocks(self.side(self.embed(x)))))


def test_a_matrix_that_is_used_on_both_sides_of_the_blocks_stays() -> None:
    module = Around()
    changed = find_changed(module, make_states(module), BATCHES)
    assert changed == [f"{name}.weight" for name in MATRICES]


class Guided(Tower):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.head.bias.mean())
        return self.head(x)


class Mixed(Tower):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        return self.head(sum([x := block(x) for block in self.blocks]))


class Detached(Tower):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(self.blocks(self.embed(x).detach()))


class Repeated(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(block := Block(1.0), block)


class Sighted(Tower):
    """More blocks, of something that is not in the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.eyes = nn.Sequential(*(Block(1.0) for _ in range(3)))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.eyes(x) if x.shape[-1] == WIDTH else super().forward(x)


def test_blocks_are_those_that_the_batches_go_through(caplog: pytest.LogCaptureFixture) -> None:
    module = Sighted()
    changed = find_changed(module, make_states(module), BATCHES)
    assert changed == [f"{name}.weight" for name in MATRICES]
    assert "as a whole" not in caplog.text


def test_matching_is_the_same_where_torch_infers() -> None:
    expected = match(TOWER, STATES, BATCHES)
    with torch.inference_mode():
        assert_same(match(TOWER, STATES, BATCHES), expected)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Guided, "more than hidden states of the one before"),
        (Mixed, "more than its last block"),
        (Detached, "cannot be traced to its weights"),
        (Repeated, ""),
    ],
)
def test_a_module_that_cannot_be_walked_by_blocks_is_matched_as_a_whole(
    kind: type[Tower], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = kind()
    with caplog.at_level(logging.WARNING):
        assert compare(module, make_states(module), BATCHES) < 1
    assert reason in caplog.text
    assert all("forward" not in vars(block) for block in module.blocks)


def test_with_examples_of_the_base_the_merge_stays_nearer_to_it() -> None:
    general = [draw(3, 40, 5, seed=77)]
    without, with_them = (
        find_deviation(TOWER, match(TOWER, STATES, BATCHES, **more), STATES[:1], [general])
        for more in ({}, {"base_batches": general})
    )
    assert with_them < 0.9 * without


def make_bert() -> tuple[nn.Module, Batches]:
    mask = torch.ones(4, 12, dtype=torch.long)
    ids = [draw(4, 12, seed=k).mul(100).long() % 40 for k in range(2)]
    return family_model("bert"), [[{"input_ids": own, "attention_mask": mask}] for own in ids]


def make_vit() -> tuple[nn.Module, Batches]:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4)
    images = [draw(8, 3, 8, 8, seed=k) for k in range(2)]
    module = transformers.ViTForImageClassification(config)
    return module, [[{"pixel_values": own}] for own in images]


def make_llama() -> tuple[nn.Module, Batches]:
    ids = [draw(4, 12, seed=k).mul(100).long() % 40 for k in range(2)]
    return family_model("llama"), [[{"input_ids": own}] for own in ids]


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_bert, make_vit, make_llama])
def test_models_of_transformers_are_matched_in_memory(
    make: Callable[[], tuple[nn.Module, Batches]], caplog: pytest.LogCaptureFixture
) -> None:
    module, batches = make()
    states = make_states(module)
    assert compare(module, states, batches) < 1
    assert len(find_changed(module, states, batches)) >= 12
    assert "as a whole" not in caplog.text
    assert getattr(module.config, "use_cache", True), "as it was"


@pytest.mark.parametrize(
    ("states", "batches", "words"),
    [
        (STATES, [[]], "batches for 1 of 2 models"),
        (STATES, [[], []], "a model has no batches"),
        ([{"embed.weight": BASE["embed.weight"]}] * 2, BATCHES[:1], "has no tensor 'embed.bias'"),
    ],
)
def test_batches_and_states_that_do_not_fit_are_refused(
    states: list[Tensors], batches: Batches, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        match(TOWER, states, batches)


def test_a_base_without_a_buffer_of_the_module_is_refused() -> None:
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
    with pytest.raises(ConfigError, match=r"has no tensor '1\.running_mean'"):
        match(module, make_states(module), BATCHES)


# --- modules as people write them -----------------------------------------------------------------


class InPlace(Block):
    def forward(self, x: Tensor, more: Tensor | float = 0.0) -> Tensor:
        x += self.share * self.down(self.up(self.norm(x)).tanh_())
        return x


def test_what_a_module_changes_in_place_makes_no_difference() -> None:
    tower = Tower()
    tower.blocks = nn.Sequential(InPlace(1.0), InPlace(1.0))
    assert is_near(match(tower, STATES, BATCHES), match(TOWER, STATES, BATCHES), 1e-5)


def test_a_module_is_left_as_it_was() -> None:
    tower = Tower()
    tower.head.eval()
    own = tower.blocks[0].forward
    tower.blocks[0].forward = lambda x: own(x)  # as other tools do
    before = tower.blocks[0].forward
    match(tower, STATES, BATCHES)
    broken = [[torch.full_like(x, torch.nan)[:, :, :3] for x in some] for some in BATCHES]
    with pytest.raises(DareError, match=r"torch cannot call the model: .* cannot be multiplied"):
        match(tower, STATES, broken)
    assert tower.blocks[0].forward is before
    assert tower.training
    assert not tower.head.training
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in tower.modules())


def test_models_are_judged_whatever_device_tensors_are_made_on() -> None:
    batches = [[{"x": x, "attention_mask": torch.ones(2, 30)} for x in some] for some in BATCHES]
    usual = dare.dare_evaluate(TOWER, STATES[0], STATES[1:], batches)
    with torch.device("meta"):  # where nothing can be computed
        other = dare.dare_evaluate(TOWER, STATES[0], STATES[1:], batches)
    assert other.as_dict() == usual.as_dict()
