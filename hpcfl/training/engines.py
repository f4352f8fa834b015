"""Gradients and probabilities of many clients' models: the loop engine and the batched engine.

Shapes: C clients, P trainable numbers, U running statistics, B samples of a mini-batch, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy

from hpcfl.config.keys import Precision
from hpcfl.parameters import ParameterLayout, Tensors
from hpcfl.training.batches import Batch
from hpcfl.training.forward import Forward, in_precision
from hpcfl.training.losses import Loss, cross_entropy_loss

BATCHNORM = nn.modules.batchnorm._BatchNorm

EVALUATION_BATCH = 512


class LoopEngine:
    """One client at a time with plain autograd: the reference, and the fastest choice on a CPU."""

    clients_at_once = 1

    def __init__(
        self,
        network: nn.Module,
        layout: ParameterLayout,
        precision: Precision = "float32",
        label_smoothing: float = 0.0,
    ) -> None:
        self._layout, self._precision, self._label_smoothing = layout, precision, label_smoothing
        # its parameters and gradients are views of one flat vector each
        self._working = without_cudnn_batchnorm(training_copy(network))
        theta, self._buffers = layout.flatten(self._working)
        self._theta, self._gradient = theta, torch.zeros_like(theta)
        views, gradients = layout.views(self._theta), layout.views(self._gradient)
        for name, parameter in self._working.named_parameters():
            parameter.data = views[name]
            parameter.grad = gradients[name]
        for name, view in layout.buffer_views(self._buffers).items():
            module, _, buffer = name.rpartition(".")
            self._working.get_submodule(module).register_buffer(buffer, view)

    def gradient(self, loss: Loss, tensors: Tensors, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        """Differentiate each client's loss with respect to each of its floating-point tensors.

        Takes tensors [C, ...] and buffers [C, U] (updated in place), C = 1; returns gradients of the same
        names and shapes, and the losses [C].
        """
        self._set_training(True)
        one = Batch(batch.members, _fastest_order(batch.x[0]), batch.y[0], batch.index[0])
        own = {name: tensor[0].detach() for name, tensor in tensors.items()}
        leaves = {name: tensor.requires_grad_() for name, tensor in own.items() if tensor.is_floating_point()}
        forward = Forward(self._working, self._layout, buffers[0], self._precision, self._label_smoothing)
        value = _one_number(loss(forward, own, one))
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return {n: g.unsqueeze(0) for n, g in zip(leaves, gradients, strict=True)}, value.detach().view(1)

    def plain_gradient(self, theta: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient [C, P] of the cross-entropy, valid until the next call, and the losses [C];
        C is 1."""
        self._load(theta[0], buffers[0])
        self._set_training(True)
        self._gradient.zero_()
        logits = in_precision(self._precision, self._working, _fastest_order(batch.x[0]))
        value = cross_entropy(logits, batch.y[0], label_smoothing=self._label_smoothing)
        value.backward()
        buffers[0].copy_(self._buffers)
        return self._gradient.unsqueeze(0), value.detach().view(1)

    @torch.no_grad()
    def outputs(
        self, theta: Tensor, buffers: Tensor, call: Callable[..., Tensor], *samples: Tensor
    ) -> Tensor:
        """Return call(network, *samples) [n, ...] for one model theta [P] in evaluation mode.

        Samples [n, ...] come in parts.
        """
        self._load(theta, buffers)
        self._set_training(False)
        parts = zip(*(tensor.split(EVALUATION_BATCH) for tensor in samples), strict=True)
        return torch.cat([call(self._working, *map(_fastest_order, part)) for part in parts])

    def _set_training(self, training: bool) -> None:
        # to walk through all modules takes as long as a small network's forward pass
        if self._working.training != training:
            self._working.train(training)

    def _load(self, theta: Tensor, buffers: Tensor) -> None:
        self._theta.copy_(theta)
        self._buffers.copy_(buffers)


class BatchedEngine:
    """Many clients as one computation, `torch.func.vmap` over the client axis: for GPUs."""

    def __init__(
        self, network: nn.Module, layout: ParameterLayout, clients_at_once: int, label_smoothing: float = 0.0
    ) -> None:
        self._network, self._layout, self._label_smoothing = training_copy(network), layout, label_smoothing
        self.clients_at_once = clients_at_once

    def gradient(self, loss: Loss, tensors: Tensors, buffers: Tensor, batch: Batch) -> tuple[Tensors, Tensor]:
        """As the loop engine's, for C clients."""

        def client_loss(
            leaves: Tensors, others: Tensors, buffers: Tensor, x: Tensor, y: Tensor, index: Tensor
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            statistics = buffers.clone()
            forward = Forward(self._network, self._layout, statistics, label_smoothing=self._label_smoothing)
            value = _one_number(loss(forward, leaves | others, Batch(batch.members, x, y, index)))
            return value, (value.detach(), statistics)

        leaves = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        others = {name: tensor for name, tensor in tensors.items() if name not in leaves}
        per_client = vmap(grad(client_loss, has_aux=True), randomness="different")
        gradients, (values, statistics) = per_client(leaves, others, buffers, batch.x, batch.y, batch.index)
        buffers.copy_(statistics)
        return gradients, values

    def plain_gradient(self, theta: Tensor, buffers: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """As the loop engine's, for C clients."""
        gradients, losses = self.gradient(cross_entropy_loss, {"theta": theta}, buffers, batch)
        return gradients["theta"], losses


def _one_number(loss: Tensor) -> Tensor:
    """Return a client's loss []; raise ValueError if it is not one number."""
    if loss.numel() != 1:
        raise ValueError(f"a loss of one client has the shape {[*loss.shape]}; return one number: .mean()")
    return loss.reshape(())


def set_cuda_arithmetic(tf32: bool) -> None:
    """Let GPUs give the same bits twice, and float32 products all their digits unless `tf32`."""
    # by default, cuDNN adds in a random order, and rounds the factors of convolutions
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


def has_bfloat16() -> bool:
    """Whether this processor has bfloat16 products in hardware; False if torch does not report it."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def _fastest_order(x: Tensor) -> Tensor:
    """Return images [B, channels, height, width] in the memory order that suits a CPU's convolutions.

    Tensors that are not images are returned unchanged.
    """
    if x.dim() != 4 or x.device.type != "cpu":
        return x
    return x.contiguous(memory_format=torch.channels_last)


Engine = LoopEngine | BatchedEngine
"""What a method's training needs: gradients of per-client losses, for `clients_at_once` at a time."""


def training_copy(network: nn.Module) -> nn.Module:
    """Return a copy of a network in training mode, whose BatchNorm does not count mini-batches."""
    working = copy.deepcopy(network).train()
    for module in working.modules():
        if isinstance(module, BATCHNORM):
            module.num_batches_tracked = None
    return working


def without_cudnn_batchnorm(network: nn.Module) -> nn.Module:
    """Let BatchNorm use PyTorch's kernels if the network is on a GPU; return the network, which is changed.

    Those of cuDNN load four weights at once, and the weights in a flat vector may begin anywhere (its error:
    misaligned address). Under vmap they are copied before, so the batched engine can use cuDNN's.
    """
    if next(network.parameters()).is_cuda:
        for module in network.modules():
            if isinstance(module, BATCHNORM):
                module.forward = partial(_forward_without_cudnn, module)  # type: ignore[method-assign]
    return network


def _forward_without_cudnn(module: nn.Module, x: Tensor) -> Tensor:
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, False
    try:
        return type(module).forward(module, x)
    finally:
        torch.backends.cudnn.enabled = enabled
