"""Models as people have them, open for reading: their tensors, and what is used of config.json."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self

from darelib.core.formats import INTEGERS
from darelib.core.text import DareError, InputChanged
from darelib.models.directories import (
    CONFIG_FILE,
    Layout,
    find_shards_beside,
    part_name,
)
from darelib.models.examples import Examples
from darelib.models.source import Source
from darelib.models.tensor import Described, Tensor
from darelib.models.tensorfile import (
    AGAIN_HINT,
    CHANGED_HINT,
    MAX_TENSORS,
    TensorFile,
    read_json,
)
from darelib.models.vocabulary import digest_tokenizer

# Models are distinguished by 256 pages of its tensors, so that most tensors have one.
PAGES = 256
PAGE_BYTES = 4096
# What is used of a model's configuration: what shapes its computation, by the names that the
# families have for it.
CONFIG_KEYS: Final = (
    "model_type", "num_hidden_layers", "n_layer", "n_layers", "num_layers", "hidden_size", "n_embd",
    "d_model",
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "moe_intermediate_size",
    "num_attention_heads", "n_head",
    "n_heads", "num_heads", "num_key_value_heads", "head_dim", "d_kv", "rope_theta",
    "rotary_emb_base",
    "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rotary_dim", "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon", "norm_epsilon", "norm_eps", "hidden_act", "activation_function",
    "hidden_activation",
    "tie_word_embeddings", "max_position_embeddings", "n_positions", "sliding_window",
    "attention_bias", "mlp_bias", "num_local_experts",
    "num_experts",
    "n_routed_experts", "num_experts_per_tok", "attn_logit_softcapping", "final_logit_softcapping",
    "query_pre_attn_scalar", "attention_multiplier", "embedding_multiplier", "residual_multiplier",
    "logits_scaling",
    "use_parallel_residual",
)  # fmt: skip
# What rope_scaling holds besides its type. Newer files have it in rope_parameters, with what used
# to lie outside.
ROPE_KEYS: Final = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
WINDOW_FLAG: Final = "use_sliding_window"  # which Qwen's have; without it, a window's size is used
OLD_ROPE_TYPES: Final = {"su": "longrope", "mrope": "default"}  # and what they are called now
ARCHITECTURE: Final = "architecture"  # the first of a list: a model's class
NAME_KEY: Final = "_name_or_path"  # what a model was loaded from before it was saved
CLASS_KEY: Final = "_class_name"  # what diffusers calls that
QUANTISE_HINT: Final = "merge the models before quantising them, then quantise the result"
# The output heads that share the input embedding's values where a model's configuration ties them,
# and the embeddings.
HEADS: Final = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")
EMBEDDINGS: Final = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "shared.weight",
)
# What marks a module as quantised: the names of the layouts of GPTQ, AWQ, bitsandbytes, FP8 and
# compressed-tensors.
QUANTISED_NAMES: Final = re.compile(
    r"(^|\.)(qweight|qzeros|g_idx|SCB|weight_format|weight_packed|weight_shape|weight_zero_point"
    r"|weight_(global_)?scale(_inv|_2)?|weight\.(absmax|quant_map|nested_\w+|quant_state\..+))$"
)
QUANTISED_TYPES: Final = ("F4", "F6_", "F8_")


def module_of(name: str) -> str:
    """The module that a tensor belongs to: its name without its last part (bitsandbytes has more
    after the weight).
    """
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0] or name


def quantised_modules(tensors: Mapping[str, Tensor]) -> set[str]:
    """The modules whose tensors only make sense together, and cannot be averaged."""
    return {
        module_of(name)
        for name, info in tensors.items()
        if info.dtype.startswith(QUANTISED_TYPES)
        or (info.dtype in INTEGERS and name.endswith("weight"))
        or (info.dtype == "U8" and name.endswith(("_blocks", "_scales")))
        or QUANTISED_NAMES.search(name)
    }


class Checkpoint(Described):
    """A model, open for reading: the tensors of all its files, by name.

    Every kind of input has these attributes.
    """

    added: tuple[dict[str, Any], ...] = ()  # tokens of other models that it has rows for
    # Of its embedding: the rows that are stored, and those that it has with the others' tokens.
    heights: tuple[int, int] = (0, 0)
    tokenizer_sha256: str | None = None  # where that decides which rows are merged
    keeps_metadata: ClassVar[bool] = False  # of its files
    note: str = ""  # about its kind, for tables
    # Of an adapter: what it calls the modules of the base's tensors, and the base, unless that is
    # an absolute path.
    modules: Mapping[str, str] = MappingProxyType({})
    stated: str = ""
    held_bytes: int = 0  # what a thread that reads it holds, at most
    examples: Examples | None = None  # of what it can do, where a merge is matched with them

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source = source
        self.name = source.name
        self.folder = layout.folder
        self.stems = layout.stems
        # All that must not be overwritten.
        self.paths = (layout.folder, *layout.files) if layout.folder else layout.files
        self.warnings = tuple(find_shards_beside(self.name, layout))
        self.files: list[TensorFile] = []
        self.tensors: dict[str, Tensor] = {}
        try:
            for path in layout.files:
                self._open(path, layout.modules.get(path, ""))
            self._check_index(layout)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, module: str) -> None:
        try:
            file = TensorFile(path, part_name(self.source, path))
        except FileNotFoundError:
            raise DareError(f"{self.name!r} lacks its file {path.name!r}", AGAIN_HINT) from None
        self.files.append(file)
        if module:
            file.tensors = {
                f"{module}/{name}": replace(info, folder=module)
                for name, info in file.tensors.items()
            }
        if not self.keeps_metadata:
            file.metadata.clear()  # which may be large, and means nothing to a merge
        for name, info in file.tensors.items():
            if name in self.tensors:
                first = next(each for each in self.files if name in each.tensors)
                raise DareError(
                    f"tensor {name!r} of {self.name!r} is in {first.path.name!r} and in "
                    f"{path.name!r}",
                    "a tensor must be in one file; save the model again",
                )
            self.tensors[name] = info
        if len(self.tensors) > MAX_TENSORS:
            raise DareError(
                f"{self.name!r} has more than {MAX_TENSORS:,} tensors, or longer names than any "
                "model",
                "get it from somewhere you trust",
            )

    def _check_index(self, layout: Layout) -> None:
        homes = {name: file.path for file in self.files for name in file.tensors}
        for name, expected in layout.weight_map.items():
            if homes.get(name) != Path(layout.folder or "", expected):
                raise DareError(
                    f"the index of {self.name!r} says that tensor {name!r} is in {expected!r}, "
                    "and it is not",
                    "download or save the model again",
                )

    @property
    def parts(self) -> Sequence[Checkpoint]:
        """The models that it is made of: itself, unless those are others."""
        return (self,)

    @property
    def stored(self) -> list[Tensor]:
        return [info for file in self.files for info in file.tensors.values()]

    def read_tables(self) -> list[dict[str, Any]]:
        """Its whole configuration, and that of its text model."""
        path = (self.folder or self.files[0].path.parent) / CONFIG_FILE
        table = read_json(path, part_name(self.source, path)) if path.is_file() else {}
        return [each for each in (table, table.get("text_config")) if isinstance(each, dict)]

    def list_changes(self, tables: Sequence[dict[str, Any]]) -> dict[str, tuple[Any, Any]]:
        """Settings of its configuration that are no longer true: the old value and the new one."""
        return {}

    @property
    def size(self) -> int:
        return sum(file.status.st_size for file in self.files)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a recipe keeps of an input, besides its name."""
        tokenizer = {"tokenizer_sha256": self.tokenizer_sha256} if self.tokenizer_sha256 else {}
        examples = {"examples": self.examples.fingerprint} if self.examples else {}
        return self._digests | tokenizer | examples

    @cached_property
    def _digests(self) -> dict[str, Any]:
        """Of several files, the digest is that of their digests."""
        digests = [file.header_sha256 for file in self.files]
        joined = hashlib.sha256("\n".join(digests).encode()).hexdigest()
        return {
            "size": self.size,
            "header_sha256": joined if len(digests) > 1 else digests[0],
            "content_sha256": self._digest_pages(),
        }

    def _digest_pages(self) -> str:
        """A digest of some pages of the stored tensors: a base and its fine-tune may differ in
        nothing else.

        The tensors are in the order of their names, each one long; page k is at k / PAGES of the
        way through them.
        """
        stored = sorted(
            (name, info.nbytes, info)
            for file in self.files
            for name, info in file.tensors.items()
            if info.nbytes
        )
        digest = hashlib.sha256()
        count = len(stored)
        for place, pages in groupby(range(PAGES if stored else 0), lambda k: k * count // PAGES):
            _, size, info = stored[place]
            length = min(size, PAGE_BYTES)
            starts = [(size - length) * (k * count % PAGES) // PAGES for k in pages]
            if size <= PAGE_BYTES * len(starts):  # its pages overlap, so that it is read once
                whole = info.read_raw(0, size)
                found = (whole[start : start + length] for start in starts)
            else:
                found = (info.read_raw(start, length) for start in starts)
            for page in found:
                digest.update(page.data)
        return digest.hexdigest()

    @cached_property
    def config(self) -> dict[str, Any]:
        """What is used of a whole model's config.json, if it, or the folder that a file is in, has
        one that can be read.
        """
        return {} if self.partial else read_config(self.folder or self.files[0].path.parent)

    def check_unchanged(self) -> None:
        for file in self.files:
            file.check_unchanged()
        if self.tokenizer_sha256 and digest_tokenizer(self.folder) != self.tokenizer_sha256:
            raise InputChanged(
                f"the tokenizer of {self.name!r} changed while it was merged", CHANGED_HINT
            )

    def is_same_as(self, other: Self) -> bool:
        """Whether it is the very same files, and the same of them."""
        if self.source.arrangement != other.source.arrangement:
            return False
        pairs = zip(self.files, other.files, strict=False)
        return len(self.files) == len(other.files) and all(
            os.path.samestat(mine.status, theirs.status) for mine, theirs in pairs
        )

    def close(self) -> None:
        for file in self.files:
            file.close()


def read_config(folder: Path) -> dict[str, Any]:
    """What is used of the config.json of a model directory, if it has one that can be read."""
    with suppress(DareError):
        if table := read_json(folder / CONFIG_FILE, CONFIG_FILE):
            return {
                "text_config": _pick_settings(table.get("text_config")),
                **_pick_settings(table),
            }
    return {}


def _pick_settings(table: Any) -> dict[str, Any]:
    """The settings that are used, if they are short: a configuration may be long, and there may be
    many models.
    """
    if not isinstance(table, dict):
        return {}
    found = {key: table.get(key) for key in (*CONFIG_KEYS, NAME_KEY)} | _pick_rope(table)
    named = table.get("architectures")
    known = table.get(CLASS_KEY)
    found[ARCHITECTURE] = named[0] if isinstance(named, list) and named else known
    if "sliding_window" in table and not (found["sliding_window"] and table.get(WINDOW_FLAG, True)):
        found["sliding_window"] = "off"
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, str | int | float) and sys.getsizeof(value) < 1000
    }


