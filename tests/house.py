"""Language models for tests of examples: a base, two fine-tunes, and what each can do."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dare import DareConfig, DareMerger
from darelib.models.examples import divide
from tests.support import GPT2, GROUPED, Tensors, low_rank, run, tensors_in, write_adapter

Numbers = tuple[float, float, float]  # loss, agreement, divergence
NEAR = 1e-5
LLAMA = {**GROUPED, "head_dim": 8, "initializer_range": 0.3, "tie_word_embeddings": False}
TIED = {**LLAMA, "tie_word_embeddings": True}
EYES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "image_size": 8,
        "num_hidden_layers": 3, "patch_size": 4}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
# Their class and its settings; how many matrices are matched, and words of the report.
KINDS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, 15, ""),
    "qwen": ("Qwen3ForCausalLM", "Qwen3Config", TIED, 14, ""),
    "gemma": ("Gemma3ForCausalLM", "Gemma3TextConfig",
              {**TIED, "layer_types": LAYERS, "sliding_window": 4}, 14, ""),
    "sees": ("Gemma3ForConditionalGeneration", "Gemma3Config", {"text_config": {
                **TIED, "layer_types": LAYERS, "sliding_window": 4}, "vision_config": EYES,
                "mm_tokens_per_image": 4}, 14, ""),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, "initializer_range": 0.3}, 8, ""),
    "moe": ("MixtralForCausalLM", "MixtralConfig", {**TIED, "num_local_experts": 4}, 8,
            "not matched (no plain matrices): 'model.layers.0.mlp."),
}  # fmt: skip
COUNT = 20  # of examples


class House:
    """A base, two fine-tunes of it, and a file of examples for each."""

    def __init__(self, folder: Path, kind: str) -> None:
        import transformers

        architecture, config, values, self.matched, self.words = KINDS[kind]
        self.kind: Any = getattr(transformers, architecture)
        self.folder = folder
        self.base, *self.models = (folder / name for name in ("base", "math", "code"))
        self.examples = [folder / f"{name}.jsonl" for name in ("math", "code")]
        torch.manual_seed(0)
        model = self.kind(getattr(transformers, config)(**values)).eval()
        model.save_pretrained(self.base, max_shard_size="8KB")
        write_tokenizer(self.base)
        stored = {name: each.detach().clone() for name, each in model.named_parameters()}
        for path, examples in zip(self.models, self.examples, strict=True):
            for name, each in model.named_parameters():
                each.data = stored[name] + 0.1 * torch.randn(each.shape) * stored[name].std()
            model.save_pretrained(path)
            write_lines(examples, make_examples(model))

    def merger(self, models: Any = (), examples: Any = None, **config: Any) -> DareMerger:
        how = {"drop_rate": 0.0, "any_base": True, "verbose": False, "engine": "plain", **config}
        more = {"base_examples": how.pop("base_examples", None)}
        base = how.pop("base", self.base)
        own = self.examples if examples is None else examples
        return DareMerger(base, models or self.models, DareConfig(**how), examples=own, **more)

    @property
    def flags(self) -> list[Any]:
        how = ["--drop-rate", "0", "-q", "--engine", "plain", "--any-base"]
        return ["-b", self.base, "-m", *self.models, *how]


def write_tokenizer(folder: Path) -> None:
    """One of words: w0 to w39."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(40)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@torch.no_grad()
def make_examples(model: Any) -> list[dict[str, str]]:
    """Prompts with what the model itself answers, of several lengths."""
    ids = torch.randint(1, 40, (COUNT, 5))
    for _ in range(6):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    rows = [[f"w{token}" for token in row] for row in ids.tolist()]
    return [
        {"prompt": " ".join(row[:5]), "completion": " ".join(row[5 : 8 + k % 4])}
        for k, row in enumerate(rows)
    ]


def write_lines(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def make_adapter(house: House, folder: Path, seed: int) -> Path:
    shapes = {name: each.shape for name, each in tensors_in(house.base).items() if "proj" in name}
    pairs: Tensors = {}
    for name, (high, wide) in shapes.items():
        pairs |= low_rank(name.removesuffix(".weight"), (high, wide), seed=seed)
    return write_adapter(folder, pairs, lora_alpha=128)


def pack(house: House, path: Path) -> Path:
    run("pack", "-b", house.base, "-m", house.models[1], "-o", path, "--drop-rate", "0.5",
        "--seed", "43", "--engine", "plain", "-q", "--any-base")  # fmt: skip
    return path


# --- what transformers itself gives ---------------------------------------------------------------


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_ids(entry: dict[str, str]) -> tuple[list[int], int]:
    """The tokens of an example, and at which one the answer begins."""
    prompt, answer = (entry.get(key, "").split() for key in ("prompt", "completion"))
    words = [*prompt, *answer, *entry.get("text", "").split()]
    return [int(word[1:]) for word in words], max(1, len(prompt))


@torch.no_grad()
def measure(house: House, model: Path, owner: Path, entries: Sequence[Any]) -> Numbers:
    """A model beside the owner of some examples, each in a forward of its own."""
    kinds = [house.kind.from_pretrained(p, dtype=torch.float32).eval() for p in (model, owner)]
    sums = torch.zeros(4, dtype=torch.float64)
    for entry in entries:
        ids, start = read_ids(entry)
        rows = [kind(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1] for kind in kinds]
        given, wanted = (each.double().log_softmax(-1) for each in rows)
        loss = -given.gather(-1, torch.tensor(ids[start:])[:, None]).sum()
        same = (given.argmax(-1) == wanted.argmax(-1)).sum()
        sums += torch.stack(
            [loss, same, (wanted.exp() * (wanted - given)).sum(), given.new_tensor(len(given))]
        )
    loss, same, divergence = (sums[:3] / sums[3]).tolist()
    return loss / math.log(2), same, divergence / math.log(2)


def numbers_in(report: Any, model: int = -1) -> list[Numbers]:
    """Of a model, by file."""
    rows = report.to_dict()["models"][model]["scores"]
    return [(row["loss"], row["agreement"], row["divergence"]) for row in rows]


def are_near(one: Sequence[Numbers], other: Sequence[Numbers]) -> bool:
    return [pytest.approx(each, abs=NEAR) for each in one] == [*other]


def hold_out(house: House, folder: Path, share: float = 0.25) -> tuple[list[Path], list[list[Any]]]:
    """The examples that judge where some match, as files, too."""
    held = [divide(read_lines(path), share)[1] for path in house.examples]
    paths = [folder / path.name for path in house.examples]
    return [write_lines(*each) for each in zip(paths, held, strict=True)], held


def find_cost(house: House, model: Path, held: Sequence[Any]) -> float:
    """The mean loss on answers, of all skills."""
    pairs = zip(house.models, held, strict=True)
    return sum(measure(house, model, own, entries)[0] for own, entries in pairs) / len(held)
