"""Does DARE work? Train models from nothing, thin and merge them with this tool, score them, and say what came out.

    uv run python examples/quality.py --quick
    uv run python examples/quality.py --out results.json --plot picture.png [--device cuda] [--jobs 6]
    uv run python examples/quality.py --report results.json [--plot picture.png]

Two families, each at three widths, on data that every machine has: small transformers that read the standard library
of Python letter by letter and are fine-tuned for word tasks, and networks that read scikit-learn's digits. For each
family and width: a base, a fine-tune with small deltas for each of three skills, and one with large deltas.
What is tuned is tuned on validation data with masks of their own, and scored on test data. The tables and the verdicts
are made from the scores alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

from sweep import COLOURS, DASHES, MARKS, chance, load_matplotlib, place_on_axis

import dare
from dare import ConfigError, DareConfig, DareError, dare_merge

Weights = dict[str, Tensor]

# ---------------------------------------------------------------------------------------------------------------------
# The settings
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How one training run goes. The rate is for a width of 64; see train for other widths."""

    steps: int
    rate: float
    batch: int


@dataclass(frozen=True)
class Plan:
    """The widths of a family and how its models are trained."""

    widths: tuple[int, ...]
    base: Recipe
    expert: Recipe  # a low rate: small deltas, as the paper wants them
    large: Recipe  # a high rate and more steps: deltas that are large on purpose


@dataclass(frozen=True)
class Settings:
    """What is tried, and with how many masks."""

    plans: dict[str, Plan]
    rates: tuple[float, ...]  # of dropping, for one model
    shifts: tuple[float, ...]  # DAREx-q: q = (1 - p) ** (1 - shift), from 1 - p (shift 0) towards 1
    merge_rates: tuple[float, ...]  # of dropping, for several models; without 0, which is the rival
    lambdas: tuple[float, ...]  # for DARE and its rivals alike
    validation_seeds: int
    test_seeds: int


