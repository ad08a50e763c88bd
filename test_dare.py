"""The claims of the front door, each with a test that runs the real thing on small files.

Run with `uv run python test_dare.py`: it needs NumPy, pytest and Hypothesis. The rooms behind have
theirs in tests/.
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dare
from dare import DareConfig, DareError, DareMerger
from darelib.arithmetic import definition
from darelib.config import SETTINGS
from darelib.core.mask import keep_rate, keep_threshold, mask_key
from darelib.core.tuning import TUNING
from darelib.requests.readers import TABLES

HERE = Path(__file__).resolve().parent
Model = dict[str, np.ndarray]  # bf16 as its bits
Capture = pytest.CaptureFixture[str]
STORED = {
    "uint16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "int32": "I32",
    "uint8": "F8_E4M3",
    "bool": "BOOL",
}
TYPES = {stored: np.dtype(name) for name, stored in STORED.items()}
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

# --- small models as files ------------------------------------------------------------------------


def bf16(values: Any) -> np.ndarray:
    """Floats as the bits of bf16, rounded to nearest even."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def write(path: Path, tensors: Model) -> Path:
    """A safetensors file with its tensors in the order of the dictionary."""
    header = {}
    data = b""
    for name, tensor in tensors.items():
        ends = len(data), len(data) + tensor.nbytes
        stored = STORED[tensor.dtype.name]
        header[name] = {"dtype": stored, "shape": tensor.shape, "data_offsets": ends}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header and what follows it."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8:start]), raw[start:]


def read(path: Path) -> Model:
    header, data = split(path)
    del header["__metadata__"]
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return {
        n: np.frombuffer(parts[n], TYPES[e["dtype"]]).reshape(e["shape"]) for n, e in header.items()
    }


def make_models(count: int = 2, size: float = 0.001) -> list[Model]:
    shapes = {"layer.weight": (37, 61), "layer.bias": (61,), "head.weight": (5, 1500), "scalar": ()}
    random = np.random.default_rng(0)
    base = {name: random.normal(size=shape) * 0.05 for name, shape in shapes.items()}
    scales = [0.0, *[size] * count]
    return [
        {n: bf16(value + random.normal(size=value.shape) * scale) for n, value in base.items()}
        for scale in scales
    ]


def write_all(folder: Path, *models: Model) -> list[Path]:
    return [write(folder / f"{number}.safetensors", model) for number, model in enumerate(models)]


def merge(folder: Path, base: Model, *models: Model, **config: Any) -> Model:
    """Merge through the front door: write the files, merge them, load the result."""
    paths = write_all(folder, base, *models)
    DareMerger(paths[0], paths[1:], DareConfig(verbose=False, **config)).merge(
        folder / "merged.safetensors", force=True
    )
    return read(folder / "merged.safetensors")


def assert_same(one: Model, other: Model) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert tensor.tobytes() == other[name].tobytes(), name


def draw_mask(seed: int, name: str, count: int, drop_rate: float) -> np.ndarray:
    return definition.draw_mask(mask_key(seed, name), keep_threshold(drop_rate), 0, count)


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    names = ("base", "math", "code")
    return [
        write(tmp_path / f"{name}.safetensors", model)
        for name, model in zip(names, make_models(), strict=True)
    ]


@pytest.fixture
def flags(models: list[Path], tmp_path: Path) -> list[str]:
    """The command's words to merge them."""
    return [
        "-b",
        str(models[0]),
        "-m",
        *map(str, models[1:]),
        "-o",
        str(tmp_path / "out.safetensors"),
    ]