def _pick_rope(table: dict[str, Any]) -> dict[str, Any]:
    """How positions are encoded, by the same names whether a file is old or new."""
    plain = "rope_scaling" in table and table["rope_scaling"] is None
    found: dict[str, Any] = {"rope_scaling.rope_type": "default"} if plain else {}
    for rope in (table.get("rope_scaling"), table.get("rope_parameters")):
        if isinstance(rope, dict):
            found |= {key: rope[key] for key in CONFIG_KEYS if key in rope}
            found |= {f"rope_scaling.{key}": rope[key] for key in ROPE_KEYS if key in rope}
            kind = str(rope.get("rope_type", rope.get("type", "")))
            found["rope_scaling.rope_type"] = OLD_ROPE_TYPES.get(kind, kind) or None
    return found


def compare_configs(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> dict[str, str]:
    """The settings in which two configurations differ: by key, in words.

    A setting that only one of them states is no difference.
    """
    compared = mine.keys() & theirs.keys() - {"text_config", NAME_KEY}
    found = {
        prefix + key: f"its {prefix}{key} is {theirs[key]!r}, not {value!r}"
        for key, value in mine.items()
        if key in compared and value != theirs[key]
    }
    parts = (mine.get("text_config", {}), theirs.get("text_config", {}))
    return found | (compare_configs(*parts, "text_config.") if all(parts) else {})


def ties_embeddings(config: Mapping[str, Any]) -> bool | None:
    """Whether a model's configuration says that its output head is its input embedding; None: it
    does not say.
    """
    for table in (config, config.get("text_config")):
        if isinstance(table, dict) and isinstance(table.get("tie_word_embeddings"), bool):
            return bool(table["tie_word_embeddings"])
    return None
