"""Where a model's files are, how they are loaded, and the tokenizer beside them.

A model is named as in a recipe: "tiny" for the bundled target, a folder, or a Hub id.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from specdraft.models.families.encoder_decoder import start_ids
from specdraft.models.hub import is_hub_id
from specdraft.models.weights.files import weight_files
from specdraft.models.weights.identity import FEATURE_SIZES
from specdraft.recipes.download_bar import DownloadBar
from specdraft.recipes.errors import TargetError, in_a_line
from specdraft.recipes.find import TEMPLATES, is_own_template
from specdraft.recipes.interrupt import abandonable
from specdraft.recipes.sections.target import BUNDLED

_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "pytorch_model*.bin"]


def bundled_target_dir() -> Path:
    """Return the folder of the target that comes with the package."""
    return Path(__file__).parent / "tiny"


def model_folder(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a model; a Hub id is downloaded, unless it is here already.

    Raises TargetError when the name is neither a folder nor reachable on the Hub.
    """
    if name == BUNDLED:
        return bundled_target_dir()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"target.model: no config.json in {folder}; give a model folder")
        return folder
    if not is_hub_id(name):
        raise TargetError(
            f"target.model: no folder at {name}; "
            f"give an existing folder, a Hub id (owner/name) or {BUNDLED!r}"
        )
    try:
        options = {"allow_patterns": _PATTERNS, "tqdm_class": DownloadBar}
        return Path(abandonable(snapshot_download, name, revision=revision, **options))
    except Exception as error:
        raise TargetError(
            f"target.model: {name} is no local folder and the Hub did not give it "
            f"({in_a_line(error)})"
        ) from error


def folder_here(name: str, revision: str | None = None) -> Path | None:
    """Return the folder that a loaded model came from, if it is on this machine; no network."""
    folder = Path(name)
    if name and not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (OSError, ValueError):
            return None
    return folder if name and (folder / "config.json").is_file() else None


def read_start_ids(name: str, revision: str | None = None) -> list[int]:
    """Ids that an encoder-decoder's generations begin with; none of another model. Raises
    TargetError."""
    folder = model_folder(name, revision)
    try:
        config = AutoConfig.from_pretrained(folder)
        given = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if given else GenerationConfig()
    except Exception as error:  # transformers raises what it likes for a file that is none
        raise TargetError(f"cannot load {folder}: {in_a_line(error)}") from error
    return start_ids(config, generation)


# -- loaded, whole or not at all -------------------------------------------------------------------


def auto_class(config: PretrainedConfig) -> type:
    """The class of transformers that makes a model with lm_head of a config."""
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def load_causal_lm(folder: Path, **options: Any) -> PreTrainedModel:
    """Load a causal LM, or an encoder-decoder, from its folder as `from_pretrained` does, and take
    none that is not whole.

    Where a config asks for what the weights do not have, transformers draws it at random. Raises
    TargetError for that, for layers that a config leaves out, for weights that are no numbers, and
    for those that come in fewer bits than float32 where that is asked for.
    """
    try:
        with _quietly():
            trust = {"trust_remote_code": options.get("trust_remote_code", False)}
            config = AutoConfig.from_pretrained(folder, **trust)
            _check_room(config, folder)
            kind = auto_class(config)
            model, found = kind.from_pretrained(
                folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # transformers raises what it likes for a file that is none
        raise TargetError(in_a_line(error)) from error
    sizes = [
        f"{name} {list(file)}, not {list(own)}" for name, file, own in found["mismatched_keys"]
    ]
    problems = {
        "lacks {}, which config.json asks for": found["missing_keys"],
        "has other sizes than config.json: {}": sizes,
        "has {}, which config.json leaves out": _left_out(model, found["unexpected_keys"]),
        "has values that are no finite numbers in {}": _unfinite(model),
    }
    for problem, names in problems.items():
        if names:
            few = ", ".join(sorted(names)[:3]) + (" .." if len(names) > 3 else "")
            raise TargetError(f"{_weights_of(folder)} {problem.format(few)}")
    if options.get("dtype") == torch.float32 != model.dtype:  # of fp8, say, without its kernels
        raise TargetError(
            f"{_weights_of(folder)} is quantised and comes as {model.dtype}, not as float32; set "
            "target.dtype=bfloat16, or take weights that are not quantised"
        )
    if strange := [one for one in end_ids(model) if type(one) is not int]:
        raise TargetError(f"eos_token_id of its generation has {strange[0]!r:.60}; give token ids")
    return model


def end_ids(model: PreTrainedModel) -> list:
    """What ends a generation, from the generation config."""
    ends = model.generation_config.eos_token_id
    return [] if ends is None else ends if isinstance(ends, list) else [ends]


def _check_room(config: PretrainedConfig, folder: Path) -> None:
    """Raise TargetError for sizes that the weight files have no bytes for: transformers would make
    tensors of them first, and the machine might run out of memory."""
    text, held = config.get_text_config(), sum(one.stat().st_size for one in weight_files(folder))
    names = ("num_hidden_layers", "vocab_size", "intermediate_size", *FEATURE_SIZES)
    sizes = {name: size for name in names if isinstance(size := getattr(text, name, None), int)}
    width = max((sizes[name] for name in FEATURE_SIZES if name in sizes), default=1)
    for name, size in sizes.items():
        if size * width > 8 * held:  # every value takes a bit at least
            raise TargetError(
                f"{_weights_of(folder)} has {held:,} bytes, too few for config.json's "
                f"{name} = {size:,}"
            )


@contextmanager
def _quietly() -> Iterator[None]:
    """Hold back transformers' bar, and its table of what it made of each tensor: it prints any name
    as it is."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _left_out(model: nn.Module, unexpected: Iterable[str]) -> list[str]:
    """Names of tensors in the files that belong to modules like those of the model.

    The others are another task's, or were never weights (OPT's, GPT-2's masks).
    """
    owners = {_owner(name) for name in model.state_dict()}
    layered = any("#" in owner for owner in owners)
    return [name for name in unexpected if _owner(name) in owners or not layered]


def _owner(name: str) -> str:
    """The module of a tensor, of whichever layer: model.layers.#.mlp.up_proj"""
    return re.sub(r"\d+", "#", name.rpartition(".")[0])


def _unfinite(model: nn.Module) -> list[str]:
    """Names of the parameters at hand that have values which are no finite numbers."""
    return [
        name
        for name, tensor in model.named_parameters()
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.is_meta
        # The sum is quick and makes nothing of the tensor's size, but may itself overflow.
        if not tensor.sum(dtype=torch.float32).isfinite() and not tensor.isfinite().all()
    ]


def _weights_of(folder: Path) -> str:
    names = [path.name for path in weight_files(folder)]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


# -- its tokenizer, and the chat template that a recipe may put in its place ----------------------


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a model's weights. Raises TargetError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        tokenizer("a text", truncation=False)  # what its settings are is only looked at now
    except Exception as error:
        raise TargetError(f"no usable tokenizer in {folder}: {in_a_line(error)}") from error
    return tokenizer


def read_chat_template(name: str) -> str:
    """Read a Jinja chat template: a bundled one by its name, or a file. Raises TargetError."""
    path = Path(name).expanduser() if is_own_template(name) else TEMPLATES / f"{name}.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in TEMPLATES.glob("*.jinja")))
        raise TargetError(
            f"target.chat_template: cannot read {path} ({error.strerror}); "
            f"give a Jinja file or one of: {known}"
        ) from error
