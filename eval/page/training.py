"""The training curve of a run, from the log that its training wrote."""

import json
from collections.abc import Iterator
from pathlib import Path

LOG = "log.jsonl"  # in the folder of a run
POINTS = 40  # of a curve, at most: each the mean of its neighbours


def training_curve(run: Path) -> list[dict]:
    """Of a run's training, in order: step, loss, accuracy by depth, and tokens_per_step where the
    validation prompts were decoded; nothing where there is no log."""
    lines = [*_lines(run / LOG)]
    logged = [line for line in lines if line["kind"] == "train" and "loss" in line]
    size = -(-len(logged) // POINTS)
    groups = [logged[n : n + size] for n in range(0, len(logged), size or 1)]
    curve = {group[-1]["step"]: _mean(group) for group in groups}
    for line in lines:
        if line["kind"] == "eval" and "tokens_per_step" in line:
            curve.setdefault(line["step"], {})["tokens_per_step"] = line["tokens_per_step"]
    return [{"step": step} | curve[step] for step in sorted(curve)]


def _lines(log: Path) -> Iterator[dict]:
    """The lines of a log, but for one that a run was killed at."""
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _mean(lines: list[dict]) -> dict:
    """The mean loss, and the mean accuracy of each depth."""
    depths = zip(*(line.get("accuracy", []) for line in lines), strict=False)
    return {
        "loss": sum(line["loss"] for line in lines) / len(lines),
        "accuracy": [sum(some) / len(some) for some in depths],
    }
