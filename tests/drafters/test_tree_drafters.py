"""Trees drafted with a draft LM: plain decoding's tokens, the right trees, the right cache."""

import dataclasses

import pytest
import torch
from decoding import decode, plain_tokens, prompts
from random_models import VOCAB, random_target
from test_graph import Naive
from test_lm_drafter import near, students

from specdraft.eval.drafters.beam import StochasticBeam
from specdraft.eval.drafters.best_first import BestFirst
from specdraft.eval.drafters.branching import Branching
from specdraft.eval.drafters.drawing import ranking
from specdraft.eval.drafters.level import TSD
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.token_graph import GSD
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import GUMBEL, Request
from specdraft.eval.methods.registry import METHODS, Setup, make_drafter
from specdraft.eval.methods.trained import Trained
from specdraft.recipes.load import load_recipe
from specdraft.recipes.schema import DraftingSection

LOW = {"theta_prob": 0.05, "theta_sib": 0.05}
STRATEGIES = {
    "ssd": (SSD, {"gamma": 4, "theta": 0.3}),
    "tsd": (TSD, {"depth": 4} | LOW),
    "tsd drop": (TSD, {"depth": 4, "theta_prob": 0.1, "drop_siblings": True, "nodes": 20}),
    "gsd": (GSD, {"depth": 4, "tau": 1, "copies": 100} | LOW),
    "gsd tau=2": (GSD, {"depth": 5, "tau": 2, "copies": 9} | LOW),
    "gsd tau=0": (GSD, {"depth": 5, "tau": 0, "copies": 100} | LOW),
    "branching": (Branching, {"branching": (3, 2, 1)}),
    "chains": (Branching, {"branching": (3, 1, 1)}),
    "beam": (StochasticBeam, {"depth": 4, "width": 3}),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def make(name: str, student, rows: int):
    kind, options = STRATEGIES[name]
    return kind(student, rows, 128, **options)


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def greedy(target):
    return [plain_tokens(target, prompt, 17) for prompt in prompts()]


@pytest.fixture(scope="module")
def pairs(target):
    """Rows and students; the partly right student also with a single row."""
    found = students(target)
    return [(1, found["near"]), *((3, student) for student in found.values())]


@every_strategy
def test_greedy_output_equals_that_of_the_model_without_a_cache(target, pairs, greedy, name):
    requests = [Request(prompt, 17) for prompt in prompts()]
    for rows, student in pairs:
        assert decode(Decoder(target, make(name, student, rows), rows, 512), requests) == greedy


@every_strategy
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, pairs, name):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, 1, 128), requests)
    for rows, student in pairs[::2]:  # the partly right student, alone and with other rows
        assert decode(Decoder(target, make(name, student, rows), rows, 512), requests) == expected


def watched(kind):
    """A drafter that after every step compares its cache with a fresh forward of what it kept."""

    class Watched(kind):
        reread: list[int]

        def observe(self, row, tokens, features):
            memory, before = self.memory[row], self.pool.lengths[row]
            read, tree, known = set(memory.cached), memory.draft, len(memory.tokens)
            super().observe(row, tokens, features)
            length = self.pool.lengths[row]
            assert length - before == (_foreseen(tree, read, tokens) if tree else 0)
            if tree:
                assert before == known
                self.reread.append(len(memory.tokens) - length)
            if length:
                self.compare(row, memory.tokens[:length])

        def compare(self, row, tokens):
            fresh = self.student.model(torch.tensor([tokens]), use_cache=True).past_key_values
            for layer, part in enumerate(fresh.layers):
                for kind, expected in enumerate((part.keys, part.values)):
                    kept = self.pool.layers[layer][kind, row, :, : len(tokens)]
                    torch.testing.assert_close(kept, expected[0], atol=1e-5, rtol=1e-4)

    return Watched


def _texts(tree) -> list[tuple[int, ...]]:
    texts = [()]
    for parent, token in zip(tree.topology.parents[1:], tree.tokens.tolist(), strict=True):
        texts.append((*texts[parent], token))
    return texts


def _foreseen(tree, read: set[int], tokens: list[int]) -> int:
    """How many committed tokens were read as a draft: the length of the longest matching text."""
    texts = [text for node, text in enumerate(_texts(tree)) if node in read]
    return max((len(text) for text in texts if tuple(tokens[: len(text)]) == text), default=0)


@every_strategy
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_equals_a_fresh_forward_and_kept_tokens_are_not_reread(target, name, temperature):
    kind, options = STRATEGIES[name]
    accepted = set()
    for student in (target, near(target)):
        drafter = watched(kind)(student, 3, 128, **options)
        drafter.reread = []
        requests = [Request(p, 20, temperature, seed=n) for n, p in enumerate(prompts(4))]
        done = list(Decoder(target, drafter, 3, 512).run(requests))
        steps = [step for one in done for step in one.steps]
        accepted |= {step.accepted for step in steps}
        # Only the bonus, a leaf that was never read, and copied tokens are read.
        assert max(drafter.reread) <= 2 + max(step.copied for step in steps)
        if student is target:
            assert max(step.accepted for step in steps) >= drafter.depth
    assert len(accepted) > 1


