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
trained several times over: a base, and a fine-tune for each skill. Two, three or eight of them are
merged: by weights alone, and matched with examples of each skill; in full, and as the tenth that
DARE leaves of each. Every merge is scored on test data with a lambda of 1, with the lambdas that
held-out examples choose, and with the one that is best on validation data; and by what it costs
elsewhere. A run that was stopped goes on where its results file ends.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from quality_families import (
    BASE_TEXT,
    COPIES,
    DEVICE,
    FAMILIES,
    HELD,
    HELD_OUT,
    JUDGES,
    PROMPTS,
    REHEARSED,
    RIGHT_SHARE,
    SKILL,
    SMOOTHING,
    TASK_SHARE,
    Adapters,
    Asked,
    join,
    seeded,
)
from quality_report import draw, report
from torch import Tensor, nn
from torch.nn import functional as F

# So that it also runs without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dare import DareConfig, dare_match, dare_merge, dare_sparsify
from darelib.run.matching.judging import LAMBDAS
from darelib.run.matching.network import fast_products

State = dict[str, Tensor]
Recipe = tuple[int, float, int]  # of a training run: steps, rate for a width of 64, batch
TENTHS: Final = 0.9  # the share that DARE drops


class Way(NamedTuple):
    """A way to merge."""

    method: str
    examples: int = 0  # of each skill, to match with; 0: by weights alone
    dropped: float = 0.0  # what DARE drops of each fine-tune; nothing else is left of it
    based: bool = False  # whether the base takes part, with text of its own
    kind: str = SKILL  # what the examples show
    turned: int = 0  # whose examples a fine-tune gets: of another skill that is so far away


AVERAGE: Final = "task arithmetic"
STARTS: Final = {AVERAGE: "linear", "wudi": "wudi"}
WAYS: Final = {
    **{name: Way(method) for name, method in STARTS.items()},
    **{f"{name} + DARE 0.9": Way(method, dropped=TENTHS) for name, method in STARTS.items()},
    **{
        f"{name}, matched with {count}": Way(method, count)
        for name, method in STARTS.items()
        for count in (16, 64, 512)
    },
    "tenths, matched with 64": Way("linear", 64, TENTHS),
    "tenths, matched with 512": Way("linear", 512, TENTHS),
    "matched with 512, and the base's text": Way("linear", 512, based=True),
}
# How few examples, and how wrong: tried where all skills are merged.
LIMITS: Final = {
    **{
        f"{AVERAGE}, matched with {count}": Way("linear", count)
        for count in (8, 32, 128, 256, 1024, 2048)
    },
    "examples in the wrong order": Way("linear", 512, turned=1),
    "examples of other text": Way("linear", 512, kind=BASE_TEXT),
    "examples without answers": Way("linear", 512, kind=PROMPTS),
}
JUDGING: Final = Way("", JUDGES, kind=HELD)
# Skills that are next to those merged: tried where not all are.
ANOTHER: Final = {"examples of another skill": Way("linear", 512, turned=3)}


class Unit(NamedTuple):
    """A kind of network and its training; a low rate keeps the deltas of fine-tunes small."""

    family: str
    width: int
    layers: int
    base: Recipe
    expert: Recipe
    # One in each round: its networks have the same held-out data and merge the same pair.
    trainings: int = 6
    # How many skills are merged, one number after the other; the last is how many are learned.
    merged: tuple[int, ...] = (2, 3, 8)
    rank: int = 0  # of fine-tunes by LoRA; 0: in full
    limits: bool = False  # whether it is tried how few and how wrong examples may be
    masks: int = 2  # with which a merge of tenths is tested
    ways: tuple[str, ...] = tuple(WAYS)

    def __str__(self) -> str:
        deep = f"x{self.layers}" if self.layers >= DEEP else ""
        return f"{self.family}/{self.width}{deep}"


DEEP: Final = 24  # blocks


class Tested(NamedTuple):
    """What a merge does on test data, and the loss at what no skill is about."""

    score: float
    elsewhere: float
    searched: float | None = None  # the lambda, where it was chosen


