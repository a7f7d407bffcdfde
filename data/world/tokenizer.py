"""The tokenizer of the bundled target: byte-level BPE with single digits, and its chat template."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdraft.data.world.world import Message

VOCAB_SIZE = 2048
READ = 20_000  # conversations that merges are learnt from
PAD, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"

# The generation block makes `return_assistant_tokens_mask` cover the answer and its <|end|>.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}"
    "{%- elif message['role'] in ('user', 'system') %}"
    "{{- '<|user|>' + message['content'] + '<|end|>' }}"
    "{%- else %}"
    "{{- raise_exception('the roles are user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def build_tokenizer(conversations: Iterator[list[Message]], out: Path) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first READ conversations; save it, with its template, to `out`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # One token a digit: arithmetic is out of reach for a small model otherwise.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (message["content"] for talk in islice(conversations, READ) for message in talk)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return fast
