"""What merges write is pinned: the same models and settings give the same bytes, in every version
and on every machine.

A digest that changes is a bug, unless the mask, the arithmetic or a file's format was changed on
purpose. Only then:

    python tests/test_bytes.py --pin
"""

import hashlib
import json
import re
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dare
from dare import DareConfig, DareMerger

PINNED = Path(__file__).with_name("digests.json")
FLOATS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp64": "F64"}
Shape = tuple[int, ...]
Tensor = tuple[str, Shape, bytes]  # its type, its shape and its bytes
Model = dict[str, Tensor]
Settings = dict[str, Any]
Inputs = tuple[str, list[str]]  # the paths of the base and of the models
OUTPUT = "merged.safetensors"

Q0 = "model.layers.0.self_attn.q_proj"
K0 = "model.layers.0.self_attn.k_proj"
UP0 = "model.layers.0.mlp.up_proj"
Q1 = "model.layers.1.self_attn.q_proj"
K1 = "model.layers.1.self_attn.k_proj"
UP1 = "model.layers.1.mlp.up_proj"
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"
C_ATTN = "h.0.attn.c_attn"
C_PROJ = "h.0.attn.c_proj"
SHAPES: dict[str, dict[str, Shape]] = {
    "small": {
        f"{EMBEDDING}.weight": (33, 31),
        f"{Q0}.weight": (41, 25),
        f"{UP0}.weight": (3, 11, 31),
        "model.layers.1.norm.weight": (64,),
        f"{UP1}.weight": (4, 1024),
        "model.layers.10.tiny.weight": (1, 3000),
        "empty.weight": (0, 4),
        "scalar": (),
        "one": (1,),
        f"{HEAD}.weight": (33, 31),
    },
    # two jobs; the second ends in the middle of a chunk and of a tile
    "large": {"w": (5003, 1009), "b": (7,)},
    # so wide that an adapter's matrices are multiplied in parts
    "wide": {"w.weight": (3, 400_001)},
    "llama": {
        f"{EMBEDDING}.weight": (50, 24),
        f"{HEAD}.weight": (50, 24),
        "conv.weight": (12, 6, 3, 3),
        f"{Q0}.weight": (24, 24),
        f"{K0}.weight": (16, 24),
        f"{UP0}.weight": (56, 24),
        f"{Q1}.weight": (24, 24),
        f"{K1}.weight": (16, 24),
        f"{UP1}.weight": (56, 24),
    },
    "gpt2": {  # stored as inputs x outputs, as the biases show
        f"{C_ATTN}.weight": (24, 72),
        f"{C_ATTN}.bias": (72,),
        f"{C_PROJ}.weight": (24, 24),
        f"{C_PROJ}.bias": (24,),
    },
}


def draw(shape: Shape, *key: int | str) -> np.ndarray:
    """Numbers between -1/16 and 1/16, most of them much smaller: random bits, so that no library
    can make others."""
    words = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in key]
    raw = np.random.PCG64(words).random_raw(int(np.prod(shape, dtype=int)))
    sizes = np.ldexp(1.0, -4 - (raw & np.uint64(15)).astype("i4"))
    return ((raw >> np.uint64(12)).astype("f8") * 2.0**-51 - 1) * sizes


def make_tensor(table: str, name: str, number: int, shape: Shape, kind: str) -> Tensor:
    """A tensor of the base (number 0), or of a model, in which a quarter is unchanged."""
    exponent = -122 if "tiny" in name else 0  # most of them are then below the least normal float32
    base, delta = (
        np.ldexp(draw(shape, table, name, n), exponent - 3 * (n > 0)) for n in (0, number)
    )
    base[3::97] = -0.0
    delta[number % 4 :: 4] = 0
    if number:
        base[delta != 0] += delta[delta != 0]  # not where it is 0: -0.0 stays what it is
    return encode(base, shape, kind)


