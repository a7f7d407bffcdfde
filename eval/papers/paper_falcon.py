"""Falcon's ablations (AAAI 2025, Tables 4 and 5) and ours: heads that differ in one thing.

Every variant is trained by train/falcon.py from every seed, for equal steps, and decodes the same
prompts as a chain and as a tree: tree attention is switched at decoding. Block sizes are compared
on trees of 16 nodes each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from specdraft.eval.papers.paper_table import Paper, Plan, Row
from specdraft.eval.papers.seeded import Job

EQUAL = (
    "train.steps=200",
    "train.eval_every=null",
    "train.save_every=null",
    "eval.limit=20",
    "eval.max_new_tokens=64",
    "eval.methods=[plain,falcon_chain,falcon_tree]",
)
GLANCE_OFF = "glance.enabled=false"
LITERAL = "glance.isolated=false"  # a revision reaches later states and blocks, as in the paper
VARIANTS: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "no_csgd": (GLANCE_OFF,),
    "csgd_literal": (LITERAL, "glance.start=0.4"),
    "csgd_literal_0.1": (LITERAL, "glance.start=0.1"),
    "csgd_literal_constant": (LITERAL, "glance.start=0.4", "glance.end=0.4"),
    "csgd_literal_supervised": (LITERAL, "glance.start=0.4", "glance.supervise_revealed=true"),
    "csgd_isolated_0.4": ("glance.start=0.4",),
    "k1": ("head.block_size=1", "eval.tree=tiny_k1", GLANCE_OFF),
    "k3": ("head.block_size=3", "eval.tree=tiny_k3"),
    "k4": ("head.block_size=4", "eval.tree=tiny_k4"),
    "linear": ("head.fusion=linear",),
    "no_noise": ("loss.feature_noise=0",),
    "rollout1": ("train.rollout=1",),
    "rollout1_no_csgd": ("train.rollout=1", GLANCE_OFF),
    "rollout3": ("train.rollout=3",),
    "bfloat16": ("data.feature_dtype=bfloat16",),
    "float8": ("data.feature_dtype=float8",),
    "int8": ("data.feature_dtype=int8",),
}
METHODS = {"chain": "falcon_chain", "tree": "falcon_tree"}
FIGURES = {
    "accepted/step": "accepted_per_step",
    "acceptance": "acceptance_rate",
    "x plain": "speedup",
}


@dataclass(frozen=True)
class FalconTable:
    """Variants of the head as rows; how each decodes as columns."""

    source: str
    variants: Mapping[str, str]  # by the names of rows
    paper: Paper = field(default_factory=dict)
    recipe: str = "recipes/tiny.yaml"
    columns = tuple(f"{way}: {figure}" for figure in FIGURES for way in METHODS)

    def job(self, plan: Plan, row: str, seed: int) -> Job:
        """The training of a row's variant from a seed."""
        variant = self.variants[row]
        overrides = (*EQUAL, *plan.overrides, *VARIANTS[variant], f"train.seed={seed}")
        folder = plan.runs / "falcon" / f"{variant}-seed{seed}"
        return Job("train/falcon.py", plan.recipe or self.recipe, overrides, folder)

    def stages(self, plan: Plan, seed: int) -> list[list[Job]]:
        """One: the heads."""
        return [[self.job(plan, row, seed) for row in self.variants]]

    def rows(self, plan: Plan, seed: int) -> dict[str, Row]:
        """Every variant, decoded both ways."""
        return {name: _row(self.job(plan, name, seed).report()) for name in self.variants}


def _row(report: dict) -> Row:
    runs = {run["method"]: run for run in report["runs"]}
    drafted = {way: runs[method] for way, method in METHODS.items()}
    figures = {
        f"{way}: {title}": run[key]
        for title, key in FIGURES.items()
        for way, run in drafted.items()
    }
    return Row(figures, [*drafted.values()])


def reported(chain: tuple[float, ...] = (), tree: tuple[float, ...] = ()) -> dict[str, float]:
    """The paper's accepted tokens per step, acceptance rate and speedup, by column."""
    both = {"chain": chain, "tree": tree}
    return {
        f"{way}: {title}": value
        for way, values in both.items()
        for title, value in zip(FIGURES, values, strict=False)
    }


# Vicuna-7B, MT-bench, greedy, batch 1, H800.
FALCON_TABLES = {
    "falcon_tree_csgd": FalconTable(
        "Falcon, Table 4",
        {
            "without CSGD": "no_csgd",
            "CSGD of the recipe": "recipe",
            "CSGD as described": "csgd_literal",
        },
        {
            "without CSGD": reported((1.64, 0.6286, 2.06), (2.78, 0.7437, 2.65)),
            "CSGD as described": reported((2.13, 0.6868, 2.27), (3.34, 0.7764, 3.10)),
        },
    ),
    "falcon_k": FalconTable(
        "Falcon, Table 5",
        {"k = 1, no CSGD": "k1", "k = 2": "recipe", "k = 3": "k3", "k = 4": "k4"},
        {
            "k = 2": reported(tree=(3.34, 0.7764, 3.10)),
            "k = 3": {"tree: x plain": 2.96},
            "k = 4": {"tree: x plain": 2.86},
        },
    ),
    "glancing": FalconTable(
        "Falcon, glancing schedule",
        {
            "none": "no_csgd",
            "isolated, 0.2 to 0": "recipe",
            "isolated, 0.4 to 0": "csgd_isolated_0.4",
            "as described, 0.1 to 0": "csgd_literal_0.1",
            "as described, 0.4 to 0": "csgd_literal",
            "as described, 0.4 throughout": "csgd_literal_constant",
            "as described, 0.4 to 0, loss on revealed": "csgd_literal_supervised",
        },
    ),
    "fusion": FalconTable(
        "Falcon, LSTM against linear fusion", {"LSTM": "recipe", "linear": "linear"}
    ),
    "noise": FalconTable(
        "Falcon, noise on input features", {"U(-0.1, 0.1)": "recipe", "none": "no_noise"}
    ),
    "rollout": FalconTable(
        "Passes over the head's own features in training",
        {
            "two passes": "recipe",
            "one": "rollout1",
            "three": "rollout3",
            "two, no CSGD": "no_csgd",
            "one, no CSGD": "rollout1_no_csgd",
        },
    ),
    "storage": FalconTable(
        "Features in fewer bytes",
        {"float32": "recipe", "bfloat16": "bfloat16", "float8": "float8", "int8": "int8"},
    ),
}
