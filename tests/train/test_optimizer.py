"""The optimiser of a recipe: which parameters each part updates, and that parts step as one."""

from types import SimpleNamespace

import pytest
import torch
from random_models import random_target
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.student import Student
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import load_recipe
from specdraft.recipes.sections.training import OptimSection
from specdraft.train.fit.accelerator import check_launch, processes_here
from specdraft.train.fit.continued import SHARDING
from specdraft.train.fit.muon import Float32Muon, orthogonal
from specdraft.train.fit.optimizer import Together, make_optimizer
from specdraft.train.plan import make_plan

VOCABULARY = 64
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # torch's coefficients of a Newton-Schulz step


CPU = torch.device("cpu")


def head() -> FalconHead:
    torch.manual_seed(0)
    form = {"fusion": "linear", "reads": "both", "coupling": "recurrent", "block_size": 3}
    return FalconHead(FalconConfig(hidden_size=16, vocab_size=VOCABULARY, **form))


def names(module: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    return {name for name, one in module.named_parameters() if id(one) in own}


def step(module: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Parameters after three steps on fixed gradients."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return {name: one.detach().clone() for name, one in module.named_parameters()}


def test_the_lm_head_of_a_draft_vocabulary_is_left_to_adamw():
    config = Eagle3Config(hidden_size=16, vocab_size=VOCABULARY, feature_layers=(1,), draft_vocab=9)
    module = Eagle3Head(config)
    adamw, muon = make_optimizer(module, OptimSection(name="muon"), CPU).parts
    assert names(module, adamw) == {"lm_head", "norm"} | {
        f"layer.{name}_norm" for name in ("attention", "mlp", "embedding")
    }
    assert {"fc.weight", "layer.qkv.weight"} < names(module, muon)


def test_muon_updates_the_matrices_and_adamw_the_rest():
    module = head()
    module.lm_head = nn.Linear(16, VOCABULARY, bias=True)  # as Medusa heads have
    adamw, muon = make_optimizer(module, OptimSection(name="muon"), CPU).parts
    assert isinstance(muon, torch.optim.Muon)
    assert {"fuse.weight", "reading.weight", "layers.0.qkv.weight"} < names(module, muon)
    rest = {name for name, one in module.named_parameters() if one.ndim != 2} | {"lm_head.weight"}
    assert names(module, adamw) == rest > {"layers.0.mlp_norm"}


def test_muon_updates_the_matrices_of_a_student_too():
    student = Student(random_target().model.requires_grad_(True))
    adamw, muon = make_optimizer(student, OptimSection(name="muon"), CPU).parts
    matrices = {f"model.model.layers.0.{of}.weight" for of in ("self_attn.q_proj", "mlp.up_proj")}
    assert matrices < names(student, muon)
    assert {"model.model.embed_tokens.weight", "model.lm_head.weight"} < names(student, adamw)


def test_position_embeddings_are_left_to_adamw():
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 2, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    student = Student(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **ends)))
    adamw, muon = make_optimizer(student, OptimSection(name="muon"), CPU).parts
    assert {f"model.transformer.{of}.weight" for of in ("wte", "wpe")} < names(student, adamw)
    assert "model.transformer.h.0.mlp.c_fc.weight" in names(student, muon)


def test_the_combined_optimizer_steps_as_its_parts_would_alone():
    optim = OptimSection(name="muon", lr=1.0e-2)
    together = step(one := head(), make_optimizer(one, optim, CPU))
    apart = step(other := head(), *make_optimizer(other, optim, CPU).parts)
    start = dict(head().named_parameters())
    for name, value in together.items():
        assert torch.equal(value, apart[name])
        assert not torch.equal(value, start[name])


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_an_orthogonalised_update_keeps_the_singular_vectors(shape):
    """Against the singular value decomposition."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    update = orthogonal(matrix, COEFFICIENTS, 5)
    found = left.T @ update @ right.T
    a, b, c = COEFFICIENTS
    expected = values / values.square().sum().sqrt()
    for _ in range(5):
        expected = a * expected + b * expected**3 + c * expected**5
    assert torch.allclose(found, expected.diag(), atol=1e-4)
    assert 0.3 < expected.min() < expected.max() < 1.3


@pytest.mark.parametrize("nesterov", [True, False])
def test_float32_muon_equals_torchs_up_to_rounding(nesterov):
    settings = {"lr": 1.0e-2, "weight_decay": 0.1, "nesterov": nesterov}
    settings["adjust_lr_fn"] = "match_rms_adamw"
    moved = []
    for maker in (torch.optim.Muon, Float32Muon):
        module = nn.Linear(24, 64, bias=False)
        nn.init.ones_(module.weight)
        optimizer = maker(module.parameters(), **settings)
        after = step(module, optimizer)["weight"]
        moved.append(after - 1)
        state = optimizer.state_dict()["state"][0]
        assert state.keys() == {"momentum_buffer"}  # each can load the other's state
    assert torch.nn.functional.cosine_similarity(*(one.flatten() for one in moved), 0) > 0.999
    assert moved[1].norm() == pytest.approx(float(moved[0].norm()), rel=0.01)


def test_a_parameter_without_a_gradient_is_not_changed():
    one, other = (nn.Parameter(torch.ones(4, 8)) for _ in range(2))
    one.grad = torch.randn(4, 8)
    Float32Muon([one, other], lr=0.1, adjust_lr_fn="match_rms_adamw").step()
    assert torch.equal(other, torch.ones(4, 8))
    assert not torch.equal(one, torch.ones(4, 8))


def test_setting_the_learning_rate_reaches_every_part_also_after_loading():
    optimizer = make_optimizer(head(), OptimSection(name="muon"), CPU)
    assert isinstance(optimizer, Together)
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert [g["lr"] for part in optimizer.parts for g in part.param_groups] == [0.5, 0.5]


@pytest.mark.parametrize("kind", SHARDING)
def test_with_sharded_weights_muon_and_forward_tokens_are_refused(kind):
    launched = SimpleNamespace(num_processes=1, distributed_type=kind)
    check_launch(load_recipe("recipes/tiny.yaml"), launched)
    with pytest.raises(RecipeError, match=rf"optim.name = 'muon'.*{kind.value}.*optim.name=adamw"):
        check_launch(load_recipe("recipes/tiny.yaml", ["optim.name=muon"]), launched)
    with pytest.raises(RecipeError, match=rf"forward_tokens = 99.*{kind.value}.*accumulation"):
        check_launch(load_recipe("recipes/tiny.yaml", ["train.forward_tokens=99"]), launched)


def test_a_batch_that_processes_cannot_share_is_refused_before_caches_and_in_the_plan():
    recipe = load_recipe("recipes/tiny.yaml")
    told = r"train.batch_size is 8: it must be a multiple of .* = 1 x 3"
    with pytest.raises(RecipeError, match=told):
        check_launch(recipe, SimpleNamespace(num_processes=3, distributed_type=None))
    with pytest.raises(RecipeError, match=told):
        make_plan(recipe, ranks=3)
    as_it_is = load_recipe("recipes/llama2_70b_draft.yaml")  # it trains nothing
    check_launch(as_it_is, SimpleNamespace(num_processes=3, distributed_type=None))


def test_the_processes_on_this_machine_are_counted(monkeypatch):
    launched = SimpleNamespace(num_processes=16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert processes_here(launched) == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert processes_here(launched) == 16
