"""Command line options: lists, numbers, and messages about invalid ones."""

import argparse
import ast
from pathlib import Path

import pytest

from specdraft.recipes.arguments import comma_separated, recipe_parser, whole, whole_numbers
from specdraft.recipes.errors import RecipeError
from specdraft.train.cli import COMMANDS

ROOT = Path(__file__).parents[2]


def test_a_list_option_is_split_at_commas():
    assert comma_separated("--prompts", "a, b, a") == ["a", "b"]
    assert whole_numbers("--lengths", "2, 30", least=2, most=30) == [2, 30]


@pytest.mark.parametrize("text", ["", ",", "1,", ",1", "1,,2"])
def test_an_empty_item_in_a_list_is_refused(text: str):
    for parse in (comma_separated, whole_numbers):
        with pytest.raises(RecipeError, match=r"--seeds .*: give values with commas between them"):
            parse("--seeds", text)


@pytest.mark.parametrize("text", ["-1", "x", "0.5", "1e3", "9" * 60, "9" * 5000, "2147483648"])
def test_an_invalid_or_out_of_range_number_is_refused(text: str):
    with pytest.raises(RecipeError, match="whole numbers of at least 0 and at most 2147483647"):
        whole_numbers("--seeds", f"0,{text}")


def test_control_characters_in_refused_arguments_are_shown_not_obeyed(capsys):
    parser = recipe_parser("Do it.")
    parser.add_argument("--count", type=whole(1, 3))
    for words in (["tiny", "--\x1b]52;c;aGk=\a"], ["tiny", "--count", "1\x1b[2J"]):
        with pytest.raises(SystemExit) as end:
            parser.parse_intermixed_args(words)
        assert end.value.code == 2
        said = capsys.readouterr().err
        assert "␛" in said
        assert "\x1b" not in said


def test_only_required_arguments_are_reported_as_missing(capsys):
    with pytest.raises(SystemExit):
        recipe_parser("Do it.").parse_intermixed_args([])
    assert capsys.readouterr().err.strip().endswith("are required: recipe")


def test_only_one_module_makes_argument_parsers():
    rooms = ("data", "eval", "models", "recipes", "train")
    files = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    raw = [path.name for path in files if "ArgumentParser" in path.read_text(encoding="utf-8")]
    assert raw == ["arguments.py"]


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal(monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    modules = {module for module, _ in COMMANDS.values() if module} | {"train.falcon"}
    for module in modules:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        lines = recipe_parser(ast.get_docstring(ast.parse(source))).format_help().splitlines()
        assert max(map(len, lines)) <= columns, module


def test_a_numeric_option_must_be_a_whole_number_within_its_bounds():
    threads = whole(0, 256)
    assert [threads(text) for text in ("0", "7", "256")] == [0, 7, 256]
    for text in ("-1", "257", "5000", "1e2", "x", "", " 1", "१", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError, match="a whole number from 0 to 256"):
            threads(text)
