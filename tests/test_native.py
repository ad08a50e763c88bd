"""Machine code: proved before it is used, kept where nobody else can write, replaced by the next
engine if it fails."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import llvmlite.binding as llvm
import pytest

import dare
from darelib.core.interrupts import Interrupts
from darelib.kernels import EngineUnavailable, KernelSpec, engines, fallback, native, objects
from darelib.kernels.engines import load_kernels
from tests.scene import contents, wait_for
from tests.support import HERE, POSIX, Capture, Models, Patch, command, run_merge, slow, snapshot

SLOW = pytest.mark.slow
OUT = "out.safetensors"
SUM = KernelSpec("sum", "BF16", "BF16", "BF16")

# --- kernels that are wrong -----------------------------------------------------------------------

ARGUMENTS = ", ".join(["ptr"] * 11 + ["i64"] * 5)
# By what is wrong: what a compiler made of the kernel that merges, and what Numba itself does.
WRONG = {
    "a symbol": (
        "declare void @NRT_decref(ptr)\n{0} {{ call void @NRT_decref(ptr null) ret i32 0 }}",
        "1 / 0",
    ),
    "the bits": ("{0} {{ ret i32 0 }}", "return None"),
    "a crash": (
        "{0} {{ store volatile i32 1, ptr inttoptr (i64 8 to ptr) ret i32 0 }}",
        "ctypes.string_at(8)",
    ),
}
REASONS = {
    "a symbol": "the kernel sum needs NRT_decref, which only Numba has",
    "the bits": "the compiled kernel sum gives another peak than its definition",
    "a crash": "its compiler, or what that made, crashed with status ",
}
# A compiler that makes the same of any function.
NUMBA = """
import ctypes
class Anything:
    def __getattr__(self, _): return self
    def __call__(self, *_, **__): return self
class Made:
    native_name = "cfunc.made"
    def inspect_llvm(self): return {code!r}
    def ctypes(self, *_): {itself}
carray = core = types = Anything()
njit = lambda **_: lambda function: function
cfunc = lambda *_: lambda function: Made()
"""


def write_code(wrong: str, name: str) -> str:
    return WRONG[wrong][0].format(f"define i32 @{name}({ARGUMENTS})")


@pytest.fixture(params=["the bits", slow("a symbol"), slow("a crash")])
def compiler(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A folder with a compiler that makes something wrong, and what that is."""
    folder = tmp_path / "compilers"
    (folder / "numba").mkdir(parents=True)
    (folder / "numba" / "_version.py").write_text(f"# {request.param}")
    (folder / "numba" / "extending.py").write_text("intrinsic = lambda function: function")
    (folder / "numba" / "__init__.py").write_text(
        NUMBA.format(code=write_code(request.param, "made"), itself=WRONG[request.param][1])
    )
    return folder, request.param