once = partial(Unit, masks=1)
# What is trained; the longest first, so that none is waited for at the end.
UNITS: Final = (
    once("chars", 1536, 11, (400, 4e-3, 96), (400, 3e-4, 128), 1),
    once("chars", 512, DEEP, (600, 4e-3, 96), (500, 3e-4, 128), 3, limits=True),
    once("lora", 512, DEEP, (600, 4e-3, 96), (500, 6e-3, 128), 3, rank=16),
    once("chars", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3),
    once("lora", 1024, 8, (500, 4e-3, 96), (500, 6e-3, 128), 3, rank=16),
    once("contexts", 384, DEEP, (600, 4e-3, 96), (500, 3e-4, 128), 3, (2, 3)),
    once("contexts", 1024, 8, (500, 4e-3, 96), (500, 3e-4, 128), 3, (2, 3)),
    Unit("chars", 768, 2, (1000, 4e-3, 64), (800, 3e-4, 128), limits=True),
    Unit("lora", 768, 2, (1000, 4e-3, 64), (800, 6e-3, 128), rank=16),
    *(Unit("chars", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128)) for width in (256, 64)),
    Unit("lora", 256, 2, (1000, 4e-3, 64), (800, 6e-3, 128), rank=16),
    *(
        Unit("contexts", width, 2, (1000, 4e-3, 64), (800, 3e-4, 128), merged=(2, 3))
        for width in (768, 256)
    ),
    Unit("digits", 2048, 2, (200, 1e-3, 64), (600, 1e-3, 64), limits=True),
    *(Unit("digits", width, 2, (200, 1e-3, 64), (600, 1e-3, 64)) for width in (512, 64)),
)
# Wide enough for eight skills merged by whole matrices; enough trainings to compare ways.
QUICK: Final = (
    once(
        *("digits", 512, 2, (200, 1e-3, 64), (400, 1e-3, 64)),
        merged=(2, 8),
        ways=(
            *(AVERAGE, "wudi", f"{AVERAGE} + DARE 0.9", f"{AVERAGE}, matched with 64"),
            *(f"{AVERAGE}, matched with 512", "tenths, matched with 512"),
        ),
    ),
)
# Trainings with seeds below were looked at when the recipes were chosen.
FIRST_SEED: Final = 5000
# Of the masks of a training: model i of a merge draws with seed + i, so that those which are ten
# apart share none.
FIRST_MASK: Final = 30_000
# What a way to merge takes for each skill, with all its lambdas, in steps of training: as measured
# with the quick networks, on one core.
MERGE_WORK: Final = 60
PAUSE: Final = 5  # seconds between two lines of a training
WARM: Final = 3  # steps of a training that a GPU does one by one, before it repeats them as a whole


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


