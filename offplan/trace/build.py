"""Build a model without allocating it, and place it on the traced device.

While ``building`` is active:

1.  Parameters are fake from the moment they are made.
2.  Small tensors on the CPU that no fake tensor went into are real, so that constructors can read
    them (``.item()``, ``.tolist()``, tables of rotary frequencies).  Small means 1 MiB, and no more
    than 256 MiB in all.
3.  Every other tensor, and everything on a GPU, is fake.

``place`` then moves parameters, buffers and inputs to the device that is traced for, as
``model.to`` would, keeping identities (tied weights), shared storages, strides and offsets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from offplan.errors import TargetError
from offplan.trace._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    is_traceable_wrapper_subclass,
    storage_key,
    tree_leaves,
    tree_map,
)

# Large enough for the tables that constructors read, small enough to hold hundreds of them.
_REAL_TENSOR_BYTES = 1024**2
_REAL_TOTAL_BYTES = 256 * 1024**2

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    UnsupportedFakeTensorException,
    NotImplementedError,
)


@contextmanager
def building(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Run a model's constructor inside the context without allocating the model."""
    with (
        mock.patch.object(torch.nn.Parameter, "__new__", _fake_parameter(fake_mode)),
        mock.patch.object(torch.nn.Module, "_apply", _apply),
        # It draws again until every value is in range, which on fake tensors never comes true.
        mock.patch.object(torch.nn.init, "_no_grad_trunc_normal_", _keep_values),
        _BuildMode(fake_mode),
    ):
        yield


class _BuildMode(TorchDispatchMode):
    """Decides for each op whether it runs for real or on fake tensors (definitions 2 and 3)."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.real_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._fake(func, args, kwargs)
        if device is not None and torch.device(device).type not in ("cpu", "meta"):
            return self._fake(func, args, kwargs)
        if _is_meta(device, tensors) or _is_alias_or_write(func):
            return func(*args, **kwargs)
        return self._small_is_real(func, args, kwargs)

    def _fake(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake_mode:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise TargetError(
                f"building the model reads values ({func}) of a tensor that is not allocated",
                fix="compute it in Python, or from a tensor under 1 MiB made without parameters",
            ) from error

    def _small_is_real(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            with self.fake_mode:
                result = func(*args, **kwargs)
        except _NEEDS_VALUES:
            # It reads values or has no fake kernel; its inputs are real and therefore small.
            return func(*args, **kwargs)
        size = sum(_storage_bytes(leaf) for leaf in tree_leaves(result))
        if size > _REAL_TENSOR_BYTES or self.real_bytes + size > _REAL_TOTAL_BYTES:
            return result
        self.real_bytes += size
        return func(*args, **kwargs)


def _storage_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0
    return int(value.untyped_storage().nbytes())


def _is_meta(device: Any, tensors: list[torch.Tensor]) -> bool:
    if device is not None:
        return torch.device(device).type == "meta"
    return any(tensor.device.type == "meta" for tensor in tensors)


def _is_alias_or_write(func: Any) -> bool:
    """Views and in-place ops follow their real input: they allocate nothing."""
    schema = func._schema
    return schema.is_mutable or any(item.alias_info is not None for item in schema.returns)


def _fake_parameter(fake_mode: FakeTensorMode) -> Callable[..., Any]:
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0)
        if not isinstance(data, FakeTensor) and data.device.type != "meta":
            data = fake_mode.from_tensor(data.detach())
        return original(cls, data, requires_grad)

    return new


def _keep_values(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
    """``nn.Module._apply`` for fake parameters: each is changed in place, as a real one would be.

    The stock version swaps tensors, which refuses any fake tensor that its mode still refers to.
    """
    if recurse:
        for module in self.children():
            module._apply(fn)
    for parameter in self._parameters.values():
        if parameter is not None:
            with torch.no_grad():
                _overwrite(parameter, fn(parameter))
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = fn(buffer)
    return self


def _overwrite(parameter: torch.Tensor, new: torch.Tensor) -> None:
    if new is parameter:
        return
    parameter.data = new
    if isinstance(new, FakeTensor):
        parameter.fake_device = new.fake_device  # type: ignore[attr-defined]


def shadow(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of ``model`` that shares its parameters and buffers; placing it leaves them alone."""
    original = getattr(model, "_orig_mod", model)
    tensors = [*original.parameters(), *original.buffers()]
    try:
        return copy.deepcopy(original, {id(tensor): tensor for tensor in tensors})
    except Exception as error:
        raise TargetError(
            f"the model cannot be copied, which analysis does without its tensors: {error}",
            fix="analyze a target file, whose factory builds the model",
        ) from error


