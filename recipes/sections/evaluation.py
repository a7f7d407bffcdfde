"""What is measured after training, and how it is decoded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdraft.recipes.fields import (
    Count,
    Draft,
    Factor,
    Few,
    InvalidRecipeError,
    Natural,
    Sampling,
    Section,
    Seed,
    Share,
    Tokens,
)
from specdraft.recipes.sections.target import Dtype
from specdraft.recipes.static_trees import AUTO, load_tree_paths

Acceptance = Literal["gumbel", "walk", "recursive", "multistep", "kseq", "block"]


@dataclass(frozen=True, kw_only=True)
class EvalSection(Section):
    """What is measured: methods, on which prompts, and how they decode. Lengths are in tokens."""

    prompts: str = "tiny_chat"  # bundled; or a published set, NAME:FILE, a JSONL file, "holdout"
    # auto: fitted when training ends, and beside the weights; or a file of recipes/trees without
    # .yaml, or a path.
    tree: str = AUTO
    chain_depth: Draft = 6  # of a head's chains; of Medusa heads as many as there are, at most
    threads: Few | None = None  # of a CPU while decoding; null: as torch takes
    # Whether a head's passes over a single greedy row are made one graph each, in half a minute
    # that the machine remembers; needs a C++ compiler. What is said stays the same.
    compile: bool = False
    # What a head drafts in, if its fusion carries no state; auto: the target's dtype. It reads half
    # as much of memory in two bytes, and what is said stays the same.
    head_dtype: Literal["auto", Dtype] = AUTO
    validation: Count = 16  # prompts, none of the measured ones, that choose the head to keep
    max_new_tokens: Tokens = 128
    limit: Count | None = None  # prompts at most
    # METHOD or METHOD:WAY, of eval/methods/registry.py; these need no more than a Falcon head.
    methods: tuple[str, ...] = (
        "plain",
        "generate",
        "hf_prompt_lookup",
        "prompt_lookup",
        "falcon_chain",
        "falcon_tree",
    )
    temperature: Sampling = 0.0  # 0: greedy
    top_k: Natural = 0  # 0: off
    top_p: Share = 1.0
    # Rule when sampling: eval/engine/accept.py. rsd_c, rsd_s, specinfer and spectr have their own.
    acceptance: Acceptance = "gumbel"
    batch_size: Few = 1  # rows decoded at once
    repeats: Few = 1  # times each batch is decoded; the median by wall-clock stands
    # Lengths range over max_new_tokens / spread .. max_new_tokens, and no end token cuts them.
    spread: Factor = 1.0
    seed: Seed = 0
    lookup_match: Draft = 2  # prompt lookup: length of the suffix looked for
    lookup_copy: Draft = 7  # prompt lookup: tokens proposed
    hf_lookup_copy: Draft = 3  # the same of transformers' prompt lookup
    prompt_tokens: Tokens | None = None  # holdout of format text: null: as data.prompt_tokens

    def conflicts(self) -> Iterator[str]:
        """Yield a missing method, and what is wrong with the tree."""
        if not self.methods:
            yield self.complaint("methods", "name at least one")
        try:
            if self.tree != AUTO:
                load_tree_paths(self.tree)
        except InvalidRecipeError as error:
            yield from (self.complaint("tree", line) for line in error.problems)
