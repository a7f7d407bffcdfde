"""The Hugging Face Hub: a drafter goes there in one commit, and comes back as a folder.

    push(files, "owner/name", private=True)     # every file, or none
    fetch("owner/name@v2")                      # the folder of a snapshot; a local folder as it is

Credentials are huggingface_hub's own affair (`hf auth login`, HF_TOKEN), and so is which Hub it is
(HF_ENDPOINT). Nothing here asks the network about a folder that exists.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    snapshot_download,
)
from huggingface_hub.utils import filter_repo_objects

from specdraft.models.weights.checksums import SUMS
from specdraft.recipes.download_bar import DownloadBar
from specdraft.recipes.errors import HubError, in_a_line
from specdraft.recipes.find import TEMPLATE
from specdraft.recipes.hub_name import split_revision
from specdraft.recipes.interrupt import abandonable
from specdraft.recipes.schema import HubSection
from specdraft.recipes.static_trees import TREE

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
PAGE = "README.md"  # the card
LATER = "python models/push.py RUN OWNER/NAME"


def is_hub_id(name: str | Path) -> bool:
    """Whether a name can only be a repository's: owner/name, with @revision or without, and no
    folder lies there.

    A Path is always a folder.
    """
    if not isinstance(name, str) or name.startswith((".", "/", "~")):
        return False
    return split_revision(name)[0].count("/") == 1 and not Path(name).exists()


def fetch(name: str | Path, revision: str | None = None) -> Path:
    """Return the folder of a drafter: a local one as it is, or a snapshot of a Hub repository.

    Raises HubError when the Hub does not give it, or a name has another revision than `revision`.
    """
    if not is_hub_id(name):
        return Path(os.path.expanduser(name))  # which takes any name
    repo_id, own = split_revision(name)
    if own and revision not in (None, own):
        raise HubError(f"{name} is not of revision {revision}; name one of the two")
    try:
        patterns = ["config.json", SUMS, TREE, *WEIGHTS]
        options = {"allow_patterns": patterns, "tqdm_class": DownloadBar}
        return Path(abandonable(snapshot_download, repo_id, revision=own or revision, **options))
    except Exception as error:
        raise HubError(
            f"{name} is no local folder and the Hub did not give it ({_reason(error)}); "
            "give a folder or a Hub id, and for a private one log in: hf auth login"
        ) from error


def check_login(hub: HubSection) -> None:
    """Raise HubError, before hours of training, when nobody is logged in to push at their end."""
    if hub.repo_id and get_token() is None:
        raise HubError(
            f"hub.repo_id = {hub.repo_id}: nobody is logged in to the Hub; run `hf auth login` or "
            f"set HF_TOKEN, or set hub.repo_id=null and push afterwards: {LATER}"
        )


def push(
    files: Mapping[str, Path | bytes],  # place in the repository -> what goes there
    repo_id: str,
    private: bool = True,
    revision: str | None = None,
    message: str = "Upload a drafter",
) -> str:
    """Publish files as one commit, making repository and branch if needed; return its address.

    What a drafter is loaded from leaves in the same commit where an earlier push left it and this
    one does not replace it: whoever loads a repository must not meet two drafters, nor another
    one's tree or chat template. Raises HubError, and then nothing has changed.
    """
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if api.repo_info(repo_id).private != private:
            there = "public; set hub.private=false to push there"
            if not private:  # by whoever decides that: what is in it already would be, too
                there = "private; push there without hub.private=false, or make it public first"
            raise HubError(f"{repo_id} exists and is {there}")
        if revision:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.list_repo_files(repo_id, revision=revision)
        loaded = filter_repo_objects(there, allow_patterns=[*WEIGHTS, SUMS, TREE, TEMPLATE])
        # Not upload_folder: it may take several commits, and show a repository half-way.
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        operations += [CommitOperationDelete(name) for name in loaded if name not in files]
        options = {"commit_message": message, "revision": revision}
        made = abandonable(api.create_commit, repo_id, operations, **options)
    except HubError:
        raise
    except Exception as error:
        raise HubError(f"the Hub did not take {repo_id} ({_reason(error)})") from error
    return str(made.commit_url)


def _reason(error: BaseException) -> str:
    """Return the first line of an error's first cause: the Hub's client wraps the network's errors
    in some that say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    return in_a_line(error)
