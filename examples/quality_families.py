"""The families of networks that quality.py trains, each with its data and its skills.

Each has `skills`, a `network`, for a model its `loss` in training, what is asked in a `test`,
examples to `show`, and what `elsewhere` no skill is about.
"""

from __future__ import annotations

import math
import random
import re
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from digits import load_split, rotate
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
ALPHABET: Final = 96  # the end of a line, and what ASCII prints
# Letters of a task line with its padding: "r stdlib=bildts" and the end of the line.
LINE: Final = 16
CONTEXT: Final = 4 * LINE
# The share of the base's rows that are task lines, and how many of those give the right answer: in
# the others the word is only repeated. So the base has seen the tasks, mostly done badly, and like
# a pretrained model it can do more than it does by itself.
TASK_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.4
# The share of a fine-tune's lines that are other tasks, done as the base has seen them. Without
# these an expert is asked only one thing, learns to do it whatever it is asked, and no merge can
# fix that.
REHEARSED: Final = 0.3
# Words for validation, and as many for the test; the base sees neither in a task.
HELD_OUT: Final = 300


def shift(word: str, by: int) -> str:
    return "".join(chr((ord(letter) - 97 + by) % 26 + 97) for letter in word)


# By skill: the mark of its lines, and what is asked for.
WORD_TASKS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "reverse": ("r", lambda word: word[::-1]),
    "capitals": ("c", str.upper),
    "shift": ("n", lambda word: shift(word, 1)),
    "shift back": ("b", lambda word: shift(word, -1)),
    "sort": ("s", lambda word: "".join(sorted(word))),
    "mirror": ("m", lambda word: "".join(chr(219 - ord(letter)) for letter in word)),
    "first last": ("f", lambda word: word[1:] + word[0]),
    "swap pairs": ("p", lambda word: re.sub("(.)(.)", r"\2\1", word)),
}
CONTEXT_TASKS: Final = {
    skill: ("x", WORD_TASKS[skill][1]) for skill in ("reverse", "capitals", "shift")
}
BLOCK: Final = 4096  # letters of text, of which every so many blocks are for no training
HELD_OUT_BLOCKS: Final = 16
TEXT_ROWS: Final = 128  # of these: what a merge adds to the loss is then known to 3 in 100
LN2: Final = math.log(2)
# What examples show: a skill as it should be; the same in others, which judge and match nothing;
# what the base knows; a skill without its answers.
SKILL = "skill"
HELD = "held out"
BASE_TEXT = "base text"
PROMPTS = "prompts"
JUDGES: Final = 64  # examples of each skill that judge


class Asked(NamedTuple):
    """What a model is called with, and what it should say: by rows and places."""

    inputs: Tensor
    wanted: Tensor
    counts: Tensor  # which places are answers

    def right(self, logits: Tensor) -> Tensor:
        """By row: whether all of its answer is the likeliest; a greedy answer is right, then."""
        likeliest = logits.argmax(-1).view_as(self.wanted)
        return ((likeliest == self.wanted) | ~self.counts).all(1)

    def loss(self, logits: Tensor) -> Tensor:
        """On the answers, in bits."""
        rows = logits.view(*self.wanted.shape, -1)[self.counts]
        return F.cross_entropy(rows.float(), self.wanted[self.counts]) / LN2


def join(parts: Sequence[Asked]) -> Asked:
    return Asked(*map(torch.cat, zip(*parts, strict=True)))


def choose_rows(count: int, rows: int, generator: Generator, kind: str) -> Tensor:
    """In random order, none more often than needed, and others to judge than for all else."""
    order = torch.randperm(rows, generator=generator)
    own = order[:JUDGES] if kind == HELD else order[JUDGES:]
    return own[torch.arange(count) % len(own)]


def seeded(seed: int) -> Generator:
    return Generator(DEVICE).manual_seed(seed)


def encode(text: str) -> Tensor:
    letters = torch.tensor(np.frombuffer(text.encode(), np.uint8))
    return (letters.long() - 31).clamp(min=0)


class Block(nn.Module):
    """Attention to what came before, and a layer for each letter. Its norms have no weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 64)
        shapes = [("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)]
        for name, ins, outs in shapes:
            self.add_module(name, nn.Linear(ins * width, outs * width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.layer_norm(x, x.shape[2:])).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[2:]))))


class Transformer(nn.Module):
    """A small GPT that predicts the next letter from those before."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(ALPHABET, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, ALPHABET, bias=False)
        for name, tensor in self.named_parameters():
            embeds = name in ("letters.weight", "places.weight")
            nn.init.normal_(tensor, std=0.02 if embeds else tensor.shape[1] ** -0.5)

    def forward(self, letters: Tensor) -> Tensor:  # (rows, letters) -> (rows, letters, alphabet)
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(F.layer_norm(x, x.shape[2:]))