def lower_precision(wanted: bool = True) -> torch.autocast:
    """A GPU computes in bf16."""
    return torch.autocast(DEVICE, torch.bfloat16, enabled=wanted and DEVICE == "cuda")


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
        is_repeated = DEVICE == "cuda"
        optimizer = torch.optim.Adam(
            parameters,
            lr=torch.tensor(rate) if is_repeated else rate,  # a GPU looks it up at each step
            betas=(0.9, 0.99),
            fused=True,
            capturable=is_repeated,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, steps, pct_start=0.1, cycle_momentum=False
        )

        def step() -> None:
            optimizer.zero_grad()
            with lower_precision():
                self.family.loss(model, skill, batch, generator).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        with on_a_stream() as stream:
            again = step
            for k in range(steps):
                if is_repeated and k == WARM:
                    again = capture(step, generator, stream)
                again()
                schedule.step()

    @torch.no_grad()
    def answer(self, state: State, asked: Asked, exact: bool = False) -> Tensor:
        """The logits of a model. exact: where two models are compared, as dare_match does it."""
        self.model.load_state_dict(state)
        with fast_products(), lower_precision(not exact):
            logits: Tensor = self.model(asked.inputs)
            return logits

    def score(self, state: State, skills: Sequence[str], part: str) -> float:
        """The share of right answers, as a mean over skills, which have as many questions each."""
        asked = join([self.family.test(skill, part) for skill in skills])
        return asked.right(self.answer(state, asked)).float().mean().item()

    def measure_elsewhere(self, state: State) -> float:
        """The loss at what no skill is about."""
        asked = self.family.elsewhere()
        return asked.loss(self.answer(state, asked)).item()

    def test(self, state: State, skills: Sequence[str], searched: float | None = None) -> Tested:
        score = self.score(state, skills, "test")
        return Tested(round(score, 4), round(self.measure_elsewhere(state), 4), searched)

    def thin(self, skills: Sequence[str], dropped: float, mask: int) -> list[State]:
        """The fine-tunes that are merged."""
        seed = FIRST_MASK + 1000 * self.training + 10 * mask
        return [
            dare_sparsify(self.base, self.experts[skill], dropped, seed + i)
            for i, skill in enumerate(skills)
        ]

    def show(self, skills: Sequence[str], way: Way) -> list[list[Asked]]:
        """What a way shows of each of some skills, as batches."""
        every = self.family.skills
        found = []
        for skill in skills:
            owner = (every.index(skill) + way.turned) % len(every)
            generator = seeded(1000 * (FIRST_SEED + self.training) + owner)
            found.append(self.family.show(every[owner], way.examples, generator, way.kind))
        return found

    def merge(self, experts: Sequence[State], shown: Sequence[Sequence[Asked]], way: Way) -> State:
        """With a lambda of 1, in float32."""
        config = DareConfig(method=way.method, drop_rate=0.0, dtype="float32", verbose=False)
        if not way.examples:
            return dare_merge(self.base, experts, config)
        batches = [[asked.inputs for asked in own] for own in shown]
        texts = None
        if way.based:
            generator = seeded(FIRST_SEED + self.training)
            own = self.family.show(self.skills[0], way.examples, generator, BASE_TEXT)
            texts = [asked.inputs for asked in own]
        return dare_match(self.model, self.base, experts, batches, config, base_batches=texts)

    def scale(self, merged: State, by: float) -> State:
        """The merge with another lambda, in the type that it is stored in."""
        return {
            name: (base.float() + by * (merged[name] - base.float())).to(base.dtype)
            for name, base in self.base.items()
        }

    def choose(
        self, merged: State, experts: Sequence[State], skills: Sequence[str]
    ) -> dict[str, float]:
        """Lambdas: the best on validation data, of equals the smallest; and those with which
        held-out examples are nearest to the fine-tunes (the mean KL divergence), or their answers
        likeliest.
        """
        held = [join(own) for own in self.show(skills, JUDGING)]
        asked = join(held)
        expected = [self.answer(e, own, True) for e, own in zip(experts, held, strict=True)]
        wanted = F.log_softmax(torch.cat(expected), -1)
        costs: dict[str, list[float]] = {name: [] for name in CHOSEN}
        for scale in LAMBDAS:
            state = self.scale(merged, scale)
            logits = self.answer(state, asked, True)
            apart = F.kl_div(F.log_softmax(logits, -1), wanted, reduction="sum", log_target=True)
            found = (
                -self.score(state, skills, "validation"),
                apart.item(),
                asked.loss(logits).item(),
            )
            for name, cost in zip(CHOSEN, found, strict=True):
                costs[name].append(cost)
        return {name: LAMBDAS[own.index(min(own))] for name, own in costs.items()}

    def try_way(self, skills: Sequence[str], way: Way) -> dict[str, Any]:
        """What a way gives by how lambda is chosen, as means over masks; the seconds that a merge
        takes; and for how many of the models examples seem to be wrong.
        """
        shown = self.show(skills, way) if way.examples else []
        tried: dict[str, list[Tested]] = {}
        seconds = []
        warned = []
        for mask in range(self.unit.masks if way.dropped else 1):
            experts = self.thin(skills, way.dropped, mask)
            started = time.perf_counter()
            merged = self.merge(experts, shown, way)
            synchronize()
            seconds.append(time.perf_counter() - started)
            lambdas = {"lambda 1": 1.0, **self.choose(merged, experts, skills)}
            tested = {
                by: self.test(self.scale(merged, by), skills, by) for by in {*lambdas.values()}
            }
            for name, by in lambdas.items():
                tried.setdefault(name, []).append(tested[by])
            warned += [self.seems_wrong(*pair) for pair in zip(experts, shown, strict=False)]
        return {
            "seconds": round(fmean(seconds), 3),
            "warned": sum(warned),
            "models": len(warned),
            "tested": {name: average(found) for name, found in tried.items()},
        }

    def seems_wrong(self, expert: State, shown: Sequence[Asked]) -> bool:
        """Whether a model is no better than the base on the answers of its own examples."""
        own, base = (
            sum(asked.loss(self.answer(state, asked)).item() for asked in shown)
            for state in (expert, self.base)
        )
        return own >= base


