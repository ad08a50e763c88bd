"""The two families of models that quality.py trains: their data, networks, losses and scores."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Final

import torch
from digits import load_split, rotate
from torch import Tensor, nn
from torch.nn import functional as F


def pick(count: int, batch: int, generator: torch.Generator) -> Tensor:
    return torch.randint(count, (batch,), generator=generator, device=generator.device)


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm without weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 64)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (rows, letters, width)
        rows, letters, width = x.shape
        parts = self.qkv(F.layer_norm(x, (width,))).split(width, 2)
        q, k, v = (part.view(rows, letters, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(F.layer_norm(x, (width,)))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A small GPT: it predicts the next letter from those before."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        for name, tensor in self.named_parameters():
            embeds = name in ("letters.weight", "places.weight")
            nn.init.normal_(tensor, std=0.02 if embeds else tensor.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:  # (rows, letters) -> (rows, letters, alphabet)
        hidden = self.letters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(F.layer_norm(hidden, hidden.shape[-1:]))  # type: ignore[no-any-return]


ALPHABET: Final = "\n" + "".join(map(chr, range(32, 127)))
LINE: Final = 16  # letters of a task line with its padding: "r stdlib=bildts" and the end of the line
CONTEXT: Final = 2 * LINE
# Files of some size that every Python has; their text differs a little from one version to the next.
TEXTS: Final = (
    "argparse ast datetime difflib doctest inspect optparse pdb pickletools pydoc_data/topics subprocess tarfile"
)
# The share of the base's rows that are task lines, and how many of those give the right answer: in the others the word
# is only repeated. So the base has seen the tasks, mostly done badly, and like a pretrained model it can do more than
# it does by itself.
TASK_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.4
# The share of a fine-tune's lines that are other tasks, done as the base has seen them. Without these an expert is
# asked only one thing, learns to do it whatever it is asked, and no merge can fix that.
REHEARSED: Final = 0.3
HELD_OUT: Final = 250  # words for validation, and as many for the test; the base sees neither in a task

WORD_TASKS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "reverse": ("r", lambda word: word[::-1]),
    "capitals": ("c", str.upper),
    "shift": ("n", lambda word: "".join(chr((ord(letter) - 96) % 26 + 97) for letter in word)),
}


def read_library() -> str:
    files = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in TEXTS.split()]
    text = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
    return "".join(letter for letter in text if letter in ALPHABET)


def encode(lines: Sequence[str]) -> Tensor:
    places = {letter: place for place, letter in enumerate(ALPHABET)}
    return torch.tensor([[places[letter] for letter in line] for line in lines])


def task_lines(words: Sequence[str], skill: str, repeated: bool = False) -> tuple[Tensor, Tensor]:
    """The encoded lines, and where in them the answer and the end of the line stand."""
    mark, task = WORD_TASKS[skill]
    lines = [f"{mark} {word}={word if repeated else task(word)}".ljust(LINE, "\n") for word in words]
    starts = torch.tensor([[len(word) + 3] for word in words])
    place = torch.arange(LINE)
    return encode(lines), (place >= starts) & (place <= 2 * starts - 3)


class Chars:
    """Letters of the standard library, and word tasks: "r hello=olleh"."""

    skills: tuple[str, ...] = tuple(WORD_TASKS)

    def __init__(self, device: str) -> None:
        text = read_library()
        words = sorted(set(re.findall(r"\b[a-z]{4,6}\b", text)))
        random.Random(0).shuffle(words)
        parts = {"validation": words[:HELD_OUT], "test": words[HELD_OUT : 2 * HELD_OUT], "train": words[2 * HELD_OUT :]}
        self.text = encode([text])[0].to(device)
        self.lines = {
            (skill, part): tuple(tensor.to(device) for tensor in task_lines(found, skill))
            for skill, (part, found) in product(self.skills, parts.items())
        }
        right = torch.stack([self.lines[skill, "train"][0] for skill in self.skills])
        repeated = [task_lines(parts["train"], skill, repeated=True)[0].to(device) for skill in self.skills]
        self.mixed = torch.stack([torch.stack(repeated), right])  # (repeated or right, skill, word, letter)

    def network(self, width: int) -> nn.Module:
        return Transformer(width)

    def base_loss(self, model: nn.Module, batch: int, generator: torch.Generator) -> Tensor:
        tasks = round(batch * TASK_SHARE)
        starts = pick(len(self.text) - CONTEXT, batch - tasks, generator)
        prose = self.text[starts[:, None] + torch.arange(CONTEXT, device=starts.device)]
        count = tasks * CONTEXT // LINE
        right = (torch.rand(count, generator=generator, device=starts.device) < RIGHT_SHARE).long()
        skill, word = pick(len(self.skills), count, generator), pick(self.mixed.shape[2], count, generator)
        rows = torch.cat([prose, self.mixed[right, skill, word].view(tasks, CONTEXT)])
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def skill_loss(self, model: nn.Module, skill: str, batch: int, generator: torch.Generator) -> Tensor:
        word, count = pick(self.mixed.shape[2], batch, generator), len(self.skills)
        rehearsed = torch.rand(batch, generator=generator, device=word.device) < REHEARSED
        number = (self.skills.index(skill) + rehearsed * (1 + pick(count - 1, batch, generator))) % count
        right = ~rehearsed | (torch.rand(batch, generator=generator, device=word.device) < RIGHT_SHARE)
        rows, weight = self.mixed[right.long(), number, word], self.lines[skill, "train"][1][word, 1:].float()
        losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        return (losses * weight).sum() / weight.sum()

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        """Whether each letter of an answer is the likeliest after those before it: then a greedy answer is right."""
        lines, answers = self.lines[skill, part]
        return ((model(lines[:, :-1]).argmax(2) == lines[:, 1:]) | ~answers[:, 1:]).all(1)


# The angles of the rotated digits; the turns are far, so that the base fails at them.
DEGREES: Final = (45.0, 65.0)
# Label smoothing keeps the base unsure of its answers, so that small changes can overrule them.
SMOOTHING: Final = 0.5
COPIES: Final = 3  # of each held-out image, at angles evenly apart


class Digits:
    """Scikit-learn's digits: the base reads them as they are, the skills are to read them distorted."""

    skills: tuple[str, ...] = ("rotated", "shifted", "mirrored")

    def __init__(self, device: str) -> None:
        train, (images, labels) = load_split()
        self.train: tuple[Tensor, Tensor] = (train[0].to(device), train[1].to(device))
        half = len(labels) // 2
        draws = ((torch.arange(COPIES) + 0.5) / COPIES).repeat_interleave(half)
        self.parts = {
            (skill, part): (
                self.distort(skill, images[chosen].repeat(COPIES, 1, 1), draws).to(device),
                labels[chosen].repeat(COPIES).to(device),
            )
            for skill in self.skills
            for part, chosen in (("validation", slice(half)), ("test", slice(half, 2 * half)))
        }

    def distort(self, skill: str, images: Tensor, draws: Tensor) -> Tensor:
        if skill == "rotated":
            low, high = DEGREES
            return rotate(images, low + (high - low) * draws)
        if skill == "shifted":  # to the left by two columns, which come in again on the right
            return images.roll(-2, 2)
        return images.flip(2)

    def network(self, width: int) -> nn.Module:
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(nn.Flatten(), *layers)

    def base_loss(self, model: nn.Module, batch: int, generator: torch.Generator) -> Tensor:
        images, labels = self.train
        chosen = pick(len(labels), batch, generator)
        angles = 30 * torch.rand(batch, generator=generator, device=generator.device) - 15
        return F.cross_entropy(model(rotate(images[chosen], angles)), labels[chosen], label_smoothing=SMOOTHING)

    def skill_loss(self, model: nn.Module, skill: str, batch: int, generator: torch.Generator) -> Tensor:
        images, labels = self.train
        chosen = pick(len(labels), batch, generator)
        draws = torch.rand(batch, generator=generator, device=generator.device)
        distorted = self.distort(skill, images[chosen], draws)
        return F.cross_entropy(model(distorted), labels[chosen], label_smoothing=SMOOTHING)

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        images, labels = self.parts[skill, part]
        return model(images).argmax(1).eq(labels)


FAMILIES: Final[dict[str, Callable[[str], Chars | Digits]]] = {"chars": Chars, "digits": Digits}
