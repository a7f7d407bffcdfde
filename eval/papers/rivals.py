"""Falcon beside EAGLE-1 and Medusa: equal data, steps and verified nodes, several seeds, one run.

    python eval/papers/rivals.py recipes/tiny.yaml [section.key=value ..]
        [--against recipes/tiny_eagle.yaml recipes/tiny_medusa.yaml]
        [--steps 800] [--seeds 0,1,2] [--jobs 2] [--runs runs/rivals] [--out FILE.json]

Every head is trained by its own script from every seed; then all of them take turns on the same
prompts, with plain decoding. Two rows more show the method's parts: the Falcon head as a chain,
without tree attention, and one that was trained without CSGD (with it, where the recipe has none).

The last two columns are Falcon's tree over a row, mean and standard error over seeds. The paper has
(Falcon, section 5), by wall-clock: 1.10 over EAGLE, 1.50 over Medusa, 1.10 with CSGD, 1.12 with the
tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specdraft.data.prompts import load_prompts
from specdraft.eval.drafters.registry import METHODS, load_trained, problems
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.report import write_json
from specdraft.eval.measure.table import identical_outputs
from specdraft.eval.papers.contenders import Contender, measured
from specdraft.eval.papers.seeded import Job, over_seeds, run_all, told
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole_numbers
from specdraft.recipes.errors import RecipeError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

TREE, CHAIN = "falcon_tree", "falcon_chain"
AGAINST = ("recipes/tiny_eagle.yaml", "recipes/tiny_medusa.yaml")
FIGURES = ("tokens_per_step", "speedup")


@dataclass(frozen=True)
class Rival:
    """A row: a head that is trained from every seed, and how it decodes."""

    name: str
    path: str  # of its recipe
    overrides: tuple[str, ...]
    method: str

    @property
    def recipe(self) -> Recipe:
        methods = f"eval.methods=[{REFERENCE},{self.method}]"
        return load_recipe(self.path, [*self.overrides, methods], check=problems)

    @property
    def script(self) -> str:
        return METHODS[self.method].trainer

    def job(self, runs: Path, seed: int) -> Job:
        """Its run from a seed. A chain is decoded with the head of the tree's run."""
        name = self.name.removesuffix(", chain").replace(" ", "_")
        trained = TREE if self.method == CHAIN else self.method
        overrides = (*self.overrides, f"train.seed={seed}", f"eval.methods=[plain,{trained}]")
        return Job(self.script, self.path, overrides, runs / f"{name}-seed{seed}")


