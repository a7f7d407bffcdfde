"""Find the best setting of a drafter on this machine, on prompts that no report measures.

    python eval/tune.py recipes/tiny_cascade.yaml [--method ssd] [--by swi] [--candidates 24]
        [--prompts 16] [--out FILE.yaml] [section.key=value ..]

Successive halving (eval/measure/tuning.py) by wall-clock over plain decoding or by SWI
with measured costs. SWI leaves out that verifying longer drafts takes longer, and that Max-Gram
takes any time at all.
Writes the best setting as a part of a recipe, which any command takes after the recipe:

    python eval/bench.py recipes/tiny_cascade.yaml runs/tiny_cascade/tuned_cascade.yaml
"""

from pathlib import Path

import yaml

from specdraft.data.prompts import tuning_prompts
from specdraft.eval.drafters.registry import METHODS, load_trained, problems
from specdraft.eval.measure.tuning import (
    FIRST,
    Scorer,
    overrides,
    parse_tuning,
    recipe_part,
    sample_settings,
    successive_halving,
)
from specdraft.models.target import Target
from specdraft.recipes.arguments import recipe_parser
from specdraft.recipes.errors import entry
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import Screen


@entry
def main() -> None:
    """Parse, load, search, write the best setting."""
    parser = recipe_parser(__doc__, "tiny_cascade")
    tunable = [row.name for row in METHODS.values() if row.tuned]
    parser.add_argument("--method", default="cascade", help=f"one of {', '.join(tunable)}")
    parser.add_argument("--out", type=Path, help="default: output.dir/tuned_METHOD.yaml")
    options = parse_tuning(parser, candidates=24)
    chosen = [*options.overrides, f"eval.methods=[{options.method}]"]
    recipe = load_recipe(options.recipe, chosen, check=problems)
    candidates = sample_settings(recipe, options.method, options.candidates, recipe.eval.seed)
    target = Target.of_recipe(recipe.target)
    prompts = tuning_prompts(recipe, target.tokenizer, options.prompts)
    trained = load_trained(recipe, target)
    measure = Scorer(recipe, options.method, target, trained, prompts, options.by)
    console = Screen(soft_wrap=True)
    for budget, scored in successive_halving(candidates, measure, FIRST, len(prompts)):
        score, best = scored[0]
        console.print(f"{len(scored)} settings, {budget} prompts: {options.by} {score:.3f}, {best}")
    out = options.out or Path(recipe.output.dir) / f"tuned_{options.method}.yaml"
    part = recipe_part(recipe, best)
    out.parent.mkdir(parents=True, exist_ok=True)
    note = f"# {options.method} of {recipe.name}: {options.by} {score:.3f} on {budget} prompts\n"
    out.write_text(note + yaml.safe_dump(part, default_flow_style=None))
    console.print(f"wrote {out}: {' '.join(map(repr, overrides(part)))}")


if __name__ == "__main__":
    main()
