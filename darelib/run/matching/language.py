"""Models of the Hugging Face ecosystem: the module that a configuration describes, without weights;
its tokenizer, and examples as batches of tokens.

No code that comes with a checkpoint is run, and nothing is looked for on the Hub.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import transformers
from torch import nn

from darelib.core.text import LOG, DareError, count_of
from darelib.models.directories import CONFIG_FILE
from darelib.models.examples import Examples
from darelib.models.tensorfile import read_json
from darelib.run.matching.network import find_size
from darelib.run.matching.walk import Stream

# Of a batch, with its padding: on a CPU, and for each so many bytes of a GPU, which has to hold
# what a head gives for them, several times.
BATCH_TOKENS: Final = 4096
GPU_TOKENS: Final = 512
GPU_BYTES: Final = 8 << 30
FAILURES: Final = (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError)


@contextmanager
def without_values() -> Iterator[None]:
    """Parameters of modules that are made have no values, and take no memory; buffers do."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, given: nn.Parameter | None) -> None:
        if given is not None and not given.is_meta:  # else it is one that others have, too: tied
            given = nn.Parameter(given.to("meta"), given.requires_grad)
        register(module, name, given)

    setattr(nn.Module, "register_parameter", register_empty)  # noqa: B010
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def make_module(folder: Path, name: str) -> Any:
    """The module that config.json in a folder describes, of the class that it names."""
    if not (folder / CONFIG_FILE).is_file():
        raise DareError(
            f"to match {name!r} with examples, its {CONFIG_FILE} is needed, and there is none",
            "give the model's directory; in Python, dare_match takes any module",
        )
    table = read_json(folder / CONFIG_FILE, f"{name}/{CONFIG_FILE}")
    [architecture, *_] = table.get("architectures") or ["?"]
    kind: Any = getattr(transformers, str(architecture), None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not is_model:
        raise DareError(
            f"{name!r} is a {architecture}, which transformers does not have",
            "install a newer transformers, or merge without examples",
        )
    try:
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        with without_values(), torch.random.fork_rng(devices=[]):
            module: Any = kind(config)
    except Exception as error:  # whatever a wrong configuration leads to
        reason = " ".join(str(error).split())
        raise DareError(
            f"transformers cannot make the module of {name!r}: {reason}",
            "check its config.json, or merge without examples",
        ) from None
    return module.float()


class Tokens(NamedTuple):
    ids: list[int]
    answered: int  # from which on they are the answer


class ExampleReader:
    """Turns examples into tokens, by a model's own tokenizer and template, or else the base's."""

    def __init__(self, folders: Sequence[Path | None], name: str, rows: int) -> None:
        """folders: the model's and the base's. rows: tokens that the base has room for."""
        self.name = name
        self.rows = rows
        found = [self._open(folder) for folder in folders if folder]
        self.tokenizers = [each for each in found if each is not None]

    def _open(self, folder: Path) -> Any:
        if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
            return None
        with contextlib.suppress(*FAILURES):
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return None

    @property
    def tokenizer(self) -> Any:
        if not self.tokenizers:
            raise DareError(
                f"neither {self.name!r} nor the base has a tokenizer that transformers can read",
                "put one beside the model, or give examples as input_ids",
            )
        return self.tokenizers[0]

    def read(self, examples: Examples) -> list[Tokens]:
        tokens = []
        shortened = 0
        for k, entry in enumerate(examples.entries, 1):
            own = self._read_one(entry, f"example {k} of {examples.name!r}")
            if self.rows and max(own.ids, default=0) >= self.rows:
                raise DareError(
                    f"example {k} of {examples.name!r} has a token that the base has no row for",
                    "use the base's tokenizer, or leave the example out",
                )
            shortened += own.answered > 1 and len(own.ids) > examples.tokens
            cut = Tokens(own.ids[: examples.tokens], own.answered)
            if len(cut.ids) > 1:
                tokens.append(cut)
        if shortened:
            LOG.warning(
                f"the answers of {shortened:,} of {count_of(len(examples.entries), 'example')} of "
                f"{examples.name!r} are not whole: they end after {examples.tokens:,} tokens; a "
                "larger --max-tokens keeps more of them"
            )
        if not tokens:
            raise DareError(f"no example of {examples.name!r} has two tokens", "give longer ones")
        return tokens

    def _read_one(self, entry: Mapping[str, Any], where: str) -> Tokens:
        if "input_ids" in entry:
            return Tokens(entry["input_ids"], 1)
        if "text" in entry:
            return Tokens(self.tokenizer(entry["text"])["input_ids"], 1)
        if "messages" in entry:
            return self._read_messages(entry["messages"], where)
        prompt = self.tokenizer(entry["prompt"])["input_ids"]
        end = getattr(self.tokenizer, "eos_token_id", None)
        if prompt and prompt[-1] == end:
            prompt = prompt[:-1]
        answer = self.tokenizer(entry["completion"], add_special_tokens=False)["input_ids"]
        return Tokens([*prompt, *answer, *([] if end is None else [end])], len(prompt))

    def _read_messages(self, messages: list[dict[str, Any]], where: str) -> Tokens:
        """A conversation, by the first chat template that there is; the last turn is the answer."""
        written = [each for each in self.tokenizers if getattr(each, "chat_template", None)]
        if not written:
            raise DareError(
                f"{where} is a conversation, and neither {self.name!r} nor the base has a chat "
                "template",
                "give prompts and completions, or add a chat template to the model",
            )
        try:
            whole = self.tokenizer(
                written[0].apply_chat_template(messages, tokenize=False), add_special_tokens=False
            )["input_ids"]
            asked = self.tokenizer(
                written[0].apply_chat_template(
                    messages[:-1], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )["input_ids"]
        except Exception as error:  # whatever a template raises
            raise DareError(f"the chat template cannot write {where}: {error}", "fix it") from None
        pairs = zip(whole[:-1], asked, strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        return Tokens(whole, max(1, len(list(same))))


def count_batch(device: torch.device) -> int:
    """The tokens of a batch: more on a large GPU, which would wait for Python otherwise."""
    if device.type != "cuda":
        return BATCH_TOKENS
    return GPU_TOKENS * max(1, find_size(device) // GPU_BYTES)


def make_streams(tokens: Sequence[Tokens], most: int) -> list[Stream]:
    """Batches of examples of about the same length, so that few tokens are padding. most: tokens of
    a batch.
    """
    streams: list[Stream] = []
    batch: list[Tokens] = []
    for each in sorted(tokens, key=lambda each: -len(each.ids)):
        if batch and (len(batch) + 1) * len(batch[0].ids) > most:
            streams.append(make_stream(batch))
            batch = []
        batch.append(each)
    return [*streams, make_stream(batch)]


def make_stream(batch: Sequence[Tokens]) -> Stream:
    length = len(batch[0].ids)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    answers = torch.zeros(len(batch), length, dtype=torch.bool)
    for row, each in enumerate(batch):
        ids[row, : len(each.ids)] = torch.tensor(each.ids)
        mask[row, : len(each.ids)] = 1
        answers[row, each.answered : len(each.ids)] = True
    return Stream({"input_ids": ids, "attention_mask": mask}, mask.bool(), answers)
