"""The format of packed models: what is not sound is refused, and docs/packed.md is enough to write
a reader."""

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from xxhash import xxh3_64_intdigest

import darelib.commands.pack.packer
import darelib.models.packed
from dare import DareError
from tests.support import (
    BF16,
    F64,
    Patch,
    Refusal,
    assert_same,
    draw_pieces,
    examples,
    finetune,
    make_models,
    mask,
    random_model,
    raw,
    run,
    run_merge,
    save,
    save_models,
    slow,
    tune,
    with_header,
)
from tests.test_packed import PLAIN, pack, pack_all, table_of

pytestmark = pytest.mark.usefixtures("small_blocks")

# --- files that are not what they say -------------------------------------------------------------


def rewrite(path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """Change the table of a packed model, or give another, and its header."""
    data = path.read_bytes()
    table = table_of(path)
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    made = edit(table, header)
    header["__metadata__"]["dare_packed"] = (
        made if isinstance(made, str) else json.dumps(table if made is None else made)
    )
    path.write_bytes(with_header(json.dumps(header), data[start:]))


def put(place: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """Replace a field of the table, or of its entry for w."""

    def edit(table: dict[str, Any], header: dict[str, Any]) -> None:
        entry = table["tensors"]["w"]
        (table if place in table else entry)[place] = (
            value(entry[place]) if callable(value) else value
        )

    return edit


EDITS: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no JSON": lambda *_: "{",
    "a list": lambda *_: "[]",
    "a number": lambda *_: "7",
    "deep": lambda *_: "[" * 100_000,
    "no version": lambda table, _: {key: value for key, value in table.items() if key != "version"},
    "a later version": put("version", 2),
    "another mask": put("mask", "mt19937"),
    "a negative seed": put("seed", -1),
    "a huge seed": put("seed", 1 << 63),
    "a seed of text": put("seed", "42"),
    "a true seed": put("seed", True),
    "another seed": put("seed", 43),
    "another base": put("base", {"file": "other"}),
    "no base": put("base", None),
    "tensors in a list": put("tensors", []),
    "an entry of text": lambda t, _: t["tensors"].update(w="x"),
    "a tensor too many": lambda t, _: t["tensors"].update(v=t["tensors"]["w"]),
    "an integer": lambda t, _: t["tensors"].update(ids=t["tensors"]["w"]),
    "a tensor of no base": lambda t, h: (
        t["tensors"].update(x=t["tensors"]["w"]),
        h.update(x=h.pop("w")),
        None,
    )[2],
    "no values": lambda _, header: (header.pop("w"), None)[1],
    "more rows": put("shape", [100, 100]),
    "fewer rows": put("shape", [98, 100]),
    "flat": put("shape", [9900]),
    "a huge shape": put("shape", [1 << 62, 1 << 62]),
    "a shape of text": put("shape", "99"),
    "a side": put("shape", 9),
    "a rate of 1": put("drop_rate", 1.0),
    "a negative rate": put("drop_rate", -0.1),
    "no rate": put("drop_rate", None),
    "a rate that is no number": put("drop_rate", math.nan),
    "a lower rate": put("drop_rate", 0.4),
    "a higher rate": put("drop_rate", 0.6),
    "a rate of text": put("drop_rate", "0.5"),
    "too few counts": put("counts", lambda c: c[:-1]),
    "too many counts": put("counts", lambda c: [*c, c[-1]]),
    "no counts": put("counts", []),
    "counts of text": put("counts", lambda c: [*map(str, c)]),
    "counts that fall": put("counts", lambda c: [c[0], c[2], c[1], c[3]]),
    "a count that is off": put("counts", lambda c: [c[0], c[1] + 1, *c[2:]]),
    "counts beyond a block": put("counts", lambda c: [0, 4097, *c[2:]]),
    "true counts": put("counts", [False] * 4),
    "counts from 1": put("counts", lambda c: [1, *c[1:]]),
    "less in all": put("counts", lambda c: [*c[:-1], c[-1] - 1]),
    "too few digests": put("base_xxh3", lambda d: d[:-1]),
    "digests of text": put("base_xxh3", lambda d: [*map(str, d)]),
    "a digest": put("base_xxh3", 7),
    "another digest": put("base_xxh3", lambda d: [*d[:-1], d[-1] ^ 1]),
    "another mask name": lambda t, _: t["tensors"]["w"].update(mask_name="v"),
    "no mask name": lambda t, _: t["tensors"]["w"].update(mask_name=""),
    "half a surrogate": lambda t, _: t["tensors"]["w"].update(mask_name="\ud800"),
    "a mask of 7": lambda t, _: t["tensors"]["w"].update(mask_name=7),
}


@pytest.fixture
def victim(tmp_path: Path) -> tuple[Path, Path]:
    base = random_model(0, BF16, {"w": (99, 100)}) | {"ids": torch.arange(9)}
    paths = save(tmp_path, base=base, math={**finetune(base, 1), "ids": torch.arange(9)})
    return paths[0], pack(*paths, tmp_path / "packed.safetensors", "--drop-rate", 0.5)


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("engine", ["plain", slow("numba")])
def test_a_table_that_does_not_fit_is_refused(
    victim: tuple[Path, Path], check_refused: Refusal, how: str, engine: str
) -> None:
    rewrite(victim[1], EDITS[how])
    check_refused(
        *victim, "packed.safetensors'", flags=("--engine", engine, "--mismatch", "overlap")
    )


def test_values_that_are_cut_or_broken_are_refused(
    victim: tuple[Path, Path], check_refused: Refusal
) -> None:
    packed = victim[1]
    data = packed.read_bytes()
    before = load_file(packed)
    for size in (0, 5, 100, len(data) - 4000, len(data) - 1):
        packed.write_bytes(data[:size])
        check_refused(*victim, "packed.safetensors'")
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    save_file({"w": before["w"][:-7].clone(), "ids": before["ids"]}, packed, header["__metadata__"])
    check_refused(*victim, "see its counts of 'w'")
    before["w"][-1] = math.nan
    save_file(before, packed, header["__metadata__"])
    check_refused(
        *victim, "tensor 'w' holds nan at [98, 99]\n", flags=(*PLAIN, "--drop-rate", "0.5")
    )


PLACES = ["version", "mask", "seed", "base", "tensors", "w", "shape", "drop_rate", "counts"]
PLACES += ["base_xxh3"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["shape", "counts"]), inner)
    ),
    max_leaves=4,
)


