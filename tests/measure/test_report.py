"""Reports: figures follow their definitions, and outputs of all methods are compared exactly."""

import dataclasses
import itertools
import json
import re

import pytest
import torch
from commands import ROOT
from decoding import plain_tokens
from random_models import random_target
from rich.console import Console
from shallow import shallow_tiny

from specdraft.data.prompts import Prompt, load_prompts
from specdraft.eval.costing.tree_growth import best_paths
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Completion, Request, Step
from specdraft.eval.engine.sampling import perturbed
from specdraft.eval.engine.timing import Timing
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.eval.measure.hf_generate import Generate
from specdraft.eval.measure.identity import ROUNDING_UNITS, first_difference
from specdraft.eval.measure.measurement import measured_cost, repeat_speedups
from specdraft.eval.measure.methods import make_method
from specdraft.eval.measure.metrics import (
    Costs,
    acceptance_by_depth,
    acceptance_by_node,
    accepted_by_depth,
    counts,
    times,
)
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.measure.questions import make_requests
from specdraft.eval.measure.report import evaluate, write_report
from specdraft.eval.measure.rounds import take_turns
from specdraft.eval.measure.show import ACCEPTED, Pieces, kinds, replay
from specdraft.eval.measure.table import print_curves, print_report
from specdraft.eval.methods.registry import METHODS
from specdraft.eval.methods.trained import Trained
from specdraft.eval.page.cells import identical_outputs
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.student import make_student
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import EvalSection, StudentSection

STEPS = [Step(1, 0, 0, 0), Step(4, 10, 4, 3, 2, copies=3), Step(1, 10, 4, 0), Step(2, 10, 4, 1)]


@pytest.fixture(scope="module")
def tiny():
    return shallow_tiny()


def test_figures_equal_a_count_by_hand():
    outcome = Outcome(
        [Completion(0, list(range(8)), STEPS)], 2.0, Timing(verify=0.9, forwards=4), (9,), 0.3
    )
    figures = counts([outcome], Costs(by_parameters=0.25, measured=0.5))
    assert figures["tokens_per_step"] == 8 / 4
    assert figures["accepted_per_step"] == 1.0
    assert figures["acceptance_rate"] == 4 / 8
    assert figures["drafted_per_step"] == 27 / 4
    assert figures["verified_per_step"] == 30 / 4
    assert figures["drafter_forwards_per_step"] == 9 / 4
    assert figures["matchness"] == 4 / 12
    assert figures["graph_success"] == 1 / 4
    assert figures["swi_params"] == 8 / (4 + 9 * 0.25)
    assert figures["swi_measured"] == 8 / (4 + 9 * 0.5)
    # 9 draft forwards over 3 drafting steps; the next test but two has the acceptance by depth.
    assert figures["ewif_params"] == (1 + 2 / 3 + 1 / 3 + 1 / 3 + 0) / (1 + 3 * 0.25)
    assert figures["mbsu"] == 2.0 / (1 + 0.25 * 9 / 4)
    clock = times([outcome], tokens=8)
    assert clock["tokens_per_second"] == 4.0
    assert clock["draft_ms_per_step"] == pytest.approx(75)
    assert clock["overhead_ms_per_step"] == pytest.approx(200)


def test_expected_tokens_count_drafts_of_all_depths():
    steps = [Step(1, 0, 0, 0), Step(7, 6, 6, 6), Step(1, 2, 2, 0), Step(2, 1, 1, 1)]
    outcome = Outcome([Completion(0, [0] * 11, steps)], 1.0, Timing(forwards=4), (6,), 0.1)
    figures = counts([outcome], Costs(by_parameters=0.25, measured=None))
    assert figures["ewif_params"] == pytest.approx((1 + 7 / 3) / (1 + 2 * 0.25))
    assert figures["ewif_measured"] is None


def test_figures_of_unknown_drafts_are_none_not_zero():
    outcome = Outcome([Completion(0, [0] * 4, [Step(3, 0, 0, 2), Step(1, 0, 0, 0)])], 1.0, Timing())
    figures = counts([outcome], Costs(0.0, None))
    unknown = ("drafted_per_step", "verified_per_step", "graph_success", "matchness")
    assert [figures[key] for key in unknown] == [None] * 4
    assert figures["tokens_per_step"] == 2.0


