"""Models by their name on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from darelib.core.text import DareError, install_hint, nearest
from darelib.models.checkpoint import WEIGHT_SUFFIXES, path_hint
from darelib.models.source import Source
from darelib.models.tensorfile import PICKLE_SUFFIXES

# org/name, or org/name@revision
HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def download(source: Source, wanted: Sequence[str] | None = None) -> Source:
    """The model on this machine: itself or, where there is no such path, the Hub's of that name.

    wanted: patterns of the files that are needed; None: all but weights of other frameworks.
    """
    if not is_on_hub(source):
        return source
    repository, _, revision = source.name.partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise DareError(
            f"there is no file or directory {source.name!r}",
            f"{path_hint(source)}; models of the Hugging Face Hub need huggingface_hub, "
            f"{install_hint('hub')}",
        ) from None
    used = (".safetensors", ".index.json")
    others = [f"*{suffix}" for suffix in WEIGHT_SUFFIXES if suffix not in used]
    try:
        folder = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(wanted) if wanted else None,
            ignore_patterns=[*others, "original/*", "consolidated*"],
        )
    except Exception as error:  # of the network, its libraries, the Hub: there are dozens of kinds
        raise _explain_failure(source, error) from None
    # The snapshot's directory has the name of its commit, which is what a recipe must hold, since
    # branches move.
    return Source(source.name, Path(folder), f"{repository}@{Path(folder).name}")


def is_on_hub(source: Source) -> bool:
    """Whether a source is a name on the Hub, as far as one can tell from here."""
    is_file = source.name.endswith((".safetensors", ".json", *PICKLE_SUFFIXES))
    return not is_file and HUB_NAME.fullmatch(source.name) is not None and is_missing(source.path)


def is_missing(path: Path) -> bool:
    """Whether there is nothing at a path, and the system lets us see that."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _explain_failure(source: Source, error: Exception) -> DareError:
    reason = re.split(r"(?<=\.)\s|\n", str(error).strip())[0] or type(error).__name__
    beside = os.listdir(source.path.parent) if source.path.parent.is_dir() else []
    return DareError(
        f"there is no file or directory {source.name!r}, and the Hugging Face Hub does not give a "
        f"model of that name: {reason}",
        nearest(source.path.name, beside)
        if beside
        else f"{path_hint(source)}; for the Hub, check the name, the network, HF_TOKEN and "
        "HF_HUB_OFFLINE",
    )
