"""A draft LM: plain decoding's tokens, and a cache that equals a fresh forward."""

import pytest
import torch
from decoding import completions, decode, plain_tokens, prompts
from random_models import VOCAB, random_target

from specdraft.eval.drafters.lm import SSD
from specdraft.eval.engine.accept import RULES
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.models.target import Target


@pytest.fixture(scope="module")
def target():
    return random_target()


def near(target: Target, noise: float = 0.02) -> Target:
    """A student that is often right: the target with disturbed weights."""
    student = random_target()
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in student.model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return student


def students(target):
    return {"itself": target, "near": near(target), "another": random_target(seed=3, kv_heads=4)}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("theta", [0.0, 0.4])
def test_greedy_output_equals_that_of_the_model_without_a_cache(target, rows, theta):
    requests = [Request(prompt, 17) for prompt in prompts()]
    expected = [plain_tokens(target, prompt, 17) for prompt in prompts()]
    for name, student in students(target).items():
        drafter = SSD(student, rows, 128, gamma=4, theta=theta)
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


@pytest.mark.parametrize("rows", [1, 3])
def test_sampled_output_equals_that_of_plain_seeded_sampling(target, rows):
    settings = {"temperature": 1.3, "top_k": 15, "top_p": 0.95}
    requests = [Request(p, 15, seed=n, **settings) for n, p in enumerate(prompts())]
    expected = decode(Decoder(target, None, 1, 128), requests)
    for name, student in students(target).items():
        drafter = SSD(student, rows, 128, gamma=4)
        assert decode(Decoder(target, drafter, rows, 128), requests) == expected, name


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_of_a_student_that_is_the_target_is_accepted(target, temperature):
    drafter = SSD(target, 1, 128, gamma=4)
    request = Request(prompts()[1], 25, temperature, seed=5)
    done = next(Decoder(target, drafter, 1, 128).run([request]))
    # The first draft is made before the target has read the prompt.
    assert [step.emitted for step in done.steps] == [5, 5, 5, 5, 5]
    assert drafter.forwards == 5 * 4  # one per token: nothing accepted is read again


class Watched(SSD):
    """Compares the cache with a fresh forward of the committed tokens, at every draft."""

    def draft(self, rows):
        trees = super().draft(rows)
        for row, tree in zip(rows, trees, strict=True):
            memory, length = self.memory[row], self.pool.lengths[row]
            assert length == len(memory.tokens)
            ids = torch.tensor([memory.tokens + tree.tokens.tolist()[:-1]])
            fresh = self.student.model(ids, use_cache=True).past_key_values
            for layer, part in enumerate(fresh.layers):
                for kind, expected in enumerate((part.keys, part.values)):
                    kept = self.pool.layers[layer][kind, row, :, : ids.shape[1]]
                    torch.testing.assert_close(kept, expected[0], atol=1e-5, rtol=1e-4)
            self.accepted.append(len(memory.cached))
        return trees


@pytest.mark.parametrize(("theta", "temperature"), [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0)])
def test_the_cache_equals_a_fresh_forward_whatever_was_accepted(target, theta, temperature):
    drafter = Watched(near(target), 3, 128, gamma=4, theta=theta)
    drafter.accepted = []
    requests = [Request(p, 20, temperature, seed=n) for n, p in enumerate(prompts())]
    steps = [s for done in Decoder(target, drafter, 3, 128).run(requests) for s in done.steps]
    assert len({step.accepted for step in steps}) > 2  # accepted fully, partly and not at all
    assert drafter.accepted


def test_a_draft_is_the_students_own_greedy_continuation(target):
    student, seen = random_target(seed=3), []

    class Recorder(SSD):
        def draft(self, rows):
            trees = super().draft(rows)
            seen.append((list(self.memory[0].tokens), trees[0].tokens.tolist()))
            return trees

    list(Decoder(target, Recorder(student, 1, 128, gamma=3), 1, 128).run([Request([1, 2, 3], 8)]))
    assert len(seen) > 3
    for committed, drafted in seen:
        assert drafted == plain_tokens(student, committed, 3)


def test_a_token_below_the_threshold_ends_the_draft_and_stays_in_it(target):
    student, theta = random_target(seed=3, sharpness=3.0), 0.5
    drafter = SSD(student, 1, 128, gamma=6, theta=theta)
    lengths = set()
    for prompt in prompts():
        drafter.start(0, Request(prompt, 20))
        with torch.inference_mode():
            drafted = drafter.draft([0])[0].tokens.tolist()
        ids = torch.tensor([prompt + drafted])
        after = student.model(ids).logits[0, len(prompt) - 1 : -1].softmax(-1)
        chances = after[range(len(drafted)), drafted]
        assert (chances[:-1] >= theta).all()
        assert len(drafted) == 6 or chances[-1] < theta
        lengths.add(len(drafted))
    assert len(lengths) > 1


def test_sampled_drafts_use_the_same_noise_as_the_targets_choice(target):
    """With the target as student every draft is accepted; with other noise almost none would be."""
    requests = [Request(prompt, 16, 1.5, seed=n) for n, prompt in enumerate(prompts())]
    done = completions(Decoder(target, SSD(target, 2, 128, gamma=3), 2, 128), requests)
    assert all(step.accepted == step.depth for one in done for step in one.steps)


@pytest.mark.parametrize("rule", RULES)
def test_a_student_that_is_the_target_is_always_accepted_by_all_rules_but_the_walk(target, rule):
    """With q = p, a rule that divides by q rejects no sampled token. "walk" drafts the most
    probable token, which the target's sample may miss."""
    warp = {"temperature": 1.5, "top_k": 12, "top_p": 0.9}
    requests = [Request(p, 16, seed=n, rule=rule, **warp) for n, p in enumerate(prompts())]
    done = completions(Decoder(target, SSD(target, 2, 128, gamma=3), 2, 128), requests)
    believed = [step.accepted == step.depth for one in done for step in one.steps]
    assert all(believed) == (rule != "walk")


def test_nothing_is_drafted_beyond_the_students_context(target):
    student = random_target(seed=3)
    student.config.max_position_embeddings = 24
    drafter = SSD(student, 1, 128, gamma=4)
    prompt = prompts()[2]
    done = next(Decoder(target, drafter, 1, 128).run([Request(prompt, 30)]))
    assert done.tokens == plain_tokens(target, prompt, 30)
    places = [len(prompt)]
    for step in done.steps:
        places.append(places[-1] + step.emitted)
    assert all((s.drafted > 0) == (p <= 20) for s, p in zip(done.steps, places, strict=False))
    assert max(done.tokens) < VOCAB
