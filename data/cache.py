"""The data stage alone, for big runs: conversations -> token cache -> feature cache.

    accelerate launch data/cache.py recipes/vicuna7b.yaml [section.key=value ..]
    python data/cache.py recipes/vicuna7b.yaml --dry-run

A run that is cut off goes on where it stopped. Training with the same recipe finds both caches.
"""

from specdraft.recipes.entry import entry

from datetime import timedelta
from functools import partial

from accelerate import Accelerator, InitProcessGroupKwargs
from rich.table import Table

from specdraft.data.store.feature_cache import FeatureCache, Features
from specdraft.data.store.tokens import TokenCache
from specdraft.data.template import LEGEND, preview
from specdraft.eval.generation.answers import build_caches
from specdraft.eval.methods.registry import problems
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser, whole
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen
from specdraft.train.command import show_plan
from specdraft.train.fit.accelerator import load_target
from specdraft.train.plan import measured_flops
from specdraft.train.plan_lines import format_bytes, format_seconds


@entry
def main() -> None:
    """Parse, load the recipe, build both caches, say what is in them."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument(
        "--preview", type=whole(0, 1000), default=1, help="rows shown with their loss mask"
    )
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides, check=problems)
    console = Screen(soft_wrap=True)
    if arguments.dry_run:
        show_plan(recipe)
        return
    # Ranks wait for the slowest one, which may write answers for hours.
    patience = InitProcessGroupKwargs(timeout=timedelta(days=7))
    accelerator = Accelerator(kwargs_handlers=[patience])
    target = load_target(recipe, accelerator)
    announce = partial(show_costs, recipe, target, accelerator.num_processes, console)
    tokens, features = build_caches(recipe, target, accelerator, announce)
    if accelerator.is_main_process:
        show(tokens, features, target, arguments.preview, console)
    accelerator.end_training()


def show(
    tokens: TokenCache, features: Features, target: Target, rows: int, console: Screen
) -> None:
    """Print the counts, the places of the caches, and rows with their supervised tokens marked."""
    table = Table.grid(padding=(0, 2))
    for name, value in tokens.stats.items():
        table.add_row(name, f"{value:,}")
    table.add_row("tokens at", str(tokens.directory))
    if isinstance(features, FeatureCache):
        size = sum(entry["bytes"] for entry in features.manifest["shards"].values())
        table.add_row("features at", f"{features.directory} ({format_bytes(size)})")
        layers = f" with layers {list(own)}" if (own := features.storage.layers) else ""
        table.add_row("features", f"{sum(features.kept):,} stored{layers}{_quantised(features)}")
    else:
        table.add_row("features", "none kept (data.features=online)")
    console.print(table)
    if rows:
        console.print(f"\n{LEGEND}")
    for index in range(min(rows, len(tokens))):
        row = tokens[index]
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        console.print(preview(target.tokenizer, ids, mask))


def _quantised(features: FeatureCache) -> str:
    """Say in which numbers features are stored, and what that was measured to cost."""
    done = features.manifest["quantisation"]
    if done is None or done["error"] is None:  # made by an earlier version
        return f" in {features.storage.dtype}"
    scale = f", one scale per {done['scale']}" if done["scale"] else ""
    return f" in {done['format']}{scale}; relative error (RMS) {done['error']:.2g}"


def show_costs(
    recipe: Recipe, target: Target, processes: int, console: Screen, tokens: int, size: int
) -> None:
    """Print what the features that are still missing will take, before they are computed."""
    speed = measured_flops(target.device, target.dtype)
    work = 2.0 * tokens * sum(p.numel() for p in target.model.base_model.parameters())
    console.print(
        f"features to make: {tokens:,} tokens, {format_bytes(size)} in "
        f"{recipe.data.feature_dtype}, about {format_seconds(work / speed / processes)}\n"
        f"  ({processes} x {speed / 1e12:.2g} TFLOP/s measured)"
    )


if __name__ == "__main__":
    main()
