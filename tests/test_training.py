"""Loops of a user's own under ``torch.compile(model, backend=...)``, on the CPU.

Each runs twice, with torch's compiler of that name and with a backend that moves something, and
must leave the same bits behind (``training_loops``).
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from training_loops import (
    SMALL,
    Broken,
    Call,
    Layer,
    Net,
    assert_same,
    assert_trains,
    batch,
    loss_of,
    plain_steps,
    run_loop,
    small_backend,
)

import offplan
from offplan.budget import FLOOR, Budget, of_bytes
from offplan.errors import BudgetError, DeviceError, PlanError, UsageError
from offplan.graph import Value, ValueId
from offplan.plan import Plan
from offplan.replay import training
from offplan.replay.live import LiveBytes
from offplan.replay.runtime import ReplayError
from offplan.trace._torch import reset_dynamo
from offplan.trace.facts import LocalGraph, RegionTemplate

# Dynamo looks at it where a graph begins with another one's output.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Kernels that repeat their bits, and nothing compiled before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with inductor_config.patch(fx_graph_cache=False):
        yield
    torch.use_deterministic_algorithms(False)
    reset_dynamo()


def said(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """How often a warning with ``words`` was logged."""
    return sum(
        words in record.getMessage()
        for record in caplog.records
        if record.name == "offplan" and record.levelno == logging.WARNING
    )


def analyzed(make: Callable[[], nn.Module] = Net, **options: Any) -> Plan:
    given = {"budget": 0, "compiler": "aot_eager", "device": "cpu", "min_size": 1} | options
    return offplan.analyze(make(), (batch(0),), **given)


def cause_of(failed: BaseException) -> BaseException:
    """What the backend raised, as Dynamo keeps it."""
    return failed.inner_exception if isinstance(failed, BackendCompilerFailed) else failed


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "lots"}, "not a budget"),
        ({"budget": -1}, "budget is -1"),
        ({"budget": "120%"}, "over 0% and at most 100%"),
        ({"compiler": "eager"}, "compiler is 'eager'"),
        ({"rules": "some"}, "rules is 'some'"),
        ({"actions": "offload"}, "not keep, and others of recompute, offload"),
        ({"on_unknown": "panic"}, "on_unknown is 'panic'"),
        ({"min_size": "5 apples"}, "apples"),
        ({"min_size": -5}, "min_size is -5"),
        ({"host_budget": -5}, "host_budget is -5"),
        ({"partitioner": "magic"}, "partitioner is 'magic'"),
        ({"optimizer": "magic"}, "optimizer is 'magic'"),
        ({"profile": "no such gpu"}, "no such gpu"),
        ({"pin": "glue"}, "'glue' is no way to pin"),
        ({"device": "meta"}, "no meta device"),
        ({"device": "abacus"}, "device is 'abacus'"),
        ({"compiler": "aot_eager", "inductor_options": {"max_autotune": True}}, "are Inductor's"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options, words):
    with pytest.raises((UsageError, DeviceError), match=words):
        offplan.backend(**({"device": "cpu"} | options))


def test_a_plan_and_a_budget_exclude_each_other_unless_others_are_to_be_planned():
    plan = analyzed()
    with pytest.raises(UsageError, match="both a plan and a budget"):
        offplan.backend(plan, budget="floor", device="cpu")
    offplan.backend(plan, budget="floor", device="cpu", on_unknown="replan").close()


def test_the_compiler_is_the_plans():
    with pytest.raises(UsageError, match="made for graphs of aot_eager"):
        offplan.backend(analyzed(), compiler="inductor", device="cpu")


def test_a_plan_for_another_device_is_refused():
    plan = analyzed(device="cuda") if torch.version.cuda else pytest.skip("needs a CUDA build")
    with pytest.raises(PlanError, match="device was cuda, is cpu"):
        offplan.backend(plan, device="cpu")


def test_a_device_that_is_not_there_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError, match="cuda"):
        offplan.backend(device="cuda")


def test_options_beside_a_backend_that_was_made_are_refused():
    with small_backend(budget=0) as made:
        call = torch.compile(Net(), backend=made, options={"budget": "floor"})
        with pytest.raises(BackendCompilerFailed) as failed:
            call(batch(0))
    assert isinstance(cause_of(failed.value), UsageError)
    assert "options given to torch.compile" in str(failed.value)


def test_a_budget_under_the_floor_names_the_floor_of_the_process():
    with small_backend(budget="floor") as made:
        run_loop(plain_steps, Net, made)
        floor = made.plans[0].predicted.floor_bytes
    with small_backend(budget=floor - 1) as made:
        reset_dynamo()
        with pytest.raises(BackendCompilerFailed) as failed:
            torch.compile(Net(), backend=made)(batch(0))
    error = cause_of(failed.value)
    assert isinstance(error, BudgetError)
    assert error.floor_bytes == floor
    assert f"budget={floor} is the least" in str(failed.value)
    assert "other tensors of the process take" in str(failed.value)
    assert_trains(plain_steps, budget=floor)


def test_auto_needs_to_know_the_devices_memory():
    with small_backend(budget="auto") as made, pytest.raises(BackendCompilerFailed) as failed:
        torch.compile(Net(), backend=made)(batch(0))
    assert isinstance(cause_of(failed.value), UsageError)
    assert "needs to know the device's memory" in str(failed.value)


# --- budgets and plans ----------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["floor", 0, "0", "95%"])
def test_a_budget_moves_and_changes_no_bit(budget):
    ran = assert_trains(plain_steps, budget=budget)
    assert ran.plans == 1
    assert ran.stats.lease_count == 3
    assert ran.stats.offload_count == ran.stats.reload_count


def test_without_offload_among_the_actions_nothing_is_moved():
    with small_backend(budget=0, actions="keep,recompute") as made:
        run_loop(plain_steps, Net, made)
        (plan,) = made.plans
        assert plan.actions == ("keep", "recompute")
        assert plan.movable_bytes
        assert made.stats().offload_count == 0


def test_a_size_moves_as_little_as_keeps_the_peak_within_it():
    with small_backend(budget="floor") as made:
        run_loop(plain_steps, Net, made)
        predicted = made.plans[0].predicted
    middle = (predicted.floor_bytes + predicted.no_plan.peak_bytes) // 2
    with small_backend(budget=middle) as made:
        expected = run_loop(plain_steps, Net, "aot_eager")
        assert_same(run_loop(plain_steps, Net, made), expected)
        (plan,) = made.plans
    assert plan.predicted.floor_bytes < plan.predicted.plan.peak_bytes <= middle


@pytest.mark.parametrize("budget", [None, "none", "100%", "1GiB"])
def test_nothing_is_moved_where_nothing_need_be(budget):
    expected = run_loop(plain_steps, Net, "aot_eager")
    with small_backend(budget=budget) as made:
        assert_same(run_loop(plain_steps, Net, made), expected)
        stats = made.stats()
    assert (stats.offload_count, stats.lease_count, stats.host_pinned_bytes) == (0, 0, 0)


def test_what_will_be_there_later_is_counted():
    def peak_bytes(**conditions: Any) -> int:
        with small_backend(budget=0, **conditions) as made:
            run_loop(plain_steps, Net, made)
            return made.plans[0].predicted.plan.peak_bytes

    weights = 4 * sum(p.numel() for p in Net().parameters())
    alone, adamw = peak_bytes(), peak_bytes(optimizer="adamw", accumulate=True)
    assert adamw >= alone + 2 * weights


@pytest.mark.parametrize(
    ("partitioner", "rules"),
    [("min-cut", "no-view"), ("min-cut", "last-holder"), ("default", "whole-storage")],
)
def test_partitioners_and_rule_sets(partitioner, rules):
    with small_backend(budget=0, partitioner=partitioner, rules=rules) as made:
        found = run_loop(plain_steps, Net, made)
        (plan,) = made.plans
    with small_backend(partitioner=partitioner) as bare:
        assert_same(found, run_loop(plain_steps, Net, bare))
    assert (plan.partitioner, plan.rules) == (partitioner, rules)
    assert plan.transfers


def test_a_plan_from_analyze_and_from_its_file(tmp_path):
    plan = analyzed()
    plan.save(tmp_path / "p.yaml")
    assert Plan.load(tmp_path / "p.yaml") == plan
    for given in (plan, tmp_path / "p.yaml", str(tmp_path / "p.yaml")):
        ran = assert_trains(plain_steps, plan=given)
        assert ran.plans == 0
        assert ran.stats.offloaded_bytes == 3 * plan.moved_bytes


def test_a_plan_with_several_regions_is_found_region_by_region():
    def make() -> nn.Module:
        return Broken(layers=3)

    plan = analyzed(make)
    assert len(plan.regions) > 1
    ran = assert_trains(plain_steps, make, plan=plan)
    assert ran.stats.offloaded_bytes == 3 * plan.moved_bytes


def test_graphs_between_breaks_are_planned_one_by_one():
    ran = assert_trains(plain_steps, Broken)
    assert ran.plans >= 1
    assert ran.stats.lease_count == 3 * 2


class Alike(nn.Module):
    """Runs one compiled layer several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(0.0) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = run_layer(layer, x)
        return x


