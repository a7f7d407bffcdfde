"""Talk with a target while a drafter drafts: accepted tokens in green, the target's own plain.

    python eval/generate.py recipes/tiny.yaml [--method falcon_tree] [--prompt "Tell a story."]
        [--context TOKENS] [section.key=value ..]

With --prompt one answer; else a chat: questions from the terminal, or line by line from a pipe.
/new forgets the conversation, /method NAME decodes by another method, /quit or Ctrl-D ends, and
Ctrl-C stops an answer. Uses what was trained in `output.dir`; sampling follows eval.temperature,
top_k, top_p and seed.
"""

import sys
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console

from specdraft.eval.drafters.trained import showcase
from specdraft.eval.generation.chat import Chat
from specdraft.eval.generation.live import Answer, show
from specdraft.eval.measure.report import cpu_threads
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import UserError, entry
from specdraft.recipes.load import load_recipe

COMMANDS = "/new, /method NAME, /quit"


@entry
def main() -> None:
    """Parse, load recipe, target and drafter, and answer."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--prompt", help="what the user says; default: a chat")
    parser.add_argument("--method", help="as eval/bench.py knows them; default: the recipe's best")
    parser.add_argument("--context", type=int, help="tokens of a conversation at most")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides)
    target = Target.of_recipe(recipe.target)
    method = options.method or showcase(recipe.eval.methods)
    talk = Chat(recipe, target, method, options.context)
    console = Console(highlight=False, markup=False, emoji=False)
    with cpu_threads(recipe.eval.threads):
        if options.prompt is not None:
            exchange(talk, options.prompt, console)
        else:
            chat(talk, console)


def chat(talk: Chat, console: Console) -> None:
    """Answer until the user has had enough; a mistake of theirs is told, and forgiven."""
    tell(console, f"{talk.target.name}, {talk.name}. {COMMANDS}", "dim")
    for said in typed(console):
        command, _, argument = said.partition(" ")
        try:
            if command == "/quit":
                return
            if command == "/new":
                talk.forget()
                tell(console, "a new conversation", "dim")
            elif command == "/method":
                talk.use(argument.strip())
                tell(console, f"decoding by {talk.name}", "dim")
            elif said.startswith("/"):
                tell(console, f"{command}: unknown; there are {COMMANDS}", "red")
            elif said:
                exchange(talk, said, console)
        except UserError as error:
            tell(console, str(error), "red")


def typed(console: Console) -> Iterator[str]:
    """What the user says, line by line."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (which makes `input` an editor with a history)
    while True:
        try:
            said = input("> ")
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            tell(console, "\nCtrl-D or /quit ends the chat", "dim")
            continue
        yield said.strip()


def exchange(talk: Chat, question: str, console: Console) -> None:
    """Answer one question; Ctrl-C at a terminal ends the answer, elsewhere everything."""
    steps, forgotten = talk.ask(question)
    if forgotten:
        told = f"the conversation outgrew {talk.context} tokens: its first {forgotten} answers are"
        tell(console, f"{told} forgotten with their questions; /new forgets all", "yellow")
    answer = Answer(talk.target.tokenizer)
    try:
        show(answer, steps, console)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        tell(console, "(stopped)", "dim")
    finally:
        talk.answered(answer.text)
    tell(console, answer.speed(), "cyan")


def tell(console: Console, text: str, style: str) -> None:
    """Print what is no answer, on as many columns as it takes."""
    console.print(text, style=style, soft_wrap=True)


if __name__ == "__main__":
    main()
