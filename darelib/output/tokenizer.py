"""The tokenizer and the chat template of a model directory: the base's, a model's, or a union."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from darelib.core.text import DareError
from darelib.models.checkpoint import Checkpoint
from darelib.models.hub import download
from darelib.models.inputs import explain_path
from darelib.models.jsonfile import read_json
from darelib.models.source import AUTO, BASE, UNION, Source, is_template, recorded_name
from darelib.models.tensorfile import explain_os_error, open_regular
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
TEMPLATE_PATTERNS: Final = ("chat_template*", "additional_chat_templates/*")
TOKENIZER_PATTERNS: Final = (
    "tokenizer*", "tokenization_*.py", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "tekken.json", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "bpe.codes", "normalizer.json", *TEMPLATE_PATTERNS,
)  # fmt: skip
MAX_TEMPLATE: Final = 1 << 20  # bytes
# Lists of special tokens, by the names that versions of transformers give them.
SPECIAL_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")

SideFiles = dict[str, bytes | Path]  # the content of each file, or what to copy


@dataclass(frozen=True)
class TokenizerChoice:
    """Where an output's tokenizer and chat template come from."""

    name: str = BASE  # base, union, or a model
    folder: Path | None = None  # of that model
    template: Any = (
        None  # None: the base's or, where it has none, that of the first model that has one
    )
    settings: Mapping[str, str] = field(default_factory=dict)  # what a recipe says of it
    paths: tuple[tuple[str, Path], ...] = ()  # what must not be written to, by the user's names

    @property
    def unites(self) -> bool:
        return self.name == UNION


def choose_tokenizer(tokenizer: Source | None, template: Source | None) -> TokenizerChoice:
    name, folder, found = (tokenizer.name if tokenizer else BASE), None, None
    sources = {"tokenizer": tokenizer, "chat_template": template}
    given = {
        key: download(source, TOKENIZER_PATTERNS)
        for key, source in sources.items()
        if source is not None and not source.is_word
    }
    if tokenizer and (name == AUTO or is_template(name)):
        raise DareError(f"there is no tokenizer {name!r}", "tokenizer wants base, union or a model")
    if "tokenizer" in given:
        folder = find_folder(given["tokenizer"])
        if folder is None or not tokenizer_files(folder):
            raise DareError(
                f"there is no tokenizer in {name!r}", "tokenizer wants base, union or a model"
            )
    if "chat_template" in given:
        found = read_template(given["chat_template"])
    settings = {key: recorded_name(source) for key, source in given.items()} | (
        {"tokenizer": UNION} if name == UNION else {}
    )
    if template is not None and (template.name == AUTO or is_template(template.name)):
        found = settings["chat_template"] = template.name
    return TokenizerChoice(
        name, folder, found, settings, tuple((s.name, s.path) for s in given.values())
    )


def read_template(source: Source) -> Any:
    """The chat template of a model, or in a file."""
    try:
        folder = find_folder(source)
        found = read_text(source.path) if folder is None else find_template(folder)
    except OSError as error:
        raise explain_os_error(error, source.name, "give a model or a text") from None
    if found is None:
        raise DareError(
            f"there is no chat template in {source.name!r}", "chat_template wants a model or a file"
        )
    return found


def find_folder(source: Source) -> Path | None:
    """The directory of a model; None: it is a file that is not a model's."""
    with explain_path(source):
        if source.path.is_dir():
            return source.path
        return source.path.parent if source.path.suffix in (".safetensors", ".json") else None


def tokenizer_files(folder: Path, patterns: Sequence[str] = TOKENIZER_PATTERNS) -> dict[str, Path]:
    paths = {
        path.relative_to(folder).as_posix(): path
        for pattern in patterns
        for path in folder.glob(pattern)
    }
    found = {name: path for name, path in sorted(paths.items()) if path.is_file()}
    for path in found.values():
        if not os.access(path, os.R_OK):  # to be known before the merge, not after it
            raise DareError(f"cannot read {str(path)!r}", "check its permissions")
    return found


