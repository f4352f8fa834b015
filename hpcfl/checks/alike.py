"""Whether the nodes of a run are alike: versions, clocks and host names."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hpcfl import __version__
from hpcfl.checks.finding import Checked, gathered, ranges
from hpcfl.communication.communicator import Communicator, run_collectively
from hpcfl.errors import UserError
from hpcfl.machine import boot_id, package_versions

Told = Mapping[str, Any]
"""What a rank tells of itself."""

COMPUTE = ("torch", "numpy")
"""Packages on whose versions the bits of a run depend."""
CLOCKS_APART_S = 60.0


def check_unlike_nodes(world: Communicator) -> None:
    """Raise UserError where ranks have other versions; warn of clocks and of host names. Collective."""
    told = gathered(world, of_this_rank(world, COMPUTE))

    def check() -> None:
        checked = Checked()
        if told:
            compare(told, checked)
        for finding in checked.findings:
            if finding.is_error:
                raise UserError(finding.text)
            warnings.warn(finding.text, stacklevel=1)

    run_collectively(world, check)


def of_this_rank(world: Communicator, packages: Iterable[str]) -> dict[str, Any]:
    """Return what `compare` looks at. Collective."""
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


def compare(told: Sequence[Told], checked: Checked) -> None:
    """Say where versions differ, where a clock is off, and which nodes have the same name."""
    first, nodes = told[0], by_node(told)
    for rank in told[1:]:
        other = {name: found for name, found in rank["versions"].items() if found != first["versions"][name]}
        if other:
            these = ", ".join(
                f"{name} {found} (rank 0: {first['versions'][name]})" for name, found in other.items()
            )
            checked.error(f"{place(rank)} has {these}: activate the same environment on every node")
            break
    for node in nodes:
        ahead_s = node[0]["clock"] - first["clock"]
        if abs(ahead_s) > CLOCKS_APART_S:
            apart = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
            checked.warning(
                f"the clock of {node[0]['host']} is {apart} that of {first['host']}, rank 0's: times in "
                "log.txt may be wrong, and a run may not see when its SLURM job ends; set the clocks (see "
                "timedatectl)"
            )
    for number, node in enumerate(nodes):
        for other_node in nodes[:number]:
            is_other = node[0]["boot"] != other_node[0]["boot"]
            if is_other and node[0]["host"] == other_node[0]["host"]:
                checked.warning(
                    f"{node[0]['host']} is the name of two nodes, that of rank(s) {_numbers(other_node)} and "
                    f"that of rank(s) {_numbers(node)}: errors and the lock of a run folder cannot tell them "
                    "apart; give each a name of its own (hostnamectl)"
                )
                return


def by_node(told: Sequence[Told]) -> list[list[Told]]:
    """Return the ranks of each node, in rank order."""
    nodes: dict[int, list[Told]] = {}
    for rank in told:
        nodes.setdefault(rank["node"], []).append(rank)
    return list(nodes.values())


def place(rank: Told) -> str:
    """Say which rank it is, and where."""
    return f"rank {rank['rank']} on {rank['host']}"


def _numbers(node: Sequence[Told]) -> str:
    return ranges(rank["rank"] for rank in node)
