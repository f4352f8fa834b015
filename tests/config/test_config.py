"""Keys and values: where they come from, what they default to, and how mistakes are refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcfl.commands.reference import keys
from hpcfl.config.key_errors import OTHER_WORDS
from hpcfl.config.keys import RESULT_NEUTRAL, Config, TrainConfig, flatten
from hpcfl.config.load import differences
from hpcfl.errors import UserError
from hpcfl.methods import METHODS
from hpcfl.registries import load_config


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(path: Path | None = None, *overrides: str) -> str:
    """Return the message with which a configuration is refused."""
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_values_have_the_types_of_their_keys() -> None:
    words = ["train.lr=1e-3", "train.rounds=7", "model.batchnorm=true", "data.per_client=null", "data.seed="]
    words += ["data.normalise=[[0.5], [0.25]]", "data.root=~/sets", "method.hypernetwork_lr=1"]
    config = load_config(None, words)
    assert (config.train.lr, config.train.rounds) == (0.001, 7)
    assert config.model.options.model_dump() == {"batchnorm": True, "groupnorm": None}
    assert config.data.per_client is config.data.seed is None
    assert (config.data.normalise, config.data.root) == ([[0.5], [0.25]], "~/sets")
    assert config.method.options.model_dump()["hypernetwork_lr"] == 1.0


def test_overrides_win_over_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    assert load_config(None, ["train.optimiser=adam"]).train.lr == 0.001
    assert load_config(None, ["train.optimiser=adamw", "train.lr=0.2"]).train.lr == 0.2
    assert load_config(None, ["method.name=fedem", "train.optimiser=adam"]).train.lr == 0.001
    text = "train: {rounds: 5, lr: 1e-2}\ndata:\n  partition: {classes_per_client: 2}\n"
    file = write(tmp_path / "a.yaml", text)
    config = load_config(file, ["train.rounds=6", "train.rounds=7"])
    assert (config.train.rounds, config.train.lr) == (7, 0.01)
    assert config.partition.options.model_dump() == {"classes_per_client": 2}


def test_a_group_left_empty_in_yaml_has_its_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "train:\nmethod:\ndata:\n  partition:\n")
    assert load_config(file, ["train.rounds=3"]).train == TrainConfig(rounds=3)
    assert load_config(write(tmp_path / "empty.yaml", ""), []) == load_config(None, [])


def test_another_method_or_partition_needs_only_its_name(tmp_path: Path) -> None:
    groups = "data: {partition: {name: dirichlet, beta: 0.1}}\ntrain: {rounds: 3}\n"
    file = write(tmp_path / "a.yaml", f"method: {{name: heurpfedla, k: 2, embedding: 7}}\n{groups}")
    fedavg = load_config(file, ["method.name=fedavg", "data.partition.name=iid"])
    assert (fedavg.method.name, fedavg.partition.name, fedavg.train.rounds) == ("fedavg", "iid", 3)
    pfedla = load_config(file, ["method.name=pfedla", "method.hidden=9"]).method.options.model_dump()
    assert (pfedla["embedding"], pfedla["hidden"], "k" in pfedla) == (7, 9, False)
    assert load_config(file, ["method.name=heurpfedla"]).method.options.model_dump()["k"] == 2
    assert "method.k" in refusal(None, "method.name=fedavg", "method.k=2")
    assert refusal(file, "method.name=[fedavg]").startswith("method.name=['fedavg'] is unknown; allowed: ")


@pytest.mark.parametrize(
    "methods", ["fedavg fedadam", "fedadam fedavg", "fedavg fedavg_ft", "fedavg fedem", "fedprox moon"]
)
def test_another_method_than_a_record_s_has_its_own_defaults(methods: str, tmp_path: Path) -> None:
    given = ["train.rounds=3", "train.momentum=0.5", "data.clients=4"]
    check_record(tmp_path, *methods.split(), given)


@pytest.mark.parametrize("lr", ["0.05", "0.001", "0.01"])
def test_a_step_beside_adam_is_that_of_the_record(lr: str, tmp_path: Path) -> None:
    # the defaults are 0.001, and 0.05 without Adam
    check_record(tmp_path, "fedadam", "fedavg", ["train.optimiser=adam", f"train.lr={lr}"])


def test_a_record_whose_method_is_no_name_is_refused(tmp_path: Path) -> None:
    record = write(tmp_path / "config.yaml", "method: {name: [fedavg]}\nenvironment: {torch: any}\n")
    assert refusal(record).startswith("method.name=['fedavg'] is unknown; allowed: ")


def check_record(tmp_path: Path, before: str, after: str, given: list[str]) -> None:
    """Compare what is read of a run's record, also with another method, with what was given."""
    config = load_config(None, [f"method.name={before}", *given])
    record = write(tmp_path / "config.yaml", f"{config.yaml()}environment: {{torch: any}}\n")
    assert load_config(record, []) == config
    other = f"method.name={after}"
    assert load_config(record, [other]) == load_config(None, [other, *given])


