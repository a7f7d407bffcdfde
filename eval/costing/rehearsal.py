"""Drafting rehearsed without the target: what a drafter that reads tokens alone would bring.

A student, a table or a copy drafts from what is committed, and what is going to be committed is
known (eval/costing/replay.py): the drafter itself runs over known answers, and only the target's
part of each step is priced instead of done. So settings of any such drafter have an expected speed,
whatever shape its drafts take.

Shapes: N nodes of a draft, the root included.
"""

from dataclasses import dataclass

import torch

from specdraft.eval.costing.replay import Load
from specdraft.eval.engine.accept import walk
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.tree import Tree
from specdraft.eval.pricing.cost import CostModel


@dataclass
class Rehearsal:
    """Steps of all rows, those of the prompts included, and milliseconds of all batches."""

    steps: int = 0
    ms: float = 0.0


@torch.inference_mode()
def rehearse(drafter: Drafter, load: Load, costs: CostModel) -> Rehearsal:
    """Draft along all answers of a load, as many rows at once as it says."""
    done = Rehearsal(ms=load.prompts_ms(costs))
    for texts in load.batches(load.texts):
        roots, ahead = {}, False
        for row, (start, ids, source) in enumerate(texts):
            request = Request(ids[:start], max_new_tokens=len(ids) - start, source=source)
            drafter.start(row, request)
            roots[row] = start - 1  # a draft is read together with the prompt
        while roots := {row: root for row, root in roots.items() if root < len(texts[row].ids) - 1}:
            with Stopwatch() as watch:
                trees = drafter.draft([*roots])
            nodes = round(sum(len(tree.topology) for tree in trees) / len(trees))
            done.ms += 1e3 * watch.seconds
            done.ms += load.step_ms(costs, len(trees), nodes) if ahead else 0.0
            done.steps, ahead = done.steps + len(trees), True
            for (row, root), tree in zip([*roots.items()], trees, strict=True):
                ids = texts[row].ids
                after = root + 1 + accepted(tree, ids[root + 1 :])
                drafter.observe(row, ids[root + 1 : after + 1], _NONE)
                roots[row] = after
    return done


_NONE = torch.empty(0)  # features, which these drafters do not read


def accepted(tree: Tree, ahead: list[int]) -> int:
    """How many of the tokens ahead a tree has on one path from its root."""
    drafted, left = [None, *tree.tokens.tolist()], iter(ahead)
    path, _ = walk(tree.topology, drafted, lambda node: next(left, None))
    return len(path) - 1
