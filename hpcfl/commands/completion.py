"""`hpcfl completion`: scripts that complete commands, options, keys and their values in a shell.

shtab makes them of the commands' parsers. Keys are not part of a parser: a function in each shell knows them.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from typing import Any

import shtab

from hpcfl.commands import COMMANDS
from hpcfl.commands.arguments import SETTINGS_HELP, TABLE_HELP, Parser, run_parser
from hpcfl.commands.reference import keys
from hpcfl.communication.communicator import Communicator

BASH_SETTINGS = """
_hpcfl_settings() {
    # bash takes key=value for three words: join them, and print what follows the =
    local word=${1#=} key= known
    [[ $1 != = ]] || key=${COMP_WORDS[COMP_CWORD-1]}=
    [[ ${COMP_WORDS[COMP_CWORD-1]} != = ]] || key=${COMP_WORDS[COMP_CWORD-2]}=
    compgen -W 'KEYS' -- "$key$word" | while read -r known; do echo "${known#"$key"}"; done
    [[ -n $key ]] || { compgen -f -X '!*.yaml' -- "$word"; compgen -d -S / -- "$word"; }
}
"""
BASH_END = """
# no space after key= and folder/; files where nothing else fits, such as after data.path=
_hpcfl() {
    _shtab_hpcfl
    [[ ${COMPREPLY[0]} != *[=/] ]] || compopt -o nospace 2>/dev/null
}
complete -o default -F _hpcfl hpcfl
"""
ZSH_SETTINGS = """
_hpcfl_settings() {
    local -a known=(KEYS)
    compadd -S '' -- ${(M)known:#*=}
    compadd -- ${known:#*=}
    compset -P '*='
    _files
}
"""
SETTINGS = {"bash": "_hpcfl_settings", "zsh": "_hpcfl_settings"}
COMPLETERS: dict[Any, Any] = {
    SETTINGS_HELP: SETTINGS,
    TABLE_HELP: SETTINGS,
    "RUN": shtab.DIRECTORY,
    "DIR": shtab.DIRECTORY,
    "FILE": shtab.FILE,
    "FILE.py": shtab.FILE,
    "SAMPLES.npz": shtab.FILE,
    "CLAIMS.yaml": shtab.FILE,
}
"""What completes an argument, by the name that its help gives it."""


def print_completion(arguments: Sequence[str], world: Communicator) -> None:
    """Print a script that completes hpcfl's commands, options, keys and values in a shell.

    ~/.bashrc: eval "$(hpcfl completion bash)"       ~/.zshrc, after compinit: eval "$(hpcfl completion zsh)"
    A shell starts faster if it reads the script from a file: eval "$(< FILE)".
    Keys are completed after `hpcfl run`, `plan`, `doctor` and `table`.
    """
    shell = parser().parse_args(arguments).shell
    known = dict.fromkeys(
        word for key in keys() for word in [f"{key.name}={value}" for value in key.values] or [f"{key.name}="]
    )
    settings = BASH_SETTINGS if shell == "bash" else ZSH_SETTINGS
    script = shtab.complete(_all_commands(), shell, preamble=settings.replace("KEYS", " ".join(known)))
    if shell == "bash":
        script += BASH_END
    else:
        # shtab has zsh complete only the first of several arguments
        script = re.sub(r'"\(\*\)::?', '"*:', script)
    print(script)


def parser() -> Parser:
    parser = Parser("hpcfl completion", print_completion.__doc__)
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser


def _all_commands() -> argparse.ArgumentParser:
    """Return one parser of all commands, with what completes their arguments."""
    everything = argparse.ArgumentParser("hpcfl")
    commands = everything.add_subparsers()
    parsers = {"run": run_parser("Run a simulation, or resume it.")}
    parsers |= {name: importlib.import_module(f"hpcfl.commands.{name}").parser() for name in COMMANDS}
    for name, own in parsers.items():
        for action in own._actions:
            if action.metavar in COMPLETERS:
                action.complete = COMPLETERS[action.metavar]  # type: ignore[attr-defined]
        summary = str(own.description).partition("\n")[0]
        commands.add_parser(name, parents=[own], add_help=False, help=summary, description=summary)
    return everything
