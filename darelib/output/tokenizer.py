"""The tokenizer and the chat template of a model directory: the base's, a model's, or a union; and
how it begins and ends texts: like the model whose chat template it has, or else its tokenizer.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from darelib.config import is_count
from darelib.core.text import ConfigError, DareError, list_names
from darelib.models.checkpoint import Checkpoint
from darelib.models.directories import CONFIG_FILE
from darelib.models.inputs import explain_path
from darelib.models.source import (
    AUTO,
    BASE,
    UNION,
    Source,
    check_links,
    download,
    recorded_name,
)
from darelib.models.tensorfile import open_regular, read_json
from darelib.models.vocabulary import (
    ADDED_START,
    ADDED_TABLE,
    TEMPLATES,
    TOKENIZER_FILE,
    Vocabulary,
    describe_differences,
    find_table,
    have_same_tokenizer,
    read_vocabulary,
)

TOKENIZER_CONFIG: Final = "tokenizer_config.json"
SPECIAL_MAP: Final = "special_tokens_map.json"
TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_TABLES: Final = ("chat_template.json", TOKENIZER_CONFIG)  # which hold one, or several
GENERATION_FILE: Final = "generation_config.json"
TOKENIZER_PATTERNS: Final = (
    "tokenizer*",
    "tokenization_*.py",
    SPECIAL_MAP,
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
# What a text begins and ends with, and what fills it up.
SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "pad_token")
TOKEN_IDS: Final = tuple(f"{name}_id" for name in SPECIAL_TOKENS)
# Of a generation_config.json.
NO_SETTINGS: Final = ("transformers_version", "_from_model_config")
SHOWN: Final = 60  # characters of a value
TOKENIZER_HINT: Final = "tokenizer wants base, union or a model"
TEMPLATE_HINT: Final = f"chat_template wants a model, a file or one of {', '.join(TEMPLATES)}"

SideFiles = dict[str, bytes | Path]  # the content of each file, or what to copy


@dataclass(frozen=True)
class Owner:
    """A model whose tokenizer, chat template or generation settings an output may get."""

    name: str
    folder: Path | None

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        with suppress(DareError):  # what cannot be read is not known
            return read_vocabulary(self.folder, self.name)
        return None

    @cached_property
    def special(self) -> set[str]:
        added = self.vocabulary.added if self.vocabulary else ()
        return {token_text(entry) for entry in added if entry.get("special")} - {""}

    @cached_property
    def tokens(self) -> dict[str, Any]:
        """The tokens that have a role, as its tokenizer's configuration has them."""
        table = self.read_json(TOKENIZER_CONFIG)
        return {key: table[key] for key in SPECIAL_TOKENS if token_text(table.get(key))}

    def read_json(self, name: str) -> dict[str, Any]:
        """What a JSON file of it holds: nothing, if there is none that can be read."""
        with suppress(DareError):
            return read_json(self.folder / name, name) if self.folder else {}
        return {}


