"""Matching: the matrices of a merged model are solved for, in forward order, so that on each
model's examples they give what that model's own give.

    X_i, Z_i  what comes into a matrix on the examples of model i: in the merged model, of which all
              matrices before it are solved, and in the model itself
    W_i, S    the matrix of model i, and of the merged model before it is matched
    W         the one that makes  sum_i |W X_i - W_i Z_i|^2 / n_i + e_i |W - S|^2  least,
              where n_i is the mean square of what comes in:  W = S + R A^-1  with
              A = sum_i X_i X_i^T / n_i + e_i I   and   R = sum_i (W_i Z_i - S X_i) X_i^T / n_i

Only the sums A and R are kept. At the last matrix of a block the difference of what the block gives
takes the place of W_i Z_i - S X_i, if the block adds what the matrix gives: that repairs what was
left on the way.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, nn

from darelib.config import DareConfig
from darelib.core.text import DareError
from darelib.output.matched import BlockMatch, MatchReport, find_ratio
from darelib.plan.tensorplan import TensorPlan
from darelib.run.matching.network import (
    BASE,
    OFTEN,
    START,
    WHOLE,
    Load,
    Network,
    Segment,
    bring,
    first_tensor,
    is_transposed,
    move,
    put_aside,
)

# Why a matrix stays as it is.
NO_INPUT: Final = "nothing came into them"
ELSEWHERE: Final = "not every token came into them"
NOT_FINITE: Final = "no finite solution"
STILL: Final = "lambda is 0"
EXCLUDED: Final = "excluded by a rule"
MANY: Final = "made of several tensors"
TIED: Final = "tied to another"
NOT_MERGED: Final = "not merged"
RIDGE: Final = 0.05
LEAST_RIDGE: Final = 1e-5  # below, sums in float32 have no more digits
ROWS: Final = 4096  # of a matrix at a time: heads are large
SMALLEST: Final = 1e-30  # of what comes in
NUDGE: Final = 1e-2  # by which it is tried whether a block adds what its last matrix gives
ADDED: Final = 1e-3  # how exactly
# Of each model's examples: on how many tokens losses are measured, its own and others', and on how
# many examples at least.
JUDGED_TOKENS: Final = 4096
JUDGED_EXAMPLES: Final = 4


def start_from(config: DareConfig) -> DareConfig:
    """What the method gives before it is matched: lambda multiplies the change in the end."""
    rules = [replace(rule, lambda_coeff=1.0) for rule in config.typed_rules]
    return replace(
        config,
        lambda_coeff=1.0,
        dtype="float32",
        rules=rules,
        adapter_rank=None,
        adapter_rest=None,
    )


def explain_unmatched(row: TensorPlan | None, is_tied: bool, config: DareConfig) -> str:
    """Why a matrix is not to be matched, or "". row: of the plan, if it is in that."""
    if row and not row.settings.lambda_coeff:
        return STILL
    if is_tied:
        return TIED
    if row is None or row.quantised or not row.merged or not row.finetuned:
        return NOT_MERGED
    own = row.rule.matched if row.rule else None
    matched = config.matched if own is None else own
    return EXCLUDED if matched is False else ""


def find_tied(module: nn.Module) -> set[str]:
    """Parameters that more than one module uses."""
    named = list(module.named_parameters(remove_duplicate=False))
    uses = Counter(id(each) for _, each in named)
    return {name for name, each in named if uses[id(each)] > 1}


@contextmanager
def explain_memory() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError, IndexError) as error:
        is_gpu = isinstance(error, torch.OutOfMemoryError)
        if is_gpu or isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise DareError(
                f"{'the GPU has' if is_gpu else 'there is'} too little memory to match the model",
                "give a smaller --max-tokens or --max-examples, or a machine with more"
                + ("; CUDA_VISIBLE_DEVICES= uses the CPU" if is_gpu else ""),
            ) from None
        reason = " ".join(str(error).split())
        is_long = isinstance(error, IndexError)  # of positions, most likely
        raise DareError(
            f"torch cannot call the model: {reason}",
            f"{'give a smaller --max-tokens, or ' if is_long else ''}check the shapes of weights "
            "and batches; a merge by weights needs no examples",
        ) from error


@dataclass
class Stream:
    """A batch of a model's examples, and how far it has come, in the model and in the merge."""

    batch: Any
    tokens: Tensor | None = None  # which count, where it is padded
    answers: Tensor | None = None  # which are judged: each as the next of the one before it
    own: Any = None
    merged: Any = None
    following: Any = None  # what the model itself gives next, where that is known already

    def choose(self, rows: list[int]) -> Stream:
        """Some examples of a batch of tokens."""
        parts = (self.tokens, self.answers)
        batch = {name: each[rows] for name, each in self.batch.items()}
        return Stream(batch, *(each if each is None else each[rows] for each in parts))

    def judge_only(self, rows: list[int]) -> Stream:
        """The same, where only some examples have answers that are judged."""
        if self.answers is None or not rows:
            return replace(self, answers=None)
        answers = torch.zeros_like(self.answers)
        answers[rows] = self.answers[rows]
        return replace(self, answers=answers)


