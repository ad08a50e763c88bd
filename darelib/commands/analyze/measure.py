"""The figures of an analysis: sums over the deltas of jobs, tensors, groups of tensors and pairs of models."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from darelib.commands.analyze.report import DeltaStats, ModelAnalysis, PairAnalysis
from darelib.core.drops import L1, RANDOM
from darelib.core.formats import FORMATS
from darelib.core.mask import TILE
from darelib.core.methods import Found, Look, TensorSettings
from darelib.core.text import DareError
from darelib.kernels.records import BINS, FIRST_BIN, LANES
from darelib.models.checkpoint import module_of
from darelib.run.outcomes import sum_fields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from darelib.plan.plan import MergePlan
    from darelib.plan.tensors import TensorPlan

# What tensors do, by their names: the first pattern that is found in one.
KINDS: Final = {
    "text encoder": re.compile(
        r"(^|\.)(cond_stage_model|conditioner|text_encoders?(_\d)?|text_model\.encoder)\.(?!.*(_embedding|\bshared)\b)"
    ),
    "VAE": re.compile(r"(^|\.)(first_stage_model|vae)\."),
    "norm": re.compile(r"norm|(^|[._])ln(_?\w+)?\.|(^|\.)bn\d*\.", re.IGNORECASE),
    "head": re.compile(
        r"(^|\.)(lm_head|head|classifier|score|embed_out|output_projection|predictions|cls)\."
    ),
    "embedding": re.compile(
        r"(?<!time_)(?<!time_text_)(?<!label_)(?<!add_)embed(?!der)|(^|\.)(wte|wpe|shared|embedder)\."
    ),
    "attention": re.compile(
        r"att(entio)?n(?!.*\.ff\.)|(^|\.)(q|k|v|o|qkv|query|key|value)(_proj)?\.", re.IGNORECASE
    ),
    "MLP": re.compile(
        r"mlp|ffn|feed_?forward|expert|(^|\.)(fc\w*|ff|gate|router|dense|intermediate|w[io123])(_\w+)?\.|dense"
    ),
    "other": re.compile(""),
}
# Where in a model a tensor is: all of a diffusion model's text encoder or VAE, else its name up to the first number.
LAYER: Final = re.compile(
    r"(?:cond_stage_model|text_encoder(?:_\d|s\.\w+)?|first_stage_model|vae)(?=\.)"
    r"|(?:.*?\.)?(?:\d+|mid(?:dle)?_block)(?=\.)"
)
# How much of a name's end is searched: the patterns take time with the square of its length.
SEARCHED: Final = 200
# Where the bins of |delta| begin, and the last ends: 16 to a doubling, so that the middle of one is within 3.1% of all
# that is in it. The first also holds what is smaller, the last what is larger.
EDGES: Final[list[float]] = (
    (np.arange(FIRST_BIN, FIRST_BIN + BINS + 1, dtype=np.uint32) << 19).view("f4").tolist()
)
# What the kernel adds up for each model that has the tensor, and for any two of them and for each pair.
MODEL_SUMS: Final = ("zeros", "above", "size", "squares")
PAIR_SUMS: Final = ("product", "opposed", "both", "opposed_size", "both_size")
# A layer and a kind of tensors; None: all of them.
Group: TypeAlias = tuple[str | None, str | None]


def kind_of(name: str) -> str:
    return next(kind for kind, pattern in KINDS.items() if pattern.search(name[-SEARCHED:]))


def layer_of(name: str) -> str:
    """Where in the model a tensor is, as the start of its name; its module where there is nothing to go by."""
    found = LAYER.match(name)
    return found[0] if found else module_of(name)


def groups_of(name: str) -> list[Group]:
    """What a tensor belongs to: its layer and kind, its layer, its kind, the whole model."""
    return [*product((layer_of(name), None), (kind_of(name), None))]


def natural(name: str) -> tuple[bool, list[tuple[str, int, str]]]:
    """A key to sort layers by: numbers as numbers, however long, and what is no block after those that are."""
    parts = re.findall(r"(\D*)0*(\d*)", name)
    return not re.search(r"(\d|mid(dle)?_block)$", name), [
        (text, len(number), number) for text, number in parts
    ]


def noise_of(settings: TensorSettings, model: int) -> float:
    """The expected distance of a thinned delta from the delta, relative to it: sqrt(p / (1 - p)) if rescaled.

    Of other drops, which depend on the sizes, it is what dropping as much at random would give.
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

    def stats(self, name: str, counts: NDArray[np.int64]) -> DeltaStats:
        """counts: how many are in each bin of |delta|."""
        count, weights = max(self.parameters, 1), math.sqrt(self.base_squares)
        mean, (p50, p95, p99) = (
            self.size / count,
            (self._percentile(share, counts) for share in (0.5, 0.95, 0.99)),
        )
        return DeltaStats(
            name=name, tensors=self.tensors, parameters=self.parameters, share_zero=self.zeros / count, mean=mean,
            standard_deviation=math.sqrt(max(0.0, self.squares / count - mean * mean)), largest=self.peak,
            p50=p50, p95=p95, p99=p99, share_above_threshold=self.above / count,
            share_below_1_percent=self._share_below(self.peak / 100, counts),
            relative_norm=math.sqrt(self.squares) / weights if weights else 0.0,
            relative_noise=math.sqrt(self.noise_squares) / weights if weights else 0.0,
        )  # fmt: skip

    def _percentile(self, share: float, counts: NDArray[np.int64]) -> float:
        """The |delta| that this share of the parameters does not exceed: the middle, by ratio, of its bin."""
        rank = math.ceil(share * self.parameters)
        place = int(np.searchsorted(np.cumsum(counts), rank))
        return (
            min(math.sqrt(EDGES[place] * EDGES[place + 1]), self.peak) if rank > self.zeros else 0.0
        )

    def _share_below(self, limit: float, counts: NDArray[np.int64]) -> float:
        """The share of the parameters whose |delta| is below a limit; within the limit's bin, in proportion."""
        if not limit:
            return 0.0
        place = min(max(bisect_right(EDGES, float(np.float32(limit))) - 1, 0), BINS - 1)
        low, high = EDGES[place : place + 2]
        below = (
            int(counts[:place].sum()) if place else self.zeros
        )  # which are counted in the first bin
        inside = int(counts[: place + 1].sum()) - below
        part = min(max((limit - low) / (high - low), 0.0), 1.0)
        return (below + part * inside) / max(self.parameters, 1)