@examples(20)
@given(value=JSON, place=st.sampled_from(PLACES))
def test_any_other_value_is_refused_or_means_the_same(
    tmp_path: Path, value: Any, place: str
) -> None:
    paths = save_models(tmp_path, make_models(1, BF16, {"w": (50, 100)}))
    packed = pack(*paths, tmp_path / "packed.safetensors", "--drop-rate", 0.5)
    run_merge(paths[0], [packed], tmp_path / "sound.safetensors", engine="plain")
    if place == "w":
        rewrite(packed, lambda table, _: table["tensors"].update(w=value))
    else:
        rewrite(packed, put(place, value))
    try:
        run_merge(paths[0], [packed], tmp_path / "out.safetensors", engine="plain")
    except DareError:
        return
    assert_same(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "sound.safetensors"))


@pytest.mark.parametrize("dtype", [BF16, slow(F64)], ids=str)
@pytest.mark.parametrize("elements", [2048, slow(8192)])
def test_a_base_of_which_some_weights_were_changed_is_another_base(
    tmp_path: Path, refused: Refusal, dtype: torch.dtype, elements: int
) -> None:
    """Its fingerprint is that of a sample, in which they are not."""
    tune(job_elements=elements)  # also less than a block, which several threads then read
    base = random_model(0, BF16, {"w": (1100, 600)})
    tuned = {name: tensor.to(dtype) for name, tensor in finetune(base, 1).items()}
    paths = save(tmp_path, base=base, math=tuned, other=finetune(base, 2))
    packed = pack_all(paths, 0.9)
    flags = ["-b", paths[0], *PLAIN, "--threads", "3"]
    merge = [*flags, "-m", *packed, "-o", tmp_path / "out.safetensors"]
    run("-q", *merge)
    base["w"].view(-1)[2100:2500] += 1
    save(tmp_path, base=base)
    words = (f"{packed[0].name}'", "another base", "tensor 'w' differs at [0, 0] or after")
    refused(1, words, *merge, "--force")
    refused(1, words, "analyze", *flags, "-m", packed[0])
    for path in packed:  # as it was before there were digests
        rewrite(path, lambda table, _: table["tensors"]["w"].pop("base_xxh3") and None)
    run("-q", *merge, "--force")


