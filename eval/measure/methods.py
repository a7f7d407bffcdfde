"""The ways of decoding that are measured side by side, by name: prompts in, tokens out.

Ours run in the one decoder, transformers' own in `model.generate` (eval/measure/hf_generate.py).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

import torch

from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lookup import PromptLookup
from specdraft.eval.drafters.maxgram import CONTINUATIONS, MaxGramDrafter
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.drafters.strategies import make_strategy
from specdraft.eval.drafters.tail import MaxGramTail
from specdraft.eval.drafters.trained import HOW, Trained, needs
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.padded import PADDINGS, PaddedDecoder
from specdraft.eval.engine.request import GUMBEL, Request, Update
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.hf_generate import Generate
from specdraft.eval.measure.outcome import DecodingMethod, Outcome
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.methods import STUDENT_METHODS, Measured
from specdraft.recipes.schema import EvalSection, MaxgramSection, Recipe
from specdraft.recipes.static_trees import load_tree_paths

OWN_RULES = {  # of papers; transformers draws from torch's generator: other samples than ours
    **dict.fromkeys(("generate", "hf_prompt_lookup", "hf_assisted"), "transformers"),
    "rsd_c": "recursive",
    "rsd_s": "recursive",
    "specinfer": "multistep",
    "spectr": "kseq",
}


def rule_of(method: str, settings: EvalSection) -> str:
    """The acceptance rule of a method when sampling: its own, or the recipe's."""
    return OWN_RULES.get(method.partition(":")[0], settings.acceptance)


class Engine:
    """Our decoder, with or without a drafter, or the vanilla padded form of it.

    `rule` is how requests that sample are accepted, whatever they say themselves.
    """

    def __init__(self, decoder: Decoder, rule: str = GUMBEL):
        self.decoder, self.rule = decoder, rule

    def __call__(self, requests: Sequence[Request]) -> Outcome:
        decoder, drafter = self.decoder, self.decoder.drafter
        decoder.timing = Timing()
        before = _spent(drafter)
        began = time.perf_counter()
        with torch.inference_mode():
            ended = [update.completion for update in self.stream(requests) if update.completion]
        seconds = time.perf_counter() - began
        completions = sorted(ended, key=lambda done: done.index)
        for done in completions:
            if done.error:
                raise done.error
        *passes, spent = (b - a for a, b in zip(before, _spent(drafter), strict=True))
        return Outcome(completions, seconds, decoder.timing, tuple(passes), spent)

    def stream(self, requests: Sequence[Request]) -> Iterator[Update]:
        """Decode a batch step by step."""
        if isinstance(self.decoder, PaddedDecoder):
            self.decoder.packed.begin(len(requests))
        return self.decoder.stream(replace(request, rule=self.rule) for request in requests)


def _spent(drafter: Drafter | None) -> tuple[float, ...]:
    """Passes of each model of a drafter so far, and the seconds that they took together."""
    if drafter is None:
        return (0.0,)
    passes = drafter.passes if isinstance(drafter, CascadeDrafter) else [drafter.forwards]
    return (*passes, drafter.seconds)


def make_method(
    name: str, recipe: Recipe, target: Target, trained: Trained, capacity: int
) -> DecodingMethod:
    """Build a method by its name; RecipeError for an unknown one or one without its drafter.

    `capacity` holds a prompt and its answer. NAME:padded, NAME:pad_kv and NAME:pad_inputs are
    decoded the vanilla way (eval/engine/padded.py), and `padded` is prompt_lookup:padded.
    NAME:dynamic is the same engine; whoever calls it hands over all requests at once.
    """
    if name not in (known := get_args(Measured)):
        raise RecipeError(f"unknown method {name!r}; known: {', '.join(known)}")
    base, _, way = ("prompt_lookup:padded" if name == "padded" else name).partition(":")
    rows = recipe.eval.batch_size
    if base == "generate":
        return Generate(target)
    if base == "hf_prompt_lookup":
        return Generate(target, lookup_tokens=recipe.eval.hf_lookup_copy)
    for need in needs(base):
        if not getattr(trained, need):
            raise RecipeError(f"method {base} needs {HOW[need]}")
    if base == "hf_assisted":
        return Generate(target, trained.student, recipe.drafting.gamma)
    drafter = make_drafter(base, recipe, target, trained, capacity)
    rule = rule_of(base, recipe.eval)
    room = capacity + (drafter.max_nodes if drafter else 0)
    if way not in PADDINGS:
        return Engine(Decoder(target, drafter, rows, room), rule)
    # Aligned caches grow by what the luckiest row accepts: at worst by the sum over rows.
    room += (rows - 1) * recipe.eval.max_new_tokens
    return Engine(PaddedDecoder(target, drafter, rows, room, *PADDINGS[way]), rule)


def make_drafter(
    name: str, recipe: Recipe, target: Target, trained: Trained, capacity: int
) -> Drafter | None:
    """Build the drafter of a method, for `eval.batch_size` rows; None for plain decoding."""
    if name == "plain":
        return None
    settings, rows = recipe.eval, recipe.eval.batch_size
    if name == "prompt_lookup":
        return PromptLookup(settings.lookup_match, settings.lookup_copy, rows, target.device)
    if name == "maxgram":
        return make_maxgram(recipe.maxgram, trained.table, rows, target.device)
    if name == "cascade":
        bottom = make_maxgram(recipe.maxgram, trained.table, rows, target.device)
        k, leniency = recipe.cascade.k, recipe.cascade.leniency
        return CascadeDrafter(trained.cascade, bottom, k, leniency, rows, capacity)
    if name == "falcon_maxgram":
        inner = make_drafter("falcon_tree", recipe, target, trained, capacity)
        bottom = make_maxgram(recipe.maxgram, trained.table, rows, target.device)
        return MaxGramTail(inner, bottom, recipe.maxgram.n, recipe.maxgram.branches)
    if name in STUDENT_METHODS:
        return make_strategy(name, recipe.drafting, trained.student, rows, capacity)
    if name == "medusa_tree":
        paths = load_tree_paths(settings.tree)
        tree = StaticTree(paths, max(map(len, paths)))
        return MedusaDrafter(trained.medusa, target, tree, rows)
    k = trained.head.config.block_size
    if name.startswith("eagle") and not trained.head.config.is_eagle:
        raise RecipeError(
            f"method {name} needs an EAGLE-1 head (k = 1, linear); this one has k = {k}, "
            f"{trained.head.config.fusion}: measure falcon_tree, or train one: train/eagle.py"
        )
    chain = StaticTree.chain(settings.chain_depth, k)
    tree = chain if name.endswith("_chain") else StaticTree(load_tree_paths(settings.tree), k)
    return FalconDrafter(trained.head, target, tree, rows, capacity)


def make_maxgram(
    section: MaxgramSection, table: MaxGramTable, rows: int, device: torch.device
) -> MaxGramDrafter:
    """Build the Max-Gram drafter that a recipe describes."""
    return MaxGramDrafter(
        CONTINUATIONS[section.continuation],
        section.n,
        section.min_match,
        section.branches,
        table.next_id.tolist(),
        rows,
        device,
    )
