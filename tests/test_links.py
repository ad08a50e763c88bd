"""Links in a model's folder, and modes: nothing of a user is published that was not given."""

from pathlib import Path

import pytest

from darelib.output.destination import list_files
from tests.support import (
    POSIX,
    Capture,
    Pair,
    Patch,
    Refusal,
    random_model,
    run,
    save,
    save_sharded,
    to_hub_cache,
)

pytestmark = POSIX
MODELS = ("base", "math", "other")


def fill(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize(
    ("link", "flags"),
    [
        ("base/NOTICE.txt", ""),
        ("base/1_Pooling/config.json", ""),
        ("base/model-00002-of-00002.safetensors", "-o out.safetensors"),
        ("base/model.safetensors.index.json", "-o out.safetensors"),
        ("math/config.json", "-o out.safetensors"),
        ("math/chat_template.jinja", ""),
        ("other/chat_template.jinja", "--chat-template other"),
        ("other/tokenizer.json", "--tokenizer other"),
        ("other/additional_chat_templates", "--tokenizer other"),
    ],
)
def test_a_link_out_of_a_model_is_not_followed(
    tmp_path: Path, monkeypatch: Patch, refused: Refusal, link: str, flags: str
) -> None:
    monkeypatch.chdir(tmp_path)
    base = random_model()
    for name in MODELS:
        save_sharded(Path(name), base, [["scalar"], [n for n in base if n != "scalar"]])
        fill(Path(name), "tokenizer_config.json")
    path = Path(link)
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename("private")
    else:
        fill(Path(), "private" if path.suffix else "private/key.jinja")
    path.symlink_to(tmp_path / "private")
    words = ["-b", "base", "-m", "math", "-o", "out", *flags.split()]
    refused(1, (link, str(tmp_path / "private"), "copy"), *words)


@pytest.mark.parametrize("linked", [0, 1])
def test_a_configuration_beside_a_file_that_is_a_link_is_not_followed(
    tmp_path: Path, check_refused: Refusal, linked: int
) -> None:
    fill(tmp_path, "private")
    paths = save(tmp_path / "one", base=random_model())
    paths += save(tmp_path / "two", math=random_model())
    config = paths[linked].with_name("config.json")
    config.symlink_to(tmp_path / "private")
    check_refused(*paths, str(config), str(tmp_path / "private"), "copy")


def test_links_within_a_model_and_to_its_blobs_are_followed(pair: Pair, tmp_path: Path) -> None:
    fill(pair[0], "config.json", "LICENSE", "1_Pooling/config.json")
    snapshot = to_hub_cache(tmp_path / "cache", "org/base", pair[0], "c0ffee")
    (pair[0] / "1_Pooling" / "licence.txt").symlink_to("../LICENSE")
    (tmp_path / "link").symlink_to(pair[0])
    for base in (tmp_path / "link", snapshot):
        out = tmp_path / f"out of {base.name}"
        run("-q", "-b", base, "-m", pair[1], "-o", out)
        assert (out / "1_Pooling" / "config.json").read_text() == "{}"
    assert (tmp_path / "out of link" / "1_Pooling" / "licence.txt").read_text() == "{}"


def test_a_link_to_a_folder_is_left_out_and_it_is_said(
    pair: Pair, tmp_path: Path, capsys: Capture
) -> None:
    fill(tmp_path, "elsewhere/key.txt")
    (pair[0] / "code").symlink_to(tmp_path / "elsewhere")
    (pair[0] / "wandb").symlink_to(tmp_path / "elsewhere")  # which is never copied
    out = tmp_path / "out"
    run("-b", pair[0], "-m", pair[1], "-o", out)
    assert not (out / "code").exists()
    printed = capsys.readouterr().err
    assert "'code'" in printed
    assert "'wandb'" not in printed


def test_what_is_copied_or_replaced_is_open_to_nobody_else(pair: Pair, tmp_path: Path) -> None:
    fill(pair[0], "config.json", "key.txt")
    (pair[0] / "key.txt").chmod(0o600)
    out = tmp_path / "out"
    models = ["-q", "-b", pair[0], "-m", pair[1], "--force"]
    for private in ({"key.txt"}, {"key.txt", "model.safetensors", "."}):
        run(*models, "-o", out)
        modes = {name: (out / name).stat().st_mode & 0o077 for name in (".", *list_files(out))}
        assert {name for name, mode in modes.items() if not mode} == private
        (out / "model.safetensors").chmod(0o600)
        out.chmod(0o700)


@pytest.mark.parametrize("words", ["-o out.safetensors", "--write-config out.toml"])
def test_a_file_that_is_replaced_stays_private(
    pair: Pair, tmp_path: Path, monkeypatch: Patch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    made = Path(words.split()[1])
    for mode in (0o644, 0o600):
        run("-q", "-b", pair[0], "-m", pair[1], "--force", *words.split())
        assert made.stat().st_mode & 0o777 == mode
        made.chmod(0o600)
