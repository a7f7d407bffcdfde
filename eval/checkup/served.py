"""Whether what was trained has been compared with itself in an engine: what eval/parity.py left."""

import json
from collections.abc import Mapping
from pathlib import Path

from specdraft.eval.checkup.finding import Finding, failed, judged, skipped
from specdraft.eval.methods.registry import needs
from specdraft.eval.methods.trained import Trained
from specdraft.recipes.schema import Recipe

LINE, RUN = "in an engine", "python eval/parity.py RECIPE --engine vllm --python V/bin/python"


def check_served(recipe: Recipe, loaded: Mapping[str, Trained]) -> list[Finding]:
    """Judge parity.json of a run; nothing is said where nothing was trained."""
    weights = [loaded[name].weights() for name in loaded if needs(name)]
    if not weights:
        return []
    path = Path(recipe.output.dir) / "parity.json"
    if not path.is_file():
        return [skipped(LINE, "never compared with a real engine", RUN)]
    try:
        reports = json.loads(path.read_text(encoding="utf-8"))["methods"]
        trained = [each for each in reports if each["weights"]]
        names = {each["method"]: each["passed"] for each in trained if each["weights"] in weights}
        engine = ", ".join({each["engine"] for each in trained})
    except (ValueError, KeyError, TypeError) as error:
        return [failed(LINE, f"{path} is no report ({error!r})", RUN)]
    if not names:
        return [skipped(LINE, f"{path} is of other weights", RUN)]
    note = ", ".join(
        f"{name} {'as here' if same else 'not as here'}" for name, same in names.items()
    )
    return [judged(LINE, all(names.values()), f"{engine}: {note}", f"see the report: {RUN}")]
