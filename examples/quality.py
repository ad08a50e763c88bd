# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Does DARE work? Train models from nothing, thin and merge them with this tool, score them, and compare.

    uv run examples/quality.py --quick
    uv run examples/quality.py --out results.json --plot picture.png
    uv run examples/quality.py --report results.json [--plot picture.png]

Two families, each at three widths, on data that every machine has: small transformers that read the standard library
of Python letter by letter and are fine-tuned for word tasks, and networks that read scikit-learn's digits. For each
family and width: a base, a fine-tune with small deltas for each of three skills, and one with large deltas.
What is tuned is tuned on validation data with masks of their own, and scored on test data; on a GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from digits import load_split, rotate
from quality_report import draw, report
from torch import Generator, Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

from dare import DareConfig, dare_merge

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
quiet = partial(DareConfig, verbose=False)
Recipe = tuple[int, float, int]  # of a training run: steps, rate for a width of 64, batch
# The widths of a family, and how it is trained: the base; the experts, with a low rate for small deltas, as the paper
# wants them; and one with a high rate and more steps, whose deltas are large on purpose.
Plan = tuple[tuple[int, ...], Recipe, Recipe, Recipe]


class Settings(NamedTuple):
    """What is tried, and with how many masks; by default as in the documents."""

    chars: Plan = ((64, 256, 768), (5000, 4e-3, 256), (1500, 3e-4, 128), (1500, 4e-3, 128))
    digits: Plan = ((64, 512, 2048), (200, 1e-3, 64), (600, 1e-3, 64), (1500, 1e-2, 64))
    rates: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # for one model
    shifts: tuple[float, ...] = (0.0, 0.1, 0.2, 0.4, 0.6)  # DAREx-q: q = (1 - p) ** (1 - shift)
    merge_rates: tuple[float, ...] = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)  # without 0, which is the rival
    lambdas: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # for DARE and its rivals alike
    validation_seeds: int = 2
    test_seeds: int = 5


