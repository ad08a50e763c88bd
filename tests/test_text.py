"""Words for people: names that talk to terminals are shown and not obeyed, and figures are rounded
as people do."""

import json
import math
import os
import struct
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
    command,
    finetune,
    low_rank,
    random_model,
    save,
    save_sharded,
    write_adapter,
)

# Sets the title, clears the screen, begins lines, rings and deletes; the same in C1; turns around;
# separates; hides.
TRICK = (
    "\x1b]0;owned\x07\x1b[2J\x1b[Ha\rerror: b\nerror: b\nhint: c\x07\x08\x7f\x9b31m\x85\x9d0;x\x9c"
    "\u202e\u2066evil\u200fa\u2028b\u2029c\x0b\x0c\x1cd\U000e0041\ufeff\u00ad"
)
END = ".safetensors"


def name_files(word: str) -> Iterator[tuple[Any, ...]]:
    """Statuses with the flags that give them, and files and directories with a word in their names."""
    base = random_model(shapes={"w": (30, 5), "b": (5,)})
    start = f"in {word}/"
    models = {
        "base": base,
        "model": finetune(base, 1, 1.0),
        "nan": {"w": base["w"] * math.nan},
        "other": {"x": base["w"]},
        "shape": {"w": base["w"][:7], "extra": base["b"]},
    }
    save(Path(start), **{name + word: tensors for name, tensors in models.items()})
    save(Path(f"{start}several{word}"), **{f"one{word}": base})
    (
        save_sharded(Path(f"{start}sharded{word}"), base, [["w"], ["b"]])
        / "model-00002-of-00002.safetensors"
    ).unlink()

    def at(name: str, suffix: str = END) -> str:
        return f"{start}{name}{word}{suffix}"

    Path(at("empty", "")).mkdir()
    Path(at("broken")).write_text("x")
    Path(at("config", ".toml")).write_text("[dare]\nx = 1")
    merge = ["-b", at("base"), "-o", at("out"), "-m"]
    yield from (
        (0, *merge, at("base"), *[at("model")] * 2, flag) for flag in ("--dry-run", "--json", "-v")
    )
    yield from (
        (0, "verify", at("out")),
        (1, "verify", at("out"), "-b", at("other")),
        (1, "verify", at("absent")),
    )
    yield from (
        (0, *merge, at("shape"), "--mismatch", "overlap"),
        (0, *merge, at("model"), "-o", at("dir", "")),
    )
    yield (
        0,
        "analyze",
        "--engine=plain",
        "-b",
        at("base"),
        "-m",
        at("model"),
        "--write-config",
        at("new", ".toml"),
    )
    yield from (
        (0, "verify", at("dir", "")),
        (1, "verify", at("empty", "")),
        (1, "verify", at("base")),
    )
    for status, output in (
        (2, at("model")),
        (1, at("no", "/x.safetensors")),
        (2, at("x", ".bin")),
        (1, at("nan")),
    ):
        yield status, *merge, at("model"), "-o", output
    wrong = [at(name) for name in ("nan", "other", "shape", "broken", "absent")]
    yield from (
        (1, *merge, path)
        for path in (*wrong, at("empty", ""), at("several", ""), at("sharded", ""))
    )
    yield from ((2, "-c", at(name, ".toml")) for name in ("config", "absent"))


