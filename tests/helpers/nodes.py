"""Simulated nodes of a cluster on this machine: each has its network, host name, /dev/shm and mounts.

They share all files. Ranks on two nodes communicate over the network, as on a cluster. Each node is an idle
process in its own namespaces; commands enter these. One more namespace, the switch, connects the links of
all nodes, so that the machine's own network is not changed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from processes import REPOSITORY, clean_environment, kill_tree, run_tree

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "setpriv")

# what mpirun calls in place of ssh, as `script [options] HOST words`
REMOTE_SHELL = """#!/usr/bin/env bash
while [[ "$1" == -* ]]; do shift; done
host=$1; shift
nsenter --target "$(cat {folder}/"$host".pid)" --net --uts --ipc --mount -- bash -c "cd {cwd} && $*"
code=$?
# over a link that is cut, nothing reports the end of what ran there
while [[ -e {folder}/"$host".cut ]]; do sleep 0.2; done
exit $code
"""


class Node:
    """One node; `process` is the idle process in its namespaces."""

    def __init__(self, number: int, process: subprocess.Popen[str]) -> None:
        self.number, self.process = number, process
        self.name, self.address = f"n{number}", f"10.77.0.{number}"

    def command(self, *words: str | Path, cwd: Path = REPOSITORY) -> list[str]:
        """Return the command that runs `words` on this node, from anywhere on this machine."""
        inside = f"cd {shlex.quote(str(cwd))} && exec {shlex.join(map(str, words))}"
        return [*_entering(self.process.pid), "bash", "-c", inside]

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a short command on this node."""
        return subprocess.run(self.command(*words), capture_output=True, text=True, check=check, timeout=60)

    def pids(self) -> list[int]:
        """Return all processes on this node except its idle process."""
        own = os.readlink(f"/proc/{self.process.pid}/ns/net")
        found = []
        for link in Path("/proc").glob("[0-9]*/ns/net"):
            with contextlib.suppress(OSError):
                if os.readlink(link) == own:
                    found.append(int(link.parts[2]))
        return [pid for pid in found if pid != self.process.pid]

    @contextlib.contextmanager
    def seeing_empty(self, folder: Path) -> Iterator[None]:
        """Let this node alone see an empty folder in place of another."""
        self.run("mount", "-t", "tmpfs", "tmpfs", folder)
        try:
            yield
        finally:
            self.run("umount", "--lazy", folder)

    def die(self) -> None:
        """Kill all its processes; the other nodes notice it. For a node without power, cut its link."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Nodes:
    """Simulated nodes that are up. `folder` holds the files that they need."""

    def __init__(self, folder: Path, switch: subprocess.Popen[str], nodes: list[Node]) -> None:
        self.folder, self._switch, self.nodes = folder, switch, nodes

    def __getitem__(self, number: int) -> Node:
        """Return node `number`, counted from 1."""
        return self.nodes[number - 1]

    def cut(self, number: int) -> None:
        """Take a node's link down."""
        (self.folder / f"n{number}.cut").touch()
        self._in_switch("ip", "link", "set", f"v{number}", "down")

    def heal(self, number: int) -> None:
        """Bring a node's link up again."""
        self._in_switch("ip", "link", "set", f"v{number}", "up")
        (self.folder / f"n{number}.cut").unlink(missing_ok=True)

    def slow(self, number: int, rate: str) -> None:
        """Limit a node's link, both ways, such as to `100mbit`."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "50ms")
        self._in_switch("tc", "qdisc", "replace", "dev", f"v{number}", *limit)
        self[number].run("tc", "qdisc", "replace", "dev", "e0", *limit)

    def remote_shell(self) -> Path:
        """Return a program that does for these nodes what ssh does: `program HOST words`."""
        script = self.folder / "remote_shell"
        script.write_text(REMOTE_SHELL.format(folder=self.folder, cwd=shlex.quote(str(REPOSITORY))))
        script.chmod(0o700)
        return script

    def mpirun(
        self, mpirun_command: list[str], ranks: int, *python_args: str | Path, on: tuple[int, ...] = ()
    ) -> list[str]:
        """Return the command that starts `python python_args` on the nodes `on` (default: all).

        It runs on the first of them. Ranks are distributed evenly, the first ones to the first node.
        """
        nodes = [self[number] for number in on] or self.nodes
        slots = -(-ranks // len(nodes))
        hosts = ",".join(f"{node.name}:{slots}" for node in nodes)
        shell = str(self.remote_shell())
        if "--oversubscribe" in mpirun_command:
            options = ["--host", hosts, "--mca", "plm_rsh_agent", shell, "--mca", "btl", "tcp,self"]
            options += ["--mca", "btl_tcp_if_include", "e0", "--mca", "oob_tcp_if_include", "e0"]
        else:
            options = ["-launcher", "ssh", "-launcher-exec", shell, "-iface", "e0", "-hosts", hosts]
        command = [*mpirun_command, *options, "-n", str(ranks), sys.executable, *python_args]
        return nodes[0].command(*command)

    def _in_switch(self, *words: str) -> None:
        subprocess.run([*_entering(self._switch.pid, "--net"), *words], check=True, timeout=60)


def skip_without(programs: Sequence[str], what: str, packages: str) -> None:
    """Skip the test, with the reason, where programs are missing, or where this is not root."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{what}: {', '.join(missing)} not found ({packages})")
    if os.geteuid() != 0:
        pytest.skip(f"{what}: only root can do this")


