"""A simulated GPU: CPU memory that is marked as a GPU's and refuses what a GPU would refuse.

Inside `marked_device()` a tensor on `DEVICE` reports this device, is moved there by `device=` or `.to`, and
its numbers are real: whole runs work, with the results of a CPU. An operator on tensors of both devices
raises MixedDevicesError, except for CPU tensors without axes, which CUDA accepts too. What makes a GPU
and its host wait for each other is counted. Both work below torch.func's transforms and in the backward pass.

It knows nothing of kernels, streams or memory: operators that CUDA lacks or that give other numbers there are
found on a GPU only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

aten = torch.ops.aten

WAITS = (
    *(aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.bincount),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.histc),
)
"""Operators whose result, or its shape, the host must know before it continues."""
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)
PICKS = (aten.index_select, aten.gather, aten.scatter, aten.take)

FACTORIES_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that bring Python numbers to a device; others make them there."""
MOVES = (torch.Tensor.to, torch.Tensor.cpu)


class MixedDevicesError(Exception):
    """Tensors of the marked device met tensors of the CPU."""


class Marked:
    """Which memory is marked, and what was done with it."""

    def __init__(self) -> None:
        self._marks: dict[int, StorageWeakRef] = {}
        self.transfers = Counter[str]()
        """Copies "to device" and "to host"; each also makes the host wait, unless memory is pinned."""
        self.numbers = Counter[tuple[str, torch.dtype]]()
        """How many numbers of each type went either way."""
        self.waits = Counter[str]()
        """Operators on the device, by name, whose result the host waits for."""
        self.operators = Counter[str]()
        """All operators that touched the device, by name: kernels and views."""

    @property
    def stops(self) -> int:
        """How often the host had to wait for the device."""
        return self.transfers.total() + self.waits.total()

    def holds(self, value: Any) -> bool:
        """Return whether a value is a tensor on the marked device."""
        if not isinstance(value, Tensor):
            return False
        mark = self._marks.get(_storage(value)._cdata)
        return mark is not None and not mark.expired()

    def record(self, way: str, tensor: Tensor) -> None:
        """Count a transfer."""
        self.transfers[way] += 1
        self.numbers[way, tensor.dtype] += tensor.numel()

    def put(self, value: Any, device: torch.device) -> Any:
        """Mark the tensors of a result as on a device; return the result."""
        for tensor in _tensors([value]):
            storage = _storage(tensor)
            if device.type == "cpu":
                self._marks.pop(storage._cdata, None)
            else:
                self._marks[storage._cdata] = StorageWeakRef(storage)
        if len(self._marks) > 10_000:
            # a weak reference keeps the address from being used again, so it goes only when it is expired
            self._marks = {key: mark for key, mark in self._marks.items() if not mark.expired()}
        return value


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among arguments or results; torch's own flattening takes a run's half."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the memory of a tensor, below the transforms of torch.func."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.untyped_storage()


class _Functions(TorchFunctionMode):
    """Sees what Python asks of torch: devices of tensors, and tensors on devices."""

    def __init__(self, marked: Marked) -> None:
        super().__init__()
        self._marked = marked
        self.inside: list[bool] = []
        """For each call under way, whether it was given a tensor on the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marked = self._marked
        # getters are made anew at every look
        if func == torch.Tensor.device.__get__:
            return DEVICE if marked.holds(args[0]) else CPU
        if func == torch.Tensor.is_cuda.__get__:
            return marked.holds(args[0])
        if func is torch.Tensor.get_device:
            return 0 if marked.holds(args[0]) else -1
        on_device = any(marked.holds(tensor) for tensor in _tensors([*args, *kwargs.values()]))
        if on_device and func in (torch.Tensor.numpy, torch.Tensor.__array__):
            raise TypeError("can't convert a tensor on the marked device to numpy; use .cpu() first")
        if on_device and func is torch.Tensor.tolist:
            marked.waits["tolist"] += 1
        if func in MOVES:
            return self._move(func, args, kwargs)
        target = None
        if kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            generator = kwargs.get("generator")
            if generator is not None and generator.device.type != target.type:
                raise MixedDevicesError(f"{func}: a generator of {generator.device} for {target}")
            kwargs = kwargs | {"device": CPU}
        self.inside.append(on_device)
        try:
            result = func(*args, **kwargs)
        finally:
            self.inside.pop()
        if target is not None:
            if target != CPU and func in FACTORIES_OF_DATA:
                marked.record("to device", result)
            return marked.put(result, target)
        if func is torch.Tensor.__deepcopy__ and on_device:
            return marked.put(result, DEVICE)
        return result

    def _move(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what `.to` and `.cpu` do, between the devices if they ask for it."""
        tensor, *rest = args
        marked, here = self._marked, DEVICE if self._marked.holds(tensor) else CPU
        there = here
        if func is torch.Tensor.cpu:
            there, rest = CPU, [CPU]
        else:
            for value in [*rest, *kwargs.values()]:
                if isinstance(value, Tensor):
                    there = DEVICE if marked.holds(value) else CPU
                elif isinstance(value, str | torch.device):
                    there = torch.device(value)
            rest = [CPU if isinstance(value, str | torch.device) else value for value in rest]
            kwargs = {name: CPU if name == "device" else value for name, value in kwargs.items()}
        if there == here:
            return tensor.to(*rest, **kwargs)
        marked.record("to host" if there == CPU else "to device", tensor)
        # a copy whatever the type: the two sides share no memory
        return marked.put(tensor.to(*rest, **(kwargs | {"copy": True})), there)


