"""What went wrong in a run of a report, in words: for its table and its page."""


def failure_counts(run: dict) -> str:
    """How many prompts a run of a report failed on, and how many its drafter left."""
    counts = {"failed": run["failed"], "fell back": run["fallbacks"]}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def failure_reasons(run: dict) -> str:
    """What was raised in a run of a report, each with its prompts."""
    by_error: dict[str, list[str]] = {}
    for one in run["failures"]:
        turn = f" (turn {one['turn']})" if one["turn"] > 1 else ""
        by_error.setdefault(one["error"], []).append(f"{one['prompt']}{turn}")
    return "; ".join(f"{error} [{', '.join(where)}]" for error, where in by_error.items())
