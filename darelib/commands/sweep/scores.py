"""What a score is: objectives, and the scores in what an evaluation gives or prints."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

from darelib.config import is_number
from darelib.core.text import ConfigError, DareError, list_names

KEPT: Final = 4000  # characters of what an evaluation prints that are kept, if it fails
ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Digits are never given back, so that a line takes no longer than its length.
NUMBER: Final = re.compile(
    r"(?<![\w.])[-+]?(?:(?:\d++\.?\d*+|\.\d++)(?:e[-+]?\d++)?|nan|inf(?:inity)?)(?![\w.])", re.I
)
JSON_START: Final = re.compile(r'\{\s*"')


class EvaluationFailed(DareError):
    """This model has no score; others may have one."""

    output = ""  # what the evaluation printed


@dataclass(frozen=True)
class Objective:
    """A score, and whether more of it is better."""

    name: str
    maximize: bool

    @classmethod
    def of(cls, text: str) -> Self:
        name, _, way = str(text).rpartition(":")
        if not name or way not in ("max", "min"):
            raise ConfigError(
                f"the objective {text!r} must be NAME:max or NAME:min", "like accuracy:max loss:min"
            )
        return cls(name, way == "max")

    @property
    def direction(self) -> Literal["maximize", "minimize"]:
        return "maximize" if self.maximize else "minimize"

    def gain(self, one: float, other: float) -> float:
        """How much better one is than the other."""
        return one - other if self.maximize else other - one


def read_scores(given: Any, objectives: Sequence[Objective]) -> list[float]:
    """The scores in what a function has returned or a command has printed."""
    if isinstance(given, str):
        given = parse_output(given)
    if not isinstance(given, Mapping):
        given = {objectives[0].name: given} if len(objectives) == 1 else {}
    scores = []
    for objective in objectives:
        if objective.name not in given:
            raise EvaluationFailed(
                f"it gives no score {objective.name!r}, but "
                f"{list_names(list(map(str, given))) or 'nothing'}; --objectives NAME:max names "
                "another"
            )
        value = given[objective.name]
        value = value.item() if hasattr(value, "item") else value  # of a tensor or a NumPy number
        if not is_number(value):
            raise EvaluationFailed(f"its {objective.name!r} is no finite number but {value!r}")
        scores.append(float(value))
    return scores


def parse_output(text: str) -> Any:
    """The JSON object that an output ends with, or else the only number in its last line."""
    text = ESCAPES.sub("", text).rstrip()
    line = text.rpartition("\n")[2]
    cut = line.count("{") != line.count("}")
    for brace in reversed(list(re.finditer(r"^\{", text, re.MULTILINE))):
        try:
            found, end = json.JSONDecoder().raw_decode(text, brace.start())
            if end == len(text):
                return found
        except (ValueError, RecursionError):
            cut |= JSON_START.match(text, brace.start()) is not None
    if cut:
        raise EvaluationFailed(f"its output ends with JSON that is not complete: {line[-80:]!r}")
    numbers = NUMBER.findall(line)
    if len(numbers) != 1:
        raise EvaluationFailed(
            f"its last line, {line[:80]!r}, is no JSON and has not one number but {len(numbers)}"
        )
    return float(numbers[0])
