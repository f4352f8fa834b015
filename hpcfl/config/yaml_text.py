"""Read YAML texts: configurations, tables, records of runs."""

from __future__ import annotations

from typing import Any

import yaml

# the loader in C, if installed, is ten times as fast: a table reads the records of all its cells
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """Makes plain values, runs no code, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise ValueError(f"line {node.start_mark.line + 1}: {key} is there twice; keep one")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML text; ValueError for any error of the parser."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:
        raise ValueError(" ".join(str(error).replace('in "<unicode string>", ', "").split())) from error
