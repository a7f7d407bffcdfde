"""The model card of a drafter: what it is, for whose tokens, how good, and how to use it.

Everything is read from the run: its recipe, the drafter's config, report.json.
"""

from dataclasses import dataclass

import yaml

from specdraft.models.hub import is_hub_id
from specdraft.recipes.find import HEADS
from specdraft.recipes.fitted_tree import Fit
from specdraft.recipes.schema import Recipe
from specdraft.recipes.sections.target import BUNDLED
from specdraft.recipes.static_trees import AUTO, known_trees

PICTURE = "training_curve.png"


@dataclass(frozen=True)
class Card:
    """What the card of one kind of drafter says of it; eval/drafters/trained.py has them all."""

    kind: str  # as recipes/find.py calls its folder
    noun: str  # with its article
    tag: str  # of its repository
    call: str  # of eval/custom_generate.py, up to what follows its {repo}
    library: str = "specdraft"  # that loads it
    drafts_trees: bool = False  # static ones


COLUMNS = {
    "tokens_per_step": ("tokens/step", ".2f"),
    "acceptance_rate": ("acceptance rate", ".2f"),
    "drafted_per_step": ("nodes/step", ".1f"),
    "speedup": ("x plain", ".2f"),
    "speedup_over_generate": ("x generate", ".2f"),
}

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.eval.custom_generate import {imports}

name = {source}
model = AutoModelForCausalLM.from_pretrained(name{pin}, dtype="{dtype}")
tokenizer = AutoTokenizer.from_pretrained(name{pin})
fast = Speculative({drafter})
inputs = tokenizer("Once upon a time", return_tensors="pt")
output = model.generate(**inputs, custom_generate=fast, max_new_tokens=64)
print(tokenizer.decode(output[0]))
"""

# custom_generate/generate.py of a repository: what `generate` runs that is given the repository.
GENERATE = """\
\"\"\"Decode with this repository's drafter: the tokens of `generate`, in fewer steps of the model.

    model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)
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
output = model.generate(**inputs, custom_generate="{repo}", trust_remote_code=True)
"""


def model_card(
    recipe: Recipe,
    card: Card,
    config: dict,  # the drafter's own
    report: dict | None,  # report.json
    picture: bool,  # whether PICTURE lies beside the card
    fit: Fit | None = None,  # of the tree beside the weights
) -> str:
    """Return README.md for the repository `hub.repo_id`."""
    parts = [
        f"---\n{yaml.safe_dump(metadata(recipe, card), sort_keys=False)}---",
        f"# {recipe.hub.repo_id}",
        f"{card.noun} that drafts for **{recipe.target.model}** in speculative "
        "decoding: the target checks every drafted token, so its output stays what it would have "
        "been alone. "
        "Trained and measured with specdraft; `recipe.yaml` makes it again.",
        facts(recipe, card, config, fit),
        "## Use",
        f"```python\n{usage(recipe, card)}```",
        "Or, with nothing but specdraft installed (`trust_remote_code` runs "
        "`custom_generate/generate.py` of this repository):",
        f"```python\n{ALONE.format(repo=recipe.hub.repo_id)}```",
        "## Results",
        results(report),
    ]
    if picture:
        parts += ["## Training", f"![training curve]({PICTURE})"]
    return "\n\n".join(parts) + "\n"


def metadata(recipe: Recipe, card: Card) -> dict:
    """Return what the Hub reads from a card's front matter."""
    names = (recipe.target.model, *recipe.data.sources)
    base, *datasets = (name if name != BUNDLED and is_hub_id(name) else None for name in names)
    found = {
        "library_name": card.library,
        "license": recipe.hub.license,
        "base_model": base,
        "datasets": [name for name in datasets if name],
        "tags": ["speculative-decoding", "draft-model", card.tag],
    }
    return {key: value for key, value in found.items() if value}


