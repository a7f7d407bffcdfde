"""Train a Falcon head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/falcon.py recipes/tiny.yaml [section.key=value ..]
    python train/falcon.py recipes/vicuna7b.yaml --dry-run

Every stage continues where an earlier run stopped; the results lie in `output.dir`.
"""

from specdraft.recipes.entry import entry

from functools import partial

from specdraft.train.command import run
from specdraft.train.heads import head_kind, train_head


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    kind = head_kind("falcon")
    run(__doc__, partial(train_head, kind), kind.check_methods)


if __name__ == "__main__":
    main()
