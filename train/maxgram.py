"""Count a Max-Gram table: conversations -> tokens -> bigrams -> table -> measured drafter.

    python train/maxgram.py recipes/tiny_maxgram.yaml [section.key=value ..]
    accelerate launch --cpu --num_processes 8 train/maxgram.py RECIPE     # eight processes count
    python train/maxgram.py RECIPE maxgram.corpus=stream data.sources=[owner/name] data.format=text

A run that is cut off goes on where it stopped. The table lies in `output.dir`/table.
"""

from specdraft.recipes.entry import entry

import logging
from pathlib import Path

from accelerate import Accelerator, PartialState
from rich.table import Table

from specdraft.data.lock import output_lock
from specdraft.data.prompts import load_prompts
from specdraft.data.ranks import Ranks
from specdraft.data.store.corpus import CachedTokens, Corpus, StreamedTexts
from specdraft.eval.costing.drafts import trained_drafter
from specdraft.eval.costing.measuring import cover_rows
from specdraft.eval.generation.answers import build_token_cache
from specdraft.eval.methods.registry import find, problems
from specdraft.eval.methods.trained import Trained
from specdraft.models.hub import check_login
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.shapes import target_shape
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.find import RECIPE
from specdraft.recipes.load import dump, load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import Screen
from specdraft.train.command import print_plan
from specdraft.train.counting.table import make_table
from specdraft.train.finish import finish
from specdraft.train.fit.accelerator import load_target, make_accelerator
from specdraft.train.plan import known_sizes
from specdraft.train.plan_lines import format_bytes


@entry
def main() -> None:
    """Parse, load the recipe, count, save and measure."""
    parser = recipe_parser(__doc__, "tiny_maxgram")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    arguments = parser.parse_intermixed_args()
    recipe = load_recipe(arguments.recipe, arguments.overrides, check=problems)
    if arguments.dry_run:
        show_plan(recipe)
        return
    check_login(recipe.hub)
    logging.basicConfig(level=logging.WARNING)
    accelerator = make_accelerator(recipe)
    with output_lock(Path(recipe.output.dir), Ranks.of(accelerator)):
        count_and_measure(recipe, accelerator)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def count_and_measure(recipe: Recipe, accelerator: Accelerator) -> None:
    """Make the table of a recipe; all ranks call this."""
    target = load_target(recipe, accelerator)
    corpus = open_corpus(recipe, target, accelerator)
    table = make_table(recipe, target, corpus, accelerator)
    if table is not None:
        dump(recipe, Path(recipe.output.dir) / RECIPE)
        if target.no_layers:
            target = load_target(recipe, accelerator, alone=True)
        report(recipe, target, table)


def open_corpus(recipe: Recipe, target: Target, accelerator: Accelerator) -> Corpus:
    """Open what is counted: the token cache, which is built first, or the sources as a stream."""
    everything = recipe.maxgram.pairs == "all"
    if recipe.maxgram.corpus == "stream":
        return StreamedTexts(recipe, target.tokenizer, everything)
    return CachedTokens(build_token_cache(recipe, target, accelerator), everything)


def report(recipe: Recipe, target: Target, table: MaxGramTable) -> None:
    """Show the table, measure its drafter beside the baselines, push it where the recipe says."""
    rows = Table.grid(padding=(0, 2))
    for name in ("rows", "tokens", "different_bigrams"):
        rows.add_row(name.replace("_", " "), f"{table.config.corpus[name]:,}")
    rows.add_row("coverage", f"{table.coverage:.1%} of the vocabulary has been seen")
    rows.add_row("agreement", f"{table.agreement:.1%} of the bigrams are those of the table")
    Screen(soft_wrap=True).print(rows)
    prompts = load_prompts(recipe, target.tokenizer)
    if any(find(name).is_priced for name in recipe.eval.methods):
        cover_rows(recipe, target, trained_drafter(recipe, target), recipe.eval.batch_size)
    finish(recipe, "table", target, Trained(table=table), prompts)


def show_plan(recipe: Recipe) -> None:
    """Print the resolved recipe and what a run of it would count and write."""
    shape, origin = target_shape(recipe)
    what = "counted while they are streamed"
    if recipe.maxgram.corpus == "tokens":
        texts, tokens, _ = known_sizes(recipe)
        what = "counted when the sources are read" if texts is None else f"at most {texts:,} rows"
        what = what if tokens is None else f"{texts:,} rows, {tokens:,} tokens"
    size = format_bytes(20 * shape.vocab_size)
    if (longest := recipe.maxgram.context) > 1:
        size += f", and 28 bytes for each context of 2 to {longest} tokens that is seen twice,"
    rows = [
        ("target", f"{recipe.target.model}: vocabulary {shape.vocab_size} ({origin})"),
        ("data", what),
        ("processes", str(PartialState().num_processes)),
        ("table", f"{size} at {recipe.output.dir}/table"),
    ]
    print_plan(recipe, rows)


if __name__ == "__main__":
    main()
