"""Words for people: names that talk to terminals are shown and not obeyed, and figures are rounded
as people do."""

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

import dare
from darelib.core.text import install_hint
from tests.support import (
    finetune,
    low_rank,
    random_model,
    save,
    save_sharded,
    with_header,
    write_adapter,
)

# Sets the title, clears the screen, begins lines, rings and deletes; the same in C1; turns around;
# separates; hides.
TRICK = (
    "\x1b]0;owned\x07\x1b[2J\x1b[Ha\rerror: b\nerror: b\nhint: c\x07\x08\x7f\x9b31m\x85\x9d0;x\x9c"
    "\u202e\u2066evil\u200fa\u2028b\u2029c\x0b\x0c\x1cd\U000e0041\ufeff\u00ad"
)
END = ".safetensors"
SHOWN = ("--json", "-v", "--dry-run")


def name_models(word: str) -> Iterator[tuple[Any, ...]]:
    """Statuses with the flags that give them: a word is in all names of files and of tensors."""
    folder = Path(f"in {word}")

    def at(name: str, suffix: str = END) -> str:
        return str(folder / f"{name}{word}{suffix}")

    w = f"w{word}"
    base = random_model(shapes={w: (30, 5), f"a{word}.weight": (6, 4)})
    more = base | {f"i{word}": torch.arange(3), f"q{word}.weight": torch.ones(3, dtype=torch.int8)}
    large = finetune(base, 1, 0.02) | {f"extra{word}": torch.ones(2)}
    models = {
        "base": base,
        "large": large,
        "lacks": {w: large[w]},
        "more": more,
        "none": {f"z{word}": torch.ones(2)},
        "nan": {w: base[w] * math.inf},
        "rows": {w: base[w][:7]},
        "kinds": {w: base[w].long()},
        "copied": more | {f"i{word}": torch.arange(3) + 1},
    }
    save(folder, **{name + word: tensors for name, tensors in models.items()})
    save(Path(at("several", "")), **{f"one{word}": base})
    sharded = save_sharded(Path(at("sharded", "")), base, [[w], [f"a{word}.weight"]])
    (sharded / "model-00002-of-00002.safetensors").unlink()
    Path(at("empty", "")).mkdir()
    Path(at("config", ".toml")).write_text("[dare]\nx = 1")
    Path(at("index", ".json")).write_text(json.dumps({"weight_map": {w: word + END}}))
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    twice = f"{{{json.dumps(w)}: {{}}, {json.dumps(w)}: {{}}}}"
    odd = (entry | {"dtype": word}, entry | {"data_offsets": [1, 5]}, {})
    for k, header in enumerate((*(json.dumps({w: each}) for each in odd), twice)):
        Path(at(f"broken{k}")).write_bytes(with_header(header, bytes(4 + (k == 1))))
    pairs = low_rank(f"a{word}", (6, 4))
    ranks = ({}, {"rank_pattern": {f".*{word}": 3}}, {"rank_pattern": {f"({word}": 3}})
    sound, *wrong = (
        str(write_adapter(Path(at(f"lora{k}", "")), pairs, **config))
        for k, config in enumerate((*ranks, {"peft_type": word}))
    )
    wrong += [str(write_adapter(Path(at("odd", "")), low_rank(f"gone{word}", (6, 4))))]
    wrong += [at(name) for name in ("nan", "rows", "none", "more", "absent")]
    wrong += [at(f"broken{k}") for k in range(4)] + [at("index", ".json")]
    wrong += [at(name, "") for name in ("empty", "several", "sharded")]
    usual = ("--engine=plain", "-b", at("base"), "-m")  # no kernels to tell of
    merge = ("-o", f"out{END}", *usual)
    kept = (*usual, at("large"), "-o", at("out"))
    yield from (
        *((0, *merge, at(file), flag) for file in ("large", "lacks") for flag in SHOWN),
        *((0, *merge, at("base"), *[at("large")] * 2, flag) for flag in SHOWN),
        (0, *merge, sound),
        (0, *merge, at("kinds")),
        (0, *merge, at("large"), "--rule", f"{word}*:lambda_coeff=0.5"),
        (0, *merge, at("rows"), "--mismatch=overlap"),
        (0, *merge, at("copied"), "-b", at("more")),
        *((1, *merge, path) for path in wrong),
        (0, *kept),
        (1, *kept, "--seed", "1"),  # of another recipe
        (0, "verify", "--engine=plain", at("out")),
        (1, "verify", at("out"), "-b", at("none")),
        (0, *kept, "-o", at("dir", "")),
        (0, "verify", "--engine=plain", at("dir", "")),
        *((1, "verify", path) for path in (at("absent"), at("base"), at("empty", ""))),
        (2, *kept, "-o", at("large")),
        (0, *kept, "-o", at("no", "/x.safetensors")),
        (2, *kept, "-o", at("x", ".bin")),
        (1, *kept, "-o", at("nan")),
        (0, "analyze", "--per-tensor", *usual, at("large"), "--write-config", at("new", ".toml")),
        *((2, "-c", at(name, ".toml")) for name in ("config", "absent")),
    )


