"""What a measurement adds up to, its file, its verification, and what people read of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from offplan.errors import FileFormatError, OutputError, UsageError
from offplan.graph import TargetRef
from offplan.measured import (
    SCHEMA_VERSION,
    Arm,
    Expected,
    Machine,
    Measurement,
    OutOfMemory,
    Parts,
    Planned,
    Step,
    Verification,
    load_measurement,
    write_measurement,
)
from offplan.replay.messages import ArmResult, Fingerprint
from offplan.replay.verify import needs_control, verify
from offplan.report.run import render_run, run_report

MACHINE = Machine(
    processor="Xeon",
    cores=16,
    memory_bytes=128 * 1024**3,
    python="3.12.3",
    torch="2.14.1",
    gpu="NVIDIA H200",
    gpu_memory_bytes=141 * 1000**3,
    cuda="13.0",
)
MOVED = 26_300_000_000
PLANNED = Planned(MOVED, MOVED, 58, 58)


def step(ms: float = 676.0, moved: int = 0, count: int = 0, **changes: Any) -> Step:
    fields: dict[str, Any] = {
        "loss": "2.5",
        "step_ms": ms,
        "forward_ms": ms / 4,
        "backward_ms": ms * 3 / 4,
        "peak_allocated_bytes": 47_900_000_000 - moved,
        "peak_reserved_bytes": 49_000_000_000 - moved,
        "forward_end_bytes": 40_000_000_000 - moved,
        "end_bytes": 12_000_000_000,
        "host_bytes": moved,
        "to_host_bytes": moved,
        "to_device_bytes": moved,
        "to_host_count": count,
        "to_device_count": count,
        "stalled_ms": 300.25 if moved else 0.0,
    }
    return Step(**{**fields, **changes})


def steps(*times: float, **changes: Any) -> tuple[Step, ...]:
    return tuple(step(ms, **changes) for ms in times)


def no_plan(**changes: Any) -> Arm:
    fields: dict[str, Any] = {
        "role": "no plan",
        "outcome": "completed",
        "build_s": 30.0,
        "steps": steps(900.0, 675.0, 677.5, 676.0),
    }
    return Arm(**{**fields, **changes})


def plan(**changes: Any) -> Arm:
    fields: dict[str, Any] = {
        "role": "plan",
        "rules": "whole-storage",
        "planned": PLANNED,
        "steps": steps(1500.0, 994.0, 993.5, 1001.0, moved=MOVED, count=58),
    }
    return no_plan(**{**fields, **changes})


OUT = OutOfMemory(
    during="the backward of step 0",
    op="aten.mm.default",
    allocated_bytes=139_000_000_000,
    asked_bytes=1_500_000_000,
    device_bytes=141_000_000_000,
)


def out_of_memory(arm: Arm) -> Arm:
    return msgspec.structs.replace(arm, outcome="out of memory", out_of_memory=OUT, steps=())


def measurement(*arms: Arm, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "measured": TargetRef("model.py", {"layers": "8"}, "model.py:4"),
        "schema_version": SCHEMA_VERSION,
        "device": "cuda",
        "machine": MACHINE,
        "digest": "sha256:0",
        "compiler": "aot_eager",
        "partitioner": "min-cut",
        "attention": "auto",
        "rules": "whole-storage",
        "min_bytes": 5 * 1024**2,
        "budget": 0,
        "movable_bytes": MOVED,
        "arms": arms or (no_plan(), plan()),
    }
    return Measurement(**{**fields, **changes})


# --- sums -----------------------------------------------------------------------------------------


def test_the_warm_up_counts_neither_for_times_nor_for_peaks():
    arm = no_plan(
        steps=(step(9000.0, peak_allocated_bytes=10**12), *steps(1.0, 5.0, 2.0)),
    )
    assert arm.step_ms == 2.0
    assert arm.peak_allocated_bytes == 47_900_000_000


def test_a_peak_is_the_largest_of_the_measured_steps():
    sizes = (9, 3, 7, 5)
    arm = no_plan(steps=tuple(step(peak_allocated_bytes=size) for size in sizes))
    assert arm.peak_allocated_bytes == 7


def test_nothing_is_reserved_on_the_cpu():
    assert no_plan(steps=steps(1.0, 1.0, peak_reserved_bytes=None)).peak_reserved_bytes is None


def test_a_measurement_is_ok_unless_a_plan_ran_out_of_memory_or_something_differs():
    assert measurement().ok
    assert measurement(out_of_memory(no_plan()), plan()).ok
    assert not measurement(no_plan(), out_of_memory(plan())).ok


# --- the file -------------------------------------------------------------------------------------


def test_a_measurement_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "measured.json"
    parts = Parts(
        peak_bytes=10,
        op="aten.mm.default",
        parameters=4,
        inputs=0,
        gradients=3,
        saved=2,
        temporaries=1,
        workspace=0,
        rounding=0,
    )
    full = measurement(
        no_plan(parts=parts),
        out_of_memory(plan()),
        verification=Verification(not_compared="out of memory: plan"),
        notes=("planned again",),
    )
    write_measurement(path, full)
    assert load_measurement(path) == full
    # It may be written over by the next, and over nothing else.
    write_measurement(path, measurement())
    other = tmp_path / "notes.json"
    other.write_text("{}")
    with pytest.raises(OutputError, match="is not an offplan measurement"):
        write_measurement(other, full)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not an offplan measurement"),
        (b"[]", "is not an offplan measurement"),
        (b'{"schema_version": 99}', "schema version 99"),
        (b'{"schema_version": 2, "device": "cpu"}', "schema version 2; this offplan reads 3"),
        (b'{"schema_version": 3, "device": 3}', r"\$.device"),
        (b'{"schema_version": 3}', "missing required field"),
        (b'{"schema_version": 3, "min_bytes": 1%s}' % (b"0" * 400), r"\$.min_bytes"),
        (b'{"schema_version": 3, "min_bytes": 1152921504606846977}', r"\$.min_bytes"),
        (b"\xff", "is not an offplan measurement"),
    ],
)
def test_a_file_that_is_no_measurement_is_refused_by_name_and_field(tmp_path, content, words):
    path = tmp_path / "measured.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=words):
        load_measurement(path)


# --- verification ---------------------------------------------------------------------------------


def fingerprint(bits: str = "a", name: str = "weight", shift: float = 0.0) -> Fingerprint:
    return Fingerprint(what="gradient", name=name, bits=bits, norm=2.0, sketch=(1.0 + shift, 1.0))


def result(arm: Arm, *found: Fingerprint, each: tuple[Any, ...] | None = None) -> ArmResult:
    per_step = each if each is not None else tuple(found or (fingerprint(),) for _ in arm.steps)
    return ArmResult(arm=arm, machine=MACHINE, fingerprints=per_step)


def test_equal_bits_and_the_planned_bytes_are_verified():
    found = verify([result(no_plan()), result(plan())])
    assert found.ok
    assert (found.reference, found.compared) == ("no plan", ("plan (whole-storage)",))
    assert (found.steps, found.gradients, found.buffers) == (4, 1, 0)


def test_another_bit_is_a_difference_with_its_tensor_and_step():
    changed = [(fingerprint(),)] * 4
    changed[2] = (fingerprint("b", shift=0.5),)
    found = verify([result(no_plan()), result(plan(), each=tuple(changed))])
    (difference,) = found.differences
    assert (difference.what, difference.name, difference.step) == ("gradient", "weight", 2)
    assert difference.arm == "plan (whole-storage)"
    assert (difference.expected, difference.found) == ("a", "b")


def test_a_gradient_that_is_missing_is_a_difference():
    found = verify([result(no_plan()), result(plan(), each=((),) * 4)])
    assert len(found.differences) == 4
    assert {difference.found for difference in found.differences} == {"none"}


def test_a_control_is_needed_where_bits_differ_and_there_is_none():
    one, other = result(no_plan()), result(plan(), fingerprint("b"))
    assert needs_control([one, other])
    assert not needs_control([one, result(plan())])
    assert not needs_control([one, other, result(no_plan(role="control"))])
    # It could not be run.
    assert not needs_control([result(out_of_memory(no_plan())), other])


def test_bits_that_a_control_does_not_repeat_either_are_noise():
    control = result(no_plan(role="control"), fingerprint("c", shift=0.001))
    found = verify([result(no_plan()), result(plan(), fingerprint("b", shift=0.004)), control])
    assert found.ok
    (noise,) = found.noise
    # Two projections, one of them off by the shift; the norm is 2.
    assert noise.control == pytest.approx(0.001 / 2**0.5 / 2)
    assert noise.plan == pytest.approx(0.004 / 2**0.5 / 2)


def test_a_distance_far_beyond_the_noise_is_a_difference():
    control = result(no_plan(role="control"), fingerprint("c", shift=0.001))
    found = verify([result(no_plan()), result(plan(), fingerprint("b", shift=0.02)), control])
    assert len(found.differences) == 4


def test_a_control_with_the_same_bits_excuses_nothing():
    control = result(no_plan(role="control"))
    found = verify([result(no_plan()), result(plan(), fingerprint("b", shift=1e-9)), control])
    assert (found.control, found.noise, len(found.differences)) == ("same", (), 4)


def test_a_control_that_was_asked_for_shows_its_noise_beside_an_equal_plan():
    control = result(no_plan(role="control"), fingerprint("c", shift=0.001))
    found = verify([result(no_plan()), result(plan()), control])
    assert (found.ok, found.control) == (True, "differs")
    (noise,) = found.noise
    assert noise.plan == 0.0


def test_a_value_that_is_not_a_number_is_never_excused_as_noise():
    control = result(no_plan(role="control"), fingerprint("c", shift=0.001))
    broken = Fingerprint(what="gradient", name="weight", bits="b", norm=None, sketch=(None, None))
    assert not verify([result(no_plan()), result(plan(), broken), control]).ok


def test_moved_bytes_and_transfers_have_to_be_the_plans():
    off = step(moved=MOVED - 1, count=57, host_bytes=MOVED)
    arms = no_plan(steps=steps(1.0, 1.0)), plan(steps=(step(moved=MOVED, count=58), off))
    found = verify([result(arm) for arm in arms])
    assert {(each.what, each.step) for each in found.differences} == {
        ("bytes to the host", 1),
        ("bytes to the device", 1),
        ("transfers to the host", 1),
        ("transfers to the device", 1),
    }


def test_an_arm_without_a_plan_moves_nothing():
    moving = no_plan(steps=steps(1.0, 1.0, 1.0, 1.0, moved=8, count=1))
    found = verify([result(moving), result(plan())])
    assert {each.arm for each in found.differences} == {"no plan"}


def test_bytes_have_to_be_flat_from_the_second_step_on():
    growing = tuple(
        step(moved=MOVED, count=58, end_bytes=size, host_bytes=7) for size in (1, 100, 100, 112)
    )
    (difference,) = verify([result(no_plan()), result(plan(steps=growing))]).differences
    assert (difference.what, difference.step) == ("device bytes", 3)
    assert (difference.expected, difference.found) == ("100", "112")


def test_what_a_model_keeps_from_step_to_step_is_not_the_plans_fault():
    grown = [step(end_bytes=size) for size in (1, 100, 112, 124)]
    as_much = [step(moved=MOVED, count=58, end_bytes=size) for size in (1, 90, 102, 114)]
    results = [result(no_plan(steps=tuple(grown))), result(plan(steps=tuple(as_much)))]
    assert verify(results).ok


def test_without_memory_for_the_reference_the_plans_are_compared_with_each_other():
    older = plan(rules="no-view")
    found = verify([result(out_of_memory(no_plan())), result(older), result(plan())])
    assert (found.reference, found.compared) == ("plan (no-view)", ("plan (whole-storage)",))


def test_an_arm_alone_has_its_bytes_checked_and_says_that_bits_were_not_compared():
    found = verify([result(out_of_memory(no_plan())), result(plan())])
    assert (found.compared, found.not_compared) == ((), "out of memory: no plan")
    assert found.ok


# --- the report -----------------------------------------------------------------------------------

REPORT = """\
offplan run ok: model.py layers=8
  replayed on  cuda (NVIDIA H200), torch 2.14.1, aot_eager graphs op by op,
               min-cut partitioner, attention auto
  plan         whole-storage, minimum 5MiB, budget 0: everything movable moves
  arms         one process each; one warm-up step, then 3 steps
  note         planned again, for a reason

