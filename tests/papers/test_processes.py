"""Scripts in processes that are forked: as if started by hand, without the seconds of importing."""

import json
import os
import subprocess
import sys
from pathlib import Path

from commands import wait_until

from specdraft.eval.papers.processes import start

TELL = """
import json, os, sys
imported = sorted(sys.modules)
from pathlib import Path
Path(sys.argv[1]).write_text(json.dumps({
    "argv": sys.argv, "typed": sys.orig_argv, "name": __name__, "imported": imported,
    "session": os.getsid(0), "pid": os.getpid(), "threads": os.environ["OMP_NUM_THREADS"],
}))
print("unheard")
print("what went wrong", file=sys.stderr)
sys.exit(int(sys.argv[2]))
"""


def test_a_script_runs_as_its_command_would(tmp_path):
    (script := tmp_path / "tell.py").write_text(TELL)
    told, logs, before = [], [], dict(os.environ)
    for code in (3, 0):
        command = [str(script), str(tmp_path / f"told-{code}"), str(code)]
        process = start(command, ["specdraft.recipes.schema"], log := tmp_path / f"log-{code}")
        process.join()
        assert process.exitcode == code
        one = json.loads(Path(command[1]).read_text())
        assert one["argv"] == command
        assert one["typed"] == [sys.executable, *command]
        assert one["name"] == "__main__"
        assert one["threads"] == "1"
        assert one["pid"] == one["session"] == process.pid
        told.append(one)
        logs.append(log.read_text())
    assert logs == ["what went wrong\n"] * 2
    assert told[0]["pid"] != told[1]["pid"]
    assert "specdraft.recipes.schema" in told[0]["imported"]
    assert os.environ == before


def test_a_script_has_the_environment_and_the_folder_of_its_caller(tmp_path, monkeypatch):
    (script := tmp_path / "where.py").write_text(
        """import os, sys
from pathlib import Path
Path(sys.argv[1]).write_text(f"{os.environ.get('WHERE')} {os.getcwd()}")
"""
    )
    for name in ("one", "two"):
        (folder := tmp_path / name).mkdir()
        monkeypatch.chdir(folder)
        monkeypatch.setenv("WHERE", name)
        start([str(script), "said"], [], tmp_path / "log").join()
        assert (folder / "said").read_text() == f"{name} {folder}"


def test_what_a_script_says_is_kept_beside_its_exit_code(tmp_path):
    (script := tmp_path / "wrong.py").write_text("raise ValueError('no such thing')")
    process = start([str(script)], [], log := tmp_path / "log")
    process.join()
    assert process.exitcode == 1
    assert log.read_text().splitlines()[-1] == "ValueError: no such thing"


def test_no_run_outlives_a_command_that_is_killed(tmp_path):
    """SIGKILL leaves it no time to stop what it started."""
    (script := tmp_path / "run.py").write_text(
        """from specdraft.recipes.entry import entry
import sys, time
from pathlib import Path

@entry
def main():
    Path(sys.argv[1]).touch()
    try:
        time.sleep(600)
    finally:
        Path(sys.argv[1]).with_name("saved").touch()

main()
"""
    )
    (caller := tmp_path / "caller.py").write_text(
        f"""from pathlib import Path
from specdraft.eval.papers.processes import start
if __name__ == "__main__":
    start(["{script}", "{tmp_path / "started"}"], [], Path("{tmp_path / "log"}")).join()
"""
    )
    process = subprocess.Popen([sys.executable, str(caller)])
    wait_until((tmp_path / "started").exists)
    process.kill()
    process.wait()
    wait_until((tmp_path / "saved").exists)
