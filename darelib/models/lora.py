"""LoRA adapters: two small matrices for each tensor that they change, seen as the tensors of the base.

An element is scale * (left @ right), with the products added in the order of the rank, so that it has the same bits
whatever range of elements is read.
"""

from __future__ import annotations

import math
import os
import re
import threading
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from darelib.config import is_count, is_number
from darelib.core.formats import FORMATS, STORED_BITS, widen
from darelib.core.text import DareError, InputChanged, count_of, list_names
from darelib.core.tuning import TUNING
from darelib.kernels import Kernel, KernelSpec
from darelib.models.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    EMBEDDINGS,
    HEADS,
    INDEX_FILE,
    NAME_KEY,
    QUANTISE_HINT,
    WEIGHTS_FILE,
    Checkpoint,
    Layout,
    compare_configs,
    module_of,
    part_name,
    quantised_modules,
    read_config,
)
from darelib.models.jsonfile import read_json
from darelib.models.source import Source
from darelib.models.tensorfile import AGAIN_HINT, CHANGED_HINT, MAX_NAME, TensorInfo, file_sha256

UNLOAD_HINT: Final = (
    "merge it into the base with PEFT's merge_and_unload, and use the result as a model"
)
# Settings of PEFT that make an adapter something else than scale * B @ A, and what people call them.
OTHER_ADAPTERS: Final = {
    "use_dora": "DoRA", "use_qalora": "QA-LoRA", "use_bdlora": "BD-LoRA", "kasa_config": "KaSA",
    "arrow_config": "Arrow", "monteclora_config": "MonteCLoRA", "alora_invocation_tokens": "activated LoRA",
    "lora_bias": "LoRA with biases", "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens", "target_parameters": "LoRA on parameters that are not modules",
}  # fmt: skip
# Ways to start training that leave the base as it is. The others (PiSSA, OLoRA, LoftQ, ...) change it, so that the
# adapter is not a change to the base that the user has.
PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
LORA_KEY: Final = re.compile(
    r"(.+)\.(lora_(?:embedding_)?[AB])(?:\.(?!weight$|bias$)[^.]+)?(?:\.weight)?", re.DOTALL
)
# Where ranks differ, PEFT writes a pattern for each module, and there may be thousands: most patterns are plain names.
PLAIN_PATTERN: Final = re.compile(r"(?:[\w-]|\\?\.)*+")
# Characters of the others together: Python may take milliseconds to compile a few of them.
MAX_PATTERNS: Final = 20_000

Lookup: TypeAlias = Callable[
    [str, Any], Any
]  # of a module, the value of the pattern that matches it, or a default


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTensor(TensorInfo):
    """A tensor, or a change to one, that is scale * left @ right; the stored matrices may be transposed."""

    left: TensorInfo  # rows x rank, or rank x rows
    right: TensorInfo  # rank x columns, or columns x rank
    rank: int
    columns: int
    transposed: bool
    scale: float
    whole: (
        TensorInfo | None
    )  # the tensor that it changes, where that was saved with it; None: the base's

    @property
    def stored_bytes(self) -> int:
        return self.left.nbytes + self.right.nbytes + (self.whole.nbytes if self.whole else 0)

    @property
    def spec(self) -> KernelSpec:
        """The kernel that multiplies the matrices."""
        return KernelSpec("expand", self.dtype, self.dtype, self.dtype)


