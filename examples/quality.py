# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot,sweep]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""What should I use? Train models, merge them in every way that this tool has, and rank the ways.

    uv run examples/quality.py --quick
    uv run examples/quality.py --out results.json --plot picture.png
    uv run examples/quality.py --report results.json [--plot picture.png]

Two families on data that every machine has, in bf16: transformers that read the sources and the
documentation of Python letter by letter and are fine-tuned for word tasks, the largest of 100
million parameters, and networks that read scikit-learn's digits. Each is trained several times
over: a base, and a fine-tune for each of three skills (or eight). Each way to merge two, three (and
eight) of them gets the same number of trials of the tool's own search, on validation data and with
masks of their own; what it finds is scored on test data. A run that was stopped goes on where its
results file ends.
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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple
from zlib import crc32

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
    seeded,
)
from quality_report import draw, report
from torch import Tensor, nn

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, dare_merge, dare_sweep

quiet = partial(DareConfig, verbose=False)
State = dict[str, Tensor]
Recipe = tuple[int, float, int]  # of a training run: steps, rate for a width of 64, batch
SCALE = {"low": 0.3, "high": 3.0}
RATE = {"low": 0.0, "high": 0.99}
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
METHODS: Final = {
    "linear": "task arithmetic",
    "ties": "ties",
    "slerp": "slerp",
    "ram": "ram",
    "wudi": "wudi",
}
# What is dropped without a search.
FIXED: Final[dict[str, dict[str, Any]]] = {
    "": {"drop_rate": 0.0},
    " + DARE 0.5": {"drop_rate": 0.5},
    " + DARE 0.9": {"drop_rate": 0.9},
    " + magnitude 0.5": {"drop": "magnitude", "drop_rate": 0.5},
    " + breadcrumbs 0.5": {"drop": "breadcrumbs", "drop_rate": 0.5},
    " + della 0.5": {"drop": "della", "drop_rate": 0.5},
}
DRAWN: Final = ("random", "della")  # drops by masks


class Unit(NamedTuple):
    """A kind of network and its training; a low rate keeps the deltas of fine-tunes small."""

    family: str
    width: int
    layers: int
    base: Recipe
    expert: Recipe
    # One in each round: its networks have the same held-out data and merge the same pair.
    trainings: int = 8
    trials: int = 16  # of the search of each contender
    # How many skills are merged, one number after the other; the last is how many are learned.
    merged: tuple[int, ...] = (2, 3)

    def __str__(self) -> str:
        return f"{self.family}/{self.width}"


class Settings(NamedTuple):
    """What is trained and how much is tried; by default as in the documents."""

    units: tuple[Unit, ...] = (  # the longest first, so that none is waited for at the end
        Unit("chars", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3),
        *(Unit("chars", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128)) for width in (768, 256, 64)),
        *(Unit("digits", width, 2, (200, 1e-3, 64), (600, 1e-3, 64)) for width in (2048, 512, 64)),
    )
    drops: tuple[str, ...] = (*THINNINGS, *FIXED)  # with and without a search
    masks: int = 3  # with which a merge is tested
    confirm: int = 3  # masks with which the best of a search are scored again, before
    rates: tuple[float, ...] = (*(k / 10 for k in range(10)), 0.95, 0.99)  # for one model
    lambdas: tuple[float, ...] = (1.0, 1.5, 2.0)  # without a search


QUICK: Final = Settings(
    units=(
        # Wide enough for whole matrices, by which networks that are 64 wide lose.
        Unit("digits", 512, 2, (200, 1e-3, 64), (400, 1e-3, 64), 4, 3, (2, 3, 8)),
        Unit("chars", 64, 2, (600, 6e-3, 32), (300, 1.2e-3, 48), 2, 3),
    ),
    drops=("", " + DARE", " + DARE 0.5", " + DARE 0.9"),
    masks=1,
    confirm=0,
    rates=(0.0, 0.5, 0.8, 0.9, 0.99),
)
# Trainings with seeds below were looked at when the recipes were chosen.
FIRST_SEED: Final = 100
# Model i of a merge draws with seed + i. Seeds so far apart share no mask, and those of search and
# test lie apart. A search also draws its first trials by its seed: it is another one for each
# merge, so that luck evens out.
SEARCH_SEEDS = range(10_000, 1_000_000, 100)
TEST_SEEDS = range(2000, 3000, 10)
# Of one model, by drop rate.
ARMS: Final[dict[str, dict[str, Any]]] = {
    "DARE": {},
    "no rescale": {"rescale": "none"},
    "magnitude": {"drop": "magnitude"},
}


