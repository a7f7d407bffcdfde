"""Dynamic drafts: plain decoding's tokens, the most probable nodes, and only as many as pay."""

import itertools
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from decoding import completions, decode, plain_tokens, prompts
from enumeration import law_error, play, random_laws
from random_models import draft_logits, random_eagle3, random_head, random_target
from test_lm_drafter import near
from test_rules_in_decoder import check_law

from specdraft.eval.drafters.best_first import SHARPNESS, BestFirst, Weighed
from specdraft.eval.drafters.drawing import ranking
from specdraft.eval.drafters.dynamic import DynamicFalcon
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.eval.engine.tree import Tree
from specdraft.eval.pricing.cost import CostModel
from specdraft.eval.pricing.evidence import LEAST, MOST, Evidence
from specdraft.eval.pricing.worth import CACHED, NEVER, USUAL, Worth, _ratios
from specdraft.models.passes.row import WEIGHED, weighed

# With FREE, nodes and passes cost next to nothing and everything is drafted; with DEAR, a lot.
FREE = CostModel(
    verify=_ratios({"forward": 1.0, "tokens from 1": 1e-6}),
    knots=(1,),
    loop=_ratios({"step": 0.0}),
    draft=_ratios({"draft": 1e-6, "passes": 1e-6, "nodes": 1e-9}),
)
DEAR = CostModel(
    verify=_ratios({"forward": 1.0, "tokens from 1": 1.0}),
    knots=(1,),
    loop=_ratios({"step": 0.0}),
    draft=_ratios({"draft": 0.2, "passes": 0.2}),
)
HEADS = {
    "paper": (2, {}),
    "eagle": (1, {"fusion": "linear"}),
    "both": (3, {"fusion": "linear", "reads": "both", "coupling": "recurrent"}),
    "newest": (2, {"reads": "newest", "coupling": "markov"}),
    "window": (3, {"reads": "newest", "coupling": "recurrent", "window": 4}),
    "own": (3, {"coupling": "recurrent", "draft_vocab": 17}),
    "eagle3": (1, {"feature_layers": (1,), "draft_vocab": 17}),
}
every_head = pytest.mark.parametrize("name", HEADS)
widths = pytest.mark.parametrize(("width", "paths"), [(1, 3), (3, 2)])


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def greedy(target):
    return [plain_tokens(target, prompt, 17) for prompt in prompts(4)]


def head_for(target, name: str):
    block_size, changes = HEADS[name]
    if name == "eagle3":
        return random_eagle3(target, **changes)
    return random_head(target, block_size, **changes)


def drafter_for(target, name: str, rows: int, costs=FREE, **shape) -> DynamicFalcon:
    return DynamicFalcon(head_for(target, name), target, costs, rows, 128, passes=3, **shape)


# -- plain decoding's tokens -----------------------------------------------------------------------


@every_head
@widths
def test_greedy_output_equals_that_of_the_model_without_a_cache(target, greedy, name, width, paths):
    requests = [Request(prompt, 17) for prompt in prompts(4)]
    for rows, costs in ((1, FREE), (3, USUAL)):
        drafter = drafter_for(target, name, rows, costs, width=width, paths=paths)
        decoder = Decoder(target, drafter, rows, 512)
        assert decode(decoder, requests, accepts=costs is FREE) == greedy


@every_head
@widths
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, name, width, paths):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 12, seed=n, **settings) for n, p in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, 1, 128), requests)
    drafter = drafter_for(target, name, 3, width=width, paths=paths)
    assert decode(Decoder(target, drafter, 3, 512), requests) == expected


@pytest.mark.parametrize("costs", [FREE, USUAL])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_students_best_first_drafts_change_no_output(target, costs, temperature):
    requests = [Request(p, 12, temperature, seed=n) for n, p in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, 1, 128), requests)
    for rows, student in ((1, target), (3, near(target)), (3, random_target(seed=3))):
        for paths in (1, 3):
            drafter = BestFirst(student, rows, 128, costs, depth=5, paths=paths)
            decoder = Decoder(target, drafter, rows, 512)
            assert decode(decoder, requests, accepts=student is target) == expected


