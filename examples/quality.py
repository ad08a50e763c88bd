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

import dare
from dare import ConfigError, DareConfig, DareError, dare_merge
from sweep import COLOURS, DASHES, MARKS, chance, load_matplotlib, place_on_axis

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
        "chars": Plan((64, 256, 768), Recipe(3000, 4e-3, 64), Recipe(500, 3e-4, 64), Recipe(1500, 4e-3, 64)),
        "digits": Plan((64, 512, 4096), Recipe(200, 1e-3, 64), Recipe(600, 1e-3, 64), Recipe(1500, 1e-2, 64)),
    },
    rates=RATES,
    shifts=(0.0, 0.1, 0.2, 0.4, 0.6),
    merge_rates=(0.3, 0.5, 0.7, 0.8, 0.9, 0.95),
    lambdas=(0.5, 1.0, 1.5, 2.0, 2.5, 3.0),
    validation_seeds=3,
    test_seeds=10,
)
QUICK: Final = Settings(
    plans={
        "chars": Plan((32, 64, 128), Recipe(900, 4e-3, 24), Recipe(250, 5e-4, 48), Recipe(500, 4e-3, 48)),
        "digits": Plan((32, 128, 512), Recipe(200, 1e-3, 64), Recipe(400, 1e-3, 64), Recipe(600, 1e-2, 64)),
    },
    rates=(0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99),
    shifts=(0.0, 0.2, 0.5),
    merge_rates=(0.3, 0.6, 0.9),
    lambdas=(1.0, 1.5, 2.0, 3.0),
    validation_seeds=2,
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
CONTEXT: Final = 4 * LINE
# Files of some size that every Python has; their text differs a little from one version to the next.
TEXTS: Final = "argparse ast datetime difflib doctest inspect optparse pdb pickletools pydoc_data/topics subprocess tarfile"
# The share of the base's rows that are task lines, and how many of those give the right answer: in the others the word
# is only repeated. So the base has seen the tasks, mostly done badly, and like a pretrained model it can do more than
# it does by itself.
TASK_SHARE: Final = 0.3
RIGHT_SHARE: Final = 0.4
HELD_OUT: Final = 250  # words for validation, and as many for the test; the base sees neither in a task

WORD_TASKS: Final[dict[str, tuple[str, Callable[[str], str]]]] = {
    "reverse": ("r", lambda word: word[::-1]),
    "sort": ("s", lambda word: "".join(sorted(word))),
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

    skills = tuple(WORD_TASKS)

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
        lines, answers = self.lines[skill, "train"]
        chosen = pick(len(lines), batch, generator)
        rows, weight = lines[chosen], answers[chosen, 1:].float()
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

    skills = ("rotated", "shifted", "mirrored")

    def __init__(self, device: str) -> None:
        if importlib.util.find_spec("sklearn") is None:
            raise DareError("the digits need scikit-learn, which is not installed", "leave them out with --only chars")
        self.rotate = importlib.import_module("digits").rotate
        self.train, (images, labels) = importlib.import_module("digits").load_split()
        self.train = tuple(tensor.to(device) for tensor in self.train)
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
            return self.rotate(images, low + (high - low) * draws)  # type: ignore[no-any-return]
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
        return F.cross_entropy(model(self.distort(skill, images[chosen], draws)), labels[chosen], label_smoothing=SMOOTHING)

    def right(self, model: Callable[[Tensor], Tensor], skill: str, part: str) -> Tensor:
        images, labels = self.parts[skill, part]
        return model(images).argmax(1) == labels


FAMILIES: Final[dict[str, Callable[[str], Family]]] = {"chars": Chars, "digits": Digits}

# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, loss_of: Callable[[torch.Generator], Tensor], recipe: Recipe, rate: float, seed: int) -> None:
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
    return f"{where}, {platform.system()} {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"


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
