"""Push the drafter of a finished run to the Hub: weights, config, recipe and model card.

    python models/push.py runs/tiny you/falcon-tiny [hub.private=false ..] [--kind head]

What training does by itself with hub.repo_id=you/falcon-tiny; after a failure, the way to go on.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from specdraft.eval.drafters.trained import CARDS
from specdraft.models.hub import check_login
from specdraft.models.publish import only_kind, publish
from specdraft.recipes.errors import HeadError, entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import OutputSection


@entry
def main() -> None:
    """Parse, load the run's own recipe, push."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run's folder, e.g. runs/tiny")
    parser.add_argument("repo_id", metavar="owner/name", help="made if needed")
    parser.add_argument("overrides", nargs="*", metavar="hub.key=value")
    parser.add_argument("--kind", choices=CARDS, help="where a run has several drafters")
    options = parser.parse_intermixed_args()
    path = options.run / "recipe.yaml"
    if not path.is_file():
        raise HeadError(f"no recipe.yaml in {options.run}; give a run's folder, e.g. runs/tiny")
    recipe = load_recipe(path, [f"hub.repo_id={options.repo_id}", *options.overrides])
    recipe = replace(recipe, output=OutputSection(dir=str(options.run)))
    check_login(recipe.hub)
    print(publish(recipe, CARDS[options.kind or only_kind(options.run, CARDS)]))  # noqa: T201


if __name__ == "__main__":
    main()
