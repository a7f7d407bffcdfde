"""The log that training leaves in the folder of its run, log.jsonl: a record per line."""

import json
from collections.abc import Iterator
from pathlib import Path

LOG = "log.jsonl"


def log_in(*folders: Path) -> Path:
    """The log of the first of some folders that has one, else where the last would have it.

    That of a drafter's training lies in its own folder once another kind is trained in the run's.
    """
    files = [folder / LOG for folder in folders]
    return next((file for file in files if file.is_file()), files[-1])


def records(log: Path, kind: str) -> Iterator[dict]:
    """Yield what a log has recorded of a kind, "train" or "eval", in its order.

    Nothing where there is no log; what a killed run was writing, or what is damaged, is left out.
    """
    if not log.is_file():
        return
    for line in log.read_bytes().splitlines():
        try:
            record = json.loads(line)
            if record["kind"] == kind and isinstance(record["step"], int):
                yield record
        except (ValueError, LookupError, TypeError):
            continue
