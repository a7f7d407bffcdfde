"""What a user did wrong, said in a line or two: every floor raises a `UserError` for bad input."""

from specdraft.recipes.terminal import visible


class UserError(Exception):
    """Bad input: the message names the value, what is allowed and what to do next."""


class RecipeError(UserError):
    """A recipe key, type, value or combination that is not allowed."""


class DataError(UserError):
    """Conversations, prompts or templates that cannot be used."""


class CacheError(UserError):
    """A token or feature cache that is damaged or belongs to something else."""


class HeadError(UserError):
    """A trained head or a counted table that is missing, damaged or none."""


class UntrainedError(HeadError):
    """Nothing has been trained yet where a drafter is looked for."""


class HubError(UserError):
    """A Hub that does not give or take a drafter."""


class TargetError(UserError):
    """A target that is missing, unsupported or not the one a head was made for."""


def in_a_line(error: BaseException, kind: bool = False) -> str:
    """Return the first line of an error's message, cut to 300 characters; its type if it has none.

    A first line that only announces the second has it behind. kind: put its type before the message
    in any case.
    """
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if not lines:
        return name
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    first = visible(" ".join(first.split()))[:300]
    return f"{name}: {first}" if kind else first
