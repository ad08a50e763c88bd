"""An output: made in a folder beside its destination, and renamed to it when it is complete.

Whatever happens, and whenever, the destination is the old model or the new one. No library does
this for directories.
"""

import ctypes
import io
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError, InputChanged
from darelib.models.tensorfile import BINARY
from darelib.output.destination import Destination, check_replaceable, digest_of
from darelib.output.files import (
    JOURNAL_FILE,
    LOCK_FILE,
    LOCK_WORDS,
    MADE,
    NO_FOLLOW,
    PRIVATE,
    Files,
    Journal,
    Lock,
    check_ours,
    explain_difference,
    explain_foreign,
    limit_mode,
    name_journal,
    remove,
    sync_directory,
    try_lock,
    write_synced,
)
from darelib.output.prepare import FilePlan
from darelib.output.scratch import make_scratch, remove_abandoned
from darelib.plan.tensors import PlannedFile

# In the folder beside the destination, for an instant: the model that is replaced.
REPLACED: Final = "replaced"


class Shard(Files):
    """A file made by another process than the one that publishes it, with a journal of its own.

    A third process may make the same one at the same time: both write the same bytes. What their
    journals then lack is done again.
    """

    def __init__(
        self, destination: Destination, file: PlannedFile, identity: dict[str, Any]
    ) -> None:
        path = destination.partial / JOURNAL_FILE
        guard = (os.open(path, os.O_RDONLY | BINARY), path)
        super().__init__(destination, [file], name_journal(file), guard)
        try:
            # The merge that asked for this file may have failed, and another one begun there.
            whole = Journal(path)  # of a process that went on alone
            check_same_merge(whole, identity, self.folder)
            if whole.done and not all(self.list_complete()):
                raise DareError(
                    f"{file.name!r} is gone from {str(self.folder)!r}",
                    "remove that folder, and merge again",
                )
            self._open()
            self._begin_journal(identity)
            sync_directory(self.made)
        except BaseException:
            self._close()
            raise
        self.done = [*whole.done, *self.journal.done]
        self._thread.start()

    def _begin_journal(self, identity: dict[str, Any]) -> None:
        """Go on with the file's journal, or begin one if it is another merge's, or gone."""
        path = self.journal.path
        if Journal(path).identity != identity:
            remove(path)
            self._sync()
            self.journal.append(identity)
        self.journal = Journal(path)
        with suppress(FileNotFoundError):  # a process that makes the same file has just begun
            self.journal.cut()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Note what is done. What failed to reach the disk is an error even if nothing else is."""
        try:
            self._stop(record=True)
        except OSError:
            if kind is None:
                raise
        finally:
            self._close()

    def _close(self) -> None:
        super()._close()
        os.close(self.guard[0])


class Output(Files):
    """What a merge writes.

    publish() gives it its name; what is not published is removed or kept to be continued.
    """

    def __init__(
        self,
        destination: Destination,
        files: Sequence[PlannedFile],
        identity: dict[str, Any],
        resume: bool,
    ) -> None:
        """identity: all that must be equal for a merge begun earlier to be continued."""
        self.resume = resume
        self.lock = Lock(destination.partial, destination.name)
        super().__init__(destination, files, JOURNAL_FILE, (self.lock.descriptor, self.lock.path))
        self.done: list[Any] = []  # by earlier runs
        keep = True  # what an earlier run left, until it is known to be of no use
        try:
            remove_abandoned(name_scratch(self.folder), self.lock.path)
            self._restore_replaced()
            if not self._continue(identity):
                keep = False
                self._begin(identity)
            self._thread.start()
        except BaseException:
            self.discard(keep)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.discard(keep=self.resume and error is not None and not isinstance(error, InputChanged))

    def _restore_replaced(self) -> None:
        """Undo what a crash between two renames left: the old content without its name."""
        old = self.folder / REPLACED
        target = self.destination.path
        if not old.exists():
            return
        if target.is_dir() and not os.listdir(target):
            os.rmdir(target)
        if not target.exists():
            os.rename(old, target)
        elif self.made.exists():  # so the new one was not put there, but something else was
            raise DareError(
                f"the model that was at {str(target)!r} is in {str(old)!r}",
                "move one of them elsewhere",
            )

    def _continue(self, identity: dict[str, Any]) -> bool:
        """Continue what an earlier run left, if that is wanted and possible."""
        if not self.lock.leftovers():
            if self.resume:
                LOG.info("there is no unfinished merge to resume; starting from the beginning")
            return False
        begun = self.journal.identity
        # What parts have not made yet is not missed.
        complete = begun is not None and (not self.journal.done or all(self.list_complete()))
        if not self.resume or begun is None:
            what = "is removed (--resume would continue it)" if complete else "is removed"
            LOG.warning(f"an unfinished merge in {self.folder} {what}")
            return False
        if difference := explain_difference(begun, identity):
            raise DareError(
                f"the unfinished merge in {str(self.folder)!r} is another one: {difference}",
                "run without --resume to remove it and start again",
            )
        if not complete:
            LOG.warning(
                f"the unfinished merge in {self.folder} cannot be continued: "
                "its files are not complete"
            )
            return False
        self.journal.cut()
        self._open()
        journals = [Journal(self.folder / name_journal(file)) for file in self.files]
        parts = [journal.done for journal in journals if journal.identity == identity]
        self.done = list(itertools.chain(self.journal.done, *parts))
        return True

    def _begin(self, identity: dict[str, Any]) -> None:
        for path in self.lock.leftovers():
            remove(path)
        if left := self.lock.leftovers():
            raise DareError(
                f"{str(left[0])!r}, of an unfinished merge, cannot be removed",
                "remove it, or give another output",
            )
        self.journal = Journal(self.journal.path)
        if self.destination.directory:
            os.mkdir(self.made)
        self._open()
        self._sync()
        self.journal.append(identity)

    def write_file(self, name: str, content: bytes | Path) -> None:
        """A small file of a model directory: of this content, or a copy of that file."""
        os.makedirs((self.made / name).parent, exist_ok=True)
        with closing(read_pieces(content)) as pieces:
            write_synced(self.made / name, os.O_TRUNC, pieces)
        if isinstance(content, Path):
            limit_mode(self.made / name, content)

    def publish(
        self,
        plan: FilePlan,
        check_inputs: Callable[[], None],
        force: bool,
        interrupts: Interrupts,
    ) -> None:
        """Complete the output and give it its name.

        check_inputs: raises an error if an input changed.
        """
        for name, content in plan.side.items():
            interrupts.check()
            self.write_file(name, content)
        check_inputs()
        for name, digest in plan.digests.items():
            if digest_of(self.made / name) != digest:
                raise DareError(
                    f"{name!r} changed while it was merged",
                    "merge again, and change no input meanwhile",
                )
        self._commit(force, plan.own_recipe)

    def _commit(self, force: bool, recipe: str) -> None:
        """Make the bytes durable, then the name."""
        self._stop(record=False)
        self._sync()
        self._check_still_ours()
        self._close()
        for path in (self.made, *self.made.rglob("*")):
            limit_mode(path, self.destination.path / path.relative_to(self.made))
        if self.destination.directory:
            for folder, _, _ in os.walk(self.made, topdown=False):
                sync_directory(Path(folder))
        # Somebody may have put something there.
        check_replaceable(self.destination, force, recipe)
        # From here on what lies in the folder may be the old model, which must not be continued.
        self.journal.path.unlink()
        self.resume = False
        sync_directory(self.folder)
        replace(self.made, self.destination.path)
        try:
            for new in (self.destination.path, *self.lock.new_parents):
                sync_directory(new.parent)
        except OSError as error:
            raise DareError(
                f"{self.destination.name!r} is in place, but may not survive a power failure: "
                f"its directory cannot be synced ({error.strerror or error})",
                "check the disk, and merge again",
            ) from None

    def discard(self, keep: bool = False) -> None:
        """Remove what is left, which may be what was replaced; or keep it, to be continued."""
        with suppress(OSError):  # of what is kept, the rest is done again
            self._stop(record=keep and bool(self.descriptors))
        self._close()
        try:
            self._restore_replaced()
        except (OSError, DareError):
            keep = True  # the old model is still in the folder
        self.lock.release(keep)


@contextmanager
def share_folder(destination: Destination, identity: dict[str, Any]) -> Iterator[None]:
    """Work in the folder of an output beside others that do the same merge.

    The first one makes it, in one step. Meanwhile nobody else can publish or remove it, so far as
    the filesystem has locks.
    """
    folder = destination.partial
    if not os.path.lexists(folder / LOCK_FILE):
        make_folder(folder, identity)
    try:
        check_ours(folder)
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | NO_FOLLOW | BINARY)
    except (FileNotFoundError, NotADirectoryError):
        raise explain_foreign(folder) from None
    try:
        if not try_lock(descriptor, shared=True):
            raise DareError(
                f"another merge is writing {destination.name!r}", "wait, or give another output"
            )
        check_same_merge(Journal(folder / JOURNAL_FILE), identity, folder)
        remove_abandoned(name_scratch(folder), folder / LOCK_FILE)
        yield
    finally:
        os.close(descriptor)


def make_folder(folder: Path, identity: dict[str, Any]) -> None:
    """Make the folder of an output elsewhere and give it its name, unless somebody was faster."""
    os.makedirs(folder.parent, exist_ok=True)
    with make_scratch(name_scratch(folder)) as scratch:
        new = scratch / MADE
        os.mkdir(new, PRIVATE)
        os.mkdir(new / MADE)
        write_synced(new / LOCK_FILE, 0, [f"{LOCK_WORDS} {os.getpid()}\n".encode()])
        Journal(new / JOURNAL_FILE).append(identity)
        sync_directory(new)
        with suppress(OSError):
            os.rename(new, folder)


def name_scratch(folder: Path) -> Path:
    """What the folders begin with in which the folder of an output is made."""
    return folder.with_name(f"{folder.name}.")


def check_same_merge(journal: Journal, identity: dict[str, Any], folder: Path) -> None:
    if journal.identity is None:
        raise DareError(
            f"the unfinished merge in {str(folder)!r} cannot be continued: its journal is missing "
            "or damaged",
            "remove that folder, and try again",
        )
    if difference := explain_difference(journal.identity, identity):
        raise DareError(
            f"the unfinished merge in {str(folder)!r} is another one: {difference}",
            "give all parts the same models and settings, or remove that folder",
        )


@contextmanager
def explain_write_errors(destination: Destination, resume: bool) -> Iterator[None]:
    """What the system refuses while an output is written, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        kept = resume and os.path.exists(destination.partial / JOURNAL_FILE)
        again = f"run again: what is done is in {destination.partial}" if kept else "try again"
        raise DareError(
            f"cannot write {destination.name!r}: {error.strerror or error}",
            f"what was there before is unchanged; fix that and {again}",
        ) from None


def read_pieces(content: bytes | Path) -> Generator[bytes]:
    """What is to be written: these bytes, or what a file holds, a piece at a time."""
    try:
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise InputChanged(
            f"cannot read {str(content)!r} any more: {error.strerror}", "merge again"
        ) from None


def replace(made: Path, target: Path) -> None:
    """Give what was made its name.

    What had that name goes, at the same instant, to where the new one was made.
    """
    if not made.is_dir() or not target.exists():
        os.replace(made, target)
    elif not exchange(made, target):
        # Without a way to exchange names there is an instant in which neither has it; what was
        # replaced is put back if the second step fails, now or, after a crash, by the next run.
        os.rename(target, made.with_name(REPLACED))
        os.rename(made, target)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step, if this system can."""
    for name, arguments in (
        # Linux: AT_FDCWD, RENAME_EXCHANGE
        ("renameat2", (-100, os.fsencode(one), -100, os.fsencode(other), 2)),
        # macOS: RENAME_SWAP
        ("renamex_np", (os.fsencode(one), os.fsencode(other), 2)),
    ):
        with suppress(AttributeError, OSError, TypeError):
            return bool(getattr(ctypes.CDLL(None), name)(*arguments) == 0)
    return False
