"""A small byte-level tokenizer trained on the spot, and chat templates like published ones."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
TEXTS = [
    "Hello there, how are you today?",
    "The answer is 42. I am fine.",
    "USER: ASSISTANT: [INST]",
]

CHATML = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHATML_MARKED = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{% if m['role'] == 'assistant' %}\
{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}\
{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA2 = """\
{% for m in messages %}{% if m['role'] == 'user' %}\
{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}\
{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
VICUNA = """\
{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] }}\
{% elif m['role'] == 'assistant' %}{{ ' ASSISTANT: ' + m['content'] + eos_token }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"""
# Only the last turn ends with the end-of-sequence token.
EOS_AT_THE_END = """\
{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'assistant: ' }}{% elif messages[-1]['role'] == 'assistant' %}\
{{ eos_token + '\n' }}{% endif %}"""
# Like Qwen3: an answer has an (empty) thought only while it is the last one.
THINKING = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}\
{{ m['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Qwen3: older answers lose their thoughts.
THOUGHTS_DROPPED = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{{ m['content'] if loop.last else m['content'].split('</think>')[-1].lstrip('\n') }}\
{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Llama 3.1: a tool's output is written as JSON.
TOOLS_AS_JSON = """\
{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{{ (m['content'] | tojson if m['role'] == 'tool' else m['content']) + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# Like Mistral: the system prompt moves into the last question, so prefixes of chats do not match.
SYSTEM_LAST = """\
{% set ns = namespace(system='') %}\
{% if messages[0]['role'] == 'system' %}\
{% set ns.system = messages[0]['content'] + '\n' %}{% endif %}\
{% for m in messages %}{% if m['role'] == 'user' %}\
{{ '[INST] ' + (ns.system if loop.index0 >= messages|length - 2 else '') }}\
{{ m['content'] + '[/INST]' }}\
{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"""


def small_tokenizer(
    chat_template: str | None = CHATML, merges: int = 60
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + merges,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens=SPECIAL[2:],
        name_or_path="small",
    )
    fast.chat_template = chat_template
    return fast