# --- the format, as docs/packed.md has it ---------------------------------------------------------


def read_packed(path: Path) -> dict[str, tuple[np.ndarray, bytes]]:
    """By tensor: the positions of its entries, and their bytes.

    Written from the page, with nothing of the tool.
    """
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    table = json.loads(header.pop("__metadata__")["dare_packed"])
    assert (table["version"], table["mask"]) == (1, "philox4x32-7/16")
    found = {}
    for name, entry in table["tensors"].items():
        text = f"{table['seed']}:{entry.get('mask_name', name)}".encode()
        key = struct.unpack("<II", hashlib.blake2b(text, digest_size=8).digest())
        count = math.prod(entry["shape"])
        # A tile of 1,024 positions has 128 blocks: position k is piece k // 128 of block k % 128.
        blocks = np.arange(-(-count // 1024) * 128, dtype=np.uint64)
        tiles = draw_pieces(key, blocks).reshape(8, -1, 128).swapaxes(0, 1)
        below = max(1, round((1 - entry["drop_rate"]) * 65536))
        kept = tiles.ravel()[:count] < below
        ends = [*range(0, count, 1 << 20), count]
        assert entry["counts"] == [np.count_nonzero(kept[:end]) for end in ends]
        first, last = header[name]["data_offsets"]
        found[name] = np.flatnonzero(kept), data[start + first : start + last]
    return found


def test_the_page_on_the_format_is_enough_to_read_a_packed_model(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    for module in (darelib.commands.pack.packer, darelib.models.packed):
        monkeypatch.setattr(module, "COUNTED_BLOCK", 1 << 20)  # as it is
    tune(job_elements=1 << 22, max_chunk=1 << 18)
    base = random_model(0, BF16, {"large": (1030, 1031), "small": (7, 9), "one": (), "none": (0,)})
    base["wide"] = random_model(1, F64, {"": (50, 60)})[""]
    tuned = finetune(base, 1)
    paths = save(tmp_path, base=base, math=tuned)
    flags = (
        "--drop-rate",
        0.93,
        "--seed",
        5,
        "--rule",
        "small:drop_rate=0.999999",
        "--rule",
        "wide:drop_rate=0.3",
    )
    found = read_packed(pack(*paths, tmp_path / "packed.safetensors", *flags))
    rates = {"large": 0.93, "one": 0.93, "none": 0.93, "small": 0.999999, "wide": 0.3}
    assert found.keys() == tuned.keys()
    entries = table_of(tmp_path / "packed.safetensors")["tensors"]
    for name, tensor in base.items():
        data = raw(tensor).tobytes()
        size = tensor.itemsize << 20
        blocks = [
            xxh3_64_intdigest(data[start : start + size]) for start in range(0, len(data), size)
        ]
        assert entries[name]["base_xxh3"] == blocks
    for name, (positions, values) in found.items():
        assert np.array_equal(
            positions, np.flatnonzero(mask(5, name, tuned[name].numel(), rates[name]))
        )
        assert values == raw(tuned[name].reshape(-1)[torch.from_numpy(positions)]).tobytes()
