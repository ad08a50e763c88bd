# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot,sweep]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""What should I use? Train models from nothing, merge them in every way that this tool has, and rank the ways.

    uv run examples/quality.py --quick
    uv run examples/quality.py --out results.json --plot picture.png
    uv run examples/quality.py --report results.json [--plot picture.png]

Two families on data that every machine has, in bf16: transformers that read the sources and the documentation of Python
letter by letter and are fine-tuned for word tasks, the largest of 100 million parameters, and networks that read
scikit-learn's digits. Each is trained several times over: a base, and a fine-tune for each of three skills. Each way to
merge a pair and all three gets the same number of trials of the tool's own search, on validation data and with masks of
their own; what it finds is scored on test data. A run that was stopped goes on where its results file ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple
from zlib import crc32

import torch
from digits import load_split, rotate
from quality_report import draw, report
from torch import Generator, Tensor, nn
from torch.nn import functional as F

sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # so that it also runs without an installation

from dare import DareConfig, dare_merge, dare_sweep

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
quiet = partial(DareConfig, verbose=False)
State = dict[str, Tensor]
Recipe = tuple[int, float, int]  # of a training run: steps, rate for a width of 64, batch


class Unit(NamedTuple):
    """A kind of network, and how it is trained; fine-tunes have a low rate, so that their deltas are small."""

    family: str
    width: int
    layers: int
    base: Recipe
    expert: Recipe
    trainings: int = 8  # one in each round: in a round all networks have the same held-out data and merge the same pair
    trials: int = 16  # of the search of each contender

    def __str__(self) -> str:
        return f"{self.family}/{self.width}"


class Settings(NamedTuple):
    """What is trained and how much is tried; by default as in the documents."""

    units: tuple[Unit, ...] = (  # the longest first, so that none is waited for at the end
        Unit("chars", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3),
        *(Unit("chars", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128)) for width in (768, 256, 64)),
        *(Unit("digits", width, 2, (200, 1e-3, 64), (600, 1e-3, 64)) for width in (2048, 512, 64)),
    )
    rescaled: bool = True  # whether other ways to rescale are ranked, too
    masks: int = 3  # with which a merge is tested
    confirm: int = 3  # masks with which the best of a search are scored again, before
    rates: tuple[float, ...] = (
        0.0,
        0.1,
        0.2,
        0.3,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        0.95,
        0.99,
    )  # for one model
    lambdas: tuple[float, ...] = (1.0, 1.5, 2.0)  # without a search


