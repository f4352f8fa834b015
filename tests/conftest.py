"""Fixtures of all tests: launches under mpirun, and the world the tests themselves run in."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcfl import own_code
from hpcfl.communication.world import World, open_world
from hpcfl.data.partitions import PARTITIONS
from hpcfl.data.sources import SOURCES
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.models import MODELS

# A shell that starts the tests in the background has them, and all that they start, ignore it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parents[1]
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "MV2_", "HYDRA", "HYDI_", "SLURM_")

QUICK = {
    f"test_{name}"
    for name in (
        *("checkpoint", "client_files", "config", "figures", "file", "hypernetworks", "ledger", "lock"),
        *("messages", "modular", "parameters", "partitions", "properties", "randomness", "rooms", "shard"),
        *("curves", "sources", "stopping", "view"),
    )
}
"""Files whose tests take under a second each, for `-m quick`."""


LONGEST = [
    f"test_{name}"
    for name in (
        *("bits", "readme", "unseen", "paper_figures", "process_faults", "take_away", "resume", "methods"),
        *("table", "under_mpirun", "sharded_runs", "divergence", "bench", "fedmn", "fedafk"),
    )
]
"""Files that take a worker of jobs/test.sh half a minute and more: none of them may be the last to start."""


RANKS_PATIENCE_S = 600.0

Mpirun = Callable[..., subprocess.CompletedProcess[str]]
"""What the fixture `mpirun` returns."""


def in_mpi_world() -> bool:
    """Return whether a launcher of several ranks started this process."""
    sizes = [os.environ[name] for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in os.environ]
    if not sizes and "PMIX_RANK" in os.environ:
        return open_world().size > 1
    return any(int(size) > 1 for size in sizes)


def clean_environment() -> dict[str, str]:
    """Return this environment without launcher variables, with one thread a rank and PYTHONPATH set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 torch's default type for a test."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_code_forgotten() -> Iterator[None]:
    """Forget what a test adds in files of its own."""
    with forgetting_own_code():
        yield


@contextlib.contextmanager
def forgetting_own_code() -> Iterator[None]:
    """Forget in the end what is added inside in files of one's own."""
    registries: list[dict[str, Any]] = [METHODS, MODELS, PARTITIONS, SOURCES]
    known, modules = [dict(registry) for registry in registries], set(sys.modules)
    added, allowed = set(own_code._added), set(own_code._allowed)
    try:
        yield
    finally:
        for registry, before in zip(registries, known, strict=True):
            registry.clear()
            registry.update(before)
        own_code._added.intersection_update(added)
        own_code._allowed.intersection_update(allowed)
        for name in set(sys.modules) - modules:
            if name.startswith(own_code.OWN_MODULE):
                del sys.modules[name]


@pytest.fixture(scope="session")
def world() -> World:
    """Return the world the test session runs in: one rank, or those of the mpirun around pytest."""
    return open_world()


