"""Files that may hold anything: every rule of the safetensors format is kept, in little memory and
in plain words."""

import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from dare import DareError
from darelib.core.formats import STORED_BITS
from darelib.models.tensorfile import TensorFile
from tests.support import (
    Capture,
    Refusal,
    damaged,
    examples,
    run,
    with_header,
)

V = '"v":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
W = '"w":{"dtype":"F32","shape":[2,3],"data_offsets":[16,40]}'
DATA = bytes(range(40))
SOUND = f"{{{V},{W}}}"


def with_field(key: str, value: str) -> str:
    """A sound header in which a field of w is spelled like that, or is left out."""
    fields = {"dtype": '"F32"', "shape": "[2,3]", "data_offsets": "[16,40]"} | {key: value}
    spelled = ",".join(f'"{key}":{value}' for key, value in fields.items() if value)
    return f'{{{V},"w":{{{spelled}}}}}'


def with_entry(name: str, value: str) -> str:
    return f'{SOUND[:-1]},"{name}":{value}}}'


# What may be wrong with the entry of w: a field, and how it is spelled; nothing: it is left out.
WRONG_FIELDS = {
    "data_offsets": [
        "",
        "[40,16]",
        "[16]",
        "[16,40,40]",
        "[]",
        "[-8,16]",
        f"[{2**64 + 16},{2**64 + 40}]",
        '["16","40"]',
        "[16,1e2]",
        '{"begin":16,"end":40}',
        f"[16,{'9' * 4999}]",
        "[16,-Infinity]",
    ],
    "shape": [
        "",
        "[2,2]",
        "[3,3]",
        f"[{2**40},{2**40}]",
        f"[{2**62},{2**62},0]",
        f"[{2**32},{2**32 + 6}]",
        "[-2,-3]",
        json.dumps([2**62] * 300),
        json.dumps([2] * 10_000),
        f"[{2**63},0]",
        f"[{2**64 + 6}]",
        "[2.0,3.0]",
        "[6e0]",
        "[-0]",
        "[6,true]",
        "[6,null]",
        '["6"]',
        "[[6]]",
        "[NaN]",
        "[Infinity]",
        "6",
        '"6"',
        '{"6":6}',
        f"[{'9' * 4999}]",
        f"[{'9' * 1_000_000}]",
        json.dumps([2**62 - 1] * 100_000),
    ],
    "dtype": ["", '"F16"', '"F31"', '"f32"', "32", '["F32"]', '"\\ud800"'],
    "more": ["NaN", "1e999", '"\\ud800"', "[" * 500 + "]" * 500],  # a field that nobody reads
}
# Headers that break a rule, by the message about them.
WRONG_HEADERS: dict[str, list[str | bytes]] = {
    "start with {": ["", "\ufeff" + SOUND, f"[{SOUND}]", "null", " " + SOUND, "\n" + SOUND],
    "utf-8": [SOUND.encode().replace(b"w", raw) for raw in (b"\xff", b"\xed\xa0\x80")]
    + [SOUND.encode() + b"\xc3"],
    "not JSON": [
        "{not JSON at all}",
        "{",
        SOUND + "{}",
        SOUND + "\0",
        SOUND.replace('"', "'"),
        SOUND[:-1] + ",}",
        SOUND[:-1] + "/* */}",
        SOUND.replace("w", "w\n"),
        SOUND.replace("w", "\\x77"),
        *(
            with_field("shape", spelled)
            for spelled in ("[06]", "[+6]", "[0x6]", "[\u0666]", "[6", "6]")
        ),
    ],
    "is the entry of a tensor": ['{"dtype":"F32","shape":[10],"data_offsets":[0,40]}'],
    "'dtype' is in it twice": [with_field("dtype", '"F32","dtype":"F32"')],
    "'w' is in it twice": [
        f"{{{V},{W},{W}}}",
        f"{{{W},{W},{V}}}",
        f"{{{V},{W},{W}}}".replace("w", "\\u0077", 1),
    ],
    "'__metadata__' is in it twice": [f'{{"__metadata__":{{}},"__metadata__":{{}},{V},{W}}}'],
    "'a' is in it twice": [with_entry("__metadata__", '{"a":"1","a":"1"}')],
    "metadata is not": [
        *(
            with_entry("__metadata__", value)
            for value in ('{"a":1}', '{"a":null}', '{"a":{}}', "[]", '"pt"', "-1")
        ),
        SOUND.replace("w", "__metadata__"),
    ],
    "surrogates": [
        *(SOUND.replace("w", half) for half in ("\\ud800", "w\\udfff")),
        *(with_entry("__metadata__", half) for half in ('{"a":"\\ud800"}', '{"\\ud800":"a"}')),
    ],
    "'x' is wrong": [with_entry("x", "null"), with_entry("x", '"F32"')],
    "it is not a type": [with_entry("x" * 60_000, "{}")],
    "65,537 characters": [
        with_entry("x" * 65_537, '{"dtype":"F32","shape":[0],"data_offsets":[40,40]}')
    ],
    "'w' is wrong": [
        with_field("dtype", '"F4"').replace("[2,3]", "[47]"),
        f'{{{V},"w":["F32",[2,3],[16,40]]}}',
        *(with_field(key, spelled) for key, values in WRONG_FIELDS.items() for spelled in values),
    ],
    "a hole or overlaps": [
        f"{{{W}}}",
        f"{{{V},{W},{W.replace('w', 'x')}}}",
        *(with_field("data_offsets", ends) for ends in ("[12,36]", "[20,44]")),
    ],
    "40 are there": ["{}", f"{{{V}}}"],
    "too deeply": [
        '{"w":' + "[" * 100_000,
        '{"a":' * 100_000,
        with_field("shape", "[" * 100_000 + "]" * 100_000),
    ],
}
BROKEN_FILES = [
    (with_header(SOUND, length=100_000), "100,000 bytes long"),
    (with_header(SOUND, b"", len(SOUND) + 1), "bytes long"),
    *((with_header(SOUND, length=length), "bytes long") for length in (2**63, 2**64 - 1)),
    *((struct.pack("<Q", 2)[:length], "too short") for length in (1, 7)),
    (struct.pack("<Q", 2), "bytes long"),
    (with_header(SOUND, DATA + b"\0"), "41 are there"),
    (with_header(SOUND, b""), "0 are there"),
    (with_header(SOUND, DATA[:-1]), "39 are there"),
    # Pickles start with the byte 0x80, as the length of one header in 32 does.
    *(
        (with_header(SOUND.ljust(length), DATA[:-1]), "39 are there")
        for length in (0x80, 0x180, 0x5880)
    ),
    *(
        (with_header(header), words)
        for words, headers in WRONG_HEADERS.items()
        for header in headers
    ),
]
# What the library takes all the same: of what is given twice the last, white space first, a list
# for a table, any name.
LIBRARY_TAKES = [
    *(
        WRONG_HEADERS["'w' is in it twice"]
        + WRONG_HEADERS["'a' is in it twice"]
        + WRONG_HEADERS["65,537 characters"]
    ),
    *(" " + SOUND, "\n" + SOUND, f'{{{V},"w":["F32",[2,3],[16,40]]}}'),
]
PLAIN = ("--engine", "plain", "-q")


