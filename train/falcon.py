"""Train a Falcon head: conversations -> tokens -> features -> head -> measured head.

    accelerate launch train/falcon.py recipes/tiny.yaml [section.key=value ..]
    python train/falcon.py recipes/vicuna7b.yaml --dry-run

Every stage continues where an earlier run stopped; the results lie in `output.dir`.
"""

from specdraft.recipes.entry import entry

from specdraft.train.heads import run_head


@entry
def main() -> None:
    """Parse, load the recipe, and go through the stages."""
    run_head("falcon", __doc__)


if __name__ == "__main__":
    main()
