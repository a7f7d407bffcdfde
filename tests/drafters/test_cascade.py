"""A cascade: the target's tokens whatever it drafts, and drafts that follow Algorithm 1."""

import pytest
import torch
from decoding import completions, decode, plain_tokens, prompts
from random_families import GQA, random_model
from random_models import VOCAB, random_head, random_target
from test_lm_drafter import near

from specdraft.eval.drafters.cascade import CascadeDrafter, Reviewer
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.engine.tree import Topology, Tree
from specdraft.eval.lookup.maxgram import MaxGramDrafter
from specdraft.eval.lookup.suffix import FirstSuffixes
from specdraft.eval.lookup.tail import MaxGramTail, deepest, grafted
from specdraft.eval.measure.methods import make_method
from specdraft.eval.methods.registry import load_trained, needs, problems
from specdraft.eval.methods.trained import Trained
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.target import Target
from specdraft.recipes.errors import DataError, HeadError, RecipeError, TargetError
from specdraft.recipes.load import dump, from_dict, load_recipe

NEXT = [(7 * token + 3) % VOCAB for token in range(VOCAB)]
ONE = [[4, 2], [0, 3]]
TWO = [[3, 2, 2], [0, 2, 1], [0, 0, 4]]


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(scope="module")
def greedy(target):
    return [plain_tokens(target, prompt, 17) for prompt in prompts()]


@pytest.fixture(scope="module")
def students(target):
    """One closer to the target, one further from it; both are often wrong."""
    return near(target, 0.02), near(target, 0.05)


def maxgram(rows: int = 1, count: int = 5, device="cpu") -> MaxGramDrafter:
    return MaxGramDrafter(FirstSuffixes, count, next_id=NEXT, rows=rows, device=device)


def cascade(students, k, leniency=1.0, rows=1, copy_match=None) -> CascadeDrafter:
    return CascadeDrafter(students, maxgram(rows), k, leniency, rows, 128, copy_match)


# -- the target's tokens -------------------------------------------------------------------------