class MeasureLook(Look):
    """Takes what jobs find in a tensor. Sums are added in the order of the jobs' starts, so that they never differ."""

    kernel = "measure"

    def __init__(self, tensor: TensorPlan, findings: Findings) -> None:
        self._tensor, self._findings, self.found = (
            tensor,
            findings,
            Found(),
        )  # it looks at deltas as they are
        self._sums: dict[
            int, dict[str, NDArray[Any]]
        ] = {}  # of each job that has arrived, by its start
        self._peaks: Any = 0
        self._counts: Any = 0  # an array only from the first job to the last

    def add_job(self, start: int, stop: int, buffers: Any) -> None:
        models = len(self._tensor.finetuned)
        fields = (
            (buffers.models, MODEL_SUMS, models),
            (buffers.pairs, PAIR_SUMS, 1 + math.comb(models, 2)),
        )
        sums = {
            name: records[name][:rows].astype(float)
            for records, names, rows in fields
            for name in names
        }
        counts = buffers.counts[:models].reshape(models, LANES, BINS).sum(1, dtype=np.int64)
        # Zeros pad the last tile, and stand in for the rows that a model lacks.
        padding = -(stop - start) % TILE
        surplus = [
            padding + stop - start - info.seen(start, stop) for _, info in self._tensor.finetuned
        ]
        sums["zeros"] -= surplus
        counts[:, 0] -= surplus
        self._sums[start] = sums | {
            "base_squares": buffers.tensor["base_squares"][:1].astype(float)
        }
        self._counts = self._counts + counts
        self._peaks = np.maximum(
            self._peaks, buffers.models["peak"][:models]
        )  # bit patterns are ordered as values

    def conclude(self, number: int) -> None:
        tensor, real = self._tensor, FORMATS[self._tensor.spec.real]
        in_order = [self._sums.pop(start) for start in sorted(self._sums)]
        sums = {name: reduce(np.add, (job[name] for job in in_order)) for name in in_order[0]}
        if not np.isfinite([*sums["squares"], *sums["base_squares"]]).all():
            raise DareError(
                f"the values of tensor {tensor.name!r} are so large that their squares are beyond the range of "
                f"{tensor.spec.real}",
                "no trained model has such values; a merge can be made without an analysis",
            )
        peaks, found, shares = (
            self._peaks.astype(real.raw).view(real.real),
            list[Deltas](),
            list[float](),
        )
        for row, (i, info) in enumerate(tensor.finetuned):
            zeros, above, size, squares = (float(sums[name][row]) for name in MODEL_SUMS)
            seen, count = info.seen(0, tensor.base.count), min(info.count, tensor.base.count)
            shares.append(seen / max(1, count))
            part = count / max(1, seen)  # what is found in a sample stands for so much
            zeros, above, size, squares = (
                round(zeros * part),
                round(above * part),
                size * part,
                squares * part,
            )
            base_squares, peak = float(sums["base_squares"][0]) * bool(seen), float(peaks[row])
            noise = squares * noise_of(tensor.settings, i) ** 2
            found.append(
                Deltas(
                    1,
                    count * bool(seen),
                    int(zeros),
                    int(above),
                    size,
                    squares,
                    base_squares,
                    noise,
                    peak,
                )
            )
            ranks = np.rint(np.cumsum(self._counts[row]) * part).astype(np.int64)
            self._findings.take(i, tensor.name, found[-1], np.diff(ranks, prepend=0))
        self._counts = 0
        if len(found) == 2:  # any two of them are the pair
            sums |= {name: sums[name][[1, 1]] for name in PAIR_SUMS}
        # Both of a pair are known where their samples meet: of one seed, one is in the other.
        shared = [
            (0.0, 0.0, 0),
            *((a.squares, b.squares, a.parameters) for a, b in combinations(found, 2)),
        ]
        drawn = [
            (share, self._findings.seeds[i])
            for share, (i, _) in zip(shares, tensor.finetuned, strict=True)
        ]
        meet = np.array(
            [
                1.0,
                *(
                    (min(a, b) if s == t else a * b) or 1.0
                    for (a, s), (b, t) in combinations(drawn, 2)
                ),
            ]
        )
        figures = np.vstack(
            [*(sums[name] / meet for name in PAIR_SUMS), *zip(*shared, strict=True)]
        )
        self._findings.pairs[tensor.name] = [i for i, _ in tensor.finetuned], figures


