"""A model as the user named it, and where it is."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from darelib.core.text import ConfigError, as_text

# The files that a model in a directory is named by; the directory's name says more.
MODEL_FILES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
)
# What a tokenizer may be besides a model's: the base's, or all models' tokens together.
BASE, UNION = ("base", "union")
AUTO: Final = "auto"  # the chat template that most models have


@dataclass(frozen=True)
class Source:
    """A model as the user named it, and where that is on this machine."""

    name: str
    path: Path
    # What recipes call it, where that is not the last part of its path: its name on the Hub.
    recorded: str = ""

    @property
    def pinned(self) -> str:
        """Its name and commit, if it is in a cache of the Hub, where directories are commits."""
        return self.recorded if self.recorded.endswith(f"@{self.path.name}") else ""

    @classmethod
    def of(cls, given: str | Path | Source, folder: Path | None = None) -> Source:
        if isinstance(given, Source):
            return given
        if not isinstance(given, str | Path):
            raise ConfigError(
                f"a model must be a path or a name, not {type(given).__name__}",
                "like 'models/base'",
            )
        if not str(given):
            raise ConfigError(
                "the path of a model is empty", "perhaps a variable of the shell is not set"
            )
        name = as_text(given)  # the recipe, which names it, must be text
        path = Path(given)
        with suppress(ValueError):  # of what cannot be a path, as will be found when it is used
            path = Path(os.path.expanduser(given))
        return cls(name, Path(folder or "", path))

    @property
    def is_word(self) -> bool:
        """Whether a tokenizer or a chat template is a word or the template itself, not a path."""
        return self.name in (BASE, UNION, AUTO) or is_template(self.name)


def is_template(text: str) -> bool:
    """Whether a text is a chat template, and not the path of one."""
    return "{{" in text or "{%" in text


def recorded_name(source: Source) -> str:
    """What a recipe calls a model: its name and commit on the Hub, or the last part of its path."""
    path = Path(os.path.abspath(source.path))
    return source.recorded or as_text(path.parent.name if path.name in MODEL_FILES else path.name)
