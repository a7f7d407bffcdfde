"""Make a small encoder-decoder of the bundled world, a FLAN-T5 in shape, and data for its drafters.

    python data/tiny_t5.py                            # minutes on two CPU cores
    python data/tiny_t5.py --steps 50 --out DIR       # a quick trial
    python train/falcon.py recipes/tiny_t5.yaml       # a head for it

It repeats, lists, summarises and is asked about passages of news. Writes to --out (default:
runs/t5) the model with the bundled tokenizer, pairs.jsonl (source and target, to train
drafters on) and prompts.jsonl (held-out sources of every task). It is not bundled. Everything
follows from --seed and --steps.
"""

from specdraft.recipes.entry import entry

import itertools
import json
import logging
from pathlib import Path

import torch
from transformers import AutoTokenizer

from specdraft.data.world.pairs import held_out_pairs, pairs
from specdraft.data.world.t5 import train_t5
from specdraft.data.world.training import TrainSettings
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes.arguments import Parser, whole
from specdraft.recipes.terminal import tell

PROMPT_SEED, PAIR_SEED = 1, 2
PROMPTS_PER_TASK = 60
PAIRS = 4000


def write_pairs(path: Path) -> None:
    """Write the training pairs for drafters."""
    with path.open("w", encoding="utf-8") as file:
        for source, target in itertools.islice(pairs(PAIR_SEED), PAIRS):
            file.write(json.dumps({"source": source, "target": target}) + "\n")


def write_prompts(path: Path) -> None:
    """Write the held-out sources, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        drawn = held_out_pairs(PROMPT_SEED, PROMPTS_PER_TASK)
        for number, (task, (source, _)) in enumerate(drawn):
            name = f"{task}-{number % PROMPTS_PER_TASK:02d}"
            file.write(json.dumps({"id": name, "category": task, "prompt": source}) + "\n")


@entry
def main() -> None:
    """Write the data and train the model."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/t5"))
    parser.add_argument("--steps", type=whole(1, 10**9), default=1200)
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=TrainSettings.seed)
    parser.add_argument("--threads", type=whole(1, 1000), default=2)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    write_pairs(args.out / "pairs.jsonl")
    write_prompts(args.out / "prompts.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(bundled_target_dir())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(args.out)
    settings = TrainSettings(args.steps, args.minutes, lr=1e-3, warmup=100, seed=args.seed)
    train_t5(settings, tokenizer, args.out)
    tell(f"{args.out}: a model and data for its drafters; next: specdraft train tiny_t5")


if __name__ == "__main__":
    main()