QUICK: Final = Settings(
    chars=((32, 64, 96), (1200, 6e-3, 32), (400, 1.2e-3, 48), (500, 5e-3, 32)),
    digits=((32, 128, 512), (200, 1e-3, 64), (400, 1e-3, 64), (600, 1e-2, 64)),
    rates=(0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    shifts=(0.0, 0.2, 0.5),
    merge_rates=(0.5, 0.9),
    lambdas=(1.0, 1.5, 2.0),
    validation_seeds=1,
    test_seeds=3,
)
# Model i of a merge draws with seed + i. Seeds so far apart share no mask, and those of validation and test lie apart.
SEEDS: Final = {"validation": range(1000, 2000, 10), "test": range(2000, 3000, 10)}
ALPHABET: Final = 96  # the end of a line, and what ASCII prints
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


def encode(text: str) -> Tensor:
    return (torch.tensor(list(text.encode())) - 31).clamp(min=0)


class Transformer(nn.Module):
    """A small GPT that predicts the next letter from those before. Its norms have no weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(2, width // 64)
        self.letters, self.places = nn.Embedding(ALPHABET, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(nn.ModuleDict() for _ in range(2))
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
            x = x + block["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + block["down"](F.gelu(block["up"](F.layer_norm(x, x.shape[2:]))))
        return self.head(F.layer_norm(x, x.shape[2:]))


class Chars:
    """Letters of the standard library, and word tasks: "r hello=olleh"."""

    skills = tuple(WORD_TASKS)
    network = Transformer

    def __init__(self) -> None:
        files = [Path(sysconfig.get_path("stdlib"), f"{name}.py") for name in TEXTS.split()]
        text = re.sub(r"[^\n -~]", "", "".join(file.read_text(encoding="utf-8") for file in files if file.is_file()))
        words = sorted(set(re.findall(r"\b[a-z]{4,6}\b", text)))
        random.Random(0).shuffle(words)
        self.text = encode(text)
        parts = {"validation": words[:HELD_OUT], "test": words[HELD_OUT : 2 * HELD_OUT], "train": words[2 * HELD_OUT :]}
        self.parts = {part: self.task_lines(chosen) for part, chosen in parts.items()}

    def task_lines(self, words: Sequence[str]) -> tuple[Tensor, Tensor]:
        """By (repeated or right, skill, word, letter); and where, past the first letter, the answers stand."""
        kinds = product((False, True), WORD_TASKS.values(), words)
        lines = (f"{mark} {word}={task(word) if right else word}\n" for right, (mark, task), word in kinds)
        starts, place = torch.tensor([[len(word) + 3] for word in words]), torch.arange(1, LINE)
        answers = (place >= starts) & (place <= 2 * starts - 3)  # with the end of the line
        return encode("".join(line.ljust(LINE, "\n") for line in lines)).view(2, -1, len(words), LINE), answers

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        (lines, answers), pick = self.parts["train"], partial(torch.randint, generator=generator)
        count, words = lines.shape[1:3]
        if skill is None:
            tasks = round(batch * TASK_SHARE)
            starts = pick(len(self.text) - CONTEXT, (batch - tasks, 1))
            right = torch.rand(2 * tasks, generator=generator) < RIGHT_SHARE
            drawn = lines[right.long(), pick(count, right.shape), pick(words, right.shape)]
            rows = torch.cat([self.text[starts + torch.arange(CONTEXT)], drawn.view(tasks, CONTEXT)])
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        word, rehearsed = pick(words, (batch,)), torch.rand(batch, generator=generator) < REHEARSED
        number = (self.skills.index(skill) + rehearsed * (1 + pick(count - 1, (batch,)))) % count
        right = ~rehearsed | (torch.rand(batch, generator=generator) < RIGHT_SHARE)
        rows, weight = lines[right.long(), number, word], answers[word].float()
        losses = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none")
        return (losses * weight).sum() / weight.sum()

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        """Whether each letter of an answer is the likeliest after those before it: then a greedy answer is right."""
        lines, answers = self.parts[part][0][1, self.skills.index(skill)], self.parts[part][1]
        return ((model(lines[:, :-1]).argmax(2) == lines[:, 1:]) | ~answers).all(1)


# What is read, by draws from 0 to 1. The turns are far, so that the base, which sees small ones, fails at them.
DISTORTIONS: Final[dict[str | None, Callable[[Tensor, Tensor], Tensor]]] = {
    None: lambda images, draws: rotate(images, 30 * draws - 15),
    "rotated": lambda images, draws: rotate(images, 45 + 20 * draws),
    "shifted": lambda images, _: images.roll(-2, 2),  # to the left by two columns, which come in again on the right
    "mirrored": lambda images, _: images.flip(2),
}
# Label smoothing keeps the base unsure of its answers, so that small changes can overrule them.
SMOOTHING: Final = 0.5
COPIES: Final = 3  # of each held-out image, at angles evenly apart


class Digits:
    """Scikit-learn's digits: the base reads them as they are, the skills are to read them distorted."""

    skills = ("rotated", "shifted", "mirrored")

    def __init__(self) -> None:
        self.train, held_out = load_split()
        half = len(held_out[1]) // 2
        parts = {"validation": slice(half), "test": slice(half, 2 * half)}
        self.parts = {part: [torch.cat([tensor[cut]] * COPIES) for tensor in held_out] for part, cut in parts.items()}
        self.draws = ((torch.arange(COPIES) + 0.5) / COPIES).repeat_interleave(half)

    def network(self, width: int) -> nn.Module:
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(nn.Flatten(), *layers)

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        images, labels = self.train
        chosen = torch.randint(len(labels), (batch,), generator=generator)
        found = model(DISTORTIONS[skill](images[chosen], torch.rand(batch, generator=generator)))
        return F.cross_entropy(found, labels[chosen], label_smoothing=SMOOTHING)

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        images, labels = self.parts[part]
        return model(DISTORTIONS[skill](images, self.draws)).argmax(1) == labels


class Lab:
    """The models of one family at one width, and the scores of their merges."""

    def __init__(self, family: Chars | Digits, width: int, plan: Plan) -> None:
        self.family, self.width = family, width
        _, base, expert, large = plan
        torch.manual_seed(width)
        self.model = family.network(width)
        self.base, self.experts = self.fit(base, 1), {}
        self.skills = {skill: skill for skill in family.skills} | {"large": family.skills[0]}
        for seed, (name, skill) in enumerate(self.skills.items(), 2):
            self.model.load_state_dict(self.base)
            self.experts[name] = self.fit(large if name == "large" else expert, seed, skill)

    def fit(self, recipe: Recipe, seed: int, skill: str | None = None) -> dict[str, Tensor]:
        """Train on from the weights as they are, for one skill or, without one, as a base."""
        steps, rate, batch = recipe
        # The wider, the less each weight has to move: between the square root, common for whole models, and 1 / width.
        rate *= (64 / self.width) ** 0.75
        generator = Generator(DEVICE).manual_seed(seed)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, betas=(0.9, 0.99), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1, cycle_momentum=False)
        for _ in range(steps):
            optimizer.zero_grad()
            self.family.loss(self.model, skill, batch, generator).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    @torch.no_grad()
    def scores(self, names: Sequence[str], config: DareConfig, part: str, masks: int) -> list[list[float]]:
        """The shares of right answers: a row for each mask, one where nothing is dropped, with each expert's skill."""
        rows, experts, skills = [], [self.experts[name] for name in names], [self.skills[name] for name in names]
        for seed in SEEDS[part][: masks if config.drop_rate else 1]:
            self.model.load_state_dict(dare_merge(self.base, experts, replace(config, seed=seed)))
            rows.append([self.family.right(self.model, skill, part).float().mean().item() for skill in skills])
        return rows

    def tune(self, names: Sequence[str], configs: Sequence[DareConfig], settings: Settings) -> dict[str, Any]:
        """What is best on validation data, the first of equals, and its scores on test data."""
        tried = [self.scores(names, config, "validation", settings.validation_seeds) for config in configs]
        means = [fmean(map(fmean, rows)) for rows in tried]
        best = configs[means.index(max(means))]
        rows = [[round(x, 4) for x in row] for row in self.scores(names, best, "test", settings.test_seeds)]
        return {"drop_rate": best.drop_rate, "lambda": best.lambda_coeff, "scores": rows}


