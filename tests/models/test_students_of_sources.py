"""Students of encoder-decoders: pruned decoders that train and draft with their sources."""

import json
from functools import partial

import pytest
import torch
from random_models import VOCAB
from random_seq2seq import FAMILIES, asked, generated, random_seq2seq

from specdraft.eval.drafters.lm import SSD
from specdraft.eval.engine.decoder import Decoder
from specdraft.models.student import Student, make_student, pruned
from specdraft.models.target import Target
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import from_dict
from specdraft.recipes.sections.drafters import StudentSection
from specdraft.train.fit.accelerator import make_accelerator
from specdraft.train.fit.loop import fit
from specdraft.train.objectives.distillation import Distillation
from specdraft.train.objectives.on_policy import OnPolicy
from specdraft.train.objectives.text import collate_text

IDS, SOURCE = torch.tensor([[0, 5, 7, 3, 9]]), torch.tensor([[4, 8, 2, 6]])


@pytest.fixture(scope="module", params=FAMILIES)
def target(request) -> Target:
    return random_seq2seq(request.param)


class Rows(list):
    """Rows with sources of different lengths, and the target's features."""

    key = None

    def __init__(self, target: Target, count: int = 8):
        generator = torch.Generator().manual_seed(3)
        for number in range(count):
            ids = torch.randint(VOCAB, (7 + number,), generator=generator)
            source = torch.randint(1, VOCAB, (3 + 2 * (number % 3),), generator=generator)
            features = target.features(ids[None], source=source[None])[0].clone()
            mask = torch.arange(len(ids)) >= len(target.start_ids)
            rows = {"input_ids": ids, "loss_mask": mask, "source_ids": source}
            self.append(rows | {"features": features})
        self.lengths = [len(row["input_ids"]) for row in self]


def recipe(out, **train):
    tree = {"name": "toy", "data": {"sources": ["tiny"], "max_length": 24}}
    tree |= {"student": {"keep_layers": [0, 2]}, "output": {"dir": str(out)}}
    steps = {"steps": 3, "batch_size": 8, "log_every": 1, "threads": 1}
    return from_dict(tree | {"train": steps | train, "optim": {"lr": 1.0e-2}})


def test_a_student_that_keeps_all_layers_equals_its_target(target):
    whole = Target(pruned(target, (0, 1, 2), shared=False), None, "whole")
    torch.testing.assert_close(
        whole.features(IDS, source=SOURCE), target.features(IDS, source=SOURCE)
    )


@pytest.mark.parametrize("keep", [(0, 2), (1,), (1, 2)])
def test_a_student_keeps_the_encoder_and_some_decoder_layers(target, keep):
    student = pruned(target, keep, shared=False)
    ours, theirs = student.state_dict(), target.model.state_dict()
    assert {n: v for n, v in ours.items() if "encoder." in n and "decoder" not in n}.keys() == {
        n for n in theirs if "encoder." in n and "decoder" not in n
    }
    torch.testing.assert_close(
        Target(student, None, "student").encode(SOURCE), target.encode(SOURCE)
    )
    features = Target(student, None, "student").features(IDS, source=SOURCE)
    torch.testing.assert_close(features, _left_out(target, keep))


def _left_out(target: Target, keep: tuple[int, ...]) -> torch.Tensor:
    """Features of the target with the other layers made identities; T5's first layer still makes
    the bias of all."""
    layers = next(p for p in target.base.modules() if isinstance(p, torch.nn.ModuleList))
    out = [layers[n] for n in range(3) if n not in keep]
    forwards = [layer.forward for layer in out]

    def handing_on(forward, hidden, *given, **named):
        told = forward(hidden, *given, **named)
        return (hidden, *told[1:]) if isinstance(told, tuple) else hidden

    try:
        for layer, forward in zip(out, forwards, strict=True):
            layer.forward = partial(handing_on, forward)
        return target.features(IDS, source=SOURCE)
    finally:
        for layer, forward in zip(out, forwards, strict=True):
            layer.forward = forward


def test_padding_of_sources_changes_no_output(target):
    student, rows = Student(target.model), Rows(target)
    together = collate_text(rows, [(0, 0, n) for n in range(8)])

    def hidden(batch, number=0):
        every = torch.arange(batch.lengths[number])
        positions = (torch.full_like(every, number), every)
        return student(batch.tokens, positions, lambda hidden, _: hidden, **batch.encoder_inputs)

    for number, row in enumerate(rows):
        alone = hidden(collate_text([row], [(0, 0, 0)]))
        torch.testing.assert_close(hidden(together, number), alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(alone, row["features"], atol=1e-4, rtol=1e-4)
        read = together.row(number)["source_ids"]
        assert read.tolist() == row["source_ids"].tolist()


def test_micro_batches_change_no_loss_and_training_lowers_it(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    target, losses = random_seq2seq("flan-t5", dropout_rate=0.0), []
    for name, cuts in (("whole", 1), ("cut", 8)):
        made = recipe(tmp_path / name, accumulation=cuts)
        student = make_student(made.student, target, 0)
        before = {n: w.clone() for n, w in student.state_dict().items()}
        fit(
            student, Rows(target), Distillation(made, student, target), made, make_accelerator(made)
        )
        moved = [n for n, w in student.state_dict().items() if not torch.equal(w, before[n])]
        assert any("encoder" in n for n in moved)
        assert any("decoder" in n for n in moved)
        lines = map(json.loads, (tmp_path / name / "log.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    # Adam's first steps amplify the rounding of small gradients to full steps.
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    assert losses[0][-1] < losses[0][0]


def test_on_policy_answers_are_the_students_own_for_each_source():
    target = random_seq2seq("flan-t5")
    tree = {"name": "toy", "data": {"sources": ["tiny"], "max_length": 24}}
    tree |= {"student": {"keep_layers": [0]}, "output": {"dir": "unused"}, "train": {"steps": 1}}
    distill = {"on_policy": 1.0, "max_new_tokens": 6, "sample_temperature": 0.0}
    made, rows = from_dict(tree | {"distill": distill}), Rows(target)
    for row in rows:
        del row["features"]
    student = make_student(made.student, target, 0)
    batch = OnPolicy(made, student)(collate_text(rows, [(0, 0, n) for n in range(8)]))
    own = Target(student.model, None, "own")
    for number, row in enumerate(rows):
        written, source = batch.row(number)["input_ids"].tolist(), row["source_ids"].tolist()
        assert batch.row(number)["source_ids"].tolist() == source
        assert written == [*row["input_ids"][:1].tolist(), *_after(own, written[0], source, 6)]


def _after(target: Target, first: int, source: list[int], count: int) -> list[int]:
    """What a model says after a first token."""
    ids = [first]
    for _ in range(count):
        features = target.features(torch.tensor([ids]), source=torch.tensor([source]))
        ids.append(int(target.logits(features[0, -1]).argmax()))
    return ids[1:]


def test_a_student_drafts_losslessly(target):
    student = Target(pruned(target, (0, 2), shared=False), None, target.name)
    sources = [[5, 9, 3], [4, 4, 8, 2, 7, 1], [12, 6]]
    decoder = Decoder(target, SSD(student, 3, 40, gamma=3), 3, 40)
    done = {one.index: one.tokens for one in decoder.run(asked(target, sources))}
    assert [done[n] for n in range(3)] == [generated(target, source, 12) for source in sources]


def test_a_decoder_only_student_of_an_encoder_decoder_is_refused(target):
    with pytest.raises(RecipeError, match=r"reads no source.*set student.keep_layers or"):
        make_student(StudentSection(layers=1), target)
