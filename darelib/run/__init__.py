"""Who does the jobs of a merge: threads, parts on several machines, a Ray cluster; or torch, for
tensors in memory.
"""

from types import ModuleType
from typing import Any, Final

from darelib.core.text import ConfigError, DareError, install_hint, nearest

RUNNERS: Final = ("threads", "ray")


def check_runner(
    runner: str = "threads",
    part: Any = None,
    ray_address: str | None = None,
    has_examples: bool = False,
) -> None:
    if runner not in RUNNERS:
        raise ConfigError(f"there is no runner {runner!r}", nearest(str(runner), RUNNERS))
    if ray_address is not None and runner != "ray":
        raise ConfigError(
            "--ray-address means nothing without --runner ray", "add that, or leave it out"
        )
    if part is not None and runner != "threads":
        raise ConfigError(f"--part and --runner {runner} both divide a merge", "choose one of them")
    if has_examples and runner != "threads":
        raise ConfigError(
            f"--runner {runner} divides a merge, and examples go through the model in its order",
            "merge on one machine, or without examples",
        )
    is_pair = isinstance(part, tuple) and len(part) == 2 and {*map(type, part)} == {int}
    if part is not None and not (is_pair and 1 <= part[0] <= part[1]):
        raise ConfigError(
            f"there is no part {part!r}",
            "--part 3/16, in Python part=(3, 16), is the third of sixteen",
        )


def load_in_memory() -> ModuleType:
    try:
        from darelib.run import in_memory
    except ModuleNotFoundError:
        raise DareError("tensors in memory need torch", install_hint("torch")) from None
    return in_memory


def load_states() -> ModuleType:
    """What matches tensors in memory."""
    load_in_memory()  # without torch, it says so
    from darelib.run.matching import states

    return states


def estimate_matching(plan: Any, inputs: Any) -> Any:
    """What matching takes; None: there are no examples."""
    has_examples = any(model.parts[0].examples for model in inputs)
    return load_matching().estimate(plan, inputs) if has_examples else None


def load_matching() -> ModuleType:
    """What matches, judges and tries merges of files by examples."""
    try:
        from darelib.run.matching import matched_files
    except ModuleNotFoundError as error:
        raise DareError(
            f"a merge with examples needs torch and transformers, and {error.name} is missing",
            install_hint("match"),
        ) from None
    return matched_files
