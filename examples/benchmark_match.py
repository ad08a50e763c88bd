# /// script
# requires-python = ">=3.11"
# dependencies = ["dare-merge[match]"]
#
# [tool.uv.sources]
# dare-merge = { path = "..", editable = true }
# ///
"""How long does it take to match a merge with examples, and how much memory?

    uv run examples/benchmark_match.py block --size 8        one block of Llama 8B, two models
    uv run examples/benchmark_match.py command --size 8      whole commands, by billions

A block is matched by the walk, and by hand: the same forwards, sums and solutions, written out for
Llama. The commands merge models of random weights from files, by weights alone and matched with
examples of each, and judge them; beside these, the files are only read. Of more than two models,
every second one has the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from darelib.run.matching.language import count_batch
from darelib.run.matching.network import BASE, START, Network, fast_products
from darelib.run.matching.walk import Participant, Stream, Walk

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Widths, layers, heads and tokens, by billions of parameters.
SIZES = {
    "8": (4096, 14336, 32, 32, 8, 128256),
    "3": (3072, 8192, 28, 24, 8, 128256),
    "1": (2048, 8192, 16, 32, 8, 128256),
    "0.5": (1024, 4864, 24, 16, 8, 32000),
    "0.1": (768, 2048, 12, 12, 4, 8192),
}
LENGTH = 512  # of the longest examples, in tokens
WAYS = ("linear", "wudi", "matched", "evaluate")
READ = 1 << 24  # bytes at a time
SHARD = 50  # tensors of a file
# The command, and the most memory that it had: what the system counts of a child has its parent's.
COMMAND = """
import os, re, sys, dare
if share := os.environ.get("GPU_SHARE"):
    import torch
    torch.cuda.set_per_process_memory_fraction(float(share))
