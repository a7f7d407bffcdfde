"""All methods of decoding, one row each. A new drafter is a file beside this one and a row here.

Whoever needs to know of methods reads the rows: a recipe is checked against them (`problems`), a
run's trained parts are loaded for them, eval/bench.py measures them, eval/fit.py searches their
settings, eval/custom_generate.py offers them inside transformers, and `--help` describes them.
A drafter that is no part of the package is tried out with `registered`.

METHOD:WAY decodes a drafter's method in another way: `padded` as vanilla multi-sample decoding does
(`pad_kv`, `pad_inputs`: one of its two pads; eval/engine/padded.py), `dynamic` from one queue
instead of batches that end together. `padded` alone is prompt_lookup:padded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from specdraft.eval.drafters.beam import StochasticBeam
from specdraft.eval.drafters.best_first import BestFirst
from specdraft.eval.drafters.branching import Branching
from specdraft.eval.drafters.cascade import CascadeDrafter
from specdraft.eval.drafters.level import TSD
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.token_graph import GSD
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.padded import PADDINGS
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.eval.lookup.tail import MaxGramTail
from specdraft.eval.methods.setup import (
    Setup,
    make_beside,
    make_dynamic,
    make_head,
    make_maxgram,
    make_medusa,
    make_ngrams,
    measured_costs,
    tree_file,
)
from specdraft.eval.methods.spaces import (
    GSD_SPACE,
    LOOKUP_SPACE,
    MAXGRAM_SPACE,
    SSD_SPACE,
    Space,
    cascade_space,
)
from specdraft.eval.methods.trained import KINDS, Sections, Trained
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import MOST_LINES, nearest, shown
from specdraft.recipes.fitted_tree import read_fit, size_of
from specdraft.recipes.schema import EvalSection, Recipe
from specdraft.recipes.static_trees import AUTO, TREE, load_tree_paths

WAYS = (*PADDINGS, "dynamic")
ALIASES = {"padded": "prompt_lookup:padded"}


@dataclass(frozen=True)
class Method:
    """One way of decoding: ours, which has `make`, or transformers' own, which has `generate`."""

    name: str
    description: str
    make: Callable[[Setup], Drafter | None] | None = None  # None made: plain decoding
    generate: Callable[[Setup], dict] | None = None  # arguments of measure/hf_generate.py
    needs: tuple[str, ...] = ()  # kinds of what is trained: eval/methods/trained.py
    trainer: str | None = None  # the script that trains them
    rule: str | None = None  # its paper's acceptance when sampling; None: eval.acceptance
    tuned: Space | Callable[[Recipe], Space] | None = None  # what eval/fit.py searches
    drafts_tree: bool = False  # eval.tree, which eval/fit.py searches, too
    is_priced: bool = False  # whether it drafts by what eval/costs.py has measured

    @property
    def is_ours(self) -> bool:
        """Whether our engine decodes it; transformers draws other samples, and pads rows."""
        return self.generate is None

    @property
    def is_fitted(self) -> bool:
        """Whether eval/fit.py has something to search."""
        return self.drafts_tree or self.tuned is not None

    def check(self, trained: Trained) -> None:
        """Raise RecipeError unless there is all that it drafts with."""
        for need in self.needs:
            if not getattr(trained, need):
                raise RecipeError(f"method {self.name} needs {KINDS[need].remedy}")


FALCON = {"needs": ("head",), "trainer": "train/falcon.py"}
EAGLE3 = {"needs": ("head",), "trainer": "train/eagle3.py"}
EAGLE = {"needs": ("head",), "trainer": "train/eagle.py"}
MEDUSA = {"needs": ("medusa",), "trainer": "train/medusa.py"}
STUDENT = {"needs": ("student",), "trainer": "train/distill.py"}
TABLE = {"needs": ("table",), "trainer": "train/maxgram.py"}
CASCADE = {"needs": ("cascade", "table"), "trainer": "train/distill.py"}
BOTH = {"needs": ("head", "table"), "trainer": "train/falcon.py"}

# -- the rows; `s` is a Setup ---------------------------------------------------------------------

