"""Push the drafter of a finished run to the Hub: weights, config, recipe and model card.

    python models/push.py runs/tiny you/falcon-tiny [hub.private=false ..] [--dry-run]
    python models/push.py runs/mine/medusa you/medusa-mine   # where a run has several kinds

What training does by itself with hub.repo_id=you/falcon-tiny; after a failure, the way to go on.
"""

from specdraft.recipes.entry import entry

from specdraft.eval.methods.trained import CARDS
from specdraft.models.hub import check_login
from specdraft.models.publish import contents, kind_named, manifest, publish
from specdraft.recipes.arguments import Parser
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import tell


@entry
def main() -> None:
    """Parse, load the run's own recipe, push."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run's folder, e.g. runs/tiny, its recipe, or runs/mine/KIND")
    parser.add_argument("repo_id", metavar="owner/name", help="created if missing")
    parser.add_argument("overrides", nargs="*", default=[], metavar="hub.key=value")
    parser.add_argument("--dry-run", action="store_true", help="list what would be pushed")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.run, [f"hub.repo_id={options.repo_id}", *options.overrides])
    card = CARDS[kind_named(options.run, recipe)]
    if options.dry_run:
        tell(manifest(contents(recipe, card), recipe, card))
        return
    check_login(recipe.hub)
    tell(publish(recipe, card))


if __name__ == "__main__":
    main()
