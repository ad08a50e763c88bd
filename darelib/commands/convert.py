"""`dare.py convert`: writes what other programs have saved in the formats that are merged, and
adapters and diffusion models in those of other programs. Each of them has a room of its own.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from darelib.commands.options import Flags, MergerClass, Options, show
from darelib.commands.report import Report
from darelib.core.text import LOG, count_of, human, list_names, printable
from darelib.models.source import Source

OPTIONS: Final[Options] = {
    "old": {
        "metavar": "OLD",
        "help": "a pickle (.bin, .pt, .pth, .ckpt, or a directory with pytorch_model.bin), a LoRA "
        "adapter (PEFT's or one file), or a diffusion model (one file, or diffusers')",
    },
    "new": {
        "metavar": "NEW",
        "help": "the .safetensors file to write; a directory for a LoRA file; either for a "
        "diffusion model with --base",
    },
    "--base": {
        "metavar": "MODEL",
        "help": "the base of a LoRA file; or a diffusion model, whose layout NEW gets",
    },
    "--force": {"action": "store_true", "help": "replace an existing file"},
}


@dataclass(frozen=True)
class ConvertReport(Report):
    """What a conversion did. Prints as a line; to_dict gives plain data."""

    output: str
    tensors: int
    bytes_written: int
    left_out: tuple[str, ...]  # entries that are no tensors, or have no place
    seconds: float

    def __str__(self) -> str:
        written = f"{count_of(self.tensors, 'tensor')}, {human(self.bytes_written)}"
        return f"wrote {printable(self.output)}: {written}, in {self.seconds:.2f} s"


def run(flags: Flags, merger_class: MergerClass) -> None:
    from darelib.commands.conversions import (
        convert_adapter,
        convert_pickles,
        convert_to_base,
        convert_to_original,
        is_adapter,
        is_diffusion,
    )
    from darelib.requests.configfile import check_new_file

    started = time.perf_counter()
    LOG.setLevel(logging.INFO if flags.get("verbose", True) else logging.WARNING)
    old = Source.of(flags["old"])
    has_adapter = is_adapter(old)
    has_model = not has_adapter and is_diffusion(old)
    if has_model and "base" in flags:
        made = convert_to_base(flags, merger_class)
        report = ConvertReport(
            flags["new"],
            made.tensors,
            made.bytes_written,
            made.models[0].extra_tensors,
            made.seconds,
        )
        show(report, flags, flags.get("verbose", True))
        return
    new = Path(os.path.expanduser(flags["new"]))
    check_new_file(new, "output", "force" in flags)
    left_out: list[str] = []
    if has_adapter:
        base = Source.of(flags["base"]) if "base" in flags else None
        tensors = convert_adapter(old, new, base)
    else:
        tensors, left_out = (convert_to_original if has_model else convert_pickles)(old, new)
    if left_out:
        LOG.warning(f"left out what has no place in {new.name!r}: {list_names(left_out)}")
    size = sum(path.stat().st_size for path in ([new] if new.is_file() else new.iterdir()))
    seconds = time.perf_counter() - started
    report = ConvertReport(flags["new"], tensors, size, tuple(left_out), seconds)
    show(report, flags, flags.get("verbose", True))
