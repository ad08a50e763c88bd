# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""What should I use? Train models, merge them in every way that is worth a try, and rank the ways.

    uv run examples/quality.py --quick
    uv run examples/quality.py --out results.json --plot picture.png
    uv run examples/quality.py --report results.json [--plot picture.png]

Four families on data that every machine has. Transformers read the sources and the documentation of
Python letter by letter and are fine-tuned for word tasks: in full ("chars", the largest of 300
million parameters), as LoRA of rank 16 ("lora"), and for tasks that one mark asks for, so that they
are in each other's way ("contexts"). Networks read scikit-learn's digits ("digits"). Each is
trained several times over: a base, and a fine-tune for each skill. Each way to merge two, three or
eight of them is tried with the same lambdas, on validation data and with masks of their own; the
best is scored on test data, and by what it costs elsewhere. A run that was stopped goes on where
its results file ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from quality_families import (
    COPIES,
    DEVICE,
    FAMILIES,
    HELD_OUT,
    REHEARSED,
    RIGHT_SHARE,
    SMOOTHING,
    TASK_SHARE,
    Adapters,
    seeded,
)
from quality_report import draw, report
from torch import Tensor, nn

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, dare_match, dare_merge, dare_sparsify

quiet = partial(DareConfig, verbose=False)
State = dict[str, Tensor]
Recipe = tuple[int, float, int]  # of a training run: steps, rate for a width of 64, batch
LAMBDAS: Final = (0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0)
METHODS: Final = {
    "linear": "task arithmetic",
    "ties": "ties",
    "ram": "ram",
    "slerp": "slerp",
    "model_stock": "model stock",
    "karcher": "karcher",
    "wudi": "wudi",
}
PAIRS: Final = ("slerp",)  # of two models alone
DROPS: Final[dict[str, dict[str, Any]]] = {
    "": {"drop_rate": 0.0},
    " + DARE 0.5": {"drop_rate": 0.5},
    " + DARE 0.9": {"drop_rate": 0.9},
}
BREADCRUMBS: Final = {"drop": "breadcrumbs", "drop_rate": 0.3, "gamma": 0.005}
# Ways to merge, by what they are called: with nothing dropped, half and nine tenths; and what came
# first of the entry-wise ways in an earlier ranking of 41, or is a setting of its own.
WAYS: Final[dict[str, dict[str, Any]]] = {
    **{
        name + drop: {"method": method, **given}
        for (method, name), (drop, given) in product(METHODS.items(), DROPS.items())
    },
    "task arithmetic + breadcrumbs": {"method": "linear", **BREADCRUMBS},
    "ram + breadcrumbs": {"method": "ram", **BREADCRUMBS},
    "wudi ridge 0.1": {"method": "wudi", "drop_rate": 0.0, "ridge": 0.1},
}
# Matched with so many examples of each skill; of tenths, nothing else is left of the models.
MATCHED: Final[dict[str, dict[str, Any]]] = {
    **{
        f"{name}, matched with {count}": {"method": method, "drop_rate": 0.0, "examples": count}
        for (method, name), count in product(
            {"linear": "task arithmetic", "wudi": "wudi"}.items(), (64, 512)
        )
    },
    "tenths, matched with 512": {
        "method": "linear",
        "drop_rate": 0.0,
        "examples": 512,
        "thinned": 0.9,
    },
}
# Of these, also with a lambda that is chosen without labels.
CHOSEN: Final = (
    *("task arithmetic", "wudi"),
    *("task arithmetic, matched with 512", "wudi, matched with 512"),
)
JUDGES: Final = 64  # held-out examples of each skill, by which a lambda is chosen


def hold_out(given: dict[str, Any]) -> dict[str, Any]:
    """The same way with a lambda that dare_match chooses: by agreement with the fine-tunes, as what
    a module is called with marks no answers.
    """
    # dare_match wants some that do not judge, even where nothing is matched.
    count = given.get("examples", JUDGES) + JUDGES
    chosen = {"examples": count, "held_out": JUDGES / count, "lambda_coeff": "auto"}
    return given | chosen | ({} if "examples" in given else {"matched": False})


