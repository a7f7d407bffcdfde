"""How often a trained head's ranks are right on a recipe's validation prompts, and its tree file.

Shapes: D depths, W ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import Tensor

from specdraft.data.atomic import write_atomic
from specdraft.data.prompts import validation_prompts
from specdraft.eval.drafters.registry import tree_method
from specdraft.eval.drafters.static import Path as Ranks
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.drafters.tree_growth import medusa_rank_shares, rank_shares
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.medusa import load_medusa
from specdraft.models.published import load_head
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError
from specdraft.recipes.schema import Recipe

ROWS = 8  # answered at once


@dataclass(frozen=True)
class Drafted:
    """A head that drafts static trees, and how often it is right."""

    method: str  # that decodes with its trees
    trained: Trained
    folder: Path  # of its weights
    shares: Tensor  # [D, W]
    block_size: int  # depths of a pass
    coupled: bool = False  # whether every node with children has a distribution of its own


def measure_shares(recipe: Recipe, target: Target, depth: int) -> Drafted:
    """Count the ranks of what the recipe has trained, to a depth at most.

    Raises HeadError where it has trained no head, DataError where no validation prompts are left.
    """
    run = Path(recipe.output.dir)
    if recipe.medusa.given:
        heads = load_medusa(run / "medusa", target.identity())
        depth = min(depth, heads.config.heads)
        shares = medusa_rank_shares(heads, target, answers(recipe, target), depth)
        trained = Trained(medusa=heads)
        return Drafted("medusa_tree", trained, run / "medusa", shares, depth)
    head = load_head(run / "head", target)
    shares = rank_shares(head, target, answers(recipe, target), depth)
    method = tree_method(head.config)
    coupled = head.config.coupling != "none"
    trained, size = Trained(head=head), head.config.block_size
    return Drafted(method, trained, run / "head", shares, size, coupled)


def answers(recipe: Recipe, target: Target) -> list[tuple[int, list[int]]]:
    """The target's greedy answers to the validation prompts: (length of the prompt, all ids)."""
    prompts = [prompt.input_ids for prompt in validation_prompts(recipe, target.tokenizer)]
    if not prompts:
        raise DataError("no validation prompts are left: lower eval.limit")
    requests = [Request(prompt, recipe.eval.max_new_tokens) for prompt in prompts]
    capacity = max(map(len, prompts)) + recipe.eval.max_new_tokens
    done = Decoder(target, rows=ROWS, capacity=capacity).run(requests)
    return [(len(prompts[one.index]), prompts[one.index] + one.tokens) for one in done]


def write_tree(path: Path, block_size: int, source: str, paths: Sequence[Ranks]) -> None:
    """Write a tree file as recipes name it in eval.tree, whole or not at all."""
    content = {
        "name": path.stem,
        "block_size": block_size,
        "source": source,
        "paths": [list(ranks) for ranks in sorted(paths, key=lambda ranks: (len(ranks), ranks))],
    }
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=99)
    write_atomic(path, text.encode())
