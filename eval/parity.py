"""Run a recipe's drafters in a real engine, and compare them with our decoder.

    python eval/parity.py recipes/tiny.yaml --engine vllm --python V/bin/python
        [--methods falcon_chain,ngram] [--out DIR] [section.key=value ..]

V is the engine's own environment (eval/serve/README.md). Default: every method of the recipe that
was trained and has a route there. Greedy outputs have to be the engine's own without speculation,
tokens per step and acceptance by position ours; where they are not, the first step and the first
tensor that differ are named. Writes DIR/parity.json (default: `output.dir`). Exit code 1 if
something differs.
"""

from specdraft.recipes.entry import entry

import sys
from pathlib import Path

from specdraft.data.prompts import load_prompts
from specdraft.eval.measure.environment import cpu_threads
from specdraft.eval.measure.report import write_json
from specdraft.eval.methods.registry import problems
from specdraft.eval.serve.engine import TRIED, VLLM
from specdraft.eval.serve.parity import check
from specdraft.eval.serve.routes import methods_of
from specdraft.eval.serve.show import print_parity
from specdraft.models.target import Target
from specdraft.recipes.arguments import comma_separated, recipe_parser
from specdraft.recipes.load import load_recipe
from specdraft.recipes.terminal import Screen, say, tell


@entry
def main() -> None:
    """Parse, find the engine, compare method by method."""
    parser = recipe_parser(__doc__)
    parser.add_argument("--engine", choices=("vllm",), required=True)
    parser.add_argument("--python", required=True, help="the engine's own interpreter")
    parser.add_argument("--methods", help="comma-separated; default: what the recipe trained")
    parser.add_argument("--out", type=Path, help="where parity.json goes; default: output.dir")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe, options.overrides, check=problems)
    names = comma_separated("--methods", options.methods) if options.methods else ()
    names = methods_of(recipe, names)
    engine = VLLM.at(options.python)
    if engine.version != TRIED:
        say(f"vLLM {engine.version}: tried with {TRIED}; going on")
    target = Target.of_recipe(recipe.target)
    recipe = recipe.with_eval(methods=("plain",))
    prompts = load_prompts(recipe, target.tokenizer)
    path = (options.out or Path(recipe.output.dir)) / "parity.json"
    console, found = Screen(soft_wrap=True, highlight=False), []
    for name in names:
        with cpu_threads(recipe.eval.threads):
            found.append(check(recipe, target, prompts, engine, name))
        print_parity(found[-1], console)
        write_json({"schema": 1, "recipe": recipe.to_dict(), "methods": found}, path)
    tell(f"wrote {path}")
    sys.exit(0 if all(report["passed"] for report in found) else 1)


if __name__ == "__main__":
    main()
