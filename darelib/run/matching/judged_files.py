"""Models in files, judged by examples: the lambda of a merge, base and fine-tunes beside merges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from darelib.core.text import progress
from darelib.output.judged import JudgedFile, LambdaChoice
from darelib.run.matching.judging import LAMBDAS, Judge, list_lambdas
from darelib.run.matching.language import Tokens
from darelib.run.matching.model_files import ModelFiles, Spool
from darelib.run.matching.network import BASE


@contextmanager
def open_judge(
    models: ModelFiles, examples: Mapping[int, Sequence[Tokens]], count: int
) -> Iterator[tuple[Judge, list[JudgedFile]]]:
    """While so many models are judged, with the module opened."""
    tests, files = models.make_tests(examples)
    steps = (len(tests) + count) * len(models.network.segments)
    with progress("judging", steps, models.config.verbose) as advance:

        def step() -> None:
            models.interrupts.check()
            advance(1)

        yield Judge(models.network, models.load, tests, step), files


def choose_lambda(
    models: ModelFiles, held: Mapping[int, Sequence[Tokens]], solved: Spool | None = None
) -> LambdaChoice:
    """The lambda with which the merge is best on examples. solved: matrices that were matched."""
    skills = {who: tokens for who, tokens in held.items() if who != BASE}
    with open_judge(models, skills, len(LAMBDAS)) as (judge, files):
        scores = judge.score(models.scale(list_lambdas(models.config), solved))
        return LambdaChoice.of(LAMBDAS, scores, files)
