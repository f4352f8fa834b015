"""All processes and ranks that tests start: as new programs, under mpirun, or as copies of this process.

See README.md for which function is for what.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import os
import pty
import resource
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from hpcfl.main import main
from hpcfl.storage.lock import holder

HELPERS = Path(__file__).resolve().parent
REPOSITORY = HELPERS.parents[1]
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "MV2_", "HYDRA", "HYDI_", "SLURM_")

PROGRAMS: dict[str, Callable[[list[str]], int]] = {"hpcfl.main": main, "pytest": pytest.main}
"""Modules that run as a program."""

Mpirun = Callable[..., subprocess.CompletedProcess[str]]
"""What the fixture `mpirun` returns."""

PATIENCE_S, WORLD_S, GONE_WITHIN_S = 120, 600, 10
"""Longest waits: for what a launch does, for a world of many runs, and for dead processes to be gone."""


def clean_environment() -> dict[str, str]:
    """Return this environment without launcher variables, with one thread a rank and PYTHONPATH set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    path = os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def give_up_capabilities() -> None:
    """Let permissions bind root, in this process, as they do users."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) == 0


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let this process's files grow to some bytes only, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _started(
    command: Sequence[str],
    stdout: Any,
    stderr: Any,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[str]:
    """Start a command in a clean environment, with nothing to read."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        cwd=cwd or REPOSITORY,
        env={**clean_environment(), **(env or {})},
    )


def run_tree(
    command: list[str],
    *,
    timeout: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a clean environment; end it with all its descendants when its time is up."""
    process = _started(command, subprocess.PIPE, subprocess.PIPE, cwd, env)
    in_time = True
    try:
        texts = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        in_time = False
        kill_tree(process.pid)
        texts = process.communicate()
    finally:
        if process.returncode is None:
            kill_tree(process.pid)
    return _ended(command, process.returncode if in_time else None, texts, check)


def _ended(
    command: Sequence[str], code: int | None, texts: Sequence[str], check: bool
) -> subprocess.CompletedProcess[str]:
    """Return how a command has ended; the test fails where it did not in time, or not as it should."""
    if code is None or (check and code != 0):
        failure = "no end in time" if code is None else f"exit code {code}"
        pytest.fail("\n".join([f"{failure}: {' '.join(command)}", *texts]), pytrace=False)
    return subprocess.CompletedProcess(command, code, *texts)


def run_forked(
    words: Sequence[str],
    *,
    timeout: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python words` as `run_tree` does, without the seconds of its imports.

    The process is a copy of this one, which has imported most of it.
    """

    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        files = {1: stdout.fileno(), 2: stderr.fileno()}
        child = forked(
            lambda: _be_python(words, cwd or REPOSITORY), files, {**clean_environment(), **(env or {})}
        )
        give_up_s, status = time.monotonic() + timeout, (0, 0)
        while time.monotonic() < give_up_s and not status[0]:
            time.sleep(0.01)
            status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status[1]) if status[0] else None
        if code is None:
            kill_tree(child)
            os.waitpid(child, 0)
        texts = [(stream.seek(0), stream.read())[1] for stream in (stdout, stderr)]
    return _ended(["python", *words], code, texts, check)


