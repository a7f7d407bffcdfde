"""JSON that holds its own checksum, so that what a cache says of itself is not read damaged."""

import hashlib
import json
from pathlib import Path
from typing import Any

from specdraft.data.atomic import write_atomic

SEAL = "sha256"  # of everything else; earlier versions have none


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Write an object in one move."""
    write_atomic(path, json.dumps(content | {SEAL: _seal(content)}).encode())


def read_sealed(path: Path) -> dict[str, Any]:
    """Read an object. Raises ValueError where it is none, or not what was written."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _seal(content):
        raise ValueError("its checksum is another")
    return content


def _seal(content: dict[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != SEAL}
    canonical = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
