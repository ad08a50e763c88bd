"""The command as the shell sees it: its flags and its help, its streams, its messages and its exit
status.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import TextIOWrapper
from typing import Any, Final, NoReturn, Protocol, TypeAlias

from darelib import __version__
from darelib.commands.options import Flags, MergerClass, Options
from darelib.config import Group
from darelib.core.interrupts import Terminated, stop_on_signals
from darelib.core.text import LOG, ConfigError, DareError, Messages, label, nearest, print_result
from darelib.requests.request import explain_key


class Room(Protocol):
    """What every command has: its options, and what it does with the flags that are given."""

    OPTIONS: Options

    def run(self, flags: Flags, merger_class: MergerClass) -> None: ...


Commands: TypeAlias = Mapping[str, tuple[str, Room]]  # by name: what it does, and its room

SHORT_NAMES: Final = {
    "--config": ("-c",),
    "--base": ("-b",),
    "--merge": ("-m",),
    "--output": ("-o",),
    "--verbose": ("-v",),
    "--quiet": ("-q",),
    "--help": ("-h",),
    "--objectives": ("--objective",),
}
# What every command takes.
COMMON: Final[Options] = {
    "--json": {"action": "store_true", "help": "print results as JSON", "group": Group.RUN},
    "--verbose": {
        "action": "store_true",
        "help": "show progress and summary (default)",
        "group": Group.RUN,
    },
    "--quiet": {
        "action": "store_false",
        "dest": "verbose",
        "help": "only warnings and errors",
        "group": Group.RUN,
    },
    "--version": {
        "action": "version",
        "version": f"dare {__version__}",
        "help": "show the version",
        "group": Group.RUN,
    },
    "--help": {"action": "help", "help": "show this help", "group": Group.RUN},
}
DEFAULT_COMMAND: Final = "merge"
PAGE: Final = """Merge models that were fine-tuned from the same base.

  {prog} --base BASE --merge FIRST SECOND --output merged   merge two models
  {prog} analyze --base BASE --merge FIRST SECOND           look before you merge
  {prog} verify merged                                      make it again, and compare

commands:
{commands}

{prog} help COMMAND shows all options of a command."""


def list_commands(commands: Commands) -> str:
    return "\n".join(f"  {name:8} {words}" for name, (words, _) in commands.items())


def name_program() -> str:
    return "dare.py" if sys.argv[0].endswith(".py") else "dare"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        numbers = "only numbers, with spaces between them, go there; files go after --merge"
        is_number = "invalid float" in message
        raise ConfigError(message, numbers if is_number else f"see {self.prog} --help")


class Help(argparse.RawDescriptionHelpFormatter):
    """Each option with its value once, not after its short name as well."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        given = super()._format_args(action, default_metavar)
        return f"{action.metavar} ..." if action.nargs == "+" else given

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, '')}"


def build_parser(name: str, commands: Commands) -> Parser:
    summary, room = commands[name]
    options = room.OPTIONS | COMMON
    words = [how["metavar"] for option, how in options.items() if not option.startswith("-")]
    usage = " ".join(["%(prog)s", name, "[options]", *words])
    description = f"{name}: {summary}."
    if name == DEFAULT_COMMAND:
        usage = "%(prog)s [COMMAND] [options]"
        description = (
            "Merge models fine-tuned from the same base by DARE: drop most of each delta at\n"
            "random, rescale the rest, combine, add to the base.\n\n"
            f"commands, each with a --help of its own:\n{list_commands(commands)}"
        )
    parser = Parser(
        prog=name_program(),
        usage=usage,
        description=description,
        epilog="Flags beat TOML, TOML beats defaults. Paths in TOML are relative to its file.\n"
        "Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted (143 by SIGTERM).",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
        formatter_class=partial(Help, max_help_position=26),
    )
    # As argparse has it, -1e-3 looks like an option.
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")
    first, *others = Group
    for title in (first, name, *others):  # without a group: the command's own
        group = parser.add_argument_group(title)
        for option, how in options.items():
            if how.get("group", name) == title:
                given: dict[str, Any] = {key: how[key] for key in how if key != "group"}
                group.add_argument(*SHORT_NAMES.get(option, ()), option, **given)
    return parser


