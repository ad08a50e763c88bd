"""Judging: models are called with examples block by block, and compared with the fine-tunes whose
examples these are: how far what they expect next is from what the fine-tune expects, and from what
the examples say.

In memory at a time: a block of a model, and what the last block gives for each example.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from darelib.config import DareConfig
from darelib.output.judged import ANSWERS, ROWS, TOKENS, JudgedFile, Score, Scores
from darelib.run.matching.network import (
    Load,
    Network,
    Weights,
    bring,
    first_tensor,
    put_aside,
)
from darelib.run.matching.walk import Stream

# Of the lambdas that are tried: from far too small to far too large.
LAMBDAS: Final = (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5)
CHUNK: Final = 256  # tokens that are compared at a time: each has as many numbers as words
REMEMBERED: Final = 1 << 29  # bytes of what fine-tunes expect, which all models are compared with
# The weights of several models, one after the other, for some of the module's names.
Make: TypeAlias = Callable[[Sequence[str]], Iterable[Weights]]
# Examples in batches, by the number of the model whose they are.
Streams: TypeAlias = dict[int, list[Stream]]
Known: TypeAlias = dict[int, list[Any]]  # what the last block gave for each batch


class Picked(NamedTuple):
    """What a model expects, where it is judged."""

    logits: Tensor  # by rows
    wanted: Tensor | None  # the row's answer
    owners: Tensor  # the row's example, by its place in the batch
    examples: int


class Judge:
    def __init__(
        self,
        network: Network,
        load: Load,
        tests: Streams,
        titles: Mapping[int, str],
        advance: Callable[[], None],
    ) -> None:
        """titles: what the examples are called. advance: called for each segment of each model; it
        may raise what stops all.
        """
        self.network = network
        self.load = load
        self.tests = tests
        self.titles = titles
        self.advance = advance
        self.end = network.segments[-1]
        # What the fine-tunes themselves make of their examples.
        self.own = {who: self._follow(self.only(who), {who: tests[who]})[0] for who in tests}
        self._wanted: dict[tuple[int, int], Picked] = {}  # what they expect, by batch

    def only(self, who: int) -> Make:
        return lambda names: [self.load(who, names)]

    def score_one(self, who: int) -> Scores:
        return self.score(self.only(who))[0]

    def score_owners(self) -> Scores:
        """What the fine-tunes score on their own examples."""
        return [
            self._add_up(who, (compare_rows(each, each) for each in self._list_wanted(who)))
            for who in self.tests
        ]

    def score(self, make: Make) -> list[Scores]:
        """The scores of models, by model and test."""
        reached = self._follow(make, self.tests)
        found: list[Scores] = []
        for k, weights in enumerate(make(self.end.parameters)):
            widened = self.network.widen(weights)
            found.append([self._compare(widened, who, reached[k][who]) for who in self.tests])
            self.advance()
        return found

    def describe(self, scores: Scores) -> tuple[JudgedFile, ...]:
        """The examples, as they were judged."""
        return tuple(
            JudgedFile(self.titles[who], len(each.tokens), int(each.tokens.sum()), each.kind)
            for who, each in zip(self.tests, scores, strict=True)
        )

    def _follow(self, make: Make, tests: Streams) -> dict[int, Known]:
        """What the last block gives, by model: nothing yet for a module that is one segment."""
        reached: dict[int, Known] = defaultdict(
            lambda: {who: [None] * len(streams) for who, streams in tests.items()}
        )
        for segment in self.network.segments[:-1]:
            # A head takes most of a small GPU.
            keep = bring if segment.number == len(self.network.blocks) - 1 else put_aside
            for k, weights in enumerate(make(segment.parameters)):
                widened = self.network.widen(weights)
                for who, streams in tests.items():
                    known = reached[k][who]
                    for b, stream in enumerate(streams):
                        known[b] = keep(self.network.call(segment, widened, stream.batch, known[b]))
                self.advance()
        return reached

    def _compare(self, weights: Weights, who: int, known: Sequence[Any]) -> Score:
        """A model's score on the examples of another. known: what its last block gave."""
        parts = []
        for stream, mine, theirs in zip(
            self.tests[who], known, self._list_wanted(who), strict=True
        ):
            output = self.network.call(self.end, weights, stream.batch, mine)
            parts.append(compare_rows(pick_rows(output, stream), theirs))
        return self._add_up(who, parts)

    def _add_up(self, who: int, parts: Iterable[tuple[Tensor, ...]]) -> Score:
        sums = [torch.cat(each).numpy() for each in zip(*parts, strict=True)]
        return Score(find_kind(self.tests[who]), *sums)

    def _list_wanted(self, who: int) -> Iterator[Picked]:
        """What the owner of examples expects, batch by batch: remembered, so far as there is
        room.
        """
        own: Weights = {}
        pairs = zip(self.tests[who], self.own[who][who], strict=True)
        for b, (stream, known) in enumerate(pairs):
            wanted = self._wanted.get((who, b))
            if wanted is None:
                own = own or self.network.take(self.load, who, self.end.parameters)
                wanted = pick_rows(self.network.call(self.end, own, stream.batch, known), stream)
                held = sum(each.logits.nbytes for each in self._wanted.values())
                if held + wanted.logits.nbytes <= REMEMBERED:
                    self._wanted[who, b] = wanted
            yield wanted


