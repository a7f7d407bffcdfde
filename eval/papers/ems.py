"""EMS-SD's Table 2 (arXiv 2405.07542): many samples at once, with pads and without.

Prompt lookup has nothing to train: a seed chooses the prompts, by shuffling those that come with
the package; `eval.limit` of them are decoded, spread over the categories. Where a batch is padded
to its longest, tokens per step are the same and pads are added; speed needs an idle machine.
"""

import random
from dataclasses import dataclass
from typing import ClassVar

from specdraft.data.sources import bundled_file
from specdraft.eval.papers.jobs import Job
from specdraft.eval.papers.table import Paper, Plan, Row, SeededTable
from specdraft.recipes.fields import Count

# Halves of ours: what is still padded.
WAYS = {"padded": ":padded", "unpad inputs": ":pad_kv", "unpad KV": ":pad_inputs", "ours": ""}


@dataclass(frozen=True, kw_only=True)
class PaddingTable(SeededTable):
    """Ways to decode a batch as rows, by batch size. The paper's: OPT-6.7B with prompt lookup."""

    name, source = "ems", "EMS-SD, Table 2: many samples at once, padded and not"
    sizes: tuple[Count, ...] = (2, 4, 8, 16, 24)
    columns: ClassVar[dict[str, str]] = {
        "x plain": "speedup",
        "pads/input": "padding_ratio_inputs",
        "pads/cached": "padding_ratio_kv",
        "tokens/step": "tokens_per_step",
    }
    paper: ClassVar[Paper] = {
        f"{size} rows, {way}": {"x plain": speedup}
        for way, speedups in {
            "padded": {2: 3.21, 4: 2.26, 8: 1.37, 16: 0.83, 24: 0.66},
            "ours": {2: 3.50, 4: 2.83, 8: 2.17, 16: 1.63, 24: 1.41},
        }.items()
        for size, speedup in speedups.items()
    }

    def job(self, plan: Plan, size: int, seed: int) -> Job:
        """All ways, on batches of one size, of a seed's prompts."""
        methods = ",".join(f"prompt_lookup{way}" for way in WAYS.values())
        overrides = (
            "eval.limit=48",
            "eval.max_new_tokens=64",
            *plan.overrides,
            f"eval.methods=[plain,{methods}]",
            f"eval.prompts={plan.runs / 'ems' / f'prompts-seed{seed}.jsonl'}",
            f"eval.batch_size={size}",
        )
        folder = plan.runs / "ems" / f"{size}rows-seed{seed}"
        return Job("eval/bench.py", plan.recipe or self.recipe, overrides, folder)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: every batch size, on the prompts that are written for it here."""
        lines = bundled_file("prompts.jsonl").read_text().splitlines(keepends=True)
        random.Random(seed).shuffle(lines)
        path = plan.runs / "ems" / f"prompts-seed{seed}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
        return [[self.job(plan, size, seed) for size in self.sizes]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every way, by batch size."""
        found = {}
        for size in self.sizes:
            _, *runs = self.job(plan, size, seed).report()["runs"]
            for way, run in zip(WAYS, runs, strict=True):
                figures = {title: run[key] for title, key in self.columns.items()}
                found[f"{size} rows, {way}"] = Row(figures, [run])
        return found
