"""Two commands at once: one does the work, the other waits or names the first."""

import shutil
import time
from pathlib import Path
from random import Random

from commands import start
from place import Place
from verdict import of_command

from specdraft.data.store.feature_cache import FeatureCache
from specdraft.data.store.tokens import TokenCache

TINY, TABLE = ["recipes/tiny.yaml"], ["recipes/tiny_maxgram.yaml"]
GRID = ["--nodes", "1,4", "--rows", "1", "--cached", "64", "--repeats", "1"]
TRAIN, CACHE = ["train/falcon.py", *TINY], ["data/cache.py", *TINY]
BENCH, COSTS = ["eval/bench.py", *TINY], ["eval/costs.py", *TINY, *GRID]
FIT, ANSWERS = ["eval/fit.py", *TINY, "--finalists", "1"], [*CACHE, "data.answers=target"]
COUNT = ["train/maxgram.py", *TABLE, "eval.methods=[plain,maxgram]", "train.epochs=null"]
# Two commands, and whether they start from a trained run.
KINDS = [
    (CACHE, CACHE, False), (TRAIN, TRAIN, False), (TRAIN, CACHE, False), (COUNT, COUNT, False),
    (ANSWERS, ANSWERS, False), (BENCH, BENCH, True), (COSTS, COSTS, True), (TRAIN, BENCH, True),
    (FIT, FIT, True), (BENCH, FIT, True),
]  # fmt: skip


def pair(number: int, folder: Path, place: Place) -> tuple[int, str | None]:
    """Run the two commands of a number, at most a moment apart."""
    *commands, trained = KINDS[number % len(KINDS)]
    if trained:
        for name in ("run", "cache"):
            shutil.copytree(place.folder / name, folder / name)
    both, random = [], Random(f"pair {number}")
    for script, recipe, *more in commands:
        given = {word.split("=")[0] for word in more}
        own = [one for one in place.settings(folder) if one.split("=")[0] not in given]
        both.append(start(script, recipe, *own, *more))
        time.sleep(random.choice([0, 0, random.random()]))
    ends = [(one.communicate(), one.returncode) for one in both]
    for (out, err), code in ends:
        if found := of_command(code, out + err):
            return 1, f"{commands}: {found}"
        if code and not (code == 2 and ": in use by process " in err):
            return 1, f"{commands}: exit code {code}: {err[-500:]}"
    if all(code for _, code in ends):
        return 1, f"{commands}: none went on: {ends}"
    return 1, unfinished(folder)


def unfinished(folder: Path) -> str | None:
    """Return what is incomplete or left behind in caches and run."""
    for cache in folder.glob("cache/tokens-*"):
        TokenCache.open(cache)
    for cache in folder.glob("cache/features-*"):
        FeatureCache.open(cache, verify=True)
    left = [path for path in folder.rglob("*") if path.name.endswith((".lock", ".partial"))]
    return f"left behind: {left}" if left else None
