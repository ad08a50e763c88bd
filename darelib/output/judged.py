"""How models do on examples, beside the fine-tunes whose examples these are; the lambda that is
chosen by that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from darelib.core.text import count_of, list_names

FEW_EXAMPLES: Final = 32  # below, or with fewer tokens, a score says little
FEW_TOKENS: Final = 1000
DRAWS: Final = 1000  # of the bootstrap
# What is judged of examples.
ANSWERS: Final = "answers"
TOKENS: Final = "all tokens"  # where no answers are marked
ROWS: Final = "rows"  # of what a module gives: nothing says what is right
MARGIN: Final = 0.98  # of a loss: what is below fits a model better
DOUBT: Final = 0.05  # of these draws: models that change places so often cannot be told apart

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class JudgedFile:
    """Examples by which models are judged."""

    name: str
    examples: int
    tokens: int  # that are judged
    kind: str

    @property
    def measure(self) -> str:
        """What a lambda is chosen by."""
        is_known = self.kind == ANSWERS
        return "loss on the answers" if is_known else "distance from the fine-tune (KL)"

    @property
    def title(self) -> str:
        return self.name if self.kind == ROWS else f"{self.name} ({self.kind})"

    def __str__(self) -> str:
        unit = {ANSWERS: "tokens of answers", TOKENS: "tokens", ROWS: "rows"}[self.kind]
        return f"{self.name}: {count_of(self.examples, 'example')}, {self.tokens:,} {unit}"


class Cost(NamedTuple):
    """What a good model has little of, by example."""

    sums: Array
    tokens: Array  # over how many

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / max(1.0, self.tokens.sum()))


@dataclass(frozen=True)
class Score:
    """Of a model, on one file: sums over the tokens of each example, losses in bits."""

    kind: str
    tokens: Array
    loss: Array
    same: Array  # tokens whose likeliest successor is the fine-tune's
    divergence: Array  # of what the fine-tune expects from what the model expects (KL)

    @property
    def cost(self) -> Cost:
        """The loss on answers, or the distance from the fine-tune where none are marked."""
        return Cost(self.loss if self.kind == ANSWERS else self.divergence, self.tokens)

    @property
    def mean_loss(self) -> float:
        return Cost(self.loss, self.tokens).mean

    def as_dict(self) -> dict[str, float | None]:
        has_loss = self.kind != ROWS  # else nothing says what is right
        return {
            "loss": self.mean_loss if has_loss else None,
            "agreement": Cost(self.same, self.tokens).mean,
            "divergence": Cost(self.divergence, self.tokens).mean,
        }


Scores: TypeAlias = Sequence[Score]  # of a model, by file
Costs: TypeAlias = Sequence[Cost]


def list_costs(scores: Scores) -> Costs:
    return [score.cost for score in scores]


def find_cost(costs: Costs) -> float:
    return float(np.mean([cost.mean for cost in costs]))


def find_rivals(models: Sequence[Costs], best: int) -> list[int]:
    """The models that cannot be told apart from the best: they beat it on many samples of the
    examples, drawn with replacement.
    """
    random = np.random.default_rng(0)
    found = np.zeros((DRAWS, len(models)))
    for k, (_, tokens) in enumerate(models[best]):
        drawn = random.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), DRAWS)
        sums = np.stack([costs[k].sums for costs in models], axis=1)
        with np.errstate(invalid="ignore"):  # infinite costs, which are never drawn
            found += drawn @ sums / np.maximum(1, drawn @ tokens)[:, None]
    beaten = (found <= found[:, [best]]).mean(axis=0)
    return [k for k, share in enumerate(beaten) if k != best and share >= DOUBT]


def find_doubts(files: Sequence[JudgedFile]) -> Iterator[str]:
    few = [
        file
        for file in files
        if file.examples < FEW_EXAMPLES or (file.kind != ROWS and file.tokens < FEW_TOKENS)
    ]
    if few:
        yield (
            f"{list_names([file.name for file in few])} judge by fewer than {FEW_EXAMPLES} "
            f"examples or {FEW_TOKENS:,} tokens (the least: {min(file.examples for file in few)} "
            f"and {min(file.tokens for file in few):,}): small differences mean nothing; give more "
            "examples, a larger --max-examples or --held-out"
        )


def explain_best(names: Sequence[str], models: Sequence[Costs]) -> str:
    """Which of several models is best, and whether that is sure. names: the base's is the first."""
    best = int(np.argmin([find_cost(costs) for costs in models]))
    rivals = [names[k] for k in find_rivals(models, best)]
    doubt = f"; it cannot be told apart from {list_names(rivals)}" if rivals else ""
    return f"{names[best]!r} has the least mean cost, of {list_names(names)}{doubt}"


