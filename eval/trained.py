"""What training has left in a run's folder, and which methods draft with it."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from specdraft.data import fingerprint
from specdraft.models.falcon import FalconHead, load_head
from specdraft.models.maxgram import MaxGramTable, load_table
from specdraft.models.medusa import MedusaHeads, load_medusa
from specdraft.models.student import finished_student
from specdraft.models.target import Target
from specdraft.recipes.schema import Recipe

NEEDS = {
    "falcon_chain": "head",
    "falcon_tree": "head",
    "maxgram": "table",
    "ssd": "student",
    "hf_assisted": "student",
    "eagle_chain": "head",
    "eagle_tree": "head",
    "medusa_tree": "medusa",
}
HOW = {
    "head": "a trained head; train one first",
    "table": "a Max-Gram table; count one first",
    "student": "a student; give the recipe one and train it",
    "medusa": "Medusa heads; train them first: train/medusa.py",
}


def needs(method: str) -> str | None:
    """Which field of `Trained` a method, decoded in whatever way, drafts with."""
    return NEEDS.get(method.partition(":")[0])


@dataclass(frozen=True)
class Trained:
    """What the methods of a run draft with; None where none asks for it."""

    head: FalconHead | None = None
    table: MaxGramTable | None = None
    student: Target | None = None
    medusa: MedusaHeads | None = None

    def model(self, method: str) -> nn.Module | None:
        """The network that a method drafts with; None for those that compute nothing."""
        student = self.student.model if self.student else None
        networks = {"head": self.head, "student": student, "medusa": self.medusa}
        return networks.get(needs(method))


def load_trained(recipe: Recipe, target: Target) -> Trained:
    """Load from `output.dir` what the recipe's methods need. Raises HeadError, TargetError."""
    out, needed = Path(recipe.output.dir), {needs(method) for method in recipe.eval.methods}
    head = table = student = medusa = None
    if "head" in needed:
        head = load_head(out / "head", target.identity())
    if "table" in needed:
        tokenizer = fingerprint.of_tokenizer(target.tokenizer)["tokenizer"]
        table = load_table(out / "table", target.name, target.vocab_size, tokenizer)
    if "student" in needed:
        student = finished_student(recipe.student, out / "student", target)
    if "medusa" in needed:
        medusa = load_medusa(out / "medusa", target.identity())
    return Trained(head, table, student, medusa)
