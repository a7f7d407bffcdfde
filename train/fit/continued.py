"""Who may continue a checkpoint: the same recipe, data and launch, but for what alters no step."""

import os
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import DistributedType

from specdraft.recipes.compare import differences
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.sections.target import BUNDLED

# What may change between a checkpoint and its continuation: nothing here alters a single step.
# train.steps and train.epochs may, too: they move the end of the schedules, which is how a run is
# prolonged; train.accumulation, train.forward_tokens and train.threads only cut the same batch
# differently, as the number of processes does.
FREE = {
    "name", "output", "hub", "eval", "drafting", "maxgram", "cascade",
    "target.device_map", "target.max_memory", "target.prepack_gib",
    "data.cache_dir", "data.drafter", "data.drafter_run",
    "data.batch_rows", "data.timeout", "data.retries",
    "train.steps", "train.epochs", "train.accumulation", "train.forward_tokens",
    "train.eval_every", "train.save_every", "train.keep", "train.log_every", "train.max_minutes",
    "train.checkpointing", "train.trackers", "train.threads",
}  # fmt: skip
# What tokens per step are measured with: the best by one of these is nothing to another.
MEASURING = {
    "eval.prompts", "eval.limit", "eval.validation", "eval.prompt_tokens", "eval.tree",
    "eval.chain_depth", "eval.head_dtype", "eval.max_new_tokens", "eval.spread", "eval.seed",
    "eval.temperature", "eval.top_k", "eval.top_p", "eval.acceptance",
    "drafting.gamma", "drafting.theta_prob",  # of a student's ssd
}  # fmt: skip
SHARDING = (DistributedType.DEEPSPEED, DistributedType.FSDP)


@dataclass(frozen=True)
class Launch:
    """Which processes write a checkpoint."""

    processes: int
    engine: str | None  # DEEPSPEED or FSDP; None: plain processes, joined by DDP where many

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Launch":
        """Describe this process and its like."""
        kind = accelerator.distributed_type
        return cls(accelerator.num_processes, kind.value if kind in SHARDING else None)

    def check_continued_by(self, other: "Launch", checkpoint: Path) -> None:
        """Raise RecipeError where another launch cannot read what this one wrote."""
        # DeepSpeed cuts the optimiser's state into one file per process, and never cuts it anew.
        cut = self.engine == DistributedType.DEEPSPEED and self.processes != other.processes
        if cut or self.engine != other.engine:
            raise RecipeError(
                f"{checkpoint} was written by {self}, and {other} cannot read its files; launch "
                "as before, give another output.dir, or delete "
                f"{checkpoint.parent} to start over"
            )

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return processes if self.engine is None else f"{processes} under {self.engine}"


def measured_alike(there: dict, here: dict) -> bool:
    """Whether a best by one recipe's tokens per step is one by another's."""
    return not MEASURING & differences(there, here, ()).keys()


def check_continued(
    checkpoint: Path,
    content: dict,
    recipe: dict,
    rows: int | None = None,
    data: str | None = None,
) -> None:
    """Raise RecipeError where a recipe, or its rows of data, would not have made a checkpoint.

    content: its state.json; rows: None: not counted yet.
    """
    differing = differences(content["recipe"], recipe, FREE)
    if "target.model" in differing and _are_one_folder(*differing["target.model"]):
        del differing["target.model"]
    if None not in differing.get("data.server", [None]):
        del differing["data.server"]  # where it listens is no matter, whether there is one is
    if rows is not None and content["rows"] != rows:
        differing["rows of training data"] = (content["rows"], rows)
    there = content.get("data")  # earlier versions do not say
    if None not in (there, data) and there != data:
        differing["contents of its data or target"] = (there, data)
    if differing:
        key, (there, here) = next(iter(differing.items()))
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise RecipeError(
            f"{checkpoint} was made with {key} = {there}, now it is {here}{more}; "
            f"give another output.dir, or delete {checkpoint.parent} to start over"
        )


def _are_one_folder(there: str, here: str) -> bool:
    """Whether two spellings of `target.model` are paths of the same folder."""
    paths = [os.path.expanduser(name) for name in (there, here)]
    folders = BUNDLED not in (there, here) and all(map(os.path.isdir, paths))
    return folders and os.path.samefile(*paths)
