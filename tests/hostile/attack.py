"""Attacks: kills, corrupt inputs, tampered files, and concurrent commands.

    python tests/hostile/attack.py [fuzz kills tampers pairs] [--work DIR] [--count 200] [--first 0]

An attack's number is its seed. DIR/attacks.jsonl keeps the results: the same command resumes where
it stopped, and ends with a summary. The exit code is 1 if anything was found.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "NO_PROXY": "127.0.0.1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
sys.path[:0] = [str(HERE.parent), *(str(path) for path in HERE.parent.glob("[a-z]*/"))]

from commands import ROOT  # noqa: E402
from fuzz import fuzz  # noqa: E402
from kills import kill  # noqa: E402
from pairs import pair  # noqa: E402
from place import Place  # noqa: E402
from tampers import tamper  # noqa: E402

# Runs the attack of a number in a fresh folder; returns how many it made, and what is wrong.
Attack = Callable[[int, Path, Place], tuple[int, str | None]]
KINDS: dict[str, tuple[Attack, int]]
KINDS = {"fuzz": (fuzz, 2000), "kills": (kill, 50), "tampers": (tamper, 200), "pairs": (pair, 24)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "hostile"))
    parser.add_argument("--count", type=int, help="of each kind; default: as many as there are")
    parser.add_argument("--first", type=int, default=0, help="number; others attack otherwise")
    options = parser.parse_args()
    work = options.work.resolve()
    os.chdir(ROOT)
    for number in (signal.SIGINT, signal.SIGHUP):
        # Commands would inherit the signals that nohup or a shell's & made us ignore.
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    place, log = Place(work / "place"), work / "attacks.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {(each["kind"], each["number"]) for each in done}
    for kind in options.kinds or KINDS:
        attack, count = KINDS[kind]
        for number in range(options.first, options.first + (options.count or count)):
            if (kind, number) not in known:
                done.append({"kind": kind, "number": number} | attacked(attack, number, place))
                with log.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                if done[-1]["wrong"]:
                    print(kind, number, done[-1]["wrong"], flush=True)  # noqa: T201
    sys.exit(summary(done))


def attacked(attack: Attack, number: int, place: Place) -> dict:
    """The result of an attack."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        count, wrong = attack(number, Path(folder), place)
    return {"count": count, "wrong": wrong, "seconds": round(time.monotonic() - began, 1)}


def summary(done: list[dict]) -> int:
    """Print the number of attacks of each kind, and how many found something."""
    there, found = Counter(), Counter()
    for each in done:
        there[each["kind"]] += each["count"]
        found[each["kind"]] += bool(each["wrong"])
    for kind, count in there.items():
        print(f"{kind}: {count}, {found[kind]} found something")  # noqa: T201
    return int(any(found.values()))


if __name__ == "__main__":
    main()
