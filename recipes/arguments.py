"""The command line that every script with a recipe shares: the recipe, then what it overrides."""

import argparse


def recipe_parser(description: str, example: str = "tiny") -> argparse.ArgumentParser:
    """A parser for RECIPE [section.key=value ..]; parse with `parse_intermixed_args`.

    description: a script's docstring, of which the first line is shown.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("recipe", help=f"a YAML file, e.g. recipes/{example}.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser
