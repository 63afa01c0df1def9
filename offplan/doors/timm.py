"""``timm:NAME``: a training step of a classifier of timm: cross-entropy of random images.

``-p`` takes what ``Options`` lists.  Weights are those of a new model; nothing is downloaded.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from offplan.errors import OffplanError, TargetError, UsageError
from offplan.target import LoadedTarget, Target, arguments, describe

PREFIX = "timm:"


@dataclass(frozen=True)
class Options:
    """What ``-p`` takes: ``size`` is pixels, ``classes`` those of the head."""

    batch: int = 64
    size: int | None = None
    classes: int | None = None
    drop_path: float | None = None
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    checkpoint: bool = False


def load(spec: str, params: Mapping[str, str]) -> LoadedTarget:
    """The target ``spec``, which starts with ``timm:``.

    Raises ``UsageError`` for a parameter that is not in ``Options``, ``TargetError`` where timm has
    no such model or cannot build it as asked.
    """
    name = spec.removeprefix(PREFIX)
    for key in params:
        if key not in Options.__dataclass_fields__:
            listed = ", ".join(field.name for field in fields(Options))
            raise UsageError(f"timm: takes no parameter {key!r}", fix=f"its parameters: {listed}")
    options = Options(**arguments(Options, "timm:", params))
    model = _model(name, options)
    images = torch.randn(options.batch, *_image_shape(model, options), dtype=options.dtype)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    return LoadedTarget(Target(model, (images,), {}, _loss), "")


def _model(name: str, options: Options) -> torch.nn.Module:
    timm = _timm()
    if not timm.is_model(name.partition(".")[0]):
        close = ", ".join(difflib.get_close_matches(name, timm.list_models(), 4, 0.5))
        raise TargetError(
            f"timm {timm.__version__} has no model {name!r}",
            fix=f"did you mean {close}?" if close else "timm.list_models() lists them",
        )
    given = {"num_classes": options.classes, "drop_path_rate": options.drop_path}
    wanted = {key: value for key, value in given.items() if value is not None}
    model = _created(timm, name, wanted, options.size)
    if options.checkpoint:
        try:
            model.set_grad_checkpointing(True)
        except Exception as error:
            raise TargetError(
                f"{name} has no activation checkpointing in timm", fix="leave -p checkpoint out"
            ) from error
    return model.to(options.dtype).train()


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        missing = error.name or "timm"
        raise TargetError(
            f"timm: needs {missing}, which is not installed", fix=f"pip install {missing}"
        ) from error


def _created(timm: Any, name: str, wanted: dict[str, Any], size: int | None) -> Any:
    """The model; told of ``size`` if its layers depend on it, which only its constructor knows."""
    attempts = [wanted] if size is None else [{**wanted, "img_size": size}, wanted]
    for number, options in enumerate(attempts, 1):
        try:
            return timm.create_model(name, pretrained=False, **options)
        except TypeError as error:
            if number < len(attempts) and "img_size" in str(error):
                continue
            raise TargetError(f"timm cannot build {name}: {describe(error)}") from error
        except OffplanError:
            raise
        except Exception as error:
            raise TargetError(f"timm cannot build {name}: {describe(error)}") from error
    raise AssertionError("the last attempt returns or raises")


def _image_shape(model: Any, options: Options) -> tuple[int, int, int]:
    """What the model was made for, unless another size was asked for."""
    found = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    channels, height, width = found.get("input_size") or (3, 224, 224)
    if options.size is not None:
        return (channels, options.size, options.size)
    return (channels, height, width)


def _loss(output: Any) -> torch.Tensor:
    """Cross-entropy; the mean of them for a model with several heads (a distilled one)."""
    heads = output if isinstance(output, tuple | list) else (output,)
    losses = [_cross_entropy(scores) for scores in heads]
    return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def _cross_entropy(scores: torch.Tensor) -> torch.Tensor:
    # Made where the scores are: a loss sees nothing else.
    targets = torch.zeros(scores.shape[:1], dtype=torch.long, device=scores.device)
    return torch.nn.functional.cross_entropy(scores, targets)
