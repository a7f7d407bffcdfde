"""A stopped command keeps what is complete, says how to resume, and leaves no process behind.

Each is started as by a user, sent SIGTERM in the middle of its work, and started again.
"""

from specdraft.recipes.entry import entry

import json
import os
import pty
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
from commands import ROOT, SURROUNDINGS, run, start, wait_until
from forks import Fork
from rich.console import Console
from small_tokenizer import small_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.recipes.interrupt import Terminated, resume_command

BENCH = ["eval/bench.py", "recipes/tiny.yaml", "--methods", "plain,generate,prompt_lookup"]
BENCH += ["eval.limit=6", "eval.max_new_tokens=8", "eval.repeats=2"]


def start_afresh(command: list[str]) -> subprocess.Popen:
    """Not forked: workers recognise a launcher by its command line, which a fork inherits."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | SURROUNDINGS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stopped_when(condition: Callable[[], bool], process: Fork | subprocess.Popen) -> str:
    """Send SIGTERM once a condition holds; return the process's errors. The rest of its session
    must end by itself."""
    wait_until(lambda: condition() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    wait_until(lambda: not in_session(process.pid), 60)
    return errors


def in_session(session: int) -> list[int]:
    """The processes of a session, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def check_line(errors: str, kept: str, command: list[str]) -> None:
    """Check that one line says what is kept, and which command resumes."""
    last = errors.strip().splitlines()[-1]
    assert last.startswith("interrupted; "), errors
    assert kept in last
    assert last.endswith(f"; resume with: {shlex.join(command)}")
    assert "Traceback" not in errors
    assert errors.count("resume with") == 1


def test_a_stopped_benchmark_resumes_with_its_measurements(tmp_path):
    measured, command = tmp_path / "measured.jsonl", [*BENCH, "--out", str(tmp_path)]
    process = start(*command, own_session=True)
    errors = stopped_when(lambda: measured.exists() and len(lines(measured)) > 3, process)
    assert process.returncode == 130
    check_line(errors, f"{measured} has what was measured", ["python", *command])
    before = len(lines(measured))
    assert before < 1 + 2 * 6
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert f"continuing from the {before - 1} turns of this benchmark" in done.stdout
    assert (tmp_path / "report.json").exists()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> list[str]:
    """Overrides: a target that is cheap to run, and whose features fill a shard of the usual size
    with eight conversations."""
    tokenizer, folder = small_tokenizer(), tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=4096,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    turns = [("user", "Say it. " * 40), ("assistant", "No. " * 60)]
    chat = {"messages": [{"role": role, "content": said} for role, said in turns]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 24)
    sources = f"data.sources=[{folder / 'chats.jsonl'}]"
    return [f"target.model={folder / 'target'}", sources, "data.feature_layers=[]"]


def test_a_stopped_feature_build_keeps_its_shards(tmp_path, wide):
    command = ["data/cache.py", "recipes/tiny.yaml", *wide, f"data.cache_dir={tmp_path}"]
    process = start(*command, own_session=True)
    errors = stopped_when(lambda: shards(tmp_path), process)
    assert process.returncode == 130
    kept = {path: path.stat().st_mtime_ns for path in shards(tmp_path)}
    check_line(errors, f"{len(kept)} shards of features are kept", ["python", *command])
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert len(shards(tmp_path)) > len(kept)
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_ending_a_launcher_ends_its_command(tmp_path, wide):
    """`accelerate launch` dies of SIGTERM without passing it on."""
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    command = [*launcher, "data/cache.py", "recipes/tiny.yaml", *wide]
    process = start_afresh([*command, f"data.cache_dir={tmp_path}"])
    errors = stopped_when(lambda: shards(tmp_path), process)
    kept = f"{len(shards(tmp_path))} shards of features are kept"
    check_line(errors, kept, [sys.executable, *command, f"data.cache_dir={tmp_path}"])