RATES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
FULL: Final = Settings(
    plans={
        "chars": Plan((64, 256, 768), Recipe(5000, 4e-3, 256), Recipe(1500, 3e-4, 128), Recipe(1500, 4e-3, 128)),
        "digits": Plan((64, 512, 2048), Recipe(200, 1e-3, 64), Recipe(600, 1e-3, 64), Recipe(1500, 1e-2, 64)),
    },
    rates=RATES,
    shifts=(0.0, 0.1, 0.2, 0.4, 0.6),
    merge_rates=(0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    lambdas=(0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
    validation_seeds=2,
    test_seeds=5,
)
QUICK: Final = Settings(
    plans={
        "chars": Plan((32, 64, 96), Recipe(1200, 6e-3, 32), Recipe(400, 1.2e-3, 48), Recipe(500, 5e-3, 32)),
        "digits": Plan((32, 128, 512), Recipe(200, 1e-3, 64), Recipe(400, 1e-3, 64), Recipe(600, 1e-2, 64)),
    },
    rates=(0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    shifts=(0.0, 0.2, 0.5),
    merge_rates=(0.5, 0.9),
    lambdas=(1.0, 1.5, 2.0),
    validation_seeds=1,
    test_seeds=3,
)

# Model i of a merge draws with seed + i. Seeds so far apart share no mask, and those of validation and test lie apart.
VALIDATION_SEED: Final = 1000
TEST_SEED: Final = 2000
SEED_STEP: Final = 10

# ---------------------------------------------------------------------------------------------------------------------
# Two families of models
# ---------------------------------------------------------------------------------------------------------------------


class Family(Protocol):
    """The data of a family on a device, its network, what it is trained for, and which of its answers are right."""

    skills: tuple[str, ...]

    def network(self, width: int) -> nn.Module: ...

    def base_loss(self, model: nn.Module, batch: int, generator: torch.Generator) -> Tensor: ...

    def skill_loss(self, model: nn.Module, skill: str, batch: int, generator: torch.Generator) -> Tensor: ...

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor: ...


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
        changed: Tensor = x + self.down(F.gelu(self.up(F.layer_norm(x, (width,)))))
        return changed


class Transformer(nn.Module):
    """A small GPT: it tells the next letter from those before."""

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
        scores: Tensor = self.head(F.layer_norm(hidden, hidden.shape[-1:]))
        return scores


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
# asked only one thing, learns to do it whatever it is asked, and no merge can mend that.
REHEARSED: Final = 0.3
HELD_OUT: Final = 250  # words for validation, and as many for the test; the base sees neither in a task

WORD_TASKS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "reverse": ("r", lambda word: word[::-1]),
    "capitals": ("c", str.upper),
    "shift": ("n", lambda word: "".join(chr((ord(letter) - 96) % 26 + 97) for letter in word)),
}


def standard_library() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in TEXTS.split()]
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
        text = standard_library()
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
        """Where every letter of the answer is the likeliest after those before it: just then is a greedy answer right.

        So that one pass over the right line shows what letter after letter would give.
        """
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
        shared = importlib.import_module("digits")  # only here: it needs scikit-learn
        self.rotate: Callable[[Tensor, Tensor], Tensor] = shared.rotate
        train, (images, labels) = shared.load_split()
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
            return self.rotate(images, low + (high - low) * draws)
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
        return F.cross_entropy(model(self.rotate(images[chosen], angles)), labels[chosen], label_smoothing=SMOOTHING)

    def skill_loss(self, model: nn.Module, skill: str, batch: int, generator: torch.Generator) -> Tensor:
        images, labels = self.train
        chosen = pick(len(labels), batch, generator)
        draws = torch.rand(batch, generator=generator, device=generator.device)
        return F.cross_entropy(
            model(self.distort(skill, images[chosen], draws)), labels[chosen], label_smoothing=SMOOTHING
        )

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        images, labels = self.parts[skill, part]
        answers = model(images).argmax(1)
        return answers.eq(labels)


FAMILIES: Final[dict[str, Callable[[str], Family]]] = {"chars": Chars, "digits": Digits}

# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def train(
    model: nn.Module, loss_of: Callable[[torch.Generator], Tensor], recipe: Recipe, rate: float, seed: int
) -> None:
    """Adam, with a rate that rises for a tenth of the steps and then falls to 0."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, recipe.steps, pct_start=0.1, cycle_momentum=False)
    for _ in range(recipe.steps):
        loss = loss_of(generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


class Lab:
    """The models of one family at one width, and their scores."""

    def __init__(self, name: str, width: int, plan: Plan, device: str) -> None:
        self.width, self.plan, self.device = width, plan, device
        self.family = FAMILIES[name](device)
        torch.manual_seed(width)
        self.model = self.family.network(width).to(device)

    def fit(self, recipe: Recipe, seed: int, skill: str | None = None) -> Weights:
        """Train on from the weights as they are, for one skill or, without one, as a base."""
        # The wider, the less each weight has to move: between the square root, common for whole models, and 1 / width.
        rate = recipe.rate * (64 / self.width) ** 0.75

        def loss(generator: torch.Generator) -> Tensor:
            if skill is None:
                return self.family.base_loss(self.model, recipe.batch, generator)
            return self.family.skill_loss(self.model, skill, recipe.batch, generator)

        train(self.model, loss, recipe, rate, seed)
        return {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}

    def make(self) -> tuple[Weights, dict[str, Weights]]:
        """The base, and the fine-tunes by their skills; "large" has the first skill, too."""
        base = self.fit(self.plan.base, seed=1)
        recipes = [(skill, skill, self.plan.expert) for skill in self.family.skills]
        experts = {}
        for seed, (name, skill, recipe) in enumerate([*recipes, ("large", self.family.skills[0], self.plan.large)], 2):
            self.model.load_state_dict(base)
            experts[name] = self.fit(recipe, seed, skill)
        return base, experts

    @torch.no_grad()
    def score(self, weights: Weights, skill: str, part: str) -> float:
        """The share of right answers on the validation or the test part of a skill's data."""
        found = self.family.right(lambda x: torch.func.functional_call(self.model, weights, (x,)), skill, part)
        return found.float().mean().item()


def deltas(base: Weights, expert: Weights) -> dict[str, float]:
    """How large a fine-tune's changes are, also next to the base's own weights."""
    change = torch.cat([(expert[name] - base[name]).flatten() for name in base])
    whole = torch.cat([tensor.flatten() for tensor in base.values()])
    place = math.ceil(0.99 * len(change))
    return {
        "mean": change.abs().mean().item(),
        "p99": change.abs().kthvalue(place).values.item(),
        "relative": (change.norm() / whole.norm()).item(),
    }


# ---------------------------------------------------------------------------------------------------------------------
# The experiment
# ---------------------------------------------------------------------------------------------------------------------

SINGLE_ARMS: Final = ("DARE", "no rescale", "magnitude", "DAREx-q")
TRIM: Final = 0.2  # what TIES-Merging keeps, by its paper


def seeds(first: int, count: int) -> range:
    return range(first, first + SEED_STEP * count, SEED_STEP)