class Findings:
    """What an analysis has found so far. Sums over tensors are made at the end, in the order of the tensors."""

    def __init__(self, seeds: Sequence[int]) -> None:
        """seeds: of each model's mask."""
        self.seeds = seeds
        self._deltas: list[dict[str, Deltas]] = [{} for _ in seeds]  # per model, by tensor
        self._stats: list[dict[str, DeltaStats]] = [{} for _ in seeds]
        # Counts by size are kept for groups of tensors only: there may be very many tensors.
        self._counts: list[dict[Group, NDArray[np.int64]]] = [{} for _ in seeds]
        # By tensor: the models that have it; what compare_pair takes of any two of them, and of each pair, in columns.
        self.pairs: dict[str, tuple[list[int], NDArray[Any]]] = {}

    def take(self, model: int, name: str, deltas: Deltas, counts: NDArray[np.int64]) -> None:
        self._deltas[model][name] = deltas
        self._stats[model][name] = deltas.stats(name, counts)
        for group in groups_of(name)[1:]:
            self._counts[model][group] = self._counts[model].get(group, 0) + counts

    def describe_model(
        self, model: int, label: str, task: MergePlan, partial: bool
    ) -> ModelAnalysis:
        settings, found, counts = (
            task.config.general(len(task.models)),
            self._deltas[model],
            self._counts[model],
        )
        names = [tensor.name for tensor in task.changed if tensor.name in found]
        groups: dict[Group, list[Deltas]] = {(None, None): []}
        for name in names:
            for group in groups_of(name):
                groups.setdefault(group, []).append(found[name])
        sums = {group: sum_fields([Deltas(), *parts]) for group, parts in groups.items()}
        cells: dict[str, dict[str, float]] = {}
        for (layer, kind), deltas in sums.items():
            if layer is not None and kind is not None:
                cells.setdefault(layer, {})[kind] = deltas.size / max(deltas.parameters, 1)
        layers = sorted(cells, key=lambda layer: ("embedding" not in cells[layer], *natural(layer)))
        kinds = [kind for kind in KINDS if (None, kind) in sums]
        total, sizes = sums[None, None], counts.get((None, None), np.zeros(BINS, np.int64))
        changed = [int(sizes[0]) - total.zeros, *sizes[1:].tolist()]
        return ModelAnalysis(
            name=task.models[model], label=label, adapter=partial, drop_rate=settings.drop_rates[model],
            drop=settings.thinnings[model].drop, expected_noise=noise_of(settings, model),
            total=total.stats(label, sizes),
            kinds=tuple(sums[None, kind].stats(kind, counts[None, kind]) for kind in kinds),
            layers=tuple(sums[layer, None].stats(layer, counts[layer, None]) for layer in layers),
            cells={layer: cells[layer] for layer in layers},
            histogram=tuple((EDGES[k] if k else 0.0, count) for k, count in enumerate(changed) if count),
            tensors=tuple(self._stats[model][name] for name in names),
        )  # fmt: skip

    def compare(
        self, labels: Sequence[str], task: MergePlan
    ) -> tuple[tuple[PairAnalysis, ...], PairAnalysis]:
        """Every pair of models, and any two of all of them."""
        count, fields = len(labels), len(PAIR_SUMS) + 3
        sums, any_two = np.zeros((fields, count, count)), np.zeros(fields)
        for models, figures in (self.pairs[tensor.name] for tensor in task.changed):
            for column, (i, k) in enumerate(combinations(models, 2), 1):
                sums[:, i, k] += figures[:, column]
            any_two += figures[:, 0]
        pairs = (
            compare_pair((labels[i], labels[k]), *sums[:, i, k])
            for i, k in combinations(range(count), 2)
        )
        return tuple(pairs), compare_pair(("", ""), *any_two)


def compare_pair(
    labels: tuple[str, str], product: float, opposed: float, both: float, opposed_size: float, both_size: float,
    first_squares: float, second_squares: float, parameters: float,
) -> PairAnalysis:  # fmt: skip
    """The last three: of the tensors that both have, the squares of each one's delta, and the number of parameters."""
    # A norm of 0 has no direction.
    has_angle = first_squares and second_squares
    cosine = product / math.sqrt(first_squares) / math.sqrt(second_squares) if has_angle else 0.0
    plain, weighted = (
        opposed / both if both else 0.0,
        opposed_size / both_size if both_size else 0.0,
    )
    return PairAnalysis(
        labels, float(cosine), float(both / max(parameters, 1)), float(plain), float(weighted)
    )
