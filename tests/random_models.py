"""Tiny random targets and heads: claims about exactness hold for any weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specdraft.models.eagle3 import Eagle3Config, Eagle3Head
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.models.sar.blocks import block_index
from specdraft.models.target import Target

VOCAB, HIDDEN = 23, 16


def random_target(
    seed: int = 0,
    kv_heads: int = 2,
    sharpness: float = 8.0,
    vocab: int = VOCAB,
    layers: int = 2,
) -> Target:
    """A small Llama over 23 tokens, sharp enough that greedy choices are no near-ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
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


def moved(target: Target, device: torch.device | str) -> Target:
    """A target whose model has been moved to a device."""
    return Target(target.model.to(device), None, target.name)


def random_head(target: Target, block_size: int = 2, seed: int = 1, **changes) -> FalconHead:
    """A head with random weights for a random target."""
    torch.manual_seed(seed)
    config = FalconConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        block_size=block_size,
        heads=4,
        kv_heads=changes.pop("kv_heads", 2),
        intermediate_size=24,
        embed_scale=0.3,
        target=target.identity(),
        **changes,
    )
    head = FalconHead(config).eval()
    with torch.no_grad():  # weights that start at zero would test nothing
        for weight in head.parameters():
            if not weight.any():
                weight.normal_(std=0.2)
    return head


def random_eagle3(target: Target, /, seed: int = 1, **changes) -> Eagle3Head:
    """An EAGLE-3 head with random weights for a random target of four layers."""
    torch.manual_seed(seed)
    config = Eagle3Config(
        **{
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "feature_layers": (1, 2, 3),
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "intermediate_size": 24,
            **changes,
        }
    )
    head = Eagle3Head(config).eval()
    with torch.no_grad():
        head.lm_head.normal_(std=2.0)
        for weight in head.parameters():  # or errors in norms would not show
            weight.add_(0.1 * torch.randn_like(weight))
        if config.draft_vocab is not None:
            head.draft_ids.copy_(torch.randperm(config.vocab_size)[: len(head.draft_ids)].sort()[0])
    return head


@torch.inference_mode()
def draft_logits(head: FalconHead, target: Target, tokens: list[int], drafted: list[int]) -> Tensor:
    """Logits [V] of a draft's next token after `tokens` and those `drafted`, by forwards of the
    whole sequence, block by block."""
    k, ids = head.config.block_size, torch.tensor([tokens])
    features, ahead = target.features(ids)[:, :-1], target.embed(ids[:, 1:])
    for start in range(0, len(drafted) + 1, k):
        count, block = features.shape[1], drafted[start : start + k]
        ahead = torch.cat((ahead, target.embed(torch.tensor([block], dtype=torch.long))), 1)
        # An extra, unseen block provides the tokens that coupled slots read.
        blocks = block_index(count + k, k, (count - 1) % k + 1)[None]
        heard = F.pad(ahead, (0, 0, 0, k - len(block)))
        slots = head(heard, F.pad(features, (0, 0, 0, k)), blocks)[0][:, count - k : count]
        if len(block) < k:
            return target.logits(slots)[0, len(block)]
        features = torch.cat((features, slots), 1)


def kept_for_backward(module: nn.Module, *inputs, **options) -> tuple[Tensor, int]:
    """Run a module; return its output and the bytes kept for backward, without its weights."""
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
