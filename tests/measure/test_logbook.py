"""A benchmark resumes where it was interrupted, and a failing method is shown, never dropped."""

import json
import os
import resource
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from commands import run_here, start
from rich.console import Console
from shallow import shallow_tiny

from specdraft.data.prompts import load_prompts
from specdraft.eval.bench import place_of
from specdraft.eval.engine.request import Completion, Step
from specdraft.eval.engine.timing import Timing
from specdraft.eval.measure.categories import macro
from specdraft.eval.measure.logbook import NAME, Logbook
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.report import evaluate, tokens_per_step, write_report
from specdraft.eval.measure.table import print_report
from specdraft.eval.methods.trained import Trained
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.recipes.errors import CacheError, DataError
from specdraft.recipes.load import load_recipe

SMALL = ["eval.limit=6", "eval.max_new_tokens=8", "eval.repeats=2", "train.threads=1"]
SMALL += ["eval.tree=tiny_k2"]
BENCH = ["eval/bench.py", "recipes/tiny.yaml", "--methods", "plain,generate,prompt_lookup"]
BENCH += ["--batch-sizes", "1,2", *SMALL, "eval.limit=4", "eval.max_new_tokens=5"]
TURNS = 2 * (4 + 2)  # repeats of the batches of one row and of two
TIMES = ("second", "_ms", "speedup", "swi_measured", "ewif_measured", "categories")


@pytest.fixture(scope="module")
def tiny():
    return shallow_tiny()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[dict]:
    """The rows of an uninterrupted benchmark, without wall-clock times."""
    return rows(tmp_path_factory.mktemp("whole"), run_here)


def rows(out, run) -> list[dict]:
    done = run(*BENCH, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert not (out / NAME).exists()
    found = json.loads((out / "report.json").read_text())["runs"]
    assert len(found) == 6
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in found]


def killed_after(lines: int, out) -> list[str]:
    """Start the benchmark, kill -9 it once so many lines are written; return the lines."""
    process = start(*BENCH, "--out", out)
    deadline = time.monotonic() + 300
    while not (out / NAME).exists() or (out / NAME).read_bytes().count(b"\n") < lines:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    return (out / NAME).read_text().splitlines()


def test_a_killed_benchmark_resumes_where_it_stopped(tmp_path, whole):
    lines = killed_after(4, tmp_path)
    assert 4 <= len(lines) < 1 + TURNS
    head, first, *others = (json.loads(line) for line in lines)
    first["outcomes"]["plain"]["seconds"] = 1e6  # shows below unless this turn is repeated
    kept = [json.dumps(line) for line in (head, first, *others)]
    torn = '{"place": [0, 5, 0], "outcomes": {"plain": {"comp'
    (tmp_path / NAME).write_text("\n".join([*kept, torn]))
    shown = []

    def noting(*command):
        done = run_here(*command)
        shown.append(done.stdout)
        return done

    assert rows(tmp_path, noting) == whole
    assert f"continuing from the {len(lines) - 1} turns of this benchmark" in shown[0]
    plain = json.loads((tmp_path / "report.json").read_text())["runs"][0]
    assert plain["seconds"] > 4e5  # the median of two repeats


def test_ctrl_c_keeps_measurements_that_only_the_same_benchmark_reuses(tmp_path):
    command = ["eval/bench.py", "recipes/tiny.yaml", "--methods", "plain,generate"]
    command += ["--out", str(tmp_path), "eval.limit=3", "eval.max_new_tokens=4", "train.threads=1"]
    # Forwards of the whole model: one inspects it, four warm up, four give the first answer.
    with everywhere("LlamaForCausalLM", Failing(10, error=KeyboardInterrupt)):
        done = run_here(*command)
    assert done.returncode == 130
    kept = f"{NAME} has what was measured; resume with: python eval/bench.py"
    assert kept in done.stderr
    assert len((tmp_path / NAME).read_text().splitlines()) == 2
    assert not (tmp_path / "report.json").exists()
    done = run_here(*command, "eval.limit=2")
    assert done.returncode == 0, done.stderr
    assert f"{NAME} was made with another prompts, recipe: starting afresh" in done.stdout


OUTCOME = Outcome(
    [Completion(0, [4, 5], [Step(2, 2, 1, 1, 0, (-1, 0, 0), [4, 6], (0, 1))], "eos")],
    1.5,
    Timing(verify=0.5, total=1.0, forwards=1, inputs=3),
    (2, 1),
    0.25,
)
FAILED = Outcome([], 0.0, Timing(), failure="RuntimeError: out of memory")


def never():
    raise AssertionError("this was measured before")


