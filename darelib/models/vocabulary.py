"""Tokenizers: the token ids of each model, where they differ, and the union; chat templates."""

import filecmp
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from darelib.core.text import DareError, count_of, list_names
from darelib.models.tensorfile import file_sha256, open_regular

TOKENIZER_FILE: Final = "tokenizer.json"
# What tokenizers were stored in before: compared as a whole.
OLDER_FILES: Final = (
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)
# Bytes, and tokens: the largest known have 35 MB and 260,000.
MAX_TOKENIZER: Final = 1 << 26
MAX_TOKENS: Final = 1 << 22
UNITE_HINT: Final = "use --tokenizer base, or leave it out"
# The file is not parsed as a whole, which would take several hundred megabytes, mostly for merges:
# these are its tables of tokens. A vocabulary is a table of token ids, or a list in their order.
STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
ADDED_START: Final = re.compile(rb'"added_tokens"\s*+:\s*+(?=\[)')
ADDED_TABLE: Final = re.compile(rb'\[(?:[^]"]++|' + STRING + rb")*+\]")
VOCABULARY_START: Final = re.compile(rb'"vocab"\s*+:\s*+(?=[{[])')
VOCABULARY_TABLE: Final = re.compile(
    rb'\{(?:[^{}"]++|'
    + STRING
    + rb')*+\}|\[(?:\s*+,?\s*+\[(?:[^]["]++|'
    + STRING
    + rb")*+\])*+\s*+\]"
)


def find_table(
    data: bytes, start: re.Pattern[bytes], table: re.Pattern[bytes]
) -> re.Match[bytes] | None:
    """The first table that starts like that: to look further might take forever."""
    opening = start.search(data)
    return table.match(data, opening.end()) if opening else None


def digest_tokenizer(folder: Path | None) -> str | None:
    """What a recipe keeps of a tokenizer that decides which rows are merged."""
    path = Path(folder or "", TOKENIZER_FILE)
    return file_sha256(path) if folder and path.is_file() else None


@dataclass(frozen=True)
class Vocabulary:
    trained: Mapping[str, int]  # what its tokenizer was trained to have
    added: tuple[dict[str, Any], ...]  # what was added to it later, as tokenizer.json has it

    @cached_property
    def ids(self) -> dict[str, int]:
        return dict(self.trained) | {entry["content"]: entry["id"] for entry in self.added}

    @property
    def size(self) -> int:
        """How many rows an embedding must have for it."""
        return 1 + max(self.ids.values(), default=-1)


def read_vocabulary(folder: Path | None, name: str) -> Vocabulary | None:
    """The tokens of the model in a directory; None: it has no tokenizer.json. name: its own."""
    if folder is None:
        return None
    try:
        with open_regular(folder / TOKENIZER_FILE) as file:
            data = file.read(MAX_TOKENIZER + 1)
        if len(data) > MAX_TOKENIZER:
            raise ValueError("it is larger than any model's")
        table = find_table(data, VOCABULARY_START, VOCABULARY_TABLE)
        if not table:
            raise ValueError("it has no vocabulary")
        trained = json.loads(table[0])
        if isinstance(trained, list):
            trained = {entry[0]: token_id for token_id, entry in enumerate(trained)}
        listed = find_table(data, ADDED_START, ADDED_TABLE)
        vocabulary = Vocabulary(trained, tuple(json.loads(listed[0])) if listed else ())
        ids = vocabulary.ids.values()
        if not all(isinstance(token_id, int) and 0 <= token_id < MAX_TOKENS for token_id in ids):
            raise ValueError("its token ids are wrong")
        return vocabulary
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        words = error.strerror if isinstance(error, OSError) else str(error)
        raise DareError(
            f"{TOKENIZER_FILE} of {name!r} cannot be used: {words or 'something is missing'}",
            "download it again",
        ) from None


def have_same_tokenizer(base: Path | None, model: Path | None) -> bool:
    if base is None or model is None or base == model:
        return base == model
    mine = base / TOKENIZER_FILE
    theirs = model / TOKENIZER_FILE
    return mine.exists() and theirs.exists() and filecmp.cmp(mine, theirs, shallow=False)


def describe_differences(
    base: Path | None, model: Path | None, base_name: str, name: str
) -> list[str]:
    """How the tokens of a model directory differ from the base's, in words; none: they do not."""
    if base is None or model is None or have_same_tokenizer(base, model):
        return []
    if (base / TOKENIZER_FILE).exists() and (model / TOKENIZER_FILE).exists():
        mine = read_vocabulary(base, base_name)
        theirs = read_vocabulary(model, name)
        return list(_compare(mine.ids, theirs.ids)) if mine and theirs else []
    both = [file for file in OLDER_FILES if (base / file).exists() and (model / file).exists()]
    changed = [file for file in both if not filecmp.cmp(base / file, model / file, shallow=False)]
    return [f"its {list_names(changed)} differs"] if changed else []


