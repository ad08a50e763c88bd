"""Tokenizers and chat templates: compared, chosen and united; every token keeps its row."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dare import DareConfig, DareMerger
from darelib.output.tokenizer import tokenizer_files
from tests.support import (
    BF16,
    F32,
    LLAMA,
    Capture,
    Config,
    Models,
    Patch,
    Refusal,
    Tensors,
    assert_same,
    random_model,
    read_json,
    run,
    same_bits,
    save_directory,
    tensors_in,
)

TRAINED = {f"t{k}": k for k in range(8)}
WIDTH = 6
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
BASE = {"<s>": 8, "</s>": 9}
CHAT = {"<a>": 10, "<b>": 11}


def write_tokenizer(
    folder: Path, added: dict[str, int], config: dict[str, Any] | None = None
) -> None:
    """A tokenizer.json of words, with added tokens, as the tokenizers library writes it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    decoder = {
        str(number): {"content": token, **flags, "special": True} for token, number in added.items()
    }
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(number), **entry} for number, entry in decoder.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": TRAINED, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(table, indent=2))
    known = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    known |= {"added_tokens_decoder": decoder} | (config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(known))


def write_model(
    folder: Path, rows: int, added: dict[str, int], seed: int, dtype: torch.dtype = BF16
) -> Tensors:
    shapes = {EMBEDDING: (rows, WIDTH), HEAD: (rows, WIDTH), "model.layers.0.mlp.weight": (5, 7)}
    tensors = random_model(seed, dtype, shapes)
    save_directory(folder, tensors, model_type="llama", vocab_size=rows, hidden_size=WIDTH)
    write_tokenizer(folder, added)
    return tensors


@pytest.fixture
def family(tmp_path: Path) -> list[Path]:
    """A base of eight words and two added tokens in twelve rows, and two models with more."""
    write_model(tmp_path / "base", 12, BASE, 0)
    write_model(tmp_path / "chat", 14, BASE | CHAT, 1)
    write_model(tmp_path / "tool", 12, {"</s>": 8, "<s>": 9, "<b>": 10, "<c>": 11}, 2)
    return [tmp_path / name for name in ("base", "chat", "tool")]


def numbers_of(folder: Path) -> dict[str, int]:
    """The tokens of a model, with their numbers."""
    table = read_json(folder / "tokenizer.json")
    return table["model"]["vocab"] | {
        entry["content"]: entry["id"] for entry in table["added_tokens"]
    }


def merge(family: Models, **config: Any) -> tuple[Path, Tensors]:
    """A union of the models' tokens, and its tensors."""
    output = family[0].parent / "out"
    settings = DareConfig(verbose=False, **config)
    DareMerger(family[0], family[1:], settings, tokenizer="union").merge(output, force=True)
    return output, tensors_in(output)


def test_a_union_gives_every_token_one_number_and_the_row_of_its_model(family: Models) -> None:
    output, merged = merge(family, drop_rate=0.0)
    numbers = numbers_of(output)
    own = [numbers_of(folder) for folder in family]
    base, chat, tool = map(tensors_in, family)
    # The base's come first, then the others in the order of the models.
    assert numbers == own[0] | {"<a>": 10, "<b>": 11, "<c>": 12}
    assert read_json(output / "config.json")["vocab_size"] == 13
    decoder = read_json(output / "tokenizer_config.json")["added_tokens_decoder"]
    added = {entry["content"]: int(number) for number, entry in decoder.items()}
    assert TRAINED | added == numbers
    for name in (EMBEDDING, HEAD):
        wanted = {
            "<a>": chat[name][10].float(),
            "<b>": (chat[name][11].float() + tool[name][10].float()) / 2,
            "<c>": tool[name][11].float(),
        }
        for token, number in own[0].items():  # what all have is merged by token, not by number
            mine = base[name][number].float()
            parts = [
                model[name][ids[token]].float() - mine
                for model, ids in zip((chat, tool), own[1:], strict=True)
            ]
            wanted[token] = mine + (0.5 * parts[0] + 0.5 * parts[1])
        rows = {token: merged[name][number] for token, number in numbers.items()}
        assert_same(rows, {token: row.to(BF16) for token, row in wanted.items()})


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize(
    "config", [{}, {"drop": "magnitude", "rescale": "l1"}, {"drop": "della", "epsilon": 0.05}]
)
def test_rows_of_added_tokens_are_neither_dropped_nor_scaled(
    family: Models, method: str, config: Config
) -> None:
    output, merged = merge(
        family, method=method, drop_rate=0.9, lambda_coeff=3.0, weights=[0.9, 0.1], **config
    )
    run("verify", "-q", output)
    chat, tool = map(tensors_in, family[1:])
    for name in (EMBEDDING, HEAD):
        shared = (chat[name][11].float() + tool[name][10].float()) / 2
        assert same_bits(merged[name][10:12], torch.stack([chat[name][10], shared.to(BF16)]))