def test_recorded_turns_are_reused_unchanged(tmp_path):
    turn = {"plain": OUTCOME, "falcon_tree": FAILED}
    with Logbook(tmp_path, {"recipe": "a", "cpu": "x"}) as book:
        assert book.note == ""
        assert book.remember(1, (0, 2), lambda: turn) == turn
    with Logbook(tmp_path, {"recipe": "a", "cpu": "x"}) as book:
        assert "from the 1 turns" in book.note
        assert book.remember(1, (0, 2), never) == turn
        assert book.remember(0, (0, 2), lambda: {"plain": FAILED}) == {"plain": FAILED}
        book.remove()
    assert list(tmp_path.iterdir()) == []


def test_measurements_of_another_machine_are_discarded(tmp_path):
    with Logbook(tmp_path, {"recipe": "a", "cpu": "x", "torch": "2"}) as book:
        book.remember(0, (0, 0), lambda: {"plain": OUTCOME})
    with Logbook(tmp_path, {"recipe": "a", "cpu": "y", "torch": "2"}) as book:
        assert book.note.endswith("was made with another cpu: starting afresh")
        assert book.remember(0, (0, 0), lambda: {"plain": FAILED}) == {"plain": FAILED}
    with Logbook(tmp_path, {"recipe": "a", "cpu": "y", "torch": "2"}) as book:
        assert book.remember(0, (0, 0), never) == {"plain": FAILED}


