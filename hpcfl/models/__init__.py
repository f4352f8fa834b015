"""Networks with a body and a head, and the hypernetworks that mix them."""

from hpcfl.models.networks import MODELS, Network, NetworkOptions, build_network

__all__ = ["MODELS", "Network", "NetworkOptions", "build_network"]