@pytest.mark.slow  # importing transformers takes longer than most of the suite
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_union_whose_tokens_have_the_rows_of_their_models(
    tmp_path: Path, tied: bool
) -> None:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = {"base": {"<s>": 8}, "chat": {"<s>": 8, "<a>": 9}, "tool": {"<b>": 8, "<s>": 9}}
    config = transformers.LlamaConfig(**LLAMA | {"vocab_size": 10, "tie_word_embeddings": tied})
    for name, added in tokens.items():
        transformers.LlamaForCausalLM(config).to(BF16).save_pretrained(tmp_path / name)
        write_tokenizer(tmp_path / name, added)
    output, _ = merge([tmp_path / name for name in tokens])
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    model, info = load(output, output_loading_info=True)
    assert not any(info.values()), info
    for token, name, row in (("<a>", "chat", 9), ("<b>", "tool", 8)):
        [number] = tokenizer.encode(token, add_special_tokens=False)
        for part in ("get_input_embeddings", "get_output_embeddings"):
            mine, theirs = (getattr(each, part)().weight for each in (model, load(tmp_path / name)))
            assert mine.shape == (len(tokenizer), LLAMA["hidden_size"])
            assert same_bits(mine.detach()[number], theirs.detach()[row])


def test_models_of_other_types_and_heads_that_are_tied_unite_too(family: Models) -> None:
    base, wide, tool = map(tensors_in, family)
    wide = {name: tensor.float() for name, tensor in wide.items() if name != HEAD}
    save_directory(family[1], wide)
    output, merged = merge(family, drop_rate=0.0, weights=[1.0, 0.0], engine="plain")
    numbers = numbers_of(output)
    for name in (EMBEDDING, HEAD):
        common = base[name][3] + (wide[EMBEDDING][3] - base[name][3])
        assert same_bits(
            merged[name][[numbers["<a>"], 3]], torch.stack([wide[EMBEDDING][10], common]).to(BF16)
        )
    # Where the first model has no token, it has changed nothing.
    assert same_bits(merged[EMBEDDING][numbers["<c>"]], tool[EMBEDDING][11])


def test_room_that_the_base_has_is_used_and_other_rows_stay_where_they_are(tmp_path: Path) -> None:
    names = {"base": {}, "chat": {"<a>": 8}, "tool": {"<b>": 8}}
    models = [write_model(tmp_path / n, 16, added, 1, F32) for n, added in names.items()]
    family = [tmp_path / name for name in names]
    output, merged = merge(family, drop_rate=0.0, engine="plain")
    assert [numbers_of(output)[token] for token in ("<a>", "<b>")] == [8, 9]
    assert read_json(output / "config.json")["vocab_size"] == 16
    rows = [model[EMBEDDING][8] for model in models[1:]]
    assert same_bits(merged[EMBEDDING][8:10], torch.stack(rows))
    _, merged = merge(family[:2], drop_rate=0.0, engine="plain")
    assert same_bits(merged[EMBEDDING][[3, 13, 15]], models[1][EMBEDDING][[3, 13, 15]])


