"""The training curve of a run as a picture: loss, and tokens per step where it was measured."""

import io
import json
from pathlib import Path


def curve(log: Path) -> bytes | None:
    """Return a PNG made from log.jsonl; None without matplotlib, or where nothing was trained."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not log.is_file():
        return None
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = _points(records, "train", "loss")
    measured = _points(records, "eval", "tokens_per_step")
    if not losses:
        return None
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*losses, strict=True), color="tab:blue")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("training loss", color="tab:blue")
    if measured:
        other = axes.twinx()
        other.plot(*zip(*measured, strict=True), "o-", color="tab:green")
        other.set_ylabel("tokens per step, validation prompts", color="tab:green")
        other.set_ylim(bottom=1.0)  # plain decoding
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _points(records: list[dict], kind: str, name: str) -> list[tuple[int, float]]:
    return [(r["step"], r[name]) for r in records if r["kind"] == kind and name in r]
