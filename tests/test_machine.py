"""Memory that a process may take: the node's, and the limit of the control groups of its job."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hpcfl.machine import free_bytes, memory_bytes, package_versions, processor

NODE = {"proc/meminfo": "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\n"}
JOB = "sys/fs/cgroup/slurm/job_7"
VERSION_2 = {
    "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
    # a step has no limit of its own
    f"{JOB}/step_0/memory.max": "max\n",
    f"{JOB}/step_0/memory.current": "50000\n",
    f"{JOB}/step_0/memory.stat": "anon 1\n",
    f"{JOB}/memory.max": "500000\n",
    f"{JOB}/memory.current": "300000\n",
    # 80,000 bytes of files make room where others need it
    f"{JOB}/memory.stat": "anon 200000\nfile 100000\ninactive_file 50000\nactive_file 30000\n",
}
OLD_JOB = "sys/fs/cgroup/memory/slurm"
VERSION_1 = {
    "proc/self/cgroup": "4:memory:/slurm\n1:cpu:/\n",
    f"{OLD_JOB}/memory.limit_in_bytes": "900000\n",
    f"{OLD_JOB}/memory.usage_in_bytes": "400000\n",
    f"{OLD_JOB}/memory.stat": "inactive_file 1\ntotal_inactive_file 10000\ntotal_active_file 0\n",
    # as where there is no limit
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
}


@pytest.mark.parametrize(
    ("files", "memory", "free"),
    [
        ({}, math.inf, math.inf),
        (NODE, 1_024_000, 614_400),
        (NODE | VERSION_2, 500_000, 280_000),
        (VERSION_2, 500_000, 280_000),
        ({name: text for name, text in VERSION_2.items() if "stat" not in name}, 500_000, 200_000),
        (NODE | VERSION_1, 900_000, 510_000),
    ],
    ids=["unknown", "node", "version 2", "version 2 alone", "no statistics", "version 1"],
)
def test_memory_is_of_node_or_job(tmp_path: Path, files: dict[str, str], memory: float, free: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (memory_bytes(tmp_path), free_bytes(tmp_path)) == (memory, free)


def test_this_machine_has_memory_a_processor_and_packages() -> None:
    assert 0 < free_bytes() <= memory_bytes()
    assert processor()
    found = package_versions(["torch", "no-such-package"])
    assert found["torch"][0].isdecimal()
    assert found["no-such-package"] == "not installed"
