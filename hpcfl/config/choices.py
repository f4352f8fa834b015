"""Groups of keys whose `name` decides which other keys they have: method, partition and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcfl.data.partitions import PARTITIONS, add_own_partition
from hpcfl.data.sources import SOURCES
from hpcfl.methods import METHODS, add_own_method
from hpcfl.models import MODELS, add_own_model
from hpcfl.settings import Settings

DEFAULT_METHOD, DEFAULT_SOURCE = "pfedla", "digits"


@dataclass(frozen=True)
class Choice:
    """The possible values of a group's `name`, and the options of each."""

    known: Mapping[str, Any]
    options: Callable[[Any], type[Settings]]
    """Returns the class of options of one of the known objects."""
    add_own: Callable[[str, str | None], tuple[str, str]]
    """Adds the object that a user's file defines; from path and expected digest to name and digest."""

    def options_of(self, name: str) -> type[Settings]:
        """Return the class of options of the known object with this name."""
        return self.options(self.known[name])


CHOICES = {
    "method": Choice(METHODS, lambda method: method.Params, add_own_method),
    "data.partition": Choice(PARTITIONS, lambda partition: partition.options, add_own_partition),
    "model": Choice(MODELS, lambda model: model.options, add_own_model),
}


def default_name(group: str, source: str) -> str:
    """Return what a group's `name` is if none is given, with this data.source."""
    if group == "method":
        return DEFAULT_METHOD
    if group == "model":
        return "digits_cnn" if source == DEFAULT_SOURCE else "lenet"
    return (SOURCES[source].partition if source in SOURCES else None) or "classes"
