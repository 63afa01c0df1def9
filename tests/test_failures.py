"""What cannot be traced or built ends in one message: the op, the user's line, what to try."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offplan.errors import DeviceError, OffplanError, TargetError, TraceError
from offplan.trace.capture import TraceOptions, trace

TARGETS = Path(__file__).parent / "targets" / "broken.py"
DEVICES = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]

# factory -> (error, words of the message, words of the line that is named, words of the fix)
CASES = {
    "shape_from_data": (TraceError, "aten.nonzero.default", "h[h > 0]", "torch.where"),
    "unique": (TraceError, "aten._unique2.default", "torch.unique", "fixed output shape"),
    "value_read": (TraceError, "aten._local_scalar_dense.default", ".item()", "torch.where"),
    "branch_on_data": (TraceError, "aten._local_scalar_dense", "if h.sum() > 0", "on the device"),
    "wrong_shapes": (TraceError, "RuntimeError", "h @ torch.ones", ""),
    "own_error": (TraceError, "ValueError: the user's own message", "raise ValueError", ""),
    "no_gradient": (TraceError, "no output needs a gradient", "", "require gradients"),
    "not_a_tensor": (TraceError, "no output needs a gradient", "", ""),
    "double_backward": (TraceError, "double backward", "torch.autograd.grad", "gradient penalty"),
    "backward_inside": (TraceError, "double backward", ".backward(", "gradient penalty"),
    "missing_fake_kernel": (
        TraceError,
        "offplan_tests::no_fake_kernel has no fake kernel",
        "no_fake_kernel(h)",
        "register_fake",
    ),
    "sparse_input": (TargetError, "sparse_coo", "", "plain strided"),
    "nested_input": (TargetError, "NestedTensor", "", "plain strided"),
    "lazy_module": (TargetError, "lazy module", "", "input size"),
    "constructor_reads_large_tensor": (TargetError, "reads values", ".sum().item()", "1 MiB"),
    "constructor_raises": (TargetError, "no such configuration", "raise RuntimeError", ""),
    "too_many_arguments": (TraceError, "takes 2 positional arguments but 3", "", ""),
    "compiler_disabled": (TraceError, "nothing was traced", "", "out of the forward"),
    "exits": (TargetError, "SystemExit: 3", "sys.exit(3)", ""),
    "returns_nothing": (TargetError, "returned NoneType", "", "(model, args)"),
    "returns_a_list_of_inputs": (TargetError, "inputs must be a tuple", "", ""),
    "not_callable": (TargetError, "is not a function", "", ""),
    "no_such_factory": (TargetError, "has no 'no_such_factory'", "", "name one of its functions"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_names_what_failed_and_the_users_line(name, device, capfd):
    error_type, words, line, fix = CASES[name]
    with pytest.raises(OffplanError) as raised:
        trace(f"{TARGETS}:{name}", {}, TraceOptions(device=device))
    error = raised.value
    assert type(error) is error_type
    assert error.exit_code == 1
    assert words in error.what
    assert "\n" not in error.what
    assert fix in error.fix
    if line:
        file, _, number = error.where.rpartition(":")
        assert Path(file).name == "broken.py"
        assert line in TARGETS.read_text().splitlines()[int(number) - 1]
    # The message is all there is: torch's own logs and warnings stay out of the way.
    assert capfd.readouterr() == ("", "")


def test_a_cpu_build_of_torch_refuses_cuda_before_torch_can_abort(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError) as raised:
        trace(f"{TARGETS}:own_error", {}, TraceOptions(device="cuda"))
    assert "not a CUDA build" in raised.value.what
    assert "pip install torch" in raised.value.fix
    assert "--device cpu" in raised.value.fix


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_a_gpu_that_this_build_of_torch_has_dropped_is_refused():
    if int(torch.version.cuda.split(".")[0]) < 13:
        pytest.skip("CUDA before 13 still supports sm70")
    with pytest.raises(DeviceError, match="does not run on Tesla V100"):
        trace(f"{TARGETS.parent / 'working.py'}:plain", {}, TraceOptions(gpu="v100"))


def test_an_interrupt_is_not_turned_into_an_error(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("offplan.trace.compilers.aot_module_simplified", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trace(f"{TARGETS.parent / 'working.py'}:plain", {}, TraceOptions(device="cpu"))