def sound_models(folder: Path) -> list[str]:
    """Two small sound files with the same names and shapes, and the arguments that merge them."""
    paths = [folder / f"{name}.safetensors" for name in ("base", "model", "out")]
    for path in paths[:2]:
        path.write_bytes(with_header(SOUND))
    return ["-b", str(paths[0]), "-m", str(paths[1]), "-o", str(paths[2]), *PLAIN]


@pytest.fixture
def refused_in_two_lines(refused: Refusal) -> Refusal:
    """No name can break the line of the error, or move a terminal's cursor, or fill a screen."""

    def check(words: str | tuple[str, ...], *arguments: Any) -> None:
        error, hint = refused(1, words, *arguments).split("\n")[:-1]
        assert (error + hint).isprintable()
        assert len(error) < 10_000

    return check


def read_by_the_library(path: Path) -> Any:
    """Types and shapes by name, and the metadata; None where the library refuses the file."""
    try:
        with safe_open(path, framework="np") as file:
            names = [*file.keys()]
            parts = {name: file.get_slice(name) for name in names}
            found = {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()
            }
            return found, file.metadata() or {}
    except Exception:
        return None


@pytest.mark.parametrize(
    ("content", "complaint"), BROKEN_FILES, ids=[complaint for _, complaint in BROKEN_FILES]
)
def test_a_file_that_breaks_a_rule_of_the_format_is_refused(
    tmp_path: Path, refused_in_two_lines: Refusal, content: bytes, complaint: str
) -> None:
    """The library refuses it too, so that there are no rules of our own but where the library is
    careless."""
    started = time.process_time()
    for side in ("base", "model"):
        arguments = sound_models(tmp_path)
        path = tmp_path / f"{side}.safetensors"
        path.write_bytes(content)
        refused_in_two_lines((repr(str(path)), "not a complete", complaint), *arguments)
        assert (read_by_the_library(path) is None) == (
            content not in map(with_header, LIBRARY_TAKES)
        )
    assert (
        time.process_time() - started < 5
    )  # multiplied out, some shapes make a number of 6 million bits


