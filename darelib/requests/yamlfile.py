"""YAML: read without surprises, or refused."""

from collections import Counter
from typing import Any, Final

import yaml

from darelib.core.text import ConfigError, as_text

MAX_YAML: Final = 1 << 18  # bytes: PyYAML takes seconds for more
MAX_DIGITS: Final = 100  # of a whole number: Python does not print large ones
MAX_VALUES: Final = 50_000  # of a file with its aliases written out
# PyYAML raises the last three for a value that does not fit its tag, like !!int.
FAULTS: Final = (
    *(yaml.YAMLError, ValueError, OverflowError, RecursionError),
    *(LookupError, AttributeError, TypeError),
)


def load_yaml(text: str, path: str) -> list[Any]:
    """The documents of a YAML text, without empty ones, if any is not.

    Texts that would take long, or are ambiguous, are refused.
    """
    try:
        if len(text.encode(errors="replace")) > MAX_YAML:
            raise ValueError(f"it is longer than {MAX_YAML:,} bytes")
        loader = yaml.SafeLoader(text)
        documents = []
        while loader.check_node():
            node = loader.get_node()
            _count_values(node, {})
            documents.append(loader.construct_document(node))
        return [document for document in documents if document is not None] or [None]
    except FAULTS as error:
        reason = str(getattr(error, "problem", None) or error).partition("\n")[0]
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(
            f"{path} cannot be read: {type(error).__name__}: {reason}{line}",
            "it must be YAML, as mergekit takes it, indented with spaces, not with tabs",
        ) from None


def _count_values(node: Any, counts: dict[int, int]) -> int:
    """How many values a node holds, aliases written out."""
    if id(node) not in counts:
        counts[id(node)] = 0  # until it is known
        line = f"(line {node.start_mark.line + 1})" if node else ""
        if isinstance(node, yaml.ScalarNode) and node.value != as_text(node.value):
            raise ValueError(f"half of a surrogate pair is no text {line}")
        is_integer = isinstance(node, yaml.ScalarNode) and node.tag.endswith(":int")
        if is_integer and len(node.value) > MAX_DIGITS:
            raise ValueError(f"a number has {len(node.value):,} digits {line}")
        children = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            for key, times in Counter(str(key.value) for key, _ in children).most_common(1):
                if times > 1:
                    raise ValueError(f"the key {key[:60]!r} is there {times} times {line}")
            children = [child for pair in children for child in pair]
        counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    if not 0 < counts[id(node)] <= MAX_VALUES:
        raise ValueError(f"with its aliases written out, it holds more than {MAX_VALUES:,} values")
    return counts[id(node)]
