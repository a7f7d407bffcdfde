"""The frozen model that is sped up."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from specdraft.recipes.fields import Interval, Section

BUNDLED = "tiny"  # the target that comes with the package
Device = Annotated[int, Interval(0, 1023)]  # a GPU by its number
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TargetSection(Section):
    """The target: a causal LM of transformers, never trained here, and where its weights lie."""

    model: str = BUNDLED  # "tiny" (bundled), a directory, or a Hub id
    revision: str | None = None  # Hub branch, tag or commit
    dtype: Dtype = "float32"  # of the frozen weights and of decoding
    trust_remote_code: bool = False
    chat_template: str | None = None  # a Jinja file, or "vicuna" (bundled); null: the tokenizer's
    # Of a target that does not fit one device, as transformers' from_pretrained takes them: a way
    # to spread it, or the devices of its modules (a GPU's number, cpu, disk). null: one device.
    device_map: Literal["auto", "balanced", "sequential"] | dict[str, Device | str] | None = None
    max_memory: dict[str, str] | None = None  # of a device at most, e.g. {0: 40GiB, cpu: 100GiB}
    # On a GPU: whether forwards of a few tokens are captured, once each, and replayed as a whole;
    # what cannot be is launched one operation after the other, as without.
    cuda_graphs: bool = True
    # On a CPU: GiB, of each model that takes part, for copies of weights by which a few tokens are
    # multiplied faster; 0: none.
    prepack_gib: Annotated[float, Interval(0, 10_000)] = 2.0

    def conflicts(self) -> Iterator[str]:
        """Yield limits of memory without a device map, which is what reads them."""
        if self.max_memory is not None and not isinstance(self.device_map, str):
            needed = "needs target.device_map=auto, balanced or sequential"
            yield self.complaint("max_memory", needed)
