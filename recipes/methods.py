"""The names of the decoding methods, as `eval.methods` and `data.drafter` take them."""

from typing import Literal, get_args

Method = Literal[
    "plain",
    "generate",
    "hf_prompt_lookup",
    "prompt_lookup",
    "falcon_chain",
    "falcon_tree",
    "maxgram",
    "ssd",
    "tsd",
    "gsd",
    "rsd_c",
    "rsd_s",
    "specinfer",
    "spectr",
    "hf_assisted",
    "cascade",
    "falcon_maxgram",
    "eagle_chain",
    "eagle_tree",
    "medusa_tree",
]
METHODS: tuple[str, ...] = get_args(Method)
# Draft with a student.
STUDENT_METHODS = ("ssd", "tsd", "gsd", "rsd_c", "rsd_s", "specinfer", "spectr")
# What a recipe measures unless it says more: every method that a Falcon head suffices for.
HEAD_METHODS = METHODS[:6]
# METHOD:WAY decodes a method in another way: padded as vanilla multi-sample decoding does (both,
# or one of its two pads), or with a queue instead of batches that end together.
WAYS = ("padded", "pad_kv", "pad_inputs", "dynamic")
OURS = tuple(name for name in METHODS if not name.startswith(("generate", "hf_")))
Drafting = Literal[OURS]
Measured = Literal[(*METHODS, "padded", *(f"{name}:{way}" for name in OURS for way in WAYS))]
