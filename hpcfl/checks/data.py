"""The data of a configuration, as every rank reads it."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from hpcfl.checks.finding import Checked, gathered
from hpcfl.communication.communicator import Communicator
from hpcfl.config import Config
from hpcfl.errors import UserError
from hpcfl.setup.experiment import load_data


def check_data(world: Communicator, config: Config) -> Checked:
    """Read the data on every rank. Collective; says something on rank 0."""
    told = gathered(world, {"host": world.host, **_read(config)})
    checked = Checked()
    for rank, found in enumerate(told):
        if "error" in found:
            # on one rank of many it is its node that lacks something
            where = "" if all("error" in other for other in told) else f"rank {rank} on {found['host']}: "
            checked.error(f"{where}{found['error']}")
            return checked
    for rank, found in enumerate(told):
        if found["digest"] != told[0]["digest"]:
            checked.error(
                f"rank {rank} on {found['host']} reads other samples than rank 0: copy the same files to "
                "every node, or put them on a file system that all share"
            )
            return checked
    if told:
        first = told[0]
        checked.lines.append(
            f"data: {config.data.source}: {first['samples']} samples of {first['classes']} classes for "
            f"{first['clients']} clients"
        )
    return checked


def _read(config: Config) -> dict[str, Any]:
    try:
        arrays, parts = load_data(config)
    except UserError as error:
        return {"error": str(error)}
    digest = zlib.crc32(np.ascontiguousarray(arrays.y).tobytes(), zlib.crc32(str(arrays.x.shape).encode()))
    digest = zlib.crc32(np.ascontiguousarray(arrays.x[:: max(1, len(arrays.x) // 100)]).tobytes(), digest)
    return {
        "samples": len(arrays.y),
        "classes": arrays.num_classes,
        "clients": len(parts),
        "digest": digest,
    }
