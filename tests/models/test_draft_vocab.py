"""A head with a draft vocabulary equals the head whose other logits are minus infinity."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decoding import PATHS, decode, plain_tokens, prompts
from enumeration import drawn, law_error, play, random_laws
from random_models import VOCAB, random_head, random_target
from test_rules_in_decoder import WARP, check_law

from specdraft.data.store.tokens import frequent_tokens
from specdraft.eval.costing.tree_growth import WIDTH, Text, best_paths, rank_traces, shares_of
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, chain
from specdraft.models.embeddings import DraftVocabulary
from specdraft.models.falcon import FalconHead
from specdraft.recipes.errors import HeadError, RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.train.heads import head_kind

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
NO_LAYERS = "data.feature_layers=[]"  # random targets have few tokens
IDS = torch.tensor([0, 2, 3, 5, 8, 9, 13, 14, 17, 20, 21, 22])


@pytest.fixture(scope="module")
def target():
    return random_target()


def few_tokens_head(target, k=2, ids=IDS, **changes) -> FalconHead:
    head = random_head(target, k, draft_vocab=len(ids), **changes)
    head.draft_ids.copy_(ids)
    return head


class Masked(DraftVocabulary):
    """All tokens, some impossible: what a draft vocabulary computes faster."""

    def __init__(self, ids, target):
        super().__init__(None, target)
        self.kept = ids

    def logits(self, features):
        logits = super().logits(features)
        cut = torch.full_like(logits, float("-inf"))
        return cut.index_copy(-1, self.kept, logits[..., self.kept])


def drafts(drafter, target, requests) -> list:
    done = sorted(Decoder(target, drafter, 3, 256).run(requests), key=lambda one: one.index)
    return [[(step.tokens, step.accepted) for step in one.steps] for one in done]


@pytest.mark.parametrize(
    ("k", "changes"), [(1, {}), (2, {}), (2, {"reads": "both", "coupling": "recurrent"})]
)
@pytest.mark.parametrize("rule", [None, *RULES])
def test_drafts_equal_those_of_a_head_whose_other_logits_are_minus_inf(target, k, changes, rule):
    head = few_tokens_head(target, k, **changes)
    tree = StaticTree.chain(4, k) if rule == "block" else StaticTree(PATHS, k)
    settings = {"rule": rule, **WARP} if rule else {}
    requests = [Request(p, 12, seed=n, **settings) for n, p in enumerate(prompts())]
    short, masked = (FalconDrafter(head, target, tree, 3, 128) for _ in range(2))
    masked.vocabulary = Masked(IDS, target)
    found = drafts(short, target, requests)
    assert found == drafts(masked, target, requests)
    drafted = {token for one in found for tokens, _ in one for token in tokens}
    assert drafted <= {*IDS.tolist()}
    assert len(drafted) > 4


@pytest.mark.parametrize("k", [1, 2, 3])
def test_greedy_output_equals_that_of_plain_decoding(target, k):
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    requests = [Request(prompt, 17) for prompt in prompts()]
    for rows in (1, 3):
        drafter = FalconDrafter(few_tokens_head(target, k), target, StaticTree(PATHS, k), rows, 128)
        assert decode(Decoder(target, drafter, rows, 256), requests) == expected


def test_sampled_output_with_shared_noise_equals_plain_seeded_sampling(target):
    requests = [Request(p, 15, seed=n, **WARP) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, 1, 128), requests)
    drafter = FalconDrafter(few_tokens_head(target), target, StaticTree(PATHS, 2), 3, 128)
    assert decode(Decoder(target, drafter, 3, 256), requests) == expected


def test_sampled_outputs_follow_the_targets_distribution(target):
    """It has tokens that the head never drafts."""
    tree = StaticTree(PATHS, 2)
    drafter = FalconDrafter(few_tokens_head(target), target, tree, 100, 128)
    check_law(target, drafter, "recursive", 100)


@pytest.mark.parametrize("rule", [name for name in RULES if name != "walk"])
def test_every_rule_is_lossless_for_drafts_from_a_draft_vocabulary(rule):
    """By enumeration, with three siblings from two of four tokens."""
    ids, matrix = torch.tensor([1, 3]), torch.eye(4, dtype=torch.float64)
    vocabulary = DraftVocabulary(ids, SimpleNamespace(lm_head_weight=matrix, vocab_size=4))
    p, q = random_laws("alike", 4, 3)
    q = {text: vocabulary.spread(law[ids] / law[ids].sum()) for text, law in q.items()}
    topology = chain(2) if rule == "block" else Topology([-1, 0, 0, 0, 1, 1, 3])
    drafts = RULES[rule].drafts
    how = "without_replacement" if drafts == "without_replacement" else "iid"
    played = play(RULES[rule].rule, drawn(topology, how, q), p)
    assert law_error(played.law, p, 3) <= 1e-12
    assert played.accepted > 0.3


def test_draft_ids_are_saved_with_the_head_and_checked_on_loading(target, tmp_path):
    head = few_tokens_head(target)
    head.save_pretrained(tmp_path / "head")
    for again in (
        FalconHead.load_for(tmp_path / "head", target.identity()),
        FalconHead.from_pretrained(tmp_path / "head"),
    ):
        assert again.draft_ids.tolist() == IDS.tolist()
        assert again.config.draft_vocab == len(IDS)
    for bad in (IDS.flip(0), IDS - 1, IDS + 1, IDS // 2):
        few_tokens_head(target, ids=bad).save_pretrained(tmp_path / "bad")
        with pytest.raises(HeadError, match="draft_ids must be ascending ids below 23"):
            FalconHead.load_for(tmp_path / "bad", target.identity())


def test_a_head_without_a_draft_vocabulary_has_no_ids(target, tmp_path):
    head = random_head(target)
    assert "draft_ids" not in head.state_dict()
    head.save_pretrained(tmp_path)
    assert FalconHead.load_for(tmp_path, target.identity()).draft_ids is None


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(target):
    config = random_head(target).config
    with pytest.raises(ValueError, match=r"draft_vocab = 24: must be at most the vocabulary"):
        replace(config, draft_vocab=VOCAB + 1)


def test_a_draft_vocabulary_of_an_impossible_size_is_refused_before_any_training(target):
    """The check runs once the target is loaded, before a cache is made."""
    check = head_kind("falcon").check
    ends = random_target()
    ends.model.generation_config.eos_token_id = [3, 5, 7]
    check(load_recipe(RECIPE, [NO_LAYERS, "head.draft_vocab=3"]), ends)
    check(load_recipe(RECIPE, [NO_LAYERS, "head.draft_vocab=23"]), target)
    for size, told in ((2, "= 2: must be 3 at least"), (24, r"= 24: must be at most .*\(23\)")):
        with pytest.raises(RecipeError, match=rf"head.draft_vocab {told}"):
            check(load_recipe(RECIPE, [NO_LAYERS, f"head.draft_vocab={size}"]), ends)


def test_a_new_heads_draft_vocabulary_has_frequent_answer_tokens_and_the_end_token(target):
    data = SimpleNamespace(
        scales={"embed_scale": 1.0, "feature_scale": 1.0},
        answers=lambda: [torch.tensor([4, 4, 9, 9, 9, 1])],
    )
    recipe = load_recipe(RECIPE, [NO_LAYERS, "head.draft_vocab=3"])
    ends = random_target()
    ends.model.generation_config.eos_token_id = 22
    head = head_kind("falcon").make(recipe, ends, data)
    assert head.draft_ids.tolist() == [4, 9, 22]


def test_a_tree_with_more_ranks_than_draft_tokens_is_refused(target):
    wide = StaticTree([(n,) for n in range(len(IDS) + 1)], 2)
    with pytest.raises(RecipeError, match="rank 12, and the head drafts among 12 tokens; take"):
        FalconDrafter(few_tokens_head(target), target, wide)


@pytest.mark.parametrize("k", [1, 2])
def test_a_tree_is_grown_from_ranks_among_the_draft_tokens(target, k):
    head = few_tokens_head(target, k)
    texts = [Text(3, prompt + plain_tokens(target, prompt, 20)) for prompt in prompts(3)]
    shares = shares_of(rank_traces(head, target, texts, 4), texts, len(IDS))
    assert shares.shape == (4, len(IDS))
    every = few_tokens_head(target, k, torch.arange(VOCAB))
    whole = shares_of(rank_traces(every, target, texts, 4), texts, VOCAB)
    assert whole.shape == (4, min(WIDTH, VOCAB))
    outside = 1 - shares.sum(1)  # tokens that are never drafted
    assert (outside > 0.1).all()
    assert (shares.cumsum(1) >= whole[:, : len(IDS)].cumsum(1) - outside[:, None] - 1e-6).all()
    StaticTree(best_paths(shares, 30), k).check_vocabulary(target, len(IDS))


def test_the_most_frequent_tokens_are_taken_and_sorted_by_id():
    answers = [torch.tensor([5, 5, 2, 7]), torch.tensor([7, 5, 4]), torch.tensor([], dtype=int)]
    assert frequent_tokens(answers, 3, 9).tolist() == [2, 5, 7]  # 2 and 4 occur once each
    assert frequent_tokens(answers, 3, 9, always={8, 0}).tolist() == [0, 5, 8]
    assert frequent_tokens(answers, 9, 9).tolist() == list(range(9))


def test_a_draft_vocabulary_maps_tokens_to_places_and_spreads_probabilities(target):
    some, every = DraftVocabulary(IDS, target), DraftVocabulary(None, target)
    tokens = torch.arange(VOCAB).view(1, -1)
    listed = IDS.tolist()
    expected = [listed.index(n) if n in listed else -1 for n in range(VOCAB)]
    assert some.places(tokens)[0].tolist() == expected
    assert torch.equal(some.tokens(torch.arange(len(IDS))), IDS)
    assert torch.equal(every.places(tokens), tokens)
    probs = torch.rand(2, len(IDS))
    spread = some.spread(probs)
    assert torch.equal(spread[:, IDS], probs)
    assert spread.shape == (2, VOCAB)
    assert spread.sum() == pytest.approx(float(probs.sum()))
