"""The colour of a method, the same in every plot of every report, on the page and in PNGs.

A family has a hue: falcon blue, eagle orange, eagle3 pink, medusa green, tables yellow, what drafts
with nothing grey. All are seen on white and on the dark page.
"""

from collections.abc import Iterable
from itertools import cycle

COLOURS = {
    "plain": "#76818c", "generate": "#99a3ad",
    "hf_prompt_lookup": "#b3a06a", "prompt_lookup": "#c79a1b", "maxgram": "#957509",
    "ngram_dynamic": "#7d8a1f",
    "falcon_tree": "#1f77c4", "falcon_chain": "#54a5e0", "falcon_dynamic": "#6f7fe0",
    "falcon_maxgram": "#2b93a6", "falcon_ngram": "#3f5fb0",
    "eagle_tree": "#d55e00", "eagle_chain": "#ee9350", "eagle_dynamic": "#b9694a",
    "eagle3_tree": "#b54f99", "eagle3_chain": "#d889bf", "eagle3_dynamic": "#a26fb8",
    "medusa_tree": "#0c9468", "medusa_chain": "#55b591",
    "ssd": "#8663d0", "ssd_dynamic": "#a68ce0", "tsd": "#169aa8", "gsd": "#cc4b82",
    "rsd_c": "#5c9a36", "rsd_s": "#86ae4c", "specinfer": "#d0782a", "spectr": "#a4714a",
    "hf_assisted": "#9a9a45", "cascade": "#cf4b4b",
}  # fmt: skip
SERIES = (  # of what is no method: depths, rows
    "#1f77c4", "#d55e00", "#0c9468", "#b54f99", "#c79a1b", "#54a5e0", "#76818c", "#957509",
)  # fmt: skip
OTHERS = ("#7c6f9c", "#4f8f86", "#a8826f", "#6f8fb0", "#93955f", "#ad7a94")  # of no row of ours
GREYED = {"dynamic": 0.3, "padded": 0.45, "pad_kv": 0.6, "pad_inputs": 0.75}  # METHOD:WAY
GREY = "#8b959f"


def method_colours(methods: Iterable[str]) -> dict[str, str]:
    """Return each method's colour, greyer for one that is decoded in another way (METHOD:WAY)."""
    others, colours = cycle(OTHERS), {}
    for name in dict.fromkeys(methods):
        base, _, way = name.partition(":")
        colour = COLOURS.get(base) or next(others)
        colours[name] = mixed(colour, GREY, GREYED.get(way, 0.0))
    return colours


def mixed(colour: str, other: str, share: float) -> str:
    """A colour on the way to another: share 0 is the first, 1 the other."""
    pairs = zip(bytes.fromhex(colour[1:]), bytes.fromhex(other[1:]), strict=True)
    return "#" + bytes(round(a + (b - a) * share) for a, b in pairs).hex()
