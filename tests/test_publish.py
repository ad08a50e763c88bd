"""Whatever happens, inputs are unchanged, the destination is the old model or the new one, and
nothing else is left."""

import errno
import itertools
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from darelib.output import publish
from darelib.output.files import MADE
from tests.scene import BOTH, SLOWLY, Scene, contents, launch, put, stop_after, wait_for
from tests.support import (
    HERE,
    POSIX,
    Patch,
    command,
    finetune,
    make_merger,
    save_directory,
    slow,
    snapshot,
    tune,
)

# --- any one call to the system may fail ----------------------------------------------------------

CALLS = [
    "open",
    "pwrite",
    "write",
    "ftruncate",
    "fsync",
    "rename",
    "replace",
    "close",
    "mkdir",
    "unlink",
    "rmdir",
]
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR)


def fail_each(scene: Scene, call: str, *flags: str, lasting: bool = False) -> Iterator[str]:
    """Merge with the first call failing, or all from it on; then the second, until all succeed."""
    real = getattr(os, call)
    for number in itertools.count(1):
        calls = itertools.count(1)
        error = ERRORS[number % len(ERRORS)]

        def failing(
            *arguments: Any,
            calls: Any = calls,
            number: int = number,
            error: int = error,
            **more: Any,
        ) -> Any:
            mine = next(calls)
            fails = mine == number or (lasting and mine > number)
            made = None if fails and call != "close" else real(*arguments, **more)
            if fails:
                raise OSError(error, os.strerror(error))
            return made

        with Patch.context() as patch:
            patch.setattr(os, call, failing)
            if call == "rename":  # which is used only where names cannot be exchanged
                patch.setattr(publish, "exchange", lambda *_: False)
            scene.run(*flags)
        if next(calls) <= number:
            assert scene.status == 0
            return
        yield f"{call} {number}"


def count_open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


ALWAYS = [
    *(("file", call, False) for call in ("pwrite", "rename")),
    *(("directory", "rmdir", False), ("directory", "rename", True)),
]
CASES = itertools.product(("file", "directory"), CALLS, (False, True))


@pytest.mark.real_fsync
@pytest.mark.parametrize(
    ("kind", "call", "lasting"), [case if case in ALWAYS else slow(*case) for case in CASES]
)
def test_any_call_to_the_system_may_fail_and_nothing_is_lost(
    tmp_path: Path, kind: str, call: str, lasting: bool
) -> None:
    """lasting: a disk that is full or broken stays so for the rest of the run."""
    problems = []
    for old in (False, True):
        scene = Scene(tmp_path / str(old), kind, old)
        opened = count_open_files()
        for which in fail_each(scene, call, lasting=lasting):
            if old and lasting and call == "rename" and contents(scene.output) == {}:
                # not even the old one could be given its name back: any next run does it
                scene.fail()
            broken = scene.broken(*([scene.partial] if call in ("unlink", "rmdir") else []))
            broken += ["a file stays open"] if count_open_files() > opened else []
            opened = count_open_files()
            broken += (
                ["then it is not merged"]
                if scene.run()
                else [f"then {what}" for what in scene.broken()]
            )
            problems += [f"{which}, old {old}: {what}" for what in broken]
            scene.reset()
    assert problems == []


