"""All methods by name; a method's file is called as the method."""

from hpcfl.methods.base import Context, Method, Params
from hpcfl.methods.fedavg import FedAvg
from hpcfl.methods.fedavg_ft import FedAvgFinetuned
from hpcfl.methods.fedbn import FedBN
from hpcfl.methods.heurpfedla import HeurpFedLA
from hpcfl.methods.local import Local
from hpcfl.methods.pfedla import PFedLA

_ALL: tuple[type[Method], ...] = (PFedLA, HeurpFedLA, Local, FedAvg, FedAvgFinetuned, FedBN)

METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = ["METHODS", "Context", "Method", "Params"]
