"""`hpcfl list keys` is correct."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import yaml

from hpcfl.commands.reference import Key, about, citation, keys
from hpcfl.config.keys import DataConfig, flatten
from hpcfl.errors import FINISHED
from hpcfl.main import main
from hpcfl.methods import METHODS
from hpcfl.registries import REGISTRIES, load_config

CHOOSERS = {f"{group}.{key}" for group in REGISTRIES.by_group for key in ("name", "path")} | {"data.reader"}
UNCITED = {"fedavg_ft", "local"}
"""Methods that no paper defines."""


@pytest.fixture(scope="module")
def every_key() -> list[Key]:
    return keys()


def test_every_key_has_a_description(every_key: list[Key]) -> None:
    for key in every_key:
        assert len(re.findall(r"[A-Za-z]{2,}", key.meaning)) >= 3, key
        assert not key.meaning.endswith((".", ",", ";")), key
        assert key.kind, key
        assert "<class" not in key.kind, key
        assert "typing." not in key.kind, key


@pytest.mark.parametrize("prefix", REGISTRIES.by_group)
def test_every_key_of_every_configuration_is_listed(every_key: list[Key], prefix: str) -> None:
    for name in REGISTRIES.by_group[prefix].known:
        tree = load_config(None, [f"{prefix}.name={name}"]).tree()
        documented = {key.name for key in every_key if key.group in (*tree, f"{prefix}.{name}")}
        of_others = tuple(f"{other}." for other in REGISTRIES.by_group if other != prefix)
        assert [key for key in flatten(tree) if key not in documented and not key.startswith(of_others)] == []


def test_the_documented_default_is_the_real_one(every_key: list[Key]) -> None:
    real: dict[str, dict[str, Any]] = {}
    for group in {key.group for key in every_key}:
        prefix, _, name = group.rpartition(".")
        words = [f"{prefix}.name={name}"] if prefix in REGISTRIES.by_group else []
        real[group] = flatten(load_config(None, words).tree())
    for key in every_key:
        if key.name == "data.clients":
            assert f"default: {load_config(None, []).data.clients}," in key.meaning
        if key.name in CHOOSERS or key.name == "data.clients":
            continue
        assert key.default is not None
        assert yaml.safe_load(key.default) == real[key.group][key.name], key
        assert key.default in (key.values or key.default), key
        # a default in words explains null
        assert key.default == "null" or "default:" not in key.meaning.lower(), key


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_its_paper(method: str) -> None:
    assert bool(citation(f"method.{method}")) == (method not in UNCITED)
    assert about(f"method.{method}") == METHODS[method].summary


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    capsys.readouterr()
    assert main(["list", "keys", *words]) == FINISHED
    return capsys.readouterr().out.splitlines()


def test_keys_are_listed_by_name_and_group(every_key: list[Key], capsys: pytest.CaptureFixture[str]) -> None:
    everything = listed(capsys)
    assert "train.lr=0.05  [a number > 0]" in everything
    assert len([line for line in everything if re.match(r"\w+\.[\w.]+=", line)]) == len(every_key)
    title, *lines = listed(capsys, "method.pfedme")
    assert title.startswith("# method.pfedme: ")
    assert "Dinh et al., Personalized federated learning with Moreau envelopes, NeurIPS 2020" in title
    assert lines[0] == "method.pull=15.0  [a number >= 0]"
    assert lines[1].startswith("    Strength lambda of the envelope (authors: 15): small lets theta_i go its")
    assert "train.lr=0.005  [a number > 0]" in lines
    assert listed(capsys, "data.partition.dirichlet")[1] == "data.partition.beta=0.5  [a number > 0]"
    _, seed, meaning = listed(capsys, "run.seed")
    assert seed == "run.seed=0  [an integer >= 0 and <= 9223372036854775807]"
    assert meaning == "    Seed of everything random; `hpcfl table` has several"
    assert len(listed(capsys, "data")) > 2 * len(DataConfig.model_fields)
    # the beginning of a key has all that begin so, a whole name only that key
    assert any(line.startswith("train.finetune_epochs=") for line in listed(capsys, "train.fine"))
    assert "train.lr_decay" not in str(listed(capsys, "train.lr"))
    of_two = [line for line in listed(capsys, "comm", "model.mlp", "comm.codec") if line.startswith("#")]
    assert of_two == ["# comm.*", "# model.mlp: fully connected layers of the widths model.hidden"]


PARAMS = """class MineParams(Params):
    mu: float = Field(0.25, ge=0)
    '''Pull to the mean. More.'''
"""
APART = f"{PARAMS}\nclass Mine(FedAvg):\n    Params = MineParams\n"
INSIDE = "class Mine(FedAvg):\n" + indent(PARAMS.replace("MineParams(Params)", "Params(Params)"), "    ")


def test_the_keys_of_an_own_file_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, classes in (("apart", APART), ("inside", INSIDE)):
        file = tmp_path / f"{name}.py"
        file.write_text(
            "from pydantic import Field\nfrom hpcfl.methods.base import Params\n"
            f"from hpcfl.methods.fedavg import FedAvg\n\n{classes}"
        )
        title, *lines = listed(capsys, f"method.{name}", "--method", str(file))
        assert title == f"# method.{name}: from {name}.py"
        assert lines == ["method.mu=0.25  [a number >= 0]", "    Pull to the mean. More"]