def token_text(token: Any) -> str:
    """A token's text: it may be listed as a text, or with its settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


@dataclass(frozen=True)
class Voice:
    """How an output speaks: by whose tokenizer, and like whom."""

    tokenizer: Owner
    speaker: Owner  # whose chat template it has, or else its tokenizer
    models: Sequence[Owner]  # that it is made of, the base first
    added: Sequence[dict[str, Any]] = ()  # tokens that the tokenizer gets besides its own

    @cached_property
    def numbers(self) -> Mapping[str, int] | None:
        """Its tokens; None: they are not known."""
        known = self.tokenizer.vocabulary
        added = {entry["content"]: entry["id"] for entry in self.added}
        return known.ids | added if known else None

    def renumber(self, model: Owner) -> dict[int, int | None]:
        """A model's numbers that are others in the output, or (None) no token's."""
        if have_same_tokenizer(model.folder, self.tokenizer.folder):
            return {}
        if self.numbers is None or model.vocabulary is None:
            return {}
        theirs = model.vocabulary.ids
        return {number: self.numbers.get(token) for token, number in theirs.items()}

    def check_template(self, template: Any, whose: Owner | None) -> None:
        """Refuse a chat template whose special tokens the output would take to pieces.

        whose: None: any model may know which tokens are special.
        """
        text = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
        for owner in (whose,) if whose else self.models:
            if have_same_tokenizer(owner.folder, self.tokenizer.folder) or self.numbers is None:
                continue
            used = {token for token in owner.special if token in text}
            used |= {token_text(token) for key, token in owner.tokens.items() if key in text}
            if lacking := sorted(used - self.numbers.keys()):
                raise DareError(
                    f"the chat template of the output has special tokens of {owner.name!r} that "
                    f"its tokenizer lacks: {list_names(lacking)}",
                    f"--tokenizer union keeps them, --tokenizer {owner.name} takes that "
                    "tokenizer; or choose another --chat-template",
                )


@dataclass(frozen=True)
class TokenizerChoice:
    name: str = BASE  # base, union, or a model
    folder: Path | None = None  # of that model
    template: Any = None  # None: the base's or, where it has none, the first that a model has
    speaker: Owner | None = None  # the model whose template that is
    settings: Mapping[str, str] = field(default_factory=dict)  # what a recipe says of it
    paths: tuple[tuple[str, Path], ...] = ()  # what must not be written to, by the user's names

    @property
    def source(self) -> Source:
        return Source(self.name, self.folder or Path(self.name))


def choose_tokenizer(tokenizer: Source, template: Source | None) -> TokenizerChoice:
    name = tokenizer.name
    if tokenizer.is_word and name not in (BASE, UNION):
        raise DareError(f"there is no tokenizer {name!r}", TOKENIZER_HINT)
    if template and template.name == UNION:
        raise ConfigError("chat templates have no union", TEMPLATE_HINT)
    given = {"tokenizer": tokenizer, "chat_template": template}
    sources = {
        key: download(source, (*TOKENIZER_PATTERNS, CONFIG_FILE, GENERATION_FILE))
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
    speaker: Owner | None = None
    if source := sources.get("chat_template"):
        home = find_folder(source)
        speaker = Owner(source.name, home) if home else None
        text = find_template(home) if home else read_text(source.path)
        if text is None:
            raise DareError(f"there is no chat template in {source.name!r}", TEMPLATE_HINT)
    elif template and template.name != BASE:
        text = settings["chat_template"] = TEMPLATES.get(template.name, template.name)
    paths = tuple((source.name, source.path) for source in sources.values())
    return TokenizerChoice(name, folder, text, speaker, settings, paths)


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
    check_readable(folder, files.values())
    return files


def check_readable(folder: Path, paths: Iterable[Path]) -> None:
    """Refuse files that cannot be copied before the merge, not after it."""
    check_links(folder, paths)
    for path in paths:
        if not os.access(path, os.R_OK):
            raise DareError(f"cannot read {str(path)!r}", "check its permissions")


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
    try:
        with open_regular(path) as file:
            data = file.read(MAX_TEMPLATE + 1)
        if len(data) > MAX_TEMPLATE:
            raise ValueError(f"it is longer than {MAX_TEMPLATE:,} bytes")
        return data.decode()
    except (OSError, ValueError) as error:
        raise DareError(
            f"cannot read the chat template {str(path)!r}: {error}", "choose another, in UTF-8"
        ) from None


def place_tokenizer(
    side: SideFiles, choice: TokenizerChoice, inputs: Sequence[Checkpoint], rows: int
) -> tuple[Voice, list[str]]:
    """Change the files of an output directory as chosen. Gives how it speaks, and what to tell.

    rows: of its embedding, 0 if unknown.
    """
    base, *models = inputs
    owners = [Owner(model.name, model.folder) for model in inputs]
    tokenizer = owners[0]
    if choice.folder is not None:
        tokenizer = Owner(choice.name, choice.folder)
        for name in tokenizer_files(base.folder):
            side.pop(name, None)
        side |= tokenizer_files(choice.folder)
        size = tokenizer.vocabulary.size if tokenizer.vocabulary else 0
        if 0 < rows < size:
            raise DareError(
                f"the tokenizer of {choice.name!r} has tokens up to {size - 1:,}, "
                f"and the merged model has rows for {rows:,}",
                "--tokenizer union gives every token a row",
            )
    if choice.name == UNION:
        add_tokens(side, base.added, [model.folder for model in models])
    template, speaker = choose_template(choice, tokenizer, owners)
    voice = Voice(tokenizer, speaker or tokenizer, owners, base.added)
    if template is None:
        return voice, []
    voice.check_template(template, speaker)
    if choice.template is not None:
        set_template(side, template)
    elif speaker and speaker is not tokenizer:
        set_template(side, template)
        whose = choice.name if choice.folder else "the base"
        return voice, [
            f"the chat template is that of {speaker.name}, since {whose} has none; "
            "--chat-template chooses"
        ]
    return voice, []


def choose_template(
    choice: TokenizerChoice, tokenizer: Owner, owners: Sequence[Owner]
) -> tuple[Any, Owner | None]:
    """The chat template of an output, and whose it is: nobody's, if it was given as a text."""
    if choice.template not in (None, AUTO):
        return choice.template, choice.speaker
    if choice.template is None:
        owners = [tokenizer, *owners]  # the base before models, where the tokenizer is not its own
    templates = [find_template(owner.folder) for owner in owners]
    given = [each for each in templates if each is not None]
    if not given:
        return None, None
    # Of equally many, the first.
    chosen = max(given, key=given.count) if choice.template == AUTO else given[0]
    return chosen, owners[templates.index(chosen)]


