"""``hf:WHERE``: a training step of a model of transformers, from its configuration alone.

1.  WHERE is a ``config.json``, a folder with one, a repository that is in the local cache, or a
    type of model (``hf:qwen3`` is the type's default configuration).  Nothing is downloaded.
2.  The *task* follows from the ``architectures`` that the configuration names, else from its type:
    contrastive, speech, ctc, image, seq2seq, masked, causal, audio classification, else the bare
    model (``base``).  It decides the head, the inputs and the labels.
3.  ``-p`` takes what ``Options`` lists, and any attribute of the configuration, by its type.
4.  The step is a training step: dropout is on, the cache off, and no layer is dropped, which would
    be decided anew in every step.

A model of images and text is given text only.  Weights are those of a new model: random, or none
at all where nothing is allocated.
"""

from __future__ import annotations

import difflib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch

from offplan.errors import OffplanError, TargetError, UsageError
from offplan.target import LoadedTarget, Target, arguments, describe, parse_value, user_line

PREFIX = "hf:"
Task = Literal[
    "causal", "masked", "seq2seq", "image", "audio", "speech", "ctc", "contrastive", "base"
]
# The family of classes that each task takes, as transformers calls its mapping and its factory; in
# the order in which a type is looked up.
_FAMILIES: dict[Task, tuple[str, str]] = {
    "contrastive": ("MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION", "AutoModel"),
    "speech": ("MODEL_FOR_SPEECH_SEQ_2_SEQ", "AutoModelForSpeechSeq2Seq"),
    "ctc": ("MODEL_FOR_CTC", "AutoModelForCTC"),
    "image": ("MODEL_FOR_IMAGE_CLASSIFICATION", "AutoModelForImageClassification"),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    "masked": ("MODEL_FOR_MASKED_LM", "AutoModelForMaskedLM"),
    "causal": ("MODEL_FOR_CAUSAL_LM", "AutoModelForCausalLM"),
    "audio": ("MODEL_FOR_AUDIO_CLASSIFICATION", "AutoModelForAudioClassification"),
    "base": ("MODEL", "AutoModel"),
}
_LAYER_COUNTS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_LAYER_DROPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
# Options that are sizes of inputs, which not every model takes.
_SIZES = ("seq", "target_seq", "mask", "size", "seconds")
_SAMPLES_PER_S, _FRAMES_PER_S = 16_000, 100
_DEFAULT_SEQ, _DEFAULT_SIZE = 1024, 224


@dataclass(frozen=True)
class Options:
    """What ``-p`` takes beside the attributes of a configuration.

    ``seq`` and ``target_seq`` are tokens (of the encoder and the decoder, where there are two),
    ``size`` pixels, ``seconds`` of sound.  ``layers`` is given to every stack of the model.
    Without ``labels`` the loss is the sum of the outputs; they are there unless that is asked for,
    or the model's loss cannot be traced (``ctc``).
    """

    batch: int = 4
    seq: int | None = None
    target_seq: int | None = None
    size: int | None = None
    seconds: float = 10.0
    layers: int | None = None
    labels: bool | None = None
    mask: bool = False
    checkpoint: bool = False
    dtype: torch.dtype | None = None
    attention: Literal["sdpa", "eager", "flex_attention"] | None = None
    task: Task | None = None


def load(spec: str, params: Mapping[str, str]) -> LoadedTarget:
    """The target ``spec``, which starts with ``hf:``.

    Raises ``UsageError`` for a parameter that is neither an option nor an attribute of the
    configuration, ``TargetError`` where there is no configuration, or no model can be made of it.
    """
    with _offline():
        source = _Source.find(spec.removeprefix(PREFIX))
        options, changes = _read(params, source.config())
        config = source.config(changes)
        _for_training(config, params)
        task = options.task or _task(config)
        model = _model(config, task, options)
        inputs = _Inputs(model, config, options, _with_labels(task, options))
        kwargs = inputs.of(task)
        inputs.refuse_unused(params)
    return LoadedTarget(Target(model, (), kwargs), source.place)


