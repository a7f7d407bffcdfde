"""A model's tokenizer, and the chat template that a recipe may put in place of its own."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specdraft.recipes.errors import TargetError, in_a_line


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a model's weights. Raises TargetError."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise TargetError(f"no usable tokenizer in {folder}: {in_a_line(error)}") from error


def read_chat_template(name: str) -> str:
    """Read a Jinja chat template: a bundled one by its name, or a file. Raises TargetError."""
    bundled = Path(__file__).parents[1] / "recipes" / "templates" / f"{name}.jinja"
    path = bundled if bundled.is_file() else Path(name).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in bundled.parent.glob("*.jinja")))
        raise TargetError(
            f"target.chat_template: cannot read {path} ({error.strerror}); "
            f"give a Jinja file or one of: {known}"
        ) from error
