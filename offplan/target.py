"""Targets: ``model.py``, ``model.py:name`` or ``package.module:name`` to a model and inputs.

A target file has a factory (``build`` unless named) that returns ``(model, args)``,
``(model, args, kwargs)`` or a ``Target``; or a module-level ``model`` with ``inputs``.  ``-p
key=value`` options are parsed by the factory's annotations and defaults.  ``hf:`` and ``timm:``
name models that need no file (``offplan.doors``).

Whether anything real is allocated is the caller's choice: analysis calls ``load_target`` under fake
tensors, a replay without.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch

from offplan.doors import is_trace, no_model
from offplan.errors import OffplanError, TargetError, UsageError

DEFAULT_FACTORY = "build"


@dataclass(frozen=True)
class Target:
    """A training step to analyze: ``loss(model(*args, **kwargs))``.

    Without ``loss``, the model's output is used if it is a scalar, else its ``.loss``, else the sum
    of its floating outputs.  A given ``loss`` takes the model's output and returns a scalar, and is
    traced together with the model.
    """

    model: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None


def is_model(value: Any) -> TypeGuard[torch.nn.Module]:
    return isinstance(value, torch.nn.Module)


@dataclass(frozen=True)
class LoadedTarget:
    """A target with ``source``, the ``path:line`` of its factory (the path as the user gave it)."""

    target: Target
    source: str


def load_target(spec: str, params: Mapping[str, str]) -> LoadedTarget:
    """Import ``spec`` and call its factory with ``params``.

    Raises ``TargetError`` when the target cannot be found or built, naming the user's line, and
    ``UsageError`` for a parameter that the factory does not take.
    """
    door = _door(spec)
    if door is not None:
        return door(spec, params)
    module, factory_name, path = _import(spec)
    if factory_name is None and not hasattr(module, DEFAULT_FACTORY) and hasattr(module, "model"):
        return _from_module(module, path, params)
    name = factory_name or DEFAULT_FACTORY
    factory = getattr(module, name, None)
    if factory is None:
        raise TargetError(f"{path} has no {name!r}", fix=_suggest_factory(module, path))
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        raise TargetError(
            f"{name!r} in {path} is not a function", fix="name a function that returns the model"
        )
    given = arguments(factory, name, params)
    try:
        result = factory(**given)
    except OffplanError as error:
        error.where = error.where or user_line(error)
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(
            f"building the model failed: {describe(error)}", where=user_line(error) or path
        ) from error
    return LoadedTarget(_as_target(result, f"{name}() in {path}"), _source_of(factory, path))


def _door(spec: str) -> Callable[[str, Mapping[str, str]], LoadedTarget] | None:
    """What loads a target that is no file of the user's."""
    prefix, separator, _ = spec.partition(":")
    if separator and prefix == "hf":
        from offplan.doors import transformers

        return transformers.load
    if separator and prefix == "timm":
        from offplan.doors import timm

        return timm.load
    if is_trace(spec):
        raise no_model(spec)
    return None


def _import(spec: str) -> tuple[types.ModuleType, str | None, str]:
    location, _, name = spec.partition(":")
    path = Path(location)
    if path.suffix == ".py":
        return _import_file(path), name or None, location
    if not name:
        raise TargetError(
            f"{spec!r} is not a target",
            fix="give a file (model.py), a factory (model.py:build) or package.module:factory",
        )
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(location)
    except ModuleNotFoundError as error:
        if error.name and (location == error.name or location.startswith(error.name + ".")):
            raise TargetError(f"there is no module {location!r}") from error
        raise _import_failed(location, error) from error
    except Exception as error:
        raise _import_failed(location, error) from error
    finally:
        sys.path.remove("")
    return module, name, getattr(module, "__file__", None) or location


def _import_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise TargetError(
            f"there is no file {path}", fix="check the path; it is taken from the current directory"
        )
    name = f"offplan_target_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    if module_spec is None or module_spec.loader is None:
        raise TargetError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(module_spec)
    # Registered, so that dataclasses, pickling and inspect find the module while it runs; its
    # folder is on the path, as it is for `python model.py`.
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except OffplanError as error:
        error.where = error.where or user_line(error)
        raise
    except (Exception, SystemExit) as error:
        raise _import_failed(str(path), error) from error
    finally:
        sys.path.pop(0)
    return module


def _import_failed(name: str, error: BaseException) -> TargetError:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}" if error.lineno else name
        return TargetError(f"{name} is not valid Python: {error.msg}", where=where)
    fix = "install it" if isinstance(error, ModuleNotFoundError) else ""
    return TargetError(
        f"importing {name} failed: {describe(error)}", where=user_line(error), fix=fix
    )


def _from_module(module: types.ModuleType, path: str, params: Mapping[str, str]) -> LoadedTarget:
    if params:
        raise UsageError(
            f"{path} has no factory, so it takes no -p",
            fix=f"put the model into a function: def {DEFAULT_FACTORY}(batch: int = 4): ...",
        )
    model = module.model
    if isinstance(model, Target):
        return LoadedTarget(model, f"{path}:1")
    if not hasattr(module, "inputs"):
        raise TargetError(f"{path} has a 'model' but no 'inputs'", fix="add: inputs = (x,)")
    inputs, loss = module.inputs, getattr(module, "loss", None)
    if isinstance(inputs, Mapping):
        parts: tuple[Any, ...] = (model, (), dict(inputs))
    else:
        parts = (model, inputs if isinstance(inputs, tuple | list) else (inputs,))
    made = _as_target(parts, path)
    return LoadedTarget(Target(made.model, made.args, made.kwargs, loss), f"{path}:1")


