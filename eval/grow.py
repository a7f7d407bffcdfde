"""Grow a static tree for a trained head from how often each rank is right at each depth.

    python eval/grow.py recipes/tiny.yaml --nodes 25 --depth 6 --out recipes/trees/tiny_k2.yaml

The prompts are validation prompts, answered greedily by the target. The head is rolled out over
those answers, for every position at once, and the rank of each true token is counted by its depth;
Medusa heads are asked at every position, one head per depth.
With P[d, r] the share of rank r at depth d, a path is accepted with probability prod P, if depths
are independent, and the N most probable paths are the best tree of N nodes (Sequoia, arXiv
2402.12374, for a fixed drafter). They are prefix-closed: a parent is never less probable.
"""

import heapq
from pathlib import Path

import torch
import yaml
from torch import Tensor

from specdraft.data.prompts import validation_prompts
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.falcon import FalconHead, block_index, load_head
from specdraft.models.medusa import MedusaHeads, load_medusa
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import DataError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

WIDTH = 20  # ranks counted


@entry
def main() -> None:
    """Parse, count ranks, write the tree."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=25)
    parser.add_argument("--depth", type=int, default=6, help="passes * block size, or Medusa heads")
    parser.add_argument("--out", type=Path, required=True, help="the tree file to write")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    target = Target.of_recipe(recipe.target)
    out = Path(recipe.output.dir)
    if recipe.medusa.given:
        heads = load_medusa(out / "medusa", target.identity())
        block_size = min(options.depth, heads.config.heads)
        shares = medusa_rank_shares(heads, target, answers(recipe, target), block_size)
    else:
        head = load_head(out / "head", target.identity())
        block_size = head.config.block_size
        shares = rank_shares(head, target, answers(recipe, target), options.depth)
    paths = best_paths(shares, options.nodes)
    write_tree(options.out, block_size, recipe.name, paths)
    expected = 1 + sum(probability(shares, path) for path in paths)
    print(f"wrote {options.out}: {len(paths)} nodes, {expected:.2f} tokens/step expected")  # noqa: T201


def answers(recipe: Recipe, target: Target) -> list[tuple[int, list[int]]]:
    """The target's greedy answers to the validation prompts: (length of the prompt, all ids)."""
    prompts = [prompt.input_ids for prompt in validation_prompts(recipe, target.tokenizer)]
    if not prompts:
        raise DataError("no validation prompts are left: lower eval.limit")
    requests = [Request(prompt, recipe.eval.max_new_tokens) for prompt in prompts]
    capacity = max(map(len, prompts)) + recipe.eval.max_new_tokens
    done = Decoder(target, rows=8, capacity=capacity).run(requests)
    return [(len(prompts[one.index]), prompts[one.index] + one.tokens) for one in done]


@torch.inference_mode()
def rank_shares(
    head: FalconHead, target: Target, texts: list[tuple[int, list[int]]], depth: int
) -> Tensor:
    """Share of positions whose true token has rank r at depth d: [depth, WIDTH]."""
    k = head.config.block_size
    passes = -(-depth // k)
    found, seen = torch.zeros(passes * k, WIDTH), torch.zeros(passes * k)
    for start, ids in texts:
        tokens = torch.tensor([ids], device=target.device)
        features, ahead = target.features(tokens)[:, :-1], target.embed(tokens[:, 1:])
        for phase in range(1, k + 1):
            blocks = block_index(len(ids) - 1, k, phase).to(target.device)[None]
            rolled = head(ahead.float(), features.float(), blocks, passes=passes)[:, 0]
            for i in range(max(start - 1, passes * k), len(ids) - k - 1):
                place = (i - phase) % k
                scores = target.logits(rolled[:, i].to(target.dtype))  # [R, V]
                true = scores[:, ids[i + k + 1], None]
                ranks = (scores > true).sum(-1)
                for number, rank in enumerate(ranks.tolist()):
                    seen[number * k + place] += 1
                    if rank < WIDTH:
                        found[number * k + place, rank] += 1
    return (found / seen.clamp(min=1)[:, None])[:depth]


@torch.inference_mode()
def medusa_rank_shares(
    heads: MedusaHeads, target: Target, texts: list[tuple[int, list[int]]], depth: int
) -> Tensor:
    """The same of Medusa heads, whose head h drafts t_(i+1+h) at i: [depth, WIDTH]."""
    drafter = MedusaDrafter(heads, target, StaticTree.chain(depth, depth))
    found, seen = torch.zeros(depth, WIDTH), 0
    for start, ids in texts:
        tokens = torch.tensor(ids, device=target.device)
        places = torch.arange(start - 1, len(ids) - depth - 1, device=target.device)
        scores = drafter.scores(target.features(tokens[None])[0, places])  # [N, depth, V]
        for number in range(depth):
            true = scores[:, number].gather(1, tokens[places + number + 2, None])
            ranks = (scores[:, number] > true).sum(-1).cpu()
            found[number] += torch.bincount(ranks, minlength=WIDTH)[:WIDTH]
        seen += len(places)
    return found / max(seen, 1)


def probability(shares: Tensor, path: tuple[int, ...]) -> float:
    """Probability that a path of ranks is accepted to its end."""
    value = 1.0
    for depth, rank in enumerate(path):
        value *= float(shares[depth, rank])
    return value


def best_paths(shares: Tensor, nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` most probable paths, most probable first. Ranks count as sorted: a better rank
    is never less probable, so siblings have no gaps."""
    shares = shares.sort(dim=-1, descending=True).values
    heap = [(-float(shares[0, 0]), (0,))]
    chosen = []
    while heap and len(chosen) < nodes:
        value, path = heapq.heappop(heap)
        chosen.append(path)
        *parent, rank = path
        if rank + 1 < shares.shape[1] and shares[len(parent), rank] > 0:
            sibling = (
                value / float(shares[len(parent), rank]) * float(shares[len(parent), rank + 1])
            )
            heapq.heappush(heap, (sibling, (*parent, rank + 1)))
        if len(path) < len(shares):
            heapq.heappush(heap, (value * float(shares[len(path), 0]), (*path, 0)))
    return chosen


def write_tree(path: Path, block_size: int, name: str, paths: list[tuple[int, ...]]) -> None:
    """Write a tree file as recipes name it in eval.tree."""
    content = {
        "name": path.stem,
        "block_size": block_size,
        "source": f"grown by eval/grow.py on recipe {name}",
        "paths": [list(p) for p in sorted(paths, key=lambda p: (len(p), p))],
    }
    path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=99))


if __name__ == "__main__":
    main()
