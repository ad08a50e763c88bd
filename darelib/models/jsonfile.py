"""The JSON files beside a model's weights: read whole, within bounds, with no key given twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from darelib.core.text import DareError
from darelib.models.tensorfile import AGAIN_HINT, explain_os_error, open_regular, reject_duplicates

# Bytes, so that a hostile file takes little memory.
MAX_JSON: Final = 1 << 24  # of a configuration
MAX_INDEX: Final = 1 << 25  # of an index: those of the largest models have 10 MB


def read_json(path: Path, name: str, limit: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object in which no key is given twice. name: what to call it in messages."""
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError("it is larger than any model's")
        table = json.loads(data.decode(), object_pairs_hook=reject_duplicates)
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON object")
        return table
    except OSError as error:
        raise explain_os_error(error, name) from None
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DareError(f"{name!r} is not valid: {reason}", AGAIN_HINT) from None
