"""What runs inside vLLM's own environment: prompts through the engine, every step noted.

    python -c "from specdraft.eval.serve.job import run; run('job.json', 'done')"

A job is JSON: `engine` has the arguments of `vllm.LLM`, `prompts` token ids, `max_new_tokens`, the
ids that `stop`, `temperatures`, a `seed`. Of each temperature are written the tokens of every
prompt, how many each step brought, and the engine's own counts of drafts, to done/result.json, with
the rows that our proposer still holds; what the first draft of the first prompt was made of, to
done/trace.safetensors.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specdraft.eval.serve.tracing import Trace, note, tracing
from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead

COUNTERS = ("num_drafts", "num_accepted_tokens_per_pos", "num_preemptions", "prefix_cache_hits")


def run(job_file: str, folder: str) -> None:
    """Run a job and write what came of it."""
    from vllm import LLM

    job, out = json.loads(Path(job_file).read_text()), Path(folder)
    llm = LLM(**job["engine"])
    repaired = repair_temperatures()
    if job["engine"].get("speculative_config"):
        trace = traced(llm, job)
        save_file({n: t.contiguous() for n, t in trace.items()}, out / "trace.safetensors")
    runs = [decode(llm, job, temperature) for temperature in job["temperatures"]]
    rows = getattr(drafter_of(llm), "rows", None)
    result = {"runs": runs, "repaired": repaired, "held": None if rows is None else len(rows)}
    (out / "result.json").write_text(json.dumps(result))


def drafter_of(llm: Any) -> Any:
    """What drafts inside the engine; None where nothing does."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return getattr(executor.driver_worker.worker.model_runner, "drafter", None)


def repair_temperatures() -> bool:
    """Whether vLLM's sampler had to be mended for drafts to be accepted at the right temperature.

    On a CPU without Triton, vLLM 0.32 hands its kernel a copy of what it wants filled, and goes on
    with whatever was in memory: with any drafter, what is sampled is noise. Ours fills it.
    """
    from vllm.v1.sample import rejection_sampler

    def expanded(
        x: Tensor, ends: Tensor, count: int, replace_from: float = 0, replace_to: float = 0
    ) -> Tensor:
        each = ends.diff(prepend=ends.new_zeros(1))
        replaced = torch.where(x == replace_from, replace_to, x)
        return replaced.repeat_interleave(each, output_size=count)

    x, ends = torch.tensor([0.5, 2.0]), torch.tensor([1, 3], dtype=torch.int32)
    if not torch.cuda.is_available():
        found = rejection_sampler.expand_batch_to_tokens(x, ends, 3)
        if not torch.equal(found, torch.tensor([0.5, 2.0, 2.0])):
            rejection_sampler.expand_batch_to_tokens = expanded
            return True
    return False


def decode(llm: Any, job: dict, temperature: float) -> dict:
    """Decode all prompts, as many at once as the engine takes."""
    engine, before = llm.llm_engine, counters(llm)
    tokens: list[list[int]] = [[] for _ in job["prompts"]]
    steps: list[list[int]] = [[] for _ in job["prompts"]]
    for number, prompt in enumerate(job["prompts"]):
        add(engine, job, number, prompt, temperature, job["max_new_tokens"])
    while engine.has_unfinished_requests():
        for output in engine.step():
            number, known = int(output.request_id), list(output.outputs[0].token_ids)
            if fresh := len(known) - len(tokens[number]):
                steps[number].append(fresh)
                tokens[number] = known
    after = counters(llm)
    counts = {name: _less(after[name], before[name]) for name in after}
    return {"temperature": temperature, "tokens": tokens, "steps": steps, "counts": counts}


def add(
    engine: Any, job: dict, number: int, prompt: list[int], temperature: float, length: int
) -> None:
    """Hand one request to the engine."""
    from vllm import SamplingParams

    settings = SamplingParams(
        temperature=temperature,
        max_tokens=length,
        seed=job["seed"] + number if temperature else None,
        stop_token_ids=job["stop"],
        detokenize=False,
    )
    engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)


def counters(llm: Any) -> dict:
    """The engine's counts so far."""
    named = {metric.name.removeprefix("vllm:"): metric for metric in llm.get_metrics()}
    found = {name.removeprefix("spec_decode_"): metric for name, metric in named.items()}
    known = {name: found[name] for name in COUNTERS if name in found}
    return {name: getattr(m, "values", None) or m.value for name, m in known.items()}


def _less(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before


# -- what the first draft is made of ---------------------------------------------------------------


def traced(llm: Any, job: dict) -> Trace:
    """Trace the first draft of the first prompt; a drafter without tensors has its tokens only."""
    drafter = drafter_of(llm)
    head = getattr(getattr(getattr(drafter, "rows", None), "drafter", None), "head", None)
    module = getattr(getattr(drafter, "model", None), "model", None)
    if isinstance(head, FalconHead | Eagle3Head):
        opened = tracing(head)
    elif hasattr(module, "fc"):
        opened = tracing_eagle(module)
    else:
        opened = nullcontext({})
    with opened as trace, drafts_noted(drafter, trace):
        add(llm.llm_engine, job, 0, job["prompts"][0], 0.0, 1)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    return trace


@contextmanager
def drafts_noted(drafter: Any, trace: Trace) -> Iterator[None]:
    """Note the tokens of the first draft."""
    propose = drafter.propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        draft = propose(*args, **kwargs)
        if len(draft) and len(draft[0]):
            note(trace, draft=torch.as_tensor(draft[0]))
        return draft

    drafter.propose = noted
    try:
        yield
    finally:
        drafter.propose = propose


@contextmanager
def tracing_eagle(model: nn.Module) -> Iterator[Trace]:
    """Trace vLLM's own EAGLE-1 and EAGLE-3 (model_executor/models/llama_eagle.py, llama_eagle3.py)
    by the names of ours."""
    trace, layer = {}, model.layers[0]
    attention, reads_apart = layer.self_attn, hasattr(layer, "hidden_norm")

    def fused(_, args: tuple, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if reads_apart:  # EAGLE-3: `fc` has the target's layers only
            note(trace, features=args[0], fused=output)
        else:
            embeddings, features = args[0].chunk(2, -1)
            note(trace, embeddings=embeddings, features=features, fused=output)

    def read(_, args: tuple, named: dict) -> None:
        if reads_apart:
            note(trace, embeddings=named["embeds"])

    def rotated(module: nn.Module, args: tuple, output: tuple) -> None:
        if "fused" not in trace:  # vLLM's layers share it with the target's, of the same angles
            return
        query, key = (_heads(x, attention.head_dim) for x in output)
        angles = module.cos_sin_cache[args[0]].chunk(2, -1)[0]
        note(trace, rotary=angles, query=query, key=key)

    def projected(_, args: tuple, output: tuple) -> None:
        note(trace, value=_heads(output[0][..., -attention.kv_size :], attention.head_dim))

    hooks = [
        model.fc.register_forward_hook(fused),
        layer.register_forward_pre_hook(read, with_kwargs=True),
        attention.rotary_emb.register_forward_hook(rotated),
        attention.qkv_proj.register_forward_hook(projected),
        attention.o_proj.register_forward_pre_hook(lambda _, a: note(trace, attended=a[0])),
        layer.mlp.register_forward_pre_hook(lambda _, a: note(trace, normed=a[0])),
        layer.register_forward_hook(lambda _, __, out: note(trace, output=out[0] + out[1])),
    ]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield trace


def _heads(x: Tensor, width: int) -> Tensor:
    """[T, heads * D] to [heads, T, D]."""
    return x.view(len(x), -1, width).transpose(0, 1)