@BOTH
@pytest.mark.parametrize("most", [1, 100, 4096])
def test_short_writes_of_any_kind_are_continued(
    tmp_path: Path, monkeypatch: Patch, kind: str, most: int
) -> None:
    scene = Scene(tmp_path, kind)
    for call in ("pwrite", "write"):
        real = getattr(os, call)
        monkeypatch.setattr(
            os, call, lambda file, view, *offset, real=real: real(file, view[:most], *offset)
        )
    scene.check()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs the names of open files")
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_all_bytes_are_on_the_disk_before_the_output_gets_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: Patch, kind: str
) -> None:
    """What is not synced is lost if the power fails, whatever the order in which it was written."""
    scene = Scene(tmp_path, kind, old=False)
    unsynced = set[str]()
    events = list[str]()
    tune(flush_seconds=60)  # nobody syncs but who publishes

    def note(call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def noting(descriptor: int, *arguments: Any) -> Any:
            events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            (unsynced.discard if call == "fsync" else unsynced.add)(events[-1])
            return real(descriptor, *arguments)

        return noting

    def create(path: Path, flags: int, *mode: int, real: Callable[..., int] = os.open) -> int:
        unsynced.update([str(Path(path).parent)] if flags & os.O_CREAT else [])
        return real(path, flags, *mode)

    def name(*paths: Path, real: Callable[..., Any] = os.replace) -> None:
        assert unsynced <= {str(scene.partial), str(scene.partial / "lock")}
        events.clear()
        real(*paths)

    for call in ("pwrite", "write", "ftruncate", "fsync"):
        monkeypatch.setattr(os, call, note(call, getattr(os, call)))
    monkeypatch.setattr(os, "open", create)
    monkeypatch.setattr(os, "replace", name)
    assert scene.run() == 0, scene.printed
    assert events == [str(scene.output.parent)]


@pytest.mark.parametrize("is_last", [False, True], ids=["before it has its name", "after that"])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_directory_that_cannot_be_synced_is_an_error_unless_the_system_never_syncs_any(
    tmp_path: Path, kind: str, is_last: bool
) -> None:
    scene = Scene(tmp_path, kind)

    def sync_or_fail(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_parent = os.path.samestat(status, scene.output.parent.stat())
        if stat.S_ISDIR(status.st_mode) and is_parent == is_last:
            raise OSError(error, os.strerror(error))

    for error in (errno.EIO, errno.ENOSPC, errno.EINVAL, errno.ENOTSUP):
        with Patch.context() as patch:
            patch.setattr(os, "fsync", sync_or_fail)
            scene.run("--resume")
        assert scene.status == (error in (errno.EIO, errno.ENOSPC))
        assert scene.broken(*([] if is_last else [scene.partial])) == []
        assert (str(scene.partial) in scene.printed) == scene.partial.exists()
        if scene.status:
            assert ("is in place, but may not survive" in scene.printed) == is_last
            assert os.strerror(error) in scene.printed
        scene.reset()


# --- processes that are killed or stopped ---------------------------------------------------------

WRITES = (os.write, getattr(os, "pwrite", None))


def dies_at(number: int, scene: Scene, flags: list[str], exchange: bool, background: bool) -> bool:
    """Merge in a process that kills itself at one of its calls to the system, in the middle of it
    if it writes."""
    if child := os.fork():
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    count = itertools.count(1)

    def make_deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                if real in WRITES:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    try:
        for name in CALLS:
            setattr(os, name, make_deadly(getattr(os, name)))
        if not exchange:
            publish.exchange = lambda *_: False
        if not background:  # then the calls have an order
            tune(flush_seconds=60)
        scene.run(*flags)
    finally:
        os._exit(0)


@pytest.mark.real_fsync
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "exchange", "background"),
    [
        slow("file", True, False),
        slow("file", True, True),
        slow("directory", True, False),
        slow("directory", False, False),
    ],
)
def test_a_merge_killed_at_any_call_to_the_system_is_made_good_by_the_next(
    tmp_path: Path, kind: str, exchange: bool, background: bool
) -> None:
    scene = Scene(tmp_path, kind)
    problems = []
    for number in itertools.count(1, 1 if background or kind == "directory" else 3):
        resume = ["--resume"] if number % 2 else []
        if not dies_at(number, scene, resume, exchange, background):
            break
        held = contents(scene.output)
        begun = set(os.listdir(scene.partial)) if scene.partial.exists() else set()
        between = not held and "replaced" in begun and not exchange
        broken = [] if between or held in (scene.old, scene.new) else [f"torn {sorted(held)}"]
        broken += [f"left {name}" for name in scene.besides() if name != scene.partial.name]
        if between:  # a run that fails still restores what was there
            scene.fail()
            broken += scene.broken()
        broken += [scene.printed] if scene.run(*resume) else scene.broken()
        is_named = resume or between or "unfinished merge" in scene.printed
        broken += [f"nothing said of {begun}"] if begun - {"lock"} and not is_named else []
        problems += [f"killed at {number}: {what}" for what in broken]
        scene.reset()
    assert number > 20
    assert problems == []


# The status and the messages of a process that gets a signal.
STOPPED = {
    signal.SIGINT: (130, "interrupted\nhint: "),
    signal.SIGTERM: (143, "interrupted\nhint: "),
    9: (-9, ""),
}


