"""Drafters of ours inside vLLM, as its `custom_class`: everything that is vLLM's own.

    vllm serve MODEL \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 9,
                               "model": "specdraft.eval.serve.for_vllm.Proposer"}' \\
        --additional-config '{"specdraft": {"method": "falcon_chain", "head": "runs/tiny/falcon"}}'

vLLM (0.32) tells such a class which tokens each row of its batch has, and no features. Those are
seen by a hook on the model that it serves: the hidden states behind the final norm of all tokens of
a step, and behind the inner layers that a head reads, their positions, and where each row begins,
in the order of the rows. What becomes of rows is the matter of eval/serve/rows.py. A model that a
CUDA graph replays as a whole runs no hook: drafters that read features want `"cudagraph_mode":
"PIECEWISE"`, or eager mode.

Shapes: N packed tokens of a step, R rows, A new tokens of a row, H hidden, n inner layers that are
read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from specdraft.eval.methods.registry import Setup, make_drafter
from specdraft.eval.methods.trained import KINDS, Trained
from specdraft.eval.serve.rows import RowStep, ServedRows
from specdraft.eval.serve.served_model import ServedModel
from specdraft.models.falcon import FalconHead
from specdraft.models.feature_layers import Layers
from specdraft.models.shapes import TargetShape
from specdraft.recipes.errors import RecipeError, TargetError
from specdraft.recipes.fields import nearest, shown
from specdraft.recipes.load import from_dict
from specdraft.recipes.schema import Recipe

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTIONS = "specdraft"  # the key of vLLM's additional_config that is ours
MEMORY = 2 << 30  # bytes of keys and values that a head or students may hold of all rows
# The methods whose drafts are chains, and what says how long these are.
CHAINS: dict[str, tuple[str, str] | None] = {
    "falcon_chain": ("eval", "chain_depth"),
    "eagle_chain": ("eval", "chain_depth"),
    "prompt_lookup": ("eval", "lookup_copy"),
    "maxgram": ("maxgram", "n"),
    "ssd": ("drafting", "gamma"),
    "cascade": None,
}


@dataclass(frozen=True)
class Seen:
    """What the hook has seen of a step."""

    features: Tensor  # [N, (1 + n) * H]
    positions: Tensor  # [N]
    starts: Tensor  # [R + 1], where each row begins


class Proposer:
    """One of our methods that draft chains, for all rows of a batch at once.

    additional_config["specdraft"] names the method, what is trained for it by kind (folders or Hub
    ids) and, in `settings`, sections of a recipe. Raises RecipeError for another option, and
    TargetError where what is trained does not fit the served model, naming both, or where the
    features of this model cannot be seen.
    """

    def __init__(self, vllm_config: "VllmConfig"):
        self.config = vllm_config
        self.length = vllm_config.speculative_config.num_speculative_tokens
        options = (vllm_config.additional_config or {}).get(OPTIONS, {})
        if not isinstance(options, dict):
            where = f'additional_config["{OPTIONS}"] = {shown(options)}'
            raise RecipeError(f'{where}: give an object, e.g. {{"head": FOLDER}}')
        options = dict(options)
        self.method = options.pop("method", "falcon_chain")
        self.settings = options.pop("settings", {})
        self.sources = options
        check_options(self.method, self.settings, self.sources)
        self.rows: ServedRows | None = None
        self.seen: Seen | None = None
        self.layers: Layers = ()  # of the model, that the head reads beside its last

    # -- what vLLM calls -------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """Make the drafter for the model that is served."""
        served, scheduler = ServedModel(target_model, self.config), self.config.scheduler_config
        trained = Trained(
            **{kind: KINDS[kind].fetch(of, None, served) for kind, of in self.sources.items()}
        )
        capacity, slots = self.config.model_config.max_model_len, scheduler.max_num_seqs
        if trained.head is not None:
            check_sizes(trained.head, served)
        if row := row_bytes(trained, capacity):
            slots = min(slots, MEMORY // row)
        if not slots:
            raise TargetError(
                f"a row of {capacity} tokens takes {self.method} more than {MEMORY >> 30} GiB; "
                f"serve {served.name} with a smaller max_model_len"
            )
        recipe = recipe_of(self.method, self.length, self.settings)
        drafter = make_drafter(self.method, Setup(recipe, served, trained, slots, capacity))
        self.rows = ServedRows(drafter, slots)
        if not drafter.from_tokens:
            self._check_hook(served)
            self.layers = drafter.feature_layers
            served.show_layers(self.layers)
            target_model.register_forward_hook(self._see, with_kwargs=True)

    def propose(
        self,
        sampled_token_ids: list[list[int]],  # of each row; none where its prompt goes on
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,  # [more rows, more tokens]
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return what to verify behind each row, at most `num_speculative_tokens` of it."""
        counts = num_tokens_no_spec[: len(sampled_token_ids)].tolist()
        tokens = [token_ids_cpu[row, :count].copy() for row, count in enumerate(counts)]
        if self.rows.drafter.from_tokens:
            steps = [
                RowStep(known, len(known) - len(fresh) - 1, None, bool(fresh))
                for known, fresh in zip(tokens, sampled_token_ids, strict=True)
            ]
        elif self.seen is None:
            return [[] for _ in tokens]
        else:
            steps = self._with_features(tokens, sampled_token_ids)
        return [draft[: self.length] for draft in self.rows.step(steps)]

    # -- the features ----------------------------------------------------------------------------

    def _see(
        self,
        model: nn.Module,
        args: tuple,
        kwargs: dict,
        output: Tensor | tuple[Tensor, list[Tensor]],  # the latter where layers are shown
    ) -> Tensor:
        """Keep what a step shows; return what the model would return without us."""
        from vllm.forward_context import get_forward_context  # not there where it is tested

        last, inner = output if self.layers else (output, [])
        metadata = get_forward_context().attn_metadata
        if metadata:  # none in a run that warms up, or measures memory
            starts = next(iter(metadata.values())).query_start_loc
            self.seen = Seen(self.wide(last, inner), kwargs["positions"], starts)
        return last

    def wide(self, last: Tensor, inner: list[Tensor]) -> Tensor:
        """Put the layers, of which vLLM gives the lowest first, in the order of the head's."""
        shown = dict(zip(sorted(self.layers), inner, strict=True))
        return torch.cat((last, *(shown[layer] for layer in self.layers)), -1)

    def _with_features(self, tokens: list[np.ndarray], sampled: list[list[int]]) -> list[RowStep]:
        """Cut what was seen into rows: of each the features of tokens whose next one is known."""
        seen, self.seen = self.seen, None
        starts = seen.starts[: len(tokens) + 1].tolist()
        firsts = seen.positions[seen.starts[: len(tokens)].long()].tolist()
        steps = []
        for row, (known, first) in enumerate(zip(tokens, firsts, strict=True)):
            count = min(starts[row + 1] - starts[row], len(known) - 1 - first)
            # A copy: the next step may write where these are.
            features = seen.features[starts[row] : starts[row] + count].clone()
            steps.append(RowStep(known, first, features, bool(sampled[row])))
        return steps

    def _check_hook(self, served: ServedModel) -> None:
        """Raise TargetError where the hook would see nothing, or not the whole of it."""
        graphs = self.config.compilation_config.cudagraph_mode
        if graphs is not None and graphs.has_full_cudagraphs():
            raise TargetError(
                f"{served.name}: cudagraph_mode {graphs.name} replays the model and shows no "
                'features; serve it with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
            )
        if self.config.parallel_config.world_size > 1:
            raise TargetError(
                f"{served.name}: the features of a model in several processes are not shown; serve "
                "it from one, or draft without a head"
            )


