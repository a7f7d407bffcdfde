"""Finding the files of a model that somebody else has loaded, among the Hub's cached snapshots.

transformers forgets the revision that `from_pretrained` was given, so the weights are compared.
"""

from pathlib import Path

import torch
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from specdraft.models.hub import is_hub_id
from specdraft.models.target_files import folder_here


def folder_of(model: PreTrainedModel) -> tuple[Path | None, str | None]:
    """Return the folder that a model was loaded from, and its revision where it is not `main`; no
    folder where none is on this machine. No network."""
    name = model.name_or_path
    main = folder_here(name)
    if not is_hub_id(name) or (main and _holds(main, model)):
        return main, None
    kept = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"))
    for config in sorted(kept.glob("snapshots/*/config.json")):
        if _holds(config.parent, model):
            return config.parent, config.parent.name
    return main, None


def _holds(folder: Path, model: PreTrainedModel) -> bool:
    """Whether all tensors that a model has by a name of the folder's files begin as they do."""
    prefix = f"{model.base_model_prefix}."  # which files of a base model's weights lack
    state = {name.removeprefix(prefix): own for name, own in model.state_dict().items()}
    state = {name: own for name, own in state.items() if own.dim() and not own.is_meta}
    shared = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, "pt") as file:
                names = {name.removeprefix(prefix): name for name in file.keys()}  # noqa: SIM118
                for name in state.keys() & names.keys():
                    theirs, own = file.get_slice(names[name])[:1], state[name][:1].cpu()
                    if theirs.shape != own.shape or not torch.equal(theirs.to(own.dtype), own):
                        return False
                    shared += 1
        except (SafetensorError, OSError):  # what nobody can read was not loaded
            return False
    return shared > 0
