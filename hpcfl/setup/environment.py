"""On what a run runs, as config.yaml records it beside the configuration."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from typing import Any

from hpcfl import __version__
from hpcfl.machine import package_versions, processor
from hpcfl.storage.slurm import job

_PACKAGES = ("torch", "torchvision", "numpy", "h5py", "mpi4py", "scikit-learn")


def environment_of(samples: int, ranks: Sequence[str], command: str) -> dict[str, Any]:
    """Return what config.yaml records of a run's environment.

    Args:
        samples: a checksum of all samples.
        ranks: host, device and engine of each rank.
        command: what was typed to start the run.
    """
    # keep type of device and engine of each "host device engine"; rank 0 trains only if it is alone
    workers = {re.sub(r"^\S+ (\w+)\S*", r"\1", rank) for rank in ranks[1:] or ranks}
    return {
        "hpcfl": __version__,
        **package_versions(_PACKAGES),
        "python": platform.python_version(),
        "processor": processor(),
        "command": command,
        **({"job": started_by} if (started_by := job()) else {}),
        "samples": f"{samples:08x}",
        "workers": ", ".join(sorted(workers)),
        "ranks": list(ranks),
    }
