"""On the CPU, one thread per worker: two workers with two threads each would block each other."""

import os
from pathlib import Path

import pytest
from short_visits import SHORT

HERE = Path(__file__).parent
# For this process, before torch is imported, and for the scripts it starts, which import the shared
# modules of tests/ as tests do (`pythonpath` in pyproject.toml).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
SHARED = [str(path) for path in (HERE, *sorted(HERE.glob("[a-z]*"))) if path.is_dir()]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SHARED, os.environ.get("PYTHONPATH")]))


# A worker gets whole files (`--dist loadfile`), in order of collection: the slowest come first, or
# one worker would still be busy with one when the others have finished.
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
    """Undo the number of threads that training sets for its process: later tests would take ten
    times as long next to another worker."""
    import torch

    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _short_visits():
    """Time everything only once: no test asserts a measured time."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SHORT.items():
            patch.setattr(name, value)
        yield
