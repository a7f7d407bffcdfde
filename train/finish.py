"""The end of every training: the drafter is measured, and the report is shown, kept and pushed."""

from pathlib import Path

from specdraft.data.atomic import write_atomic
from specdraft.data.prompts import Prompt
from specdraft.eval.measure.report import evaluate, write_json, write_report
from specdraft.eval.measure.table import print_report
from specdraft.eval.methods.trained import CARDS, Trained
from specdraft.models.portable import portable
from specdraft.models.publish import REPORT, pages, publish
from specdraft.models.target import Target
from specdraft.recipes.find import drafter_folder
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell


def finish(
    recipe: Recipe, kind: str, target: Target, trained: Trained, prompts: list[Prompt]
) -> None:
    """Measure a drafter of a kind beside the baselines. Leave the report in `output.dir`, and with
    the card beside the drafter; push it where the recipe says, and tell what lies where."""
    card, run = CARDS[kind], Path(recipe.output.dir)
    report = evaluate(recipe, target, trained, prompts, recipe.eval.methods)
    folder = drafter_folder(run, card.kind)
    write_report(report, run)
    print_report(report)
    if folder.is_dir():  # a student that is used as it is was made elsewhere
        write_json(portable(report), folder / REPORT)
        for name, content in pages(recipe, card).items():
            write_atomic(folder / name, content)
    publish(recipe, card)
    drafter = folder if folder.is_dir() else run
    tell(f"trained  {drafter}")
    tell(f"report   {run / 'report.html'}")
    tell(f"next     specdraft chat {drafter}")