def run_ranks(
    mpirun_command: list[str],
    ranks: int,
    *python_args: str | Path,
    timeout: float = 120,
    check: bool = True,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    anew: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `python python_args` under mpirun, as `run_tree` does, without the seconds of each rank's imports.

    mpirun starts small programs, which pass their place in the world on to copies of this process. `anew` has
    each rank start Python itself, as do those of Open MPI, whose place cannot be passed on.
    """
    words = list(map(str, python_args))
    command = [*mpirun_command, "-n", str(ranks), sys.executable]
    if anew or "--oversubscribe" in mpirun_command:
        return run_tree([*command, *words], timeout=timeout, check=check, cwd=cwd, env=env)
    name = f"hpcfl-{os.getpid()}-{time.monotonic_ns()}"
    command += ["-I", "-S", str(HELPERS / "forked_rank.py"), name]
    places: dict[int, socket.socket] = {}
    give_up_s = time.monotonic() + timeout
    with (
        socket.socket(socket.AF_UNIX) as door,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        door.bind("\0" + name)
        door.listen(ranks)
        door.settimeout(0.02)
        launcher = _started(command, stdout, stderr, cwd, env)
        try:
            while launcher.poll() is None and time.monotonic() < give_up_s:
                with contextlib.suppress(TimeoutError):
                    place = door.accept()[0]
                    places[_forked_rank(words, place)] = place
                for child in list(places):
                    _end_as_one(child, places)
            in_time = launcher.poll() is not None
        finally:
            if launcher.poll() is None:
                kill_tree(launcher.pid)
                launcher.wait()
            for child, place in places.items():
                kill_tree(child)
                os.waitpid(child, 0)
                place.close()
        texts = [(stream.seek(0), stream.read())[1] for stream in (stdout, stderr)]
    return _ended([*command, *words], launcher.returncode if in_time else None, texts, check)


def run_in_one_world(
    mpirun_command: list[str],
    ranks: int,
    runs: Mapping[Path, Sequence[str]],
    blocks: Sequence[int] = (),
    *,
    env: Mapping[str, str] | None = None,
    code: int = 0,
) -> None:
    """Run settings, by run folder, one after the other on `ranks` ranks; `blocks` as in world_commands.py.

    All must end with the exit code `code`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "commands.json")
        words = [["--quiet", "--out", str(run), *settings] for run, settings in runs.items()]
        file.write_text(json.dumps(words))
        program = (HELPERS / "world_commands.py", file, *map(str, blocks))
        run_ranks(mpirun_command, ranks, *program, timeout=WORLD_S, cwd=Path(folder), env=env)
        codes = json.loads(Path(folder, "codes0.json").read_text())
    failed = [str(run) for run, found in zip(runs, codes, strict=True) if found != code]
    assert not failed, f"{len(failed)} of {len(runs)} runs did not end with {code}: {failed}"


def _forked_rank(words: Sequence[str], place: socket.socket) -> int:
    """Start a process in the place that a placeholder hands over, and return its id."""
    text, files, *_ = socket.recv_fds(place, 1 << 20, 8)
    while more := place.recv(1 << 20):
        text += more
    numbers, folder, environment = json.loads(text)

    try:
        return forked(lambda: _be_python(words, folder), dict(zip(numbers, files, strict=True)), environment)
    finally:
        for file in files:
            os.close(file)


def _be_python(words: Sequence[str], folder: str | Path) -> None:
    """Do what `python words` does in a folder, in this process; comes back only by an exception."""
    os.chdir(folder)
    # an exit then leaves out what was loaded before: torch's end takes a fifth of a second
    c_library = ctypes.CDLL(None)
    c_library.on_exit(c_library._exit, None)
    # those of this process's own modules, such as wandb's, which waits for its service
    atexit._clear()
    # what pytest has changed: MPICH may crash at the exit of a rank whose launcher is gone, which nobody sees
    faulthandler.disable()
    warnings.resetwarnings()
    for of_python in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", of_python)
    kind, *rest = words
    code: Any = 0
    try:
        if kind == "-m":
            sys.argv = rest
            code = PROGRAMS[rest[0]](rest[1:])
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    atexit._run_exitfuncs()
    if "mpi4py.MPI" in sys.modules:
        sys.modules["mpi4py.MPI"].Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    # C calls at exit what reports the end to the launcher
    c_library.exit(int(code or 0))


def _end_as_one(child: int, places: dict[int, socket.socket]) -> None:
    """End a placeholder with the exit code of its rank, and the rank if its placeholder is gone."""
    place, looks = places[child], select.poll()
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        with contextlib.suppress(BrokenPipeError):
            place.send(str(os.waitstatus_to_exitcode(status)).encode())
    else:
        looks.register(place, select.POLLHUP)
        if not any(event & select.POLLHUP for _, event in looks.poll(0)):
            return
        kill_tree(child)
        os.waitpid(child, 0)
    places.pop(child).close()


