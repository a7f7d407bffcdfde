"""Why two traces of the same first draft differ: the first tensor, where, and what became of it.

Tensors are compared in the order in which they follow from each other, so that what differs first
is where the fault is, and not what came of it.

Shapes: T inputs read, H hidden.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from specdraft.eval.serve.tracing import Trace
from specdraft.models.target import Target

ROUNDING = torch.finfo(torch.float32).eps ** 0.5  # half of the digits, of the largest number
MEANING = {  # in the order in which one follows from those before it
    "embeddings": "the embeddings of the tokens one ahead",
    "features": "the target's features",
    "fused": "what the fusion (fc) makes of embeddings and features",
    "positions": "the rotary positions",
    "rotary": "the rotary angles: their base",
    "query": "the attention's queries: q_proj, or the norm before it",
    "key": "the attention's keys: k_proj, or the norm before it",
    "value": "the attention's values: v_proj, or the norm before it",
    "attended": "what is attended to: the mask, or the scale",
    "normed": "what the MLP reads: the norm before it, or o_proj",
    "output": "what the layer puts out: the MLP",
    "draft": "the tokens drafted: lm_head, or the draft vocabulary's ids",
}


def first_cause(target: Target, prompt: list[int], ours: Trace, theirs: Trace) -> dict | None:
    """Return the first tensor that differs, at which input, and by what; None: there is none.

    prompt: that was read. What rounding may do is relative to the largest number of a tensor.
    """
    both = (split(ours), split(theirs))
    for name in [name for name in MEANING if all(name in trace for trace in both)]:
        (mine, other), limit = (trace[name] for trace in both), ROUNDING
        if name == "draft":
            count = min(len(mine), len(other))
            mine, other, limit = mine[:count, None], other[:count, None], 0.0
        if mine.shape != other.shape:
            how = f"{list(mine.shape)} here, {list(other.shape)} there"
            return {"tensor": name, "input": 0, "what": MEANING[name], "how": how}
        gaps = (mine - other).abs().flatten(1).amax(1) / mine.abs().max().clamp(min=1e-30)
        if not (gaps <= limit).all():  # NaN is not
            where = int((~(gaps <= limit)).nonzero()[0])
            found = next(transformations(name, target, prompt, *both), "")
            return {"tensor": name, "input": where, "what": MEANING[name], "how": found}
    return None


def split(trace: Trace) -> Trace:
    """A trace with inputs in front, [T, ..], and angles parted: those of the first pair of numbers
    are the positions, whatever the base."""
    parted = {name: trace[name] for name in MEANING if name in trace}
    for name in {"query", "key", "value"} & parted.keys():
        parted[name] = parted[name].transpose(0, 1)
    if "rotary" in parted:
        parted["positions"], parted["rotary"] = parted["rotary"][:, :1], parted["rotary"][:, 1:]
    return parted


def transformations(
    name: str, target: Target, prompt: list[int], ours: Trace, theirs: Trace
) -> Iterator[str]:
    """What their tensor is, where it is one that can be named."""
    mine, other = ours[name], theirs[name]
    if name == "features":
        yield from other_features(target, prompt, mine, other)
    if name in ("query", "key"):
        swapped = theirs["key" if name == "query" else "query"]
        if alike(mine, swapped):
            yield "queries and keys have changed places (q_proj, k_proj)"
    for shift in (1, -1):
        here, there = mine[max(shift, 0) :], other[max(-shift, 0) :]
        count = min(len(here), len(there))
        if len(mine) > 2 and alike(here[:count], there[:count]):
            yield f"theirs are ours of one {'later' if shift > 0 else 'earlier'}"
    if name == "positions":
        yield "theirs are counted from another number"
    if name == "normed" and alike(unit(mine), unit(other)):
        yield "theirs differ by a factor: the norm was left out"
    ratio = (mine * other).sum() / mine.square().sum().clamp(min=1e-30)
    if alike(mine * ratio, other):
        yield f"theirs are ours times {float(ratio):.4g}"
    if name == "normed" and but_for_weights(mine, other):
        yield "theirs are ours but for the weights of the norm, which are missing"


def but_for_weights(mine: Tensor, other: Tensor) -> bool:
    """Whether each number of theirs is ours times a weight, the same at every input."""
    weights = other / torch.where(mine.abs() > 1e-3 * mine.abs().max(), mine, torch.nan)
    spread = (weights.nanmedian(0).values - weights).abs() / weights.abs()
    return float(spread.nanmedian()) < ROUNDING


def other_features(target: Target, prompt: list[int], mine: Tensor, other: Tensor) -> Iterator[str]:
    """Name the place in the target that has such features, if there is one; of EAGLE-3, which reads
    several side by side and weighs them, the layers."""
    count = len(mine)
    ids = torch.tensor([prompt[:count]], device=target.device)
    base, kept = target.model.base_model, []
    *_, norm = (module for module in base.modules() if "Norm" in type(module).__name__)
    with norm.register_forward_pre_hook(lambda _, args: kept.append(args[0][0].float().cpu())):
        states = base(ids, output_hidden_states=True).hidden_states
    if kept and alike(kept[0], other):
        yield "theirs are those before the final norm"
    for number, state in enumerate(states[:-1]):
        if alike(state[0].float().cpu(), other):
            yield f"theirs are those after layer {number} of {len(states) - 1}, before any norm"
        with torch.inference_mode():
            normed = norm(state)[0].float().cpu()
        if alike(normed, other):
            yield f"theirs are those after layer {number} of {len(states) - 1}, normed"
    read = [layer_of(part, states) for part in other.split(target.hidden_size, -1)]
    if None not in read:
        yield f"theirs are those after layers {read} of {len(states) - 1}"


def layer_of(part: Tensor, states: Sequence[Tensor]) -> int | None:
    """The layer whose states [1, T, H] these are, normed and weighed or not; None: of none."""
    for number, state in enumerate(states[:-1]):
        plain = state[0].float().cpu()
        if alike(plain, part) or but_for_weights(unit(plain), part):
            return number
    return None


def alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a - b).abs() <= ROUNDING * b.abs().max()).all())


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
