"""Two processes that train together: ``python ddp_loop.py STORE COMPILER:WAY...``.

The second is forked of the first once that has imported what takes seconds.  Each trains with
torch's compiler and with a backend that moves everything, compares all bits, and prints as a line
of JSON what was moved, in how many graphs, by compiler and way.  A way is what is compiled:
``outside`` the wrapped model, whose graph torch splits where gradients are reduced; ``inside`` the
model that is wrapped; ``accumulate`` as outside, with micro-steps that do not reduce.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_loops import Net, assert_same, batch, loss_of, small_backend

from offplan.replay import training
from offplan.trace._torch import reset_dynamo

# A layer's weights are over 1 MiB, the least that a bucket takes: three buckets, of a layer each.
WIDE = 192


def train(rank: int, way: str, chosen: Any) -> dict[str, torch.Tensor]:
    reset_dynamo()
    torch.manual_seed(0)
    model = Net(layers=3, width=WIDE)
    if way == "inside":
        model.compile(backend=chosen)
    wrapped: nn.Module = DistributedDataParallel(model, bucket_cap_mb=1)
    call = wrapped if way == "inside" else torch.compile(wrapped, backend=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        for micro in range(2 if way == "accumulate" else 1):
            is_last = way != "accumulate" or micro == 1
            with nullcontext() if is_last else wrapped.no_sync():
                loss = loss_of(call(batch(100 * step + 10 * micro + rank, width=WIDE)))
                loss.backward()
            found[f"loss {step}.{micro}"] = loss.detach()
        gradients = {f"gradient {step} {n}": p.grad.clone() for n, p in model.named_parameters()}
        found |= gradients
        optimizer.step()
        optimizer.zero_grad()
    return found | {n: p.detach().clone() for n, p in model.named_parameters()}


def main(arguments: Sequence[str]) -> None:
    store, *asked = arguments
    other = os.fork()
    rank = int(other == 0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    try:
        found = {}
        for name in asked:
            compiler, _, way = name.partition(":")
            found[name] = compared(rank, way, compiler)
    finally:
        torch.distributed.destroy_process_group()
    if other:
        _, status = os.waitpid(other, 0)
        assert status == 0
    print(json.dumps(found))


def compared(rank: int, way: str, compiler: Any) -> dict[str, Any]:
    expected = train(rank, way, compiler)
    with small_backend(budget=0, compiler=compiler) as made, heard_saved_bytes() as saved:
        found = train(rank, way, made)
        stats, plans = made.stats(), sum(bool(plan.transfers) for plan in made.plans)
    assert_same(found, expected)
    gathered = [torch.zeros_like(found["layers.0.up.weight"]) for _ in range(2)]
    torch.distributed.all_gather(gathered, found["layers.0.up.weight"])
    assert torch.equal(*gathered)
    counts = {"plans": plans, "leases": stats.lease_count, "moved": stats.offload_count}
    return counts | {"saved": saved}


@contextmanager
def heard_saved_bytes() -> Iterator[list[int]]:
    """What the earlier parts of a split graph will save, as each part is planned."""
    heard: list[int] = []

    def elsewhere(inputs: Any, device: torch.device, saved_bytes: int) -> int:
        heard.append(saved_bytes)
        return 0

    with mock.patch.object(training, "_elsewhere_bytes", elsewhere):
        yield heard


if __name__ == "__main__":
    main(sys.argv[1:])
