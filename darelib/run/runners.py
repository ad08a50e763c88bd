"""The runners: each takes an order, makes what it asks for, and gives what its jobs found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from darelib.core.text import ConfigError, nearest

if TYPE_CHECKING:
    from darelib.run.order import Order, Result


def run_threads(order: Order) -> Result:
    from darelib.run.threads import run

    return run(order)


def run_part(order: Order) -> Result:
    from darelib.run.parts import run

    return run(order)


def run_ray(order: Order) -> Result:
    from darelib.run.ray import run

    return run(order)


RUNNERS: Final[dict[str, Callable[[Order], Result]]] = {"threads": run_threads, "ray": run_ray}


def choose_runner(
    runner: str = "threads", part: Any = None, ray_address: str | None = None
) -> Callable[[Order], Result]:
    """Refuses what does not go together, or does not exist."""
    if runner not in RUNNERS:
        raise ConfigError(f"there is no runner {runner!r}", nearest(str(runner), RUNNERS))
    if ray_address is not None and runner != "ray":
        raise ConfigError(
            "--ray-address means nothing without --runner ray", "add that, or leave it out"
        )
    if part is None:
        return RUNNERS[runner]
    if runner != "threads":
        raise ConfigError(f"--part and --runner {runner} both divide a merge", "choose one of them")
    is_pair = isinstance(part, tuple) and len(part) == 2 and {*map(type, part)} == {int}
    if not is_pair or not 1 <= part[0] <= part[1]:
        given = "/".join(map(str, part)) if is_pair else repr(part)
        raise ConfigError(
            f"there is no part {given}",
            "--part 3/16 is the third of sixteen; in Python, part=(3, 16)",
        )
    return run_part