@contextmanager
def _offline() -> Iterator[None]:
    """Nothing is looked up over the network, whatever a configuration names."""
    with mock.patch.dict(os.environ, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1"):
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise TargetError(
                "hf: needs transformers, which is not installed", fix="pip install transformers"
            ) from error
        with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
            yield


# The configuration (definition 1)


@dataclass(frozen=True)
class _Source:
    """A type of model with what its file sets; ``place`` is the file's ``path:line``."""

    name: str
    model_type: str
    given: Mapping[str, Any]
    place: str = ""

    @staticmethod
    def find(where: str) -> _Source:
        if not where:
            raise TargetError(
                "hf: names no configuration", fix="hf:path/to/config.json, or a type: hf:qwen3"
            )
        path = Path(where)
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return _Source._of_file(path)
        # A bare word may be a type; a name of two parts a repository's.
        in_folder = len(path.parts) > 1 and path.parent.is_dir()
        if path.suffix == ".json" or path.is_absolute() or where.startswith(".") or in_folder:
            raise TargetError(
                f"there is no configuration at {path}",
                fix="name a config.json, or a folder with one",
            )
        return _Source._of_cache(where) if "/" in where else _Source._of_type(where)

    @staticmethod
    def _of_file(path: Path) -> _Source:
        try:
            given = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise TargetError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(given, dict) or not isinstance(given.get("model_type"), str):
            raise TargetError(
                f"{path} has no model_type, so it is no configuration of transformers",
                fix="name the config.json that save_pretrained writes",
            )
        return _Source(str(path), _known_type(given["model_type"], path), given, f"{path}:1")

    @staticmethod
    def _of_cache(where: str) -> _Source:
        from transformers.utils import cached_file

        try:
            found = cached_file(where, "config.json", local_files_only=True)
        except (OSError, ValueError) as error:
            raise TargetError(
                f"{where} is no file or folder here, nor in the local cache of Hugging Face",
                fix="nothing is downloaded: get its config.json and name that, or name a type of "
                "model (hf:qwen3)",
            ) from error
        return _Source._of_file(Path(found))

    @staticmethod
    def _of_type(name: str) -> _Source:
        return _Source(name, _known_type(name), {})

    def config(self, changes: Mapping[str, Any] | None = None) -> Any:
        """The configuration, with ``changes`` to what the file sets."""
        from transformers import AutoConfig

        given = _merged(self.given, changes or {})
        given.pop("model_type", None)
        try:
            return AutoConfig.for_model(self.model_type, **given)
        except Exception as error:
            what = " ".join(str(error).split())
            raise TargetError(f"the configuration {self.name} is refused: {what}") from error


def _known_type(name: str, path: Path | None = None) -> str:
    from transformers import CONFIG_MAPPING

    types = list(CONFIG_MAPPING.keys())
    for spelled in (name, name.replace("-", "_"), name.replace("_", "-")):
        if spelled in types:
            return str(spelled)
    close = ", ".join(difflib.get_close_matches(name, types, 4, 0.5))
    where = f"{path} is of type {name!r}, which" if path else f"{name!r} is no file, and"
    raise TargetError(
        f"{where} is no type of model that the installed transformers knows",
        fix=(f"did you mean {close}? " if close else "")
        + "a model with code of its own needs a target file that builds it",
    )


def _merged(given: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(given)
    for name, value in changes.items():
        inner = merged.get(name)
        both = isinstance(value, Mapping) and (inner is None or isinstance(inner, Mapping))
        merged[name] = _merged(inner or {}, value) if both else value
    return merged


# Parameters (definition 3)


def _read(params: Mapping[str, str], config: Any) -> tuple[Options, dict[str, Any]]:
    """The options, and the changes to the configuration that they and other parameters make."""
    names = {field.name for field in fields(Options)}
    # What a configuration calls the same is its own: an image size, the type of a weight.
    options = Options(**arguments(Options, "hf:", {k: v for k, v in params.items() if k in names}))
    changes: dict[str, Any] = {}
    if options.layers is not None:
        changes = _layer_changes(config, options.layers)
    for key, text in params.items():
        if key not in names:
            changes = _merged(changes, _attribute_change(config, key, text))
    return options, changes


def _layer_changes(config: Any, layers: int) -> dict[str, Any]:
    """Every stack of the model with ``layers`` layers, and lists by layer as long as that."""
    if layers < 1:
        raise UsageError(f"-p layers={layers}: a model has one layer at least")
    if getattr(config, "depths", None):
        raise UsageError(
            f"-p layers={layers}: this model has stages, with {list(config.depths)} layers",
            fix=f"-p depths={json.dumps([1] * len(config.depths), separators=(',', ':'))}",
        )
    changes: dict[str, Any] = {}
    own = {config.attribute_map.get(name, name) for name in _LAYER_COUNTS}
    for name in sorted(name for name in own if isinstance(getattr(config, name, None), int)):
        changes |= _shortened(config, getattr(config, name), layers)
        changes[name] = layers
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "attribute_map"):
            found = _layer_changes(inner, layers)
            changes |= {name: found} if found else {}
    return changes


def _shortened(config: Any, before: int, layers: int) -> dict[str, Any]:
    lists = {k: v for k, v in vars(config).items() if isinstance(v, list) and len(v) == before > 1}
    return {
        name: [value[i % before] for i in range(layers)]
        for name, value in lists.items()
        if not name.startswith("_")
    }


def _attribute_change(config: Any, key: str, text: str) -> dict[str, Any]:
    """``{key: value}`` in the type that the configuration has it in, below the part that has it."""
    if not key.startswith("_") and hasattr(config, key) and not callable(getattr(config, key)):
        name = config.attribute_map.get(key, key)
        return {name: _as_type_of(key, getattr(config, key), text)}
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if inner is not None and not key.startswith("_") and hasattr(inner, key):
            return {part: {key: _as_type_of(key, getattr(inner, key), text)}}
    listed = ", ".join(field.name for field in fields(Options))
    close = difflib.get_close_matches(key, [*vars(config), *Options.__dataclass_fields__], 3, 0.6)
    raise UsageError(
        f"-p {key}: no parameter of hf:, nor an attribute of a {type(config).__name__}",
        fix=(f"did you mean {', '.join(close)}? " if close else "")
        + f"its parameters: {listed}; and any attribute of the configuration",
    )


def _as_type_of(key: str, value: Any, text: str) -> Any:
    if isinstance(value, list | tuple | dict):
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict if isinstance(value, dict) else list):
            raise UsageError(f"-p {key}={text}: not JSON such as {json.dumps(value)}")
        return parsed
    if isinstance(value, bool | str):
        return parse_value(key, text, type(value))
    # A whole number may stand for a fraction (a dropout of 0), and nothing at all for either.
    kind = int | float if isinstance(value, int | float) else int | float | bool | str | None
    return parse_value(key, text, kind)


