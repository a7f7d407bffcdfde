"""Try every family of transformers that has a causal LM, tiny and random, and write the table.

    python eval/survey.py [FAMILY ..] [--out eval/families] [--seconds 60]

Takes minutes. Writes OUT/families.json, and goes on behind what the same version of transformers
has there (delete it to try all again); and OUT/families.md.
"""

from specdraft.recipes.entry import entry

import logging
from pathlib import Path

from specdraft.eval.checkup.survey import kept, page, survey
from specdraft.eval.checkup.tiny_families import families
from specdraft.recipes.arguments import Parser
from specdraft.recipes.terminal import say, tell


@entry
def main() -> None:
    """Parse, try one family after the other, write the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="model types; default: all")
    parser.add_argument("--out", type=Path, default=Path("eval/families"), help="a folder")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one family")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    names, file = options.families or families(), options.out / "families.json"
    for row in survey(file, names, options.seconds):
        say(f"{row['family']}: {row['result']} {row['why']}")
    text = page(kept(file), "python eval/survey.py")
    (options.out / "families.md").write_text(text, encoding="utf-8")
    tell(f"wrote {options.out / 'families.md'}")


if __name__ == "__main__":
    main()
