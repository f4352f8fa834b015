"""The package's rooms: imports go down the list and not in circles, and some libraries have one door each."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from processes import REPOSITORY

PACKAGE = REPOSITORY / "hpcfl"

ROOMS = [
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
"""From the top; a room imports from those below it and from itself, not from those beside it."""

LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
DOORS = {
    "mpi4py": ["communication/communicator.py"],
    "h5py": ["storage/hdf5.py"],
    "matplotlib": ["tables/drawing.py"],
}
"""Which files import a library."""

FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def imported(path: Path) -> list[str]:
    """Return the modules that a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found += [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_file_has_a_room() -> None:
    assert {room_of(path) for path in FILES} == {*LEVEL, "__init__"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = room_of(path)
    if own == "__init__":
        return
    for module in imported(path):
        package, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if package == "hpcfl" and other in LEVEL:
            assert other == own or LEVEL[other] > LEVEL[own], f"{own} imports {module}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    names = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in FILES}
    # raises CycleError, which names the files
    TopologicalSorter({name: names.keys() & set(imported(path)) for name, path in names.items()}).prepare()


def test_a_whole_config_ends_in_set_up_and_in_the_run_folder() -> None:
    """Below set-up, and in rounds, functions take the group of keys that they use."""
    below = {room for room, level in LEVEL.items() if level > LEVEL["setup"]}
    rooms = below - {"config", "registries"} | {"simulation"}
    takers = [path for path in FILES if "hpcfl.config.keys.Config" in imported(path)]
    found = [str(path.relative_to(PACKAGE)) for path in takers if room_of(path) in rooms]
    assert found == ["storage/runfolder.py"]


@pytest.mark.parametrize("library", DOORS)
def test_a_library_has_its_doors(library: str) -> None:
    found = [path for path in FILES if any(module.partition(".")[0] == library for module in imported(path))]
    assert [str(path.relative_to(PACKAGE)) for path in found] == DOORS[library]
