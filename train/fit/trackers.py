"""Where a run's figures go beside log.jsonl: accelerate's trackers, named by `train.trackers`.

tensorboard, the default, writes below output.dir. The others take project, folder and credentials
from their own environment (WANDB_MODE=offline, MLFLOW_TRACKING_URI, ..), and their packages are not
installed with this one.
"""

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from specdraft.recipes.errors import RecipeError, in_a_line
from specdraft.recipes.schema import Recipe
from specdraft.recipes.terminal import say

BOARD = "tensorboard"


def check_trackers(recipe: Recipe) -> None:
    """Raise RecipeError for a tracker whose package is not installed."""
    there = {tracker.value for tracker in get_available_trackers()}
    if missing := [name for name in recipe.train.trackers if name not in there]:
        names = ", ".join(missing)
        raise RecipeError(
            f"train.trackers: no package for {names} is installed; pip install "
            f"{' '.join(missing)}, or leave it out of train.trackers"
        )


class Trackers:
    """The trackers of one run; the first rank starts, feeds and finishes them.

    One that fails while training goes on is left out from there: figures are in log.jsonl, too.
    """

    def __init__(self, accelerator: Accelerator, recipe: Recipe):
        self.accelerator, self.recipe = accelerator, recipe
        self.running: list[GeneralTracker] = accelerator.trackers

    def start(self, step: int) -> None:
        """Open every tracker for what follows `step`.

        Raises: RecipeError for one that does not start, e.g. for want of a login or a network.
        """
        recipe = self.recipe
        try:
            # Of a run that is resumed, tensorboard forgets what it is about to be told again.
            resumed = {BOARD: {"purge_step": step + 1}}
            self.accelerator.init_trackers(recipe.name, init_kwargs=resumed)
            for tracker in self.running:
                if tracker.name != BOARD:  # which would open one more run for the settings
                    tracker.store_init_configuration(_flat(recipe))
        except Exception as error:
            raise RecipeError(
                f"train.trackers = {list(recipe.train.trackers)}: a tracker fails to start "
                f"({in_a_line(error, kind=True)}); check its settings, or leave it out"
            ) from error

    def log(self, values: dict[str, float], step: int) -> None:
        """Give every tracker the figures of a step."""
        for tracker in [*self.running]:
            try:
                tracker.log(values, step=step)
            except Exception as error:
                self.running.remove(tracker)
                _warn(tracker, "takes no more figures", error)

    def finish(self) -> None:
        """Close all of them, so that another training by the same accelerator starts with none."""
        while self.running:
            tracker = self.running.pop()
            try:
                tracker.finish()
            except Exception as error:
                _warn(tracker, "is not closed", error)


def _warn(tracker: GeneralTracker, what: str, error: Exception) -> None:
    say(f"warning: {tracker.name} {what} ({in_a_line(error, kind=True)})")


def _flat(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """Return a recipe as `section.key: value`, of the types that every tracker takes."""
    settings = {
        f"{section}.{key}": value
        for section, keys in recipe.to_dict().items()
        if isinstance(keys, dict)
        for key, value in keys.items()
    }
    simple = (int, float, bool, str)
    return {key: v if isinstance(v, simple) else str(v) for key, v in settings.items()}