def test_a_header_of_more_than_100_mb_is_refused_unread(tmp_path: Path, capsys: Capture) -> None:
    arguments = sound_models(tmp_path)
    for length in (100_000_001, 2**32, 2**40):
        with open(tmp_path / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", length) + b"{")
            file.truncate(8 + length)  # all holes: no disk holds that much
        run(*arguments, status=1)
        assert f"{length:,}" in capsys.readouterr().err
    assert not (tmp_path / "out.safetensors").exists()


# --- odd, and sound all the same ---

ODD_NAMES = [
    "\u00fcber.\u6a21\u578b.\U0001f600",
    "two\nlines",
    "\r\x1b[2J\x07",
    "a\x00b",
    "x" * 10_000,
    "",
    " ",
    '"quoted"\\',
    "\u202ereversed",
    "e\u0301",
    "\u00e9",
    "__metadata",
    "../../etc/passwd",
    "%s %d {} {0}",
]


def write_floats(
    path: Path, tensors: dict[str, tuple[list[int], Any]], names: list[str], padding: str = ""
) -> None:
    """A file of F32 tensors: their values in the order of tensors, their entries in the order of
    names."""
    entries = {}
    place = 0
    for name, (shape, values) in tensors.items():
        ends = [place, place + 4 * len(values)]
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": ends}
        place = ends[1]
    text = ",".join(
        f"{padding}{json.dumps(name)}:{padding}{json.dumps(entries[name])}" for name in names
    )
    data = b"".join(np.array(values, "<f4").tobytes() for _, values in tensors.values())
    path.write_bytes(with_header(f"{{{padding}{text}{padding}}}{padding}", data))


@pytest.mark.parametrize("padding", ["", "\t\r\n "], ids=["tight", "lines"])
def test_odd_but_sound_files_are_merged_right(tmp_path: Path, padding: str) -> None:
    rng = np.random.default_rng(4)
    shapes: dict[str, list[int]] = {"empty at the start": [0]}
    for number, name in enumerate(ODD_NAMES):
        shapes |= {name: [3, 7], f"empty {number}": [5, 0, 2**31]}
    shapes |= {"scalar": [], "of 100 sides": [1] * 50 + [3] + [1] * 49, "empty at the end": [2, 0]}
    base = {name: (shape, rng.normal(size=math.prod(shape))) for name, shape in shapes.items()}
    model = {name: (shape, values + 1e-3) for name, (shape, values) in reversed(base.items())}
    order = rng.permutation(list(base)).tolist()
    arguments = sound_models(tmp_path)
    write_floats(tmp_path / "base.safetensors", base, order, padding)
    write_floats(tmp_path / "model.safetensors", model, order[::-1], padding)
    run(*arguments, "--drop-rate", "0", "--lambda", "2")
    output = tmp_path / "out.safetensors"
    assert read_by_the_library(output)[0] == {
        name: ("F32", tuple(shape)) for name, shape in shapes.items()
    }
    merged = load_file(output)
    for name, (_, values) in base.items():
        old = values.astype("f4")
        new = model[name][1].astype("f4")
        assert np.allclose(
            merged[name].flatten().numpy(), old + 2 * (new.astype("f8") - old), rtol=1e-6, atol=1e-9
        )
    run("verify", output, *PLAIN)


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_files_of_empty_tensors_alone_merge_and_such_without_any_do_not(
    tmp_path: Path, refused_in_two_lines: Refusal, method: str
) -> None:
    arguments = sound_models(tmp_path)
    for side in ("base", "model"):
        write_floats(tmp_path / f"{side}.safetensors", {"w": ([0], [])}, ["w"])
    run(*arguments, "--method", method)
    assert load_file(tmp_path / "out.safetensors")["w"].shape == (0,)
    (tmp_path / "model.safetensors").write_bytes(with_header("{}", b""))
    refused_in_two_lines("has no tensor in common", *arguments, "--force")


@pytest.mark.parametrize("sides", [0, 64, 65, 100])
def test_a_bad_value_is_found_in_a_tensor_of_any_number_of_sides(
    tmp_path: Path, refused_in_two_lines: Refusal, sides: int
) -> None:
    """NumPy knows 64 sides at most."""
    arguments = sound_models(tmp_path)
    for side, value in (("base", 1.0), ("model", math.nan)):
        write_floats(tmp_path / f"{side}.safetensors", {"w": ([1] * sides, [value])}, ["w"])
    refused_in_two_lines(f"tensor 'w' holds nan at {[0] * sides}", *arguments)


# --- agreement with the library, on headers that nobody thought of ---

# JSON as text: what stands where a number, a name or a value should be.
ODD_JSON = st.one_of(
    st.integers(-2, 50).map(str),
    st.sampled_from(
        [2**31, 2**32 + 4, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**63)]
    ).map(str),
    st.sampled_from(
        [
            "-0",
            "0.0",
            "4.0",
            "4e0",
            "1e999",
            "NaN",
            "Infinity",
            "-Infinity",
            "true",
            "null",
            "{}",
            "[]",
        ]
    ),
    st.sampled_from(
        ["F32", "BF16", "BOOL", "F4", "F8_E4M3", "C64", "I64", "\\ud800", "\\u0000", ""]
    ).map('"{}"'.format),
    st.sampled_from(["[[]]", "[0]", "[-0]", "[2,2]", "[1,1]", f"[{2**62},4,0]", f"[0,{2**62},4]"]),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=5,
    ).map(json.dumps),
)
NAMES_IN_JSON = st.sampled_from(["v", "w", "e", "\\u0077", "__metadata__", "", "\\ud800", "dtype"])