@dataclass
class Participant:
    who: int
    streams: list[Stream]
    owner: int | None = None  # whose examples these are, where nothing is matched with them
    # By whose output: sums of the loss on answers, in bits, and of how many.
    losses: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def subject(self) -> int:
        """Whose examples it is given."""
        return self.who if self.owner is None else self.owner

    @property
    def watches(self) -> bool:
        """Whether it only goes along."""
        return self.owner is not None

    @property
    def count(self) -> int:
        """How many examples it has, where these are tokens."""
        return sum(len(each.tokens) for each in self.streams if each.tokens is not None)

    @property
    def tokens(self) -> int:
        return sum(int(each.tokens.sum()) for each in self.streams if each.tokens is not None)

    def judge(self, whose: str, output: Any, stream: Stream) -> None:
        """Note the loss on the answers."""
        if stream.answers is None:
            return
        chosen = stream.answers[:, 1:].to(output.logits.device)
        ids = stream.batch["input_ids"][:, 1:].to(output.logits.device)[chosen]
        logits = output.logits[:, :-1][chosen].float()
        loss = nn.functional.cross_entropy(logits, ids, reduction="sum")
        self.losses[whose].append((float(loss) / math.log(2), len(ids)))

    def mean_loss(self, whose: str) -> float | None:
        """None: nothing was judged."""
        count = sum(each for _, each in self.losses[whose])
        return sum(loss for loss, _ in self.losses[whose]) / count if count else None


def enlist(used: Mapping[int, Sequence[Stream]]) -> list[Participant]:
    """All whose examples match."""
    return [
        Participant(who, [each.judge_only([]) for each in streams]) for who, streams in used.items()
    ]


def enlist_watched(used: Mapping[int, Sequence[Stream]]) -> list[Participant]:
    """The same; losses are measured on some of each model's examples. Others are only judged on
    these: the base, and the other models, which they may fit better.
    """
    participants = []
    watchers = []
    for who, streams in used.items():
        judged = [[] for _ in streams] if who == BASE else list(choose_judged(streams))
        pairs = list(zip(streams, judged, strict=True))
        participants.append(Participant(who, [each.judge_only(rows) for each, rows in pairs]))
        few = [each.choose(rows) for each, rows in pairs if rows]
        if few:
            others = [BASE, *(each for each in used if each not in (BASE, who))]
            watchers += [Participant(each, list(map(replace, few)), who) for each in others]
    return [*participants, *watchers]


def choose_judged(streams: Sequence[Stream]) -> Iterator[list[int]]:
    """By batch, the examples on which losses are measured: long ones and short ones."""
    sizes = [0 if each.answers is None else len(each.answers) for each in streams]
    judged = [each.batch["input_ids"] for each in streams if each.answers is not None]
    longest = max((each.shape[1] for each in judged), default=1)
    step = -(-sum(sizes) // max(JUDGED_EXAMPLES, JUDGED_TOKENS // longest))
    first = 0
    for size in sizes:
        yield [row for row in range(size) if (first + row) % step == 0]
        first += size


@dataclass
class Matched:
    """What was found of a segment: its matrices, and how far their outputs were off."""

    name: str
    solved: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)  # matrices that stay, and why
    wanted: float = 0.0  # the mean square of what the matrices should give
    before: float = 0.0  # of what is missing from that
    after: float = 0.0


def summarize(results: Sequence[Matched]) -> MatchReport:
    left: dict[str, list[str]] = {}
    for name, why in {name: why for each in results for name, why in each.left.items()}.items():
        left.setdefault(why, []).append(name)
    blocks = [
        BlockMatch(
            name=result.name,
            matrices=len(result.solved),
            before=find_ratio(result.before, result.wanted),
            after=find_ratio(result.after, result.wanted),
        )
        for result in results
        if result.solved
    ]
    wanted = sum(result.wanted for result in results)
    return MatchReport(
        blocks=tuple(blocks),
        before=find_ratio(sum(result.before for result in results), wanted),
        after=find_ratio(sum(result.after for result in results), wanted),
        left={why: tuple(names) for why, names in left.items()},
    )


