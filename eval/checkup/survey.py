"""Which families of transformers decode here as their own models do: each one tried, tiny.

A random model of a family (eval/checkup/tiny_families.py) is loaded as a target. What is decoded
with right and wrong drafts, two rows at a time, is compared with what the model itself generates,
greedily: in float32, where every token has to be the same, and in bfloat16, where a near-tie may
part them.
"""

import json
import multiprocessing
import queue
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING

from specdraft.eval.checkup.foreseeing import Foreseeing
from specdraft.eval.checkup.tiny_families import VOCAB, WINDOW, tiny_model
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.packed import PackedTarget
from specdraft.eval.engine.request import Request
from specdraft.eval.measure.identity import ROUNDING_UNITS, first_difference
from specdraft.eval.measure.report import write_json
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, TargetError, in_a_line

CAPACITY, NEW = 48, 8  # tokens of a row, and of an answer
LATE = "it took longer than"  # why: not for want of anything in the family


def special(target: Target) -> list[str]:
    """What a family does beyond plain attention and an lm_head, in words."""
    packed, config, words = PackedTarget(target, 1, CAPACITY), target.config, []
    windows = packed.pool.windows
    if any(windows):
        words.append("windows" if all(windows) else "windows in some layers")
    if any(keys.shape != values.shape for keys, values in packed.pool.kv):
        words.append("latent attention")
    if packed.states:
        words.append("recurrent states" + " in some layers" * bool(packed.pool.kv))
    if packed.pool.leaning is not None:
        words.append("relative bias" if target.reads_source else "ALiBi")
    if any("sinks" in name for name, _ in target.model.named_parameters()):
        words.append("sinks")
    if getattr(config, "attn_logit_softcapping", None):
        words.append("capped scores")
    if target.finish.cap:
        words.append("capped logits")
    if target.finish.scale != 1.0:
        words.append("scaled logits")
    if target.lm_head.bias is not None:
        words.append("bias on lm_head")
    return words


def examine(family: str) -> dict:
    """A row of the table: what is special, whether it works, and why not."""
    row = {"family": family, "special": [], "result": "works", "bfloat16": "", "why": ""}
    broken = "not tried"  # by sizes of ours that its code does not take
    try:
        target = Target(tiny_model(family), None, family)
        broken = "fails"
        row["special"] = special(target)
        return row | _compare(target)
    except TargetError as error:
        return row | {"result": "refused", "why": _reason(error)}
    except Exception as error:
        return row | {"result": broken, "why": in_a_line(error, kind=True)}


def _reason(error: TargetError) -> str:
    return in_a_line(error).partition("): ")[2] or in_a_line(error).partition(": ")[2]


def _compare(target: Target) -> dict:
    """Decode in float32 and bfloat16, with drafts and without."""
    if {*_outputs(target)} != {"identical"}:
        own = [
            [_own_tokens(target, r, use_cache=on) for r in _requests(target)]
            for on in (True, False)
        ]
        why = "tokens are not the model's own"
        if own[0] != own[1]:
            why = "its own generate gives other tokens with its cache than without"
        return {"result": "differs", "why": why}
    half = Target(target.model.to(torch.bfloat16), None, target.name)
    counts = _outputs(half)
    return {"bfloat16": ", ".join(f"{count} {kind}" for kind, count in counts.items())}


def _outputs(target: Target) -> Counter:
    """How many outputs are identical to the model's own, leave it at a near-tie, or differ."""
    requests, counts = _requests(target), Counter()
    expected = [_own_tokens(target, request) for request in requests]
    told = [tuple(request.source or request.prompt) for request in requests]
    for drafter in (None, Foreseeing(dict(zip(told, expected, strict=True)))):
        decoder = Decoder(target, drafter, 2, CAPACITY, prefill=7)
        for done in decoder.run(requests):
            if done.fallback:
                raise RuntimeError(done.fallback)
            request, index = requests[done.index], done.index
            found = first_difference(target, request, expected[index], done.tokens)
            kind = "near-tie" if found and found.near_tie else "differs"
            counts["identical" if found is None else kind] += 1
    return counts


def _requests(target: Target) -> list[Request]:
    generator, begin = torch.Generator().manual_seed(1), target.start_ids
    texts = [
        torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in (3, WINDOW + 5, 9)
    ]
    return [
        Request(begin or text, NEW, source=text if begin else (), eos_ids=frozenset())
        for text in texts
    ]


def _own_tokens(target: Target, request: Request, **options) -> list[int]:
    ids = torch.tensor([request.source or request.prompt])
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "pad_token_id": 0}
    said = target.model.generate(ids, do_sample=False, **options)[0].tolist()
    return said[len(request.prompt) :]


def survey(path: Path, names: list[str], seconds: float = 60.0) -> Iterator[dict]:
    """Examine families, each in a process of its own with a time limit; yield and keep every row.

    path: JSON with the rows so far; what this version of transformers was tried with is not tried
    again, unless it took too long.
    """
    if unknown := [name for name in names if name not in CONFIG_MAPPING]:
        raise TargetError(f"{unknown[0]}: no family of transformers {transformers.__version__}")
    rows, version = {row["family"]: row for row in kept(path)}, transformers.__version__
    for name in names:
        if name not in rows or rows[name]["why"].startswith(LATE):
            rows[name] = _apart(name, seconds)
            ordered = [rows[name] for name in sorted(rows)]
            write_json({"schema": 1, "transformers": version, "rows": ordered}, path)
        yield rows[name]


def kept(path: Path) -> list[dict]:
    """The rows of this version of transformers; DataError for a file that has none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
        same = content.get("transformers") == transformers.__version__
        return content["rows"] if same else []
    except (ValueError, KeyError, AttributeError) as error:
        raise DataError(f"{path} has no table of families; delete it to try all again") from error


def _apart(family: str, seconds: float) -> dict:
    """`examine` in a fork: what one family breaks or hangs does not reach the next."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_answer, args=(family, answers), daemon=True)
    process.start()
    process.join(seconds)
    row = {"family": family, "special": [], "result": "not tried", "bfloat16": ""}
    if process.is_alive():
        process.kill()
        process.join()
        return row | {"why": f"{LATE} {seconds:g} s"}
    if answers.empty():
        return row | {"why": f"its process ended with {process.exitcode}"}
    return answers.get()


def _answer(family: str, answers: queue.SimpleQueue) -> None:
    warnings.simplefilter("ignore")
    answers.put(examine(family))


def page(rows: list[dict], command: str) -> str:
    """The table in Markdown."""
    counts = {kind: sum(row["result"] == kind for row in rows) for kind in ("works", "refused")}
    lines = [
        "# Families of targets",
        "",
        "Which families of causal LMs and encoder-decoders in transformers "
        f"{transformers.__version__} can be targets,",
        "each tried as a tiny model with random weights. "
        f"{counts['works']} of {len(rows)} decode exactly their own model's",
        f"tokens, and {counts['refused']} are refused, with the reason. This table is made by",
        "",
        f"```bash\n{command}\n```",
        "",
        "*special*: unusual layers or logits. *bfloat16*: how many of six outputs are",
        "identical with and without drafts; the others differ at a near-tie, where two logits lie",
        f"within {ROUNDING_UNITS} roundings of the largest.",
        "",
        "| family | special | result | bfloat16 | why |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        why = row["why"].replace("|", "/")
        cells = (row["family"], ", ".join(row["special"]), row["result"], row["bfloat16"], why)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