def find_kind(streams: Sequence[Stream]) -> str:
    """What is judged of examples."""
    if streams[0].answers is None:
        return ROWS
    prompts = [each.tokens & ~each.answers for each in streams]  # type: ignore[operator]
    return ANSWERS if any(prompt[:, 1:].any() for prompt in prompts) else TOKENS


def list_lambdas(config: DareConfig) -> list[DareConfig]:
    """The merges among which examples choose; one alone has a lambda of its own."""
    return [replace(config, lambda_coeff=k) for k in LAMBDAS] if config.is_auto else [config]


def pick_rows(output: Any, stream: Stream) -> Picked:
    """Where a model is judged: before each answer's tokens, or wherever the output has a row."""
    logits = output.logits if hasattr(output, "logits") else first_tensor(output)
    wanted = None
    if stream.answers is not None:
        logits = logits[:, :-1]
        chosen = stream.answers[:, 1:]
        wanted = stream.batch["input_ids"][:, 1:][chosen].to(logits.device)
    else:
        # On the CPU, where sums are taken, whatever torch's default device is.
        chosen = torch.ones(logits.shape[:-1], dtype=torch.bool, device="cpu")
        if stream.tokens is not None and stream.tokens.numel() == chosen.numel():
            chosen = stream.tokens.reshape(chosen.shape).cpu()
    rows = logits[chosen.to(logits.device)]
    return Picked(rows, wanted, chosen.nonzero()[:, 0], len(chosen))


def compare_rows(mine: Picked, own: Picked) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By example: tokens, and sums of the loss, of what is the same, and of the divergence."""
    columns: tuple[list[Tensor], ...] = [], [], []
    for start in range(0, len(mine.logits), CHUNK):
        part = slice(start, start + CHUNK)
        given, expected = (
            nn.functional.log_softmax(each.logits[part].float(), -1) for each in (mine, own)
        )
        if mine.wanted is not None:
            columns[0].append(-given.gather(-1, mine.wanted[part, None])[:, 0])
        is_number = ~given[:, 0].isnan()  # or else nothing of the row is
        columns[1].append((given.argmax(-1) == expected.argmax(-1)) & is_number)
        share = expected.exp()
        # What is impossible is no difference: there, 0 is multiplied by infinity.
        apart = torch.where(share == 0, 0.0, share * (expected - given))
        columns[2].append(apart.sum(-1))
    ones = torch.ones(len(mine.owners), dtype=torch.float64, device="cpu")
    # A model that gives no numbers is as bad as can be.
    rows = [
        torch.cat(each).cpu().double().nan_to_num(math.inf) if each else 0 * ones
        for each in columns
    ]
    tokens, loss, same, divergence = (
        ones.new_zeros(mine.examples).index_add_(0, mine.owners, each) for each in (ones, *rows)
    )
    return tokens, loss / math.log(2), same, divergence / math.log(2)
