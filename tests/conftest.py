"""On the CPU, one thread per worker: two workers with two threads each wait for each other."""

import os
from pathlib import Path

import pytest
from short_visits import SHORT

HERE = Path(__file__).parent
# Of this process, before torch is imported, and of the scripts it starts: these import what the
# tests of any folder share, as tests do (`pythonpath` in pyproject.toml).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
SHARED = [str(path) for path in (HERE, *sorted(HERE.glob("[a-z]*"))) if path.is_dir()]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SHARED, os.environ.get("PYTHONPATH")]))


# A file is one worker's work (`--dist loadfile`), begun in the order of collection: what takes
# longest comes first, or one worker is still at it when the others have nothing left.
LONGEST = [
    "drawn_drafts", "accept", "entries", "docs", "deepspeed", "paper_tables", "stopping",
    "logbook", "checkpoint", "hub", "medusa", "report", "decoder", "placement", "doctor",
    "cascades_table", "rules_in_decoder", "online", "maxgram", "distill", "server", "rivals",
    "packaging", "cascade", "loop", "memory", "registry", "page", "costs", "student_comparisons",
    "families", "tree_drafters", "sampling", "tuning", "custom_generate", "lm_drafter",
    "chat_terminal", "prompt_sets", "drafted_answers", "eagle", "features",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


@pytest.fixture(autouse=True)
def _one_thread():
    """Undo what training sets for its whole process: the tests after it would take ten times as
    long beside another worker."""
    import torch

    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _short_visits():
    """What is timed for a figure, which no test asserts, is timed once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT.items():
            patch.setattr(name, value)
        yield