@torch._dynamo.disable(recursive=False)
def run_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def test_a_plan_for_a_layer_that_is_compiled_once_and_run_often():
    plan = analyzed(Alike)
    ran = assert_trains(plain_steps, Alike, plan=plan)
    assert ran.stats.offloaded_bytes == 3 * plan.moved_bytes


def test_a_layer_that_is_compiled_once_and_run_often_is_planned_once():
    ran = assert_trains(plain_steps, Alike)
    # The first layer's input needs no gradient: another graph.
    assert ran.plans == 2
    assert ran.stats.lease_count == 3 * 3


def test_layers_compiled_by_themselves():
    def steps(chosen: Any) -> dict[str, torch.Tensor]:
        reset_dynamo()
        torch.manual_seed(0)
        model = Net()
        for layer in model.layers:
            layer.compile(backend=chosen)
        losses = plain_steps(model, model)
        return {f"{i}": loss for i, loss in enumerate(losses)} | dict(model.state_dict())

    expected = steps("aot_eager")
    with small_backend(budget=0) as made:
        assert_same(steps(made), expected)
        assert made.stats().lease_count == 3 * 2


# --- unknown graphs, shapes -----------------------------------------------------------------------


def shapes(call: Call, model: nn.Module) -> list[torch.Tensor]:
    losses = []
    for rows in (32, 16, 8, 32):
        loss = loss_of(call(batch(0, rows)))
        loss.backward()
        losses.append(loss.detach())
    return losses