def encode(numbers: np.ndarray, shape: Shape, kind: str) -> Tensor:
    if kind != "bf16":
        return FLOATS[kind], shape, numbers.astype(f"<f{int(kind[2:]) // 8}").tobytes()
    bits = numbers.astype("<f4").view("<u4")
    return "BF16", shape, (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2").tobytes()


@cache
def make_model(table: str, number: int, kind: str) -> Model:
    found = {
        name: make_tensor(table, name, number, shape, kind) for name, shape in SHAPES[table].items()
    }
    if table == "small":  # with tensors that are copied
        found["position_ids"] = "I64", (1, 5), np.arange(5, dtype="<i8").tobytes()
        found["mask"] = "BOOL", (2, 3), bytes([1, 0, 1, 1, 0, number % 2])
        found["quantised.weight"] = "F8_E4M3", (8,), bytes(range(40, 48))
    return found


def write(path: str, tensors: Model) -> str:
    header = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": (end, end := end + len(data)),
        }
    text = json.dumps(header).encode()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())
    )
    return path


def write_directory(folder: str, tensors: Model, shards: int = 1, **files: Any) -> str:
    """A model directory. files: the content of its JSON files."""
    names = (
        [f"model-{k}-of-{shards}.safetensors" for k in range(shards)]
        if shards > 1
        else ["model.safetensors"]
    )
    weight_map = {name: names[k % shards] for k, name in enumerate(tensors)}
    for file in names:
        write(
            f"{folder}/{file}",
            {name: tensor for name, tensor in tensors.items() if weight_map[name] == file},
        )
    files |= {"model.safetensors.index": {"weight_map": weight_map}} if shards > 1 else {}
    for name, content in files.items():
        Path(folder, f"{name}.json").write_text(json.dumps(content), newline="\n")
    return folder


def write_adapter(
    folder: str, table: str, ranks: Any, kind: str, whole: Sequence[str], config: Settings
) -> str:
    """A LoRA adapter that changes some modules, by their ranks.

    whole: the names of what it stores whole.
    """
    tensors: Model = {}
    for module, rank in ranks.items():
        shape = SHAPES[table][f"{module}.weight"]
        rows, columns = shape[::-1] if table == "gpt2" else shape[:2]
        parts = {
            "lora_A.weight": (rank, columns, *shape[2:]),
            "lora_B.weight": (rows, rank, *(1 for _ in shape[2:])),
        }
        if module == EMBEDDING:
            parts = {"lora_embedding_A": (rank, rows), "lora_embedding_B": (columns, rank)}
        for part, size in parts.items():
            tensors[f"base_model.model.{module}.{part}"] = encode(
                draw(size, folder, module, part), size, kind
            )
    for name in whole:
        plain = name.replace(".modules_to_save", "").replace(".base_layer", "")
        tensors[f"base_model.model.{name}"] = make_tensor(
            table, plain, 2, SHAPES[table][plain], kind
        )
    write(f"{folder}/adapter_model.safetensors", tensors)
    Path(folder, "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", **config}), newline="\n"
    )
    return folder


def write_models(table: str, kinds: str) -> Inputs:
    """A base and its models, as files of these types."""
    base, *models = (
        write(f"{k}.safetensors", make_model(table, k, kind))
        for k, kind in enumerate(kinds.split())
    )
    return base, models


def merge(
    base: str, models: list[str], output: str = OUTPUT, tokenizer: str = "base", **settings: Any
) -> Any:
    config = DareConfig(verbose=False, **settings)
    return DareMerger(base, models, config, tokenizer=tokenizer).merge(output)


def digest(output: str | Path) -> Any:
    """Of a file's tensors, or of each file of a directory.

    Recipes, which name versions, are only known to be there.
    """
    path = Path(output)
    if path.is_dir():
        return {
            f.relative_to(path).as_posix(): digest(f)
            for f in sorted(path.rglob("*"))
            if f.is_file()
        }
    if path.name in ("README.md", "dare_recipe.toml"):
        return ""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        start = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:start])
        del header["__metadata__"]
        content = json.dumps(header).encode() + content[start:]
    return hashlib.sha256(content).hexdigest()


def merge_files(settings: Settings, write_inputs: Any, *arguments: Any, engine: str) -> Any:
    merge(*write_inputs(*arguments), **settings, engine=engine)
    return digest(settings.get("output", OUTPUT))


def load_tensors(table: str, number: int, kind: str) -> dict[str, Any]:
    model = make_model(table, number, kind)
    found = pytest.importorskip("safetensors.torch").load_file(
        write(f"{number}.safetensors", model)
    )
    return {name: found[name] for name in model}


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    torch = sys.modules["torch"]
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def merge_tensors(settings: Settings, table: str, kinds: str, engine: str) -> str:
    base, *models = (load_tensors(table, number, kind) for number, kind in enumerate(kinds.split()))
    return digest_tensors(dare.dare_merge(base, models, DareConfig(**settings)))


