"""The accelerator: devices, processes and precision, as the launcher and the recipe say."""

import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import ProjectConfiguration, convert_outputs_to_fp32, get_int_from_env
from torch import nn
from torch.optim import Optimizer
from transformers.integrations import unset_hf_deepspeed_config

from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.recipes.schema import Recipe
from specdraft.train.fit.batches import rows_per_forward
from specdraft.train.fit.continued import SHARDING
from specdraft.train.fit.trackers import BOARD, check_trackers


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Build the accelerator a recipe asks for, under whatever launcher runs this process.

    Raises: RecipeError for a tracker that is not installed.
    """
    check_trackers(recipe)
    if not torch.accelerator.is_available():
        # accelerate imports an installed DeepSpeed, which would warn that it has found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    accelerator = Accelerator(
        mixed_precision="bf16" if recipe.train.precision == "bfloat16" else "no",
        gradient_accumulation_steps=recipe.train.accumulation,
        kwargs_handlers=[_process_group()],
        log_with=list(recipe.train.trackers) or None,
        project_config=ProjectConfiguration(logging_dir=str(Path(recipe.output.dir) / BOARD)),
    )
    if accelerator.device.type == "cpu":
        # Launchers set one thread per process where nobody told them better.
        share = max(1, _usable_cores() // processes_here(accelerator))
        torch.set_num_threads(recipe.train.threads or share)
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None:
        # Under ZeRO-3 transformers would shard what it loads; here that is decoded with, whole.
        unset_hf_deepspeed_config()
        # What DeepSpeed would otherwise read from a DataLoader or its JSON.
        ranks, accumulation = accelerator.num_processes, recipe.train.accumulation
        plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": recipe.train.batch_size // (ranks * accumulation),
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": recipe.optim.clip_norm,
        }
        if recipe.train.precision == "bfloat16":
            # Weights in float32 and autocast, as without DeepSpeed: its own bf16 has no autocast,
            # and a head's features and norms are float32.
            autocast = {"enabled": True, "dtype": "bfloat16"}
            plugin.deepspeed_config |= {"bf16": {"enabled": False}, "torch_autocast": autocast}
    return accelerator


def prepare(
    accelerator: Accelerator, drafter: nn.Module, optimizer: Optimizer
) -> tuple[nn.Module, Optimizer]:
    """Prepare both for training, as the launcher says."""
    if accelerator.is_fsdp2 and accelerator.native_amp:
        from torch.distributed.fsdp import MixedPrecisionPolicy  # two seconds, only here

        # Weights in float32 and autocast, as without FSDP: there accelerate leaves autocast out and
        # casts weights and all that goes in and out.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()
        drafter.forward = convert_outputs_to_fp32(accelerator.autocast()(drafter.forward))
    return accelerator.prepare(drafter.train(), optimizer)


def load_target(recipe: Recipe, accelerator: Accelerator, alone: bool = False) -> Target:
    """Load the recipe's target for this process. Where several processes would each spread it over
    all devices, none loads its layers; alone: only this process loads it, so it may.

    Raises TargetError.
    """
    section, device = recipe.target, accelerator.device
    if section.device_map is None:
        return Target.of_recipe(section, device)
    if accelerator.num_processes == 1 or alone:
        target = Target.of_recipe(section)
        if target.device != torch.empty(0, device=device).device and not alone:
            raise TargetError(
                f"target.device_map: the embedding runs on {target.device} and this process on "
                f"{device}; map it there"
            )
        return target
    remedy = "make the caches in one process, which has all devices: python data/cache.py RECIPE"
    return Target.without_layers(section, device, f"{_everywhere(recipe, accelerator)}; {remedy}")


def check_launch(recipe: Recipe, accelerator: Accelerator) -> None:
    """Raise RecipeError for what a launch cannot do: cut a batch evenly among its processes, give
    Muon whole matrices where they are sharded, or spread the target once in every process."""
    train, kind = recipe.train, accelerator.distributed_type
    if recipe.student.training != "none":
        rows_per_forward(train.batch_size, train.accumulation, accelerator.num_processes)
    if recipe.optim.name == "muon" and kind in SHARDING:
        raise RecipeError(
            f"optim.name = 'muon': it updates whole matrices, and under {kind.value} no process "
            "has them; set optim.name=adamw"
        )
    most = train.forward_tokens
    if most is not None and kind in SHARDING:
        raise RecipeError(
            f"train.forward_tokens = {most}: cuts each process's rows by themselves, and under "
            f"{kind.value} all take equally many forwards; set train.accumulation"
        )
    every = train.eval_every
    if recipe.target.device_map and accelerator.num_processes > 1 and every is not None:
        raise RecipeError(
            f"{_everywhere(recipe, accelerator)}; set train.eval_every=null (now {every}): then it "
            "is loaded once, when training is over"
        )


def _everywhere(recipe: Recipe, accelerator: Accelerator) -> str:
    return (
        f"target.device_map = {recipe.target.device_map} spreads one model over all devices, and "
        f"{accelerator.num_processes} processes would each do so"
    )


def _process_group() -> InitProcessGroupKwargs:
    # Ranks wait for the slowest one, which may write answers or decode prompts for hours.
    group = InitProcessGroupKwargs(timeout=timedelta(days=1))
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if deepspeed and not torch.cuda.is_available():
        group.backend = "gloo"  # unnamed, accelerate would take every CPU process for the only one
    return group


def processes_here(accelerator: Accelerator) -> int:
    """Processes of a run on this machine, as its launcher says: they share the cores."""
    launchers = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return get_int_from_env(launchers, accelerator.num_processes)


def _usable_cores() -> int:
    """Cores that this process may run on; a container or taskset may leave fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