def test_a_full_disk_is_reported_with_the_file_and_what_to_do(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Logbook(tmp_path, {"machine": "this"}) as logbook:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try:
            with pytest.raises(CacheError, match=rf"out of disk: {tmp_path / NAME} .* make room"):
                logbook.remember(0, (0, 0, 0), lambda: {"plain": "x" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("content", [b'{"recipe": "a"}\n{"place": 3}\n', b"\xff\xfe\n", b"[]\n"])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(DataError, match=r"measured\.jsonl is damaged; delete it"):
        Logbook(tmp_path, {"recipe": "a"})


class Failing:
    """A hook that raises at one call, or, without a number, at every call."""

    def __init__(self, call: int | None = None, error: type = RuntimeError):
        self.call, self.error, self.count = call, error, 0

    def __call__(self, *_) -> None:
        self.count += 1
        if self.call in (None, self.count):
            raise self.error("out of memory\nand a long story")


def measured(tiny, methods: list[str], trained: Trained, *changes: str) -> tuple[dict, dict]:
    recipe = load_recipe("recipes/tiny.yaml", [*SMALL, "eval.repeats=1", *changes])
    prompts = load_prompts(recipe, tiny.tokenizer)
    report = evaluate(recipe, tiny, trained, prompts, methods)
    return report, {row["method"]: row for row in report["runs"]}


def console_of(report: dict) -> str:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    print_report(report, console)
    return console.export_text()


def test_a_failure_on_one_prompt_is_shown_and_the_method_goes_on(tiny, tmp_path):
    _, whole = measured(tiny, ["plain", "generate"], Trained())
    # Only `generate` calls the model as a whole. Its warm-up takes 8 forwards; the first one for
    # the third prompt fails.
    counted = Failing(10**9)
    with hooked(tiny.model, counted):
        measured(tiny, ["generate"], Trained(), "eval.limit=2")
    with hooked(tiny.model, Failing(counted.count + 1)):
        report, found = measured(tiny, ["plain", "generate", "prompt_lookup"], Trained())
    row, plain = found["generate"], found["plain"]
    prompt = [p.id for p in load_prompts(load_recipe("recipes/tiny.yaml", SMALL), tiny.tokenizer)]
    error = {"turn": 1, "error": "RuntimeError: out of memory", "fallback": False}
    assert row["failures"] == [{"prompt": prompt[2]} | error]
    assert (row["failed"], row["outputs"], row["identical"]) == (1, 5, 5)
    assert (plain["failed"], plain["outputs"], plain["identical"]) == (0, 6, 6)
    assert found["prompt_lookup"]["identical"] == 6
    assert found["prompt_lookup"]["speedup_over_generate"] is None  # it answered fewer
    # Its speedup compares with plain decoding of the same five prompts.
    assert row["tokens"] < whole["generate"]["tokens"]
    assert row["speedup"] != row["tokens_per_second"] / plain["tokens_per_second"]
    shown = console_of(report)
    assert "1 failed" in shown
    assert f"generate: RuntimeError: out of memory [{prompt[2]}]" in shown
    page = write_report(report, tmp_path).with_suffix(".html").read_text()
    assert "1 failed" in page


def test_a_method_that_fails_in_its_warm_up_is_not_called_again(tiny, tmp_path):
    hook = Failing()
    with hooked(tiny.model, hook):
        report, found = measured(tiny, ["generate", "plain"], Trained(), "eval.batch_size=2")
    assert hook.count == 1
    assert (found["generate"]["failed"], found["generate"]["outputs"]) == (6, 0)
    assert "tokens_per_second" not in found["generate"]
    assert found["plain"]["outputs"] == 6
    shown = console_of(report)
    assert "6 failed" in shown
    assert "tiny_chat: 6 outputs" in shown
    write_report(report, tmp_path)


def test_a_failure_in_one_repeat_fails_its_batch(tiny):
    counted = Failing(10**9)
    with hooked(tiny.model, counted):
        measured(tiny, ["generate"], Trained(), "eval.limit=1", "eval.repeats=2")
    with hooked(tiny.model, Failing(counted.count)):
        _, found = measured(tiny, ["generate"], Trained(), "eval.limit=3", "eval.repeats=2")
    assert (found["generate"]["failed"], found["generate"]["outputs"]) == (1, 2)


@pytest.fixture
def head(tiny):
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    return FalconHead(FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape))


def test_requests_whose_drafter_raised_are_counted_as_fallbacks(tiny, head):
    with hooked(head.layers[0], Failing(40)), pytest.warns(RuntimeWarning, match="drafter raised"):
        report, found = measured(tiny, ["plain", "falcon_tree"], Trained(head))
    row = found["falcon_tree"]
    assert (row["failed"], row["fallbacks"], row["identical"]) == (0, 1, 6)
    (one,) = row["failures"]
    assert (one["error"], one["fallback"]) == ("RuntimeError: out of memory", True)
    assert found["plain"]["fallbacks"] == 0
    assert "1 fell back" in console_of(report)


def test_scoring_a_single_method_raises_its_failure(tiny, head):
    recipe = load_recipe("recipes/tiny.yaml", [*SMALL, "eval.limit=2"])
    prompts = load_prompts(recipe, tiny.tokenizer)
    _, found = measured(tiny, ["falcon_tree"], Trained(head), "eval.limit=2")
    alone = partial(tokens_per_step, recipe, tiny, Trained(head), prompts)
    assert alone("falcon_tree") == found["falcon_tree"]["tokens_per_step"]
    with hooked(tiny.model, Failing()), pytest.raises(RuntimeError, match="out of memory"):
        alone("generate")


def test_a_benchmark_with_a_failure_ends_with_exit_code_1(tmp_path):
    command = ["eval/bench.py", "recipes/tiny.yaml", "--methods", "plain,generate"]
    command += ["--out", str(tmp_path), "eval.limit=3", "eval.max_new_tokens=4", "train.threads=1"]
    with everywhere("LlamaForCausalLM", Failing(10)):  # at the second answer, as above
        done = run_here(*command)
    assert "1 failed" in done.stdout
    assert "not all methods decoded all prompts" in done.returncode  # a shell prints it and gets 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert [run["failed"] for run in report["runs"]] == [0, 1]
    assert not (tmp_path / NAME).exists()


@contextmanager
def hooked(module, hook):
    """Call a hook before every forward of a module."""
    handle = module.register_forward_pre_hook(hook)
    yield
    handle.remove()


@contextmanager
def everywhere(kind: str, hook):
    """Call a hook before every forward of every module of a class."""

    def of_kind(module, _):
        if type(module).__name__ == kind:
            hook()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(of_kind)
    yield
    handle.remove()


def test_a_later_turn_counts_as_its_own_conversation_if_the_first_failed(tiny):
    recipe = load_recipe("recipes/tiny.yaml", ["eval.limit=2"])
    one, other = load_prompts(recipe, tiny.tokenizer)
    prompts = [replace(one, later=()), replace(other, turn=2)]  # only the second turn of `other`
    parts = [replace(OUTCOME, seconds=seconds) for seconds in (1.0, 4.0)]
    assert macro(prompts, parts)["macro_tokens_per_second"] == (2 / 1 + 2 / 4) / 2


def test_a_reports_folder_names_the_settings_and_the_drafter_if_a_run_has_several(tmp_path):
    run = tmp_path / "mine"
    (run / "falcon").mkdir(parents=True)
    (run / "falcon" / "config.json").write_text("{}")
    recipes = [
        load_recipe("tiny", [f"output.dir={run}", f"eval.batch_size={rows}"]) for rows in (1, 8)
    ]
    assert place_of("tiny", recipes) == run / "bench" / "tiny_chat-b1+8-t0"
    (run / "medusa").mkdir()
    (run / "medusa" / "config.json").write_text("{}")
    assert place_of("tiny", recipes).name == "falcon-tiny_chat-b1+8-t0"
    assert place_of(f"{run}/medusa", recipes).name == "medusa-tiny_chat-b1+8-t0"
