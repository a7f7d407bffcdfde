"""Push the drafter of a finished run to the Hub: weights, config, recipe and model card.

    python models/push.py runs/tiny you/falcon-tiny [hub.private=false ..] [--kind head] [--dry-run]

What training does by itself with hub.repo_id=you/falcon-tiny; after a failure, the way to go on.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from specdraft.eval.drafters.trained import CARDS
from specdraft.models.hub import check_login
from specdraft.models.publish import contents, manifest, only_kind, publish
from specdraft.recipes.errors import HeadError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import OutputSection
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load the run's own recipe, push."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder, e.g. runs/tiny")
    parser.add_argument("repo_id", metavar="owner/name", help="made if needed")
    parser.add_argument("overrides", nargs="*", metavar="hub.key=value")
    parser.add_argument("--kind", choices=CARDS, help="where a run has several drafters")
    parser.add_argument("--dry-run", action="store_true", help="say what would go there and stop")
    options = parser.parse_intermixed_args()
    path = options.run / "recipe.yaml"
    if not path.is_file():
        raise HeadError(f"no recipe.yaml in {options.run}; give a run's folder, e.g. runs/tiny")
    recipe = load_recipe(path, [f"hub.repo_id={options.repo_id}", *options.overrides])
    recipe = replace(recipe, output=OutputSection(dir=str(options.run)))
    card = CARDS[options.kind or only_kind(options.run, CARDS)]
    if options.dry_run:
        tell(manifest(contents(recipe, card), recipe, card))
        return
    check_login(recipe.hub)
    tell(publish(recipe, card))


if __name__ == "__main__":
    main()