def explain_order(
    files: Sequence[str],
    base: Sequence[float],
    own: Sequence[float],
    losses: Sequence[Sequence[float]] = (),
) -> Iterator[str]:
    """Files that may be in another order than the models, or of another task.

    Losses by file: of the base, of the model whose they should be, of each model if that is known.
    """
    best = [int(np.argmin(row)) for row in losses]
    swapped = [k for k, row in enumerate(losses) if row[best[k]] < MARGIN * min(own[k], base[k])]
    # One alone, or several that fit one model: that is just the better model.
    if len(swapped) < 2 or len({best[k] for k in swapped}) < len(swapped):
        swapped = []
    if swapped:
        yield (
            f"other models are better at {list_names([files[k] for k in swapped])} than those "
            "whose examples these should be: are the files in another order than the models?"
        )
    rows = enumerate(zip(base, own, strict=True))
    wrong = [files[k] for k, (before, after) in rows if after >= before and k not in swapped]
    if wrong:
        yield (
            f"on {list_names(wrong)}, the fine-tune whose examples these should be is no better "
            "than the base: are the files in another order than the models, or of another task, or "
            "is the base one of the models?"
        )


@dataclass(frozen=True)
class LambdaChoice:
    """The lambda that was chosen, and what was tried. Prints as a line."""

    chosen: float
    tried: tuple[tuple[float, float], ...]  # lambdas and their costs
    rivals: tuple[float, ...]  # that cannot be told apart from it
    files: tuple[JudgedFile, ...]

    @classmethod
    def of(
        cls, lambdas: Sequence[float], models: Sequence[Scores], files: Sequence[JudgedFile]
    ) -> Self:
        costs = [list_costs(scores) for scores in models]
        means = [find_cost(each) for each in costs]
        best = int(np.argmin(means))
        return cls(
            chosen=lambdas[best],
            tried=tuple(zip(lambdas, means, strict=True)),
            rivals=tuple(lambdas[k] for k in find_rivals(costs, best)),
            files=tuple(files),
        )

    @property
    def warnings(self) -> list[str]:
        found = list(find_doubts(self.files))
        ends = {min(self.tried)[0]: "smaller", max(self.tried)[0]: "larger"}
        if self.chosen in ends:
            found.append(
                f"lambda {self.chosen:g} is at the end of what was tried: "
                f"a {ends[self.chosen]} one may be better"
            )
        return found

    def __str__(self) -> str:
        measures = " and ".join(dict.fromkeys(file.measure for file in self.files))
        tried = ", ".join(f"{each:g}: {cost:.4g}" for each, cost in self.tried)
        held = sum(file.examples for file in self.files)
        tokens = sum(file.tokens for file in self.files)
        line = (
            f"lambda {self.chosen:g} is the best on {count_of(held, 'held-out example')} "
            f"({tokens:,} tokens), by {measures} in bits a token ({tried})"
        )
        if self.rivals:
            line += f"; it cannot be told apart from {', '.join(f'{k:g}' for k in self.rivals)}"
        return line


@dataclass(frozen=True)
class Judgement:
    """Of the base, the fine-tunes, and what is judged beside them."""

    files: tuple[JudgedFile, ...]
    scores: tuple[Scores, ...]
    choice: LambdaChoice | None
    remarks: tuple[str, ...]
