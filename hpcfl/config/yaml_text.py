"""Read and write YAML texts: configurations, tables, records of runs."""

from __future__ import annotations

from typing import Any

import yaml

# those in C, if installed, are several times as fast: a table reads the records of all its cells
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SafeLoader):
    """Makes plain values, runs no code, and refuses duplicate keys and values that hold themselves."""

    def construct_object(self, node: yaml.Node, deep: bool = True) -> Any:
        # only a value whose parts are made at once is found to hold itself
        return super().construct_object(node, deep=True)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise ValueError(f"line {key.start_mark.line + 1}: duplicate key {key.value}; keep one")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML text; ValueError for any error of the parser."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ValueError(_what_is_wrong(error, text)) from error
    except RecursionError as error:
        raise ValueError("too many values inside each other") from error
    except Exception as error:
        raise ValueError(" ".join(str(error).replace('in "<unicode string>", ', "").split())) from error


def _what_is_wrong(error: yaml.MarkedYAMLError, text: str) -> str:
    """Return an error with its line, and that of what the parser was reading."""
    found, of_context = error.problem or "", ""
    if (mark := error.problem_mark) is None:
        return found
    line = text.splitlines()[mark.line : mark.line + 1]
    if line and line[0][mark.column : mark.column + 1] == "\t":
        return f"line {mark.line + 1}: a tab; indent with spaces"
    if error.context is not None and (start := error.context_mark) is not None:
        of_context = f" ({error.context} from line {start.line + 1}, column {start.column + 1})"
    return f"line {mark.line + 1}, column {mark.column + 1}: {found}{of_context}"


def yaml_of(values: dict[str, Any]) -> str:
    """Return the YAML text of plain values, in their order."""
    return str(yaml.dump(values, Dumper=_SafeDumper, sort_keys=False))
