"""The frozen target: a causal language model whose tokens we want sooner.

`Target` is the whole model; `TargetEnds` only its input embedding and lm_head, which is all a head
needs to train on cached features, so a head for a 70B target trains on one small GPU.

Shapes: B rows, T time, H hidden, V vocabulary. A feature `f_i` is the last hidden state AFTER the
final norm, exactly what lm_head consumes: `p(. | t_<=i) = softmax(lm_head(f_i))`.
"""

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from specdraft.models.placement import (
    is_kept_elsewhere,
    loading_options,
    runs_on,
    shared,
)
from specdraft.recipes.errors import TargetError, in_a_line
from specdraft.recipes.sections.target import BUNDLED, TargetSection

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "pytorch_model*.bin"]
# Where families write the size of what lm_head consumes; OPT-350m's differs from its hidden size.
_FEATURE_SIZES = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model")
# Where families write how many positions they have.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
# What reading weights raises; a pickle may hold tensors, and anything else in it is refused.
UNREADABLE = (ValueError, OSError, SafetensorError, UnpicklingError)


def bundled_target_dir() -> Path:
    """Return the folder of the target that comes with the package."""
    return Path(__file__).parent / "tiny"


def resolve(name: str, revision: str | None = None) -> Path:
    """Return the local folder of a target: the bundled one, a folder, or a Hub snapshot.

    Raises TargetError when the name is neither a folder nor reachable on the Hub.
    """
    if name == BUNDLED:
        return bundled_target_dir()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise TargetError(f"target.model: no config.json in {folder}; give a model folder")
        return folder
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TargetError(
            f"target.model: no folder at {name}; "
            f"give an existing folder, a Hub id (owner/name) or {BUNDLED!r}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except Exception as error:
        reason = in_a_line(error)
        raise TargetError(
            f"target.model: {name} is no local folder and the Hub did not give it ({reason})"
        ) from error


def identity(name: str, revision: str | None, folder: Path) -> dict[str, str | int | None]:
    """Describe which weights these are; written into every cache and head made from them.

    `weights` is a sha256 over the size of each weight file, its first bytes (for safetensors the
    table of tensors) and 64 evenly spread pages: any two checkpoints of a training run differ, and
    140 GB need not be read.
    """
    config = json.loads((folder / "config.json").read_text())
    digest = hashlib.sha256()
    for path in _weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for page in range(_SAMPLES):
                file.seek(size * page // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return {
        "name": name,
        "revision": revision,
        "weights": digest.hexdigest(),
        "hidden_size": next((config[key] for key in _FEATURE_SIZES if config.get(key)), None),
        "vocab_size": config["vocab_size"],
    }


def context_length(config: PretrainedConfig) -> int | None:
    """How many positions a model was made for; None where its config names no end."""
    text = config.get_text_config()
    return next((size for key in _CONTEXTS if (size := getattr(text, key, None))), None)


def hash_weights(model: nn.Module) -> str:
    """Return a sha256 over the names and values of all tensors of a model."""
    digest = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        digest.update(key.encode())
        values = value.detach().float().cpu().contiguous().flatten()
        digest.update(values.view(torch.uint8).numpy())
    return digest.hexdigest()


def check_trained_for(own: dict, identity: dict) -> None:
    """Raise TargetError when a head was trained for another target than this one, naming both.

    own: the identity saved with the head; an empty one fits every target.
    """
    if own and own["weights"] != identity["weights"]:
        raise TargetError(
            f"this head was trained for {own['name']} (weights {own['weights'][:12]}), "
            f"not for {identity['name']} (weights {identity['weights'][:12]}); "
            "use that target, or train a head for this one"
        )


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise TargetError(f"no weights in {folder}: expected *.safetensors")
    return files


def _local_folder(name: str) -> Path | None:
    """The folder a loaded model came from, a Hub snapshot included; never asks the network."""
    folder = Path(name)
    if name and not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            return None
    return folder if name and (folder / "config.json").is_file() else None


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a target's weights."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise TargetError(f"no usable tokenizer in {folder}: {in_a_line(error)}") from error


def read_chat_template(name: str) -> str:
    """Read a Jinja chat template: a bundled one by its name, or a file."""
    bundled = Path(__file__).parents[1] / "recipes" / "templates" / f"{name}.jinja"
    path = bundled if bundled.is_file() else Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in bundled.parent.glob("*.jinja")))
        raise TargetError(
            f"target.chat_template: cannot read {path} ({error.strerror}); "
            f"give a Jinja file or one of: {known}"
        ) from error


