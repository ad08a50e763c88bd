"""`dare.py verify`: a merged model is made again by its recipe, and compared, not written."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Final

from darelib.commands.options import (
    MODELS,
    Flags,
    MergerClass,
    Options,
    list_models,
    merger_for,
    show,
)
from darelib.commands.report import Report
from darelib.core.formats import STORED_BITS
from darelib.core.interrupts import Interrupts
from darelib.core.text import (
    LOG,
    ConfigError,
    DareError,
    as_text,
    human,
    list_names,
    printable,
    progress,
)
from darelib.models.tensorfile import explain_os_error, open_regular, peek_header, read_at

if TYPE_CHECKING:
    from darelib.models.checkpoint import Checkpoint
    from darelib.models.forms import Entry
    from darelib.output.prepare import FilePlan
    from darelib.plan.tensorplan import PlannedFile

OPTIONS: Final[Options] = {
    "path": {
        "metavar": "PATH",
        "nargs": "?",
        "help": "the merged model, a file or a directory",
    },
    "--verify": {
        "metavar": "PATH",
        "dest": "path",
        "help": "the same, without the word verify",
    },
    **MODELS,
}
# What no loader reads: cards, licences, pictures, and what other tools keep under a hidden name.
UNREAD: Final = re.compile(
    r"(?i)(.*/)?(\..*|[^/]*\.(md|png|jpe?g|svg|pdf)|(licen[cs]e|notice)(\.txt)?)"
)


@dataclasses.dataclass(frozen=True)
class VerifyReport(Report):
    """A merged model that is, byte for byte, what its recipe makes. Prints as a line."""

    output: str
    tensors: int
    bytes_compared: int
    seconds: float
    differing: int = 0  # values that were solved elsewhere, and differ in the last place
    matched: int = 0  # tensors that were matched with examples, and have the recipe's digests

    def __str__(self) -> str:
        last = f"; {self.differing:,} values differ in the last place" if self.differing else ""
        if self.matched:
            last += f"; {self.matched:,} of them, matched with examples, by their digests"
        return (
            f"verified {printable(self.output)}: {self.tensors:,} tensors, "
            f"{human(self.bytes_compared)}, are what the recipe makes{last}, "
            f"in {self.seconds:.2f} s"
        )


def run(flags: Flags, merger_class: MergerClass) -> None:
    from darelib.models.source import UNION, last_parts
    from darelib.requests.recipe import find_merged, locate_inputs, read_recipe

    if "path" not in flags:
        raise ConfigError("there is nothing to verify", "give a merged model: verify PATH")
    path = find_merged(flags["path"])
    request = read_recipe(path)
    own = {name: flags[name] for name in ("threads", "engine", "verbose") if name in flags}
    names = {UNION, *(last_parts(str(entry.get("file"))) for entry in request.inputs)}
    may_move = request.tokenizer and last_parts(request.tokenizer.name) in names  # rows
    # Files besides the tensors are held to their digests, whatever they were made from.
    request = dataclasses.replace(
        request,
        dare=request.dare | own,
        tokenizer=request.tokenizer if may_move else None,
        chat_template=None,
    )
    merger = merger_for(locate_inputs(request, list_models(flags), path), merger_class)
    show(merger.verify(path), flags, merger.config.verbose)


def compare_output(
    plan: FilePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts
) -> VerifyReport:
    """Make an output again and compare it with what is there; the first difference is an error."""
    from darelib.run.products import open_worker, settle_ranks
    from darelib.run.rounds import run_rounds
    from darelib.run.solving import count_steps

    started = time.perf_counter()
    plan = keep_recipes(settle_ranks(plan, inputs, interrupts))
    with Comparison(plan) as comparison:
        for file in plan.files:
            comparison.open_file(file)
        comparison.check_side_files()
        worker = open_worker(plan, inputs)
        done = comparison.check_matched(worker.place_of)
        with progress("verifying", count_steps(plan), plan.config.verbose) as worker.advance:
            run_rounds(
                plan.rounds(done),
                worker,
                comparison.write_at,
                lambda job, _: worker.advance(job.bytes_read),
                interrupts,
            )
    return VerifyReport(
        output=plan.output.name,
        tensors=len(plan.tensors),
        bytes_compared=plan.size,
        seconds=time.perf_counter() - started,
        differing=sum(comparison.differing),
        matched=comparison.matched,
    )


def keep_recipes(plan: FilePlan) -> FilePlan:
    """The plan with the recipe that each file has: other versions write the same one otherwise."""
    from darelib.output.destination import RECIPE_KEY
    from darelib.output.directory import recipe_metadata

    files = []
    for file in plan.files:
        stored = peek_header(find_folder(plan) / file.name)[1]
        is_sound = stored == recipe_metadata(stored.get(RECIPE_KEY, ""))
        files.append(file.replace_metadata(stored) if is_sound else file)
    return dataclasses.replace(plan, files=tuple(files))


def find_folder(plan: FilePlan) -> Path:
    return plan.output.path if plan.output.directory else plan.output.path.parent


class Comparison(ExitStack):
    """An output that exists already: what jobs write to it is compared."""

    def __init__(self, plan: FilePlan) -> None:
        super().__init__()
        self.plan = plan
        self.folder = find_folder(plan)
        self.files: list[BufferedReader] = []
        # How many values of matrices differ by next to nothing, as the libraries of machines do.
        self.differing: list[int] = []
        self.matched = 0

    def open_file(self, planned: PlannedFile) -> None:
        path = self.folder / planned.name
        try:
            file = self.enter_context(open_regular(path))
        except FileNotFoundError:
            raise self._differs(f"{planned.name!r} is not there") from None
        except OSError as error:
            raise explain_os_error(error, str(path)) from None
        self.files.append(file)
        size = os.fstat(file.fileno()).st_size
        if size != planned.size:
            raise self._differs(f"{planned.name!r} is {size:,} bytes long, not {planned.size:,}")
        if file.read(len(planned.header)) != planned.header:
            raise self._differs(
                f"the header of {planned.name!r} differs, as with other models or settings"
            )

    def check_side_files(self) -> None:
        """Compare a directory's other files with the digests in its recipe, which has a seal.

        What is not in the recipe may change what is loaded. A file that no loader reads may be
        changed, with a warning, and added.
        """
        from darelib.models.source import RECIPE_FILE
        from darelib.output.destination import digest_of, list_files, read_digests
        from darelib.output.directory import check_seal

        if not self.plan.output.directory:
            return
        check_seal(self.folder)
        paths = {as_text(name): self.folder / name for name in list_files(self.folder)}
        digests = read_digests(self.folder)
        for name in sorted(digests):
            digest = digest_of(paths[name]) if name in paths else ""
            if digest == digests[name]:
                continue
            if not UNREAD.fullmatch(name):
                raise self._differs(f"{name!r} {'differs' if digest else 'cannot be read'}")
            LOG.warning(f"{name!r} is not as the merge wrote it; no loader reads it")
        known = {RECIPE_FILE, *digests}
        unknown = [name for name in paths if name not in known and not UNREAD.fullmatch(name)]
        if added := [name for name in unknown if not name.endswith("/")]:  # an empty directory
            raise DareError(
                f"{self.plan.output.name!r} also holds {list_names(added)}, "
                "which its recipe does not know",
                "a loader may read that instead of the merged files; move it elsewhere",
            )

    def check_matched(self, place_of: Callable[[Entry], int]) -> set[tuple[str, int]]:
        """Compare the tensors that were matched with their digests in the recipe: to match them
        again would take the examples, and another machine comes to other last digits. Gives their
        jobs, which need not be run.
        """
        from darelib.output.destination import RECIPE_KEY
        from darelib.output.matched import UNMATCHED, digest_range, list_matched

        digests = list_matched(self.folder / self.plan.files[0].name, RECIPE_KEY)
        done: set[tuple[str, int]] = set()
        for tensor in self.plan.tensors:
            if not any(digests.get(name, UNMATCHED) != UNMATCHED for name in tensor.outputs):
                continue
            for name, info in tensor.outputs.items():
                path = self.folder / self.plan.files[info.file].name
                if digest_range(path, place_of(info), info.nbytes) != digests.get(name):
                    raise self._differs(f"tensor {name!r} has another digest")
            self.matched += 1
            done |= {(tensor.name, start) for start in self.plan.list_starts(tensor)}
        return done

    def write_at(self, file: int, view: memoryview, offset: int) -> None:
        import numpy as np

        stored = memoryview(bytearray(len(view)))
        try:
            done = read_at(self.files[file].fileno(), stored, offset)
        except OSError as error:
            raise explain_os_error(
                error, str(self.files[file].name), "check the disk that it is on"
            ) from None
        if done < len(stored):
            raise self._differs(f"{self.plan.files[file].name!r} became shorter while it was read")
        differs = np.frombuffer(stored, np.uint8) != np.frombuffer(view, np.uint8)
        if differs.any():
            self._examine(stored, view, file, offset, int(differs.argmax()))

    def _examine(
        self, stored: memoryview, made: memoryview, file: int, offset: int, first: int
    ) -> None:
        """Refuse a difference, unless it is as small as that of another machine's libraries.

        first: the first byte that differs.
        """
        place = offset - len(self.plan.files[file].header)
        tensor, name, info = next(
            (tensor, name, info)
            for tensor in self.plan.tensors
            for name, info in tensor.outputs.items()
            if info.file == file and info.offset <= place + first < info.offset + info.nbytes
        )
        bits = STORED_BITS[info.dtype]
        beyond: int | None = first * 8 // bits
        if compare := self.plan.find_comparison(tensor):
            count, beyond = compare(stored, made, info.dtype)
            self.differing.append(count)  # by many threads
        if beyond is not None:
            element = (place - info.offset) * 8 // bits + beyond
            raise self._differs(f"tensor {name!r} differs at {info.place_of(element)}")

    def _differs(self, how: str) -> DareError:
        return DareError(
            f"{self.plan.output.name!r} is not what its recipe makes: {how}",
            "it was damaged or changed after it was merged, or the inputs were; merge again",
        )
