"""A figure of matplotlib, which is an extra (pip install 'specdraft[plots]'), as a file."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from specdraft.data.atomic import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_png(drawn: Figure, path: Path, dpi: int = 150) -> Path:
    """Write a figure as a PNG, whole or not at all. Raises CacheError on a full disk."""
    content = BytesIO()
    drawn.savefig(content, format="png", dpi=dpi)
    write_atomic(path, content.getvalue())
    return path
