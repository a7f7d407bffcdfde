"""The training curve of a run as a picture: loss, and tokens per step where it was measured."""

import io
from pathlib import Path

from specdraft.models.cards.log import records


def curve(log: Path) -> bytes | None:
    """Return a PNG made from log.jsonl; None without matplotlib, or where nothing was trained."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    losses = _points(log, "train", "loss")
    measured = _points(log, "eval", "tokens_per_step")
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


def _points(log: Path, kind: str, name: str) -> list[tuple[int, float]]:
    return [(r["step"], r[name]) for r in records(log, kind) if name in r]
