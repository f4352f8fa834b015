"""System information: package versions, the processor, and the memory of the node or of the job."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path("/")

_LIMITS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Linux control groups (cgroup versions 2 and 1) limit the memory of a group of processes, such as a job."""
_RECLAIMABLE = ("inactive_file", "active_file")
"""Cached files: the kernel frees them when the group needs memory."""


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the version of each package, "not installed" for those that are not there."""
    return {package: _version(package) for package in packages}


@cache
def _version(package: str) -> str:
    if package == "torch":
        import torch

        # names the build, such as +cpu, which the metadata of some wheels leave out
        return str(torch.__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """Return the CPU's model name, or the architecture if the system does not report it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def memory_bytes(root: Path = ROOT) -> float:
    """Return the memory of this node, or of its job if that is less; infinite if unknown."""
    return min([_meminfo(root, "MemTotal"), *(limit for limit, _ in _limits(root))])


def free_bytes(root: Path = ROOT) -> float:
    """Return the memory that is free on this node, or for its job; infinite if unknown."""
    return min([_meminfo(root, "MemAvailable"), *(limit - used for limit, used in _limits(root))])


def peak_bytes() -> int:
    """Return the peak memory of this process; 0 if unknown."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _meminfo(root: Path, name: str) -> float:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return math.inf


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of the control groups of this process, from all levels."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for own in {line.split(":", 2)[2].strip("/") for line in lines}:
        for place, limit, used, kind in _LIMITS:
            for level in (Path(own), *Path(own).parents):
                folder = root / place / level
                # without a limit, version 2 has the word max here
                try:
                    yield int((folder / limit).read_text()), _used(folder, used, kind)
                except (OSError, ValueError):
                    continue


def _used(folder: Path, used: str, kind: str) -> int:
    count, stat = int((folder / used).read_text()), folder / "memory.stat"
    lines = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    return count - sum(int(lines.get(kind + name, 0)) for name in _RECLAIMABLE)