def test_another_model_needs_only_its_name(tmp_path: Path) -> None:
    def options(file: Path, *overrides: str) -> tuple[str, dict[str, Any]]:
        config = load_config(file, overrides)
        return config.model.name, config.model.options.model_dump()

    unnamed = write(tmp_path / "a.yaml", "model: {batchnorm: true}\n")
    assert options(unnamed) == ("digits_cnn", {"batchnorm": True, "groupnorm": None})
    assert options(unnamed, "model.name=lenet") == ("lenet", {"batchnorm": True, "groupnorm": None})
    assert options(unnamed, "model.name=mlp") == ("mlp", {"hidden": [256]})
    mlp = write(tmp_path / "b.yaml", "model: {name: mlp, hidden: [9, 8]}\n")
    assert options(mlp, "model.name=mlp") == ("mlp", {"hidden": [9, 8]})
    assert options(mlp, "model.hidden=[]") == ("mlp", {"hidden": []})
    assert options(mlp, "model.name=resnet18") == ("resnet18", {"weights": None, "groupnorm": None})
    assert "model.hidden=[9]" in refusal(mlp, "model.name=lenet", "model.hidden=[9]")


def test_the_number_of_clients_is_ten_unless_the_source_has_its_own(tmp_path: Path) -> None:
    plain = load_config(None, [])
    assert plain.data.clients == 10
    assert load_config(None, ["data.clients=null"]) == plain
    assert load_config(None, ["data.clients=10"]).run_name() == plain.run_name()
    own = load_config(None, ["data.partition.name=given"])
    assert own.data.clients is None
    assert load_config(write(tmp_path / "a.yaml", own.yaml()), []) == own
    assert load_config(None, ["data.partition.name=given", "data.clients=3"]).data.clients == 3


def test_a_source_names_its_default_partition(tmp_path: Path) -> None:
    writers = ["data.source=femnist", "data.path=x"]
    assert load_config(None, writers).partition.name == "given"
    pooled = load_config(None, [*writers, "data.partition.name=iid"])
    assert (pooled.partition.name, pooled.data.clients) == ("iid", 10)
    file = write(tmp_path / "a.yaml", "data: {source: femnist, path: x, partition: {}}\n")
    assert load_config(file, ["data.partition.name=classes"]).partition.name == "classes"
    # options under no name are those of the source's default, and go when another is named
    digits = write(tmp_path / "b.yaml", "data: {partition: {classes_per_client: 2}}\n")
    assert load_config(digits, ["data.partition.name=given"]).partition.name == "given"
    assert "data.partition.classes_per_client=2" in refusal(digits, *writers)


@pytest.mark.parametrize(("method", "epochs"), [("fedavg_ft", 1), ("fedavg", 0), ("pfedla", 0)])
def test_defaults_may_depend_on_the_method(method: str, epochs: int) -> None:
    assert load_config(None, [f"method.name={method}"]).train.finetune_epochs == epochs
    explicit = load_config(None, [f"method.name={method}", "train.finetune_epochs=4"])
    assert explicit.train.finetune_epochs == 4


@pytest.mark.parametrize("method", METHODS)
def test_yaml_contains_the_whole_configuration(tmp_path: Path, method: str) -> None:
    words = [f"method.name={method}", "train.lr=1e-5", "data.partition.name=dominant"]
    config = load_config(None, [*words, "model.name=mlp", "model.hidden=[64, 32]"])
    file = write(tmp_path / "config.yaml", config.yaml() + "environment: {torch: 2, ranks: [a cpu loop]}\n")
    again = load_config(file, [])
    assert again == config
    assert again.run_name() == config.run_name()
    assert differences(yaml.safe_load(config.yaml()), again.tree()) == []