# fmt: off
ROWS = (
    Method("plain", "the target alone, in our engine", lambda s: None),
    Method("generate", "transformers' generate alone", generate=lambda s: {}),
    Method("hf_prompt_lookup", "transformers' prompt lookup",
           generate=lambda s: {"lookup_tokens": s.recipe.eval.hf_lookup_copy}),
    Method("prompt_lookup", "copies what followed the last tokens earlier on",
           lambda s: PromptLookup(s.recipe.eval.lookup_match, s.recipe.eval.lookup_copy, s.rows,
                                  s.target.device), tuned=LOOKUP_SPACE),
    Method("falcon_chain", "Falcon's head, a chain", make_head, **FALCON),
    Method("falcon_tree", "Falcon's head, a static tree", partial(make_head, tree=True), **FALCON,
           drafts_tree=True),
    Method("falcon_dynamic", "Falcon's head, drafts sized at each step", make_dynamic, **FALCON,
           is_priced=True),
    Method("maxgram", "copies after the longest suffix, then bigrams", make_maxgram, **TABLE,
           tuned=MAXGRAM_SPACE),
    Method("ngram_dynamic", "what follows the last tokens in a table, sized at each step",
           make_ngrams, **TABLE, is_priced=True),
    Method("ssd", "a draft LM, a chain",
           lambda s: SSD(*s.student, s.drafting.gamma, s.drafting.theta_prob),
           **STUDENT, tuned=SSD_SPACE),
    Method("tsd", "a draft LM, a pruned tree", lambda s: TSD(*s.student, **s.pruned), **STUDENT),
    Method("gsd", "a draft LM, a token graph",
           lambda s: GSD(*s.student, s.drafting.tau, s.drafting.max_copies, **s.pruned),
           **STUDENT, tuned=GSD_SPACE),
    Method("ssd_dynamic", "a draft LM, drafts sized at each step",
           lambda s: BestFirst(*s.student, measured_costs(s, "student"), s.drafting.depth,
                               s.drafting.out_degree),
           **STUDENT, is_priced=True),
    Method("rsd_c", "a draft LM, siblings without replacement (RSD-C)",
           lambda s: Branching(*s.student, s.drafting.branching), **STUDENT, rule="recursive"),
    Method("rsd_s", "a draft LM, stochastic beams (RSD-S)",
           lambda s: StochasticBeam(*s.student, s.drafting.gamma, s.drafting.beam_width),
           **STUDENT, rule="recursive"),
    Method("specinfer", "a draft LM, independent siblings (SpecInfer)",
           lambda s: Branching(*s.student, s.drafting.branching,
                               s.drafting.equal_siblings == "merged"),
           **STUDENT, rule="multistep"),
    Method("spectr", "a draft LM, independent chains (SpecTr)",
           lambda s: Branching(*s.student, (s.drafting.chains, *[1] * (s.drafting.gamma - 1))),
           **STUDENT, rule="kseq"),
    Method("hf_assisted", "transformers' assisted generation", **STUDENT,
           generate=lambda s: {"student": s.trained.student, "gamma": s.drafting.gamma}),
    Method("cascade", "draft LMs above Max-Gram (CS Drafting)",
           lambda s: CascadeDrafter(s.trained.cascade, make_maxgram(s), s.recipe.cascade.k,
                                    s.recipe.cascade.leniency, s.rows, s.capacity,
                                    s.recipe.cascade.copy_match),
           **CASCADE, tuned=cascade_space),
    Method("falcon_maxgram", "Falcon's tree, then Max-Gram",
           lambda s: MaxGramTail(make_head(s, tree=True), make_maxgram(s), s.recipe.maxgram.n,
                                 s.recipe.maxgram.branches), **BOTH, drafts_tree=True),
    Method("falcon_ngram", "Falcon's head beside a table, drafts sized at each step", make_beside,
           **BOTH, is_priced=True),
    Method("eagle_chain", "EAGLE-1's head, a chain", partial(make_head, only="eagle_chain"),
           **EAGLE),
    Method("eagle_tree", "EAGLE-1's head, a static tree",
           partial(make_head, tree=True, only="eagle_tree"), **EAGLE, drafts_tree=True),
    Method("eagle_dynamic", "EAGLE-1's head, drafts sized at each step",
           partial(make_dynamic, only="eagle_dynamic"), **EAGLE, is_priced=True),
    Method("eagle3_chain", "EAGLE-3's head, a chain", partial(make_head, only="eagle3_chain"),
           **EAGLE3),
    Method("eagle3_tree", "EAGLE-3's head, a static tree",
           partial(make_head, tree=True, only="eagle3_tree"), **EAGLE3, drafts_tree=True),
    Method("eagle3_dynamic", "EAGLE-3's head, drafts sized at each step",
           partial(make_dynamic, only="eagle3_dynamic"), **EAGLE3, is_priced=True),
    Method("medusa_chain", "Medusa's heads, a chain", make_medusa, **MEDUSA),
    Method("medusa_tree", "Medusa's heads, a static tree", partial(make_medusa, tree=True),
           **MEDUSA, drafts_tree=True),
)
# fmt: on
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