def run(*words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=HERE, **options)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(p): (p.stat().st_mtime_ns, p.read_bytes())
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["numba", "plain"])
@pytest.mark.parametrize("drop_rate", [0.0, 0.5, 0.9])
def test_a_merge_is_the_base_plus_the_average_of_the_kept_and_rescaled_deltas(
    tmp_path: Path, engine: str, drop_rate: float
) -> None:
    base, *tuned = make_models(3, size=0.01)
    merged = merge(tmp_path, base, *tuned, drop_rate=drop_rate, engine=engine)
    for name, stored in base.items():
        start = floats(stored).ravel()
        total = np.float32(0)
        for i, model in enumerate(tuned):
            total += np.where(
                draw_mask(42 + i, name, start.size, drop_rate),
                (floats(model[name]).ravel() - start) * np.float32(1 / 3 / keep_rate(drop_rate)),
                0,
            )
        assert np.array_equal(merged[name].ravel(), bf16(start + total)), name


def test_dropping_changes_no_expectation_and_the_variance_is_as_the_paper_has_it(
    tmp_path: Path,
) -> None:
    """Every seed gives an unbiased estimate of the plain average.

    The variance is p / (1 - p) * delta^2 per model.
    """
    base, *deltas = np.random.default_rng(3).normal(size=(3, 2048)).astype(np.float32)
    models = [{"w": base + delta} for delta in (np.float32(0), *deltas)]
    rate = keep_rate(0.8)
    config = {"drop_rate": 0.8, "engine": "plain", "threads": 1}
    samples = [
        merge(tmp_path, *models, seed=2 * seed, **config)["w"].astype(np.float64)
        for seed in range(40)
    ]
    variance = sum((delta.astype(np.float64) / 2) ** 2 * (1 - rate) / rate for delta in deltas)
    z = (np.mean(samples, axis=0) - base - sum(deltas) / 2) / np.sqrt(variance / len(samples))
    assert np.abs(z).max() < 6
    assert abs(np.mean(z**2) - 1) < 0.2
    assert abs(np.mean(np.var(samples, axis=0, ddof=1) / variance) - 1) < 0.03


@few
@given(
    st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(sorted),
    st.integers(0, 2**62),
    st.integers(1, 3000),
)
def test_what_is_kept_at_a_higher_drop_rate_is_kept_at_every_lower_one(
    tmp_path: Path, rates: list[float], seed: int, count: int
) -> None:
    zero, one = ({"w": bf16(np.full(count, size))} for size in (0, 1))
    low, high = (merge(tmp_path, zero, one, drop_rate=rate, seed=seed)["w"] != 0 for rate in rates)
    assert not np.any(high & ~low)
    assert np.array_equal(high, draw_mask(seed, "w", count, rates[1]))


bits = st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300)
ways = st.sampled_from(
    [{}, {"method": "ties"}, {"method": "ties", "keep_ratio": 0.4}, {"method": "slerp"}]
)


def finite(patterns: list[int], name: str) -> np.ndarray:
    """Any values of a 16-bit type, subnormals and both zeros among them; what is not finite becomes
    -0.0."""
    array = np.array(patterns, np.uint16)
    exponent = 0x7F80 if name == "BF16" else 0x7C00
    array[(array & exponent) == exponent] = 0x8000
    return array if name == "BF16" else array.view(np.float16)


@few
@given(bits, bits, st.sampled_from([("BF16", "numba"), ("F16", "plain")]))
def test_dropping_nothing_gives_any_finetune_back_bit_for_bit(
    tmp_path: Path, one: list[int], other: list[int], kind: tuple[str, str]
) -> None:
    length = min(len(one), len(other))
    base, model = ({"w": finite(patterns[:length], kind[0])} for patterns in (one, other))
    assert_same(merge(tmp_path, base, model, drop_rate=0, engine=kind[1]), model)


@few
@given(bits, st.floats(0, 0.999), ways, st.sampled_from(["BF16", "F16"]))
def test_lambda_0_and_models_equal_to_the_base_give_the_base_bit_for_bit_at_any_drop_rate(
    tmp_path: Path, patterns: list[int], drop_rate: float, way: dict[str, Any], kind: str
) -> None:
    base = {"w": finite(patterns, kind)}
    config = {"drop_rate": drop_rate, "engine": "plain", **way}
    assert_same(merge(tmp_path, base, base, base, **config), base)
    base, model = (
        {"w": finite(list(np.bitwise_and(part, 0xBFFF)), kind)}
        for part in (patterns, patterns[::-1])
    )
    assert_same(merge(tmp_path, base, model, base, lambda_coeff=0, **config), base)


