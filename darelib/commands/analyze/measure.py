"""The measurement: sums over the deltas of jobs, tensors, groups of tensors and pairs of models,
and the figures that come of them, as plain data.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations, product
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.arithmetic.chunks import compare
from darelib.commands.analyze.overlaps import measure_energy, measure_spaces
from darelib.core.drops import L1, RANDOM
from darelib.core.formats import BINS, FIRST_BIN
from darelib.core.interrupts import Interrupts
from darelib.core.text import DareError, progress
from darelib.methods.looks import Found, Look, TensorSettings
from darelib.models.checkpoint import Checkpoint, module_of
from darelib.plan.plan import LOOK, MergePlan
from darelib.plan.tensorplan import TensorPlan
from darelib.run.rounds import run_rounds
from darelib.run.worker import Worker, sum_fields

# What tensors do, by their names: the first pattern that is found in one.
KINDS: Final = {
    "text encoder": re.compile(
        r"(^|\.)(cond_stage_model|conditioner|text_encoders?(_\d)?|text_model\.encoder)\."
        r"(?!.*(_embedding|\bshared)\b)"
    ),
    "VAE": re.compile(r"(^|\.)(first_stage_model|vae)\."),
    "norm": re.compile(r"norm|(^|[._])ln(_?\w+)?\.|(^|\.)bn\d*\.", re.IGNORECASE),
    "head": re.compile(
        r"(^|\.)(lm_head|head|classifier|score|embed_out|output_projection|predictions|cls)\."
    ),
    "embedding": re.compile(
        r"(?<!time_)(?<!time_text_)(?<!label_)(?<!add_)embed(?!der)"
        r"|(^|\.)(wte|wpe|shared|embedder)\."
    ),
    "attention": re.compile(
        r"att(entio)?n(?!.*\.ff\.)|(^|\.)(q|k|v|o|qkv|query|key|value)(_proj)?\.", re.IGNORECASE
    ),
    "MLP": re.compile(
        r"mlp|ffn|feed_?forward|expert"
        r"|(^|\.)(fc\w*|ff|gate|router|dense|intermediate|w[io123])(_\w+)?\.|dense"
    ),
    "other": re.compile(""),
}
# Where in a model a tensor is: all of a diffusion model's text encoder or VAE, else its name up to
# the first number.
LAYER: Final = re.compile(
    r"(?:cond_stage_model|text_encoder(?:_\d|s\.\w+)?|first_stage_model|vae)(?=\.)"
    r"|(?:.*?\.)?(?:\d+|mid(?:dle)?_block)(?=\.)"
)
# How much of a name's end is searched: the patterns take time with the square of its length.
SEARCHED: Final = 200
# Where the bins of |delta| begin, and the last ends: 16 to a doubling, so that the middle of one is
# within 3.1% of all that is in it. The first also holds what is smaller, the last what is larger.
EDGES: Final[list[float]] = (
    (np.arange(FIRST_BIN, FIRST_BIN + BINS + 1, dtype=np.uint32) << 19).view("f4").tolist()
)
# What is added up for each model that has the tensor, and for each pair of them.
MODEL_SUMS: Final = ("zeros", "above", "size", "squares")
PAIR_SUMS: Final = ("product", "opposed", "both", "opposed_size", "both_size")
# A layer and a kind of tensors; None: all of them.
Group: TypeAlias = tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)  # there may be very many
class DeltaStats:
    """What one model changed in some tensors. Percentiles come from counts by size: within 3.1%."""

    name: str
    tensors: int
    parameters: int
    share_zero: float
    mean: float  # of |delta|, as all up to the percentiles
    standard_deviation: float
    largest: float
    p50: float
    p95: float
    p99: float
    share_above_threshold: float
    share_below_1_percent: float  # of the largest
    relative_norm: float  # |delta| / |weights|
    relative_noise: float  # what dropping is expected to add, / |weights|


@dataclass(frozen=True)
class ModelAnalysis:
    """What one model changed: in all, by layer, by kind of tensor, and tensor by tensor."""

    name: str
    label: str  # a shorter name
    adapter: bool
    drop_rate: float  # as it is set now, rules apart
    total: DeltaStats
    kinds: tuple[DeltaStats, ...]
    layers: tuple[DeltaStats, ...]
    cells: Mapping[str, Mapping[str, float]]  # mean |delta| by layer and kind
    # Where a bin of |delta| begins, and how many are in it; zeros apart.
    histogram: tuple[tuple[float, int], ...]
    # By rank: the share of the energy (sum of squares) that a product of two thin matrices would
    # keep of some matrices' changes. Empty: it changes none, or not all is known.
    energy: Mapping[str, float]
    tensors: tuple[DeltaStats, ...]


@dataclass(frozen=True)
class PairAnalysis:
    """How two models' changes relate to one another."""

    models: tuple[str, str]
    cosine: float  # of their task vectors
    share_both: float  # of the parameters, that both change
    sign_conflict: float  # of those, the share that they change in opposite directions
    weighted_sign_conflict: float  # the same, each counted by how much they change it
    # How much the row spaces of their changes overlap, from 0 to 1; None: they change no matrix
    # both.
    shared_space: float | None


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if pattern.search(name[-SEARCHED:]))