QUICK: Final = Settings(
    units=(
        Unit("chars", 64, 2, (600, 6e-3, 32), (300, 1.2e-3, 48), 2, 3),
        Unit("digits", 128, 2, (200, 1e-3, 64), (400, 1e-3, 64), 2, 3),
    ),
    rescaled=False,
    masks=1,
    confirm=0,
    rates=(0.0, 0.5, 0.8, 0.9, 0.99),
    lambdas=(1.0, 1.5),
)
# Trainings with seeds below were looked at when the recipes were chosen.
FIRST_SEED: Final = 100
# Model i of a merge draws with seed + i. Seeds so far apart share no mask, and those of search and test lie apart. A
# search also draws its first trials by its seed: it is another one for each merge, so that luck evens out.
SEARCH_SEEDS, TEST_SEEDS = range(10_000, 1_000_000, 100), range(2000, 3000, 10)
SCALE, RATE = {"low": 0.3, "high": 3.0}, {"low": 0.0, "high": 0.99}
DROPS: Final[dict[str, dict[str, Any]]] = {
    "DARE": {"drop_rate": RATE},
    "DAREx-q": {"drop_rate": RATE, "rescale_q": {"low": 0.01, "high": 1.0}},
    "magnitude": {"drop": "magnitude", "drop_rate": RATE},
    "breadcrumbs": {"drop": "breadcrumbs", "drop_rate": RATE, "gamma": {"low": 0.0, "high": 0.01}},
    "della": {"drop": "della", "drop_rate": {"low": 0.1, "high": 0.9}, "epsilon": 0.09},
}
RESCALED: Final = {
    "DARE": ("l1", "none"),
    "magnitude": ("l1",),
    "breadcrumbs": ("l1",),
    "della": ("l1", "none"),
}
# What is dropped and how the rest is rescaled, with what a search may choose beside lambda.
THINNINGS: Final[dict[str, dict[str, Any]]] = {
    "": {"drop_rate": 0.0},
    **{f" + {name}": space for name, space in DROPS.items()},
    **{
        f" + {name}, {how}": DROPS[name] | {"rescale": how}
        for name, hows in RESCALED.items()
        for how in hows
    },
}
METHODS: Final = {"linear": "task arithmetic", "ties": "ties", "slerp": "slerp", "ram": "ram"}
FIXED: Final[dict[str, dict[str, Any]]] = {  # what is dropped without a search
    "": {"drop_rate": 0.0}, " + DARE 0.5": {"drop_rate": 0.5}, " + DARE 0.9": {"drop_rate": 0.9},
    **{f" + {name} 0.5": {"drop": name, "drop_rate": 0.5} for name in ("magnitude", "breadcrumbs", "della")},
}  # fmt: skip
DRAWN: Final = ("random", "della")  # drops by masks
ARMS: Final[dict[str, dict[str, Any]]] = {  # of one model, by drop rate
    "DARE": {}, "no rescale": {"rescale": "none"}, "magnitude": {"drop": "magnitude"},
}  # fmt: skip
ALPHABET: Final = 96  # the end of a line, and what ASCII prints
LINE: Final = (
    16  # letters of a task line with its padding: "r stdlib=bildts" and the end of the line
)
CONTEXT: Final = 4 * LINE
# The share of the base's rows that are task lines, and how many of those give the right answer: in the others the word
# is only repeated. So the base has seen the tasks, mostly done badly, and like a pretrained model it can do more than
# it does by itself.
TASK_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.4
# The share of a fine-tune's lines that are other tasks, done as the base has seen them. Without these an expert is
# asked only one thing, learns to do it whatever it is asked, and no merge can fix that.
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
        self.letters, self.places = nn.Embedding(ALPHABET, width), nn.Embedding(CONTEXT, width)
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
        """By (repeated or right, skill, word, letter); and where, past the first letter, the answers stand."""
        kinds = product((False, True), WORD_TASKS.values(), words)
        lines = (
            f"{mark} {word}={task(word) if right else word}\n"
            for right, (mark, task), word in kinds
        )
        starts, place = torch.tensor([[len(word) + 3] for word in words]), torch.arange(1, LINE)
        answers = (place >= starts) & (place <= 2 * starts - 3)  # with the end of the line
        return encode("".join(line.ljust(LINE, "\n") for line in lines)).view(
            2, -1, len(words), LINE
        ), answers

    def loss(self, model: nn.Module, skill: str | None, batch: int, generator: Generator) -> Tensor:
        (lines, answers), pick = self.parts["train"], partial(torch.randint, generator=generator)
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
    "shifted": lambda images, _: images.roll(
        -2, 2
    ),  # to the left by two columns, which come in again on the right
    "mirrored": lambda images, _: images.flip(2),
}
# Label smoothing keeps the base unsure of its answers, so that small changes can overrule them.
SMOOTHING: Final = 0.5
COPIES: Final = 3  # of each held-out image, at angles evenly apart


class Digits:
    """Scikit-learn's digits: the base reads them as they are, the skills are to read them distorted."""

    skills = ("rotated", "shifted", "mirrored")

    def __init__(self, seed: int) -> None:
        self.train, held_out = load_split()
        half, order = (
            len(held_out[1]) // 2,
            torch.randperm(len(held_out[1]), generator=seeded(seed)),
        )
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


