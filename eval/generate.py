"""Talk with a target while a drafter drafts: accepted tokens in green, the target's own plain.

    python eval/generate.py recipes/tiny.yaml [--method falcon_tree] [--prompt "Tell a story."]
        [--context TOKENS] [section.key=value ..]

With --prompt an answer to each; else a chat: questions from the terminal, or line by line from a
pipe. A block that is pasted is one question. /new forgets the conversation, /method NAME decodes by
another method, of which /method lists those that this run can do, /quit or Ctrl-D ends, and Ctrl-C
stops an answer. Uses what was trained in `output.dir`; sampling follows eval.temperature,
top_k, top_p and seed.
"""

from specdraft.recipes.entry import entry

import sys
from collections.abc import Iterator
from contextlib import suppress

from specdraft.eval.generation.chat import Chat
from specdraft.eval.generation.live import Answer, show
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.methods.registry import describe, featured, problems
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.errors import UserError
from specdraft.recipes.interrupt import Terminated
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import Screen

COMMANDS = "/new, /method [NAME], /quit"


@entry
def main() -> None:
    """Parse, load recipe, target and drafter, and answer."""
    parser = recipe_parser(__doc__, epilog=describe())
    what = "what the user says (repeat it for further turns); default: a chat"
    parser.add_argument("--prompt", action="append", help=what)
    parser.add_argument("--method", help="default: the last trained one of eval.methods")
    parser.add_argument("--context", type=whole(2, 10**7), help="most tokens of a conversation")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    target = Target.of_recipe(recipe.target)
    method = options.method or featured(recipe.eval.methods)
    talk = Chat(recipe, target, method, options.context)
    console = Screen(highlight=False, markup=False, emoji=False)
    with cpu_threads(recipe.eval.threads):
        for prompt in options.prompt or ():
            answer(talk, prompt, console)
        if options.prompt is None:
            chat(talk, console)


def chat(talk: Chat, console: Screen) -> None:
    """Answer until the user has had enough; a mistake of theirs is shown, and forgiven."""
    notice(console, f"{talk.target.name}, {talk.name}. {COMMANDS}", "dim")
    for said in questions(console):
        command, _, argument = said.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/new":
                talk.forget()
                notice(console, "a new conversation", "dim")
            elif command == "/method":
                if name := argument.strip():
                    talk.use(name)
                beside = "" if name else f"; this run can do {', '.join(talk.usable())}"
                notice(console, f"decoding by {talk.name}{beside}", "dim")
            elif said.startswith("/"):
                notice(console, f"{command}: unknown; there are {COMMANDS}", "red")
            elif said:
                answer(talk, said, console)
        except UserError as error:
            notice(console, str(error), "red")


def questions(console: Screen) -> Iterator[str]:
    """What the user says, line by line; what is pasted at a terminal, as a whole."""
    if not at_terminal():
        yield from (line.strip() for line in sys.stdin or ())
        return
    with suppress(ImportError):
        import readline  # which makes `input` an editor with a history

        if not console.is_dumb_terminal:  # which would show what marks a paste
            readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            said = input("> ")
        except EOFError:
            console.print()
            return
        except Terminated:
            raise
        except KeyboardInterrupt:
            notice(console, "\nCtrl-D or /quit ends the chat", "dim")
            continue
        yield said.strip()


def at_terminal() -> bool:
    """Whether questions are typed: not from a pipe, nor from a stdin that is closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def answer(talk: Chat, question: str, console: Screen) -> None:
    """Answer one question; Ctrl-C at a terminal ends the answer, elsewhere everything."""
    steps, forgotten = talk.ask(question)
    if forgotten:
        outgrown = f"the conversation outgrew {talk.context} tokens: its first {forgotten} answers"
        notice(
            console, f"{outgrown} are forgotten with their questions; /new forgets all", "yellow"
        )
    growing = Answer(talk.target.tokenizer)
    try:
        show(growing, steps, console)
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated) or not at_terminal():
            raise
        notice(console, "(stopped)", "dim")
    finally:
        talk.answered(growing.text)
    notice(console, growing.speed(), "cyan")


def notice(console: Screen, text: str, style: str) -> None:
    """Print what is no answer; only a terminal has columns to wrap it at."""
    console.print(text, style=style, soft_wrap=not console.is_terminal)


if __name__ == "__main__":
    main()
