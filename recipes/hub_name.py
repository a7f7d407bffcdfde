"""A repository of the Hub as a command line names it: owner/name, or owner/name@revision."""


def split_revision(name: str) -> tuple[str, str | None]:
    """Return the repository of a name, and the branch, tag or commit behind its @; None: `main`.

    >>> split_revision("you/drafter@v2"), split_revision("you/drafter")
    (('you/drafter', 'v2'), ('you/drafter', None))
    """
    repo_id, _, revision = name.partition("@")
    return repo_id, revision or None