def lower_precision() -> torch.autocast:
    """A GPU computes in bf16."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


class Lab:
    """The models of one training, and the scores of their merges."""

    def __init__(self, unit: Unit, training: int) -> None:
        self.unit, self.training, seed = unit, training, FIRST_SEED + training
        self.family = {"chars": Chars, "digits": Digits}[unit.family](seed)
        torch.manual_seed(seed)
        self.model = self.family.network(unit.width, unit.layers)
        self.base, self.experts = self.fit(unit.base, 10 * seed), {}
        for number, skill in enumerate(self.family.skills, 1):
            self.model.load_state_dict(self.base)
            self.experts[skill] = self.fit(unit.expert, 10 * seed + number, skill)

    def fit(self, recipe: Recipe, seed: int, skill: str | None = None) -> State:
        """Train on from the weights as they are, for one skill or, without one, as a base. Gives them in bf16."""
        steps, rate, batch = recipe
        # The wider, the less each weight has to move: between the square root, common for whole models, and 1 / width.
        rate *= (64 / self.unit.width) ** 0.75
        generator = seeded(seed)
        optimizer = torch.optim.Adam(
            self.model.parameters(), lr=rate, betas=(0.9, 0.99), fused=True
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, steps, pct_start=0.1, cycle_momentum=False
        )
        for _ in range(steps):
            optimizer.zero_grad()
            with lower_precision():
                self.family.loss(self.model, skill, batch, generator).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return {name: tensor.detach().bfloat16() for name, tensor in self.model.named_parameters()}

    @torch.no_grad()
    def score(self, state: State, skills: Sequence[str], part: str) -> float:
        """The share of right answers, as a mean over skills."""
        self.model.load_state_dict(state)
        with lower_precision():
            right = [self.family.right(self.model, skill, part).float().mean() for skill in skills]
        return torch.stack(right).mean().item()

    def test(self, skills: Sequence[str], config: DareConfig, masks: int = 1) -> float:
        """The score of a merge of the experts for some skills, as a mean over masks where it draws any."""
        experts = [self.experts[skill] for skill in skills]
        seeds = TEST_SEEDS[10 * self.training :][
            : masks if config.drop_rate and config.drop in DRAWN else 1
        ]
        merges = (dare_merge(self.base, experts, replace(config, seed=seed)) for seed in seeds)
        return round(fmean(self.score(merged, skills, "test") for merged in merges), 4)

    def contend(
        self, skills: Sequence[str], space: dict[str, Any], settings: Settings
    ) -> dict[str, Any]:
        """What a search finds best on validation data, and its score on test data."""
        experts = [self.experts[skill] for skill in skills]
        seed = SEARCH_SEEDS[
            crc32(f"{self.unit}/{self.training}/{'+'.join(skills)}".encode()) % len(SEARCH_SEEDS)
        ]
        best = dare_sweep(
            self.base, experts, lambda state: self.score(state, skills, "validation"), space, quiet(seed=seed),
            trials=self.unit.trials, confirm=settings.confirm,
        ).best  # fmt: skip
        chosen = {
            name: round(value, 4) for name, value in best.params.items() if isinstance(value, float)
        }
        score = self.test(skills, best.config, settings.masks)
        return {"score": score, "validation": round(best.mean(0), 4), "chosen": chosen}


def list_ways(count: int, thinnings: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """All ways to merge so many models that go with some ways to drop."""
    found = {}
    for (method, name), (thinning, settings) in product(METHODS.items(), thinnings.items()):
        if method != "slerp" or (
            count == 2 and "drop" not in settings
        ):  # it is of two, with random drops only
            found[name + thinning] = {"method": method, **settings}
    return found


def list_contenders(count: int, rescaled: bool = True) -> dict[str, dict[str, Any]]:
    """What a search is made for, each with what it chooses from; or without other ways to rescale."""
    thinnings = {
        name: space for name, space in THINNINGS.items() if rescaled or "rescale" not in space
    }
    return {
        name: {"lambda_coeff": SCALE, **space}
        for name, space in list_ways(count, thinnings).items()
    }


def measure(unit: Unit, training: int, settings: Settings) -> dict[str, Any]:
    """Train once, and measure."""
    # On one thread sums are taken in the same order every time; several trainings keep several cores busy.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device(DEVICE)
    started = time.perf_counter()
    lab = Lab(unit, training)
    skills, seconds = lab.family.skills, {"training": time.perf_counter() - started}
    print(f"{unit}/{training} is trained, {seconds['training']:.0f} s", file=sys.stderr, flush=True)
    curves = {
        arm: [
            fmean(lab.test([skill], quiet(drop_rate=rate, **more)) for skill in skills)
            for rate in settings.rates
        ]
        for arm, more in ARMS.items()
    }
    merges: dict[str, Any] = {}
    for chosen in ([skills[training % 3], skills[(training + 1) % 3]], skills):
        spaces = list_contenders(len(chosen), settings.rescaled)
        merges[" + ".join(chosen)] = {name: lab.contend(chosen, spaces[name], settings) for name in spaces} | {
            f"{name}, lambda {scale:g}": {
                "score": lab.test(chosen, quiet(lambda_coeff=scale, **given), settings.masks), "chosen": {}
            }
            for (name, given), scale in product(list_ways(len(chosen), FIXED).items(), settings.lambdas)
        }  # fmt: skip
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    seconds["all"] = time.perf_counter() - started
    return {
        "settings": describe(unit, settings),
        "machine": f"{where}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, optuna {version('optuna')}",
        "parameters": sum(tensor.numel() for tensor in lab.base.values()),
        "seconds": {name: round(taken, 1) for name, taken in seconds.items()},
        "base": round(lab.score(lab.base, skills, "test"), 4),
        "curves": curves,
        "merges": merges,
    }


def describe(unit: Unit, settings: Settings) -> list[Any]:
    """What a measurement depends on, as a results file has it; not how many there are."""
    ways = [METHODS, THINNINGS, FIXED, ARMS, SCALE]
    data = [FIRST_SEED, TASK_SHARE, RIGHT_SHARE, REHEARSED, HELD_OUT, SMOOTHING, COPIES]
    digest = hashlib.sha256(json.dumps([*ways, *data]).encode()).hexdigest()
    found: list[Any] = json.loads(json.dumps([unit._replace(trainings=1), *settings[1:], digest]))
    return found


def run(settings: Settings, file: Path | None) -> dict[str, Any]:
    """Measure what a results file lacks, or has by other settings, and write it after each training."""
    every = {
        f"{unit}/{k}": (unit, k, settings) for unit in settings.units for k in range(unit.trainings)
    }
    stored = (
        json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {"units": {}}
    )
    known = {name: record for name, record in stored["units"].items() if name in every}
    known = {
        name: record
        for name, record in known.items()
        if record["settings"] == describe(every[name][0], settings)
    }
    results: dict[str, Any] = {"seconds": 0.0, "rates": settings.rates, "units": known}
    started, before = time.perf_counter(), stored["seconds"] if known else 0.0
    failures = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        names = {
            pool.submit(measure, *what): name for name, what in every.items() if name not in known
        }
        for done in as_completed(names):
            if error := done.exception():
                failures.append(f"{names[done]} failed: {error!r}")
                continue
            results["units"][names[done]] = done.result()
            results["seconds"] = round(before + time.perf_counter() - started, 1)
            print(
                f"{names[done]} is measured, {results['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            if file:
                new = file.with_suffix(".new")
                new.write_text(json.dumps(results) + "\n", encoding="utf-8")
                new.replace(file)
    if failures:
        sys.exit("\n".join(failures))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--quick", action="store_true", help="smaller models and fewer trials: minutes on two cores"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the results here, or go on from there"
    )
    parser.add_argument(
        "--report", metavar="FILE", type=Path, help="train nothing: report on a results file"
    )
    parser.add_argument(
        "--plot", metavar="FILE", type=Path, help="draw the ranking: a .png or .svg file"
    )
    options = parser.parse_args()
    if options.report:
        results = json.loads(options.report.read_text(encoding="utf-8"))
    else:
        results = run(QUICK if options.quick else Settings(), options.out)
    print(report(results))
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