def test_a_drafters_pass_is_priced_in_plain_steps_of_one_row():
    rows = [Completion(n, [0] * 5, [Step(1, 0, 0, 0)] * 5) for n in range(4)]
    plain = [Outcome(rows, 2.0, Timing(verify=1.0, forwards=5))]
    ours = [Outcome(rows, 1.0, Timing(verify=0.5, forwards=2), (8,), 0.2)]
    assert measured_cost(ours, plain) == pytest.approx(0.2 / 8 / (1.0 / 20))
    assert measured_cost(plain, plain) == 0.0
    assert measured_cost(ours, None) is None


def test_acceptance_by_depth_is_conditional_on_the_depth_before():
    assert acceptance_by_depth(STEPS) == [2 / 3, 1 / 2, 1 / 1, 0 / 1]
    assert acceptance_by_depth([Step(1, 0, 0, 0)]) == []


def test_acceptance_by_depth_counts_drafts_of_all_depths():
    steps = [Step(1, 0, 0, 0), Step(3, 2, 2, 2), Step(2, 1, 1, 1), Step(1, 4, 4, 0)]
    assert acceptance_by_depth(steps) == [2 / 3, 1 / 1, 0 / 1][:2]
    assert accepted_by_depth(steps) == [2 / 3, 1 / 3]
    assert accepted_by_depth(steps[:1]) == []


def test_acceptance_by_node_counts_paths_of_ranks():
    tree = (-1, 0, 0, 1, 1)  # root; a, b; a's children c, d
    chain = (-1, 0)
    steps = [
        Step(1, 0, 0, 0, 0, (-1,), (), (0,)),
        Step(3, 4, 2, 2, 0, tree, (1, 2, 3, 4), (0, 1, 4)),
        Step(2, 4, 2, 1, 0, tree, (1, 2, 3, 4), (0, 2)),
        Step(2, 1, 1, 1, 0, chain, (1,), (0, 1)),
        Step(1, 0, 0, 0),  # a baseline's: no tree is known
    ]
    found = {tuple(n["path"]): (n["drafted"], n["accepted"]) for n in acceptance_by_node(steps)}
    assert found == {(0,): (3, 2), (1,): (2, 1), (0, 0): (2, 0), (0, 1): (2, 1)}
    assert [n["path"] for n in acceptance_by_node(steps, limit=2)] == [[0], [1]]


def test_repeats_are_kept_and_paired_with_those_of_plain_decoding():
    times_of = {"plain": [(2.0, 4.0), (6.0, 4.0)], "ours": [(1.0, 1.0), (1.0, 3.0)]}
    done = Completion(0, [1, 2], [Step(1, 0, 0, 0)] * 2)
    rows = {
        name: times(
            [Outcome([done], 1.0, Timing(forwards=2), tries=tries) for tries in batches], tokens=4
        )
        for name, batches in times_of.items()
    }
    assert rows["plain"]["tokens_per_second_repeats"] == [4 / 8, 4 / 8]
    assert rows["ours"]["tokens_per_second_repeats"] == [4 / 2, 4 / 4]
    assert repeat_speedups(rows["ours"], rows["plain"]) == [4.0, 2.0]


def test_an_odd_number_of_repeats_gives_the_figures_of_the_median_one():
    seconds = iter([9.0, 5.0, 1.0, 3.0])  # the first is the warm-up

    def run(requests):
        took = next(seconds)
        return Outcome([Completion(0, [1], [])] * len(requests), took, Timing(verify=took / 2))

    settings = EvalSection(repeats=3, batch_size=2)
    requests = make_requests(settings, [Prompt("a", "x", [1], ""), Prompt("b", "x", [2], "")])
    [outcome] = take_turns({"ours": run}, requests, settings, progress=False)["ours"]
    assert (outcome.seconds, outcome.timing.verify) == (3.0, 1.5)
    assert outcome.tries == (5.0, 1.0, 3.0)