def facts(recipe: Recipe, card: Card, config: dict, fit: Fit | None) -> str:
    """Return target, data and licence as a table."""
    target, data = recipe.target, recipe.data
    weights = config.get("target", {}).get("weights")
    rows = {
        "target": f"{target.model}, revision {target.revision or 'main'}, decoded in "
        + target.dtype + (f", weights {weights[:12]}" if weights else ""),
        "data": f"{', '.join(data.sources)}; answers by the {data.answers}, up to "
        f"{data.max_length} tokens"
        + (f", {data.limit} conversations at most" if data.limit else ""),
        **({"head": head_facts(config)} if card.kind in HEADS else {}),
        **({"tree": tree_facts(fit)} if fit else {}),
        "licence": recipe.hub.license
        or "none was chosen (`hub.license`); that of the target may bind what is made from it",
    }  # fmt: skip
    return "\n".join(["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())])


def head_facts(config: dict) -> str:
    """Return what a Falcon or EAGLE head's config says of its form, in a line."""
    size, fusion = config.get("block_size", 1), config.get("fusion", "of layers (EAGLE-3)")
    parts = [f"{size} token{'s' * (size > 1)} a pass", f"fusion {fusion}"]
    if size > 1:
        parts += [f"slots read {config['reads']}, coupling {config['coupling']}"]
    if layers := config.get("feature_layers"):
        parts += [f"reads layers {', '.join(map(str, layers))} of the target, too"]
    if drafted := config.get("draft_vocab"):
        parts += [f"drafts among {drafted:,} of {config['vocab_size']:,} tokens"]
    return "; ".join(parts)


def tree_facts(fit: Fit) -> str:
    """Return what the tree beside the weights is, and what it brought where it was fitted."""
    own, rows = fit.tried()[0], f"{fit.rows} row{'s' * (fit.rows > 1)}"
    return (
        f"{own}, fitted on {fit.place} for {rows}: {own.measured:.2f} x plain decoding there, "
        f"{own.expected:.2f} x expected; for another machine: `python eval/fit.py recipe.yaml`"
    )


def usage(recipe: Recipe, card: Card) -> str:
    """Return the lines of Python that decode with the drafter."""
    target = recipe.target
    revision = f', revision="{recipe.hub.revision}"' if recipe.hub.revision else ""
    call, tree = card.call.format(repo=recipe.hub.repo_id), tree_name(recipe)
    call += f', tree="{tree}"' if card.drafts_trees and tree != AUTO else ""
    bundled = target.model == BUNDLED
    source = "bundled_target_dir()" if bundled else repr(target.model).replace("'", '"')
    pin = f', revision="{target.revision}"' if target.revision else ""
    imports = f"Speculative, {call.partition('(')[0]}"
    if bundled:
        imports += "\nfrom specdraft.models.target_files import bundled_target_dir"
    drafter = f"{call}{revision})"
    return USAGE.format(
        imports=imports, source=source, pin=pin, dtype=target.dtype, drafter=drafter
    )


def generate_file(recipe: Recipe, card: Card) -> str:
    """Return custom_generate/generate.py for the repository `hub.repo_id`."""
    maker = card.call.partition("(")[0]
    call, tree = card.call.replace('"{repo}"', "source"), tree_name(recipe)
    call += f', tree="{tree}"' if card.drafts_trees and tree != AUTO else ""
    drafter = f"{call}, revision=revision)"
    return GENERATE.format(repo=recipe.hub.repo_id, maker=maker, drafter=drafter)


def tree_name(recipe: Recipe) -> str:
    """Return a bundled tree's name, or AUTO: one that goes along with the head."""
    return recipe.eval.tree if recipe.eval.tree in known_trees() else AUTO


def results(report: dict | None) -> str:
    """Return the runs of a report as a table, and what its columns mean."""
    if report is None:
        return "Not measured yet."
    runs, where = report["runs"], report["environment"]
    names = [name for name, _ in COLUMNS.values()]
    lines = [f"| method | {' | '.join(names)} | identical |", "|---" * (len(names) + 2) + "|"]
    for run in runs:
        cells = [_shown(run.get(key), form) for key, (_, form) in COLUMNS.items()]
        same = "-" if run["identical"] is None else f"{run['identical']}/{run['outputs']}"
        lines.append(f"| `{run['method']}` | {' | '.join(cells)} | {same} |")
    first = max(runs, key=lambda run: run["outputs"])  # one that failed on none, if there is
    lines += [
        "",
        f"{first['outputs']} prompts of {first['prompt_set']}, up to {first['max_new_tokens']} new "
        f"tokens, temperature {first['temperature']}, batch {first['batch_size']}, "
        f"{first['dtype']}; {where['gpu'] or where['cpu']}, torch {where['torch']}, transformers "
        f"{where['transformers']}. A step is one target forward; *identical* counts outputs that "
        "equal plain decoding token for token.",
    ]
    return "\n".join(lines)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
