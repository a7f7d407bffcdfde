"""The student: a small causal LM that learns to draft for a target with the same tokens.

It comes from one of three places: a config of its own (Llama-like, random weights), a pretrained
model, or the target itself, pruned to some of its layers. It is trained whole or through LoRA
adapters (arXiv 2106.09685), and saved as a plain Hugging Face model with the target's tokenizer.

Of an encoder-decoder the student is one, too: it keeps layers of the decoder and the whole encoder.

Shapes: B rows, T time, S tokens of a source, N supervised positions, H the student's hidden size,
V vocabulary.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdraft.models.embeddings import check_no_bias
from specdraft.models.families.encoder_decoder import base_of, decoder_depth, decoder_layers
from specdraft.models.hub import is_hub_id
from specdraft.models.saved import share_weights
from specdraft.models.shapes import (
    OTHER_STUDENTS,
    TargetShape,
    check_layers,
    check_vocabulary,
    llama_config,
    own_shape,
)
from specdraft.models.target import Target
from specdraft.models.target_files import (
    auto_class,
    load_causal_lm,
    load_tokenizer,
    model_folder,
)
from specdraft.models.weights.checksums import check_sums, write_sums
from specdraft.models.weights.placement import is_kept_elsewhere
from specdraft.recipes.errors import RecipeError, TargetError, UntrainedError, in_a_line
from specdraft.recipes.hub_name import split_revision
from specdraft.recipes.schema import StudentSection

SPECIAL = ("bos_token", "eos_token", "unk_token")


class Student(nn.Module):
    """A causal LM in training; its lm_head is applied by the loss, chunk by chunk."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer

    def forward(
        self,
        ids: Tensor,  # [B, T]
        positions: tuple[Tensor, Tensor],  # rows [N] and times [N]
        loss: Callable[[Tensor, Tensor], Any],
        source: Tensor | None = None,  # [B, S], of an encoder-decoder
        source_mask: Tensor | None = None,
    ) -> Any:
        """Return `loss(hidden [N, H] at the positions, lm_head [V, H])`.

        The loss is taken in here because engines that shard parameters gather lm_head only while
        the module runs. Rows may be padded on the right: attention is causal.
        """
        inputs = {"input_ids": ids, "use_cache": False}
        if source is not None:
            read = self.model.get_encoder()(input_ids=source, attention_mask=source_mask)
            inputs["encoder_hidden_states"] = read.last_hidden_state
            inputs["encoder_attention_mask"] = source_mask
        hidden = base_of(self.model)(**inputs).last_hidden_state
        return loss(hidden[positions], self.model.get_output_embeddings().weight)

    def checkpoint_layers(self) -> None:
        """Let backward run each decoder layer again, to keep less for it.

        Raises RecipeError where transformers cannot do that for the model.
        """
        try:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise RecipeError(f"train.checkpointing = True: {error}; set it to false") from error

    def as_target(self) -> Target:
        """The student as the decoder wants a model: frozen, every tensor shared with this one.

        It follows the training: optimisers change weights in place.
        """
        view = Target.of_model(self.model)
        view.tokenizer, view.name = self.tokenizer, "the student"
        return view

    def save_pretrained(self, folder: str | Path) -> None:
        """Save a plain Hugging Face model, adapters merged, with the tokenizer and checksums."""
        self.merged().save_pretrained(folder)
        share_weights(Path(folder))
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)
        write_sums(Path(folder))

    def merged(self) -> PreTrainedModel:
        """Return the model with its adapters, where it has some, merged into a copy."""
        # A layer of peft stands around one of the model's own.
        parts = self.model.named_modules()
        adapted = [name for name, part in parts if hasattr(part, "get_base_layer")]
        if not adapted:
            return self.model
        model = copy.deepcopy(self.model)
        for name in adapted:
            layer = model.get_submodule(name)
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
        return model.requires_grad_(False)


