"""Machine code: checked before it is used, kept where nobody else can write, and not waited for
where NumPy is done before it is compiled."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from darelib.arithmetic.engines import find_code, load_kernels
from safetensors.torch import save_file

from darelib.arithmetic import COMPILED, KernelSpec
from darelib.core.interrupts import Interrupts
from tests.scene import contents
from tests.support import HERE, POSIX, Models, command, run_merge, slow, snapshot

SLOW = pytest.mark.slow
OUT = "out.safetensors"
# A program for which no merge is small.
LARGE = """
import sys
sys.path.insert(0, {home!r})
import dare
from darelib.core.tuning import TUNING
TUNING.compiled_work = 0
sys.exit(max([dare.main(sys.argv[1:]) for _ in range({times})]))
"""
NOTE = "compiling for this machine (BF16)"
Done = subprocess.CompletedProcess[str]
Merge = Callable[..., Done]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of modules that are found before all others."""
    (tmp_path / "library").mkdir()
    return tmp_path / "library"


@pytest.fixture
def merge(models: Models, tmp_path: Path, library: Path) -> Merge:
    """Merges in a process of its own, with an empty cache. large: no merge is small."""

    def run(*flags: str, large: bool = False, times: int = 1) -> Done:
        words = ["-b", models[0], "-m", *models[1:], "-o", tmp_path / OUT, "--force", *flags]
        own = {"NUMBA_CACHE_DIR": str(tmp_path / "kernels"), "PYTHONPATH": str(library)}
        program = HERE / "dare.py"
        if large:
            program = tmp_path / "large.py"
            program.write_text(LARGE.format(home=str(HERE), times=times))
        return command(*words, program=program, env=os.environ | own)

    return run


def copy_house(folder: Path) -> Path:
    shutil.copytree(
        HERE / "darelib", folder / "house" / "darelib", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(HERE / "dare.py", folder / "house")
    return folder / "house"


# --- kernels that are wrong -----------------------------------------------------------------------

# By what is wrong: what a compiler makes of the kernel that merges, and how the warning calls it.
WRONG = {
    "a symbol": (
        "declare void @NRT_decref(ptr)\n{0} {{ call void @NRT_decref(ptr null) ret i32 0 }}",
        "the kernel sum needs NRT_decref, which only Numba has",
    ),
    "the bits": (
        "{0} {{ ret i32 0 }}",
        "the compiled kernel sum gives other values than its definition",
    ),
    "a crash": (
        "{0} {{ store volatile i32 1, ptr inttoptr (i64 8 to ptr) ret i32 0 }}",
        "its compiler, or compiled code, crashed with status ",
    ),
}
# A compiler that makes the same of any function, and counts how often it is started.
NUMBA = """
class Anything:
    def __getattr__(self, _): return self
    def __call__(self, *_, **__): return self
class Made:
    native_name = "cfunc.made"
    def inspect_llvm(self): return {code!r}
types = Anything()
njit = lambda **_: lambda function: function
cfunc = lambda *_: lambda function: Made()
open({log!r}, "a").write("started ")
"""


@pytest.mark.parametrize("wrong", ["the bits", slow("a symbol"), slow("a crash")])
def test_a_kernel_that_is_wrong_is_not_used_and_the_result_is_right(
    wrong: str, merge: Merge, models: Models, library: Path, tmp_path: Path
) -> None:
    code, reason = WRONG[wrong]
    (library / "numba").mkdir()
    (library / "numba" / "_version.py").write_text(f"# {wrong}")
    (library / "numba" / "extending.py").write_text("intrinsic = lambda function: function")
    code = code.format("define i32 @made(ptr, ptr, ptr)")
    log = tmp_path / "log.txt"
    (library / "numba" / "__init__.py").write_text(NUMBA.format(code=code, log=str(log)))
    done = merge("--engine", "numba")
    note, error, _ = done.stderr.splitlines()
    assert note == f"{NOTE}; later runs start at once"
    assert error.startswith(f"error: the engine numba cannot be used: {reason}")
    assert (done.returncode, (tmp_path / OUT).exists()) == (1, False)
    run_merge(models[0], models[1:], tmp_path / "usual.safetensors", engine="plain")
    log.unlink()
    done = merge("-q", large=True, times=2)
    for line in done.stderr.splitlines():
        assert line.startswith(f"warning: Numba cannot be used ({reason}")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 2)
    assert log.read_text() == "started ", "what failed once is not tried again"
    assert contents(tmp_path / OUT) == contents(tmp_path / "usual.safetensors")
    assert not list(tmp_path.rglob("*.o")), "what was not proved is not stored"


