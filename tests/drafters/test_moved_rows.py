"""What is drafted for a request does not depend on the rows it is moved through.

The tokens would be right even if a drafter lost state in a move: the drafts would not.
"""

import pytest
from decoding import PATHS, completions, prompts
from random_models import VOCAB, random_head, random_target
from test_cascade import TWO, cascade, maxgram
from test_dynamic import FREE
from test_lm_drafter import near
from test_medusa import DEPTH, random_heads

from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.drafters.lm import SSD
from specdraft.eval.drafters.medusa import MedusaDrafter
from specdraft.eval.drafters.ngrams import NGramDrafter
from specdraft.eval.drafters.static import StaticTree
from specdraft.eval.engine.decoder import Decoder
from specdraft.eval.engine.request import Request
from specdraft.eval.lookup.tail import MaxGramTail

FOLLOWERS = {token + 1: ((7 * token + 3) % VOCAB, 0.5) for token in range(VOCAB)}
LENGTHS = (13, 4, 19, 10, 7, 16)  # rows 0, 2 and 5 outlast the others


@pytest.fixture(scope="module")
def target():
    return random_target()


def falcon(target, rows: int, **options) -> FalconDrafter:
    head = random_head(target, 2, **options)
    return FalconDrafter(head, target, StaticTree(PATHS, 2), rows, 128)


KINDS = {
    "lstm": falcon,
    "coupled": lambda target, rows: falcon(
        target, rows, fusion="linear", reads="both", coupling="recurrent", layers=2
    ),
    "medusa": lambda target, rows: MedusaDrafter(
        random_heads(target, DEPTH), target, StaticTree(PATHS, DEPTH), rows
    ),
    "ssd": lambda target, rows: SSD(near(target), rows, 128, gamma=4),
    "maxgram": lambda target, rows: maxgram(rows),
    # Of one token: longer chains depend on what other requests have taught the drafter.
    "ngrams": lambda target, rows: NGramDrafter([FOLLOWERS], FREE, 1, rows),
    "tail": lambda target, rows: MaxGramTail(falcon(target, rows), maxgram(rows), 2),
    "cascade": lambda target, rows: cascade((near(target), near(target, 0.05)), TWO, 2.0, rows),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.1])
def test_a_requests_drafts_are_the_same_alone_and_in_rows_that_are_moved(target, kind, temperature):
    requests = [
        Request(prompt, length, temperature, seed=n)
        for n, (prompt, length) in enumerate(zip(prompts(), LENGTHS, strict=True))
    ]
    make = KINDS[kind]
    decoder = Decoder(target, make(target, 6), 6, 128)
    together = [one.steps for one in completions(decoder, requests, accepts=False)]
    alone = Decoder(target, make(target, 1), 1, 128)
    for request, steps in zip(requests, together, strict=True):
        assert next(alone.run([request])).steps == steps
