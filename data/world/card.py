"""Write the facts about the bundled target beside its weights: metrics.json and CARD.md."""

import json
from pathlib import Path

from transformers import LlamaForCausalLM

from specdraft.data.world.measures import Answer
from specdraft.data.world.world import KINDS

SAMPLES_PER_KIND = 2


def _samples(answers: list[Answer]) -> str:
    return "\n\n".join(
        f"**{kind}**\n\n````text\n> {made.prompt}\n\n{made.text}\n````"
        for kind in KINDS
        for made in [made for made in answers if made.kind == kind][:SAMPLES_PER_KIND]
    )


def write_card(
    out: Path,
    model: LlamaForCausalLM,
    training: dict[str, float],
    metrics: dict,
    answers: list[Answer],
) -> None:
    """Write `metrics.json` and `CARD.md` to `out`."""
    figures = {"training": training, **metrics}
    (out / "metrics.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    parameters = model.num_parameters()
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    text = template.format(
        config=model.config,
        parameters=parameters,
        megabytes=2 * parameters / 1e6,
        speed=training["tokens"] / (60 * training["minutes"]),
        by_kind=", ".join(f"{kind} {metrics['perplexity'][kind]:.2f}" for kind in KINDS),
        known=", ".join(f"{kind} {share:.0%}" for kind, share in metrics["facts_right"].items()),
        samples=_samples(answers),
        **training,
        **metrics,
    )
    (out / "CARD.md").write_text(text, encoding="utf-8")
