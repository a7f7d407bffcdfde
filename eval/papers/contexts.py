"""Heads on contexts longer than the rows of their training, by how far they look back.

Nothing is trained: the target has the bundled one's weights and a window (data/world/contexts.py),
so that it reads long texts, and the heads of `table.runs` are its own. A row is a head with a
window, which may be set when decoding; a column is a length of the context, the answer included.
All lengths end with the same requests, and all rows take turns on them, as chains.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdraft.data.world.contexts import NEW_TOKENS, context_prompts, write_windowed
from specdraft.eval.measure.environment import environment
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.methods.registry import load_trained, problems
from specdraft.eval.methods.trained import Trained
from specdraft.eval.papers.contenders import Contender, asked, measured
from specdraft.eval.papers.table import Found, Plan, Row, Table
from specdraft.models.target import Target
from specdraft.recipes.fields import Count, Tokens
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

SEED = 1  # of the requests


@dataclass(frozen=True, kw_only=True)
class ContextTable(Table):
    """Heads and windows as rows, lengths as columns."""

    runs: tuple[str, ...] = ("runs/tiny", "runs/tiny_eagle")
    windows: tuple[Tokens | None, ...] = (None, 64)
    lengths: tuple[Tokens, ...] = (128, 256, 512, 1024, 4096)
    per_kind: Count = 2  # requests

    def find(self, plan: Plan, seeds: Sequence[int]) -> Found:
        """Write target and prompts below the runs' folder, and measure."""
        folder, cells, runs = plan.runs / "contexts", {}, []
        write_windowed(max(self.lengths), folder / "target")
        target = Target.load(str(folder / "target"))
        self.write_prompts(target, folder)
        for length in self.lengths:
            rows = [*self.contenders(plan, target, folder, length)]
            plain = Contender(REFERENCE, REFERENCE, rows[0].recipe, Trained())
            prompts = asked(rows[0].recipe, target)
            _, *made = measured([plain, *rows], target, prompts)
            runs += [run | {"context": length} for run in made]
        (figure,) = self.columns.values()
        for run in runs:
            own = cells.setdefault(run["row"], Row({}, []))
            own.figures[str(run["context"])] = {"mean": run[figure]}
            own.runs.append(run)
        return Found(cells, environment(target), runs)

    def write_prompts(self, target: Target, folder: Path) -> None:
        """Write the requests of every length, one JSON object a line."""
        talks = context_prompts(target.tokenizer, SEED, self.per_kind, self.lengths)
        for length, some in talks.items():
            rows = ({"category": kind, "messages": messages[:-1]} for kind, messages in some)
            lines = (json.dumps({"id": str(n)} | row) + "\n" for n, row in enumerate(rows))
            (folder / f"{length}.jsonl").write_text("".join(lines), encoding="utf-8")

    def contenders(
        self, plan: Plan, target: Target, folder: Path, length: int
    ) -> Iterator[Contender]:
        """Every head with every window, on the prompts of a length."""
        for run in self.runs:
            for window in self.windows:
                recipe = self.of_run(plan, run, target, folder / f"{length}.jsonl", window)
                method = f"{recipe.head.kind}_chain"
                seen = "sees all" if window is None else f"sees {window}"
                trained = load_trained(recipe, target, [method])
                yield Contender(f"{recipe.head.kind}, {seen}", method, recipe, trained)

    def of_run(
        self, plan: Plan, run: str, target: Target, prompts: Path, window: int | None
    ) -> Recipe:
        """A run's recipe for another target and other prompts."""
        given = [
            *(*self.overrides, *plan.overrides),
            *(f"target.model={target.name}", f"eval.prompts={prompts}", "eval.limit=1000"),
            *(f"eval.max_new_tokens={NEW_TOKENS}", f"head.window={window or 'null'}"),
        ]
        return load_recipe(run, given, check=problems)
