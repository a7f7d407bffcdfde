"""The recipe: one frozen dataclass per YAML section, and the only place where defaults live.

`Recipe` is built by `specdraft.recipes.load.load_recipe`. Constructing a section checks it: every
problem of the section is in one `InvalidRecipeError`, each with key, value and what is allowed.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from specdraft.recipes import combinations
from specdraft.recipes.fields import (
    Count,
    Fraction,
    Interval,
    InvalidRecipeError,
    Natural,
    NonNegative,
    Positive,
    Section,
)

BUNDLED = "tiny"  # the target that comes with the package
Dtype = Literal["float32", "bfloat16"]
Method = Literal[
    "plain",
    "generate",
    "hf_prompt_lookup",
    "prompt_lookup",
    "falcon_chain",
    "falcon_tree",
    "maxgram",
    "ssd",
    "tsd",
    "gsd",
    "rsd_c",
    "rsd_s",
    "specinfer",
    "spectr",
    "hf_assisted",
    "cascade",
    "falcon_maxgram",
    "eagle_chain",
    "eagle_tree",
    "medusa_tree",
]
METHODS: tuple[str, ...] = get_args(Method)
# Draft with a student.
STUDENT_METHODS = ("ssd", "tsd", "gsd", "rsd_c", "rsd_s", "specinfer", "spectr")
# What a recipe measures unless it says more: every method that a Falcon head suffices for.
HEAD_METHODS = METHODS[:6]
Acceptance = Literal["gumbel", "walk", "recursive", "multistep", "kseq", "block"]
# METHOD:WAY decodes a method in another way: padded as vanilla multi-sample decoding does (both,
# or one of its two pads), or with a queue instead of batches that end together.
WAYS = ("padded", "pad_kv", "pad_inputs", "dynamic")
OURS = tuple(name for name in METHODS if not name.startswith(("generate", "hf_")))
Drafting = Literal[OURS]
Measured = Literal[(*METHODS, "padded", *(f"{name}:{way}" for name in OURS for way in WAYS))]


@dataclass(frozen=True, kw_only=True)
class TargetSection(Section):
    model: str = BUNDLED  # "tiny" (bundled), a directory, or a Hub id
    revision: str | None = None  # Hub branch, tag or commit
    dtype: Dtype = "float32"  # of the frozen weights and of decoding
    trust_remote_code: bool = False
    chat_template: str | None = None  # a Jinja file, or "vicuna" (bundled); null: the tokenizer's
    # Of a target that does not fit one device, as transformers' from_pretrained takes them: a way
    # to spread it, or the devices of its modules (a GPU's number, cpu, disk). null: one device.
    device_map: Literal["auto", "balanced", "sequential"] | dict[str, int | str] | None = None
    max_memory: dict[str, str] | None = None  # of a device at most, e.g. {0: 40GiB, cpu: 100GiB}

    def combinations(self) -> list[str]:
        return combinations.of_target(self)


@dataclass(frozen=True, kw_only=True)
class DataSection(Section):
    sources: tuple[str, ...]  # files, Hub ids, or "tiny" (the bundled conversations)
    format: Literal["auto", "sharegpt", "messages", "alpaca", "text"] = "auto"
    answers: Literal["dataset", "target"] = "dataset"  # "target": the target rewrites the answers
    max_length: Annotated[int, Interval(2)] = 2048  # tokens kept of a conversation
    cache_dir: str = "cache"
    features: Literal["cached", "online"] = "cached"  # on disk, or computed as training goes on
    feature_dtype: Literal[Dtype, "float8", "int8"] = "float32"  # of the features, either way
    # Stored are features with a supervised token among the next so many; the others are zeros in
    # training. As many as max_length: only what no loss reads is missing. null: all are stored.
    feature_context: Count | None = None
    limit: Count | None = None  # conversations read at most
    holdout: Natural = 0  # last rows of the sources, never trained on
    prompt_tokens: Count | None = None  # format text: prompt length; null: all is supervised
    # The rest matters for `answers: target` only.
    samples: Count = 1  # continuations per conversation
    temperature: NonNegative = 0.0  # of the samples after the first, which is greedy
    max_new_tokens: Count | None = 256
    batch_rows: Count = 32  # conversations decoded, or requests of a process to the server, at once
    seed: Natural = 0
    # Drafts our decoder's answers, which are the same with any drafter, only sooner: a method of
    # `eval`, and the folder of the run that trained it; null: output.dir.
    drafter: Drafting = "plain"
    drafter_run: str | None = None
    server: str | None = None  # OpenAI-compatible, http://HOST:PORT/v1; null: our decoder
    server_model: str | None = None  # the name the server has for the target; null: target.model
    retries: Natural = 5  # of a request, after 0.5 s, 1 s, 2 s, ..
    timeout: Positive = 600.0  # seconds for an answer of the server

    def combinations(self) -> list[str]:
        return combinations.of_data(self)


@dataclass(frozen=True, kw_only=True)
class HeadSection(Section):
    block_size: Count = 2  # k: tokens drafted per pass
    fusion: Literal["lstm", "linear"] = "lstm"  # of token and feature
    layers: Count = 1  # decoder layers
    heads: Count | None = None  # null: as the target, for these three
    kv_heads: Count | None = None
    intermediate: Count | None = None  # width of the MLP
    input_norm: bool = True  # of the first decoder layer; EAGLE-1 and its serving format: false

    def combinations(self) -> list[str]:
        return combinations.of_head(self)


@dataclass(frozen=True, kw_only=True)
class MedusaSection(Section):
    """Medusa heads: head h of a feature f_i drafts t_(i+1+h). They replace the `head` section."""

    heads: Count | None = None  # tokens drafted, in one pass; null: no Medusa heads
    layers: Count = 1  # residual blocks of a head
    lm_heads: Literal["own", "shared"] = "own"  # own: trained, from the target's; shared: frozen
    decay: Annotated[float, Interval(0, 1, above=True)] = 0.8  # head h counts decay^h in the loss
    soft_weight: Fraction = 0.0  # share of KL(p || q) in the loss, the rest is cross-entropy

    @property
    def given(self) -> bool:
        """Whether the recipe has Medusa heads at all."""
        return self.heads is not None


@dataclass(frozen=True, kw_only=True)
class GlanceSection(Section):
    enabled: bool = True
    start: Fraction = 0.4  # share of the Hamming distance that is revealed, first step
    end: Fraction = 0.0  # the same at the last step
    isolated: bool = False  # a revealed block's neighbours read it, and the LSTM, as it was
    supervise_revealed: bool = False  # loss also where the answer was put into the input


@dataclass(frozen=True, kw_only=True)
class LossSection(Section):
    feature_weight: NonNegative = 1.0  # of SmoothL1 on features
    distill_weight: NonNegative = 0.1  # of the token loss (w_dist)
    soft_weight: Fraction = 0.9  # alpha: share of KL in the token loss, the rest is CE
    feature_noise: NonNegative = 0.1  # U(-x, x) on input features, in their standard deviations

    def combinations(self) -> list[str]:
        return combinations.of_loss(self)


@dataclass(frozen=True, kw_only=True)
class StudentSection(Section):
    """The draft LM. Exactly one of `model`, `keep_layers` and `layers` says where it comes from."""

    model: str | None = None  # a pretrained one: a directory or a Hub id
    revision: str | None = None  # Hub branch, tag or commit
    keep_layers: tuple[Natural, ...] | None = None  # pruned from the target: layers it copies
    embeddings: Literal["copied", "shared"] = "copied"  # of a pruned one; shared: not trained
    layers: Count | None = None  # a config of its own, like Llama
    hidden: Count | None = None  # null: as the target, for these four
    heads: Count | None = None
    kv_heads: Count | None = None
    intermediate: Count | None = None  # width of the MLP
    training: Literal["full", "lora", "none"] = "full"  # none: drafts as it is
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0
    lora_targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # linear layers

    @property
    def given(self) -> bool:
        """Whether the recipe has a student at all."""
        return not (self.model is None and self.keep_layers is None and self.layers is None)

    def combinations(self) -> list[str]:
        return combinations.of_student(self)


@dataclass(frozen=True, kw_only=True)
class DistillSection(Section):
    """What a student is trained on: weights of a mixture of objectives, and whose text."""

    forward_kl: NonNegative = 1.0  # KL(p || q), p the target's distribution, q the student's
    reverse_kl: NonNegative = 0.0  # KL(q || p)
    jsd: NonNegative = 0.0  # generalised Jensen-Shannon divergence
    beta: Fraction = 0.5  # its share of p in the mixture; 0 and 1 are excluded
    total_variation: NonNegative = 0.0  # 1 - the share of sampled drafts that is accepted
    cross_entropy: NonNegative = 0.0  # on the tokens of the text
    temperature: Positive = 1.0  # of p and q in the divergences
    on_policy: Fraction = 0.0  # lambda: share of rows whose answer the student writes
    sample_temperature: NonNegative = 1.0  # of these answers
    max_new_tokens: Count = 128  # of these answers

    @property
    def divergences(self) -> bool:
        """Whether the target's distributions are needed, not just tokens."""
        return max(self.forward_kl, self.reverse_kl, self.jsd, self.total_variation) > 0

    def combinations(self) -> list[str]:
        return combinations.of_distill(self)


