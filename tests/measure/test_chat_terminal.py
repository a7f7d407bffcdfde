"""Chatting with a target: history, commands, context, a pipe, and a real terminal."""

import io
import os
import re
import sys
import time
from contextlib import suppress

import pytest
from commands import run_here, start
from rich.console import Console

from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request, Step, Update
from specdraft.eval.generation.chat import CONTEXT, Chat
from specdraft.eval.generation.live import Answer, show
from specdraft.models.falcon import FalconHead
from specdraft.models.shapes import TargetShape, head_config
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, RecipeError
from specdraft.recipes.load import load_recipe

SMALL = ["eval.max_new_tokens=16", "train.threads=1", "output.dir=nowhere"]
FIRST, SECOND = "Tell me about a fox.", "And where does it live?"


@pytest.fixture(scope="module")
def tiny():
    return Target.load("tiny")


@pytest.fixture
def talk(tiny):
    return Chat(load_recipe("recipes/tiny.yaml", SMALL), tiny, "prompt_lookup")


def plain(tiny, *said: str, length: int = 16) -> str:
    """Plain decoding's answer to a conversation of alternating user and assistant messages."""
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=False)]
    ids = tiny.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    (done,) = Decoder(tiny, capacity=600).run([Request(ids, length)])
    return tiny.tokenizer.decode(done.tokens, skip_special_tokens=True)


def answer(talk: Chat, question: str) -> str:
    steps, _ = talk.ask(question)
    tokens = [token for update in steps for token in update.tokens]
    text = talk.target.tokenizer.decode(tokens, skip_special_tokens=True)
    talk.answered(text)
    return text


def test_an_answer_is_conditioned_on_the_whole_conversation(tiny, talk):
    first = answer(talk, FIRST)
    assert first == plain(tiny, FIRST)
    second = answer(talk, SECOND)
    assert second == plain(tiny, FIRST, first.strip(), SECOND) != plain(tiny, SECOND)
    talk.forget()
    assert answer(talk, SECOND) == plain(tiny, SECOND)


@pytest.mark.parametrize("method", ["plain", "generate", "prompt_lookup:padded"])
def test_the_method_can_be_changed_within_a_conversation(tiny, talk, method):
    first = answer(talk, FIRST)
    talk.use(method)
    assert answer(talk, SECOND) == plain(tiny, FIRST, first.strip(), SECOND)


def test_a_conversation_longer_than_its_context_drops_its_oldest_messages(tiny):
    recipe = load_recipe("recipes/tiny.yaml", SMALL)
    talk = Chat(recipe, tiny, "prompt_lookup", context=70)
    said, lost = [], 0
    for number in range(4):
        question = f"Tell me about fox {number}."
        steps, forgotten = talk.ask(question)
        tokens = [token for update in steps for token in update.tokens]
        lost += forgotten
        said.append(question)
        text = tiny.tokenizer.decode(tokens, skip_special_tokens=True)
        assert text == plain(tiny, *said[2 * lost :])
        talk.answered(text)
        said.append(text.strip())
    assert 0 < lost < 4
    before = list(talk.messages)
    with pytest.raises(
        DataError, match=r"the question has \d+ tokens; 54 fit into a context of 70"
    ):
        talk.ask("fox " * 60)
    assert talk.messages == before


def test_dropped_messages_are_whole_exchanges(tiny):
    """Otherwise a conversation could begin with an answer."""
    talk = Chat(load_recipe("recipes/tiny.yaml", SMALL), tiny, "plain", context=400)
    said = [
        {"role": role, "content": f"{role} " * words}
        for words in (2, 9, 5)
        for role in ("user", "assistant")
    ]
    found = set()
    for talk.room in range(40, 200):
        talk.messages = said
        _, forgotten = talk.ask("And you?")
        assert talk.messages == [*said[2 * forgotten :], {"role": "user", "content": "And you?"}]
        found.add(forgotten)
    assert found == {0, 1, 2, 3}


def test_a_context_too_small_for_an_answer_or_too_large_for_the_target_is_refused(tiny):
    recipe = load_recipe("recipes/tiny.yaml", SMALL)
    for context in (16, 10**6):
        with pytest.raises(RecipeError, match=f"context of {context} .* at most 896"):
            Chat(recipe, tiny, "plain", context)


