"""What a reader of a model card types: to install, to decode in Python, to serve.

Also custom_generate/generate.py of a repository, which is what `generate` runs that is given the
repository's name alone.
"""

import json
from dataclasses import dataclass

from specdraft.recipes.find import TEMPLATE, is_own_template
from specdraft.recipes.schema import Recipe
from specdraft.recipes.sections.target import BUNDLED


@dataclass(frozen=True)
class Card:
    """What the card of one kind of drafter says of it; eval/methods/trained.py has them all."""

    kind: str  # as recipes/find.py calls its folder
    noun: str  # with its article
    tag: str  # of its repository
    call: str  # of eval/custom_generate.py, up to what follows its {repo}
    library: str = "specdraft"  # that loads it
    drafts_trees: bool = False  # static ones


INSTALL = "pip install specdraft    # or, in a clone of it: pip install -c constraints.txt -e .\n"

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.eval.custom_generate import {imports}

name = {source}
model = AutoModelForCausalLM.from_pretrained(name{pin}, dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained(name{pin})
fast = Speculative({drafter})
{inputs}
output = model.generate(**inputs, custom_generate=fast, max_new_tokens=64)
print(tokenizer.decode(output[0]))
"""
TEXT = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
ASKING = "tokenizer.chat_template = read_chat_template({name})\n"
CHAT = """\
chat = [{"role": "user", "content": "Tell me a story about a fox."}]
shape = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
inputs = tokenizer.apply_chat_template(chat, **shape)"""

GENERATE = """\
\"\"\"Decode with this repository's drafter: the tokens of `generate`, in fewer steps of the model.

    model.generate(**inputs, custom_generate="{repo}"{revision}, trust_remote_code=True)
\"\"\"

import inspect
from functools import lru_cache

from specdraft.eval.custom_generate import Speculative, {maker}


@lru_cache
def speculative(source, revision):
    return Speculative({drafter})


def generate(model, revision=None, **arguments):
    # Where this file comes from, a repository or a folder, stands in the call of `generate` alone.
    called = inspect.currentframe().f_back.f_locals
    fast = speculative(called.get("custom_generate") or "{repo}", revision)
    # Not model.generate: of a model that lies beside this file, that is this function.
    return type(model).generate(model, **arguments, custom_generate=fast)
"""
ALONE = """\
output = model.generate(**inputs, custom_generate="{repo}"{revision}, trust_remote_code=True)
"""

PROPOSER = "specdraft.eval.serve.for_vllm.Proposer"
PLUGGED_IN = {  # kind -> method, and what it calls its drafter: eval/serve/README.md
    "falcon": ("falcon_chain", "head"),
    "eagle": ("eagle_chain", "head"),
    "table": ("maxgram", "table"),
}
EXPORTED = {"eagle3": "eagle3", "medusa": "medusa"}  # kind -> vLLM's own method


def usage(recipe: Recipe, card: Card, repo: str, chat: bool) -> str:
    """Return the lines of Python that decode with the drafter; chat: by the target's template."""
    target = recipe.target
    revision = _revision(recipe)
    call = card.call.format(repo=repo)
    bundled = target.model == BUNDLED
    imports = f"Speculative, {call.partition('(')[0]}"
    if bundled:
        imports += "\nfrom specdraft.models.target_files import bundled_target_dir"
    inputs = CHAT if chat else TEXT
    if chat and target.chat_template is not None:  # that the target's own tokenizer has not
        imports += "\nfrom specdraft.models.target_files import read_chat_template"
        name = json.dumps(target.chat_template)
        if is_own_template(target.chat_template) and recipe.hub.repo_id:
            imports += "\nfrom huggingface_hub import hf_hub_download"
            name = f'hf_hub_download("{repo}", "{TEMPLATE}"{revision})'
        inputs = ASKING.format(name=name) + CHAT
    return USAGE.format(
        imports=imports,
        source="bundled_target_dir()" if bundled else json.dumps(target.model),
        pin=f', revision="{target.revision}"' if target.revision else "",
        dtype=target.dtype,
        drafter=f"{call}{revision})",
        inputs=inputs,
    )


def alone(recipe: Recipe) -> str:
    """Return the line of Python that decodes with what the repository `hub.repo_id` brings."""
    return ALONE.format(repo=recipe.hub.repo_id, revision=_revision(recipe))


def serving(recipe: Recipe, card: Card, repo: str) -> str:
    """Return the lines of a shell that serve the target with the drafter in vLLM."""
    target = "models/tiny" if recipe.target.model == BUNDLED else recipe.target.model
    branch = recipe.hub.repo_id and recipe.hub.revision
    pinned = f"{repo}@{branch}" if branch else repo
    lines = []
    if card.kind in PLUGGED_IN:
        method, name = PLUGGED_IN[card.kind]
        length = recipe.maxgram.n if card.kind == "table" else recipe.eval.chain_depth
        config = {"method": "custom_class", "num_speculative_tokens": length, "model": PROPOSER}
        more = {"specdraft": {"method": method, name: pinned}}
        lines = [
            "# into vLLM's environment; in a clone of it: pip install --no-deps .",
            "pip install --no-deps specdraft",
        ]
    elif card.kind in EXPORTED:
        length = recipe.medusa.heads if card.kind == "medusa" else recipe.eval.chain_depth
        config = {"method": EXPORTED[card.kind], "num_speculative_tokens": length}
        config, more = config | {"model": "for_vllm"}, None
        lines += [f"specdraft export {pinned} --engine vllm --out for_vllm"]
    else:
        length, more = recipe.drafting.gamma, None
        config = {"method": "draft_model", "num_speculative_tokens": length, "model": repo}
        config |= {"revision": branch} if branch else {}
    serve = [f"vllm serve {target}", f"    --speculative-config '{json.dumps(config)}'"]
    serve += [f"    --additional-config '{json.dumps(more)}'"] if more else []
    return "\n".join([*lines, " \\\n".join(serve)]) + "\n"


def generate_file(recipe: Recipe, card: Card) -> str:
    """Return custom_generate/generate.py for the repository `hub.repo_id`."""
    maker = card.call.partition("(")[0]
    call = card.call.replace('"{repo}"', "source")
    drafter = f"{call}, revision=revision)"
    named = {"repo": recipe.hub.repo_id, "revision": _revision(recipe)}
    return GENERATE.format(**named, maker=maker, drafter=drafter)


def _revision(recipe: Recipe) -> str:
    """The argument that names the branch that is pushed to; none of the main one."""
    return f', revision="{recipe.hub.revision}"' if recipe.hub.revision else ""
