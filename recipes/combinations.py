"""What cannot be had together: recipe values that are each allowed, and impossible combined.

Each function returns one line per problem, in a user's words: the keys, the values, the way out.
"""

from __future__ import annotations

import re
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

from specdraft.recipes.fields import InvalidRecipeError
from specdraft.recipes.static_trees import load_tree_paths

if TYPE_CHECKING:
    from specdraft.recipes import schema

LARGEST_TREE = 4096  # nodes drafted by branching factors


def of_target(target: schema.TargetSection) -> list[str]:
    """Memory is limited where somebody chooses what goes where."""
    if target.max_memory is not None and not isinstance(target.device_map, str):
        return [
            f"target.max_memory = {target.max_memory}: needs target.device_map=auto, balanced or "
            "sequential"
        ]
    return []


def of_data(data: schema.DataSection) -> list[str]:
    """Sources there are, and answers that can be made."""
    problems = []
    if not data.sources:
        problems.append("data.sources = []: name at least one file, Hub id, or tiny")
    if data.prompt_tokens is not None and data.prompt_tokens >= data.max_length:
        problems.append(
            f"data.prompt_tokens = {data.prompt_tokens}: leaves nothing to learn; "
            f"must be below data.max_length ({data.max_length})"
        )
    if data.drafter_run is not None and data.drafter == "plain":
        problems.append(
            f"data.drafter_run = {data.drafter_run!r}: needs data.drafter, which says what drafts"
        )
    if data.answers == "target":
        return problems + _rewriting(data) + _serving(data)
    if data.drafter != "plain":
        problems.append(f"data.drafter = {data.drafter!r}: needs data.answers=target")
    if data.server is not None:
        problems.append(f"data.server = {data.server!r}: needs data.answers=target")
    if data.samples > 1:
        problems.append(f"data.samples = {data.samples}: needs data.answers=target")
    return problems


def _rewriting(data: schema.DataSection) -> list[str]:
    problems = []
    if data.max_new_tokens is None:
        problems.append(
            "data.max_new_tokens = None: data.answers=target needs the length of an answer, "
            "e.g. 256"
        )
    if data.samples > 1 and data.temperature == 0:
        problems.append(
            f"data.samples = {data.samples}: all would be the same greedy answer; "
            "set data.temperature above 0, e.g. 1.0"
        )
    if data.format == "text" and data.prompt_tokens is None:
        problems.append(
            "data.prompt_tokens = None: data.answers=target continues a prompt; say how many "
            "tokens of each text are the prompt, e.g. 16"
        )
    return problems


def _serving(data: schema.DataSection) -> list[str]:
    if data.server is None and data.server_model is not None:
        return [f"data.server_model = {data.server_model!r}: needs data.server"]
    if data.server is not None and data.drafter != "plain":
        return [
            f"data.drafter = {data.drafter!r} and data.server = {data.server!r}: a server drafts "
            "as it was started; set one of the two to null or plain"
        ]
    if data.server is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", data.server):
        return [f"data.server = {data.server!r}: must be a URL, e.g. http://127.0.0.1:8000/v1"]
    return []


def of_head(head: schema.HeadSection) -> list[str]:
    """Query heads share key/value heads evenly."""
    if head.heads and head.kv_heads and head.heads % head.kv_heads:
        return [f"head.kv_heads = {head.kv_heads}: must divide head.heads ({head.heads})"]
    return []


def of_loss(loss: schema.LossSection) -> list[str]:
    """Something is left to minimise."""
    if loss.feature_weight == loss.distill_weight == 0:
        return [
            "loss.feature_weight = 0.0 and loss.distill_weight = 0.0: "
            "nothing to train on; one must be above 0"
        ]
    return []