@pytest.mark.parametrize(
    ("kind", "module", "right", "wrong"),
    [  # by kernel: what a compiler might get wrong, where the sources say it
        ("pack", "cpu", "if place < count:", "if True:"),
        slow("elect", "cpu", " if share[j] > 0 else zero", ""),
        slow("average", "cpu", 'any_sign = code.kind == "average"', "any_sign = False"),
        slow("sum", "cpu", "value = base[j] if change == 0 else sum_", "value = sum_"),
        slow("sum", "cpu_parts", "x1 = first >> np.uint64(32)", "x1 = np.uint64(0)"),
        slow("sum", "cpu_parts", "base[count:] = 0", "pass"),
        slow("sum", "cpu_parts", "finetuned[:, count : tiles * TILE] = 0", "pass"),
        slow("sum", "cpu_parts", "scratch[ZERO_ROW] = 0", "pass"),
        slow("sum", "cpu_parts", "(at_low if is_low else at_high)", "at_low"),
        slow("sum", "cpu_parts", "model.kept -= np.uint64(bits[j] <= last)", "pass"),
        slow("sum", "cpu_parts", "drops_some = model.ranked or ", "drops_some = "),
        slow("products", "cpu_looks", " if tensor.from_zero else chunk.zeros", ""),
        slow("products", "cpu_looks", "chunk.kept[i, j] = origin[j]", "pass"),
        slow("sums", "cpu_looks", "abs(np.float64(values[j]))", "np.float64(values[j])"),
        slow("rank", "cpu_looks", "passes = max(1, ", "passes = ("),
        slow("count", "cpu_looks", "elif prefix == model.prefix_2:", "elif False:"),
        slow(
            "measure",
            "cpu_looks",
            "place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1)",
            "place",
        ),
        slow("unpack", "cpu_parts", " and done < np.uint64(len(entries))", ""),
        slow("unpack", "cpu_parts", "flags[j] = 0", "pass"),
        slow("expand", "cpu", "while k < rank:", "while k < rank - 1:"),
    ],
)
def test_what_a_compiler_might_get_wrong_is_found(
    tmp_path: Path, kind: str, module: str, right: str, wrong: str
) -> None:
    house = copy_house(tmp_path)
    path = house / "darelib" / "kernels" / f"{module}.py"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    types = ["F32"] * 3 if kind == "expand" else ["BF16"] * 3
    target = tmp_path / f"dare.{find_code(KernelSpec(kind, *types))}.o"
    words = [sys.executable, "-m", "darelib.arithmetic.proof", str(target)]
    done = subprocess.run(words, cwd=house, capture_output=True, text=True, timeout=300)
    assert done.returncode < 0 or " than its definition" in done.stderr
    assert not target.exists()


@SLOW
@pytest.mark.parametrize(
    "types", [("F32", "F64", "F64"), ("F64", "BF16", "F16"), ("F16", "F32", "BF16")]
)
def test_kernels_of_mixed_types_are_proved(types: tuple[str, str, str]) -> None:
    specs = [KernelSpec(kind, *types) for kind in COMPILED if kind != "expand"]
    with Interrupts() as interrupts:
        assert load_kernels(specs, "numba", interrupts, 1).keys() == set(specs)


# --- small merges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["numba", slow("llvmlite")])
def test_a_small_merge_needs_no_compiler_and_a_large_one_says_that_there_is_none(
    missing: str, merge: Merge, library: Path, tmp_path: Path
) -> None:
    (library / f"{missing}.py").write_text("raise ImportError('no such thing here')")
    done = merge("--threads", "1")
    assert (done.returncode, done.stderr) == (0, "")
    before = contents(tmp_path / OUT)
    done = merge("-q", large=True)
    [line] = done.stderr.splitlines()
    assert re.match("warning: Numba cannot be used .*no such thing.* so NumPy computes", line)
    assert (done.returncode, contents(tmp_path / OUT)) == (0, before)
    done = merge("-q", "--engine", "numba")
    assert "error: the engine numba cannot be used: " in done.stderr
    assert (done.returncode, list(tmp_path.rglob("*.o"))) == (1, [])


def test_an_estimate_has_the_time_that_a_compiler_takes(merge: Merge, models: Models) -> None:
    """Whole matrices are not sampled, so that nothing has been compiled for them."""
    for path in models:
        save_file({"layer.weight": torch.randn(8, 8)}, path)
    for engine, time in (("auto", "under a second"), ("numba", r"about \d+(\.\d)? s")):
        done = merge("--method", "wudi", "--drop-rate", "0", "--dry-run", "--engine", engine)
        assert re.search(f"^time +{time} to read", done.stdout, re.M), done.stdout