AUTO: Final[dict[str, dict[str, Any]]] = {
    f"{name}, lambda auto": hold_out(given)
    for name, given in (WAYS | MATCHED).items()
    if name in CHOSEN
}
# For networks whose merges take long.
FEW: Final = (
    *("task arithmetic", "ties", "ram", "model stock", "wudi", "wudi ridge 0.1"),
    *("task arithmetic + DARE 0.9", "wudi + DARE 0.5", "wudi + DARE 0.9"),
)
FEW_LAMBDAS: Final = (0.4, 0.7, 1.0, 1.5, 2.0, 3.0)


class Unit(NamedTuple):
    """A kind of network and its training; a low rate keeps the deltas of fine-tunes small."""

    family: str
    width: int
    layers: int
    base: Recipe
    expert: Recipe
    # One in each round: its networks have the same held-out data and merge the same pair.
    trainings: int = 6
    lambdas: tuple[float, ...] = LAMBDAS  # that a search tries
    # How many skills are merged, one number after the other; the last is how many are learned.
    merged: tuple[int, ...] = (2, 3, 8)
    rank: int = 0  # of fine-tunes by LoRA; 0: in full
    ways: tuple[str, ...] = tuple(WAYS)

    def __str__(self) -> str:
        return f"{self.family}/{self.width}"


large = partial(Unit, lambdas=FEW_LAMBDAS, ways=FEW)


class Tested(NamedTuple):
    """What a merge does on test data, and the loss at what no skill is about."""

    score: float
    elsewhere: float
    searched: float | None = None  # the lambda that a search has chosen


