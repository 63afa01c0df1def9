"""A CUDA device that is not there, as far as Python code can tell.

Programs branch on ``torch.cuda.is_available()``, ``torch.autocast("cuda")`` turns itself off
without a device, and libraries pick kernels by compute capability; all of that has to go as on
the GPU.  So while ``pretend_gpu`` is active, the driver calls under ``torch.cuda`` answer for one
named GPU. Nothing is allocated and no kernel runs: every CUDA tensor is a fake one.

Assumes a CUDA build of torch and no GPU.  The functions that reach the driver are replaced rather
than ``torch.cuda.is_available`` and its like, so that names imported earlier answer the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from offplan.gpus import Gpu
from offplan.trace._torch import (
    TorchDispatchMode,
    fake_tensor_module,
    proxy_tensor_module,
    torch_c,
    unset_fake_temporarily,
)

# Names that torch.cuda has only once it is initialized, which it never is here.
_BOUND_LATE = frozenset({"_get_device_properties"})


@contextmanager
def pretend_gpu(gpu: Gpu) -> Iterator[None]:
    """Answer ``torch.cuda`` queries for ``gpu`` inside the context."""
    with ExitStack() as stack:
        for owner, name, answer in _answers(gpu):
            if hasattr(owner, name) or name in _BOUND_LATE:
                stack.enter_context(mock.patch.object(owner, name, answer, create=True))
        yield


def _answers(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    properties = _properties(gpu)
    rng_state = torch.zeros(16, dtype=torch.uint8)
    yield torch_c, "_cuda_getDeviceCount", lambda: 1
    yield torch_c, "_cuda_getDevice", lambda: 0
    yield torch_c, "_cuda_setDevice", lambda device: None
    yield torch_c, "_cuda_exchangeDevice", lambda device: 0
    yield torch_c, "_cuda_maybeExchangeDevice", lambda device: 0
    # Bound by name where torch.cuda was imported.
    yield torch.cuda, "_exchange_device", lambda device: 0
    yield torch.cuda, "_maybe_exchange_device", lambda device: 0
    yield torch.cuda, "_device_count_nvml", lambda: 1
    yield torch.cuda, "_lazy_init", lambda: None
    yield torch.cuda, "_get_device_properties", lambda device: properties
    yield torch.cuda, "get_device_properties", lambda device=None: properties
    yield torch.cuda, "get_device_capability", lambda device=None: gpu.capability
    yield torch.cuda, "get_device_name", lambda device=None: gpu.name
    yield torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", lambda: False
    yield torch.cuda, "synchronize", lambda device=None: None
    yield torch.cuda, "empty_cache", lambda: None
    for module in (torch.cuda, torch.cuda.random):
        yield module, "get_rng_state", lambda device="cuda": rng_state.clone()
        yield module, "set_rng_state", lambda new_state, device="cuda": None
    yield torch.cuda, "default_generators", (_Generator(),)
    yield torch_c, "_select_conv_backend", _conv_backends(gpu)
    # It would allocate a real byte on the device, to initialize the context for the engine.
    yield fake_tensor_module, "init_gpu_context", lambda *device: None
    # Small constants are also computed for real, which has to happen on the host.
    yield proxy_tensor_module, "unset_fake_temporarily", _unset_fake_on_host


def _conv_backends(gpu: Gpu) -> Callable[..., Any]:
    """What chooses the kernel of a convolution, and with it the layout of its output.

    Without a device cuDNN is taken to have none for bfloat16, which it has from Ampere on: for the
    rest these go as those of float16 do.
    """
    select = torch_c._select_conv_backend
    if gpu.capability < (8, 0):
        return select  # type: ignore[no-any-return]

    def as_half(argument: Any) -> Any:
        is_bf16 = isinstance(argument, torch.Tensor) and argument.dtype == torch.bfloat16
        return argument.to(torch.float16) if is_bf16 else argument

    def answer(*args: Any, **kwargs: Any) -> Any:
        named = {name: as_half(argument) for name, argument in kwargs.items()}
        return select(*map(as_half, args), **named)

    return answer


class _OnHost(TorchDispatchMode):
    """Runs what is asked of the GPU on the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, with what it computes for real on the GPU computed on the CPU instead."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():
            return function(*args, **kwargs)

    return call


@contextmanager
def _unset_fake_on_host() -> Iterator[Any]:
    with unset_fake_temporarily() as fake_mode, _OnHost():
        yield fake_mode


class _Generator(torch.Generator):
    """Stands for the device's random-number generator in graphs that recompute dropout."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)

    def clone_state(self) -> _Generator:
        return self

    def graphsafe_get_state(self) -> _Generator:
        return self

    def graphsafe_set_state(self, state: torch.Generator) -> _Generator:
        return self


def _properties(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessor_count,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