def lower_precision() -> torch.autocast:
    """A GPU computes in bf16."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda")


class Lab:
    """The models of one training, and the scores of their merges."""

    def __init__(self, unit: Unit, training: int) -> None:
        self.unit = unit
        self.training = training
        seed = FIRST_SEED + training
        self.family = FAMILIES[unit.family](seed)
        torch.manual_seed(seed)
        self.model = self.family.network(unit.width, unit.layers)
        self.base = self.fit(unit.base, 10 * seed)
        self.experts = {}
        self.skills = self.family.skills[: unit.merged[-1]]
        for number, skill in enumerate(self.skills, 1):
            self.model.load_state_dict(self.base)
            self.experts[skill] = self.fit(unit.expert, 10 * seed + number, skill)

    def fit(self, recipe: Recipe, seed: int, skill: str | None = None) -> State:
        """Train on from the weights as they are, for one skill or as a base. Gives them in bf16."""
        steps, rate, batch = recipe
        # The wider, the less each weight has to move: between the square root, common for whole
        # models, and 1 / width.
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
        """The score of a merge of experts, as a mean over masks where it draws any."""
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
            self.base,
            experts,
            lambda state: self.score(state, skills, "validation"),
            space,
            quiet(seed=seed),
            trials=self.unit.trials,
            confirm=settings.confirm,
        ).best
        chosen = {
            name: round(value, 4) for name, value in best.params.items() if isinstance(value, float)
        }
        score = self.test(skills, best.config, settings.masks)
        return {"score": score, "validation": round(best.mean(0), 4), "chosen": chosen}


def list_ways(
    count: int, thinnings: dict[str, dict[str, Any]], settings: Settings
) -> dict[str, dict[str, Any]]:
    """All ways to merge so many models that go with some ways to drop."""
    found = {}
    for (method, name), thinning in product(METHODS.items(), settings.drops):
        given = thinnings.get(thinning)
        # Slerp is of two, with random drops only.
        if given and (method != "slerp" or (count == 2 and "drop" not in given)):
            found[name + thinning] = {"method": method, **given}
    return found


def list_contenders(count: int, settings: Settings) -> dict[str, dict[str, Any]]:
    """What a search is made for, each with what it chooses from."""
    return {
        name: {"lambda_coeff": SCALE, **space}
        for name, space in list_ways(count, THINNINGS, settings).items()
    }


def measure(unit: Unit, training: int, settings: Settings) -> dict[str, Any]:
    """Train once, and measure."""
    # On one thread sums are taken in the same order every time; several trainings keep several
    # cores busy.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device(DEVICE)
    started = time.perf_counter()
    lab = Lab(unit, training)
    skills = lab.skills
    seconds = {"training": time.perf_counter() - started}
    print(f"{unit}/{training} is trained, {seconds['training']:.0f} s", file=sys.stderr, flush=True)
    curves = {
        arm: [
            fmean(lab.test([skill], quiet(drop_rate=rate, **more)) for skill in skills)
            for rate in settings.rates
        ]
        for arm, more in ARMS.items()
    }
    merges: dict[str, Any] = {}
    for count in unit.merged:
        chosen = [skills[(training + k) % len(skills)] for k in range(count)]
        spaces = list_contenders(count, settings)
        found = {name: lab.contend(chosen, space, settings) for name, space in spaces.items()}
        ways = list_ways(count, FIXED, settings).items()
        for (name, given), scale in product(ways, settings.lambdas):
            score = lab.test(chosen, quiet(lambda_coeff=scale, **given), settings.masks)
            found[f"{name}, lambda {scale:g}"] = {"score": score, "chosen": {}}
        merges[" + ".join(chosen)] = found
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    seconds["all"] = time.perf_counter() - started
    return {
        "settings": describe(unit, settings),
        "machine": f"{where}, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"optuna {version('optuna')}",
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