def layer_of(name: str) -> str:
    """Where in the model a tensor is, as the start of its name; its module if it has no layer."""
    layer = LAYER.match(name)
    return layer[0] if layer else module_of(name)


def groups_of(name: str) -> list[Group]:
    """The groups of a tensor: its layer and kind, its layer, its kind, the whole model."""
    return [*product((layer_of(name), None), (kind_of(name), None))]


def natural(name: str) -> tuple[bool, list[tuple[str, int, str]]]:
    """A key to sort layers by: numbers as numbers, however long, and blocks before all others."""
    is_block = re.search(r"(\d|mid(dle)?_block)$", name)
    parts = re.findall(r"(\D*)0*(\d*)", name)
    return not is_block, [(text, len(number), number) for text, number in parts]


def noise_of(settings: TensorSettings, model: int) -> float:
    """The expected distance of a thinned delta from the delta, relative to it.

    That is sqrt(p / (1 - p)) if it is rescaled. Drops by size are taken as if they were random.
    """
    thinning = settings.thinnings[model]
    kept = thinning.keep_rate
    divisor = thinning.divisor if thinning.drop == RANDOM and thinning.rescale != L1 else kept
    return math.sqrt(kept * (1 / divisor - 1) ** 2 + 1 - kept)


class Deltas(NamedTuple):
    """The sums over some tensors' deltas of one model."""

    tensors: int = 0
    parameters: int = 0
    zeros: int = 0
    above: int = 0
    size: float = 0.0  # sum of |delta|
    squares: float = 0.0
    base_squares: float = 0.0
    noise_squares: float = 0.0  # what dropping is expected to add
    peak: float = 0.0  # the largest |delta|

    @property
    def mean(self) -> float:
        return self.size / max(self.parameters, 1)

    def describe(self, name: str, counts: NDArray[np.int64]) -> DeltaStats:
        """counts: how many are in each bin of |delta|."""
        count = max(self.parameters, 1)
        ranks = np.cumsum(counts)
        weights = math.sqrt(self.base_squares) or math.inf  # of no weights, nothing is a share
        return DeltaStats(
            name=name,
            tensors=self.tensors,
            parameters=self.parameters,
            share_zero=self.zeros / count,
            mean=self.mean,
            standard_deviation=math.sqrt(max(0.0, self.squares / count - self.mean * self.mean)),
            largest=self.peak,
            p50=self._percentile(0.5, ranks),
            p95=self._percentile(0.95, ranks),
            p99=self._percentile(0.99, ranks),
            share_above_threshold=self.above / count,
            share_below_1_percent=self._share_below(self.peak / 100, ranks),
            relative_norm=math.sqrt(self.squares) / weights,
            relative_noise=math.sqrt(self.noise_squares) / weights,
        )

    def _percentile(self, share: float, ranks: NDArray[np.int64]) -> float:
        """The |delta| that this share does not exceed: the middle, by ratio, of its bin."""
        rank = math.ceil(share * self.parameters)
        if rank <= self.zeros:
            return 0.0
        place = int(np.searchsorted(ranks, rank))
        return min(math.sqrt(EDGES[place] * EDGES[place + 1]), self.peak)

    def _share_below(self, limit: float, ranks: NDArray[np.int64]) -> float:
        """The share whose |delta| is below a limit; within the limit's bin, in proportion."""
        # Zeros, which are counted in the first bin, are below its start.
        below = float(np.interp(limit, EDGES, [self.zeros, *ranks])) if limit else 0.0
        return below / max(self.parameters, 1)