class Sums:
    """What is summed over the tokens of one model, or of all: for matrices with one input."""

    def __init__(self, width: int, outputs: Mapping[str, int], device: torch.device) -> None:
        self.gram = torch.zeros(width, width, device=device)
        self.cross = {n: torch.zeros(rows, width, device=device) for n, rows in outputs.items()}
        self.wanted = 0.0  # squares of what the matrices should give
        self.before = 0.0  # of what is missing from that
        self.ridge = 0.0
        self.tokens = 0

    def make_empty(self) -> Sums:
        outputs = {name: len(each) for name, each in self.cross.items()}
        return Sums(len(self.gram), outputs, self.gram.device)

    def add(self, inputs: Tensor, wanted: dict[str, Tensor], missing: dict[str, Tensor]) -> None:
        """inputs: in the merged model, by rows. wanted, missing: of each matrix."""
        self.tokens += len(inputs)
        self.gram.addmm_(inputs.T, inputs)
        for name, each in missing.items():
            self.cross[name].addmm_(each.T, inputs)
            self.before += float(each.square().sum())
            self.wanted += float(wanted[name].square().sum())

    def include(self, model: Sums, ridge: float) -> None:
        """Add one model's sums, by the size of its inputs. Few tokens, more ridge."""
        size = float(model.gram.diagonal().mean())
        if size < SMALLEST:
            return
        width = len(self.gram)
        most = max(1.0, ridge)  # a large one is wanted
        self.ridge += min(most, max(LEAST_RIDGE, ridge * width / model.tokens))
        self.gram.add_(model.gram, alpha=1 / size)
        for name, each in model.cross.items():
            self.cross[name].add_(each, alpha=1 / size)
        self.before += model.before / size
        self.wanted += model.wanted / size

    def solve(self) -> dict[str, Tensor]:
        """The changes of the matrices. They are not finite where there is no solution."""
        system = self.gram.clone()
        system.diagonal().add_(self.ridge)
        if not system.is_cuda:  # where float64 is half as fast, not a small part of it
            system = system.double()
        factor, failed = torch.linalg.cholesky_ex(system)
        if failed and system.is_cuda:
            factor, failed = torch.linalg.cholesky_ex(system.double())
        if failed:
            factor = torch.full_like(factor, torch.nan)
        return {
            name: torch.cholesky_solve(each.T.to(factor.dtype), factor).T.float()
            for name, each in self.cross.items()
        }

    def find_gain(self, name: str, change: Tensor) -> float:
        """By how much a change C that solves C (gram + ridge) = cross makes less what is missing:
        its square.
        """
        rows = zip(torch.split(change, ROWS), torch.split(self.cross[name], ROWS), strict=True)
        return sum(float((own * (own * self.ridge + cross)).sum()) for own, cross in rows)


class Enough(Exception):
    """All that is wanted of a forward is seen."""