def test_spread_lengths_are_log_uniform_shuffled_by_the_seed_and_ignore_end_tokens():
    prompts = [Prompt(str(n), "x", [n], "") for n in range(7)]

    def lengths(**settings) -> list[int]:
        asked = make_requests(EvalSection(max_new_tokens=64, **settings), prompts)
        assert [request.prompt for request in asked] == [[n] for n in range(7)]
        ends = frozenset() if "spread" in settings else None  # None: the target's
        assert {request.eos_ids for request in asked} == {ends}
        return [request.max_new_tokens for request in asked]

    assert lengths() == [64] * 7
    spread = lengths(spread=8.0)
    assert sorted(spread) == [8, 11, 16, 23, 32, 45, 64]
    assert spread not in (sorted(spread), sorted(spread)[::-1])
    assert lengths(spread=8.0) == spread != lengths(spread=8.0, seed=1)


def test_a_request_has_the_recipes_sampling_settings_and_its_own_seed():
    settings = EvalSection(temperature=0.7, top_k=5, top_p=0.9, acceptance="walk", seed=40)
    asked = make_requests(settings, [Prompt(str(n), "x", [n], "") for n in range(3)])
    assert [request.seed for request in asked] == [40, 41, 42]
    found = {(one.temperature, one.top_k, one.top_p, one.rule) for one in asked}
    assert found == {(0.7, 5, 0.9, "walk")}


def test_a_replay_shows_every_token_and_draft(tiny):
    recipe = load_recipe("recipes/tiny.yaml", ["eval.limit=3", "eval.max_new_tokens=32"])
    for prompt in load_prompts(recipe, tiny.tokenizer):
        drafter = PromptLookup(1, 5, 1, tiny.device)
        (done,) = Decoder(tiny, drafter, capacity=600).run([Request(prompt.input_ids, 32)])
        told = replay(tiny.tokenizer, done.tokens, done.steps)
        texts = [text for step in told for text, _ in step["tokens"]]
        assert "".join(texts) == tiny.tokenizer.decode(done.tokens)
        assert len(texts) == len(done.tokens)
        fresh = iter(done.tokens)
        for step, shown in zip(done.steps, told, strict=True):
            emitted = [next(fresh) for _ in range(step.emitted)]
            kinds = [kind for _, kind in shown["tokens"]]
            whole = ["accepted"] * step.accepted + ["bonus" if step.drafted else "plain"]
            assert kinds == whole[: step.emitted]
            assert (shown["draft"] is None) == (step.drafted == 0)
            for node, token in zip(step.path[1:], emitted, strict=False):
                assert step.tokens[node - 1] == token
                assert shown["draft"]["texts"][node] == tiny.tokenizer.decode([token])


