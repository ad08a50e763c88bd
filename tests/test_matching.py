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
from dare import ConfigError, DareConfig
from tests.support import Tensors, assert_same, examples, family_model, same_bits

Batches = list[list[Any]]
Match = Callable[..., Tensors]
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

    def forward(self, x: Tensor) -> Tensor:
        return x + self.share * self.down(self.up(self.norm(x)).tanh())


class Tower(nn.Module):
    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block(share), Block(share)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def draw(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size


def make_states(module: nn.Module, count: int = 2) -> list[Tensors]:
    """A base and fine-tunes of it."""
    base = {
        name: draw(*each.shape, seed=k, size=0.4) + (each.dim() == 1)  # norms are about 1
        for k, (name, each) in enumerate(module.named_parameters())
    }
    return [base, *({n: each + change_like(n, each, k) for n, each in base.items()}
                    for k in range(count))]  # fmt: skip


def change_like(name: str, each: Tensor, k: int) -> Tensor:
    return draw(*each.shape, seed=100 + len(name) + k * 50, size=0.2)


def make_batches(count: int = 2, tokens: int = 30, size: float = 1.0) -> Batches:
    return [[draw(2, tokens, 5, seed=9 * k + b) * size for b in range(2)] for k in range(count)]


def match(
    module: nn.Module, states: Sequence[Tensors], batches: Batches, **config: Any
) -> Tensors:
    """dare_match, without dropping unless it is asked for; other keywords are its own."""
    own = {key: config.pop(key) for key in ("base_batches", "out") if key in config}
    settings = DareConfig(**{"drop_rate": 0.0, "any_base": True, **config})
    return dare.dare_match(module, states[0], states[1:], batches, settings, **own)


def start_of(states: Sequence[Tensors], **config: Any) -> Tensors:
    """The same merge without examples."""
    settings = DareConfig(**{"drop_rate": 0.0, "any_base": True, **config})
    return dare.dare_merge(states[0], states[1:], settings)


def is_near(one: Tensors, other: Tensors, share: float = 1e-4) -> bool:
    return all(torch.allclose(one[name], other[name], share, share) for name in one)


def find_deviation(module: nn.Module, merged: Tensors, states: Sequence[Tensors], batches: Any) -> float:  # fmt: skip
    """How far what a module gives is from what the models give, on the examples of each."""
    call = torch.func.functional_call
    total = 0.0
    with torch.no_grad():
        for own, some in zip(states[1:], batches, strict=True):
            for batch in some:
                total += float((call(module, merged, batch) - call(module, own, batch)).norm())
    return total


# --- the solution ---------------------------------------------------------------------------------


def solve(inputs: list[Any], missing: list[Any], ridge: float) -> np.ndarray:
    """The change of a matrix, by least squares in float64: with the ridge as rows of its own."""
    left, right = [], []
    for x, m in zip(inputs, missing, strict=True):
        width = x.shape[1]
        size = np.sqrt((x**2).sum(0).mean())
        least = np.sqrt(min(max(1.0, ridge), ridge * width / len(x)))
        left += [x / size, least * np.eye(width)]
        right += [m / size, np.zeros((width, m.shape[1]))]
    return np.linalg.lstsq(np.concatenate(left), np.concatenate(right), rcond=None)[0].T


def flat(tensor: Tensor) -> np.ndarray:
    return tensor.double().reshape(-1, tensor.shape[-1]).numpy()


@given(
    width=st.integers(1, 9),
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    ridge=st.floats(1e-2, 1e3),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
)
@examples(25)
def test_a_matrix_is_the_least_squares_solution_with_a_ridge(
    width: int, tokens: list[int], ridge: float, size: float
) -> None:
    module = nn.Linear(width, 3)
    states = make_states(module, len(tokens))
    inputs = [draw(count, width, seed=k, size=size) for k, count in enumerate(tokens)]
    made = match(module, states, [[x] for x in inputs], match_ridge=ridge)
    start = start_of(states)
    call = torch.func.functional_call
    missing = [
        flat((call(module, own, x) - call(module, start, x)).detach())
        for own, x in zip(states[1:], inputs, strict=True)
    ]
    wanted = solve([flat(x) for x in inputs], missing, ridge)
    found = made["weight"].double().numpy() - start["weight"].double().numpy()
    assert np.abs(found - wanted).max() <= 1e-4 * max(np.abs(wanted).max(), 1e-2)
    assert same_bits(made["bias"], start["bias"])


@given(width=st.integers(1, 12), tokens=st.integers(1, 20), power=st.integers(-15, 15))
@examples(20)
def test_any_ridge_brings_outputs_nearer_and_a_huge_one_keeps_the_start(
    width: int, tokens: int, power: int
) -> None:
    module = nn.Linear(width, 3, bias=False)
    states = make_states(module)
    batches: Batches = [[draw(tokens, width, seed=k, size=10.0**k)] for k in range(2)]
    made = match(module, states, batches, match_ridge=10.0**power)
    start = start_of(states)
    before, after = (
        sum(find_deviation(module, each, [{}, own], [some]) ** 2 / float(some[0].square().sum())
            for own, some in zip(states[1:], batches, strict=True))
        for each in (start, made)
    )  # fmt: skip
    assert after <= before * (1 + 1e-4)
    assert power < 10 or is_near(made, start, 1e-6)


def walk(states: list[Tensors], batches: Batches, share: float) -> dict[str, np.ndarray]:
    """The same as a plain loop over the matrices of a tower, in float64: what it adds to each."""
    start, *models = [
        {name: each.double().numpy() for name, each in state.items()}
        for state in [start_of(states), *states[1:]]
    ]
    merged = dict(start)

    def multiply(own: Any, name: str, x: np.ndarray) -> np.ndarray:
        return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0.0)

    def normalise(own: Any, name: str, x: np.ndarray) -> np.ndarray:
        off = x - x.mean(1, keepdims=True)
        size = np.sqrt((off**2).mean(1, keepdims=True) + 1e-5)
        return off / size * own[f"{name}.weight"] + own[f"{name}.bias"]

    def improve(name: str, inputs: list[np.ndarray], missing: list[np.ndarray]) -> None:
        merged[f"{name}.weight"] = start[f"{name}.weight"] + solve(inputs, missing, 0.05)

    given_in = [np.concatenate([flat(each) for each in some]) for some in batches]
    pairs = list(zip(models, given_in, strict=True))
    improve("embed", given_in,
            [multiply(own, "embed", x) - multiply(merged, "embed", x) for own, x in pairs])  # fmt: skip
    theirs = [multiply(own, "embed", x) for own, x in pairs]
    ours = [multiply(merged, "embed", x) for x in given_in]
    for block in ("blocks.0", "blocks.1"):
        own_in = [normalise(own, f"{block}.norm", h) for own, h in zip(models, theirs, strict=True)]
        our_in = [normalise(merged, f"{block}.norm", h) for h in ours]
        own_up = [multiply(own, f"{block}.up", x) for own, x in zip(models, own_in, strict=True)]
        improve(f"{block}.up", our_in, [each - multiply(merged, f"{block}.up", x)
                                        for each, x in zip(own_up, our_in, strict=True)])  # fmt: skip
        middle = [np.tanh(multiply(merged, f"{block}.up", x)) for x in our_in]
        theirs = [
            h + share * multiply(own, f"{block}.down", np.tanh(up))
            for own, h, up in zip(models, theirs, own_up, strict=True)
        ]
        # Here the stream is repaired: what the block gives is compared.
        off = [
            (h - (mine + share * multiply(merged, f"{block}.down", x))) / share
            for h, mine, x in zip(theirs, ours, middle, strict=True)
        ]
        improve(f"{block}.down", middle, off)
        ours = [
            mine + share * multiply(merged, f"{block}.down", x)
            for mine, x in zip(ours, middle, strict=True)
        ]
    improve("head", ours, [multiply(own, "head", h) - multiply(merged, "head", mine)
                           for own, h, mine in zip(models, theirs, ours, strict=True)])  # fmt: skip
    return merged


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_walk_is_a_plain_loop_that_repairs_the_stream_at_each_block(share: float) -> None:
    module = Tower(share)
    states = make_states(module)
    batches = make_batches()
    made = match(module, states, batches)
    wanted = walk(states, batches, share)
    start = start_of(states)
    for name in made:
        change = np.abs(wanted[name] - start[name].numpy()).max()
        assert np.abs(made[name].numpy() - wanted[name]).max() <= 1e-4 * change + 1e-6, name
        assert (change > 1e-3) == (name.removesuffix(".weight") in MATRICES)
    before, after = (find_deviation(module, each, states, batches) for each in (start, made))
    assert after < before