# -- what a user asks for --------------------------------------------------------------------------


def check_options(method: str, settings: dict, sources: dict) -> None:
    """Raise RecipeError for options that are none."""
    where = f'additional_config["{OPTIONS}"]'
    if method not in CHAINS:
        raise RecipeError(
            f"{where}: method {shown(method)} is none that drafts chains, all that vLLM verifies; "
            f"known: {', '.join(CHAINS)}"
        )
    for key, source in sources.items():
        if key not in KINDS:
            known = ["method", "settings", *KINDS]
            raise RecipeError(
                f"{where}: {shown(key)} is no option; known: {', '.join(known)}; nearest is "
                f"{nearest(str(key)[:100], known)}"
            )
        several = source if isinstance(source, list) and key == "cascade" else [source]
        if not all(isinstance(one, str) for one in several):
            raise RecipeError(f"{where}: {key} = {shown(source)}: give a folder or a Hub id")
    if not isinstance(settings, dict) or not all(isinstance(s, dict) for s in settings.values()):
        raise RecipeError(f"{where}: settings = {shown(settings)}: give sections of a recipe")


def recipe_of(method: str, length: int, settings: dict) -> Recipe:
    """The recipe of a method that drafts chains of a length."""
    base = {"name": method, "data": {"sources": ["tiny"]}, "train": {"steps": 1}}
    tree = base | {section: dict(values) for section, values in settings.items()}
    if (place := CHAINS[method]) is not None:
        section, key = place
        tree[section] = {key: length} | tree.get(section, {})
    return from_dict(tree)


def check_sizes(head: FalconHead, served: ServedModel) -> None:
    """Raise TargetError for a head of other sizes, which names no target of its own."""
    sizes = (head.config.hidden_size, head.config.vocab_size)
    if sizes != (served.hidden_size, served.vocab_size):
        whose = head.config.target.get("name", "another target")
        raise TargetError(
            f"this head was trained for {whose} (hidden size {sizes[0]}, {sizes[1]} tokens), not "
            f"for {served.name} (hidden size {served.hidden_size}, {served.vocab_size} tokens)"
        )


def row_bytes(trained: Trained, capacity: int) -> int:
    """Bytes of the keys and values of a row: of a head in float32, of students in their dtype."""
    held = 0
    if trained.head is not None:
        config = trained.head.config
        held += 4 * 2 * config.layers * config.kv_heads * config.head_dim
    for student in trained.students:
        shape = TargetShape.of(student.config.get_text_config())
        held += student.dtype.itemsize * shape.cached_numbers
    return held * capacity
