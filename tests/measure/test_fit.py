"""Fitting: nearly the best of all trees at given costs, replays equal to decoding, the command, and
the tree beside the weights that `auto` uses."""

import json
import re
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from commands import run_here
from decoding import plain_tokens, prompts
from random_models import random_head, random_target
from random_seq2seq import generated, random_seq2seq
from shallow import shallow_target

from specdraft.data.prompts import Prompt
from specdraft.eval.costing import race
from specdraft.eval.costing.drafts import shape_of
from specdraft.eval.costing.fitting import is_fitted, leave_tree, write_tree
from specdraft.eval.costing.rehearsal import rehearse
from specdraft.eval.costing.replay import Load, Ranks
from specdraft.eval.costing.search import Candidate, TreePrices, finalists
from specdraft.eval.costing.settings import PricedSetting
from specdraft.eval.costing.shares import TreeDrafter
from specdraft.eval.costing.show import print_fit, print_settings
from specdraft.eval.costing.tree_growth import (
    Text,
    medusa_rank_traces,
    rank_traces,
    shares_of,
)
from specdraft.eval.custom_generate import falcon
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.drafters.token_graph import GSD
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Completion, Request
from specdraft.eval.engine.timing import Timing
from specdraft.eval.lookup.maxgram import PromptLookup
from specdraft.eval.measure.outcome import Outcome
from specdraft.eval.methods.trained import Trained
from specdraft.eval.pricing.cost import CostModel, Curve, draft_terms, loop_terms, verify_terms
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.medusa import MedusaConfig, MedusaHeads
from specdraft.models.serving import serve_eagle
from specdraft.models.shapes import TargetShape, head_config
from specdraft.models.target import Target
from specdraft.models.weights.identity import hash_weights
from specdraft.recipes.arguments import check_writable
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.fields import InvalidRecipeError, plain
from specdraft.recipes.fitted_tree import Fit, fitted_tree, read_fit, size_of
from specdraft.recipes.load import load_recipe
from specdraft.recipes.static_trees import load_tree_paths

KNOTS = (1,)


def curve(terms: dict, **weights: float) -> Curve:
    return Curve({name: weights.get(name, 0.0) for name in terms}, 1, 0.0, 0.0, 0.0)


def costs(forward: float, node: float, per_pass: float, level: float) -> CostModel:
    """A machine with these costs in milliseconds."""
    verify = {"forward": forward, "tokens from 1": node}
    draft = {"draft": per_pass, "passes": per_pass, "levels": level}
    return CostModel(
        verify=curve(verify_terms(1, 1, 1, KNOTS), **verify),
        knots=KNOTS,
        loop=curve(loop_terms(1, 1), step=0.1),
        draft=curve(draft_terms(1, [1], [1]), **draft),
    )


MACHINES = {
    "a node costs nothing": costs(5.0, 0.01, 0.3, 0.05),
    "a node costs its share": costs(5.0, 0.8, 0.3, 0.05),
    "a pass costs two forwards": costs(5.0, 0.01, 10.0, 0.05),
}


def some_ranks(lengths: list[int], depth: int = 4) -> tuple[list, list[torch.Tensor]]:
    """Texts of given lengths with prompts of 5 tokens, and ranks of 0 to 2, mostly 0."""
    torch.manual_seed(2)
    texts = [Text(5, [0] * length) for length in lengths]
    traces = [torch.rand(length, depth).mul(1.6).pow(2).long() for length in lengths]
    return texts, traces


def every_tree(depth: int, nodes: int) -> list[list[tuple[int, ...]]]:
    """All prefix-closed trees over two ranks."""
    paths = [p for length in range(1, depth + 1) for p in product(range(2), repeat=length)]
    trees, frontier = [], [[path] for path in paths if len(path) == 1]
    seen = set()
    while frontier:
        tree = frontier.pop()
        key = frozenset(tree)
        if key in seen:
            continue
        seen.add(key)
        trees.append(sorted(tree))
        if len(tree) < nodes:
            frontier += [
                [*tree, path]
                for path in paths
                if path not in key and (len(path) == 1 or path[:-1] in key)
            ]
    return trees


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("coupled", [False, True])
def test_no_tree_is_expected_to_be_much_faster_than_the_best_finalist(machine, coupled):
    """Candidates are grown as if depths were independent, and priced by replays."""
    model, (texts, traces) = MACHINES[machine], some_ranks([300, 250])
    load, ranks = Load(texts, 1), Ranks(texts, traces)

    def speed(paths: list[tuple[int, ...]]) -> float:
        shape = shape_of(StaticTree(paths, 2, coupled))
        ms = load.step_ms(model, 1, len(paths) + 1) + model.draft_ms(*shape)
        return load.plain_ms(model) / (load.prompts_ms(model) + sum(ranks.steps(paths)) * ms)

    prices = TreePrices(ranks, model, 2, coupled, load)
    best = finalists([*prices.candidates(shares_of(traces, texts))], 1)[0]
    assert best.speedup == pytest.approx(speed([*best.paths]))
    assert best.speedup >= 0.97 * max(map(speed, every_tree(depth=4, nodes=6)))


