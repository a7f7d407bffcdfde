"""Where rows come from: JSON and JSONL files, Arrow and Parquet, saved datasets, the Hub.

path/to/chats.jsonl, chats.json     one object per line, or one JSON array
path/to/rows.arrow, rows.parquet    read through `datasets`
path/to/folder                      a dataset written by `Dataset.save_to_disk`, or the files of the
                                    kinds above that lie in it, by their names
path/to/*.jsonl, **/*.json          the files that match, by their names
owner/name, owner/name:split        a dataset of the Hub (split: train unless given)
hf://datasets/owner/name/file.json  one file of a Hub dataset
tiny                                the conversations that come with the package
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdraft.data import fingerprint
from specdraft.recipes.errors import DataError, in_a_line
from specdraft.recipes.interrupt import abandonable

BUNDLED = "tiny"
_HUB_FILE = re.compile(r"hf://datasets/([^/]+/[^/@]+)(?:@([^/]+))?/(.+)")
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?::([\w.\[\]%:+-]+))?")
_ROWS = (".json", ".jsonl", ".arrow", ".parquet")  # endings of files with rows
_SAVED = ("state.json", "dataset_dict.json")  # of `Dataset.save_to_disk`
_FILE_ENDINGS = (*_ROWS, ".txt", ".csv", ".gz", ".zip")


def each_source(names: Sequence[str]) -> list[str]:
    """Return sources in which patterns and folders of files have become the files.

    Raises DataError for one that has none.
    """
    return [file for name in names for file in _each(name)]


def is_here(name: str) -> bool:
    """Whether a source can be read without a download."""
    return name == BUNDLED or _is_pattern(name) or Path(os.path.expanduser(name)).exists()


def _each(name: str) -> list[str]:
    path = Path(os.path.expanduser(name))
    if _is_pattern(name):
        found = glob.glob(str(path), recursive=True)
    elif path.is_dir() and not any((path / file).is_file() for file in _SAVED):
        found = [str(file) for file in path.iterdir() if not file.name.startswith(".")]
    else:
        return [name]
    files = sorted(file for file in found if file.endswith(_ROWS) and Path(file).is_file())
    if not files:
        raise DataError(
            f"data.sources: no file of {', '.join(_ROWS)} at {name}; give files, a folder of "
            "files, or a pattern such as chats/*.jsonl"
        )
    return files


def _is_pattern(name: str) -> bool:
    there = name == BUNDLED or _HUB_NAME.fullmatch(name) or _HUB_FILE.fullmatch(name)
    return bool(re.search(r"[*?\[]", name)) and not there and not Path(name).exists()


def bundled_file(name: str) -> Path:
    """Return the path of a file of data/tiny, which comes with the package."""
    return Path(__file__).with_name("tiny") / name


@dataclass(frozen=True)
class Row:
    """One row of a source. `problem` says why it could not be read; `value` is then None."""

    source: str
    line: int  # from 1: line of a JSONL file, item of an array, row of a dataset
    value: Any = None
    problem: str | None = None

    def called(self, keys: Sequence[str]) -> str:
        """Return the id of an object: what it has under the first of these keys, else its line."""
        names = (self.value.get(key) for key in keys)  # None: a column that other rows have
        return str(next((name for name in names if name is not None), self.line))


class Source:
    """An opened source: its rows, and a hash of its contents.

    With `streaming`, rows of the Hub are fetched as they are read, not before.
    Raises DataError when it does not exist or cannot be opened.
    """

    def __init__(self, name: str, streaming: bool = False):
        self.name, self._streaming = name, streaming
        self._dataset = None
        self._path = _find(name)
        if self._path is None or self._path.is_dir() or self._path.suffix in (".arrow", ".parquet"):
            self._dataset = _open_dataset(name, self._path, streaming)

    def content_hash(self) -> str:
        """Return a hash that changes with the contents, not with the place."""
        if self._dataset is None:
            return fingerprint.of_file(self._path)
        if self._path is None:
            version = _hub_commit(self.name) if self._streaming else self._dataset._fingerprint
            return hashlib.sha256(version.encode()).hexdigest()
        paths = sorted(self._path.rglob("*.arrow")) if self._path.is_dir() else [self._path]
        digests = "".join(fingerprint.of_file(path) for path in paths)
        return hashlib.sha256(digests.encode()).hexdigest()

    def rows(self) -> Iterator[Row]:
        """Yield every row in order; a line that does not parse becomes a Row with a problem."""
        if self._dataset is None and not _is_array(self._path):
            yield from self._lines()
            return
        values = self._array() if self._dataset is None else self._read()
        for line, value in enumerate(values, 1):
            yield Row(self.name, line, value)

    def _read(self) -> Iterator[Any]:
        try:
            yield from self._dataset
        except Exception as error:  # of a stream, where it is damaged, or the Hub's
            raise DataError(
                f"data.sources: cannot read {self.name} ({in_a_line(error)}); take a whole copy"
            ) from error

    def _array(self) -> list:
        try:
            return json.loads(self._path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{self.name} starts as a JSON array and does not parse: {error}"
            ) from error

    def _lines(self) -> Iterator[Row]:
        # Lines are split as bytes: str.splitlines also cuts at U+2028, which JSON strings may hold.
        with self._path.open("rb") as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    yield Row(self.name, line, json.loads(text))
                except (ValueError, RecursionError) as error:  # thousands of brackets nest too deep
                    yield Row(self.name, line, problem=f"does not parse as JSON ({error})")


def _find(name: str) -> Path | None:
    """Return the local path of a source, or None for a name of the Hub."""
    if name == BUNDLED:
        return bundled_file("conversations.jsonl")
    if match := _HUB_FILE.fullmatch(name):
        return _download(name, *match.groups())
    path = Path(os.path.expanduser(name))
    if path.exists():
        return path
    if _HUB_NAME.fullmatch(name) and not name.endswith(_FILE_ENDINGS):
        return None
    raise DataError(
        f"data.sources: no file at {name}; "
        f"give an existing file, a Hub dataset (owner/name) or {BUNDLED}"
    )


def _download(name: str, repo: str, revision: str | None, filename: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        options = {"repo_type": "dataset", "revision": revision}
        return Path(abandonable(hf_hub_download, repo, filename, **options))
    except Exception as error:
        raise DataError(f"data.sources: cannot fetch {name} ({in_a_line(error)})") from error


def _hub_commit(name: str) -> str:
    """Return name and commit of a Hub dataset: what a stream of it will yield."""
    from huggingface_hub import HfApi

    try:
        return f"{name}@{HfApi().dataset_info(_HUB_NAME.fullmatch(name)[1]).sha}"
    except Exception as error:
        raise DataError(f"data.sources: cannot ask for {name} ({in_a_line(error)})") from error


def _open_dataset(name: str, path: Path | None, streaming: bool) -> Any:
    import datasets

    try:
        if path is None:
            repo, split = _HUB_NAME.fullmatch(name).groups()
            options = {"split": split or "train", "streaming": streaming}
            return abandonable(datasets.load_dataset, repo, **options)
        if path.suffix == ".arrow":
            return datasets.Dataset.from_file(str(path))
        if path.suffix == ".parquet":
            # Streamed: a copy in the user's home is known by place and time, not by contents.
            return datasets.Dataset.from_parquet(str(path), streaming=True)
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(
            f"data.sources: cannot open {name} ({in_a_line(error)}); give a file, a folder of "
            "Dataset.save_to_disk, or a Hub dataset (owner/name or owner/name:split)"
        ) from error
    if not isinstance(dataset, datasets.DatasetDict):
        return dataset
    if "train" not in dataset:
        raise DataError(
            f"data.sources: {name} has no split train, but {', '.join(dataset)}; name the folder "
            f"of one, e.g. {path / next(iter(dataset), 'train')}"
        )
    return dataset["train"]


def _is_array(path: Path) -> bool:
    """Whether the first character of a JSON file opens an array."""
    with path.open("rb") as file:
        while block := file.read(4096):
            if text := block.lstrip(b"\xef\xbb\xbf \t\r\n"):
                return text[:1] == b"["
    return False