@dataclass(frozen=True)
class LoraConfig:
    """What of an adapter_config.json determines the weights."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    rank_pattern: Lookup = lambda module, default: default
    alpha_pattern: Lookup = lambda module, default: default

    @classmethod
    def of(cls, table: dict[str, Any], name: str) -> LoraConfig:
        """name: what to call the adapter."""
        _check_plain(table, name)
        tests: dict[str, Callable[[Any], bool]] = {
            "r": lambda v: is_count(v, 1),
            "lora_alpha": is_number,
            "use_rslora": lambda v: isinstance(v, bool),
            "fan_in_fan_out": lambda v: isinstance(v, bool),
            "rank_pattern": lambda v: (
                isinstance(v, dict) and all(is_count(rank, 1) for rank in v.values())
            ),
            "alpha_pattern": lambda v: isinstance(v, dict) and all(map(is_number, v.values())),
        }
        given: dict[str, Any] = {key: table[key] for key in tests if table.get(key) is not None}
        for key, value in given.items():
            if not tests[key](value):
                raise DareError(
                    f"the adapter {name!r} has {key} = {value!r}", f"fix its {ADAPTER_CONFIG}"
                )
            given[key] = _compile_patterns(value, name) if isinstance(value, dict) else value
        return cls(**given)

    def rank(self, module: str) -> int:
        return int(self.rank_pattern(module, self.r))

    def scale(self, module: str, rank: int) -> float:
        return float(self.alpha_pattern(module, self.lora_alpha)) / (
            math.sqrt(rank) if self.use_rslora else rank
        )


def _check_plain(table: dict[str, Any], name: str) -> None:
    """Refuse every kind of adapter but plain LoRA."""
    kind, start = table.get("peft_type"), table.get("init_lora_weights")
    if kind != "LORA":
        raise DareError(
            f"the adapter {name!r} is of type {kind!r}", "only LoRA adapters can be merged"
        )
    for key, words in OTHER_ADAPTERS.items():
        if table.get(key):
            raise DareError(
                f"the adapter {name!r} uses {words} ({key}), which is not a product of two matrices",
                UNLOAD_HINT,
            )
    if start not in PLAIN_STARTS:
        raise DareError(
            f"the adapter {name!r} was started by {start!r}, which may also have changed the base",
            "convert it to a plain LoRA, as PEFT's save_pretrained with path_initial_model_for_weight_conversion",
        )


def _compile_patterns(patterns: dict[str, Any], name: str) -> Lookup:
    """As PEFT matches them: the first one that matches the end of the module's name, after a dot.

    But in a plain name a dot is only a dot, so that names are looked up, however many there are.
    """
    odd = [key for key in patterns if not PLAIN_PATTERN.fullmatch(key)]
    if sum(map(len, odd)) > MAX_PATTERNS or any(len(key) > 2 * MAX_NAME for key in patterns):
        raise DareError(f"the patterns in the {ADAPTER_CONFIG} of {name!r} are too long", "fix it")
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # Python's, about brackets that may mean more some day
            compiled = {key: re.compile(rf"(.*\.)?({key})$") for key in odd}
    except (re.error, OverflowError, RecursionError) as error:
        reason = f"a pattern in the {ADAPTER_CONFIG} of {name!r} is no regular expression: {error}"
        raise DareError(reason, "fix it") from None
    order = {key: place for place, key in enumerate(patterns)}
    plain = {key.replace("\\", ""): key for key in reversed(patterns) if key not in compiled}

    def find(module: str, default: Any) -> Any:
        ends = (module[start.end() :] for start in re.finditer(r"^|\.", module))
        matching = [plain[end] for end in ends if end in plain]
        matching += [key for key, pattern in compiled.items() if pattern.match(module)]
        return patterns[min(matching, key=order.__getitem__)] if matching else default

    return find


def find_adapter(source: Source) -> Layout | None:
    """The files of an adapter; None: the source is something else."""
    path, folder = source.path, source.path.parent
    if path.is_dir():
        folder = path
        has_model = (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists()
        has_config = (folder / ADAPTER_CONFIG).exists()
        if has_config and has_model:
            raise DareError(
                f"{source.name!r} holds a model and an adapter",
                f"name one of them, like {WEIGHTS_FILE}",
            )
        if has_model or not (has_config or os.path.lexists(folder / ADAPTER_FILE)):
            return None
    elif path.name not in (ADAPTER_FILE, ADAPTER_CONFIG):
        return None
    for name in (ADAPTER_CONFIG, ADAPTER_FILE):
        if not (folder / name).exists():
            pickled = (folder / "adapter_model.bin").exists()
            hint = "load and save it with a current PEFT" if pickled else AGAIN_HINT
            raise DareError(f"the adapter {source.name!r} has no {name}", hint)
    return Layout((folder / ADAPTER_FILE,), folder)


def find_other_base(name: str, stated: Any, base: Checkpoint) -> Iterator[str]:
    """What to warn of where an adapter states another base than it gets. Paths are as PEFT reads them."""
    if not stated or not isinstance(stated, str) or len(stated) > 1000:  # which is no name
        return
    path, differences = base.folder or base.files[0].path, ""
    path = path.parent if path.name == WEIGHTS_FILE else path
    if not re.match(r"[/\\]{2}", stated) and os.path.isdir(
        stated
    ):  # no adapter may have another machine asked
        if os.path.samefile(stated, path):
            return
        stated = os.path.abspath(stated)
        differences = ", ".join(compare_configs(read_config(Path(stated)), base.config).values())
    hub_name, loaded_from = (
        base.source.recorded.partition("@")[0],
        str(base.config.get(NAME_KEY, "")),
    )
    names = map(last_part, (hub_name, os.path.abspath(path), os.path.realpath(path), loaded_from))
    if differences or last_part(stated) not in names:
        how = (
            f"is configured differently from it ({differences})"
            if differences
            else "is given as its base"
        )
        yield f"{name} was trained on {stated!r}, and {base.name} {how}; check that they are the same model"


def last_part(name: str) -> str:
    """What a path and a name on the Hub have in common for one model. In the Hub's cache, paths end in a commit."""
    parts = re.split(r"[/\\]", name.rstrip("/\\"))
    if parts[-2:-1] == ["snapshots"] and len(parts) > 2:
        parts = parts[-3].split("--")
    return parts[-1].lower().removesuffix(".safetensors")