STATIC = {"dynamic": False}


def test_an_unknown_shape_runs_with_nothing_moved_which_is_said_once(caplog):
    plan = analyzed()
    ran = assert_trains(shapes, compile_options=STATIC, plan=plan)
    assert ran.stats.offloaded_bytes == 2 * plan.moved_bytes
    assert said(caplog, "a graph was compiled that the plan does not have") == 1


def test_an_unknown_shape_is_planned_where_that_is_asked_for(caplog):
    plan = analyzed()
    ran = assert_trains(shapes, compile_options=STATIC, plan=plan, on_unknown="replan")
    assert ran.plans == 2
    assert ran.stats.lease_count == 4
    assert said(caplog, "the plan does not have") == 0


def test_each_shape_is_planned_for_the_budget():
    ran = assert_trains(shapes, compile_options=STATIC)
    assert (ran.plans, ran.stats.lease_count) == (3, 4)


def test_symbolic_sizes_move_nothing_which_is_said_once(caplog):
    expected = run_loop(shapes, Net, "aot_eager", dynamic=True)
    with small_backend(budget=0) as made:
        assert_same(run_loop(shapes, Net, made, dynamic=True), expected)
        assert made.stats().offload_count == 0
    assert said(caplog, "symbolic sizes") == 1


@pytest.mark.parametrize(
    ("given", "symbolic", "expected"), [(0, "", False), (1, "", True), (0, "(s0, 4)", True)]
)
def test_a_number_that_an_op_returns_is_no_unknown_size(given, symbolic, expected):
    # As attention on a GPU returns the lengths of its sequences.
    values = (Value("tensor", dtype="float32", symbolic=symbolic), Value("symint"))
    graph = LocalGraph((ValueId(given),), ("x",), (), (), ())
    template = RegionTemplate((), values, graph, None, (), 0, 0)
    assert training._is_symbolic(template) is expected


def test_sizes_that_become_symbolic_move_nothing_from_then_on(caplog):
    ran = assert_trains(shapes)
    assert ran.stats.lease_count >= 1
    assert said(caplog, "symbolic sizes") == 1


def test_no_graph_break_and_no_recompilation_is_added():
    def counted(chosen: Any) -> tuple[int, int]:
        counters.clear()
        run_loop(plain_steps, Net, chosen)
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    expected = counted("aot_eager")
    with small_backend(budget=0) as made:
        assert counted(made) == expected == (1, 0)


# --- what loops do --------------------------------------------------------------------------------


def test_dropout_draws_what_it_draws_without_a_plan():
    assert_trains(plain_steps, lambda: Net(drop=0.2))