def test_a_trees_size_and_passes_depend_on_the_machines_costs():
    texts, traces = some_ranks([300])
    shares, ranks, load = shares_of(traces, texts), Ranks(texts, traces), Load(texts, 1)
    every = (TreePrices(ranks, model, 2, True, load) for model in MACHINES.values())
    cheap, dear, slow = (finalists([*prices.candidates(shares)], 1)[0] for prices in every)
    assert len(cheap.paths) > 2 * len(dear.paths)
    assert (cheap.passes, slow.passes) == (2, 1)


def test_finalists_differ_in_passes_or_in_size():
    def one(nodes: int, passes: int, speedup: float) -> Candidate:
        return Candidate(tuple((rank,) for rank in range(nodes)), passes, 2.0, speedup)

    best, close, other, large = one(10, 2, 4.0), one(11, 2, 3.9), one(10, 3, 3.5), one(14, 2, 3.0)
    assert finalists([large, other, close, best], 3) == [best, other, large]
    assert finalists([best, close], 4) == [best]


def test_the_price_of_several_rows_accounts_for_rows_that_end_earlier():
    texts = [Text(5, [0] * (5 + answer)) for answer in (3, 9, 4)]
    load, model = Load(texts, 2), MACHINES["a node costs nothing"]
    assert load.tokens == 16
    prompts_ms = load.prompts_ms(model)
    two, one = (load.step_ms(model, rows, 1) for rows in (2, 1))
    # Two rows until the shorter answer ends, then one; then the third answer alone.
    assert load.plain_ms(model) == pytest.approx(prompts_ms + 2 * two + 6 * one + 3 * one)


# -- replays and rehearsals equal decoding ---------------------------------------------------------


@pytest.fixture(scope="module", params=["decoder", "flan-t5"])
def target(request) -> Target:
    return random_target() if request.param == "decoder" else random_seq2seq(request.param)


@pytest.fixture(scope="module")
def texts(target) -> list[Text]:
    asked = [prompt for prompt in prompts(5) if len(prompt) > 4]
    if target.reads_source:
        begin = target.start_ids
        return [Text(1, begin + generated(target, source, 21), source) for source in asked]
    return [Text(len(prompt), prompt + plain_tokens(target, prompt, 21)) for prompt in asked]


def decoded_steps(target, drafter, texts) -> list[int]:
    """Steps of every answer, with the prompt's, in real decoding."""
    requests = [
        Request(ids[:start], len(ids) - start, source=source) for start, ids, source in texts
    ]
    done = Decoder(target, drafter, rows=1, capacity=128).run(requests)
    return [len(one.steps) for one in done]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("reads", ["own", "both"])
def test_a_replayed_tree_takes_as_many_steps_as_decoding_with_it(target, texts, k, reads):
    forms = {"own": {}, "both": {"reads": "both", "coupling": "recurrent", "fusion": "linear"}}
    head = random_head(target, k, **(forms[reads] if k > 1 else {}))
    ranks = Ranks(texts, rank_traces(head, target, texts, 6))
    wide = [(n,) for n in range(12)] + [(n, m) for n in range(4) for m in range(4)]
    for paths in (wide, [(0,) * n for n in range(1, 7)], [*wide, (0, 0, 0), (1, 1, 0)]):
        drafter = FalconDrafter(head, target, StaticTree(paths, k), 1, 128)
        steps = [1 + count for count in ranks.steps(paths)]
        assert steps == decoded_steps(target, drafter, texts)
    assert min(ranks.steps(wide)) < 20  # something was accepted