def forked(
    program: Callable[[], int | None],
    files: Mapping[int, int] | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Start a copy of this process that does a program as a started one does, and return its id.

    Args:
        program: returns the exit code, or nothing where it is 0; 1 where it raises, which is printed.
        files: this process's open files, by the number that they have there.
        env: the environment there, if another.
    """
    with warnings.catch_warnings():
        # newer Pythons warn of threads; those of linear algebra are idle
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code: Any = 1
    try:
        # out of the way of the numbers that they are to have
        aside = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 200) for number, file in (files or {}).items()}
        for number, file in aside.items():
            os.dup2(file, number)
        # not those that pytest reads
        sys.stdout, sys.stderr = (open(number, "w", 1, closefd=False) for number in (1, 2))  # noqa: SIM115
        if env is not None:
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
        os._exit(code if isinstance(code, int) else int(code is not None))


def exit_code(child: int) -> int:
    """Wait for the end of a forked process and return its exit code; that of a signal is negative."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_on_terminal(program: Callable[[], int]) -> tuple[int, int]:
    """Start a program as `forked` does, on a terminal 80 wide; return its id and where to read it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**clean_environment(), "TERM": "xterm"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    child = forked(program, {1: follower, 2: follower}, environment)
    os.close(follower)
    return child, leader


def read_all(leader: int) -> str:
    """Read a terminal until its program has ended."""
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


def until(true: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait until something is true; the test fails when it takes too long."""
    end_s = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > end_s:
            pytest.fail(f"{what}: not after {patience_s:.0f} s", pytrace=False)
        time.sleep(0.2)


def kill_tree(pid: int) -> None:
    """Kill a process and all that descend from it; launchers put ranks into sessions of their own."""
    tasks = Path(f"/proc/{pid}/task")
    children = [int(child) for file in tasks.glob("*/children") for child in file.read_text().split()]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(child)


class Launch:
    """A run under mpirun in the background."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._folder, self._metrics = folder, folder / "metrics.csv"
        self._metrics.unlink(missing_ok=True)
        self.process = _started(command, subprocess.PIPE, subprocess.STDOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what is left of it."""
        for pid in (self.process.pid, *self.pids()):
            kill_tree(pid)
        self.process.communicate()

    def wait_for_rounds(self, count: int) -> None:
        """Wait until metrics.csv has at least `count` rows; the run must not end before."""
        self._wait_until(lambda: self.rows() >= count, f"{count} rounds")

    def wait_for(self, mark: Path) -> None:
        """Wait until an injected fault has created its mark; the run must not end before."""
        self._wait_until(mark.exists, mark.name)

    def _wait_until(self, has_come: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not has_come():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"{what} did not come in {self.rows()} rounds:\n{self.end()}")
            time.sleep(0.01)

    def end(self) -> str:
        """Wait until all processes that write to the terminal have ended and return what was printed."""
        try:
            printed = self.process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            left = self.pids()
            pytest.fail(f"no end after {PATIENCE_S} s, left are {left}:\n{self.process.communicate()[0]}")
        # Open MPI's mpirun warns if a shell that it has started was quicker than it
        return "".join(line for line in printed.splitlines(True) if "plm:rsh: Warning: setpgid(" not in line)

    def pids(self) -> list[int]:
        """Return all processes that have the run folder in their command line, mpirun and ranks."""
        processes = psutil.process_iter(["cmdline"])
        return [one.pid for one in processes if str(self._folder) in (one.info["cmdline"] or ())]

    def is_gone(self) -> bool:
        """Whether none of its processes is left a few seconds from now: dying takes a moment."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        # one that dies has lost its command line before it loses its lock
        while self._is_running() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return not self._is_running()

    def _is_running(self) -> bool:
        _, is_held = holder(self._folder)
        return bool(self.pids() or is_held)

    def rows(self) -> int:
        return self._metrics.read_text().count("\n") - 1 if self._metrics.exists() else 0