@dataclass(frozen=True, kw_only=True)
class DraftingSection(Section):
    """How a student drafts. Every key names the methods that read it."""

    gamma: Count = 5  # ssd, rsd_s, spectr: tokens of a path
    depth: Count = 10  # tsd, gsd: levels
    out_degree: Count = 4  # tsd, gsd: children of a node
    theta_prob: Fraction = 0.2  # ssd, tsd, gsd: a less probable token ends its path; 0: none does
    theta_sib: Fraction = 0.3  # tsd, gsd: so does one less probable than this share of its best
    sibling_pruning: Literal["leaf", "drop"] = "leaf"  # sibling; drop: it is not even added
    max_nodes: Count = 256  # tsd, gsd: nodes of a draft, copies not counted
    tau: Natural = 2  # gsd: tokens after which paths that agree share what follows
    max_copies: Natural = 100  # gsd: nodes copied before verification
    branching: tuple[Count, ...] = (2, 2, 2, 1, 1)  # rsd_c, specinfer: children by depth
    equal_siblings: Literal["merged", "apart"] = "merged"  # specinfer: share children, or have own
    beam_width: Count = 4  # rsd_s: nodes of a level
    chains: Count = 4  # spectr

    def combinations(self) -> list[str]:
        return combinations.of_drafting(self)


