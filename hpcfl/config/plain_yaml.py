"""YAML as configurations need it, and no more: what a few bytes can blow up is refused before it is made."""

from __future__ import annotations

from collections import Counter
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

MOST_BYTES = 2**20
"""Of a file."""
MOST_VALUES = 20_000
"""Keys and values, those that aliases repeat counted as often as they stand there."""
MOST_DEPTH = 20
MOST_DIGITS = 100


def plain_yaml(text: str) -> Any:
    """Return what `yaml.safe_load` does; libyaml, where it is there, takes a tab for a blank, too.

    Raises:
        yaml.YAMLError, ValueError: it is not YAML, or has a directive, more values than MOST_VALUES, deeper
            ones than MOST_DEPTH, a key twice, or a number that no machine has.
    """
    # many of them take a parser minutes, and no configuration has any
    if any(line.startswith("%") for line in text.splitlines()):
        raise ValueError("a line that begins with %, a directive, which no configuration needs")
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    # what SafeLoader's own makers of values raise has no common base
    except (AttributeError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"a value that is none of its kind ({error})") from error
    finally:
        loader.dispose()


class _Loader(Composer, SafeConstructor, Resolver):
    """Makes what yaml.SafeLoader makes, and counts what a text stands for as it is read."""

    def __init__(self, text: str) -> None:
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        # the one in C, where there is one, is ten times as fast: a table reads the records of all its cells
        self._parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        self.check_event, self.get_event = self._parser.check_event, self._parser.get_event
        self.peek_event, self.dispose = self._parser.peek_event, self._parser.dispose
        self._made, self._depth = 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node; ValueError where it makes the text too large."""
        self._made += 1
        self._depth += 1
        if self._made > MOST_VALUES:
            raise ValueError(_TOO_MANY)
        if self._depth > MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and self._size(node)[1] > MOST_DEPTH:
            raise ValueError(_TOO_DEEP)
        return node

    def _size(self, node: yaml.Node, depth: int = 1) -> tuple[int, int]:
        """Return how many values a node stands for, and how deep."""
        if depth > MOST_DEPTH:
            # an alias of what it stands in has no end
            raise ValueError(_TOO_DEEP)
        if node not in self._sizes:
            sizes = [self._size(part, depth + 1) for part in _parts(node)]
            values = 1 + sum(count for count, _ in sizes)
            if values > MOST_VALUES:
                raise ValueError(_TOO_MANY)
            self._sizes[node] = values, 1 + max((height for _, height in sizes), default=0)
        return self._sizes[node]

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a whole number; ValueError where 64 bits do not hold it."""
        number = super().construct_yaml_int(node)
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{_line(node)}: {node.value} is a number beyond 64 bits")
        return number

    yaml_constructors = SafeConstructor.yaml_constructors | {"tag:yaml.org,2002:int": construct_yaml_int}


_TOO_DEEP = f"its values are nested more than {MOST_DEPTH} deep"
_TOO_MANY = f"it has more than {MOST_VALUES} values"


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """Return the keys, values and entries of a node; ValueError for what no configuration has."""
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    if isinstance(node, yaml.MappingNode):
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            raise ValueError(f"{_line(node)}: {twice[0][:MOST_DIGITS]} is there twice; keep one")
        return [part for pair in node.value for part in pair]
    is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if is_number and len(node.value) > MOST_DIGITS:
        raise ValueError(f"{_line(node)}: a number of {len(node.value)} digits")
    return []


def _line(node: yaml.Node) -> str:
    return f"line {node.start_mark.line + 1}"
