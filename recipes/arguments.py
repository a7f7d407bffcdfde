"""The command line that every script with a recipe shares: the recipe, then what it overrides."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.terminal import visible


class Parser(argparse.ArgumentParser):
    """argparse's parser, but that what it refuses is printed so that no terminal obeys it."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the process; the message goes to stderr."""
        super().exit(status, message and visible(message))


def recipe_parser(description: str, example: str = "tiny", epilog: str | None = None) -> Parser:
    """A parser for RECIPE [section.key=value ..]; parse with `parse_intermixed_args`.

    description: a script's docstring, of which the first line is shown; epilog: shown as it is.
    """
    columns = shutil.get_terminal_size().columns - 2  # as argparse wraps all else
    parser = Parser(
        description=textwrap.fill(description.splitlines()[0], columns),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "recipe",
        help=f"a YAML file, a bundled recipe's name, e.g. {example}, the folder of a run or of a "
        "drafter, or a drafter's Hub id",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="overrides a setting"
    )
    return parser


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a whole number within bounds, as argparse takes one."""

    def number(text: str) -> int:
        if not (re.fullmatch(r"-?[0-9]{1,19}", text) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(
                f"{text:.40} is not allowed; give a whole number from {least} to {most}"
            )
        return int(text)

    return number


def comma_separated(option: str, text: str) -> list[str]:
    """Parse an option's a,b,c, each once. RecipeError where there is nothing beside a comma."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise RecipeError(f"{option} {text:.100}: give values with commas between them")
    return [*dict.fromkeys(parts)]


def whole_numbers(option: str, text: str, least: int = 0, most: int = 2**31 - 1) -> list[int]:
    """Parse an option's 0,1,2. RecipeError for anything else, or for numbers out of bounds."""
    parts = comma_separated(option, text)
    if not all(n.isdecimal() and len(n) < 20 and least <= int(n) <= most for n in parts):
        example = ",".join(str(least + n) for n in range(3))
        raise RecipeError(
            f"{option} {text:.100}: give whole numbers of at least {least} and at most {most}, "
            f"e.g. {example}"
        )
    return [int(part) for part in parts]


def check_writable(out: Path, *endings: str) -> None:
    """Raise RecipeError or DataError where the file of --out, whose name has one of these endings,
    cannot be written: now, and not behind all that it is to hold."""
    if out.suffix not in endings:
        raise RecipeError(f"--out {out}: give the name of a file that ends in {endings[0]}")
    probe = out.with_name(f".{out.name}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DataError(
            f"{out} cannot be written ({error.strerror}); give another --out or output.dir"
        ) from error
