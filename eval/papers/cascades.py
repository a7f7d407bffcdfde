"""Compare a cascade with what it is made of, all tuned: CS Drafting's Table 2 for any target.

    python eval/papers/cascades.py recipes/tiny_cascades.yaml [section.key=value ..] [--by swi]
        [--candidates 16] [--prompts 16] [--out FILE.json]

One line per row: plain decoding, SD with each student of `cascade.students`, Max-Gram (MaG) alone,
each student above Max-Gram, all students above Max-Gram. Each is tuned on prompts that are not
measured, by wall-clock or by SWI (eval/measure/tuning.py), then all take turns on the
measured ones. Two figures per category: SWI with measured costs, and wall-clock speedup over plain
decoding.

The last line is the best cascade with a student over the best SD, category by category.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specdraft.data.prompts import load_prompts, tuning_prompts
from specdraft.eval.drafters.registry import load_trained, problems
from specdraft.eval.drafters.trained import Trained
from specdraft.eval.measure.environment import cpu_threads, environment
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.report import write_json
from specdraft.eval.measure.table import identical_outputs
from specdraft.eval.measure.tuning import overrides, parse_tuning, recipe_part
from specdraft.eval.papers.contenders import contenders, measured, tuned
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import RecipeError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

ALL = "all"  # categories together
FIGURES = {"swi": "swi_measured", "wall": "speedup"}
WIDTH = 200  # enough for many categories: a figure that is cut off is none
GAIN, CATEGORIES = 1.1, 2  # what is claimed: so much in so many categories, and never a loss


@entry
def main() -> None:
    """Parse, load, tune and measure, write and show."""
    parser = recipe_parser(__doc__, "tiny_cascades")
    parser.add_argument("--out", type=Path, help="default: cascades.json of output.dir")
    options = parse_tuning(parser, candidates=16)
    chosen = [*options.overrides, "eval.methods=[plain, maxgram, cascade]"]
    recipe = load_recipe(options.recipe, chosen, check=problems)
    if recipe.eval.batch_size > 1:
        raise RecipeError(
            f"eval.batch_size = {recipe.eval.batch_size}: a batch mixes categories; set it to 1"
        )
    target = Target.of_recipe(recipe.target)
    trained = load_trained(recipe, target)
    out = options.out or Path(recipe.output.dir) / "cascades.json"
    report = compare(recipe, target, trained, options.candidates, options.prompts, options.by)
    write_json(report, out)
    show(report, trained)
    print(f"wrote {out}")  # noqa: T201


def compare(
    recipe: Recipe, target: Target, trained: Trained, candidates: int, count: int, by: str
) -> dict:
    """Tune every row on `count` prompts, measure all on the recipe's; return the report."""
    prompts = load_prompts(recipe, target.tokenizer)
    unseen = tuning_prompts(recipe, target.tokenizer, count)
    rows = []
    for row in contenders(recipe, trained):
        rows.append(tuned(row, target, unseen, candidates, by))
        chosen = " ".join(overrides(recipe_part(rows[-1].recipe, rows[-1].setting)))
        if chosen:
            Console(soft_wrap=True).print(f"{row.name}: {by} {rows[-1].score:.3f}, {chosen}")
    with cpu_threads(recipe.eval.threads):
        prompts = expand_turns(recipe, target, prompts)
        where = environment(target)
    figures = measured(rows, target, prompts)
    gains = gains_of(figures)
    return {
        "recipe": recipe.to_dict(),
        "environment": where,
        "tuning": {"by": by, "candidates": candidates, "prompts": [p.id for p in unseen]},
        "prompts": [p.id for p in prompts],
        "rows": figures,
        "gains": gains,
        "claim": {measure: claim_of(gains, measure) for measure in FIGURES},
    }


def gains_of(rows: Sequence[dict]) -> list[dict]:
    """The best cascade over the best SD, by SWI and by wall-clock, of every category and of all."""
    categories = [category["category"] for category in rows[0]["categories"]]
    return [
        {"category": category} | {measure: _gain(rows, category, measure) for measure in FIGURES}
        for category in [*categories, ALL]
    ]


def _gain(rows: Sequence[dict], category: str, measure: str) -> dict:
    best = {}
    for method in ("cascade", "ssd"):
        some = [(figure_of(r, category, measure), r["row"]) for r in rows if r["method"] == method]
        best[method] = max(some)
    ratio = best["cascade"][0] / best["ssd"][0]
    return {"ratio": ratio, "cascade": best["cascade"][1], "sd": best["ssd"][1]}


def figure_of(row: dict, category: str, measure: str) -> float:
    """SWI or speedup of a row in a category, or in all together."""
    parts = {part["category"]: part for part in row["categories"]}
    return (row if category == ALL else parts[category])[FIGURES[measure]]


def claim_of(gains: Sequence[dict], measure: str) -> dict:
    """Where the best cascade gains enough over the best SD, where it loses, and what that says."""
    enough = [g["category"] for g in gains if g[measure]["ratio"] >= GAIN and g["category"] != ALL]
    losses = [g["category"] for g in gains if g[measure]["ratio"] < 1]
    holds = len(enough) >= CATEGORIES and not losses
    return {"gain": GAIN, "gains": enough, "losses": losses, "holds": holds}


def show(report: dict, trained: Trained) -> None:
    """The table, in the paper's layout, and the claim."""
    rows, gains = report["rows"], report["gains"]
    title = f"{rows[0]['outputs']} prompts of {rows[0]['prompt_set']}, tuned by "
    title += report["tuning"]["by"]
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    for gain in gains:
        table.add_column(f"{gain['category']}\n SWI    x", justify="right", no_wrap=True)
    table.add_column("iden-\ntical", justify="right", no_wrap=True)
    for row in rows:
        pairs = ([figure_of(row, gain["category"], m) for m in FIGURES] for gain in gains)
        cells = [f"{swi:.2f} {wall:.2f}" for swi, wall in pairs]
        table.add_row(row["row"], *cells, identical_outputs(row))
    ratios = (f"{g['swi']['ratio']:.2f} {g['wall']['ratio']:.2f}" for g in gains)
    table.add_section()
    table.add_row("cascade/SD", *ratios, "")
    console = Console(width=WIDTH, soft_wrap=True)
    console.print(table)
    for number, student in enumerate(trained.cascade, start=1):
        console.print(f"{number}: {student.name}")
    for measure, claim in report["claim"].items():
        told = f"{GAIN:g} or more in {', '.join(claim['gains']) or 'no category'}"
        lost = f"below 1 in {', '.join(claim['losses'])}" if claim["losses"] else "never below 1"
        console.print(f"best cascade / best SD by {measure}: {told}; {lost}")


if __name__ == "__main__":
    main()
