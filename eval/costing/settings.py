"""The settings of a drafter are fitted to a machine: lengths, thresholds, what copies look for.

The same search as a tree's: every setting is priced, by a rehearsal over the validation prompts'
answers (eval/costing/rehearsal.py); the best few decode these prompts in turns.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specdraft.data.atomic import write_atomic
from specdraft.eval.costing.drafts import trained_drafter
from specdraft.eval.costing.grid import Grid
from specdraft.eval.costing.measuring import measure_costs
from specdraft.eval.costing.race import combined_speedup, fitting_prompts, speedups
from specdraft.eval.costing.rehearsal import rehearse
from specdraft.eval.costing.replay import Load, answers
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.tuning import Setting, apply_setting, recipe_part, sample_settings
from specdraft.eval.methods.registry import Setup, load_trained, make_drafter
from specdraft.eval.pricing.cost import CostModel
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

CANDIDATES = 32  # settings that are priced


@dataclass(frozen=True)
class PricedSetting:
    """Values by recipe path, what a step is expected to bring, and how fast decoding is."""

    setting: Setting
    tokens: float
    expected: float  # x plain
    measured: float | None = None

    def __str__(self) -> str:
        return ", ".join(f"{path} {value}" for path, value in self.setting.items())


def fit_settings(recipe: Recipe, target: Target, method: str, count: int) -> list[PricedSetting]:
    """Fit the settings of a method that drafts from tokens; return what was tried, the best first.

    count: settings that are decoded with. Raises RecipeError for a method without any to fit, or
    without what it drafts with, DataError where no validation prompts are left.
    """
    settings = sample_settings(recipe, method, CANDIDATES, recipe.eval.seed)
    trained, prompts = load_trained(recipe, target, [method]), fitting_prompts(recipe, target)
    with cpu_threads(recipe.eval.threads):
        grid = Grid.for_rows(recipe.eval.batch_size)
        costs = measure_costs(recipe, target, trained_drafter(recipe, target), grid).model
        load = Load(answers(target, prompts, recipe.eval.max_new_tokens), recipe.eval.batch_size)
        longest = max(len(text.ids) for text in load.texts)
        setup = Setup(recipe, target, trained, load.rows, longest)
        priced = [_priced(one, method, setup, load, costs) for one in settings]
        best = sorted(priced, key=lambda one: -one.expected)[:count]
        recipes = [apply_setting(recipe, one.setting) for one in best]
        seconds = load.plain_ms(costs) / 1e3 * (1 + sum(1 / one.expected for one in best))
        measured = speedups(method, recipes, target, trained, prompts, seconds)
    found = [replace(one, measured=speed) for one, speed in zip(best, measured, strict=True)]
    return sorted(found, key=lambda one: -combined_speedup(one.expected, one.measured))


def _priced(
    setting: Setting, method: str, setup: Setup, load: Load, costs: CostModel
) -> PricedSetting:
    """What a method is expected to bring and to take with a setting in a setup's recipe."""
    own = replace(setup, recipe=apply_setting(setup.recipe, setting))
    done = rehearse(make_drafter(method, own), load, costs)
    return PricedSetting(setting, load.tokens / done.steps, load.plain_ms(costs) / done.ms)


def write_setting(recipe: Recipe, method: str, best: PricedSetting, out: Path) -> None:
    """Write a setting as a part of a recipe, which any command takes after the recipe."""
    part = recipe_part(recipe, best.setting)
    note = f"# {method} of {recipe.name}: {best.measured:.2f} x plain, {best.expected:.2f} expected"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, f"{note}\n{yaml.safe_dump(part, default_flow_style=None)}".encode())
