"""The tokenizer and the chat template of a model directory: the base's, a model's, or a union."""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from darelib.core.text import DareError
from darelib.models.checkpoint import Checkpoint
from darelib.models.inputs import explain_path
from darelib.models.source import (
    AUTO,
    BASE,
    UNION,
    Source,
    check_links,
    download,
    is_template,
    recorded_name,
)
from darelib.models.tensorfile import explain_os_error, open_regular, read_json
from darelib.models.vocabulary import (
    ADDED_START,
    ADDED_TABLE,
    TOKENIZER_FILE,
    describe_differences,
    find_table,
    read_vocabulary,
)

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_TABLES: Final = ("chat_template.json", TOKENIZER_CONFIG)  # which hold one, or several
TOKENIZER_PATTERNS: Final = (
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.model.v*",
    "*.tiktoken",
    "*.spm",
    "bpe.codes",
    "normalizer.json",
    "chat_template*",
    "additional_chat_templates/*",
)
MAX_TEMPLATE: Final = 1 << 20  # bytes
# Lists of special tokens, by the names that versions of transformers give them.
SPECIAL_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
TOKENIZER_HINT: Final = "tokenizer wants base, union or a model"

SideFiles = dict[str, bytes | Path]  # the content of each file, or what to copy


@dataclass(frozen=True)
class TokenizerChoice:
    """Where an output's tokenizer and chat template come from."""

    name: str = BASE  # base, union, or a model
    folder: Path | None = None  # of that model
    template: Any = None  # None: the base's or, where it has none, the first that a model has
    settings: Mapping[str, str] = field(default_factory=dict)  # what a recipe says of it
    paths: tuple[tuple[str, Path], ...] = ()  # what must not be written to, by the user's names

    @property
    def unites(self) -> bool:
        return self.name == UNION


def choose_tokenizer(tokenizer: Source | None, template: Source | None) -> TokenizerChoice:
    name = tokenizer.name if tokenizer else BASE
    if name == AUTO or is_template(name):
        raise DareError(f"there is no tokenizer {name!r}", TOKENIZER_HINT)
    given = {"tokenizer": tokenizer, "chat_template": template}
    sources = {
        key: download(source, TOKENIZER_PATTERNS)
        for key, source in given.items()
        if source and not source.is_word
    }
    settings = {key: recorded_name(source) for key, source in sources.items()}
    folder: Path | None = None
    if "tokenizer" in sources:
        folder = find_folder(sources["tokenizer"])
        if not tokenizer_files(folder):
            raise DareError(f"there is no tokenizer in {name!r}", TOKENIZER_HINT)
    if name == UNION:
        settings["tokenizer"] = UNION
    text: Any = None
    if "chat_template" in sources:
        text = read_template(sources["chat_template"])
    elif template and template.name not in (BASE, UNION):
        text = settings["chat_template"] = template.name
    paths = tuple((source.name, source.path) for source in sources.values())
    return TokenizerChoice(name, folder, text, settings, paths)


def read_template(source: Source) -> Any:
    """The chat template of a model, or in a file."""
    try:
        folder = find_folder(source)
        template = find_template(folder) if folder else read_text(source.path)
    except OSError as error:
        raise explain_os_error(error, source.name, "give a model or a text") from None
    if template is None:
        raise DareError(
            f"there is no chat template in {source.name!r}", "chat_template wants a model or a file"
        )
    return template


def find_folder(source: Source) -> Path | None:
    """The directory of a model; None: it is a file that is not a model's."""
    with explain_path(source):
        if source.path.is_dir():
            return source.path
        return source.path.parent if source.path.suffix in (".safetensors", ".json") else None


def tokenizer_files(folder: Path | None) -> dict[str, Path]:
    """The files of a model's tokenizer and chat template, by their names."""
    if folder is None:
        return {}
    paths = {path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern)}
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    check_links(folder, files.values())
    for path in files.values():
        if not os.access(path, os.R_OK):  # to be known before the merge, not after it
            raise DareError(f"cannot read {str(path)!r}", "check its permissions")
    return files


def find_template(folder: Path | None) -> Any:
    """The chat template of a model: a text or, by name, several of them; None without one."""
    if folder is None:
        return None
    check_links(folder, [folder / name for name in (TEMPLATE_FILE, *TEMPLATE_TABLES)])
    if (folder / TEMPLATE_FILE).exists():
        return read_text(folder / TEMPLATE_FILE)
    for name in TEMPLATE_TABLES:
        with suppress(DareError):  # what is not there, or is not JSON, has no template
            template = read_json(folder / name, name).get("chat_template")
            if template is not None:
                return template
    return None


def read_text(path: Path) -> str:
    with open_regular(path) as file:
        data = file.read(MAX_TEMPLATE + 1)
    if len(data) > MAX_TEMPLATE:
        raise DareError(
            f"the chat template {str(path)!r} is longer than {MAX_TEMPLATE:,} bytes",
            "choose another",
        )
    try:
        return data.decode()
    except ValueError as error:
        raise DareError(
            f"the chat template {str(path)!r} is not UTF-8 text: {error}", "save it as UTF-8"
        ) from None


