"""Prompt lookup: copy what followed the last tokens when they occurred before (LLMA, PLD).

It is Max-Gram with a bound and without bigrams: a match of `match` tokens is looked for in the
prompt and in what has been generated; the `copy` tokens after its most recent occurrence are the
draft, a chain. No occurrence, no draft.
"""

from functools import partial

import torch

from specdraft.eval.drafters.maxgram import MaxGramDrafter
from specdraft.eval.drafters.suffix import RecentSuffixes


class PromptLookup(MaxGramDrafter):
    """Draft the `copy` tokens after the most recent occurrence of the last `match` tokens."""

    def __init__(self, match: int, copy: int, rows: int, device: torch.device | str = "cpu"):
        suffixes = partial(RecentSuffixes, longest=match)
        super().__init__(suffixes, copy, shortest=match, rows=rows, device=device)