def thin_tensors(settings: Settings, kind: str, engine: str) -> list[str]:
    base, finetuned = (load_tensors("small", number, kind) for number in (0, 1))
    delta = {name: finetuned[name] - base[name] for name in (*SHAPES["small"], "position_ids")}
    thinned = [dare.dare_drop(delta, rescale=rescale, **settings) for rescale in (True, False)]
    return [
        digest_tensors(tensors)
        for tensors in (*thinned, dare.dare_sparsify(base, finetuned, **settings))
    ]


# The time that a report took, the size of the recipe, and what comes from a machine's own products.
UNPINNED = ("seconds", "bytes_written", "shared_space")


def collect_figures(data: Any) -> list[float]:
    """The numbers of a report that are the same everywhere, in their order."""
    if isinstance(data, dict):
        data = [value for key, value in data.items() if key not in UNPINNED]
    if isinstance(data, list):
        return [number for part in data for number in collect_figures(part)]
    return [data] if isinstance(data, int | float) and not isinstance(data, bool) else []


def report_merge(settings: Settings, kinds: str, engine: str) -> list[float]:
    return collect_figures(
        merge(*write_models("small", kinds), threads=1, engine=engine, **settings).as_dict()
    )


def report_analysis(kinds: str, engine: str) -> list[Any]:
    report = DareMerger(
        *write_models("small", kinds), DareConfig(verbose=False, engine=engine)
    ).analyze()
    every = json.dumps(collect_figures(report.as_dict(per_tensor=True)))
    data = report.as_dict()
    for found in data["models"]:
        del found["histogram"], found["layers"], found["cells"]  # which are many
    return [hashlib.sha256(every.encode()).hexdigest(), *collect_figures(data)]