Without the plan and with it
                   no plan      plan      delta   predicted   error
  peak allocated  47.90 GB  21.60 GB  -26.30 GB    21.60 GB    none
  peak reserved   49.00 GB  22.70 GB  -26.30 GB    22.80 GB  -0.44%
  end of forward  40.00 GB  13.70 GB  -26.30 GB    13.69 GB  +0.07%
  step            676.0 ms  994.0 ms  +318.0 ms  1,010.0 ms  -1.58%
  moved                0 B  26.30 GB  +26.30 GB    26.30 GB    none
  no plan               steps of 675.0, 677.5, 676.0 ms
  plan (whole-storage)  steps of 994.0, 993.5, 1,001.0 ms; compute waited
                        300.2 ms a step for transfers; 26.30 GB of host memory
  predicted             47.85 GB without a plan (measured: +0.10%), in 680.0 ms
                        (measured: -0.6%)

What the peak is made of
                 no plan  plan (whole-storage)
  parameters     6.60 GB               6.60 GB
  inputs       131.07 kB             131.07 kB
  gradients      6.60 GB               6.60 GB
  saved         32.70 GB               6.40 GB
  temporaries    1.97 GB               1.97 GB
  workspace     33.55 MB              33.55 MB
  rounding         568 B                 568 B
  peak          47.90 GB              21.60 GB
  no plan               reached in aten.mm.default
  plan (whole-storage)  reached in
                        aten._scaled_dot_product_cudnn_attention.default

