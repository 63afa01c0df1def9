"""The sample models are models: each runs for real, forward and backward, on the CPU.

Qwen3-14B is too large for that; its configuration is checked on the meta device instead.
"""

from __future__ import annotations

import inspect
import re
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from offplan.target import Target

SAMPLES = Path(__file__).resolve().parent.parent / "sample_graphs"
NAMES = sorted(path.stem for path in SAMPLES.glob("*.py"))
TOO_LARGE = {"qwen3_14b"}

# Parameters that no graph uses, by sample: the whole of the fourth expert, which is idle.
UNUSED = {
    "moe": {f"experts.3.{layer}.{kind}" for layer in ("up", "down") for kind in ("weight", "bias")}
}


def load(name: str) -> ModuleType:
    spec = util.spec_from_file_location(f"sample_{name}", SAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_target(built: Any) -> Target:
    return built if isinstance(built, Target) else Target(*built)


def loss_of(target: Target) -> torch.Tensor:
    """The target's own loss, else the sum of its floating outputs (a scalar's is itself)."""
    output = target.model(*target.args, **target.kwargs)
    if target.loss is not None:
        return target.loss(output)
    outputs = [leaf for leaf in tree_leaves(output) if leaf.is_floating_point()]
    return sum((leaf.sum() for leaf in outputs), start=torch.zeros(()))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TOO_LARGE])
def test_a_sample_trains_on_the_cpu_and_every_used_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    target = as_target(load(name).build())
    loss = loss_of(target)
    assert loss.ndim == 0
    loss.backward()

    gradients = {key: value.grad for key, value in target.model.named_parameters()}
    assert gradients
    unused = {key for key, gradient in gradients.items() if gradient is None}
    assert unused == UNUSED.get(name, set())
    for key, gradient in gradients.items():
        if gradient is not None:
            assert gradient.isfinite().all(), key
            assert gradient.any(), key


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_explains_itself_and_its_options_are_annotated_with_defaults(name: str) -> None:
    module = load(name)
    assert module.__doc__
    assert module.__doc__.splitlines()[0].strip()
    options = inspect.signature(module.build).parameters.values()
    assert options
    for option in options:
        assert option.annotation in (int, float, bool), option
        assert type(option.default) is option.annotation, option


def test_a_sample_can_be_loaded_twice_in_one_process() -> None:
    # The custom op's registration outlives the module that made it.
    assert load("pass_through_op").build is not load("pass_through_op").build


def test_the_table_in_the_readme_lists_every_sample_once() -> None:
    listed = re.findall(
        r"^\| \[`(\w+)\.py`\]\((\w+)\.py\)", (SAMPLES / "README.md").read_text(), re.M
    )
    assert sorted(listed) == [(name, name) for name in NAMES]


def test_the_pass_through_op_returns_the_very_tensor_it_was_given() -> None:
    load("pass_through_op")
    x = torch.ones(2)
    assert torch.ops.offplan_samples.pass_through(x) is x


def test_qwen3_14b_has_the_published_parameter_count() -> None:
    hidden, intermediate, vocabulary, layers = 5120, 17408, 151936, 40
    query_width, key_width, head_size = 40 * 128, 8 * 128, 128
    attention = hidden * query_width + 2 * hidden * key_width + query_width * hidden
    layer = attention + 3 * hidden * intermediate + 2 * hidden + 2 * head_size
    stack = vocabulary * hidden + layers * layer + hidden
    assert stack + vocabulary * hidden == 14_768_307_200  # as published: 14.8 billion

    with torch.device("meta"):
        decoder, _, decoder_kwargs = load("qwen3_14b").build()
        language_model, _, language_kwargs = load("qwen3_14b").build(labels=True)
    assert sum(item.numel() for item in decoder.parameters()) == stack
    assert sum(item.numel() for item in language_model.parameters()) == 14_768_307_200
    assert {item.dtype for item in language_model.parameters()} == {torch.bfloat16}
    assert decoder_kwargs.keys() == {"input_ids"}
    assert language_kwargs.keys() == {"input_ids", "labels"}


def test_qwen3_14b_options_reach_the_model() -> None:
    with torch.device("meta"):
        model, args, kwargs = load("qwen3_14b").build(layers=2, batch=3, seq=5)
    assert len(model.layers) == 2
    assert args == ()
    assert kwargs["input_ids"].shape == (3, 5)
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "sdpa"
    assert model.config.rope_parameters["rope_theta"] == 1e6
    assert model.config.rms_norm_eps == 1e-6
