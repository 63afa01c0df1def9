"""Live bytes of the CPU, measured: what the caching allocator tells on a GPU.

``LiveBytes`` is a dispatch mode.  While it is active, each op's new storages are counted until they
are gone, and so are the buffers of code that Inductor compiled.  Storages that were there before,
host memory of a replay among them, are not counted, nor is what a kernel allocates and frees inside
itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offplan.replay.generated import Watch
from offplan.trace._torch import storage_key, tree_leaves


class LiveBytes(Watch):
    """Counts bytes of CPU storages made since it was made.

    ``peak_bytes`` is the most that was live after any op, the op's inputs and outputs included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes of the counted storages that are still there."""
        self._forget_dead()
        return sum(size for _, size in self.storages.values())

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A reused address must not pass for the storage that had it before.
        self._forget_dead()
        known = {storage_key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            if storage_key(tensor) not in known:
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def made(self, tensor: torch.Tensor) -> None:
        """Count a buffer that no op returned."""
        if tensor.device.type != "cpu":
            return
        self._forget_dead()
        self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _count(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self.storages:
            storage = tensor.untyped_storage()
            self.storages[key] = (StorageWeakRef(storage), storage.nbytes())

    def _forget_dead(self) -> None:
        dead = [key for key, (reference, _) in self.storages.items() if reference.expired()]
        for key in dead:
            del self.storages[key]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(tree)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and leaf.device.type == "cpu"
    ]
