"""The figures of an analysis as plain data: of some tensors, of a model, of a pair of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
    drop: str
    # Of dropping at that rate, / |delta|: sqrt(p / (1 - p)) where it is rescaled.
    expected_noise: float
    total: DeltaStats
    kinds: tuple[DeltaStats, ...]
    layers: tuple[DeltaStats, ...]
    cells: Mapping[str, Mapping[str, float]]  # mean |delta| by layer and kind
    # Where a bin of |delta| begins, and how many are in it; zeros apart.
    histogram: tuple[tuple[float, int], ...]
    tensors: tuple[DeltaStats, ...]


@dataclass(frozen=True)
class PairAnalysis:
    """How two models' changes relate to one another."""

    models: tuple[str, str]
    cosine: float  # of their task vectors
    share_both: float  # of the parameters, that both change
    sign_conflict: float  # of those, the share that they change in opposite directions
    weighted_sign_conflict: float  # the same, each counted by how much they change it
