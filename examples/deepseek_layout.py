"""Plan a merge of models as large as DeepSeek-V3, made of holes: its time and its memory.

    uv run examples/deepseek_layout.py [FOLDER]

The files have the names, shapes and number of shards of the published model, in bf16, 1.3 TB each,
but nothing is stored in them besides their headers: they need a filesystem with sparse files. Two
of the output's files, of 5 GB of zeros each, are made for real, as parts on two machines would make
them, and everything is removed.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# As the command, on a disk that seems to have room for all of it.
TOOL = """
import shutil, sys, dare
shutil.disk_usage = lambda _: shutil._ntuple_diskusage(0, 0, 1 << 50)
sys.exit(dare.main())
"""
LAYERS = 61
DENSE = 3
HIDDEN = 7168
EXPERTS = 256
EXPERT = 2048
MLP = 18432
HEADS = 128
QUERY = 1536
KEYS = 512
NOPE = 128
ROPE = 64
VALUE = 128
WORDS = 129280
SHARDS = 163


def list_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all tensors, from the model's configuration."""
    yield "model.embed_tokens.weight", (WORDS, HIDDEN)
    for layer in range(LAYERS):
        attention = {
            "q_a_proj": (QUERY, HIDDEN),
            "q_a_layernorm": (QUERY,),
            "q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
            "kv_a_proj_with_mqa": (KEYS + ROPE, HIDDEN),
            "kv_a_layernorm": (KEYS,),
            "kv_b_proj": (HEADS * (NOPE + VALUE), KEYS),
            "o_proj": (HIDDEN, HEADS * VALUE),
        }
        named = {f"self_attn.{name}.weight": shape for name, shape in attention.items()}
        routed = {f"experts.{k}.": EXPERT for k in range(EXPERTS)} | {"shared_experts.": EXPERT}
        for name, width in (routed if layer >= DENSE else {"": MLP}).items():
            named |= {f"mlp.{name}{side}_proj.weight": (width, HIDDEN) for side in ("gate", "up")}
            named[f"mlp.{name}down_proj.weight"] = (HIDDEN, width)
        if layer >= DENSE:
            named |= {
                "mlp.gate.weight": (EXPERTS, HIDDEN),
                "mlp.gate.e_score_correction_bias": (EXPERTS,),
            }
        named |= {f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
        yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in named.items())
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (WORDS, HIDDEN)


def make_holes(folder: Path) -> Path:
    """A model whose tensors are zeros that take no room."""
    sys.path.insert(0, str(ROOT))
    from darelib.models.forms import Entry
    from darelib.models.tensorfile import header_bytes

    folder.mkdir()
    tensors = {name: Entry("BF16", shape) for name, shape in list_tensors()}
    limit = sum(info.nbytes for info in tensors.values()) / SHARDS
    shards = [dict[str, Entry]()]
    place = 0
    weight_map = {}
    for name, info in tensors.items():
        if place > limit * len(shards):
            shards.append({})
        used = sum(other.nbytes for other in shards[-1].values())
        shards[-1][name] = Entry("BF16", info.shape, used)
        place += info.nbytes
    for number, shard in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        header = header_bytes(shard, {})
        file.write_bytes(header)
        os.truncate(file, len(header) + sum(info.nbytes for info in shard.values()))
        weight_map |= dict.fromkeys(shard, file.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "torch_dtype": "bfloat16"})
    )
    return folder


def measure(*words: str | Path) -> tuple[float, float]:
    """Run the tool: its seconds, and the most megabytes that any run has taken so far."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", TOOL, *words], check=True, stdout=subprocess.DEVNULL, cwd=ROOT
    )
    return time.perf_counter() - started, resource.getrusage(
        resource.RUSAGE_CHILDREN
    ).ru_maxrss / 1000


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as scratch:
        base, *models = [make_holes(Path(scratch, name)) for name in ("base", "math", "code")]
        merge = ["-q", "-b", base, "-m", *models, "-o", Path(scratch, "out")]
        print(
            "plan and estimate: {:.1f} s, {:.0f} MB".format(*measure(*merge, "--dry-run")),
            flush=True,
        )
        for part in ("1/300", "200/300"):
            print(
                "part {}: {:.1f} s, {:.0f} MB".format(part, *measure(*merge, "--part", part)),
                flush=True,
            )


if __name__ == "__main__":
    main()
