"""What a cache was made from, as hashes: files, tokenizers, chat templates, settings."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


def of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_settings(settings: dict[str, Any]) -> str:
    """Return 12 hex digits that name a cache made with these (JSON) settings."""
    canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return `tokenizer` (vocabulary, merges, special tokens) and `template` (chat template)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = sorted(tokenizer.get_vocab().items())
    else:
        state = json.loads(backend.to_str())
        # A call with truncation or padding leaves its setting behind: not part of the identity.
        state.pop("truncation", None)
        state.pop("padding", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    parts = {"tokenizer": [state, special], "template": tokenizer.chat_template}
    return {
        name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()
        for name, part in parts.items()
    }