CHOSEN: Final = "best", "lambda auto", "lambda by answers"


def average(tried: Sequence[Tested]) -> Tested:
    score, elsewhere, searched = zip(*tried, strict=True)
    return Tested(round(fmean(score), 4), round(fmean(elsewhere), 4), round(fmean(searched), 4))


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@contextmanager
def on_a_stream() -> Iterator[Any]:
    """A GPU records what is done on a stream of its own."""
    if DEVICE != "cuda":
        yield None
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.current_stream().wait_stream(stream)


def capture(
    step: Callable[[], None], generator: torch.Generator, stream: Any
) -> Callable[[], None]:
    """A step that a GPU repeats as a whole: one by one, most of the time is Python's."""
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def list_ways(count: int, unit: Unit) -> dict[str, Way]:
    """All ways to merge so many models of a kind."""
    every = {name: WAYS[name] for name in unit.ways}
    if not unit.limits or count == 2:
        return every
    if count < unit.merged[-1]:
        return every | ANOTHER
    # The numbers of digits have no prompts.
    limits = {n: way for n, way in LIMITS.items() if way.kind != PROMPTS or unit.family != "digits"}
    return every | limits


def measure(unit: Unit, training: int) -> dict[str, Any]:
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
    alone = [lab.test(lab.experts[skill], [skill]) for skill in skills]
    thinned = zip(lab.thin(skills, TENTHS, 0), skills, strict=True)
    tenths = [lab.score(state, [skill], "test") for state, skill in thinned]
    merges: dict[str, Any] = {}
    tried: dict[str, Any] = {}
    for count in unit.merged:
        chosen = [skills[(training + k) % len(skills)] for k in range(count)]
        found = {}
        cell = " + ".join(chosen)
        tried[cell] = {}
        for name, way in list_ways(count, unit).items():
            made = lab.try_way(chosen, way)
            for choice, tested in made.pop("tested").items():
                if choice == "lambda 1":
                    tested = tested._replace(searched=None)
                found[name if choice == "best" else f"{name}, {choice}"] = tested
            tried[cell][name] = made
            lab.progress.advance(MERGE_WORK * count, f"{count} skills are merged by {name}")
        merges[cell] = found
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    seconds["all"] = time.perf_counter() - started
    return {
        "settings": describe(unit),
        "machine": f"{where}, {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}",
        "parameters": sum(tensor.numel() for tensor in lab.base.values()),
        "seconds": {name: round(taken, 1) for name, taken in seconds.items()},
        "base": round(lab.score(lab.base, skills, "test"), 4),
        "elsewhere": {  # the loss of the base, and of the fine-tunes
            "base": round(lab.measure_elsewhere(lab.base), 4),
            "fine-tunes": round(fmean(each.elsewhere for each in alone), 4),
        },
        # Of fine-tunes by themselves, by how much is dropped.
        "curves": {
            "DARE": [round(fmean(each.score for each in alone), 4), round(fmean(tenths), 4)]
        },
        "merges": merges,
        "tried": tried,
    }


def describe(unit: Unit) -> list[Any]:
    """What a measurement depends on, as a results file has it; not how many there are."""
    ways = [WAYS, LIMITS, ANOTHER, LAMBDAS, JUDGES]
    data = [FIRST_SEED, TASK_SHARE, RIGHT_SHARE, REHEARSED, HELD_OUT, SMOOTHING, COPIES]
    digest = hashlib.sha256(json.dumps([*ways, *data]).encode()).hexdigest()
    found: list[Any] = json.loads(json.dumps([unit._replace(trainings=1), digest]))
    return found


def run(units: Sequence[Unit], file: Path | None) -> dict[str, Any]:
    """Measure what a results file lacks or has by other settings; write after each training."""
    every = {f"{unit}/{k}": (unit, k) for unit in units for k in range(unit.trainings)}
    stored = (
        json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else {"units": {}}
    )
    known = {name: record for name, record in stored["units"].items() if name in every}
    known = {
        name: record
        for name, record in known.items()
        if record["settings"] == describe(every[name][0])
    }
    results: dict[str, Any] = {"seconds": 0.0, "rates": [0.0, TENTHS], "units": known}
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
        results = run(QUICK if options.quick else UNITS, options.out)
    print(report(results))
    if options.plot:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