@contextmanager
def registered(method: Method) -> Iterator[None]:
    """Have one method more as long as the context is open; RecipeError where its name is taken."""
    if method.name in METHODS:
        raise RecipeError(f"method {method.name} is registered already; give another name")
    METHODS[method.name] = method
    try:
        yield
    finally:
        del METHODS[method.name]


# -- what is asked of the rows ---------------------------------------------------------------------


def find(name: str) -> Method:
    """Return the method of METHOD or METHOD:WAY; RecipeError for an unknown one."""
    base, colon, way = ALIASES.get(name, name).partition(":")
    method = METHODS.get(base)
    if method is None or (colon and not (method.is_ours and way in WAYS)):
        raise RecipeError(f"unknown method {shown(name)}; known: {_known(name)}")
    return method


def way_of(name: str) -> str:
    """Return the way of METHOD:WAY; none of a METHOD alone."""
    return ALIASES.get(name, name).partition(":")[2]


def _known(name: str) -> str:
    """Name all methods, and the one that an unknown name is nearest to."""
    ways = [f"{row.name}:{way}" for row in METHODS.values() if row.is_ours for way in WAYS]
    names = [*METHODS, *ALIASES]
    return (
        f"{', '.join(names)} (most with :{', :'.join(WAYS)}, too); nearest is "
        f"{nearest(name[:100], [*names, *ways])}"
    )


def needs(name: str) -> tuple[str, ...]:
    """Which kinds of what is trained a method, decoded in whatever way, drafts with."""
    return find(name).needs


def drafted_trees(recipe: Recipe, trained: Trained) -> list[list[tuple[int, ...]]]:
    """The nodes of the static trees that a recipe's methods draft."""
    files = (_tree_file_of(name, recipe, trained) for name in recipe.eval.methods)
    return [load_tree_paths(file) for file in files if file is not None]


def tree_of(name: str, recipe: Recipe, trained: Trained) -> str | None:
    """The static tree of a method, in words; None where it has none."""
    if (file := _tree_file_of(name, recipe, trained)) is None:
        return None
    paths = load_tree_paths(file)
    own = recipe.eval.tree == AUTO and Path(file).name == TREE
    which = "fitted" if own and read_fit(Path(file)) else Path(file).stem
    return f"{which}, {size_of(len(paths), max(map(len, paths)))}"


def _tree_file_of(name: str, recipe: Recipe, trained: Trained) -> str | None:
    method = find(name)
    own = Trained(medusa=trained.medusa) if "medusa" in method.needs else trained
    return tree_file(recipe, own) if method.drafts_tree else None


def rule_of(name: str, recipe: Recipe) -> str:
    """The acceptance rule of a method when sampling: its own, or the recipe's."""
    method = find(name)
    return (method.rule or recipe.eval.acceptance) if method.is_ours else "transformers"


