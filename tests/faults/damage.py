"""Kinds of damage to a file that `mutations.py` draws from, to bytes and to the values of JSON."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from random import Random
from types import EllipsisType
from typing import Any

DEEP = 100_000  # brackets
HUGE = (2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Raw(str):
    """Characters that stand in JSON unchanged."""


LEAVES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 1.5, -0.0, 2**31, 2**53 + 1, 2**63, 10**18, 10**400, -(10**400)),
    *(Raw("1e400"), Raw("NaN"), Raw("-Infinity"), Raw("1" * 5000), Raw("[" * DEEP + "]" * DEEP), Raw("[" * DEEP)),
    *("", "x", "0", "x" * 5000, "\0", Raw('"\\ud800"'), "é\u2028", "../../etc/passwd", "a\nb", "\x1b[31m"),
    *([], {}, [[]], [None], ["x"] * 1000, {"x": {}}, {"": 0}),
]


def damage(content: bytes, name: str, draw: Random) -> tuple[bytes | EllipsisType | None, str]:
    """The content after one kind of damage, and its name; None: no file is there, `...`: a folder is."""
    kinds = [*BYTES] * 2
    if name.endswith((".json", ".jsonl")) or content[:1] == b"{":
        kinds += [*JSON] * 4
    if name.endswith(".safetensors"):
        kinds += ["header"] * 10
    if zipfile.is_zipfile(io.BytesIO(content)):
        kinds += ["zipped again"] * 10
    kind = draw.choice([*kinds, "empty", "folder", "missing"])
    if kind in BYTES:
        return bytes(BYTES[kind](bytearray(content), draw)), kind
    if kind in JSON:
        return _json_lines(content, JSON[kind], draw), kind
    if kind == "header":
        size = struct.unpack("<Q", content[:8])[0]
        header = _json_lines(content[8 : 8 + size], JSON[draw.choice([*JSON])], draw)
        return struct.pack("<Q", len(header)) + header + content[8 + size :], kind
    if kind == "zipped again":
        return _zipped_again(content, draw), kind
    return {"empty": b"", "folder": ..., "missing": None}[kind], kind


# --- Bytes ------------------------------------------------------------------------------------------------------------


def _place(content: bytearray, draw: Random) -> int:
    """Anywhere, and as often in the first hundred bytes, where headers are, or in the last."""
    size = len(content)
    return draw.choice([draw.randrange(size + 1), min(draw.randrange(100), size), max(size - draw.randrange(100), 0)])


def _range(content: bytearray, draw: Random) -> slice:
    begin = _place(content, draw)
    return slice(begin, begin + draw.choice([1, 2, 8, 100, max(len(content) // 3, 1)]))


def _flip(content: bytearray, draw: Random) -> bytearray:
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        if content:
            content[min(_place(content, draw), len(content) - 1)] ^= 1 << draw.randrange(8)
    return content


def _number(content: bytearray, draw: Random) -> bytearray:
    form = draw.choice(["<I", ">I", "<Q", ">Q"])
    value = draw.choice([*HUGE, 0, 1]) % 2 ** (8 * struct.calcsize(form))
    place = min(_place(content, draw), max(len(content) - struct.calcsize(form), 0))
    content[place : place + struct.calcsize(form)] = struct.pack(form, value)
    return content


def _splice(make: Callable[[bytes, Random], bytes], insert: bool) -> Callable[[bytearray, Random], bytearray]:
    """Replace a range by the result of a function of it, or insert that before it."""

    def change(content: bytearray, draw: Random) -> bytearray:
        where = _range(content, draw)
        new = make(bytes(content[where]), draw)
        content[where.start : where.start if insert else where.stop] = new
        return content

    return change


_replace, _insert = partial(_splice, insert=False), partial(_splice, insert=True)


BYTES: dict[str, Callable[[bytearray, Random], bytearray]] = {
    "flip bits": _flip,
    "cut": lambda content, draw: content[: _place(content, draw)],
    "cut at the front": lambda content, draw: content[_place(content, draw) :],
    "delete a range": _replace(lambda old, draw: b""),
    "repeat a range": _insert(lambda old, draw: old * draw.choice([1, 1, 3])),
    "insert bytes": _insert(lambda old, draw: draw.randbytes(draw.choice([1, 2, 8, 100]))),
    "NULs": _replace(lambda old, draw: bytes(len(old))),
    "ones": _replace(lambda old, draw: b"\xff" * len(old)),
    "not UTF-8": _insert(lambda old, draw: draw.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"])),
    "brackets": _insert(lambda old, draw: draw.choice([b"[", b"{", b"(", b'{"a":']) * DEEP),
    "line ends": _insert(lambda old, draw: draw.choice([b"\n", b"\r\n", b"\r", b"\n\n", b"\t"])),
    "huge number": _number,
    "digits": _insert(lambda old, draw: b"9" * draw.choice([3, 20, 400, 5000])),
    "repeat the file": lambda content, draw: content * 2,
}


# --- JSON -------------------------------------------------------------------------------------------------------------


def _json_lines(content: bytes, change: Callable[[Any, Random], Any], draw: Random) -> bytes:
    """Change the value of a JSON file, or of one of its lines where each is a value."""

    def changed(text: bytes) -> bytes:
        return _written(change(json.loads(text), draw)).encode(errors="surrogatepass")

    try:
        return changed(content)
    except ValueError:
        lines = content.split(b"\n")
        number = draw.randrange(len(lines))
        try:
            lines[number] = changed(lines[number])
        except ValueError:  # not a line of JSON
            lines[number] = lines[number][::-1]
        return b"\n".join(lines)


def _written(value: Any) -> str:
    """JSON of a value in which `Raw` stands for itself."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_written(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    return json.dumps(value)