def place_tokenizer(
    side: SideFiles, choice: TokenizerChoice, inputs: Sequence[Checkpoint], rows: int
) -> list[str]:
    """Change the files of an output directory as chosen. Gives what to tell.

    rows: of its embedding, 0 if unknown.
    """
    base, *models = inputs
    if choice.folder is not None:
        for name in tokenizer_files(base.folder):
            side.pop(name, None)
        side |= tokenizer_files(choice.folder)
        size = 0
        with suppress(DareError):
            vocabulary = read_vocabulary(choice.folder, choice.name)
            size = vocabulary.size if vocabulary else 0
        if 0 < rows < size:
            raise DareError(
                f"the tokenizer of {choice.name!r} has tokens up to {size - 1:,}, "
                f"and the merged model has rows for {rows:,}",
                "--tokenizer union gives every token a row",
            )
    if choice.unites:
        add_tokens(side, base.added, [model.folder for model in models])
    template = choice.template
    if template == AUTO:
        templates = [find_template(model.folder) for model in inputs]
        given = [each for each in templates if each is not None]
        template = max(given, key=given.count, default=None)  # of equally many, the first
    if template is not None:
        set_template(side, template)
    elif find_template(choice.folder or base.folder) is None:
        for model in inputs:  # the base first, where the tokenizer is not its own
            if (template := find_template(model.folder)) is not None:
                set_template(side, template)
                whose = choice.name if choice.folder else "the base"
                return [
                    f"the chat template is that of {model.name}, since {whose} has none; "
                    "--chat-template chooses"
                ]
    return []


def set_template(side: SideFiles, template: Any) -> None:
    for name in list(side):
        if name.startswith(("chat_template", "additional_chat_templates/")):
            del side[name]
    if TOKENIZER_CONFIG in side or not isinstance(template, str):
        side.setdefault(TOKENIZER_CONFIG, b"{}")  # which every version of transformers reads
        edit_json(side, TOKENIZER_CONFIG, lambda table: table.update(chat_template=template))
    else:
        side[TEMPLATE_FILE] = template.encode()


def edit_json(side: SideFiles, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file, if there is one of that name."""
    content = side.get(name)
    if content is not None:
        table = json.loads(content) if isinstance(content, bytes) else read_json(content, name)
        edit(table)
        side[name] = json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n"


def add_tokens(
    side: SideFiles, added: Sequence[dict[str, Any]], folders: Sequence[Path | None]
) -> None:
    """The base's tokenizer with the tokens that models added, in every file that lists tokens."""
    content = side[TOKENIZER_FILE]
    if added and isinstance(content, Path):
        side[TOKENIZER_FILE] = insert_tokens(content.read_bytes(), added)
    paths = [folder / TOKENIZER_CONFIG for folder in folders if folder]
    known = [read_json(path, TOKENIZER_CONFIG) for path in paths if path.exists()]

    def add_to_lists(table: dict[str, Any]) -> None:
        for key in SPECIAL_LISTS:
            lists = [each[key] for each in (table, *known) if isinstance(each.get(key), list)]
            if lists:
                # By their texts: a token may be listed as a text, or with its settings.
                tokens = {
                    str(token.get("content") if isinstance(token, dict) else token): token
                    for token in itertools.chain(*lists)
                }
                table[key] = list(tokens.values())
        decoder = table.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            for entry in added:
                decoder[str(entry["id"])] = {key: entry[key] for key in entry if key != "id"}

    edit_json(side, TOKENIZER_CONFIG, add_to_lists)
    edit_json(side, "special_tokens_map.json", add_to_lists)
    numbers = {entry["content"]: entry["id"] for entry in added}
    edit_json(side, "added_tokens.json", lambda table: table.update(numbers))


def insert_tokens(data: bytes, added: Sequence[dict[str, Any]]) -> bytes:
    """A tokenizer.json with more added tokens: the rest of it may be large, and stays as it is."""
    entries = b",\n    ".join(json.dumps(entry, ensure_ascii=False).encode() for entry in added)
    listed = find_table(data, ADDED_START, ADDED_TABLE)
    if listed is None:
        return data.replace(b"{", b'{\n  "added_tokens": [' + entries + b"],", 1)
    before = data[: listed.end() - 1].rstrip()
    comma = b"" if before.endswith(b"[") else b","
    return before + comma + b"\n    " + entries + b"\n  " + data[listed.end() - 1 :]


def compare_tokenizers(
    choice: TokenizerChoice, inputs: Sequence[Checkpoint], directory: bool
) -> Iterator[str]:
    """Which models number their tokens otherwise than the base, and what that means."""
    base, *models = inputs
    others = {(model.name, model.folder): None for model in models}
    if choice.folder:
        others[choice.name, choice.folder] = None
    for name, folder in () if choice.unites else others:
        try:
            differences = describe_differences(base.folder, folder, base.name, name)
        except DareError as error:
            differences = [str(error)]
        if not differences:
            continue
        words = [
            f"{name} has another tokenizer than {base.name}: {'; '.join(differences)}",
            "rows of the same number are merged, whatever tokens they stand for",
        ]
        if directory:
            whose = f"that of {choice.name}" if choice.folder else "the base's"
            words.append(f"the output gets {whose} (--tokenizer union keeps added tokens)")
        yield "; ".join(words)
