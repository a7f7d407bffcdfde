"""The end of every training: its report is written, shown, kept beside the drafter and pushed."""

from pathlib import Path

from specdraft.data.atomic import write_atomic
from specdraft.eval.measure.report import write_json, write_report
from specdraft.eval.measure.table import print_report
from specdraft.models.cards.lines import Card
from specdraft.models.portable import portable
from specdraft.models.publish import REPORT, pages, publish
from specdraft.recipes.find import drafter_folder
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import tell


def finish(recipe: Recipe, card: Card, report: dict) -> None:
    """Leave a training's report in `output.dir`, and beside its drafter the report and the card;
    push the drafter where the recipe says, and tell what lies where."""
    run = Path(recipe.output.dir)
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