def name_tensors(word: str) -> Iterator[tuple[Any, ...]]:
    """The same, with a word in what files hold."""
    w = f"w{word}"
    name = json.dumps(f"w{word}")
    base = random_model(shapes={w: (30, 5), f"a{word}.weight": (6, 4)})
    pairs = low_rank(f"a{word}", (6, 4))
    more = base | {f"i{word}": torch.arange(3), f"q{word}.weight": torch.ones(3, dtype=torch.int8)}
    large = finetune(base, 1, 0.02) | {f"extra{word}": torch.ones(2)}
    save(
        Path(),
        base=base,
        large=large,
        lacks={w: large[w]},
        more=more,
        none={f"z{word}": torch.ones(2)},
    )
    save(Path(), nan={w: base[w] * math.inf}, rows={w: base[w][:7]}, kinds={w: base[w].long()})
    save(Path(), copied=more | {f"i{word}": torch.arange(3) + 1})
    entry = f'{{{name}: {{"dtype": %s, "shape": [1], "data_offsets": %s}}}}'
    headers = [
        entry % (json.dumps(word), "[0, 4]"),
        entry % ('"F32"', "[1, 5]"),
        f"{{{name}: {{}}}}",
    ]
    for k, header in enumerate([*headers, f"{{{name}: {{}}, {name}: {{}}}}"]):
        Path(f"broken{k}{END}").write_bytes(
            struct.pack("<Q", len(header)) + header.encode() + bytes(4 + (k == 1))
        )
    Path("index.json").write_text(json.dumps({"weight_map": {w: word + END}}))
    configs: Any = (
        {},
        {"peft_type": word},
        {"rank_pattern": {f".*{word}": 3}},
        {"rank_pattern": {f"({word}": 3}},
    )
    sound, *broken = (
        write_adapter(Path(f"{k}"), pairs, **config) for k, config in enumerate(configs)
    )
    broken += [Path("index.json"), write_adapter(Path("odd"), low_rank(f"gone{word}", (6, 4)))]
    merge = ("-b", f"base{END}", "-o", f"out{END}", "-m")
    yield from (
        (0, *merge, file + END, flag)
        for file in ("large", "lacks")
        for flag in ("--json", "-v", "--dry-run")
    )
    yield 0, "analyze", "--engine=plain", "--per-tensor", "-b", f"base{END}", "-m", f"large{END}"
    yield from (
        (0, *merge, str(sound)),
        (0, *merge, f"kinds{END}"),
        (0, *merge, f"large{END}", "--rule", f"{word}*:lambda_coeff=0.5"),
    )
    yield from (
        (0, *merge, f"rows{END}", "--mismatch=overlap"),
        (0, *merge, f"copied{END}", "-b", f"more{END}"),
    )
    yield from ((1, *merge, file + END) for file in ("nan", "rows", "none", "more"))
    yield from ((1, *merge, str(path)) for path in (*broken, *sorted(Path().glob("broken*"))))


def write_words(word: str) -> Iterator[tuple[Any, ...]]:
    """The same, with a word in configurations and flags."""
    models = {"base_file": f"base{END}", "merge_files": [f"base{END}"], "output_file": f"out{END}"}
    save(Path(), base=random_model())
    wrong = [
        {word: {}},
        {"models": {word: 1}},
        {"models": {"merge_files": [{word: 1}]}},
        {"recipe": {"mask": word}},
        {"rules": [word]},
        {"rules": [{word: 1}]},
        {"dare": {word: 1}},
        {"dare": {"method": word}},
        {"dare": {"drop_rate": [word]}},
        {"dare": {"drop_rate": {word: word}}},
    ]
    missing = [
        {"models": models | t}
        for t in ({"base_file": word}, {"merge_files": [word]}, {"tokenizer": word})
    ]
    sound = {"rules": [{"match": word, "drop_rate": 0.5}]}
    other = {"recipe": {"inputs": [{"size": word}]}}
    runs = [
        (1, {"models": models, **other}),
        (0, {"models": models, **sound}),
        *((1, table) for table in missing),
    ]
    for status, table in (*((2, table) for table in wrong), *runs):
        Path("c.toml").write_text(tomli_w.dumps(table))
        yield status, "-c", "c.toml"
    Path("c.toml").write_text(f"[dare]\nx = {word}")
    yield from (
        (2, flag, word)
        for flag in ("--method", "--seed", "--drop-rate", "--rule", "--dtype", "--engine")
    )
    yield from ((2, "-c", "c.toml"), (2, f"--{word}"), (2, word), (2, f"--force={word}"))
    yield from ((2, "--rule", rule) for rule in (f"{word}:{word}", f"a:{json.dumps(word)}=1"))


@pytest.mark.skipif(os.name == "nt", reason="such names cannot be")
@pytest.mark.parametrize("make", [name_files, name_tensors, write_words])
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


def test_what_python_thinks_of_a_pattern_does_not_reach_the_terminal(
    models: list[Path], tmp_path: Path
) -> None:
    """It warns of patterns like [[a], in lines of its own with a piece of our source."""
    ranks = dict.fromkeys(("[[a]", "a--b", "[a||b]"), 3)
    adapter = write_adapter(tmp_path / "adapter", low_rank("layer", (37, 61)), rank_pattern=ranks)
    done = command(
        "-q",
        "--engine",
        "plain",
        "-b",
        models[0],
        "-m",
        adapter,
        "-o",
        tmp_path / "out.safetensors",
    )
    assert (done.returncode, done.stderr) == (0, "")


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