Verified: same bits
  same   losses, 1 gradient, 0 buffers, over 4 steps: plan (whole-storage)
  moved  bytes and transfers of every step are the plan's
  flat   device and host bytes do not change after the second step
"""


def printed(found: Measurement) -> str:
    return render_run(run_report(found), "text", 80)


def verified(*results: ArmResult, **changes: Any) -> Measurement:
    arms = tuple(each.arm for each in results)
    return measurement(*arms, verification=verify(results), **changes)


def parts(op: str, moved: int) -> Parts:
    return Parts(
        peak_bytes=47_900_000_000 - moved,
        op=op,
        parameters=6_600_000_000,
        inputs=131_072,
        gradients=6_600_000_000,
        saved=32_700_000_000 - moved,
        temporaries=1_966_313_928,
        workspace=33_554_432,
        rounding=568,
    )


def predicted_arms() -> tuple[Arm, Arm]:
    """The arms, with all that is predicted of them."""
    without = no_plan(
        parts=parts("aten.mm.default", 0),
        expected=Expected(
            peak_allocated_bytes=47_850_000_000,
            peak_reserved_bytes=49_500_000_000,
            forward_end_bytes=40_000_000_000,
            step_ms=680.0,
        ),
    )
    with_plan = plan(
        parts=parts("aten._scaled_dot_product_cudnn_attention.default", MOVED),
        expected=Expected(
            peak_allocated_bytes=21_600_000_000,
            peak_reserved_bytes=22_800_000_000,
            forward_end_bytes=13_690_000_000,
            step_ms=1010.0,
        ),
    )
    return without, with_plan


def test_the_report_is_this():
    found = verified(*map(result, predicted_arms()), notes=("planned again, for a reason",))
    assert printed(found) == REPORT


def test_without_a_profile_only_bytes_are_predicted():
    arms = [
        msgspec.structs.replace(arm, expected=msgspec.structs.replace(arm.expected, step_ms=None))
        for arm in predicted_arms()
    ]
    text = printed(verified(*map(result, arms)))
    assert "  step            676.0 ms  994.0 ms  +318.0 ms\n" in text
    assert "  predicted             47.85 GB without a plan (measured: +0.10%)\n" in text


def test_of_nothing_predicted_no_share_is_said():
    without, with_plan = predicted_arms()
    nothing = Expected(
        peak_allocated_bytes=0, peak_reserved_bytes=0, forward_end_bytes=0, step_ms=0.0
    )
    without, with_plan = (
        msgspec.structs.replace(arm, expected=nothing) for arm in (without, with_plan)
    )
    text = printed(verified(result(without), result(with_plan)))
    assert "  predicted             0 B without a plan, in 0.0 ms\n" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  peak allocated ")]
    assert row.split()[-4:] == ["0", "B", "+21.60", "GB"]


def test_a_peak_that_is_measured_as_predicted_says_so_on_both_sides():
    exact = no_plan().peak_allocated_bytes
    without, with_plan = predicted_arms()
    expected = msgspec.structs.replace(without.expected, peak_allocated_bytes=exact, step_ms=None)
    arms = msgspec.structs.replace(without, expected=expected), with_plan
    text = printed(verified(*map(result, arms)))
    assert "  predicted             47.90 GB without a plan (as measured)\n" in text
    (row,) = [line for line in text.splitlines() if line.startswith("  peak allocated ")]
    assert row.split()[-1] == "none"


def test_what_was_predicted_of_an_arm_that_ran_out_of_memory_is_still_there():
    without, with_plan = predicted_arms()
    text = printed(verified(result(out_of_memory(without)), result(with_plan)))
    assert "  predicted             47.85 GB without a plan, in 680.0 ms\n" in text


@pytest.mark.parametrize(
    ("budget", "asked", "words"),
    [
        (21_600_000_000, "80%", "budget 80%: 21.60 GB"),
        (21_600_000_000, "floor", "budget floor: 21.60 GB"),
        (21_600_000_000, "21.6 GB", "budget 21.60 GB"),
        (21_600_000_000, "21.60GB", "budget 21.60 GB"),
        (21_600_000_000, "", "budget 21.60 GB"),
        (21_600_000_000, "21600000000", "budget 21.60 GB"),
        (21 * 1024**3, "21GiB", "budget 21GiB: 22.55 GB"),
    ],
)
def test_a_budget_that_is_kept_is_ok_and_named_as_it_was_asked_for(budget, asked, words):
    found = verified(*map(result, predicted_arms()), budget=budget, asked=asked)
    assert (found.ok, found.over_budget_bytes) == (True, 0)
    text = printed(found)
    assert text.startswith("offplan run ok")
    assert f"minimum 5MiB, {words}\n" in text
    assert "exceeded" not in text


def test_a_byte_over_the_budget_is_not_ok_and_the_report_says_by_how_much():
    peak = plan().peak_allocated_bytes
    assert measurement(budget=peak).ok
    assert not measurement(budget=peak - 1).ok
    found = verified(*map(result, predicted_arms()), budget=21_000_000_000, asked="21GB")
    assert found.verification is not None
    assert found.verification.ok
    assert (found.ok, found.over_budget_bytes) == (False, 600_000_000)
    text = printed(found)
    assert text.startswith("offplan run failed")
    assert "  budget                exceeded: the measured peak is 600.00 MB over it\n" in text
    document = json.loads(render_run(run_report(found), "json"))
    assert (document["ok"], document["over_budget_bytes"]) == (False, 600_000_000)


def test_the_budget_is_for_the_plans_and_not_for_the_arms_without_one():
    # 47.90 GB without a plan, and again in the control.
    arms = no_plan(), plan(), no_plan(role="control")
    assert measurement(*arms, budget=22_000_000_000).ok
    # Of several plans the highest peak counts.
    older = plan(rules="no-view", steps=steps(1.0, 1.0, moved=MOVED - 2_000_000_000, count=58))
    assert measurement(*arms, older, budget=22_000_000_000).over_budget_bytes == 1_600_000_000


def test_budget_0_and_no_budget_have_no_limit():
    for budget in (0, None):
        assert measurement(budget=budget).over_budget_bytes == 0
    assert not measurement(no_plan(), out_of_memory(plan()), budget=22_000_000_000).ok


def test_json_has_every_sample_and_the_verdict():
    document = json.loads(render_run(run_report(measurement()), "json"))
    assert document["ok"] is True
    assert [step["step_ms"] for step in document["arms"][1]["steps"]] == [
        1500.0,
        994.0,
        993.5,
        1001.0,
    ]
    assert document["rows"][-1]["error"] == 0


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="html"):
        render_run(run_report(measurement()), "html")


def test_running_out_of_memory_is_a_line_and_not_a_number():
    text = printed(verified(result(out_of_memory(no_plan())), result(plan())))
    assert text.startswith("offplan run ok: model.py layers=8\n")
    assert "out of memory in the backward of step 0 (aten.mm.default)" in " ".join(text.split())
    assert "Bits not compared: out of memory: no plan" in text


def test_a_difference_is_named_with_tensor_and_step():
    text = printed(verified(result(no_plan()), result(plan(), fingerprint("b"))))
    assert text.startswith("offplan run failed")
    assert "Verification failed: 4 differences" in text
    assert "gradient weight" in text


def test_rule_sets_are_compared_row_by_row():
    plans = [plan(rules=rules) for rules in ("no-view", "last-holder", "whole-storage")]
    text = printed(verified(result(no_plan()), *(result(each) for each in plans)))
    rows = text[text.index("Rule sets compared") :].splitlines()[1:6]
    assert [row.split()[0] for row in rows] == [
        "rules",
        "no",
        "no-view",
        "last-holder",
        "whole-storage",
    ]


# --- host memory and engines ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin", "words"),
    [
        ("register", "26.30 GB of host memory, pinned (register)"),
        ("torch", "26.30 GB of host memory, pinned (torch)"),
        ("off", "26.30 GB of host memory, pageable (--pin off)"),
    ],
)
def test_the_report_says_how_host_memory_was_pinned(pin, words):
    assert words in " ".join(printed(measurement(no_plan(), plan(pin=pin))).split())


def eager(role: str, **changes: Any) -> Arm:
    fields: dict[str, Any] = {"role": role, "engine": "hooks", "rules": None, "planned": None}
    return (plan if role == "hooks" else no_plan)(**{**fields, **changes})


HOOKS_REPORT = """\
offplan run ok: model.py layers=8
  measured on  cuda (NVIDIA H200), torch 2.14.1, eager, saved-tensor hooks
  hooks        move saved storages from 5MiB
  beside it    the plan, replayed: aot_eager graphs op by op, min-cut
               partitioner, attention auto
  plan         whole-storage, minimum 5MiB, budget 0: everything movable moves
  arms         one process each; one warm-up step, then 3 steps

