"""Whether an engine drafts as we do: the same tokens, steps and acceptance; if not, since where.

Both sides decode the same prompts with the same chain. Greedy outputs have to be those of the
engine without speculation, token for token; steps are compared one by one. With a temperature,
where the two draw other samples, acceptance is compared in standard errors, over prompts.
Where they differ, the tensors of the first draft are gone through in the order of computation
(eval/serve/tracing.py), and the first that differs beyond rounding is the one to look at.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from specdraft.data.prompts import Prompt
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.drafter import Drafter
from specdraft.eval.engine.request import Completion, Request
from specdraft.eval.measure.identity import differences
from specdraft.eval.measure.measurement import measure
from specdraft.eval.methods.registry import METHODS, Setup, load_trained, make_drafter, registered
from specdraft.eval.methods.trained import Trained
from specdraft.eval.serve.causes import first_cause
from specdraft.eval.serve.engine import VLLM
from specdraft.eval.serve.routes import fixed_chain, route
from specdraft.eval.serve.sides import Side, first_step, gaps_of
from specdraft.eval.serve.tracing import Trace, note, tracing
from specdraft.models.target import Target
from specdraft.models.target_files import model_folder
from specdraft.recipes.schema import Recipe

GREEDY_GAP = 0.01  # of acceptance at a position, where nothing is random
# Standard errors that acceptance at a position may differ by: of some ten positions the largest is
# beyond 2 every third time.
ERRORS = 3.0
ROWS = 8  # that the engine decodes at once
MARGIN = 64  # positions behind the longest answer: an engine near its end drafts no more


def check(recipe: Recipe, target: Target, prompts: Sequence[Prompt], vllm: VLLM, name: str) -> dict:
    """Compare one method with its route in the engine, greedily and at temperature 1: a report."""
    way, recipe = route(name), fixed_chain(recipe)
    kept = nullcontext() if way.ours.name in METHODS else registered(way.ours)
    with kept, TemporaryDirectory() as folder:
        trained = load_trained(recipe, target, [way.ours.name])
        given = way.engine(recipe, Path(folder))
        result, theirs = vllm.run(job(recipe, target, prompts, (0.0, 1.0), given))
        plain, _ = vllm.run(job(recipe, target, prompts, (0.0,), {}))
        ours = Ours(way.ours.name, recipe, target, trained)
        sides = [(run, ours.decode(prompts, run["temperature"])) for run in result["runs"]]
        trace = ours.traced(prompts[0])
    parts = [
        compared(target, prompts, side_of(run), mine, plain["runs"][0], run) for run, mine in sides
    ]
    cause = first_cause(target, prompts[0].input_ids, trace, theirs)
    return {
        "method": name,
        "engine": f"vllm {vllm.version}",
        "prompts": len(prompts),
        "weights": trained.weights(),
        "passed": cause is None and all(part["passed"] for part in parts),
        "cause": cause,
        "repaired": result["repaired"],
        "runs": parts,
    }


def job(
    recipe: Recipe, target: Target, prompts: Sequence[Prompt], temperatures: tuple, given: dict
) -> dict:
    """What the engine has to do (eval/serve/job.py)."""
    settings, section = recipe.eval, recipe.target
    room = max(len(prompt.input_ids) for prompt in prompts) + settings.max_new_tokens
    engine = {
        "model": str(model_folder(section.model, section.revision).absolute()),
        "dtype": section.dtype,
        "trust_remote_code": section.trust_remote_code,
        "max_model_len": min(room + MARGIN, max(room, target.context or math.inf)),
        "max_num_seqs": ROWS,
        "enable_prefix_caching": False,  # every feature is computed, as ours are
        "enforce_eager": True,
        "disable_log_stats": False,
    }
    return {
        "engine": engine | given,
        "prompts": [list(prompt.input_ids) for prompt in prompts],
        "max_new_tokens": settings.max_new_tokens,
        "stop": sorted(target.eos_ids),
        "temperatures": temperatures,
        "seed": settings.seed,
    }


# -- both sides ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """Our decoder with one method, and what it drafts with."""

    name: str
    recipe: Recipe
    target: Target
    trained: Trained

    def decode(self, prompts: Sequence[Prompt], temperature: float) -> Side:
        """Decode prompts; drafts are taken as they are and accepted as engines do.

        A drafter that needs tokens alone drafts here while the target reads the prompt, in an
        engine behind the first token: so that the steps are the same, it is handed that token with
        the prompt.
        """
        settings = {"temperature": temperature, "acceptance": "walk", "repeats": 1, "spread": 1.0}
        own = replace(self, recipe=self.recipe.with_eval(**settings))
        if own._drafter(1).from_tokens:
            return own._behind_first(prompts)
        return Side.of(own._completions(prompts))

    def _behind_first(self, prompts: Sequence[Prompt]) -> Side:
        """The first token by plain decoding, the others behind it by the method."""
        firsts = replace(self, name="plain")._completions(prompts, 1)
        rest, eos_ids = self.recipe.eval.max_new_tokens - 1, self.target.eos_ids
        going = [n for n, one in enumerate(firsts) if rest and one.tokens[0] not in eos_ids]
        longer = [
            replace(prompts[n], input_ids=[*prompts[n].input_ids, *firsts[n].tokens]) for n in going
        ]
        done = list(firsts)
        for n, later in zip(going, self._completions(longer, rest) if going else (), strict=True):
            tokens, steps = done[n].tokens + later.tokens, done[n].steps + later.steps
            done[n] = replace(done[n], tokens=tokens, steps=steps)
        return Side.of(done)

    def _completions(
        self, prompts: Sequence[Prompt], length: int | None = None
    ) -> list[Completion]:
        """Decode prompts in their order; length: new tokens, None: as many as the recipe says."""
        recipe = self.recipe.with_eval(max_new_tokens=length) if length else self.recipe
        done = measure(recipe, self.target, self.trained, prompts, [self.name])
        return done.completions(self.name)

    def traced(self, prompt: Prompt) -> Trace:
        """Trace the first draft for a prompt."""
        capacity = len(prompt.input_ids) + self.recipe.eval.max_new_tokens
        drafter = self._drafter(capacity)
        decoder = Decoder(self.target, drafter, 1, capacity + drafter.max_nodes)
        head = getattr(drafter, "head", None)  # as it drafts
        with tracing(head) if head is not None else nullcontext({}) as trace:
            (done,) = decoder.run([Request(prompt.input_ids, 2)])
        if len(done.steps) > 1 and len(done.steps[1].tokens):
            note(trace, draft=torch.tensor(done.steps[1].tokens))
        return trace

    def _drafter(self, capacity: int) -> Drafter:
        setup = Setup(self.recipe, self.target, self.trained, 1, capacity)
        return make_drafter(self.name, setup)


def side_of(run: dict) -> Side:
    """What the engine did."""
    counts = run["counts"]
    accepted = counts.get("num_accepted_tokens_per_pos", [])
    return Side(run["tokens"], run["steps"], counts.get("num_drafts", 0), accepted)


# -- side by side ----------------------------------------------------------------------------------


def compared(
    target: Target, prompts: Sequence[Prompt], theirs: Side, ours: Side, plain: dict, run: dict
) -> dict:
    """Compare the two at one temperature."""
    greedy = run["temperature"] == 0
    gaps = gaps_of(theirs, ours)
    report = {
        "temperature": run["temperature"],
        "tokens_per_step": {"engine": theirs.tokens_per_step, "ours": ours.tokens_per_step},
        "drafts": {"engine": theirs.drafts, "ours": ours.drafts},
        "acceptance": {"engine": theirs.acceptance, "ours": ours.acceptance},
        "gaps": gaps,
    }
    if not greedy:
        return report | {"passed": all(gap["errors"] <= ERRORS for gap in gaps)}
    asked = [Request(prompt.input_ids, 1, source=prompt.source) for prompt in prompts]
    wrong = differences(target, asked, plain["tokens"], theirs.tokens)
    faults = sum(not difference.near_tie for _, difference in wrong)
    report["identical"] = len(prompts) - len(wrong)
    report["near_ties"] = len(wrong) - faults
    report["identical_to_ours"] = sum(map(list.__eq__, ours.tokens, theirs.tokens))
    report["first_step"] = first_step(ours, theirs)
    alike = all(gap["gap"] <= GREEDY_GAP for gap in gaps)
    return report | {"passed": not faults and alike}