status = dare.main(sys.argv[1:])
used = os.times()
peak = re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())
torch = sys.modules.get("torch")
gpu = torch.cuda.max_memory_reserved() if torch and torch.cuda.is_available() else 0
numbers = int(peak[1]) * 1024 / 1e9, gpu / 1e9, used.user + used.system
print([round(number, 2) for number in numbers], file=sys.stderr)
sys.exit(status)
"""


def configure(size: str, layers: int | None = None) -> transformers.LlamaConfig:
    width, inner, depth, heads, groups, tokens = SIZES[size]
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=tokens,
        max_position_embeddings=LENGTH,
        use_cache=False,
        architectures=["LlamaForCausalLM"],
    )


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def measure(task: Callable[[], Any], times: int) -> float:
    """The median of several runs after one that warms up."""
    seconds = []
    for _ in range(times + 1):
        synchronize()
        started = time.perf_counter()
        task()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def make_states(model: torch.nn.Module) -> dict[int, dict[str, Tensor]]:
    base = {name: each.detach() for name, each in model.named_parameters()}
    states = {BASE: base}
    for i in range(2):
        states[i] = {
            n: each + 0.01 * torch.randn_like(each) * each.std() for n, each in base.items()
        }
    states[START] = {name: (states[0][name] + states[1][name]) / 2 for name in base}
    return states


def match_by_hand(
    block: Any,
    states: dict[int, dict[str, Tensor]],
    hidden: list[list[Tensor]],
    rest: dict[str, Any],
) -> dict[str, Tensor]:
    """The forwards, sums and solutions of one block, and nothing else."""
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)
    stages = [*names, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
    merged = dict(states[START])
    found: dict[str, Tensor] = {}
    for k, stage in enumerate(stages):
        gram: Any = 0
        cross: dict[str, Any] = dict.fromkeys(stage, 0)
        for i, batches in enumerate(hidden):
            for x in batches:
                _, _, wanted = run_block(block, states[i], x, rest, k)
                inputs, _, given = run_block(block, merged, x, rest, k)
                gram = gram + inputs.T @ inputs
                for name, one, other in zip(stage, wanted, given, strict=True):
                    cross[name] = cross[name] + (one - other).T @ inputs
        system = gram + gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
        factor = torch.linalg.cholesky(system)
        for name in stage:
            change = torch.cholesky_solve(cross[name].T, factor).T
            merged[f"{name}.weight"] = found[name] = merged[f"{name}.weight"] + change
    for i, batches in enumerate(hidden):
        for x in batches:
            run_block(block, states[i], x, rest, len(stages))
            run_block(block, merged, x, rest, len(stages))
    return found


def run_block(
    block: Any, state: dict[str, Tensor], x: Tensor, rest: dict[str, Any], stop: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A block of Llama up to one of its stages: what comes into it, and what it gives."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def norm(name: str, values: Tensor) -> Tensor:
        mean = values.square().mean(-1, keepdim=True)
        return values * torch.rsqrt(mean + 1e-6) * state[f"{name}.weight"]

    def by(name: str, values: Tensor) -> Tensor:
        return values @ state[f"{name}.weight"].T

    attention = block.self_attn
    shape = (*x.shape[:2], -1, attention.head_dim)
    first = norm("input_layernorm", x)
    parts = [by(f"self_attn.{letter}_proj", first) for letter in "qkv"]
    if stop == 0:
        return first.flatten(0, 1), x, [part.flatten(0, 1) for part in parts]
    q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
    q, k = apply_rotary_pos_emb(q, k, *rest["position_embeddings"])
    seen = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    second = seen.transpose(1, 2).flatten(2)
    x = x + (given := by("self_attn.o_proj", second))
    if stop == 1:
        return second.flatten(0, 1), x, [given.flatten(0, 1)]
    third = norm("post_attention_layernorm", x)
    gate = by("mlp.gate_proj", third)
    up = by("mlp.up_proj", third)
    if stop == 2:
        return third.flatten(0, 1), x, [gate.flatten(0, 1), up.flatten(0, 1)]
    last = torch.nn.functional.silu(gate) * up
    x = x + by("mlp.down_proj", last)
    return last.flatten(0, 1), x, [x.flatten(0, 1)]


def measure_block(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_grad_enabled(False)
    with DEVICE:
        config = configure(options.size, 2)
        config.vocab_size = 1000
        model = transformers.LlamaForCausalLM(config).eval()
    states = make_states(model)
    rows = count_batch(DEVICE) // options.tokens
    shape = options.examples, options.tokens
    batches = [list(torch.randint(0, 1000, shape, device=DEVICE).split(rows)) for _ in range(2)]
    participants = [
        Participant(i, [Stream({"input_ids": ids}) for ids in own]) for i, own in enumerate(batches)
    ]
    network = Network(model, DEVICE)

    def load(who: int, names: Any) -> dict[str, Tensor]:
        return {name: states[who][name] for name in names}

    with network.opened():
        network.choose_way(load, participants[0].streams[0].batch)
        walk = Walk(network, load, participants, ridge=0.05, excluded=lambda _: "")
        before, first, second, _ = network.segments
        walk.match(before)
        walk.match(first)
        hidden = [[stream.own for stream in each.streams] for each in participants]

        def match() -> None:
            for each, own in zip(participants, hidden, strict=True):
                for stream, known in zip(each.streams, own, strict=True):
                    stream.own = stream.merged = known
            walk.match(second)

        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = measure(match, options.times)
        memory = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else 0
    x = [[each.to(DEVICE) for each in own] for own in hidden]
    prefix = "model.layers.1."
    own = {
        who: {n.removeprefix(prefix): each for n, each in state.items() if n.startswith(prefix)}
        for who, state in states.items()
    }
    positions = torch.arange(options.tokens, device=DEVICE)[None]
    rest = {"position_embeddings": model.model.rotary_emb(x[0][0], positions)}
    with fast_products():
        block = model.model.layers[1]
        alone = measure(lambda: match_by_hand(block, own, x, rest), options.times)
    return {
        "tokens of each model": options.examples * options.tokens,
        "seconds": round(seconds, 3),
        "by hand": round(alone, 3),
        "ratio": round(seconds / alone, 2),
        "GPU memory, GB": round(memory / 1e9, 2),
    }


def write_models(options: argparse.Namespace) -> list[str]:
    """A base and fine-tunes of random weights, in bf16, with examples as token ids."""
    folder = options.folder
    config = configure(options.size, options.layers)
    names = [f"model{k}" for k in range(1, options.models + 1)]
    for number, name in enumerate(("base", *names)):
        (folder / name).mkdir(parents=True)
        shape = options.examples, options.tokens
        write_examples(folder / f"{name}.jsonl", torch.randint(0, config.vocab_size, shape))
        if number > 2:  # the disk may have no room for more
            for file in (folder / names[number % 2]).iterdir():
                os.link(file, folder / name / file.name)
            continue
        config.save_pretrained(folder / name)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        table = {}
        shard: dict[str, Tensor] = {}
        parameters = list(model.named_parameters())
        for k, (key, each) in enumerate(parameters):
            generator = torch.Generator(DEVICE).manual_seed(k)
            values = torch.randn(each.shape, generator=generator, device=DEVICE) * 0.02
            if each.dim() == 1:
                values = torch.ones(each.shape, device=DEVICE)
            generator.manual_seed(1000 * number + k)
            noise = torch.randn(each.shape, generator=generator, device=DEVICE) * 0.0005
            values = values + noise * (number > 0 and each.dim() > 1)
            shard[key] = values.bfloat16().cpu()
            table[key] = f"model-{k // SHARD:02}.safetensors"
            if k % SHARD == SHARD - 1 or k == len(parameters) - 1:
                save_file(shard, folder / name / table[key], {"format": "pt"})
                shard = {}
        (folder / name / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": table})
        )
    return names


def write_examples(path: Path, examples: Tensor) -> None:
    with path.open("w") as file:
        for ids in examples.tolist():
            file.write(json.dumps({"input_ids": ids}) + "\n")


def read_files(folder: Path, names: Sequence[str]) -> float:
    """The seconds that it takes to read models, on one thread."""
    started = time.perf_counter()
    buffer = bytearray(READ)
    for name in names:
        for path in (folder / name).glob("*.safetensors"):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - started


def measure_commands(options: argparse.Namespace) -> None:
    """Print the figures of each command when it is done: some take long."""
    folder = options.folder
    names = write_models(options)
    home = str(Path(__file__).resolve().parent.parent)
    paths = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    if options.gpu_memory:
        whole = torch.cuda.get_device_properties(DEVICE).total_memory
        environment["GPU_SHARE"] = str(options.gpu_memory * 1e9 / whole)
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    print(json.dumps({"reading, s": round(read_files(folder, ["base", *names]), 1)}), flush=True)
    models = ["--base", "base", "--merge", *names, "--drop-rate", "0", "--json"]
    files = ["--examples", *(f"{name}.jsonl" for name in names)]
    for way in options.ways:
        shutil.rmtree(folder / "merged", ignore_errors=True)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *make_words(way, models, files)],
            cwd=folder,
            capture_output=True,
            text=True,
            env=environment,
        )
        seconds = time.perf_counter() - started
        if done.returncode:
            sys.exit(done.stderr)
        resident, on_gpu, of_cpu = json.loads(done.stderr.splitlines()[-1])
        figures = {"s": seconds, "GB": resident, "GB of the GPU": on_gpu, "s of CPUs": of_cpu}
        shown = {f"{way}, {name}": round(each, 2) for name, each in figures.items() if each}
        matching = json.loads(done.stdout).get("matching") or {}
        shown |= {name: matching[name] for name in ("before", "after") if name in matching}
        print(json.dumps(shown), flush=True)


def make_words(way: str, models: Sequence[str], files: Sequence[str]) -> list[str]:
    """What the command is called with."""
    if way == "evaluate":
        return ["evaluate", *models, *files, "--no-matched"]
    return [*models, "--output", "merged", *(files if way == "matched" else ["--method", way])]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("block", "command"))
    parser.add_argument("--size", choices=SIZES, default="0.1", help="billions of parameters")
    parser.add_argument("--examples", type=int, default=64, help="of each model")
    parser.add_argument("--tokens", type=int, default=LENGTH, help=f"of each, up to {LENGTH}")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--models", type=int, default=2, help="that are merged by commands")
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY", help=" ".join(WAYS)
    )
    parser.add_argument("--gpu-memory", type=float, help="GB that the command may have")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("benchmark_match"), help="for files")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.what == "block":
        print(json.dumps(measure_block(options)))
        return
    try:
        measure_commands(options)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
