"""The frozen target: a causal language model whose tokens we want sooner.

An encoder-decoder is one, too, given a source (families/encoder_decoder.py): its features are the
decoder's.

Shapes: B rows, T time, S tokens of a source, H hidden, V vocabulary. A feature `f_i` is the last
hidden state AFTER the final norm, exactly what lm_head consumes: `p(. | t_<=i) =
softmax(finish(lm_head(f_i)))`; in most families there is nothing to finish (families/finish.py).
"""

import copy
import threading
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdraft.models.embeddings import (
    DTYPES,
    TargetEmbeddings,
    check_no_bias,
    embed_scale_of,
    model_without_weights,
)
from specdraft.models.families.encoder_decoder import (
    base_of,
    decoder_depth,
    is_encoder_decoder,
    start_ids,
)
from specdraft.models.families.finish import finish_of
from specdraft.models.feature_layers import Layers, check_layers, wide_features
from specdraft.models.snapshot import folder_of
from specdraft.models.target_files import (
    auto_class,
    end_ids,
    load_causal_lm,
    load_tokenizer,
    model_folder,
    read_chat_template,
)
from specdraft.models.weights.identity import hash_config, hash_weights, identity_of
from specdraft.models.weights.placement import is_kept_elsewhere, loading_options, runs_on, shared
from specdraft.models.weights.prepacked import PrepackedWeights, prepacked_layer
from specdraft.recipes.errors import TargetError, in_a_line
from specdraft.recipes.sections.target import TargetSection

# Where families write how many positions they have.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len")
NO_SOURCE = "it is an encoder-decoder, and was given no source; set data.format=seq2seq"
_PROBES = 8  # ids that lm_head is checked on, spread over the vocabulary


def context_length(config: PretrainedConfig) -> int | None:
    """How many positions a model was made for; None where its config names no end."""
    text = config.get_text_config()
    if hasattr(text, "relative_attention_num_buckets"):  # T5's config names one, and it has none
        return None
    sizes = (getattr(text, key, None) for key in _CONTEXTS)
    return next((size for size in sizes if size and size > 0), None)  # -1 says: no end