def test_evaluation_between_steps():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        found = plain_steps(call, model, 2)
        model.eval()
        with torch.no_grad():
            found.append(call(batch(7)))
        with torch.inference_mode():
            found.append(call(batch(8)).clone())
        found.append(call(batch(9)))
        model.train()
        return [*found, *plain_steps(call, model, 2)]

    ran = assert_trains(loop, lambda: Net(drop=0.2))
    # Evaluation without a gradient takes no host memory, the one with a gradient does.
    assert ran.stats.lease_count == 5


def test_evaluation_comes_first():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            before = call(batch(7))
        return [before, *plain_steps(call, model)]

    assert assert_trains(loop).stats.lease_count == 3


def test_gradients_accumulate_over_micro_steps():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(2):
            for micro in range(3):
                loss = loss_of(call(batch(3 * step + micro))) / 3
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    ran = assert_trains(loop, accumulate=True)
    assert ran.stats.lease_count == 6


def test_two_forwards_before_two_backwards():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        first, second = loss_of(call(batch(0))), loss_of(call(batch(1)))
        first.backward()
        second.backward()
        third, fourth = loss_of(call(batch(2))), loss_of(call(batch(3)))
        fourth.backward()
        third.backward()
        return [first, second, third, fourth]

    ran = assert_trains(loop)
    assert ran.stats.lease_count == 4


def test_host_memory_of_two_forwards_is_used_again():
    with small_backend(budget=0) as made:
        call = torch.compile(Net(), backend=made)
        loss_of(call(batch(0))).backward()
        one = made.stats().host_pinned_bytes
        for _ in range(3):
            first, second = loss_of(call(batch(0))), loss_of(call(batch(1)))
            (first + second).backward()
            assert made.stats().host_pinned_bytes == 2 * one


def test_a_backward_that_keeps_its_graph_runs_again():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        loss = loss_of(call(batch(0)))
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss]

    ran = assert_trains(loop)
    assert ran.stats.reload_count == 2 * ran.stats.offload_count


class TwoHeads(Net):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = super().forward(x)
        return torch.sin(x), torch.exp(x)


def test_one_of_two_losses_has_a_backward():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        first, second = call(batch(0))
        loss_of(first).backward()
        both = call(batch(1))
        (loss_of(both[0]) + loss_of(both[1])).backward()
        return [first, second]

    assert_trains(loop, TwoHeads)


def test_a_loss_that_is_dropped_gives_its_host_memory_back():
    with small_backend(budget=0) as made:
        call = torch.compile(Net(), backend=made)
        loss_of(call(batch(0))).backward()
        held = made.stats().host_pinned_bytes
        for step in range(3):
            call(batch(step))
        assert made.stats().host_pinned_bytes == held