def _compare(base: Mapping[str, int], model: Mapping[str, int]) -> Iterator[str]:
    differences = {
        "with other ids": [token for token, n in model.items() if base.get(token, n) != n],
        "that the base lacks": [token for token in model if token not in base],
        "fewer": [token for token in base if token not in model],
    }
    for words, tokens in differences.items():
        if tokens:
            yield f"{count_of(len(tokens), 'token')} {words} ({list_names(tokens)})"


@dataclass(frozen=True)
class Union:
    """The tokens of an output, each with one id: the base's and those that the models added, or
    those of one of them.
    """

    base: Vocabulary
    # None: a model without a tokenizer of its own has the base's.
    models: tuple[Vocabulary | None, ...]
    # The tokens that the base's tokenizer gets, with their new ids, in their order.
    added: tuple[dict[str, Any], ...] = ()
    owner: Vocabulary | None = None  # whose tokens these are; None: everybody's

    @property
    def size(self) -> int:
        return 1 + max(self.tokens, default=-1)

    @cached_property
    def tokens(self) -> dict[int, str]:
        added = {entry["content"]: entry["id"] for entry in self.added}
        ids = self.owner.ids if self.owner else self.base.ids | added
        return {token_id: token for token, token_id in ids.items()}

    @property
    def moves(self) -> bool:
        """Whether any model has other tokens, or other token ids."""
        known = (self.base, *filter(None, self.models))
        return self.owner is None or any(each.ids != self.owner.ids for each in known)


def check_gaps(vocabularies: Sequence[tuple[str, Vocabulary | None]]) -> None:
    for name, vocabulary in vocabularies:
        # Loaders number added tokens one after the other, whatever the file says.
        if vocabulary is not None and vocabulary.size != len(set(vocabulary.ids.values())):
            raise DareError(
                f"the token ids of {name} have gaps, so its rows are unknown",
                UNITE_HINT,
            )


def unite(base: Vocabulary, models: Sequence[tuple[str, Vocabulary | None]]) -> Union:
    """Append the tokens that models added to the base's, in the order of models and token ids."""
    known = set(base.ids)
    entries: list[dict[str, Any]] = []
    for name, model in models:
        if model is None:
            continue
        if model.trained != base.trained:
            raise DareError(
                f"{name!r} has another vocabulary than the base, not only other added tokens: "
                f"{'; '.join(_compare(base.trained, model.trained))}",
                UNITE_HINT,
            )
        for entry in sorted(model.added, key=lambda entry: int(entry["id"])):
            if entry["content"] not in known:
                known.add(entry["content"])
                entries.append({**entry, "id": base.size + len(entries)})
    return Union(base, tuple(model for _, model in models), tuple(entries))


# Chat templates by the names that mergekit gives them, written from what the formats are. Those of
# mergekit have white space that the formats lack (a line end after each turn of llama3, indented
# turns of exaone). Models have not seen it in training, so it is not here.
TEMPLATES: Final = {
    # Without system messages but for the last, which comes first.
    "alpaca": (
        "{% set titles = {'user': 'Instruction', 'user_context': 'Input', 'assistant': 'Response'}"
        " %}{% for message in messages if message.role == 'system' %}"
        "{% if loop.last %}{{ message.content | trim }}{{ '\n\n' }}{% endif %}{% endfor %}"
        "{% for message in messages %}{% if message.role in titles %}"
        "### {{ titles[message.role] }}:\n"
        "{{ message.content | trim }}{{ '' if loop.last else '\n\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
        "{{ '\n\n' }}### Response:\n{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # A conversation without a system message begins with an empty one.
    "exaone": (
        "{% for message in messages %}"
        "{{ '[|system|][|endofturn|]\n' if loop.first and message.role != 'system' }}"
        "[|{{ message.role }}|]{{ message.content }}"
        "{{ '\n' if message.role == 'user' else '[|endofturn|]\n' }}{% endfor %}"
        "{% if add_generation_prompt %}[|assistant|]{% endif %}"
    ),
    "llama3": (
        "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # The system message is a part of the first question; the question itself asks to speak.
    "mistral": (
        "{% set asked = 1 if messages[0].role == 'system' else 0 %}{{ bos_token }}"
        "{% for message in messages[asked:] %}"
        "{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
        "{{ raise_exception('users and assistants must take turns, a user first') }}{% endif %}"
        "{% if message.role == 'user' %} [INST] "
        "{{ messages[0].content ~ '\n\n' if asked and loop.first else '' }}"
        "{{ message.content }} [/INST]"
        "{% else %} {{ message.content ~ eos_token }}{% endif %}{% endfor %}"
    ),
}
