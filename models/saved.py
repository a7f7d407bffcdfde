"""Drafters saved as config.json and model.safetensors with checksums, and loaded strictly.

The files may come from anywhere, so they are checked before memory of the size that they name is
taken: the config key by key, the tensors' names, kinds and shapes against those that the config
makes, and both against their checksums (weights/checksums.py).
"""

import json
import shutil
from dataclasses import MISSING, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeVar, get_type_hints

import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from specdraft.models.hub import PAGE, fetch, push
from specdraft.models.portable import portable_json
from specdraft.models.weights.checksums import SUMS, check_sums, sums, write_sums
from specdraft.models.weights.identity import hash_weights
from specdraft.recipes.errors import HeadError, TargetError, UntrainedError, in_a_line
from specdraft.recipes.fields import Interval, coerce_fields, shown

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LARGEST_CONFIG = 2**20  # bytes
Vocabulary = Annotated[int, Interval(1, 10**7)]
Scale = Annotated[float, Interval(1e-9, 1e9)]  # what is divided by
Module = TypeVar("Module", bound=nn.Module)
Head = TypeVar("Head", bound="SavedHead")


class SavedConfig:
    """A dataclass that checks every field against its annotation, as a recipe's sections do."""

    def __post_init__(self) -> None:
        _, mismatches = coerce_fields(self)
        for key, mismatch in mismatches.items():
            raise ValueError(f"{key} = {shown(getattr(self, key))}: {mismatch}")
        identity = getattr(self, "target", None)
        if identity and not all(isinstance(identity.get(k), str) for k in ("name", "weights")):
            raise ValueError(
                f"target = {shown(identity)}: must have a name and weights, or nothing"
            )
        if (drafted := getattr(self, "draft_vocab", None)) and drafted > self.vocab_size:
            raise ValueError(
                f"draft_vocab = {drafted}: must be at most the vocabulary ({self.vocab_size}), or "
                "null for all of it"
            )


class Saved(
    nn.Module, PyTorchModelHubMixin, library_name="specdraft", tags=["speculative-decoding"]
):
    """A module that is made from its config alone: saved with config and checksums, and loaded
    strictly."""

    @classmethod
    def from_pretrained(
        cls: type[Module], source: str | Path, *, revision: str | None = None
    ) -> Module:
        """Load one on the CPU, from a folder or by its Hub id, as `load_saved` does."""
        return load_saved(cls, source, revision, noun="drafter", maker="its entry of train/")

    def save_pretrained(self, folder: str | Path) -> None:
        """Save config, weights and their checksums."""
        folder = Path(folder)
        page, had_page = folder / PAGE, (folder / PAGE).is_file()
        # They go while what they speak of is replaced.
        (folder / SUMS).unlink(missing_ok=True)
        super().save_pretrained(folder)
        share_weights(folder)
        write_sums(folder, (CONFIG, WEIGHTS))
        if not had_page:  # the mixin's knows nothing of the drafter: training writes one that does
            page.unlink()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = True,
        branch: str | None = None,
        commit_message: str = "Upload a drafter",
    ) -> str:
        """Push config and weights alone, names standing in the config for places of this machine;
        return the commit's address. `specdraft push RUN OWNER/NAME` has card, tree and recipe, too.

        Raises HubError when the Hub does not take it.
        """
        with TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            config = portable_json(Path(folder) / CONFIG)
            files: dict[str, Path | bytes] = {CONFIG: config, WEIGHTS: Path(folder) / WEIGHTS}
            files[SUMS] = sums(files).encode()
            return push(files, repo_id, private, branch, commit_message)


