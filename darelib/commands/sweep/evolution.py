"""CMA-ES for a search: where it stands is computed from the scores of the trials.

Optuna's own sampler keeps that in the study as a pickle, so that a study from elsewhere could run
any code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from cmaes import CMA
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import intersection_search_space
from optuna.study import StudyDirection
from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

SPREAD = 1 / 6  # of the first generation around the middle, as a share of each range


class CmaEsSampler(BaseSampler):
    """Chooses what all trials have in common by CMA-ES, and the rest at random."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = RandomSampler(seed=seed)

    def infer_relative_search_space(
        self, study: Study, _: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        space = intersection_search_space(study.get_trials(deepcopy=False))
        return {
            name: axis
            for name, axis in space.items()
            if isinstance(axis, FloatDistribution) and not axis.single()
        }

    def sample_relative(
        self, study: Study, _: FrozenTrial, search_space: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not search_space:
            return {}
        count = len(search_space)
        optimizer = CMA(
            mean=np.full(count, 0.5),
            sigma=SPREAD,
            bounds=np.tile([0.0, 1.0], (count, 1)),
            n_max_resampling=10 * count,
            seed=self.seed,
        )
        sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
        told = []
        for trial in study.get_trials(deepcopy=False, states=[TrialState.COMPLETE]):
            shares = [to_share(axis, trial.params[name]) for name, axis in search_space.items()]
            told.append((np.array(shares), sign * trial.values[0]))
        size = optimizer.population_size
        for start in range(0, len(told) - size + 1, size):
            optimizer.tell(told[start : start + size])
        chosen = zip(search_space.items(), optimizer.ask(), strict=True)
        return {name: from_share(axis, float(share)) for (name, axis), share in chosen}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        return self.random.sample_independent(study, trial, param_name, param_distribution)


def to_share(axis: FloatDistribution, value: float) -> float:
    """How far along its range a value is, from 0 to 1."""
    if axis.log:
        return math.log(value / axis.low) / math.log(axis.high / axis.low)
    return (value - axis.low) / (axis.high - axis.low)


def from_share(axis: FloatDistribution, share: float) -> float:
    if axis.log:
        value = axis.low * (axis.high / axis.low) ** share
    else:
        value = axis.low + share * (axis.high - axis.low)
    if axis.step:
        value = axis.low + round((value - axis.low) / axis.step) * axis.step
    return min(max(value, axis.low), axis.high)
