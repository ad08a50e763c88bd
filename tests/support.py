"""Small models for the tests, merges through the front door, and what they should give."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import dare
from dare import DareConfig, DareMerger
from darelib.arithmetic import definition
from darelib.config import Chooser
from darelib.core.mask import keep_threshold, mask_key
from darelib.core.tuning import TUNING

Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
Models = list[Path]
Pair = tuple[Path, Path]
Refusal = Callable[..., str]
Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

HERE = Path(__file__).resolve().parent.parent
INDEX = "model.safetensors.index.json"
BF16 = torch.bfloat16
F16 = torch.float16
F32 = torch.float32
F64 = torch.float64
STORED = {BF16: "BF16", F16: "F16", F32: "F32", F64: "F64"}
METHODS: list[Config] = [
    {"method": "linear", "drop_rate": 0.7},
    {"method": "ties", "drop_rate": 0.5},
    {"method": "ties", "drop_rate": 0.5, "keep_ratio": 0.3},
    {"method": "slerp", "drop_rate": 0.5},
]
POSIX = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals and processes")
NAMES = ("base", "math", "code")
WORD = np.uint64(0xFFFFFFFF)
BUMPS = (0x9E3779B9, 0xBB67AE85)  # of the two words of Philox's key, in each round


def slow(*values: Any) -> Any:
    """A row of a table that only the slow suite has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(count: int) -> settings:
    """How many examples Hypothesis makes up; each may write and read files."""
    usual = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=usual,
    )


def tune(**sizes: Any) -> None:
    """Make jobs and chunks small, or times short, until the test ends."""
    for name, value in sizes.items():
        setattr(TUNING, name, value)


# --- models ---------------------------------------------------------------------------------------


def random_model(
    seed: int = 0, dtype: torch.dtype = F32, shapes: dict[str, tuple[int, ...]] | None = None
) -> Tensors:
    """A base of random weights: a matrix, two vectors and a scalar, unless shapes are given."""
    generator = torch.Generator().manual_seed(seed)
    shapes = shapes or {
        "layer.weight": (37, 61),
        "layer.bias": (61,),
        "head.weight": (5, 1500),
        "scalar": (),
    }
    return {
        name: (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in shapes.items()
    }


def make_models(
    count: int,
    dtype: torch.dtype = F32,
    shapes: dict[str, tuple[int, ...]] | None = None,
    size: float = 0.001,
    seed: int = 0,
) -> list[Tensors]:
    """A random base and so many fine-tunes of it."""
    base = random_model(seed, dtype, shapes)
    return [base, *(finetune(base, k, size) for k in range(1, count + 1))]


def finetune(base: Tensors, seed: int, size: float = 0.001) -> Tensors:
    """A fine-tune of a base, with normal deltas of this size."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return {
        name: (tensor.double() + torch.randn(tensor.shape, generator=generator).double() * size).to(
            tensor.dtype
        )
        for name, tensor in base.items()
    }


def save(folder: Path, **models: Tensors) -> list[Path]:
    """Write each model to folder/NAME.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in models.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return [folder / f"{name}.safetensors" for name in models]


def save_models(folder: Path, models: list[Tensors]) -> list[Path]:
    """Write models as files called base, math and code."""
    return save(folder, **dict(zip(NAMES, models, strict=False)))


def save_directories(folder: Path, models: list[Tensors], **config: Any) -> list[Path]:
    """The same as directories, with these settings in config.json."""
    return [
        save_directory(folder / name, tensors, **config)
        for name, tensors in zip(NAMES, models, strict=False)
    ]


def save_directory(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A model directory with its weights in one file, and these settings in config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_sharded(
    folder: Path, tensors: Tensors, parts: list[list[str]], stem: str = "model", **extra: str
) -> Path:
    """A model directory with a shard for each list of names, and an index.

    extra: entries that the index gets besides, or instead of, the true ones; dots are written
    as double underscores.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        shard = f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(names, shard)
    weight_map |= {name.replace("__", "."): file for name, file in extra.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / f"{stem}.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    )
    return folder


def low_rank(module: str, shape: tuple[int, int], rank: int = 2, seed: int = 5) -> Tensors:
    """The two matrices of a LoRA on one module, under the names that PEFT saves them by."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, shape[1], generator=generator) * 0.01,
        f"{prefix}.lora_B.weight": torch.randn(shape[0], rank, generator=generator) * 0.01,
    }


def write_adapter(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """A LoRA adapter, of rank 2 and alpha 4 unless these settings say otherwise.

    A setting that is ... is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config
    stated = {key: value for key, value in table.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def to_hub_cache(cache: Path, repository: str, folder: Path, commit: str) -> Path:
    """Lay a directory out as the Hub's cache does: blobs, links to them in a snapshot, a branch."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = home / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        link = home / "snapshots" / commit / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return home / "snapshots" / commit


LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}
GROUPED = {**LLAMA, "num_key_value_heads": 1}
T5 = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 40}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 40,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Families of models: their class in transformers, that of their configuration, and its settings.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": False}),
    "qwen": ("Qwen2ForCausalLM", "Qwen2Config", {**GROUPED, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2 untied": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "tie_word_embeddings": False}),
    "moe": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "bert": ("BertForMaskedLM", "BertConfig", LLAMA),
    "classifier": ("BertForSequenceClassification", "BertConfig", LLAMA),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", LLAMA),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}


def family_model(family: str, dtype: torch.dtype = F32) -> Any:
    """A model of a family as transformers makes it, small and random."""
    import transformers

    model, config, values = FAMILIES[family]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**values)).to(dtype)


