"""What a cache was made from, as hashes: files, tokenizers, chat templates, settings."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

# Bytes that are read at a time: beside a thread that computes, each part waits for its turn.
PART = 1 << 24


def of_file(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    digest, size = hashlib.sha256(), path.stat().st_size
    part = memoryview(bytearray(max(1, min(PART, size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(part):
            digest.update(part[:count])
    return digest.hexdigest()


def of_settings(settings: dict[str, Any], digits: int = 12) -> str:
    """Return hex digits that name what is made with these (JSON) settings, e.g. a cache."""
    canonical = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:digits]


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
