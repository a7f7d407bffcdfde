"""What drafters are trained on: conversations, who answers them, and how features are kept."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from specdraft.recipes.fields import (
    Count,
    Few,
    Interval,
    Natural,
    Positive,
    Rows,
    Sampling,
    Section,
    Seed,
    Tokens,
)
from specdraft.recipes.sections.target import Dtype


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    """Conversations, their tokens, and the target's features of them; lengths are in tokens.

    With `answers: target`, the target writes each answer anew: a drafter learns its text best.
    """

    sources: tuple[str, ...]  # files, Hub ids, or "tiny" (the bundled conversations)
    format: Literal["auto", "sharegpt", "messages", "alpaca", "text", "seq2seq"] = "auto"
    answers: Literal["dataset", "target"] = "dataset"  # "target": the target rewrites the answers
    max_length: Annotated[int, Interval(2, 10**7)] = 2048  # tokens kept of a conversation
    cache_dir: str = "cache"
    features: Literal["cached", "online"] = "cached"  # on disk, or computed as training goes on
    feature_dtype: Literal[Dtype, "float8", "int8"] = "float32"  # of the features, either way
    # Stored are features with a supervised token among the next so many; the others are zeros in
    # training. As many as max_length: only what no loss reads is missing. null: all are stored.
    feature_context: Tokens | None = None
    # Decoder layers of the target, counted from 1, whose outputs a Falcon or EAGLE-1 head reads
    # beside the last feature, e.g. [2, 6]: models/feature_layers.py.
    feature_layers: tuple[Few, ...] = ()
    limit: Count | None = None  # conversations at most, of those that a holdout leaves
    # Which ones: null: the first; else some drawn with this seed, a lower limit's among a higher's.
    shuffle_seed: Seed | None = None
    holdout: Natural = 0  # last rows of the sources, never trained on
    prompt_tokens: Tokens | None = None  # format text: prompt length; null: all is supervised
    # The rest matters for `answers: target` only.
    samples: Rows = 1  # continuations per conversation
    temperature: Sampling = 0.0  # of the samples after the first, which is greedy
    max_new_tokens: Tokens | None = 256
    batch_rows: Few = 32  # conversations decoded, or requests of a process to the server, at once
    seed: Seed = 0
    # Drafts our decoder's answers, which are the same with any drafter, only sooner: a method of
    # `eval`, and the folder of the run that trained it; null: output.dir.
    drafter: str = "plain"
    drafter_run: str | None = None
    server: str | None = None  # OpenAI-compatible, http://HOST:PORT/v1; null: our decoder
    server_model: str | None = None  # the name the server has for the target; null: target.model
    retries: Annotated[int, Interval(0, 20)] = 5  # of a request, after 0.5 s, 1 s, 2 s, ..
    timeout: Positive = 600.0  # seconds for an answer of the server

    def conflicts(self) -> Iterator[str]:
        """Yield what is missing, out of range together, or set without what it needs."""
        if not self.sources:
            yield self.complaint("sources", "name at least one file, Hub id, or tiny")
        if len(set(self.feature_layers)) < len(self.feature_layers):
            yield self.complaint("feature_layers", "name each layer once")
        if self.prompt_tokens is not None and self.prompt_tokens >= self.max_length:
            limit = f"must be below data.max_length ({self.max_length})"
            yield self.complaint("prompt_tokens", f"leaves nothing to learn; {limit}")
        if self.drafter_run is not None and self.drafter == "plain":
            yield self.complaint("drafter_run", "needs data.drafter, which says what drafts")
        if self.answers == "target":
            yield from self._rewriting()
            yield from self._serving()
            return
        for key, off in (("drafter", "plain"), ("server", None), ("samples", 1)):
            if getattr(self, key) != off:
                yield self.complaint(key, "needs data.answers=target")

    def _rewriting(self) -> Iterator[str]:
        if self.max_new_tokens is None:
            needed = "data.answers=target needs the length of an answer, e.g. 256"
            yield self.complaint("max_new_tokens", needed)
        if self.samples > 1 and self.temperature == 0:
            way_out = "set data.temperature above 0, e.g. 1.0"
            yield self.complaint("samples", f"all would be the same greedy answer; {way_out}")
        if self.format == "text" and self.prompt_tokens is None:
            what = "data.answers=target continues a prompt; say how many tokens of each text are "
            yield self.complaint("prompt_tokens", f"{what}the prompt, e.g. 16")

    def _serving(self) -> Iterator[str]:
        if self.server is None:
            if self.server_model is not None:
                yield self.complaint("server_model", "needs data.server")
        elif self.format == "seq2seq":
            what = "a server completes prompts, and an encoder-decoder's answers need sources"
            yield self.complaint("server", f"{what}; set it to null")
        elif self.drafter != "plain":
            what = "a server drafts as it was started; set one of the two to null or plain"
            yield self.complaint(("drafter", "server"), what)
        elif not _is_url(self.server):
            yield self.complaint("server", "must be a URL, e.g. http://127.0.0.1:8000/v1")


def _is_url(text: str) -> bool:
    """Whether a text is the address of a server, with a port that there can be."""
    try:
        known = urlsplit(text).hostname and urlsplit(text).port != 0
    except ValueError:  # a port beyond 65535, or half of a bracket
        return False
    return bool(known and re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", text))