def test_a_wrong_token_is_no_near_tie_but_an_equally_likely_one_is():
    target, request = random_target(), Request([1, 2, 3], 2)
    logits = target.model(torch.tensor([request.prompt])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert first_difference(target, request, [best, 4], [best, 4]) is None
    fault = first_difference(target, request, [best, 4], [second, 4])
    assert (fault.position, fault.plain, fault.ours, fault.near_tie) == (0, best, second, False)
    assert fault.gap == pytest.approx(float(logits[best] - logits[second]), rel=1e-4)
    with torch.no_grad():  # make the two logits equal
        target.lm_head.weight[second] = target.lm_head.weight[best]
    assert first_difference(target, request, [best], [second]).near_tie
    assert not first_difference(target, request, [best], [best, 1]).near_tie


def move_logit(target: Target, prompt: list[int], token: int, by: float) -> None:
    """Change a target's logit of one token after a prompt."""
    with torch.no_grad():
        feature = target.features(torch.tensor([prompt]))[0, -1]
        target.lm_head.weight[token] += by * feature / feature.dot(feature)


def test_a_near_tie_of_sampling_compares_scores_with_their_noise():
    target, request = random_target(), Request([1, 2, 3], 1, temperature=0.7, seed=5)
    logits = target.model(torch.tensor([request.prompt])).logits[0, -1]
    scores = perturbed(logits, 3, 5, 0.7, 0, 1.0)
    first, second = scores.topk(2).indices.tolist()
    fault = first_difference(target, request, [first], [second])
    assert fault.gap == pytest.approx(0.7 * float(scores[first] - scores[second]), rel=1e-3)
    assert not fault.near_tie
    move_logit(target, request.prompt, second, fault.gap)
    assert first_difference(target, request, [first], [second]).near_tie
    greedy = dataclasses.replace(request, temperature=0.0)
    assert not first_difference(target, greedy, [first], [second]).near_tie


def test_a_token_cut_by_top_k_is_a_near_tie_only_close_to_the_cut():
    target, request = random_target(), Request([1, 2, 3], 1, temperature=1.0, top_k=2)
    logits = target.model(torch.tensor([request.prompt])).logits[0, -1]
    best, second, third = logits.topk(3).indices.tolist()
    fault = first_difference(target, request, [best], [third])
    assert fault.gap == pytest.approx(float(logits[second] - logits[third]), rel=1e-3)
    assert not fault.near_tie
    move_logit(target, request.prompt, third, fault.gap - 5e-6)
    assert first_difference(target, request, [best], [third]).near_tie


def test_the_limit_of_a_near_tie_scales_with_the_largest_logit():
    """Rounding errors grow with the size of the sums."""
    for sharpness in (0.1, 8.0, 800.0):
        target, request = random_target(sharpness=sharpness), Request([1, 2, 3], 1)
        logits = target.model(torch.tensor([request.prompt])).logits[0, -1]
        best, second = logits.topk(2).indices.tolist()
        limit = ROUNDING_UNITS * torch.finfo(torch.float32).eps * float(logits.abs().max())
        for gap, near in ((2.0 * limit, False), (0.5 * limit, True)):
            now = target.model(torch.tensor([request.prompt])).logits[0, -1]
            move_logit(target, request.prompt, second, float(now[best] - now[second]) - gap)
            assert first_difference(target, request, [best], [second]).near_tie == near


def test_the_pieces_of_an_answer_add_up_to_its_text(tiny):
    tokens = tiny.tokenizer("Once there was a café, and it was blue.")["input_ids"]
    rest = len(tokens) - 4
    steps = [Step(1, 0, 0, 0), Step(3, 5, 3, 2), Step(rest, rest, rest, rest - 1)]
    runs = Pieces(tiny.tokenizer).add(tokens, steps)
    assert "".join(text for text, _ in runs) == tiny.tokenizer.decode(tokens)
    assert [kind == ACCEPTED for _, kind in runs].count(True) == 2


def test_an_end_token_within_a_draft_leaves_no_bonus_token():
    cut = [Step(1, 0, 0, 0), Step(2, 5, 3, 3), Step(2, 5, 3, 1)]
    assert [kinds(step) for step in cut] == [["plain"], ["accepted"] * 2, ["accepted", "bonus"]]
    unknown = Step(3, 0, 0, 2)  # as reported for transformers
    assert kinds(unknown) == ["bonus"] * 3


# EAGLE-1 and Medusa heads are measured in their own tests.
MEASURED = [name for name in METHODS if not name.startswith(("eagle", "medusa"))]


@pytest.fixture(scope="module")
def report(tiny, tmp_path_factory):
    """Every method on real prompts, with an untrained head and a table that predicts one token."""
    overrides = ["eval.limit=3", "eval.max_new_tokens=14", "train.threads=1"]
    overrides += ["eval.tree=tiny_k2", f"output.dir={tmp_path_factory.mktemp('run')}"]
    recipe = load_recipe("recipes/tiny.yaml", overrides)
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    config = FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape)
    prompts = load_prompts(recipe, tiny.tokenizer)
    ones = torch.ones(tiny.vocab_size, dtype=torch.long)
    table = MaxGramTable.of_counts(MaxGramConfig(tiny.vocab_size), ones, ones, ones)
    student = make_student(StudentSection(keep_layers=[0]), tiny).as_target()
    trained = Trained(FalconHead(config), table, student, (student,))
    return evaluate(recipe, tiny, trained, prompts, MEASURED)


def test_every_method_gives_plain_decodings_tokens(report):
    rows = {row["method"]: row for row in report["runs"]}
    assert set(rows) == set(MEASURED)
    for row in rows.values():
        assert row["outputs"] == row["identical"] + row["near_ties"] == 3, row["differences"]
        assert row["tokens"] == rows["plain"]["tokens"]
        assert row["speedup"] == row["tokens_per_second"] / rows["plain"]["tokens_per_second"]
    assert rows["plain"]["tokens_per_step"] == rows["generate"]["tokens_per_step"] == 1.0
    assert rows["prompt_lookup"]["tokens_per_step"] > 1.0
    assert rows["hf_prompt_lookup"]["tokens_per_step"] > 1.0
    assert rows["falcon_tree"]["drafter_forwards_per_step"] > 2.0