def test_empty_tensors_and_scalars_merge_and_what_a_model_lacks_is_unchanged(
    tmp_path: Path,
) -> None:
    base = {
        name: bf16(value)
        for name, value in {"empty": np.zeros((0, 4)), "scalar": 1.0, "both": [1.0] * 4}.items()
    }
    one = {**base, "scalar": bf16(3.0)}
    other = {"both": bf16([5.0] * 4)}
    merged = merge(tmp_path, base, one, other, drop_rate=0)
    assert_same(merged, base | {"scalar": bf16(2.0), "both": bf16([3.0] * 4)})
    assert_same(merge(tmp_path, base, other, drop_rate=0), base | other)


def test_tensors_that_are_not_floats_are_copied_and_differences_reported(tmp_path: Path) -> None:
    quantised = np.array([56, 64], np.uint8)
    base = {
        "w": bf16(np.ones(4)),
        "ids": np.arange(3000),
        "kind": np.arange(4),
        "flag": np.array([True, False]),
        "same": np.arange(5),
        "q": quantised,
    }
    model = base | {
        "ids": np.arange(3000) + 1,
        "kind": np.arange(4, dtype=np.int32),
        "flag": np.array([True, True]),
    }
    paths = write_all(tmp_path, base, model)
    report = DareMerger(paths[0], paths[1:], DareConfig(verbose=False)).merge(
        tmp_path / "out.safetensors"
    )
    assert_same(read(tmp_path / "out.safetensors"), base)
    assert any("'flag', 'ids', 'kind'" in warning for warning in report.warnings)
    assert report.copied_tensors == 5
    with pytest.raises(DareError, match="'q'"):
        merge(tmp_path, base, {**base, "q": quantised + np.uint8(1)})


# --- same recipe, same bytes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "threads", "engine"), [(1024, 1, "numba"), (2048, 2, "plain"), (1 << 16, 7, "numba")]
)
def test_same_bytes_on_any_number_of_threads_for_any_chunk_size_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: Any, threads: int, engine: str
) -> None:
    models = make_models()
    usual = merge(tmp_path, *models)
    monkeypatch.setattr(TUNING, "min_chunk", chunk)
    monkeypatch.setattr(TUNING, "max_chunk", chunk)
    assert_same(merge(tmp_path, *models, threads=threads, engine=engine), usual)


def test_same_tensors_in_any_stored_order_and_alone(tmp_path: Path) -> None:
    base, model = make_models(1)
    together = merge(tmp_path, base, model)
    backwards = dict(reversed(base.items()))
    merged = merge(tmp_path, backwards, dict(sorted(model.items())))
    assert list(merged) == list(backwards), "the base's order is kept"
    assert_same(merged, together)
    for name in base:
        assert_same(
            merge(tmp_path, {name: base[name]}, {name: model[name]}), {name: together[name]}
        )


# --- from Python ----------------------------------------------------------------------------------


def test_every_public_name_is_there_and_documented() -> None:
    for name in dare.__all__:
        assert getattr(dare, name).__doc__, name
    assert dir(dare) == sorted(dare.__all__)


