"""Files that flux writes and reads: replaced at once, and parsed into types, because anybody may have written
them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import secrets
import stat
import types
import typing
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union

# The largest file of results has 0.3 MB in 9 levels.
MOST_BYTES = 16 << 20
_MOST_LEVELS = 64


def replace(path: str | Path, text: str) -> None:
    """Replaces a file atomically, so that an interrupted run leaves its last complete state. A symbolic link
    stays, and what it points to is replaced. An existing file keeps its mode.
    """
    path = Path(os.path.realpath(path))
    mode = stat.S_IMODE(path.stat().st_mode) & 0o777 if path.exists() else None
    # A name that nobody can have prepared; and O_EXCL neither follows a link nor takes an existing file.
    part = path.with_name(f".flux-{secrets.token_hex(8)}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    try:
        with open(file, "w", encoding="utf-8") as stream:
            if mode is not None:
                os.fchmod(file, mode)  # the umask may have taken bits away
            stream.write(text)
            stream.flush()
            os.fsync(file)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or standard output, which is written to and never replaced."""
    return path.exists() and (not path.is_file() or (path.is_symlink() and path.parts[1:2] == ("dev",)))


def write(path: str | Path, text: str) -> None:
    """Replaces a file, whose folder is made, or writes to the end of a stream."""
    path = Path(path)
    if is_stream(path):
        with path.open("a", encoding="utf-8") as stream:
            stream.write(text)
        return
    Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
    replace(path, text)


def json_text(data: dict[str, Any]) -> str:
    """JSON with a line for each field, or for each row of a field that has rows (lists or dicts)."""
    fields = []
    for key, value in data.items():
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not any(isinstance(entry, dict | list) for entry in entries):
            fields.append(f"{json.dumps(key)}: {json.dumps(value)}")
            continue
        named = isinstance(value, dict)
        names = [f"{json.dumps(name)}: " for name in value] if named else [""] * len(value)
        rows = (f"\n  {name}{json.dumps(entry)}" for name, entry in zip(names, entries, strict=True))
        begin, end = "{}" if named else "[]"
        fields.append(f"{json.dumps(key)}: {begin}{','.join(rows)}\n {end}")
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def write_json(data: dict[str, Any], path: str | Path) -> None:
    """As `write`, a line for each row (`json_text`)."""
    write(path, json_text(data))


def read_text(path: str | Path, what: str = "file") -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, is too large, or is no text.
    """
    where = f"{what} {path}"
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"{where}: expected at most {MOST_BYTES} bytes, got more")
        return data.decode()
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        got = f"{data[error.start]:#04x}"
        raise ValueError(f"{where}: byte {error.start}: expected UTF-8, got {got}") from None


def read_json(path: str | Path, kind: Any = Any, what: str = "file") -> Any:
    """The JSON of a file, as `of_json`, and as `parse` makes a type of it.

    Raises:
        ValueError: the file cannot be read, or is something else.
    """
    where = f"{what} {path}"
    return parse(kind, of_json(read_text(path, what), where), where)


def of_json(text: str, where: str) -> Any:
    """JSON of finite numbers, of keys that are not repeated, and of text without control characters.

    Raises:
        ValueError: it is something else.
    """
    text = text.strip()
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        begun = text[:1] in ("{", "[") and (error.pos >= len(text) or text[-1] not in "}]")
        got = "it is cut off" if begun else "it is empty" if not text else str(error)
        raise ValueError(f"{where}: expected JSON, but {got}") from None
    except _Unfit as error:
        raise error.error(where) from None
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"{where}: expected JSON, but {error}") from None
    except RecursionError:
        raise ValueError(f"{where}: expected at most {_MOST_LEVELS} levels, got more") from None
    return plain(found, where)


def plain(value: Any, where: str = "") -> Any:
    """Values of JSON or TOML, as `of_json`: a number is finite, keys differ, text is printable.

    Raises:
        ValueError: they are not so, or too deep.
    """
    try:
        return _plain(value, 0)
    except _Unfit as error:
        raise error.error(where) from None


def printable(text: str) -> str:
    """Text that moves no cursor and sets no colour when it is printed: without control characters, halves of
    surrogate pairs, and marks that turn the direction of writing. Lines stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() or unicodedata.category(c) == "Zs" else "\ufffd" for c in text
    )


class Within(NamedTuple):
    """As Annotated[int, Within(1, 8)] the range of a number, or of how many entries a collection has."""

    least: float
    most: float = math.inf


# Of most fields: what a tensor may have of elements, and a time or a rate in any unit.
Count = Annotated[int, Within(1, 2**53)]
Size = Annotated[int, Within(0, 2**53)]
Positive = Annotated[float, Within(1e-9, 1e15)]
NotNegative = Annotated[float, Within(0.0, 1e15)]


def parse(kind: Any, value: object, where: str = "", place: str = "") -> Any:
    """A JSON value as a type: a dataclass or a TypedDict by the annotations of its fields, list, tuple, dict,
    Literal, a type or None, str, bool, int, float, Any; Annotated with Within, or with a narrower type. A
    dataclass has no other fields than its own, a TypedDict may.

    Args:
        where, place: the file, or what else the value is from, and where in it, for the message.

    Raises:
        ValueError: naming the place in the value, what was expected there and what is there.
    """
    try:
        return _parser(kind)(value)
    except _Unfit as error:
        raise error.error(where, place) from None