# --- identities -----------------------------------------------------------------------------------


def test_models_that_are_the_base_give_the_base_to_the_bit() -> None:
    module = Tower()
    [base] = make_states(module, 0)
    assert_same(match(module, [base, base, base], make_batches()), base)


@pytest.mark.parametrize("count", [1, 3])
def test_models_that_are_one_give_that_one(count: int) -> None:
    module = Tower()
    base, model = make_states(module, 1)
    made = match(module, [base, *[model] * count], make_batches(count))
    assert is_near(made, model, 1e-5)


def test_lambda_multiplies_the_whole_change() -> None:
    module = Tower()
    states = make_states(module)
    whole = match(module, states, make_batches())
    base = states[0]
    for factor in (0.3, 1.7):
        made = match(module, states, make_batches(), lambda_coeff=factor)
        wanted = {name: base[name] + factor * (whole[name] - base[name]) for name in base}
        assert is_near(made, wanted, 1e-5)
    assert_same(match(module, states, make_batches(), lambda_coeff=0.0), base)


def test_neither_the_order_of_models_nor_that_of_examples_matters_and_twice_is_the_same() -> None:
    module = Tower()
    base, one, other = make_states(module)
    first, second = make_batches()
    made = match(module, [base, one, other], [first, second])
    assert is_near(made, match(module, [base, other, one], [second[::-1], first]), 1e-4)
    assert_same(made, match(module, [base, one, other], [first, second]))
    out = {name: torch.empty_like(each) for name, each in base.items()}
    match(module, [base, one, other], [first, second], out=out)
    assert_same(made, out)