TWO = "bf16 bf16 bf16"
THREE = "bf16 bf16 bf16 bf16"
RULES = [
    {"match": "*norm*", "drop_rate": 0, "lambda_coeff": 0.5},
    {"match": ["*embed*", "lm_head*"], "drop_rate": [0.2, 0.8], "rescale_q": [0.9, 0.4]},
    {"match": "one", "lambda_coeff": 0.0},
]
TIES_RULES = [
    {"match": "*.0.*", "keep_ratio": 0.1},
    {"match": "*norm*", "keep_ratio": 1.0, "drop_rate": 0.5},
]
LINEAR = {"method": "linear"}
TIES = {"method": "ties"}
SLERP = {"method": "slerp", "drop_rate": 0.9}
# The types of the base and the models, and the settings.
MERGES: dict[str, tuple[str, Settings]] = {
    **{
        f"{method['method']} {t}": (f"{t} {t} {t}", method)
        for method in (LINEAR, TIES, SLERP)
        for t in FLOATS
    },
    **{
        f"{m['method']} of {n}": (" ".join(["bf16"] * (n + 1)), m)
        for m in (LINEAR, TIES)
        for n in (1, 3, 5)
    },
    **{f"linear {p}": (TWO, {"drop_rate": p}) for p in (0, 0.3, 0.99)},
    **{f"linear lambda {factor}": (TWO, {"lambda_coeff": factor}) for factor in (0, 1.7, -0.5)},
    "linear rate each": (THREE, {"drop_rate": [0.0, 0.5, 0.97]}),
    "linear weights": (THREE, {"weights": [0.7, -0.4, 1.5]}),
    "linear no rescale": (TWO, {"rescale": False, "drop_rate": 0.5}),
    "linear q": (TWO, {"rescale_q": 0.3}),
    "linear q each": (TWO, {"rescale_q": [0.6, 1.0], "drop_rate": [0.5, 0.8]}),
    "linear seed": (TWO, {"seed": 2**63 - 5}),
    "linear rules": (TWO, {"rules": RULES}),
    **{f"return {t}": (f"{t} {t}", {"drop_rate": 0}) for t in FLOATS},
    "return mixed": ("fp32 bf16", {"drop_rate": 0}),
    "return ties": ("bf16 bf16", {**TIES, "drop_rate": 0, "weights": [0.3]}),
    "return not quite": ("bf16 bf16", {"drop_rate": 0, "lambda_coeff": 1 - 2**-30}),
    **{f"linear fp64 to {t}": ("fp64 fp64 fp64", {"dtype": t}) for t in ("bf16", "fp16", "fp32")},
    **{f"linear fp32 to {t}": ("fp32 fp32 fp32", {"dtype": t}) for t in ("bf16", "fp16")},
    **{f"linear bf16 to {t}": (TWO, {"dtype": t}) for t in ("fp16", "fp32", "fp64")},
    **{
        f"linear {kinds}": (kinds, {})
        for kinds in ("bf16 fp32 fp32", "bf16 fp64 bf16", "fp32 bf16 bf16")
    },
    "linear mixed": ("bf16 bf16 fp16 fp32", {"drop_rate": 0.5}),
    "ties mixed": ("bf16 fp16 fp32 bf16", {**TIES, "keep_ratio": 0.4}),
    "ties fp64 to fp16": ("fp64 fp64 fp64", {**TIES, "dtype": "fp16"}),
    **{
        f"ties keep {share}": (THREE, {**TIES, "keep_ratio": share})
        for share in (0.001, 0.2, 0.75, 1)
    },
    "ties keep fp64": ("fp64 fp64 fp64", {**TIES, "keep_ratio": 0.3, "drop_rate": 0.4}),
    "ties keep without drop": (
        TWO,
        {**TIES, "keep_ratio": 0.2, "drop_rate": 0, "lambda_coeff": 1.7},
    ),
    "ties weights": (
        THREE,
        {**TIES, "weights": [2, 1, 0.25], "drop_rate": 0.5, "lambda_coeff": 0.6},
    ),
    "ties rules": (TWO, {**TIES, "rules": TIES_RULES, "keep_ratio": 0.6}),
    "slerp mixed": ("bf16 fp32 bf16", {**SLERP, "drop_rate": 0.5}),
    **{f"slerp at {t}": (TWO, {**SLERP, "slerp_t": t}) for t in (0, 0.3, 1)},
    "slerp rates": (
        TWO,
        {**SLERP, "drop_rate": [0.3, 0.99], "lambda_coeff": 1.7, "rescale": False},
    ),
    "slerp rules": (TWO, {**SLERP, "drop_rate": 0, "rules": RULES}),
}
KEEP: Settings = {**TIES, "keep_ratio": 0.2}
LARGE: dict[str, Settings] = {
    "linear": LINEAR,
    "ties": TIES,
    "slerp": {**SLERP, "slerp_t": 0.4},
    "keep": KEEP,
}

PLAIN = {Q0: 4, K0: 4, UP1: 4}
SAVED = (f"{HEAD}.modules_to_save.weight", f"{Q0}.base_layer.weight")
PATTERNS = {
    "rank_pattern": {"q_proj": 3, r"model\.layers\.1\..*": 9},
    "alpha_pattern": {"k_proj": 5, UP0: 1},
}
# The base's table, the rank of each module, the type, what is stored whole, and the configuration.
ADAPTERS: dict[str, tuple[str, dict[str, int], str, Sequence[str], Settings]] = {
    "plain": ("llama", PLAIN, "fp32", (), {"r": 4, "lora_alpha": 16}),
    "second": ("llama", {Q0: 8, Q1: 8}, "bf16", (), {"r": 8, "lora_alpha": 12}),
    "half": (
        "llama",
        PLAIN,
        "fp16",
        (),
        {"r": 4, "lora_alpha": 7, "init_lora_weights": "gaussian"},
    ),
    "rslora": ("llama", {Q0: 6, UP0: 6}, "bf16", (), {"r": 6, "lora_alpha": 6, "use_rslora": True}),
    "fan in": ("llama", {Q0: 4, UP0: 4}, "fp32", (), {"r": 4, "fan_in_fan_out": True}),
    "gpt2": ("gpt2", {C_ATTN: 5, C_PROJ: 5}, "fp32", (), {"r": 5, "lora_alpha": 10}),
    "embedding": ("llama", {EMBEDDING: 4, K1: 4}, "fp32", (), {"r": 4, "lora_alpha": 8}),
    "conv": ("llama", {"conv": 2, Q1: 2}, "fp32", (), {"r": 2, "lora_alpha": 8}),
    "patterns": (
        "llama",
        {Q0: 3, K0: 5, UP0: 5, UP1: 9},
        "fp32",
        (),
        {"r": 5, "lora_alpha": 20, **PATTERNS},
    ),
    "saved": ("llama", PLAIN, "bf16", SAVED, {"r": 4}),
    "wide": ("wide", {"w": 8}, "bf16", (), {"r": 8, "lora_alpha": 8}),
}
# The type of the base, the models (an adapter, or the number of a model and its type), and the
# settings.
LORA: dict[str, tuple[str, list[str], Settings]] = {
    **{name: ("bf16", [name], {"drop_rate": 0.5}) for name in ADAPTERS},
    "plain fp32": ("fp32", ["plain"], {"drop_rate": 0}),
    "plain fp64": ("fp64", ["plain", "half"], {}),
    "several": (
        "bf16",
        ["plain", "rslora", "embedding"],
        {"drop_rate": [0.3, 0.6, 0.0], "weights": [1, 1, 0.5]},
    ),
    "ties keep": (
        "bf16",
        ["plain", "second", "1 fp32"],
        {**TIES, "keep_ratio": 0.3, "drop_rate": 0.2},
    ),
    "linear with a model": ("bf16", ["plain", "1 bf16"], {"drop_rate": 0.5}),
    "ties with a model": ("bf16", ["plain", "1 bf16"], {**TIES, "drop_rate": 0.5}),
    "slerp with a model": ("bf16", ["1 bf16", "saved"], {**SLERP, "slerp_t": 0.8}),
}


