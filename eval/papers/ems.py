"""EMS-SD's Table 2 (arXiv 2405.07542): many samples at once, with pads and without.

Prompt lookup has nothing to train: a seed chooses the prompts, by shuffling those that come with
the package; `eval.limit` of them are decoded, spread over the categories. Where a batch is padded
to its longest, tokens per step are the same and pads are added; speed needs an idle machine.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from specdraft.data.sources import bundled_file
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Plan, Row, SeededTable
from specdraft.recipes.fields import Count

# Halves of ours: what is still padded.
WAYS = {"padded": ":padded", "unpad inputs": ":pad_kv", "unpad KV": ":pad_inputs", "ours": ""}


@dataclass(frozen=True, kw_only=True)
class PaddingTable(SeededTable):
    """Ways to decode a batch as rows, by batch size."""

    sizes: tuple[Count, ...] = (2, 4, 8, 16, 24)

    def batches(self, plan: Plan, size: int, seed: int) -> Job:
        """The run of all ways on a seed's prompts, in batches of one size."""
        methods = ",".join(f"prompt_lookup{way}" for way in WAYS.values())
        overrides = (
            f"eval.methods=[plain,{methods}]",
            f"eval.prompts={self.prompts(plan, seed)}",
            f"eval.batch_size={size}",
        )
        return self.job(plan, "eval/bench.py", f"ems/{size}rows-seed{seed}", *overrides)

    def prompts(self, plan: Plan, seed: int) -> Path:
        """Where the prompts of a seed are."""
        return plan.runs / "ems" / f"prompts-seed{seed}.jsonl"

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: every batch size, on the prompts that are written for it here."""
        lines = bundled_file("prompts.jsonl").read_text().splitlines(keepends=True)
        random.Random(seed).shuffle(lines)
        path = self.prompts(plan, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
        return [[self.batches(plan, size, seed) for size in self.sizes]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every way, by batch size."""
        found = {}
        for size in self.sizes:
            _, *runs = self.batches(plan, size, seed).report()["runs"]
            for way, run in zip(WAYS, runs, strict=True):
                found[f"{size} rows, {way}"] = self.row(run)
        return found
