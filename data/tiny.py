"""Make the bundled tiny target: a real, trained, small chat model of a made-up world.

    python data/tiny.py                       # conversations, tokenizer, training, evaluation
    python data/tiny.py --evaluate            # only measure what is in --out
    python data/tiny.py --steps 50 --out DIR  # a quick trial

Writes models/tiny/ (weights, tokenizer, CARD.md, metrics.json) and data/tiny/ (training
conversations for drafters, evaluation prompts). Everything follows from --seed and --steps.
"""

import argparse
import json
import logging
from pathlib import Path

import torch

from specdraft.data.tiny_card import write_card
from specdraft.data.tiny_measure import measure
from specdraft.data.tiny_tokenizer import build_tokenizer
from specdraft.data.tiny_train import TrainSettings, load_trained, train
from specdraft.data.world import KINDS, conversations, held_out_prompts

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"user": "human", "assistant": "gpt"}  # in ShareGPT's words
PROMPT_SEED, CONVERSATION_SEED, TOKENIZER_SEED = 1, 2, 3
MAX_CONVERSATION_BYTES = 3_000_000


def write_prompts(path: Path, per_category: int) -> None:
    """Write the held-out evaluation prompts, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for number, (kind, messages) in enumerate(held_out_prompts(PROMPT_SEED, per_category)):
            row = {
                "id": f"{kind}-{number % per_category:02d}",
                "category": kind,
                "messages": messages[:-1],
            }
            file.write(json.dumps(row) + "\n")


def write_conversations(path: Path, count: int) -> None:
    """Write the training conversations for drafters in ShareGPT's form."""
    rows = []
    for number, messages in zip(range(count), conversations(CONVERSATION_SEED), strict=False):
        turns = [{"from": ROLES[m["role"]], "value": m["content"]} for m in messages]
        rows.append(json.dumps({"id": f"tiny-{number}", "conversations": turns}) + "\n")
    text = "".join(rows)
    if len(text.encode()) > MAX_CONVERSATION_BYTES:
        raise ValueError(f"{len(text)} bytes of conversations; ask for fewer than {count}")
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Write the data, train the model and measure it, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "tiny")
    parser.add_argument("--steps", type=int, default=TrainSettings.steps)
    parser.add_argument("--minutes", type=float, help="end earlier, after this long")
    parser.add_argument("--seed", type=int, default=TrainSettings.seed)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate", action="store_true", help="measure only, train nothing")
    parser.add_argument("--write-data", action="store_true", help="write the data only")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    args.data.mkdir(parents=True, exist_ok=True)
    if not args.evaluate:
        write_prompts(args.data / "prompts.jsonl", per_category=200 // len(KINDS))
        write_conversations(args.data / "conversations.jsonl", count=3000)
        if args.write_data:
            return
        tokenizer = build_tokenizer(conversations(TOKENIZER_SEED), args.out)
        settings = TrainSettings(
            steps=args.steps, minutes=args.minutes, compile=args.compile, seed=args.seed
        )
        train(settings, tokenizer, args.out)
    model, tokenizer = load_trained(args.out)
    metrics, samples = measure(model, tokenizer, args.data / "prompts.jsonl")
    write_card(args.out, metrics, samples)


if __name__ == "__main__":
    main()