class LoraAdapter(Checkpoint):
    """A LoRA adapter of any format, open for reading: its tensors are those of the base that it changes."""

    partial = True

    def __init__(self, source: Source, layout: Layout, base: Checkpoint | None) -> None:
        if base is None:
            raise DareError(
                f"the base {source.name!r} is a LoRA adapter",
                "give the model that it was trained on",
            )
        super().__init__(source, layout)
        self._kernels: Mapping[KernelSpec, Kernel] = {}
        self._room = 0  # elements of a matrix that a thread may hold
        self._held = threading.local()
        try:
            found = self._find_changes(base)
        except BaseException:
            self.close()
            raise
        self.tensors = {name: info for name, info in found.items() if name in base.tensors}
        self.unused = tuple(name for name in found if name not in base.tensors)
        self._describe(base)

    def _find_changes(self, base: Checkpoint) -> dict[str, TensorInfo]:
        """By the base's names, how what it changes is made from what is stored; what the base lacks has other names."""
        raise NotImplementedError

    def _describe(self, base: Checkpoint) -> None:
        """Set what others ask about this kind of input."""
        pairs = [info for info in self.tensors.values() if isinstance(info, LowRankTensor)]
        self.specs = frozenset(pair.spec for pair in pairs)
        self.held_bytes = max(
            (p.rank * p.columns * FORMATS[p.dtype].itemsize for p in pairs), default=0
        )
        ranks = sorted({pair.rank for pair in pairs})
        spread = (
            f" of rank {' to '.join(map(str, dict.fromkeys((ranks[0], ranks[-1]))))}"
            if ranks
            else ""
        )
        self.note = f"LoRA{spread}, changes {count_of(len(self.tensors), 'tensor')}"
        whole = [
            n
            for n, i in self.tensors.items()
            if n.endswith(EMBEDDINGS) and not isinstance(i, LowRankTensor)
        ]
        if whole and not any(name.endswith(HEADS) for name in base.tensors):
            self.warnings += (
                f"{self.name} has its own {whole[0]!r}, and the base uses that as its output head too: both change, "
                "where PEFT would leave the head as it was",
            )

    def prepare(self, kernels: Mapping[KernelSpec, Kernel], readers: int) -> None:
        self._kernels, self._room = kernels, TUNING.expand_elements // readers

    def read_stored(
        self, info: TensorInfo, start: int, count: int, into: NDArray[np.uint8]
    ) -> None:
        if not isinstance(info, LowRankTensor):
            super().read_stored(info, start, count, into)
        elif count:
            self._expand(info, start, np.asarray(into).view(FORMATS[info.dtype].real))

    def _expand(self, info: LowRankTensor, start: int, made: NDArray[Any]) -> None:
        """Fill made with elements of a product, by as many ranks at a time as there is room for."""
        kernel = self._kernels[info.spec]
        rows = slice(start // info.columns, -(-(start + len(made)) // info.columns))
        step = max(1, self._room // max(info.columns, rows.stop - rows.start))
        for k in range(0, info.rank, step):
            ranks = slice(k, min(k + step, info.rank))
            left = self._read_matrix(info.left, rows, ranks, info)
            kernel(left, self._read_right(info, ranks), made, start % info.columns, k)
        with np.errstate(over="ignore"):  # the merge finds what is out of range, and says where
            made *= made.dtype.type(info.scale)
        if info.whole is not None:
            raw = np.empty(made.size * STORED_BITS[info.whole.dtype] // 8, np.uint8)
            self.read(info.whole, start, made.size, raw)
            made += widen(raw, info.whole.dtype)

    def _read_right(self, info: LowRankTensor, ranks: slice) -> NDArray[Any]:
        """Kept for as long as a thread reads the same tensor: its next chunk needs the same matrix."""
        if getattr(self._held, "key", None) != (info, ranks):
            self._held.right = self._read_matrix(info.right, ranks, slice(0, info.columns), info)
            self._held.key = info, ranks
        return cast("NDArray[Any]", self._held.right)

    def _read_matrix(
        self, stored: TensorInfo, rows: slice, columns: slice, info: LowRankTensor
    ) -> NDArray[Any]:
        """A part of one of the two matrices of a tensor, in the type that it is multiplied in.

        Of more than two dimensions, all after the first are its columns.
        """
        rows, columns = (columns, rows) if info.transposed else (rows, columns)
        width, item = stored.count // stored.shape[0], FORMATS[stored.dtype].itemsize
        height, wanted = rows.stop - rows.start, columns.stop - columns.start
        if 2 * wanted >= width:  # one read of everything beats many small ones
            raw = np.empty((height, width, item), np.uint8)
            self.read_bytes(raw.reshape(-1).data, stored, rows.start * width * item)
            raw = np.ascontiguousarray(raw[:, columns])
        else:
            raw = np.empty((height, wanted, item), np.uint8)
            for k in range(height):
                self.read_bytes(
                    raw[k].reshape(-1).data,
                    stored,
                    ((rows.start + k) * width + columns.start) * item,
                )
        part = widen(raw.reshape(-1), stored.dtype).reshape(height, wanted)
        return np.ascontiguousarray(part.T if info.transposed else part, FORMATS[info.dtype].real)


class PeftAdapter(LoraAdapter):
    """A LoRA adapter of PEFT: its configuration is a file of its own."""

    def _find_changes(self, base: Checkpoint) -> dict[str, TensorInfo]:
        self._config_path = self.files[0].path.with_name(ADAPTER_CONFIG)
        table = read_json(self._config_path, part_name(self.source, self._config_path))
        self._config_sha256 = file_sha256(self._config_path)
        self.warnings = tuple(
            find_other_base(self.name, table.get("base_model_name_or_path"), base)
        )
        return ChangeFinder(self.name, LoraConfig.of(table, self.name), base).find(self.tensors)

    @property
    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint | {"config_sha256": self._config_sha256}

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if file_sha256(self._config_path) != self._config_sha256:
            raise InputChanged(f"{self.name!r} changed while it was merged", CHANGED_HINT)


class ChangeFinder:
    """Finds out which tensors of a base an adapter changes, and how they are made from what is stored."""

    def __init__(self, name: str, config: LoraConfig, base: Checkpoint) -> None:
        self.name, self.config, self.base = name, config, base

    def find(self, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """By the base's names; what the base has no place for keeps its own."""
        pairs, whole = self._sort_keys(stored)
        if not pairs and not whole:
            raise DareError(f"the adapter {self.name!r} is empty", AGAIN_HINT)
        targets = [f"{module}.weight" for module in pairs]
        to_base = _match_names(targets or list(whole), self.base.tensors)
        found = {to_base(name): info for name, info in whole.items()}
        for module, target in zip(pairs, targets, strict=True):
            name = to_base(target)
            if name not in self.base.tensors:
                raise self._explain_missing(name, target)
            found[name] = self._make_tensor(module, pairs[module], name, found.get(name))
        return found

    def _sort_keys(
        self, stored: Mapping[str, TensorInfo]
    ) -> tuple[dict[str, dict[str, TensorInfo]], dict[str, TensorInfo]]:
        """The pairs of matrices by module, and the tensors that are stored whole."""
        pairs: dict[str, dict[str, TensorInfo]] = {}
        whole: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            key = name.removeprefix("base_model.model.")
            if (
                ".original_module." in key
            ):  # the base's, which PEFT may save beside the one that replaces it
                continue
            if matched := LORA_KEY.fullmatch(key):
                if info.dtype not in FORMATS:
                    raise DareError(
                        f"tensor {name!r} of the adapter {self.name!r} is {info.dtype}",
                        QUANTISE_HINT,
                    )
                module, part = matched.groups()
                if part in pairs.setdefault(module, {}):
                    raise DareError(
                        f"{self.name!r} holds several adapters: see {name!r}", "save each by itself"
                    )
                pairs[module][part] = info
            elif "lora_" in key or "trainable_tokens" in key:
                raise DareError(
                    f"the adapter {self.name!r} holds {name!r}, which is not a part of a plain LoRA",
                    UNLOAD_HINT,
                )
            else:
                whole[
                    re.sub(r"\.base_layer(?=\.)|\.modules_to_save(\.default)?(?=\.)", "", key)
                ] = info
        return pairs, whole

    def _explain_missing(self, name: str, target: str) -> DareError:
        base = self.base.tensors
        if module_of(name) in quantised_modules(base):
            return DareError(
                f"{self.base.name!r} is quantised, and the adapter {self.name!r} changes {target!r}",
                QUANTISE_HINT,
            )
        hint = f"check the base; it has {list_names(list(base))}"
        if target.endswith(HEADS) and any(other.endswith(EMBEDDINGS) for other in base):
            hint = (
                "the base uses its embedding as the output head, and changing only one of them unties them; "
                f"{UNLOAD_HINT}"
            )
        return DareError(
            f"the adapter {self.name!r} changes {target!r}, which the base does not have", hint
        )

    def _make_tensor(
        self, module: str, parts: Mapping[str, TensorInfo], name: str, whole: TensorInfo | None
    ) -> LowRankTensor:
        base = self.base.tensors[name]
        embedding = "lora_embedding_A" in parts
        prefix = "lora_embedding_" if embedding else "lora_"
        a, b = parts.get(f"{prefix}A"), parts.get(f"{prefix}B")
        if a is None or b is None or len(parts) != 2:
            raise DareError(
                f"{self.name!r} has no pair of matrices A and B for {module!r}",
                "save the adapter again",
            )
        rank = self.config.rank(module)
        # PEFT stores A as rank x inputs and B as outputs x rank, with the sizes of a convolution's kernel behind.
        if (
            a.count == 0
            or b.count == 0
            or a.shape[:1] != (rank,)
            or b.shape[1:2] != (rank,)
            or b.count % rank
        ):
            raise DareError(
                f"the matrices {list(a.shape)} and {list(b.shape)} of {module!r} in {self.name!r} are not of rank "
                f"{rank}",
                f"its {ADAPTER_CONFIG} belongs to other weights",
            )
        inputs, outputs = a.count // rank, b.count // rank
        rows = base.shape[0] if base.shape else 1
        in_base = (rows, base.count // max(rows, 1))
        # Embeddings, and the layers of GPT-2, are stored as inputs x outputs.
        transposed = embedding or (
            self._is_transposed(name) if inputs == outputs else in_base == (inputs, outputs)
        )
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        if whole is not None and (whole.shape != shape or whole.dtype not in FORMATS):
            sizes = f"{list(whole.shape)} and {list(shape)}"
            raise DareError(
                f"{module!r} is {sizes} in {self.name!r}, as {whole.dtype}", "save it again"
            )
        return LowRankTensor(
            dtype="F64" if base.dtype == "F64" else "F32",
            shape=base.shape if shape == in_base else shape,
            is_delta=whole is None,
            left=a if transposed else b,
            right=b if transposed else a,
            rank=rank,
            columns=shape[1],
            transposed=transposed,
            scale=self.config.scale(module, rank),
            whole=whole,
        )

    def _is_transposed(self, name: str) -> bool:
        """Whether a square matrix is stored as inputs x outputs, by its neighbours that are not square.

        The configuration has a setting for it, but PEFT writes there what is true of the last module it looked at.
        """
        names, turned = self._oblong
        around = name.removesuffix(".weight").rpartition(".")[0]
        first, last = (
            bisect_left(names, f"{around}."),
            bisect_left(names, f"{around}/"),
        )  # which comes after the dot
        count = turned[last] - turned[first]
        return (
            count > 0 if first < last and count in (0, last - first) else self.config.fan_in_fan_out
        )

    @cached_property
    def _oblong(self) -> tuple[list[str], list[int]]:
        """The base's matrices that are not square and have a bias, and how many before each are inputs x outputs."""
        found = []
        for name, info in self.base.tensors.items():
            bias = self.base.tensors.get(f"{name.removesuffix('weight')}bias")
            if bias and len(info.shape) == 2 and info.shape[0] != info.shape[1]:
                found.append((name, bias.shape == info.shape[1:]))
        found.sort()
        return [name for name, _ in found], [0, *accumulate(turned for _, turned in found)]


def _match_names(targets: Sequence[str], base: Mapping[str, TensorInfo]) -> Callable[[str], str]:
    """How an adapter's names become the base's: unchanged, without their first part, or with what the base has before.

    Checkpoints of a bare model lack the name under which a model with a head holds it, and adapters may be of either.
    """
    first = f"{targets[0].partition('.')[0]}."
    prefixes = [name.removesuffix(targets[0]) for name in base if name.endswith(f".{targets[0]}")]
    ways = [
        ("", ""),
        (first, ""),
        *(("", prefix) for prefix in prefixes),
    ]  # what to replace, and by what
    fitting = [
        (old, new)
        for old, new in ways
        if all(
            target.startswith(old) and new + target.removeprefix(old) in base for target in targets
        )
    ]
    if len(fitting) > 1 and fitting[0] != ("", ""):
        raise DareError(
            f"an adapter for {targets[0]!r} may mean several tensors: {list_names([p + targets[0] for p in prefixes])}",
            "save it with the names of the base",
        )
    old, new = fitting[0] if fitting else ("", "")

    def to_base(name: str) -> str:
        renamed = new + name.removeprefix(old)
        return renamed if name.startswith(old) and renamed in base else name

    return to_base
