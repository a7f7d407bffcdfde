"""One command for all of it: `specdraft train tiny`, `specdraft bench runs/tiny`, ..

A recipe is named by its file, a bundled one by its name; the folder of a run or of a drafter, and a
drafter's Hub id, stand for the recipe that made it.

Each command is a script of the repository under another name, and takes what that script takes.
Over several processes the scripts themselves are launched:
`accelerate launch -m specdraft.train.falcon RECIPE`.
"""

from specdraft.recipes.entry import entry

import sys
from importlib import import_module
from importlib.metadata import version

from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import nearest
from specdraft.recipes.terminal import tell

TRAINERS = "train.kinds"  # finds the scripts of `train`
COMMANDS = {
    "train": ("", "train a recipe's drafter, or another (--kind KIND), and measure it"),
    "cache": ("data.cache", "only make the data: tokens, and the target's features"),
    "bench": ("eval.bench", "measure methods side by side"),
    "curve": ("train.curve", "measure how acceptance grows with the training data"),
    "compare": ("eval.compare", "compare trained drafters of one target"),
    "table": ("eval.table", "print a report as one table to paste into a paper"),
    "chat": ("eval.generate", "talk to the target; accepted guesses in green"),
    "doctor": ("eval.doctor", "check caches, drafter and decoding"),
    "costs": ("eval.costs", "measure what a node, a pass and a row cost on this machine"),
    "fit": ("eval.fit", "find a drafter's fastest tree or settings on this machine"),
    "export": ("eval.export", "write a head in a serving engine's layout"),
    "parity": ("eval.parity", "check that a serving engine drafts as we do"),
    "push": ("models.push", "push a drafter to the Hub, with a card"),
    "paper": ("eval.paper", "reproduce the papers' tables"),
}


def main() -> None:
    """Import what the command needs, which a signal still ends in a line, and run it."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        import_module(f"specdraft.{COMMANDS[name][0] or TRAINERS}")
    entry(command)()


def command() -> None:
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
        modules = [COMMANDS[name][0]]
        if name == "train":
            kinds = import_module(f"specdraft.{TRAINERS}")
            arguments = kinds.with_kind(arguments)
            modules = kinds.trainers(arguments)
        for module in modules:
            sys.argv = [f"specdraft {name}", *arguments]
            import_module(f"specdraft.{module}").main()


def usage() -> str:
    """What there is, a line each."""
    width = max(map(len, COMMANDS))
    rows = (f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items())
    head = "usage: specdraft COMMAND RECIPE [section.key=value ..]"
    return "\n".join([head, "", *rows, "", "Options of a command: specdraft COMMAND --help"])


if __name__ == "__main__":
    main()