def test_special_tokens_follow_and_other_vocabularies_of_a_configuration_stay(
    family: Models,
) -> None:
    table = {"text_config": {"vocab_size": 12}, "talker_config": {"vocab_size": 4096}}
    (family[0] / "config.json").write_text(json.dumps(table))
    write_tokenizer(family[0], BASE, {"additional_special_tokens": ["<s>"]})
    special = {"additional_special_tokens": ["<s>"], "eos_token": "</s>"}
    (family[0] / "added_tokens.json").write_text(json.dumps(BASE))
    (family[0] / "special_tokens_map.json").write_text(json.dumps(special))
    write_tokenizer(
        family[1], BASE | CHAT, {"additional_special_tokens": ["<a>", {"content": "<s>"}]}
    )
    output, _ = merge(family)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        listed = read_json(output / name)["additional_special_tokens"]
        texts = [token if isinstance(token, str) else token["content"] for token in listed]
        assert texts == ["<s>", "<a>"]
    assert read_json(output / "added_tokens.json") == BASE | CHAT | {"<c>": 12}
    assert read_json(output / "config.json") == table | {"text_config": {"vocab_size": 13}}


@pytest.mark.parametrize(
    ("which", "change", "words"),
    [
        (2, {"model": {"vocab": {**TRAINED, "new word": 7}}}, "another vocabulary"),
        (2, {"added_tokens": [{"id": k, "content": f"<{k}>"} for k in range(8, 41)]}, "41 tokens"),
        (2, {"added_tokens": [{"id": "x", "content": "<far>"}]}, "cannot be used"),
        (2, None, "tokenizer.json of"),
        (0, {"added_tokens": [{"id": 8, "content": "a"}, {"id": 10, "content": "b"}]}, "gaps"),
        (1, {"added_tokens": [{"id": 13, "content": "<a>"}]}, "gaps"),
        (0, ..., "no tokenizer.json"),
        (1, ..., "no tokenizer.json"),
    ],
)
@pytest.mark.parametrize("output", ["out", "out.safetensors"])
def test_what_cannot_be_united_is_refused(
    family: Models,
    tmp_path: Path,
    refused: Refusal,
    which: int,
    change: Any,
    words: str,
    output: str,
) -> None:
    path = family[which] / "tokenizer.json"
    if change is ...:
        path.unlink()
    elif change is None:
        path.write_text(path.read_text()[:99])
    else:
        path.write_text(json.dumps(read_json(path) | change))
    flags = ["-b", family[0], "-m", *family[1:], "-o", tmp_path / output, "--tokenizer", "union"]
    refused(1, words, *flags)


