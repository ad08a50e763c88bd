"""An output: made in a folder beside its destination, and renamed to it when it is complete.

Whatever happens, and whenever, the destination is the old model or the new one. No library does
this for directories.
"""

import ctypes
import os
import secrets
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from darelib.core.interrupts import Interrupts
from darelib.core.text import LOG, DareError, InputChanged, as_text
from darelib.models.source import RECIPE_FILE
from darelib.models.tensorfile import BINARY
from darelib.output.destination import Destination, check_replaceable, digest_of, read_digests
from darelib.output.files import (
    JOURNAL_FILE,
    LOCK_FILE,
    MADE,
    Files,
    Journal,
    Lock,
    limit_mode,
    list_journals,
    name_folder,
    read_journals,
    sync_directory,
    write_synced,
)
from darelib.output.prepare import FilePlan
from darelib.plan.tensorplan import PlannedFile

# In the folder beside the destination, for an instant: the model that is replaced.
REPLACED: Final = "replaced"


class OutputPart(Files):
    """Some files of an output, made by another process than the one that publishes it.

    A third process may make the same ones at the same time: both write the same bytes.
    """

    def __init__(
        self, destination: Destination, files: Sequence[PlannedFile], identity: dict[str, Any]
    ) -> None:
        path = destination.partial / LOCK_FILE
        guard = (os.open(path, os.O_RDONLY | BINARY), path)
        super().__init__(destination, files, identity, name_journal(), guard)
        try:
            # The merge that asked for these files may have failed, and another one begun there.
            journals = read_journals(destination.partial, identity)
            if not journals:
                raise DareError(f"what was in {str(destination.partial)!r} is gone", "merge again")
            self._open(journals)
        except BaseException:
            self._close()
            raise

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
        self.resume = resume
        self.lock = Lock(destination.partial, destination.name)
        guard = (self.lock.descriptor, self.lock.path)
        super().__init__(destination, files, identity, JOURNAL_FILE, guard)
        keep = True  # what an earlier run left, until it is known to be of no use
        try:
            self._restore_replaced()
            if not self._continue():
                keep = False
                self._begin()
        except BaseException:
            self.discard(keep)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.discard(keep=self.resume and error is not None and not isinstance(error, InputChanged))

    def _restore_replaced(self) -> None:
        """Undo what a crash between two renames left: the old content without its name."""
        old = self.lock.folder / REPLACED
        target = self.destination.path
        if not old.exists():
            return
        if not target.exists():
            os.rename(old, target)
        # If the new one was not put there, something else was.
        elif any(self.lock.folder.glob(f"*/{MADE}")):
            raise DareError(
                f"the model that was at {str(target)!r} is in {str(old)!r}",
                "move one of them elsewhere",
            )

    def _continue(self) -> bool:
        """Continue what an earlier run, or parts, left, if that is wanted and possible."""
        folder = self.lock.folder
        if not self.resume and self.lock.leftovers():
            LOG.warning(f"an unfinished merge in {folder} is removed; --resume continues one")
        if not self.resume:
            return False
        if not self.lock.leftovers():
            LOG.info("there is no unfinished merge to resume; starting from the beginning")
            return False
        journals = read_journals(folder, self.identity)
        lost = self.list_lost()
        if not any(journal.files and lost.isdisjoint(journal.files) for journal in journals):
            LOG.warning(f"the unfinished merge in {folder} cannot be continued: it is not complete")
            return False
        self._open(journals)
        return True

    def _begin(self) -> None:
        if left := self.lock.clear():
            raise DareError(
                f"{str(left[0])!r}, of an unfinished merge, cannot be removed",
                "remove it, or give another output",
            )
        os.makedirs(self.made if self.destination.directory else self.folder)
        self._open()

    def write_file(self, name: str, content: bytes | Path) -> None:
        """A small file of a model directory: of this content, or a copy of that file."""
        os.makedirs((self.made / name).parent, exist_ok=True)
        if isinstance(content, bytes):
            write_synced(self.made / name, os.O_TRUNC, [content])
            return
        with closing(read_pieces(content)) as pieces:
            write_synced(self.made / name, os.O_TRUNC, pieces)
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
        digests = read_digests(self.made)
        for name in plan.side:
            if name != RECIPE_FILE and digest_of(self.made / name) != digests[as_text(name)]:
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
        for journal in list_journals(self.lock.folder):
            journal.unlink()
        self.resume = False
        sync_directory(self.folder)
        replace(self.made, self.destination.path, self.lock.folder / REPLACED)
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

    Meanwhile nobody else can publish or remove it, so far as the filesystem has locks.
    """
    folder = destination.partial
    with closing(Lock(folder, destination.name, shared=True)):
        own = folder / name_folder(identity)
        left = list(folder.glob(f"*/{MADE}/*"))  # before journals: who writes there has begun one
        if not read_journals(folder, identity):
            if left:
                raise DareError(
                    f"what is in {str(folder)!r} cannot be continued",
                    "a merge without --part and --resume removes it",
                )
            begin_journal(own, identity)
        os.makedirs(own / MADE, exist_ok=True)  # before anybody counts on it
        yield


def begin_journal(folder: Path, identity: dict[str, Any]) -> None:
    """Note what is merged in a folder, unless somebody has just begun another merge beside it."""
    os.makedirs(folder, exist_ok=True)
    journal = Journal(folder / name_journal())
    journal.begin(identity)
    try:
        read_journals(folder.parent, identity)
    except DareError:
        journal.path.unlink(missing_ok=True)
        raise


def name_journal() -> str:
    return f"{JOURNAL_FILE}-{secrets.token_hex(8)}"  # of a process beside others


@contextmanager
def explain_write_errors(destination: Destination, resume: bool) -> Iterator[None]:
    """What the system refuses while an output is written, as an error that says what to do."""
    try:
        yield
    except OSError as error:
        kept = resume and bool(list_journals(destination.partial))
        again = f"run again: what is done is in {destination.partial}" if kept else "try again"
        raise DareError(
            f"cannot write {destination.name!r}: {error.strerror or error}",
            f"the earlier output is unchanged; fix that and {again}",
        ) from None


def read_pieces(path: Path) -> Generator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                yield piece
    except OSError as error:
        raise InputChanged(
            f"cannot read {str(path)!r} any more: {error.strerror}", "merge again"
        ) from None


def replace(made: Path, target: Path, replaced: Path) -> None:
    """Give what was made its name.

    What had that name goes, at the same instant, to where the new one was made.
    """
    if not made.is_dir() or not target.exists():
        os.replace(made, target)
    elif not exchange(made, target):
        # Without a way to exchange names there is an instant in which neither has it; what was
        # replaced is put back if the second step fails, now or, after a crash, by the next run.
        os.rename(target, replaced)
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
