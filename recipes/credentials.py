"""Credentials: no recipe holds any, and no message shows one.

A recipe is kept beside what it made, printed, and pushed to the Hub; an environment is not.
"""

import re

KEY = "OPENAI_API_KEY"  # what an answering server is shown (data/server.py)
PLACES = f"a key of data.server in {KEY}, the Hub's token in HF_TOKEN or by `hf auth login`"
_HIDDEN = "***"
_SECRETS = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)"  # user:password@
    # Tokens of Hugging Face, GitHub, OpenAI: long, and no words.
    r"|\b(?:hf_|gh[a-z]_|github_pat_|sk-)(?=[\w-]{0,99}\d)[\w-]{24,}"
    r"|(?<=[?&;])[\w-]*(?:key|token|secret|password|auth)[\w-]*=[^&\s'\"]+",
    re.IGNORECASE,
)


def holds_credentials(text: str) -> bool:
    """Whether a text has a user or password of a URL, or what looks like an API's key in it."""
    return _SECRETS.search(text) is not None


def redacted(text: str, *secrets: str | None) -> str:
    """Return a text without the credentials in it; secrets: others that are known."""
    for secret in filter(None, secrets):
        text = text.replace(secret, _HIDDEN)
    return _SECRETS.sub(_HIDDEN, text)