def set_template(side: SideFiles, template: Any) -> None:
    for name in list(side):
        if name.startswith(("chat_template", "additional_chat_templates/")):
            del side[name]
    if TOKENIZER_CONFIG in side or not isinstance(template, str):
        side.setdefault(TOKENIZER_CONFIG, b"{}")  # which every version of transformers reads
        edit_json(side, TOKENIZER_CONFIG, lambda table: table.update(chat_template=template))
    else:
        side[TEMPLATE_FILE] = template.encode(errors="replace")  # half of a surrogate pair


def edit_json(side: SideFiles, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file, if there is one of that name."""
    content = side.get(name)
    if content is not None:
        table = json.loads(content) if isinstance(content, bytes) else read_json(content, name)
        edit(table)
        text = json.dumps(table, indent=2, ensure_ascii=False)
        # Half of a surrogate pair is no text: check_tables refuses it.
        side[name] = text.encode(errors="surrogatepass") + b"\n"


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
                tokens = {token_text(token): token for token in itertools.chain(*lists)}
                table[key] = list(tokens.values())
        decoder = table.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            for entry in added:
                decoder[str(entry["id"])] = {key: entry[key] for key in entry if key != "id"}

    edit_json(side, TOKENIZER_CONFIG, add_to_lists)
    edit_json(side, SPECIAL_MAP, add_to_lists)
    numbers = {entry["content"]: entry["id"] for entry in added}
    edit_json(side, "added_tokens.json", lambda table: table.update(numbers))


def insert_tokens(data: bytes, added: Sequence[dict[str, Any]]) -> bytes:
    """A tokenizer.json with more added tokens: the rest of it may be large, and stays as it is."""
    texts = [json.dumps(entry, ensure_ascii=False) for entry in added]
    entries = ",\n    ".join(texts).encode(errors="surrogatepass")
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
    having = [model.name for model in models if tokenizer_files(model.folder)]
    if directory and having and not choice.folder and not tokenizer_files(base.folder):
        yield (
            f"{base.name} has no tokenizer, so the output has none: --tokenizer {having[0]} takes "
            "that one's"
        )
    parts = [part for model in (base, *models) for part in model.parts]
    others = {(model.name, model.folder): None for model in parts if model.folder != base.folder}
    if choice.folder:
        others[choice.name, choice.folder] = None
    for name, folder in () if base.heights[1] else others:
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


# --- end tokens and generation settings ----------------------------------------------------------


def place_generation(side: SideFiles, voice: Voice) -> dict[str, tuple[Any, Any]]:
    """Let an output directory speak like its speaker. Gives old and new values in config.json."""
    base = voice.models[0]
    speaker = voice.speaker
    if speaker == base or speaker.folder is None:
        return {}
    tokens = {
        key: token
        for key, token in speaker.tokens.items()
        if token_text(token) != token_text(voice.tokenizer.tokens.get(key))
        and (voice.numbers is None or token_text(token) in voice.numbers)
    }
    for name in (TOKENIZER_CONFIG, SPECIAL_MAP) if tokens else ():
        edit_json(side, name, lambda table: table.update(tokens))
    ids = translate_ids(find_ids(speaker), voice.renumber(speaker))
    own = speaker.read_json(GENERATION_FILE)
    wanted = ids
    if own:
        side[GENERATION_FILE] = speaker.folder / GENERATION_FILE
        wanted = translate_ids(own, voice.renumber(speaker))
    stated = own or base.read_json(GENERATION_FILE)
    if any(stated.get(key) != number for key, number in wanted.items()):
        edit_json(side, GENERATION_FILE, lambda table: table.update(wanted))
    before = find_ids(base)
    # What the base does not state is stated once, and not in each part of a model.
    return {key: (before.get(key, ()), ids[key]) for key in ids if ids[key] != before.get(key)}


def find_ids(model: Owner) -> dict[str, Any]:
    """The numbers of a model's special tokens: as its configuration states them or, where it has
    none, by its tokenizer.
    """
    if config := model.read_json(CONFIG_FILE):
        parts = [part for part in (config.get("text_config"), config) if isinstance(part, dict)]
        return {key: part[key] for part in parts for key in TOKEN_IDS if is_id(part.get(key))}
    known = model.vocabulary.ids if model.vocabulary else {}
    numbers = {f"{key}_id": known.get(token_text(token)) for key, token in model.tokens.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_id(value: Any) -> bool:
    """Whether it is the number of a token, or a list of such."""
    return value != [] and all(is_count(number, 0) for number in as_list(value))


def translate_ids(table: dict[str, Any], numbers: Mapping[int, int | None]) -> dict[str, Any]:
    """The numbers of special tokens as the output has them; what it lacks is left out."""
    found: dict[str, Any] = {}
    for key in TOKEN_IDS:
        value = table.get(key)
        mine = [numbers.get(number, number) for number in as_list(value)] if is_id(value) else []
        if kept := [number for number in mine if number is not None]:
            found[key] = kept if isinstance(value, list) else kept[0]
    return found


def compare_generation(
    side: SideFiles, voice: Voice, changes: Mapping[str, tuple[Any, Any]]
) -> Iterator[str]:
    """Which models begin and end texts, or generate them, otherwise than the output.

    changes: of its config.json.
    """
    output = find_ids(voice.models[0]) | {key: new for key, (_, new) in changes.items()}
    edit_json({**side}, GENERATION_FILE, output.update)
    for model in voice.models:
        own = model.read_json(GENERATION_FILE)
        ids = translate_ids(find_ids(model) | own, voice.renumber(model))
        others = {key: own[key] for key in own if key not in (*TOKEN_IDS, *NO_SETTINGS)}
        words = [
            f"{key} is {str(value)[:SHOWN]}, not {str(output.get(key))[:SHOWN]}"
            for key, value in (ids | others).items()
            if as_list(value) != as_list(output.get(key))
        ]
        if words:
            yield (
                f"{model.name} ends or generates texts otherwise than the output, which does as "
                f"{voice.speaker.name}: {', '.join(words)}; --chat-template and --tokenizer choose"
            )