Without offload and with it
                  no offload     hooks      delta
  peak allocated    47.90 GB  21.60 GB  -26.30 GB
  peak reserved     49.00 GB  22.70 GB  -26.30 GB
  end of forward    40.00 GB  13.70 GB  -26.30 GB
  step              676.0 ms  994.0 ms  +318.0 ms
  moved                  0 B  26.30 GB  +26.30 GB
  no offload            steps of 675.0, 677.5, 676.0 ms
  hooks                 steps of 994.0, 993.5, 1,001.0 ms; compute waited
                        300.2 ms a step for transfers; 26.30 GB of host memory,
                        pinned (register)
  plan (whole-storage)  steps of 994.0, 993.5, 1,001.0 ms; compute waited
                        300.2 ms a step for transfers; 26.30 GB of host memory

Hooks and replay compared
  arm                       peak     moved      step
  no offload            47.90 GB       0 B  676.0 ms
  hooks                 21.60 GB  26.30 GB  994.0 ms
  plan (whole-storage)  21.60 GB  26.30 GB  994.0 ms

Verified: same bits
  same          losses, 1 gradient, 0 buffers, over 4 steps: hooks
  not compared  the replay: graphs may round otherwise than eager training does
  moved         bytes and transfers do not change after the second step; a
                replay's are its plan's
  flat          device and host bytes do not change after the second step
