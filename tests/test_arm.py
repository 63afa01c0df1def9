"""One arm: fingerprints of tensors, parts of a peak, and what a process answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay_runtime import ALIAS_WARNING, CUDA_ONLY, _targets

from offplan.budget import parse_budget
from offplan.graph import GraphFacts
from offplan.measured import planned
from offplan.plan import Plan, make_plan, write_plan
from offplan.replay import arm as arm_module
from offplan.replay import fingerprint as fingerprint_module
from offplan.replay.arm import DrawnOn, answer
from offplan.replay.fingerprint import fingerprints
from offplan.replay.layout import laid_out_bytes
from offplan.replay.limits import HostMemoryError
from offplan.replay.measure import without_transfers
from offplan.replay.messages import Answer, ArmRequest, ArmResult, Failure, Fingerprint
from offplan.replay.parts import PartsWatch
from offplan.replay.verify import distance, verify
from offplan.trace.capture import TraceOptions, trace

ROOT = Path(__file__).parent.parent
MIB = 1024**2
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


class Model(nn.Module):
    def __init__(self, width, dropout, forward=None, backward=None):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout, self.errors = dropout, (forward, backward)

    @torch.compiler.disable
    def between(self, x):
        forward, backward = self.errors
        # The forward of a trace runs it too, on fake tensors; its backward does not.
        if forward is not None and type(x).__name__ != "FakeTensor":
            raise forward
        return x if backward is None else Explodes.apply(x, backward)

    def forward(self, x):
        x = F.dropout(self.norm(F.gelu(self.first(x))), self.dropout)
        return self.second(self.between(x)).square().mean()


def build(width: int = 64, dropout: float = 0.25):
    return Model(width, dropout), (torch.randn(32, width),)


def forward_fails():
    return Model(64, 0.0, forward=ValueError("no such token")), (torch.randn(32, 64),)


def backward_fails():
    return Model(64, 0.0, backward=ValueError("no gradient")), (torch.randn(32, 64),)


def forward_is_too_large():
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ...")
    return Model(64, 0.0, forward=error), (torch.randn(32, 64),)


def backward_is_too_large():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: tried to allocate 8 bytes")
    return Model(64, 0.0, backward=error), (torch.randn(32, 64),)
"""


def of(tensor: torch.Tensor) -> Fingerprint:
    (found,) = fingerprints([("gradient", "weight", tensor)])
    return found


# --- fingerprints ---------------------------------------------------------------------------------

DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.int64, torch.int8, torch.bool),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bit_changes_the_fingerprint(dtype):
    tensor = torch.arange(1, 13).remainder(2).to(dtype).reshape(3, 4)
    changed = tensor.clone()
    changed.view(torch.uint8)[1, 2] ^= 1
    before = tensor.clone()
    assert of(tensor).bits == of(before).bits
    assert of(tensor).bits != of(changed).bits
    # It only looks.
    assert tensor.view(torch.uint8).equal(before.view(torch.uint8))


def test_the_order_of_elements_the_shape_and_the_type_count():
    tensor = torch.tensor([1.0, 2.0, 3.0, 4.0])
    alike = (tensor.flip(0), tensor.reshape(2, 2), tensor.view(torch.int32))
    assert len({of(each).bits for each in (tensor, *alike)}) == 4


def test_strides_do_not_count():
    tensor = torch.randn(5, 7)
    assert of(tensor).bits == of(tensor.t().contiguous().t()).bits
    assert of(torch.ones(1).expand(6)).bits == of(torch.ones(6)).bits


def test_zeros_of_either_sign_and_every_nan_are_told_apart_by_their_bits():
    zeros = torch.tensor([0.0, -0.0])
    assert of(zeros).bits != of(zeros.flip(0)).bits
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert of(nan).bits == of(nan.clone()).bits
    assert of(nan).bits != of(nan.flip(0)).bits
    assert of(nan).norm is None


def test_a_conjugate_and_a_negative_view_are_read_as_their_values():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert of(tensor.conj()).bits == of(tensor.conj().resolve_conj()).bits
    assert of(tensor.conj().imag).bits == of(torch.tensor([-2.0, 4.0])).bits