def test_a_replayed_tree_of_medusa_heads_takes_as_many_steps_as_decoding_with_it(target, texts):
    config = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "heads": 3}
    heads = MedusaHeads.of(MedusaConfig(**config), target.lm_head_weight)
    ranks = Ranks(texts, medusa_rank_traces(heads, target, texts, 3))
    paths = [(n,) for n in range(8)] + [(n, m) for n in range(4) for m in range(4)] + [(0, 0, 0)]
    drafter = MedusaDrafter(heads, target, StaticTree(paths, 3))
    steps = [1 + count for count in ranks.steps(paths)]
    assert steps == decoded_steps(target, drafter, texts)


def test_a_rehearsal_takes_as_many_steps_as_decoding(target, texts):
    student, model = deepcopy(target), MACHINES["a node costs nothing"]
    with torch.no_grad():
        for weight in student.model.parameters():
            weight.add_(0.03 * torch.randn_like(weight))
    makers = {
        "ssd": lambda rows: SSD(student, rows, 128, gamma=4, theta=0.3),
        "gsd": lambda rows: GSD(student, rows, 128, 2, 4, depth=4, out_degree=2, theta_prob=0.1,
                                theta_sib=0.1, drop_siblings=False, nodes=16),
        "lookup": lambda rows: PromptLookup(1, 4, rows),
    }  # fmt: skip
    for name, make in makers.items():
        expected = decoded_steps(target, make(1), texts)
        for rows in (1, 3):
            done = rehearse(make(rows), Load(texts, rows), model)
            assert done.steps == sum(expected), name
            assert done.ms > 0
    assert sum(decoded_steps(target, makers["ssd"](1), texts)) < 20 * len(texts)


# -- the tree beside the weights -------------------------------------------------------------------

FIT = Fit(
    weights="abc",
    machine={"cpu": "one of ours", "threads": "1"},
    rows=1,
    trials=(
        {"nodes": 2, "depth": 2, "passes": 1, "tokens": 2.5, "expected": 1.5, "measured": 1.4},
    ),
)


def tree_text(fit: Fit | None = FIT) -> str:
    content = {"paths": [[0], [0, 0]]} | ({"fit": plain(asdict(fit))} if fit else {})
    return yaml.safe_dump(content)


def test_auto_means_the_tree_fitted_to_these_weights(tmp_path):
    with pytest.raises(RecipeError, match=r"= auto: no tree.yaml in .*: python eval/fit.py RECIPE"):
        fitted_tree(tmp_path, "abc")
    with pytest.raises(RecipeError, match="beside weights that were never saved"):
        fitted_tree(None, "abc")
    file = tmp_path / "tree.yaml"
    file.write_text(tree_text())
    assert fitted_tree(tmp_path, "abc") == file
    assert read_fit(file) == FIT
    assert str(read_fit(file).tried()[0]) == "2 nodes to depth 2 in 1 pass"
    assert str(replace(FIT.tried()[0], nodes=1, depth=1)) == "1 node to depth 1 in 1 pass"
    assert load_tree_paths(str(file)) == [(0,), (0, 0)]
    with pytest.raises(RecipeError, match="was fitted to other weights than lie beside it"):
        fitted_tree(tmp_path, "abd")
    file.write_text(tree_text(fit=None))  # a tree of the user's own
    assert fitted_tree(tmp_path, "abd") == file


def test_a_named_tree_is_written_beside_the_weights_unless_one_was_fitted_to_them(tmp_path):
    random_head(random_target(vocab=40), 2).save_pretrained(tmp_path)
    head = FalconHead.from_pretrained(tmp_path)
    drafter = TreeDrafter("falcon_tree", Trained(head=head), 2, coupled=False, deepest=16)
    recipe = load_recipe("recipes/tiny.yaml", ["eval.tree=tiny_k2"])
    file, weights = tmp_path / "tree.yaml", hash_weights(head)
    for fit, stays in ((None, False), (FIT, False), (replace(FIT, weights=weights), True)):
        file.write_text(tree_text(fit))
        leave_tree(recipe, drafter)
        named = [(0,), (0, 0)] if stays else load_tree_paths("tiny_k2")
        assert {*load_tree_paths(str(fitted_tree(tmp_path, weights)))} == {*named}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": []}, "must have one at least"),
        ({"trials": [{"nodes": 2}]}, "missing"),
        ({"trials": [FIT.trials[0] | {"measured": "fast"}]}, "entry 0"),
        ({"trials": [FIT.trials[0] | {"nodes": -1}]}, "nodes"),
        ({"machine": ["a"]}, "machine"),
        ({"rows": 0}, "rows"),
        ({"more": 1}, "must have weights"),
    ],
)
def test_an_invalid_fit_in_a_tree_file_is_refused(change, message, tmp_path):
    file = tmp_path / "tree.yaml"
    file.write_text(yaml.safe_dump({"paths": [[0]], "fit": plain(asdict(FIT)) | change}))
    with pytest.raises(InvalidRecipeError, match=message):
        read_fit(file)


