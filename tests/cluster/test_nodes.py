"""Runs on several nodes: the bits of one, and what is told where a node or its link is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bits import differing, run_here, tiny_settings, write_digits
from nodes import Nodes, played
from processes import run_tree

from hpcfl.errors import FINISHED


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with played(3) as up:
        yield up


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    digits = tmp_path_factory.mktemp("digits") / "digits.npz"
    write_digits(digits)
    return [*tiny_settings(digits), "method.name=pfedla", "train.rounds=5"]


def test_three_nodes_give_the_bits_of_one_rank(
    nodes: Nodes, settings: list[str], tmp_path: Path, mpirun_command: list[str]
) -> None:
    assert run_here(tmp_path / "alone", settings) == FINISHED
    words = ["-m", "hpcfl.main", "--quiet", "--out", tmp_path / "nodes", *settings]
    run_tree(nodes.mpirun(mpirun_command, 6, *words))
    assert not differing(tmp_path / "alone", tmp_path / "nodes")
    config = (tmp_path / "nodes" / "config.yaml").read_text()
    assert all(f"- {node.name} cpu" in config for node in nodes.nodes)