def test_the_report_page_describes_exactly_the_keys_of_a_run(report):
    page = (ROOT / "eval" / "report.md").read_text(encoding="utf-8")
    described = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))
    for run in report["runs"]:
        assert sorted(run) == sorted(described)
    nested = {
        "categories": report["runs"][0]["categories"][0].keys() - {"category"},
        "acceptance_by_node": {"path", "drafted", "accepted"},
    }
    for key, parts in nested.items():
        assert all(re.search(rf"\b{part}\b", described[key]) for part in parts), key


def test_a_report_is_written_as_json_and_html_and_printed(report, tmp_path, capsys):
    path = write_report(report, tmp_path)
    assert json.loads(path.read_text())["schema"] == 1
    names = {file.name for file in tmp_path.iterdir() if file.suffix != ".png"}
    assert names == {"report.json", "report.html"}
    print_report(report)
    shown = capsys.readouterr().out
    assert "falcon_tree" in shown
    assert "a step" in shown


def test_baselines_run_in_the_same_mode_as_ours(tiny):
    methods = ["plain", "generate", "hf_prompt_lookup", "hf_assisted"]
    recipe = load_recipe("recipes/tiny_distill.yaml", ["eval.limit=1", "eval.max_new_tokens=4"])
    student = make_student(StudentSection(keep_layers=[0]), tiny).as_target()
    modes = []
    seen = tiny.model.base_model.layers[0].register_forward_pre_hook(
        lambda *_: modes.append(torch.is_inference_mode_enabled())
    )
    runner = {
        name: make_method(name, recipe, tiny, Trained(student=student), 600) for name in methods
    }
    modes.clear()  # forwards while making methods
    prompts = load_prompts(recipe, tiny.tokenizer)
    with seen:
        for name in methods:
            runner[name]([Request(prompts[0].input_ids, 4)])
            assert modes, name
            assert all(modes), name
            modes.clear()


def test_the_generate_baseline_ignores_the_models_generation_config():
    target, requests = random_target(), [Request([n, 3, n], 12) for n in range(1, 5)]
    target.model.generation_config.repetition_penalty = 3.0
    target.model.generation_config.no_repeat_ngram_size = 2
    expected = [plain_tokens(target, request.prompt, 12) for request in requests]
    for options in ({}, {"lookup_tokens": 3}):
        done = Generate(target, **options)(requests).completions
        assert [one.tokens for one in done] == expected
    assert target.model.generation_config.repetition_penalty == 3.0


def test_the_most_important_figures_fit_80_columns(report, capsys):
    for run in report["runs"]:
        run["tokens_per_second_repeats"] = [110.0, 12000.0]
    print_report(report, Console(width=80))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for run in report["runs"]:
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == [run["method"]])
        assert {f"{run[key]:.2f}" for key in ("tokens_per_step", "speedup")} <= {*line.split()}
        assert "(110-12000)" in line
    print_report(report, Console(width=120))
    assert "verify" not in shown
    assert "verify" in capsys.readouterr().out


def test_a_terminal_that_is_too_narrow_still_shows_the_last_column(report, capsys):
    print_report(report, Console(width=40))
    shown = capsys.readouterr().out
    for run in report["runs"]:
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == [run["method"]])
        assert line.split()[-1] == identical_outputs(run)