def test_other_tokens_are_told_with_what_will_happen(family: Models, tmp_path: Path) -> None:
    def warn(**tokenizer: Any) -> list[str]:
        merger = DareMerger(
            family[0], family[1:], DareConfig(mismatch="overlap", engine="plain"), **tokenizer
        )
        return [w for w in merger.plan(tmp_path / "out").warnings if "tokenizer" in w]

    chat, tool = warn()
    for warning, names in (
        (chat, (str(family[1]), "('<a>', '<b>')", "--tokenizer union")),
        (tool, (str(family[2]), "('</s>', '<s>')", "('<b>', '<c>')")),
    ):
        assert [name for name in names if name not in warning] == []
    assert warn(tokenizer="union") == warn(tokenizer=family[2]) == []
    for folder in family[1:]:  # the same tokens, written otherwise
        (folder / "tokenizer.json").write_text(json.dumps(read_json(family[0] / "tokenizer.json")))
    assert warn() == []
    for folder, words in zip(family, ("a", "b", "a"), strict=True):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text(words)
    assert ["'vocab.txt'" in warning for warning in warn()] == [True]
    for path in tokenizer_files(family[0]).values():
        path.unlink()
    words = f"{family[0]} has no tokenizer, so the output has none: --tokenizer {family[1]} takes"
    assert warn()[0].startswith(words)
    assert words not in " ".join(warn(tokenizer=family[1]))


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_with_the_tokenizer_of_an_input_rows_follow_its_tokens(
    family: Models, tmp_path: Path, owner: int, refused: Refusal
) -> None:
    """A token that the base lacks has the mean of the rows of the models that have it."""
    flags = ("-q", "--drop-rate", 0, "--engine", "plain")
    models = ("-b", family[0], "-m", *family[1:], "--tokenizer", family[owner])
    run(*models, "-o", tmp_path / "out", *flags)
    stored = [tensors_in(folder)[HEAD].double() for folder in family]
    known = [numbers_of(folder) for folder in family]
    made = tensors_in(tmp_path / "out")[HEAD].double()
    assert len(made) == len(known[owner]) == read_json(tmp_path / "out/config.json")["vocab_size"]
    for token, number in known[owner].items():
        rows = {k: stored[k][own[token]] for k, own in enumerate(known) if token in own}
        rows.setdefault(0, sum(rows.values()) / len(rows))
        deltas = [rows.get(k, rows[0]) - rows[0] for k in (1, 2)] if token in known[0] else [0]
        torch.testing.assert_close(made[number], rows[0] + sum(deltas) / 2, rtol=0.01, atol=1e-4)
    run("verify", tmp_path / "out", "-q", "--engine", "plain")
    run("-c", tmp_path / "out", "-o", tmp_path / "again", "-q", "--engine", "plain")
    assert_same(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "again"))
    (family[2] / "tokenizer.json").write_text((family[1] / "tokenizer.json").read_text())
    refused(1, "its tokenizer_sha256 is", "verify", tmp_path / "out")


def test_unigram_vocabularies_are_read(family: Models) -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.5] for token in TRAINED]}
    for path in (folder / "tokenizer.json" for folder in family):
        path.write_text(json.dumps(read_json(path) | {"model": model}))
    output, _ = merge(family)
    assert read_json(output / "tokenizer.json")["added_tokens"][-1]["id"] == 12


@pytest.mark.parametrize(
    "text",
    ['"added_tokens":[' * 100_000, '"vocab":{' * 100_000, '{"added_tokens":[' + "{}," * 10**6],
)
def test_hostile_tokenizers_take_neither_time_nor_memory(
    family: Models, tmp_path: Path, text: str
) -> None:
    (family[1] / "tokenizer.json").write_text(text)
    started = time.process_time()
    run("-q", "-b", family[0], "-m", family[1], "-o", tmp_path / "out", "--mismatch", "overlap")
    assert time.process_time() - started < 5


@pytest.mark.parametrize("words", [("merge",), ("merge", "--tokenizer", "union"), ("pack",)])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("wrong", [b"}", b"\xff"])
def test_what_is_no_json_is_not_published(
    family: Models,
    tmp_path: Path,
    refused: Refusal,
    words: tuple[str, ...],
    name: str,
    wrong: bytes,
) -> None:
    base, _, tool = family
    path = (tool if words == ("pack",) else base) / name
    path.write_bytes(path.read_bytes() + wrong)
    printed = refused(1, name, *words, "-b", base, "-m", tool, "-o", tmp_path / "out")
    if "union" not in words:  # which puts another one together
        assert str(path) in printed


TEMPLATE = "{% for m in messages %}{{ m }}{% endfor %}"
SEVERAL = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]


def write_template(template: Any) -> str:
    """A JSON file of a model that has this chat template."""
    return json.dumps({"chat_template": template})