def test_rejection_rules_refuse_best_first_drafts(target):
    for drafter in (drafter_for(target, "both", 1), BestFirst(target, 1, 128)):
        assert drafter.rules == frozenset()
        [done] = Decoder(target, drafter, 1, 512).run([Request([1, 2], 5, 1.0, rule="recursive")])
        assert done.reason == "refused"
        assert "allowed: gumbel, walk" in str(done.error)


@pytest.mark.parametrize("kind", ["alike", "mismatched", "some zeros", "disjoint"])
def test_walking_a_tree_of_the_most_probable_nodes_is_lossless(kind):
    """Every branch of choices is enumerated, for several numbers of most probable nodes by q."""
    length = 3
    p, q = random_laws(kind, 3, length)
    for least in (0.9, 0.3, 0.15, 0.05, 0.0):
        growth, texts = Weighed([-1]), {0: ()}
        for depth in range(length - 1):
            for node in [n for n, text in texts.items() if len(text) == depth]:
                chances, tokens = q[texts[node]].sort(descending=True)
                first = len(growth)
                growth.sprout(node, tokens.tolist(), chances.tolist())
                for place, token in enumerate(tokens.tolist()):
                    texts[first + place] = (*texts[node], token)
        topology, order = growth.pruned(least, 99)
        tokens = [growth.tokens[node] for node in order]

        def draft(chance, topology=topology, tokens=tokens):
            return Tree(topology, torch.empty(0)), tokens

        played = play(RULES["walk"].rule, draft, p)
        assert law_error(played.law, p, length) <= 1e-12
        kept = sum(chance >= least for chance in growth.chances[1:])
        assert played.drafted == pytest.approx(kept)


def test_outputs_under_the_walk_follow_the_targets_distribution(target):
    check_law(target, drafter_for(target, "both", 4), "walk", 4)


# -- the most probable nodes -----------------------------------------------------------------------


def drafted(drafter, request: Request, target) -> list[tuple[int, ...]]:
    """The texts of the first draft."""
    drafter.start(0, request)
    features = target.features(torch.tensor([request.prompt[:-1]]))[0]
    if not drafter.from_tokens:
        drafter.observe(0, list(request.prompt[1:]), features)
    [tree] = drafter.draft([0])
    return texts_of(tree)


def texts_of(tree: Tree) -> list[tuple[int, ...]]:
    """The tokens of the path to every node but the root; no two are equal."""
    texts = [()]
    for parent, token in zip(tree.topology.parents[1:], tree.tokens.tolist(), strict=True):
        texts.append((*texts[parent], token))
    assert len(set(texts)) == len(texts)
    return texts[1:]


@pytest.mark.parametrize("name", ["both", "newest", "eagle", "paper"])
@pytest.mark.parametrize(("temperature", "rule"), [(0.0, GUMBEL), (1.2, GUMBEL), (1.2, "walk")])
@torch.inference_mode()
def test_no_undrafted_child_is_more_probable_than_a_drafted_node(target, name, temperature, rule):
    """Of nodes that have children, every child more probable than the least probable drafted node
    is drafted; probabilities come from whole-sequence forwards of the head."""
    head, prompt = head_for(target, name), prompts(4)[3]
    request = Request(prompt, 9, temperature, seed=3, rule=rule)
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "tokens from 1": 0.1}),
        knots=(1,),
        loop=_ratios({"step": 0.0}),
        draft=FREE.draft,
    )
    drafter = DynamicFalcon(head, target, costs, 1, 128, width=4, siblings=3, paths=4, passes=3)
    texts = drafted(drafter, request, target)
    chance = {(): 1.0}

    def law(text):
        logits = draft_logits(head, target, prompt, list(text))
        position = torch.tensor([len(prompt) + len(text)])
        ranked = ranking(logits[None], request, position)[0]
        chances, tokens = weighed(ranked, WEIGHED, SHARPNESS)
        return torch.zeros_like(ranked).index_put((tokens,), chances)

    for text in texts:
        chance[text] = chance[text[:-1]] * float(law(text[:-1])[text[-1]])
    least = min(chance.values())
    assert least > 0.05  # a node costs at least a tenth of a token
    expanded = {text[:-1] for text in texts}
    for text in expanded:
        best = (law(text) * chance[text]).topk(3)
        for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            assert value < least + 1e-4 or (*text, token) in chance
    assert len(texts) > 2


