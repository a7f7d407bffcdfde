"""What drafters are made from: a recipe's settings, and what was trained.

A row of eval/methods/registry.py says in a line how its drafter is made; what takes more is here.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specdraft.eval.drafters.beside import FalconBesideTable
from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.ngrams import NGramDrafter
from specdraft.eval.drafters.pass_options import DEFAULT, PassOptions
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.lookup.maxgram import CONTINUATIONS, MaxGramDrafter
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import CostModel, costs_file, load_costs
from specdraft.models.eagle3 import Eagle3Config
from specdraft.models.falcon import FalconConfig
from specdraft.models.published import is_published
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fitted_tree import fitted_tree
from specdraft.recipes.schema import DraftingSection, Recipe
from specdraft.recipes.static_trees import AUTO, TREE, TREES, load_tree_paths


@dataclass(frozen=True)
class Setup:
    """What a drafter is made for: whose tokens it drafts, with what, for how many rows."""

    recipe: Recipe
    target: Target
    trained: Trained
    rows: int
    capacity: int  # tokens of a row: its prompt and its answer

    @property
    def drafting(self) -> DraftingSection:
        return self.recipe.drafting

    @property
    def student(self) -> tuple[Target, int, int]:
        """What every drafter around a student takes first: it, rows and capacity."""
        return self.trained.student, self.rows, self.capacity

    @property
    def pruned(self) -> dict:
        """What the recipe says of trees that are pruned, as TSD and GSD take it."""
        own, keys = self.drafting, ("depth", "out_degree", "theta_prob", "theta_sib")
        drop = {"drop_siblings": own.sibling_pruning == "drop", "nodes": own.max_nodes}
        return {key: getattr(own, key) for key in keys} | drop


PUBLISHED = "eagle_k1_depth5"  # that EAGLE's authors publish with their heads
DRAFTERS = ("head", "medusa", "student")  # in `Trained`, that eval/costs.py measures


def drafter_form(trained: Trained, options: PassOptions) -> dict[str, Any] | None:
    """What the time of a draft depends on, as costs.json has it: the kind of a drafter, its sizes,
    and how it is run; None where nothing is trained."""
    for kind in DRAFTERS:
        part = getattr(trained, kind)
        if part is not None:
            config = {} if kind == "student" else asdict(part.config) | {"target": {}}
            known = {"kind": kind, "config": config}
            if options.dtype is not DEFAULT.dtype:
                known["dtype"] = str(options.dtype).removeprefix("torch.")
            return known | ({"compiled": True} if options.compiles else {})
    return None


def tree_method(config: FalconConfig | Eagle3Config) -> str:
    """The method of a head of this config that drafts trees."""
    if config.fusion == "layers":
        return "eagle3_tree"
    return "eagle_tree" if config.is_eagle else "falcon_tree"


def own_methods(methods: Sequence[str], config: FalconConfig | Eagle3Config) -> tuple[str, ...]:
    """Call methods of Falcon's head by the name of the head of this config: a recipe of Falcon's
    may measure a published EAGLE head."""
    kind = tree_method(config).removesuffix("tree")
    names = (re.sub(r"^falcon_(?=(chain|tree|dynamic)\b)", kind, name) for name in methods)
    return tuple(dict.fromkeys(names))


def make_head(setup: Setup, tree: bool = False, only: str | None = None) -> FalconDrafter:
    """A head's chain or static tree. RecipeError for the method `only` with another's head."""
    config, settings = setup.trained.head.config, setup.recipe.eval
    _check_head(only, config)
    plan = StaticTree.chain(settings.chain_depth, config.block_size)
    if tree:
        file = tree_file(setup.recipe, setup.trained)
        plan = StaticTree.of_file(file, config.block_size)
    how = setup.rows, setup.capacity, PassOptions.of(settings, setup.target)
    return FalconDrafter(setup.trained.head, setup.target, plan, *how)


def _check_head(only: str | None, config: FalconConfig | Eagle3Config) -> None:
    own = tree_method(config)
    if only and (wanted := only.partition("_")[0]) != own.partition("_")[0]:
        form = "3 head (fusion layers)" if wanted == "eagle3" else "1 head (k = 1, linear)"
        raise RecipeError(
            f"method {only} needs an EAGLE-{form}; this one has k = {config.block_size}, "
            f"{config.fusion}: measure {own}, or train one: train/{wanted}.py"
        )


def make_dynamic(setup: Setup, only: str | None = None) -> DynamicFalcon:
    """A head's drafts by what they are worth. RecipeError for the method `only` with another's."""
    head, sizes = setup.trained.head, (setup.rows, setup.capacity)
    _check_head(only, head.config)
    options = PassOptions.of(setup.recipe.eval, setup.target)
    return DynamicFalcon(head, setup.target, measured_costs(setup, "head"), *sizes, options=options)


def measured_costs(setup: Setup, kind: str) -> CostModel | None:
    """What eval/costs.py has measured for the run, if it has; kind: of the drafter, whose drafts
    have no price where those of another one, which shares the run's folder, were measured last."""
    path = costs_file(setup.recipe, setup.target)
    if not path.is_file():
        return None
    own = Trained(**{kind: getattr(setup.trained, kind)})
    options = PassOptions.of(setup.recipe.eval, setup.target)
    return load_costs(path, setup.target, drafter_form(own, options))


def make_medusa(setup: Setup, tree: bool = False) -> MedusaDrafter:
    """Medusa heads' chain or static tree."""
    depth = min(setup.recipe.eval.chain_depth, setup.trained.medusa.config.heads)
    plan = StaticTree.chain(depth, depth)
    if tree:
        own = Trained(medusa=setup.trained.medusa)  # a head beside it has a tree of its own
        paths = load_tree_paths(tree_file(setup.recipe, own))
        plan = StaticTree(paths, max(map(len, paths)))
    return MedusaDrafter(setup.trained.medusa, setup.target, plan, setup.rows)


def tree_file(recipe: Recipe, trained: Trained) -> str | None:
    """The name or the place of the static tree that a recipe's head drafts: the recipe's, or the
    one beside the weights, or of a published head EAGLE's own; None where there are no weights.
    Raises RecipeError for weights without a tree, or with that of others."""
    if recipe.eval.tree != AUTO:
        return recipe.eval.tree
    part = trained.head or trained.medusa
    if part is None:
        return None
    if part.folder and is_published(part.folder) and not (part.folder / TREE).is_file():
        return str(TREES / f"{PUBLISHED}.yaml")
    return str(fitted_tree(part.folder, part.hash()))


def make_maxgram(setup: Setup) -> MaxGramDrafter:
    section, bigrams = setup.recipe.maxgram, setup.trained.table.next_id.tolist()
    shape = (CONTINUATIONS[section.continuation], section.n, section.min_match, section.branches)
    return MaxGramDrafter(*shape, bigrams, setup.rows, setup.target.device)


def make_ngrams(setup: Setup) -> NGramDrafter:
    """A table's drafts by what they are worth."""
    how = {"rows": setup.rows, "device": setup.target.device}
    return NGramDrafter(setup.trained.table.followers(), measured_costs(setup, "table"), **how)


def make_beside(setup: Setup) -> FalconBesideTable:
    """A head's and a table's drafts by what they are worth."""
    head, known = setup.trained.head, setup.trained.table.followers()
    how = setup.rows, setup.capacity, PassOptions.of(setup.recipe.eval, setup.target)
    return FalconBesideTable(head, setup.target, known, measured_costs(setup, "head"), *how)