def find_template(folder: Path | None) -> Any:
    """The chat template of a model: a text or, by name, several of them; None where there is none."""
    if folder is None:
        return None
    if (folder / TEMPLATE_FILE).exists():
        return read_text(folder / TEMPLATE_FILE)
    for name in ("chat_template.json", TOKENIZER_CONFIG):
        if (folder / name).exists():
            with suppress(DareError):  # what is not JSON has no template
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
    """Change the files of an output directory as chosen. Gives what to tell. rows: of its embedding, 0 if unknown."""
    base, *models = inputs
    vocabulary = None
    if choice.folder is not None:
        for name in tokenizer_files(base.folder) if base.folder else ():
            side.pop(name, None)
        side |= tokenizer_files(choice.folder)
        with suppress(DareError):
            vocabulary = read_vocabulary(choice.folder, choice.name)
        if vocabulary is not None and 0 < rows < vocabulary.size:
            raise DareError(
                f"the tokenizer of {choice.name!r} has tokens up to {vocabulary.size - 1:,}, and the merged model has "
                f"rows for {rows:,}",
                "--tokenizer union gives every token a row",
            )
    if choice.unites:
        add_tokens(side, base.added, [model.folder for model in models])
    template = choice.template
    if template == AUTO:
        template = most_common([find_template(model.folder) for model in inputs])
    if template is not None:
        set_template(side, template)
    elif find_template(choice.folder or base.folder) is None:
        for model in inputs:  # the base first, where the tokenizer is not its own
            if (template := find_template(model.folder)) is not None:
                set_template(side, template)
                whose = choice.name if choice.folder else "the base"
                return [
                    f"the chat template is that of {model.name}, since {whose} has none; --chat-template chooses"
                ]
    return []


def most_common(templates: Sequence[Any]) -> Any:
    """What most of those that there are have in common: of several, the first; None where there are none."""
    found = [template for template in templates if template is not None]
    return max(found, key=found.count, default=None)


def set_template(side: SideFiles, template: Any) -> None:
    for name in [
        name for name in side if name.startswith(("chat_template", "additional_chat_templates/"))
    ]:
        del side[name]
    if TOKENIZER_CONFIG not in side and isinstance(template, str):
        side[TEMPLATE_FILE] = template.encode()
        return
    side.setdefault(TOKENIZER_CONFIG, b"{}")  # which every version of transformers reads
    edit_json(side, TOKENIZER_CONFIG, lambda table: table.update(chat_template=template))


def edit_json(side: SideFiles, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
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
    path = side[TOKENIZER_FILE]
    data = path.read_bytes() if isinstance(path, Path) else path
    entries = b",\n    ".join(json.dumps(entry, ensure_ascii=False).encode() for entry in added)
    listed = find_table(data, ADDED_START, ADDED_TABLE)
    if entries and listed:
        before = data[: listed.end() - 1].rstrip()
        comma = b"" if before.endswith(b"[") else b","
        side[TOKENIZER_FILE] = (
            before + comma + b"\n    " + entries + b"\n  " + data[listed.end() - 1 :]
        )
    elif entries:
        side[TOKENIZER_FILE] = data.replace(b"{", b'{\n  "added_tokens": [' + entries + b"],", 1)
    known = [
        read_json(f / TOKENIZER_CONFIG, TOKENIZER_CONFIG)
        for f in folders
        if f and (f / TOKENIZER_CONFIG).exists()
    ]

    def add_special(table: dict[str, Any]) -> None:
        for key in SPECIAL_LISTS:
            lists = [entry[key] for entry in (table, *known) if isinstance(entry.get(key), list)]
            if lists:
                table[key] = list(
                    {str(of(token)): token for tokens in lists for token in tokens}.values()
                )

    def of(token: Any) -> Any:
        return token.get("content") if isinstance(token, Mapping) else token

    def add_to_config(table: dict[str, Any]) -> None:
        add_special(table)
        if isinstance(table.get("added_tokens_decoder"), dict):
            fields = (
                {key: value for key, value in entry.items() if key != "id"} for entry in added
            )
            table["added_tokens_decoder"] |= {
                str(e["id"]): f for e, f in zip(added, fields, strict=True)
            }

    edit_json(side, TOKENIZER_CONFIG, add_to_config)
    edit_json(side, "special_tokens_map.json", add_special)
    edit_json(
        side,
        "added_tokens.json",
        lambda table: table.update((e["content"], e["id"]) for e in added),
    )


def compare_tokenizers(
    choice: TokenizerChoice, inputs: Sequence[Checkpoint], directory: bool
) -> Iterator[str]:
    """Which models number their tokens otherwise than the base, and what that means for the output."""
    base, *models = inputs
    others = [(model.name, model.folder) for model in models]
    others += [(choice.name, choice.folder)] if choice.folder else []
    for name, folder in dict.fromkeys(others) if not choice.unites else ():
        try:
            differences = describe_differences(base.folder, folder, base.name, name)
        except DareError as error:
            differences = [str(error)]
        if not differences:
            continue
        words = [f"{name} has another tokenizer than {base.name}: {'; '.join(differences)}"]
        words.append("rows of the same number are merged, whatever tokens they stand for")
        if directory:
            whose = "the base's" if choice.folder is None else f"that of {choice.name}"
            words.append(f"the output gets {whose} (--tokenizer union keeps added tokens)")
        yield "; ".join(words)