def test_a_merger_plans_merges_verifies_and_analyzes_and_its_reports_are_plain_data(
    models: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "out.safetensors"
    merger = DareMerger(
        models[0], models[1:], DareConfig(drop_rate=0.5, delta_threshold=1e-9, verbose=False)
    )
    plan = merger.plan(output, estimate=True)
    analysis = merger.analyze()
    caplog.clear()
    report = merger.merge(output)
    assert [record.getMessage() for record in caplog.records] == list(report.warnings) != []
    verified = merger.verify(output)
    for found in (plan, report, verified, analysis):
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict() == found.as_dict()
        assert str(found)
    assert (plan.seeds, plan.weights) == ((42, 43), (0.5, 0.5))
    assert plan.bytes_to_write == output.stat().st_size
    assert abs(report.models[0].dropped_share - 0.5) < 0.03
    output.write_bytes(output.read_bytes()[:-1] + b"\x00")
    with pytest.raises(DareError, match="tensor 'scalar'"):
        merger.verify(output)


def find_blocks(language: str) -> list[str]:
    return [
        block
        for path in (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
        for block in re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)
    ]


def test_the_documents_code_runs(
    models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = (
        'base_file = "base.safetensors"\nmerge_files = ["math.safetensors", "code.safetensors"]\n'
    )
    score = f"'{sys.executable}' -c 'print(1)' {{model}}"
    sweep = ["sweep", "--evaluate", score, "--trials", "1"]
    for block in find_blocks("toml"):
        whole = "[models]" in block
        Path("config.toml").write_text(block if whole else f"[models]\n{table}{block}")
        assert dare.main([*([] if whole else sweep), "--quiet", "--config", "config.toml"]) == 0
    # A model that generates text is not among those here: tests/test_examples.py has one.
    [first, *others] = [block for block in find_blocks("python") if "pipeline" not in block]
    exec(first, names := dict[str, Any]())
    pytest.importorskip("torch")
    base, math, code = map(pytest.importorskip("safetensors.torch").load_file, models)
    names |= {"base": base, "math": math, "code": code, "pretrained": base, "finetuned": math}
    names |= {"task_vector": code, "first": math, "second": code, "model": None, "data": None}
    names |= {"dare_sweep": dare.dare_sweep, "accuracy": lambda model, data: 1.0}
    for block in others:
        exec(block, names)
    assert names["merged"].keys() == base.keys()
    words = ["--quiet", "--config", "merged.safetensors", "--output", "again.safetensors"]
    assert dare.main(words) == 0
    assert Path("again.safetensors").read_bytes() == Path("merged.safetensors").read_bytes()


@pytest.mark.parametrize(
    "call",
    [
        lambda: dare.dare_merge({}, [{}]),
        lambda: dare.dare_sparsify({}, {}),
        lambda: dare.dare_drop({}),
    ],
)
def test_tensors_in_memory_without_torch_are_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "darelib.run.in_memory", raising=False)
    monkeypatch.delattr("darelib.run.in_memory", raising=False)
    with pytest.raises(DareError, match="tensors in memory need torch") as caught:
        call()
    assert caught.value.hint.startswith("install it: ")


# --- nothing changes for the rest of the process --------------------------------------------------


@pytest.mark.parametrize(
    "words", [["--help"], ["--drop-rat", "1"], ["-c", "nowhere.toml"], ["analyze", "--seed", "-1"]]
)
def test_help_and_wrong_usage_load_nothing_heavy(words: list[str]) -> None:
    loaded = run(
        "-c",
        f"import sys, dare\ntry: dare.main({words})\nexcept SystemExit: "
        f"pass\nprint(sorted(sys.modules))",
    ).stdout.splitlines()[-1]
    assert "'dare'" in loaded
    for heavy in ("torch", "numba", "numpy", "rich", "llvmlite", "safetensors", "yaml"):
        assert f"'{heavy}'" not in loaded


STATE = """
import json, logging, os, signal, sys, threading, warnings
import numpy
from dare import DareConfig, DareMerger

def look():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    logs = [list(logging.getLogger(name).handlers) for name in (None, "dare")]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE) if resource else None
    streams = sys.stdout, sys.stderr, os.getcwd()
    python = list(warnings.filters), list(sys.path), sys.excepthook
    return handlers, logs, limit, dict(os.environ), threading.active_count(), streams, python

try:
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
except ImportError:
    resource = None
signal.signal(signal.SIGTERM, lambda *_: None)
before = look()
merger = DareMerger(sys.argv[1], [sys.argv[2]], DareConfig(verbose=False))
merger.merge(sys.argv[3])
merger.plan(sys.argv[3], estimate=True)
merger.verify(sys.argv[3])
assert look() == before
print(json.dumps(sorted(sys.modules)))
"""


def test_a_small_merge_loads_neither_torch_nor_numba_and_leaves_the_process_alone(
    flags: list[str],
) -> None:
    done = run("-c", STATE, flags[1], flags[3], flags[-1])
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numba", "rich", "safetensors", "yaml"} & set(json.loads(done.stdout))


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_the_command_called_from_python_gives_the_signals_back(flags: list[str]) -> None:
    def handler(*_: object) -> None: ...

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert dare.main(["-q", *flags]) == 0
        assert dare.main(["-q", "--drop-rate", "2", *flags]) == 2
        assert all(signal.getsignal(number) is handler for number in before)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example that ships, where it may be changed."""
    merged = shutil.ignore_patterns("merged*")
    shutil.copytree(HERE / "examples" / "models", tmp_path / "examples" / "models", ignore=merged)
    return Path(shutil.copy(HERE / "merge_config.toml", tmp_path))


def test_the_shipped_example_is_planned_merged_verified_and_analyzed(
    example: Path, capsys: Capture
) -> None:
    output = example.parent / "examples" / "models" / "merged.safetensors"
    config = ["--config", str(example)]
    before = contents(example.parent)
    for words, printed, key in (
        (["--dry-run", *config], r"^would merge 2 models into .*(\n.*)*seeds 42, 43; ", "seeds"),
        (["analyze", *config], r"^Advice\nmodel .*\nrotated +right +2.99% ", "models"),
        (config, r"\nmerged 2 models into .*: 6 tensors, 2.78 MB", "bytes_written"),
        (["verify", str(output)], r"6 tensors", "tensors"),
    ):
        assert dare.main([*words, "--json"]) == 0
        assert key in json.loads(capsys.readouterr().out), "and nothing else is printed"
        assert dare.main(words) == 0
        assert re.search(printed, capsys.readouterr().out)
        writes = words[0] in ("--config", "verify")
        assert writes or contents(example.parent) == before
    merged = output.read_bytes()
    recipe = output.with_name("recipe.toml")
    recipe.write_text(split(output)[0]["__metadata__"]["dare_recipe"])
    assert dare.main(["--quiet", "--config", str(recipe), "--output", str(output)]) == 0
    assert output.read_bytes() == merged, "a recipe is a configuration"


def test_the_shipped_configuration_has_every_key_with_its_default() -> None:
    text = (HERE / "merge_config.toml").read_text()
    for table, keys in TABLES.items():
        for key in keys if table not in ("recipe", "sweep") else ():
            assert re.search(rf"^(# )?{key} = ", text, re.MULTILINE), key
    shown = tomllib.loads(text)["dare"]
    assert shown == {key: getattr(DareConfig(), key) for key in shown}, (
        "what is not commented out is the default"
    )
    whole = tomllib.loads(re.sub(r"^# (?=\[|[a-z_]+ = )", "", text, flags=re.MULTILINE))
    assert set(whole["dare"]) == set(SETTINGS)
    assert set(whole["examples"]) == set(TABLES["examples"])


def test_help_names_every_setting_and_each_flag_has_its_key_in_toml(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        dare.main(["--help"])
    printed = set(re.findall(r"--([a-z0-9-]+)", capsys.readouterr().out))
    names = {
        "lambda_coeff": "lambda",
        "base_file": "base",
        "merge_files": "merge",
        "output_file": "output",
        "files": "examples",
        "base": "base-examples",
        "rules": "rule",
    }
    tables = (*SETTINGS, *TABLES["models"], *TABLES["examples"], "rules")
    keys = {names.get(key, key.replace("_", "-")) for key in tables}
    own = (
        "help version config force resume verify dry-run per-tensor plot write-config json quiet"
        " part runner ray-address no-normalize no-rescale no-matched lenient bake"
    )
    assert printed - set(own.split()) == keys - set(own.split())


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        ("", 2, ["--output merged", "\n  convert  write", "help COMMAND"]),
        ("help", 0, ["--output merged", "\n  convert  write", "help COMMAND"]),
        ("--help", 0, ["[COMMAND] [options]", "\nadapters:\n  --adapter-rank", "\nmethods:\n"]),
        ("help merge", 0, ["\nimage models:\n  --components", "wudi: ", "(default 1.5)"]),
        ("help verify", 0, ["verify [options] PATH"]),
        ("convert --help", 0, ["convert [options] OLD NEW"]),
    ],
)
def test_help_is_where_it_is_looked_for(
    capsys: Capture, words: str, status: int, shown: list[str]
) -> None:
    with pytest.raises(SystemExit, match=str(status)):
        dare.main(words.split())
    printed = capsys.readouterr()
    page = printed.err if status else printed.out
    assert [text for text in shown if text not in page] == []
    assert len(page.splitlines()) < (25 if "COMMAND sh" in page else 150)


def test_the_version_is_printed(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="0"):
        dare.main(["--version"])
    assert capsys.readouterr().out == f"dare {dare.__version__}\n"


def test_flags_beat_toml_and_toml_beats_defaults(example: Path, tmp_path: Path) -> None:
    text = example.read_text().replace("# drop_rate = 0.9", "drop_rate = 0.5")
    example.write_text(text.replace("seed = 42", "seed = 7"))
    output = tmp_path / "out.safetensors"
    model = HERE / "examples" / "models" / "covered.safetensors"
    words = ["-q", "-c", example, "--seed", "8", "--lambda", "-1e-3", "-m", model, "-o", output]
    assert dare.main([str(word) for word in words]) == 0
    recipe = tomllib.loads(split(output)[0]["__metadata__"]["dare_recipe"])
    settings = {"drop_rate": 0.5, "seed": 8, "lambda_coeff": -0.001, "method": "linear"}
    assert settings.items() <= recipe["dare"].items()
    assert recipe["models"]["merge_files"] == [model.name]


@pytest.mark.parametrize(
    ("words", "out", "err"),
    [
        ("--quiet", "$", "$"),
        ("--quiet --delta-threshold 1e-9", "$", "warning: "),
        ("--verbose", r"(?s).*merged 2 models into", ""),
    ],
)
def test_quiet_prints_only_warnings(
    flags: list[str], capsys: Capture, words: str, out: str, err: str
) -> None:
    assert dare.main([*flags, *words.split()]) == 0
    printed = capsys.readouterr()
    assert re.match(out, printed.out)
    assert re.match(err, printed.err)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "| true"])
def test_output_that_nobody_listens_to_is_no_error(flags: list[str], closed: str) -> None:
    shell = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, str(HERE / "dare.py"), *flags]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "rror" in done.stdout + done.stderr) == (0, False)
    assert Path(flags[-1]).exists()


def test_names_that_the_terminal_has_no_letters_for_are_no_error(
    models: list[Path], flags: list[str]
) -> None:
    flags[flags.index(str(models[1]))] = str(
        models[1].rename(models[1].with_name("\u6a21\u578b.safetensors"))
    )
    done = run("dare.py", *flags, env={**os.environ, "PYTHONIOENCODING": "cp1252"})
    assert done.returncode == 0, done.stderr
    assert "\\u6a21" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only here may names be any bytes")
def test_names_that_are_no_text_still_give_a_file_that_opens(
    models: list[Path], tmp_path: Path
) -> None:
    odd = models[1].rename(os.fsdecode(os.fsencode(tmp_path) + b"/n\xff.safetensors"))
    DareMerger(models[0], [odd], DareConfig(verbose=False)).merge(tmp_path / "out.safetensors")
    assert (
        r"n\\udcff.safetensors"
        in split(tmp_path / "out.safetensors")[0]["__metadata__"]["dare_recipe"]
    )


if __name__ == "__main__":
    # Some plugins are imported above already, which pytest would warn of.
    quiet = ["-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(pytest.main([__file__, "-n", "0", *quiet, *sys.argv[1:]]))
