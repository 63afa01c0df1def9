"""Files at the boundaries: read untrusted YAML strictly, and write results whole or not at all.

Reading accepts the part of YAML that offplan writes: mappings with text keys, sequences, text,
integers up to 64 bits, ``true``, ``false`` and ``null``.  Anchors, aliases, tags, several
documents, repeated keys and deep nesting are refused, so that time and memory are linear in the
size of the file.  What YAML 1.1 would guess besides (dates, ``yes``, octal numbers, floats, NaN)
stays text, for the schema to refuse where text is not wanted.

What is read is of a bounded size, and comes from a regular file, or from a pipe that is written to
(``<(git show main:offplan.plan.yaml)``): devices have no end, and some pipes no beginning.

Writing goes to a temporary file beside the target, which then takes its name; whatever interrupts
it, the target is as it was and nothing is left behind.  A file that is not of the kind being
written is not replaced.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import re
import secrets
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml import events

from offplan.errors import FileFormatError, OutputError

# The C parser is ten times faster; PyYAML's wheels have it, a build from source may not.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

# Many times what an 80-layer model's plan takes (2 MB) or nests (7 levels).
_MAX_FILE_BYTES = 32 * 1024**2
_MAX_DEPTH = 32
_PIPE_WAIT_S = 30
_PART_BYTES = 2**20
_COLLECTIONS = (dict, list, tuple)
_TEXT_TAG = "tag:yaml.org,2002:str"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})", re.ASCII)
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


class YamlError(Exception):
    """What is wrong with a YAML text, and at which line, as one phrase."""


@dataclass(frozen=True)
class FileKind:
    """A kind of file that offplan writes, recognized by its first bytes."""

    name: str
    first_bytes: bytes


PLAN_FILE = FileKind("an offplan plan", b"# offplan plan")
GRAPH_FILE = FileKind("an offplan graph file", b'{"target":{"spec":')
KEPT_FILE = FileKind("a file that offplan keeps", b"offplan kept 1\n")


# --- reading --------------------------------------------------------------------------------------


def read_text(path: Path) -> str:
    """The UTF-8 text of ``path``.  Raises ``FileFormatError`` if there is none to be read."""
    try:
        return read_content(path, _MAX_FILE_BYTES, "a plan").decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8 text (byte {error.start})") from error


def read_content(path: Path, most_bytes: int, kind: str) -> bytes:
    """What is in ``path``, which messages call ``kind``.

    Raises ``FileFormatError`` if it cannot be read, or is more than ``most_bytes``.
    """
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            is_pipe = stat.S_ISFIFO(status.st_mode)
            if not is_pipe and not stat.S_ISREG(status.st_mode):
                raise FileFormatError(f"cannot read {path}: it is neither a file nor a pipe")
            if status.st_size > most_bytes:
                raise _too_large(path, kind)
            content = _read(file, path, most_bytes, _PIPE_WAIT_S if is_pipe else 0)
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FileFormatError(f"cannot read {str(path)!r}: {error}") from error
    if len(content) > most_bytes:
        raise _too_large(path, kind)
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting for who would write to a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _read(file: io.FileIO, path: Path, most_bytes: int, wait_s: int) -> bytes:
    """All of ``file``, or more than ``most_bytes`` of it.  A pipe must not pause for ``wait_s``."""
    parts: list[bytes] = []
    size_bytes = 0
    while size_bytes <= most_bytes:
        part = file.read(_PART_BYTES)
        if part is None:
            # Somebody has it open to write to it, and has not yet.
            if not select.select([file], [], [], wait_s)[0]:
                raise FileFormatError(f"cannot read {path}: nothing came from it for {wait_s} s")
            continue
        if not part:
            break
        parts.append(part)
        size_bytes += len(part)
    return b"".join(parts)


def _too_large(path: Path, kind: str) -> FileFormatError:
    return FileFormatError(f"{path} is too large to be {kind}")


def parse_yaml(text: str) -> object:
    """The one document of ``text``, as dicts, lists, text, integers, booleans and None.

    Raises ``YamlError``.
    """
    root: list[object] = []
    # Innermost last: the open collections, and for a mapping the key that waits for its value.
    open_collections: list[object] = [root]
    keys: list[object] = [None]
    try:
        for event in yaml.parse(text, Loader=_Loader):
            _take(event, open_collections, keys)
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    if len(root) != 1:
        raise YamlError("expected one document" if root else "the file is empty")
    return root[0]


def _take(event: events.Event, open_collections: list[object], keys: list[object]) -> None:
    """Add ``event`` to the innermost open collection, or open or close one."""
    if isinstance(event, events.ScalarEvent):
        _refuse_special(event)
        _add(_scalar(event), event, open_collections, keys)
    elif isinstance(event, events.CollectionStartEvent):
        _refuse_special(event)
        if len(open_collections) > _MAX_DEPTH:
            raise YamlError(f"nested deeper than {_MAX_DEPTH} levels{_at(event)}")
        opened: object = {} if isinstance(event, events.MappingStartEvent) else []
        _add(opened, event, open_collections, keys)
        open_collections.append(opened)
        keys.append(None)
    elif isinstance(event, events.CollectionEndEvent):
        open_collections.pop()
        keys.pop()
    elif isinstance(event, events.AliasEvent):
        raise YamlError(f"anchors and aliases are not used in plans{_at(event)}")


def _add(
    item: object, event: events.Event, open_collections: list[object], keys: list[object]
) -> None:
    parent = open_collections[-1]
    if isinstance(parent, list):
        parent.append(item)
        return
    assert isinstance(parent, dict)
    if keys[-1] is None:
        # The text as written, so that a key such as 1 or null is a key too.
        if not isinstance(event, events.ScalarEvent):
            raise YamlError(f"a key must be text{_at(event)}")
        if event.value in parent:
            raise YamlError(f"{event.value!r} is given twice{_at(event)}")
        keys[-1] = event.value
        return
    parent[keys[-1]] = item
    keys[-1] = None


def _scalar(event: events.ScalarEvent) -> object:
    text: str = event.value
    plain = bool(event.implicit[0]) and event.style in (None, "")
    if not plain:
        return text
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _INTEGER.fullmatch(text) else text


def _refuse_special(event: events.NodeEvent) -> None:
    if event.anchor is not None:
        raise YamlError(f"anchors and aliases are not used in plans{_at(event)}")
    if getattr(event, "tag", None) is not None:
        raise YamlError(f"tags are not used in plans{_at(event)}")


def _at(event: events.Event) -> str:
    return f" (line {event.start_mark.line + 1})" if event.start_mark else ""


# --- writing --------------------------------------------------------------------------------------


def dump_yaml(document: object) -> str:
    """``document`` as YAML: collections of scalars on one line, keys in their given order.

    What ``yaml.dump`` writes with ``default_flow_style=None``, in half the time: its search for
    repeated objects, which would become aliases, is left out.
    """
    resolver = _Dumper(io.StringIO())

    # The few texts that repeat, keys above all, are most of the work.
    @functools.cache
    def is_plain(text: str) -> bool:
        return bool(resolver.resolve(yaml.ScalarNode, text, (True, False)) == _TEXT_TAG)

    stream = (
        events.StreamStartEvent(),
        events.DocumentStartEvent(explicit=False),
        *_node_events(document, is_plain),
        events.DocumentEndEvent(explicit=False),
        events.StreamEndEvent(),
    )
    text: str = yaml.emit(stream, Dumper=_Dumper, allow_unicode=True, width=2**20)
    return text


def _node_events(item: object, is_plain: Callable[[str], bool]) -> Iterator[events.Event]:
    if isinstance(item, dict):
        in_line = not any(isinstance(value, _COLLECTIONS) for value in item.values())
        yield events.MappingStartEvent(None, None, True, flow_style=in_line)
        for key, value in item.items():
            yield _scalar_event(key, is_plain)
            yield from _node_events(value, is_plain)
        yield events.MappingEndEvent()
    elif isinstance(item, list | tuple):
        in_line = not any(isinstance(value, _COLLECTIONS) for value in item)
        yield events.SequenceStartEvent(None, None, True, flow_style=in_line)
        for value in item:
            yield from _node_events(value, is_plain)
        yield events.SequenceEndEvent()
    else:
        yield _scalar_event(item, is_plain)


def _scalar_event(item: object, is_plain: Callable[[str], bool]) -> events.ScalarEvent:
    if isinstance(item, str):
        return events.ScalarEvent(None, None, (is_plain(item), True), item)
    text = "null" if item is None else str(item).lower()
    return events.ScalarEvent(None, None, (True, False), text)


def check_writable(path: Path, kind: FileKind) -> None:
    """Raise ``OutputError`` now if ``write_atomically`` would: a trace can take a minute."""
    target = Path(os.path.realpath(path))
    try:
        mode = _mode(target, path)
        if mode is None or not stat.S_ISREG(mode):
            if not target.parent.is_dir():
                raise _cannot_write(path, FileNotFoundError())
            if mode is None and not os.access(target.parent, os.W_OK):
                raise OutputError(f"cannot write {path}: {target.parent} is not writable")
            return
        _refuse_other_kind(target, path, kind)
        if not os.access(target, os.W_OK):
            raise OutputError(f"cannot write {path}: it is not writable")
    except OSError as error:
        raise _cannot_write(path, error) from error


def write_atomically(path: Path, content: bytes, kind: FileKind) -> None:
    """Write ``content`` to ``path``, which must be new, empty or of the same ``kind``.

    A symbolic link is followed; a device or pipe (``/dev/null``) is written to as it is.  Raises
    ``OutputError`` if it cannot be written or would replace something else.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = _mode(target, path)
        if mode is not None and not stat.S_ISREG(mode):
            target.write_bytes(content)
            return
        if mode is not None:
            _refuse_other_kind(target, path, kind)
        _replace(target, content, mode)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _mode(target: Path, path: Path) -> int | None:
    """The mode of what is at ``target``; None if nothing is.  A directory is refused."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise OutputError(f"cannot write {path}: it is a directory", fix="name a file in it")
    return mode


def _refuse_other_kind(target: Path, path: Path, kind: FileKind) -> None:
    with target.open("rb") as file:
        found = file.read(len(kind.first_bytes))
    if found not in (b"", kind.first_bytes):
        raise OutputError(
            f"{path} exists and is not {kind.name}, so it is left as it is",
            fix="name another file, or remove this one first",
        )


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".offplan-{secrets.token_hex(8)}.tmp")
    try:
        # Not mkstemp, which makes files that only their owner can read.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            _settle(file.fileno())
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except BaseException:
        # Ctrl-C included: nothing half written stays.
        with suppress(OSError):
            temporary.unlink()
        raise


def _settle(descriptor: int) -> None:
    """Have it on the disk before it replaces anything: file systems with quotas, or of another
    machine, say only now that there is no room, and after a power cut there is one file or the
    other."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def make_folder(path: Path) -> None:
    """Make a directory, and those above it, where there is none.  Raises ``OutputError``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the directory {path}: {error.strerror}") from error


def _cannot_write(path: Path, error: OSError) -> OutputError:
    if isinstance(error, FileNotFoundError):
        return OutputError(f"cannot write {path}: there is no directory {path.parent}")
    return OutputError(f"cannot write {path}: {error.strerror}")
