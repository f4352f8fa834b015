"""Fixtures of all tests: launches under mpirun, and the world the tests themselves run in."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import write_digits
from processes import Mpirun, run_ranks

from hpcfl.communication.communicator import Communicator, abort_with_message, open_world
from hpcfl.config import own_code
from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.methods import METHODS
from hpcfl.models import MODELS
from hpcfl.simulation.stopping import STOP_SIGNALS

# A shell that starts the tests in the background has them, and all that they start, ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

QUICK = {
    f"test_{name}"
    for name in (
        *("checkpoint", "client_files", "config", "figures", "file", "hypernetworks", "ledger", "lock"),
        *("messages", "modular", "parameters", "partitions", "randomness", "layers", "shard"),
        *("sources", "stopping"),
    )
}
"""Files whose tests take under a second each, for `-m quick`."""


LONGEST = [
    f"test_{name}"
    for name in (
        *("docs", "process_faults", "jobs", "bits", "marked_device", "nodes", "resume", "transports"),
        *("methods", "paper_figures", "unseen", "clients", "three_rounds", "table", "faults", "export"),
        *("divergence", "sharded_runs", "slurm_nodes", "page", "kinds", "bench", "under_mpirun", "plan"),
        *("trackers", "configs", "networks", "memory", "hostile", "privacy", "cli", "patience"),
    )
]
"""Files that take a worker of jobs/test.sh ten seconds and more: none of them may be the last to start."""

LEFT_OUT = ("soak", "nodes")
"""Markers of tests that take minutes, and run only where `-m` chooses them."""


TRANSPORTS: dict[str, dict[str, str]] = {
    "shared-memory": {},
    "ucx": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ucx"},
    "ofi": {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi"},
    "openmpi-tcp": {"MPI4PY_MPIABI": "openmpi"},
}
"""By what ranks that tests start talk to each other (`--transport`), with the variables that choose it:
MPICH's shared memory, its two kinds of network, as between nodes, and Open MPI's."""


def in_mpi_world() -> bool:
    """Return whether a launcher of several ranks started this process."""
    sizes = [os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in os.environ]
    if not sizes and "PMIX_RANK" in os.environ:
        return open_world().size > 1
    return any(int(size) > 1 for size in sizes)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file that `tiny_settings` take."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(path)
    return path


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 torch's default type for a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


HANDLERS = {number: signal.getsignal(number) for number in STOP_SIGNALS}


@pytest.fixture(autouse=True)
def signals_handled_as_before() -> Iterator[None]:
    """Undo that the program ignores stop signals when it ends."""
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


@pytest.fixture(autouse=True)
def no_warning_unseen(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test in which the package warns, unless it captures the output or is marked `warns`."""
    yield
    own = {*request.fixturenames} - {"caplog"} | {*signature(request.function).parameters}
    if own & {"capsys", "capfd", "caplog"} or request.node.get_closest_marker("warns"):
        return
    records = [*caplog.get_records("setup"), *caplog.get_records("call")]
    assert [record.getMessage() for record in records if record.name.startswith("hpcfl")] == []


@pytest.fixture(autouse=True)
def own_code_forgotten() -> Iterator[None]:
    """Forget what a test adds in own files, and the classes that it gives to `hpcfl.run`."""
    with forgetting_own_code():
        yield


@contextlib.contextmanager
def forgetting_own_code() -> Iterator[None]:
    """Forget in the end what own files add inside the block."""
    registries: list[dict[str, Any]] = [METHODS, MODELS, PARTITIONS, SOURCES]
    known, modules = [dict(registry) for registry in registries], set(sys.modules)
    added, allowed, classes = dict(own_code._added), dict(own_code._allowed), dict(own_code._classes)
    try:
        yield
    finally:
        for registry, before in zip(registries, known, strict=True):
            registry.clear()
            registry.update(before)
        own_code._added.clear()
        own_code._added.update(added)
        own_code._classes.clear()
        own_code._classes.update(classes)
        own_code._allowed.clear()
        own_code._allowed.update(allowed)
        for name in set(sys.modules) - modules:
            if name.startswith(own_code.OWN_MODULE):
                del sys.modules[name]


@pytest.fixture(scope="session")
def world() -> Communicator:
    """Return the world the test session runs in: one rank, or those of the mpirun around pytest."""
    return open_world()


@pytest.fixture(scope="session")
def mpirun_command(pytestconfig: pytest.Config) -> list[str]:
    """Return mpirun with the flags it needs here; skip where there is none, or inside an MPI world."""
    if in_mpi_world():
        pytest.skip("an MPI world cannot start another one")
    if pytestconfig.option.transport == "openmpi-tcp":
        return [*openmpi_command(), "--mca", "btl", "tcp,self"]
    beside_python = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun beside python or on PATH")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    return [mpirun, *OPENMPI_FLAGS] if "Open MPI" in version else [mpirun]


OPENMPI_FLAGS = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


def openmpi_command() -> list[str]:
    """Return the mpirun of the distribution's Open MPI, with its flags; skip where there is none.

    Its ranks need `TRANSPORTS["openmpi-tcp"]` in their environment.
    """
    mpirun = shutil.which("mpirun.openmpi")
    if mpirun is None:
        pytest.skip("no Open MPI here (packages openmpi-bin and libopenmpi-dev)")
    return [mpirun, *OPENMPI_FLAGS]


@pytest.fixture
def mpirun(mpirun_command: list[str]) -> Mpirun:
    """Return `run_ranks` for the mpirun that there is: it takes a number of ranks and Python's words."""
    return functools.partial(run_ranks, mpirun_command)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "by what ranks that tests start talk to each other (default: shared-memory)"
    parser.addoption("--transport", choices=TRANSPORTS, default="shared-memory", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the transport of ranks that tests start.

    Each of several ranks gets a folder of its own for files: pytest's are tidied up by all at once.
    """
    os.environ.update(TRANSPORTS[config.option.transport])
    # ranks are copies of this process, and the threads of OpenMP are not copied
    torch.set_num_threads(1)
    if in_mpi_world():
        folder = tempfile.TemporaryDirectory(prefix="hpcfl-rank-")
        config.add_cleanup(folder.cleanup)
        config.option.basetemp = Path(folder.name) / "pytest"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the longest files to the front and mark quick tests.

    Tests with a marker of LEFT_OUT are left out unless `-m` names it; in an MPI world, tests that are not
    collective are left to a world of one rank.
    """
    for marker in LEFT_OUT:
        if marker not in config.option.markexpr:
            left_out = [item for item in items if item.get_closest_marker(marker)]
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    alone = pytest.mark.skip(reason="not collective: a plain pytest runs it")
    for item in items:
        starts_ranks = {"mpirun", "mpirun_command"} & set(getattr(item, "fixturenames", ()))
        if item.path.stem in QUICK and not starts_ranks:
            item.add_marker("quick")
        if in_mpi_world() and item.get_closest_marker("mpi") is None:
            item.add_marker(alone)


def pytest_collection_finish() -> None:
    """Leave what is there by now out of garbage collections: half of their time would go to it."""
    gc.freeze()


def pytest_exception_interact(node: pytest.Item, report: Any) -> None:
    """Show a failure on one of several ranks and end them all: the others would wait for this one."""
    if in_mpi_world() and (world := open_world()).size > 1:
        reporter = node.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nrank {world.rank} of {world.size}: {node.nodeid}\n{report.longreprtext}")
        reporter.flush()
        abort_with_message(world, "", 1)