def make_student(section: StudentSection, target: Target, seed: int = 0) -> Student:
    """Build the student of a recipe for a target; random weights are drawn from `seed`.

    Raises RecipeError for layers or adapters that the models do not have, TargetError when a
    pretrained student cannot be loaded or has other tokens, or an lm_head has a bias.
    """
    torch.manual_seed(seed)
    if section.model is not None:
        # Masters in float32; what LoRA leaves alone may stay as small as the target is.
        dtype = target.dtype if section.training == "lora" else torch.float32
        model = load_student(section.model, section.revision, target, dtype).model
        model.requires_grad_(True)  # loaded as something frozen
    elif section.keep_layers is not None:
        model = pruned(target, section.keep_layers, section.embeddings == "shared")
    elif target.reads_source:
        raise RecipeError(
            f"student.layers = {section.layers}: a student like Llama reads no source, which "
            f"{target.name} does; set student.keep_layers or student.model"
        )
    else:
        model = LlamaForCausalLM(own_config(section, target)).float()
    check_no_bias(model.get_output_embeddings(), section.model or f"a student of {target.name}")
    # It stops where the target stops, also where it is used without us.
    model.generation_config = copy.deepcopy(target.model.generation_config)
    if section.training == "lora":
        model = adapted(model, section)
    return Student(model.to(target.device), target.tokenizer)


def own_config(section: StudentSection, target: Target) -> LlamaConfig:
    """Return the config of a Llama of the section's sizes; what it leaves open is the target's."""
    shape = own_shape(section, TargetShape.of(target.config))
    return llama_config(shape, target.context or 2048, target.config.get_text_config())


def pruned(target: Target, keep: tuple[int, ...], shared: bool) -> PreTrainedModel:
    """Copy a target with some of its layers, in float32.

    shared: embedding and lm_head are the target's own tensors where the dtypes agree, and are not
    trained. Raises RecipeError for layers that the target does not have, or that are built unlike
    those whose places they take: the first ones of a mixture of experts are often dense.
    """
    key, count = decoder_depth(target.config.get_text_config())
    check_layers(keep, count, target.name)
    target.check_runs()
    if is_kept_elsewhere(target.model):
        raise TargetError(
            f"student.keep_layers = {list(keep)}: copies layers of {target.name}, and target."
            "device_map keeps some on the CPU or on disk; load it where it fits, or set "
            "student.layers"
        )
    config = copy.deepcopy(target.config)
    text = config.get_text_config()  # of a multimodal model, a part of its config
    setattr(text, key, len(keep))
    if getattr(text, "layer_types", None):
        text.layer_types = [text.layer_types[layer] for layer in keep]
    model = auto_class(config).from_config(config).float()
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = target.embedding.weight is target.lm_head.weight
    if not tied:  # FLAN-T5's are two matrices, whatever its config says
        lm_head.weight = nn.Parameter(torch.empty_like(lm_head.weight))
    theirs = decoder_layers(target.base, count)
    prefix = next(name for name, part in target.model.named_modules() if part is theirs)
    rest = {k: v for k, v in target.model.state_dict().items() if not k.startswith(f"{prefix}.")}
    model.load_state_dict(rest, strict=False)
    _copy_layers(theirs, keep, decoder_layers(base_of(model), len(keep)), target.name)
    if shared:
        embedding.weight = nn.Parameter(target.embedding_weight.detach().float(), False)
        lm_head.weight = nn.Parameter(target.lm_head_weight.detach().float(), False)
        if tied:
            lm_head.weight = embedding.weight
    return model


def load_student(
    name: str | Path,
    revision: str | None,
    target: Target,
    dtype: torch.dtype | None = None,
    key: str = "student.model",
) -> Target:
    """Load a pretrained or finished student, in the dtype it was saved in unless told otherwise.

    Raises TargetError, naming the recipe's `key`, when it cannot be loaded, or when it does not
    share the target's tokens.
    """
    try:
        repo_id, own = split_revision(name) if is_hub_id(name) else (str(name), None)
        folder = model_folder(repo_id, own or revision)
        check_sums(folder)
        model = load_causal_lm(folder, dtype=dtype or "auto")
        tokenizer = load_tokenizer(folder)
    except Exception as error:
        reason = in_a_line(error).removeprefix("target.model: ")
        raise TargetError(f"{key}: cannot load {name}: {reason}") from error
    student = Target(model.to(target.device), tokenizer, str(name))
    student.cuda_graphs = target.cuda_graphs
    check_tokens(student, target)
    return student