# --- kernels on disk ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the kernel that packs, which is the fastest to compile."""
    return tmp_path_factory.mktemp("stored") / "kernels"


@pytest.fixture
def pack(models: Models, tmp_path: Path) -> Merge:
    def run(cache: Path | str, home: Path = HERE, **environment: str) -> Done:
        words = ["pack", "-b", models[0], "-m", models[1], "-o", tmp_path / "packed"]
        own = {"NUMBA_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        words += ["--force", "--engine", "numba"]
        done = command(
            *words, program=home / "dare.py", env=os.environ | own, cwd=tmp_path, umask=0
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


@pytest.mark.slow
def test_kernels_are_compiled_once_and_damaged_ones_again(stored: Path, pack: Merge) -> None:
    pack(stored)
    [kernel] = stored.iterdir()
    if os.name != "nt":  # nobody else can write there
        modes = [path.stat().st_mode & 0o777 for path in (kernel, kernel.parent)]
        assert modes == [0o644, 0o755]
    before = kernel.stat().st_ino
    pack(stored)
    assert kernel.stat().st_ino == before
    whole = kernel.read_bytes()
    kernel.write_bytes(whole[:-1])
    pack(stored)
    assert kernel.read_bytes() == whole


@POSIX
@SLOW
@pytest.mark.parametrize("whose", ["folder", "file", "user"])
def test_a_kernel_that_somebody_else_may_have_written_is_not_run(
    whose: str, stored: Path, pack: Merge, tmp_path: Path
) -> None:
    pack(stored)  # whichever test comes first
    cache = tmp_path / "kernels"
    shutil.copytree(stored, cache)
    [kernel] = cache.iterdir()
    if whose == "user":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(kernel, 12345, -1)
    else:
        (kernel if whose == "file" else cache).chmod(0o777)
    before = snapshot(cache)
    printed = pack(cache).stderr
    if whose == "folder":
        assert re.match(
            f"warning: others can write to {cache} .*so no kernel there is run", printed
        )
        assert snapshot(cache) == before, "and nothing is kept there"
    else:
        assert (kernel.stat().st_uid, kernel.stat().st_mode & 0o777) == (os.geteuid(), 0o644)


@SLOW
def test_a_folder_for_kernels_that_cannot_be_written_only_costs_time(
    pack: Merge, tmp_path: Path
) -> None:
    house = copy_house(tmp_path)
    blocked = house / "darelib" / "kernels" / "__pycache__"
    blocked.write_text("not a directory")
    pack(blocked / "below", house)
    pack("", house, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache" / "dare").glob("*.o"))) == 1
    pack("", house, XDG_CACHE_HOME="somewhere")
    assert not (tmp_path / "somewhere").exists(), "the working directory is no place for code"


@SLOW
def test_kernels_depend_on_all_that_is_compiled_in_and_on_nothing_else(tmp_path: Path) -> None:
    house = copy_house(tmp_path)
    say = "from darelib.arithmetic import objects; print(objects.identify())"

    def ask(script: str) -> str:
        words = [sys.executable, "-c", script]
        return subprocess.run(words, cwd=house, capture_output=True, text=True, check=True).stdout

    before = ask(say)
    for name, right, wrong, is_needed in (
        ("core/mask.py", "ROUNDS: Final = 7", "ROUNDS: Final = 8", True),
        ("kernels/records.py", "TILE + 80", "TILE + 96", True),
        ("kernels/cpu_looks.py", "SHORT: Final = 16", "SHORT: Final = 8", True),
        ("methods/sce.py", "LEAST_SHARE: Final = 1e-6", "LEAST_SHARE: Final = 1e-7", False),
        ("run/worker.py", '"""One job', '"""A job', False),
    ):
        path = house / "darelib" / name
        text = path.read_text()
        assert text.count(right) == 1, name
        path.write_text(text.replace(right, wrong))
        assert (ask(say) != before) == is_needed, name
        path.write_text(text)
    loaded = "import sys, darelib.arithmetic.cpu; from darelib.arithmetic import objects; "
    loaded += "own = {name for name in sys.modules if name.split('.')[0] == 'darelib'}; "
    assert ask(loaded + "print(own - {*objects.read_sources()})") == "set()\n"


# --- the processes that compile -------------------------------------------------------------------


@SLOW
def test_a_compiler_imports_nothing_from_the_working_directory_and_may_print_what_it_likes(
    pack: Merge, tmp_path: Path
) -> None:
    (tmp_path / "numba.py").write_text("raise SystemExit('from the working directory')")
    pack(tmp_path / "cache", PYTHONVERBOSE="1")
    assert len(list((tmp_path / "cache").glob("dare.pack-*.o"))) == 1
