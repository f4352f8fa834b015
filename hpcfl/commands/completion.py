"""`hpcfl completion`: scripts that complete commands, options, keys and their values in a shell.

They hold everything in themselves: starting Python at each press of a key would take seconds.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial

from hpcfl.commands import COMMANDS, command
from hpcfl.commands.arguments import Parser, parse_run
from hpcfl.commands.list import OWN_FILES
from hpcfl.commands.reference import keys
from hpcfl.communication.communicator import Communicator
from hpcfl.data.sources import SOURCES
from hpcfl.registries import REGISTRIES

_CHOICES = REGISTRIES.by_group

COMMON = """\
# Completion of hpcfl {version}. {use}

_hpcfl_options() {{
    case $1 in
{options}
    esac
}}

_hpcfl_words() {{
    case $1 in
{words}
    esac
}}

_hpcfl_groups() {{
    case $1 in
{groups}
    esac
}}

_hpcfl_values() {{
    case $1 in
{values}
    esac
}}

# What may stand in place of a word: of the whole line $1, the word $2 and the command $3.
_hpcfl_candidates() {{
    local group chosen value
    case $2 in
        -*) _hpcfl_options "$3" ;;
        *=*) for value in `_hpcfl_values "${{2%%=*}}"`; do printf '%s\\n' "${{2%%=*}}=$value"; done ;;
        *.*)
            case $3 in list) _hpcfl_words list; return ;; esac
            _hpcfl_groups common
            for group in {choosers}; do
                # the keys of the method that the line names, or of all
                chosen=
                case $1 in *" $group.name="*) chosen=${{1##*" $group.name="}} ;; esac
                _hpcfl_groups "$group.${{chosen%%[ =]*}}"
            done ;;
        *) _hpcfl_words "$3" ;;
    esac
}}

