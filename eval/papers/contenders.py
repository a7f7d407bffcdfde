"""The rows of CS Drafting's Table 2 (arXiv 2312.11462): what a cascade is compared with, tuned.

Plain decoding, SD with each student, Max-Gram alone, each student above Max-Gram, and the cascade
of all. Every row is tuned by itself (eval/measure/tuning.py), on prompts that none is measured
on; then all take turns on the measured prompts (eval/measure/rounds.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specdraft.data.prompts import Prompt, load_prompts
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.measurement import REFERENCE, Measurement, measure_entrants
from specdraft.eval.measure.questions import expand_turns
from specdraft.eval.measure.tuning import (
    FIRST,
    Scorer,
    Setting,
    apply_setting,
    recipe_part,
    sample_settings,
    successive_halving,
)
from specdraft.eval.methods.trained import Trained
from specdraft.models.target import Target
from specdraft.recipes.schema import CascadeSection, Recipe

OF_A_CATEGORY = ("swi_params", "swi_measured", "speedup", "identical", "near_ties")


@dataclass(frozen=True)
class Contender:
    """One row: a method with what it drafts with, and the setting that tuning chose."""

    name: str
    method: str
    recipe: Recipe
    trained: Trained
    setting: Setting = field(default_factory=dict)
    score: float | None = None  # of the last rung of tuning


def contenders(recipe: Recipe, trained: Trained) -> list[Contender]:
    """Return the rows, untuned; students are called by their number in `cascade.students`."""
    table, students = trained.table, trained.cascade
    numbered = list(enumerate(students, start=1))
    rows = [Contender("plain", REFERENCE, recipe, Trained())]
    rows += [Contender(f"SD {n}", "ssd", recipe, Trained(student=one)) for n, one in numbered]
    rows.append(Contender("MaG", "maxgram", recipe, Trained(table=table)))
    for n, one in numbered:
        lone = Trained(table=table, cascade=(one,))
        rows.append(Contender(f"{n} + MaG", "cascade", alone(recipe, n - 1), lone))
    if len(students) > 1:
        name = "".join(f"{n} + " for n, _ in numbered) + "MaG"
        rows.append(Contender(name, "cascade", recipe, Trained(table=table, cascade=students)))
    return rows


def asked(recipe: Recipe, target: Target) -> list[Prompt]:
    """The recipe's prompts, one per turn."""
    with cpu_threads(recipe.eval.threads):
        return expand_turns(recipe, target, load_prompts(recipe, target.tokenizer))


def alone(recipe: Recipe, place: int) -> Recipe:
    """Return the recipe with one student of its cascade, which contributes what it did to whoever
    reviewed it; Max-Gram contributes as before to the target and to its own reviewer."""
    k, names = recipe.cascade.k, recipe.cascade.students
    section = CascadeSection(
        students=names and (names[place],),
        k=((max(k[place][place], 1), k[0][-1]), (0, k[-1][-1])),
        copy_match=recipe.cascade.copy_match,
    )
    return replace(recipe, cascade=section)


def tuned(
    row: Contender, target: Target, prompts: Sequence[Prompt], candidates: int, by: str
) -> Contender:
    """Return a row with the best of up to `candidates` settings in its recipe."""
    if row.method == REFERENCE:
        return row
    tried = sample_settings(row.recipe, row.method, candidates, row.recipe.eval.seed)
    measure = Scorer(row.recipe, row.method, target, row.trained, prompts, by)
    *_, (_, scored) = successive_halving(tried, measure, FIRST, len(prompts))
    score, best = scored[0]
    return replace(row, recipe=apply_setting(row.recipe, best), setting=best, score=score)


def measured(rows: Sequence[Contender], target: Target, prompts: Sequence[Prompt]) -> list[dict]:
    """Decode all prompts by all rows in turns; return each row's report, categories with SWI.

    That of a single row at a time: a category has the forwards and the time of its own prompts.
    """
    with cpu_threads(rows[0].recipe.eval.threads):
        measurements = measure_entrants(rows, target, prompts)
    reports = []
    for row, done in zip(rows, measurements, strict=True):
        tuning = {"score": row.score, "setting": recipe_part(row.recipe, row.setting)}
        reports.append({"row": row.name} | tuning | _by_category(done))
    return reports


def _by_category(done: Measurement) -> dict:
    """The last method's figures, in which every category has also those of its prompts alone."""
    whole = done.rows()[-1]
    if done.recipe.eval.batch_size > 1:
        return whole
    for part in whole["categories"]:
        own = [n for n, prompt in enumerate(done.prompts) if prompt.category == part["category"]]
        figures = done.of([*done.outcomes], own).rows()[-1]
        part |= {key: figures[key] for key in OF_A_CATEGORY}
    return whole
