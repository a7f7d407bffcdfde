"""Where a run's files go: a folder, and the Hub."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from specdraft.recipes.fields import Section


@dataclass(frozen=True, kw_only=True)
class OutputSection(Section):
    """The folder of a run: checkpoints, the trained drafter, reports."""

    dir: str | None = None  # null: runs/<recipe name>


@dataclass(frozen=True, kw_only=True)
class HubSection(Section):
    """The repository of the Hub that a trained drafter is pushed to."""

    repo_id: str | None = None  # owner/name to push the drafter to; null: do not push
    private: bool = True  # a push is never public by accident
    revision: str | None = None  # branch to push to, made if needed; null: main
    license: str | None = None  # of the weights, for the model card, e.g. apache-2.0

    def conflicts(self) -> Iterator[str]:
        """Yield a repository id that the Hub does not take."""
        if self.repo_id is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo_id):
            yield self.complaint("repo_id", "must be owner/name, e.g. you/falcon-tiny")
        elif self.repo_id is not None:
            try:
                validate_repo_id(self.repo_id)
            except HFValidationError as error:
                what = str(error).removesuffix(f": '{self.repo_id}'.")
                yield self.complaint("repo_id", f"the Hub takes no such name ({what}); rename it")
