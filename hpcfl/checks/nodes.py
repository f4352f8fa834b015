"""What all ranks must have alike: versions, settings, data and their division among clients."""

from __future__ import annotations

import platform
from collections.abc import Mapping

from hpcfl import __version__
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import OWN_KEYS, Config, digest_key, flatten
from hpcfl.errors import UserError
from hpcfl.machine import package_versions

_NAMES_OF_FILES = (*OWN_KEYS, "data.path", "data.root", "data.source")
"""Keys that name what nodes may have in different places; its content is compared."""


def numeric_versions() -> dict[str, str]:
    """Return the versions of this rank's software on which the bits of a run depend."""
    return {
        "hpcfl": __version__,
        "python": platform.python_version(),
        **package_versions(("torch", "numpy")),
    }


def check_same_versions(world: Communicator, versions: Mapping[str, str]) -> None:
    """Raise UserError on all ranks unless all have the versions of rank 0. Collective."""
    ranks = world.all_gather([world.host, versions])
    expected = ranks[0][1]
    for rank, (host, found) in enumerate(ranks):
        other = [
            f"{name} {version} (rank 0: {expected[name]})"
            for name, version in found.items()
            if version != expected[name]
        ]
        if other:
            these = ", ".join(other)
            raise UserError(f"rank {rank} on {host} has {these}: activate the same environment on every node")


def check_same_settings(world: Communicator, config: Config) -> None:
    """Raise UserError on all ranks unless all have the same settings and files of the user's own.
    Collective."""
    own = {key: value for key, value in flatten(config.tree()).items() if key not in _NAMES_OF_FILES}
    digests = {*map(digest_key, OWN_KEYS)}
    found = world.all_gather(own)
    for rank, other in enumerate(found):
        for key in found[0] | other:
            if other.get(key) == found[0].get(key):
                continue
            if key in digests:
                raise UserError(
                    f"{' or '.join(config.own_code)} differs between ranks; copy the file to "
                    "every node, or put it on a file system that all share"
                )
            raise UserError(
                f"rank {rank} has {key}={other.get(key)}, and rank 0 {found[0].get(key)}: give all ranks "
                "the same settings, such as random ones drawn from the same seed"
            )


def check_same_data(world: Communicator, digest: int) -> None:
    """Raise UserError on all ranks unless all have read the same data. Collective."""
    digests = world.all_gather(digest)
    other = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if other is not None:
        raise UserError(
            f"rank {other} has read other data than rank 0: copy the same files to every node, or put them "
            "on a file system that all share; a data set of hpcfl.run must be the same on every rank"
        )


def check_same_partition(world: Communicator, digest: int) -> None:
    """Raise UserError on all ranks unless all have divided the samples alike. Collective."""
    if len({*world.all_gather(digest)}) > 1:
        raise UserError(
            "ranks have divided the samples among clients in different ways: a partition of your own must "
            "draw from hpcfl.randomness.numpy_stream(request.seed, ...), so that all ranks have the same"
        )