def write_adapters(kind: str, names: Sequence[str]) -> Inputs:
    table = ADAPTERS[names[0]][0] if names[0] in ADAPTERS else "llama"

    def write_one(name: str) -> str:
        if name in ADAPTERS:
            return write_adapter(name, *ADAPTERS[name])
        return write(f"{name}.safetensors", make_model(table, int(name[0]), name[2:]))

    return write("base.safetensors", make_model(table, 0, kind)), [
        write_one(name) for name in names
    ]


def write_mismatched(kinds: str) -> Inputs:
    """Models with fewer and with more rows, without a tensor of the base, and with one that the
    base lacks."""
    (base, models) = write_models("small", kinds)
    name = f"{EMBEDDING}.weight"
    for number, (path, kind, rows) in enumerate(
        zip(models, kinds.split()[1:], (29, 40), strict=True), 1
    ):
        tensors = {
            n: t
            for n, t in make_model("small", number, kind).items()
            if n != f"{UP0}.weight" or number == 1
        }
        tensors[name] = make_tensor("small", name, number, (rows, 31), kind)
        write(path, {"extra.weight": tensors["one"], **tensors})
    return base, models


def write_tied(config: Settings) -> Inputs:
    """The base has its embedding as a head too; one model has its own head and one none."""
    tensors = [dict(make_model("small", number, "bf16")) for number in range(3)]
    tensors[0][f"{HEAD}.weight"] = tensors[0][f"{EMBEDDING}.weight"]
    del tensors[2][f"{HEAD}.weight"]
    base, *models = (
        write_directory(f"model {number}", tensors[number], config=config) for number in range(3)
    )
    return base, models


def write_sharded() -> Inputs:
    """A base and a model in several files, with what lies beside them, and one in one file."""
    config = {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "ä": "é",
    }
    files = {
        "config": config,
        "tokenizer": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 40}]},
    }
    write_directory(
        "base", make_model("small", 0, "bf16"), 3, generation_config={"top_p": 1}, **files
    )
    write_directory(
        "models/one", make_model("small", 1, "bf16"), 2, config=config, tokenizer={"model": {}}
    )
    Path("base/code").mkdir()
    for path in (
        "base/README.md",
        "base/LICENSE",
        "base/code/model.py",
        "base/optimizer.pt",
        "models/one/merges.txt",
    ):
        Path(path).write_text(f"{path}\n", newline="\n")
    return "base", ["models/one", write("models/two.safetensors", make_model("small", 2, "bf16"))]