class Placer:
    """Moves tensors to ``device`` as fake ones, once per tensor and once per storage."""

    def __init__(self, fake_mode: FakeTensorMode, device: torch.device) -> None:
        self.fake_mode = fake_mode
        self.device = device
        self.moved: dict[int, torch.Tensor] = {}
        self.bases: dict[int, torch.Tensor] = {}
        # Keeps the originals alive: ids and storage keys are only unique while they are.
        self.originals: list[torch.Tensor] = []

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the device; the same result for the same tensor."""
        if id(tensor) not in self.moved:
            self.originals.append(tensor)
            self.moved[id(tensor)] = self._moved(tensor)
        return self.moved[id(tensor)]

    def model(self, model: torch.nn.Module) -> None:
        """Move the parameters and buffers of ``model``, keeping ties between them."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._parameter(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.move(buffer)

    def tree(self, values: Any) -> Any:
        """``values`` with every tensor in it moved, inside mappings of any class too."""
        return tree_map(self._leaf, values)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.move(value)
        if isinstance(value, MutableMapping):
            # Such as a tokenizer's BatchEncoding: no container that torch knows to look into.
            moved = copy.copy(value)
            for key, item in value.items():
                moved[key] = self.tree(item)
            return moved
        if callable(getattr(value, "to", None)):
            # A batch of the user's own: it knows how to move itself.
            with self.fake_mode:
                return value.to(self.device)
        return value

    def _parameter(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
            raise TargetError(
                "the model has a lazy module whose parameters have no shape yet",
                fix="give the layer its input size, or run the model once on a real input",
            )
        if isinstance(parameter, FakeTensor):
            if id(parameter) not in self.moved:
                self.originals.append(parameter)
                self.moved[id(parameter)] = parameter
                _overwrite(parameter, self._moved(parameter.detach()))
            return parameter
        known = self.moved.get(id(parameter))
        if known is None:
            self.originals.append(parameter)
            known = torch.nn.Parameter(self._moved(parameter.detach()), parameter.requires_grad)
            self.moved[id(parameter)] = known
        assert isinstance(known, torch.nn.Parameter)
        return known

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if (
            is_traceable_wrapper_subclass(tensor)
            or tensor.is_nested
            or tensor.layout != torch.strided
        ):
            raise TargetError(
                f"a parameter, buffer or input is a {_kind(tensor)}, which offplan cannot place",
                fix="use a plain strided tensor",
            )
        if isinstance(tensor, FakeTensor) and tensor.device.type not in ("cpu", "meta"):
            return tensor
        with self.fake_mode, torch.no_grad():
            placed = self._window(tensor)
        return placed.requires_grad_(tensor.requires_grad)

    def _window(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        if key not in self.bases and storage_bytes == tensor.numel() * tensor.itemsize:
            # The usual case: the tensor is all of its storage, and needs no view of a base.
            self.bases[key] = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device
            )
            return self.bases[key].detach()
        if key not in self.bases:
            self.bases[key] = torch.empty(storage_bytes, dtype=torch.uint8, device=self.device)
        flat = self.bases[key].as_strided((self._elements(key),), (1,), 0)
        flat = flat if flat.dtype == tensor.dtype else flat.view(torch.uint8).view(tensor.dtype)
        return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset()).detach()

    def _elements(self, key: int) -> int:
        base = self.bases[key]
        return base.untyped_storage().nbytes() // base.itemsize


def _kind(tensor: torch.Tensor) -> str:
    if is_traceable_wrapper_subclass(tensor):
        return type(tensor).__name__
    if tensor.is_nested:
        return "nested tensor"
    return str(tensor.layout).removeprefix("torch.") + " tensor"
