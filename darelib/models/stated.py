"""The base that an adapter of PEFT was trained on, as its configuration names it."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeGuard

from darelib.core.text import LOG, ConfigError, DareError
from darelib.models.directories import ADAPTER_CONFIG, ADAPTER_FILE
from darelib.models.source import Source, download, is_on_hub
from darelib.models.tensorfile import read_json

STATED_KEY: Final = "base_model_name_or_path"
BASE_HINT: Final = "give --base MODEL, or base_file in [models] of a --config file"


def is_name(stated: object) -> TypeGuard[str]:
    return isinstance(stated, str) and 0 < len(stated) <= 1000


def is_folder(stated: str) -> bool:
    """Whether a path of an adapter's is here. No adapter may have another machine asked."""
    return not re.match(r"[/\\]{2}", stated) and os.path.isdir(stated)


def find_base(adapters: Sequence[Source]) -> Source:
    """The base that all adapters name, which must be on this machine, or in its cache of the Hub:
    what nobody asked for is not downloaded.
    """
    if not adapters:
        raise ConfigError("there is no base model", BASE_HINT)
    trained = {_read_name(adapter): adapter.name for adapter in adapters}
    if len(trained) > 1:
        (one, first), (other, second), *_ = trained.items()
        raise ConfigError(
            f"{first!r} was trained on {one!r}, and {second!r} on {other!r}",
            f"adapters that are merged share a base; {BASE_HINT}",
        )
    [name] = trained
    base = Source(name, Path(name))
    if is_on_hub(base):
        with suppress(DareError):
            cached = download(base, is_cached=True)
            base = cached if any(cached.path.glob("*.safetensors")) else base
    if not is_folder(str(base.path)):
        raise ConfigError(
            f"the base of {trained[name]!r}, {name!r}, is neither a directory here nor in the "
            "cache of the Hub",
            BASE_HINT,
        )
    LOG.info(f"base: {name} (named by the adapters)")
    return base


def _read_name(adapter: Source) -> str:
    """What an adapter calls its base; on the Hub, with the revision that it names."""
    path = download(adapter, [ADAPTER_CONFIG]).path
    is_file = path.name in (ADAPTER_FILE, ADAPTER_CONFIG)
    config = (path.parent if is_file else path) / ADAPTER_CONFIG
    table = read_json(config, str(config)) if os.path.isfile(config) else {}
    stated = table.get(STATED_KEY)
    if not is_name(stated):
        raise ConfigError(
            f"there is no base model, and {adapter.name!r} is no adapter that names one", BASE_HINT
        )
    revision = table.get("revision")
    is_branch = is_name(revision) and is_on_hub(Source(stated, Path(stated)))
    return f"{stated}@{revision}" if is_branch else stated
