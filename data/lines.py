"""Files that grow by a line at a time, and may end within one."""

from pathlib import Path


def cut_torn_line(path: Path) -> None:
    """Drop what a process that was killed within a line has left at the end of its file."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