@pytest.mark.parametrize("leniency", [1.0, 5.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_output_equals_that_of_the_model_without_a_cache(
    target, greedy, students, rows, leniency
):
    requests = [Request(prompt, 17) for prompt in prompts()]
    for chosen, k in ((students[:1], ONE), (students, TWO), (students[::-1], TWO)):
        drafter = cascade(chosen, k, leniency, rows)
        assert decode(Decoder(target, drafter, rows, 128), requests) == greedy


@pytest.mark.parametrize("leniency", [1.0, 5.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, students, rows, leniency):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, 1, 128), requests)
    for chosen, k in ((students[:1], ONE), (students, TWO)):
        drafter = cascade(chosen, k, leniency, rows)
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected


def test_a_cascade_allows_the_walk_and_refuses_block_verification(target, students):
    requests = [Request(prompts()[1], 12, 1.0, rule=rule) for rule in ("walk", "block")]
    done = list(Decoder(target, cascade(students[:1], ONE), 1, 128).run(requests))
    assert len(done[0].tokens) == 12
    assert any(step.drafted for step in done[0].steps)
    assert isinstance(done[1].error, DataError)


def test_sampled_drafts_use_the_same_noise_as_the_targets_choice(target):
    """With the target as student all it reviewed is accepted; with other noise little would be."""
    requests = [Request(prompt, 16, 1.5, seed=n) for n, prompt in enumerate(prompts())]
    drafter = cascade((target,), [[3, 0], [0, 2]], rows=2)
    done = list(Decoder(target, drafter, 2, 128).run(requests))
    assert all(step.accepted == step.depth for one in done for step in one.steps)


# -- Algorithm 1 ---------------------------------------------------------------------------------


def drafted(drafter, prompt: list[int], temperature: float = 0.0) -> list[int]:
    drafter.start(0, Request(prompt, 40, temperature, seed=8))
    with torch.inference_mode():
        return drafter.draft([0])[0].tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_without_leniency_a_draft_equals_that_of_the_top_student_alone(students, temperature):
    for chosen, k in ((students[:1], [[5, 0], [0, 4]]), (students, [[5, 0, 0], *TWO[1:]])):
        lengths = set()
        for prompt in prompts():
            tokens = drafted(cascade(chosen, k), prompt, temperature)
            alone = drafted(SSD(chosen[0], 1, 128, gamma=len(tokens)), prompt, temperature)
            assert tokens == alone
            if temperature == 0:
                assert tokens == plain_tokens(chosen[0], prompt, len(tokens))
            lengths.add(len(tokens))
        # The last review may add more tokens than needed.
        assert min(lengths) == 5 < max(lengths) <= cascade(chosen, k).max_nodes


def test_larger_drafters_come_first_and_maxgram_last(students):
    for prompt in prompts():
        tokens = drafted(cascade(students, [[2, 2, 3], [0, 0, 0], [0, 0, 0]]), prompt)
        first = plain_tokens(students[0], prompt, 2)
        second = plain_tokens(students[1], prompt + first, 2)
        bottom = maxgram()
        bottom.memory[0].extend(prompt)
        assert tokens == first + second + bottom.continuation(0, first + second, 3)


def naive(students, k, leniency, known: list[int], ahead: list[int], reviewer: int) -> list[tuple]:
    """Algorithm 1 without a cache, one row: (token, probability or None) of what is proposed."""
    found: list[tuple] = []
    for drafter, count in enumerate(k[reviewer], start=1):
        goal = len(found) + count
        while len(found) < goal:
            behind = ahead + [token for token, _ in found]
            if drafter > len(students):
                bottom = maxgram()
                bottom.memory[0].extend(known)
                found += [(token, None) for token in bottom.continuation(0, behind, count)]
                continue
            proposed = naive(students, k, leniency, known, behind, drafter)
            ids = known + behind + [token for token, _ in proposed]
            laws = students[drafter - 1].model(torch.tensor([ids])).logits[0].softmax(-1)
            place = len(known) + len(behind) - 1
            for token, chance in proposed:
                own = laws[place]
                lenient = leniency > 1 and chance is not None
                if token != own.argmax() and not (lenient and leniency * own[token] > chance):
                    break
                found.append((token, float(own[token])))
                place += 1
            found.append((int(laws[place].argmax()), float(laws[place].max())))
    return found


@pytest.mark.parametrize("leniency", [1.0, 5.0])
def test_a_draft_equals_that_of_a_naive_algorithm_1(students, leniency):
    for k in (TWO, [[4, 0, 0], [0, 3, 2], [0, 0, 2]], [[0, 3, 1], [0, 0, 0], [0, 0, 3]]):
        for prompt in prompts():
            expected = naive(students, k, leniency, prompt, [], 0)
            assert drafted(cascade(students, k, leniency), prompt) == [t for t, _ in expected]


def test_higher_leniency_changes_drafts(students):
    drafts = [
        [drafted(cascade(students, TWO, leniency), prompt) for prompt in prompts(12)]
        for leniency in (1.0, 5.0)
    ]
    assert drafts[0] != drafts[1]


def test_a_copy_after_a_long_enough_match_asks_no_student(students):
    prompt = [1, 2, 3, 1, 2]  # the longest repeated suffix has two tokens
    bottom = maxgram()
    bottom.memory[0].extend(prompt)
    for match in (1, 2):
        drafter = cascade(students, TWO, copy_match=match)
        assert drafted(drafter, prompt) == bottom.continuation(0, [], 5) == [3, 1, 2, 17, 7]
        assert drafter.passes == [0, 0]
    drafter = cascade(students, TWO, copy_match=3)
    assert drafted(drafter, prompt) == drafted(cascade(students, TWO), prompt)
    assert min(drafter.passes) > 0
    # A copy may be longer than any entry of K: `max_nodes` leaves room for it.
    assert cascade(students[:1], [[1, 0], [0, 1]], copy_match=1).max_nodes == 5


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copying_saves_student_passes_and_changes_no_output(target, students, temperature, rows):
    asked = [Request(3 * p, 24, temperature, seed=n) for n, p in enumerate(prompts(4))]
    expected = decode(Decoder(target, None, rows, 128), asked)
    passes = []
    for match in (None, 2, 1):
        drafter = cascade(students, TWO, rows=rows, copy_match=match)
        assert decode(Decoder(target, drafter, rows, 128), asked) == expected
        passes.append(drafter.forwards)
    assert passes[0] > passes[1] > passes[2] > 0


class Periodic(Target):
    """A model that always continues 1 2 3 1 2 3 .., so that its calls can be counted by hand."""

    def logits(self, features):
        # `reading_ids` makes the features the ids themselves.
        return torch.nn.functional.one_hot(features[:, 0].long() % 3 + 1, VOCAB).float()


def periodic() -> Periodic:
    student = random_target()
    student.__class__ = Periodic
    return student


def reading_ids(drafter: CascadeDrafter) -> CascadeDrafter:
    for reviewer in drafter.reviewers:
        reviewer.tokens_read = 0

        def forward(ids, *_, reviewer=reviewer):
            reviewer.tokens_read += len(ids)
            return ids[:, None].float()

        reviewer.packed.forward = forward
    return drafter


def test_calls_and_tokens_read_equal_a_count_by_hand():
    """After the prompt 1 2 3 1 2, Max-Gram and the students all propose 3 1 2 3 1 2 .., so every
    proposal is accepted."""
    prompt = [1, 2, 3, 1, 2]
    # Student 1 wants 4 tokens: one review gives Max-Gram's 3 and its own.
    one = reading_ids(cascade([periodic()], [[4, 2], [0, 3]]))
    assert drafted(one, prompt) == [3, 1, 2, 3, 1, 2]
    assert one.passes == [1]
    assert one.reviewers[0].tokens_read == 5 + 3
    # Wanting 5, it reviews again, reading its own 4th token and 3 more of Max-Gram's.
    one = reading_ids(cascade([periodic()], [[5, 0], [0, 3]]))
    assert drafted(one, prompt) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert one.passes == [2]
    assert one.reviewers[0].tokens_read == 5 + 3 + 1 + 3
    # Student 2 gives 3 at a time: 2 of Max-Gram's and its own. Student 1 adds 1: 4 of the 5 it
    # wants, then 8. After them student 2 is to add 2 tokens: one more review gives 3.
    two = reading_ids(cascade([periodic(), periodic()], [[5, 2, 1], [0, 3, 0], [0, 0, 2]]))
    assert len(drafted(two, prompt)) == 8 + 3 + 1
    assert two.passes == [2, 3]
    # Student 1 reads the prompt and 3 proposals; then its own token and 3 proposals.
    assert two.reviewers[0].tokens_read == 5 + 3 + 1 + 3
    # Student 2 reads the prompt and 2 proposals; then twice its own token, student 1's token and
    # 2 proposals.
    assert two.reviewers[1].tokens_read == (5 + 2) + (2 + 2) + (2 + 2)


# -- caches --------------------------------------------------------------------------------------


class Watched(Reviewer):
    """Compares the cache with a fresh forward at every call, and counts what had to be read."""

    needed = tokens_read = 0

    def read(self, rows, tokens, committed, starts):
        for row, known, start in zip(rows, tokens, starts, strict=True):
            cached = self.cached[row]
            agree = [a == b for a, b in zip(cached, known, strict=False)]
            same = [*agree, False].index(False)
            self.needed += len(known) - min(same, start - 1)
        logits = super().read(rows, tokens, committed, starts)
        self.tokens_read += self.packed.inputs
        for row, known, start, after in zip(rows, tokens, starts, logits, strict=True):
            fresh = self.student.model(torch.tensor([known]), use_cache=True)
            torch.testing.assert_close(after, fresh.logits[0, start - 1 :], atol=1e-4, rtol=1e-4)
            for layer, part in enumerate(fresh.past_key_values.layers):
                for kind, expected in enumerate((part.keys, part.values)):
                    kept = self.packed.pool.layers[layer][kind, row, :, : len(known)]
                    torch.testing.assert_close(kept, expected[0], atol=1e-5, rtol=1e-4)
        return logits


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_reviewer_reads_only_what_changed_since_it_last_read(target, students, temperature, rows):
    drafter = cascade(students, TWO, 2.0, rows)
    drafter.reviewers = [Watched(s, rows, 128, drafter.max_nodes) for s in students]
    requests = [Request(p, 20, temperature, seed=n) for n, p in enumerate(prompts(4))]
    done = list(Decoder(target, drafter, rows, 128).run(requests))
    assert len({step.accepted for one in done for step in one.steps}) > 3
    for reviewer in drafter.reviewers:
        assert reviewer.tokens_read == reviewer.needed > 0


class Recorded(Reviewer):
    """Remembers every text whose last token it has read."""

    def read(self, rows, tokens, *others):
        logits = super().read(rows, tokens, *others)
        for row, known in zip(rows, tokens, strict=True):
            kept = self.packed.pool.lengths[row]
            self.texts += [tuple(known[: n + 1]) for n in range(kept, len(known))]
        return logits


@pytest.mark.parametrize("k", [[[4, 0], [0, 2]], [[1, 0], [0, 1]], [[6, 3], [0, 4]]])
def test_a_reviewer_reads_no_accepted_token_twice(target, k):
    """The student is the target, so that the target accepts what it accepts."""
    drafter = cascade((target,), k)
    reviewer = Recorded(target, 1, 128, drafter.max_nodes)
    drafter.reviewers = [reviewer]
    for prompt in prompts():
        reviewer.texts = []
        done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 30)]))
        whole = (*prompt, *done.tokens)
        times = [reviewer.texts.count(whole[:n]) for n in range(1, len(whole) + 1)]
        assert set(times[: len(prompt)]) == {1}
        assert set(times) <= {0, 1}
        assert sum(times) >= len(whole) - drafter.max_nodes - 1