def of_student(student: schema.StudentSection) -> list[str]:
    """One origin, and only settings that this origin has."""
    origins = {"model": student.model, "keep_layers": student.keep_layers, "layers": student.layers}
    given = {key: value for key, value in origins.items() if value is not None}
    if len(given) > 1:
        told = " and ".join(f"student.{key} = {value!r}" for key, value in given.items())
        return [f"{told}: set exactly one, the others to null"]
    problems = []
    keep = student.keep_layers
    if keep is not None and (not keep or list(keep) != sorted(set(keep))):
        problems.append(
            f"student.keep_layers = {list(keep)}: must be layers of the target in ascending order, "
            "e.g. [0, 11]"
        )
    shape = ("hidden", "heads", "kv_heads", "intermediate")
    for key in (key for key in shape if getattr(student, key) is not None):
        if student.layers is None:
            value = getattr(student, key)
            problems.append(f"student.{key} = {value}: needs a config of its own: student.layers")
    if student.embeddings == "shared" and keep is None:
        problems.append("student.embeddings = 'shared': needs student.keep_layers")
    if student.training == "none" and student.given and student.model is None:
        problems.append("student.training = 'none': needs a pretrained student: student.model")
    if student.training == "lora" and student.layers is not None:
        problems.append("student.training = 'lora': adapts weights that exist; not with layers")
    if not student.lora_targets:
        problems.append("student.lora_targets = []: name at least one linear layer, e.g. q_proj")
    return problems


def of_distill(distill: schema.DistillSection) -> list[str]:
    """Something is left to minimise, and a mixture that is one."""
    problems = []
    if not 0 < distill.beta < 1:
        problems.append(
            f"distill.beta = {distill.beta}: must be above 0 and below 1, where it is no mixture; "
            "use distill.forward_kl or distill.reverse_kl"
        )
    if not distill.divergences and distill.cross_entropy == 0:
        problems.append(
            "distill.forward_kl, reverse_kl, jsd, total_variation and cross_entropy are all 0: "
            "nothing to train on; one must be above 0"
        )
    return problems


def of_drafting(drafting: schema.DraftingSection) -> list[str]:
    """A tree that is one, and of a size that a target can read."""
    branching = list(drafting.branching)
    if not branching:
        return ["drafting.branching = []: give the children by depth, e.g. [2, 2, 1]"]
    nodes = sum(accumulate(branching, mul))
    if nodes > LARGEST_TREE:
        return [
            f"drafting.branching = {branching}: makes {nodes} nodes, at most {LARGEST_TREE}; "
            "lower some factors or leave out the last"
        ]
    return []


def of_optim(optim: schema.OptimSection) -> list[str]:
    """A beta of 1 would never forget the first gradient."""
    if max(optim.betas) == 1:
        return [f"optim.betas = {list(optim.betas)}: each must be below 1"]
    return []


def of_train(train: schema.TrainSection) -> list[str]:
    """One length of training, and forwards of equal size."""
    problems = []
    if train.steps is not None and train.epochs is not None:
        problems.append(
            f"train.steps = {train.steps} and train.epochs = {train.epochs}: "
            "set exactly one, the other to null"
        )
    if train.batch_size % train.accumulation:
        problems.append(
            f"train.accumulation = {train.accumulation}: must divide train.batch_size "
            f"({train.batch_size})"
        )
    return problems


def of_eval(evaluation: schema.EvalSection) -> list[str]:
    """Methods there are, and a tree that exists and is one."""
    problems = [] if evaluation.methods else ["eval.methods = []: name at least one"]
    foreign = [name for name in evaluation.methods if name.startswith(("generate", "hf_"))]
    if evaluation.spread > 1 and foreign:
        problems.append(
            f"eval.spread = {evaluation.spread:g}: {foreign[0]} cannot give each row its own "
            "length; leave it out of eval.methods or set eval.spread to 1"
        )
    try:
        load_tree_paths(evaluation.tree)
    except InvalidRecipeError as error:
        problems.extend(f"eval.tree = {evaluation.tree!r}: {line}" for line in error.problems)
    return problems


def of_hub(hub: schema.HubSection) -> list[str]:
    """A repository has an owner and a name."""
    if hub.repo_id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", hub.repo_id):
        return [f"hub.repo_id = {hub.repo_id!r}: must be owner/name, e.g. you/falcon-tiny"]
    return []


def of_cascade(cascade: schema.CascadeSection) -> list[str]:
    """A square, upper triangular K of the right size, with a student that has something to do."""
    k, students = [list(row) for row in cascade.k], cascade.size
    told = f"cascade.k = {k}"
    if not students:
        return ["cascade.students = []: name at least one student, or null for the recipe's own"]
    if len(k) != students + 1 or any(len(row) != len(k) for row in k):
        size = f"{students + 1} x {students + 1}"
        return [
            f"{told}: must be {size}: rows of the target and of {students} student(s), columns of "
            "the students and of Max-Gram; see cascade.students"
        ]
    below = [(i, j) for i in range(len(k)) for j in range(i) if k[i][j]]
    if below:
        i, j = below[0]
        return [
            f"{told}: must be upper triangular, but row {i}, column {j} is {k[i][j]}: a drafter "
            "reviews only what smaller ones propose; set it to 0"
        ]
    if not any(k[0][:-1]):
        return [
            f"{told}: no student drafts: row 0 must be above 0 before its last column (method "
            "maxgram is Max-Gram alone)"
        ]
    return []