class SavedHead(Saved, tags=["draft-head"]):
    """A trained head, which belongs to a target."""

    noun = "trained head"  # in messages
    # Scripts of train/ that make one: the one that its folder is called by, else the first.
    trainers: tuple[str, ...]
    folder: Path | None = None  # that it was loaded from
    enlarges: str | None = None  # hash of the smaller head's weights whose drafts it makes

    def __init__(self, config: SavedConfig):
        super().__init__()
        self.config = config

    @classmethod
    def load_for(
        cls: type[Head], source: str | Path, target_identity: dict, revision: str | None = None
    ) -> Head:
        """Load a trained head, from a folder or by its Hub id, for a target.

        Raises HeadError when there is none or it is damaged, HubError when the Hub does not give
        it, and TargetError when it is another target's.
        """
        name = Path(source).name
        maker = f"accelerate launch train/{name if name in cls.trainers else cls.trainers[0]}.py"
        head = load_saved(cls, source, revision, noun=cls.noun, maker=maker)
        head.check_target(target_identity)
        if (ids := getattr(head, "draft_ids", None)) is not None:
            size = head.config.vocab_size
            if (torch.cat((ids.new_tensor([-1]), ids, ids.new_tensor([size]))).diff() < 1).any():
                raise HeadError(
                    f"{source} holds no whole head: its draft_ids must be ascending ids below "
                    f"{size}; train it again"
                )
        return head

    def hash(self) -> str:
        """Which weights draft: where a head was enlarged, those that were trained."""
        return self.enlarges or hash_weights(self)

    def check_target(self, identity: dict) -> None:
        """Raise TargetError when this head was trained for another target, naming both.

        A head whose config names no target fits every one.
        """
        own = self.config.target
        if own and own["weights"] != identity["weights"]:
            raise TargetError(
                f"this head was trained for {own['name']} (weights {own['weights'][:12]}), "
                f"not for {identity['name']} (weights {identity['weights'][:12]}); "
                "use that target, or train a head for this one"
            )


def load_saved(
    kind: type[Module],  # made from one argument, its config
    source: str | Path,
    revision: str | None = None,
    *,
    noun: str,
    maker: str,
) -> Module:
    """Load a drafter on the CPU, from a folder or by its Hub id, ready to draft.

    noun and maker: what it is, and the command that makes one. Raises HeadError when there is none
    or it is damaged, naming file, key and value, and HubError when the Hub does not give it.
    """
    folder = fetch(source, revision)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise (UntrainedError if name == CONFIG else HeadError)(
                f"no {noun} at {folder} ({name} is missing); make one with: {maker} and the same "
                "recipe"
            )
    try:
        settings = _read_config(folder / CONFIG, get_type_hints(kind.__init__)["config"])
        with torch.device("meta"):
            _check_tensors(folder / WEIGHTS, kind(settings))
        check_sums(folder)
        module = kind(settings)
        module.load_state_dict(load_file(folder / WEIGHTS))
        for name, tensor in module.state_dict().items():
            if not torch.isfinite(tensor).all():
                raise HeadError(f"{WEIGHTS}: {name} has values that are no finite numbers")
        module.folder = folder
    except HeadError as error:
        whole = noun.removeprefix("trained ")
        raise HeadError(f"{folder} holds no whole {whole}: {error}") from error
    return module.eval()


def _read_config(path: Path, config: type[SavedConfig]) -> SavedConfig:
    if (size := path.stat().st_size) > LARGEST_CONFIG:
        raise HeadError(f"{path.name} has {size} bytes, and a config {LARGEST_CONFIG} at most")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{path.name} is no JSON: {in_a_line(error)}") from error
    if not isinstance(values, dict):
        raise HeadError(f"{path.name} is {shown(values)}, and must be an object with keys")
    known = {item.name: item.default is item.default_factory is MISSING for item in fields(config)}
    for name in [name for name, needed in known.items() if needed and name not in values]:
        raise HeadError(f"{path.name} has no {name}")
    for name in values.keys() - known:
        raise HeadError(f"{path.name}: {shown(name)} is no key; known: {', '.join(known)}")
    try:
        return config(**values)
    except ValueError as error:
        raise HeadError(f"{path.name}: {error}") from error


def _check_tensors(path: Path, expected: nn.Module) -> None:
    """Raise HeadError unless a file has the tensors of a module, by name, kind and shape."""
    wanted = expected.state_dict()
    try:
        with safe_open(path, "pt") as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: (t.get_dtype(), list(t.get_shape())) for name, t in found.items()}
    except (SafetensorError, OSError) as error:
        raise HeadError(in_a_line(error)) from error
    differing = {"lacks": wanted.keys() - kinds, "has no use for": kinds.keys() - wanted}
    for what, names in differing.items():
        if names:
            few = ", ".join(map(shown, sorted(names)[:4])) + (" .." if len(names) > 4 else "")
            raise HeadError(f"{path.name} {what} {few}")
    for name, (dtype, shape) in kinds.items():
        real, size = dtype.startswith(("F", "BF")), list(wanted[name].shape)
        if shape != size or real != wanted[name].is_floating_point():
            raise HeadError(
                f"{path.name}: {name} is {dtype} {shape}, and must be "
                f"{'real' if wanted[name].is_floating_point() else 'whole'} numbers {size}, as "
                f"{CONFIG} has it"
            )


def share_weights(folder: Path) -> None:
    """Let whoever may read a folder's config read its weights: safetensors writes them for their
    owner alone."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / CONFIG, weights)