"""


def test_hooks_are_reported_beside_the_replay_whose_bits_are_not_compared():
    arms = (
        result(eager("no offload")),
        result(eager("hooks", pin="register")),
        result(plan(), fingerprint("other bits")),
    )
    assert not needs_control(arms)
    assert printed(verified(*arms, engine="hooks")) == HOOKS_REPORT


def test_another_bit_under_hooks_is_a_difference_and_a_control_tells_noise():
    one, other = result(eager("no offload")), result(eager("hooks"), fingerprint("b", shift=0.001))
    assert needs_control([one, other, result(plan())])
    found = verify([one, other, result(plan())])
    assert {(each.arm, each.what) for each in found.differences} == {("hooks", "gradient")}
    control = result(eager("control"), fingerprint("c", shift=0.001))
    assert control.arm.name == "no offload, again"
    assert verify([one, other, control]).ok


def test_hooks_move_the_same_from_the_second_step_on():
    first = step(moved=MOVED, count=9)
    even = (first, *steps(1.0, 1.0, 1.0, moved=MOVED, count=8))
    assert verify([result(eager("no offload")), result(eager("hooks", steps=even))]).ok
    odd = (*even[:3], step(moved=MOVED, count=7))
    found = verify([result(eager("no offload")), result(eager("hooks", steps=odd))])
    assert {(each.what, each.step, each.expected) for each in found.differences} >= {
        ("transfers to the host", 3, "8"),
        ("transfers to the device", 3, "8"),
    }


def test_without_offload_nothing_moves():
    moving = eager("no offload", steps=steps(1.0, 1.0, 1.0, 1.0, moved=8, count=1))
    found = verify([result(moving), result(eager("hooks"))])
    assert "no offload" in {each.arm for each in found.differences}


def test_hooks_that_run_out_of_memory_are_not_ok():
    arms = eager("no offload"), eager("hooks"), plan()
    assert measurement(*arms, engine="hooks").ok
    assert not measurement(arms[0], out_of_memory(arms[1]), arms[2], engine="hooks").ok