HEADER = with_entry("__metadata__", '{"format":"pt"}').encode()
# A part of the header that is odd, left out or there twice; a few bytes that are.
MANGLED = (
    st.builds(with_field, st.sampled_from([*WRONG_FIELDS]), ODD_JSON | st.just(""))
    | st.builds(with_entry, NAMES_IN_JSON, ODD_JSON)
    | st.lists(st.sampled_from([V, W, W.replace("w", "e")]), max_size=4).map(
        lambda entries: f"{{{','.join(entries)}}}"
    )
)
ANY_FILE = (
    st.builds(with_header, MANGLED, st.sampled_from([40, 40, 40, 39, 41, 16, 0]).map(bytes))
    | damaged(with_header(HEADER))
    | damaged(HEADER).map(with_header)
)


def assert_agreement(path: Path, content: bytes) -> None:
    """What we accept the library accepts too, and finds the same in it; what we refuse we refuse in
    words."""
    path.write_bytes(content)
    try:
        file = TensorFile(path, str(path))
    except DareError:
        return
    file.close()
    ours = {name: (info.dtype, info.shape) for name, info in file.tensors.items()}
    assert (ours, file.metadata) == read_by_the_library(path)


@examples(100)
@given(content=ANY_FILE)
def test_any_file_is_read_as_the_library_reads_it(tmp_path: Path, content: bytes) -> None:
    assert_agreement(tmp_path / "file.safetensors", content)


@pytest.mark.parametrize("dtype", [*STORED_BITS, "F8_E4M3FN", "I4", "U4", "C128", "F128"])
def test_types_are_those_of_the_library_with_the_same_sizes(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "file.safetensors"
    taken = []
    for size in (*range(9), 16, 32, 64, 128):
        header = f'{{"w":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{size}]}}}}'
        assert_agreement(path, with_header(header, bytes(size)))
        taken += [size] if read_by_the_library(path) else []
    assert taken == ([STORED_BITS[dtype]] if dtype in STORED_BITS else [])
