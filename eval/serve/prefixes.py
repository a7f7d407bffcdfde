"""Features that the target gave once, kept by the tokens they belong to.

An engine's prefix cache spares the target what it has read before, and with it come no features. A
feature depends on the tokens up to its own and on nothing else: so they are kept by these, whole
blocks and the rest behind the last one, least recently used first to go.

Shapes: A tokens of a part, H hidden.
"""

from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

BLOCK = 16  # tokens; engines cache prefixes in multiples of it


class Prefixes:
    """Features of at most `limit` tokens, by the digest of all tokens up to their last."""

    def __init__(self, limit: int):
        self.limit, self.tokens = limit, 0
        self._parts: OrderedDict[bytes, Tensor] = OrderedDict()

    def keep(self, tokens: np.ndarray, parts: list[Tensor]) -> None:
        """Keep features, parts [.., H], of the last of `tokens`, from where a block begins."""
        features = torch.cat(parts) if parts else ()
        begin = len(tokens) - len(features)
        first = -(-begin // BLOCK) * BLOCK
        for start, digest in zip(
            range(first, len(tokens), BLOCK), _digests(tokens, first), strict=True
        ):
            if digest not in self._parts:
                # A copy: a view would keep alive all that it is cut from.
                part = features[start - begin : start - begin + BLOCK].clone()
                self._parts[digest] = part
                self.tokens += len(part)
            self._parts.move_to_end(digest)
        while self.tokens > self.limit:
            self.tokens -= len(self._parts.popitem(last=False)[1])

    def behind(self, tokens: np.ndarray) -> list[Tensor]:
        """What is known of the features of `tokens`, from the last one back without a gap: parts
        [.., H] in the order of positions."""
        found: list[Tensor] = []
        for digest in reversed([*_digests(tokens, 0)]):
            if digest not in self._parts:
                break
            self._parts.move_to_end(digest)
            found.append(self._parts[digest])
        return found[::-1]


def _digests(tokens: np.ndarray, first: int) -> Iterator[bytes]:
    """Yield, for every block from a place on, the digest of all tokens up to its end; the last one
    may be short."""
    digest = blake2b(tokens[:first].tobytes(), digest_size=16)
    for start in range(first, len(tokens), BLOCK):
        digest.update(tokens[start : start + BLOCK].tobytes())
        yield digest.digest()