@dataclass(frozen=True)
class Trial:
    """Models to merge and the skills to score the merge by."""

    lab: Lab
    base: Weights
    experts: Sequence[Weights]
    skills: tuple[str, ...]

    def scores(self, config: DareConfig, part: str, first: int, count: int) -> list[list[float]]:
        """A row for each mask, with a score for each skill; one row where nothing is dropped."""
        rows = []
        for seed in seeds(first, count if config.drop_rate else 1):
            merged = dare_merge(self.base, self.experts, dataclasses.replace(config, seed=seed))
            rows.append([self.lab.score(merged, skill, part) for skill in self.skills])
        return rows

    def chosen(self, configs: Sequence[DareConfig], count: int) -> DareConfig:
        """The configuration with the best mean on validation data, with validation masks; the first of equals."""
        if len(configs) == 1:
            return configs[0]
        return max(configs, key=lambda config: mean_of(self.scores(config, "validation", VALIDATION_SEED, count)))

    def tested(self, config: DareConfig, count: int) -> list[list[float]]:
        return self.scores(config, "test", TEST_SEED, count)


def mean_of(rows: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(statistics.fmean(row) for row in rows)


def rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def single_configs(arm: str, rate: float, settings: Settings) -> list[DareConfig]:
    """What an arm may choose from at one drop rate."""
    if arm == "magnitude":  # trim alone, of one model, is magnitude pruning of each tensor
        return [DareConfig(drop_rate=0.0, method="ties", keep_ratio=1 - rate, verbose=False)]
    if arm == "no rescale":
        return [DareConfig(drop_rate=rate, rescale=False, verbose=False)]
    if arm == "DARE" or rate == 0:
        return [DareConfig(drop_rate=rate, verbose=False)]
    divisors = [max(1 - rate, (1 - rate) ** (1 - shift)) for shift in settings.shifts]
    return [DareConfig(drop_rate=rate, rescale_q=divisor, verbose=False) for divisor in divisors]


def one_model(trial: Trial, settings: Settings) -> dict[str, Any]:
    """For each arm: the test scores at each drop rate, a list with one for each mask; and the q that were chosen."""
    found: dict[str, Any] = {arm: [] for arm in (*SINGLE_ARMS, "q")}
    for arm, rate in product(SINGLE_ARMS, settings.rates):
        config = trial.chosen(single_configs(arm, rate, settings), settings.validation_seeds)
        found[arm].append(rounded([row[0] for row in trial.tested(config, settings.test_seeds)]))
        if arm == "DAREx-q":
            found["q"].append(round(float(config.rescale_q or 1 - rate), 4))  # type: ignore[arg-type]
    return found


def merge_arms(count: int, settings: Settings) -> dict[str, list[DareConfig]]:
    """What is compared for several models: for each arm the grid that its setting is chosen from."""

    def grid(method: str, rates: Sequence[float], **more: Any) -> list[DareConfig]:
        pairs = product(rates, settings.lambdas)
        return [DareConfig(drop_rate=p, method=method, lambda_coeff=x, verbose=False, **more) for p, x in pairs]

    arms = {
        "average": [DareConfig(drop_rate=0.0, verbose=False)],
        "linear": grid("linear", [0.0]),
        "linear + DARE": grid("linear", settings.merge_rates),
        "linear + DARE 0.9": grid("linear", [0.9]),
        "ties": grid("ties", [0.0]),
        "ties + DARE": grid("ties", settings.merge_rates),
        "ties trimmed": grid("ties", [0.0], keep_ratio=TRIM),
        "slerp": grid("slerp", [0.0]),
        "slerp + DARE": grid("slerp", settings.merge_rates),
    }
    return {name: configs for name, configs in arms.items() if count == 2 or "slerp" not in name}


def several_models(trial: Trial, settings: Settings) -> dict[str, Any]:
    """For each arm: the setting that validation chose, and the test scores, a row for each mask."""
    found = {}
    for arm, configs in merge_arms(len(trial.experts), settings).items():
        config = trial.chosen(configs, settings.validation_seeds)
        scores = [rounded(row) for row in trial.tested(config, settings.test_seeds)]
        found[arm] = {"drop_rate": config.drop_rate, "lambda": config.lambda_coeff, "scores": scores}
    return found


def skill_of(name: str, skills: Sequence[str]) -> str:
    return skills[0] if name == "large" else name


def run_unit(unit: str, settings: Settings, device: str) -> dict[str, Any]:
    """Train and measure one family at one width."""
    # On one thread sums are taken in the same order every time; several units keep several cores busy.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    family, width = unit.split("/")
    lab = Lab(family, int(width), settings.plans[family], device)
    base, experts = lab.make()
    skills = lab.family.skills
    tell(unit, "trained", started)
    models: dict[str, Any] = {"base": {"scores": rounded([lab.score(base, skill, "test") for skill in skills])}}
    single, merged = {}, {}
    for name, expert in experts.items():
        scores = rounded([lab.score(expert, skill, "test") for skill in skills])
        models[name] = {"scores": scores, "delta": {key: float(f"{x:.4g}") for key, x in deltas(base, expert).items()}}
        single[name] = one_model(Trial(lab, base, [expert], (skill_of(name, skills),)), settings)
        tell(unit, f"dropped from {name}", started)
    for chosen in [*combinations(skills, 2), skills]:
        merged[" + ".join(chosen)] = several_models(Trial(lab, base, [experts[s] for s in chosen], chosen), settings)
        tell(unit, f"merged {' + '.join(chosen)}", started)
    return {
        "settings": unit_settings(unit, settings, device),
        "machine": machine(device),
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(tensor.numel() for tensor in base.values()),
        "skills": list(skills),
        "models": models,
        "single": single,
        "merged": merged,
    }


def tell(unit: str, what: str, started: float) -> None:
    print(f"{unit:12} {time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr, flush=True)


def machine(device: str) -> str:
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"
    return f"{where}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


def unit_settings(unit: str, settings: Settings, device: str) -> dict[str, Any]:
    """What a unit's results depend on; in the form that they have after a trip through JSON."""
    table = dataclasses.asdict(settings)
    table["plan"] = table.pop("plans")[unit.split("/")[0]]
    del table["plan"]["widths"]
    return json.loads(json.dumps(table | {"device": device}))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------------
# The results file
# ---------------------------------------------------------------------------------------------------------------------

MARK: Final = "Written by examples/quality.py"


def load_results(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"mark": MARK, "seconds": 0.0, "units": {}}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["mark"] != MARK:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(path)!r} is not a results file of this script", "give another name") from None
    return results  # type: ignore[no-any-return]


def save_results(results: dict[str, Any], path: Path) -> None:
    """Whole or not at all, a line to a unit."""
    units = ",\n".join(f"{json.dumps(name)}: {json.dumps(unit)}" for name, unit in sorted(results["units"].items()))
    head = json.dumps({key: value for key, value in results.items() if key != "units"})[:-1]
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(f'{head}, "units": {{\n{units}\n}}}}\n', encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "give another --out") from None


def run_units(units: Sequence[str], settings: Settings, device: str, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each unit's results as they come."""
    if jobs == 1 or len(units) == 1:
        for unit in units:
            yield unit, run_unit(unit, settings, device)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            waiting = {pool.submit(run_unit, unit, settings, device): unit for unit in units}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


# ---------------------------------------------------------------------------------------------------------------------
# Tables and verdicts, from a results file alone
# ---------------------------------------------------------------------------------------------------------------------

CLAIMED: Final = 0.9  # the drop rate that the paper calls harmless
KEPT_GAIN: Final = 0.95  # of the expert's gain over the base: where less is kept, the cliff begins
# Differences count where a t test over the masks gives them a chance of 1 in 20, and where they are large enough to
# matter: a point of the score, or of the drop rate.
SIGNIFICANT: Final = 0.05
MATTERS: Final = 0.01
CRITERION: Final = (
    "A difference counts as told when a two-sided t test over the masks gives it a chance of at most 5% and it is at "
    "least one percentage point."
)


def direction(differences: Sequence[float]) -> int:
    """1 for more, -1 for less, 0 for what cannot be told."""
    middle = statistics.fmean(differences)
    if abs(middle) < MATTERS or len(differences) < 2:
        return 0
    spread = statistics.stdev(differences)
    t = abs(middle) / (spread / math.sqrt(len(differences))) if spread else math.inf
    return int(math.copysign(1, middle)) if 2 * chance(t, len(differences) - 1) <= SIGNIFICANT else 0


EFFECT: Final = {1: "helps", -1: "hurts", 0: "cannot be told"}


def verdict(sign: int) -> str:
    return {1: "as the paper says", -1: "not as the paper says", 0: "cannot be told"}[sign]


def spread_of(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def points(values: Sequence[float], sign: str = "") -> str:
    """The mean in % and the standard deviation; with the sign "+", as a difference."""
    return f"{100 * statistics.fmean(values):{sign}.1f} ± {100 * spread_of(values):.1f}"


def cliff(rates: Sequence[float], scores: Sequence[float], least: float) -> float:
    """The highest drop rate up to which no score is below the least, by straight lines between the rates tried."""
    for k, score in enumerate(scores):
        if score < least:
            if k == 0:
                return 0.0
            share = (scores[k - 1] - least) / (scores[k - 1] - score)
            return rates[k - 1] + share * (rates[k] - rates[k - 1])
    return rates[-1]


def expert_scores(unit: dict[str, Any], name: str) -> tuple[float, float]:
    """What the base and the expert score at the expert's skill."""
    place = unit["skills"].index(skill_of(name, unit["skills"]))
    return unit["models"]["base"]["scores"][place], unit["models"][name]["scores"][place]


def cliffs(unit: dict[str, Any], name: str, arm: str) -> list[float]:
    """The cliff of one fine-tune, for each mask; a deterministic arm has the same for all."""
    base, expert = expert_scores(unit, name)
    count, curve = unit["settings"]["test_seeds"], unit["single"][name][arm]
    masks = [[row[k % len(row)] for row in curve] for k in range(count)]
    return [cliff(unit["settings"]["rates"], scores, base + KEPT_GAIN * (expert - base)) for scores in masks]


def mean_cliffs(unit: dict[str, Any], arm: str) -> list[float]:
    """For each mask, the mean over the fine-tunes with small deltas."""
    return [statistics.fmean(row) for row in zip(*(cliffs(unit, name, arm) for name in unit["skills"]), strict=True)]


def minus(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def mask_means(arm: dict[str, Any], count: int) -> list[float]:
    """The mean over the skills for each mask; what is deterministic is the same for all."""
    rows = [statistics.fmean(row) for row in arm["scores"]]
    return [rows[k % len(rows)] for k in range(count)]


def ordered(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(sorted(results["units"].items(), key=lambda item: (item[0].split("/")[0], int(item[0].split("/")[1]))))


def by_family(results: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for name, unit in ordered(results).items():
        families.setdefault(name.split("/")[0], {})[name] = unit
    return families


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that a terminal and Markdown both show."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def models_table(results: dict[str, Any]) -> str:
    rows = []
    for name, unit in ordered(results).items():
        for expert in unit["single"]:
            size = unit["models"][expert]["delta"]
            sizes = [f"{size['mean']:.2g}", f"{size['p99']:.2g}", f"{size['relative']:.1%}"]
            scores = [f"{100 * score:.1f}" for score in expert_scores(unit, expert)]
            found = [f"{statistics.fmean(cliffs(unit, expert, arm)):.2f}" for arm in SINGLE_ARMS]
            rows.append([name, expert, *scores, *sizes, *found])
    head = ["model", "fine-tune", "base", "expert", "mean delta", "99th percentile", "relative norm"]
    return table([*head, *(f"cliff: {arm}" for arm in SINGLE_ARMS)], rows)


def rates_table(results: dict[str, Any]) -> str:
    """Means over the fine-tunes with small deltas, and the one with large ones."""
    rows = []
    rates = sorted({rate for unit in results["units"].values() for rate in unit["settings"]["rates"]})
    for name, unit in ordered(results).items():
        for arm in (*SINGLE_ARMS, "DARE, large"):
            names = ["large"] if arm == "DARE, large" else unit["skills"]
            columns = zip(*(unit["single"][expert][arm.split(",")[0]] for expert in names), strict=True)
            means = dict(zip(unit["settings"]["rates"], map(mean_of, columns), strict=True))
            rows.append([name, arm, *(f"{100 * means[rate]:.1f}" if rate in means else "" for rate in rates)])
    return table(["model", "drop rate:", *map(str, rates)], rows)


def alone(unit: dict[str, Any], skills: Sequence[str]) -> dict[str, Any]:
    """The base and each expert by itself at all the skills of a merge, like arms that chose nothing."""
    places = [unit["skills"].index(skill) for skill in skills]
    return {
        f"{name} alone": {"scores": [[unit["models"][name]["scores"][place] for place in places]]}
        for name in ("base", *skills)
    }


# Without dropping, linear is the average with a lambda of its own.
LABELS: Final = {"average": "average, lambda 1", "linear": "average, lambda tuned"}


def merged_table(results: dict[str, Any]) -> str:
    rows = []
    for name, unit in ordered(results).items():
        for models, arms in unit["merged"].items():
            for arm, found in (alone(unit, models.split(" + ")) | arms).items():
                columns = zip(*found["scores"], strict=True)
                each = " / ".join(f"{100 * statistics.fmean(column):.1f}" for column in columns)
                setting = f"drop {found['drop_rate']:g}, lambda {found['lambda']:g}" if "lambda" in found else ""
                means = mask_means(found, len(found["scores"]))
                rows.append([name, models, LABELS.get(arm, arm), setting, points(means), each])
    return table(["model", "merged", "how", "chosen on validation data", "test: mean", "each skill"], rows)


def single_verdicts(name: str, units: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What one family shows of thinning one model."""
    found = {unit: mean_cliffs(results, "DARE") for unit, results in units.items()}
    for unit, rates in found.items():
        flat = 1 if statistics.fmean(rates) >= CLAIMED else direction([rate - CLAIMED for rate in rates])
        yield f"{unit}: flat until {points(rates)}% are dropped (paper: {CLAIMED:.0%} or more): {verdict(flat)}."
    narrow, wide = next(iter(found)), list(found)[-1]
    if narrow != wide:
        moved = minus(found[wide], found[narrow])
        says = verdict(direction(moved))
        yield f"{name}: the cliff moves right from {narrow} to {wide}, by {points(moved, '+')} points: {says}."
    for unit, results in units.items():
        for arm in ("no rescale", "magnitude"):
            lead = minus(found[unit], mean_cliffs(results, arm))
            words = "without rescaling" if arm == "no rescale" else "with magnitude pruning"
            sign, when = (1, "earlier") if statistics.fmean(lead) >= 0 else (-1, "later")
            size = points([sign * value for value in lead])
            yield f"{unit}: {words} it falls {size} points {when} (paper: earlier): {verdict(direction(lead))}."
        gain = minus(mean_cliffs(results, "DAREx-q"), found[unit])
        yield f"{unit}: DAREx-q moves the cliff by {points(gain, '+')} points: {EFFECT[direction(gain)]}."
        skill = results["skills"][0]
        lead = minus(cliffs(results, skill, "DARE"), cliffs(results, "large", "DARE"))
        says = verdict(direction(lead))
        yield f"{unit}: large deltas of {skill} fail earlier, by {points(lead, '+')} points: {says}."


# DARE, and the same without dropping, whose lambda was chosen from the same grid.
RIVALS: Final = (
    ("linear + DARE", "linear"),
    ("linear + DARE 0.9", "linear"),
    ("ties + DARE", "ties"),
    ("slerp + DARE", "slerp"),
)


def differences(results: dict[str, Any], dropping: str, rival: str) -> dict[str, list[float]]:
    """DARE less its rival, for each mask, wherever both were tried."""
    found = {}
    for name, unit in ordered(results).items():
        count = unit["settings"]["test_seeds"]
        for models, arms in unit["merged"].items():
            if dropping in arms:
                pair = (mask_means(arms[arm], count) for arm in (dropping, rival))
                found[f"{name} {models}"] = minus(*pair)
    return found


def merge_verdicts(results: dict[str, Any]) -> Iterator[str]:
    for dropping, rival in RIVALS:
        found = differences(results, dropping, rival)
        signs = {name: direction(values) for name, values in found.items()}
        counts = [sum(sign == wanted for sign in signs.values()) for wanted in (1, -1, 0)]
        average = "the average" if rival == "linear" else f"{rival} without dropping"
        overall = [statistics.fmean(mask) for mask in zip(*found.values(), strict=True)]
        yield (
            f"{dropping} against {average}, lambda tuned the same way: helps in {counts[0]}, hurts in {counts[1]}, "
            f"cannot be told in {counts[2]} of {len(found)} merges; on average {points(overall, '+')} points: "
            f"{EFFECT[direction(overall)]}."
        )
        for name, values in found.items():
            yield f"  {name}: {points(values, '+')} points: {EFFECT[signs[name]]}"


def report(results: dict[str, Any]) -> str:
    """All tables and verdicts."""
    if not results["units"]:
        raise DareError("there are no results to report", "run without --report first")
    machines = sorted({unit["machine"] for unit in results["units"].values()})
    each = ", ".join(f"{name} {unit['seconds']:.0f} s" for name, unit in ordered(results).items())
    sections = [
        f"{'; '.join(machines)}; {results['seconds']:.0f} s in all (side by side: {each})",
        "One model: scores in %, sizes of the deltas, and the cliff: the highest drop rate that keeps "
        f"{KEPT_GAIN:.0%} of the gain",
        models_table(results),
        "Scores in % by drop rate, mean of the three fine-tunes and all masks",
        rates_table(results),
        "Several models: mean of the skills in %, ± standard deviation over masks",
        merged_table(results),
        f"Verdicts. {CRITERION}",
        "\n".join(line for name, units in by_family(results).items() for line in single_verdicts(name, units)),
        "\n".join(merge_verdicts(results)),
    ]
    return "\n\n".join(sections)


# ---------------------------------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------------------------------

BARS: Final = ("average", "linear", "linear + DARE", "ties", "ties + DARE", "slerp", "slerp + DARE")


def mean_curve(unit: dict[str, Any], names: Sequence[str], arm: str) -> list[list[float]]:
    """For each drop rate: the mean over the fine-tunes, for each mask, in %."""
    curves = [unit["single"][name][arm] for name in names]
    return [[100 * statistics.fmean(mask) for mask in zip(*cells, strict=True)] for cells in zip(*curves, strict=True)]


def draw_curve(axes: Any, unit: dict[str, Any], names: Sequence[str], arm: str, number: int, label: str) -> None:
    rates, cells = [place_on_axis(rate) for rate in unit["settings"]["rates"]], mean_curve(unit, names, arm)
    style = {"color": COLOURS[number], "marker": MARKS[number], "linestyle": DASHES[number]}
    axes.plot(rates, [statistics.fmean(cell) for cell in cells], label=label, linewidth=1.8, markersize=4, **style)
    low, high = [min(cell) for cell in cells], [max(cell) for cell in cells]
    axes.fill_between(rates, low, high, color=COLOURS[number], alpha=0.15, linewidth=0)


def finish_curves(axes: Any, unit: dict[str, Any], title: str) -> None:
    shown = [rate for rate in (0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99) if rate in unit["settings"]["rates"]]
    axes.set_xticks([place_on_axis(rate) for rate in shown], [f"{rate:g}" for rate in shown], fontsize=8)
    axes.set_ylim(-2, 102)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("drop rate", fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="best")


def draw_bars(axes: Any, units: dict[str, dict[str, Any]]) -> None:
    """The merges of each width: the mean over all pairs, a bar for each way; whiskers: standard deviation of masks."""
    for number, arm in enumerate(BARS):
        for place, unit in enumerate(units.values()):
            count, merges = unit["settings"]["test_seeds"], unit["merged"].values()
            rows = [mask_means(arms[arm], count) for arms in merges if arm in arms and "slerp" in arms]  # pairs
            means = [100 * statistics.fmean(row) for row in zip(*rows, strict=True)]
            axes.bar(
                place + (number - len(BARS) / 2 + 0.5) * 0.12,
                statistics.fmean(means),
                0.11,
                yerr=spread_of(means),
                color=COLOURS[(number + 1) // 2],
                alpha=0.55 if "DARE" not in arm and number else 1,
                hatch="//" if "DARE" in arm else None,
                edgecolor="white",
                error_kw={"linewidth": 1},
                label=LABELS.get(arm, arm) if place == 0 else None,
            )
    for place, unit in enumerate(units.values()):  # what a perfect merge would keep, and the base
        own = [expert_scores(unit, skill) for skill in unit["skills"]]
        for level in (100 * statistics.fmean(column) for column in zip(*own, strict=True)):
            axes.plot([place - 0.43, place + 0.43], [level, level], color="black", linewidth=1, linestyle=":")
    axes.set_xticks(range(len(units)), list(units), fontsize=9)
    axes.set_ylim(0, 102)
    axes.set_title("Pairs merged, mean of both skills (dotted: their experts, base)", fontsize=10, loc="left")


def draw(results: dict[str, Any], path: Path) -> None:
    """A column for each family: the ways to thin the widest model, DARE by width, and merged models."""
    families = by_family(results)
    figure = load_matplotlib().Figure(figsize=(5 * len(families), 11), dpi=100, layout="constrained")
    grid = figure.subplots(3, len(families), squeeze=False)
    for column, units in enumerate(families.values()):
        widest, unit = list(units.items())[-1]
        for number, arm in enumerate(SINGLE_ARMS):
            draw_curve(grid[0][column], unit, unit["skills"], arm, number, arm)
        finish_curves(grid[0][column], unit, f"{widest}: one model thinned, mean of three skills")
        for number, (name, other) in enumerate(units.items()):
            draw_curve(grid[1][column], other, other["skills"], "DARE", number, name)
        draw_curve(grid[1][column], unit, ["large"], "DARE", len(units), f"{widest}, large deltas")
        finish_curves(grid[1][column], unit, "DARE by width, and with large deltas")
        draw_bars(grid[2][column], units)
    for axes in grid.flat:
        axes.set_ylabel("score on test data, %", fontsize=9)
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = grid[2][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(BARS), fontsize=9, frameon=False)
    try:
        figure.savefig(path, metadata={"Title" if path.suffix == ".svg" else "Software": MARK})
    except OSError as error:
        raise DareError(f"cannot write {str(path)!r}: {error.strerror}", "give another file after --plot") from None


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def build_parser() -> dare.Parser:
    parser = dare.Parser(
        prog="quality.py",
        description="Train small models from nothing, thin and merge them, and say by their scores whether DARE helps.",
        epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller models and fewer masks: minutes on two cores")
    add("--out", metavar="FILE", type=Path, help="keep the results here, and continue what is there")
    add("--report", metavar="FILE", type=Path, help="train nothing: tables, verdicts and picture from a results file")
    add("--plot", metavar="FILE", type=Path, help="draw the scores: a .png or .svg file")
    add("--device", metavar="NAME", default="cpu", help="where to train and merge: cpu (default) or cuda")
    add("--jobs", metavar="N", type=int, help="models at a time (default: one for each core, and 1 on a GPU)")
    add(
        "--only",
        metavar="UNIT",
        nargs="+",
        help="families, or a family at a width: chars/256 digits (other widths with --quick)",
    )
    return parser


def chosen_units(only: Sequence[str] | None, settings: Settings) -> list[str]:
    """The units, the longest first, so that none is waited for at the end."""
    units = [f"{family}/{width}" for family, plan in settings.plans.items() for width in sorted(plan.widths)[::-1]]
    for word in only or ():
        if word not in units and word not in settings.plans:
            raise ConfigError(f"there is no {word!r}", f"--only takes {', '.join([*settings.plans, *units])}")
    return [unit for unit in units if only is None or unit in only or unit.split("/")[0] in only]


def refuse_others(results: dict[str, Any], settings: Settings, options: Any) -> None:
    """What --quick or another device has measured is not to be mixed with the rest, nor to be lost by it."""
    known = chosen_units(None, settings)
    for unit, found in results["units"].items():
        if unit not in known or found["settings"] != unit_settings(unit, settings, options.device):
            raise ConfigError(f"{str(options.out)!r} holds results of other settings", "give another file after --out")


def measure(options: Any, settings: Settings) -> dict[str, Any]:
    """Run what is not in the results file yet."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise ConfigError(f"--device takes cpu or cuda, not {options.device!r}", "leave it out for the CPU")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("there is no GPU that torch can use", "leave --device out")
    results = load_results(options.out)
    refuse_others(results, settings, options)
    missing = [unit for unit in chosen_units(options.only, settings) if unit not in results["units"]]
    if any(unit.startswith("digits") for unit in missing) and importlib.util.find_spec("sklearn") is None:
        raise DareError("the digits need scikit-learn, which is not installed", "leave them out with --only chars")
    jobs = options.jobs or (1 if options.device.startswith("cuda") else dare.usable_cores())
    started, before = time.perf_counter(), results["seconds"]
    for unit, found in run_units(missing, settings, options.device, jobs):
        results["units"][unit] = found
        results["seconds"] = round(before + time.perf_counter() - started, 1)
        if options.out:
            save_results(results, options.out)
    return results


def run(arguments: Sequence[str] | None, settings: Settings | None = None) -> None:
    options = build_parser().parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, not {options.jobs}", "leave it out for one to each core")
    for path in (options.out, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"the directory of {str(path)!r} does not exist", "create it first")
    if options.plot:
        if options.plot.suffix not in (".png", ".svg"):
            raise ConfigError(f"--plot {str(options.plot)!r} is neither .png nor .svg", "name it like quality.png")
        load_matplotlib()
    if options.report:
        if options.quick or options.out or options.only or options.jobs or options.device != "cpu":
            raise ConfigError("--report trains nothing", "give it alone, or with --plot")
        if not options.report.is_file():
            raise ConfigError(f"there is no file {str(options.report)!r}", "--report takes what --out has written")
        results = load_results(options.report)
    else:
        results = measure(options, settings or (QUICK if options.quick else FULL))
    print(report(results))
    if options.plot:
        draw(results, options.plot)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Gives the exit status; no traceback reaches a user."""
    kept = "interrupted; with --out, the units that were finished are kept, and the same command continues"
    return dare.guarded(lambda: run(arguments), kept)


if __name__ == "__main__":
    sys.exit(main())
