"""Which scripts train what a recipe drafts with, or, by `--kind KIND`, another kind of drafter."""

from specdraft.eval.methods.registry import find, problems
from specdraft.models.kinds import overrides_of
from specdraft.recipes.arguments import Parser
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.find import KINDS
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import tell


def with_kind(arguments: list[str]) -> list[str]:
    """Return the arguments of `train` with the overrides that `--kind KIND` stands for, which are
    put right behind the recipe. Raises RecipeError for an unknown kind."""
    parser = Parser(prog="specdraft train", add_help=False, allow_abbrev=False)
    parser.add_argument("--kind")
    parsed, rest = parser.parse_known_args(arguments)
    if {"-h", "--help"} & {*rest}:
        tell(f"--kind KIND trains another kind of drafter by the same recipe: {', '.join(KINDS)}\n")
    given = named(rest)
    if parsed.kind is None or not given:
        return rest
    behind = rest.index(given[0]) + 1
    return [*rest[:behind], *overrides_of(parsed.kind, given[0], given[1:]), *rest[behind:]]


def named(arguments: list[str]) -> list[str]:
    """Return the recipe and its overrides: the arguments that are no option, nor its value."""
    parser = Parser(prog="specdraft train", add_help=False)
    parser.add_argument("--processes")  # the one of the scripts' options that has a value
    _, rest = parser.parse_known_args(arguments)
    recipe, *others = [one for one in rest if not one.startswith("-")] or [""]
    overrides = [one for one in others if "=" in one or one.endswith(".yaml")]
    return [recipe, *overrides] if recipe else []


def trainers(arguments: list[str]) -> list[str]:
    """The scripts that train what a recipe's methods draft with, in their order."""
    given = named(arguments)
    if not given:
        return ["train.falcon"]  # which says what is missing
    recipe = load_recipe(given[0], given[1:], check=problems)
    scripts = [find(name).trainer for name in recipe.eval.methods]
    found = list(dict.fromkeys(script for script in scripts if script))
    if not found:
        raise RecipeError(f"{recipe.name}: none of eval.methods drafts with anything trained")
    return [script.removesuffix(".py").replace("/", ".") for script in found]