@pytest.mark.parametrize("name", [name for name in HEADS if name != "eagle3"])
@torch.inference_mode()
def test_a_long_draft_equals_the_heads_token_by_token_prediction(target, name):
    """Chains over all passes: every pass has the right states, attention and blocks."""
    head, prompt = head_for(target, name), prompts(4)[3]
    drafter = DynamicFalcon(head, target, FREE, 1, 128, width=1, siblings=1, paths=1, passes=4)
    [longest] = [max(drafted(drafter, Request(prompt, 9), target), key=len)]
    assert len(longest) == drafter.depth
    for count in range(len(longest)):
        logits = draft_logits(head, target, prompt, list(longest[:count]))
        if head.draft_ids is not None:
            logits = logits[head.draft_ids]
            best = int(head.draft_ids[logits.argmax()])
        else:
            best = int(logits.argmax())
        assert longest[count] == best


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@torch.inference_mode()
def test_a_row_alone_drafts_what_it_drafts_next_to_another_row(target, temperature):
    """With one path: the shortcut for a single row, and the levels that several rows share."""
    nothing = replace(FREE, verify=_ratios({"forward": 1.0}))  # nodes cost nothing
    drafter = BestFirst(near(target), 2, 128, nothing, depth=5, paths=1)
    for prompt in prompts():
        for row in (0, 1):
            drafter.start(row, Request(prompt, 9, temperature, seed=3))
        _, beside = drafter.draft([0, 1])
        drafter.start(0, Request(prompt, 9, temperature, seed=3))
        [alone] = drafter.draft([0])
        assert {*texts_of(alone)} == {*texts_of(beside)}
        assert drafter.memory[0].cached == drafter.memory[1].cached == [1, 2, 3, 4]
        assert alone.topology.depth == 5


# -- only as many as pay ---------------------------------------------------------------------------


def test_the_more_rows_the_fewer_nodes_are_drafted_for_each_down_to_none(target):
    """A node costs the same with any number of rows, while the forward is shared."""
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "tokens from 1": 0.1}),
        knots=(1,),
        loop=_ratios({"step": 0.0}),
        draft=_ratios({"draft": 0.01, "rows": 0.05, "row passes": 0.05}),
    )
    counts = []
    for rows in (1, 3, 8):
        drafter = BestFirst(near(target), rows, 128, costs, depth=5)
        requests = [Request(prompts()[n % 6], 40, seed=n) for n in range(rows)]
        done = completions(Decoder(target, drafter, rows, 512), requests)
        steps = [step for one in done for step in one.steps]
        counts.append(sum(step.drafted for step in steps) / len(steps))
    assert counts[0] > 1.3 * counts[1] > 1.69 * counts[2]
    for rows in (1, 64):
        worth = Worth(costs, 1, 48)
        worth.begin(range(rows), 100)
        assert (worth.choose([[0.8, 0.7]] * rows).least == NEVER) == (rows == 64)


def test_drafting_that_never_pays_is_retried_at_doubling_intervals():
    worth = Worth(replace(DEAR, draft=_ratios({"draft": 4.0})), 3, 48)
    drafted = []
    for _ in range(5 * MOST):
        worth.begin(range(8), 100)
        drafted.append(worth.starts())
        if drafted[-1]:
            assert worth.choose([[0.9, 0.8]] * 8).least == NEVER
        for row in range(8):
            worth.earn(row, 1)
    assert all(made in ([], [*range(8)]) for made in drafted)
    spells = [(len([*own]), made) for made, own in itertools.groupby(map(bool, drafted))]
    tries = [count for count, made in spells if made]
    rests = [count for count, made in spells[:-1] if not made]
    assert max(tries) < LEAST / 4
    assert rests == [min(LEAST * 2**n, MOST) for n in range(1, 1 + len(rests))]
    assert rests.count(MOST) > 1


def test_after_drafts_have_paid_for_long_pauses_are_short_again():
    evidence = Evidence()
    evidence.rest = MOST

    def lasts(gained: float) -> int:
        """Steps until the next pause."""
        for step in range(9 * MOST):
            if not evidence.allows(1.0):
                return step
            evidence.add(gained if step <= 2 * MOST else -9.0, 1)
        raise AssertionError("it never rests")

    assert lasts(1.5) > 2 * MOST
    assert evidence.left == LEAST - 1
    assert [evidence.allows(1.0) for _ in range(LEAST)] == [False] * (LEAST - 1) + [True]


