"""A model that vLLM serves, as a target of ours: what drafters and heads ask of one.

Shapes: V vocabulary, H hidden.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specdraft.models.embeddings import TargetEmbeddings, model_without_weights
from specdraft.models.families.finish import PLAIN
from specdraft.models.feature_layers import Layers, check_layers
from specdraft.models.target_files import folder_here, load_tokenizer
from specdraft.models.weights.identity import identity_of
from specdraft.models.weights.prepacked import PrepackedWeights
from specdraft.recipes.errors import TargetError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ServedModel:
    """What drafters ask of a target, answered by the model that vLLM serves."""

    finish = PLAIN  # vLLM's own part; where only some tokens are drafted, q goes without it
    replays = cuda_graphs = False  # inside an engine that captures graphs of its own
    reads_source = False  # what vLLM hands to a proposer is a decoder's

    def __init__(self, model: nn.Module, config: "VllmConfig"):
        served = config.model_config
        self.model, self.name, self.revision = model, served.model, served.revision
        self.vocab_size, self.hidden_size = served.get_vocab_size(), served.get_hidden_size()
        self.dtype, self.lm_head = served.dtype, model.lm_head
        self.trusts = served.trust_remote_code
        self.layers = served.get_total_num_hidden_layers()
        self.prepacked = PrepackedWeights()  # of heads, on a CPU
        self.folder = folder_here(self.name, self.revision)
        if self.folder is None:
            raise TargetError(
                f"no files of {self.name} on this machine, by which drafters know their target; "
                "serve it from a folder"
            )
        self.tokenizer = load_tokenizer(self.folder)

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, H]; vLLM pads it to more rows, that no id stands for."""
        return self.lm_head.weight[: self.vocab_size]

    @property
    def embedding(self) -> nn.Module:
        """The family's own, without weights: by it a published head knows the scale."""
        empty = model_without_weights(self.folder, self.dtype, self.trusts)
        return empty.get_input_embeddings()

    @property
    def embedding_weight(self) -> Tensor:
        """[V, H], of the files: a published head may hold a copy of it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return TargetEmbeddings.load(str(self.folder), dtype=dtype).embedding

    def identity(self) -> dict:
        return identity_of(self.name, self.revision, self.folder)

    def check_layers(self, layers: Layers, **asked: str) -> None:
        """Raise TargetError for layers that it does not have, or that vLLM does not show."""
        check_layers(layers, self.layers, self.name, **asked)
        if layers and not hasattr(self.model, "set_aux_hidden_state_layers"):
            raise TargetError(
                f"the head reads layers {list(layers)} of its target, and vLLM's "
                f"{type(self.model).__name__} ({self.name}) shows its last alone; train one with "
                "data.feature_layers=[]"
            )

    def show_layers(self, layers: Layers) -> None:
        """Have the model return (last, [layer, ..]), in ascending order, as for EAGLE-3."""
        if layers:
            self.model.set_aux_hidden_state_layers(tuple(sorted(layers)))

    def embed(self, ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(ids.flatten()).view(*ids.shape, -1)

    def logits(self, features: Tensor) -> Tensor:
        logits = self.model.compute_logits(features.flatten(0, -2))
        return logits.view(*features.shape[:-1], -1)