def stop(process: subprocess.Popen[str], sent: signal.Signals, everybody: bool = False) -> None:
    """Send a signal, to its children too as Ctrl-C does: in two seconds it must have ended."""
    (os.killpg if everybody else os.kill)(process.pid, sent)
    try:
        _, printed = process.communicate(timeout=2)
    finally:
        process.kill()
    status, words = STOPPED[sent]
    printed = printed.removeprefix("stopping\n")  # where it took a moment
    assert process.returncode == status
    assert printed.startswith(words)
    assert printed.count("\n") == 2 * bool(words)


@POSIX
@BOTH
@pytest.mark.parametrize("sent", [signal.SIGINT, slow(signal.SIGTERM)])
def test_a_signal_stops_a_merge_and_keeps_what_is_done_only_with_resume(
    tmp_path: Path, sent: signal.Signals, kind: str
) -> None:
    scene = Scene(tmp_path, kind)
    for flags in ([], ["--resume"]):
        process = launch(SLOWLY, *scene.arguments, *flags)
        wait_for(lambda: scene.journal)
        stop(process, sent)
        assert scene.broken(*([scene.partial] if flags else []), status=1) == []
    assert scene.journal != []
    scene.check("--resume")


LATE = {
    "renamed": """
replace = publish.replace
publish.replace = lambda *paths: (replace(*paths), kill())""",
    "tidied": (
        "discard = Output.discard; Output.discard = lambda self, keep: (discard(self, keep), "
        "kill())"
    ),
    "closed": "close = Checkpoint.close; Checkpoint.close = lambda model: (close(model), kill())",
    "returned": "from darelib.commands import options; show = options.print_result; "
    "options.print_result = lambda found: (kill(), show(found))",
}


@POSIX
@BOTH
@pytest.mark.parametrize("when", LATE)
@pytest.mark.parametrize("sent", ["SIGINT", slow("SIGTERM")])
def test_a_signal_that_comes_when_the_model_is_published_stops_nothing(
    tmp_path: Path, sent: str, when: str, kind: str
) -> None:
    scene = Scene(tmp_path, kind)
    kill = (
        f"import signal; from darelib.output import publish; kill = lambda: "
        f"os.kill(os.getpid(), signal.{sent})\n"
    )
    process = launch(kill + LATE[when], *scene.arguments, "--json")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    report = json.loads(printed.removeprefix("started\n").removesuffix("ended\n"))
    assert report["output"] == str(scene.output)
    assert scene.broken(status=0) == []


@POSIX
@pytest.mark.parametrize("sent", ["SIGINT", slow("SIGTERM")])
def test_a_signal_that_comes_when_the_process_ends_does_not_change_its_status(
    tmp_path: Path, sent: str
) -> None:
    scene = Scene(tmp_path, "file")
    program = (
        "import atexit, os, runpy, signal, sys\n"
        f"atexit.register(lambda: os.kill(os.getpid(), signal.{sent}))\n"
        f"sys.argv = {['dare.py', *map(str, scene.arguments)]}\n"
        f"runpy.run_path({str(HERE / 'dare.py')!r}, run_name='__main__')"
    )
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, cwd=HERE, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert scene.broken(status=0) == []


@POSIX
def test_in_a_script_a_signal_is_kept_until_the_model_is_published(
    models: list[Path], tmp_path: Path
) -> None:
    """Who stops a script wants it to stop; what was made is there."""
    merger = make_merger(models[0], models[1:])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    with Patch.context() as patch:
        patch.setattr(
            publish,
            "replace",
            lambda made, name, _: (os.replace(made, name), signal.raise_signal(signal.SIGINT)),
        )
        with pytest.raises(KeyboardInterrupt):
            merger.merge(tmp_path / "out.safetensors")
    signal.signal(signal.SIGINT, before)
    assert merger.published is not None
    assert (tmp_path / "out.safetensors").exists()


BUSY = {
    "planning": """
def choose(*_):
    print('planning', file=sys.stderr)
    time.sleep(30)
darelib.output.tokenizer.choose_tokenizer = choose
""",
    "merging": """
run, read, TUNING.min_chunk, TUNING.max_chunk = threads.run_merge, Stored.read, 1024, 1024
threads.run_merge = lambda *arguments: (print("merging", file=sys.stderr), run(*arguments))[1]
Stored.read = lambda *arguments: (time.sleep(0.2), read(*arguments))[1]""",
    "copying": """
begun = []
def write(*arguments):
    begun or print("copying", file=sys.stderr)
    begun.append(1)
    time.sleep(1)
Output.write_file = write""",
}


