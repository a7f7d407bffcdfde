"""Which weights a model has: the hashes by which caches and heads know the target they are of."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn

from specdraft.models.weights.files import weight_files

# Where families write the size of what lm_head consumes; OPT-350m's differs from its hidden size.
FEATURE_SIZES = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
# Of config.json, what changes nothing that is computed.
_WITHOUT_EFFECT = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def identity_of(name: str, revision: str | None, folder: Path) -> dict[str, str | int | None]:
    """Describe which weights these are; written into every cache and head made from them.

    `weights` is a sha256 over the size of each weight file, its first bytes (for safetensors the
    table of tensors) and 64 evenly spread pages: any two checkpoints of a training run differ, and
    140 GB need not be read. `config` is one of what else decides the tokens: other positions
    (rope), another end of an answer.
    """
    config = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"
    spoken = json.loads(generation.read_text()) if generation.is_file() else config
    digest = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for page in range(_SAMPLES):
                file.seek(size * page // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return {
        "name": name,
        "revision": revision,
        "weights": digest.hexdigest(),
        "config": hash_config(config, spoken.get("eos_token_id")),
        "hidden_size": next((config[key] for key in FEATURE_SIZES if config.get(key)), None),
        "vocab_size": config.get("vocab_size"),
    }


def hash_config(config: dict, eos_ids: int | list[int] | None) -> str:
    """Return a sha256 over the settings of a config.json and the ids that end an answer."""
    settings = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT}
    canonical = json.dumps([settings, eos_ids], sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def hash_weights(model: nn.Module) -> str:
    """Return a sha256 over the names and values of all tensors of a model."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        values = value.detach().float().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()
