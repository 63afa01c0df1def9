"""Each kind of wrong copy is found by ``offplan verify``: the code is broken on purpose.

Without a paced link, most of these would pass: the copies of a small step land in time by luck, or,
on the CPU, at once.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from offplan.replay import rewrite
from offplan.replay.cases import find_cases
from offplan.replay.host import HostPool, Pageable
from offplan.replay.pace import PacedCpuLink, paced
from offplan.replay.packing import scatter
from offplan.replay.runtime import CpuLink, Runtime, Slot
from offplan.replay.selftest import Asked, verify_one
from offplan.verified import CaseResult, Pace

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def verified(name: str, device: str = "cpu", repeats: int = 1) -> CaseResult:
    (case,) = find_cases([name])
    return verify_one(
        Asked(
            name=case.name,
            target=case.target,
            is_case=True,
            device=device,
            compiler="aot_eager",
            repeats=repeats,
        )
    )


def paces(found: CaseResult) -> set[Pace]:
    return {each.pace for each in found.differences}


def never_arrives(self: Runtime, buffer: torch.Tensor) -> None:
    """``Runtime.wait`` without the wait."""
    arriving = self._arriving.pop(buffer.data_ptr())
    if arriving.packed is not None:
        slot = arriving.slot
        scatter(arriving.packed, buffer.untyped_storage(), slot.first_byte, slot.pieces)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["interleaved-qkv", "gaps-are-packed"])
def test_a_reload_that_is_not_waited_for_is_found(name, device, monkeypatch):
    monkeypatch.setattr(Runtime, "wait", never_arrives)
    found = verified(name, device)
    assert found.outcome == "different"
    assert "slow" in paces(found)
    assert {"loss", "gradient"} & {each.what for each in found.differences}


@pytest.mark.parametrize("name", ["interleaved-qkv", "gaps-are-packed"])
def test_a_release_that_does_not_wait_for_its_offload_is_found(name, monkeypatch):
    """On a GPU it only shows if the memory is used again in time, which a small step does not."""

    def let_go(self: Runtime, number: int) -> torch.Tensor:
        return self._sending.pop(number).value

    monkeypatch.setattr(Runtime, "let_go", let_go)
    found = verified(name, repeats=5)
    assert found.outcome == "different"
    assert "slow to the host" in paces(found) or "slow" in paces(found)
    # Nothing is wrong where copies land in time.
    assert "as they come" not in paces(found)


def test_an_arena_that_is_used_again_before_its_last_reload_is_found(monkeypatch):
    original = Runtime.reload

    def reload(self: Runtime, host: torch.Tensor, number: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = original(self, host, number, dtype)
        self.pool.by_address[host.data_ptr()].last_reload = None
        return buffer

    monkeypatch.setattr(Runtime, "reload", reload)
    found = verified("stepped")
    assert found.outcome == "different"
    assert {each.what for each in found.differences} == {"order of copies"}


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_byte_range_is_found(device, monkeypatch):
    original = Runtime._offload

    def shifted(self: Runtime, value: torch.Tensor, number: int, first: int) -> torch.Tensor:
        slot = self.slots[number]
        return original(self, value, number, first - (0 if slot.pieces else min(8, slot.start)))

    monkeypatch.setattr(Runtime, "_offload", shifted)
    found = verified("shifted-labels", device)
    assert found.outcome == "different"
    assert "as they come" in paces(found)


@pytest.mark.parametrize("device", DEVICES)
def test_a_range_that_ends_too_early_is_found(device, monkeypatch):
    original = rewrite._Move.slot

    def shorter(self: Any, host_offset: int) -> Slot:
        slot = original(self, host_offset)
        if slot.item_bytes == 4:
            # Its buffer would be too short for its views, which is refused before anything runs.
            return slot
        return replace(slot, stop=slot.stop - 4, transfer_bytes=slot.transfer_bytes - 4)

    monkeypatch.setattr(rewrite._Move, "slot", shorter)
    found = verified("conjugate-view", device)
    assert found.outcome == "different"
    assert {"bytes to the host", "gradient"} <= {each.what for each in found.differences}


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_stride_is_found(device, monkeypatch):
    original = rewrite._call_aten

    def turned(side: Any, undo: Any, target: Any, args: tuple[Any, ...]) -> Any:
        if target is torch.ops.aten.as_strided.default and args[1] == [64, 64]:
            args = (args[0], args[1], args[2][::-1], args[3])
        return original(side, undo, target, args)

    monkeypatch.setattr(rewrite, "_call_aten", turned)
    assert verified("square-transpose", device).outcome == "different"


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_of_an_earlier_step_are_found(device, monkeypatch):
    """A copy to the host that is left out in every step but the first."""
    original = Runtime._offload
    seen: set[int] = set()

    def old(link: Any, host: torch.Tensor) -> Any:
        return link.part(host.to(link.device).untyped_storage(), 0, host.numel())

    def once(self: Runtime, value: torch.Tensor, number: int, first: int) -> Any:
        send = self.link.send
        if number in seen:
            self.link.send = lambda source, host, after: send(old(self.link, host), host, after)
        seen.add(number)
        try:
            return original(self, value, number, first)
        finally:
            self.link.send = send

    monkeypatch.setattr(Runtime, "_offload", once)
    assert verified("stepped", device).outcome == "different"


def test_what_is_broken_above_is_found_by_nothing_else():
    """So that those tests can fail: unbroken, the same cases are the same."""
    for name in ("interleaved-qkv", "gaps-are-packed", "stepped", "shifted-labels"):
        assert verified(name).outcome == "same"


# --- the link of the CPU --------------------------------------------------------------------------


class Copies:
    """A runtime on the CPU with a paced link, and the memory of one lease."""

    def __init__(self, pace: Pace, repeat: int = 0) -> None:
        link = paced(CpuLink())
        assert isinstance(link, PacedCpuLink)
        self.link = link
        self.link.set_pace(pace, repeat)
        self.pool = HostPool([64], Pageable())
        self.lease = self.pool.lease(64)
        self.host = self.lease.host_tensor(0, 16)

    def send(self, value: int, after: Any = None) -> tuple[torch.Tensor, Any]:
        source = torch.full((16,), value, dtype=torch.uint8)
        return source, self.link.send(source, self.host, after)

    def fetch(self, after: Any = None) -> tuple[torch.Tensor, Any]:
        target = self.link.buffer(16)
        return target, self.link.fetch(self.host, target, after)


def first(tensor: torch.Tensor) -> int:
    return int(tensor[0])


def test_a_slow_copy_lands_when_it_is_waited_for():
    copies = Copies("slow")
    source, sent = copies.send(7)
    assert first(copies.host) == 0xFF
    source.fill_(8)
    copies.link.wait(sent)
    assert first(copies.host) == 8


def test_a_fast_copy_lands_when_it_is_issued():
    copies = Copies("fast")
    source, _ = copies.send(7)
    source.fill_(8)
    target, _ = copies.fetch()
    assert (first(copies.host), first(target)) == (7, 7)


def test_a_slow_copy_of_what_is_gone_carries_ones():
    copies = Copies("slow")
    source, sent = copies.send(7)
    del source
    copies.link.wait(sent)
    assert first(copies.host) == 0xFF


def test_a_slow_copy_keeps_neither_its_source_nor_the_lease():
    copies = Copies("slow")
    source, _ = copies.send(7)
    gone, lease = weakref.ref(source), weakref.ref(copies.lease)
    del source, copies.lease, copies.host
    assert gone() is None
    assert lease() is None


def test_copies_of_one_direction_land_in_order_and_after_what_they_follow():
    copies = Copies("slow")
    kept, sent = copies.send(7)
    target, fetched = copies.fetch(after=sent)
    assert (first(copies.host), first(target)) == (0xFF, 0xFF)
    copies.link.wait(fetched)
    assert (first(copies.host), first(target), first(kept)) == (7, 7, 7)


def test_each_direction_can_be_slow_alone():
    to_host, to_device = Copies("slow to the host"), Copies("slow to the device")
    source, _ = to_host.send(7)
    other, _ = to_device.send(7)
    assert (first(to_host.host), first(to_device.host)) == (0xFF, 7)
    early, late = to_host.fetch()[0], to_device.fetch()[0]
    # That of the host's own bytes as they are: the copy to them is not waited for here.
    assert (first(early), first(late)) == (0xFF, 0xFF)
    to_device.link.drain()
    assert (first(late), first(source), first(other)) == (7, 7, 7)


def test_a_later_repeat_lands_some_copies_earlier_and_repeats_itself():
    def landed(repeat: int) -> list[int]:
        copies = Copies("slow", repeat)
        kept = [copies.send(value) for value in range(20)]
        return [first(copies.host), len(copies.link._to_host.waiting), len(kept)]

    assert landed(0)[1] == 20
    assert landed(1)[1] < 20
    assert landed(1) == landed(1)


def test_host_bytes_that_a_reload_may_still_read_are_not_written_unseen():
    copies = Copies("slow")
    copies.link.begin_step()
    source, sent = copies.send(1)
    target, fetched = copies.fetch(after=sent)
    copies.link.wait(fetched)
    # The same compute stream has waited for the reload.
    again = copies.send(2)
    assert copies.link.misordered == []
    other, later = copies.fetch(after=again[1])
    copies.link.wait(later)
    copies.link.begin_step()
    third = copies.send(3, after=later)
    assert copies.link.misordered == []
    last, fourth = copies.fetch(after=third[1])
    copies.link.wait(fourth)
    copies.link.begin_step()
    copies.send(4)
    assert len(copies.link.misordered) == 1
    assert len({id(each) for each in (source, target, other, last)}) == 4


def test_a_drained_link_has_nothing_left_to_carry():
    copies = Copies("slow")
    source, _ = copies.send(7)
    target, _ = copies.fetch()
    copies.link.drain()
    assert (first(copies.host), first(target), first(source)) == (7, 7, 7)
    assert not copies.link._to_host.waiting
    assert not copies.link._to_device.waiting
