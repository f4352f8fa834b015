"""FedPer. Arivazhagan et al., Federated learning with personalization layers, 2019.

    (phi_i, h_i) <- E epochs of SGD on L_i from (phi, h_i), body and head together
    phi          <- weighted mean of phi_i                                      (Algorithms 1, 2)

Choices: the head is the network's last linear layer (for ResNets the paper also tries larger heads, with the
blocks before it). All heads start from the same weights and are never reset. Running statistics are averaged
with the body (`train.buffers=local` keeps them with the client). The evaluated model is the newest phi with
the client's own head. A client that takes no part in training learns a head under phi as it is.
"""

from __future__ import annotations

from hpcfl.methods._own_layers import OwnLayers


class FedPer(OwnLayers):
    summary = "a shared body under each client's own head, trained together"
    privacy_units = ("client", "sample")
    own_part = "head"
    traits = OwnLayers.traits.replace(needs_body=True)
