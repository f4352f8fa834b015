"""Squared norms of the gradients of single samples, without making these gradients one by one.

A layer's gradient on one sample is a product of what the layer received and of the gradient of what it gave,
so one backward pass of a mini-batch is enough (Goodfellow, Efficient per-example gradient computations,
2015).

Shapes: n samples, T positions of a sample in a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, unfold

from hpcfl.parameters import Tensors

SAMPLES_AT_ONCE = 32
"""Samples of one backward pass; more of them are slower on a CPU, whose caches they do not fit in."""
NUMBERS_AT_ONCE = 2**24
"""Most numbers of gradients by sample that are in memory at once, or one sample's."""


def squared_gradients(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return ||d log p(y | x) / d weights||^2 of each sample [n].

    The network must be in evaluation mode: in training mode, BatchNorm lets samples depend on each other.
    """
    has_tied = len([*network.named_parameters(remove_duplicate=False)]) > len([*network.parameters()])
    if has_tied or not all(_is_covered(module) for module in _with_weights(network)):
        return _one_by_one(network, x, y)
    # a weight may act outside its layer too: try it, with unlikely labels, whose gradients are not near 0
    some = x[:3]
    with torch.no_grad():
        unlikely = network(some).argmin(dim=1)
    tried = _by_layer(network, some, unlikely)
    if tried is None or not torch.allclose(tried, _in_a_loop(network, some, unlikely), rtol=1e-3, atol=0):
        return _one_by_one(network, x, y)
    squares = []
    for part in zip(x.split(SAMPLES_AT_ONCE), y.split(SAMPLES_AT_ONCE), strict=True):
        of_part = _by_layer(network, *part)
        squares.append(_one_by_one(network, *part) if of_part is None else of_part)
    return torch.cat(squares)


def _with_weights(network: nn.Module) -> list[nn.Module]:
    return [module for module in network.modules() if list(module.parameters(recurse=False))]


def _is_covered(module: nn.Module) -> bool:
    # a subclass or a hook may compute something else
    if type(module) not in (nn.Conv2d, nn.BatchNorm2d, nn.Linear):
        return False
    if module._forward_pre_hooks or module._forward_hooks:
        return False
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if isinstance(module, nn.BatchNorm2d):
        return module.running_mean is not None
    return True


def _watched(network: nn.Module, x: Tensor) -> tuple[Tensor, list[tuple[nn.Module, Tensor, Tensor]]]:
    """Return the logits, and for each use of a layer with weights: the layer, what it received and gave."""
    received: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        received.append((module, inputs[0].detach(), output))
        # what follows may change its input in place
        return output.clone()

    hooks = [module.register_forward_hook(keep) for module in _with_weights(network)]
    try:
        return network(x), received
    finally:
        for hook in hooks:
            hook.remove()


def _is_by_sample(
    network: nn.Module, received: list[tuple[nn.Module, Tensor, Tensor]], num_samples: int
) -> bool:
    """Whether each layer was used once, with the samples as first axis.

    A layer that is used twice has the sum of two products; one that receives the steps of all samples as so
    many samples, or the steps as its first axis, does not tell the samples apart.
    """
    return len(received) == len(_with_weights(network)) and all(
        len(inputs) == len(output) == num_samples for _, inputs, output in received
    )


@torch.enable_grad()
def _by_layer(network: nn.Module, x: Tensor, y: Tensor) -> Tensor | None:
    """Return the same from one backward pass; None where a layer does not tell the samples apart."""
    logits, received = _watched(network, x)
    if not _is_by_sample(network, received, len(x)):
        return None
    loss = cross_entropy(logits, y, reduction="sum")
    slopes = torch.autograd.grad(loss, [output for _, _, output in received])
    squares = [
        _of_layer(module, inputs, slope) for (module, inputs, _), slope in zip(received, slopes, strict=True)
    ]
    return torch.stack(squares).sum(dim=0)


def _of_layer(layer: nn.Module, inputs: Tensor, slope: Tensor) -> Tensor:
    """Return the squared norm of one layer's gradient on each sample [n].

    `inputs` is what the layer received, `slope` the gradient of what it gave.
    """
    if isinstance(layer, nn.BatchNorm2d):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        centred = inputs - layer.running_mean[:, None, None]
        scaled = centred * (layer.running_var + layer.eps).rsqrt()[:, None, None]
        by_weight, by_bias = (slope * scaled).sum(dim=(2, 3)), slope.sum(dim=(2, 3))
        return by_weight.square().sum(dim=1) + by_bias.square().sum(dim=1)
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        # what the convolution multiplies by its weights at each place
        patches = unfold(inputs.contiguous(), layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        rows, slope = patches.transpose(1, 2), slope.flatten(start_dim=2)
    else:
        rows = inputs.flatten(start_dim=1, end_dim=-2) if inputs.dim() > 2 else inputs.unsqueeze(1)
        slope = slope.flatten(start_dim=1, end_dim=-2) if slope.dim() > 2 else slope.unsqueeze(1)
        slope = slope.transpose(1, 2)
    if rows.shape[1] == 1:
        squares = slope.square().sum(dim=(1, 2)) * rows.square().sum(dim=(1, 2))
    else:
        squares = (slope @ rows).square().sum(dim=(1, 2))
    return squares if layer.bias is None else squares + slope.sum(dim=2).square().sum(dim=1)


def _one_by_one(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the same for any network, by a gradient for each sample."""
    if any(isinstance(module, nn.RNNBase) for module in network.modules()):
        # vmap has no rule for these, and would be slower than a loop
        return _in_a_loop(network, x, y)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(network, weights, x.unsqueeze(0)), y.unsqueeze(0))

    def squared(x: Tensor, y: Tensor) -> Tensor:
        slopes: Tensors = grad(loss)(weights, x, y)
        return torch.stack([slope.square().sum() for slope in slopes.values()]).sum()

    at_once = max(1, NUMBERS_AT_ONCE // sum(weight.numel() for weight in weights.values()))
    return vmap(squared, chunk_size=at_once)(x, y)


@torch.enable_grad()
def _in_a_loop(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    squares = []
    for sample in range(len(y)):
        part = slice(sample, sample + 1)
        slopes = torch.autograd.grad(cross_entropy(network(x[part]), y[part]), [*network.parameters()])
        squares.append(torch.stack([slope.square().sum() for slope in slopes]).sum())
    return torch.stack(squares)
