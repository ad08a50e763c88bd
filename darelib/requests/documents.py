"""Several merges in one file, as mergekit-multi takes them: what one makes, others may merge."""

from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from darelib.core.text import ConfigError, list_names
from darelib.models.source import is_last_part
from darelib.requests.mergekitfile import MergekitFile
from darelib.requests.yamlfile import load_yaml

# Under which keys a document may name another one.
REFERENCES: Final = ("model", "path", "base_model", "tokenizer_source", "source")


def read_documents(text: str, path: str, lenient: bool) -> list[MergekitFile]:
    """The documents of a file, each after those that it refers to: the last is the output."""
    contents = load_yaml(text, path)
    if len(contents) == 1:
        return [MergekitFile(path, contents[0], lenient)]
    numbered = enumerate(contents, 1)
    files = [MergekitFile(f"{path}, document {k}", content, lenient) for k, content in numbered]
    by_name: dict[str, MergekitFile] = {}
    for file in files:
        name = file.name
        is_folder = is_last_part(name) and "/" not in name
        file.check(not name or is_folder, "name", f"{name!r} is no name for a folder", "change it")
        whose = f"another document is called {name!r}" if name else "another one has none either"
        file.check(name not in by_name, "name", whose, "give each but the output a name of its own")
        by_name[name] = file
    needs = {
        name: sorted(list_references(file.content) & by_name.keys())
        for name, file in by_name.items()
    }
    try:
        order = list(TopologicalSorter(needs).static_order())
    except CycleError as error:
        raise ConfigError(
            f"{path}: documents refer to each other in a circle: {' -> '.join(error.args[1])}",
            "a model cannot be made from itself",
        ) from None
    ends = [name for name in order if not any(name in others for others in needs.values())]
    if len(ends) > 1:
        raise ConfigError(
            f"{path}: {list_names(sorted(ends))} are used by no other document, and only one of "
            "them can be the output",
            "give the others a file of their own",
        )
    return [by_name[name] for name in order]


def list_references(value: Any, key: str = "") -> set[str]:
    """What may be names of documents in a document, without adapters on top of them."""
    if isinstance(value, dict):
        pairs = value.items()
        return {name for inner, entry in pairs for name in list_references(entry, str(inner))}
    if isinstance(value, list):
        return {name for entry in value for name in list_references(entry, key)}
    is_reference = isinstance(value, str) and key in REFERENCES
    return {value.partition("+")[0]} if is_reference else set()