def test_speedups_compare_tokens_per_second_if_samples_differ_in_length(monkeypatch):
    def outcome(tokens: int, seconds: float) -> Outcome:
        return Outcome([Completion(0, [1] * tokens, [], "length")], seconds, Timing())

    outcomes = {"plain": [outcome(10, 1.0)] * 2, "0": [outcome(5, 0.25)] * 2}
    monkeypatch.setattr(race, "take_turns", lambda *_: outcomes)
    monkeypatch.setattr(race, "make_method", lambda *_: None)
    recipe, asked = load_recipe("recipes/tiny.yaml"), [Prompt("a", "", [5], "")] * 2
    assert race.speedups("falcon_tree", [recipe], None, None, asked, 1.0) == [2.0]


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "said"), [("tree.json", "ends in .yaml"), ("README.md/tree.yaml", "cannot be written")]
)
def test_an_unwritable_output_path_is_refused_before_fitting(tmp_path, out, said):
    done = run_here("eval/fit.py", "recipes/tiny.yaml", f"output.dir={tmp_path}", "--out", out)
    assert done.returncode == 2
    assert out in done.stderr
    assert said in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_tree_may_be_written_into_a_new_folder(tmp_path):
    file = tmp_path / "new" / "tree.yaml"
    check_writable(file, ".yaml")
    write_tree(file, 2, "by hand", [(0,), (0, 0)])
    assert load_tree_paths(str(file)) == [(0,), (0, 0)]


def test_a_fit_that_never_beats_plain_decoding_says_so(capsys):
    trial = {"nodes": 2, "depth": 2, "passes": 1, "tokens": 1.5, "expected": 1.1}
    machine = {"cpu": "a slow one"}
    # The first trial is kept, though another may have been measured faster.
    for others, said in (((), True), ((0.9,), True), ((1.3,), False)):
        trials = tuple({**trial, "measured": measured} for measured in (0.93, *others))
        fit = Fit(weights="w", machine=machine, rows=24, trials=trials)
        print_fit(Path("tree.yaml"), fit)
        shown = capsys.readouterr().out
        assert ("no draft tried beats plain decoding with 24 rows on a slow one" in shown) is said
        assert ("the best runs at 0.93 x" in shown) is said


def test_long_setting_names_do_not_hide_their_figures(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    setting = {"drafting.depth": 10, "drafting.out_degree": 3, "drafting.theta_prob": 0.1}
    found = [PricedSetting({**setting, "drafting.tau": 3}, 2.25, 1.75, 1.5)]
    print_settings(load_recipe("recipes/tiny_distill.yaml"), Path("fitted.yaml"), found)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if ".tau 3 " in line)
    assert line.split()[-3:] == ["2.25", "1.75", "1.50"]


def test_the_expected_and_the_measured_speedup_both_decide():
    """Expected and measured speedups of two trees of the quickstart, on two days."""
    assert race.combined_speedup(2.61, 2.54) > race.combined_speedup(2.51, 2.63)
    assert race.combined_speedup(2.55, 2.29) < race.combined_speedup(2.51, 2.39)


