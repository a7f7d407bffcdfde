"""One command for all of it: `specdraft train tiny`, `specdraft bench runs/tiny`, ..

A recipe is named by its file, a bundled one by its name; the folder of a run or of a drafter, and a
drafter's Hub id, stand for the recipe that made it.

Each command is a script of the repository under another name, and takes what that script takes.
Over several processes the scripts themselves are launched:
`accelerate launch -m specdraft.train.falcon RECIPE`.
"""

from specdraft.recipes.entry import entry

import sys
from argparse import ArgumentParser
from importlib import import_module
from importlib.metadata import version

from specdraft.eval.drafters.registry import find, problems
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest
from specdraft.recipes.find import KINDS
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import tell
from specdraft.train.kinds import overrides_of

COMMANDS = {
    "train": ("", "train what a recipe drafts with, or --kind KIND of it, and measure it"),
    "cache": ("data.cache", "the data stage alone: tokens and features of the target"),
    "bench": ("eval.bench", "measure methods beside each other"),
    "curve": ("train.curve", "how much data gives what acceptance"),
    "compare": ("eval.compare", "finished drafters of one target beside each other"),
    "table": ("eval.table", "a report as one table to paste into a paper"),
    "chat": ("eval.generate", "talk to the target; accepted guesses in green"),
    "doctor": ("eval.doctor", "are caches, drafter and decoding sound?"),
    "costs": ("eval.costs", "what a node, a pass and a row cost on this machine"),
    "fit": ("eval.fit", "the draft that is the fastest for a drafter here"),
    "export": ("eval.export", "write a head as a serving engine reads it"),
    "parity": ("eval.parity", "does a serving engine draft as we do?"),
    "push": ("models.push", "push a drafter to the Hub, with a card"),
    "paper": ("eval.paper", "the tables of the papers"),
}


@entry
def main() -> None:
    """Find the script of a command and run it with the other arguments."""
    name, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        tell(usage())
    elif name == "--version":
        tell(version("specdraft"))
    elif name not in COMMANDS:
        guess = nearest(name[:100], COMMANDS)
        raise RecipeError(
            f"specdraft {name:.100}: no such command; nearest is {guess} "
            f"(there are {', '.join(COMMANDS)})"
        )
    else:
        if name == "train":
            arguments = with_kind(arguments)
        for module in trainers(arguments) if name == "train" else [COMMANDS[name][0]]:
            sys.argv = [f"specdraft {name}", *arguments]
            import_module(f"specdraft.{module}").main()


def usage() -> str:
    """What there is, a line each."""
    width = max(map(len, COMMANDS))
    rows = (f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    head = "usage: specdraft COMMAND RECIPE [section.key=value ..]"
    return "\n".join([head, "", *rows, "", "specdraft COMMAND --help says more."])


def with_kind(arguments: list[str]) -> list[str]:
    """The arguments of `train` with what `--kind KIND` stands for behind the recipe. RecipeError
    for a kind that there is not."""
    parser = ArgumentParser(prog="specdraft train", add_help=False, allow_abbrev=False)
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
    """The recipe, and what it is overridden by: what is no option."""
    recipe, *others = [one for one in arguments if not one.startswith("-")] or [""]
    overrides = [one for one in others if "=" in one or one.endswith(".yaml")]
    return [recipe, *overrides] if recipe else []


def trainers(arguments: list[str]) -> list[str]:
    """The scripts that train what a recipe's methods draft with, in their order."""
    given = named(arguments)
    if not given:
        return ["train.falcon"]  # which says what is missing
    recipe = load_recipe(given[0], given[1:], check=problems)
    scripts = [find(name)[0].trainer for name in recipe.eval.methods]
    found = list(dict.fromkeys(script for script in scripts if script))
    if not found:
        raise RecipeError(f"{recipe.name}: none of eval.methods drafts with anything trained")
    return [script.removesuffix(".py").replace("/", ".") for script in found]


if __name__ == "__main__":
    main()
