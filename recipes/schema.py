"""The recipe: a section of settings per YAML key, and what no section can check alone.

Defaults live in `specdraft.recipes.sections`, one frozen dataclass per section, and only there.
`Recipe` is built by `specdraft.recipes.load.load_recipe`. Constructing a section checks it: every
problem of the section is in one `InvalidRecipeError`, each with key, value and what is allowed.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Self, get_type_hints

from specdraft.recipes.fields import InvalidRecipeError, Section, plain, shown
from specdraft.recipes.sections.data import DataSection
from specdraft.recipes.sections.drafters import HeadSection, MedusaSection, StudentSection
from specdraft.recipes.sections.drafting import CascadeSection, DraftingSection, MaxgramSection
from specdraft.recipes.sections.evaluation import EvalSection
from specdraft.recipes.sections.objectives import DistillSection, GlanceSection, LossSection
from specdraft.recipes.sections.output import HubSection, OutputSection
from specdraft.recipes.sections.target import TargetSection
from specdraft.recipes.sections.training import OptimSection, TrainSection


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole, valid recipe. `output.dir` is resolved; every other value is as written."""

    name: str
    target: TargetSection = field(default_factory=TargetSection)
    data: DataSection
    head: HeadSection = field(default_factory=HeadSection)
    medusa: MedusaSection = field(default_factory=MedusaSection)
    glance: GlanceSection = field(default_factory=GlanceSection)
    loss: LossSection = field(default_factory=LossSection)
    student: StudentSection = field(default_factory=StudentSection)
    distill: DistillSection = field(default_factory=DistillSection)
    drafting: DraftingSection = field(default_factory=DraftingSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection
    eval: EvalSection = field(default_factory=EvalSection)
    maxgram: MaxgramSection = field(default_factory=MaxgramSection)
    cascade: CascadeSection = field(default_factory=CascadeSection)
    output: OutputSection = field(default_factory=OutputSection)
    hub: HubSection = field(default_factory=HubSection)

    def __post_init__(self) -> None:
        if problems := list(conflicts(vars(self))):
            raise InvalidRecipeError(problems)
        if self.output.dir is None:
            object.__setattr__(self, "output", OutputSection(dir=f"runs/{self.name}"))
        # As sources and targets may, what is written to may begin with `~`.
        for section, key in (("output", "dir"), ("data", "cache_dir"), ("data", "drafter_run")):
            part = getattr(self, section)
            if path := getattr(part, key):
                told = dataclasses.replace(part, **{key: os.path.expanduser(path)})
                object.__setattr__(self, section, told)

    @property
    def kind(self) -> str:
        """The kind of drafter that this recipe trains, one of recipes/find.py's KINDS."""
        if self.medusa.given:
            return "medusa"
        return "student" if self.student.given else self.head.kind

    @classmethod
    def sections(cls) -> dict[str, type[Section]]:
        """Return the class of each section, by its name."""
        return {name: kind for name, kind in get_type_hints(cls).items() if name != "name"}

    def with_eval(self, **settings: Any) -> Self:
        """Return the recipe with other settings of its eval section. Raises InvalidRecipeError."""
        return dataclasses.replace(self, eval=dataclasses.replace(self.eval, **settings))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain dicts, lists and scalars, ready for YAML and JSON."""
        return plain(dataclasses.asdict(self))


def conflicts(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a recipe's name, and with sections that are each sound, together.

    parts: of a recipe, by their names. Nothing more is said about a section that is left out.
    """
    name = parts.get("name")
    fits = isinstance(name, str) and name.isprintable() and len(name.encode()) < 200
    if not (fits and name.strip() and "/" not in name and name[0] != "."):
        yield f"name = {shown(name)}: must be text that can name a folder, e.g. tiny"
    for check in _CHECKS:
        sections = signature(check).parameters
        if parts.keys() >= sections.keys():
            yield from check(*(parts[section] for section in sections))


def _of_stream(data: DataSection, maxgram: MaxgramSection) -> Iterator[str]:
    """A stream is read once and kept nowhere: no last rows can be held out, none drawn, and the
    target cannot rewrite answers."""
    for key, off, what in (
        ("holdout", 0, "cannot know the last rows; set it to 0"),
        ("shuffle_seed", None, "takes rows as they come; set it to null"),
        ("answers", "dataset", "counts texts as they are; set data.answers=dataset"),
    ):
        if maxgram.corpus == "stream" and getattr(data, key) != off:
            yield data.complaint(key, f"maxgram.corpus=stream {what}, or maxgram.corpus=tokens")


def _of_holdout(data: DataSection, eval: EvalSection) -> Iterator[str]:
    """Prompts from the holdout need rows that are held out, and of texts a prompt's length."""
    if eval.prompts != "holdout":
        return
    if data.holdout == 0:
        needed = "needs rows that training never sees; set data.holdout, e.g. 100"
        yield eval.complaint("prompts", needed)
    if data.format == "text" and eval.prompt_tokens is None and data.prompt_tokens is None:
        needed = "a text has no prompt of its own; say how many tokens are the prompt, e.g. 16"
        yield eval.complaint("prompt_tokens", needed)


def _of_length(train: TrainSection, student: StudentSection) -> Iterator[str]:
    if student.training != "none" and train.steps is None and train.epochs is None:
        yield "train.steps and train.epochs are both null: set exactly one"


def _of_depth(head: HeadSection, loss: LossSection, train: TrainSection) -> Iterator[str]:
    """Weights by depth need predictions of more than one depth."""
    if loss.by_depth and head.block_size == train.rollout == 1:
        lacks = "every token is trained at depth 1; set train.rollout, e.g. 3"
        yield loss.complaint(("depth_decay", "pace_smoothing"), lacks)


def _of_on_policy(data: DataSection, distill: DistillSection) -> Iterator[str]:
    if distill.on_policy and data.format == "text" and not data.prompt_tokens:
        lacks = "a text has no prompt that the student could continue"
        yield distill.complaint("on_policy", f"{lacks}; set data.prompt_tokens, e.g. 16")


def _of_medusa(student: StudentSection, medusa: MedusaSection) -> Iterator[str]:
    """A recipe trains one kind of drafter."""
    if medusa.given and student.given:
        yield medusa.complaint("heads", "the recipe has a student, too; set one to null")


def _of_layers(data: DataSection, student: StudentSection, medusa: MedusaSection) -> Iterator[str]:
    if data.feature_layers and (student.given or medusa.given):
        kind = "students" if student.given else "Medusa heads"
        way_out = "set it to [], or train a Falcon or EAGLE head"
        yield data.complaint("feature_layers", f"{kind} do not read them; {way_out}")


def _of_fusion(data: DataSection, head: HeadSection) -> Iterator[str]:
    """EAGLE-3 fuses layers, in the ascending order in which engines hand them over."""
    layers = list(data.feature_layers)
    if head.fusion == "layers" and (not layers or layers != sorted(layers)):
        few = "head.fusion=layers reads some in ascending order, e.g. of 32: [2,16,29]"
        yield data.complaint("feature_layers", few)


# Each is about the sections that its parameters name.
_CHECKS = (
    _of_stream,
    _of_holdout,
    _of_length,
    _of_depth,
    _of_on_policy,
    _of_medusa,
    _of_layers,
    _of_fusion,
)