REPORTED = (
    "linear bf16",
    "linear rules",
    "linear fp64",
    "linear mixed",
    "ties rules",
    "slerp fp32",
)
DIRECTORIES: dict[str, Settings] = {
    "one file": {"output": "merged"},
    "shards": {**TIES, "keep_ratio": 0.5, "max_shard_size": "6kB", "output": "merged"},
    "types": {"dtype": "fp16", "rules": RULES, "max_shard_size": 5000, "output": "merged"},
    "tokenizer": {**SLERP, "slerp_t": 0.25, "tokenizer": "models/one", "output": "merged"},
}
OVERLAP = {"mismatch": "overlap"}
TIE = {"tie_word_embeddings": True}
CASES: dict[str, Callable[..., Any]] = {
    **{
        f"file: {name}": partial(merge_files, s, write_models, "small", kinds)
        for name, (kinds, s) in MERGES.items()
    },
    **{
        f"memory: {name}": partial(merge_tensors, s, "small", kinds)
        for name, (kinds, s) in MERGES.items()
    },
    **{
        f"file: large {name}": partial(merge_files, s, write_models, "large", TWO)
        for name, s in LARGE.items()
    },
    **{
        f"memory: large {name}": partial(merge_tensors, LARGE[name], "large", TWO)
        for name in ("slerp", "keep")
    },
    **{f"memory: thin {t}": partial(thin_tensors, {}, t) for t in FLOATS},
    **{
        f"memory: thin {p}": partial(thin_tensors, {"drop_rate": p, "seed": 7}, "bf16")
        for p in (0, 0.3, 0.99)
    },
    **{
        f"lora: {name}": partial(merge_files, s, write_adapters, *models)
        for name, (*models, s) in LORA.items()
    },
    "mismatch: overlap": partial(merge_files, OVERLAP, write_mismatched, TWO),
    "mismatch: overlap ties": partial(
        merge_files, {**OVERLAP, **TIES, "keep_ratio": 0.5}, write_mismatched, TWO
    ),
    "mismatch: overlap slerp": partial(merge_files, {**OVERLAP, **SLERP}, write_mismatched, TWO),
    "mismatch: overlap mixed": partial(merge_files, OVERLAP, write_mismatched, "bf16 fp32 bf16"),
    "mismatch: base": partial(merge_files, {"mismatch": "base"}, write_mismatched, TWO),
    "tied": partial(merge_files, {}, write_tied, TIE),
    "tied: rules": partial(merge_files, {"rules": RULES}, write_tied, {"text_config": TIE}),
    "tied: not said": partial(merge_files, SLERP, write_tied, {"model_type": "llama"}),
    "tied: untied": partial(merge_files, TIES, write_tied, {"tie_word_embeddings": False}),
    **{
        f"directory: {name}": partial(merge_files, s, write_sharded)
        for name, s in DIRECTORIES.items()
    },
    **{
        f"report: {name}": partial(report_merge, MERGES[name][1], MERGES[name][0])
        for name in REPORTED
    },
    **{f"analysis: {t}": partial(report_analysis, f"{t} {t} {t} {t}") for t in ("bf16", "fp32")},
}
# Every kind of look and combination of types is a kernel to compile, so the rare ones are usually
# merged by plain NumPy.
RARE = re.compile(r"fp\d\d|mixed|types|lora|analysis|file: (large )?slerp|keep|overlap")
USUAL = {name: "plain" if RARE.search(name) else "numba" for name in CASES}
OTHER = {
    name: "numba" if RARE.search(name) else "plain"
    for name in CASES
    if not name.startswith("memory")
}
LONG = [*OTHER.items(), *(pair for pair in USUAL.items() if "memory: large" in pair[0])]
BOTH = [
    *(pair for pair in USUAL.items() if pair not in LONG),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in LONG),
]


@pytest.mark.parametrize(("name", "engine"), BOTH)
def test_the_bytes_are_those_that_were_pinned(name: str, engine: str, tmp_path: Path) -> None:
    with chdir(tmp_path):
        assert CASES[name](engine=engine) == json.loads(PINNED.read_text())[name]


def pin() -> None:
    print(f"pinning what {dare.__file__} does")
    found = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            found[name] = case(engine="numba")
    PINNED.write_text(json.dumps(found, indent=0) + "\n", newline="\n")


if __name__ == "__main__":
    pin() if sys.argv[1:] == ["--pin"] else sys.exit(__doc__)
