"""Tiny random targets and heads: every claim about exactness holds for any weights."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.target import Target

VOCAB, HIDDEN = 23, 16


def random_target(
    seed: int = 0, kv_heads: int = 2, sharpness: float = 8.0, layers: int = 2
) -> Target:
    """A small Llama over 23 tokens; sharp enough that greedy choices are no near-ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return Target(model, None, f"random-{seed}")


def random_head(target: Target, block_size: int = 2, seed: int = 1, **changes) -> FalconHead:
    """A head with random weights for a random target."""
    torch.manual_seed(seed)
    config = FalconConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        block_size=block_size,
        heads=4,
        kv_heads=2,
        intermediate_size=24,
        embed_scale=0.3,
        target=target.identity(),
        **changes,
    )
    head = FalconHead(config).eval()
    if head.layer_fusion is not None:  # made as zeros
        nn.init.normal_(head.layer_fusion, std=0.5)
    return head


def kept_for_backward(module: nn.Module, *inputs, **options) -> tuple[Tensor, int]:
    """Run a module; return its output and the bytes kept for backward, its weights left out."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(*inputs, **options)
    for weight in module.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return output, sum(kept.values())
