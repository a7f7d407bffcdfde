"""Students that the papers' tables draft with: distilled from every seed, for equal steps."""

from specdraft.eval.papers.paper_table import Plan
from specdraft.eval.papers.seeded import Job

MEASURED = ("eval.limit=20", "eval.max_new_tokens=64")
EQUAL = (
    "train.steps=300",
    "train.eval_every=null",
    "train.save_every=null",
    *MEASURED,
    "eval.methods=[plain,ssd]",
)
DISTILLED = "recipes/tiny_distill.yaml"


def student(plan: Plan, seed: int, name: str = "student", *overrides: str) -> Job:
    """The training of a student, the recipe's or one that overrides make of it, from a seed."""
    settings = (*EQUAL, *plan.overrides, *overrides, f"train.seed={seed}")
    folder = plan.runs / "students" / f"{name}-seed{seed}"
    return Job("train/distill.py", plan.recipe or DISTILLED, settings, folder)


def weights_of(job: Job) -> str:
    """Where a student's training leaves it."""
    return str(job.folder / "student")


def drafting_with(job: Job) -> tuple[str, ...]:
    """Overrides with which a recipe drafts with a student that a job trained, as it is."""
    return ("student.keep_layers=null", f"student.model={weights_of(job)}", "student.training=none")
