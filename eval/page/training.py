"""The training curve of a run, from the log that its training wrote."""

from math import inf, isfinite
from pathlib import Path

from specdraft.models.cards.log import LOG, records

POINTS = 40  # of a curve, at most: each the mean of its neighbours


def training_curve(run: Path) -> list[dict]:
    """Return the points of a run's training, in order: step, loss, accuracy by depth, and
    tokens_per_step where the validation prompts were decoded; none where there is no log."""
    logged = [line for line in records(run / LOG, "train") if isfinite(line.get("loss", inf))]
    size = -(-len(logged) // POINTS)
    groups = [logged[n : n + size] for n in range(0, len(logged), size or 1)]
    curve = {group[-1]["step"]: _mean(group) for group in groups}
    for line in records(run / LOG, "eval"):
        if "tokens_per_step" in line:
            curve.setdefault(line["step"], {})["tokens_per_step"] = line["tokens_per_step"]
    return [{"step": step} | curve[step] for step in sorted(curve)]


def _mean(lines: list[dict]) -> dict:
    """The mean loss, and the mean accuracy of each depth."""
    depths = zip(*(line.get("accuracy", []) for line in lines), strict=False)
    return {
        "loss": sum(line["loss"] for line in lines) / len(lines),
        "accuracy": [sum(some) / len(some) for some in depths],
    }