def test_a_new_text_ends_the_pause_of_a_single_row_but_not_of_a_batch():
    """In a batch, the texts before tell what the next ones are like."""
    for rows in (1, 2):
        worth = Worth(USUAL, 3, 48)
        worth.begin(range(rows), 100)
        worth.evidence.left, worth.evidence.rest = MOST, MOST
        worth.begin(range(rows), 100)
        assert not worth.starts()
        for row in range(rows):
            worth.admit(row)
        worth.begin(range(rows), 100)
        assert worth.starts() == ([0] if rows == 1 else [])


def test_drafts_that_pay_are_hardly_ever_paused_and_others_nearly_always():
    """However much the gains scatter."""
    generator = random.Random(0)
    shares = []
    for mean in (1.3, 0.5):
        evidence, drafted = Evidence(), 0
        for _ in range(20_000):
            if evidence.allows(1.0):
                drafted += 1
                evidence.add(generator.gauss(mean, 1.5), 1)
        shares.append(drafted / 20_000)
    assert shares[0] > 0.9
    assert shares[1] < 0.1


def test_a_pass_for_rows_ahead_has_to_gain_more_if_no_request_will_replace_them():
    """In a batch whose rows end one by one, and in a queue once no request waits."""
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "rows": 0.1, "tokens from 1": 0.02}),
        knots=(1,),
        loop=_ratios({"step": 0.0}),
        draft=_ratios({"draft": 0.1, "passes": 0.1}),
    )
    worth = Worth(costs, 1, 48)
    for row in range(4):
        worth.admit(row)

    def passes(running, end: float) -> set[int]:
        """The rows that get another pass if each would continue a path of this probability."""
        worth.begin(running, 100)
        alone = {row for row in running if worth.goes_on([row], [[end]])[0]}
        together = worth.goes_on(running, [[end]] * len(running))[0]
        assert {running[number] for number in together} >= alone
        return alone

    assert passes(range(4), 0.9) == {0, 1, 2, 3}  # no row is ahead
    for row, tokens in enumerate((2, 8, 5, 5)):
        worth.earn(row, tokens)
    worth.begin(range(4), 100)
    worth.tokens = 1.0  # the speed of plain decoding
    assert passes(range(4), 0.9) == {0}
    own = costs.verify_ms(4, 1, 64) - costs.verify_ms(3, 1, 64)
    share = own * 4 / costs.verify_ms(4, 1, 64)
    assert worth._weights(range(4)) == pytest.approx([1.0, share, share, share])
    worth.admit(3)  # a new request takes the row of an ended one
    assert passes([0, 1, 2], 0.9) == {0, 1, 2}
    assert passes(range(4), 0.9) == {0, 1, 2, 3}
    assert passes([0, 1, 2], 0.9) == {0}  # row 3 ended and stays empty


def test_a_row_moved_into_the_place_of_an_ended_one_is_no_new_request():
    """Also in the step in which the queue's last request begins."""
    worth = Worth(USUAL, 1, 8)
    for row in range(3):
        worth.admit(row)
    worth.begin(range(3), 64)
    worth.admit(2)
    worth.begin(range(3), 64)
    assert worth._replaced
    worth.admit(2)  # the last request begins, and row 0 ends
    worth.move(2, 0)
    worth.begin(range(2), 64)
    assert not worth._replaced
    # A request that replaced an ended one, and has ended too, is forgotten.
    worth.admit(0)
    worth.move(1, 0)
    assert not worth._begun


def test_a_batchs_gain_counts_every_token_of_the_rows_in_the_step():
    """A row admitted since then does not count: it read its prompt."""
    costs = replace(DEAR, verify=_ratios({"forward": 1.0}), draft=_ratios({"draft": 0.0}))
    worth = Worth(costs, 1, 48)
    worth.begin(range(5), 64)
    assert [*range(5)] == worth.starts()
    worth.choose([[0.5]] * 5)
    worth.admit(4)
    for row, tokens in enumerate((2, 4, 5, 3, 1)):
        worth.earn(row, tokens)
    worth.move(4, 3)  # row 3 has just ended
    before = worth.evidence.gains
    worth.begin(range(4), 64)
    assert worth.evidence.gains - 0.99 * before == pytest.approx(10)