def test_nothing_is_drafted_beyond_a_students_context(target):
    student = near(target)
    student.config.max_position_embeddings = 30
    drafter = cascade((student,), ONE)
    prompt = prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 30)]))
    assert done.tokens == plain_tokens(target, prompt, 30)
    assert done.steps[1].drafted > 0
    assert done.steps[-1].drafted == 0


def test_a_student_drafts_up_to_the_length_where_its_rope_frequencies_change(target):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    rope["original_max_position_embeddings"] = 30
    model = random_model("Llama", **GQA, max_position_embeddings=512, rope_parameters=rope)
    drafter, prompt = cascade((Target(model, None, "dynamic"),), ONE), prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 30)]))
    assert done.tokens == plain_tokens(target, prompt, 30)
    committed, drafts = len(prompt), []
    for step in done.steps:
        drafts.append((step.drafted > 0, committed + drafter.max_nodes <= 30))
        committed += step.emitted
    assert all(drafted == fits for drafted, fits in drafts)
    assert {fits for _, fits in drafts} == {True, False}


# -- Max-Gram below a tree -----------------------------------------------------------------------


def test_tails_hang_below_the_deepest_nodes():
    tree = Topology([-1, 0, 0, 1, 2, 2])
    assert deepest(tree, 2) == [3, 4]
    assert tree.path(5) == [2, 5]
    grown = grafted(tree, ((3, 2), (5, 1)))
    assert grown.parents == (*tree.parents, 3, 6, 5)
    assert grafted(tree, ((3, 2), (5, 1))) is grown