@pytest.mark.parametrize(("positions", "left"), [(3, None), (128, None), (-1, CONTEXT)])
def test_too_few_positions_are_refused_and_minus_one_means_no_limit(positions, left, monkeypatch):
    target = Target.load("tiny")
    monkeypatch.setattr(target.config, "max_position_embeddings", positions)
    recipe = load_recipe("recipes/tiny.yaml", SMALL)
    if left is not None:
        assert Chat(recipe, target, "plain").context == left
        return
    with pytest.raises(RecipeError, match=f"tiny: it has {positions} positions.*128 for drafts"):
        Chat(recipe, target, "plain")


def test_a_chats_context_ends_before_longrope_would_change_frequencies(monkeypatch):
    target = Target.load("tiny")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 512}
    monkeypatch.setattr(target.config, "rope_parameters", rope)
    assert Chat(load_recipe("recipes/tiny.yaml", SMALL), target, "plain").context == 512 - 128


def test_stopping_before_the_first_token_drops_the_question(talk):
    answer(talk, FIRST)
    before = list(talk.messages)
    talk.ask(SECOND)
    talk.answered("")
    assert talk.messages == before


def piped(monkeypatch, *said: str, options: tuple[str, ...] = ()) -> list[str]:
    """The lines printed by a chat that reads its questions from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said)))
    command = ["eval/generate.py", "recipes/tiny.yaml", "--method", "prompt_lookup"]
    done = run_here(*command, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pipe_is_answered_line_by_line(tiny, monkeypatch):
    greeting, *lines = piped(monkeypatch, FIRST, "", "/new", SECOND, "/quit", "never read")
    assert greeting == "tiny, prompt_lookup. /new, /method [NAME], /quit"
    answers = [line for line in lines if not line.endswith("tokens/s")]
    assert len(lines) - len(answers) == 2
    expected = f"{plain(tiny, FIRST)}\na new conversation\n{plain(tiny, SECOND)}"
    assert "\n".join(answers) == expected
    assert "\x1b" not in "".join(lines)


def test_mistakes_are_reported_and_the_chat_goes_on(tiny, monkeypatch):
    said = ("/method nothing", "/method falcon_tree", "/methods", "fox " * 60, "/method plain")
    lines = piped(monkeypatch, *said, FIRST, options=("--context", "70"))
    text = "\n".join(lines)
    able = "plain, generate, hf_prompt_lookup, prompt_lookup"
    assert lines[1] == f"unknown method 'nothing'; this run can do {able}"
    assert "no trained head at nowhere" in text
    assert "/methods: unknown; there are /new, /method [NAME], /quit" in text
    assert "54 fit into a context of 70" in text
    assert plain(tiny, FIRST) in text
    assert lines[-1].split(", ")[0].endswith("1.00 a step")


def test_the_method_command_alone_lists_the_methods_of_this_run(tiny, monkeypatch, tmp_path):
    blocks = ("head.block_size=2", "eval.tree=tiny_k2")
    shape = TargetShape.of(tiny.config)
    config = head_config(load_recipe("recipes/tiny.yaml", blocks), shape, identity=tiny.identity())
    FalconHead(config).save_pretrained(tmp_path / "head")
    for folder, more in (
        ("nowhere", ""),
        (str(tmp_path), ", falcon_chain, falcon_tree, falcon_dynamic"),
    ):
        *_, told = piped(monkeypatch, "/method", options=(f"output.dir={folder}", *blocks))
        able = f"plain, generate, hf_prompt_lookup, prompt_lookup{more}"
        assert told == f"decoding by prompt_lookup; this run can do {able}"


def test_a_pasted_text_of_several_lines_is_one_question():
    terminal = Terminal("eval.methods=[prompt_lookup]")
    assert "\x1b[?2004h" in terminal.until("> ")  # turns on bracketed paste
    terminal.type("\x1b[200~Tell me about\na fox.\x1b[201~\n")
    terminal.until("tokens/s")
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0
    with suppress(BlockingIOError):
        terminal.seen += os.read(terminal.keyboard, 1 << 16).decode(errors="replace")
    assert "tokens in" not in terminal.seen.partition("> ")[2]


def test_a_dumb_terminal_gets_no_escape_codes():
    terminal = Terminal("eval.methods=[prompt_lookup]", term="dumb")
    assert "\x1b" not in terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0


def test_an_invalid_character_is_reported_with_its_place_in_the_question(talk):
    answer(talk, FIRST)
    with pytest.raises(DataError, match=r"the question: \\udce9 at character 3 "):
        talk.ask("caf\udce9")


def test_every_prompt_on_the_command_line_is_answered():
    said = [word for prompt in ("Hi", "And you?") for word in ("--prompt", prompt)]
    done = run_here("eval/generate.py", "recipes/tiny.yaml", *said, "--method", "plain", *SMALL[1:])
    assert done.stdout.count(" tokens in ") == 2


def test_an_unknown_method_is_refused_with_the_known_ones():
    done = run_here("eval/generate.py", "recipes/tiny.yaml", "--method", "medusa", "--prompt", "Hi")
    assert done.returncode == 2
    assert "prompt_lookup" in done.stderr


def test_a_base_model_continues_the_plain_text_of_the_conversation(tiny):
    base = Target(tiny.model, Target.load("tiny").tokenizer, "base")
    base.tokenizer.chat_template = None
    talk = Chat(load_recipe("recipes/tiny.yaml", SMALL), base, "prompt_lookup")
    first = answer(talk, "Once upon a time")
    second = answer(talk, "The fox")
    ids = base.tokenizer(f"Once upon a time\n\n{first.strip()}\n\nThe fox")["input_ids"]
    (done,) = Decoder(base, capacity=200).run([Request(ids, 16)])
    assert second == base.tokenizer.decode(done.tokens, skip_special_tokens=True)


def test_an_answer_shown_line_by_line_on_a_terminal_loses_and_repeats_nothing(tiny):
    """Several widths put spaces, line breaks and parts of characters at line ends."""
    text = "The café  is here: one two three.\n\nA longwordthatfillsthelineandmore é end "
    tokens = tiny.tokenizer(text)["input_ids"]
    for width in (7, 12, 40):
        for size in (1, 3):
            updates = [
                Update(0, part, [Step(len(part), 2, 2, len(part) - 1)])
                for start in range(0, len(tokens), size)
                for part in [tokens[start : start + size]]
            ]
            console = Console(
                width=width, force_terminal=True, record=True, file=io.StringIO(), height=30
            )
            grown = Answer(tiny.tokenizer)
            show(grown, updates, console)
            assert grown.text == tiny.tokenizer.decode(tokens, skip_special_tokens=True)
            whole = Console(width=width, file=io.StringIO())
            whole.print(grown.text.rstrip(" "))
            assert printed(console) == whole.file.getvalue().rstrip().splitlines()


def printed(console: Console) -> list[str]:
    """The lines that stay on a terminal; live lines are erased before they are drawn again."""
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", console.file.getvalue()):
        if part == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part == "\x1b[1A":
            row -= 1
        elif part != "\r" and not part.startswith("\x1b"):
            rows[row] += part
    return "\n".join(rows).rstrip().splitlines()


class Terminal:
    """A chat in its own pseudo-terminal: what a user types and sees."""

    def __init__(self, *options: str, term: str = "xterm"):
        self.keyboard, theirs = os.openpty()
        command = ["eval/generate.py", "recipes/tiny.yaml", *options, *SMALL[1:]]
        env = {"TERM": term, "NO_COLOR": ""}
        self.process = start(*command, terminal=os.ttyname(theirs), **env)
        os.set_blocking(self.keyboard, False)
        self.seen = ""

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def until(self, expected: str) -> str:
        """Wait for a text; return the output up to it since the last call."""
        deadline = time.monotonic() + 300
        while expected not in self.seen:
            assert self.process.poll() is None, self.seen
            assert time.monotonic() < deadline, self.seen
            with suppress(BlockingIOError):
                self.seen += os.read(self.keyboard, 1 << 16).decode(errors="replace")
            time.sleep(0.01)
        before, _, self.seen = self.seen.partition(expected)
        return before + expected


def test_a_terminal_shows_colours_and_ctrl_c_stops_only_the_answer():
    # With eval.spread, no end token ends the answer before Ctrl-C does.
    terminal = Terminal("eval.methods=[prompt_lookup]", "eval.max_new_tokens=600", "eval.spread=2")
    terminal.until("> ")
    terminal.type("Tell me a story about a fox.\n")
    terminal.until("a step")  # the live figures
    terminal.until("\x1b[1;32m")  # an accepted draft
    terminal.type("\x03")
    terminal.until("(stopped)")
    (count,) = re.findall(r"(\d+) tokens in", terminal.until("tokens/s"))
    assert 0 < int(count) < 600
    terminal.until("> ")
    terminal.type("/new\n")
    terminal.until("> ")
    terminal.type("\x03")
    terminal.until("Ctrl-D or /quit ends the chat")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