def space_of(recipe: Recipe, name: str) -> Space:
    """Return the values of everything that is tuned of a method; RecipeError where nothing is."""
    tuned = METHODS[name].tuned if name in METHODS else None
    if tuned is None:
        known = ", ".join(row.name for row in METHODS.values() if row.tuned)
        raise RecipeError(f"nothing to fit of {name!r}; known: {known}")
    return tuned(recipe) if callable(tuned) else tuned


def featured(names: Sequence[str]) -> str:
    """Return the method that shows a run at its best: our last one that drafts as it was trained,
    else the last."""
    trained = [name for name in names if find(name).is_ours and needs(name)]
    return [*names, *trained][-1]


def fitted(names: Sequence[str]) -> str:
    """Return the method that a run is fitted for: its last one that is trained and has something
    to fit, else any. RecipeError where there is none."""
    able = [name for name in names if find(name).is_fitted]
    if not able:
        known = ", ".join(row.name for row in METHODS.values() if row.is_fitted)
        raise RecipeError(f"nothing of eval.methods can be fitted; give --method, one of {known}")
    return [*able, *(name for name in able if needs(name))][-1].partition(":")[0]


def describe() -> str:
    """The methods with a line each, as `--help` shows them."""
    width = max(map(len, METHODS))
    rows = (f"  {row.name:{width}}  {row.description}" for row in METHODS.values())
    ways = [f"  METHOD:{' METHOD:'.join(WAYS)}", f"  {'':{width}}  see eval/README.md"]
    return "\n".join(["methods:", *rows, *ways])


def make_drafter(name: str, setup: Setup) -> Drafter | None:
    """Build the drafter of one of our methods; None for plain decoding.

    Raises RecipeError where something it drafts with is missing, and for a method of transformers.
    """
    method = find(name)
    if not method.is_ours:
        raise RecipeError(f"{name} is transformers' own way to draft, and no drafter of ours")
    method.check(setup.trained)
    return method.make(setup)


def load_trained(
    recipe: Recipe, target: Target, names: Iterable[str] | None = None, run: Path | None = None
) -> Trained:
    """Load what methods (None: the recipe's) need from the folder of a run (None: `output.dir`),
    or from where the recipe says. Raises HeadError, TargetError.
    """
    names = recipe.eval.methods if names is None else names
    kinds = {need for name in names for need in needs(name)}
    run = run or Path(recipe.output.dir)
    # Without others named, the cascade is of the recipe's own student.
    own = "cascade" in kinds and recipe.cascade.students is None
    wanted = {*kinds, "student"} - {"cascade"} if own else kinds
    found = {name: kind.load(recipe, target, run) for name, kind in KINDS.items() if name in wanted}
    if own:
        found["cascade"] = (found["student"],)
    return Trained(**found)


def problems(sections: Sections) -> list[str]:
    """Return what is wrong with the methods that a recipe names: what `load_recipe` is handed.

    One line each, in a user's words: the key, the value, the way out.
    """
    found = []
    if data := sections.get("data"):
        ours = [row.name for row in METHODS.values() if row.is_ours]
        if data.drafter not in ours:
            guess = nearest(data.drafter[:100], ours)
            allowed = f"must be one of {', '.join(ours)}; nearest is {guess}"
            found.append(data.complaint("drafter", allowed))
    if "eval" in sections:
        found += islice(_of_methods(sections["eval"], sections), MOST_LINES + 1)
    return list(dict.fromkeys(found))


def _of_methods(settings: EvalSection, sections: Sections) -> Iterator[str]:
    foreign = []
    for number, name in enumerate(settings.methods):
        try:
            method = find(name)
        except RecipeError:
            allowed = f"entry {number} ({shown(name)}) must be one of {_known(name)}"
            yield settings.complaint("methods", allowed)
            continue
        foreign += [] if method.is_ours else [name]
        for need in method.needs:
            yield from KINDS[need].problems(name, sections)
    if settings.spread > 1 and foreign:
        way_out = "leave it out of eval.methods or set eval.spread to 1"
        unable = f"{foreign[0]} cannot give each row its own length; {way_out}"
        yield settings.complaint("spread", unable)
