"""Time the training loop of a head against its bare computation: what the loop itself costs.

    python train/bench_loop.py recipes/tiny.yaml [section.key=value ..] [--steps 20] [--repeats 5]
        [--shape llama7b] [--out FILE.json]

loop     tokens/s of `fit` over those of bare optimiser steps: the same batches, in memory before,
         through the objective's passes, backward and AdamW
wait     share of the loop's time that passes until the next batch is there
cold     the same in the first turn, whose features the system has to fetch from the disk
CSGD     seconds of bare steps with glancing, two passes, over those of the same without, one;
         glance.isolated reads the revised blocks, and only these, once more
cache    tokens/s of building the feature cache, from reading tokens to opening what was flushed
         and hashed, over those of the target alone on the same padded batches

What is timed takes turns, and medians stand. The rows are those of 400 conversations (data.limit);
nothing is kept of them. Glancing stays at its first share, where it reveals most.

With --shape, the target is enlarged before it makes caches (models/enlarged/): features are as wide
as a larger one's and cost what they do there, and the head is the recipe's for a target of that
size. What a step takes is printed, too, and on a GPU the most memory while `fit` runs, the target's
included.
"""

from specdraft.recipes.entry import entry

import copy
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from rich.table import Table
from torch import nn

from specdraft.data.store.feature_builder import build_features
from specdraft.data.store.feature_cache import FeatureCache, Features
from specdraft.data.store.features import BATCH_TOKENS, batches, pad
from specdraft.data.store.storage import SHARD_BYTES, Storage, plan_shards
from specdraft.data.store.tokens import TokenCache
from specdraft.eval.costing.enlarged import enlarge
from specdraft.eval.costing.shapes import Shape, find_shape
from specdraft.eval.engine.transfer import wait
from specdraft.eval.generation.answers import build_caches
from specdraft.eval.measure.environment import environment
from specdraft.eval.measure.report import write_json
from specdraft.eval.methods.registry import problems
from specdraft.eval.methods.trained import Trained
from specdraft.models.cards.log import LOG, records
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import OutputSection, Recipe
from specdraft.recipes.terminal import Screen
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.batches import Batch, Loader, SamplingPlan
from specdraft.train.fit.loop import fit
from specdraft.train.fit.run import Objective
from specdraft.train.heads import Kind, head_kind

INTERRUPTIONS = ("epochs", "eval_every", "save_every", "max_minutes")
STEPPING = ("loop", "step", "two passes", "one pass")  # what takes optimiser steps
GOALS = {"loop": ">= 0.90", "wait": "< 2%", "cold": "< 2%", "CSGD": "<= 1.45", "cache": ">= 0.90"}


@entry
def main() -> None:
    """Parse, make caches and a head in a folder that is deleted, time in turns, print."""
    parser = recipe_parser(__doc__)
    parser.add_argument(
        "--steps", type=whole(1, 10**6), default=20, help="optimiser steps of one timing"
    )
    parser.add_argument(
        "--repeats", type=whole(1, 1000), default=5, help="turns; their medians are shown"
    )
    parser.add_argument("--shape", help="enlarge the models to llama7b, .., or a config.json")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures")
    options = parser.parse_intermixed_args()
    shape = find_shape(options.shape) if options.shape else None
    recipe = load_recipe(options.recipe, ["data.limit=400", *options.overrides], check=problems)
    if recipe.student.given:
        raise RecipeError(f"{recipe.name}: has a student; give a recipe of a head")
    with TemporaryDirectory(prefix="bench-") as folder:
        bench = Bench.make(recipe, options.steps, Path(folder), shape)
        turns = [bench.turn() for _ in range(options.repeats)]
        figures = bench.figures(turns)
    show(figures)
    if options.out:
        write_json(figures, options.out)