class Fixed:
    """A drafter that always drafts the same small tree."""

    forwards, seconds, max_nodes, rules = 0, 0.0, 4, frozenset()
    from_tokens = False

    def start(self, row, request): ...

    def observe(self, row, tokens, features): ...

    def draft(self, rows):
        return [Tree(Topology([-1, 0, 0, 1, 2]), torch.tensor([5, 1, 6, 2])) for _ in rows]


def test_a_tail_copies_what_followed_its_path_before():
    tail = MaxGramTail(Fixed(), maxgram(), count=3, paths=2)
    tail.start(0, Request([5, 6, 9, 8, 1, 2, 4], 10))
    tail.observe(0, [6, 9, 8, 1, 2, 4], torch.empty(0))
    (tree,) = tail.draft([0])
    assert tree.topology.parents == (-1, 0, 0, 1, 2, 3, 5, 6, 4, 8, 9)
    # 5 6 was followed by 9 8 1; 1 2 by 4 and then by the drafted path 1 2 itself.
    assert tree.tokens.tolist() == [5, 1, 6, 2, 9, 8, 1, 4, 1, 2]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("paths", [1, 2])
def test_a_tail_below_a_falcon_tree_changes_no_output(target, rows, temperature, paths):
    tree = StaticTree([(0,), (1,), (0, 0), (0, 1), (1, 0)], 2)
    falcon = FalconDrafter(random_head(target), target, tree, rows, 128)
    drafter = MaxGramTail(falcon, maxgram(rows), count=4, paths=paths)
    requests = [Request(p, 17, temperature, seed=n) for n, p in enumerate([[3], *prompts()])]
    expected = decode(Decoder(target, None, 1, 128), requests)
    done = completions(Decoder(target, drafter, rows, 128), requests)
    assert [one.tokens for one in done] == expected
    depths = {step.depth for one in done for step in one.steps}
    assert depths >= {4, 2 + 4}  # empty trees (one known token) get tails, too
    assert max(step.drafted for one in done for step in one.steps) == drafter.max_nodes


# -- recipes -------------------------------------------------------------------------------------