class Findings:
    """What an analysis has found so far. Sums over tensors are made last, in their order."""

    def __init__(self, task: MergePlan) -> None:
        self.task = task
        self.bytes_read = sum(tensor.bytes_read for tensor in task.changed)
        self._tensors: list[dict[str, tuple[Deltas, DeltaStats]]] = [{} for _ in task.models]
        # Counts by size are kept for groups of tensors only: there may be very many tensors.
        self._counts: list[dict[Group, NDArray[np.int64]]] = [
            {(None, None): np.zeros(BINS, np.int64)} for _ in task.models
        ]
        # By tensor and pair of models that have it: what compare_pair wants.
        self.pairs: dict[str, dict[tuple[int, int], NDArray[np.float64]]] = {}
        self.spaces: dict[tuple[int, int], float] = {}
        self.energy: list[dict[str, float]] = [{} for _ in task.models]

    def add_deltas(self, model: int, name: str, deltas: Deltas, counts: NDArray[np.int64]) -> None:
        self._tensors[model][name] = deltas, deltas.describe(name, counts)
        for group in groups_of(name)[1:]:
            self._counts[model][group] = self._counts[model].get(group, 0) + counts

    def list_squares(self) -> list[dict[str, float]]:
        return [
            {name: deltas.squares for name, (deltas, _) in found.items()} for found in self._tensors
        ]

    def describe_model(self, model: int, label: str, is_adapter: bool) -> ModelAnalysis:
        settings = self.task.config.general(len(self.task.models))
        counts = self._counts[model]
        found = self._tensors[model]
        names = [tensor.name for tensor in self.task.changed if tensor.name in found]
        groups: dict[Group, list[Deltas]] = {(None, None): []}
        for name in names:
            for group in groups_of(name):
                groups.setdefault(group, []).append(found[name][0])
        sums = {group: sum_fields([Deltas(), *parts]) for group, parts in groups.items()}
        cells: dict[str, dict[str, float]] = {}
        for (layer, kind), total in sums.items():
            if layer is not None and kind is not None:
                cells.setdefault(layer, {})[kind] = total.mean
        layers = sorted(cells, key=lambda layer: ("embedding" not in cells[layer], *natural(layer)))
        total = sums[None, None]
        changed = counts[None, None].copy()
        changed[0] -= total.zeros
        return ModelAnalysis(
            name=self.task.models[model],
            label=label,
            adapter=is_adapter,
            drop_rate=settings.drop_rates[model],
            total=total.describe(label, counts[None, None]),
            kinds=tuple(
                sums[None, kind].describe(kind, counts[None, kind])
                for kind in KINDS
                if (None, kind) in sums
            ),
            layers=tuple(
                sums[layer, None].describe(layer, counts[layer, None]) for layer in layers
            ),
            cells={layer: cells[layer] for layer in layers},
            histogram=tuple(
                (EDGES[k] if k else 0.0, int(changed[k])) for k in np.flatnonzero(changed)
            ),
            energy=self.energy[model],
            tensors=tuple(found[name][1] for name in names),
        )

    def compare(self, labels: Sequence[str]) -> tuple[PairAnalysis, ...]:
        sums = {pair: np.zeros(len(PAIR_SUMS) + 3) for pair in combinations(range(len(labels)), 2)}
        for tensor in self.task.changed:
            for pair, figures in self.pairs[tensor.name].items():
                sums[pair] += figures
        return tuple(
            compare_pair((labels[i], labels[k]), figures, self.spaces.get((i, k)))
            for (i, k), figures in sums.items()
        )


def compare_pair(
    labels: tuple[str, str], figures: NDArray[np.float64], space: float | None
) -> PairAnalysis:
    """figures: the sums of a pair and, of the tensors that both have, the squares of each one's
    delta and the number of parameters.
    """
    product, opposed, both, opposed_size, both_size, *own = map(float, figures)
    first, second, parameters = own
    # A norm of 0 has no direction. What samples stand for may be a little too much.
    cosine = product / math.sqrt(first) / math.sqrt(second) if first and second else 0.0
    return PairAnalysis(
        models=labels,
        cosine=max(-1.0, min(1.0, cosine)),
        share_both=min(1.0, both / max(parameters, 1)),
        sign_conflict=opposed / both if both else 0.0,
        weighted_sign_conflict=opposed_size / both_size if both_size else 0.0,
        shared_space=space,
    )


class Noted(NamedTuple):
    """What was measured in the chunks of a job."""

    sums: dict[int, dict[str, NDArray[Any]]]  # by the chunk's start
    counts: NDArray[np.int64]  # by model and bin
    peaks: NDArray[np.float64]  # by model


