# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[torch,plot]", "scikit-learn"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""Does DARE work? Train models from nothing, thin and merge them with this tool, score them, and compare.

    uv run examples/quality.py --quick
    uv run examples/quality.py --out results.json --plot picture.png [--device cuda] [--jobs 6]
    uv run examples/quality.py --report results.json [--plot picture.png]

Two families, each at three widths, on data that every machine has: small transformers that read the standard library
of Python letter by letter and are fine-tuned for word tasks, and networks that read scikit-learn's digits. For each
family and width: a base, a fine-tune with small deltas for each of three skills, and one with large deltas.
What is tuned is tuned on validation data with masks of their own, and scored on test data. The tables and the verdicts
are made from the scores alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final

import torch
from quality_families import FAMILIES
from quality_report import SINGLE_ARMS, draw, mean_of, report, skill_of
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it also runs without an installation

from dare import DareConfig, dare_merge

Weights = dict[str, Tensor]


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


FULL: Final = Settings(
    plans={
        "chars": Plan((64, 256, 768), Recipe(5000, 4e-3, 256), Recipe(1500, 3e-4, 128), Recipe(1500, 4e-3, 128)),
        "digits": Plan((64, 512, 2048), Recipe(200, 1e-3, 64), Recipe(600, 1e-3, 64), Recipe(1500, 1e-2, 64)),
    },
    rates=(0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99),
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
# Training
# ---------------------------------------------------------------------------------------------------------------------


def train(model: nn.Module, loss_of: Callable[..., Tensor], recipe: Recipe, rate: float, seed: int) -> None:
    """Adam, with a rate that rises for a tenth of the steps and then falls to 0."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
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

TRIM: Final = 0.2  # what TIES-Merging keeps, by its paper


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
        for number in range(count if config.drop_rate else 1):
            seed = first + SEED_STEP * number
            merged = dare_merge(self.base, self.experts, dataclasses.replace(config, seed=seed))
            rows.append([self.lab.score(merged, skill, part) for skill in self.skills])
        return rows

    def choose(self, configs: Sequence[DareConfig], count: int) -> DareConfig:
        """The configuration with the best mean on validation data, with validation masks; the first of equals."""
        if len(configs) == 1:
            return configs[0]
        return max(configs, key=lambda config: mean_of(self.scores(config, "validation", VALIDATION_SEED, count)))

    def test(self, config: DareConfig, count: int) -> list[list[float]]:
        return self.scores(config, "test", TEST_SEED, count)


def round_all(values: Sequence[float]) -> list[float]:
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
        config = trial.choose(single_configs(arm, rate, settings), settings.validation_seeds)
        found[arm].append(round_all([row[0] for row in trial.test(config, settings.test_seeds)]))
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
        config = trial.choose(configs, settings.validation_seeds)
        scores = [round_all(row) for row in trial.test(config, settings.test_seeds)]
        found[arm] = {"drop_rate": config.drop_rate, "lambda": config.lambda_coeff, "scores": scores}
    return found


def run_unit(unit: str, settings: Settings, device: str) -> dict[str, Any]:
    """Train and measure one family at one width."""
    # On one thread sums are taken in the same order every time; several units keep several cores busy.
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()

    def log(what: str) -> None:
        print(f"{unit:12} {time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr, flush=True)

    family, width = unit.split("/")
    lab = Lab(family, int(width), settings.plans[family], device)
    base, experts = lab.make()
    skills = lab.family.skills
    log("trained")
    models: dict[str, Any] = {"base": {"scores": round_all([lab.score(base, skill, "test") for skill in skills])}}
    single, merged = {}, {}
    for name, expert in experts.items():
        scores = round_all([lab.score(expert, skill, "test") for skill in skills])
        models[name] = {"scores": scores, "delta": {key: float(f"{x:.4g}") for key, x in deltas(base, expert).items()}}
        single[name] = one_model(Trial(lab, base, [expert], (skill_of(name, skills),)), settings)
        log(f"dropped from {name}")
    for chosen in [*combinations(skills, 2), skills]:
        merged[" + ".join(chosen)] = several_models(Trial(lab, base, [experts[s] for s in chosen], chosen), settings)
        log(f"merged {' + '.join(chosen)}")
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"{os.cpu_count()} CPU cores"
    return {
        "settings": unit_settings(unit, settings, device),
        "machine": f"{where}, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "seconds": round(time.perf_counter() - started, 1),
        "parameters": sum(tensor.numel() for tensor in base.values()),
        "skills": list(skills),
        "models": models,
        "single": single,
        "merged": merged,
    }


def unit_settings(unit: str, settings: Settings, device: str) -> dict[str, Any]:
    """What a unit's results depend on; in the form that they have after a trip through JSON."""
    table = dataclasses.asdict(settings)
    table["plan"] = table.pop("plans")[unit.split("/")[0]]
    del table["plan"]["widths"]
    return json.loads(json.dumps(table | {"device": device}))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------------------------
# The results file and the command line
# ---------------------------------------------------------------------------------------------------------------------

MARK: Final = "Written by examples/quality.py"


def load_results(path: Path) -> dict[str, Any]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["mark"] != MARK:
            raise ValueError("it has another mark")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is not a results file of this script: {error}") from None
    return results  # type: ignore[no-any-return]


def save_results(results: dict[str, Any], path: Path) -> None:
    """Whole or not at all, a line to a unit."""
    units = ",\n".join(f"{json.dumps(name)}: {json.dumps(unit)}" for name, unit in sorted(results["units"].items()))
    head = json.dumps({key: value for key, value in results.items() if key != "units"})[:-1]
    partial = path.with_name(path.name + ".partial")
    partial.write_text(f'{head}, "units": {{\n{units}\n}}}}\n', encoding="utf-8")
    partial.replace(path)


def measure(settings: Settings, device: str, jobs: int, out: Path | None) -> dict[str, Any]:
    """Run what is not in the results file yet."""
    results: dict[str, Any] = {"mark": MARK, "seconds": 0.0, "units": {}}
    if out and out.exists():
        results = load_results(out)
    # The longest first, so that none is waited for at the end.
    units = [f"{family}/{width}" for family, plan in settings.plans.items() for width in sorted(plan.widths)[::-1]]
    for unit, found in results["units"].items():
        if unit not in units or found["settings"] != unit_settings(unit, settings, device):
            raise SystemExit(f"{out} holds results of other settings: give another file after --out")
    started, before = time.perf_counter(), results["seconds"]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        missing = [unit for unit in units if unit not in results["units"]]
        waiting = {pool.submit(run_unit, unit, settings, device): unit for unit in missing}
        try:
            for done in as_completed(waiting):
                results["units"][waiting[done]] = done.result()
                results["seconds"] = round(before + time.perf_counter() - started, 1)
                if out:
                    save_results(results, out)
        except BaseException:  # do not wait for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--quick", action="store_true", help="smaller models and fewer masks: minutes on two cores")
    add("--out", metavar="FILE", type=Path, help="write the results here, and continue what is there")
    add("--report", metavar="FILE", type=Path, help="train nothing: tables, verdicts and picture from a results file")
    add("--plot", metavar="FILE", type=Path, help="draw the scores: a .png or .svg file")
    add("--device", default="cpu", help="where to train and merge: cpu (default) or cuda")
    add("--jobs", metavar="N", type=int, help="models at a time (default: one for each core, and 1 on a GPU)")
    options = parser.parse_args()
    if options.report:
        results = load_results(options.report)
    else:
        jobs = options.jobs or (1 if options.device.startswith("cuda") else os.cpu_count() or 1)
        results = measure(QUICK if options.quick else FULL, options.device, jobs, options.out)
    print(report(results))
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; with --out, the same command continues")
