"""The fixed properties of a method."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpcfl.config.keys import BufferPolicy


@dataclass(frozen=True)
class Traits:
    """Fixed properties of a method, for any hyper-parameters; `replace` changes some in a subclass."""

    eval_after: Literal["download", "training"] = "download"
    """Whether the evaluated models (`eval_model`) exist after a download, or only after local training."""
    buffers: tuple[BufferPolicy, ...] = ("average", "local")
    """Allowed values of `train.buffers`, the treatment of BatchNorm's running statistics; the first is the
    default. local: they stay with the client. average: the server averages them. mixed: the method mixes
    them, in its own state. `Method.buffers` does it."""
    averages: tuple[str, ...] = ()
    """Tensors of the server's state that `aggregate` moves to means over clients: `server.optimiser` acts on
    them. (): the method refuses `server.optimiser`."""
    averages_own_buffers: bool = False
    """Whether `aggregate` averages the clients' running statistics itself, for example cluster by cluster."""
    has_global_model: bool = False
    """Whether the server's `theta` [P], with the running statistics it averages, is one model for all."""
    needs_body: bool = False
    """Whether the method treats feature extractor and head differently; the network must then have both."""
    linear_head: bool = False
    """Whether it needs a body under a head that is one linear layer with a bias."""
    uses_total_rounds: bool = False
    """Whether a round depends on `train.rounds`; a run of such a method cannot be extended to more rounds."""
    predicts_by: Literal["network", "module", "rule"] = "network"
    """What gives class probabilities. network: one forward pass of the network that clients train. module:
    `predict`, of which `as_module` gives the same as a module. rule: `predict` alone, so that models are
    exported as tensors."""
    differences: tuple[str, ...] = ("theta",)
    """Tensors of uploads that are new values of those of the same name in the download: a codec may send the
    difference between both."""
    growing_state: frozenset[str] = frozenset()
    """Names of tensors of the server's state whose shapes change from round to round."""
    train_defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults under `train.*` that differ from the general ones."""
    server_defaults: dict[str, Any] = field(default_factory=dict)
    """The same under `server.*`."""
    refuses: dict[str, str] = field(default_factory=dict)
    """Keys under `train.*` that must keep their defaults with this method, each with the reason: half a
    sentence that begins with "whose" or "which"."""

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """Both kinds of defaults, by group of keys."""
        return {"train": self.train_defaults, "server": self.server_defaults}

    def replace(self, **changes: Any) -> Traits:
        """Return these traits with some changes."""
        return replace(self, **changes)