class Target:
    """A frozen causal LM with its tokenizer. Never modified; no parameter has a gradient.

    However its layers are placed, ids, features and logits are on `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        absent: str | None = None,  # why its layers are not loaded (see `of_files`)
    ):
        self.model = model.eval().requires_grad_(False)
        self.absent = absent
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config
        self.embedding = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self._identity: dict | None = None
        # Weights come and go with a module's forward: two threads must not be in the same module.
        self._turn = threading.Lock() if is_kept_elsewhere(model) else nullcontext()
        if not absent:
            self._check_lm_head()

    @classmethod
    def load(
        cls,
        name: str,
        revision: str | None = None,
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        **placing,
    ) -> "Target":
        """Load a target by folder, Hub id or "tiny"; raises TargetError with the reason.

        placing: `from_pretrained`'s own device_map and max_memory, instead of `device`.
        """
        folder = resolve(name, revision)
        options = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, **options, **placing)
        except UNREADABLE as error:
            raise TargetError(f"cannot load {name}: {in_a_line(error)}") from error
        model = model if placing else model.to(device)
        try:
            target = cls(model, load_tokenizer(folder, trust_remote_code), name)
        except KeyError as error:  # a weight that accelerate keeps under another name only
            raise TargetError(
                f"{name}: target.device_map parts {error} from a matrix that it is one with; give "
                "tied embeddings one place"
            ) from error
        target._identity = identity(name, revision, folder)
        return target

    @classmethod
    def of_files(cls, section: TargetSection, device: str | torch.device, absent: str) -> "Target":
        """What there is to a recipe's target without loading its layers: tokenizer, config,
        identity and two ends. What needs its forward raises TargetError, for the reason `absent`.
        """
        folder, trusted = resolve(section.model, section.revision), section.trust_remote_code
        model = _shell(folder, DTYPES[section.dtype], trusted)
        target = cls(model, load_tokenizer(folder, trusted), section.model, absent)
        target.device = torch.device(device)
        target._identity = identity(section.model, section.revision, folder)
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
        target = cls(copy.deepcopy(model, memo), None, name)
        if folder := _local_folder(model.name_or_path):
            target._identity = identity(name, None, folder)
        return target

    @classmethod
    def of_recipe(
        cls, section: TargetSection, device: str | torch.device | None = None
    ) -> "Target":
        """Load the target that a recipe names, with the chat template it names.

        device: null: the first GPU, or the CPU where there is none.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        source = (section.model, section.revision, section.dtype, device)
        target = cls.load(*source, section.trust_remote_code, **loading_options(section))
        target._use_template(section)
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

    @property
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
    def embedding_weight(self) -> Tensor:
        """The input embedding's matrix, [V, H]."""
        return self._at_hand(self.embedding.weight, 0)

    @property
    def lm_head_weight(self) -> Tensor:
        """lm_head's matrix, [V, H]."""
        return self._at_hand(self.lm_head.weight, 1)

    def _at_hand(self, weight: Tensor, end: int) -> Tensor:
        """One of the two ends on `device`, where the model may not have it."""
        return weight if weight.device == self.device else self._ends[end]

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Copies of embedding and lm_head on `device`; from the weight files, where need be."""
        weights = (self.embedding.weight, self.lm_head.weight)
        if any(weight.is_meta for weight in weights):
            dtype = str(self.dtype).removeprefix("torch.")
            ends = TargetEnds.load(self.name, self.identity()["revision"], dtype, self.device)
            weights = (ends.embedding, ends.lm_head_weight)
        return tuple(weight.to(self.device) for weight in weights)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, from the generation config."""
        eos = self.model.generation_config.eos_token_id
        return frozenset(() if eos is None else eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Run ids [B, T] and return the features [B, T, H] after the final norm."""
        self.check_runs()
        with self._turn:
            hidden = self.model.base_model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=False
            )
        return hidden.last_hidden_state.to(self.device)

    def logits(self, features: Tensor) -> Tensor:
        """lm_head: features [.., H] to logits [.., V]."""
        with self._turn:
            return self.lm_head(features).to(self.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embedding: ids [..] to vectors [.., H]."""
        with self._turn:
            return self.embedding(ids)

    def check_runs(self) -> None:
        """Raise TargetError where the layers are not loaded, with the reason."""
        if self.absent:
            raise TargetError(f"{self.name}: {self.absent}")

    def identity(self) -> dict:
        """Which weights these are (see `identity`)."""
        if self._identity is None:  # a model handed in as an object has no files to hash
            self._identity = {
                "name": self.name,
                "revision": None,
                "weights": hash_weights(self.model),
                "hidden_size": self.hidden_size,
                "vocab_size": self.vocab_size,
            }
        return self._identity

    @torch.inference_mode()
    def _check_lm_head(self) -> None:
        """Refuse models whose logits are not lm_head(feature): scaled or capped ones, mostly."""
        if self.lm_head is None or getattr(self.config, "is_encoder_decoder", False):
            raise TargetError(f"{self.name}: only decoder-only models with lm_head work")
        ids = torch.tensor([[0, 1]], device=self.device)
        expected = self.model(input_ids=ids, use_cache=False).logits
        error = (self.logits(self.features(ids)) - expected).abs().max()
        # A soft cap hardly moves small logits, so it has to be known by its name.
        capped = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
        if capped or not error <= 1e-2 * expected.abs().max():
            raise TargetError(
                f"{self.name} ({self.config.model_type}): its logits are not lm_head(last hidden "
                f"state) but {f'capped at {capped}' if capped else 'scaled or shifted'}, so its "
                "features cannot be drafted; families like Llama, Qwen, OPT and GPT-2 can"
            )


class TargetEnds(nn.Module):
    """The two ends of a target, without its layers: `embed` and `lm_head`, frozen."""

    def __init__(self, embedding: Tensor, lm_head: Tensor, name: str, target_identity: dict):
        super().__init__()
        self.register_buffer("embedding", embedding, persistent=False)  # [V, H]
        self.register_buffer("lm_head_weight", lm_head, persistent=False)  # [V, H]
        self.name = name
        self._identity = target_identity

    @classmethod
    def load(
        cls, name: str, revision: str | None = None, dtype: str = "float32", device: str = "cpu"
    ) -> "TargetEnds":
        """Read two tensors from the target's weight files and nothing else."""
        folder = resolve(name, revision)
        shell = _shell(folder, DTYPES[dtype])
        _check_no_bias(shell.get_output_embeddings(), name)
        ends = (shell.get_input_embeddings().weight, shell.get_output_embeddings().weight)
        # A tied tensor has two names, and a file may hold it under either.
        named = [*shell.named_parameters(remove_duplicate=False)]
        names = [{n for n, p in named if p is end} for end in ends]
        tensors = _read_tensors(folder, set.union(*names), _renaming(shell))
        if getattr(shell.config, "tie_word_embeddings", False):
            names = [set.union(*names)] * 2
        found = [next((tensors[n] for n in alias if n in tensors), None) for alias in names]
        for alias, tensor in zip(names, found, strict=True):
            if tensor is None:
                wanted = " or ".join(sorted(alias))
                raise TargetError(f"{name}: no tensor named {wanted} in {folder}")
        cast = [tensor.to(device=device, dtype=DTYPES[dtype]) for tensor in found]
        return cls(cast[0], cast[1], name, identity(name, revision, folder))

    @classmethod
    def of(cls, target: Target) -> "TargetEnds":
        """The ends of a target that is already in memory (shares its tensors)."""
        _check_no_bias(target.lm_head, target.name)
        ends = (target.embedding_weight.detach(), target.lm_head_weight.detach())
        return cls(*ends, target.name, target.identity())

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab_size(self) -> int:
        return self.lm_head_weight.shape[0]

    def logits(self, features: Tensor) -> Tensor:
        """lm_head: features [.., H] to logits [.., V]."""
        return nn.functional.linear(features, self.lm_head_weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embedding: ids [..] to vectors [.., H]."""
        return nn.functional.embedding(ids, self.embedding)

    def identity(self) -> dict:
        return self._identity


def _shell(folder: Path, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The structure of the model in a folder, its tensors on the meta device."""
    trust = {"trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(folder, **trust)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **trust)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _check_no_bias(lm_head: nn.Module, name: str) -> None:
    if getattr(lm_head, "bias", None) is not None:
        raise TargetError(
            f"{name}: its lm_head has a bias, which no head can be trained against yet; "
            "drafters without training, like prompt lookup, work"
        )


def _renaming(model: PreTrainedModel) -> Callable[[str], str]:
    """What a tensor in a file is called in the model.

    As from_pretrained does it: files of a base model lack its prefix (GPT-2, OPT), and some
    families have changed names since (GPT-NeoX).
    """
    mapping, parameters = get_model_conversion_mapping(model), model.state_dict()
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix = model.base_model_prefix
    return lambda key: rename_source_key(key, renamings, converters, prefix, parameters)[0]


def _read_tensors(folder: Path, names: set[str], rename: Callable[[str], str]) -> dict[str, Tensor]:
    found = {}
    for path in _weight_files(folder):
        try:
            found |= _read_file(path, names, rename)
        except (*UNREADABLE, RuntimeError) as error:
            raise TargetError(f"cannot read {path}: {in_a_line(error)}") from error
    return found


def _read_file(path: Path, names: set[str], rename: Callable[[str], str]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            keys = {rename(key): key for key in file.keys()}  # noqa: SIM118
            return {n: file.get_tensor(keys[n]) for n in names & keys.keys()}
    state = torch.load(path, weights_only=True, mmap=True)
    return {n: t for key, t in state.items() if (n := rename(key)) in names}
