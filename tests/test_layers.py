"""Layers of the package: imports are from lower layers, without cycles; some libraries have few importers."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import REPOSITORY

PACKAGE = REPOSITORY / "hpcfl"

LAYERS = [
    ["__main__"],
    ["api", "main"],
    ["commands"],
    ["benchmarks", "checks"],
    ["report"],
    ["tables"],
    ["planning", "results"],
    ["simulation"],
    ["terminal"],
    ["setup"],
    ["registries"],
    ["methods"],
    ["storage"],
    ["privacy", "training"],
    ["communication", "data", "models"],
    ["parameters", "samples", "torchvision_parts"],
    ["config"],
    ["randomness"],
    ["errors", "formatting", "machine"],
]
"""From the top; a part imports from lower layers and from itself, not from others of its layer."""

LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
IMPORTERS = {"mpi4py": "communication/communicator.py", "h5py": "storage/hdf5.py"}
IMPORTERS |= {"matplotlib": "tables/drawing.py"}
"""Which file imports a library."""

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imported(path: Path) -> list[str]:
    """Return the modules that a file imports, at its top or inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found += [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return found


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_file_is_in_a_layer() -> None:
    assert {part_of(path) for path in FILES} == {*LEVEL, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_from_lower_layers(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":
        return
    for module in imported(path):
        package, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if package == "hpcfl" and other in LEVEL:
            assert other == own or LEVEL[other] > LEVEL[own], f"{own} imports {module}"


def test_no_file_imports_itself_through_others() -> None:
    names = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in FILES}
    # raises CycleError, which names the files
    TopologicalSorter({name: names.keys() & set(imported(path)) for name, path in names.items()}).prepare()


def test_only_set_up_and_the_run_folder_take_the_whole_configuration() -> None:
    """Below set-up, and in rounds, functions take the group of keys that they use."""
    below = {part for part, level in LEVEL.items() if level > LEVEL["setup"]}
    parts = below - {"config", "registries"} | {"simulation"}
    takers = [path for path in FILES if "hpcfl.config.keys.Config" in imported(path)]
    found = [str(path.relative_to(PACKAGE)) for path in takers if part_of(path) in parts]
    assert found == ["storage/runfolder.py"]


@pytest.mark.parametrize("library", IMPORTERS)
def test_a_library_is_imported_only_by_its_file(library: str) -> None:
    found = [path for path in FILES if any(module.partition(".")[0] == library for module in imported(path))]
    assert [str(path.relative_to(PACKAGE)) for path in found] == [IMPORTERS[library]]
