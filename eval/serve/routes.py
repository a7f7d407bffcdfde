"""How each method of ours is reached in vLLM, and the chain that it drafts on both sides.

An engine verifies chains. What its layouts hold it drafts itself (EAGLE, Medusa, students, n-gram
lookup); the rest goes through eval/serve/for_vllm.py. Our side decodes the same chain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.lookup.maxgram import MaxGramDrafter
from specdraft.eval.lookup.suffix import FirstSuffixes
from specdraft.eval.methods.registry import METHODS, Method, Setup
from specdraft.eval.serve.layouts import served_head
from specdraft.models.cards.lines import PROPOSER
from specdraft.models.target_files import model_folder
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.find import drafter_of
from specdraft.recipes.schema import Recipe

LONGEST = 256  # tokens of a suffix that vLLM looks for: ours has no bound, and hardly needs more


@dataclass(frozen=True)
class Route:
    """A method on both sides. `engine` returns what `vllm.LLM` is given to draft with, and may
    write to a folder of its own; `ours` is its row of the registry."""

    ours: Method
    engine: Callable[[Recipe, Path], dict]


def route(name: str) -> Route:
    """Return the route of a method. Raises RecipeError for one that no engine has."""
    if name not in ROUTES:
        raise RecipeError(
            f"method {name!r} has no route to vLLM, which verifies chains; known: "
            f"{', '.join(ROUTES)}"
        )
    return ROUTES[name]


def fixed_chain(recipe: Recipe) -> Recipe:
    """The recipe with drafts as an engine makes them: none is cut short for its probability, none
    has branches."""
    drafting, maxgram = replace(recipe.drafting, theta_prob=0.0), recipe.maxgram
    return replace(recipe, drafting=drafting, maxgram=replace(maxgram, branches=1))


# -- what vLLM is given ----------------------------------------------------------------------------


def _custom(method: str, length: Callable[[Recipe], int], **settings: tuple[str, ...]) -> Route:
    """Return the route of a method through our own class, with what is trained as it lies in the
    run's folder.

    settings: sections of the recipe, and which of their keys it drafts by.
    """
    ours = METHODS[method]

    def engine(recipe: Recipe, folder: Path) -> dict:
        tree = recipe.to_dict()
        given = {name: {key: tree[name][key] for key in keys} for name, keys in settings.items()}
        trained = {kind: _trained(recipe, kind) for kind in ours.needs}
        return {
            "speculative_config": _speculative("custom_class", PROPOSER, length(recipe)),
            "additional_config": {"specdraft": {"method": method} | trained | {"settings": given}},
        }

    return Route(ours, engine)


def _trained(recipe: Recipe, kind: str) -> str | list[str]:
    if kind == "cascade":
        return [_found(name) for name in recipe.cascade.students or (_student(recipe),)]
    return _found(drafter_of(recipe, kind))


def _found(place: str | Path) -> str:
    """A place as an engine finds it from anywhere: a folder's whole path, or a Hub id."""
    local = isinstance(place, Path) or Path(place).is_dir()
    return str(Path(place).absolute()) if local else place


def _student(recipe: Recipe) -> str:
    if recipe.student.training == "none":
        return str(model_folder(recipe.student.model, recipe.student.revision).absolute())
    return str(Path(recipe.output.dir).absolute() / "student")


def _speculative(method: str, model: str | Path, length: int) -> dict:
    return {"method": method, "model": str(model), "num_speculative_tokens": length}


def _served(method: str) -> Callable:
    """Return an `engine` of a `Route` that drafts by vLLM's own implementation, with the head in
    its layout."""

    def engine(recipe: Recipe, folder: Path) -> dict:
        served_head(recipe, "vllm").write(folder / method)
        length = recipe.medusa.heads if method == "medusa" else recipe.eval.chain_depth
        return {"speculative_config": _speculative(method, folder / method, length)}

    return engine


def _draft_model(recipe: Recipe, folder: Path) -> dict:
    config = _speculative("draft_model", _student(recipe), recipe.drafting.gamma)
    return {"speculative_config": config}


def _ngram(recipe: Recipe, folder: Path) -> dict:
    bounds = {"prompt_lookup_min": recipe.eval.lookup_match, "prompt_lookup_max": LONGEST}
    config = {"method": "ngram", "num_speculative_tokens": recipe.eval.lookup_copy}
    return {"speculative_config": config | bounds}


# -- what ours is ----------------------------------------------------------------------------------


def _medusa_chain(setup: Setup) -> MedusaDrafter:
    heads = setup.trained.medusa
    tree = StaticTree.chain(heads.config.heads, heads.config.heads)
    return MedusaDrafter(heads, setup.target, tree, setup.rows)


def _first_suffix(setup: Setup) -> MaxGramDrafter:
    """What vLLM's lookup is: behind the first occurrence of the longest suffix, and no table."""
    settings = setup.recipe.eval
    shape = (FirstSuffixes, settings.lookup_copy, settings.lookup_match)
    return MaxGramDrafter(*shape, rows=setup.rows, device=setup.target.device)


MEDUSA_CHAIN = Method("medusa", "Medusa's heads, a chain", _medusa_chain, needs=("medusa",))
NGRAM = Method("ngram", "vLLM's own prompt lookup", _first_suffix)


ROUTES: dict[str, Route] = {
    "eagle_chain": Route(METHODS["eagle_chain"], _served("eagle")),
    "eagle3_chain": Route(METHODS["eagle3_chain"], _served("eagle3")),
    "falcon_chain": _custom("falcon_chain", lambda r: r.eval.chain_depth),
    "medusa": Route(MEDUSA_CHAIN, _served("medusa")),
    "ssd": Route(METHODS["ssd"], _draft_model),
    "ngram": Route(NGRAM, _ngram),
    "prompt_lookup": _custom("prompt_lookup", lambda r: r.eval.lookup_copy, eval=("lookup_match",)),
    "maxgram": _custom("maxgram", lambda r: r.maxgram.n, maxgram=("min_match", "continuation")),
    "cascade": _custom(
        "cascade",
        lambda r: sum(r.cascade.k[0]) + r.maxgram.n,
        cascade=("k", "leniency", "copy_match"),
        maxgram=("n",),
    ),
}


def methods_of(recipe: Recipe, names: Sequence[str] = ()) -> list[str]:
    """The methods to compare: those asked for, else those of the recipe that were trained.

    Raises RecipeError where one has no route, or nothing is left.
    """
    for name in names:
        route(name)
    own = [
        name.replace("medusa_tree", "medusa").replace("_tree", "_chain")
        for name in recipe.eval.methods
    ]
    found = list(names) or [n for n in dict.fromkeys(own) if n in ROUTES and ROUTES[n].ours.needs]
    if not found:
        raise RecipeError(
            f"no method of eval.methods was trained and has a route to vLLM; name some with "
            f"--methods: {', '.join(ROUTES)}"
        )
    return found
