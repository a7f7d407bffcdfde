"""The weight files of a model's folder, and single tensors of them."""

from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdraft.recipes.errors import TargetError, in_a_line


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files, else its pickles. Raises TargetError for none."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise TargetError(f"no weights in {folder}: expected *.safetensors")
    return files


def read_tensors(folder: Path, names: set[str], rename: Callable[[str], str]) -> dict[str, Tensor]:
    """Read the tensors called `names` from a folder's weight files, as far as they are there.

    rename: from what a tensor is called in a file. Raises TargetError for a file that cannot be
    read.
    """
    found = {}
    for path in weight_files(folder):
        try:
            found |= _read_file(path, names, rename)
        except (ValueError, OSError, RuntimeError, SafetensorError, UnpicklingError) as error:
            # A pickle may hold tensors; anything else in it is refused.
            raise TargetError(f"cannot read {path}: {in_a_line(error)}") from error
    return found


def _read_file(path: Path, names: set[str], rename: Callable[[str], str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            keys = {rename(key): key for key in file.keys()}  # noqa: SIM118
            return {n: file.get_tensor(keys[n]) for n in names & keys.keys()}
    state = torch.load(path, weights_only=True, mmap=True)
    return {n: t for key, t in state.items() if (n := rename(key)) in names}