@POSIX
@pytest.mark.parametrize("doing", BUSY)
@pytest.mark.parametrize(
    ("sent", "everybody"), [(signal.SIGINT, True), slow(signal.SIGTERM, False)]
)
def test_a_signal_stops_a_merge_in_two_seconds_whatever_it_is_doing(
    models: list[Path], tmp_path: Path, sent: signal.Signals, everybody: bool, doing: str
) -> None:
    """A tokenizer may have to be downloaded, jobs and copies may take long."""
    before = sorted(tmp_path.rglob("*"))
    process = launch(BUSY[doing], "-b", models[0], "-m", models[1], "-o", tmp_path / "out")
    assert doing in process.stderr.readline()
    time.sleep(0.3)  # for it to be at work
    stop(process, sent, everybody)
    assert sorted(tmp_path.rglob("*")) == before


@POSIX
@BOTH
def test_files_that_may_not_grow_are_an_error_that_changes_nothing(
    tmp_path: Path, kind: str
) -> None:
    import resource

    scene = Scene(tmp_path, kind)
    for size in (3, 15_000) if kind == "directory" else (15_000,):
        limit = (resource.RLIMIT_FSIZE, (size, size))
        done = command(*scene.arguments, preexec_fn=lambda limit=limit: resource.setrlimit(*limit))
        assert "File too large" in done.stderr
        assert scene.broken(status=done.returncode) == []


# --- an unfinished merge is continued to the same bytes, or left alone ----------------------------


@BOTH
@pytest.mark.parametrize(
    "method",
    [
        {"method": "linear"},
        slow({"method": "ties"}),
        {"method": "ties", "keep_ratio": 0.3},
        {"method": "slerp"},
        {"method": "ties", "drop": "magnitude", "rescale": "l1"},
        {"method": "linear", "drop": "della", "rescale": "l1"},
    ],
    ids=str,
)
def test_a_resumed_merge_has_the_bytes_and_the_figures_of_one_that_was_not_interrupted(
    tmp_path: Path, monkeypatch: Patch, method: dict[str, Any], kind: str
) -> None:
    scene = Scene(tmp_path, kind)
    base, *models = (scene.inputs / name for name in ("base", "math", "code"))
    settings = {"drop_rate": 0.5, "max_shard_size": "10kB", "delta_threshold": 1e-9} | method

    def merge(threads: int = 1) -> dict[str, Any]:
        merger = make_merger(base, models, threads=threads, **settings)
        report = merger.merge(scene.output, force=True, resume=True)
        return report.as_dict() | {"seconds": 0}

    usual = merge()
    scene.new = contents(scene.output)
    assert usual["warnings"] != ()
    for stops, threads in (([0], 1), ([1, 3], 3), ([5, 2, 3], 1), ([12], 1)):
        put(scene.output, {})
        for ranges in stops:
            with monkeypatch.context() as patch:
                stop_after(patch, ranges)
                with pytest.raises(KeyboardInterrupt):
                    merge()
        assert len(scene.journal) == sum(stops)
        resumed = merge(threads)
        assert resumed == usual or threads > 1  # which add up in another order
        assert scene.broken(status=0) == []


