"""What the configurations of two models state differently."""

from collections.abc import Mapping
from typing import Any

from darelib.models.checkpoint import NAME_KEY


def compare_configs(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> dict[str, str]:
    """What two configurations both state, but differently: by key, in words.

    What only one states is no difference.
    """
    compared = mine.keys() & theirs.keys() - {"text_config", NAME_KEY}
    found = {
        prefix + key: f"its {prefix}{key} is {theirs[key]!r}, not {value!r}"
        for key, value in mine.items()
        if key in compared and value != theirs[key]
    }
    parts = (mine.get("text_config", {}), theirs.get("text_config", {}))
    return found | (compare_configs(*parts, "text_config.") if all(parts) else {})
