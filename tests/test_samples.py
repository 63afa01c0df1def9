"""Every sample gives the summary beside it, and the values that its arithmetic predicts.

``OFFPLAN_UPDATE_EXPECTED=1 pytest tests/test_samples.py`` writes the summaries again; they are then
reviewed as code.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from offplan.eligibility import RULE_SETS
from offplan.plan import Plan, check_plan, make_plan
from offplan.trace.capture import TraceOptions, trace

SAMPLES = Path("sample_graphs")
NAMES = sorted(path.stem for path in SAMPLES.glob("*.py"))
MIB = 1024**2
pytestmark = pytest.mark.skipif(
    torch.version.cuda is None, reason="the summaries are for cuda: needs a CUDA build of torch"
)


@cache
def plan_of(name: str, **params: str) -> Plan:
    facts = trace(f"{SAMPLES / name}.py", params, TraceOptions())
    # Whatever is asserted below, the plan for the floor must hold for the graphs it is made from.
    check_plan(facts, make_plan(facts, budget=0))
    return make_plan(facts)


def summary(plan: Plan) -> dict[str, Any]:
    """What a change of torch or of the rules must not change unseen."""
    return {
        "regions": len(plan.regions),
        "breaks": [graph_break.reason for graph_break in plan.breaks],
        "saved_bytes": plan.saved_bytes,
        "movable_bytes": plan.movable_bytes,
        "staying_bytes": plan.staying_bytes,
        "ledger": {
            rules: [
                {
                    "rule": row.rule,
                    "holder": row.holder,
                    "count": row.count,
                    "logical_bytes": row.logical_bytes,
                    "storage_bytes": row.storage_bytes,
                }
                for row in plan.ledger[rules]
            ]
            for rules in RULE_SETS
        },
    }


def logical(plan: Plan, rules: str, rule: str) -> int:
    return sum(row.logical_bytes for row in plan.ledger[rules] if row.rule == rule)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "qwen3_14b")) for n in NAMES]
)
def test_the_sample_gives_the_summary_beside_it(name):
    path = SAMPLES / f"{name}.expected.yaml"
    found = summary(plan_of(name))
    if os.environ.get("OFFPLAN_UPDATE_EXPECTED"):
        text = yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=100)
        path.write_text(f"# offplan analyze sample_graphs/{name}.py\n{text}")
    assert found == yaml.safe_load(path.read_text())


def test_every_summary_belongs_to_a_sample():
    assert sorted(path.name.removesuffix(".expected.yaml") for path in SAMPLES.glob("*.yaml")) == (
        NAMES
    )


# --- by hand: bytes are elements times their size -------------------------------------------------


def storages(plan: Plan, rules: str, rule: str) -> int:
    return sum(row.storage_bytes for row in plan.ledger[rules] if row.rule == rule)


def alias_bytes(plan: Plan) -> tuple[int, ...]:
    """Logical bytes skipped under ``alias`` by each rule set, in their order."""
    return tuple(logical(plan, rules, "alias") for rules in RULE_SETS)


def test_saved_view_is_skipped_only_where_every_view_is():
    plan = plan_of("saved_view")
    view = 2048 * 1024 * 4  # float32[2048, 1024], saved as [64, 32768]
    assert alias_bytes(plan) == (view, 0, 0)
    assert logical(plan, "last-holder", "eligible") == view
    assert plan.movable_bytes == view == 8 * MIB


def test_base_also_saved_holds_its_view_until_both_leave_together():
    plan = plan_of("base_also_saved")
    storage = 2048 * 1024 * 4
    assert alias_bytes(plan) == (storage, storage, 0)
    # Two values of one storage: 16 MiB carried, 8 MiB freed.
    assert logical(plan, "whole-storage", "eligible") == 2 * storage
    assert plan.movable_bytes == storage


def test_expanded_view_carries_twice_its_storage():
    plan = plan_of("expanded_view")
    storage, carried = 2048 * 1024 * 4, 2 * 2048 * 1024 * 4
    assert alias_bytes(plan) == (carried, 0, 0)
    # Stride 0: a host copy made by shape would be dense, so the fixed pass leaves it.
    assert logical(plan, "last-holder", "alias_layout") == carried
    (entry,) = plan.storages
    assert (entry.size_bytes, plan.movable_bytes) == (storage, storage)
    assert entry.footprint is not None
    assert entry.footprint.transfer_bytes == storage


def test_small_view_of_large_counts_the_whole_storage_and_moves_the_view():
    plan = plan_of("small_view_of_large")
    (entry,) = plan.storages
    assert entry.size_bytes == 32 * MIB
    # 4 MiB is under the minimum of 5 MiB; its storage is not.
    assert entry.views[0].logical_bytes == 4 * MIB
    assert (entry.action, plan.movable_bytes) == ("keep", 32 * MIB)
    assert entry.footprint is not None
    assert entry.footprint.transfer_bytes == 4 * MIB


def test_stepped_view_keeps_its_strides():
    plan = plan_of("stepped_view")
    (entry,) = plan.storages
    rows, columns, step = 4096, 512, 2
    assert entry.views[0].stride == (columns * step, step)
    assert entry.views[0].logical_bytes == rows * columns * 4 == 8 * MIB
    assert alias_bytes(plan) == (8 * MIB, 0, 0)
    assert logical(plan, "last-holder", "alias_layout") == 8 * MIB
    assert plan.movable_bytes == rows * columns * step * 4


def test_pass_through_op_neither_breaks_the_pair_nor_hides_the_storage():
    plan = plan_of("pass_through_op")
    (entry,) = plan.storages
    assert plan.movable_bytes == entry.size_bytes == 8 * MIB
    # The storage is relu's, the value saved is what the custom op returned.
    assert entry.op == "aten.relu.default"
    assert "relu" not in entry.views[0].op


def test_fused_qkv_leaves_as_one_storage():
    plan = plan_of("fused_qkv")
    batch, seq, heads, size = 8, 512, 8, 64
    projected = 3 * batch * seq * heads * size * 4
    attention = batch * seq * heads * size * 4
    view_of_input = batch * seq * heads * size * 4
    # q, k and v hold each other; so do the view and the detach of attention's output.
    held = projected + 2 * attention + view_of_input
    assert alias_bytes(plan) == (held, held, view_of_input)
    assert plan.movable_bytes == projected + attention


def test_tied_weights_are_one_parameter():
    plan = plan_of("tied_weights")
    assert {row.holder for row in plan.ledger["whole-storage"] if row.rule == "parameter"} == {
        "parameter"
    }
    assert plan.movable_bytes == 2 * 2048 * 1024 * 4  # the embedding's and the norm's output


def test_checkpointed_saves_the_layers_inputs_only():
    plan = plan_of("checkpointed")
    assert plan.movable_bytes == 3 * 8 * MIB
    assert plan_of("checkpointed", checkpointing="false").movable_bytes > 4 * plan.movable_bytes


def test_moe_saves_nothing_for_the_idle_expert():
    plan = plan_of("moe")
    rows, width = 5 * 4096 * 2 // (4 * 3), 512
    assert plan.movable_bytes == 3 * (2 * rows * width + 2 * rows * 2 * width) * 4
    modules = {view.module for entry in plan.storages for view in entry.views}
    assert {"experts.0.up", "experts.2.up"} <= modules
    assert not any(module.startswith("experts.3") for module in modules)


def test_graph_break_gives_two_regions_that_share_a_storage():
    plan = plan_of("graph_break")
    assert len(plan.regions) == 2
    assert len(plan.breaks) == 1
    (shared,) = {e.id for e in plan.storages if e.region == 0} & {
        e.id for e in plan.storages if e.region == 1
    }
    assert plan.movable_bytes == 0  # the caller has it in between
    assert next(e for e in plan.storages if e.id == shared).size_bytes == 8 * MIB


def test_conv_net_is_saved_channels_last():
    plan = plan_of("conv_net")
    large = [e for e in plan.storages if e.size_bytes == 8 * MIB]
    assert len(large) == 9
    for entry in large:
        (view,) = entry.views
        assert view.stride[1] == 1


@pytest.mark.parametrize("batch", [4, 5])
def test_qwen_layers_skip_what_a_published_run_measured(batch):
    """Per layer, batch x 4096 and bf16: what a DeepSpeed pull request measured on eight H200s."""
    layers = 2
    plan = plan_of("qwen3_14b", layers=str(layers), batch=str(batch), seq="4096")
    tokens, hidden, inner = batch * 4096, 5120, 17408
    # Views into q/k/v, o, gate/up and down projections, and attention's detach of its output.
    no_view = tokens * (4 * hidden + inner) * 2
    # The o projection's view and the detach hold each other.
    last_holder = tokens * 2 * hidden * 2
    assert alias_bytes(plan) == (layers * no_view, layers * last_holder, 0)
    # 40 layers: 49.66, 13.42 and 0 GB; at batch 5: 62.08, 16.78 and 0.
    expected = {4: (49.66, 13.42), 5: (62.08, 16.78)}[batch]
    assert (round(40 * no_view / 1e9, 2), round(40 * last_holder / 1e9, 2)) == expected


@pytest.mark.slow
def test_the_whole_14b_decoder_stack_skips_49_66_and_13_42_and_0_gb():
    assert [round(size / 1e9, 2) for size in alias_bytes(plan_of("qwen3_14b"))] == [49.66, 13.42, 0]
