"""A SLURM for the tests of the job scripts, on this machine or on simulated nodes."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from nodes import Node, skip_without
from processes import REPOSITORY, clean_environment, until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel", "setpriv")
CORES = 16
"""How many cores each node reports, so that jobs never wait for each other."""

PATIENCE_S = 300.0
KILL_WAIT_S = 2
NODE_TIMEOUT_S = 20
"""How long SLURM waits for a node before it takes it for dead."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

# cred_expire is also how long a requeued job waits: two minutes by default, and no less than these 5 s;
# started earlier, it would be taken for ended when its old processes are
CONFIGURATION = """
ClusterName=hpcfl-tests
SlurmctldHost={first.name}({first.address})
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout={node_timeout}
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait={kill_wait}
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = "NodeName={node.name} NodeAddr={node.address} CPUs={cores} CoresPerSocket={cores} State=UNKNOWN\n"


class ThisMachine:
    """This machine as a node."""

    name, address = socket.gethostname().partition(".")[0], "127.0.0.1"

    def command(self, *words: str | Path, cwd: Path = REPOSITORY) -> list[str]:
        """Return the words that run a command here."""
        return ["env", "--chdir", str(cwd), *map(str, words)]


AnyNode = Node | ThisMachine


class DaemonFault(Exception):
    """A daemon does not start."""


class Slurm:
    """A SLURM that runs; `folder` is where its jobs are submitted, with the repository's jobs/ in it.

    The first of its nodes has the controller, and is where jobs are submitted.
    """

    def __init__(self, configuration: Path, folder: Path, nodes: Sequence[AnyNode]) -> None:
        self.folder = folder
        self._configuration, self._nodes = configuration, nodes
        self._daemons: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """Return a clean environment whose SLURM is this one, and whose python runs the tests."""
        clean = clean_environment()
        path = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", os.defpath)])
        return {**clean, "PATH": path, "SLURM_CONF": str(self._configuration)}

    def call(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a program of SLURM's in the submit folder and return what it prints; the test fails with it."""
        found = self.try_call(*words, env=env)
        if found.returncode:
            pytest.fail(f"{words}: exit code {found.returncode}\n{found.stdout}{found.stderr}", pytrace=False)
        return found.stdout

    def try_call(
        self, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._nodes[0].command(*words, cwd=self.folder),
            env={**self.environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def start_daemons(self) -> None:
        """Start all daemons and wait for the nodes; raise DaemonFault where they do not come up."""
        folder = self._configuration.parent
        munge = folder / "munge"
        for name in ("munge", "state"):
            (folder / name).mkdir(mode=0o700)
        (munge / "key").touch(mode=0o600)
        (munge / "key").write_bytes(os.urandom(128))
        of_munge = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        # --force: the folder of the socket is closed to other users, and all jobs here are root's
        munged = ["munged", "--foreground", "--force", f"--socket={munge}/socket", *of_munge]
        self._start(self._nodes[0], munged, (munge / "socket").exists)
        self._start(
            self._nodes[0],
            ["slurmctld", "-D", "-i"],
            lambda: "is UP" in self.try_call("scontrol", "ping").stdout,
        )
        for node in self._nodes:
            self.start_node(node)

    def start_node(self, node: AnyNode) -> None:
        """Start a node's daemon, as after a start of the node, and wait until SLURM has the node."""
        # a PMIx server's files would meet those of other nodes in /tmp
        self._configuration.with_name(f"tmp-{node.name}").mkdir(exist_ok=True)
        self._start(node, ["slurmd", "-D", "-b", "-N", node.name], lambda: self._is_up(node))

    @contextlib.contextmanager
    def drained(self, number: int) -> Iterator[None]:
        """Have no job start on a node, counted from 1, until the block is left."""
        update = ("scontrol", "update", f"NodeName={self._nodes[number - 1].name}")
        self.call(*update, "State=DRAIN", "Reason=test")
        try:
            yield
        finally:
            self.call(*update, "State=RESUME")

    def _is_up(self, node: AnyNode) -> bool:
        words = ("--noheader", f"--nodes={node.name}", "--format=%T")
        state = self.try_call("sinfo", *words).stdout.strip()
        # a star is one that does not answer
        return bool(state) and not state.endswith("*") and not state.startswith(("down", "unk"))

    def _start(self, node: AnyNode, command: list[str], ready: Callable[[], bool]) -> None:
        log = self._configuration.with_name("daemons.log")
        with log.open("ab") as output:
            # with the tests their daemons go, even if these are killed
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *node.command(*command)],
                env={**self.environment(), "PATH": f"{self.environment()['PATH']}:/usr/sbin"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._daemons.append(daemon)
        end_s = time.monotonic() + 30
        while not ready():
            if daemon.poll() is not None or time.monotonic() > end_s:
                end_of_log = " / ".join(log.read_text(errors="replace").splitlines()[-3:])
                raise DaemonFault(f"{command[0]} does not start here: {end_of_log}")
            time.sleep(0.05)

    def kill_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()

    def submit(self, *words: str | Path, **env: str) -> Job:
        """Submit with these words behind `sbatch`; return the job."""
        number = self.call("sbatch", "--parsable", *words, env=env).strip()
        return Job(self, number)


class Job:
    """A job, or a task of an array as `12_1`."""

    def __init__(self, slurm: Slurm, number: str) -> None:
        self._slurm = slurm
        self.number = number

    def task(self, number: int) -> Job:
        return Job(self._slurm, f"{self.number}_{number}")

    def field(self, key: str) -> str:
        """Return a field of `scontrol show job`, such as JobState, Restarts or ExitCode."""
        lines = self._slurm.call("scontrol", "--oneliner", "show", "job", self.number)
        return next(word.partition("=")[2] for word in lines.split() if word.startswith(f"{key}="))

    @property
    def state(self) -> str:
        return self.field("JobState")

    @property
    def exit_code(self) -> int:
        """The batch script's."""
        return int(self.field("ExitCode").partition(":")[0])

    @property
    def output(self) -> str:
        path = Path(self.field("StdOut"))
        return path.read_text() if path.exists() else ""

    def wait(self, *states: str) -> None:
        """Wait until the job has one of these states; without any, until it has ended for good."""
        if states:
            self.until(lambda: self.state in states, " or ".join(states))
        else:
            self.until(self._has_ended, "its end")

    def _has_ended(self) -> bool:
        before = self.state
        if before not in ENDED:
            return False
        # while it is requeued it has failed for a moment
        time.sleep(1.5)
        return self.state == before

    def until(self, true: Callable[[], object], what: str) -> None:
        """Wait until something is true that the job brings about; a failure shows the job."""
        try:
            until(true, f"job {self.number}: {what}", PATIENCE_S)
        except pytest.fail.Exception as failure:
            shown = self._slurm.call("scontrol", "show", "job", self.number)
            pytest.fail(f"{failure}\n{shown}\n{self.output}", pytrace=False)

    def come_back(self, restarts: int) -> None:
        """Wait until the job has been requeued so often. SLURM lets it wait some seconds before it starts."""
        self.until(lambda: self.field("Restarts") == str(restarts), f"requeue {restarts}")

    def wait_for_start(self, number: int) -> None:
        """Wait until the job script runs for the `number`-th time."""
        self.until(lambda: f", start {number} on " in self.output, f"start {number}")


@contextlib.contextmanager
def running_slurm(
    submit_folder: Path, nodes: Sequence[AnyNode] = (ThisMachine(),), binds_cores: bool = False
) -> Iterator[Slurm]:
    """Run a SLURM on nodes until the block is left; skip the test, with the reason, where it cannot be.

    If it binds the ranks of a step to cores, each node has those of this machine.
    """
    skip_without(PROGRAMS, "no SLURM here", "packages slurm-wlm and munge")
    # a socket's path has at most 107 characters, and those of pytest's folders may be longer
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    configuration = folder / "slurm.conf"
    # MPICH names shared memory after the job: what a killed one has left would meet the next of its number
    first_job = random.randrange(1000, 50_000_000)
    text = CONFIGURATION.format(
        first=nodes[0],
        folder=folder,
        ports=_free_ports(),
        first_job=first_job,
        kill_wait=KILL_WAIT_S,
        node_timeout=NODE_TIMEOUT_S,
        task_plugin="task/affinity" if binds_cores else "task/none",
    )
    cores = os.cpu_count() if binds_cores else CORES
    configuration.write_text(text + "".join(NODE.format(node=node, cores=cores) for node in nodes))
    # no test needs control groups; simulated nodes have none mounted, which only version 1 accepts
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    slurm = Slurm(configuration, submit_folder, nodes)
    try:
        try:
            slurm.start_daemons()
        except DaemonFault as fault:
            pytest.skip(str(fault))
        yield slurm
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            slurm.try_call("scancel", "--user=root")
            end_s = time.monotonic() + 3 * KILL_WAIT_S
            while slurm.try_call("squeue", "--noheader").stdout and time.monotonic() < end_s:
                time.sleep(0.2)
        slurm.kill_daemons()
        _kill_all_of(configuration)
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports() -> list[int]:
    """Return two ports that nothing listens on."""
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in (first, second)]


def _kill_all_of(configuration: Path) -> None:
    """Kill what is left of jobs: every process whose environment names this SLURM."""
    wanted = f"SLURM_CONF={configuration}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(path.parent.name) != os.getpid() and wanted in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