def _for_training(config: Any, params: Mapping[str, str]) -> None:
    """Definition 4, for the configuration and its parts."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is None:
            continue
        if hasattr(part, "use_cache"):
            part.use_cache = False
        for name in _LAYER_DROPS:
            if getattr(part, name, 0) and name not in params:
                setattr(part, name, 0.0)
        if getattr(part, "is_encoder_decoder", False) and not hasattr(
            part, "decoder_start_token_id"
        ):
            # A checkpoint's file says which; any token is as large.
            part.decoder_start_token_id = getattr(part, "pad_token_id", None) or 0
        if getattr(part, "apply_spec_augment", False) and "apply_spec_augment" not in params:
            # It draws its masks with numpy, on the host.
            part.apply_spec_augment = False


# The model (definition 2)


def _task(config: Any) -> Task:
    from transformers.models.auto import modeling_auto

    named = set(getattr(config, "architectures", None) or ())
    by_type: Task | None = None
    for task, (mapping, _) in _FAMILIES.items():
        classes = getattr(modeling_auto, f"{mapping}_MAPPING_NAMES", {}).get(config.model_type, ())
        classes = {classes} if isinstance(classes, str) else set(classes)
        if named & classes:
            return task
        if classes and by_type is None:
            by_type = task
    return by_type or "base"


def _model(config: Any, task: Task, options: Options) -> Any:
    import transformers

    family = _FAMILIES[task][1]
    how: dict[str, Any] = {}
    if options.attention is not None:
        how["attn_implementation"] = options.attention
    how["dtype"] = options.dtype or getattr(config, "dtype", None) or torch.float32
    try:
        model = getattr(transformers, family).from_config(config, **how)
        if options.checkpoint:
            model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
    except Exception as error:
        raise _refused(config, task, error) from error
    if task == "causal" and getattr(model, "loss_type", "") is None:
        # Not found by the name of some classes (GPT-2); it would say so, and take this one.
        model.loss_type = "ForCausalLM"
    model.train()
    return model


def _refused(config: Any, task: Task, error: Exception) -> OffplanError:
    if isinstance(error, OffplanError):
        return error
    if "Unrecognized configuration class" in str(error):
        return TargetError(
            f"transformers has no {task} model of type {config.model_type!r}",
            fix="leave -p task out, or -p task=base for the bare model",
        )
    return TargetError(
        f"the model cannot be built: {describe(error)}",
        where=user_line(error),
        fix="try it without changes to the configuration, whose parts have to fit together",
    )


# Inputs


def _with_labels(task: Task, options: Options) -> bool:
    if task != "ctc":
        return options.labels is not False
    if options.labels:
        raise TargetError(
            "the CTC loss of torch takes lengths that are not known without running it, so it "
            "cannot be traced",
            fix="leave -p labels out: the same model, with the sum of its scores as the loss",
        )
    return False


class _Inputs:
    """What one step of a model is given; shapes from the options, else from the configuration."""

    def __init__(self, model: Any, config: Any, options: Options, with_labels: bool) -> None:
        self.model = model
        self.config = config
        self.options = options
        self.with_labels = with_labels
        self.used: set[str] = set()
        self.text = config.get_text_config()

    def of(self, task: Task) -> dict[str, Any]:
        """The keyword arguments of the model's forward."""
        if task == "contrastive":
            return {**self._tokens(), **self._images(), "return_loss": self.with_labels}
        if task in ("causal", "masked"):
            tokens = self._tokens()
            return {**tokens, **({"labels": tokens["input_ids"]} if self.with_labels else {})}
        if task in ("seq2seq", "speech"):
            given = self._tokens() if task == "seq2seq" else self._main()
            return {**given, **self._decoder()}
        if task in ("image", "audio") and self.with_labels:
            count = int(getattr(self.config, "num_labels", 2))
            return {**self._main(), "labels": torch.randint(count, (self.options.batch,))}
        return self._base()

    def refuse_unused(self, params: Mapping[str, str]) -> None:
        """Raise ``UsageError`` for a size of what this model does not take."""
        for name in _SIZES:
            if name in params and name not in self.used:
                raise UsageError(
                    f"-p {name}: {type(self.model).__name__} takes nothing that it is the size of",
                    fix="leave it out",
                )

    def _base(self) -> dict[str, Any]:
        given = self._main()
        # A detector has a decoder, too, and reads no tokens.
        if "decoder_input_ids" in inspect.signature(self.model.forward).parameters:
            given |= {"decoder_input_ids": self._token_ids(self._target_seq())}
        return given

    def _decoder(self) -> dict[str, Any]:
        targets = self._token_ids(self._target_seq())
        # Without a loss the decoder still needs what it is to read.
        return {"labels": targets} if self.with_labels else {"decoder_input_ids": targets}

    def _main(self) -> dict[str, Any]:
        name = str(getattr(self.model, "main_input_name", "input_ids"))
        if name == "pixel_values":
            return self._images()
        if name in ("input_features", "input_values"):
            return {name: self._real(*self._sound_shape(name))}
        if name == "input_ids":
            return self._tokens()
        raise TargetError(
            f"it is not known what {type(self.model).__name__} takes as {name!r}",
            fix="write a target file that builds the model and its inputs",
        )

    def _tokens(self) -> dict[str, Any]:
        self.used |= {"seq", "mask"}
        ids = self._token_ids(self.options.seq or self._default_seq())
        mask = {"attention_mask": ids.new_ones(ids.shape)} if self.options.mask else {}
        return {"input_ids": ids, **mask}

    def _token_ids(self, seq: int) -> torch.Tensor:
        count = getattr(self.text, "vocab_size", None)
        if not isinstance(count, int):
            raise TargetError(
                f"a {type(self.config).__name__} says nothing of a vocabulary",
                fix="write a target file that builds the model and its inputs",
            )
        return torch.randint(count, (self.options.batch, seq))

    def _default_seq(self) -> int:
        """1024 tokens, or as large a power of two as there are positions for."""
        limits = [_DEFAULT_SEQ]
        for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
            limit = getattr(self.text, name, None)
            limits += [limit] if isinstance(limit, int) and limit > 0 else []
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
                # Counted from the padding's, where there is one (RoBERTa).
                first = 0 if module.padding_idx is None else module.padding_idx + 1
                limits.append(module.num_embeddings - first)
        return 1 << (max(min(limits), 1).bit_length() - 1)

    def _target_seq(self) -> int:
        self.used.add("target_seq")
        if self.options.target_seq is not None:
            return self.options.target_seq
        limit = getattr(self.config, "max_target_positions", None)
        sound = str(getattr(self.model, "main_input_name", "")) != "input_ids"
        default = 128 if sound else self.options.seq or self._default_seq()
        return min(default, limit) if isinstance(limit, int) else default

    def _images(self) -> dict[str, Any]:
        self.used.add("size")
        part = getattr(self.config, "vision_config", None) or self.config
        size: Any = self.options.size or getattr(part, "image_size", None) or _DEFAULT_SIZE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(part, "num_channels", 3)
        return {"pixel_values": self._real(int(channels), int(height), int(width))}

    def _sound_shape(self, name: str) -> tuple[int, ...]:
        config, frames = self.config, int(self.options.seconds * _FRAMES_PER_S)
        mels = getattr(config, "num_mel_bins", None)
        whole = getattr(config, "max_source_positions", None)
        if name == "input_features" and mels and whole and not hasattr(config, "conv_kernel_sizes"):
            # Whisper takes thirty seconds, always: two frames to a position.
            return (mels, 2 * whole)
        if mels and getattr(config, "max_length", None):
            return (config.max_length, mels)
        self.used.add("seconds")
        features = (
            getattr(config, "input_feat_per_channel", None)
            or getattr(config, "feature_projection_input_dim", None)
            or mels
        )
        if name == "input_features" and features:
            return (frames, features)
        return (int(self.options.seconds * _SAMPLES_PER_S),)

    def _real(self, *shape: int) -> torch.Tensor:
        """Random numbers in the dtype of the model, as its processor would cast them."""
        return torch.randn(self.options.batch, *shape, dtype=self.model.dtype)
