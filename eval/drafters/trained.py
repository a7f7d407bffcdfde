"""What training has left in a run's folder, and which methods draft with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from specdraft.data import fingerprint
from specdraft.models.falcon import FalconHead, load_head
from specdraft.models.maxgram import MaxGramTable, load_table
from specdraft.models.medusa import MedusaHeads, load_medusa
from specdraft.models.student import finished_student, load_student
from specdraft.models.target import Target
from specdraft.models.target_files import hash_weights
from specdraft.recipes.methods import STUDENT_METHODS
from specdraft.recipes.schema import Recipe

NEEDS = {
    "falcon_chain": ("head",),
    "falcon_tree": ("head",),
    "maxgram": ("table",),
    **dict.fromkeys((*STUDENT_METHODS, "hf_assisted"), ("student",)),
    "cascade": ("cascade", "table"),
    "falcon_maxgram": ("head", "table"),
    "eagle_chain": ("head",),
    "eagle_tree": ("head",),
    "medusa_tree": ("medusa",),
}
HOW = {
    "head": "a trained head; train one first",
    "table": "a Max-Gram table; count one first",
    "student": "a student; give the recipe one and train it",
    "cascade": "at least one student; train one, or name some in cascade.students",
    "medusa": "Medusa heads; train them first: train/medusa.py",
}


def needs(method: str) -> tuple[str, ...]:
    """Which fields of `Trained` a method, decoded in whatever way, drafts with."""
    return NEEDS.get(method.partition(":")[0], ())


def showcase(methods: Sequence[str]) -> str:
    """Return the method that shows a run at its best: our last one that drafts as it was trained,
    else the last."""
    ours = [name for name in methods if needs(name) and not name.startswith("hf_")]
    return [*methods, *ours][-1]


@dataclass(frozen=True)
class Trained:
    """What the methods of a run draft with; None or empty where none asks for it."""

    head: FalconHead | None = None
    table: MaxGramTable | None = None
    student: Target | None = None
    cascade: tuple[Target, ...] = ()  # students, from the largest to the smallest
    medusa: MedusaHeads | None = None

    def models(self, method: str) -> list[nn.Module]:
        """The networks that a method drafts with, in the order of its passes."""
        needed = needs(method)
        students = self.cascade if "cascade" in needed else ()
        students += (self.student,) if "student" in needed else ()
        heads = [getattr(self, name) for name in ("head", "medusa") if name in needed]
        return [*heads, *(student.model for student in students)]

    def weights(self) -> list[str]:
        """Hashes of all that there is to draft with."""
        networks = [one for one in (self.head, self.table, self.medusa) if one is not None]
        students = [*self.cascade, *([self.student] if self.student else [])]
        hashes = [hash_weights(one) for one in networks]
        return [*hashes, *(student.identity()["weights"] for student in students)]


def load_trained(recipe: Recipe, target: Target) -> Trained:
    """Load from `output.dir`, or from where the recipe says, what its methods need.

    Raises HeadError, TargetError.
    """
    return load_drafters(recipe.eval.methods, recipe, target, Path(recipe.output.dir))


def load_drafters(methods: Sequence[str], recipe: Recipe, target: Target, out: Path) -> Trained:
    """Load what these methods need from the folder of a run, or from where the recipe says.

    Raises HeadError, TargetError.
    """
    needed = {need for method in methods for need in needs(method)}
    own = recipe.cascade.students is None
    head = table = student = medusa = None
    cascade: tuple[Target, ...] = ()
    if "head" in needed:
        head = load_head(out / "head", target.identity())
    if "table" in needed:
        folder = Path(recipe.maxgram.table) if recipe.maxgram.table else out / "table"
        tokenizer = fingerprint.of_tokenizer(target.tokenizer)["tokenizer"]
        table = load_table(folder, target.name, target.vocab_size, tokenizer)
    if "student" in needed or ("cascade" in needed and own):
        student = finished_student(recipe.student, out / "student", target)
    if "medusa" in needed:
        medusa = load_medusa(out / "medusa", target.identity())
    if "cascade" in needed:
        named = recipe.cascade.students or ()
        key = "cascade.students"
        loaded = tuple(load_student(name, None, target, key=key) for name in named)
        cascade = (student,) if own else loaded
    return Trained(head, table, student, cascade, medusa)