def test_gradients_of_inputs_and_by_autograd_grad():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        x = batch(0).requires_grad_()
        loss = loss_of(call(x))
        (of_x,) = torch.autograd.grad(loss, [x])
        weights = torch.autograd.grad(loss_of(call(x)), list(model.parameters()))
        return [of_x, *weights]

    assert_trains(loop)


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_around_and_inside_of_what_is_compiled(inside):
    class Cast(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                loss = loss_of(call(batch(step)).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    assert_trains(loop, Cast if inside else Net)


def test_a_gradient_scaler_skips_the_steps_that_it_skips_without_a_plan():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        found = []
        for step in range(4):
            x = batch(step) * (torch.inf if step == 1 else 1)
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(call(x).float())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.detach(), torch.tensor(scaler.get_scale())]
        assert found[3] < found[1]
        return found

    assert_trains(loop)


def test_gradients_are_clipped():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = []
        for step in range(3):
            loss_of(call(batch(step))).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
            optimizer.zero_grad()
        return norms

    assert_trains(loop)


def test_optimizers_step_inside_the_backward():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        hooks = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
        losses = []
        for number in range(3):
            loss = loss_of(call(batch(number)))
            loss.backward()
            losses.append(loss.detach())
        assert all(p.grad is None for p in optimizers)
        for hook in hooks:
            hook.remove()
        return losses

    assert_trains(loop)


def test_frozen_parameters_stay_and_have_no_gradient():
    def make() -> nn.Module:
        model = Net(layers=3)
        model.layers[0].requires_grad_(False)
        model.layers[1].up.requires_grad_(False)
        return model

    ran = assert_trains(plain_steps, make)
    assert not any(name.startswith("gradient layers.0") for name in ran.state)


def test_a_parameter_is_frozen_between_steps():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        first = plain_steps(call, model, 1)
        model.layers[0].requires_grad_(False)
        return first + plain_steps(call, model, 1)

    assert_trains(loop)


def test_user_checkpointing_inside_of_what_is_compiled():
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return torch.tanh(x)

    assert_trains(plain_steps, lambda: Checkpointed(layers=3))


# --- checkpoint and resume ------------------------------------------------------------------------


class Saved:
    """A training that can stop and go on."""

    def __init__(self, chosen: Any) -> None:
        reset_dynamo()
        torch.manual_seed(0)
        self.model = Net()
        self.call = torch.compile(self.model, backend=chosen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def steps(self, first: int, last: int) -> dict[str, torch.Tensor]:
        losses = {}
        for step in range(first, last):
            loss = loss_of(self.call(batch(step)))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses[f"loss {step}"] = loss.detach()
        return losses


@pytest.mark.parametrize("of", ["compiled", "module"])
def test_a_run_that_was_saved_goes_on_to_the_bit(of, tmp_path):
    straight = Saved("aot_eager")
    expected = straight.steps(0, 4)
    with small_backend(budget=0) as made:
        begun = Saved(made)
        found = begun.steps(0, 2)
        source = begun.call if of == "compiled" else begun.model
        torch.save(
            {"model": source.state_dict(), "optimizer": begun.optimizer.state_dict()},
            tmp_path / "checkpoint.pt",
        )
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    with small_backend(budget="floor") as made:
        resumed = Saved(made)
        (resumed.call if of == "compiled" else resumed.model).load_state_dict(saved["model"])
        resumed.optimizer.load_state_dict(saved["optimizer"])
        found |= resumed.steps(2, 4)
        assert made.stats().lease_count == 2
    assert_same(found, expected)
    assert_same(dict(resumed.model.state_dict()), dict(straight.model.state_dict()))


def test_state_is_loaded_into_what_was_compiled():
    with small_backend(budget=0) as made:
        saved = Saved(made)
        before = {name: t.clone() for name, t in saved.model.state_dict().items()}
        first = saved.steps(0, 1)
        saved.model.load_state_dict(before)
        assert_same(saved.steps(0, 1), first)
        assert len(made.plans) == 1


# --- failures -------------------------------------------------------------------------------------


def test_a_step_after_a_forward_and_a_backward_that_failed():
    class Failing(Net):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[index]

    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        losses = []
        for step in range(3):
            with pytest.raises((IndexError, RuntimeError)):
                call(batch(step), torch.tensor([1, 99]))
            failing = loss_of(call(batch(step), torch.tensor([0, 1])))
            hook = model.layers[0].up.weight.register_hook(raises)
            with pytest.raises(ZeroDivisionError):
                failing.backward()
            hook.remove()
            model.zero_grad()
            loss = loss_of(call(batch(step), torch.tensor([0, 1])))
            loss.backward()
            losses.append(loss.detach())
        return losses

    assert_trains(loop, Failing)


def raises(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_failing_op_of_the_backward_leaves_the_next_step_right():
    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.tanh(x), index)
            return torch.tanh(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            saved, index = ctx.saved_tensors
            return gradient * (1 - saved[index] * saved[index]), None

    class Failing(Net):
        def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return super().forward(Picky.apply(self.layers[0](x), index))

    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        good, bad = torch.arange(32), torch.full((32,), 99)
        losses = []
        for step in range(3):
            loss = loss_of(call(batch(step), bad))
            with pytest.raises((IndexError, RuntimeError)):
                loss.backward()
            model.zero_grad()
            loss = loss_of(call(batch(step), good))
            loss.backward()
            losses.append(loss.detach())
        return losses

    assert_trains(loop, Failing)


# --- the life of a backend ------------------------------------------------------------------------


def test_measured_steps_move_what_was_planned():
    with small_backend(budget=0) as made:
        call = torch.compile(Net(), backend=made)
        for step in range(3):
            with made.measure() as measured:
                loss_of(call(batch(step))).backward()
            (plan,) = made.plans
            (found,) = measured
            assert found.offload_count == len(plan.transfers) == found.reload_count
            assert found.offloaded_bytes == found.reloaded_bytes == plan.moved_bytes
            assert found.host_pinned_bytes >= plan.moved_bytes
            assert found.step_ms > 0
            assert (found.peak_allocated_bytes, found.stalled_ms) == (None, None)
        assert made.stats().offloaded_bytes == 3 * plan.moved_bytes


def test_a_step_that_fails_is_not_measured():
    with small_backend(budget=0) as made:
        measuring = made.measure()
        measured = measuring.__enter__()
        assert not measuring.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert measured == []


def test_what_was_compiled_cannot_run_once_its_backend_is_closed():
    made = offplan.backend(budget=0, **SMALL)
    call = torch.compile(Net(), backend=made)
    loss = loss_of(call(batch(0)))
    made.close()
    made.close()
    assert made.stats().host_pinned_bytes == 0
    with pytest.raises(ReplayError, match="closed"):
        loss.backward()
    with pytest.raises(ReplayError, match="closed"):
        call(batch(0))
    reset_dynamo()
    with pytest.raises((ReplayError, BackendCompilerFailed), match="closed"):
        torch.compile(Net(), backend=made)(batch(0))


def test_a_backend_that_moved_nothing_is_closed_like_any_other():
    made = offplan.backend(**SMALL)
    call = torch.compile(Net(), backend=made)
    loss_of(call(batch(0))).backward()
    made.close()
    with pytest.raises(ReplayError, match="closed"):
        call(batch(0))


def test_a_backend_that_nothing_refers_to_gives_its_host_memory_back():
    made = offplan.backend(budget=0, **SMALL)
    model = Net()
    call = torch.compile(model, backend=made)
    loss_of(call(batch(0))).backward()
    pool, reference = made.runtime.pool, weakref.ref(made)
    assert pool.pinned_bytes > 0
    del made, call, model
    reset_dynamo()
    gc.collect()
    assert reference() is None
    assert pool.is_closed
    assert pool.pinned_bytes == 0


def test_two_backends_in_two_threads():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        loss_of(call(batch(9))).backward()
        return plain_steps(call, model, 5)

    expected = run_loop(loop, Net, "aot_eager")
    reset_dynamo()
    made = [offplan.backend(budget=budget, **SMALL) for budget in (0, "floor")]
    models, calls = [], []
    for one in made:
        torch.manual_seed(0)
        models.append(Net())
        calls.append(torch.compile(models[-1], backend=one))
        # Compiled here: a thread that trains while another compiles gets other bits, from torch's
        # own compilers too.
        loss_of(calls[-1](batch(9))).backward()
    found: list[list[torch.Tensor]] = [[], []]

    def train(number: int) -> None:
        found[number] += plain_steps(calls[number], models[number], 5)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(made):
        results = {f"result {i}": t for i, t in enumerate(found[number])}
        results |= {f"parameter {n}": p.detach() for n, p in models[number].named_parameters()}
        assert_same(results, {name: expected[name] for name in results})
        assert len(found[number]) == 5
        assert one.stats().lease_count == 6
        one.close()


# --- by name --------------------------------------------------------------------------------------

NAMED = {"budget": 0, "min_size": 1, "compiler": "aot_eager", "device": "cpu"}


def is_installed() -> bool:
    return "offplan" in torch._dynamo.list_backends()


by_name = pytest.mark.skipif(
    not is_installed(), reason="the entry point is there once offplan is installed"
)


@by_name
def test_the_name_is_all_it_takes(monkeypatch):
    made = kept_backends(monkeypatch)
    expected = run_loop(plain_steps, Net, "aot_eager")
    assert_same(run_loop(plain_steps, Net, "offplan", options=dict(NAMED)), expected)
    assert [one.stats().lease_count for one in made] == [3]


def kept_backends(monkeypatch: pytest.MonkeyPatch) -> list[offplan.Backend]:
    """The backends that the entry point makes from now on."""
    made: list[offplan.Backend] = []
    original = training.backend

    def backend(*args: Any, **kwargs: Any) -> offplan.Backend:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(training, "backend", backend)
    return made


@by_name
def test_by_name_with_a_plan_file_and_graph_breaks(tmp_path, monkeypatch):
    made = kept_backends(monkeypatch)
    plan = analyzed(Broken)
    plan.save(tmp_path / "p.yaml")
    expected = run_loop(plain_steps, Broken, "aot_eager")
    options = {"plan": str(tmp_path / "p.yaml"), "device": "cpu"}
    assert_same(run_loop(plain_steps, Broken, "offplan", options=options), expected)
    assert sum(one.stats().offloaded_bytes for one in made) == 3 * plan.moved_bytes


@by_name
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"options": {"budgt": "floor"}}, "'budgt' is an option of neither offplan nor Inductor"),
        ({"options": {"budget": "lots"}}, "not a budget"),
        ({"mode": "reduce-overhead"}, "records CUDA graphs"),
        ({"mode": "max-autotune"}, "records CUDA graphs"),
        ({"mode": "fastest"}, "mode is 'fastest'"),
        ({"options": {**NAMED, "max_autotune": True}}, "max_autotune are Inductor's"),
    ],
)
def test_what_makes_no_sense_by_name_is_refused(given, words):
    with pytest.raises(BackendCompilerFailed) as failed:
        torch.compile(Net(), backend="offplan", **given)(batch(0))
    assert isinstance(cause_of(failed.value), UsageError)
    assert words in str(failed.value)