class Target:
    """A frozen causal LM with its tokenizer. Never modified; no parameter has a gradient.

    However its layers are placed, ids, features and logits are on `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        no_layers: str | None = None,  # why they are not loaded (see `without_layers`)
        prepacked: PrepackedWeights | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.no_layers = no_layers
        # For type checkers, always one: only a model that came without its files has none.
        self.tokenizer: Any = tokenizer
        self.name = name
        self.config = model.config
        self.embedding = model.get_input_embeddings()
        self.prepacked = prepacked or PrepackedWeights()
        self.lm_head = prepacked_layer(model.get_output_embeddings(), self.prepacked)
        self.cuda_graphs = True  # whether short forwards are replayed, where they can be
        self.finish = finish_of(model)  # what comes after lm_head
        self.base = base_of(model)  # what makes features
        self.start_ids = start_ids(model.config, model.generation_config)  # of an encoder-decoder
        self._identity: dict | None = None
        self.is_enlarged = False  # whether it says what a smaller one says (models/enlarged/)
        # Weights come and go with a module's forward: two threads must not be in the same module.
        self._lock = threading.Lock() if is_kept_elsewhere(model) else nullcontext()
        if not no_layers:
            self._check_ends()
            self._check_logits()

    @classmethod
    def load(
        cls,
        name: str,
        revision: str | None = None,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        prepacked: PrepackedWeights | None = None,
        **placing,
    ) -> "Target":
        """Load a target by folder, Hub id or "tiny"; raises TargetError with the reason.

        placing: `from_pretrained`'s own device_map and max_memory, instead of `device`.
        """
        folder = model_folder(name, revision)
        options = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        try:
            model = load_causal_lm(folder, **options, **placing)
        except TargetError as error:
            raise TargetError(f"cannot load {name}: {error}") from error
        model = model if placing else model.to(device)
        try:
            tokenizer = load_tokenizer(folder, trust_remote_code)
            target = cls(model, tokenizer, name, prepacked=prepacked)
        except KeyError as error:  # a weight that accelerate keeps under another name only
            raise TargetError(
                f"{name}: target.device_map separates {error} from the matrix that it is tied to; "
                "put tied embeddings on one device"
            ) from error
        target._identity = identity_of(name, revision, folder)
        return target

    @classmethod
    def without_layers(
        cls, section: TargetSection, device: str | torch.device, reason: str
    ) -> "Target":
        """What there is to a recipe's target without loading its layers: tokenizer, config,
        identity and embeddings. What needs its forward raises TargetError, with the reason.
        """
        folder, trusted = model_folder(section.model, section.revision), section.trust_remote_code
        model = model_without_weights(folder, DTYPES[section.dtype], trusted)
        target = cls(model, load_tokenizer(folder, trusted), section.model, reason)
        target.device = torch.device(device)
        target._identity = identity_of(section.model, section.revision, folder)
        target._use_template(section)
        return target

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> "Target":
        """Wrap a model that somebody else loaded and goes on using, without changing it.

        Its structure is copied, its tensors are shared. Its identity is that of the files it was
        loaded from, as far as they can be found on this machine.
        """
        memo = shared(model)
        for tensor in model.parameters():
            # A detached twin: freezing must not freeze the caller's.
            frozen = nn.Parameter(tensor.detach(), False) if tensor.requires_grad else tensor
            memo[id(tensor)] = frozen
        name = model.name_or_path or type(model).__name__
        try:
            view = copy.deepcopy(model, memo)
        except (TypeError, RuntimeError) as error:  # a lock, a tensor with a history, ..
            raise TargetError(
                f"{name}: its structure cannot be copied ({in_a_line(error)}); remove what is "
                "no part of the model from its modules"
            ) from error
        target = cls(view, None, name)
        folder, revision = folder_of(model)
        if folder:
            target._identity = identity_of(name, revision, folder)
        return target

    @classmethod
    def of_recipe(
        cls, section: TargetSection, device: str | torch.device | None = None
    ) -> "Target":
        """Load the target that a recipe names, with the chat template it names.

        device: None: the first GPU, or the CPU where there is none.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        source = (section.model, section.revision, section.dtype, device)
        prepacked = PrepackedWeights(section.prepack_gib * 2**30)
        trusted, placing = section.trust_remote_code, loading_options(section)
        target = cls.load(*source, trusted, prepacked, **placing)
        target.cuda_graphs = section.cuda_graphs
        target._use_template(section)
        return target

    @classmethod
    def random(
        cls,
        config: PretrainedConfig,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
        prepacked: PrepackedWeights | None = None,
    ) -> "Target":
        """A target with the sizes of a config and random weights, drawn on `device`; it has no
        tokenizer, and its identity is its name's."""
        with torch.device(device):
            model = auto_class(config).from_config(config, dtype=dtype)
        target = cls(model, None, name, prepacked=prepacked)
        target.identify(f"random {name}", config)
        return target

    def _use_template(self, section: TargetSection) -> None:
        if section.chat_template is not None:
            self.tokenizer.chat_template = read_chat_template(section.chat_template)

    @property
    def hidden_size(self) -> int:
        return self.embedding.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @cached_property
    def context(self) -> int | None:
        """How many positions the target was made for; None where its config names no end."""
        return context_length(self.config)

    @cached_property
    def device(self) -> torch.device:
        return runs_on(self.embedding)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def replays(self) -> bool:
        """Whether forwards of fixed shapes are replayed (models/passes/graphs.py)."""
        return self.cuda_graphs and self.device.type == "cuda"

    @property
    def embedding_weight(self) -> Tensor:
        """The input embedding's matrix, [V, H], on `device`."""
        weight = self.embedding.weight
        return weight if weight.device == self.device else self._brought[0]

    @property
    def lm_head_weight(self) -> Tensor:
        """lm_head's matrix, [V, H], on `device`."""
        weight = self.lm_head.weight
        return weight if weight.device == self.device else self._brought[1]

    @cached_property
    def _brought(self) -> tuple[Tensor, Tensor]:
        """Copies of embedding and lm_head on `device`, for a model that has them elsewhere; from
        the weight files, where it has none at hand."""
        weights = (self.embedding.weight, self.lm_head.weight)
        if any(weight.is_meta for weight in weights):
            dtype, revision = str(self.dtype).removeprefix("torch."), self.identity()["revision"]
            read = TargetEmbeddings.load(self.name, revision, dtype, self.device)
            weights = (read.embedding, read.lm_head_weight)
        return tuple(weight.to(self.device) for weight in weights)

    def embeddings(self) -> TargetEmbeddings:
        """The target without its layers, sharing its tensors. Raises TargetError where lm_head has
        a bias."""
        check_no_bias(self.lm_head, self.name)
        matrices = self.embedding_weight.detach(), self.lm_head_weight.detach()
        return TargetEmbeddings(*matrices, self.finish, embed_scale_of(self.embedding))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, from the generation config."""
        return frozenset(end_ids(self.model))

    @cached_property
    def reads_source(self) -> bool:
        """Whether it is an encoder-decoder."""
        return is_encoder_decoder(self.config)

    @torch.inference_mode()
    def features(
        self,
        input_ids: Tensor,  # [B, T]
        attention_mask: Tensor | None = None,
        layers: Layers = (),
        source: Tensor | None = None,  # [B, S], of an encoder-decoder
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Run ids and return the features [B, T, H] after the final norm, wide with `layers` (see
        feature_layers.py)."""
        self.check_runs()
        if self.reads_source and source is None:
            raise TargetError(f"{self.name}: {NO_SOURCE}")
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if source is not None:
            inputs["encoder_hidden_states"] = self.encode(source, source_mask)
            inputs["encoder_attention_mask"] = source_mask
        with self._lock:
            return wide_features(self.base, layers, self.device, **inputs)

    @torch.inference_mode()
    def encode(self, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run an encoder-decoder's encoder on ids [B, S], once a request: [B, S, H]."""
        self.check_runs()
        with self._lock:
            read = self.model.get_encoder()(input_ids=source, attention_mask=mask)
        return read.last_hidden_state.to(self.device)

    def logits(self, features: Tensor) -> Tensor:
        """lm_head, and what comes after it: features [.., H] to logits [.., V]."""
        with self._lock:
            return self.finish(self.lm_head(features).to(self.device))

    def embed(self, ids: Tensor) -> Tensor:
        """Input embedding: ids [..] to vectors [.., H]."""
        with self._lock:
            return self.embedding(ids)

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return decoder_depth(self.config.get_text_config())[1]

    def check_layers(self, layers: Layers, **asked: str) -> None:
        """Raise TargetError for layers that it does not have; asked: see `check_layers`."""
        if layers:
            check_layers(layers, self.depth, self.name, **asked)

    def check_runs(self) -> None:
        """Raise TargetError where the layers are not loaded, with the reason."""
        if self.no_layers:
            raise TargetError(f"{self.name}: {self.no_layers}")

    def identity(self) -> dict:
        """Which weights these are (see `identity_of`)."""
        if self._identity is None:  # a model handed in as an object has no files to hash
            self.identify(hash_weights(self.model), self.model.config)
        return self._identity

    def identify(self, weights: str, config: PretrainedConfig) -> None:
        """Say which weights these are, where no files do."""
        self._identity = {
            "name": self.name,
            "revision": None,
            "weights": weights,
            "config": hash_config(config.to_dict(), sorted(self.eos_ids)),
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
        }

    def _check_ends(self) -> None:
        """Refuse models without what a target begins and ends with."""
        if self.lm_head is None:
            raise TargetError(f"{self.name}: only models with lm_head work")
        for end in (self.embedding, self.lm_head):
            if not isinstance(getattr(end, "weight", None), Tensor):
                raise TargetError(
                    f"{self.name}: the weight of its {type(end).__name__} is no matrix of numbers; "
                    "leave embedding and lm_head as they are where other layers are quantised"
                )
        if self.reads_source and not self.start_ids:
            raise TargetError(
                f"{self.name}: its config names no decoder_start_token_id, so an encoder-decoder's "
                "generation has nothing to begin with; add one to its config.json"
            )

    @torch.inference_mode()
    def _check_logits(self) -> None:
        """Refuse models whose logits are not those of their features."""
        # Some embeddings are zero, of padding mostly, and zero equals zero at any scale.
        count = self.embedding.weight.shape[0]
        ids = torch.tensor([[count * n // _PROBES for n in range(_PROBES)]], device=self.device)
        sources = {"decoder_input_ids": ids} if self.reads_source else {}
        expected = self.model(input_ids=ids, use_cache=False, **sources).logits
        features = self.features(ids, source=ids if sources else None)
        error = (self.logits(features) - expected).abs().max()
        largest = expected.abs().max()
        if not 0 < largest < torch.inf:
            raise TargetError(
                f"{self.name}: its largest logit of ids {ids[0].tolist()} is {float(largest)}; "
                "its weights are damaged, or were never loaded"
            )
        # A soft cap hardly moves small logits, so it has to be known by its name.
        capped = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        unknown_cap = capped and self.finish.cap != capped
        if unknown_cap or not error <= 1e-2 * largest:
            found = f"capped at {capped}" if unknown_cap else "changed"
            raise TargetError(
                f"{self.name} ({self.config.model_type}): its logits are not lm_head(last hidden "
                f"state), as it is, scaled or capped, but {found} in another way, so its features "
                "cannot be drafted; families like Llama, Qwen and Gemma can"
            )
