"""The Max-Gram table of a run: counted from a corpus, left in the run's folder."""

from pathlib import Path

from accelerate import Accelerator

from specdraft.data import fingerprint
from specdraft.data.ranks import Ranks
from specdraft.data.store.corpus import Corpus
from specdraft.models.maxgram import MaxGramTable
from specdraft.models.target import Target
from specdraft.recipes.find import RECIPE
from specdraft.recipes.load import dump
from specdraft.recipes.schema import Recipe
from specdraft.train.counting.bigrams import count, save_table

TABLE = "table"  # its folder in a run's


def make_table(
    recipe: Recipe, target: Target, corpus: Corpus, accelerator: Accelerator
) -> MaxGramTable | None:
    """Count the table of a recipe, and save it beside what else the run leaves; all ranks call
    this, the first one is given the table."""
    cache_dir, folder = Path(recipe.data.cache_dir), Path(recipe.output.dir) / TABLE
    size, context = target.vocab_size, recipe.maxgram.context
    counts = count(corpus, cache_dir, size, Ranks.of(accelerator), context)
    if not accelerator.is_main_process:
        return None
    tokenizer = fingerprint.of_tokenizer(target.tokenizer)["tokenizer"]
    table = counts.table(tokenizer, _described(recipe))
    save_table(table, folder)
    dump(recipe, folder / RECIPE)
    return table


def _described(recipe: Recipe) -> dict:
    """What a table was counted on."""
    data, section = recipe.data, recipe.maxgram
    described = {"sources": list(data.sources), "format": data.format, "answers": data.answers}
    return described | {"corpus": section.corpus, "pairs": section.pairs}
