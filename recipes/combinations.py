"""What cannot be had together: recipe values that are each allowed, and impossible combined.

Each function returns one line per problem, in a user's words: the keys, the values, the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdraft.recipes.fields import InvalidRecipeError
from specdraft.recipes.static_trees import load_tree_paths

if TYPE_CHECKING:
    from specdraft.recipes import schema


def of_data(data: schema.DataSection) -> list[str]:
    """Sources there are, a form of features that exists, and answers that can be made."""
    problems = []
    if not data.sources:
        problems.append("data.sources = []: name at least one file, Hub id, or tiny")
    if data.features == "online":
        problems.append("data.features = 'online': comes with a later version; use cached")
    if data.prompt_tokens is not None and data.prompt_tokens >= data.max_length:
        problems.append(
            f"data.prompt_tokens = {data.prompt_tokens}: leaves nothing to learn; "
            f"must be below data.max_length ({data.max_length})"
        )
    if data.answers == "target":
        return problems + _rewriting(data)
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


def of_optim(optim: schema.OptimSection) -> list[str]:
    """A beta of 1 would never forget the first gradient."""
    if max(optim.betas) == 1:
        return [f"optim.betas = {list(optim.betas)}: each must be below 1"]
    return []


def of_train(train: schema.TrainSection) -> list[str]:
    """One length of training, and forwards of equal size."""
    problems = []
    if train.steps is None and train.epochs is None:
        problems.append("train.steps and train.epochs are both null: set exactly one")
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
    foreign = [name for name in evaluation.methods if name in ("generate", "hf_prompt_lookup")]
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
