"""Reads pickles of plain values, and no others, without unpickling.

1.  A pickle is a program for a stack machine.  Loading it with ``pickle`` can run any code; here
    only the opcodes that build None, booleans, numbers, text, bytes, lists, tuples and dicts are
    known, and everything else is refused by its name.
2.  ``pickletools`` takes the file apart into opcodes and their arguments; it runs nothing.

Reads protocols 0 to 5.  Values that are shared in the file are shared in the result, which can be
larger when walked than the file is: walk it through a schema, and count.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VALUES = _words(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT UNICODE BINUNICODE SHORT_BINUNICODE
    BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8
    """
)
# What is long, or holds others, could take long to hash.
_KEYS = (str, int, float, bool, type(None))
_NOTHING = _words("PROTO FRAME STOP")
_GETS = _words("GET BINGET LONG_BINGET")
_PUTS = _words("PUT BINPUT LONG_BINPUT")
_RUNS_CODE = _words(
    """
    GLOBAL STACK_GLOBAL REDUCE BUILD INST OBJ NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4 PERSID BINPERSID
    """
)


class PickleError(Exception):
    """What is wrong with a pickle, as one phrase."""


def read_pickle(content: bytes) -> Any:
    """The value that ``content`` is a pickle of.  Raises ``PickleError`` for anything but plain
    values (definition 1), and for what is no whole pickle."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            machine.take(opcode.name, argument)
        return machine.result()
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        # What a file that is cut off or made up asks of an empty stack.
        raise PickleError(f"it is damaged ({' '.join(str(error).split())})") from error


class _Machine:
    """The stack of a pickle; ``marks`` are the heights at which a collection's items begin."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def result(self) -> Any:
        (value,) = self.stack
        return value

    def take(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _ACTIONS:
            _ACTIONS[name](self)
        elif name not in _NOTHING:
            why = "which can run code" if name in _RUNS_CODE else "which plain values do not need"
            raise PickleError(f"it has the opcode {name}, {why}")

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def mark(self) -> None:
        self.marks.append(len(self.stack))

    def marked(self) -> list[Any]:
        """The items above the last mark, off the stack."""
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def last(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("an item is missing")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("items are added to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("keys are set in what is no dict")
        target.update(_pairs(items))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key has no value")
    keys = items[::2]
    if not all(isinstance(key, _KEYS) for key in keys):
        raise TypeError("a key is neither text nor a number")
    return dict(zip(keys, items[1::2], strict=True))


_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "MEMOIZE": _Machine.memoize,
    "MARK": _Machine.mark,
    "EMPTY_LIST": lambda machine: machine.stack.append([]),
    "EMPTY_DICT": lambda machine: machine.stack.append({}),
    "EMPTY_TUPLE": lambda machine: machine.stack.append(()),
    "LIST": lambda machine: machine.stack.append(machine.marked()),
    "TUPLE": lambda machine: machine.stack.append(tuple(machine.marked())),
    "TUPLE1": lambda machine: machine.stack.append(tuple(machine.last(1))),
    "TUPLE2": lambda machine: machine.stack.append(tuple(machine.last(2))),
    "TUPLE3": lambda machine: machine.stack.append(tuple(machine.last(3))),
    "DICT": lambda machine: machine.stack.append(_pairs(machine.marked())),
    "APPEND": lambda machine: machine.extend(machine.last(1)),
    "APPENDS": lambda machine: machine.extend(machine.marked()),
    "SETITEM": lambda machine: machine.set_items(machine.last(2)),
    "SETITEMS": lambda machine: machine.set_items(machine.marked()),
}
