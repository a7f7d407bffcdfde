"""What training leaves in a run's folder: its kinds, how each is loaded and what its card says."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from specdraft.data import fingerprint
from specdraft.models.cards.lines import Card
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead
from specdraft.models.maxgram import MaxGramTable, load_table
from specdraft.models.medusa import MedusaHeads
from specdraft.models.published import load_head
from specdraft.models.student import check_tokens, finished_student, load_student
from specdraft.models.target import Target
from specdraft.models.weights.identity import hash_weights
from specdraft.recipes.find import drafter_of
from specdraft.recipes.schema import Recipe
from specdraft.recipes.static_trees import AUTO, load_tree_paths, tree_block_size

Source = str | Path  # a folder or a Hub id
Sections = Mapping[str, Any]  # of a recipe, by name; one that is unsound is missing


@dataclass(frozen=True)
class Trained:
    """What the methods of a run draft with; None or empty where none asks for it."""

    head: FalconHead | Eagle3Head | None = None
    table: MaxGramTable | None = None
    student: Target | None = None
    cascade: tuple[Target, ...] = ()  # students, from the largest to the smallest
    medusa: MedusaHeads | None = None

    @property
    def students(self) -> list[Target]:
        """All students, those of the cascade first."""
        return [*filter(None, (*self.cascade, self.student))]

    def networks(self, kinds: Collection[str]) -> list[nn.Module]:
        """The networks among some kinds, in the order of a draft's passes."""
        heads = [getattr(self, name) for name in ("head", "medusa") if name in kinds]
        students = self.cascade if "cascade" in kinds else ()
        students += (self.student,) if "student" in kinds else ()
        return [*heads, *(student.model for student in students)]

    def check_tokens(self, target: Target) -> None:
        """Raise TargetError where students or a table draft other tokens than the target's."""
        for student in self.students:
            check_tokens(student, target)
        if self.table:
            self.table.check(target.name, target.vocab_size, None)

    def weights(self) -> list[str]:
        """Hashes of all that there is to draft with."""
        own = (self.head and self.head.hash(), self.table and hash_weights(self.table))
        hashes = (*own, self.medusa and self.medusa.hash())
        return [*filter(None, hashes), *(one.identity()["weights"] for one in self.students)]


@dataclass(frozen=True)
class Kind:
    """One kind of what is trained: a field of `Trained`."""

    remedy: str  # what a method that has none of it needs, and what to do
    load: Callable[[Recipe, Target, Path], Any]  # of a run's folder
    # By its own name, or of students of a cascade by theirs where they are names; revision.
    fetch: Callable[[Any, str | None, Target], Any]
    # What is wrong with a recipe whose eval.methods have a method, by its name, that needs it.
    problems: Callable[[str, Sections], list[str]] = lambda method, sections: []


def _of_head(method: str, sections: Sections) -> list[str]:
    if "head" not in sections or sections["head"].model is not None:
        return []  # the section is not about the head that drafts
    if sections["eval"].tree == AUTO:
        return []
    return [*_other_blocks(method, sections), *_beyond_draft_vocab(sections)]


def _other_blocks(method: str, sections: Sections) -> list[str]:
    size, settings = sections["head"].block_size, sections["eval"]
    if "chain" in method or (wanted := tree_block_size(settings.tree)) in (None, size):
        return []
    other = f"made for blocks of {wanted}, and head.block_size = {size}"
    way_out = "take a tree for these; eval/fit.py fits one to a trained head"
    return [settings.complaint("tree", f"{other}; {way_out}")]


def _beyond_draft_vocab(sections: Sections) -> list[str]:
    if (size := sections["head"].draft_vocab) is None:
        return []
    rank = max(path[-1] for path in load_tree_paths(sections["eval"].tree))
    if rank < size:
        return []
    few = f"takes the token of rank {rank}, and head.draft_vocab = {size} drafts among as many"
    return [sections["eval"].complaint("tree", f"{few}; raise it, or take another tree")]


