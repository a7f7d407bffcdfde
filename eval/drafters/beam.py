"""RSD-S: trees drawn by stochastic beam search with a draft LM (arXiv 2402.14160, section 3.2).

Every level keeps the W sequences with the largest perturbed log-probabilities. A sequence's G is
Gumbel noise located at its log q and conditioned so that the best of a node's children has the G of
the node (Kool et al., arXiv 1903.06059): the W sequences of a level are a sample without
replacement, and so are the siblings behind every node, in decreasing order of G (Theorem 3.2).
Which of them make it into the beam depends on their G, and that of the next sibling tells nothing
about which token it is: what truncation leaves is still such a sample.

Shapes: .. any, B beams, V vocabulary, W beam width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdraft.eval.drafters.drawing import DRAFTER_STREAM, wants_samples
from specdraft.eval.drafters.level import Growth, LevelDrafter, Open
from specdraft.eval.engine.sampling import derive_seed, gumbel, warp
from specdraft.eval.engine.transfer import download
from specdraft.models.target import Target


@dataclass(frozen=True)
class Beams:
    """Sequences of one level, the best first."""

    phi: Tensor  # [.., B], log q of each
    noisy: Tensor  # [.., B], G: phi with Gumbel noise; phi itself where nothing is drawn


@dataclass(frozen=True)
class Chosen:
    """The W best children of a level's sequences: parents and tokens, both [.., W]."""

    parents: Tensor
    tokens: Tensor
    beams: Beams


def conditioned(noisy: Tensor, children: Tensor) -> Tensor:
    """Shift Gumbel variables [.., V] so that their maximum is `noisy` [..]: G^ of section 3.2,

    G^ = -log(exp(-G) - exp(-Z) + exp(-G~)), Z = max G~. Order is kept; -inf stays. Computed as
    G - log(1 + exp(v)), v = G - G~ + log(1 - exp(G~ - Z)), where no exponential can overflow.
    """
    below = children - children.max(-1, keepdim=True).values
    # log(1 - exp(x)) for x <= 0 (Maechler, 2012).
    rest = torch.where(below > -0.6931, (-below.expm1()).log(), (-below.exp()).log1p())
    value = noisy[..., None] - children + rest
    return noisy[..., None] - torch.logaddexp(value, torch.zeros_like(value))


def step(beams: Beams, logs: Tensor, noise: Tensor | None, width: int) -> Chosen:
    """One level of stochastic beam search: the `width` children of the largest G over all beams.

    logs: log q [.., B, V] behind each beam. noise: standard Gumbel [.., B, V]; None: plain beam
    search. Raises ValueError when there are fewer children than `width`.
    """
    size = logs.shape[-1]
    phi = beams.phi[..., None] + logs
    noisy = phi if noise is None else conditioned(beams.noisy, phi + noise)
    if width > noisy.shape[-2] * size:
        raise ValueError(f"a beam of {width} out of {noisy.shape[-2]} x {size} children")
    best = noisy.flatten(-2).topk(width)
    chosen = Beams(phi.flatten(-2).gather(-1, best.indices), best.values)
    return Chosen(best.indices // size, best.indices % size, chosen)


class BeamGrowth(Growth):
    """A tree with the beams of its last level."""

    beams: Beams


class StochasticBeam(LevelDrafter):
    """Draft `width` nodes at each of `depth` levels. Without a rule that rejects, plain beam search
    over the ranking of the candidates."""

    rules = frozenset({"recursive"})

    def __init__(self, student: Target, rows: int, capacity: int, depth: int, width: int):
        super().__init__(student, rows, capacity, depth, depth * width)
        self.width = width

    def plant(self, row: int) -> BeamGrowth:
        growth = BeamGrowth(self.memory[row].tokens[-1:])
        # The best sequence's noise is independent of which one it is: any G will do at the root.
        start = torch.zeros(1, dtype=torch.float64, device=self.student.device)
        growth.beams = Beams(start, start)
        return growth

    def expand(self, growths: dict[int, Growth], opened: Open, logits: Tensor, depth: int) -> Open:
        parts = logits.split([len(nodes) for nodes in opened.values()])
        chosen = {
            row: self._choose(row, growths[row], nodes, part, depth)
            for (row, nodes), part in zip(opened.items(), parts, strict=True)
        }
        found = [(each.parents, each.tokens, each.beams.noisy) for each in chosen.values()]
        host = iter(download(*(part for parts in found for part in parts)))
        children = zip(host, host, host, strict=True)  # three of each row
        return {
            row: self._add(growths[row], opened[row], *(part.tolist() for part in parts))
            for row, parts in zip(chosen, children, strict=True)
        }

    def _choose(
        self, row: int, growth: BeamGrowth, nodes: list[int], logits: Tensor, depth: int
    ) -> Chosen:
        """The next level of a row, given the logits [B, V] behind its beams."""
        request, noise = self.memory[row].request, None
        if wants_samples(request):
            warped = warp(logits, request.temperature, request.top_k, request.top_p)
            logs = warped.double().log_softmax(-1)  # log q, what the drafts are drawn from
            seed = derive_seed(request.seed, DRAFTER_STREAM, self.num_committed_tokens(row), depth)
            noise = gumbel(seed, torch.arange(len(nodes), device=logs.device), logs.shape[-1])
            growth.drawn_from(nodes, logs.exp())
        else:
            logs = self.rank({row: len(nodes)}, logits, depth).double().log_softmax(-1)
        width = min(self.width, logs.numel())
        chosen = step(growth.beams, logs, noise, width)
        growth.beams = chosen.beams
        return chosen

    @staticmethod
    def _add(
        growth: BeamGrowth,
        nodes: list[int],
        parents: list[int],
        tokens: list[int],
        noisy: list[float],
    ) -> list[int]:
        """Add the chosen children, the best first; with top-k and top-p, some are impossible."""
        kept = [n for n, value in enumerate(noisy) if value > float("-inf")]
        growth.beams = Beams(growth.beams.phi[: len(kept)], growth.beams.noisy[: len(kept)])
        return [growth.add(nodes[parents[n]], tokens[n]) for n in kept]
