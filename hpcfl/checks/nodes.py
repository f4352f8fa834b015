"""Whether the nodes of a run are alike: versions, clocks and host names."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcfl import __version__
from hpcfl.checks.findings import Findings, ranges
from hpcfl.communication.communicator import Communicator
from hpcfl.config.keys import OWN_KEYS, Config, digest_key, flatten
from hpcfl.errors import UserError
from hpcfl.machine import boot_id, package_versions

LOG = logging.getLogger(__name__)

Facts = Mapping[str, Any]
"""Of one rank."""

NUMERIC_PACKAGES = ("torch", "numpy")
"""Packages on whose versions the bits of a run depend."""
CLOCKS_APART_S = 60.0

_NAMES_OF_FILES = (*OWN_KEYS, "data.path", "data.root", "data.source")
"""Keys that name what nodes may have in different places; its content is compared."""


def check_unlike_nodes(world: Communicator) -> None:
    """Raise UserError where ranks have other versions; warn of clocks and of host names. Collective."""
    found = Findings()
    compare_nodes(world.all_gather(node_facts(world, NUMERIC_PACKAGES)), found)
    if found.errors:
        raise UserError(found.errors[0])
    # a run shows those of the server only
    for text in found.warnings:
        LOG.warning(text)


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


def node_facts(world: Communicator, packages: Iterable[str]) -> dict[str, Any]:
    """Return what `compare_nodes` needs of this rank. Collective."""
    return {
        "rank": world.rank,
        "host": world.host,
        "node": min(world.ranks_of_node()),
        "boot": boot_id(),
        # ranks have just met, so that all read their clocks in the same moment
        "clock": time.time(),
        "versions": {
            "hpcfl": __version__,
            "python": platform.python_version(),
            **package_versions(packages),
        },
    }


def compare_nodes(ranks: Sequence[Facts], found: Findings) -> None:
    """Find other versions, clocks that are off, and nodes with the same name."""
    for rank in ranks:
        expected = ranks[0]["versions"]
        other = [
            f"{name} {version} (rank 0: {expected[name]})"
            for name, version in rank["versions"].items()
            if version != expected[name]
        ]
        if other:
            these = ", ".join(other)
            found.errors.append(f"{place(rank)} has {these}: activate the same environment on every node")
            break
    for node in by_node(ranks):
        ahead_s = node[0]["clock"] - ranks[0]["clock"]
        if abs(ahead_s) > CLOCKS_APART_S:
            apart = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            found.warnings.append(
                f"the clock of {node[0]['host']} is {apart} that of {ranks[0]['host']}, rank 0's: times in "
                "log.txt may be wrong, and a run may not see when its SLURM job ends; set the clocks (see "
                "timedatectl)"
            )
    named: dict[str, list[Facts]] = {}
    for node in by_node(ranks):
        first = named.setdefault(node[0]["host"], node)
        if first[0]["boot"] != node[0]["boot"]:
            those, these = (ranges(rank["rank"] for rank in ranks_there) for ranks_there in (first, node))
            found.warnings.append(
                f"{node[0]['host']} is the name of two nodes, that of rank(s) {those} and that of rank(s) "
                f"{these}: errors and the lock of a run folder cannot tell them apart; give each a name of "
                "its own (hostnamectl)"
            )
            break


def by_node(ranks: Sequence[Facts]) -> list[list[Facts]]:
    """Return the ranks of each node, in rank order."""
    nodes: dict[int, list[Facts]] = {}
    for rank in ranks:
        nodes.setdefault(rank["node"], []).append(rank)
    return list(nodes.values())


def place(rank: Facts) -> str:
    """Return which rank it is, and where."""
    return f"rank {rank['rank']} on {rank['host']}"