@by_name
@pytest.mark.parametrize(("budget", "leases"), [("floor", 3), ("0", 3), ("none", 0), ("", 0)])
def test_where_only_the_name_can_be_given_the_environment_has_the_budget(
    budget, leases, monkeypatch
):
    monkeypatch.setenv("OFFPLAN_BUDGET", budget)
    made = kept_backends(monkeypatch)
    options = {name: value for name, value in NAMED.items() if name != "budget"}
    run_loop(plain_steps, Net, "offplan", options=options)
    assert [one.stats().lease_count for one in made] == [leases]


def test_without_any_budget_a_gpus_memory_is_the_budget(monkeypatch):
    monkeypatch.delenv("OFFPLAN_BUDGET", raising=False)
    assert training._default_budget(torch.device("cuda")) == "auto"
    assert training._default_budget(torch.device("cpu")) is None
    monkeypatch.setenv("OFFPLAN_BUDGET", "60%")
    assert training._default_budget(torch.device("cuda")) == "60%"


@by_name
def test_options_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("OFFPLAN_BUDGET", "none")
    made = kept_backends(monkeypatch)
    run_loop(plain_steps, Net, "offplan", options=dict(NAMED))
    assert [one.stats().lease_count for one in made] == [3]


@by_name
def test_an_environment_that_makes_no_sense_is_named(monkeypatch):
    monkeypatch.setenv("OFFPLAN_BUDGET", "lots")
    with pytest.raises(BackendCompilerFailed, match="OFFPLAN_BUDGET is 'lots'"):
        torch.compile(Net(), backend="offplan", options={"device": "cpu"})(batch(0))


