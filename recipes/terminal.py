"""The terminal: all that is printed goes through here, and is shown, never obeyed.

Rows, answers, names, errors of servers and libraries are foreign text. An escape sequence in it can
set a terminal's title, write to the clipboard (OSC 52), clear the screen or hide a line.
"""

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

LONGEST = 8000  # characters of a message
# Control characters but newline and tab, and those that turn the direction of what follows.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_PICTURES = 0x2400  # Unicode's pictures of the first 32 control characters


def visible(text: str) -> str:
    """Return a text in which every character that a terminal would obey is one that it shows."""
    return _OBEYED.sub(_picture, text.replace("\r\n", "\n"))


def _picture(match: re.Match) -> str:
    number = ord(match[0])
    return chr(_PICTURES + number) if number < 32 else f"<{number:04X}>"


def tell(text: object) -> None:
    """Print a result: on stdout."""
    try:
        print(visible(str(text)), flush=True)  # noqa: T201
    except BrokenPipeError:
        _go_on_unseen(sys.stdout)


def _go_on_unseen(file: IO[str]) -> None:
    """Send what follows nowhere, for nobody reads it any more (`| head`): a command still does the
    rest of its work, e.g. writes its report."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def say(message: str) -> None:
    """Tell the user a line that is no result: on stderr, if that is still there."""
    with suppress(OSError):  # a terminal that was closed
        print(visible(message[: 2 * LONGEST]), file=sys.stderr)  # noqa: T201


def say_at_once(line: str) -> None:
    """Tell the user a line from a signal's handler, which may have interrupted a print."""
    with suppress(OSError, ValueError):  # stderr is gone, or no file
        os.write(sys.stderr.fileno(), f"\n{line}\n".encode())


class Screen(Console):
    """rich's console: it colours what we say, and nothing that others say."""

    def __init__(self, **options):
        super().__init__(**{"markup": False, "emoji": False, **options})

    def on_broken_pipe(self) -> None:
        """Go on; rich calls this where nobody reads any more, and would exit."""
        _go_on_unseen(self.file)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as rich does, and make visible what is no styling of rich's own."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