@dataclass(frozen=True, kw_only=True)
class OptimSection(Section):
    lr: Positive = 3.0e-5  # peak learning rate; 3.0e-3 suits heads of width 128 to 200
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    weight_decay: NonNegative = 0.0
    warmup: Fraction = 0.05  # share of all steps
    schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after warm-up
    clip_norm: Positive = 1.0

    def combinations(self) -> list[str]:
        return combinations.of_optim(self)


@dataclass(frozen=True, kw_only=True)
class TrainSection(Section):
    steps: Count | None = None  # optimiser steps; exactly one of steps and epochs
    epochs: Count | None = None
    batch_size: Count = 16  # sequences per optimiser step, over all ranks
    accumulation: Count = 1  # forwards per optimiser step
    seed: Natural = 0
    precision: Dtype = "float32"  # of the head's forward; master weights are float32
    rollout: Count = 1  # passes over the head's own features in training
    checkpointing: bool = False  # backward runs a student's layers, a head's passes again
    eval_every: Count | None = None  # steps between evaluations; null: at the end only
    save_every: Count | None = None  # steps between checkpoints; null: at the end only
    keep: Count = 2  # checkpoints kept
    log_every: Count = 10  # steps
    max_minutes: Positive | None = None  # stop training after this time
    threads: Count | None = None  # of a CPU process; null: the cores, shared among the ranks

    def combinations(self) -> list[str]:
        return combinations.of_train(self)