@pytest.mark.parametrize(
    ("files", "flags", "expected"),
    [
        ({}, "", None),
        ({"tool/tokenizer_config.json": write_template(TEMPLATE)}, "", TEMPLATE),
        ({"tool/tokenizer_config.json": write_template(SEVERAL)}, "", SEVERAL),
        ({"tool/chat_template.json": write_template("of a processor")}, "", "of a processor"),
        ({"tool/chat_template.jinja": "tool", "chat/chat_template.jinja": "first"}, "", "first"),
        ({"tool/chat_template.jinja": "tool", "base/chat_template.jinja": "base"}, "", "base"),
        (
            {"tool/chat_template.jinja": "tool", "base/chat_template.jinja": "base"},
            "--chat-template tool",
            "tool",
        ),
        ({"base/chat_template.jinja": "base"}, "--tokenizer tool", "base"),
        ({"own.jinja": "own"}, "--chat-template own.jinja", "own"),
    ],
)
def test_the_chat_template_is_the_base_s_or_that_of_the_first_model_that_has_one(
    family: Models,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    files: dict[str, str],
    flags: str,
    expected: Any,
) -> None:
    """Unless one is chosen."""
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    words = ["-b", "base", "-m", "chat", "tool", "-o", "out", "--mismatch", "overlap"]
    run(*words, "--engine", "plain", *flags.split())
    assert template_of(tmp_path / "out") == expected
    is_said = "the chat template is that of" in capsys.readouterr().err
    is_chosen = "--chat-template" in flags or (expected in (None, "base") and not flags)
    assert is_said == (not is_chosen)


def template_of(folder: Path) -> Any:
    """The chat template of a model, wherever it is."""
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text()
    return read_json(folder / "tokenizer_config.json").get("chat_template")