def _suggest_factory(module: types.ModuleType, path: str) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if names:
        return f"name one of its functions: {path}:{names[0]}"
    return f"define {DEFAULT_FACTORY}() returning (model, (inputs,)), or 'model' and 'inputs'"


def _as_target(result: Any, origin: str) -> Target:
    if isinstance(result, Target):
        parts: tuple[Any, ...] = (result.model, result.args, result.kwargs, result.loss)
    elif isinstance(result, tuple) and 2 <= len(result) <= 3:
        parts = result
    else:
        raise TargetError(
            f"{origin} returned {type(result).__name__}",
            fix="return (model, args), (model, args, kwargs) or offplan.Target(...)",
        )
    model, args, *rest = parts
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{origin}: the model is a {type(model).__name__}, not an nn.Module")
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, tuple | list) or not all(isinstance(k, Mapping) for k in rest[:1]):
        raise TargetError(
            f"{origin}: inputs must be a tuple of positional and a dict of keyword arguments"
        )
    return Target(model, tuple(args), *rest)


def _source_of(factory: Any, path: str) -> str:
    code = getattr(inspect.unwrap(factory), "__code__", None)
    return f"{path}:{code.co_firstlineno if code else 1}"


# Parameters


def arguments(factory: Any, name: str, params: Mapping[str, str]) -> dict[str, Any]:
    """``params`` by the annotations and defaults of ``factory``, which messages call ``name``.

    Raises ``UsageError`` for one that it does not take, or needs, or that cannot be read.
    """
    signature = inspect.signature(factory)
    try:
        hints = typing.get_type_hints(factory)
    except Exception:  # an annotation may name what only a type checker imports
        hints = {}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    known = {
        key
        for key, p in signature.parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    arguments: dict[str, Any] = {}
    for key, text in params.items():
        if key not in known and not takes_any:
            listed = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"{name}() takes no parameter {key!r}", fix=f"its parameters: {listed}"
            )
        default = signature.parameters[key].default if key in known else inspect.Parameter.empty
        arguments[key] = parse_value(key, text, hints.get(key, _type_of(default)))
    missing = [
        key
        for key in sorted(known - set(arguments))
        if signature.parameters[key].default is inspect.Parameter.empty
    ]
    if missing:
        raise UsageError(
            f"{name}() needs {', '.join(missing)}", fix=f"add -p {missing[0]}=VALUE to the command"
        )
    return arguments


def _type_of(default: Any) -> Any:
    return str if default is inspect.Parameter.empty or default is None else type(default)


def parse_value(key: str, text: str, kind: Any) -> Any:
    """``text`` as ``kind``: int, float, bool, str, a Literal, an Optional of these, or a dtype."""
    origin = typing.get_origin(kind)
    if origin is typing.Union or origin is types.UnionType:
        options = [arg for arg in typing.get_args(kind) if arg is not type(None)]
        if len(options) < len(typing.get_args(kind)) and text.lower() == "none":
            return None
        return _parse_first(key, text, options)
    if origin is Literal:
        for choice in typing.get_args(kind):
            if str(choice) == text:
                return choice
        raise _bad(key, text, "one of " + ", ".join(map(str, typing.get_args(kind))))
    if kind is bool:
        return _parse_bool(key, text)
    if kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            raise _bad(key, text, "a whole number" if kind is int else "a number") from None
    if kind is torch.dtype:
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise _bad(key, text, "a dtype such as bfloat16")
        return dtype
    if kind in (str, Any, inspect.Parameter.empty):
        return text
    raise UsageError(
        f"-p {key}: a parameter of type {getattr(kind, '__name__', kind)} cannot be given",
        fix="annotate it as int, float, bool, str, Literal or torch.dtype",
    )


def _parse_first(key: str, text: str, options: list[Any]) -> Any:
    if len(options) == 1:
        return parse_value(key, text, options[0])
    # Strings last: everything is one.
    ordered = sorted(options, key=lambda option: option is str)
    for option in ordered:
        try:
            return parse_value(key, text, option)
        except UsageError:
            continue
    raise _bad(key, text, " or ".join(getattr(o, "__name__", str(o)) for o in ordered))


def _parse_bool(key: str, text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise _bad(key, text, "true or false")


def _bad(key: str, text: str, wanted: str) -> UsageError:
    return UsageError(f"-p {key}={text}: {text!r} is not {wanted}")


# Other people's exceptions


def describe(error: BaseException) -> str:
    """``ValueError: the first line of the message``, without torch's appended advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def user_line(error: BaseException) -> str:
    """``file:line`` of the innermost frame outside torch and offplan; empty if there is none."""
    found = ""
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not is_library_file(filename):
            found = f"{filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def is_library_file(filename: str) -> bool:
    """Whether a source file is torch's, offplan's or Python's own, not the user's program."""
    if filename.startswith("<"):
        return True
    if filename.startswith((_TORCH, _OFFPLAN)):
        return True
    return filename.startswith(_STDLIB) and "-packages/" not in filename


_TORCH = str(Path(torch.__file__).parent) + "/"
_OFFPLAN = str(Path(__file__).parent) + "/"
_STDLIB = str(Path(inspect.__file__).parent) + "/"
