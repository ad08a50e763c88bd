"""Tokenizers and chat templates: compared, chosen, and united, so that every token keeps its row."""

import copy
import json
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from dare import DareConfig, DareMerger
from tests.support import BF16, F32, Capture, Tensors, refuse, run, same_bits, save_directory

TRAINED = {f"t{k}": k for k in range(8)}
WIDTH = 6
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CHAT = {"<a>": 10, "<b>": 11}


def write_tokenizer(
    folder: Path, added: dict[str, int], config: dict[str, Any] | None = None
) -> None:
    """A tokenizer.json of words, with added tokens, as the tokenizers library writes it."""
    entries = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, number in added.items()
    ]
    model = {"type": "WordLevel", "vocab": TRAINED, "unk_token": "t0"}
    parts = {
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
    }
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": entries,
        **parts,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(table, indent=2))
    decoder = {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in entries}
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "t0",
        "added_tokens_decoder": decoder,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(known | (config or {})))


def write_model(
    folder: Path, rows: int, added: dict[str, int], seed: int, dtype: torch.dtype = BF16
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {EMBEDDING: (rows, WIDTH), HEAD: (rows, WIDTH), "model.layers.0.mlp.weight": (5, 7)}
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    save_directory(folder, tensors, model_type="llama", vocab_size=rows, hidden_size=WIDTH)
    write_tokenizer(folder, added)
    return tensors


@pytest.fixture
def family(tmp_path: Path) -> list[Path]:
    """A base of eight words and two added tokens in twelve rows, and two models with more of them."""
    write_model(tmp_path / "base", 12, {"<s>": 8, "</s>": 9}, 0)
    write_model(tmp_path / "chat", 14, {"<s>": 8, "</s>": 9, **CHAT}, 1)
    write_model(tmp_path / "tool", 12, {"</s>": 8, "<s>": 9, "<b>": 10, "<c>": 11}, 2)
    return [tmp_path / name for name in ("base", "chat", "tool")]


def numbers_of(folder: Path) -> dict[str, int]:
    table = json.loads((folder / "tokenizer.json").read_text())
    return table["model"]["vocab"] | {
        entry["content"]: entry["id"] for entry in table["added_tokens"]
    }


def merge(family: list[Path], **config: Any) -> tuple[Path, Tensors]:
    output = family[0].parent / "out"
    DareMerger(family[0], family[1:], DareConfig(verbose=False, **config), tokenizer="union").merge(
        output
    )
    return output, load_file(output / "model.safetensors")


def test_a_union_gives_every_token_one_number_and_the_row_of_its_model(family: list[Path]) -> None:
    output, merged = merge(family, drop_rate=0.0)
    numbers, own = numbers_of(output), [numbers_of(folder) for folder in family]
    base, *models = [load_file(folder / "model.safetensors") for folder in family]
    assert numbers == own[0] | {"<a>": 10, "<b>": 11, "<c>": 12}, (
        "the base's first, then in the order of the models"
    )
    assert json.loads((output / "config.json").read_text())["vocab_size"] == 13
    decoder = json.loads((output / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {entry["content"]: int(number) for number, entry in decoder.items()} == {
        token: number for token, number in numbers.items() if token.startswith("<")
    }
    for name in (EMBEDDING, HEAD):
        rows = merged[name]
        assert rows.shape == (13, WIDTH)
        assert same_bits(rows[numbers["<a>"]], models[0][name][10])
        assert same_bits(rows[numbers["<c>"]], models[1][name][11])
        mean = (models[0][name][11].float() + models[1][name][10].float()) / 2
        assert same_bits(rows[numbers["<b>"]], mean.to(BF16))
        for token, number in own[0].items():  # what all have is merged by token, not by number
            mine = base[name][number].float()
            parts = [
                model[name][ids[token]].float() for model, ids in zip(models, own[1:], strict=True)
            ]
            wanted = mine + (0.5 * (parts[0] - mine) + 0.5 * (parts[1] - mine))
            assert same_bits(rows[number], wanted.to(BF16)), token
    assert merged["model.layers.0.mlp.weight"].shape == (5, 7)


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize(
    "config", [{}, {"drop": "magnitude", "rescale": "l1"}, {"drop": "della", "epsilon": 0.05}]
)
def test_rows_of_added_tokens_are_neither_dropped_nor_scaled(
    family: list[Path], method: str, config: Any
) -> None:
    output, merged = merge(
        family, method=method, drop_rate=0.9, lambda_coeff=3.0, weights=[0.9, 0.1], **config
    )
    run("verify", "-q", output)
    chat, tool = (load_file(folder / "model.safetensors") for folder in family[1:])
    for name in (EMBEDDING, HEAD):
        assert same_bits(merged[name][10], chat[name][10])
        assert same_bits(
            merged[name][11], ((chat[name][11].float() + tool[name][10].float()) / 2).to(BF16)
        )


def test_models_of_other_types_and_heads_that_are_tied_unite_too(
    tmp_path: Path, family: list[Path]
) -> None:
    base = load_file(family[0] / "model.safetensors")
    wide = {
        name: tensor.float() for name, tensor in load_file(family[1] / "model.safetensors").items()
    }
    del wide[HEAD]
    save_file(wide, family[1] / "model.safetensors", {"format": "pt"})
    output, merged = merge(family, drop_rate=0.0, weights=[1.0, 0.0])
    numbers = numbers_of(output)
    for name in (EMBEDDING, HEAD):
        assert same_bits(merged[name][numbers["<a>"]], wide[EMBEDDING][10].to(BF16))
        assert same_bits(
            merged[name][3], (base[name][3] + (wide[EMBEDDING][3] - base[name][3])).to(BF16)
        )
        # Where the first model has no token, it has changed nothing.
        if name == EMBEDDING:
            assert same_bits(
                merged[name][numbers["<c>"]], load_file(family[2] / "model.safetensors")[name][11]
            )


def test_room_that_the_base_has_is_used_and_other_rows_stay_where_they_are(tmp_path: Path) -> None:
    write_model(tmp_path / "base", 16, {}, 0, F32)
    chat = write_model(tmp_path / "chat", 16, {"<a>": 8}, 1, F32)
    tool = write_model(tmp_path / "tool", 16, {"<b>": 8}, 1, F32)
    output, merged = merge([tmp_path / "base", tmp_path / "chat", tmp_path / "tool"], drop_rate=0.0)
    assert [numbers_of(output)[token] for token in ("<a>", "<b>")] == [8, 9]
    assert json.loads((output / "config.json").read_text())["vocab_size"] == 16
    assert same_bits(merged[EMBEDDING][8], chat[EMBEDDING][8])
    assert same_bits(merged[EMBEDDING][9], tool[EMBEDDING][8])
    output, merged = merge([tmp_path / "base", tmp_path / "chat"], drop_rate=0.0)
    for row in (3, 13, 15):
        assert same_bits(merged[EMBEDDING][row], chat[EMBEDDING][row])


def test_a_union_is_verified_resumed_and_made_again_by_its_recipe(
    family: list[Path], tmp_path: Path
) -> None:
    flags = ["-q", "-b", str(family[0]), "-m", *map(str, family[1:]), "-o", str(tmp_path / "out")]
    run(*flags, "--tokenizer", "union", "--resume")
    run("verify", "-q", tmp_path / "out")
    run("-q", "-c", tmp_path / "out", "-o", tmp_path / "again")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


def test_special_tokens_follow(family: list[Path]) -> None:
    write_tokenizer(family[0], {"<s>": 8, "</s>": 9}, {"additional_special_tokens": ["<s>"]})
    (family[0] / "added_tokens.json").write_text('{"<s>": 8, "</s>": 9}')
    (family[0] / "special_tokens_map.json").write_text(
        '{"additional_special_tokens": ["<s>"], "eos_token": "</s>"}'
    )
    write_tokenizer(
        family[1],
        {"<s>": 8, "</s>": 9, **CHAT},
        {"additional_special_tokens": ["<a>", {"content": "<s>"}]},
    )
    output, _ = merge(family)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        listed = json.loads((output / name).read_text())["additional_special_tokens"]
        assert [token if isinstance(token, str) else token["content"] for token in listed] == [
            "<s>",
            "<a>",
        ]
    assert json.loads((output / "added_tokens.json").read_text()) == {
        "<s>": 8,
        "</s>": 9,
        "<a>": 10,
        "<b>": 11,
        "<c>": 12,
    }


def test_what_cannot_be_united_is_refused(
    family: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    flags = ["-b", family[0], "-m", *family[1:], "-o", tmp_path / "out", "--tokenizer", "union"]
    path = family[2] / "tokenizer.json"
    table, text = json.loads(path.read_text()), path.read_text()
    other = copy.deepcopy(table)
    other["model"]["vocab"]["new word"] = other["model"]["vocab"].pop("t7")
    for content, words in (
        (
            json.dumps(other),
            (
                "has another vocabulary than the base, not only other added tokens: 1 token "
                "that the base"
            ),
        ),
        (text[:99], "tokenizer.json of"),
        (
            json.dumps(
                table | {"added_tokens": [{"id": k, "content": f"<{k}>"} for k in range(8, 41)]}
            ),
            "has 41 tokens, and its embedding 12 rows",
        ),
        (
            json.dumps(table | {"added_tokens": [{"id": "x", "content": "<far>"}]}),
            "cannot be used: its tokens have no",
        ),
    ):
        path.write_text(content)
        refuse(tmp_path, capsys, 1, words, arguments=flags)
    path.write_text(text)
    (family[0] / "tokenizer.json").unlink()
    refuse(tmp_path, capsys, 1, "has no tokenizer.json", arguments=flags)
    flags[flags.index(tmp_path / "out")] = tmp_path / "out.safetensors"
    refuse(tmp_path, capsys, 1, "has no tokenizer.json", arguments=flags)


def test_other_tokens_are_told_with_what_will_happen(family: list[Path], tmp_path: Path) -> None:
    def warnings(*tokenizer: Any) -> list[str]:
        merger = DareMerger(
            family[0], family[1:], DareConfig(mismatch="overlap", engine="plain"), **dict(tokenizer)
        )
        return [w for w in merger.plan(tmp_path / "out").warnings if "tokenizer" in w]

    chat, tool = warnings()
    assert (
        f"{family[1]} has another tokenizer than {family[0]}: 2 tokens that the base lacks "
        f"('<a>', '<b>')"
    ) in chat
    assert "the output gets the base's (--tokenizer union keeps added tokens)" in chat
    assert (
        "2 tokens with other numbers ('</s>', '<s>'); 2 tokens that the base lacks ('<b>', '<c>')"
        in tool
    )
    assert "rows of the same number are merged, whatever tokens they stand for" in tool
    assert f"the output gets that of {family[2]}" in warnings(("tokenizer", family[2]))[0]
    assert f"{family[2]} has another tokenizer than {family[0]}" in str(
        warnings(("tokenizer", family[2]))
    )
    assert warnings(("tokenizer", "union")) == []
    for folder in family[1:]:  # the same tokens, written otherwise
        table = json.loads((family[0] / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps(table))
    assert warnings() == []
    for folder, words in zip(family, ("a", "b", "a"), strict=True):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text(words)
    assert len(warnings()) == 1
    assert "its 'vocab.txt' differs" in warnings()[0]


def test_unigram_vocabularies_are_read(family: list[Path], tmp_path: Path) -> None:
    for folder in family:
        table = json.loads((folder / "tokenizer.json").read_text())
        table["model"] = {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [[token, -1.5] for token in TRAINED],
        }
        (folder / "tokenizer.json").write_text(json.dumps(table))
    output, _ = merge(family)
    assert [
        entry["id"] for entry in json.loads((output / "tokenizer.json").read_text())["added_tokens"]
    ][-1] == 12


def test_a_tokenizer_that_changed_is_another_input(
    family: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    """In a union it decides which rows are merged, so neither a recipe nor a resumed merge may take
    another one."""
    flags = [
        "-q",
        "-b",
        str(family[0]),
        "-m",
        *map(str, family[1:]),
        "-o",
        str(tmp_path / "out"),
        "--tokenizer",
        "union",
    ]
    run(*flags)
    again = ["-c", tmp_path / "out", "-o", tmp_path / "again"]
    path, text = family[2] / "tokenizer.json", (family[2] / "tokenizer.json").read_text()
    write_tokenizer(family[2], {"</s>": 8, "<s>": 9, "<c>": 10, "<b>": 11})
    refuse(tmp_path, capsys, 1, "is another one: its tokenizer_sha256 is", arguments=again)
    refuse(
        tmp_path,
        capsys,
        1,
        "is another one: its tokenizer_sha256 is",
        arguments=["verify", tmp_path / "out"],
    )
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("darelib.output.publish.Output.publish", Mock(side_effect=KeyboardInterrupt))
        run(*flags, "--resume", "--seed", "3", status=130)
    write_tokenizer(family[2], {"</s>": 8, "<s>": 9, "<c>": 10, "<b>": 11})
    run(*flags, "--resume", "--seed", "3", status=1)
    assert "is another one" in capsys.readouterr().err


def test_a_base_whose_numbers_have_gaps_is_not_united(
    family: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    write_tokenizer(family[0], {"<s>": 8, "</s>": 10})
    flags = ["-b", family[0], "-m", family[1], "-o", tmp_path / "out", "--tokenizer", "union"]
    refuse(tmp_path, capsys, 1, "the numbers of the tokens of the base have gaps", arguments=flags)
    write_tokenizer(family[0], {"<s>": 8, "</s>": 9})
    write_tokenizer(family[1], {"<s>": 8, "</s>": 9, "<a>": 13})
    refuse(tmp_path, capsys, 1, f"of {family[1]} have gaps", arguments=flags)
    (family[1] / "tokenizer.json").unlink()
    refuse(
        tmp_path,
        capsys,
        1,
        "has 14 rows where the base has 12, and no tokenizer.json",
        arguments=flags,
    )


def test_other_vocabularies_of_a_configuration_stay(family: list[Path]) -> None:
    table = {"text_config": {"vocab_size": 12}, "talker_config": {"vocab_size": 4096}}
    (family[0] / "config.json").write_text(json.dumps(table))
    output, _ = merge(family)
    config = json.loads((output / "config.json").read_text())
    assert config == {"text_config": {"vocab_size": 13}, "talker_config": {"vocab_size": 4096}}


@pytest.mark.parametrize(
    "text",
    ['"added_tokens":[' * 100_000, '"vocab":{' * 100_000, '{"added_tokens":[' + "{}," * 10**6],
)
def test_hostile_tokenizers_take_neither_time_nor_memory(
    family: list[Path], tmp_path: Path, text: str
) -> None:
    (family[1] / "tokenizer.json").write_text(text)
    started = time.process_time()
    flags = [
        "-q",
        "-b",
        str(family[0]),
        "-m",
        str(family[1]),
        "-o",
        str(tmp_path / "out"),
        "--mismatch",
        "overlap",
    ]
    run(*flags)
    assert time.process_time() - started < 5


def test_a_tokenizer_s_own_files_are_replaced_and_no_others(
    family: list[Path], tmp_path: Path
) -> None:
    for name in ("assets/some.model", "tokenizer_code/notes.txt", "vocab.txt"):
        (family[0] / name).parent.mkdir(exist_ok=True)
        (family[0] / name).write_text("base")
    DareMerger(family[0], [family[2]], DareConfig(verbose=False), tokenizer=family[2]).merge(
        tmp_path / "out"
    )
    assert not (tmp_path / "out" / "vocab.txt").exists()
    assert (tmp_path / "out" / "assets" / "some.model").read_text() == "base"


def test_templates_of_any_form_are_kept(family: list[Path], tmp_path: Path) -> None:
    several = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    (family[0] / "tokenizer_config.json").unlink()
    write_tokenizer(family[2], {"<s>": 8, "</s>": 9}, {"chat_template": several})
    merger = DareMerger(family[0], [family[2]], DareConfig(verbose=False))
    merger.merge(tmp_path / "out")
    assert template_of(tmp_path / "out") == several
    (family[0] / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert "chat template" not in str(merger.merge(tmp_path / "out").warnings)
    assert (tmp_path / "out" / "chat_template.json").exists()
    (family[2] / "tokenizer_config.json").unlink()
    DareMerger(family[0], [family[2]], DareConfig(verbose=False), tokenizer=family[2]).merge(
        tmp_path / "out"
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "of a processor", (
        "the base's, where it has none"
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_waited_for(family: list[Path], tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe.jinja")
    flags = [
        "-b",
        family[0],
        "-m",
        family[2],
        "-o",
        tmp_path / "out",
        "--chat-template",
        tmp_path / "pipe.jinja",
    ]
    refuse(tmp_path, capsys, 1, "is not a regular file", arguments=flags)
    run("convert", tmp_path / "pipe.jinja", tmp_path / "x.safetensors", status=1)


TEMPLATE = "{% for m in messages %}<a>{{ m }}<b>{% endfor %}"


def template_of(folder: Path) -> Any:
    assert not (folder / "chat_template.jinja").exists()
    return json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template")


def test_the_chat_template_is_the_base_s_or_that_of_the_first_model_that_has_one(
    family: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    flags = [
        "-b",
        str(family[0]),
        "-m",
        *map(str, family[1:]),
        "-o",
        str(tmp_path / "out"),
        "--mismatch",
        "overlap",
    ]
    run(*flags)
    assert template_of(tmp_path / "out") is None
    write_tokenizer(family[2], {"<s>": 8, "</s>": 9}, {"chat_template": TEMPLATE})
    capsys.readouterr()
    run(*flags)
    assert (
        f"warning: the chat template is that of {family[2]}, since the base has none"
        in capsys.readouterr().err
    )
    assert template_of(tmp_path / "out") == TEMPLATE
    (family[1] / "chat_template.jinja").write_text("first")
    run(*flags)
    assert template_of(tmp_path / "out") == "first"
    run(*flags, "--chat-template", family[2])
    assert template_of(tmp_path / "out") == TEMPLATE
    (tmp_path / "own.jinja").write_text("own")
    run(*flags, "--chat-template", tmp_path / "own.jinja")
    assert template_of(tmp_path / "out") == "own"
    run("-q", "-c", tmp_path / "out", "-o", tmp_path / "again")
    assert template_of(tmp_path / "again") == "own"
    (family[0] / "chat_template.jinja").write_text("base")
    run(*flags)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "base"
    run(*flags, "--chat-template", family[2])
    assert template_of(tmp_path / "out") == TEMPLATE


def test_chat_templates_that_are_not_there_are_refused(
    family: list[Path], tmp_path: Path, capsys: Capture
) -> None:
    flags = ["-b", family[0], "-m", family[2], "--chat-template"]
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    for output, given, status, words in (
        ("out", family[1], 1, "there is no chat template in"),
        ("out", tmp_path / "x", 1, "there is no file or"),
        ("out", tmp_path / "binary.jinja", 1, "is not UTF-8 text"),
        ("out.safetensors", family[1] / "tokenizer.json", 1, "there is no chat template in"),
    ):
        refuse(tmp_path, capsys, status, words, arguments=[*flags, given, "-o", tmp_path / output])
    (tmp_path / "own.jinja").write_text("own")
    words = "chat_template means nothing to an output of one file"
    refuse(
        tmp_path,
        capsys,
        2,
        words,
        arguments=[*flags, tmp_path / "own.jinja", "-o", tmp_path / "out.safetensors"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_union_whose_tokens_and_rows_agree(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    family = []
    for seed, (name, added) in enumerate(
        {"base": {"<s>": 8}, "chat": {"<s>": 8, "<a>": 9}, "tool": {"<b>": 8, "<s>": 9}}.items()
    ):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(vocab_size=10, tie_word_embeddings=tied, **sizes)
        transformers.LlamaForCausalLM(config).to(BF16).save_pretrained(tmp_path / name)
        write_tokenizer(
            tmp_path / name, added, {"chat_template": TEMPLATE} if name == "chat" else {}
        )
        family.append(tmp_path / name)
    output, _ = merge(family, drop_rate=0.5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=BF16)
    assert (
        len(tokenizer)
        == 11
        == model.get_input_embeddings().weight.shape[0]
        == model.config.vocab_size
    )
    assert tokenizer.chat_template == TEMPLATE
    for token, folder, row in (("<a>", family[1], 9), ("<b>", family[2], 8)):
        [number] = tokenizer.encode(token, add_special_tokens=False)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=BF16)
        for mine, other in (
            (model.get_input_embeddings().weight, theirs.get_input_embeddings().weight),
            (model.get_output_embeddings().weight, theirs.get_output_embeddings().weight),
        ):
            assert same_bits(mine[number].detach(), other[row].detach())
    assert model(input_ids=torch.tensor([tokenizer.encode("t1 <a> t2 <b>")])).logits.shape[-1] == 11