@pytest.mark.parametrize(
    ("output", "given", "status"),
    [
        ("out", "chat", 1),
        ("out", "x", 1),
        ("out", "binary.jinja", 1),
        ("out.safetensors", "chat/tokenizer.json", 1),
        ("out.safetensors", "own.jinja", 2),
        ("out", "union", 2),
    ],
)
def test_chat_templates_that_are_not_there_are_refused(
    family: Models,
    tmp_path: Path,
    monkeypatch: Patch,
    refused: Refusal,
    output: str,
    given: str,
    status: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.jinja").write_bytes(b"\xff\xfe")
    Path("own.jinja").write_text("own")
    refused(status, "template", "-b", "base", "-m", "tool", "-o", output, "--chat-template", given)


def test_half_a_surrogate_pair_is_refused(family: Models, tmp_path: Path, refused: Refusal) -> None:
    flags = ["-b", family[0], "-m", family[1], "-o", tmp_path / "out"]
    write_tokenizer(family[1], BASE | {"\ud800": 10})
    refused(1, "tokenizer.json' of the output is no JSON", *flags, "--tokenizer", "union")
    write_tokenizer(family[2], BASE, {"chat_template": "{{ \udc00 }}"})
    flags[3] = family[2]
    refused(1, "tokenizer_config.json' of the output is no JSON", *flags)


# --- how an output begins and ends texts ----------------------------------------------------------

IM = {"<|im_start|>": 10, "<|im_end|>": 11}
CHATML = "{% for m in messages %}<|im_start|>{{ m }}<|im_end|>{% endfor %}{{ eos_token }}"


def write_speaker(
    folder: Path, seed: int, added: dict[str, int], end: str, template: str = "", **settings: Any
) -> Path:
    """A model that ends texts with a token, as its three configurations say."""
    write_model(folder, 12, added, seed)
    known = {"eos_token": end} | ({"chat_template": template} if template else {})
    write_tokenizer(folder, added, known)
    number = (TRAINED | added)[end]
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": end}}))
    config = read_json(folder / "config.json") | {"eos_token_id": number}
    (folder / "config.json").write_text(json.dumps(config))
    table = {"eos_token_id": [number, 9], **settings}
    (folder / "generation_config.json").write_text(json.dumps(table))
    return folder


def ends_of(folder: Path) -> tuple[Any, ...]:
    """What a model ends texts with: by its configuration, by its tokenizer, when it generates."""
    token = read_json(folder / "tokenizer_config.json")["eos_token"]
    listed = read_json(folder / "special_tokens_map.json")["eos_token"]
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")["eos_token_id"]
    text = listed["content"] if isinstance(listed, dict) else listed
    return config, token, text, generation["eos_token_id"], generation.get("temperature")


@pytest.fixture
def speakers(tmp_path: Path) -> Models:
    """A pretrained base, and two instruct models whose texts end otherwise."""
    tokens = BASE | IM
    hot = {"template": CHATML, "temperature": 0.7}
    return [
        write_speaker(tmp_path / "base", 0, tokens, "</s>"),
        write_speaker(tmp_path / "one", 1, tokens, "<|im_end|>", **hot),
        write_speaker(tmp_path / "two", 2, tokens, "<|im_end|>", **hot),
    ]


@pytest.mark.parametrize(
    ("template", "flags", "speaker"),
    [
        ("", "", "one"),
        ("base", "", "base"),  # its own template brings nothing
        ("base", "--tokenizer two", "two"),
        ("base", "--chat-template one", "one"),
    ],
)
def test_the_model_whose_chat_template_is_taken_brings_its_end_token_along(
    speakers: Models,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    template: str,
    flags: str,
    speaker: str,
) -> None:
    """Each model that ends its texts otherwise is named."""
    monkeypatch.chdir(tmp_path)
    if template:
        Path("base/chat_template.jinja").write_text(template)
    run("-b", "base", "-m", "one", "two", "-o", "out", *flags.split())
    assert ends_of(Path("out")) == ends_of(Path(speaker))
    said = capsys.readouterr().err
    named = {name for name in ("base", "one", "two") if f"{name} ends or generates" in said}
    assert named == ({"one", "two"} if speaker == "base" else {"base"})
    assert ("eos_token_id is [11, 9], not [9, 9]" in said) == (speaker == "base")
    run("verify", "-q", "out")


def test_what_a_speaker_brings_has_the_numbers_of_the_output(tmp_path: Path) -> None:
    base = write_speaker(tmp_path / "base", 0, BASE, "</s>")
    mine = {"<|im_end|>": 8, "</s>": 9, "<s>": 10, "<|im_start|>": 11}
    chat = write_speaker(tmp_path / "chat", 1, mine, "<|im_end|>", CHATML)
    out = tmp_path / "out"
    flags = ["-q", "-b", base, "-o", out, "--tokenizer", "union", "--force"]
    run(*flags, "-m", chat)
    number = numbers_of(out)["<|im_end|>"]
    assert number == 10
    assert ends_of(out)[:4] == (number, "<|im_end|>", "<|im_end|>", [number, 9])
    run("verify", "-q", out)
    # Without a configuration of its own, as beside an adapter, its tokenizer says it.
    for name in ("config.json", "generation_config.json"):
        (chat / name).unlink()
    run(*flags, "-m", chat)
    assert ends_of(out)[:4] == (number, "<|im_end|>", "<|im_end|>", number)


@pytest.mark.parametrize("given", ["", "one", "own.jinja"])
def test_a_chat_template_whose_special_tokens_the_tokenizer_lacks_is_refused(
    speakers: Models, tmp_path: Path, refused: Refusal, given: str
) -> None:
    write_speaker(speakers[0], 0, BASE, "</s>")
    (tmp_path / "own.jinja").write_text(CHATML)
    flags = ["-b", speakers[0], "-m", *speakers[1:], "-o", tmp_path / "out"]
    flags += ["--chat-template", tmp_path / given] if given else []
    refused(1, ("'<|im_start|>'", "--tokenizer union"), *flags)
    for tokenizer in ("union", speakers[1]):
        run("-q", *flags, "--tokenizer", tokenizer, "--force")
        assert {*IM} <= numbers_of(tmp_path / "out").keys()


def test_words_of_a_template_that_are_no_special_tokens_are_no_obstacle(
    speakers: Models, tmp_path: Path
) -> None:
    """Some models were trained with <|user|> as plain text."""
    write_speaker(speakers[0], 0, BASE, "</s>")
    template = "{% for m in messages %}<|user|>{{ m }}{{ eos_token }}{% endfor %}"
    write_speaker(speakers[1], 1, BASE, "</s>", template)
    run("-q", "-b", speakers[0], "-m", *speakers[1:], "-o", tmp_path / "out")
    assert template_of(tmp_path / "out") == template
