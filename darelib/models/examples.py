"""Examples of what a model can do: a file of texts, conversations, or prompts with completions."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar

from darelib.core.text import ConfigError, DareError, as_text, count_of, list_names
from darelib.models.tensorfile import explain_os_error, file_sha256

T = TypeVar("T")
CHOICE: Final = 42  # the seed that chooses, where there are more than are used
FORMS: Final = (
    'an example is a line of JSON like {"prompt": "...", "completion": "..."}, or with "messages", '
    '"text" or "input_ids"; in a .txt file, empty lines divide examples'
)


@dataclass(frozen=True)
class Examples:
    """The examples of one model that are used."""

    name: str  # of the file
    sha256: str
    entries: tuple[Mapping[str, Any], ...]
    tokens: int  # of each, at most

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a recipe keeps of them: no text."""
        return {
            "file": self.name,
            "sha256": self.sha256,
            "count": len(self.entries),
            "tokens": self.tokens,
        }


def check_examples(
    files: Sequence[str | Path], base: str | Path | None, models: int
) -> tuple[Path | None, ...]:
    """Files of examples in the order of the inputs: the base, which may have none, and the models.
    None at all: there are no examples.
    """
    if isinstance(files, str | Path):
        raise ConfigError(
            "examples must be a list of files, not a single path", "put it in brackets"
        )
    if base is not None and not files:
        raise ConfigError(
            "the base's examples keep what it can do beside examples of the models",
            "give these with --examples, or leave --base-examples out",
        )
    if files and len(files) != models:
        raise ConfigError(
            f"{count_of(len(files), 'file')} of examples for {count_of(models, 'model')}",
            "give one for each model, in the same order",
        )
    own = tuple(Path(os.path.expanduser(file)) for file in files)
    return (None if base is None else Path(os.path.expanduser(base)), *own) if own else ()


def is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in value)
    )


def is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and value == as_text(value)


def is_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and each >= 0 for each in value)
    )


# What an example may be: the keys that make it one, with what each must be. The first that fits is
# taken; keys beside them are nothing to us.
KINDS: Final[tuple[dict[str, Callable[[Any], bool]], ...]] = (
    {"messages": is_conversation},
    {"prompt": is_text, "completion": is_text},
    {"text": is_text},
    {"input_ids": is_ids},
)


def read_examples(path: Path, count: int, tokens: int) -> Examples:
    """Those of a file that are used: so many, by a fixed seed. What is no example is an error."""
    name = as_text(path.name)
    if path.suffix not in READERS:
        raise DareError(f"examples are .jsonl or .txt files, and {name!r} is neither", FORMS)
    try:
        found = list(READERS[path.suffix](path))
        digest = file_sha256(path)
    except UnicodeDecodeError:
        raise DareError(f"{name!r} is not text in UTF-8", FORMS) from None
    except OSError as error:
        raise explain_os_error(
            error, str(path), "check the path after --examples or --base-examples"
        ) from None
    if not found:
        raise DareError(f"there are no examples in {name!r}", FORMS)
    chosen = choose_some(len(found), min(count, len(found)))
    return Examples(name, digest, tuple(found[k] for k in chosen), tokens)


def choose_some(all_of: int, count: int) -> list[int]:
    """So many of the numbers below another, always the same."""
    import random  # --help starts sooner

    return sorted(random.Random(CHOICE).sample(range(all_of), count))


def divide(whole: Sequence[T], share: float) -> tuple[list[T], list[T]]:
    """What is used, and a share that is held out; at least one of each."""
    if len(whole) < 2:
        raise ConfigError("one example cannot be divided, to hold some out", "give more of them")
    count = min(max(1, round(share * len(whole))), len(whole) - 1)
    held = choose_some(len(whole), count)
    used = sorted({*range(len(whole))} - {*held})
    return [whole[k] for k in used], [whole[k] for k in held]


def read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield read_line(line, f"{as_text(path.name)!r}, line {number}")


def read_line(line: str, where: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DareError(f"{where} is not JSON: {getattr(error, 'msg', error)}", FORMS) from None
    table = entry if isinstance(entry, dict) else {}
    for kind in KINDS:
        if kind.keys() <= table.keys():
            wrong = [key for key, accepts in kind.items() if not accepts(table[key])]
            if wrong:
                raise DareError(f"{where}: {wrong[0]!r} is empty, or of another kind", FORMS)
            return {key: table[key] for key in kind}
    raise DareError(f"{where} is no example: it has {list_names([*table]) or 'no keys'}", FORMS)


def read_paragraphs(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for is_empty, lines in groupby(file, lambda line: not line.strip()):
            if not is_empty:
                yield {"text": "".join(lines)}


READERS: Final[Mapping[str, Callable[[Path], Iterator[Mapping[str, Any]]]]] = {
    ".jsonl": read_lines,
    ".txt": read_paragraphs,
}