@dataclass(frozen=True)
class Bench:
    """What all timings share; each starts from a copy of the untrained head."""

    recipe: Recipe
    kind: Kind
    accelerator: Accelerator
    target: Target
    tokens: TokenCache
    data: Features
    head: nn.Module
    steps: int  # timed, of every run of `fit` the last; as many before them warm it up
    folder: Path

    @classmethod
    def make(cls, recipe: Recipe, steps: int, folder: Path, shape: Shape | None = None) -> "Bench":
        """Build caches and head of a recipe, all below `folder`; shape: what its target is enlarged
        to."""
        every = recipe.train.log_every
        steps = -(-steps // every) * every  # the log says when it was written: start at a line
        recipe = replace(
            recipe,
            data=replace(recipe.data, cache_dir=str(folder / "cache")),
            glance=replace(recipe.glance, end=recipe.glance.start),
            train=replace(recipe.train, steps=2 * steps, **dict.fromkeys(INTERRUPTIONS)),
        )
        accelerator = make_accelerator(recipe)
        target = Target.of_recipe(recipe.target, accelerator.device)
        if shape:
            target, _ = enlarge(shape, recipe, target, Trained())
        tokens, data = build_caches(recipe, target, accelerator)
        kind = head_kind(recipe.kind)
        head = kind.make(recipe, target, data)
        if isinstance(data, FeatureCache):
            data = FeatureCache(data.directory, data.manifest)  # nothing of it is mapped yet
            forget(data.directory)
        return cls(recipe, kind, accelerator, target, tokens, data, head, steps, folder)

    def turn(self) -> dict[str, float]:
        """Time everything once: tokens per second, the share of waiting, and on a GPU the most
        bytes of its memory that are taken while `fit` runs."""
        on_gpu = self.target.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        loop, waited = self.loop()
        peak = {"peak": torch.cuda.max_memory_allocated()} if on_gpu else {}
        speeds = peak | {"loop": loop, "wait": waited}
        speeds["step"] = self.step(self.recipe.glance.enabled)
        if not self.recipe.medusa.given and self.recipe.head.block_size > 1:
            speeds |= {"two passes": self.step(True), "one pass": self.step(False)}
        return speeds | {"cache": self.cache(), "forward": self.forward()}

    def loop(self) -> tuple[float, float]:
        """Run `fit`; return tokens/s of its later half, and the share of waiting."""
        with TemporaryDirectory(dir=self.folder) as out:
            recipe = replace(self.recipe, output=OutputSection(dir=out))
            head = copy.deepcopy(self.head)
            fit(head, self.data, self._objective(recipe), recipe, self.accelerator)
            self.accelerator.free_memory()  # it would save all heads that it ever prepared
            lines = [*records(Path(out) / LOG, "train")]
        first, *later = (line for line in lines if line["step"] >= self.steps)
        seconds = 60 * (later[-1]["minutes"] - first["minutes"])
        return self._tokens() / seconds, mean(line["data_wait"] for line in later)

    def step(self, glancing: bool) -> float:
        """Return tokens/s of bare optimiser steps over batches in memory."""
        recipe = replace(self.recipe, glance=replace(self.recipe.glance, enabled=glancing))
        objective, loaded = self._objective(recipe), self._batches()
        head = self.accelerator.prepare_model(copy.deepcopy(self.head).train())
        # Weights that stay as they are: every timing has the same work.
        fused = self.target.device.type == "cuda"  # as in training
        optimizer = torch.optim.AdamW(head.parameters(), lr=0.0, fused=fused)
        wait(self.target.device)
        began = time.perf_counter()
        for step in loaded:
            plans = [objective.plan(head, batch, 0.0) for batch in step]
            count = sum(counted.sum() for _, counted in plans)
            for batch, plan in zip(step, plans, strict=True):
                loss, _ = objective.loss(head, batch, *plan)
                (loss / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        wait(self.target.device)
        seconds = time.perf_counter() - began
        self.accelerator.free_memory()
        return self._tokens() / seconds

    def cache(self) -> float:
        """Return tokens/s of building the feature cache."""
        with TemporaryDirectory(dir=self.folder) as folder:
            recipe = replace(self.recipe, data=replace(self.recipe.data, cache_dir=folder))
            began = time.perf_counter()
            build_features(recipe, self.tokens, self.target)
            return sum(self.tokens.lengths) / (time.perf_counter() - began)

    def forward(self) -> float:
        """Return tokens/s of the target on the padded batches that a feature cache is made of."""
        lengths, storage = self.tokens.lengths, Storage.of(self.recipe.data)
        sizes = (storage.counts(self.tokens), self.target.hidden_size, storage)
        plan = plan_shards(lengths, *sizes, SHARD_BYTES)
        padded = [
            pad([self.tokens[row]["input_ids"] for row in rows]).to(self.target.device)
            for shard in plan.values()
            for rows in batches(shard, lengths, BATCH_TOKENS)
        ]
        wait(self.target.device)
        began = time.perf_counter()
        for ids in padded:
            self.target.features(ids)
        wait(self.target.device)
        return sum(lengths) / (time.perf_counter() - began)

    def figures(self, turns: list[dict[str, float]]) -> dict:
        """What is shown of some turns: their medians, and what they are of."""
        medians = {name: median(turn[name] for turn in turns) for name in turns[0]}
        tokens = self._tokens() / self.steps
        return {
            "recipe": self.recipe.to_dict(),
            "target": self.target.name,
            "parameters": sum(tensor.numel() for tensor in self.head.parameters()),
            "tokens_per_optimiser_step": tokens,
            "ms_per_optimiser_step": {
                name: 1000 * tokens / medians[name] for name in STEPPING if name in medians
            },
            "peak_memory_bytes": medians.get("peak"),
            "medians": medians,
            "turns": turns,
            "environment": environment(self.target),
        }

    def _objective(self, recipe: Recipe) -> Objective:
        return self.kind.objective(recipe, self.target.embeddings(), self.head)

    @property
    def _timed(self) -> range:
        return range(self.steps, 2 * self.steps)

    def _plan(self) -> SamplingPlan:
        train = self.recipe.train
        return SamplingPlan(self.data.lengths, train.batch_size, train.seed)

    def _batches(self) -> list[list[Batch]]:
        """The micro-batches of the timed steps, on the device."""
        collate, device = self._objective(self.recipe).collate, self.target.device
        loader = Loader(self.data, self._plan(), collate, self.recipe.train.accumulation)
        return [[batch.to(device) for batch in loader.load(step)] for step in self._timed]

    def _tokens(self) -> int:
        plan = self._plan()
        return sum(self.data.lengths[row] for step in self._timed for row in plan.rows(step))


def forget(folder: Path) -> None:
    """Have the system drop what it keeps in memory of the files of a folder (Linux)."""
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(figures: dict) -> None:
    """Print medians of ratios within a turn, with the speeds that they come from, and what a step
    takes."""
    turns, machine = figures["turns"], figures["environment"]

    def over(name: str, other: str) -> tuple[str, str]:
        ratios = [turn[name] / turn[other] for turn in turns]
        speeds = (f"{median(turn[n] for turn in turns) / 1000:.2f}k" for n in (name, other))
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        return f"{median(ratios):.3f}", f"{' / '.join(speeds)} tok/s, {spread}"

    waited = [turn["wait"] for turn in turns]
    rows = {
        "loop": over("loop", "step"),
        "wait": (f"{median(waited):.2%}", f"{min(waited):.2%} to {max(waited):.2%}"),
        "cold": (f"{waited[0]:.2%}", ""),
        "CSGD": over("one pass", "two passes") if "one pass" in turns[0] else ("none", ""),
        "cache": over("cache", "forward"),
    }
    table = Table("", "measured", "goal", "speeds, range over the turns", title="the loop's cost")
    for name, (measured, note) in rows.items():
        table.add_row(name, measured, GOALS[name], note)
    console = Screen(soft_wrap=True)
    console.print(table)
    took = figures["ms_per_optimiser_step"]
    peak = figures["peak_memory_bytes"]
    parts = [
        f"{figures['target']}, a head of {figures['parameters'] / 1e6:.1f}M parameters",
        f"{figures['tokens_per_optimiser_step']:.0f} tokens an optimiser step",
        *(f"{name} {ms:.2f} ms" for name, ms in took.items()),
        *([] if peak is None else [f"at most {peak / 1e9:.1f} GB of GPU memory in the loop"]),
    ]
    console.print(", ".join(parts), highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), highlight=False)


if __name__ == "__main__":
    main()
