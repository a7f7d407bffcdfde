"""The log that training leaves in the folder of its run, log.jsonl: a record per line."""

import json
from collections.abc import Iterator
from pathlib import Path

LOG = "log.jsonl"


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
