"""Where models are made and scored, one at a time: as files, or in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from darelib.commands.sweep.evaluation import Evaluate
from darelib.config import DareConfig
from darelib.core.text import DareError, install_hint
from darelib.models.checkpoint import Checkpoint
from darelib.run import load_memory


@dataclass(frozen=True)
class FileBench:
    """Models are written, each over the one before, and handed over by their path."""

    base: Path
    merge: Callable[[DareConfig, Path], Any]
    evaluate: Evaluate
    folder: Path
    keep: bool

    def place(self, name: str) -> Path:
        """Of the kind that the base is, so that what loads the base loads it."""
        is_file = self.base.is_file() and self.base.suffix == ".safetensors"
        return self.folder.absolute() / (f"{name}.safetensors" if is_file else name)

    def score(self, config: DareConfig | None, trial: Any, name: str) -> Any:
        if config is None:
            return self.evaluate(self.base.absolute(), trial)
        path = self.place(name if self.keep else "merged")
        if not self.keep:  # what an evaluation has put beside the last one's files goes, too
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        self.merge(config, path)
        return self.evaluate(path, trial)


@contextmanager
def prepare_folder(folder: Path, keep: bool) -> Iterator[Path]:
    """Where models are written: there, to be kept, or in a folder of its own that goes away."""
    made: AbstractContextManager[str] = nullcontext(str(folder))
    try:
        if keep:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            made = TemporaryDirectory(prefix=".sweep-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise DareError(
            f"cannot write models in {str(folder)!r}: {error.strerror}", "give --keep-models DIR"
        ) from None
    with made as name:
        yield Path(name)


class MemoryBench:
    """State dicts are merged, into a live model's tensors if there is one; nothing is written."""

    def __init__(
        self,
        base: Mapping[str, Any],
        finetuned: Sequence[Mapping[str, Any]],
        evaluate: Evaluate,
        model: Any,
        dtype: str | None,
    ) -> None:
        self.merge = load_memory().merge_tensors
        self.evaluate = evaluate
        self.model = model
        self.nothing = DareConfig(lambda_coeff=0.0, dtype=dtype)  # which gives the base
        self.out = None if model is None else model.state_dict()
        owners: dict[int, str] = {}  # by address, the first name of each tensor that is written
        tied = set()  # the other names: a tied head is merged once
        for name, tensor in (self.out or {}).items():
            if tensor.numel() and owners.setdefault(tensor.data_ptr(), name) != name:
                tied.add(name)
        # What is merged into the base's own tensors would be the base of the next merge.
        self.base = {
            name: tensor.clone() if tensor.data_ptr() in owners else tensor
            for name, tensor in base.items()
            if name not in tied
        }
        self.finetuned = [
            {name: tensor for name, tensor in state.items() if name not in tied}
            for state in finetuned
        ]
        for k, state in enumerate(finetuned):
            if any(tensor.data_ptr() in owners for tensor in state.values()):
                raise DareError(
                    f"model {k} and the live model share their memory", "give copies of its tensors"
                )

    def make(self, config: DareConfig | None) -> Any:
        """What is scored: a merged state dict, or the live model. None: the base."""
        merged = self.merge(self.base, self.finetuned, config or self.nothing, self.out)
        return merged if self.model is None else self.model

    def leave(self, config: DareConfig | None) -> None:
        """Let a live model hold a merge, or the base."""
        if self.model is not None:
            self.make(config)

    def score(self, config: DareConfig | None, trial: Any, _: str) -> Any:
        return self.evaluate(self.make(config), trial)


def load_states(inputs: Sequence[Checkpoint], model: Any) -> list[dict[str, Any]]:
    """The tensors of models in files, on the device of a live model if there is one."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise DareError(
            "models in memory need torch and safetensors", install_hint("torch")
        ) from None
    device = "cpu" if model is None else str(next(iter(model.state_dict().values())).device)
    for each in inputs:
        if type(each) is not Checkpoint:
            raise DareError(
                f"{each.name!r} is no whole model of plain weights, as is needed in memory",
                "search in files, or merge it alone first",
            )
    return [
        {n: t for file in each.files for n, t in load_file(file.path, device).items()}
        for each in inputs
    ]