class _Operators(TorchDispatchMode):
    """Sees the operators that run in the end: checks their sides, marks their results, counts."""

    def __init__(self, marked: Marked, functions: _Functions) -> None:
        super().__init__()
        self._marked, self._functions = marked, functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        marked, packet = self._marked, func.overloadpacket
        tensors = _tensors([*args, *kwargs.values()])
        sides = [marked.holds(tensor) for tensor in tensors]
        if not tensors:
            # made inside of an operator of Python's, such as a gradient of zeros, for its tensors
            result = func(*args, **kwargs)
            return marked.put(result, DEVICE) if any(self._functions.inside) else result
        if not any(sides):
            return func(*args, **kwargs)
        marked.operators[packet.__name__] += 1
        if packet is aten.copy_:
            if sides[0] != sides[1]:
                marked.record("to device" if sides[0] else "to host", args[1])
            return func(*args, **kwargs)
        self._check(packet, args, tensors, sides)
        self._count(packet, args, kwargs)
        return marked.put(func(*args, **kwargs), DEVICE)

    def _check(self, packet: Any, args: Any, tensors: Sequence[Tensor], sides: Sequence[bool]) -> None:
        """Refuse tensors of both sides, but for what CUDA takes."""
        if all(sides):
            return
        marked = self._marked
        if packet in INDEXING:
            indices = [index for index in args[1] if index is not None]
            own, values = marked.holds(args[0]), args[2:3]
            if own:
                # CUDA brings indices over by itself
                for index in indices:
                    if not marked.holds(index):
                        marked.record("to device", index)
                sides = [own, *(marked.holds(value) or value.dim() == 0 for value in values)]
            if all(sides):
                return
        elif all(
            side or (tensor.dim() == 0 and packet not in PICKS)
            for tensor, side in zip(tensors, sides, strict=True)
        ):
            return
        where = ", ".join(
            f"{tuple(tensor.shape)} on {DEVICE if side else CPU}"
            for tensor, side in zip(tensors, [marked.holds(tensor) for tensor in tensors], strict=True)
        )
        raise MixedDevicesError(f"{packet.__name__} of tensors of two devices: {where}")

    def _count(self, packet: Any, args: Any, kwargs: Any) -> None:
        """Count an operator that the host waits for."""
        waits = packet in WAITS
        if packet in INDEXING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            # one number put behind a mask needs no positions
            fills = packet is not aten.index and len(masks) == 1 and args[2].numel() == 1
            # a number of the host comes from memory that is not pinned
            from_host = packet is not aten.index and not self._marked.holds(args[2])
            waits = (bool(masks) and not fills) or from_host
        elif packet is aten.repeat_interleave:
            waits = kwargs.get("output_size") is None
        if waits:
            self._marked.waits[packet.__name__] += 1


@contextmanager
def marked_device() -> Iterator[Marked]:
    """Provide `DEVICE` inside, and record what is done with it."""
    marked = Marked()
    functions = _Functions(marked)
    with functions, _Operators(marked, functions):
        yield marked