def test_a_student_that_is_the_target_makes_one_forward_per_level(target):
    """The tree has one open node per level; nothing is read again."""
    drafter = TSD(target, 1, 128, depth=4, theta_prob=0.0, theta_sib=1.0)
    done = next(Decoder(target, drafter, 1, 512).run([Request(prompts()[1], 25)]))
    assert [step.accepted for step in done.steps] == [4] * 5
    assert {step.drafted for step in done.steps} == {16}
    assert drafter.forwards == 5 * 4


# -- which trees are drafted -----------------------------------------------------------------------


def first_tree(drafter, request: Request):
    """The draft after a prompt, and a function q(text): its distribution, without a cache."""
    drafter.start(0, request)
    with torch.inference_mode():
        tree = drafter.draft([0])[0]

    def q(text):
        ids = torch.tensor([[*request.prompt, *text]])
        logits = drafter.student.model(ids).logits[0, -1:]
        return ranking(logits, request, torch.tensor([ids.shape[1]]))[0].softmax(-1)

    return tree, q


def pruned_by_definition(q, drafter, merge=lambda text: False) -> list[tuple[int, ...]]:
    """The texts of a tree, level by level; `merge` may close a node."""
    texts, opened = [()], [()]
    for _ in range(drafter.depth):
        following = []
        for text in opened:
            law = q(text)
            ranked = law.argsort(descending=True)[: drafter.width].tolist()
            for token in ranked:
                weak = law[token] < drafter.theta_sib * law.max()
                if weak and drafter.drop_siblings:
                    continue
                texts.append((*text, token))
                if not weak and law[token] >= drafter.theta_prob and not merge(texts[-1]):
                    following.append(texts[-1])
        opened = following
    return texts