def test_the_command_writes_a_tree_that_auto_uses_and_the_report_shows(tmp_path):
    tiny = Target.load(shallow_target(tmp_path / "target"))
    of_two_layers = [f"target.model={tiny.name}", "data.feature_layers=[1]"]
    places = [*of_two_layers, f"output.dir={tmp_path}", "eval.limit=2", "eval.validation=2"]
    command = ["recipes/tiny.yaml", *places, "eval.max_new_tokens=8"]
    bench = ["eval/bench.py", *command, "--methods", "plain,falcon_tree"]
    scales = {"embed_scale": 1.0, "feature_scale": 1.0}
    recipe, shape = load_recipe("recipes/tiny.yaml", places), TargetShape.of(tiny.config)
    head = FalconHead(head_config(recipe, shape, **scales, identity=tiny.identity()))
    head.save_pretrained(tmp_path / "head")

    missing = run_here(*bench)
    assert missing.returncode == 2
    assert "fit one: python eval/fit.py RECIPE, or name a tree" in missing.stderr

    done = run_here("eval/fit.py", *command, "--finalists", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "costs.json").is_file()
    file = tmp_path / "head" / "tree.yaml"
    fit, own = read_fit(file), load_recipe("recipes/tiny.yaml", [*command[1:], "eval.threads=1"])
    drafter = TreeDrafter.of_run(own, tiny)
    other = run_here("eval/fit.py", *command, "--method", "medusa_tree")
    assert other.returncode == 2
    assert "--method medusa_tree: the recipe's run drafts by falcon_tree" in other.stderr
    assert is_fitted(own, tiny, drafter)
    assert not is_fitted(replace(own, eval=replace(own.eval, batch_size=2)), tiny, drafter)
    assert fit.weights == hash_weights(head)
    assert fit.machine["threads"] == "1"
    assert fit.tried()[0].nodes == len(load_tree_paths(str(file)))
    assert [f"{trial.measured:.2f}" in done.stdout for trial in fit.tried()] == [True] * 2
    chosen, other_tree = (
        race.combined_speedup(trial.expected, trial.measured) for trial in fit.tried()
    )
    assert chosen > other_tree - 1e-3  # figures are rounded

    measured = run_here(*bench)
    assert measured.returncode == 0, measured.stderr
    told = f"fitted, {size_of(fit.tried()[0].nodes, fit.tried()[0].depth)}"
    assert f"falcon_tree: {told}" in measured.stdout
    bench = tmp_path / "bench" / "tiny_chat-b1-t0"
    report = json.loads((bench / "report.json").read_text())
    assert [run["tree"] for run in report["runs"]] == [None, told]
    assert report["fit"]["trials"] == plain(fit.trials)
    assert {one["nodes"] for one in report["fit"]["verify_ms"]} >= {1, 64}
    page = (bench / "report.html").read_text()
    assert len(re.findall("nodes? to depth", page)) == 2
    assert 'data-plot="costs"' in page

    drafter = falcon(str(tmp_path / "head"))(tiny, 1, 64)
    assert drafter.tree.paths == sorted(load_tree_paths(str(file)))
    with torch.no_grad():
        head.layers[0].down.weight.add_(0.1)
    head.save_pretrained(tmp_path / "head")  # trained again
    with pytest.raises(RecipeError, match="was fitted to other weights"):
        falcon(str(tmp_path / "head"))(tiny, 1, 64)


def test_the_command_fits_the_settings_of_a_drafter_without_a_tree(tmp_path):
    target = shallow_target(tmp_path / "target")
    of_two_layers = [f"target.model={target}", "data.feature_layers=[1]"]
    lengths = ["eval.validation=2", "eval.max_new_tokens=16"]
    places = [*of_two_layers, f"output.dir={tmp_path}", *lengths]
    command = ["eval/fit.py", "recipes/tiny.yaml", *places, "--method", "prompt_lookup"]
    done = run_here(*command, "--finalists", "2")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "fitted_prompt_lookup.yaml"
    before = load_recipe("recipes/tiny.yaml", places)
    after = load_recipe("recipes/tiny.yaml", [*places, str(file)])
    assert after.eval.lookup_match in (1, 2, 3)
    assert replace(before, eval=after.eval) == after
    assert f"'eval.lookup_copy={after.eval.lookup_copy}'" in done.stdout
    unknown = run_here(*command[:-1], "plain")
    assert unknown.returncode == 2
    assert "nothing to fit of 'plain'; known: prompt_lookup" in unknown.stderr


def test_a_recipe_with_a_falcon_tree_can_fit_a_tree_for_any_head(tmp_path):
    tiny = Target.load("tiny")
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64, "block_size": 1}
    config = FalconConfig(128, tiny.vocab_size, **shape, fusion="linear", input_norm=False)
    serve_eagle(FalconHead(config), "vllm", None).write(tmp_path / "head")
    places = [f"head={tmp_path / 'head'}", f"output.dir={tmp_path / 'run'}", "eval.limit=1000"]
    stopped = run_here("eval/fit.py", "recipes/tiny.yaml", *places)
    assert "no validation prompts are left" in stopped.stderr  # nothing else is wrong
