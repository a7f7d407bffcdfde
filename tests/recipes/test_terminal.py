"""Foreign text is shown on a terminal, and its control characters are never obeyed."""

from specdraft.recipes.entry import entry

import io
import os
import re
import subprocess
import sys

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdraft.eval.checkup.finding import failed, print_findings
from specdraft.eval.measure.show import ACCEPTED, BONUS, print_sample
from specdraft.recipes.errors import DataError, in_a_line
from specdraft.recipes.terminal import Screen, say, tell, visible

ATTACKS = {
    "the clipboard": "\x1b]52;c;aGFja2Vk\x07",
    "a title": "\x1b]0;mine\x07",
    "a title in one byte": "\x9d0;mine\x9c",
    "a clear screen": "\x1b[2J\x1b[H",
    "a hidden line": "\x1b[1A\x1b[2K",
    "a link": "\x1b]8;;http://there\x1b\\here\x1b]8;;\x1b\\",
    "an overwritten line": "error\rfine ",
    "backspaces": "no\b\byes",
    "a bell": "\a",
    "the direction": "abc\u202ecba\u2066",
    "device control": "\x1bP$q\x1b\\",
    "delete": "\x7f",
}
OBEYED = {character for attack in ATTACKS.values() for character in attack} - {
    character for attack in ATTACKS.values() for character in attack if character.isprintable()
}

every_attack = pytest.mark.parametrize("attack", ATTACKS.values(), ids=[*ATTACKS])


def harmless(printed: str) -> bool:
    return not OBEYED & set(printed)


def test_the_attacks_contain_characters_a_terminal_obeys():
    assert {"\x1b", "\x9d", "\x07", "\r", "\b", "\x7f", "\u202e"} <= OBEYED
    assert not any(map(harmless, ATTACKS.values()))


@every_attack
def test_an_attack_is_shown_as_visible_characters(attack):
    assert harmless(visible(attack))
    assert len(visible(attack)) >= len(attack)


def test_ordinary_text_is_not_changed():
    for text in (
        "two\nlines\tand a tab",
        "naïve 東京 🙂 ‏עברית".replace("\u200f", ""),
        "␛ [bold]",
        "",
    ):
        assert visible(text) == text
    assert visible("windows\r\nlines") == "windows\nlines"


@every_attack
def test_printed_lines_and_errors_are_harmless(attack, capsys, monkeypatch):
    tell(f"wrote {attack}")
    say(f"note: {attack}")

    @entry
    def main():
        raise DataError(f"the server says {attack}")

    with pytest.raises(SystemExit):
        main()
    out, err = capsys.readouterr()
    assert harmless(out.replace("\n", ""))
    assert harmless(err.replace("\n", ""))
    assert harmless(in_a_line(ValueError(f"a name: {attack}")))


def screen() -> Screen:
    options = {"force_terminal": True, "color_system": "standard", "highlight": False}
    return Screen(file=io.StringIO(), width=80, **options)


def colours_alone(console: Screen) -> None:
    """The terminal obeys only colours that we set."""
    written = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    assert harmless(written.replace("\n", "")), written


@every_attack
def test_texts_and_tables_are_harmless(attack):
    console, table = screen(), Table("a", attack)
    table.add_row(attack, Text(attack, "green"))
    console.print(attack, table, Text(attack, "bold red"))
    console.print(f"[link=http://there]{attack}[/link] :warning:", style="cyan")
    written = console.file.getvalue()
    assert "[link=http://there]" in written
    assert ":warning:" in written
    colours_alone(console)


@every_attack
def test_answers_and_the_doctors_lines_are_harmless(attack):
    console = screen()
    pieces = [(attack, ACCEPTED), (attack, BONUS)]
    print_sample({"prompt": attack, "tokens": 2, "steps": 1, "pieces": pieces}, console)
    print_findings([failed("a line", attack, attack)], console)
    colours_alone(console)
    assert "\x1b[1;31m" in console.file.getvalue()


def test_colour_codes_in_foreign_text_are_not_obeyed():
    console = screen()
    console.print("\x1b[31mred\x1b[0m")
    assert console.file.getvalue() == "␛[31mred␛[0m\n"


def test_live_text_is_harmless():
    console = screen()
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text(ATTACKS["the clipboard"]), refresh=True)
    assert "\x1b]52" not in console.file.getvalue()
    assert "␛]52;c;aGFja2Vk" in console.file.getvalue()


def test_long_findings_wrap_with_a_hanging_indent():
    note = "one word after another, " * 6
    console = screen()
    print_findings([failed("a line", note, f"do this: {note}")], console)
    plain = re.sub(r"\x1b\[[\d;]*m", "", console.file.getvalue())
    first, *others, counts = plain.splitlines()
    assert first.startswith("fail    a line  one word")
    assert counts == "0 pass, 1 fail, 0 skipped"
    assert len(others) > 3
    assert all(line.startswith(" " * 16) and len(line) <= 80 for line in others)
    piped = Screen(file=io.StringIO(), width=80, soft_wrap=True)
    print_findings([failed("a line", note, "do this")], piped)
    assert len(piped.file.getvalue().splitlines()) == 3


UNHEARD = """
import sys
from specdraft.recipes.entry import entry
from specdraft.recipes.terminal import Screen, say, tell

@entry
def main():
    for _ in range(3):
        tell("a table")
        Screen().print("a colour")
    say("and the report is written")

main()
"""


def test_a_command_whose_output_is_closed_still_finishes():
    """As in `bench.py .. | head`, where the report is still to be written."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", UNHEARD], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "and the report is written\n")


SPOKEN = """
import sys
from specdraft.recipes.entry import entry
from specdraft.recipes.terminal import tell

@entry
def main():
    tell("\\u03c4 = 2")
    tell(len(sys.stdin.readline()))

main()
"""


def test_a_character_outside_the_terminals_encoding_ends_no_command():
    done = subprocess.run(
        [sys.executable, "-c", SPOKEN],
        input=b"Gr\xfc\xdfe",
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
    )
    assert done.stdout.splitlines() == [rb"\u03c4 = 2", b"5"], done.stderr