OPTIONS = [
    {"theta_prob": 0.1, "theta_sib": 0.3},
    {"theta_prob": 0.0, "theta_sib": 0.4, "out_degree": 2},
    {"theta_prob": 0.1, "theta_sib": 0.2, "drop_siblings": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("temperature", "rule"), [(0.0, GUMBEL), (1.2, GUMBEL), (1.2, "walk")])
def test_a_tree_is_pruned_as_defined(options, temperature, rule):
    student, sizes = random_target(seed=3, sharpness=3.0), set()
    drafter = TSD(student, 1, 128, depth=3, **options)
    for seed, prompt in enumerate(prompts(4)):
        tree, q = first_tree(drafter, Request(prompt, 9, temperature, seed=seed, rule=rule))
        assert _texts(tree) == pruned_by_definition(q, drafter)
        assert tree.draws is None
        sizes.add(len(tree.topology))
    assert len(sizes) > 1


@pytest.mark.parametrize("tau", [0, 1, 2, 3])
def test_a_graph_is_merged_as_defined_and_then_unmerged(tau):
    student, copies = random_target(seed=3, sharpness=3.0), 0
    drafter = GSD(student, 1, 128, tau, 10_000, depth=4, out_degree=3, **LOW)
    for seed, prompt in enumerate(prompts(4)):
        tree, q = first_tree(drafter, Request(prompt, 9, seed=seed))
        graph, numbers = Naive(prompt, tau), {(): 0}

        def merge(text, graph=graph, numbers=numbers):
            return graph.merge(add(text, graph, numbers))

        texts = pruned_by_definition(q, drafter, merge)
        for text in texts[1:]:
            add(text, graph, numbers)
        assert sorted(_texts(tree)) == sorted(graph.texts(most=20_000))
        assert tree.copies == len(tree.topology) - len(texts)
        copies += tree.copies
        assert set(_texts(tree)[: len(texts)]) == set(texts)
    assert copies > 0


def add(text, graph: Naive, numbers: dict) -> int:
    """The node of a text, added to the graph unless it is there."""
    if text not in numbers:
        numbers[text] = len(graph.parents)
        graph.parents.append(numbers[text[:-1]])
        graph.tokens.append(text[-1])
        graph.shared.append(-1)
    return numbers[text]


def test_accepted_copies_are_counted(target):
    """In a repetitive text, shared nodes are accepted beyond the drafted depth."""
    drafter = GSD(target, 1, 128, 1, 50, depth=3, **LOW)
    requests = [Request(prompt, 40) for prompt in prompts()]
    steps = [s for done in Decoder(target, drafter, 1, 512).run(requests) for s in done.steps]
    assert any(step.copied for step in steps)
    assert any(step.accepted > 3 for step in steps)
    assert all(step.copied >= step.accepted - 3 for step in steps)
    assert all(step.copied <= step.copies < step.drafted for step in steps if step.drafted)
    plain = TSD(target, 1, 128, depth=3, **LOW)
    steps = [s for done in Decoder(target, plain, 1, 512).run(requests) for s in done.steps]
    assert not any(step.copied or step.copies for step in steps)


def test_trees_have_at_most_max_nodes_nodes():
    student = random_target(seed=3, sharpness=0.1)
    for drafter in (
        TSD(student, 1, 128, depth=6, theta_prob=0.0, theta_sib=0.0, nodes=30),
        GSD(student, 1, 128, 1, 7, depth=6, theta_prob=0.0, theta_sib=0.0, nodes=30),
        Branching(student, 1, 128, (3, 2, 2)),
        StochasticBeam(student, 1, 128, 4, 5),
    ):
        tree, _ = first_tree(drafter, Request(prompts()[1], 9))
        assert len(tree.topology) - 1 == drafter.max_nodes
        assert tree.copies == (7 if isinstance(drafter, GSD) else 0)


def test_without_sampling_branching_takes_top_tokens_and_a_beam_top_sequences():
    student = random_target(seed=3, sharpness=3.0)
    for rule, temperature in ((GUMBEL, 0.0), (GUMBEL, 1.2), ("walk", 1.2)):
        request = Request(prompts()[1], 9, temperature, seed=4, rule=rule)
        tree, q = first_tree(Branching(student, 1, 128, (3, 2)), request)
        expected = [()] + [(a,) for a in q(()).topk(3).indices.tolist()]
        expected += [(*a, b) for a in expected[1:] for b in q(a).topk(2).indices.tolist()]
        assert _texts(tree) == expected
        tree, q = first_tree(StochasticBeam(student, 1, 128, 3, 4), request)
        beams, expected = {(): 0.0}, [()]
        for _ in range(3):
            scores = {
                (*s, t): v + float(q(s)[t].log()) for s, v in beams.items() for t in range(VOCAB)
            }
            beams = dict(sorted(scores.items(), key=lambda item: -item[1])[:4])
            expected += beams
        assert _texts(tree) == expected


def test_every_method_with_a_student_has_its_drafter_in_the_size_set(target, tmp_path):
    settings = DraftingSection(gamma=3, chains=2, branching=(2, 1), beam_width=3, max_nodes=50)
    recipe = load_recipe("recipes/tiny_distill.yaml", [f"output.dir={tmp_path}"])
    recipe = dataclasses.replace(recipe, drafting=settings)
    setup = Setup(recipe, target, Trained(student=target), 1, 64)
    with_student = [row.name for row in METHODS.values() if row.is_ours and "student" in row.needs]
    drafters = {name: make_drafter(name, setup) for name in with_student}
    assert {name: (type(one), one.max_nodes) for name, one in drafters.items()} == {
        "ssd": (SSD, 3), "tsd": (TSD, 50), "gsd": (GSD, 150), "ssd_dynamic": (BestFirst, 48),
        "rsd_c": (Branching, 4), "rsd_s": (StochasticBeam, 9), "specinfer": (Branching, 4),
        "spectr": (Branching, 6),
    }  # fmt: skip
    with pytest.raises(ValueError, match="factors of at least 1"):
        Branching(target, 1, 128, branching=())


def test_a_recipes_drafting_options_reach_the_drafters(target, tmp_path):
    """No value is a default, so that a dropped option shows."""
    settings = DraftingSection(
        gamma=3, depth=7, out_degree=5, theta_prob=0.15, theta_sib=0.45, sibling_pruning="drop",
        max_nodes=50, tau=4, max_copies=9, branching=(3, 1), equal_siblings="apart", beam_width=3,
        chains=2,
    )  # fmt: skip
    overrides = [f"output.dir={tmp_path}", "eval.lookup_match=3", "eval.lookup_copy=11"]
    recipe = load_recipe("recipes/tiny_distill.yaml", overrides)
    recipe = dataclasses.replace(recipe, drafting=settings)
    setup = Setup(recipe, target, Trained(student=target), 2, 64)
    pruned = {"depth": 7, "width": 5, "theta_prob": 0.15, "theta_sib": 0.45, "nodes": 50}
    pruned |= {"drop_siblings": True}
    wanted = {
        "prompt_lookup": {"shortest": 3, "count": 11},
        "ssd": {"gamma": 3, "theta": 0.15},
        "tsd": pruned,
        "gsd": pruned | {"tau": 4, "copies": 9},
        "ssd_dynamic": {"depth": 7, "width": 5},
        "rsd_c": {"branching": (3, 1), "merged": True},
        "rsd_s": {"depth": 3, "width": 3},
        "specinfer": {"branching": (3, 1), "merged": False},
        "spectr": {"branching": (2, 1, 1)},
    }
    for name, values in wanted.items():
        drafter = make_drafter(name, setup)
        assert {key: getattr(drafter, key) for key in values} == values, name