def _containers(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every part of a value."""
    found = []
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        found += [(value, key), *_containers(part)]
    return found


def _leaf(value: Any, draw: Random) -> Any:
    places = _containers(value)
    if not places or draw.random() < 0.1:
        return draw.choice(LEAVES)
    container, key = draw.choice(places)
    container[key] = draw.choice(LEAVES)
    return value


def _swap(value: Any, draw: Random) -> Any:
    if places := _containers(value):
        (a, i), (b, j) = draw.choice(places), draw.choice(places)
        inside = [id(part) for container, key in ((a, i), (b, j)) for part, _ in _containers(container[key])]
        if id(a) not in inside and id(b) not in inside:
            a[i], b[j] = b[j], a[i]
    return value


def _key(value: Any, draw: Random) -> Any:
    objects = [part for part in [value, *(c[k] for c, k in _containers(value))] if isinstance(part, dict) and part]
    if objects:
        chosen = draw.choice(objects)
        key = draw.choice(list(chosen))
        part = chosen.pop(key)
        if draw.random() < 0.5:
            chosen[draw.choice([f"{key}x", key.upper(), "", "\0", "é", "x" * 5000])] = part
    return value


def _grow(value: Any, draw: Random) -> Any:
    lists = [part for part in [value, *(c[k] for c, k in _containers(value))] if isinstance(part, list) and part]
    if lists:
        chosen = draw.choice(lists)
        draw.choice([lambda: chosen.append(chosen[0]), chosen.pop, chosen.reverse])()
    return value


def _scale(value: Any, draw: Random) -> Any:
    """Replace one number by another."""
    places = [(c, k) for c, k in _containers(value) if type(c[k]) in (int, float)]
    if places:
        container, key = draw.choice(places)
        container[key] = draw.choice([container[key] + 1, -container[key], container[key] * 10**7, 2**62, 1e300])
    return value


JSON: dict[str, Callable[[Any, Random], Any]] = {
    "another value": _leaf,
    "swapped values": _swap,
    "another key": _key,
    "longer or shorter list": _grow,
    "another number": _scale,
}


# --- Archives ---------------------------------------------------------------------------------------------------------


def _zipped_again(content: bytes, draw: Random) -> bytes:
    """An archive whose checksums are right and one of whose members is damaged."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        chosen = draw.choice(old.namelist())
        for member in old.infolist():
            inside = old.read(member)
            if member.filename == chosen and chosen.endswith(".json") and draw.random() < 0.7:
                inside = _json_lines(inside, JSON[draw.choice([*JSON])], draw)
            elif member.filename == chosen:
                inside = bytes(BYTES[draw.choice([*BYTES])](bytearray(inside), draw))
            new.writestr(member.filename, inside, member.compress_type)
    return out.getvalue()