def of_recipe(
    name: Any,
    data: schema.DataSection | None,
    evaluation: schema.EvalSection | None,
    maxgram: schema.MaxgramSection | None,
) -> list[str]:
    """A name that can be a folder, prompts that the data can give, a stream that can be counted.

    A section that is itself unsound is passed as None: nothing more can be said about it.
    """
    problems = []
    if not (isinstance(name, str) and name.strip() and "/" not in name and name[0] != "."):
        problems.append(f"name = {name!r}: must be text that can name a folder, e.g. tiny")
    if data is not None and maxgram is not None and maxgram.corpus == "stream":
        problems += _streaming(data)
    if data is None or evaluation is None or evaluation.prompts != "holdout":
        return problems
    if data.holdout == 0:
        problems.append(
            "eval.prompts = 'holdout': needs rows that training never sees; "
            "set data.holdout, e.g. 100"
        )
    if data.format == "text" and evaluation.prompt_tokens is None and data.prompt_tokens is None:
        problems.append(
            "eval.prompt_tokens = None: a text has no prompt of its own; say how many tokens are "
            "the prompt, e.g. 16"
        )
    return problems


def _streaming(data: schema.DataSection) -> list[str]:
    """A stream is read once and kept nowhere: it has no last rows, and nobody answers it."""
    problems = []
    if data.holdout:
        problems.append(
            f"data.holdout = {data.holdout}: maxgram.corpus=stream cannot know the last rows; "
            "set it to 0, or maxgram.corpus=tokens"
        )
    if data.answers == "target":
        problems.append(
            "data.answers = 'target': maxgram.corpus=stream counts texts as they are; set "
            "data.answers=dataset, or maxgram.corpus=tokens"
        )
    return problems


def of_distillation(
    data: schema.DataSection | None,
    evaluation: schema.EvalSection | None,
    train: schema.TrainSection | None,
    student: schema.StudentSection | None,
    distill: schema.DistillSection | None,
    cascade: schema.CascadeSection | None,
) -> list[str]:
    """What a recipe with a student may have, and one without it may not."""
    if student is None:
        return []
    problems = []
    if train and student.training != "none" and train.steps is None and train.epochs is None:
        problems.append("train.steps and train.epochs are both null: set exactly one")
    if evaluation and not student.given:
        problems.extend(
            f"eval.methods: {method} drafts with a student; set one of student.model, "
            "student.keep_layers and student.layers"
            for method in evaluation.methods
            if method in evaluation.student_methods
            or (method.partition(":")[0] == "cascade" and cascade and cascade.students is None)
        )
    if data and distill and distill.on_policy and data.format == "text" and not data.prompt_tokens:
        problems.append(
            f"distill.on_policy = {distill.on_policy}: a text has no prompt that the student could "
            "continue; set data.prompt_tokens, e.g. 16"
        )
    return problems


def of_medusa(
    evaluation: schema.EvalSection | None,
    student: schema.StudentSection | None,
    medusa: schema.MedusaSection | None,
) -> list[str]:
    """One kind of drafter to a recipe, and a tree no deeper than there are heads."""
    if evaluation is None or student is None or medusa is None:
        return []
    if medusa.given and student.given:
        return [f"medusa.heads = {medusa.heads}: the recipe has a student, too; set one to null"]
    if "medusa_tree" not in (name.partition(":")[0] for name in evaluation.methods):
        return []
    if not medusa.given:
        return ["eval.methods: medusa_tree drafts with Medusa heads; set medusa.heads, e.g. 4"]
    depth = max(map(len, load_tree_paths(evaluation.tree)))
    if depth > medusa.heads:
        return [
            f"eval.tree = {evaluation.tree!r}: {depth} deep, and medusa.heads = {medusa.heads} "
            f"draft {medusa.heads} tokens; take a tree that is no deeper, or grow one: eval/grow.py"
        ]
    return []