class Settings(NamedTuple):
    """What is trained and how much is tried; by default as in the documents."""

    units: tuple[Unit, ...] = (  # the longest first, so that none is waited for at the end
        large("chars", 1536, 11, (400, 4e-3, 96), (400, 3e-4, 128), 1),
        large("chars", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3),
        large("lora", 1024, 8, (500, 4e-3, 96), (500, 6e-3, 128), 3, rank=16),
        large("contexts", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3, merged=(2, 3)),
        *(Unit("chars", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128)) for width in (768, 256, 64)),
        *(
            Unit("lora", width, 2, (1000, 4e-3, 64), (800, 6e-3, 128), rank=16)
            for width in (768, 256)
        ),
        *(
            Unit("contexts", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128), merged=(2, 3))
            for width in (768, 256)
        ),
        *(Unit("digits", width, 2, (200, 1e-3, 64), (600, 1e-3, 64)) for width in (2048, 512, 64)),
    )
    masks: int = 2  # with which a merge is tested, and as many others for each lambda of a search
    rates: tuple[float, ...] = (0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # for one model
    starts: tuple[float, ...] = (0.6, 1.0, 1.5)  # lambdas without a search


QUICK: Final = Settings(
    units=(
        # Wide enough for eight skills merged by whole matrices; enough trainings to compare ways.
        Unit(
            *("digits", 512, 2, (200, 1e-3, 64), (400, 1e-3, 64), 6, FEW_LAMBDAS, (2, 8)),
            ways=(
                *("task arithmetic", "ties", "wudi", "wudi + DARE 0.9"),
                *("task arithmetic + DARE 0.9", *MATCHED, *AUTO),
            ),
        ),
    ),
    masks=1,
    rates=(0.0, 0.5, 0.8, 0.9, 0.99),
)
# Trainings with seeds below were looked at when the recipes were chosen.
FIRST_SEED: Final = 3000
# Model i of a merge draws with seed + i: seeds that are ten apart share no mask. By what a merge is
# scored on; each training has ten of its own.
SEEDS: Final = {"validation": range(10_000, 20_000, 10), "test": range(20_000, 30_000, 10)}
# Of one model, by drop rate.
ARMS: Final[dict[str, dict[str, Any]]] = {
    "DARE": {},
    "no rescale": {"rescale": "none"},
    "magnitude": {"drop": "magnitude"},
}


# What a way to merge takes for each skill, with all its lambdas, in steps of training: as measured
# with the quick networks, on one core.
MERGE_WORK: Final = 60
PAUSE: Final = 5  # seconds between two lines of a training


class Progress:
    """Says what a training has done, and about how long the rest takes."""

    def __init__(self, unit: Unit, training: int) -> None:
        self.name = f"{unit}/{training}"
        merges = sum(count * len(list_ways(count, unit)) for count in unit.merged)
        self.work = unit.expert[0] * unit.merged[-1] + MERGE_WORK * merges
        self.done = 0
        self.started = self.said = time.perf_counter()

    def advance(self, work: int, what: str) -> None:
        self.done += work
        now = time.perf_counter()
        if now - self.said >= PAUSE:
            self.said = now
            left = (now - self.started) * (self.work / self.done - 1)
            say(f"{self.name}: {what}, about {left:.0f} s left")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def lower_precision() -> torch.autocast:
    """A GPU computes in bf16."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


class Lab:
    """The models of one training, and the scores of their merges."""

    # What is scored on validation and on test data, where that is matched with examples.
    matched: Mapping[str, list[State]] = MappingProxyType({})

    def __init__(self, unit: Unit, training: int) -> None:
        self.unit = unit
        self.training = training
        seed = FIRST_SEED + training
        self.family = FAMILIES[unit.family](seed)
        torch.manual_seed(seed)
        self.model = self.family.network(unit.width, unit.layers)
        self.base = self.fit(unit.base, 10 * seed)
        if unit.rank:  # in bf16 what is added would be rounded, and the change no product
            self.base = {name: tensor.float() for name, tensor in self.base.items()}
        # The base has no share: before it torch and the data are loaded.
        self.progress = Progress(unit, training)
        fit = self.fit_adapter if unit.rank else self.fit
        self.skills = self.family.skills[: unit.merged[-1]]
        self.experts = {}
        for number, skill in enumerate(self.skills, 1):
            self.model.load_state_dict(self.base)
            self.experts[skill] = fit(unit.expert, 10 * seed + number, skill)
            self.progress.advance(unit.expert[0], f"{skill!r} is learned")

    def fit_adapter(self, recipe: Recipe, seed: int, skill: str) -> State:
        """Train products of thin matrices, and add them to the base."""
        torch.manual_seed(seed)
        adapters = Adapters(self.model, self.unit.rank)
        self.train(adapters, recipe, seed, skill)
        with torch.no_grad():
            return self.base | adapters.changed()

    def fit(self, recipe: Recipe, seed: int, skill: str | None = None) -> State:
        """Train on from the weights as they are, for one skill or as a base. Gives them in bf16."""
        self.train(self.model, recipe, seed, skill)
        return {name: tensor.detach().bfloat16() for name, tensor in self.model.named_parameters()}

    def train(self, model: nn.Module, recipe: Recipe, seed: int, skill: str | None) -> None:
        steps, rate, batch = recipe
        parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
        # The wider, the less each weight has to move: between the square root, common for whole
        # models, and 1 / width.
        rate *= (64 / self.unit.width) ** 0.75
        generator = seeded(seed)
        optimizer = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, steps, pct_start=0.1, cycle_momentum=False
        )
        for _ in range(steps):
            optimizer.zero_grad()
            with lower_precision():
                self.family.loss(model, skill, batch, generator).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def score(self, state: State, skills: Sequence[str], part: str) -> float:
        """The share of right answers, as a mean over skills."""
        self.model.load_state_dict(state)
        with lower_precision():
            right = [self.family.right(self.model, skill, part).float().mean() for skill in skills]
        return torch.stack(right).mean().item()

    def match(self, skills: Sequence[str], way: dict[str, Any], seed: int) -> State:
        """A merge that is matched with examples. Lambda only multiplies what it changes."""
        given = dict(way)
        count = given.pop("examples")
        thinned = given.pop("thinned", 0.0)
        generator = seeded(FIRST_SEED * 100 + seed)
        batches = [self.family.show(skill, count, generator) for skill in skills]
        if "held_out" in given:  # whole batches are: one of each skill
            batches = [[part for rows in own for part in rows.split(JUDGES)] for own in batches]
        experts = [
            dare_sparsify(self.base, self.experts[skill], thinned, seed + i)
            for i, skill in enumerate(skills)
        ]
        return dare_match(self.model, self.base, experts, batches, quiet(**given, dtype="float32"))

    def merge(
        self, skills: Sequence[str], config: DareConfig, part: str, masks: int
    ) -> Iterator[State]:
        """Merges of experts with several masks; where none is drawn, one merge."""
        if self.matched:
            for state in self.matched[part][:masks]:
                yield dare_merge(self.base, [state], config)
            return
        experts = [self.experts[skill] for skill in skills]
        is_drawn = config.drop_rate and config.drop == "random"
        for seed in SEEDS[part][10 * self.training :][: masks if is_drawn else 1]:
            yield dare_merge(self.base, experts, replace(config, seed=seed))

    def rate(self, skills: Sequence[str], config: DareConfig, part: str, masks: int = 1) -> float:
        """The score of a merge, as a mean over masks."""
        merges = self.merge(skills, config, part, masks)
        return fmean(self.score(merged, skills, part) for merged in merges)

    def test(self, skills: Sequence[str], config: DareConfig, masks: int = 1) -> Tested:
        """The score of a merge on test data and its loss elsewhere, as means over masks."""
        scores = []
        losses = []
        for merged in self.merge(skills, config, "test", masks):
            scores.append(self.score(merged, skills, "test"))
            losses.append(self.measure_elsewhere(merged))
        return Tested(round(fmean(scores), 4), round(fmean(losses), 4))

    @torch.no_grad()
    def measure_elsewhere(self, state: State) -> float:
        """The loss at what no skill is about."""
        self.model.load_state_dict(state)
        with lower_precision():
            return self.family.elsewhere(self.model).item()

    def configure(self, scale: float, given: dict[str, Any]) -> DareConfig:
        """What is matched is one model, of which nothing is dropped."""
        return quiet(lambda_coeff=scale, **({"drop_rate": 0.0} if self.matched else given))

    def prepare(self, skills: Sequence[str], given: dict[str, Any], masks: int) -> None:
        """Match, if that is the way: with other examples and masks for validation and test."""
        self.matched = {
            part: [
                self.match(skills, given, seed)
                for seed in seeds[10 * self.training :][: masks if "thinned" in given else 1]
            ]
            for part, seeds in SEEDS.items()
            # Lambda is chosen on the way: there is nothing to validate.
            if "examples" in given and (part == "test" or "held_out" not in given)
        }

    def search(self, skills: Sequence[str], given: dict[str, Any], masks: int) -> Tested:
        """The lambda that is best on validation data, of equals the smallest, on test data."""
        configs = {scale: self.configure(scale, given) for scale in self.unit.lambdas}
        scores = {
            scale: self.rate(skills, config, "validation", masks)
            for scale, config in configs.items()
        }
        best = max(scores, key=scores.__getitem__)
        return self.test(skills, configs[best], masks)._replace(searched=best)


def list_ways(count: int, unit: Unit) -> dict[str, dict[str, Any]]:
    """All ways to merge so many models of a kind."""
    every = WAYS | MATCHED | AUTO
    return {
        name: every[name] for name in unit.ways if count == 2 or every[name]["method"] not in PAIRS
    }


def measure(unit: Unit, training: int, settings: Settings) -> dict[str, Any]:
    """Train once, and measure."""
    # On one thread sums are taken in the same order every time; several trainings keep several
    # cores busy.
    torch.set_num_threads(1)
    torch.set_default_device(DEVICE)
    started = time.perf_counter()
    lab = Lab(unit, training)
    skills = lab.skills
    seconds = {"training": time.perf_counter() - started}
    say(f"{unit}/{training} is trained, {seconds['training']:.0f} s")
    alone = [lab.test([skill], quiet(drop_rate=0.0)) for skill in skills]
    curves = {
        arm: [
            round(
                fmean(lab.rate([skill], quiet(drop_rate=rate, **more), "test") for skill in skills),
                4,
            )
            for rate in settings.rates
        ]
        for arm, more in ARMS.items()
    }
    merges: dict[str, Any] = {}
    for count in unit.merged:
        chosen = [skills[(training + k) % len(skills)] for k in range(count)]
        found = {}
        for name, given in list_ways(count, unit).items():
            lab.prepare(chosen, given, settings.masks)
            if name in AUTO:
                found[name] = lab.test(chosen, lab.configure(1.0, given))
            else:
                found[name] = lab.search(chosen, given, settings.masks)
                for scale in settings.starts:
                    config = lab.configure(scale, given)
                    found[f"{name}, lambda {scale:g}"] = lab.test(chosen, config, settings.masks)
            lab.progress.advance(MERGE_WORK * count, f"{count} skills are merged by {name}")
        merges[" + ".join(chosen)] = found
        lab.matched = {}
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    seconds["all"] = time.perf_counter() - started
    return {
        "settings": describe(unit, settings),
        "machine": f"{where}, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
        "parameters": sum(tensor.numel() for tensor in lab.base.values()),
        "seconds": {name: round(taken, 1) for name, taken in seconds.items()},
        "base": round(lab.score(lab.base, skills, "test"), 4),
        "elsewhere": {  # the loss of the base, and of the fine-tunes
            "base": round(lab.measure_elsewhere(lab.base), 4),
            "fine-tunes": round(fmean(each.elsewhere for each in alone), 4),
        },
        "curves": curves,
        "merges": merges,
    }


def describe(unit: Unit, settings: Settings) -> list[Any]:
    """What a measurement depends on, as a results file has it; not how many there are."""
    ways = [WAYS, ARMS]
    data = [FIRST_SEED, TASK_SHARE, RIGHT_SHARE, REHEARSED, HELD_OUT, SMOOTHING, COPIES]
    digest = hashlib.sha256(json.dumps([*ways, *data]).encode()).hexdigest()
    found: list[Any] = json.loads(json.dumps([unit._replace(trainings=1), *settings[1:], digest]))
    return found


def run(settings: Settings, file: Path | None) -> dict[str, Any]:
    """Measure what a results file lacks or has by other settings; write after each training."""
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
    started = time.perf_counter()
    before = stored["seconds"] if known else 0.0
    failures = []
    hush = logging.getLogger("dare").setLevel  # warnings: some merges are weak by intention
    with ProcessPoolExecutor(
        mp_context=get_context("spawn"), initializer=hush, initargs=(logging.ERROR,)
    ) as pool:
        say(f"{len(every) - len(known)} of {len(every)} trainings are left")
        names = {
            pool.submit(measure, *what): name for name, what in every.items() if name not in known
        }
        for done in as_completed(names):
            if error := done.exception():
                failures.append(f"{names[done]} failed: {error!r}")
                continue
            results["units"][names[done]] = done.result()
            results["seconds"] = round(before + time.perf_counter() - started, 1)
            left = len(every) - len(results["units"])
            say(f"{names[done]} is measured, {results['seconds']:.0f} s; {left} more")
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
        "--quick",
        action="store_true",
        help="small models and fewer ways: a minute or two on two cores",
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
