"""How much of a change a low rank would keep, as an analysis says it: held to exact SVDs."""

import json
import re
from pathlib import Path

import pytest
import torch

from dare import AnalysisReport
from tests.support import (
    BF16,
    F32,
    F64,
    Capture,
    Patch,
    Tensors,
    low_rank,
    make_merger,
    random_model,
    run,
    save,
    write_adapter,
)

RANKS = (8, 16, 32, 64, 128, 256)
MATRICES = {"layers.0.mlp.weight": (96, 64), "layers.1.mlp.weight": (70, 300)}


def analyze(folder: Path, base: Tensors, *models: Tensors) -> AnalysisReport:
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return make_merger(paths[0], paths[1:], engine="plain").analyze()


def change(base: Tensors, rank: int, noise: float) -> Tensors:
    """A fine-tune whose changes are of a rank, apart from noise."""
    generator = torch.Generator().manual_seed(rank)
    model = {}
    for name, tensor in base.items():
        whole, left, right = (
            torch.randn(shape, generator=generator, dtype=F64)
            for shape in (tensor.shape, (len(tensor), rank), (rank, tensor.shape[1]))
        )
        model[name] = (tensor + 0.001 * left @ right + noise * whole).to(tensor.dtype)
    return model


def keep_by_rank(base: Tensors, model: Tensors) -> list[float]:
    """What the best products of each rank keep of the changes, by squares."""
    changes = [(model[name].double() - base[name].double()) for name in base]
    squares = [torch.linalg.svdvals(delta) ** 2 for delta in changes]
    total = float(sum(map(torch.sum, squares)))
    return [float(sum(part[:rank].sum() for part in squares)) / total for rank in RANKS]


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize(("rank", "noise"), [(8, 0.0), (8, 0.003), (20, 0.001), (0, 0.001)])
def test_an_analysis_says_how_much_a_low_rank_keeps(
    tmp_path: Path, dtype: torch.dtype, rank: int, noise: float
) -> None:
    base = random_model(1, dtype, MATRICES)
    model = change(base, rank, noise)
    norms = random_model(2, dtype, {"norm.weight": (64,), "narrow.weight": (10, 99)})
    more = {name: tensor + 1 for name, tensor in norms.items()}  # of which nothing is told
    found, same = analyze(tmp_path, base | norms, model | more, base | norms).models
    assert found.energy == {
        str(rank): pytest.approx(share, abs=0.0051)
        for rank, share in zip(RANKS, keep_by_rank(base, model), strict=True)
    }
    assert same.energy == {}
    assert (found.energy["8"] == 1) == (rank == 8 and not noise)


@pytest.mark.parametrize("entries", [1 << 20, 10_000])
def test_what_a_low_rank_keeps_of_wide_matrices_is_nearly_found(
    tmp_path: Path, monkeypatch: Patch, entries: int
) -> None:
    """However many entries are read at a time."""
    monkeypatch.setattr("darelib.commands.analyze.overlaps.READ_ENTRIES", entries)
    base = random_model(1, F32, {"layers.0.mlp.weight": (500, 700)})
    model = change(base, 20, 0.003)
    found = analyze(tmp_path, base, model).models[0].energy
    for share, exact in zip(found.values(), keep_by_rank(base, model), strict=True):
        assert exact - 0.05 < share < exact + 0.0051


def test_what_a_low_rank_keeps_is_by_the_size_of_the_changes(tmp_path: Path) -> None:
    """The matrices that are looked at are those that hold most of a change."""
    base = random_model(1, F32, {f"layers.{k}.mlp.weight": (64, 64) for k in range(9)})
    model = change(base, 0, 1e-6)
    name = "layers.4.mlp.weight"
    model[name] = change({name: base[name]}, 8, 0.0)[name]
    assert analyze(tmp_path, base, model).models[0].energy["8"] == 1


@pytest.mark.parametrize("rank", [4, 8, 24])
def test_what_a_low_rank_keeps_of_an_adapter_comes_from_its_factors(
    tmp_path: Path, capsys: Capture, rank: int
) -> None:
    shape = (96, 80)
    base = random_model(1, BF16, {"layers.0.mlp.weight": shape, "layers.1.mlp.weight": shape})
    tensors = low_rank("layers.0.mlp", shape, rank)
    right, left = (tensor.double() for tensor in tensors.values())
    [file] = save(tmp_path, base=base)
    adapter = write_adapter(tmp_path / "adapter", tensors, r=rank)
    words = ["analyze", "-b", file, "-m", adapter, "--engine", "plain"]
    run(*words, "--json")
    [model] = json.loads(capsys.readouterr().out)["models"]
    exact = keep_by_rank({"": torch.zeros(shape)}, {"": left @ right})
    assert list(model["energy"].values()) == pytest.approx(exact, abs=0.0051)
    assert (model["energy"]["8"] == 1) == (rank <= 8)
    run(*words, "--full")
    [line] = re.findall(r"^kept at rank.*\nadapter +(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert line.split() == [f"{share:.0%}" for share in model["energy"].values()]
