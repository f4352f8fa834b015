"""Read and write YAML texts: configurations, tables, records of runs."""

from __future__ import annotations

from typing import Any

import yaml

# those in C, if installed, are several times as fast: a table reads the records of all its cells
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SafeDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_SafeLoader):
    """Makes plain values, runs no code, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise ValueError(f"line {node.start_mark.line + 1}: duplicate key {key}; keep one")
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML text; ValueError for any error of the parser."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:
        raise ValueError(" ".join(str(error).replace('in "<unicode string>", ', "").split())) from error


def yaml_of(values: dict[str, Any]) -> str:
    """Return the YAML text of plain values, in their order."""
    return str(yaml.dump(values, Dumper=_SafeDumper, sort_keys=False))
