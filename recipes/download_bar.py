"""The bar of a download from the Hub: only of one that a user waits for."""

from typing import Any

from huggingface_hub.utils import tqdm

MOMENT = 1.0  # seconds; what lies in the cache, and a config, are there sooner


class DownloadBar(tqdm):
    """The Hub's bar, drawn after a moment only."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"delay": MOMENT, **options})

    def display(self, *args: Any, **options: Any) -> bool | None:
        """Draw it; a new description would draw one that has to wait, too."""
        waited = self._time() - self.start_t
        return super().display(*args, **options) if waited >= MOMENT else True
