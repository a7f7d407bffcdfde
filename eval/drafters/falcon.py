"""Draft the same static tree with a head in every step.

Within a pass, the tokens of a block are chosen in rounds. Where slots are coupled, every chosen
token gives its children a distribution of their own, at the price of the coupling and of the
lm_head for the nodes that have any: no attention, no new pass.

Shapes: R rows, E paths of a pass, K block size, H hidden, D distributions of a round, V tokens
drafted among.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specdraft.eval.drafters.best_first import SHARPNESS
from specdraft.eval.drafters.drawing import REJECTION_RULES, draw, draws_of, wants_best
from specdraft.eval.drafters.head import HeadDrafter
from specdraft.eval.drafters.pass_options import DEFAULT, PassOptions
from specdraft.eval.drafters.static import Pass, Round, StaticTree
from specdraft.eval.drafters.whole_draft import Planned, WholeDraft
from specdraft.eval.engine.sampling import most_probable
from specdraft.eval.engine.timing import Stopwatch
from specdraft.eval.engine.tree import Tree
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.passes.row import FEWEST
from specdraft.models.sar.fusion import State
from specdraft.models.target import Target


class FalconDrafter(HeadDrafter):
    """Draft the same static tree in every step."""

    def __init__(
        self,
        head: FalconHead | Eagle3Head,
        target: Target,
        tree: StaticTree,
        rows: int = 1,
        capacity: int = 2048,
        options: PassOptions = DEFAULT,
    ):
        config = head.config
        tree.check_vocabulary(target, config.draft_vocab)
        if tree.block_size != config.block_size:
            raise ValueError(f"tree for blocks of {tree.block_size}, head of {config.block_size}")
        coupled = config.coupling != "none"
        if tree.coupled != coupled:
            tree = StaticTree(tree.paths, tree.block_size, coupled)
        scratch = sum(len(plan.blocks) for plan in tree.passes)
        widest, sharpness = 1 + max(path[-1] for path in tree.paths), None
        if options.compiles:  # the graph of dynamic drafts, too
            widest = min(max(FEWEST, widest), config.draft_vocab or target.vocab_size)
            sharpness = SHARPNESS
        reads = tree.topology.depth, scratch
        super().__init__(head, target, rows, capacity, *reads, widest, options, sharpness)
        self.tree, self.max_nodes = tree, len(tree.paths)
        self.passes = [self._to_device(plan) for plan in tree.passes]
        self.choices = tree.choices.to(target.device)
        self.rules = REJECTION_RULES if tree.topology.is_chain else REJECTION_RULES - {"block"}
        self._biases = {plan: self.hiding(plan.visible) for plan in self.passes[1:]}
        # Of every node, its place among the best tokens of all levels, where there is one at each.
        places = [(len(path) - 1) * widest + path[-1] for path in tree.paths]
        self._of_levels = torch.tensor(places, device=target.device)
        self.whole = None
        if target.replays and self.row_pass:
            self.whole = WholeDraft(self, Planned(self.passes, self.choices, self.choose))

    def grow(self, rows: list[int]) -> list[Tree]:
        if trees := self._grow_whole(rows):
            return trees
        if self.tree.is_narrow and self.goes_alone(rows):
            return [self._grow_alone(rows[0])]
        requests = enumerate(self.memory[row].request for row in rows)
        # The distributions, pass by pass, of rows that do not just take the best tokens.
        probs: dict[int, list[Tensor]] = {n: [] for n, own in requests if not wants_best(own)}
        ranked, drawn, state = [], None, None
        for plan in self.passes:
            with Stopwatch() as watch:
                if not ranked:
                    slots, state = self._read(rows)
                else:
                    slots, state = self._extend(rows, plan, ranked[-1], drawn, state)
                drawn, tokens = self.choose(rows, plan, slots, probs)
            self.seconds += watch.seconds
            ranked.append(tokens)
        self.forwards += len(self.passes) * len(rows)
        nodes = torch.cat(ranked, 1).index_select(1, self.choices).unbind()
        requests = (self.memory[row].request for row in rows)
        drawn = (draws_of(r, probs.get(n, ()), self.tree.sources) for n, r in enumerate(requests))
        return [Tree(self.tree.topology, *both) for both in zip(nodes, drawn, strict=True)]

    def _grow_whole(self, rows: list[int]) -> list[Tree] | None:
        """`grow` as one replayed graph, for rows that are all greedy; None where it does not do."""
        greedy = all(self.memory[row].request.temperature == 0 for row in rows)
        if not (self.whole and greedy):
            return None
        with Stopwatch() as watch:
            nodes = self.whole.grow(rows)
        if nodes is None:
            return None
        self.seconds += watch.seconds
        self.forwards += len(self.passes) * len(rows)
        return [Tree(self.tree.topology, own) for own in nodes.unbind()]

    def _grow_alone(self, row: int) -> Tree:
        """`grow` for one greedy row and a tree that branches off the most probable path alone."""
        with Stopwatch() as watch:
            blocks = [self.read_alone(row)]
            for plan in self.passes[1:]:
                blocks.append(self.go_on_alone(row, blocks[-1], plan.depth))
        self.seconds += watch.seconds
        self.forwards += len(blocks)
        levels = torch.cat([block.tokens for block in blocks]).flatten()
        return Tree(self.tree.topology, levels.index_select(0, self._of_levels))

    def choose(
        self, rows: list[int], plan: Pass, slots: Tensor, probs: dict[int, list[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Choose the tokens of a pass, given its slots [R, E * K, H].

        Returns what its distributions are made of and their ranked tokens, those of all rounds one
        after the other: [R, .., H] and [R, ..].
        """
        drawn, ranked = [], []
        for part in plan.rounds:
            hidden = slots.index_select(1, part.slots)
            if part.before is not None:
                before = drawn[-1].index_select(1, part.before)
                tokens = ranked[-1].index_select(1, part.tokens)
                hidden = self.head.couple(hidden, before, self.embed(tokens))
            # Of features at unit scale: logits but for a factor, which changes no order.
            scores = self.vocabulary.logits(hidden)  # [R, D, V]
            ranked.append(self._rank(rows, part, scores, probs))
            drawn.append(hidden)
        return torch.cat(drawn, 1), torch.cat(ranked, 1)

    def _rank(
        self, rows: list[int], part: Round, scores: Tensor, probs: dict[int, list[Tensor]]
    ) -> Tensor:
        """Rank tokens of each distribution of a round, given scores [R, D, V], logits over the
        feature scale: [R, D * width]. The distributions of what was drawn go to `probs`."""
        chain = part.width == 1
        ranked = most_probable(scores) if chain else scores.topk(part.width).indices.flatten(1)
        for number, drawn in probs.items():
            request, read = self.memory[rows[number]].request, self.pool.lengths[rows[number]]
            step, ids = (read, part.depth), self.vocabulary.ids
            positions = read + part.depths
            logits = scores[number] * self.head.config.feature_scale
            tokens, law = draw(logits, request, positions, step, part.width, ids)
            ranked[number] = tokens.flatten()
            drawn += [] if law is None else [self.vocabulary.spread(law)]
        return self.vocabulary.tokens(ranked)

    def _extend(
        self,
        rows: list[int],
        plan: Pass,
        ranked: Tensor,  # [R, ..], of the pass before
        drawn: Tensor,  # [R, .., H]
        state: State,
    ) -> tuple[Tensor, State]:
        """Read one drafted block per path; return its slots [R, E * K, H] and end states."""
        state = tuple(
            s.unflatten(1, (len(rows), -1)).index_select(2, plan.parents).flatten(1, 2)
            for s in state
        )
        return self.read_blocks(
            rows,
            ranked.index_select(1, plan.blocks),
            drawn.index_select(1, plan.features),
            state,
            (plan.depth, plan.scratch),
            [self._biases[plan]] * len(rows),
        )

    def _to_device(self, plan: Pass) -> Pass:
        rounds = tuple(self._moved(part) for part in plan.rounds)
        # Masks are made of `visible` on the host.
        return replace(self._moved(plan), visible=plan.visible, rounds=rounds)

    def _moved(self, plan: Pass | Round) -> Pass | Round:
        tensors = {n: value for n, value in vars(plan).items() if isinstance(value, Tensor)}
        return replace(plan, **{n: value.to(self.target.device) for n, value in tensors.items()})