def single_arms(rate: float, settings: Settings) -> dict[str, list[DareConfig]]:
    """What is compared for one model at one drop rate: for each arm what its setting is chosen from."""
    divisors = [max(1 - rate, (1 - rate) ** (1 - shift)) for shift in settings.shifts] if rate else [None]
    return {
        "DARE": [quiet(drop_rate=rate)],
        "no rescale": [quiet(drop_rate=rate, rescale=False)],
        "magnitude": [quiet(drop_rate=0.0, method="ties", keep_ratio=1 - rate)],  # trim alone prunes each tensor
        "DAREx-q": [quiet(drop_rate=rate, rescale_q=divisor) for divisor in divisors],
    }


def merge_arms(count: int, settings: Settings) -> dict[str, list[DareConfig]]:
    """The same for several models."""

    def grid(method: str, rates: Sequence[float]) -> list[DareConfig]:
        return [quiet(drop_rate=p, method=method, lambda_coeff=x) for p, x in product(rates, settings.lambdas)]

    arms = {"average": [quiet(drop_rate=0.0)], "linear + DARE 0.9": grid("linear", [0.9])}
    for method in ("linear", "ties", "slerp") if count == 2 else ("linear", "ties"):
        arms |= {method: grid(method, [0.0]), f"{method} + DARE": grid(method, settings.merge_rates)}
    return arms


def measure(unit: str, settings: Settings) -> tuple[str, dict[str, Any]]:
    """Train and measure one family at one width."""
    # On one thread sums are taken in the same order every time; several units keep several cores busy.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device(DEVICE)
    family, width = unit.split("/")
    lab = Lab({"chars": Chars, "digits": Digits}[family](), int(width), getattr(settings, family))
    skills, single, merged = lab.family.skills, {name: {} for name in lab.experts}, {}
    for name, rate in product(lab.experts, settings.rates):
        for arm, configs in single_arms(rate, settings).items():
            scores = lab.tune([name], configs, settings)["scores"]
            single[name].setdefault(arm, []).append([score for [score] in scores])
    for chosen in [*combinations(skills, 2), skills]:
        arms = merge_arms(len(chosen), settings)
        merged[" + ".join(chosen)] = {arm: lab.tune(chosen, arms[arm], settings) for arm in arms}
    base = lab.tune(skills, [quiet(drop_rate=0.0, lambda_coeff=0.0)], settings)
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{os.cpu_count()} CPU cores"
    print(f"{unit} is measured", file=sys.stderr, flush=True)
    return unit, {
        "settings": settings._asdict(),
        "machine": f"{where}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "parameters": sum(tensor.numel() for tensor in lab.base.values()),
        "skills": skills,
        "models": {"base": {"scores": base["scores"][0]}},
        "single": single,
        "merged": merged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer masks: minutes on two cores")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the results here")
    parser.add_argument("--report", metavar="FILE", type=Path, help="train nothing: report on a results file")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the scores: a .png or .svg file")
    options = parser.parse_args()
    if options.report:
        results = json.loads(options.report.read_text(encoding="utf-8"))
    else:
        started, settings = time.perf_counter(), QUICK if options.quick else Settings()
        # The longest first, so that none is waited for at the end.
        units = [f"{name}/{width}" for name in ("chars", "digits") for width in getattr(settings, name)[0][::-1]]
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            found = dict(pool.map(partial(measure, settings=settings), units))
        results = {"seconds": round(time.perf_counter() - started, 1), "units": found}
    if options.out:
        options.out.write_text(json.dumps(results) + "\n", encoding="utf-8")
    print(report(results))
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
