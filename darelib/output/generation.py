"""How an output begins and ends texts, and generates them: like the model whose chat template it
has, or else its tokenizer.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from darelib.config import is_count
from darelib.models.directories import CONFIG_FILE
from darelib.output.tokenizer import (
    GENERATION_FILE,
    SPECIAL_MAP,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    Owner,
    SideFiles,
    Voice,
    edit_json,
    token_text,
)

Table = dict[str, Any]
TOKEN_IDS: Final = tuple(f"{name}_id" for name in SPECIAL_TOKENS)
NO_SETTINGS: Final = ("transformers_version", "_from_model_config")
SHOWN: Final = 60  # characters of a value


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


def find_ids(model: Owner) -> Table:
    """The numbers of a model's special tokens: as its configuration states them or, where it has
    none, by its tokenizer.
    """
    if config := model.read_json(CONFIG_FILE):
        parts = [part for part in (config.get("text_config"), config) if isinstance(part, dict)]
        return {key: part[key] for part in parts for key in TOKEN_IDS if is_id(part.get(key))}
    known = model.vocabulary.numbers if model.vocabulary else {}
    numbers = {f"{key}_id": known.get(token_text(token)) for key, token in model.tokens.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_id(value: Any) -> bool:
    """Whether it is the number of a token, or a list of such."""
    return value != [] and all(is_count(number, 0) for number in as_list(value))


def translate_ids(table: Table, numbers: Mapping[int, int | None]) -> Table:
    """The numbers of special tokens as the output has them; what it lacks is left out."""
    found: Table = {}
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