def test_an_empty_tensor_and_a_scalar_have_one():
    assert of(torch.empty(0, 3)).bits.startswith("float32[0x3] ")
    assert of(torch.tensor(2.5)).norm == 2.5


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, ::3],
        lambda t: t[::2, 1:],
        lambda t: t.reshape(2, -1, 11).transpose(0, 2),
        lambda t: t[:1].expand(50, 121),
    ],
)
def test_pieces_give_what_the_whole_gives(view, monkeypatch):
    tensor = view(torch.randn(40, 121))
    whole = of(tensor)
    monkeypatch.setattr(fingerprint_module, "_PIECE_ELEMENTS", 37)
    pieces = of(tensor)
    assert pieces.bits == whole.bits
    assert pieces.sketch == pytest.approx(whole.sketch)
    assert pieces.norm == pytest.approx(whole.norm)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3000), st.floats(1e-6, 10.0), st.integers(0, 2**31))
def test_a_sketch_tells_the_distance_within_a_factor(count, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(count, generator=generator, dtype=torch.float64)
    noise = scale * torch.randn(count, generator=generator, dtype=torch.float64)
    true = float(noise.norm() / tensor.norm())
    # Eight projections: the estimate of the square is that of a chi-square with 8 degrees.
    assert true / 5 < distance(of(tensor), of(tensor + noise)) < true * 3


# --- the parts of a peak --------------------------------------------------------------------------


def test_the_parts_of_a_peak_are_those_that_a_hand_counts():
    row = 256 * 1024  # floats: 1 MiB
    weight = torch.nn.Parameter(torch.ones(row))
    x = torch.ones(row)
    watch = PartsWatch(torch.device("cpu"), [weight], [x])
    with watch:
        a = x * weight  # multiplication saves x and the weight
        b = a.exp()  # exp saves its output
        del a
        loss = b.sum()
        watch.forward_ended()
        loss.backward()
    del b, loss
    parts = watch.parts([weight.grad])
    # The peak is in the backward, when exp's output is still held, its gradient (of the product) is
    # there, and the weight's is being made of that.  The loss (4 bytes) is born in the forward, the
    # gradient that the engine starts from (4 bytes) in the backward.
    assert parts.op == "aten.mul.Tensor"
    assert parts.parameters == parts.inputs == MIB
    assert (parts.saved, parts.temporaries, parts.gradients) == (MIB + 4, MIB + 4, MIB)
    assert parts.peak_bytes == 5 * MIB + 8
    assert (parts.workspace, parts.rounding) == (None, None)


def test_a_gradient_at_the_peak_is_told_from_a_temporary():
    weight = torch.nn.Parameter(torch.ones(MIB // 4))
    watch = PartsWatch(torch.device("cpu"), [weight], [])
    with watch:
        loss = (weight * 2.0).sum()
        watch.forward_ended()
        loss.backward()
        # A further op, with the gradient there.
        other = torch.zeros(MIB)
    parts = watch.parts([weight.grad])
    assert other is not None
    assert (parts.gradients, parts.temporaries) == (MIB, 4 * MIB)


def test_a_storage_that_is_emptied_counts_for_nothing():
    watch = PartsWatch(torch.device("cpu"), [], [])
    with watch:
        a = torch.zeros(MIB)
        a.untyped_storage().resize_(0)
        b = torch.zeros(MIB)
    parts = watch.parts([])
    assert b is not None
    assert parts.peak_bytes == 4 * MIB


# --- what a process answers -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty current directory with a small model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def floor_plan(spec: str = "model.py", **params: str) -> Plan:
    return make_plan(trace(spec, params, TraceOptions("cpu")), min_bytes=0, budget=0)


def answered(plan: Plan, **changes) -> Answer:
    fields = {
        "plan": Path("arm.plan.yaml"),
        "device": "cpu",
        "steps": 2,
        "seed": 7,
        "host_budget_bytes": None,
        "verify": True,
    }
    write_plan(Path("arm.plan.yaml"), plan)
    return answer(ArmRequest(**{**fields, **changes}))


def replayed(plan: Plan, **changes) -> ArmResult:
    found = answered(plan, **changes)
    assert isinstance(found, ArmResult), found
    return found


def in_role(found: ArmResult, **changes) -> ArmResult:
    return msgspec.structs.replace(found, arm=msgspec.structs.replace(found.arm, **changes))


def test_an_arm_with_a_plan_is_the_same_as_one_without_dropout_and_statistics_included(folder):
    plan = floor_plan()
    assert plan.transfers
    with_plan = replayed(plan)
    without = replayed(without_transfers(plan))
    kinds = [(each.what, each.name) for each in with_plan.fingerprints[0]]
    assert kinds[0] == ("loss", "")
    assert ("gradient", "first.weight") in kinds
    assert ("buffer", "norm.running_mean") in kinds
    found = verify(
        [
            in_role(without, role="no plan"),
            in_role(with_plan, rules="whole-storage", planned=planned(plan)),
        ]
    )
    assert found.differences == ()
    assert (found.steps, found.gradients, found.buffers) == (3, 6, 3)


def test_every_step_draws_other_random_numbers_and_advances_the_statistics(folder):
    by_step = [
        {each.name: each.bits for each in step} for step in replayed(floor_plan()).fingerprints
    ]
    assert len({found[""] for found in by_step}) == 3
    assert len({found["norm.running_mean"] for found in by_step}) == 3
    counts = [found["norm.num_batches_tracked"] for found in by_step]
    assert len(set(counts)) == 3


def test_an_arm_counts_what_it_moves_and_holds(folder):
    plan = floor_plan()
    arm = replayed(plan).arm
    moved = planned(plan)
    assert arm.completed
    assert [step.to_host_bytes for step in arm.steps] == [moved.to_host_bytes] * 3
    assert [step.to_device_count for step in arm.steps] == [moved.to_device_count] * 3
    assert all(step.host_bytes >= moved.to_host_bytes for step in arm.steps)
    assert all(step.step_ms == step.forward_ms + step.backward_ms for step in arm.steps)
    assert len({step.end_bytes for step in arm.steps[1:]}) == 1


def test_the_peak_of_the_steps_is_the_peak_that_its_parts_add_up_to(folder):
    for plan in (floor_plan(), without_transfers(floor_plan())):
        arm = replayed(plan, steps=1).arm
        assert arm.parts is not None
        assert arm.parts.peak_bytes == arm.peak_allocated_bytes
        named = ("parameters", "inputs", "gradients", "saved", "temporaries")
        assert sum(getattr(arm.parts, name) for name in named) == arm.parts.peak_bytes


def test_a_plan_leaves_less_at_the_end_of_the_forward(folder):
    plan = floor_plan()
    before, after = replayed(without_transfers(plan)).arm, replayed(plan).arm
    assert before.forward_end_bytes - after.forward_end_bytes == plan.moved_bytes


def test_without_verification_there_are_no_fingerprints_and_nothing_is_deterministic(folder):
    assert replayed(floor_plan(), verify=False).fingerprints == ()
    assert not torch.are_deterministic_algorithms_enabled()


def test_running_out_of_memory_is_a_result(folder):
    arm = replayed(floor_plan("model.py:forward_is_too_large")).arm
    assert (arm.outcome, arm.steps) == ("out of memory", ())
    assert arm.out_of_memory is not None
    assert arm.out_of_memory.during == "the forward of step 0"
    assert arm.out_of_memory.asked_bytes == 2.5 * 1024**3
    assert arm.out_of_memory.allocated_bytes > 0


def test_running_out_of_memory_in_the_backward_is_one_too(folder):
    arm = replayed(floor_plan("model.py:backward_is_too_large")).arm
    assert arm.out_of_memory is not None
    assert arm.out_of_memory.during == "the backward of step 0"
    assert arm.out_of_memory.asked_bytes == 8


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("forward_fails", "the forward of step 0 failed: ValueError: no such token"),
        ("backward_fails", "the backward of step 0 failed: ValueError: no gradient"),
    ],
)
def test_an_exception_in_the_step_is_one_message_with_the_users_line(folder, factory, words):
    found = answered(floor_plan(f"model.py:{factory}"))
    assert isinstance(found, Failure)
    assert (found.exit_code, found.what) == (1, words)
    assert "model.py:" in found.where


def test_a_target_that_changed_since_is_refused_with_what_changed(folder):
    plan = floor_plan()
    Path("model.py").write_text(MODEL.replace("square()", "abs()"))
    found = answered(plan)
    assert isinstance(found, Failure)
    assert found.exit_code == 1
    assert "the plan was made for other graphs" in found.what


def test_another_version_of_torch_with_other_graphs_is_named(folder):
    plan = msgspec.structs.replace(floor_plan(), torch="2.0.0", digest="sha256:0")
    found = answered(plan)
    assert isinstance(found, Failure)
    assert "torch was 2.0.0, is" in found.what


def test_a_plan_edited_by_hand_is_refused(folder):
    plan = floor_plan()
    first, *rest = plan.transfers
    late = msgspec.structs.replace(first, needed_by=plan.op_count - 1)
    found = answered(msgspec.structs.replace(plan, transfers=(late, *rest)))
    assert isinstance(found, Failure)
    assert "cannot be moved as planned" in found.what


def test_a_host_budget_that_is_too_small_is_refused(folder):
    found = answered(floor_plan(), host_budget_bytes=100)
    assert isinstance(found, Failure)
    assert "host" in found.what
    assert found.fix


def test_no_gpu_is_a_message_that_names_the_cpu(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = answered(floor_plan(), device="cuda")
    assert isinstance(found, Failure)
    assert "no GPU" in found.what
    assert "--device cpu" in found.fix


# --- predicted peaks ------------------------------------------------------------------------------


# What is predicted of these cannot be measured to the byte on the CPU, where a gauge has to find
# each tensor: constants that no module owns, and inputs in a class of which torch knows nothing.
UNSEEN_BYTES = {
    "in_place": 4,
    "constants_on_the_device": 8,
    "constructor_reads_values": 64 * 4,
    "batch_object": 32 * 64 * 4 + 64 * 4,
}
# Nor is there a prediction to the byte for ops between the graphs, for a saved random-number state
# whose size is unknown when traced, and for the scalars by which a loss of many terms is added up.
INEXACT = frozenset(
    {"abandoned_frame", "checkpointed_dropout", "checkpointed_noise", "dict_output"}
)


def plans_of(facts: GraphFacts) -> list[Plan]:
    """The plans without a budget, half-way to the floor, and at the floor with as little and as
    much moved as can be; each set of transfers once."""
    none = make_plan(facts, min_bytes=1)
    middle = (none.predicted.no_plan.peak_bytes + none.predicted.floor_bytes) // 2
    budgets = (str(middle), "floor", "0")
    made = [none, *(make_plan(facts, min_bytes=1, budget=parse_budget(b)) for b in budgets)]
    return list({plan.transfers: plan for plan in made}.values())


@pytest.mark.filterwarnings(ALIAS_WARNING)
@pytest.mark.parametrize(("spec", "params"), _targets(CUDA_ONLY | INEXACT))
def test_the_measured_peak_is_the_predicted_one_and_within_the_budget(folder, spec, params):
    unseen_bytes = UNSEEN_BYTES.get(spec.rpartition(":")[2], 0)
    for plan in plans_of(trace(str(ROOT / spec), params, TraceOptions("cpu"))):
        arm = replayed(plan, steps=1, verify=False).arm
        predicted = plan.predicted.plan
        assert arm.peak_allocated_bytes == predicted.peak_bytes - unseen_bytes, plan.asked
        assert arm.forward_end_bytes == predicted.forward_end_bytes - unseen_bytes, plan.asked
        if plan.budget:
            assert arm.peak_allocated_bytes <= plan.budget


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_bits_do_not_depend_on_the_device():
    tensor = torch.randn(300, 70)
    on_gpu = tensor.t().cuda()
    assert of(on_gpu).bits == of(tensor.t()).bits


@pytest.mark.cuda
def test_large_parameters_are_drawn_on_the_gpu_and_stay_where_they_are():
    def built() -> torch.nn.Linear:
        torch.manual_seed(3)
        with DrawnOn(torch.device("cuda", 0)):
            return torch.nn.Linear(2048, 2048)

    one, other = built(), built()
    assert one.weight.device.type == "cpu"
    assert one.weight.equal(other.weight)
    # Uniform within 1 / sqrt(2048), as the layer asks for.
    assert 0.0220 < float(one.weight.detach().abs().max()) < 0.0221


@pytest.mark.cuda
def test_parts_of_a_peak_on_the_gpu_add_up_to_what_the_allocator_counts(folder):
    plan = make_plan(trace("model.py", {"width": "1024"}, TraceOptions()), min_bytes=0, budget=0)
    arm = replayed(plan, device="cuda").arm
    parts = arm.parts
    assert parts is not None
    assert parts.workspace is not None
    assert parts.rounding is not None
    assert parts.peak_bytes == arm.peak_allocated_bytes
    tensors = parts.parameters + parts.inputs + parts.gradients + parts.saved + parts.temporaries
    assert tensors + parts.workspace + parts.rounding == parts.peak_bytes


@pytest.mark.cuda
def test_a_gpu_that_is_nearly_full_gives_a_result(folder):
    plan = make_plan(trace("model.py", {"width": "4096"}, TraceOptions()), min_bytes=0)
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    # Room for the parameters (two of 64 MiB) and workspaces, but not for two gradients more.
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + 240 * MIB) / total_bytes
    )
    try:
        arm = replayed(plan, device="cuda").arm
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert arm.out_of_memory is not None
    assert arm.out_of_memory.during == "the backward of step 0"
    assert arm.out_of_memory.asked_bytes == 64 * MIB


