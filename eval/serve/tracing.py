"""What a head computes for its first draft, tensor by tensor, wherever it runs.

The same hooks on a head serve our decoder and a head inside an engine; what an engine's own module
computes is brought to the same names (eval/serve/job.py). All in units of the target's own
embeddings and features, whatever scales a head divides by.

    embeddings   [T, H], of the tokens one ahead
    features     [T, H]; of EAGLE-3 [T, n * H], normed as its config says
    fused        [T, H]
    rotary       [T, D / 2], cosines of the angles; of the first pair, the position is the angle
    query, key   [heads, Q, D] and [kv_heads, T, D], rotated
    value        [kv_heads, T, D]
    attended     [Q, H]
    normed       [Q, H], what the MLP reads
    output       [Q, H], of the first layer
    draft        the tokens

Shapes: T inputs read, Q queries, H hidden, n layers that EAGLE-3 reads, D head dimension.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from specdraft.models.eagle3 import Eagle3Head
from specdraft.models.falcon import FalconHead

Trace = dict[str, Tensor]


@contextmanager
def tracing(head: FalconHead | Eagle3Head) -> Iterator[Trace]:
    """Note what the first pass of a head computes while the context is open."""
    trace, scale, layer = {}, head.config.feature_scale, head.layers[0]
    if isinstance(head, Eagle3Head):
        hooks = [
            head.fuse.register_forward_hook(
                lambda _, args, __: note(trace, embeddings=args[0][0].chunk(2, -1)[0])
            ),
            head.fc.register_forward_hook(
                lambda _, args, states: note(trace, features=args[0], fused=states)
            ),
        ]
    else:
        hooks = [head.fuse.register_forward_hook(_fused(trace, head.config.embed_scale, scale))]
    hooks += [
        layer.register_forward_pre_hook(_attention(trace)),
        layer.out.register_forward_pre_hook(lambda _, args: note(trace, attended=args[0][0])),
        layer.gate_up.register_forward_pre_hook(lambda _, args: note(trace, normed=args[0][0])),
        layer.register_forward_hook(lambda _, __, output: note(trace, output=output[0] * scale)),
    ]
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield trace


def note(trace: Trace, **tensors: Tensor) -> None:
    """Add tensors to a trace, as float32 on the CPU: of each name the first."""
    for name, tensor in tensors.items():
        trace.setdefault(name, tensor.detach().float().cpu().clone())


def _fused(trace: Trace, embed_scale: float, feature_scale: float) -> Callable:
    def hook(_, args: tuple, output: tuple) -> None:
        embeddings, features = args[0][0].chunk(2, -1)
        note(trace, embeddings=embeddings * embed_scale, features=features * feature_scale)
        note(trace, fused=output[0][0] * feature_scale)

    return hook


def _attention(trace: Trace) -> Callable:
    """A hook that notes angles, and what the attention of the layer is asked."""

    def hook(_, args: tuple) -> tuple:
        queries, rope, number, attend, *source = args
        cos = (source[0][1] if source and source[0] else rope)[0]
        note(trace, rotary=cos[0, 0, :, : cos.shape[-1] // 2])

        def noted(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            note(trace, query=query[0], key=key[0], value=value[0])
            return attend(layer, query, key, value)

        return (queries, rope, number, noted, *source)

    return hook
