"""Who takes part in a comparison: finished drafters of one target, each as its run drafts with it.

A drafter is named by its folder in a run, the run (which stands for all that it has), a recipe, or,
for a head, a Hub id, which is read with the recipe of the first run among them. It drafts by the
last method of its recipe that drafts as it was trained, with the tree and the settings that were
fitted to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from specdraft.eval.measure.measurement import REFERENCE
from specdraft.eval.methods.registry import drafted_trees, featured, load_trained, needs, problems
from specdraft.eval.methods.setup import tree_method
from specdraft.eval.methods.trained import Trained
from specdraft.models.cards.log import log_in, records
from specdraft.models.hub import is_hub_id
from specdraft.models.published import is_published
from specdraft.models.saved import CONFIG
from specdraft.models.target import Target
from specdraft.recipes.errors import HeadError, RecipeError, in_a_line
from specdraft.recipes.find import RECIPE, drafters_of
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import TREE

SAME = ("model", "revision", "dtype", "chat_template")  # of one target
# What an answer depends on, and its time: all decode by the first one's.
COMMON = (
    *("prompts", "limit", "max_new_tokens", "temperature", "top_k", "top_p", "acceptance"),
    *("batch_size", "repeats", "spread", "seed", "threads", "prompt_tokens", "validation"),
)


@dataclass(frozen=True)
class Contestant:
    """A finished drafter: with what it drafts, and what it cost."""

    name: str
    recipe: Recipe
    trained: Trained
    method: str
    minutes: float | None  # of its training, over all continuations; None: nobody wrote them down

    def networks(self) -> list[nn.Module]:
        """What was trained of it, or counted."""
        table = [self.trained.table] if "table" in needs(self.method) else []
        return [*self.trained.networks(needs(self.method)), *table]

    def facts(self) -> dict:
        """What it cost: parameters (of a table: entries), their bytes, minutes of training."""
        every = ([*one.parameters()] or [*one.buffers()] for one in self.networks())
        tensors = [tensor for some in every for tensor in some]
        return {
            "name": self.name,
            "drafts_by": self.method,
            "parameters": sum(tensor.numel() for tensor in tensors),
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            "training_minutes": self.minutes,
        }


def read_recipes(names: Sequence[str], overrides: Sequence[str]) -> dict[str, Recipe]:
    """Return the recipe of each, with the settings of the first for all that is not a drafter's.

    Raises: RecipeError for two of one name, for one of another target (which is named), and for a
    Hub id without a run to read it with.
    """
    names = [one for name in names for one in _drafters_of(name)]
    if len({Path(n).resolve() if Path(n).exists() else n for n in names}) < len(names):
        raise RecipeError("one of them is named twice; name each once")
    ids = [name for name in names if _is_elsewhere(name)]
    recipes = {n: load_recipe(n, overrides, check=problems) for n in names if n not in ids}
    if not recipes:
        raise RecipeError(f"{ids[0]}: a run or a recipe of its target has to be named, too")
    base_name, base = next(iter(recipes.items()))
    for name in ids:
        own = [f"head={name}", "eval.tree=auto"]  # the tree beside its weights
        recipes[name] = load_recipe(base_name, [*overrides, *own], check=problems)
    for name, recipe in recipes.items():
        for key in SAME:
            told, first = getattr(recipe.target, key), getattr(base.target, key)
            if told != first:
                raise RecipeError(
                    f"{name} is of another target: target.{key} = {told}, and {first} of "
                    f"{base_name}; compare drafters of one target"
                )
    common = {key: getattr(base.eval, key) for key in COMMON}
    return {name: recipes[name].with_eval(**common) for name in names}


def _drafters_of(name: str) -> list[str]:
    """The folders of a run that has drafters of several kinds; else the name itself."""
    kinds = drafters_of(Path(name))
    return [str(Path(name) / kind) for kind in kinds] if len(kinds) > 1 else [name]


def _is_elsewhere(name: str) -> bool:
    """Whether it is a head of the Hub, or one in a folder that no training has written."""
    folder = Path(name)
    if not folder.exists():
        return is_hub_id(name)
    made_here = any((place / RECIPE).is_file() for place in (folder, folder.resolve().parent))
    return (folder / CONFIG).is_file() and not made_here


def enter(recipes: dict[str, Recipe], target: Target) -> tuple[list[Contestant], dict[str, str]]:
    """Load each drafter; return them, and of those that are not finished why they are left out.

    Raises: TargetError for a drafter of another target, RecipeError where none is finished.
    """
    entered, left_out = [], {}
    for given, recipe in recipes.items():
        try:
            recipe = _drafting(given, recipe)
            trained = load_trained(recipe, target, [featured(recipe.eval.methods)])
            method = _method(recipe, trained)
            alone = recipe.with_eval(methods=(method,))
            drafted_trees(alone, trained)  # a missing one is told here
        except (HeadError, RecipeError) as error:
            left_out[given] = in_a_line(error)
            continue
        log = _train_records(given, recipe) if needs(method) != ("table",) else []
        steps, done = recipe.train.steps, log[-1]["step"] if log else None
        if done and steps and done < steps and recipe.train.max_minutes is None:
            left_out[given] = f"training stands at step {done} of {steps}; let it finish"
            continue
        minutes = log[-1].get("minutes") if log else None
        name = _short(given, recipes)
        entered.append(Contestant(name, alone, trained, method, minutes))
    if not entered:
        told = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise RecipeError(f"none of them is finished: {told}")
    return entered, left_out


def _drafting(given: str, recipe: Recipe) -> Recipe:
    """The recipe, with its kind's own method where it has none of its kind: heads of papers' tables
    have one that decodes plainly only, a table that was counted for a head has that head's."""
    shown = featured(recipe.eval.methods)
    kind = "table" if Path(given).name == "table" else recipe.kind
    of_its_kind = needs(shown) == ("table",) if kind == "table" else shown != REFERENCE
    if of_its_kind:
        return recipe
    method = {"student": "ssd", "table": "maxgram"}.get(kind, f"{kind}_tree")
    return recipe.with_eval(methods=(REFERENCE, method))


def _method(recipe: Recipe, trained: Trained) -> str:
    """The method that a recipe measures last; for a head from elsewhere the one that suits its
    form: a tree, where it has one, else a chain."""
    if recipe.head.model is None or trained.head is None:
        return featured(recipe.eval.methods)
    tree, folder = tree_method(trained.head.config), Path(trained.head.folder)
    drawn = (folder / TREE).is_file() or is_published(folder)
    return tree if drawn else tree.replace("tree", "chain")


def _short(name: str, every: dict[str, Recipe]) -> str:
    """The last part of a name, where no other ends with it and it is not that of plain decoding."""
    last, *others = (
        Path(one).name.removesuffix(".yaml") for one in (name, *(every.keys() - {name}))
    )
    return str(Path(name).absolute()) if last == REFERENCE else name if last in others else last


def _train_records(given: str, recipe: Recipe) -> list[dict]:
    """What the log of a drafter's training has recorded. It lies in the drafter's own folder where
    another kind was trained in its run after it, else in the run's, which is another's where the
    head is from elsewhere."""
    if _is_elsewhere(given):
        return []
    run = Path(recipe.output.dir)
    return [*records(log_in(Path(given), run / recipe.kind, run), "train")]