class MeasureLook(Look):
    """Adds up what is measured in a tensor, in the order of the chunks: sums never differ."""

    def __init__(self, tensor: TensorPlan, findings: Findings) -> None:
        self.tensor = tensor
        self.settings = tensor.settings
        self.models = tensor.models
        self._findings = findings
        self.found = Found()  # it looks at deltas as they are
        self._sums: dict[int, dict[str, NDArray[Any]]] = {}  # of each chunk, by its start
        # Arrays only from the first job to the last.
        self._peaks: Any = 0
        self._counts: Any = 0

    def observe(self, chunk: Any, number: int, noted: Noted | None) -> Noted:
        models = len(self.tensor.finetuned)
        noted = noted or Noted({}, np.zeros((models, BINS), np.int64), np.zeros(models))
        own = [chunk.measure(row, counts) for row, counts in enumerate(noted.counts)]
        pairs = [chunk.compare(*pair) for pair in combinations(range(models), 2)]
        sums = {name: np.array([each[k] for each in own]) for k, name in enumerate(MODEL_SUMS)}
        sums |= {name: np.array([each[k] for each in pairs]) for k, name in enumerate(PAIR_SUMS)}
        sums["base_squares"] = np.array([compare(chunk.base, chunk.base)[0]])
        noted.sums[chunk.start] = sums
        np.maximum(noted.peaks, [seen.peak for seen in chunk.seen], out=noted.peaks)
        return noted

    def add(self, noted: Noted) -> None:
        self._sums |= noted.sums
        self._counts = self._counts + noted.counts
        self._peaks = np.maximum(self._peaks, noted.peaks)

    def conclude(self, number: int) -> None:
        parts = [self._sums.pop(start) for start in sorted(self._sums)]
        sums = {name: reduce(np.add, (part[name] for part in parts)) for name in parts[0]}
        if not np.isfinite([*sums["squares"], *sums["base_squares"]]).all():
            raise DareError(
                f"the values of tensor {self.tensor.name!r} are so large that their squares are "
                f"beyond the range of {self.tensor.real}",
                "no trained model has such values; a merge can be made without an analysis",
            )
        deltas = [self._describe_model(row, sums) for row in range(len(self.tensor.finetuned))]
        self._counts = 0
        self._compare_models(deltas, sums)

    def _describe_model(self, row: int, sums: dict[str, NDArray[Any]]) -> Deltas:
        model, info = self.tensor.finetuned[row]
        zeros, above, size, squares = (float(sums[name][row]) for name in MODEL_SUMS)
        whole = self.tensor.base.count
        count = min(info.count, whole)
        # Zeros stand in for entries that a model does not store.
        surplus = whole - round(count * info.share)
        self._counts[row, 0] = max(0, self._counts[row, 0] - surplus)
        part = 1 / (info.share or 1.0)  # a sample stands for the whole
        deltas = Deltas(
            tensors=1,
            parameters=count * bool(info.share),
            zeros=round(max(0.0, zeros - surplus) * part),
            above=round(above * part),
            size=size * part,
            squares=squares * part,
            base_squares=float(sums["base_squares"][0]) * bool(info.share),
            noise_squares=squares * part * noise_of(self.tensor.settings, model) ** 2,
            peak=float(self._peaks[row]),
        )
        ranks = np.rint(np.cumsum(self._counts[row]) * part).astype(np.int64)
        self._findings.add_deltas(model, self.tensor.name, deltas, np.diff(ranks, prepend=0))
        return deltas

    def _compare_models(self, deltas: Sequence[Deltas], sums: dict[str, NDArray[Any]]) -> None:
        seeds = [self._findings.task.seeds[i] for i in self.tensor.models]
        shares = [info.share for _, info in self.tensor.finetuned]
        pairs = self._findings.pairs.setdefault(self.tensor.name, {})
        for row, (one, other) in enumerate(combinations(range(len(deltas)), 2)):
            # Samples of one seed are nested: where they meet is the smaller of them.
            is_nested = seeds[one] == seeds[other]
            meet = min(shares[one], shares[other]) if is_nested else shares[one] * shares[other]
            known = meet or 1.0  # which share of the entries, of both
            own = (deltas[one].squares, deltas[other].squares, deltas[one].parameters)
            figures = np.array([*(sums[name][row] / known for name in PAIR_SUMS), *own])
            pairs[self.tensor.models[one], self.tensor.models[other]] = figures


def measure_deltas(
    task: MergePlan, inputs: Sequence[Checkpoint], interrupts: Interrupts
) -> Findings:
    """Look once at every tensor that some model changes."""
    findings = Findings(task)
    passes = {tensor.name: [(MeasureLook(tensor, findings), 0)] for tensor in task.changed}
    with progress("analyzing", findings.bytes_read, task.config.verbose) as advance:
        run_rounds(
            [task.jobs(task.changed, kind=LOOK)],
            Worker(task, inputs, passes),
            lambda *_: None,
            lambda job, _: advance(job.bytes_read),
            interrupts,
        )
    findings.spaces = measure_spaces(task)
    findings.energy = measure_energy(task, findings.list_squares(), interrupts)
    return findings
