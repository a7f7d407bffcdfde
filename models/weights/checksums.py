"""Checksums of a folder's files, beside them: SHA256SUMS, as `sha256sum -c` reads it."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from specdraft.recipes.errors import HeadError
from specdraft.recipes.fields import shown

SUMS = "SHA256SUMS"


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write the checksums of a folder's files beside them; names: of these, else of all."""
    if names is None:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
        names = [path.relative_to(folder).as_posix() for path in files]
    text = sums({name: folder / name for name in names})
    (folder / SUMS).write_text(text, encoding="utf-8")


def sums(files: Mapping[str, Path | bytes]) -> str:
    """Return the lines of checksums of files, or of what they will hold, by their names."""
    return "".join(f"{_sha256(content)}  {name}\n" for name, content in files.items())


def check_sums(folder: Path) -> None:
    """Raise HeadError for a file that is not what it was when the checksums were written.

    A folder that was saved without them passes.
    """
    if not (folder / SUMS).is_file():
        return
    for line in (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines():
        entry = re.fullmatch(r"([0-9a-f]{64})  (?!.*\.\.)([^/\s].*)", line)
        if not entry or not (folder / entry[2]).is_file():
            what = f"{entry[2]} is missing" if entry else f"it has no checksum in {shown(line)}"
            raise HeadError(f"{SUMS}: {what}; take a copy that is whole")
        if (found := _sha256(folder / entry[2])) != entry[1]:
            raise HeadError(
                f"{entry[2]} is not what was saved: its sha256 is {found[:12]}.., {SUMS} has "
                f"{entry[1][:12]}..; take a copy that is whole, or delete {SUMS} where you changed "
                "it yourself"
            )


def _sha256(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
