"""Make the bundled tiny target: a real, trained, small chat model of a made-up world.

    python data/tiny.py                       # conversations, tokenizer, training, evaluation
    python data/tiny.py --evaluate            # only measure what is in --out
    python data/tiny.py --steps 50 --out DIR  # a quick trial
    # as many conversations of the same world as a drafter's data should have
    python data/tiny.py --write-data --conversations 10000 --data runs/world
    # in minutes, another family: the bundled target with these settings, trained on
    python data/tiny.py --steps 300 --out runs/windowed --variant \
        '{"model_type": "mistral", "sliding_window": 32}'

Writes models/tiny/ (weights, tokenizer, CARD.md, metrics.json) and data/tiny/ (training
conversations for drafters, evaluation prompts). Everything follows from --seed and --steps.
"""

from specdraft.recipes.entry import entry

import argparse
import itertools
import json
import logging
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoTokenizer

from specdraft.data.world.card import write_card
from specdraft.data.world.measures import measure
from specdraft.data.world.tokenizer import build_tokenizer
from specdraft.data.world.training import TrainSettings, build_variant, load_trained, train
from specdraft.data.world.world import conversations, held_out_prompts
from specdraft.recipes.arguments import Parser, whole
from specdraft.recipes.terminal import tell

ROOT = Path(__file__).resolve().parents[1]
ROLES = {"user": "human", "assistant": "gpt"}  # in ShareGPT's words
PROMPT_SEED, CONVERSATION_SEED, TOKENIZER_SEED, REFERENCE_SEED = 1, 2, 3, 4
PROMPTS_PER_KIND = 40
REFERENCES_PER_KIND = 100
CONVERSATIONS = 3000  # about 2 MB; more begin with these


def write_prompts(path: Path) -> None:
    """Write the held-out evaluation prompts, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for number, (kind, messages) in enumerate(held_out_prompts(PROMPT_SEED, PROMPTS_PER_KIND)):
            name = f"{kind}-{number % PROMPTS_PER_KIND:02d}"
            row = {"id": name, "category": kind, "messages": messages[:-1]}
            file.write(json.dumps(row) + "\n")


def write_conversations(path: Path, count: int) -> None:
    """Write the training conversations for drafters in ShareGPT's form."""
    talks = itertools.islice(conversations(CONVERSATION_SEED), count)
    with path.open("w", encoding="utf-8") as file:
        for number, messages in enumerate(talks):
            turns = [{"from": ROLES[m["role"]], "value": m["content"]} for m in messages]
            file.write(json.dumps({"id": f"tiny-{number}", "conversations": turns}) + "\n")
    tell(f"wrote {count:,} conversations: {path}")


def evaluate(out: Path, training: dict[str, float]) -> None:
    """Measure the target in `out` on held-out requests and write its card there."""
    model, tokenizer = load_trained(out)
    prompts = list(held_out_prompts(PROMPT_SEED, PROMPTS_PER_KIND))
    references = list(held_out_prompts(REFERENCE_SEED, REFERENCES_PER_KIND))
    metrics, answers = measure(model, tokenizer, prompts, references)
    write_card(out, model, training, metrics, answers)


def train_variant(changes: dict, settings: TrainSettings, out: Path) -> None:
    """Train the bundled target, as a model of another family, on; nothing is measured."""
    bundled = ROOT / "models" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(bundled)
    tokenizer.save_pretrained(out)
    train(settings, tokenizer, out, build_variant(bundled, changes))


def settings_of(text: str) -> dict:
    """Read the settings of a variant. Raises ArgumentTypeError for others than transformers has."""
    try:
        changes = json.loads(text)
        known = changes.get("model_type", "llama") in CONFIG_MAPPING
    except (ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON object ({error})") from error
    if not known:
        raise argparse.ArgumentTypeError(f"transformers has no model_type {changes['model_type']}")
    return changes


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "tiny")
    parser.add_argument("--steps", type=whole(1, 10**9), default=TrainSettings.steps)
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=TrainSettings.seed)
    parser.add_argument("--threads", type=whole(1, 1000), default=2)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="slower, needs no C++ compiler"
    )
    parser.add_argument("--evaluate", action="store_true", help="measure only, train nothing")
    parser.add_argument("--write-data", action="store_true", help="write the data only")
    parser.add_argument(
        "--conversations", type=whole(1, 10**7), default=CONVERSATIONS, help="default: %(default)s"
    )
    parser.add_argument("--variant", type=settings_of, metavar="JSON", help="settings to change")
    return parser.parse_args()


@entry
def main() -> None:
    """Write the data, train the target and measure it, as the options say."""
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    args.data.mkdir(parents=True, exist_ok=True)
    if args.evaluate:
        training = json.loads((args.out / "metrics.json").read_text(encoding="utf-8"))["training"]
        evaluate(args.out, training)
        return
    settings = TrainSettings(
        steps=args.steps, minutes=args.minutes, compile=args.compile, seed=args.seed
    )
    if args.variant:
        train_variant(args.variant, settings, args.out)
        return
    write_prompts(args.data / "prompts.jsonl")
    write_conversations(args.data / "conversations.jsonl", args.conversations)
    if args.write_data:
        return
    tokenizer = build_tokenizer(conversations(TOKENIZER_SEED), args.out)
    evaluate(args.out, train(settings, tokenizer, args.out))


if __name__ == "__main__":
    main()