# --- files that are wrong -------------------------------------------------------------------------


def with_header(
    header: bytes | str, data: bytes = bytes(range(40)), length: int | None = None
) -> bytes:
    """The bytes of a safetensors file that has this header, and says that it is of that length."""
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[Any]], Any], whole: bytes) -> bytes:
    """Bytes of which a few are changed, taken out or put in."""
    content = bytearray(whole)
    signs = st.sampled_from(list(b'{}[]",:0-9e \\')).map(lambda sign: bytes([sign]))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(len(content) - 1, 0)))
        end = start + draw(st.integers(0, 3))
        content[start:end] = draw(st.binary(max_size=3) | signs)
    return bytes(content)


# --- merges ---------------------------------------------------------------------------------------


def write_config(folder: Path, text: str = "", **values: Any) -> Path:
    """A configuration for base, math and code in a folder, with these settings."""
    models = """[models]
base_file = "base.safetensors"
merge_files = ["math.safetensors", "code.safetensors"]
output_file = "out.safetensors"
[dare]
"""
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in values.items()]
    path = folder / "config.toml"
    path.write_text(models + "".join(lines) + text)
    return path


def run(*words: Any, status: int = 0) -> None:
    """Run the command in this process, which must end with this status."""
    assert dare.main([str(word) for word in words]) == status, words


def command(
    *arguments: Any, program: Path = HERE / "dare.py", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    words = [sys.executable, str(program), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, **options)


def make_merger(base: Path, models: list[Path], **config: Any) -> DareMerger:
    return DareMerger(base, models, DareConfig(verbose=False, **config))


def run_merge(base: Path, models: list[Path], output: Path, **config: Any) -> dare.MergeReport:
    """Merge these files or directories, over whatever merge there is, and give the report."""
    return make_merger(base, models, **config).merge(output, force=True)


def merge_paths(base: Path, models: list[Path], output: Path, **config: Any) -> Tensors:
    """Merge these files or directories, and load the result."""
    run_merge(base, models, output, **config)
    return tensors_in(output) if output.is_dir() else load_file(output)


def merge(folder: Path, base: Tensors, *models: Tensors, **config: Any) -> Tensors:
    """Merge through the front door: write the files, merge them, load the result."""
    paths = save(folder, base=base, **{f"m{i}": model for i, model in enumerate(models)})
    return merge_paths(paths[0], paths[1:], folder / "merged.safetensors", **config)


def define(base: Tensors, models: list[Tensors], **config: Any) -> Tensors:
    """What the definition makes of models: the oracle for every other engine."""
    settings = DareConfig(**config)
    merged = {}
    for name, tensor in base.items():
        parts = {
            i: (raw(model[name]), STORED[model[name].dtype])
            for i, model in enumerate(models)
            if name in model
        }
        output = getattr(torch, settings.dtype) if settings.dtype else tensor.dtype
        made = definition.merge_tensor(
            name,
            raw(tensor),
            STORED[tensor.dtype],
            parts,
            STORED[output],
            Chooser(settings, base, len(models)).choose(name, tuple(tensor.shape))[1],
            settings.seed,
            tensor.shape[-1] or 1 if tensor.shape else 1,
            tuple(tensor.shape),
        )
        stored = torch.from_numpy(made.view(f"i{made.itemsize}").copy())
        merged[name] = stored.view(output).reshape(tensor.shape)
    return merged


def philox(key: tuple[int, ...], counters: np.ndarray) -> np.ndarray:
    """Philox4x32-7 by Salmon et al., SC 2011, section 3.3, of counters of four words each."""
    a, b, c, d = counters.astype(np.uint64)
    for r in range(7):
        first = a * np.uint64(0xD2511F53)
        second = c * np.uint64(0xCD9E8D57)
        k, m = (np.uint64((key[n] + r * step) % 2**32) for n, step in enumerate(BUMPS))
        a, b = second >> np.uint64(32) ^ b ^ k, second & WORD
        c, d = first >> np.uint64(32) ^ d ^ m, first & WORD
    return np.stack([a, b, c, d])


def draw_pieces(key: tuple[int, ...], blocks: np.ndarray) -> np.ndarray:
    """The eight pieces of 16 bits that each block of a mask has."""
    none = np.zeros_like(blocks)
    words = philox(key, np.stack([blocks & WORD, blocks >> np.uint64(32), none, none]))
    return np.stack([w >> np.uint64(n) & np.uint64(0xFFFF) for w in words for n in (0, 16)])


def mask(seed: int, name: str, count: int, drop_rate: float) -> np.ndarray:
    """Which entries of a tensor the definition keeps."""
    return definition.draw_mask(mask_key(seed, name), keep_threshold(drop_rate), 0, count)


# --- what came out --------------------------------------------------------------------------------


def tensors_in(folder: Path) -> Tensors:
    """All tensors of a merged directory."""
    paths = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def raw(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bytes, flat."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one type, one shape and the same bits."""
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and np.array_equal(raw(a), raw(b))


def assert_same(a: Tensors, b: Tensors) -> None:
    """Two models must have the same tensors, bit for bit."""
    assert set() != a.keys() == b.keys()
    assert [name for name in a if not same_bits(a[name], b[name])] == []


def snapshot(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything in a folder: size, modification time and content."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        readable = path.is_file() and os.access(path, os.R_OK)
        content = hashlib.sha256(path.read_bytes()).hexdigest() if readable else ""
        contents[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns, content)
    return contents