@contextmanager
def hooked(modules: Mapping[str, nn.Module], hook: Callable[..., Tensor | None]) -> Iterator[None]:
    """hook: called with each module's name, the module, its inputs and its output."""
    hooks = [each.register_forward_hook(partial(hook, name)) for name, each in modules.items()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def seen(matrices: dict[str, nn.Module], stops: bool) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """What comes into matrices, and what they give. stops: end the forward after the last."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def note(name: str, _: nn.Module, inputs: Any, output: Tensor) -> None:
        is_last = stops and len(found) == len(matrices) - (name not in found)
        # A copy: what comes next may change it in place.
        found[name] = inputs[0], output if is_last else output.clone()
        if is_last:
            raise Enough

    try:
        with hooked(matrices, note):
            yield found
    except Enough as enough:
        enough.__traceback__ = None  # it holds what was computed on the way


@dataclass
class Walk:
    """Matches a network with examples, segment by segment."""

    network: Network
    load: Load
    participants: Sequence[Participant]
    ridge: float
    excluded: Callable[[str], str]  # why a matrix is not to be matched, or ""
    check: Callable[[], None] = lambda: None  # raises what should stop it

    @property
    def matching(self) -> list[Participant]:
        return [each for each in self.participants if not each.watches]

    def run(self) -> Iterator[Matched]:
        for segment in self.network.segments:
            yield self.match(segment)

    def match(self, segment: Segment) -> Matched:
        result = Matched(segment.name)
        is_block = 0 <= segment.number < len(self.network.blocks)
        merged = self.network.take(self.load, START, segment.parameters)
        still = [name for name in segment.parameters if self.excluded(name) == STILL]
        merged |= self.network.take(self.load, BASE, still)
        if not is_block:
            self.clear()
        stages = self.find_stages(segment, merged, result)
        loaded = {}
        if len(stages) > 1:  # each needs them
            whose = [each.who for each in self.matching]
            taken = ((who, self.load(who, segment.parameters)) for who in whose)
            loaded = {who: put_aside(move(own, self.network.device)) for who, own in taken}
        for k, stage in enumerate(stages):
            self.solve_stage(segment, merged, stage, loaded, k == len(stages) - 1, result)
        self.advance(segment, merged, loaded)
        result.solved = {name: bring(merged[name]) for name in result.solved}
        return result

    def clear(self) -> None:
        """Put all aside: a head takes most of a small GPU, and has no room between other things."""
        for participant in self.participants:
            for stream in participant.streams:
                stream.own = bring(stream.own)
                stream.merged = bring(stream.merged)

    def call(self, segment: Segment, weights: dict[str, Tensor], batch: Any, known: Any) -> Any:
        self.check()
        return self.network.call(segment, weights, batch, known)

    def find_stages(
        self, segment: Segment, merged: dict[str, Tensor], result: Matched
    ) -> list[dict[str, nn.Module]]:
        """The matrices that are given one and the same input, in the order of their calls."""
        calls: list[tuple[str, Tensor]] = []
        wanted = {}
        for name, why in segment.others.items():
            result.left[name] = TIED if self.excluded(name) == TIED else why
        for name, module in segment.matrices.items():
            if reason := self.excluded(name):
                result.left[name] = reason
            else:
                wanted[name] = module

        def note(name: str, _: nn.Module, inputs: Any, __: Tensor) -> None:
            calls.append((name, inputs[0]))

        stream = self.matching[0].streams[0]
        with hooked(wanted, note):
            self.call(segment, merged, stream.batch, stream.merged)
        uses = Counter(name for name, _ in calls)
        sizes = Counter(inputs.shape[:-1].numel() for _, inputs in calls)
        rows = max(sizes, key=sizes.__getitem__, default=0)
        result.left |= {name: NO_INPUT for name in wanted if name not in uses}
        stages: list[tuple[Tensor, dict[str, nn.Module]]] = []
        for name, inputs in calls:
            if uses[name] > 1:
                result.left[name] = OFTEN
            elif inputs.shape[:-1].numel() != rows:
                result.left[name] = ELSEWHERE
            elif stages and stages[-1][0] is inputs:
                stages[-1][1][name] = wanted[name]
            else:
                stages.append((inputs, {name: wanted[name]}))
        return [stage for _, stage in stages]

    def solve_stage(
        self,
        segment: Segment,
        merged: dict[str, Tensor],
        stage: dict[str, nn.Module],
        loaded: dict[int, dict[str, Tensor]],
        is_last: bool,
        result: Matched,
    ) -> None:
        """Solve for matrices with one input. What the last stage repairs is the block's output."""
        share = self.find_share(segment, merged, stage) if is_last else 0.0
        total: Sums | None = None
        for participant in self.matching:
            own = self.take(segment, participant.who, loaded)
            sums = self.add_up(segment, own, merged, stage, participant, share, is_last)
            if sums is None:
                result.left |= dict.fromkeys(stage, ELSEWHERE)
                return
            total = total or sums.make_empty()
            total.include(sums, self.ridge)
            del own, sums  # they are large
        if total:
            self.apply(merged, stage, total, result)

    def add_up(
        self,
        segment: Segment,
        own: dict[str, Tensor],
        merged: dict[str, Tensor],
        stage: dict[str, nn.Module],
        participant: Participant,
        share: float,
        is_last: bool,
    ) -> Sums | None:
        """What the matrices of a stage are given and should give. None: other tokens come into
        them in the merged model than in the participant's own.
        """
        is_end = segment.number in (len(self.network.blocks), WHOLE)
        sums: Sums | None = None
        for stream in participant.streams:
            with seen(stage, stops=not is_last) as wanted:
                theirs = self.call(segment, own, stream.batch, stream.own)
            with seen(stage, stops=not share) as given:
                ours = self.call(segment, merged, stream.batch, stream.merged)
            shapes = [{n: each[0].shape for n, each in s.items()} for s in (wanted, given)]
            if shapes[0] != shapes[1] or len(given) < len(stage):
                return None
            inputs, keep = self.choose(next(iter(given.values()))[0], stream.tokens)
            if share:
                [name] = stage
                targets = {name: flatten(first_tensor(theirs))[keep] / share}
                missing = {name: targets[name] - flatten(first_tensor(ours))[keep] / share}
            else:
                targets = {name: flatten(each[1])[keep] for name, each in wanted.items()}
                missing = {n: targets[n] - flatten(each[1])[keep] for n, each in given.items()}
            if sums is None:
                sizes = {name: each.shape[1] for name, each in targets.items()}
                sums = Sums(inputs.shape[1], sizes, self.network.device)
            sums.add(inputs, targets, missing)
            if is_last and not is_end:
                stream.own = None  # they would be in memory three times
                stream.following = put_aside(theirs)
        return sums

    def apply(
        self, merged: dict[str, Tensor], stage: dict[str, nn.Module], sums: Sums, result: Matched
    ) -> None:
        changes = sums.solve()
        if not all(change.isfinite().all() for change in changes.values()):
            result.left |= dict.fromkeys(stage, NOT_FINITE)
            return
        for name, change in changes.items():
            merged[name] = merged[name] + (change.T if is_transposed(stage[name]) else change)
            result.solved[name] = merged[name]
        gained = sum(sums.find_gain(name, change) for name, change in changes.items())
        result.wanted += sums.wanted
        result.before += sums.before
        result.after += max(0.0, sums.before - gained)

    def find_share(
        self, segment: Segment, merged: dict[str, Tensor], stage: dict[str, nn.Module]
    ) -> float:
        """What a block multiplies by what its last matrix gives before it adds it to its output;
        0: it does something else with that, or there are several.
        """
        if len(stage) > 1 or not 0 <= segment.number < len(self.network.blocks):
            return 0.0
        stream = self.matching[0].streams[0]
        plain = first_tensor(self.call(segment, merged, stream.batch, stream.merged))
        pushed: list[Tensor] = []

        def push(_: str, __: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            generator = torch.Generator(output.device).manual_seed(0)
            noise = torch.randn(output.shape, generator=generator, device=output.device)
            pushed.append(noise * (NUDGE * output.std()))
            return output + pushed[0]

        with hooked(stage, push):
            moved = first_tensor(self.call(segment, merged, stream.batch, stream.merged)) - plain
        if [each.numel() for each in pushed] != [moved.numel()]:
            return 0.0
        nudge = pushed[0].reshape(moved.shape)
        share = float((moved * nudge).sum() / nudge.square().sum().clamp(min=SMALLEST))
        is_added = (moved - share * nudge).norm() < ADDED * abs(share) * nudge.norm()
        return share if is_added else 0.0

    def advance(
        self, segment: Segment, merged: dict[str, Tensor], loaded: dict[int, dict[str, Tensor]]
    ) -> None:
        """Let all examples pass through a segment; through the last, those that are judged. What
        the others have come to is nobody's then.
        """
        is_end = segment.number in (len(self.network.blocks), WHOLE)
        ordered = sorted(self.participants, key=attrgetter("who"))
        for who, some in groupby(ordered, attrgetter("who")):
            pairs = [(each, stream) for each in some for stream in each.streams]
            if is_end:
                for _, stream in pairs:
                    if stream.answers is None:
                        stream.own = stream.merged = None
                pairs = [(each, stream) for each, stream in pairs if stream.answers is not None]
            own = self.take(segment, who, loaded) if pairs else {}
            for participant, stream in pairs:
                given = stream.following
                stream.following = None
                if given is None:
                    given = self.call(segment, own, stream.batch, stream.own)
                made = given
                if not participant.watches:
                    made = self.call(segment, merged, stream.batch, stream.merged)
                if is_end:
                    participant.judge("own", given, stream)
                    participant.judge("merged", made, stream)
                    stream.own = stream.merged = None
                else:
                    stream.own = put_aside(given)
                    stream.merged = None if participant.watches else put_aside(made)

    def take(
        self, segment: Segment, who: int, loaded: dict[int, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        return self.network.widen(loaded.get(who) or self.load(who, segment.parameters))

    def choose(self, inputs: Tensor, tokens: Tensor | None) -> tuple[Tensor, Any]:
        """The rows that count, and which they are: all, or those that are no padding."""
        rows = flatten(inputs)
        keep: Any = slice(None)
        if tokens is not None and tokens.numel() == len(rows):
            keep = tokens.reshape(-1).to(rows.device)
        return rows[keep].float(), keep


def flatten(tensor: Tensor) -> Tensor:
    """By rows."""
    return tensor.reshape(-1, tensor.shape[-1])