def test_different_configurations_have_different_run_names(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["method.name=fedavg", "run.seed=3"])
    assert config.run_name() == f"fedavg-digits-s3-{config.short_hash()}"
    tree, plain, same = config.tree(), config.short_hash(), set()
    for key in flatten(tree):
        *groups, last = key.split(".")
        node = altered = deepcopy(tree)
        for group in groups:
            node = node[group]
        node[last] = "altered"
        monkeypatch.setattr(Config, "tree", lambda _, altered=altered: altered)
        same |= {key} if config.short_hash() == plain else set()
    own = {"method.path", "model.path", "data.partition.path", "data.reader"}
    assert same == {"train.rounds", *RESULT_NEUTRAL} - own
    of_run = ["checkpoint_every", "max_elements", "metrics", "on_divergence", "placement", "report", "state"]
    neutral = {"data.root", *(f"run.{key}" for key in [*of_run, "timeout", "tracker"])}
    assert set(RESULT_NEUTRAL) - own == neutral


def test_names_of_configurations_are_the_recorded_ones() -> None:
    assert load_config(None, []).run_name() == "pfedla-digits-s0-633675fa"
    assert load_config(None, ["data.source=mnist"]).model.name == "lenet"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("train.round=3", "=3 is an unknown key; the nearest known one is train.rounds"),
        ("method.k=1", "an unknown key; the nearest known one is method.k of method.name=heurpfedla"),
        ("data.partition.beta=1", "known one is data.partition.beta of data.partition.name=dirichlet or "),
        ("data.partition.x=1", "; allowed: data.partition.name, data.partition.path, data.partition.cl"),
        ("num_clients=20", "=20 is an unknown key; the nearest known one is data.clients; see hpcfl list"),
        ("data.partition.alpha=1 data.partition.name=dirichlet", "known one is data.partition.beta; see "),
        ("data.alpha=0.1", "known one is data.partition.beta of data.partition.name=dirichlet or"),
        ("data.beta=0.1", "known one is data.partition.beta of data.partition.name=dirichlet or"),
        ("data.dataset=mnist", "the nearest known one is data.source; see hpcfl list keys data.source"),
        ("global_rounds=9", "the nearest known one is train.rounds; see"),
        ("mu=1", "=1 is an unknown key; the nearest known one is method.mu of method.name="),
        ("train.rounds=abc", "=abc is invalid; allowed: an integer >= 1 (default: 30)"),
        ("train.rounds.x=3", "train.rounds={'x': 3} is invalid"),
        ("method.name=pfedl", "did you mean pfedla?"),
        ("train.lr=.inf", "=inf is invalid; allowed: a number > 0 (default: 0.05)"),
        ("train.lr=-1 method.name=fedem", "(default: 0.15)"),
        ("data.layout=HWC", "=HWC is invalid; allowed: NHWC, NCHW, NCL, NLC or null (default: null)"),
        ("comm.keep=0.1", "comm.keep=0.1: this key is now comm.topk_ratio"),
        ("run.tensorboard=true", "run.tensorboard=true: this key is now run.tracker=tensorboard"),
        ("method=fedavg", "=fedavg is invalid: it is a group of keys; write method.name=fedavg, in a YAML "),
        ("train=3 train.rounds=3", "train.rounds needs a group of keys, not train=3; leave train=3 out"),
        ("=3", "=3 is an unknown key; allowed: method, data, model, train, "),
        ("run.eval_split=val", "needs data.val_fraction, such as 0.2; set that, or run.eval_split=test"),
        ("comm.topk_ratio=0.1", "=0.1 needs comm.codec=topk; set that, or comm"),
        ("comm.directions=up", "=up needs comm.codec=float16 or int8 or topk; set that, or"),
        ("comm.directions=both comm.codec=topk", "=both needs comm.codec=float16 or int8; set that, or"),
        ("comm.directions=down comm.codec=topk", "=down needs comm.codec=float16 or int8; set that, or"),
        ("data.path=a.npz", " needs data.source=npz or csv or domains or femnist or pfllib; set that, or"),
        ("clients.candidates=4", "=4 needs clients.sampling=power_of_choice; set that, or clients.cand"),
        ("clients.deadline_s=3", "=3.0 needs clients.step_s; set that, or"),
        ("clients.slowness=1", "=1.0 needs clients.step_s; set that, or"),
        ("clients.local_epochs=[3,1]", "=[3, 1] is invalid; allowed: [least, most] with"),
        ("clients.local_epochs=[2]", "=[2] is invalid; allowed: [least, most] with"),
        ("data.label_noise_clients=0.5", "=0.5 needs data.label_noise; set that, or data.label_noise_cl"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(overrides: str, expected: str) -> None:
    message = refusal(None, *overrides.split())
    assert expected in message
    assert overrides.partition("=")[0].removesuffix(".x") in message
    assert "\n" not in message


def test_words_of_other_frameworks_stand_for_keys_that_there_are() -> None:
    assert {key.name for key in keys()} >= set(OTHER_WORDS.values())


@pytest.mark.parametrize("hidden", ["[0]", "[3, 1.5]", "[true]", "256", "null"])
def test_the_widths_of_an_mlp_are_whole_numbers(hidden: str) -> None:
    expected = "is invalid; allowed: a list [VALUE,...], each VALUE an integer > 0 (default: [256])"
    assert expected in refusal(None, "model.name=mlp", f"model.hidden={hidden}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {rounds: 3\n", "is not YAML: line 2, column 1: did not find expected ',' or '}' (while"),
        ("train:\n\trounds: 3\n", "is not YAML: line 2: a tab; indent with spaces"),
        ("train:\n  rounds: 3\n\n  rounds: 4\n", "is not YAML: line 4: duplicate key rounds; keep one"),
        ("train: &a {lr: *a}\n", "is not YAML: line 1, column 8: found unconstructable recursive node"),
        (f"train: {'[' * 3000}{']' * 3000}\n", "is not YAML: too many values inside each other"),
        ("x: 2024-13-45\n", "is not YAML: month must be in 1..12"),
        ("- train\n", "holds no groups of keys, such as train: {rounds: 50}"),
        ("train: 5\n", "train=5 is invalid: it is a group of keys; see hpcfl list keys train"),
        ("1: 2\n", "1=2 is an unknown key"),
        ("train: {1: 2}\n", "train.1=2 is an unknown key"),
        ("optimiser: {}\n", "optimiser={} is an unknown key"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = write(tmp_path / "bad.yaml", text)
    message = refusal(file)
    assert expected in message
    assert "\n" not in message
    assert str(file) in message or "key" in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    bad, missing = tmp_path / "bad.yaml", tmp_path / "no.yaml"
    bad.write_bytes(b"\xff\xfe\x00")
    assert f"{bad} is not YAML" in refusal(bad)
    message = refusal(missing)
    assert f"cannot read {missing}: No such file" in message
    assert "key=value such as train.rounds=50" in message
    assert "Is a directory" in refusal(tmp_path)
    assert "File name too long" in refusal(tmp_path / f"{'n' * 300}.yaml")


def test_a_file_that_is_no_configuration_is_refused_with_advice(tmp_path: Path) -> None:
    table, run = tmp_path / "table.yaml", tmp_path / "run"
    for text in ("{title: Two, seeds: [0], rows: [{}]}", "extends: base.yaml"):
        table.write_text(text)
        assert "which is run by hpcfl table" in refusal(table)
    run.mkdir()
    (run / "config.yaml").touch()
    assert refusal(run).endswith(f"to resume this run, type hpcfl run {run}/config.yaml --out {run}")


def test_a_key_with_dots_is_refused_with_how_to_write_it(tmp_path: Path) -> None:
    for text, key in (
        ("train.rounds: 2", "train.rounds"),
        ("data.partition.name: iid", "data.partition.name"),
        ("data.partition: {name: iid}", "data.partition.name"),
        ("data: {partition.name: iid}", "data.partition.name"),
    ):
        expected = f"{key} has a dot, which is for the command line; in a YAML file keys are nested, as in "
        assert refusal(write(tmp_path / "dots.yaml", text)) == f"{expected}train: {{rounds: 50}}"
    assert load_config(write(tmp_path / "nested.yaml", "train: {rounds: 50}"), []).train.rounds == 50


def test_differences_name_the_keys_with_both_values() -> None:
    old = load_config(None, ["train.lr=0.1", "data.root=a", "run.checkpoint_every=3"]).tree()
    new = load_config(None, ["data.root=b", "train.buffers=local"]).tree()
    expected = ["train.lr: 0.1 there, 0.05 here", "train.buffers: null there, local here"]
    assert differences(old, new) == expected
    assert differences(old, old) == []


def test_another_method_counts_as_one_difference_and_a_key_of_one_side_unless_it_is_null() -> None:
    pfedla, fedavg = (load_config(None, [f"method.name={name}"]).tree() for name in ("pfedla", "fedavg"))
    assert differences(pfedla, fedavg) == ["method.name: pfedla there, fedavg here"]
    older = pfedla | {"run": {key: value for key, value in pfedla["run"].items() if key != "threads"}}
    assert differences(older, pfedla) == ["run.threads: (not set) there, 1 here"]
    longer = pfedla | {"train": pfedla["train"] | {"rounds": 99}}
    assert differences(older, longer, but=["train.rounds"]) == differences(older, pfedla)
    comm = pfedla["comm"]
    older = pfedla | {"comm": {key: comm[key] for key in comm if key != "error_feedback"}}
    assert differences(older, pfedla) == differences(pfedla, older) == []