LAUNCHERS = {
    "accelerate": ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize(("launcher", "close"), [("accelerate", False), ("torchrun", True)])
def test_training_saves_on_ctrl_c_or_a_closed_terminal_under_a_launcher(tmp_path, launcher, close):
    """There, Ctrl-C or closing the terminal sends SIGINT, SIGTERM and SIGHUP in turn."""
    out = tmp_path / "run"
    job = ["tests/train/test_loop.py", str(out), "train.steps=3000", "train.log_every=1"]
    command = [*LAUNCHERS[launcher], *job, "pace=0.01"]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.environ.update(SURROUNDINGS, ACCELERATE_USE_CPU="true")
        os.execv(sys.executable, [sys.executable, *command])
    with open(terminal, "rb+", buffering=0) as screen:
        # After a step, all processes, however slow to start, have their signal handlers.
        wait_until(lambda: (out / "log.jsonl").exists() and (out / "log.jsonl").stat().st_size)
        if not close:
            screen.write(b"\x03")
            said = "".join(iter(partial(read, screen), ""))
    wait_until(lambda: not running_with(out), 60)
    os.waitpid(pid, 0)
    (state,) = out.glob("checkpoints/step-*/state.json")
    step = json.loads(state.read_text())["state"]["step"]
    assert 0 < step < 3000
    if not close:
        ours = re.findall(r"^(?:saving|stopped at|interrupted).*?\r$", said, re.MULTILINE)
        resume = shlex.join([sys.executable, *command])
        assert len(ours) == 2, said
        assert ours[0].startswith("saving after this step ..")
        assert ours[1] == f"stopped at step {step}; resume with: {resume}\r"


def read(screen: BinaryIO) -> str:
    try:
        return screen.read(4096).decode(errors="replace")
    except OSError:  # no process has it any more
        return ""


def running_with(word: object) -> list[psutil.Process]:
    """The processes of any session whose command contains a word."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if str(word) in (one.info["cmdline"] or ())]


@pytest.mark.parametrize(("rank", "told"), [("0", ["error: another process"]), ("1", [])])
def test_a_rank_whose_peer_is_gone_reports_no_internal_error(monkeypatch, capsys, rank, told):
    @entry
    def main() -> None:
        raise RuntimeError("gloo: Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert [line[:22] for line in capsys.readouterr().err.splitlines()] == told
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        main()
    assert "internal error: RuntimeError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "number", "rank", "told"),
    [
        (["eval/bench.py"], signal.SIGINT, "0", ["interrupted before anything began"]),
        (
            ["-m", "specdraft.train.cli", "train"],
            signal.SIGHUP,
            "0",
            ["interrupted before anything began"],
        ),
        (["train/falcon.py"], signal.SIGTERM, "1", []),
    ],
)
def test_a_command_interrupted_while_importing_says_so(monkeypatch, command, number, rank, told):
    monkeypatch.setenv("RANK", rank)
    # It would inherit an ignored signal, as from a shell's background.
    before = signal.signal(number, signal.default_int_handler)
    try:
        process = start_afresh([*command, "--help"])
    finally:
        signal.signal(number, before)
    wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.split("\n") == (["", *told, ""] if told else [""])


@pytest.mark.parametrize(
    ("environment", "told"), [({"TORCHELASTIC_RUN_ID": "1"}, "ended"), ({}, "went on")]
)
def test_a_run_does_not_start_if_its_launcher_has_ended(tmp_path, environment, told):
    """The shell is gone when the script asks; without a launcher, it was in the background."""
    (script := tmp_path / "orphan.py").write_text(
        """import sys, time
from pathlib import Path
import psutil
from specdraft.recipes.interrupt import Terminated, stop_with_launcher
while psutil.Process().parent().name() == "sh":
    time.sleep(0.01)
try:
    stop_with_launcher()
    told = "went on"
except Terminated:
    told = "ended"
Path(sys.argv[1]).with_suffix(".part").write_text(told)
Path(sys.argv[1]).with_suffix(".part").rename(sys.argv[1])
"""
    )
    said = tmp_path / "said"
    background = f"{sys.executable} {script} {said} > /dev/null 2>&1 &"
    subprocess.run(["sh", "-c", background], env=os.environ | environment, check=True)
    wait_until(said.exists)
    assert said.read_text() == told


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (["/x/bin/python", "/x/bin/specdraft", "train", "tiny"], "specdraft train tiny"),
        (["python3", "-u", "train/falcon.py", "a b"], "python3 -u train/falcon.py 'a b'"),
        (["python", "-m", "specdraft.eval.bench", "r"], "python -m specdraft.eval.bench r"),
    ],
)
def test_the_resume_command_is_the_one_that_was_typed(monkeypatch, words, typed):
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["specdraft train", "tiny"])
    assert resume_command() == typed


def shards(cache: Path) -> list[Path]:
    """The shards named in the manifest."""
    manifest = next(cache.glob("features-*/manifest.json"), None)
    named = json.loads(manifest.read_text())["shards"].values() if manifest else ()
    return [manifest.with_name(entry["file"]) for entry in named]


def test_stopping_a_comparison_stops_and_saves_its_runs(tmp_path):
    """Its run is training: it finishes its step and saves."""
    runs = tmp_path / "runs"
    small = ["train.steps=2000", "train.log_every=1", "data.limit=60", "train.eval_every=null"]
    small += ["eval.limit=2", "eval.validation=2", "train.save_every=1000"]
    command = ["eval/paper.py", "noise", *small, "--runs", str(runs), "--seeds", "0"]
    process = start(*command, own_session=True)
    errors = stopped_when(lambda: any(runs.rglob("log.jsonl")), process)
    assert process.returncode == 130
    check_line(errors, "0 of ", ["python", *command])
    (state,) = runs.rglob("checkpoints/step-*/state.json")
    assert 0 < json.loads(state.read_text())["state"]["step"] < 2000


def test_sigterm_ends_a_chat_and_ctrl_c_does_not(monkeypatch):
    chat = runpy.run_path(str(ROOT / "eval" / "generate.py"))
    events = iter([KeyboardInterrupt, "hello", Terminated, "never"])

    def prompt(_: str) -> str:
        event = next(events)
        if isinstance(event, str):
            return event
        raise event

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", prompt)
    heard = chat["questions"](Console(quiet=True))
    assert next(heard) == "hello"
    with pytest.raises(Terminated):
        next(heard)
