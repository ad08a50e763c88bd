"""How models do on examples, beside the fine-tunes whose examples these are; the lambda that is
chosen by that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

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

    @property
    def size(self) -> str:
        unit = {ANSWERS: "tokens of answers", TOKENS: "tokens", ROWS: "rows"}[self.kind]
        return f"{count_of(self.examples, 'example')}, {self.tokens:,} {unit}"

    def __str__(self) -> str:
        return f"{self.name}: {self.size}"


@dataclass(frozen=True)
class Score:
    """Of a model, on one file: sums over the tokens of each example, losses in bits."""

    tokens: Array
    loss: Array | None  # None: nothing says what is right
    same: Array  # tokens whose likeliest successor is the fine-tune's
    divergence: Array  # of what the fine-tune expects from what the model expects (KL)

    def mean(self, sums: Array) -> float:
        return find_mean(sums, self.tokens)

    def cost(self, file: JudgedFile) -> Array:
        """What a good model has little of."""
        return self.loss if file.kind == ANSWERS and self.loss is not None else self.divergence

    def as_dict(self) -> dict[str, float | None]:
        return {
            "loss": None if self.loss is None else self.mean(self.loss),
            "agreement": self.mean(self.same),
            "divergence": self.mean(self.divergence),
        }


Scores: TypeAlias = Sequence[Score]  # of a model, by file
# By file, of each example: what a good model has little of, and over how many tokens.
Costs: TypeAlias = Sequence[tuple[Array, Array]]


def list_costs(scores: Scores, files: Sequence[JudgedFile]) -> Costs:
    """Losses on answers, or distances from the fine-tune where none are marked."""
    pairs = zip(scores, files, strict=True)
    return [(score.cost(file), score.tokens) for score, file in pairs]


def find_mean(sums: Array, tokens: Array) -> float:
    return float(sums.sum() / max(1.0, tokens.sum()))


def find_means(costs: Costs) -> list[float]:
    return [find_mean(sums, tokens) for sums, tokens in costs]


def find_cost(costs: Costs) -> float:
    return float(np.mean(find_means(costs)))


def find_rivals(models: Sequence[Costs], best: int) -> list[int]:
    """The models that cannot be told apart from the best: they beat it on many samples of the
    examples, drawn with replacement.
    """
    random = np.random.default_rng(0)
    found = np.zeros((DRAWS, len(models)))
    for k, (_, tokens) in enumerate(models[best]):
        drawn = random.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), DRAWS)
        sums = np.stack([costs[k][0] for costs in models], axis=1)
        with np.errstate(invalid="ignore"):  # infinite costs, which are never drawn
            found += drawn @ sums / np.maximum(1, drawn @ tokens)[:, None]
    beaten = (found <= found[:, [best]]).mean(axis=0)
    return [k for k, share in enumerate(beaten) if k != best and share >= DOUBT]


def find_doubts(files: Sequence[JudgedFile]) -> list[str]:
    few = [
        file.name
        for file in files
        if file.examples < FEW_EXAMPLES or (file.kind != ROWS and file.tokens < FEW_TOKENS)
    ]
    if not few:
        return []
    return [
        f"{list_names(few)} judge by fewer than {FEW_EXAMPLES} examples or {FEW_TOKENS:,} tokens: "
        "small differences mean nothing; give more examples, a larger --max-examples or --held-out"
    ]


def explain_best(names: Sequence[str], models: Sequence[Costs]) -> list[str]:
    """Which of several models is best, and whether that is sure. names: the base's is the first."""
    if len(models) < 2:
        return []
    best = int(np.argmin([find_cost(costs) for costs in models]))
    rivals = [names[k] for k in find_rivals(models, best)]
    doubt = f"; it cannot be told apart from {list_names(rivals)}" if rivals else ""
    return [f"of those that are judged and the base, {names[best]!r} is the best{doubt}"]


def find_disorder(files: Sequence[JudgedFile], base: Costs, owners: Costs) -> list[str]:
    """Files on which their own model is no better than the base. owners: the models' own costs."""
    pairs = zip(files, find_means(base), find_means(owners), strict=True)
    wrong = [file.name for file, before, own in pairs if file.kind == ANSWERS and own >= before]
    if not wrong:
        return []
    return [
        f"on {list_names(wrong)}, the fine-tune whose examples these should be is no better than "
        "the base: are the files in another order than the models, or of another task?"
    ]


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
        costs = [list_costs(scores, files) for scores in models]
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
        found = find_doubts(self.files)
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
