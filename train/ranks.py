"""The accelerator: devices, processes and precision, as the launcher and the recipe say."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from specdraft.recipes.schema import Recipe


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Build the accelerator a recipe asks for, under whatever launcher runs this process."""
    accelerator = Accelerator(
        mixed_precision="bf16" if recipe.train.precision == "bfloat16" else "no",
        gradient_accumulation_steps=recipe.train.accumulation,
        kwargs_handlers=[_process_group()],
    )
    if accelerator.device.type == "cpu":
        # Launchers set one thread per process where nobody told them better.
        share = max(1, _usable_cores() // accelerator.num_processes)
        torch.set_num_threads(recipe.train.threads or share)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:  # what DeepSpeed would otherwise read from a DataLoader or its JSON
        ranks, accumulation = accelerator.num_processes, recipe.train.accumulation
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": recipe.train.batch_size // (ranks * accumulation),
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": recipe.optim.clip_norm,
        }
    return accelerator


def _process_group() -> InitProcessGroupKwargs:
    # Ranks wait for the slowest one, which may write answers or decode prompts for hours.
    group = InitProcessGroupKwargs(timeout=timedelta(days=1))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if deepspeed and not torch.cuda.is_available():
        group.backend = "gloo"  # unnamed, accelerate would take every CPU process for the only one
    return group


def _usable_cores() -> int:
    """Cores that this process may run on; a container or taskset may leave fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