# Which files may stand in place of the word $1, behind the word $2, of the command $3.
_hpcfl_files() {{
    case $1 in
        data.path=*) echo '*.*'; return ;;
        *.path=* | data.reader=*) echo '*.py'; return ;;
    esac
    case $3,$2 in
        {own_files} | *,--own-code) echo '*.py' ;;
        predict,*) echo '*.npz' ;;
        # folders alone
        {without_keys}) echo '*/' ;;
        *) echo '*.yaml' ;;
    esac
}}
"""

BASH = """
_hpcfl() {
    local word=${COMP_WORDS[COMP_CWORD]} stem= command=
    [[ $COMP_CWORD -gt 1 ]] && command=${COMP_WORDS[1]}
    # bash takes key=value for three words
    if [[ $word == = ]]; then
        stem=${COMP_WORDS[COMP_CWORD-1]}= word=
    elif [[ $COMP_CWORD -gt 1 && ${COMP_WORDS[COMP_CWORD-1]} == = ]]; then
        stem=${COMP_WORDS[COMP_CWORD-2]}=
    fi
    local files=$(_hpcfl_files "$stem$word" "${COMP_WORDS[COMP_CWORD-1]}" "$command")
    local found=$(_hpcfl_candidates "$COMP_LINE" "$stem$word" "$command")
    [[ $files == '*.py' ]] && found=
    mapfile -t COMPREPLY < <(compgen -W "$found" -- "$stem$word")
    COMPREPLY=("${COMPREPLY[@]#"$stem"}")
    if [[ -z $found || ( -z $stem && $word != -* && " list completion data " != *" $command "* ) ]]; then
        mapfile -t -O ${#COMPREPLY[@]} COMPREPLY < <(
            compgen -f -X "!$files" -- "$word"
            compgen -d -S / -- "$word"
        )
    fi
    if [[ ${COMPREPLY[0]} == *[=./] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _hpcfl hpcfl
"""

ZSH = """
_hpcfl() {
    local command=
    (( CURRENT > 2 )) && command=$words[2]
    local files="$(_hpcfl_files "$PREFIX" "$words[CURRENT-1]" "$command")"
    local -a found
    [[ $files == '*.py' ]] || found=(${(f)"$(_hpcfl_candidates "$words" "$PREFIX" "$command")"})
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
    if [[ -z $found || ( $PREFIX != (-*|*=*) && " list completion data " != *" $command "* ) ]]; then
        compset -P '*='
        _files -g "$files"
    fi
}
compdef _hpcfl hpcfl
"""

WITHOUT_KEYS = ("watch", "report", "export", "predict", "compare", "claims")
"""Commands that take folders of runs or files, and no keys."""

SHELLS = {
    "bash": (BASH, "In ~/.bashrc: source <(hpcfl completion bash), or a file with it."),
    "zsh": (
        ZSH,
        "In ~/.zshrc, after compinit: source <(hpcfl completion zsh), or a file with it.",
    ),
}


def print_completion(arguments: Sequence[str], world: Communicator) -> None:
    """Print a script that completes hpcfl's commands, options, keys and values in a shell.

    bash: source <(hpcfl completion bash)        zsh: source <(hpcfl completion zsh)
    """
    parser = Parser("hpcfl completion", print_completion.__doc__)
    parser.add_argument("shell", choices=SHELLS)
    code, use = SHELLS[parser.parse_args(arguments).shell]
    print(_common(world, use) + code, end="")


def _common(world: Communicator, use: str) -> str:
    """Return the part that all shells share: what there is to complete."""
    from hpcfl import __version__

    known = keys()
    groups: dict[str, list[str]] = {"common": []}
    values: dict[str, list[str]] = {}
    for key in known:
        prefix = key.group.rpartition(".")[0]
        if not key.name.startswith("train.") or prefix not in _CHOICES:
            groups.setdefault(key.group if prefix in _CHOICES else "common", []).append(f"{key.name}=")
        values.setdefault(key.name, []).extend(key.values)
    for prefix, choice in _CHOICES.items():
        options = [groups.get(f"{prefix}.{name}", []) for name in choice.known]
        groups[f"{prefix}."] = [name for names in options for name in names]
    tops = [f"{name}." for name in dict.fromkeys(name.partition(".")[0] for name in groups["common"])]
    words = {
        "": [*COMMANDS, *tops],
        "list": ["keys", *dict.fromkeys(key.group for key in known)],
        "data": ["fetch", *SOURCES],
        "completion": list(SHELLS),
        **{name: [] for name in WITHOUT_KEYS},
        "*": tops,
    }
    options_of = {name: _options(partial(command(name), ["--help"], world)) for name in COMMANDS}
    options_of["*"] = _options(partial(parse_run, ["--help"], ""))
    return COMMON.format(
        version=__version__,
        use=use,
        options=_cases(options_of),
        words=_cases(words),
        groups=_cases(groups),
        values=_cases({name: found for name, found in values.items() if found}),
        choosers=" ".join(_CHOICES),
        without_keys=" | ".join(f"{name},*" for name in WITHOUT_KEYS),
        own_files=" | ".join(f"list,--{kind}" for kind in OWN_FILES),
    )


def _cases(words: dict[str, list[str]]) -> str:
    """Return branches of a shell's `case`: under each name, print its words, one a line."""
    lines = []
    for name, known in words.items():
        pattern = name if name == "*" else f"'{name}'"
        listed = " ".join(f"'{word}'" for word in dict.fromkeys(known))
        lines.append(f"        {pattern}) printf '%s\\n' {listed} ;;" if listed else f"        {pattern}) ;;")
    return "\n".join(lines)


def _options(show_help: Callable[[], object]) -> list[str]:
    """Return the options that a command's help names."""
    with redirect_stdout(io.StringIO()) as shown, suppress(SystemExit):
        show_help()
    return re.findall(r"^ +(?:-\w, )?(--[\w-]+)", shown.getvalue(), re.MULTILINE)