@by_name
def test_a_graph_that_is_forgotten_gives_its_host_memory_back(monkeypatch):
    made = kept_backends(monkeypatch)
    run_loop(plain_steps, Net, "offplan", options=dict(NAMED))
    pool = made.pop().runtime.pool
    assert pool.pinned_bytes > 0
    reset_dynamo()
    gc.collect()
    assert pool.is_closed


def test_a_copy_of_a_backend_is_itself():
    """Lightning copies what ``torch.compile`` is given, to compile again with it."""
    with small_backend(budget=0) as made:
        assert copy.deepcopy({"backend": made})["backend"] is made


# --- Inductor -------------------------------------------------------------------------------------


@pytest.mark.xdist_group("inductor")
def test_inductor_trains_the_same():
    ran = assert_trains(plain_steps, lambda: Net(drop=0.2), compiler="inductor")
    assert ran.stats.offload_count == ran.stats.reload_count


@pytest.mark.xdist_group("inductor")
def test_inductor_with_accumulation_evaluation_and_a_plan():
    def loop(call: Call, model: nn.Module) -> list[torch.Tensor]:
        found = []
        for step in range(2):
            loss = loss_of(call(batch(step)))
            loss.backward()
            with torch.no_grad():
                found += [loss.detach(), call(batch(9))]
        return found

    plan = analyzed(compiler="inductor")
    ran = assert_trains(loop, plan=plan, compiler="inductor")
    assert ran.stats.offloaded_bytes == 2 * plan.moved_bytes


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.xdist_group("inductor")
def test_a_graph_is_predicted_while_it_is_compiled_as_analysis_predicts_it(compiler):
    """Fused kernels too: what is predicted is the step that will run."""
    expected = analyzed(compiler=compiler, budget="floor").predicted
    reset_dynamo()
    with small_backend(budget="floor", compiler=compiler) as made:
        torch.compile(Net(), backend=made, dynamic=False)(batch(0))
        (plan,) = made.plans
    assert plan.predicted.no_plan.peak_bytes == expected.no_plan.peak_bytes
    assert plan.predicted.plan.peak_bytes == expected.plan.peak_bytes
    assert plan.predicted.band_percent == expected.band_percent
    assert (plan.predicted.band_percent is None) == (compiler == "aot_eager")