@pytest.mark.parametrize("module", [Tower(), nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))])  # fmt: skip
def test_dropping_takes_place_before(module: nn.Module) -> None:
    states = make_states(module)
    made = match(module, states, make_batches(), drop_rate=0.5)
    start = start_of(states, drop_rate=0.5)
    before, after = (find_deviation(module, each, states, make_batches()) for each in (start, made))
    assert after < 0.9 * before


def test_padding_counts_nowhere() -> None:
    module = Tower()
    states = make_states(module)
    first, second = make_batches(tokens=8)
    long, short = draw(1, 9, 5, seed=1), draw(1, 4, 5, seed=2)
    padded = torch.cat([short, torch.full((1, 5, 5), 1e3)], 1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 4:] = 0
    one = {"x": torch.cat([long, padded]), "attention_mask": mask}
    made = match(module, states, [[*first, long, short], second])
    assert is_near(made, match(module, states, [[*first, one], second]), 1e-4)


# --- which matrices -------------------------------------------------------------------------------


def test_what_a_rule_excludes_and_what_is_no_matrix_is_as_without_examples() -> None:
    module = Tower()
    states = make_states(module)
    rules = [{"match": "*.up.*", "matched": False}]
    made = match(module, states, make_batches(), rules=rules)
    start = start_of(states)
    changed = {name for name in made if not same_bits(made[name], start[name])}
    assert changed == {f"{name}.weight" for name in MATRICES if not name.endswith(".up")}


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
    module = Odd()
    states = make_states(module)
    made = match(module, states, make_batches())
    start = start_of(states)
    changed = [name for name in made if not same_bits(made[name], start[name])]
    assert changed == ["plain.weight"]


class Guided(Tower):
    """Its blocks are given more of its weights than hidden states."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) + self.head.bias.sum() * block(x)
        return self.head(x)


class Mixed(Tower):
    """Its head is given what all blocks gave."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        given = [x := block(x) for block in self.blocks]
        return self.head(sum(given))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Guided, "not called one after the other"), (Mixed, "depends on more than its last block")],
)
def test_a_module_that_cannot_be_walked_by_blocks_is_matched_as_a_whole(
    kind: type[Tower], reason: str, capsys: Any, caplog: Any
) -> None:
    module = kind()
    states = make_states(module)
    batches = make_batches()
    with caplog.at_level(logging.WARNING):
        made = match(module, states, batches)
    assert reason in caplog.text + capsys.readouterr().err
    start = start_of(states)
    before, after = (find_deviation(module, each, states, batches) for each in (start, made))
    assert after < before
    assert all("forward" not in vars(block) for block in module.blocks)


def test_with_examples_of_the_base_the_merge_stays_nearer_to_it() -> None:
    module = Tower()
    states = make_states(module)
    general = [draw(3, 40, 5, seed=77)]
    merges = [match(module, states, make_batches(), **more)
              for more in ({}, {"base_batches": general})]  # fmt: skip
    without, with_them = (
        find_deviation(module, made, [{}, states[0]], [general]) for made in merges
    )
    assert with_them < 0.9 * without


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "vit"])
def test_models_of_transformers_are_matched_in_memory(family: str) -> None:
    import transformers

    if family == "bert":
        module = family_model("bert")
        batches: Batches = [
            [{"input_ids": draw(4, 12, seed=k).mul(100).long() % 40,
              "attention_mask": torch.ones(4, 12, dtype=torch.long)}]
            for k in range(2)
        ]  # fmt: skip
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        config = transformers.ViTConfig(**sizes, num_attention_heads=2, image_size=8, patch_size=4)
        module = transformers.ViTForImageClassification(config)
        batches = [[{"pixel_values": draw(8, 3, 8, 8, seed=k)}] for k in range(2)]
    states = make_states(module)
    made = match(module, states, batches)
    start = start_of(states)
    call = torch.func.functional_call
    deviations = []
    for each in (start, made):
        with torch.no_grad():
            deviations.append(sum(
                float((call(module, each, (), some[0]).logits
                       - call(module, own, (), some[0]).logits).norm())
                for own, some in zip(states[1:], batches, strict=True)
            ))  # fmt: skip
    assert deviations[1] < deviations[0]
    assert sum(not same_bits(made[name], start[name]) for name in made) >= 12


@pytest.mark.parametrize(
    ("count", "batches", "words"),
    [
        (2, [[]], "batches for 1 of 2 models"),
        (1, [[]], "a model has no batches"),
        (1, [[torch.zeros(1, 5)]], "has no tensor 'head.weight'"),
    ],
)
def test_batches_and_states_that_do_not_fit_are_refused(
    count: int, batches: Batches, words: str
) -> None:
    module = Tower()
    states = make_states(module, count)
    for state in states if "head" in words else ():
        del state["head.weight"]
    with pytest.raises(ConfigError, match=words) as caught:
        match(module, states, batches)
    assert caught.value.hint
