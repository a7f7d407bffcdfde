"""What draft LMs do in three papers: GSD's Figure 5, CS Drafting's Table 2, RSD's budgets.

Students are distilled from every seed, for equal steps; each table then runs the comparison that
eval/ has for it with the students of one seed, and takes the figures over seeds. Wall-clock means
something where the machine does nothing else (--jobs 1); all other figures are counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from specdraft.train.paper_table import Paper, Plan, Row
from specdraft.train.seeded import Job

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


def _weights(job: Job) -> str:
    return str(job.folder / "student")


def _drafting_with(job: Job) -> tuple[str, ...]:
    """Overrides that make a recipe draft with a finished student, as it is."""
    return ("student.keep_layers=null", f"student.model={_weights(job)}", "student.training=none")


GRAPHS: dict[str, tuple[str, ...]] = {  # rows: a method and how it drafts
    "SSD, 10 tokens": ("ssd", "drafting.gamma=10", "drafting.theta_prob=0"),
    "TSD, siblings not pruned": ("tsd", "drafting.theta_sib=0"),
    "TSD": ("tsd",),
    "GSD": ("gsd",),
    "GSD, theta_prob 0.1": ("gsd", "drafting.theta_prob=0.1"),
    "GSD, theta_prob 0.4": ("gsd", "drafting.theta_prob=0.4"),
    "GSD, theta_sib 0.1": ("gsd", "drafting.theta_sib=0.1"),
    "GSD, theta_sib 0.5": ("gsd", "drafting.theta_sib=0.5"),
}


@dataclass(frozen=True)
class GraphTable:
    """Chains, trees and token graphs by what prunes them, and graphs by tau.

    GSD's text for Figure 5 is not at hand. What is swept here are the parameters of its drafts:
    both pruning thresholds (eval/bench.py), and how many tokens must agree for a merge (Appendix C;
    eval/tau.py), with the KL divergence between what follows a merged node and what is shared
    there. The paper's figures are those of its main table: LLaMA-2-70B with 7B, GSM8K.
    """

    source: str = "GSD, Figure 5"
    recipe: str = DISTILLED
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: GRAPHS)
    taus: tuple[int, ...] = (0, 1, 2, 3, 4)
    columns: ClassVar[dict[str, str]] = {
        "acceptance": "matchness",
        "nodes/step": "drafted_per_step",
        "tokens/step": "tokens_per_step",
        "student passes/step": "drafter_forwards_per_step",
        "graph success": "graph_success",
        "x plain": "speedup",
        "merged/step": "merged_per_step",
        "KL": "kl",
    }
    paper: ClassVar[Paper] = {
        "SSD, 10 tokens": {"acceptance": 0.795, "x plain": 1.85},
        "TSD, siblings not pruned": {"acceptance": 0.894, "x plain": 1.81},
        "GSD": {"acceptance": 0.917, "x plain": 1.96, "graph success": 0.277},
    }

    def bench(self, plan: Plan, row: str, seed: int) -> Job:
        """The measurement of one setting."""
        method, *drafting = self.settings[row]
        name = row.replace(", ", "_").replace(" ", "_")
        return self._job(
            "eval/bench.py", plan, seed, name, f"eval.methods=[plain,{method}]", *drafting
        )

    def tau(self, plan: Plan, seed: int) -> Job:
        """The sweep of tau."""
        taus = ("--taus", ",".join(map(str, self.taus)))
        return replace(
            self._job("eval/tau.py", plan, seed, "tau"), options=taus, ends_with="tau.json"
        )

    def _job(self, script: str, plan: Plan, seed: int, name: str, *drafting: str) -> Job:
        settings = (*MEASURED, *plan.overrides, *drafting, *_drafting_with(student(plan, seed)))
        return Job(
            script, plan.recipe or self.recipe, settings, plan.runs / "gsd" / f"{name}-seed{seed}"
        )

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then all settings."""
        measured = [self.bench(plan, row, seed) for row in self.settings]
        return [[student(plan, seed)], [*measured, self.tau(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every setting, then every tau."""
        found = {}
        for row in self.settings:
            run = self.bench(plan, row, seed).report()["runs"][-1]
            found[row] = self._row(run, [run])
        for run in self.tau(plan, seed).report()["rows"]:
            found[f"GSD, tau {run['tau']}"] = self._row(run)
        return found

    def _row(self, run: dict, runs: Sequence[dict] = ()) -> Row:
        return Row({title: run.get(key) for title, key in self.columns.items()}, runs)


@dataclass(frozen=True)
class CascadeTable:
    """SD, Max-Gram and cascades, each tuned by SWI; students of two layers (1) and of one (2).

    The paper's figures are SWI by model size on GSM8K, FLAN-T5 targets: the best plain SD, one
    neural drafter above Max-Gram, and the whole cascade. "best" takes the better one of each seed.
    """

    source: str = "CS Drafting, Table 2"
    recipe: str = DISTILLED
    compared: str = "recipes/tiny_cascades.yaml"
    columns: ClassVar[dict[str, str]] = {
        "SWI, parameters": "swi_params",
        "SWI, measured": "swi_measured",
        "x plain": "speedup",
        "tokens/step": "tokens_per_step",
    }
    paper: ClassVar[Paper] = {
        "best SD": {"SWI, parameters": 3.38},
        "best of one student + MaG": {"SWI, parameters": 3.62},
        "1 + 2 + MaG": {"SWI, parameters": 3.75},
    }
    best: ClassVar[dict[str, tuple[str, ...]]] = {
        "best SD": ("SD 1", "SD 2"),
        "best of one student + MaG": ("1 + MaG", "2 + MaG"),
    }

    def students(self, plan: Plan, seed: int) -> list[Job]:
        """The larger one, and one that keeps only the target's last layer."""
        smaller = student(plan, seed, "one_layer", "student.keep_layers=[11]")
        return [student(plan, seed), smaller]

    def table(self, plan: Plan) -> Job:
        """The Max-Gram table: counted, so the same for every seed."""
        settings = (*MEASURED, *plan.overrides, "train.steps=1", "train.epochs=null")
        methods = ("eval.methods=[plain,maxgram]",)
        folder = plan.runs / "students" / "maxgram"
        return Job("train/maxgram.py", "recipes/tiny_maxgram.yaml", (*settings, *methods), folder)

    def comparison(self, plan: Plan, seed: int) -> Job:
        """Tuning of all rows, then their turns on the prompts."""
        weights = [_weights(job) for job in self.students(plan, seed)]
        overrides = (
            *MEASURED,
            *plan.overrides,
            f"student.model={weights[0]}",
            f"cascade.students=[{','.join(weights)}]",
            f"maxgram.table={self.table(plan).folder / 'table'}",
            "eval.methods=[plain, maxgram, cascade]",
        )
        options = ("--by", "swi", "--candidates", "8", "--prompts", "8")
        folder = plan.runs / "cascades" / f"seed{seed}"
        return Job("eval/cascades.py", self.compared, overrides, folder, options, "cascades.json")

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """All drafters, then the comparison."""
        return [[*self.students(plan, seed), self.table(plan)], [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The comparison's rows, and the best ones."""
        runs = {run["row"]: run for run in self.comparison(plan, seed).report()["rows"]}
        for name, some in self.best.items():
            runs[name] = max((runs[one] for one in some), key=lambda run: run["swi_params"])
        return {
            name: Row({title: run[key] for title, key in self.columns.items()}, [run])
            for name, run in runs.items()
        }


@dataclass(frozen=True)
class BudgetTable:
    """Tokens per step of drawn drafts, at fixed lengths and at fixed budgets, temperature 1.

    A seed trains a student and draws with it. A cell is the best shape that a method has there for
    that seed. None of the paper's figures is at hand as a number.
    """

    source: str = "RSD, Tables 2 and 3"
    recipe: str = DISTILLED
    lengths: tuple[int, ...] = (2, 3, 4, 5)
    budgets: tuple[int, ...] = (6, 10, 14, 21, 30)
    paper: ClassVar[Paper] = {}
    methods: ClassVar[dict[str, str]] = {
        "SD": "ssd",
        "SpecTr": "spectr",
        "SpecInfer": "specinfer",
        "RSD-C": "rsd_c",
        "RSD-S": "rsd_s",
    }

    @property
    def columns(self) -> list[str]:
        """What is fixed."""
        lengths = [f"length {length}" for length in self.lengths]
        return lengths + [f"budget {budget}" for budget in self.budgets]

    def comparison(self, plan: Plan, seed: int) -> Job:
        """All shapes, with the student and the draws of a seed."""
        drafting = _drafting_with(student(plan, seed))
        settings = (*MEASURED, "eval.temperature=1", *plan.overrides, *drafting)
        lists = {"--lengths": self.lengths, "--budgets": self.budgets, "--seeds": (seed,)}
        options = [part for key, some in lists.items() for part in (key, ",".join(map(str, some)))]
        folder = plan.runs / "rsd_budgets" / f"seed{seed}"
        recipe = plan.recipe or self.recipe
        return Job("eval/budgets.py", recipe, settings, folder, tuple(options), "budgets.json")

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """The student, then the comparison."""
        return [[student(plan, seed)], [self.comparison(plan, seed)]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """The best shape of every method, by tokens per step."""
        best: dict[str, dict[str, float]] = {name: {} for name in self.methods.values()}
        for run in self.comparison(plan, seed).report()["rows"]:
            figures, column = best[run["method"]], run["comparison"]
            figures[column] = max(run["tokens_per_step"], figures.get(column, 0.0))
        return {name: Row(best[method]) for name, method in self.methods.items()}