@contextlib.contextmanager
def simulated_nodes(count: int) -> Iterator[Nodes]:
    """Simulate `count` nodes inside the block; skip the test, with the reason, where this is not possible."""
    skip_without(PROGRAMS, "no nodes here", "package iproute2")
    files = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="nodes-"))
    names = [f"n{number}" for number in range(1, count + 1)]
    hosts = "".join(f"10.77.0.{number} n{number}\n" for number in range(1, count + 1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
    idle: list[subprocess.Popen[str]] = []
    nodes: list[Node] = []
    try:
        switch = _start_idle("ip link add br0 type bridge && ip link set br0 up", "--net", idle)
        for number, name in enumerate(names, 1):
            # MPI finds network interfaces in /sys
            prepare = "mount -t sysfs sysfs /sys"
            # a node keeps the files of the tests, though they may be in /dev/shm
            prepare += f" && mount --bind {files} /mnt && mount -t tmpfs tmpfs /dev/shm"
            prepare += f" && mkdir -p {files} && mount --move /mnt {files}"
            prepare += f" && mount --bind {folder}/hosts /etc/hosts"
            # Linux gives up a link that is cut after 13 s, not after a quarter of an hour
            prepare += " && echo 5 > /proc/sys/net/ipv4/tcp_retries2"
            process = _start_idle(
                f"hostname {name} && ip link set lo up && {prepare}", "--net --uts --ipc --mount", idle
            )
            (folder / f"{name}.pid").write_text(str(process.pid))
            nodes.append(Node(number, process))
            link = f"ip link add v{number} type veth peer name e0 netns {process.pid}"
            _enter(switch.pid, f"{link} && ip link set v{number} master br0 up")
            _enter(process.pid, f"ip address add {nodes[-1].address}/24 dev e0 && ip link set e0 up")
        yield Nodes(folder, switch, nodes)
    finally:
        for node in nodes:
            node.die()
        for process in idle:
            kill_tree(process.pid)
            process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def _start_idle(prepare: str, namespaces: str, idle: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Start an idle process in new namespaces that are prepared; skip the test where this is not possible."""
    script = f"{prepare} && echo ready && exec sleep infinity"
    # it ends with the tests, even if they are killed
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces.split(), "bash", "-c", script],
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    idle.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    if line != "ready\n":
        pytest.skip(f"no nodes here: {line.strip()}")
    return process


def _entering(pid: int, namespaces: str = "--net --uts --ipc --mount") -> list[str]:
    return ["nsenter", "--target", str(pid), *namespaces.split(), "--"]


def _enter(pid: int, script: str) -> None:
    run_tree([*_entering(pid, "--net"), "bash", "-c", script], env=_environment())


def _environment() -> Mapping[str, str]:
    clean = clean_environment()
    return {**clean, "PATH": f"{clean.get('PATH', os.defpath)}:/usr/sbin"}