def test_speedups_by_batch_size_are_shown_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    run = {"prompt_set": "a", "temperature": 0.0, "method": "plain", "speedup": 1.25}
    print_curves([run | {"batch_size": size} for size in (1, 2, 4, 8, 16, 32)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "plain " in line[:7])
    assert line.split() == ["plain", *["1.25"] * 6]


def test_an_unknown_method_or_one_without_its_drafter_is_refused(tiny):
    recipe = load_recipe("recipes/tiny.yaml")
    with pytest.raises(RecipeError, match=r"medusa.*known: plain, generate"):
        make_method("medusa", recipe, tiny, Trained(), 64)
    with pytest.raises(RecipeError, match="needs a trained head"):
        make_method("falcon_tree", recipe, tiny, Trained(), 64)
    with pytest.raises(RecipeError, match="needs a Max-Gram table"):
        make_method("maxgram", recipe, tiny, Trained(), 64)


def test_a_rule_that_does_not_fit_a_method_is_refused_naming_both(tiny):
    recipe = load_recipe("recipes/tiny.yaml", ["eval.acceptance=recursive"])
    make_method("prompt_lookup", recipe, tiny, Trained(), 64)  # greedy needs no rule
    recipe = load_recipe("recipes/tiny.yaml", ["eval.acceptance=recursive", "eval.temperature=1"])
    make_method("plain", recipe, tiny, Trained(), 64)
    with pytest.raises(RecipeError, match=r"eval\.acceptance = recursive: .*prompt_lookup.*walk"):
        make_method("prompt_lookup", recipe, tiny, Trained(), 64)


def test_a_sampling_method_uses_the_acceptance_rule_of_its_paper(tiny):
    methods = ["plain", "ssd", "gsd:dynamic", "rsd_c", "rsd_s", "specinfer:padded", "spectr"]
    methods += ["generate"]  # samples with its own generator
    options = ["eval.limit=2", "eval.max_new_tokens=12", "eval.temperature=1.0", "train.threads=1"]
    recipe = load_recipe("recipes/tiny_distill.yaml", [*options, "drafting.gamma=3"])
    student = make_student(StudentSection(keep_layers=[0]), tiny).as_target()
    prompts = load_prompts(recipe, tiny.tokenizer)
    trained = Trained(student=student)
    done = evaluate(recipe, tiny, trained, prompts, methods)
    rows = {row["method"]: row for row in done["runs"]}
    rules = {name: row["acceptance"] for name, row in rows.items()}
    assert rules == {
        "plain": "gumbel", "ssd": "gumbel", "gsd:dynamic": "gumbel", "rsd_c": "recursive",
        "rsd_s": "recursive", "specinfer:padded": "multistep", "spectr": "kseq",
        "generate": "transformers",
    }  # fmt: skip
    for row in rows.values():
        exact = row["acceptance"] == "gumbel"
        assert row["identical"] is None or row["identical"] + row["near_ties"] == 2
        assert exact == (row["identical"] is not None)
    undrafted = ("plain", "generate")
    drafted = [row["drafted_per_step"] for name, row in rows.items() if name not in undrafted]
    assert all(count > 1 for count in drafted)


def test_batches_of_rows_change_no_output(tiny, report):
    recipe = load_recipe("recipes/tiny.yaml", ["eval.limit=3", "eval.max_new_tokens=14"])
    recipe = dataclasses.replace(recipe, eval=dataclasses.replace(recipe.eval, batch_size=2))
    prompts = load_prompts(recipe, tiny.tokenizer)
    methods = ["plain", "generate", "prompt_lookup"]
    together = evaluate(recipe, tiny, Trained(), prompts, methods)
    assert [row["method"] for row in together["runs"]] == methods
    for row in together["runs"]:
        assert row["identical"] + row["near_ties"] == 3
        assert row["tokens"] == report["runs"][0]["tokens"]


def test_the_grown_tree_equals_the_best_tree_by_brute_force():
    shares = torch.tensor([[0.6, 0.2, 0.1], [0.5, 0.3, 0.05], [0.4, 0.1, 0.1]])
    everything = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]

    def probability(path):
        return float(shares[range(len(path)), path].prod())

    by_value = sorted(everything, key=probability, reverse=True)
    for nodes in (1, 4, 9, 15):
        grown = best_paths(shares, nodes)
        assert all(path[:-1] in [(), *grown] for path in grown)
        total = sum(map(probability, grown))
        assert total == pytest.approx(sum(map(probability, by_value[:nodes])))


def test_an_answer_that_ends_within_a_character_keeps_the_text_before_it(tiny):
    tokens = tiny.tokenizer.encode("Hello \N{GRINNING FACE}", add_special_tokens=False)[:-1]
    pieces = Pieces(tiny.tokenizer)
    assert pieces.add(tokens, [Step(len(tokens), 8, 8, len(tokens))]) == [("Hello ", ACCEPTED)]
    assert pieces.text == "Hello "