class _Unfit(Exception):
    """A value that does not fit; `place` grows on the way out, so that a value that fits costs nothing."""

    def __init__(self, expected: str, value: object, got: str = "") -> None:
        self.expected, self.got, self.place = expected, got or f"{value!r:.120}", ""

    def at(self, key: str | int) -> _Unfit:
        self.place = (f"[{key}]" if isinstance(key, int) else f".{printable(key)[:80]}") + self.place
        return self

    def error(self, where: str, place: str = "") -> ValueError:
        at = ": ".join(filter(None, (where, (place + self.place).removeprefix("."))))
        return ValueError(f"{at}: expected {self.expected}, got {self.got}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Unfit("each key once", next(key for key in keys if keys.count(key) > 1))
    return found


def _plain(value: Any, level: int) -> Any:
    """The value, its texts printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _Unfit("a finite number", value)
    if not isinstance(value, dict | list):
        return value
    if level == _MOST_LEVELS:
        raise _Unfit(f"at most {_MOST_LEVELS} levels", value, "more")
    found: list[tuple[Any, Any]] = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        try:
            found.append((printable(key) if isinstance(key, str) else key, _plain(item, level + 1)))
        except _Unfit as error:
            raise error.at(key) from None
    return _object(found) if isinstance(value, dict) else [item for _, item in found]


_Parser = Callable[[Any], Any]
_SCALARS: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
}


@functools.cache
def _parser(kind: Any) -> _Parser:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in _SCALARS:
        return functools.partial(_scalar, kind, *_SCALARS[kind])
    if origin is Annotated:
        return _limited(_parser(args[0]), args[1]) if isinstance(args[1], Within) else _parser(args[1])
    if origin is Literal:
        return functools.partial(_literal, args)
    if origin in (Union, types.UnionType):
        (inner,) = (_parser(arg) for arg in args if arg is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin in (list, tuple):
        return _sequence(origin, [_parser(arg) for arg in args if arg is not ...], ... in args)
    if origin is dict:
        return functools.partial(_dictionary, *map(_parser, args))
    return _record(kind)


def _scalar(kind: type, types_: tuple[type, ...], name: str, value: Any) -> Any:
    fits = isinstance(value, types_) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is float and not abs(value) < 1e300):
        raise _Unfit(name, value)
    return kind(value)


def _literal(allowed: tuple[Any, ...], value: Any) -> Any:
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise _Unfit(" or ".join(map(repr, allowed)), value)
    return value


def _limited(inner: _Parser, limits: Within) -> _Parser:
    def parse_one(value: Any) -> Any:
        found = inner(value)
        number = isinstance(found, int | float)
        if not limits.least <= (found if number else len(found)) <= limits.most:
            kind = "a number" if number else "a number of entries"
            raise _Unfit(f"{kind} from {limits.least:g} to {limits.most:g}", value if number else len(found))
        return found

    return parse_one


def _sequence(kind: Any, inner: list[_Parser], endless: bool) -> _Parser:
    if kind is list or endless:
        (item,) = inner

        def parse_all(value: Any) -> Any:
            _expect(isinstance(value, list | tuple), "a list", value)
            return kind(_each(enumerate(value), lambda at: item))

        return parse_all

    def parse_fixed(value: Any) -> Any:
        fits = isinstance(value, list | tuple) and len(value) == len(inner)
        _expect(fits, f"a list of {len(inner)}", value)
        return tuple(_each(enumerate(value), inner.__getitem__))

    return parse_fixed


def _dictionary(key: _Parser, item: _Parser, value: Any) -> Any:
    _expect(isinstance(value, dict), "an object", value)
    return dict(zip(map(key, value), _each(value.items(), lambda at: item), strict=True))


def _each(items: Any, parser_of: Callable[[Any], _Parser]) -> list[Any]:
    found = []
    for at, item in items:
        try:
            found.append(parser_of(at)(item))
        except _Unfit as error:
            raise error.at(at) from None
    return found


def _expect(condition: bool, expected: str, value: object) -> None:
    if not condition:
        raise _Unfit(expected, value)


def _record(kind: Any) -> _Parser:
    """Of a dataclass, which is made, or of a TypedDict, which may have more fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if closed := dataclasses.is_dataclass(kind):
        fields = [each for each in dataclasses.fields(kind) if each.init]
        parsers = {each.name: _parser(hints[each.name]) for each in fields}
        needed = {
            each.name
            for each in fields
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        }
    else:
        parsers, needed = {name: _parser(hint) for name, hint in hints.items()}, kind.__required_keys__

    def parse_fields(value: Any) -> Any:
        if closed and isinstance(value, kind):  # by the caller
            return value
        _expect(isinstance(value, dict), "an object", value)
        if lacking := sorted(needed - value.keys()):
            raise _Unfit(f"a field {lacking[0]!r}", value, f"only {sorted(value)!r:.120}")
        if closed and (more := value.keys() - parsers.keys()):
            raise _Unfit(f"no field but {', '.join(parsers)}", sorted(more)[0])
        found = _each(value.items(), lambda name: parsers.get(name, lambda item: item))
        named = dict(zip(value, found, strict=True))
        return kind(**named) if closed else named

    return parse_fields
