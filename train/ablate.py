"""Ablations of the Falcon head: each variant trained from several seeds at equal steps.

    python train/ablate.py recipes/tiny.yaml --steps 600 --seeds 0,1,2 --jobs 2 --out FILE.json

Every run is train/falcon.py with overrides, so anything here can be repeated by hand; a run whose
report.json exists is not run again. Tree attention is switched at decoding: each run measures its
head as a chain and as a tree (Falcon, Table 4); block sizes are Table 5.
"""

import json
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specdraft.eval.report import write_json
from specdraft.recipes.arguments import recipe_parser, whole_numbers
from specdraft.recipes.errors import RecipeError, entry
from specdraft.train.seeded import Job, over_seeds, told, train_all

GLANCE_OFF = "glance.enabled=false"
LITERAL = "glance.isolated=false"  # a revision reaches later states and blocks, as in the paper
VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "no_csgd": [GLANCE_OFF],
    "csgd_literal": [LITERAL, "glance.start=0.4"],
    "k1": ["head.block_size=1", "eval.tree=tiny_k1", GLANCE_OFF],
    "k3": ["head.block_size=3", "eval.tree=tiny_k3"],
    "k4": ["head.block_size=4", "eval.tree=tiny_k4"],
    "linear": ["head.fusion=linear"],
    "csgd_isolated_0.4": ["glance.start=0.4"],
    "csgd_literal_0.1": [LITERAL, "glance.start=0.1"],
    "csgd_literal_constant": [LITERAL, "glance.start=0.4", "glance.end=0.4"],
    "csgd_literal_supervised": [LITERAL, "glance.start=0.4", "glance.supervise_revealed=true"],
    "rollout1": ["train.rollout=1"],
    "rollout1_no_csgd": ["train.rollout=1", GLANCE_OFF],
    "rollout3": ["train.rollout=3"],
    "no_noise": ["loss.feature_noise=0"],
    "bfloat16": ["data.feature_dtype=bfloat16"],
    "float8": ["data.feature_dtype=float8"],
    "int8": ["data.feature_dtype=int8"],
}
SHOWN = ("falcon_chain", "falcon_tree")


@entry
def main() -> None:
    """Run what is missing, then write and show means and standard errors."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="optimiser steps of every run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="default: all")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"))
    parser.add_argument("--out", type=Path, default=Path("runs/ablation/ablation.json"))
    options = parser.parse_intermixed_args()
    names = options.variants.split(",")
    if unknown := set(names) - VARIANTS.keys():
        raise RecipeError(f"unknown variant {sorted(unknown)[0]!r}; known: {', '.join(VARIANTS)}")
    seeds = whole_numbers("--seeds", options.seeds)
    common = [*options.overrides, f"train.steps={options.steps}"]
    common += ["eval.methods=[plain,falcon_chain,falcon_tree]"]
    jobs = [
        Job(
            "falcon.py",
            options.recipe,
            (*common, *VARIANTS[name], f"train.seed={seed}"),
            options.runs / f"{name}-seed{seed}",
        )
        for name, seed in product(names, seeds)
    ]
    train_all(jobs, options.jobs, "ablation")
    reports = {
        name: [_read(options.runs / f"{name}-seed{seed}") for seed in seeds] for name in names
    }
    table = {
        "recipe": options.recipe,
        "overrides": common,
        "seeds": seeds,
        "environment": reports[names[0]][0]["environment"],
        "variants": {name: _summary(name, reports[name]) for name in names},
    }
    write_json(table, options.out)
    show(table)


def _read(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def _summary(name: str, reports: list[dict]) -> dict:
    """Tokens per step of each seed, their mean and standard error, by decoding method."""
    summary: dict = {"overrides": VARIANTS[name]}
    for method in SHOWN:
        rows = [row for report in reports for row in report["runs"] if row["method"] == method]
        figure = over_seeds([row["tokens_per_step"] for row in rows])
        summary[method] = {
            "tokens_per_step": figure.pop("values"),
            **figure,
            "identical": sum(row["identical"] for row in rows),
            "near_ties": sum(row["near_ties"] for row in rows),
            "outputs": sum(row["outputs"] for row in rows),
        }
    return summary


def show(table: dict) -> None:
    """Print mean tokens per step with their standard errors."""
    grid = Table(title=f"tokens per step, {len(table['seeds'])} seeds")
    for column in ("variant", "chain", "tree", "identical"):
        grid.add_column(column)
    for name, row in table["variants"].items():
        grid.add_row(
            name,
            *(told(row[m]) for m in SHOWN),
            f"{row[SHOWN[1]]['identical']}/{row[SHOWN[1]]['outputs']}",
        )
    Console().print(grid)


if __name__ == "__main__":
    main()