def finished_student(section: StudentSection, folder: Path, target: Target) -> Target:
    """Load what decoding drafts with: the student trained into `folder`, or one used as it is.

    Raises UntrainedError when nothing has been trained yet, TargetError as `load_student`.
    """
    if section.training == "none":
        return load_student(section.model, section.revision, target, target.dtype)
    if not (folder / "config.json").is_file():
        raise UntrainedError(
            f"no trained student at {folder}; train one: accelerate launch train/distill.py RECIPE"
        )
    return load_student(folder, None, target)


def check_tokens(student: Target, target: Target) -> None:
    """Raise TargetError unless every token id means the same to both, naming what differs."""
    if student.reads_source != target.reads_source:
        reading, other = (student, target) if student.reads_source else (target, student)
        raise TargetError(
            f"{reading.name} is an encoder-decoder and {other.name} is none; take a student that "
            "reads sources where its target does"
        )
    check_vocabulary(student.name, student.vocab_size, target.name, target.vocab_size)
    names = f"the student {student.name} and the target {target.name}"
    if student.tokenizer is None or target.tokenizer is None:
        return
    ours, theirs = student.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if ours != theirs:
        token = min(t for t in ours.keys() | theirs.keys() if ours.get(t) != theirs.get(t))
        raise TargetError(
            f"{names} have different tokenizers: {token!r} is {ours.get(token)} and "
            f"{theirs.get(token)}; {OTHER_STUDENTS}"
        )
    for special in SPECIAL:
        our, their = getattr(student.tokenizer, special), getattr(target.tokenizer, special)
        if our != their:
            raise TargetError(
                f"{names} have different special tokens: {special} is {our!r} and {their!r}; "
                f"{OTHER_STUDENTS}"
            )


def adapted(model: PreTrainedModel, section: StudentSection) -> PreTrainedModel:
    """Freeze a model and put LoRA adapters into the linear layers of `section.lora_targets`.

    Raises RecipeError when peft is not installed or a layer does not exist.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise RecipeError(
            "student.training = 'lora': needs peft; pip install 'specdraft[lora]'"
        ) from error
    last = model.get_output_embeddings()  # whose weight the loss reads past any adapter
    linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not last)
    known = sorted({name.rpartition(".")[2] for name in linear})
    for name in section.lora_targets:
        if name not in known:
            raise RecipeError(
                f"student.lora_targets: no linear layer is called {name!r}; "
                f"the student has {', '.join(known)}"
            )
    sizes = {"r": section.lora_rank, "lora_alpha": section.lora_alpha}
    config = LoraConfig(target_modules=list(section.lora_targets), **sizes)
    model = inject_adapter_in_model(config, model.requires_grad_(False))
    for weight in model.parameters():
        if weight.requires_grad:  # peft makes them in the dtype of what they adapt
            weight.data = weight.data.float()
    return model


def _copy_layers(
    theirs: nn.ModuleList, keep: tuple[int, ...], ours: nn.ModuleList, name: str
) -> None:
    """Copy some layers of a target. Raises RecipeError for one that is built unlike the layer whose
    place it takes."""
    for place, (layer, copied) in enumerate(zip(keep, ours, strict=True)):
        state = theirs[layer].state_dict()
        if place == 0:  # T5's first has what all share: the bias of distances
            first = theirs[0].state_dict()
            state |= {key: first[key] for key in first if "relative_attention_bias" in key}
        if _shapes(copied.state_dict()) != _shapes(state):
            raise RecipeError(
                f"student.keep_layers = {list(keep)}: layer {layer} of {name} is built unlike "
                f"layer {place}, whose place it would take; keep layer {place}, too, or set "
                "student.layers"
            )
        copied.load_state_dict(state)


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}
