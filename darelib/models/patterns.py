"""Patterns of an adapter's configuration, matched in bounded time: they may come from anybody."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from darelib.core.text import DareError, list_names
from darelib.models.directories import ADAPTER_CONFIG
from darelib.models.tensorfile import MAX_NAME

# Where ranks differ, PEFT writes a pattern for each module, and there may be thousands: most
# patterns are plain names.
PLAIN_PATTERN: Final = re.compile(r"(?:[\w-]|\\?\.)*+")
# Characters of the others together: Python may take milliseconds to compile a few of them.
MAX_PATTERNS: Final = 20_000
# Python takes a time that doubles with each letter for a pattern like (a+)+, and cannot be stopped
# meanwhile. So a process of its own matches them, which can be.
PATTERN_SECONDS: Final = 5.0
WHOLE_PATTERN: Final = r"(.*\.)?({})$"
MATCHER: Final = r"""
import json, re, sys, warnings
warnings.simplefilter("ignore")
whole, patterns, modules = json.load(sys.stdin)
compiled = [(key, re.compile(whole.format(key))) for key in patterns]
found = {name: [key for key, pattern in compiled if pattern.match(name)] for name in modules}
print(json.dumps(found))
"""


def match_patterns(
    patterns: Mapping[str, Any], modules: Sequence[str], name: str
) -> dict[str, Any]:
    """The values of the modules that patterns match. name: of the adapter.

    As PEFT matches them: the first one that matches the end of the module's name, after a dot. But
    in a plain name a dot is only a dot, so that names are looked up, however many there are.
    """
    odd = [key for key in patterns if not PLAIN_PATTERN.fullmatch(key)]
    if sum(map(len, odd)) > MAX_PATTERNS or any(len(key) > 2 * MAX_NAME for key in patterns):
        raise DareError(f"the patterns in the {ADAPTER_CONFIG} of {name!r} are too long", "fix it")
    order = {key: place for place, key in enumerate(patterns)}
    plain = {key.replace("\\", ""): key for key in reversed(order) if key not in odd}
    found = match_expressions(odd, modules, name) if odd else {}
    values = {}
    for module in modules:
        ends = (module[start.end() :] for start in re.finditer(r"^|\.", module))
        matching = [plain[end] for end in ends if end in plain] + found.get(module, [])
        if matching:
            values[module] = patterns[min(matching, key=order.__getitem__)]
    return values


def match_expressions(
    patterns: Sequence[str], modules: Sequence[str], name: str
) -> dict[str, list[str]]:
    """The regular expressions that match each module."""
    try:
        matched = subprocess.run(
            [sys.executable, "-ISc", MATCHER],
            input=json.dumps([WHOLE_PATTERN, patterns, modules]).encode(),
            capture_output=True,
            timeout=PATTERN_SECONDS,
            check=True,
            start_new_session=True,  # so that Ctrl-C reaches only the one who asks
        )
    except (OSError, subprocess.SubprocessError):
        raise DareError(
            f"the patterns in the {ADAPTER_CONFIG} of {name!r} are no regular expressions, or take "
            f"more than {PATTERN_SECONDS:g} s to match: {list_names(patterns)}",
            "write the names of modules instead",
        ) from None
    return json.loads(matched.stdout)