@entry
def main() -> None:
    """Train what is missing, measure all heads in turns, write and show."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--against", nargs="*", default=AGAINST, help="recipes of other heads")
    parser.add_argument("--steps", type=int, default=800, help="optimiser steps of every run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/rivals"))
    parser.add_argument("--out", type=Path, help="default: rivals.json of --runs")
    options = parser.parse_intermixed_args()
    seeds = whole_numbers("--seeds", options.seeds)
    common = (*options.overrides, f"train.steps={options.steps}")
    rivals = line_up(options.recipe, options.against, common)
    jobs = {job.folder: job for rival in rivals for job in jobs_of(rival, options.runs, seeds)}
    run_all([*jobs.values()], options.jobs, "training")
    report = compare(rivals, options.runs, seeds)
    out = options.out or options.runs / "rivals.json"
    write_json(report, out)
    show(report)
    print(f"wrote {out}")  # noqa: T201


def jobs_of(rival: Rival, runs: Path, seeds: Sequence[int]) -> list[Job]:
    """Its runs, one per seed."""
    return [rival.job(runs, seed) for seed in seeds]


def line_up(path: str, against: Sequence[str], common: tuple[str, ...]) -> list[Rival]:
    """Falcon's rows, then the others'; RecipeError where the comparison would not be fair."""
    ours = Rival("falcon", path, common, TREE)
    glance = "glance.enabled=" + ("false" if ours.recipe.glance.enabled else "true")
    other = "falcon without CSGD" if ours.recipe.glance.enabled else "falcon with CSGD"
    rivals = [
        ours,
        Rival("falcon, chain", path, common, CHAIN),
        Rival(other, path, (*common, glance), TREE),
    ]
    for rival_path in against:
        recipe = load_recipe(rival_path, list(common), check=problems)
        method = "medusa_tree" if recipe.medusa.given else "eagle_tree"
        rivals.append(Rival(method.removesuffix("_tree"), rival_path, common, method))
        _check_fair(ours.recipe, rivals[-1].recipe)
    return rivals


def _check_fair(ours: Recipe, theirs: Recipe) -> None:
    for key in ("target.model", "data", "train.steps", "train.batch_size", "train.rollout"):
        section, _, name = key.partition(".")
        mine, other = (getattr(recipe, section) for recipe in (ours, theirs))
        if name:
            mine, other = getattr(mine, name), getattr(other, name)
        if mine != other and not (theirs.medusa.given and name == "rollout"):
            raise RecipeError(
                f"{key} of {ours.name} and {theirs.name} differ ({mine} and {other}): "
                "set it for both, on the command line"
            )


def compare(rivals: Sequence[Rival], runs: Path, seeds: Sequence[int]) -> dict:
    """Measure every head of every seed in turns with plain decoding; return the report."""
    recipe = rivals[0].recipe
    target = Target.of_recipe(recipe.target)
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, load_prompts(recipe, target.tokenizer))
        where = environment(target)
    rows = [Contender(REFERENCE, REFERENCE, recipe, Trained())]
    for rival in rivals:
        for seed, job in zip(seeds, jobs_of(rival, runs, seeds), strict=True):
            own = rival.recipe
            own = replace(own, output=replace(own.output, dir=str(job.folder)))
            trained = load_trained(own, target)
            rows.append(Contender(f"{rival.name}, seed {seed}", rival.method, own, trained))
    figures = {row["row"]: row for row in measured(rows, target, prompts)}
    by_name = {
        rival.name: [figures[f"{rival.name}, seed {seed}"] for seed in seeds] for rival in rivals
    }
    ours = by_name[rivals[0].name]
    return {
        "recipe": recipe.to_dict(),
        "environment": where,
        "seeds": list(seeds),
        "prompts": [prompt.id for prompt in prompts],
        "rivals": [
            {"name": name, "method": own[0]["method"], "rows": own} | _summary(own, ours)
            for name, own in by_name.items()
        ],
    }


def _summary(rows: Sequence[dict], ours: Sequence[dict]) -> dict:
    """A rival's figures over seeds, and ours over its, seed by seed."""
    of = {figure: over_seeds([row[figure] for row in rows]) for figure in FIGURES}
    gains = {
        figure: over_seeds([a[figure] / b[figure] for a, b in zip(ours, rows, strict=True)])
        for figure in FIGURES
    }
    return of | {"ours_over_it": gains}


def show(report: dict) -> None:
    """The table: tokens per step and wall-clock of every rival, and Falcon's tree over it."""
    title = f"{len(report['prompts'])} prompts, {len(report['seeds'])} seeds"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    columns = ("tokens/step", "x plain", "nodes", "identical", "ours: tokens/step", "ours: time")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for rival in report["rivals"]:
        rows, gains = rival["rows"], rival["ours_over_it"]
        same = " ".join(sorted({identical_outputs(row) for row in rows}))
        nodes = max(row["drafted_per_step"] for row in rows)
        figures = (told(rival[figure]) for figure in FIGURES)
        ratios = (told(gains[figure]) for figure in FIGURES)
        table.add_row(rival["name"], *figures, f"{nodes:.1f}", same, *ratios)
    Console(width=140, soft_wrap=True).print(table)


if __name__ == "__main__":
    main()