class Adapters(nn.Module):
    """A transformer of which only products of thin matrices are trained, one for each matrix."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        own = dict(model.named_parameters())
        self.names = [name for name in own if name.startswith("blocks.")]
        shapes = [own[name].shape for name in self.names]
        self.left = nn.ParameterList(torch.zeros(rows, rank) for rows, _ in shapes)
        self.right = nn.ParameterList(torch.randn(rank, width) / rank for _, width in shapes)

    def changed(self) -> dict[str, Tensor]:
        products = (left @ right for left, right in zip(self.left, self.right, strict=True))
        own = dict(self.model.named_parameters())
        return {
            name: own[name] + product for name, product in zip(self.names, products, strict=True)
        }

    def forward(self, letters: Tensor) -> Tensor:
        found: Tensor = functional_call(self.model, self.changed(), (letters,))
        return found


class Chars:
    """Letters of Python's sources and documentation, and word tasks: "r hello=olleh"."""

    tasks: Mapping[str, tuple[str, Callable[[str], str]]] = WORD_TASKS
    network = Transformer
    rehearsed = REHEARSED

    def __init__(self, seed: int) -> None:
        # Whose text differs a little from one version to the next.
        folder = Path(sysconfig.get_path("stdlib"))
        files = [*sorted(folder.glob("*.py")), folder / "pydoc_data" / "topics.py"]
        whole = "".join(
            file.read_text(encoding="utf-8", errors="ignore") for file in files if file.is_file()
        )
        text = re.sub(r"[^\n -~]", "", whole)
        words = sorted(set(re.findall(r"\b[a-z]{4,6}\b", text)))
        random.Random(seed).shuffle(words)
        blocks = encode(text[: len(text) // BLOCK * BLOCK]).view(-1, BLOCK)
        is_held_out = torch.arange(len(blocks)) % HELD_OUT_BLOCKS == 0
        self.text = blocks[~is_held_out]
        rows = blocks[is_held_out].view(-1, CONTEXT)
        self.unseen = rows[:: max(1, len(rows) // TEXT_ROWS)]
        self.skills = tuple(self.tasks)
        parts = {
            "validation": words[:HELD_OUT],
            "test": words[HELD_OUT : 2 * HELD_OUT],
            "train": words[2 * HELD_OUT :],
        }
        self.parts = {
            part: [self.make_lines(skill, chosen) for skill in self.skills]
            for part, chosen in parts.items()
        }
        # One row after the other, by skill: what a step of training draws from.
        lines, answers = zip(*self.parts["train"], strict=True)
        self.lines = torch.cat(lines, 1)
        self.answers = torch.cat(answers)
        self.counts = torch.tensor([each.shape[1] for each in lines])
        self.firsts = self.counts.cumsum(0) - self.counts

    def choose_words(self, skill: str, words: Sequence[str]) -> Sequence[str]:
        """Those that a skill is about: all."""
        return words

    def make_lines(self, skill: str, words: Sequence[str]) -> tuple[Tensor, Tensor]:
        """By (repeated or right, word, letter); and where the answers stand."""
        mark, task = self.tasks[skill]
        chosen = self.choose_words(skill, words)
        lines = (
            f"{mark} {word}={task(word) if right else word}\n"
            for right, word in product((False, True), chosen)
        )
        starts = torch.tensor([[len(word) + 3] for word in chosen])
        place = torch.arange(1, LINE)
        answers = (place >= starts) & (place <= 2 * starts - 3)  # with the end of the line
        encoded = encode("".join(line.ljust(LINE, "\n") for line in lines))
        return encoded.view(2, len(chosen), LINE), answers

    def draw(self, skills: Tensor, right: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """Lines of training words, one for each skill by its number; and where answers stand."""
        drawn = torch.rand(len(skills), generator=generator)
        number = self.firsts[skills] + (drawn * self.counts[skills]).long()
        return self.lines[right.long(), number], self.answers[number]

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        pick = partial(torch.randint, generator=generator)
        count = len(self.skills)
        if skill is None:
            tasks = round(batch * TASK_SHARE)
            starts = pick(BLOCK - CONTEXT + 1, (batch - tasks, 1)) + torch.arange(CONTEXT)
            text = self.text[pick(len(self.text), (batch - tasks, 1)), starts]
            right = torch.rand(tasks * CONTEXT // LINE, generator=generator) < RIGHT_SHARE
            drawn, _ = self.draw(pick(count, right.shape), right, generator)
            rows = torch.cat([text, drawn.view(tasks, CONTEXT)])
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        rehearsed = torch.rand(batch, generator=generator) < self.rehearsed
        number = (self.skills.index(skill) + rehearsed * (1 + pick(count - 1, (batch,)))) % count
        right = ~rehearsed | (torch.rand(batch, generator=generator) < RIGHT_SHARE)
        rows, answers = self.draw(number, right, generator)
        weight = answers.float()
        losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        return (losses * weight).sum() / weight.sum()

    def show(self, skill: str, count: int, generator: Generator, kind: str) -> list[Asked]:
        """Examples, as batches: lines of a skill, or as much of something else."""
        if kind == BASE_TEXT:
            rows = count * LINE // CONTEXT
            starts = torch.randint(BLOCK - CONTEXT + 1, (rows, 1), generator=generator)
            chosen = choose_rows(rows, len(self.text), generator, kind)[:, None]
            text = self.text[chosen, starts + torch.arange(CONTEXT)]
            return [ask_all(text)]
        lines, answers = self.parts["train"][self.skills.index(skill)]
        chosen = choose_rows(count, lines.shape[1], generator, kind)
        shown = Asked(lines[1, chosen, :-1], lines[1, chosen, 1:], answers[chosen])
        if kind != PROMPTS:
            return [shown]
        ends = shown.counts.int().argmax(
            1
        )  # of prompts, which are as long as others in their batch
        batches = []
        for end in ends.unique().tolist():
            own = Asked(*(part[ends == end, : end + 1] for part in shown))
            batches.append(own._replace(counts=~own.counts))
        return batches

    def test(self, skill: str, part: str) -> Asked:
        lines, answers = self.parts[part][self.skills.index(skill)]
        return Asked(lines[1, :, :-1], lines[1, :, 1:], answers)

    def elsewhere(self) -> Asked:
        """Text that no training has seen."""
        return ask_all(self.unseen)


class Contexts(Chars):
    """The same, in each other's way: one mark asks for all, the word's first letter says for what,
    and a fine-tune sees no other words than its own.
    """

    tasks = CONTEXT_TASKS
    rehearsed = 0.0

    def choose_words(self, skill: str, words: Sequence[str]) -> Sequence[str]:
        """Those whose first letter has a number that divides so: neighbours differ."""
        number = self.skills.index(skill)
        return [word for word in words if ord(word[0]) % len(self.tasks) == number]


# What is read, by draws from 0 to 1. The turns are far, so that the base, which sees small ones,
# fails at them.
DISTORTIONS: Final[dict[str | None, Callable[[Tensor, Tensor], Tensor]]] = {
    None: lambda images, draws: rotate(images, 30 * draws - 15),
    "rotated": lambda images, draws: rotate(images, 45 + 20 * draws),
    # To the left by two columns, which come in again on the right.
    "shifted": lambda images, _: images.roll(-2, 2),
    "mirrored": lambda images, _: images.flip(2),
    "upside down": lambda images, _: images.flip(1),
    "transposed": lambda images, _: images.transpose(1, 2),
    "lowered": lambda images, _: images.roll(3, 1),
    "on its side": lambda images, _: images.rot90(1, (1, 2)),
    "rotated back": lambda images, draws: rotate(images, -45 - 20 * draws),
}
# Label smoothing keeps the base unsure of its answers, so that small changes can overrule them.
SMOOTHING: Final = 0.5
COPIES: Final = 3  # of each held-out image, at angles evenly apart


class Digits:
    """Scikit-learn's digits: the base reads them as they are, a skill is to read them distorted."""

    skills = tuple(filter(None, DISTORTIONS))

    def __init__(self, seed: int) -> None:
        self.train, held_out = load_split()
        half = len(held_out[1]) // 2
        order = torch.randperm(len(held_out[1]), generator=seeded(seed))
        parts = {"validation": order[:half], "test": order[half : 2 * half]}
        self.parts = {
            part: [torch.cat([tensor[cut]] * COPIES) for tensor in held_out]
            for part, cut in parts.items()
        }
        self.draws = ((torch.arange(COPIES) + 0.5) / COPIES).repeat_interleave(half)

    def network(self, width: int, layers: int) -> nn.Module:
        sizes = [64, *[width] * layers]
        hidden = [
            layer for ins, outs in pairwise(sizes) for layer in (nn.Linear(ins, outs), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        images, labels = self.train
        chosen = torch.randint(len(labels), (batch,), generator=generator)
        found = model(DISTORTIONS[skill](images[chosen], torch.rand(batch, generator=generator)))
        return F.cross_entropy(found, labels[chosen], label_smoothing=SMOOTHING)

    def show(self, skill: str, count: int, generator: Generator, kind: str) -> list[Asked]:
        images, labels = self.train
        chosen = choose_rows(count, len(labels), generator, kind)
        draws = torch.rand(count, generator=generator)
        distorted = DISTORTIONS[None if kind == BASE_TEXT else skill](images[chosen], draws)
        return [ask_digits(distorted, labels[chosen])]

    def test(self, skill: str, part: str) -> Asked:
        images, labels = self.parts[part]
        return ask_digits(DISTORTIONS[skill](images, self.draws), labels)

    def elsewhere(self) -> Asked:
        """Digits as they are."""
        return ask_digits(*self.parts["test"])


def ask_all(text: Tensor) -> Asked:
    """For each letter of a text after the first."""
    wanted = text[:, 1:]
    return Asked(text[:, :-1], wanted, torch.ones_like(wanted, dtype=torch.bool))


def ask_digits(images: Tensor, labels: Tensor) -> Asked:
    wanted = labels[:, None]
    return Asked(images, wanted, torch.ones_like(wanted, dtype=torch.bool))


FAMILIES: Final = {"chars": Chars, "lora": Chars, "contexts": Contexts, "digits": Digits}