def write_words(word: str) -> Iterator[tuple[Any, ...]]:
    """The same, with a word in configurations and flags."""
    models = {"base_file": f"base{END}", "merge_files": [f"base{END}"], "output_file": f"out{END}"}
    save(Path(), base=random_model())
    tables = [
        (2, {word: {}}),
        (2, {"models": {word: 1}}),
        (2, {"models": {"merge_files": [{word: 1}]}}),
        (2, {"recipe": {"mask": word}}),
        (2, {"rules": [word]}),
        (2, {"rules": [{word: 1}]}),
        (2, {"dare": {word: 1}}),
        (2, {"dare": {"method": word}}),
        (2, {"dare": {"drop_rate": [word]}}),
        (2, {"dare": {"drop_rate": {word: word}}}),
        (1, {"recipe": {"inputs": [{"file": f"base{END}", "size": word}]}}),
        (2, {"models": {"tokenizer": f"/{word}"}, "recipe": {}}),
        (0, {"models": models, "rules": [{"match": word, "drop_rate": 0.5}]}),
        (1, {"models": models | {"base_file": word}}),
        (1, {"models": models | {"merge_files": [word]}}),
        (1, {"models": models | {"tokenizer": word}}),
    ]
    for status, table in tables:
        Path("c.toml").write_text(tomli_w.dumps(table))
        yield status, "-c", "c.toml"
    Path("c.toml").write_text(f"[dare]\nx = {word}")
    flags = ("--method", "--seed", "--drop-rate", "--rule", "--dtype", "--engine")
    yield from (
        *((2, flag, word) for flag in flags),
        (2, "-c", "c.toml"),
        (2, f"--{word}"),
        (2, word),
        (2, f"--force={word}"),
        (2, "--rule", f"{word}:{word}"),
        (2, "--rule", f"a:{json.dumps(word)}=1"),
    )


@pytest.mark.skipif(os.name == "nt", reason="such names cannot be")
@pytest.mark.parametrize("make", [name_models, write_words])
def test_no_name_reaches_a_terminal_as_more_than_text(
    tmp_path: Path, monkeypatch: Any, capsys: Any, make: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: dict[str, list[tuple[int, int]]] = {"plain": [], TRICK: []}
    for word, counts in lines.items():
        for status, *flags in make(word):
            Path(f"out{END}").unlink(missing_ok=True)
            assert dare.main(flags) == status, flags
            out, err = capsys.readouterr()
            assert all(letter.isprintable() or letter == "\n" for letter in out + err), flags
            assert "unexpected" not in err
            assert "--json" not in flags or repr(word)[1:-1] in repr(json.loads(out)), (
                "as data, names are whole"
            )
            counts.append((out.count("\n"), err.count("\n")))
    assert lines["plain"] == lines[TRICK]


def test_hints_to_install_fit_how_the_tool_was_installed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("UV", "uv")
    assert install_hint("torch") == "install it: uv run --extra torch python dare.py ..."
    monkeypatch.delenv("UV")
    assert install_hint("hub") == f"install it: {sys.executable} -m pip install huggingface_hub"
    (tmp_path / "uv-receipt.toml").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert (
        install_hint("plot") == f"install it: uv pip install --python {sys.executable} matplotlib"
    )