@dataclass(frozen=True, kw_only=True)
class EvalSection(Section):
    prompts: str = "tiny_chat"  # bundled; or a published set, NAME:FILE, a JSONL file, "holdout"
    tree: str = "tiny_k2"  # a file of recipes/trees without .yaml, or a path
    chain_depth: Count = 6  # of falcon_chain and eagle_chain
    threads: Count | None = None  # of a CPU while decoding; null: as in training
    validation: Count = 16  # prompts, none of the measured ones, that choose the head to keep
    max_new_tokens: Count = 128
    limit: Count | None = None  # prompts at most
    methods: tuple[Measured, ...] = HEAD_METHODS  # METHOD or METHOD:WAY; padded: prompt_lookup's
    temperature: NonNegative = 0.0  # 0: greedy
    top_k: Natural = 0  # 0: off
    top_p: Annotated[float, Interval(0, 1, above=True)] = 1.0
    # Rule when sampling: eval/engine/accept.py. rsd_c, rsd_s, specinfer and spectr have their own.
    acceptance: Acceptance = "gumbel"
    batch_size: Count = 1  # rows decoded at once
    repeats: Count = 1  # times each batch is decoded; the median by wall-clock stands
    # Lengths range over max_new_tokens / spread .. max_new_tokens, and no end token cuts them.
    spread: Annotated[float, Interval(1)] = 1.0
    seed: Natural = 0
    lookup_match: Count = 2  # prompt lookup: longest suffix looked for
    lookup_copy: Count = 7  # prompt lookup: tokens proposed
    hf_lookup_copy: Count = 3  # the same of transformers' prompt lookup
    prompt_tokens: Count | None = None  # holdout of format text: null: as data.prompt_tokens

    @property
    def student_methods(self) -> tuple[str, ...]:
        """The methods, padded or not, that draft with a student."""
        drafting = (*STUDENT_METHODS, "hf_assisted")
        return tuple(name for name in self.methods if name.partition(":")[0] in drafting)

    def combinations(self) -> list[str]:
        return combinations.of_eval(self)


@dataclass(frozen=True, kw_only=True)
class MaxgramSection(Section):
    n: Count = 10  # tokens drafted: copied, then by bigrams
    min_match: Annotated[int, Interval(1, 16)] = 1  # shortest suffix copied from
    continuation: Literal["first", "recent", "frequent"] = "first"  # occurrence that is copied
    # Continuations drafted side by side, as a tree; falcon_maxgram: deepest paths that go on.
    branches: Count = 1
    corpus: Literal["tokens", "stream"] = "tokens"  # counted: the token cache, or texts as read
    pairs: Literal["answers", "all"] = "answers"  # bigrams that end in an answer, or every one
    table: str | None = None  # folder to draft with; null: output.dir/table


@dataclass(frozen=True, kw_only=True)
class CascadeSection(Section):
    """Drafters from the largest to the smallest: students, then Max-Gram. Row i of `k` belongs to
    reviewer i (0: the target): how many tokens each drafter contributes to what it reviews."""

    k: tuple[tuple[Natural, ...], ...] = ((4, 2), (0, 10))  # upper triangular
    leniency: Annotated[float, Interval(1)] = 1.0  # l, of reviews among students
    students: tuple[str, ...] | None = None  # folders or Hub ids; null: the recipe's own student

    @property
    def size(self) -> int:
        """How many students the cascade has."""
        return 1 if self.students is None else len(self.students)

    def combinations(self) -> list[str]:
        return combinations.of_cascade(self)


@dataclass(frozen=True, kw_only=True)
class OutputSection(Section):
    dir: str | None = None  # null: runs/<recipe name>


@dataclass(frozen=True, kw_only=True)
class HubSection(Section):
    repo_id: str | None = None  # owner/name to push the drafter to; null: do not push
    private: bool = True  # a push is never public by accident
    revision: str | None = None  # branch to push to, made if needed; null: main
    license: str | None = None  # of the weights, for the model card, e.g. apache-2.0

    def combinations(self) -> list[str]:
        return combinations.of_hub(self)


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
        problems = combinations.of_recipe(self.name, self.data, self.eval, self.maxgram)
        problems += combinations.of_distillation(
            self.data, self.eval, self.train, self.student, self.distill, self.cascade
        )
        problems += combinations.of_medusa(self.eval, self.student, self.medusa)
        if problems:
            raise InvalidRecipeError(problems)
        if self.output.dir is None:
            object.__setattr__(self, "output", OutputSection(dir=f"runs/{self.name}"))

    def to_dict(self) -> dict[str, Any]:
        """Return the recipe as plain dicts, lists and scalars, ready for YAML and JSON."""
        return _plain(dataclasses.asdict(self))


def _plain(value: Any) -> Any:
    """Return a value with lists for tuples, at any depth."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