@by_name
@pytest.mark.xdist_group("inductor")
def test_a_mode_without_cuda_graphs_by_name(monkeypatch):
    monkeypatch.setenv("OFFPLAN_BUDGET", "0")
    made = kept_backends(monkeypatch)
    mode = "max-autotune-no-cudagraphs"
    expected = run_loop(plain_steps, Net, "inductor", mode=mode)
    assert_same(run_loop(plain_steps, Net, "offplan", mode=mode), expected)
    assert made


# --- several processes ----------------------------------------------------------------------------


TOGETHER = ("aot_eager:outside", "aot_eager:inside", "aot_eager:accumulate", "inductor:outside")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without it")
@pytest.mark.slow
def test_two_processes_train_together_as_without_a_plan(tmp_path):
    for found in two_processes(tmp_path / "store", *TOGETHER):
        assert tuple(found) == TOGETHER
        for name, counted in found.items():
            micro_steps = 6 if name.endswith(":accumulate") else 3
            assert counted["moved"] > 0
            assert counted["plans"] >= 3
            assert counted["leases"] == micro_steps * counted["plans"]
            # All parts are compiled before any runs: each is told what those before it will save.
            assert counted["saved"][0] == 0
            assert sorted(set(counted["saved"])) == counted["saved"]


def two_processes(store: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the two processes of ``ddp_loop`` print."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    with subprocess.Popen(
        [sys.executable, HERE / "ddp_loop.py", store, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            # The other one too, where it waits for one that is gone.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    found = [json.loads(line) for line in output.splitlines()]
    assert len(found) == 2
    return found


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_a_budget_is_for_the_process(monkeypatch):
    from offplan.replay.training import _elsewhere_bytes, _own_budget

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10_000)
    with FakeTensorMode():
        given = torch.empty(250, device="cuda")
        inputs = [given, given.view(25, 10), torch.empty(7), 3]
    device = torch.device("cuda")
    assert _elsewhere_bytes(inputs, device) == 9_000
    assert _elsewhere_bytes(inputs, device, 500) == 9_500
    assert _elsewhere_bytes(inputs, torch.device("cpu"), 500) == 0
    assert _own_budget(of_bytes(12_000), 4_000, 9_000).value == 3_000
    assert _own_budget(of_bytes(8_000), 4_000, 9_000).value == 1
    assert _own_budget(Budget("share", 0.9), 4_000, 6_000).value == 3_000
    assert _own_budget(FLOOR, 4_000, 9_000) == FLOOR


# --- limits ---------------------------------------------------------------------------------------


def test_with_less_host_memory_less_is_moved():
    def moved(**options: Any) -> int:
        with small_backend(**options) as made:
            found = run_loop(plain_steps, Net, made)
            assert_same(found, expected)
            assert made.stats().host_pinned_bytes <= options.get("host_budget", 1 << 20)
            return made.plans[0].moved_bytes

    expected = run_loop(plain_steps, Net, "aot_eager")
    assert 0 < moved(budget=0, host_budget=8192) <= 8192 < moved(budget=0)
    with pytest.raises(BackendCompilerFailed) as failed:
        moved(budget="80%", host_budget=1)
    error = cause_of(failed.value)
    assert isinstance(error, BudgetError)
    assert "of host memory" in str(error)


def test_what_was_moved_is_gone_when_the_forward_ends():
    def live(chosen: Any) -> tuple[int, int]:
        reset_dynamo()
        torch.manual_seed(0)
        call = torch.compile(Net(), backend=chosen)
        loss_of(call(batch(0))).backward()
        with LiveBytes() as found:
            loss = loss_of(call(batch(0)))
            saved_bytes = found.live_bytes
            loss.backward()
        return saved_bytes, found.peak_bytes

    with small_backend() as bare:
        saved_bytes, peak_bytes = live(bare)
    with small_backend(budget="floor") as made:
        low_saved_bytes, low_peak_bytes = live(made)
        (plan,) = made.plans
    assert low_saved_bytes == saved_bytes - plan.moved_bytes
    assert low_peak_bytes < peak_bytes


def test_the_entry_point_is_declared():
    declared = tomli.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    points = declared["entry-points"]["torch_dynamo_backends"]
    module, _, name = points["offplan"].partition(":")
    assert getattr(importlib.import_module(module), name) is training.by_name