def _without_student(method: str, sections: Sections) -> list[str]:
    if "student" not in sections or sections["student"].given:
        return []
    return [
        f"eval.methods: {method} drafts with a student; set one of student.model, "
        "student.keep_layers and student.layers"
    ]


def _without_cascade(method: str, sections: Sections) -> list[str]:
    cascade = sections.get("cascade")
    own = cascade is not None and cascade.students is None
    return _without_student(method, sections) if own else []


def _without_medusa(method: str, sections: Sections) -> list[str]:
    if "medusa" not in sections:
        return []
    if (heads := sections["medusa"].heads) is None:
        return [f"eval.methods: {method} drafts with Medusa heads; set medusa.heads, e.g. 4"]
    if "chain" in method or (tree := sections["eval"].tree) == AUTO:
        return []
    if (depth := max(map(len, load_tree_paths(tree)))) <= heads:
        return []
    deep = f"{depth} deep, and medusa.heads = {heads} draft {heads} tokens"
    way_out = "take a tree that is no deeper, or fit one: eval/fit.py"
    return [sections["eval"].complaint("tree", f"{deep}; {way_out}")]


def _load_head(recipe: Recipe, target: Target, run: Path) -> FalconHead | Eagle3Head:
    head = load_head(drafter_of(recipe, "head", run), target)
    if recipe.head.window is not None:  # no weight depends on it
        head.config = replace(head.config, window=recipe.head.window)
    return head


def _load_table(recipe: Recipe, target: Target, run: Path) -> MaxGramTable:
    tokenizer = fingerprint.of_tokenizer(target.tokenizer)["tokenizer"]
    folder = drafter_of(recipe, "table", run)
    return load_table(folder, target.name, target.vocab_size, tokenizer)


KINDS: dict[str, Kind] = {
    "head": Kind(
        "a trained head; train one first",
        load=_load_head,
        fetch=lambda name, revision, target: load_head(name, target, revision),
        problems=_of_head,
    ),
    "medusa": Kind(
        "Medusa heads; train them first: train/medusa.py",
        load=lambda recipe, target, run: MedusaHeads.load_for(
            drafter_of(recipe, "medusa", run), target.identity()
        ),
        fetch=lambda name, revision, target: MedusaHeads.load_for(
            name, target.identity(), revision
        ),
        problems=_without_medusa,
    ),
    "student": Kind(
        "a student; give the recipe one and train it",
        load=lambda recipe, target, run: finished_student(recipe.student, run / "student", target),
        fetch=lambda name, revision, target: load_student(name, revision, target, target.dtype),
        problems=_without_student,
    ),
    "table": Kind(
        "a Max-Gram table; count one first",
        load=_load_table,
        fetch=lambda name, revision, target: load_table(
            name, target.name, target.vocab_size, revision=revision
        ),
    ),
    "cascade": Kind(
        "at least one student; train one, or name some in cascade.students",
        load=lambda recipe, target, run: tuple(
            load_student(name, None, target, key="cascade.students")
            for name in recipe.cascade.students
        ),
        fetch=lambda names, revision, target: tuple(
            load_student(one, revision, target, target.dtype) if isinstance(one, Source) else one
            for one in ([names] if isinstance(names, Source) else names)
        ),
        problems=_without_cascade,
    ),
}
HEAD_CARD = partial(Card, call='falcon("{repo}"', drafts_trees=True)
CARDS = {
    card.kind: card
    for card in (
        HEAD_CARD("falcon", "A Falcon head", "falcon"),
        HEAD_CARD("eagle", "An EAGLE-1 head", "eagle"),
        HEAD_CARD("eagle3", "An EAGLE-3 head", "eagle3"),
        Card("medusa", "A set of Medusa heads", "medusa", 'medusa("{repo}"', drafts_trees=True),
        Card("student", "A draft LM", "distillation", 'ssd("{repo}"', "transformers"),
        Card("table", "A Max-Gram table", "max-gram", 'maxgram("{repo}"'),
    )
}
