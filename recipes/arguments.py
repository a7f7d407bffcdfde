"""The command line that every script with a recipe shares: the recipe, then what it overrides."""

import argparse

from specdraft.recipes.errors import RecipeError


def recipe_parser(description: str, example: str = "tiny") -> argparse.ArgumentParser:
    """A parser for RECIPE [section.key=value ..]; parse with `parse_intermixed_args`.

    description: a script's docstring, of which the first line is shown.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("recipe", help=f"a YAML file, e.g. recipes/{example}.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser


def whole_numbers(option: str, text: str, least: int = 0) -> list[int]:
    """Parse an option's 0,1,2. RecipeError for anything else, or for numbers below `least`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        example = ",".join(str(least + n) for n in range(3))
        raise RecipeError(
            f"{option} {text}: give whole numbers of at least {least}, e.g. {example}"
        )
    return [int(part) for part in parts]