def copy_house(folder: Path) -> Path:
    shutil.copytree(
        HERE / "darelib", folder / "house" / "darelib", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(HERE / "dare.py", folder / "house")
    return folder / "house"


def merge_in(folder: Path, models: list[Path], *flags: str) -> subprocess.CompletedProcess[str]:
    """Merge with the compiler, or by the program, that is in a folder."""
    kernels = str(folder.parent / "kernels")
    own = {"NUMBA_CACHE_DIR": kernels, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    words = ["-q", "-b", models[0], "-m", *models[1:], "-o", models[0].with_name(OUT), *flags]
    home = folder if (folder / "dare.py").exists() else HERE
    return command(*words, program=home / "dare.py", env=os.environ | own)


def test_a_kernel_that_is_wrong_is_not_used_and_the_result_is_right(
    compiler: tuple[Path, str], models: Models, tmp_path: Path
) -> None:
    folder, wrong = compiler
    before = snapshot(tmp_path)
    done = merge_in(folder, models, "--engine", "numba")
    assert (done.returncode, snapshot(tmp_path)) == (1, before)
    assert done.stderr.startswith(f"error: the engine numba cannot be used: {REASONS[wrong]}")
    run_merge(models[0], models[1:], tmp_path / "usual.safetensors")
    done = merge_in(folder, models)
    [line] = done.stderr.splitlines()
    assert line.startswith(f"warning: Numba cannot be used ({REASONS[wrong]}")
    assert done.returncode == 0
    assert contents(tmp_path / "out.safetensors") == contents(tmp_path / "usual.safetensors")
    assert not list(tmp_path.rglob("*.o")), "what was not proved is not stored"


@SLOW
def test_where_stored_kernels_cannot_be_used_numba_takes_over(
    models: list[Path], tmp_path: Path
) -> None:
    folder = copy_house(tmp_path)
    run_merge(models[0], models[1:], tmp_path / "usual.safetensors")
    with (folder / "darelib" / "kernels" / "cpu.py").open("a") as file:
        code = f"machine.emit_object(llvm.parse_assembly({write_code('a crash', 'kernel')!r}))"
        file.write(f"def compile_object(code, machine):\n    return {code}\n")
    [line] = merge_in(folder, models).stderr.splitlines()
    assert re.match(
        "warning: Kernels compiled beforehand cannot be used .* so Numba compiles", line
    )
    assert contents(tmp_path / OUT) == contents(tmp_path / "usual.safetensors")


def test_what_failed_once_is_not_tried_again_by_the_same_process(monkeypatch: Patch) -> None:
    tried = Mock(side_effect=EngineUnavailable("it is out of order"))
    monkeypatch.setattr(native, "load_kernels", tried)
    monkeypatch.setattr(engines, "load_here", tried)
    monkeypatch.setattr(engines, "_refused", {})
    with Interrupts() as interrupts:
        for _ in range(3):
            assert load_kernels([SUM], "auto", interrupts)
        with pytest.raises(dare.DareError, match="it is out of order"):
            load_kernels([SUM], "numba", interrupts)
    assert tried.call_count == 2


@SLOW
@pytest.mark.parametrize(
    ("kind", "module", "right", "wrong"),
    [  # by kernel: what a compiler might get wrong, where the sources say it
        ("elect", "tiles", " if share[j] > 0 else zero", ""),
        ("sum", "parts", "x1 = first >> np.uint64(32)", "x1 = np.uint64(0)"),
        ("sum", "parts", "base[count:] = 0", "pass"),
        ("sum", "parts", "finetuned[:, count : tiles * TILE] = 0", "pass"),
        ("sum", "parts", "scratch[ZERO_ROW] = 0", "pass"),
        ("sum", "parts", "(at_low if is_low else at_high)", "at_low"),
        ("sum", "parts", "model.kept -= np.uint64(bits[j] <= limit)", "pass"),
        ("sum", "cpu", "value = base[j] if change == 0 else sum_", "value = sum_"),
        ("products", "parts", "base[count:] = 0", "pass"),
        ("products", "looks", "chunk.base if tensor.from_zero else chunk.zeros", "chunk.base"),
        ("products", "looks", "chunk.kept[i, j] = origin[j]", "pass"),
        ("rank", "looks", "passes = max(1, ", "passes = ("),
        ("count", "looks", "elif prefix == model.prefix_2:", "elif prefix == model.prefix:"),
        (
            "measure",
            "looks",
            "place if place < np.uint32(BINS - 1) else np.uint32(BINS - 1)",
            "place",
        ),
        ("pack", "cpu", "if place < count:", "if True:"),
        ("unpack", "parts", "while mask and done < np.uint64(len(entries)):", "while mask:"),
        ("unpack", "parts", "flags[j] = 0", "pass"),
        ("sum", "parts", "drops_some = model.ranked or limit", "drops_some = limit"),
        ("expand", "cpu", "while k < rank:", "while k < rank - 1:"),
        ("select", "tiles", "averaged if variance[j] >= bound else real(0)", "averaged"),
        ("overlap", "tiles", "np.uint32(number[j] > 1)", "np.uint32(number[j] > 0)"),
        (
            "average",
            "tiles",
            "elect(chunk, True)\n\n\ndef swap",
            "elect(chunk, False)\n\n\ndef swap",
        ),
        ("near", "tiles", "min(share, real(1))", "share"),
        ("boost", "tiles", "row[j] != 0 and chunk.left[j] == 1", "row[j] != 0"),
        ("fuse", "tiles", "if abs(value) >= scale", "if value >= scale"),
        ("fuse", "tiles", "scale * real(by_entry[j])", "real(by_entry[j])"),
        ("fuse", "tiles", "[tile * TILE : (tile + 1) * TILE]\n    scale", "\n    scale"),
        ("variance", "tiles", "if chunk.right[j] > 0:", "if chunk.right[j] >= 0:"),
        ("squares", "tiles", "row[j] if variance[j] >= bound else real(0)", "row[j]"),
        ("diverge", "tiles", "found[row] = 0 if total < 0 else total", "found[row] = total + 1e-9"),
        ("sums", "looks", "abs(np.float64(values[j]))", "np.float64(values[j])"),
        ("importance", "tiles", "min(chunk.count - tile * TILE, TILE)", "TILE"),
    ],
)
def test_what_a_compiler_might_get_wrong_is_found(
    tmp_path: Path, kind: str, module: str, right: str, wrong: str
) -> None:
    path = copy_house(tmp_path) / "darelib" / "kernels" / f"{module}.py"
    assert path.read_text().count(right) == 1
    path.write_text(path.read_text().replace(right, wrong))
    types = ["F32"] * 3 if kind == "expand" else ["BF16"] * 3
    name = f"dare.{native.find_code(KernelSpec(kind, *types))}.o"
    words = [sys.executable, "-c", native.CHILD, "object", tmp_path / name]
    done = subprocess.run(
        words, cwd=tmp_path / "house", capture_output=True, text=True, timeout=300
    )
    assert done.returncode < 0 or " than its definition" in done.stderr
    assert not (tmp_path / name).exists()


@SLOW
@pytest.mark.parametrize(
    "types", [("F32", "F64", "F64"), ("F64", "BF16", "F16"), ("F16", "F32", "BF16")]
)
def test_kernels_of_mixed_types_are_proved(types: tuple[str, str, str]) -> None:
    specs = [KernelSpec(kind, *types) for kind in fallback.KERNELS if kind != "expand"]
    with Interrupts() as interrupts:
        assert load_kernels(specs, "numba", interrupts).keys() == set(specs)


# --- kernels on disk ------------------------------------------------------------------------------


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: Patch) -> list[str]:
    """What is compiled from now on: kernels are kept in an empty folder, and a compiler copies what
    it made before."""
    with Interrupts() as interrupts:
        load_kernels([SUM], "numba", interrupts)
    usual = objects.find_cache()
    made = list[str]()

    def copy(words: list[str], _: Path) -> subprocess.Popen[bytes]:
        for path in map(Path, words[1:]):
            made.append(str(objects.code_of(path.name)))
            objects.store(objects.read_object(usual / path.name), path)
        return subprocess.Popen([sys.executable, "-S", "-c", "pass"])

    monkeypatch.setattr(native, "_start", copy)
    monkeypatch.setattr(native, "COMPANIONS", ())
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    return made


def run_command(models: list[Path], *flags: str) -> int:
    """Merge as a new process would, with no kernels in memory."""
    native._loaded.clear()
    engines._refused.clear()
    base, model, output = map(str, (*models[:2], models[0].with_name(OUT)))
    return dare.main(["-b", base, "-m", model, "-o", output, "--force", *flags])


def test_kernels_are_compiled_once_with_a_note_and_damaged_ones_again(
    compiled: list[str], models: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    before = os.umask(0)
    try:
        assert run_command(models) == 0
    finally:
        os.umask(before)
    note = "compiling for this machine (BF16); later runs start at once\n"
    assert capsys.readouterr().err == note
    [kernel] = (tmp_path / "kernels").glob("*.o")
    if os.name != "nt":  # nobody else can write there
        modes = [path.stat().st_mode & 0o777 for path in (kernel, kernel.parent)]
        assert modes == [0o644, 0o755]
    older = kernel.with_name(kernel.name.rsplit(".", 2)[0] + ".0123456789abcdef.o")
    older.write_bytes(b"another version's")
    assert run_command(models, "--weights", "2") == 0, "with the same kernel"
    assert "compiling for" not in capsys.readouterr().err
    whole = kernel.read_bytes()
    renamed = objects._digest(older, whole[32:]) + whole[32:]
    for damaged in (whole[:-1], older.read_bytes(), renamed):
        kernel.write_bytes(damaged)
        assert run_command(models) == 0
    assert compiled == [str(SUM)] * 4
    assert older.exists()


@POSIX
@pytest.mark.parametrize("whose", ["another user's", "in a folder for all", "writable for all"])
def test_a_kernel_that_somebody_else_may_have_written_is_not_run(
    compiled: list[str],
    models: list[Path],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: Patch,
    whose: str,
) -> None:
    run_merge(models[0], models[1:2], tmp_path / "usual.safetensors")
    planted = tmp_path / "kernels" / objects.object_name(SUM)
    compiled.clear()
    shutil.rmtree(planted.parent)
    wrong = llvm.parse_assembly(write_code("the bits", "kernel"))
    objects.store(objects.target_machine().emit_object(wrong), planted)
    before = planted.read_bytes()
    if whose == "another user's":
        if os.geteuid() == 0:
            os.chown(planted, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", Mock(return_value=os.geteuid() + 1))
    else:
        (planted if whose == "writable for all" else planted.parent).chmod(0o777)
    reason = "belongs to another" if whose == "another user's" else "others can write to "
    assert run_command(models, "-q") == 0
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(f"warning: .*{reason}.*so no kernel there is run", line)
    assert contents(tmp_path / OUT) == contents(tmp_path / "usual.safetensors")
    assert compiled == [str(SUM)]
    assert [path.read_bytes() for path in planted.parent.iterdir()] == [before], (
        "and nothing is kept there"
    )


@SLOW
def test_after_the_first_merge_other_ways_to_merge_the_same_type_need_no_compiler(
    models: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "kernels"
    kinds = {f"dare.{kind}" for kind in native.COMPANIONS}
    words = ["-b", models[0], "-m", *models[1:], "-o", tmp_path / "out", "--force"]
    ways = (
        "",
        "--method ties --keep-ratio 0.5",
        "--method slerp",
        "--method ram",
        "--drop magnitude",
        "--drop della --drop-rate 0.5",
        "--drop breadcrumbs",
        "--rescale l1",
    )
    for way in ways:
        done = command(*words, *way.split(), env={**os.environ, "NUMBA_CACHE_DIR": str(folder)})
        assert done.returncode == 0, done.stderr
        assert ("compiling for this machine (" in done.stderr) == (not way), way
        wait_for(lambda: {name.split("-")[0] for name in os.listdir(folder)} == kinds, 120)


def test_kernels_depend_on_their_own_sources_and_on_nothing_else(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    copy = copy_house(tmp_path) / "darelib"
    identify = objects.identify.__wrapped__
    before = objects.identify()
    monkeypatch.setattr(objects, "__file__", str(copy / "kernels" / "objects.py"))
    needed = ("kernels/plain.py", "kernels/parts.py", "kernels/looks.py", "core/mask.py")
    for name in ("config/__init__.py", "run/worker.py", "kernels/tensors.py", *needed):
        (copy / name).write_bytes((HERE / "darelib" / name).read_bytes() + b"# edited\n")
        assert (identify() != before) == (name in needed), name
        shutil.copy(HERE / "darelib" / name, copy / name)


def test_a_folder_for_kernels_that_cannot_be_written_only_costs_time(
    compiled: list[str], models: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    (tmp_path / "blocked").write_text("not a directory")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "blocked" / "below"))
    assert (run_command(models), run_command(models)) == (0, 0)
    assert compiled == [str(SUM)] * 2
    assert capsys.readouterr().err.count("compiling for this machine (BF16)\n") == 2, (
        "nothing is promised"
    )
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.setattr(os, "access", lambda path, mode: "__pycache__" not in str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run_command(models) == 0
    assert len(list((tmp_path / "cache" / "dare").glob("*.o"))) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert run_command(models) == 0
    assert not Path("somewhere").exists(), "the working directory is no place for machine code"


# --- the processes that compile -------------------------------------------------------------------


@SLOW
def test_a_compiler_imports_nothing_from_the_working_directory_and_may_print_what_it_likes(
    models: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "numba.py").write_text("raise SystemExit('from the working directory')")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONVERBOSE": "1"}
    done = command("-q", "-b", models[0], "-m", models[1], "-o", OUT, env=environment, cwd=tmp_path)
    assert (done.returncode, "cannot be used" in done.stderr) == (0, False)
    assert len(list((tmp_path / "cache").glob("dare.sum-*.o"))) == 1


@pytest.mark.parametrize("missing", ["llvmlite", "numba"])
def test_without_numba_numpy_computes_the_same_and_one_warning_is_printed(
    models: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: Patch, missing: str
) -> None:
    run_merge(models[0], models[1:2], tmp_path / "usual.safetensors")
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(engines, "_refused", {})
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "empty"))
    objects.load_llvmlite.cache_clear()
    if missing == "llvmlite":
        monkeypatch.setitem(sys.modules, "llvmlite", None)
    else:  # which only the compiler loads
        (tmp_path / "numba.py").write_text("raise ImportError('no such thing here')")
        monkeypatch.syspath_prepend(tmp_path)
    assert run_command(models, "-q") == 0
    [warning] = capsys.readouterr().err.splitlines()
    assert re.match("warning: Numba cannot be used .* so NumPy computes", warning)
    assert contents(tmp_path / OUT) == contents(tmp_path / "usual.safetensors")
    assert run_command(models, "-q", "--engine", "numba") == 1
    assert "error: the engine numba cannot be used: " in capsys.readouterr().err