@pytest.fixture(scope="session")
def mpirun_command() -> list[str]:
    """Return mpirun with the flags it needs here; skip where there is none, or inside an MPI world."""
    if in_mpi_world():
        pytest.skip("an MPI world cannot start another one")
    beside_python = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside_python) if beside_python.exists() else shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun beside python or on PATH")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version:
        return [mpirun]
    return [mpirun, "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]


@pytest.fixture
def mpirun(mpirun_command: list[str]) -> Mpirun:
    """Return a function that runs Python under mpirun and returns what it printed."""

    def run(
        ranks: int,
        *python_args: str | Path,
        timeout: float = 120,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python python_args` on `ranks` ranks.

        The test fails after `timeout` seconds, and, with `check`, at an exit code other than 0. `env` is
        added to the clean environment; `cwd` is the repository root by default.
        """
        command = [*mpirun_command, "-n", str(ranks), sys.executable, *map(str, python_args)]
        return run_tree(command, timeout=timeout, check=check, cwd=cwd, env=env)

    return run


def run_tree(
    command: list[str],
    *,
    timeout: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean environment; end it with all its descendants when its time is up."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or REPOSITORY,
        env={**clean_environment(), **(env or {})},
    )
    failure = None
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        if check and process.returncode != 0:
            failure = f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        failure = f"no end after {timeout} s"
        kill_tree(process.pid)
        stdout, stderr = process.communicate()
    finally:
        if process.returncode is None:
            kill_tree(process.pid)
    if failure:
        pytest.fail(f"{failure}: {' '.join(command)}\n{stdout}\n{stderr}", pytrace=False)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def run_forked(
    words: Sequence[str],
    *,
    timeout: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m hpcfl.main words` as `run_tree` does, without the seconds of its imports.

    The process is a copy of this one, which has imported all of it.
    """

    def program() -> int:
        os.chdir(cwd or REPOSITORY)
        sys.argv = ["hpcfl", *words]
        return main(list(words))

    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        files = {1: stdout.fileno(), 2: stderr.fileno()}
        child = _forked(program, files, {**clean_environment(), **(env or {})})
        give_up_s, status = time.monotonic() + timeout, (0, 0)
        while time.monotonic() < give_up_s and not status[0]:
            time.sleep(0.01)
            status = os.waitpid(child, os.WNOHANG)
        if not status[0]:
            kill_tree(child)
            os.waitpid(child, 0)
        texts = [(stream.seek(0), stream.read())[1] for stream in (stdout, stderr)]
    done = subprocess.CompletedProcess(
        ["hpcfl", *words], os.waitstatus_to_exitcode(status[1]) if status[0] else -signal.SIGKILL, *texts
    )
    if not status[0] or (check and done.returncode != 0):
        pytest.fail(f"exit code {done.returncode}: {' '.join(done.args)}\n{''.join(texts)}", pytrace=False)
    return done


def run_forked_ranks(mpirun_command: list[str], ranks: int, script: Path, *arguments: str) -> None:
    """Run a script under mpirun, which must end well, without the seconds of each rank's imports.

    mpirun starts small programs, which pass their place in the world on to copies of this process. Open MPI's
    gives no place that could be passed on, and starts the script itself.
    """
    if "--oversubscribe" in mpirun_command:
        command = [*mpirun_command, "-n", str(ranks), sys.executable, str(script), *arguments]
        run_tree(command, timeout=RANKS_PATIENCE_S)
        return

    def program() -> int:
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")
        sys.modules["mpi4py.MPI"].Finalize()
        sys.stdout.flush()
        # the launcher is told of the end by what C calls at an exit
        ctypes.CDLL(None).exit(0)
        return 0

    name = f"hpcfl-{os.getpid()}-{time.monotonic_ns()}"
    stand_in = [sys.executable, "-I", "-S", str(REPOSITORY / "tests" / "forked_rank.py"), name]
    places: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + RANKS_PATIENCE_S
    with socket.socket(socket.AF_UNIX) as door, tempfile.TemporaryFile("w+") as printed:
        door.bind("\0" + name)
        door.listen(ranks)
        door.settimeout(0.02)
        launcher = subprocess.Popen(
            [*mpirun_command, "-n", str(ranks), *stand_in],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=clean_environment(),
        )
        failed = False
        try:
            while launcher.poll() is None and not failed and time.monotonic() < deadline_s:
                with contextlib.suppress(TimeoutError):
                    place = door.accept()[0]
                    places[_forked_rank(program, place)] = place
                for child in list(places):
                    if (status := os.waitpid(child, os.WNOHANG))[0]:
                        failed = failed or status[1] != 0
                        with places.pop(child) as place, contextlib.suppress(BrokenPipeError):
                            place.send(b"1" if status[1] else b"0")
        finally:
            # those left wait for ranks that are gone, and hold what the launcher reads to its end
            for child, place in places.items():
                kill_tree(child)
                os.waitpid(child, 0)
                place.close()
            try:
                code = launcher.wait(timeout=20 if failed else 1)
            except subprocess.TimeoutExpired:
                kill_tree(launcher.pid)
                code = launcher.wait()
        if failed or code != 0:
            printed.seek(0)
            pytest.fail(f"exit code {code}: {ranks} ranks, {script} {arguments}\n{printed.read()}", False)


def _forked_rank(program: Callable[[], int], place: socket.socket) -> int:
    """Start a process in the place that a stand-in passes on, and return its id."""
    text, files, *_ = socket.recv_fds(place, 1 << 20, 8)
    while more := place.recv(1 << 20):
        text += more
    numbers, environment = json.loads(text)
    try:
        return _forked(program, dict(zip(numbers, files, strict=True)), environment)
    finally:
        for file in files:
            os.close(file)


def _forked(program: Callable[[], int], files: Mapping[int, int], env: Mapping[str, str]) -> int:
    """Start a copy of this process that does a program as a started one does, and return its id.

    `files` are this process's open files, by the number that they have there.
    """
    with warnings.catch_warnings():
        # of threads, which newer Pythons warn of: those of linear algebra are idle
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        # out of the way of the numbers that they are to have
        aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 200) for number, file in files.items()}
        for number, file in aside.items():
            os.dup2(file, number)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(env)
        code = program()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def read_all(leader: int) -> str:
    """Read a terminal until its program has left."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:
            part = b""
        if not part:
            os.close(leader)
            return b"".join(parts).decode()
        parts.append(part)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it; launchers put ranks into sessions of their own."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for file in tasks.glob("*/children") for child in file.read_text().split()]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(child)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring the longest files to the front and mark quick tests.

    Soak tests are left out unless `-m` names them; in an MPI world, tests that are not collective are left to
    a world of one rank.
    """
    if "soak" not in config.option.markexpr:
        soak = [item for item in items if item.get_closest_marker("soak")]
        items[:] = [item for item in items if item not in soak]
        config.hook.pytest_deselected(items=soak)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    alone = pytest.mark.skip(reason="not collective: a plain pytest runs it")
    for item in items:
        starts_ranks = {"mpirun", "mpirun_command"} & set(getattr(item, "fixturenames", ()))
        if item.path.stem in QUICK and not starts_ranks:
            item.add_marker("quick")
        if in_mpi_world() and item.get_closest_marker("mpi") is None:
            item.add_marker(alone)


def pytest_exception_interact(node: pytest.Item, report: Any) -> None:
    """Show a failure on one of several ranks and end them all: the others would wait for this one."""
    if in_mpi_world() and (world := open_world()).size > 1:
        reporter = node.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nrank {world.rank} of {world.size}: {node.nodeid}\n{report.longreprtext}")
        reporter.flush()
        world.abort(1)
