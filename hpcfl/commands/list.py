"""`hpcfl list`: methods, sources, partitions, models, codecs, and configuration keys."""

from __future__ import annotations

from collections.abc import Sequence

from hpcfl.commands.arguments import Parser
from hpcfl.commands.reference import Key, about, citation, goes_with, keys
from hpcfl.communication.codecs import CODECS
from hpcfl.communication.communicator import Communicator
from hpcfl.config.key_errors import nearest_key
from hpcfl.config.own_code import allow
from hpcfl.config.registry import Registry
from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.models import MODELS
from hpcfl.registries import REGISTRIES

_REGISTRIES: dict[str, Registry] = vars(REGISTRIES)
"""By kind, such as `method`: an option for each names a file of the user's own."""


def list_everything(arguments: Sequence[str], world: Communicator) -> None:
    """Print all methods, sources, partitions, models and codecs, one per line, with what each is.

    With `keys`, print all configuration keys with allowed values, defaults and meanings, or only those
    whose name or group begins with a KEY: train, run.seed, method.pfedla, data.partition.dirichlet
    """
    options = parser().parse_intermixed_args(list(arguments))
    if options.words and options.words[0] != "keys":
        word = options.words[0]
        group = next((name for name in _groups_of_kinds() if name.endswith(f".{word}")), "method.pfedla")
        raise UserError(f"hpcfl list {word}: type hpcfl list for all names, or hpcfl list keys {group}")
    for kind, registry in _REGISTRIES.items():
        if (path := getattr(options, kind)) is not None:
            allow(f"--{kind}", path)
            registry.add_own(path)
    if options.words:
        by_group: dict[str, list[Key]] = {}
        for key in _chosen(options.words[1:]):
            by_group.setdefault(key.group, []).append(key)
        print("\n\n".join(_as_lines(*group) for group in by_group.items()))
    else:
        _print_names()


def parser() -> Parser:
    parser = Parser("hpcfl list", list_everything.__doc__)
    parser.add_argument("words", nargs="*", metavar="keys | KEY", help="`keys`, then names of keys or groups")
    for kind, registry in _REGISTRIES.items():
        parser.add_argument(
            f"--{kind}", metavar="FILE.py", help=f"your own {kind} too (see {registry.own_key})"
        )
    return parser


def _print_names() -> None:
    kinds: dict[str, dict[str, str]] = {
        "method": {
            name: "; ".join(
                [
                    method.summary,
                    *(f"{verb} {', '.join(keys)}" for verb, keys in goes_with(method).items() if keys),
                ]
            )
            for name, method in METHODS.items()
        },
        "source": {name: source.description for name, source in SOURCES.items()},
        "partition": {name: partition.description for name, partition in PARTITIONS.items()},
        "model": {
            name: f"{model.description}; takes {', '.join(model.kinds)}" for name, model in MODELS.items()
        },
        "codec": {name: codec.description for name, codec in CODECS.items()},
    }
    for kind, entries in kinds.items():
        for name, description in entries.items():
            print(f"{kind} {name}: {description}")


def _chosen(words: Sequence[str]) -> list[Key]:
    """Return the keys whose name or group begins with a word, all without words; UserError if none match."""
    known = keys()
    if not words:
        return known
    found = []
    for word in words:
        of_word = [key for key in known if any(f"{name}.".startswith(f"{word}.") for name in _names(key))]
        if not of_word and word in _groups_of_kinds():
            raise UserError(f"{word} has no keys of its own; see hpcfl list keys")
        of_word = of_word or [key for key in known if any(name.startswith(word) for name in _names(key))]
        if not of_word:
            near = nearest_key(word, sorted({name for key in known for name in _names(key)}))
            hint = f"; did you mean {near}?" if near else "; see hpcfl list keys"
            raise UserError(f"{word} is not a key or a group of keys{hint}")
        found += [key for key in of_word if key not in found]
    return found


def _groups_of_kinds() -> list[str]:
    """Return the groups of the keys of each method, model and partition, also of those without keys."""
    return [f"{group}.{name}" for group, registry in REGISTRIES.by_group.items() for name in registry.known]


def _names(key: Key) -> set[str]:
    """Return the names under which a key is found: its group, its name, and both together."""
    return {key.group, key.name, f"{key.group}.{key.name.rpartition('.')[2]}"}


def _as_lines(group: str, found: Sequence[Key]) -> str:
    """Return keys of a group as text: for each a line with allowed values, and a line with its meaning."""
    title = f"{group}: {about(group)}" if about(group) else f"{group}.*"
    lines = [f"# {title} ({citation(group)})" if citation(group) else f"# {title}"]
    for key in found:
        default = "" if key.default is None else f"={key.default}"
        lines += [f"{key.name}{default}  [{key.kind}]", f"    {key.meaning}"]
    return "\n".join(lines)
