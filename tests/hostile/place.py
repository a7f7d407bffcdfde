"""The object of the attacks: a small run, trained once, with its caches and target."""

import hashlib
import json
import shutil
import tempfile
from functools import cached_property
from pathlib import Path

from commands import run

from specdraft.models.target import Target
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe

SMALL = ["data.limit=12", "data.max_length=128", "train.steps=6", "train.batch_size=4"]
SMALL += ["train.rollout=1", "train.threads=1", "train.save_every=2", "train.eval_every=3"]
SMALL += ["train.log_every=1", "eval.limit=1", "eval.validation=1", "eval.max_new_tokens=12"]
SMALL += ["eval.methods=[plain,falcon_tree]", "eval.tree=tiny_coupled_k3_small"]


class Place:
    """A folder with `run` and `cache`, which are made if missing."""

    def __init__(self, folder: Path):
        self.folder, self.run, self.cache = folder, folder / "run", folder / "cache"
        if not (self.run / "report.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            self.made("train/falcon.py", folder)

    @staticmethod
    def settings(folder: Path) -> list[str]:
        """Overrides that put run and cache into a folder."""
        return [*SMALL, f"output.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]

    def made(self, script: str, folder: Path, *more: str) -> None:
        """Run a script to its end."""
        done = run(script, "recipes/tiny.yaml", *self.settings(folder), *more)
        assert done.returncode == 0, done.stderr

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return load_recipe("recipes/tiny.yaml", self.settings(self.folder))

    @cached_property
    def target(self) -> Target:
        """The bundled target."""
        return Target.load("tiny")

    @cached_property
    def expected(self) -> dict:
        """The results of the untouched run: {"bench": .., "train": ..}."""
        from tampers import BENCH, MORE, steps

        if not (kept := self.folder / "expected.json").is_file():
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                for part in ("run", "cache"):
                    shutil.copytree(self.folder / part, folder / part)
                self.made("eval/bench.py", folder, *BENCH, "--out", str(folder / "bench"))
                self.made("train/falcon.py", folder, *MORE)
                found = {"bench": steps(folder / "bench"), "train": weights(folder / "run")}
            kept.write_text(json.dumps(found))
        return json.loads(kept.read_text())


def weights(run: Path, folder: str = "falcon") -> str:
    """The checksum of the trained weights."""
    return hashlib.sha256((run / folder / "model.safetensors").read_bytes()).hexdigest()
