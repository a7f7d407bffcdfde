"""Check a recipe's caches and drafter: one line per check, with what to do where it fails.

    python eval/doctor.py recipes/tiny.yaml [section.key=value ..] [--prompts 10] [--samples 4]
        [--preview 1]

Nothing is built, trained or changed. Exit code 1 if a line fails.
"""

from specdraft.recipes.entry import entry

import sys

from specdraft.data.prompts import load_prompts
from specdraft.data.template import LEGEND, preview
from specdraft.eval.checkup.caches import Caches, check_caches
from specdraft.eval.checkup.drafters import check_drafters, check_methods
from specdraft.eval.checkup.finding import FAIL, print_findings
from specdraft.eval.checkup.served import check_served
from specdraft.eval.methods.registry import problems
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import Screen


@entry
def main() -> None:
    """Parse, load recipe and target, examine, print."""
    parser = recipe_parser(__doc__)
    parser.add_argument(
        "--prompts", type=whole(1, 10**6), default=10, help="prompts to decode (default: 10)"
    )
    parser.add_argument(
        "--samples", type=whole(1, 10**6), default=4, help="cached rows to compute again"
    )
    parser.add_argument(
        "--preview", type=whole(0, 1000), default=1, help="rows to show with their loss mask"
    )
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    recipe = recipe.with_eval(limit=options.prompts)
    target = Target.of_recipe(recipe.target)
    caches, findings = check_caches(recipe, target, options.samples)
    manifest = caches.features.manifest if caches.features else None
    loaded, found = check_drafters(recipe, target, manifest)
    prompts = load_prompts(recipe, target.tokenizer)
    findings += [*found, *check_methods(recipe, target, loaded, prompts)]
    findings += check_served(recipe, loaded)
    console = Screen(soft_wrap=True, highlight=False)
    show_mask(caches, target, options.preview, console)
    print_findings(findings, console)
    sys.exit(1 if any(finding.outcome == FAIL for finding in findings) else 0)


def show_mask(caches: Caches, target: Target, rows: int, console: Screen) -> None:
    """Print the first rows of the token cache, what is learnt in green."""
    count = min(rows, len(caches.tokens or ()))
    if count:
        console.print(LEGEND)
    for index in range(count):
        row = caches.tokens[index]
        console.print(
            preview(target.tokenizer, row["input_ids"].tolist(), row["loss_mask"].tolist())
        )


if __name__ == "__main__":
    main()