def parse_flags(arguments: Sequence[str] | None, commands: Commands) -> tuple[Room, Flags]:
    """The room of the command, merge where none is given, and the flags."""
    words = place_config(list(sys.argv[1:] if arguments is None else arguments))
    if words in ([], ["help"]):
        page = PAGE.format(prog=name_program(), commands=list_commands(commands))
        if words:
            print_result(page)
            sys.exit(0)
        print(page, file=sys.stderr)
        sys.exit(2)
    if words[0] == "help":
        words = [*words[1:], "--help"]
    if words[0] not in commands and not words[0].startswith("-"):
        raise ConfigError(
            f"there is no command {words[0]!r}",
            f"{nearest(words[0], commands)} (files go after --base, --merge or --output)",
        )
    name = words.pop(0) if words[0] in commands else DEFAULT_COMMAND
    if name == DEFAULT_COMMAND and any(word.split("=")[0] == "--verify" for word in words):
        name = "verify"
    parser = build_parser(name, commands)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise explain_unknown(unknown[0].split("=")[0], name, parser, commands)
    return commands[name][1], vars(parsed)


def place_config(words: list[str]) -> list[str]:
    """A configuration and perhaps an output as the first words, as mergekit has them, as flags."""
    if not words or not words[0].endswith((".yaml", ".yml", ".toml")):
        return words
    config, *rest = words
    output = ["--output"] if rest and not rest[0].startswith("-") else []
    return ["--config", config, *output, *rest]


def explain_unknown(word: str, name: str, parser: Parser, commands: Commands) -> ConfigError:
    """What is wrong with a word that a command does not take."""
    if not word.startswith("-"):
        files = "files go after --config, --base, --merge or --output"
        command = f"a command is the first word: {parser.prog} {word} ..."
        return ConfigError(f"{word!r} is not expected here", command if word in commands else files)
    long = next((name for name, short in SHORT_NAMES.items() if word in short), word)
    for other, (_, room) in commands.items():
        if long in room.OPTIONS:
            return ConfigError(
                f"{word} means nothing to {name}", f"it belongs to {parser.prog} {other}"
            )
    foreign = explain_key(word.lstrip("-").replace("-", "_"), ())
    hint = foreign or nearest(word, parser._option_string_actions)
    return ConfigError(f"there is no option {word!r}", hint)


def run_command(act: Callable[[], None]) -> int:
    """The exit status. Errors become a sentence and a hint: no traceback reaches a user."""
    # Closed by the caller, as after >&- or 2>&-, they are None. Here they stay open.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A name that the terminal lacks letters for is no error.
            stream.reconfigure(errors="backslashreplace")
    messages = Messages(sys.stderr)
    LOG.addHandler(messages)
    LOG.propagate = False
    with stop_on_signals() as received:
        try:
            act()
            sys.stdout.flush()
            return 0
        except (Exception, KeyboardInterrupt, Terminated) as error:
            if isinstance(error, Exception) and not received:
                known = explain(error)
                print(label("error", str(known), sys.stderr), file=sys.stderr)
                print_hints([known.hint] if known.hint else [])
                return known.status
            print("interrupted", file=sys.stderr)
            print_hints(getattr(error, "__notes__", []))
            terminated = isinstance(error, Terminated) or signal.SIGTERM in received
            return 143 if terminated else 130
        finally:
            LOG.removeHandler(messages)
            LOG.propagate = True


def print_hints(hints: list[str]) -> None:
    for hint in hints:
        print(label("hint", hint, sys.stderr), file=sys.stderr)


def explain(error: Exception) -> DareError:
    if isinstance(error, DareError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return DareError(
            f"{error.name} is not installed for {sys.executable}",
            "use uv run python dare.py ..., or pip install . first",
        )
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return DareError(
            f"there is too little memory: {error or type(error).__name__}",
            "give fewer --threads, or raise the limits on memory and processes (ulimit -a)",
        )
    if os.environ.get("DARE_TRACEBACK"):
        raise error
    return DareError(
        f"unexpected {type(error).__name__}: {error}",
        "this is a bug; run again with DARE_TRACEBACK=1 set and report what it shows",
    )
