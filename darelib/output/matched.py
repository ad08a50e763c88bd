"""What a merge that was matched with examples found, and what its recipe keeps of it."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from darelib.core.text import count_of, duration, human, list_names, printable, read_toml
from darelib.models.tensorfile import peek_header
from darelib.output.destination import MATCHED_KEY

UNMATCHED: Final = "0" * 64  # the digest of one that could not be matched: it is made again


@dataclass(frozen=True)
class BlockMatch:
    """How far outputs of matrices were off, relative to what the models give."""

    name: str
    matrices: int
    before: float
    after: float


@dataclass(frozen=True)
class AnswerLoss:
    """The loss on the answers of a model's examples, or of some of them, in bits a token."""

    model: str
    base: float
    own: float
    merged: float | None  # None: what is written is not what was walked

    def __str__(self) -> str:
        words = f"base {self.base:.3f}, own {self.own:.3f}"
        words += "" if self.merged is None else f", merged {self.merged:.3f}"
        return f"loss on the answers of {printable(self.model)}, bits a token: {words}"


@dataclass(frozen=True)
class MatchReport:
    """What matching did. Prints as lines."""

    blocks: tuple[BlockMatch, ...]
    before: float
    after: float
    left: Mapping[str, tuple[str, ...]]  # tensors that stay as the method has them, by why
    examples: tuple[int, ...] = ()  # of each model, and of the base if it has some
    tokens: tuple[int, ...] = ()
    losses: tuple[AnswerLoss, ...] = ()  # where there is something to judge

    def __str__(self) -> str:
        count = sum(block.matrices for block in self.blocks)
        used = f" with {count_of(sum(self.examples), 'example')} ({sum(self.tokens):,} tokens)"
        lines = [
            f"matched {count:,} matri{'x' if count == 1 else 'ces'}{used if self.examples else ''}:"
            f" outputs were off by {self.before:.1%}, and are by {self.after:.1%}",
            *map(str, self.losses),
        ]
        for why, names in self.left.items():
            lines.append(
                f"{count_of(len(names), 'tensor')} not matched ({why}): {list_names(names)}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class PlannedMatch:
    """What examples will take. Prints as a line."""

    matrices: int  # that are matched
    examples: int
    tokens: int
    judged: int  # tokens of other examples, which choose lambda
    memory: int
    seconds: float

    def __str__(self) -> str:
        used = f"{count_of(self.examples, 'example')} ({self.tokens:,} tokens)"
        parts = [f"{self.matrices:,} matrices matched with {used}"] if self.matrices else []
        parts += [f"lambda chosen by {self.judged:,} tokens"] if self.judged else []
        cost = f"{duration(self.seconds)} of products, {human(self.memory)} of memory"
        return f"{', '.join(parts) or 'nothing is matched'}: {cost}"


def find_ratio(missing: float, wanted: float) -> float:
    return math.sqrt(missing / wanted) if wanted else 0.0


def list_matched(path: Path, key: str) -> dict[str, str]:
    """The digests in the recipe of a file of tensors."""
    recipe = read_toml(peek_header(path)[1].get(key, "")).get("recipe", {})
    found = recipe.get(MATCHED_KEY, {})
    return {str(name): str(digest) for name, digest in found.items()}


def digest_range(path: Path, start: int, count: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(start)
        while count and (piece := file.read(min(count, 1 << 22))):
            digest.update(piece)
            count -= len(piece)
    return digest.hexdigest()
