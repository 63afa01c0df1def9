"""What commands keep on disk by content, so that the next one need not trace again.

1.  The folder is ``$OFFPLAN_CACHE``, else ``offplan`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.
2.  ``graphs/<hex>.<hex>.graph.z`` has graphs by their digest and by all that they say, compressed:
    graphs of one digest differ in names, source lines, the GPU, and how they are lowered.
    ``traces/<hex>.json`` says of one request (``TraceKey``) which graphs its trace had, and which
    files of the user's it read, with their hashes: it holds while all of them are as they were.
    ``results/<hex>`` has what was computed from a key.
3.  It is a cache: what is damaged or stale counts as not there; what cannot be written is not
    kept; and beyond ``LIMIT_BYTES`` the files that were used least recently go.

Files are replaced whole, so that several processes can share the folder.  ``OFFPLAN_CACHE=off``
keeps nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from offplan.errors import FileFormatError, OutputError
from offplan.files import KEPT_FILE, make_folder, write_atomically
from offplan.graph import GraphFacts, decode_graph, digest, save_graph

logger = logging.getLogger("offplan")

LIMIT_BYTES = 2 * 1024**3
# A file that decompresses to more than this is not one of ours.
_MOST_BYTES = 1024**3
_OFF = "off"


class TraceKey(msgspec.Struct, frozen=True):
    """What a trace depends on, beside the code that it reads: the request, and ``versions``."""

    spec: str
    params: dict[str, str]
    options: dict[str, str]
    versions: dict[str, str]


class _Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``graph`` is the checksum of all that the graphs say."""

    digest: str
    graph: str
    files: dict[str, str]


def folder() -> Path | None:
    """Where things are kept (definition 1); None if nothing is."""
    named = os.environ.get("OFFPLAN_CACHE", "")
    if named:
        return None if named == _OFF else Path(named)
    try:
        above = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        # A container's user can be without a home.
        return None
    return Path(above) / "offplan"


def keep_graph(facts: GraphFacts) -> Path | None:
    """Keep ``facts``; None if that cannot be done."""
    content = save_graph(facts)
    path = _graph_path(digest(facts), _checksum(content))
    if path is None:
        return None
    return path if _write(path, KEPT_FILE.first_bytes + zlib.compress(content, 1)) else None


def kept_graph(name: str, gpu: str | None = None) -> GraphFacts | None:
    """The graphs whose digest is ``name``, traced for ``gpu`` if one is named, that were used last;
    None if none were kept."""
    for path in _newest_first(_graph_path(name, "*")):
        facts = _graph(path, name)
        if facts is not None and gpu in (None, facts.gpu):
            return facts
    return None


def _newest_first(pattern: Path | None) -> list[Path]:
    if pattern is None:
        return []
    found = []
    for path in pattern.parent.glob(pattern.name):
        # Another process may be removing it.
        with suppress(OSError):
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def _graph(path: Path, name: str) -> GraphFacts | None:
    """The graphs in ``path``, which goes if it does not have those of digest ``name``."""
    content = _read(path)
    if content is None:
        return None
    try:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(content.removeprefix(KEPT_FILE.first_bytes), _MOST_BYTES)
        facts = decode_graph(text, str(path))
    except (zlib.error, FileFormatError):
        facts = None
    if facts is None or digest(facts) != name:
        with suppress(OSError):
            path.unlink()
        return None
    return facts


def keep_trace(key: TraceKey, facts: GraphFacts, files: Iterable[Path]) -> None:
    """Keep ``facts`` as what a trace of ``key`` has that read ``files`` of the user's."""
    path = _trace_path(key)
    hashes = {str(file): _hash(file) for file in sorted(set(files))}
    graph = keep_graph(facts)
    if path is None or graph is None:
        return
    known = {name: found for name, found in hashes.items() if found is not None}
    if len(known) == len(hashes):
        trace = _Trace(digest(facts), _checksum(save_graph(facts)), known)
        _write(path, KEPT_FILE.first_bytes + msgspec.json.encode(trace))


def kept_trace(key: TraceKey) -> GraphFacts | None:
    """The graphs of an earlier trace of ``key``, if all that it read is as it was."""
    path = _trace_path(key)
    content = None if path is None else _read(path)
    if content is None:
        return None
    try:
        found = msgspec.json.decode(content.removeprefix(KEPT_FILE.first_bytes), type=_Trace)
    except msgspec.DecodeError:
        return None
    if any(_hash(Path(name)) != known for name, known in found.files.items()):
        return None
    graph = _graph_path(found.digest, found.graph)
    facts = None if graph is None else _graph(graph, found.digest)
    return facts if facts is None or _checksum(save_graph(facts)) == found.graph else None


def keep_result(key: bytes, content: bytes) -> None:
    """Keep ``content`` as what was computed from ``key``, which has all that it depends on."""
    path = _result_path(key)
    if path is not None:
        _write(path, KEPT_FILE.first_bytes + content)


def kept_result(key: bytes) -> bytes | None:
    """What was computed from ``key`` before."""
    path = _result_path(key)
    content = None if path is None else _read(path)
    return None if content is None else content.removeprefix(KEPT_FILE.first_bytes)


def _result_path(key: bytes) -> Path | None:
    above = folder()
    stem = hashlib.sha256(key).hexdigest()[:40]
    return None if above is None else above / "results" / stem


def _graph_path(name: str, checksum: str) -> Path | None:
    """Named by hash alone, so that no digest in a file can point outside the folder."""
    above = folder()
    if above is None or not (checksum == "*" or checksum.isalnum()):
        return None
    stem = hashlib.sha256(name.encode()).hexdigest()[:40]
    return above / "graphs" / f"{stem}.{checksum}.graph.z"


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _trace_path(key: TraceKey) -> Path | None:
    above = folder()
    ordered: Mapping[str, object] = msgspec.to_builtins(key, str_keys=True)
    stem = hashlib.sha256(msgspec.json.encode(ordered, order="sorted")).hexdigest()[:40]
    return None if above is None else above / "traces" / f"{stem}.json"


def _hash(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
        # Used now: what was used least recently goes first.
        os.utime(path)
    except OSError:
        return None
    return content


def _write(path: Path, content: bytes) -> bool:
    try:
        make_folder(path.parent)
        write_atomically(path, content, KEPT_FILE)
        _make_room(path.parent.parent)
    except (OSError, OutputError) as error:
        logger.info("not kept for the next time: %s", error)
        return False
    return True


def _make_room(above: Path) -> None:
    found = []
    for path in above.glob("*/*"):
        # Another process may be removing it.
        with suppress(OSError):
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= LIMIT_BYTES:
            break
        with suppress(OSError):
            path.unlink()
        total -= size