def test_drafts_have_to_beat_plain_decoding_even_if_recent_steps_were_slower():
    worth = Worth(USUAL, 3, 48)
    worth.tokens, worth.plain = 1.0, 2.0  # half the speed of plain decoding
    worth.begin([0], 100)
    plain = USUAL.verify_ms(1, 1, 128) + USUAL.loop_ms(1, 1)
    assert worth.rate == pytest.approx(1.0 / plain)
    pass_ms = USUAL.draft_ms([1], [1] * 3, 1)
    for gained, starts in ((0.95, []), (1.05, [0])):
        worth.evidence.left = 0
        worth.evidence.gains, worth.evidence.drafts = 1e9 * gained * pass_ms / plain, 1e9
        assert worth.starts() == starts


@pytest.mark.parametrize("rows", [1, 3])
def test_the_number_of_nodes_chosen_gives_most_tokens_per_millisecond(rows):
    """Compared with every number of nodes, at the rate the steps settle at."""
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "tokens from 1": 0.05, "tokens from 4": 0.1}),
        knots=(1, 4),
        loop=_ratios({"step": 0.1}),
        draft=_ratios({"draft": 0.1}),
    )
    chances = [[0.9, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05]] * rows
    worth = Worth(costs, 1, 48)
    for _ in range(400):
        worth.begin(range(rows), 100)
        assert worth.starts()
        least, most = worth.choose(chances)
        assert most == 48
        for row, own in enumerate(chances):
            worth.earn(row, 1 + sum(chance for chance in own if chance >= least))
    rates = {}
    for count in range(8):
        ms = costs.verify_ms(rows, 1 + count, 256) + costs.loop_ms(rows, 1 + count)
        rates[count] = (1 + sum(chances[0][:count])) / (ms + costs.draft_ms([1], [1], rows))
    best = max(rates, key=rates.get)
    assert sum(chance >= least for chance in chances[0]) == best
    assert 0 < best < 7
    assert worth.rate == pytest.approx(rows * rates[best], rel=1e-3)


def tokens_less_costs(ranked, rate: float, widths) -> float:
    """Tokens of each row's best nodes, minus what the rate gives in their and the pads' time."""
    kept = [sum(own[:width]) for own, width in zip(ranked, widths, strict=True)]
    pads = len(ranked) * max(widths) - sum(widths)
    return sum(kept) - rate * (0.05 * sum(widths) + 0.03 * pads)


def test_a_row_gets_more_nodes_than_others_if_that_pays_for_their_pads():
    """Compared with every width and every number of nodes."""
    generator, rows = random.Random(0), 3
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "tokens from 1": 0.05, "pads": 0.03}),
        knots=(1,),
        loop=_ratios({"step": 0.1}),
        draft=_ratios({"draft": 0.1}),
    )
    worth, found = Worth(costs, 2, 6), set()
    for _ in range(200):
        worth.begin(range(rows), 100)
        assert worth.starts()
        counts = [generator.randint(0, 6) for _ in range(rows)]
        chances = [[generator.random() for _ in range(count)] for count in counts]
        ranked = [sorted(own, reverse=True) for own in chances]
        rate = worth.rate
        least, most = worth.choose(chances)
        widths = [sum(chance >= least for chance in own[:most]) for own in ranked]
        gain = partial(tokens_less_costs, ranked, rate)
        best = max(map(gain, itertools.product(*(range(1 + count) for count in counts))))
        assert gain(widths) == pytest.approx(best)
        found.add(tuple(sorted(widths)))
        for _ in range(rows):
            worth.earn(0, 2)
    assert len(found) > 5


def test_pruning_to_a_width_drops_the_least_probable_nodes():
    growth = Weighed([0])
    growth.sprout(0, [1, 2, 3], [0.5, 0.3, 0.1])
    growth.sprout(1, [4], [0.9])
    assert growth.pruned(0.0, 3)[1] == (0, 1, 4, 2)
    assert growth.pruned(0.0, 2)[1] == (0, 1, 4)
    assert growth.pruned(0.4, 9)[1] == (0, 1, 4)


