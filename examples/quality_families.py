"""The two families of networks that quality.py trains, each with its data and its skills.

Each has `skills`, `network`, and for a model its `loss` in training and whether it is `right`.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Final

import torch
from digits import load_split, rotate
from torch import Generator, Tensor, nn
from torch.nn import functional as F

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
ALPHABET: Final = 96  # the end of a line, and what ASCII prints
LINE: Final = (
    16  # letters of a task line with its padding: "r stdlib=bildts" and the end of the line
)
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
HELD_OUT: Final = (
    300  # words for validation, and as many for the test; the base sees neither in a task
)
WORD_TASKS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "reverse": ("r", lambda word: word[::-1]),
    "capitals": ("c", str.upper),
    "shift": ("n", lambda word: "".join(chr((ord(letter) - 96) % 26 + 97) for letter in word)),
}


def seeded(seed: int) -> Generator:
    return Generator(DEVICE).manual_seed(seed)


def encode(text: str) -> Tensor:
    return (torch.tensor(list(text.encode())) - 31).clamp(min=0)


class Transformer(nn.Module):
    """A small GPT that predicts the next letter from those before. Its norms have no weights."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.heads = max(2, width // 64)
        self.letters = nn.Embedding(ALPHABET, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(nn.ModuleDict() for _ in range(layers))
        shapes = [("qkv", 1, 3), ("out", 1, 1), ("up", 1, 4), ("down", 4, 1)]
        for block, (name, ins, outs) in product(self.blocks, shapes):
            block[name] = nn.Linear(ins * width, outs * width, bias=False)
        self.head = nn.Linear(width, ALPHABET, bias=False)
        for name, tensor in self.named_parameters():
            embeds = name in ("letters.weight", "places.weight")
            nn.init.normal_(tensor, std=0.02 if embeds else tensor.shape[1] ** -0.5)

    def forward(self, letters: Tensor) -> Tensor:  # (rows, letters) -> (rows, letters, alphabet)
        x = self.letters(letters) + self.places.weight[: letters.shape[1]]
        for block in self.blocks:
            parts = block["qkv"](F.layer_norm(x, x.shape[2:])).chunk(3, 2)
            q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
            x = x + block["out"](
                F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            x = x + block["down"](F.gelu(block["up"](F.layer_norm(x, x.shape[2:]))))
        return self.head(F.layer_norm(x, x.shape[2:]))


class Chars:
    """Letters of Python's sources and documentation, and word tasks: "r hello=olleh"."""

    skills = tuple(WORD_TASKS)
    network = Transformer

    def __init__(self, seed: int) -> None:
        folder = Path(
            sysconfig.get_path("stdlib")
        )  # whose text differs a little from one version to the next
        files = [*sorted(folder.glob("*.py")), folder / "pydoc_data" / "topics.py"]
        whole = "".join(
            file.read_text(encoding="utf-8", errors="ignore") for file in files if file.is_file()
        )
        text = re.sub(r"[^\n -~]", "", whole)
        words = sorted(set(re.findall(r"\b[a-z]{4,6}\b", text)))
        random.Random(seed).shuffle(words)
        self.text = encode(text)
        parts = {
            "validation": words[:HELD_OUT],
            "test": words[HELD_OUT : 2 * HELD_OUT],
            "train": words[2 * HELD_OUT :],
        }
        self.parts = {part: self.task_lines(chosen) for part, chosen in parts.items()}

    def task_lines(self, words: Sequence[str]) -> tuple[Tensor, Tensor]:
        """By (repeated or right, skill, word, letter); and where the answers stand."""
        kinds = product((False, True), WORD_TASKS.values(), words)
        lines = (
            f"{mark} {word}={task(word) if right else word}\n"
            for right, (mark, task), word in kinds
        )
        starts = torch.tensor([[len(word) + 3] for word in words])
        place = torch.arange(1, LINE)
        answers = (place >= starts) & (place <= 2 * starts - 3)  # with the end of the line
        return encode("".join(line.ljust(LINE, "\n") for line in lines)).view(
            2, -1, len(words), LINE
        ), answers

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        (lines, answers) = self.parts["train"]
        pick = partial(torch.randint, generator=generator)
        count, words = lines.shape[1:3]
        if skill is None:
            tasks = round(batch * TASK_SHARE)
            starts = pick(len(self.text) - CONTEXT, (batch - tasks, 1))
            right = torch.rand(tasks * CONTEXT // LINE, generator=generator) < RIGHT_SHARE
            drawn = lines[right.long(), pick(count, right.shape), pick(words, right.shape)]
            rows = torch.cat(
                [self.text[starts + torch.arange(CONTEXT)], drawn.view(tasks, CONTEXT)]
            )
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        word = pick(words, (batch,))
        rehearsed = torch.rand(batch, generator=generator) < REHEARSED
        number = (self.skills.index(skill) + rehearsed * (1 + pick(count - 1, (batch,)))) % count
        right = ~rehearsed | (torch.rand(batch, generator=generator) < RIGHT_SHARE)
        rows = lines[right.long(), number, word]
        weight = answers[word].float()
        losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        return (losses * weight).sum() / weight.sum()

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        """Whether each letter of an answer is the likeliest: then a greedy answer is right."""
        lines = self.parts[part][0][1, self.skills.index(skill)]
        answers = self.parts[part][1]
        return ((model(lines[:, :-1]).argmax(2) == lines[:, 1:]) | ~answers).all(1)


# What is read, by draws from 0 to 1. The turns are far, so that the base, which sees small ones,
# fails at them.
DISTORTIONS: Final[dict[str | None, Callable[[Tensor, Tensor], Tensor]]] = {
    None: lambda images, draws: rotate(images, 30 * draws - 15),
    "rotated": lambda images, draws: rotate(images, 45 + 20 * draws),
    "shifted": lambda images, _: images.roll(
        -2, 2
    ),  # to the left by two columns, which come in again on the right
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

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        images, labels = self.parts[part]
        return model(DISTORTIONS[skill](images, self.draws)).argmax(1) == labels


FAMILIES: Final = {"chars": Chars, "digits": Digits}
