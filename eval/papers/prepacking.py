"""Time verifying forwards with a target's weights as they are, and prepacked, by nodes of a draft.

Targets are random Llamas of a few widths, on one CPU thread; both take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean
from typing import Annotated

import torch
from transformers import LlamaConfig

from specdraft.eval.costing.bench import TargetBench, Try, settled, turns, visit
from specdraft.eval.costing.grid import Grid
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.papers.table import Found, Plan, Row, SeededTable
from specdraft.models.embeddings import DTYPES
from specdraft.models.target import Target
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.fields import Count, Interval

CPU, TURNS = torch.device("cpu"), 5
CACHED = 64  # tokens before the draft
LAYERS, VOCABULARY, HEAD_DIM = 8, 8192, 64
FORMATS, HOW = ("float32", "bfloat16"), ("as they are", "prepacked")
Nodes = Annotated[int, Interval(1, 512)]


@dataclass(frozen=True, kw_only=True)
class PrepackingTable(SeededTable):
    """Widths and dtypes, as they are and prepacked, as rows; nodes as columns, in milliseconds."""

    widths: tuple[Count, ...] = (256, 512, 1024)
    nodes: tuple[Nodes, ...] = (1, 4, 12, 24, 48)

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Means over seeds, and the machine."""
        with cpu_threads(1):
            found = super().find(plan, seeds)
            return replace(found, environment=environment(random_target(HEAD_DIM, FORMATS[0])))

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every width and dtype, with the weights of a seed."""
        found = {}
        for width, dtype in product(self.widths, FORMATS):
            torch.manual_seed(seed)
            prepacked = random_target(width, dtype)
            as_it_is = Target(prepacked.model, None, dtype, prepacked=PrepackedWeights(0))
            names = [f"{width} wide, {dtype}, {how}" for how in HOW]
            times = milliseconds([as_it_is, prepacked], self.nodes)
            found |= {name: Row(own) for name, own in zip(names, times, strict=True)}
        return found


def random_target(width: int, dtype: str) -> Target:
    """A Llama of a width, with random weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=max(width // HEAD_DIM, 1),
        num_key_value_heads=max(width // HEAD_DIM // 2, 1),
    )
    return Target.random(config, f"{width} wide", DTYPES[dtype], CPU)


def milliseconds(targets: Sequence[Target], nodes: Sequence[int]) -> list[dict[str, float]]:
    """Return, for each target, the milliseconds of verifying one row by its nodes: medians of
    turns, at the mean pace of the first target."""
    grid = Grid(tuple(nodes), rows=(1,), cached=(CACHED,))
    benches = [TargetBench(target, grid) for target in targets]
    forwards = [[cell for cell in bench.cells() if cell.what == "verify"] for bench in benches]
    pace = benches[0].pace()
    tries: list[dict[int, list[Try]]] = [{count: [] for count in nodes} for _ in targets]
    for visits in zip(*(turns(cells, TURNS) for cells in forwards), strict=True):
        for own, (_, cell) in zip(tries, visits, strict=True):
            own[cell.at["nodes"]].append(visit(cell, pace))
    usual = mean(one.pace for own in tries for some in own.values() for one in some)
    return [{f"{count}": settled(some, usual) for count, some in own.items()} for own in tries]