def test_a_pass_is_made_for_the_rows_and_paths_of_the_best_net_gain():
    """Compared with every subset of rows and every number of paths."""
    costs = CostModel(
        verify=_ratios({"forward": 1.0, "tokens from 1": 0.02}),
        knots=(1,),
        loop=_ratios({"step": 0.0}),
        draft=_ratios({"draft": 0.2, "passes": 0.05, "row passes": 0.3, "paths": 0.05}),
    )
    worth = Worth(costs, 2, 48)
    worth.behind = 0.8
    seen = set()
    for ends in itertools.product([(0.9, 0.05), (0.5, 0.45), (0.2, 0.1), (0.02, 0.01)], repeat=3):
        worth.begin(range(3), 100)
        rows, paths = worth.goes_on(range(3), ends)
        value = 0.0
        for count in (1, 2):
            for size in (1, 2, 3):
                for some in itertools.combinations(range(3), size):
                    gained = sum(worth._added(c) for n in some for c in ends[n][:count])
                    one = costs.draft_ms([1, count], [1, 1, count, count], size)
                    cost = worth.rate * (one - costs.draft_ms([1], [1, 1], size))
                    if gained - cost > value + 1e-12:
                        value = gained - cost
        if value == 0:
            assert (rows, paths) == ([], 0)
        else:
            gained = sum(worth._added(c) for n in rows for c in ends[n][:paths])
            one = costs.draft_ms([1, paths], [1, 1, paths, paths], len(rows))
            cost = worth.rate * (one - costs.draft_ms([1], [1, 1], len(rows)))
            assert gained - cost == pytest.approx(value)
        seen.add((len(rows), paths))
    assert {size for size, _ in seen} == {0, 1, 2, 3}
    assert {paths for _, paths in seen} == {0, 1, 2}


def test_a_pruned_tree_is_numbered_depth_first_and_keeps_its_parents():
    growth = Weighed([7])
    growth.sprout(0, [5, 6], [0.6, 0.4])
    growth.sprout(1, [8, 9], [0.5, 0.4])
    growth.sprout(2, [3], [1.0])
    topology, order = growth.pruned(0.24, 99)
    assert topology.parents == (-1, 0, 1, 1, 0, 4)
    assert [growth.tokens[node] for node in order] == [7, 5, 8, 9, 6, 3]
    assert growth.pruned(0.24, 99)[0] is topology  # with its cached masks
    assert growth.pruned(0.3, 99)[0].parents == (-1, 0, 1, 0, 3)
    assert growth.pruned(NEVER, 99)[1] == (0,)


def test_the_host_waits_for_the_device_once_per_pass(target, monkeypatch):
    """Downloads are counted."""
    import specdraft.eval.drafters.dynamic as module

    waits = SimpleNamespace(count=0)
    download = module.download

    def counted(*tensors):
        waits.count += 1
        return download(*tensors)

    monkeypatch.setattr(module, "download", counted)
    for width in (1, 3):
        waits.count = 0
        drafter = drafter_for(target, "both", 1, width=width)
        list(Decoder(target, drafter, 1, 512).run([Request(prompts()[2], 20)]))
        assert waits.count == drafter.forwards > 4


@pytest.mark.parametrize("rows", [1, 5])
def test_prices_equal_the_cost_models_for_every_number_of_nodes(rows):
    verify = {"forward": 2.0, "several": 0.3, "rows": 0.1, "cached": 1e-4, "scores": 1e-5}
    verify |= {"tokens from 1": 0.5, "tokens from 8": 0.01, "tokens from 20": 0.3}
    loop = {"step": 0.1, "drafts": 0.05, "rows": 0.01, "nodes": 0.02}
    costs = CostModel(_ratios(verify), (1, 8, 20), _ratios(loop), _ratios({"draft": 0.1}))
    worth = Worth(costs, 3, 10)
    each = [1 + nodes / rows for nodes in range(10 * rows + 1)]
    for cached, nearest in ((80, CACHED), (300, 5 * CACHED)):
        worth.begin(range(rows), cached)
        assert worth._prices() == pytest.approx(
            [costs.verify_ms(rows, n, nearest) + costs.loop_ms(rows, n) for n in each]
        )
