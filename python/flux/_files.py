"""Files of results: replaced at once, and read with an error that says what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace(path: Path, text: str) -> None:
    """Replaces the file atomically, so that an interrupted run leaves its last complete state."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe, a device or standard output, which is written to and never replaced."""
    return path.exists() and (not path.is_file() or (path.is_symlink() and path.parts[1:2] == ("dev",)))


def write_json(data: dict[str, Any], path: str | Path) -> None:
    """Writes a file at once, or to the end of a stream."""
    text = json.dumps(data, indent=1) + "\n"
    path = Path(path)
    if is_stream(path):
        with path.open("a") as stream:
            stream.write(text)
        return
    path = path.resolve()  # replace the target of a symbolic link, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text)


def read_json(path: str | Path) -> Any:
    """Reads JSON; ValueError if the file is not JSON or is truncated."""
    text = Path(path).read_bytes().decode(errors="replace").strip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        begun = text[:1] in ("{", "[") and (error.pos >= len(text) or text[-1] not in "}]")
        what = "it is cut off" if begun else "it is empty" if not text else str(error)
        raise ValueError(f"bench: {path} is not a JSON result file: {what}") from error
    except RecursionError as error:
        raise ValueError(f"bench: {path} is not a JSON result file: nested too deeply") from error