def complaint(*overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe("recipes/tiny_cascade.yaml", list(overrides), check=problems)
    return str(caught.value)


def test_an_invalid_k_is_refused_with_the_reason():
    assert "cascade.k = [[4, 2], [1, 2]]: must be upper triangular, but row 1, column 0 is 1" in (
        complaint("cascade.k=[[4, 2], [1, 2]]")
    )
    assert "entry 0 ([4, -1]) entry 1 (-1) must be >= 0" in complaint("cascade.k=[[4, -1], [0, 2]]")
    assert "must be 2 x 2" in complaint("cascade.k=[[4, 2, 1], [0, 2, 1], [0, 0, 1]]")
    assert "must be 3 x 3" in complaint("cascade.students=[a, b]")
    assert "must be 2 x 2" in complaint("cascade.k=[[4], [0, 2]]")
    assert "no student drafts" in complaint("cascade.k=[[0, 5], [0, 2]]")
    assert "cascade.students = []" in complaint("cascade.students=[]")
    assert "cascade.leniency = 0.5: must be >= 1" in complaint("cascade.leniency=0.5")
    assert "eval.methods: cascade drafts with a student" in complaint(
        "student.model=null", "student.training=full", "train.steps=1", "eval.methods=[cascade]"
    )


def test_k_survives_a_round_trip_through_yaml_and_plain_dicts(tmp_path):
    recipe = load_recipe("recipes/tiny_cascade.yaml", ["cascade.k=[[3, 1], [0, 4]]"])
    assert recipe.cascade.k == ((3, 1), (0, 4))
    assert from_dict(recipe.to_dict()) == recipe
    dump(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_a_cascade_without_students_a_matching_k_or_a_table_is_refused(students):
    with pytest.raises(ValueError, match="0 students"):
        cascade((), [[3]])
    with pytest.raises(ValueError, match="2 students with a K of 2 rows"):
        cascade(students, ONE)
    with pytest.raises(ValueError, match="with a table"):
        CascadeDrafter(students[:1], MaxGramDrafter(FirstSuffixes, 3), ONE)


def table_at(folder, size: int, tokenizer: str | None = None) -> None:
    ones = torch.ones(size, dtype=torch.long)
    table = MaxGramTable.of_counts(MaxGramConfig(size, tokenizer), ones, ones, ones)
    table.save_pretrained(folder)


def test_a_cascades_students_and_table_are_loaded_from_the_recipes_paths(tmp_path):
    tiny = Target.load("tiny")
    table_at(tmp_path / "table", tiny.vocab_size)
    places = ["cascade.students=[tiny, tiny]", "cascade.k=[[2, 1, 1], [0, 1, 0], [0, 0, 2]]"]
    places += [f"maxgram.table={tmp_path / 'table'}", "eval.methods=[plain, cascade]"]
    recipe = load_recipe("recipes/tiny_cascade.yaml", places)
    trained = load_trained(recipe, tiny)
    assert len(trained.cascade) == len(trained.networks(needs("cascade:padded"))) == 2
    assert trained.student is None
    run = make_method("cascade", recipe, tiny, trained, 80)
    outcome = run([Request([5, 6, 7, 8], 12)])
    assert len(outcome.drafter_passes) == 2
    assert min(outcome.drafter_passes) > 0
    with pytest.raises(RecipeError, match="method cascade needs at least one student"):
        make_method("cascade", recipe, tiny, Trained(), 80)


def test_a_missing_part_and_a_table_for_other_tokens_are_named(tmp_path):
    tiny = Target.load("tiny")
    table_at(tmp_path / "other", tiny.vocab_size, "another tokenizer")
    table_at(tmp_path / "small", 99)

    def loading(**places):
        overrides = ["eval.methods=[cascade]"]
        overrides += [f"{key.replace('_', '.')}={value}" for key, value in places.items()]
        return load_trained(load_recipe("recipes/tiny_cascade.yaml", overrides), tiny)

    with pytest.raises(TargetError, match="this table was counted with the tokenizer another"):
        loading(maxgram_table=tmp_path / "other", cascade_students="[tiny]")
    with pytest.raises(TargetError, match="this table is for a vocabulary of 99"):
        loading(maxgram_table=tmp_path / "small", cascade_students="[tiny]")
    with pytest.raises(HeadError, match="no Max-Gram table at gone"):
        loading(maxgram_table="gone", cascade_students="[tiny]")
    table_at(tmp_path / "table", tiny.vocab_size)
    with pytest.raises(TargetError, match=r"cascade.students: cannot load \./gone: no folder"):
        loading(maxgram_table=tmp_path / "table", cascade_students="[./gone]")
