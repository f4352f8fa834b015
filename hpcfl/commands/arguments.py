"""Parse the command line, and write a command line from its words."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from hpcfl import __version__
from hpcfl.config.keys import GROUPS
from hpcfl.config.own_code import allow
from hpcfl.errors import UserError

SETTINGS_HELP = "CONFIG.yaml | key.sub=value"
TABLE_HELP = "TABLE.yaml | key.sub=value"

YAML_ENDINGS = (".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError, and prints the description unchanged."""

    def __init__(self, program: str, description: str | None) -> None:
        super().__init__(
            program,
            description=inspect.cleandoc(description or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        hint = "; keys have no dashes, write key.sub=VALUE" if re.search(r" --?[a-z]+\.\w", message) else ""
        raise UserError(f"{message}{hint}; see {self.prog} --help")


def whole_number(text: str) -> int:
    """Return an option's value, an integer from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is invalid; give an integer from 1 on")
    return int(text)


def add_own_code(parser: Parser) -> None:
    """Add the option that names a Python file of the user's own."""
    parser.add_argument(
        "--own-code",
        type=partial(allow, "--own-code"),
        metavar="FILE.py",
        help="Python file that a configuration may run",
    )


def run_parser(description: str | None) -> Parser:
    """Return what reads the words of a run."""
    parser = Parser("hpcfl run", description)
    parser.add_argument("settings", nargs="*", metavar=SETTINGS_HELP)
    parser.add_argument("--out", type=Path, metavar="DIR", help="run folder (default: runs/<name>)")
    parser.add_argument("--fresh", action="store_true", help="move the old run folder aside and start over")
    parser.add_argument("--quiet", action="store_true", help="print nothing but warnings and errors")
    add_own_code(parser)
    parser.add_argument("--version", action="version", version=f"hpcfl {__version__}")
    return parser


def is_file(word: str) -> bool:
    """Return whether a word names a configuration file: it ends in .yaml, or exists."""
    return word.endswith(YAML_ENDINGS) or os.path.exists(word)


def is_bare_key(word: str) -> bool:
    """Return whether a word looks like a key without a value, such as `train.lr`."""
    return bool(re.fullmatch(rf"({'|'.join(GROUPS)})\.[\w.]+", word)) and not is_file(word)


def split_settings(settings: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """Separate the configuration file from the `key=value` words; UserError for a second file, or a key
    without its value."""
    for word, later in pairwise([*settings, ""]):
        # key= VALUE; key= alone is null
        has_space = word.endswith("=") and later and "=" not in later and not later.endswith(YAML_ENDINGS)
        if has_space or is_bare_key(word):
            key = word.removesuffix("=")
            raise UserError(f"{key} has no value; write {key}=VALUE, without spaces")
    files = [setting for setting in settings if "=" not in setting]
    if len(files) > 1:
        raise UserError(
            f"more than one configuration file: {', '.join(files)}; give one, and key=value for the rest"
        )
    overrides = tuple(setting for setting in settings if "=" in setting)
    return Path(files[0]) if files else None, overrides


def command_line(words: Sequence[str], num_ranks: int) -> str:
    """Return the command line that runs hpcfl with these words on this many ranks."""
    launcher = ["mpirun", "-n", str(num_ranks)] if num_ranks > 1 else []
    return shlex.join([*launcher, "hpcfl", *words])


def client_of(text: str, *words: str) -> Any:
    """Return --client as a client's number, or as one of the allowed words; UserError otherwise."""
    if text in words:
        return text
    if not text.isdecimal():
        allowed = " or ".join(("a client's number", *words))
        raise UserError(f"--client {text} is invalid; allowed: {allowed}")
    return int(text)
