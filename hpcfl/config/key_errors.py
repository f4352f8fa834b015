"""Error messages about invalid keys and values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo

from hpcfl.config.keys import GROUPS, Settings
from hpcfl.config.registry import Registry
from hpcfl.errors import UserError
from hpcfl.formatting import did_you_mean

Keys = TypeVar("Keys", bound="FileKeys")


class FileKeys(Settings):
    """Keys of a file that is not a configuration, such as a table."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields:
                if str(key).partition(".")[0] in cls.model_fields:
                    raise ValueError(f"{key} {HAS_DOT}")
                near = did_you_mean(str(key), cls.model_fields)
                if key in GROUPS and "settings" in cls.model_fields:
                    near = "; write it under settings"
                raise ValueError(f"{key} is an unknown key; allowed: {', '.join(cls.model_fields)}{near}")
        return given


def validate_file(path: Path, tree: Mapping[str, Any], kind: type[Keys]) -> Keys:
    """Return a file's nested keys as an object; UserError for the first mistake, with its place."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}{_first_mistake(error, tree)}") from error


def _first_mistake(error: ValidationError, tree: Any) -> str:
    """Say where the first mistake is, such as ", row 2 (FedAvg): published=-1 is invalid: ..."."""
    first = error.errors()[0]
    place: list[str] = []
    for key in first["loc"]:
        if isinstance(tree, list) and isinstance(key, int):
            tree = tree[key]
            label = tree.get("label") if isinstance(tree, dict) else None
            place[-1] = f"{place[-1].removesuffix('s')} {key + 1}" + (f" ({label})" if label else "")
        # pydantic's path names the kinds of entries as well
        elif isinstance(tree, dict) and key in tree:
            place.append(str(key))
            tree = tree[key]
    said = first["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    said = said.partition(" or instance of ")[0]
    said = said.replace("a valid dictionary", "a group of keys")
    entries = {int: "0, 1", str: first["input"]}.get(type(first["input"]), "VALUE, ...")
    said = said.replace("a valid list", f"a list, such as [{entries}]")
    if first["type"] == "union_tag_invalid":
        tag = {key: str(value).replace("'", "") for key, value in first["ctx"].items()}
        said = f"{tag['discriminator']}={tag['tag']} is unknown; allowed: {tag['expected_tags']}"
    elif first["type"] == "missing":
        said = f"{first['loc'][-1]} is missing"
    elif first["type"] == "union_tag_not_found":
        said = f"{first['ctx']['discriminator']} is missing".replace("'", "")
    elif not isinstance(first["input"], dict):
        said = f"{place.pop()}={first['input']!r} is invalid: {said}"
    return "".join(f", {one}" for one in place) + f": {said}"


def one_of(key: str, value: Any, names: Collection[str]) -> str:
    """Return a name if it is one of those known; raise UserError otherwise."""
    # a list, as the value may have any type
    if value not in [*names]:
        hint = did_you_mean(str(value), names)
        raise UserError(f"{key}={shown(value)} is unknown; allowed: {', '.join(names)}{hint}")
    return str(value)


HAS_DOT = (
    "has a dot, which is for the command line; in a YAML file keys are nested, as in train: {rounds: 50}"
)

RENAMED = {
    "comm.keep": "comm.topk_ratio",
    "comm.memory": "comm.error_feedback",
    "run.tensorboard": "run.tracker=tensorboard",
}
"""Present names of earlier keys."""

OTHER_WORDS = {
    "algorithm": "method.name",
    "strategy": "method.name",
    "dataset": "data.source",
    "num_partitions": "data.clients",
    "num_supernodes": "data.clients",
    "data.alpha": "data.partition.beta",
    "data.partition.alpha": "data.partition.beta",
    "algo": "method.name",
    "global_rounds": "train.rounds",
    "num_rounds": "train.rounds",
    "num_server_rounds": "train.rounds",
    "join_ratio": "train.participation",
    "fraction_fit": "train.participation",
    "fraction_train": "train.participation",
    "epochs": "train.local_epochs",
    "learning_rate": "train.lr",
    "local_learning_rate": "train.lr",
    "learning_rate_decay": "train.lr_decay",
    "learning_rate_decay_gamma": "train.lr_decay",
    "eval_gap": "run.eval_every",
    "auto_break": "train.patience",
    "num_new_clients": "data.unseen_clients",
    "fine_tuning_epoch_new": "train.unseen_epochs",
    "client_drop_rate": "clients.drop_rate",
    "train_slow_rate": "clients.slowness",
    "gpu": "run.device",
    "cuda": "run.device",
    "device_id": "run.device",
}
"""Keys by the words of other frameworks, with any group or with one."""


def unknown_key(key: str, value: Any, known: Sequence[str], choices: Mapping[str, Registry]) -> str:
    """Say that a key is unknown, which known one is nearest, and what is allowed."""
    if key in known:
        return f"{key} {HAS_DOT}"
    if key in RENAMED:
        return f"{key}={shown(value)}: this key is now {RENAMED[key]}"
    owners: dict[str, list[str]] = {}
    for chooser, choice in choices.items():
        for name in choice.known:
            for option in choice.options_of(name).model_fields:
                owners.setdefault(f"{chooser}.{option}", []).append(f"{chooser}.name={name}")
    # of other methods' keys only one with this very word: a similar one is of no use
    of_others = [name for name in owners if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = nearest_key(key, [*known, *of_others])
    beginning = f"{key}={shown(value)} is an unknown key;"
    if near:
        place = f" of {' or '.join(owners[near])}" if near in owners and near not in known else ""
        return f"{beginning} the nearest known one is {near}{place}; see hpcfl list keys {near}"
    siblings = [name for name in known if name.rpartition(".")[0] == key.rpartition(".")[0]]
    return f"{beginning} allowed: {', '.join(siblings or GROUPS)}; see hpcfl list keys"


def nearest_key(key: str, known: Collection[str]) -> str:
    """Return the key of another framework's word, or the known key whose last word is the same, or similar
    and in the same group; "" without one.

    Among several with this word it is the one that is most similar as a whole.
    """
    group, last = key.partition(".")[0], key.rpartition(".")[2]
    if other := OTHER_WORDS.get(key) or OTHER_WORDS.get(last):
        return other
    by_word: dict[str, list[str]] = {}
    for name in known:
        word = name.rpartition(".")[2]
        if word == last or group not in GROUPS or name.startswith(f"{group}."):
            by_word.setdefault(word, []).append(name)
    words = difflib.get_close_matches(last, by_word, n=1)
    return difflib.get_close_matches(key, by_word[words[0]], n=1, cutoff=0)[0] if words else ""


def allowed(field: FieldInfo, of_method: Any) -> str:
    """Say what a key may be: its type, bounds and default, that `of_method` if it is not None."""
    value = field.default if of_method is None else of_method
    default = "" if field.is_required() else f" (default: {shown(value)})"
    return f"allowed: {kind_in_words(field)}{default}"


def kind_in_words(field: FieldInfo) -> str:
    """Say what a key may be: its type and bounds."""
    return f"{_in_words(field.annotation)} {_bounds(field.metadata)}".strip()


def values_of(field: FieldInfo) -> tuple[str, ...]:
    """Return all that a key may be, as typed, where these are words; () where they are not."""
    parts = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else None
    known: list[str] = []
    for part in parts or (field.annotation,):
        if get_origin(part) is Literal:
            known += map(str, get_args(part))
        elif part in (bool, NoneType):
            known += ["true", "false"] if part is bool else ["null"]
        else:
            return ()
    return tuple(known)


def _bounds(limits: Iterable[Any]) -> str:
    forms = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}"}
    forms["min_length"] = "({} or more of them)"
    return " and ".join(
        form.format(getattr(limit, name))
        for limit in limits
        for name, form in forms.items()
        if hasattr(limit, name)
    )


def shown(value: Any) -> str:
    """Write a value as a user types it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _in_words(annotation: Any) -> str:
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, UnionType):
        parts = list(get_args(annotation))
        if not any(get_origin(part) is Literal for part in parts):
            # null first, as bounds that follow are not about it
            parts.sort(key=lambda part: part is not NoneType)
        return " or ".join(map(_in_words, parts))
    if get_origin(annotation) is list:
        return f"a list [VALUE,...], each VALUE {_in_words(get_args(annotation)[0])}"
    if get_origin(annotation) is Annotated:
        kind, *given = get_args(annotation)
        limits = [limit for item in given for limit in getattr(item, "metadata", [item])]
        return f"{_in_words(kind)} {_bounds(limits)}".strip()
    return words.get(annotation, str(annotation))
