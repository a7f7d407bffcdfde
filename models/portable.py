"""Cutting paths to names in all that is pushed: nobody else can use a path, and it tells whose
machine it was."""

import json
import os
import re
from pathlib import Path
from typing import Any

FILES = (".json", ".jsonl", ".txt", ".csv", ".yaml", ".jinja", ".arrow", ".parquet", ".gz", ".zip")


def portable(value: Any) -> Any:
    """Return a value of JSON in which every path, at any depth, is cut to its name."""
    if isinstance(value, dict):
        return {portable(key): portable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [portable(part) for part in value]
    if not isinstance(value, str):
        return value
    prefix, _, path = value.rpartition(":")  # of prompts: NAME:FILE
    if len(prefix) > 1 and not re.search(r"[/\\]", prefix) and _is_path(path):
        return f"{prefix}:{portable(path)}"
    return _name(value) if _is_path(value) else value


def _is_path(text: str) -> bool:
    """Whether a text is a path of this machine, and not the name of a repository or a set."""
    if "\n" in text or len(text) > 4096 or not re.search(r"[/\\]", text):
        return False
    if "://" in text or text.startswith("//"):
        return text.startswith("file:")
    if text.startswith(("/", "~", "./", "../")) or re.match(r"[A-Za-z]:\\", text):
        return True
    return os.path.exists(text) or text.endswith(FILES)


def _name(path: str) -> str:
    """A path's last part; of the Hub's cache, the repository's name."""
    if cached := re.search(r"(?:models|datasets)--([^/]+?)--([^/]+)/snapshots/", path):
        return "/".join(cached.groups())
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "local"


def portable_json(path: Path) -> bytes:
    """Return the JSON of a file, its paths cut to names."""
    return (json.dumps(portable(json.loads(path.read_text())), indent=2) + "\n").encode()