def refuse_to_resume(scene: Scene, complaint: str, *flags: str) -> None:
    """An unfinished merge of something else is left as it is.

    But for the lock, which names its last process.
    """
    begun = contents(scene.partial) | {"lock": b""}
    scene.before = snapshot(scene.inputs)  # which may be other inputs by now
    flags = ("--resume", "--force", *flags)
    scene.check(*flags, status=1, words=complaint, left=[scene.partial])
    assert contents(scene.partial) | {"lock": b""} == begun


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--seed 3", "dare.seed"),
        ("--merge base", "models.merge_files"),
        slow("--drop-rate 0.5", "dare.drop_rate"),
        slow("--weights 1 2", "dare.weights"),
        slow("--method slerp", "dare.method"),
        slow("--dtype float32", "dare.dtype"),
        slow("--max-shard-size 1kB", "files"),
        slow("--rule *:drop_rate=0.5", "rules"),
        ("--delta-threshold 1", "delta_threshold"),  # of which the report has figures
    ],
)
def test_an_unfinished_merge_of_another_recipe_is_left_alone_with_resume_and_removed_without(
    tmp_path: Path, flags: str, complaint: str
) -> None:
    scene = Scene(tmp_path, "directory")
    words = flags.replace("base", str(scene.inputs / "base")).split()
    scene.interrupt(4)
    refuse_to_resume(scene, complaint, *words)
    scene.check("--resume")  # the right recipe still continues it
    scene.reset()
    scene.interrupt(4)
    assert scene.run("--force", *words) == 0
    assert f"warning: an unfinished merge in {scene.partial}" in scene.printed
    assert scene.besides() == []


@pytest.mark.parametrize("change", ["touched", "rewritten", "other tensors"])
def test_an_unfinished_merge_of_other_inputs_is_refused_and_left_alone(
    tmp_path: Path, change: str
) -> None:
    scene = Scene(tmp_path, "directory")
    scene.interrupt(4)
    weights = scene.inputs / "math" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    tensors = load_file(weights)
    if change != "touched":
        more = {"more": torch.zeros(3)} if change == "other tensors" else finetune(tensors, 9)
        save_file(tensors | more, weights, {"format": "pt"})
    os.utime(weights, ns=(written, written + 1))
    refuse_to_resume(scene, str(weights))


def test_an_unfinished_merge_of_embeddings_tied_otherwise_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    """config.json says whether a model without a head merges the embedding's changes into it."""
    scene = Scene(tmp_path, "directory", old=False)
    embedding = load_file(scene.inputs / "math" / "model.safetensors")["layer.weight"]
    names = ("lm_head.weight", "model.embed_tokens.weight")
    tied = {name: embedding.clone() for name in names}
    save_directory(scene.inputs / "base", tied, tie_word_embeddings=True)
    for model in ("math", "code"):
        save_directory(scene.inputs / model, {names[1]: embedding * 2}, tie_word_embeddings=True)
    scene.interrupt(2)
    put(scene.inputs / "math" / "config.json", {"": b'{"tie_word_embeddings": false}'})
    refuse_to_resume(scene, "way to merge the tensors")


def damage_journal(journal: bytes) -> list[bytes]:
    """Journals as crashes, disks and editors leave them."""
    _, *lines = journal.splitlines(keepends=True)
    damaged = [
        b"",
        b"00000000 \n" + journal,
        journal + bytes(4096),
        bytes(len(journal)),
        journal[:-1],
        journal + lines[-1][:20],
        b"".join([*lines, lines[0]]),
    ]
    for place in random.Random(5).choices(range(len(journal)), k=10):
        flipped = bytes([journal[place] ^ 1 << place % 8])
        damaged += [journal[:place], journal[:place] + flipped + journal[place + 1 :]]
    return damaged


def test_a_journal_damaged_anywhere_still_gives_the_right_bytes(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "file")
    scene.interrupt(7)
    begun = contents(scene.partial)
    name = f"{scene.begun.name}/journal"
    for journal in damage_journal(begun[name]):
        put(scene.partial, begun | {name: journal})
        scene.check("--resume")
        scene.reset()


@pytest.mark.parametrize(
    "damage", ["missing", "shorter", "longer", "a directory", "no made folder"]
)
def test_files_of_an_unfinished_merge_that_are_not_as_they_were_are_made_again(
    tmp_path: Path, damage: str
) -> None:
    scene = Scene(tmp_path, "directory")
    scene.interrupt(9)
    shard = min((scene.begun / MADE).glob("*.safetensors"))
    if damage in ("shorter", "longer"):
        os.truncate(shard, shard.stat().st_size + (1 if damage == "longer" else -1))
    else:
        put(shard.parent if damage == "no made folder" else shard, {})
    if damage == "a directory":
        shard.mkdir()
    scene.check("--resume", words="cannot be continued")


def test_with_resume_a_merge_is_begun_where_there_is_none_and_what_is_replaced_is_said(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path, "file")
    scene.check("--resume", "--verbose", words="no unfinished merge")
    assert "replaces " in scene.printed