# --- host memory ----------------------------------------------------------------------------------


def test_host_memory_that_cannot_be_had_ends_an_arm_before_its_model_is_built(folder, monkeypatch):
    asked, built = [], []

    def refuse(name: str, device: torch.device, asked_bytes: int) -> None:
        asked.append((name, asked_bytes))
        raise HostMemoryError("--pin torch cannot be used here: why", fix="--pin auto")

    monkeypatch.setattr(arm_module, "choose", refuse)
    monkeypatch.setattr(arm_module, "build_real", lambda *rest: built.append(rest))
    plan = floor_plan()
    found = answered(plan, pin="torch")
    assert found == Failure(
        exit_code=1, what="--pin torch cannot be used here: why", fix="--pin auto"
    )
    assert built == []
    assert asked == [("torch", laid_out_bytes(plan.transfers))]
    assert asked[0][1] > 0


def test_host_memory_that_runs_out_is_not_taken_for_memory_of_the_device():
    """CUDA says "out of memory" of both."""
    error = HostMemoryError("host pinned memory")
    error.__cause__ = RuntimeError("CUDA error: out of memory")
    assert not arm_module._is_out_of_memory(error)
    outer = RuntimeError("while compiling")
    outer.__cause__ = error
    assert not arm_module._is_out_of_memory(outer)
    assert arm_module._is_out_of_memory(error.__cause__)


# --- eager arms -----------------------------------------------------------------------------------


def test_eager_arms_train_alike_and_only_one_of_them_moves_something(folder):
    plan = without_transfers(floor_plan())
    results = []
    for role, is_enabled in (("no offload", False), ("hooks", True)):
        found = answered(plan, engine="hooks", enabled=is_enabled, steps=2)
        assert isinstance(found, ArmResult), found
        arm = msgspec.structs.replace(found.arm, role=role, engine="hooks")
        assert (arm.completed, arm.expected, arm.pin) == (True, None, "")
        assert len(arm.steps) == 3
        results.append(msgspec.structs.replace(found, arm=arm))
    before, after = (result.arm for result in results)
    assert before.to_host_bytes == before.host_bytes == 0
    assert after.to_host_bytes > 0 < after.host_bytes
    assert after.forward_end_bytes < before.forward_end_bytes
    assert before.parts is not None
    assert before.parts.peak_bytes == before.peak_allocated_bytes
    found = verify(results)
    assert (found.ok, found.compared) == (True, ("hooks",))
