"""The GPUs that offplan can trace for without having them.

Memory, multiprocessors and compute capability are the vendor's published figures.  Compute
capability decides which attention kernels torch would choose; the rest answers programs that ask
``torch.cuda.get_device_properties``.
"""

from __future__ import annotations

from dataclasses import dataclass

from offplan.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch describes it.  ``memory_bytes`` is the whole device memory."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessor_count: int


_GIB = 1024**3

GPUS: dict[str, Gpu] = {
    "h200": Gpu("NVIDIA H200", (9, 0), 141 * 1000**3, 132),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80 * _GIB, 132),
    "b200": Gpu("NVIDIA B200", (10, 0), 180 * 1000**3, 148),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80 * _GIB, 108),
    "a10": Gpu("NVIDIA A10", (8, 6), 24 * _GIB, 72),
    "l4": Gpu("NVIDIA L4", (8, 9), 24 * _GIB, 58),
    "l40s": Gpu("NVIDIA L40S", (8, 9), 48 * _GIB, 142),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 24 * _GIB, 82),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24 * _GIB, 128),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32 * _GIB, 170),
    "v100": Gpu("Tesla V100-SXM2-32GB", (7, 0), 32 * _GIB, 80),
    "t4": Gpu("Tesla T4", (7, 5), 16 * _GIB, 40),
}
DEFAULT_GPU = "h200"


def find_gpu(name: str) -> Gpu:
    """The GPU called ``name``: a key of ``GPUS``, however spelt (``RTX-4090``), or torch's name."""
    wanted = _letters(name)
    for key, gpu in GPUS.items():
        if wanted in (key, _letters(gpu.name)):
            return gpu
    raise UsageError(f"unknown GPU {name!r}", fix=f"use one of: {', '.join(GPUS)}")


def gpu_key(name: str) -> str | None:
    """The short name of the GPU that torch calls ``name``; None if it is not listed."""
    return next((key for key, gpu in GPUS.items() if gpu.name == name), None)


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
