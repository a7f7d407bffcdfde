"""Pushing to the Hub and loading from it, with the real client and a local stand-in server."""

import hashlib
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import yaml
from forks import Fork, Nursery
from local_hub import DROP, Handler, LocalHub
from random_models import random_eagle3

from specdraft.eval.methods.trained import CARDS
from specdraft.models.cards.card import PICTURE, head_facts, model_card, results
from specdraft.models.cards.curve import curve
from specdraft.models.cards.lines import usage
from specdraft.models.cards.log import LOG, records
from specdraft.models.hub import fetch, is_hub_id
from specdraft.models.publish import contents, portable
from specdraft.models.published import kind_there
from specdraft.models.serving import serve_eagle3
from specdraft.models.target_files import bundled_target_dir
from specdraft.recipes import download_bar
from specdraft.recipes.errors import HeadError, HubError
from specdraft.recipes.fitted_tree import Fit
from specdraft.recipes.load import from_dict, load_recipe
from specdraft.recipes.static_trees import load_tree_paths

# The tests share three small runs: keep them in one worker.

ROOT = Path(__file__).parents[2]
SMALL = ["data.limit=8", "eval.limit=1", "eval.validation=1", "eval.max_new_tokens=12"]
STEPS = ["train.steps=2", "train.batch_size=2", "train.threads=1", "train.log_every=1"]
ENTRIES = {  # kind of drafter -> the command that makes it
    "falcon": ["train/falcon.py", "recipes/tiny.yaml", *STEPS, "eval.tree=tiny_coupled_k3",
             "eval.methods=[plain,falcon_tree]"],
    "student": [
        "train/distill.py", "recipes/tiny_distill.yaml", *STEPS, "eval.methods=[plain,ssd]",
        "data.answers=dataset", "train.eval_every=null",
    ],
    "table": ["train/maxgram.py", "recipes/tiny_maxgram.yaml", "eval.methods=[plain,maxgram]"],
}  # fmt: skip

PUSH = """
import runpy, sys, time
time.sleep = lambda seconds: None  # the client waits between its retries
sys.argv[0] = "models/push.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def hub():
    with LocalHub() as server:
        yield server


@pytest.fixture(scope="module")
def nursery(hub: LocalHub, tmp_path_factory) -> Iterator[Nursery]:
    """Separate from other tests', since huggingface_hub reads its environment on import."""
    cache = tmp_path_factory.mktemp("hf")
    nursery = Nursery(os.environ | {"COLUMNS": "200"} | hub.environment(cache))
    yield nursery
    nursery.close()


def run(nursery: Nursery, *command: object, **changes: str) -> subprocess.CompletedProcess:
    process = Fork(*command, cwd=ROOT, env=nursery.env | changes, parent=nursery)
    out, err = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module")
def runs(nursery: Nursery, tmp_path_factory) -> Path:
    """A head, a student and a table, each made and pushed to you/KIND by its own command."""
    folder = tmp_path_factory.mktemp("runs")
    for kind, command in ENTRIES.items():
        places = [f"output.dir={folder / kind}", f"data.cache_dir={folder / 'cache'}"]
        names = [f"hub.repo_id=you/{kind}", "hub.license=apache-2.0"]
        done = run(nursery, *command, *SMALL, *places, *names)
        assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(scope="module")
def push(nursery: Nursery, runs, tmp_path_factory):
    """Run models/push.py with arguments; names of runs become their folders."""
    script = tmp_path_factory.mktemp("push") / "push.py"
    script.write_text(PUSH)

    def push(name: str, *arguments: str) -> subprocess.CompletedProcess:
        folder = str(runs / name) if (runs / name).is_dir() else name
        return run(nursery, script, folder, *arguments)

    return push


def front_matter(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def code(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_run_with_a_repository_is_pushed_there_in_one_commit(hub, runs, kind):
    before, after = hub.commits[f"you/{kind}"]["main"]
    assert hub.private[f"you/{kind}"]
    assert set(before) == {".gitattributes"}
    folder = runs / kind / kind
    assert after["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    for line in after["SHA256SUMS"].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(after[name]).hexdigest() == digest
    assert ("tokenizer.json" in after) == (kind == "student")
    trained = kind != "table" and importlib.util.find_spec("matplotlib") is not None
    assert (PICTURE in after) == trained
    assert after.get(PICTURE, b"\x89PNG").startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_card_describes_the_drafter_and_its_figures(hub, runs, kind):
    files = hub.commits[f"you/{kind}"]["main"][-1]
    card = files["README.md"].decode()
    assert front_matter(card)["license"] == "apache-2.0"
    assert "speculative-decoding" in front_matter(card)["tags"]
    assert "| target | tiny, revision main, decoded in float32" in card
    assert (f"({PICTURE})" in card) == (PICTURE in files)
    measured = json.loads((runs / kind / "report.json").read_text())["runs"]
    assert measured
    for run in measured:
        assert f"| `{run['method']}` | {run['tokens_per_step']:.2f} |" in card
    if kind == "falcon":
        weights = json.loads(files["config.json"])["target"]["weights"]
        assert weights[:12] in card
        form = "3 tokens a pass; fusion linear; slots read both, coupling recurrent"
        form += "; also reads layer 3 of the target"
        assert f"| head | {form} |" in card


def test_a_card_names_a_heads_layers_and_draft_vocabulary():
    config = {"block_size": 1, "fusion": "linear", "vocab_size": 32000}
    more = {"feature_layers": [2, 16], "draft_vocab": 8000}
    assert head_facts(config) == "1 token a pass; fusion linear"
    assert head_facts(config | more).endswith(
        "; also reads layers 2, 16 of the target; drafts among 8,000 of 32,000 tokens"
    )


@pytest.mark.parametrize("kind", ENTRIES)
def test_the_pushed_card_is_also_in_the_drafters_folder(hub, runs, kind):
    card = (runs / kind / kind / "README.md").read_text()
    assert card == hub.commits[f"you/{kind}"]["main"][-1]["README.md"].decode()
    assert "More Information Needed" not in card
    assert "pip install specdraft" in card
    assert "vllm serve models/tiny" in card
    (figures,) = front_matter(card)["model-index"]
    assert figures["name"] == f"you/{kind}"
    measured = json.loads((runs / kind / "report.json").read_text())["runs"][-1]
    (result,) = figures["results"]
    told = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert told["tokens_per_step"] == round(measured["tokens_per_step"], 3)


def test_a_benchmark_of_the_same_weights_gets_its_own_table_in_the_card(head_run):
    run, pushed = head_run
    report = json.loads((run / "falcon" / "report.json").read_text())
    rows = report["runs"]
    hot = [row | {"temperature": 1.0, "outputs": 7} for row in rows]
    others = [row | {"temperature": 1.0, "outputs": 9} for row in rows]
    for name, more in (
        ("hot", {"runs": rows + hot}),
        ("other", {"runs": others, "drafter": ["0"]}),
    ):
        (run / "bench" / name).mkdir(parents=True)
        (run / "bench" / name / "report.json").write_text(json.dumps(report | more))
    card = pushed()["README.md"].decode()
    assert card.count("| method |") == 3  # the training's, and the benchmark's at two temperatures
    assert "7 answers to the bundled prompts, up to 12 new tokens, temperature 1, batch 1" in card
    assert "9 answers" not in card


def test_a_local_folder_of_the_training_machine_is_never_listed_as_a_dataset(head_run, monkeypatch):
    """`you/chats` was a folder on the training machine, as its report shows."""
    run, pushed = head_run
    path = run / "falcon" / "report.json"
    report = json.loads(path.read_text())
    report["recipe"]["data"]["sources"] = ["chats"]
    path.write_text(json.dumps(report))
    files = pushed("data.sources=[you/chats]")
    assert "datasets" not in front_matter(files["README.md"].decode())
    assert yaml.safe_load(files["recipe.yaml"])["data"]["sources"] == ["chats"]


MIXIN = """
import sys
from specdraft.models.falcon import FalconHead
head = FalconHead.from_pretrained(sys.argv[1])
head.config.target["name"] = "../private/my-model"
head.push_to_hub("you/mixed")
"""


def test_push_to_hub_publishes_only_the_drafters_files(hub, nursery, runs, tmp_path):
    (tmp_path / "push.py").write_text(MIXIN)
    done = run(nursery, tmp_path / "push.py", runs / "falcon" / "falcon")
    assert done.returncode == 0, done.stderr[-2000:]
    files = hub.commits["you/mixed"]["main"][-1]
    assert set(files) - {".gitattributes"} == {"config.json", "model.safetensors", "SHA256SUMS"}
    assert json.loads(files["config.json"])["target"]["name"] == "my-model"
    assert hub.private["you/mixed"]


@pytest.mark.parametrize("kind", ENTRIES)
def test_pushed_files_contain_no_local_path(hub, runs, kind):
    for name, content in hub.commits[f"you/{kind}"]["main"][-1].items():
        assert str(runs).encode() not in content, name
        assert str(ROOT).encode() not in content, name


@pytest.fixture
def head_run(runs, tmp_path):
    """A copy of the head's run to modify, and the files a push of it would publish."""
    run = shutil.copytree(runs / "falcon", tmp_path / "run")

    def pushed(*overrides: str) -> dict[str, Path | bytes]:
        names = ["hub.repo_id=you/t", f"output.dir={run}", *overrides]
        return contents(load_recipe(run / "recipe.yaml", names), CARDS["falcon"])

    return run, pushed


def test_only_the_files_of_a_drafter_are_pushed(head_run):
    run, pushed = head_run
    before = set(pushed())
    for stray in (".env", "notes.txt", "train.log", "model.safetensors.bak", "optimizer.bin"):
        (run / "falcon" / stray).write_text("HF_TOKEN=..")
    (run / "falcon" / "data").mkdir()
    (run / "falcon" / "vocab.json").mkdir()
    assert set(pushed()) == before
    assert before == {
        "README.md", "SHA256SUMS", "config.json", "custom_generate/generate.py",
        "custom_generate/requirements.txt", "model.safetensors", "recipe.yaml", "tree.yaml",
        *({PICTURE} & before),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["falcon/config.json", "falcon/model.safetensors", "falcon/tokenizer.json", "falcon"]
)
def test_a_push_follows_no_link(head_run, tmp_path, name):
    run, pushed = head_run
    link, secret = run / name, tmp_path / "secret"
    if link.exists():
        link.rename(secret)
    else:
        secret.write_text("{}")
    link.symlink_to(secret)
    with pytest.raises(HeadError, match="is a link, and a push follows none"):
        pushed()


def test_a_damaged_drafter_is_not_pushed(head_run):
    run, pushed = head_run
    weights = bytearray((run / "falcon" / "model.safetensors").read_bytes())
    weights[-4] ^= 1
    (run / "falcon" / "model.safetensors").write_bytes(weights)
    with pytest.raises(HeadError, match=r"model.safetensors is not what was saved"):
        pushed()


def test_local_paths_of_target_and_data_are_pushed_as_names(head_run, tmp_path):
    """In the recipe, the head's config, the report and the card."""
    run, pushed = head_run
    model, chats = tmp_path / "private" / "my-model", tmp_path / "private" / "chats.jsonl"
    path = run / "falcon" / "config.json"
    config = json.loads(path.read_text())
    config["target"]["name"] = str(model)
    path.write_text(json.dumps(config))
    (run / "falcon" / "SHA256SUMS").unlink()
    report = json.loads((run / "report.json").read_text())
    for one in report["runs"]:
        one["prompt_set"] = f"mt_bench:{chats}"
    sources = [
        str(chats), "owner/name:test", "hf://datasets/a/b/c.json", f"{tmp_path}/here/chats",
        "chats/part-*",
    ]  # fmt: skip
    report["recipe"]["target"]["model"], report["recipe"]["data"]["sources"] = str(model), sources
    (run / "report.json").write_text(json.dumps(report))
    (run / "falcon" / "report.json").unlink()  # as in older runs
    template = tmp_path / "my.jinja"
    template.write_text("{{ messages[0].content }}")
    files = pushed(
        f"target.model={model}", f"data.sources={json.dumps(sources)}",
        f"eval.prompts=mt_bench:{chats}", f"data.drafter_run={tmp_path}", "data.answers=target",
        "data.drafter=falcon_tree", f"target.chat_template={template}",
    )  # fmt: skip
    for name, content in files.items():
        assert str(tmp_path).encode() not in (content if isinstance(content, bytes) else b""), name
    recipe = yaml.safe_load(files["recipe.yaml"])
    assert recipe["target"]["model"] == "my-model"
    assert recipe["data"]["sources"] == [
        "chats.jsonl", "owner/name:test", "hf://datasets/a/b/c.json", "chats", "chats/part-*",
    ]  # fmt: skip
    assert recipe["eval"]["prompts"] == "mt_bench:chats.jsonl"
    assert files[recipe["target"]["chat_template"]].decode() == template.read_text()
    assert json.loads(files["config.json"])["target"]["name"] == "my-model"
    card = files["README.md"].decode()
    assert "drafts for **my-model**" in card
    assert "datasets:\n- owner/name\n" in card
    assert "part-*" not in card.split("---")[1]
    from_dict(recipe)


def test_a_cards_example_uses_the_recipes_chat_template():
    """The target's own tokenizer may have no template, or another one."""
    recipe = load_recipe("tiny", ["hub.repo_id=you/t", "target.chat_template=vicuna"])
    lines = usage(recipe, CARDS["falcon"], "you/t", chat=True)
    known: dict = {}
    asked = lines.replace('falcon("you/t")', "no_drafter").replace("falcon", "no_drafter")
    exec(asked.partition("output =")[0], known)
    assert "ASSISTANT:" in known["tokenizer"].decode(known["inputs"]["input_ids"][0])


def test_a_pushed_head_brings_the_chat_template_of_its_recipe(hub, nursery, runs, push, tmp_path):
    template = tmp_path / "my.jinja"
    template.write_text("<{{ messages[0].content }}>")
    done = push("falcon", "you/asked", f"target.chat_template={template}")
    assert done.returncode == 0, done.stderr
    card = hub.commits["you/asked"]["main"][-1]["README.md"].decode()
    assert 'read_chat_template(hf_hub_download("you/asked", "target_template.jinja"))' in card
    template.unlink()
    (tmp_path / "read.py").write_text(ASKED)
    done = run(nursery, tmp_path / "read.py")
    assert done.stdout.split() == ["<{{", "messages[0].content", "}}>", "False"], done.stderr


ASKED = """
from huggingface_hub import snapshot_download

from specdraft.models.target_files import read_chat_template
from specdraft.recipes.load import load_recipe

for name in ("you/asked", snapshot_download("you/asked")):
    told = load_recipe(name).target
    text = read_chat_template(told.chat_template)
print(text, told.trust_remote_code)
"""


def test_a_recipe_from_the_hub_cannot_allow_remote_code_or_set_output_paths(
    hub, nursery, runs, tmp_path
):
    files = dict(hub.commits["you/falcon"]["main"][-1])
    recipe = yaml.safe_load(files["recipe.yaml"])
    recipe["target"]["trust_remote_code"] = True
    recipe["output"], recipe["data"]["cache_dir"] = {"dir": str(tmp_path / "there")}, "/anywhere"
    hub.commits["them/head"] = {"main": [files | {"recipe.yaml": yaml.safe_dump(recipe).encode()}]}
    hub.private["them/head"] = False
    (tmp_path / "read.py").write_text(READ)
    done = run(nursery, tmp_path / "read.py")
    assert done.stdout.split() == ["False", "runs/tiny", "cache", "True", "mine"], done.stderr


READ = """
from specdraft.recipes.load import load_recipe
told = load_recipe("them/head")
print(told.target.trust_remote_code, told.output.dir, told.data.cache_dir)
told = load_recipe("them/head", ["target.trust_remote_code=true", "output.dir=mine"])
print(told.target.trust_remote_code, told.output.dir)
"""


def test_a_card_shows_control_characters_in_names_as_visible_symbols(runs):
    names = r'data.sources=["a|b\e]52;c;aGk=\a.jsonl", "c\n# d.jsonl"]'
    recipe = load_recipe("tiny", [names, r'target.model="my\e[2J"', "hub.repo_id=you/t"])
    config = json.loads((runs / "falcon" / "falcon" / "config.json").read_text())
    card = model_card(recipe, CARDS["falcon"], config, [], picture=False)
    assert r"| data | a\|b␛]52;c;aGk=␇.jsonl, c # d.jsonl; answers by" in card
    assert "drafts for **my␛[2J**" in card
    assert not {"\x1b", "\a"} & set(card)


def test_the_address_of_the_answering_server_is_not_pushed(head_run):
    _, pushed = head_run
    files = pushed("data.answers=target", "data.server=http://10.0.0.7:8000/v1")
    assert b"10.0.0.7" not in files["recipe.yaml"] + files["README.md"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/huggingface/hub/models--you--big/snapshots/0123abc", "you/big"),
        ("~/models/big/", "big"),
        ("../chats.json", "chats.json"),
        ("data/chats.jsonl", "chats.jsonl"),
        ("C:\\Users\\me\\chats.json", "chats.json"),
        ("you/big", "you/big"),
        ("you/chats:train", "you/chats:train"),
        ("hf://datasets/you/chats/a.json", "hf://datasets/you/chats/a.json"),
        ("a sentence / with a slash", "a sentence / with a slash"),
    ],
)
def test_local_paths_are_shortened_and_hub_names_are_kept(path, name):
    assert portable({"key": [path]}) == {"key": [name]}


def test_a_dry_run_shows_what_would_be_pushed_and_pushes_nothing(hub, runs, push):
    (runs / "falcon" / "falcon" / "notes.txt").write_text("mine")
    try:
        dry, calls = push("falcon", "you/shown", "--dry-run"), len(hub.calls)
        assert dry.returncode == 0, dry.stderr
        assert "to you/shown (private):\n" in dry.stdout
        assert "model.safetensors" in dry.stdout
        assert "not pushed, for they are no part of a drafter: notes.txt" in dry.stdout
        assert len(hub.calls) == calls
        assert "you/shown" not in hub.commits
        done = push("falcon", "you/shown")
        assert dry.stdout.strip() in done.stderr
        assert "notes.txt" not in hub.commits["you/shown"]["main"][-1]
    finally:
        (runs / "falcon" / "falcon" / "notes.txt").unlink()


def test_the_kind_of_a_head_in_an_older_runs_folder_follows_from_its_config(tmp_path):
    one, two = {"block_size": 1, "fusion": "linear"}, {"block_size": 2, "fusion": "linear"}
    (tmp_path / "head").mkdir()
    for config, kind in ((one, "eagle"), (two, "falcon"), ({"architecture": "eagle3"}, "eagle3")):
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        assert kind_there(tmp_path) == kind
    assert CARDS["eagle"].noun == "An EAGLE-1 head"


def test_a_card_describes_an_eagle_3_head():
    config = {"architecture": "eagle3", "feature_layers": [2, 6, 9], "vocab_size": 2048}
    assert head_facts(config).startswith(
        "1 token a pass; fusion of layers (EAGLE-3); also reads lay"
    )


def test_the_pushed_recipe_is_the_one_that_ran_without_local_paths(hub, runs):
    text = hub.commits["you/falcon"]["main"][-1]["recipe.yaml"].decode()
    assert str(runs) not in text
    pushed, ran = from_dict(yaml.safe_load(text)), load_recipe(runs / "falcon" / "recipe.yaml")
    for section in ("target", "head", "glance", "loss", "optim", "train", "eval"):
        assert getattr(pushed, section) == getattr(ran, section)
    assert pushed.output.dir == "runs/tiny"


USE = """
import sys, torch
from specdraft.models.falcon import FalconHead
from specdraft.models.target import Target
from specdraft.recipes.errors import UserError
local, *cards = sys.argv[1:]
for card in cards:
    lines = {}
    exec(open(card).read(), lines)
    plain = lines["model"].generate(**lines["inputs"], do_sample=False, max_new_tokens=64)
    assert torch.equal(lines["output"], plain), card
    exec(open(card.replace(".py", "_alone.py")).read(), lines)
    plain = lines["model"].generate(**lines["inputs"])
    assert torch.equal(lines["output"], plain), card
    # The same of a copy of the repository, with a streamer.
    from transformers import TextStreamer
    shown, model = TextStreamer(lines["tokenizer"]), lines["model"]
    folder = card.removesuffix(".py")
    how = {"custom_generate": folder, "trust_remote_code": True, "streamer": shown}
    assert torch.equal(model.generate(**lines["inputs"], **how), plain), folder
there, here = FalconHead.from_pretrained("you/falcon"), FalconHead.from_pretrained(local)
blocks = torch.arange(9)[None] // 2
width, layers = here.config.hidden_size, len(here.config.feature_layers)
x = torch.randn(1, 9, width), torch.randn(1, 9, (1 + layers) * width)
logits = [Target.load("tiny").logits(head(*x, blocks)) for head in (there, here)]
assert torch.equal(*logits) and logits[0].std() > 0
from transformers import AutoModelForCausalLM, LlamaConfig
from specdraft.eval.custom_generate import Speculative, falcon
config = lines["model"].config
torch.manual_seed(0)
other = AutoModelForCausalLM.from_config(config)
other.name_or_path = "another-model"
try:
    method = Speculative(falcon("you/falcon", "tiny_coupled_k3"))
    other.generate(**lines["inputs"], custom_generate=method)
except UserError as error:
    print(error)
"""


def test_a_pushed_drafter_loads_by_its_name_and_by_its_cards_example(hub, nursery, runs, tmp_path):
    cards = [tmp_path / f"{kind}.py" for kind in ENTRIES]
    for kind, path in zip(ENTRIES, cards, strict=True):
        files = hub.commits[f"you/{kind}"]["main"][-1]
        card = files["README.md"].decode()
        path.write_text(code(card))
        (tmp_path / f"{kind}_alone.py").write_text(code(card.split("Or, with nothing but")[1]))
        for name, content in files.items():
            (tmp_path / kind / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / kind / name).write_bytes(content)
    (tmp_path / "use.py").write_text(USE)
    done = run(nursery, tmp_path / "use.py", runs / "falcon" / "falcon", *cards)
    assert done.returncode == 0, done.stderr[-2000:]
    refusal = done.stdout.strip().splitlines()[-1]
    assert "this head was trained for tiny" in refusal
    assert "not for another-model" in refusal


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_command_takes_a_hub_name_or_a_copied_folder(hub, nursery, runs, tmp_path, kind):
    few = ["eval.limit=1", "eval.max_new_tokens=4", f"output.dir={tmp_path / 'out'}"]
    copied = shutil.copytree(runs / kind / kind, tmp_path / "mine")
    for name in (f"you/{kind}", copied):
        done = run(nursery, "eval/bench.py", name, *few)
        assert done.returncode == 0, done.stderr[-2000:]
    if kind == "falcon":
        again = run(nursery, "train/cli.py", "train", f"you/{kind}")
        assert again.returncode == 2
        assert "it is trained already" in again.stderr
        gone = run(nursery, "train/cli.py", "bench", "you/gone")
        assert gone.returncode == 2
        assert "you/gone is no recipe or folder here, and the Hub did not give its" in gone.stderr


PUBLISHED = """
import sys
from pathlib import Path
import torch
from specdraft.models.hub import push
from specdraft.models.published import load_head
from specdraft.models.target import Target
folder, target = Path(sys.argv[1]), Target.load("tiny")
push({path.name: path for path in folder.iterdir()}, "others/eagle3")
here, there = load_head(folder, target), load_head("others/eagle3", target)
assert here.config == there.config
assert torch.equal(here.lm_head, there.lm_head)
"""


@pytest.mark.parametrize(("moment", "shown"), [(1e9, False), (1e-9, True)])
def test_only_a_slow_download_shows_a_bar(monkeypatch, moment, shown):
    monkeypatch.setattr(download_bar, "MOMENT", moment)
    hub = sys.modules[download_bar.tqdm.__module__]
    # Other tests' commands may have turned off bars in this process.
    monkeypatch.setattr(hub, "are_progress_bars_disabled", lambda name: False)
    screen = io.StringIO()
    bar = download_bar.DownloadBar(total=2, file=screen, mininterval=0)
    bar.update()
    bar.set_description("Download complete")
    bar.update()
    bar.close()
    assert ("Download complete" in screen.getvalue()) is shown
    assert shown or screen.getvalue() == ""


def test_a_published_head_in_an_engines_layout_is_read_by_its_hub_name(nursery, tmp_path):
    """tests/models/test_eagle3.py tests what is read."""
    sizes = json.loads((bundled_target_dir() / "config.json").read_text())
    head = random_eagle3(SimpleNamespace(**sizes), feature_layers=(2, 6, 9), draft_vocab=99)
    serve_eagle3(head, "vllm", 512).write(tmp_path / "head")
    (tmp_path / "read.py").write_text(PUBLISHED)
    done = run(nursery, tmp_path / "read.py", tmp_path / "head")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ("POST create", DROP),
        ("POST preupload", 403),
        ("PUT lfs", DROP),
        ("PUT lfs", 500),
        ("POST commit", DROP),
        ("POST commit", 500),
    ],
)
def test_a_failed_push_publishes_nothing_and_says_how_to_retry(hub, runs, push, call, how):
    repo, before = f"you/{call.replace(' ', '-')}-{how}", len(hub.calls)
    hub.objects.clear()
    hub.fail = {call: how}
    failed = push("falcon", repo)
    assert call in hub.calls[before:]
    assert failed.returncode == 2
    errors = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert errors[0].endswith(f"go on with: python models/push.py {runs / 'falcon'} {repo}")
    assert "Traceback" not in failed.stderr
    commits = hub.commits.get(repo, {"main": [{".gitattributes": b""}]})["main"]
    assert [set(files) for files in commits] == [{".gitattributes"}]
    hub.fail = {}
    uploaded, again = len(hub.objects), len(hub.calls)
    done = push("falcon", repo)
    assert done.returncode == 0, done.stderr
    assert set(hub.commits[repo]["main"][-1]) >= {"model.safetensors", "config.json", "README.md"}
    # Files uploaded before are not sent again.
    assert hub.calls[again:].count("PUT lfs") == len(hub.objects) - uploaded
    assert (uploaded > 0) == (call == "POST commit")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_push_does_not_wait_for_its_uploads(hub, nursery, runs, monkeypatch, number):
    shutil.copytree(runs / "falcon", again := runs / f"stopped-{number}")
    released, began = Event(), Event()

    def store(handler, body, oid):
        began.set()
        released.wait()
        with suppress(OSError):  # the client is gone
            handler.answer({})

    monkeypatch.setattr(Handler, "store", store)
    monkeypatch.setattr(hub, "objects", {})
    name = f"you/stopped-{number}"
    process = Fork("models/push.py", again, name, cwd=ROOT, env=nursery.env, parent=nursery)
    try:
        assert began.wait(300)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        released.set()
    assert process.returncode == 130
    assert errors.strip().endswith(
        f"interrupted; start again with: python models/push.py {again} {name}"
    )
    assert len(hub.commits[name]["main"]) == 1


def test_a_repeated_push_replaces_drafter_files_and_keeps_others(hub, runs, push):
    assert push("falcon", "you/again").returncode == 0
    files = hub.commits["you/again"]["main"][-1]
    older = {"model-00001-of-00002.safetensors", "tree.yaml", "target_template.jinja"}
    files |= dict.fromkeys(older, b"of an older push") | {"notes.md": b"by hand"}
    done = push("table", "you/again")
    assert done.returncode == 0, done.stderr
    files = hub.commits["you/again"]["main"][-1]
    assert not older & set(files)
    assert files["notes.md"] == b"by hand"
    table = (runs / "table" / "table" / "model.safetensors").read_bytes()
    assert files["model.safetensors"] == table


def test_a_revision_is_pushed_to_its_own_branch(hub, runs, push):
    done = push("falcon", "you/branched", "hub.revision=v2")
    assert done.returncode == 0, done.stderr
    branches = hub.commits["you/branched"]
    assert set(branches["main"][-1]) == {".gitattributes"}
    files = branches["v2"][-1]
    assert "model.safetensors" in files
    assert b'falcon("you/branched", revision="v2")' in files["README.md"]
    for name in ("README.md", "custom_generate/generate.py"):
        assert b'custom_generate="you/branched", revision="v2", trust' in files[name]
    assert b'"head": "you/branched@v2"' in files["README.md"]


@pytest.mark.parametrize("kind", ["falcon", "student"])
def test_a_name_may_say_its_revision(hub, nursery, push, tmp_path, kind):
    name = f"you/{kind}_at"
    assert push(kind, name, "hub.revision=v2").returncode == 0
    few = ["eval.limit=1", "eval.max_new_tokens=4", f"output.dir={tmp_path / 'out'}"]
    done = run(nursery, "eval/bench.py", f"{name}@v2", *few)
    assert done.returncode == 0, done.stderr[-2000:]
    for other in (name, f"{name}@v3"):
        gone = run(nursery, "eval/bench.py", other, *few)
        assert gone.returncode == 2
        assert f"{other} is no recipe or folder here, and the Hub did not give" in gone.stderr


def test_two_revisions_of_one_name_are_refused():
    with pytest.raises(HubError, match=r"you/x@v2 is not of revision v3; name one of the two"):
        fetch("you/x@v2", "v3")


def test_a_push_never_changes_or_ignores_a_repositorys_visibility(hub, runs, push):
    assert push("falcon", "you/open", "hub.private=false").returncode == 0
    assert not hub.private["you/open"]
    refused = push("falcon", "you/open")
    assert refused.returncode == 2
    assert "you/open exists and is public; set hub.private=false" in refused.stderr
    assert len(hub.commits["you/open"]["main"]) == 2
    assert push("falcon", "you/closed").returncode == 0
    refused = push("falcon", "you/closed", "hub.private=false")
    assert refused.returncode == 2
    assert (
        "you/closed exists and is private; push there without hub.private=false" in refused.stderr
    )
    assert hub.private["you/closed"]


def test_without_hub_credentials_training_does_not_start(nursery, tmp_path):
    arguments = [*ENTRIES["table"], "hub.repo_id=you/no", f"output.dir={tmp_path / 'run'}"]
    done = run(nursery, *arguments, HF_TOKEN="")
    assert done.returncode == 2
    assert "nobody is logged in to the Hub; run `hf auth login`" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone", "you/x"], "no recipe at gone; nearest is"),
        (["falcon", "x"], "hub.repo_id = 'x': must be owner/name"),
        (["falcon", "you/a--b"], "hub.repo_id = 'you/a--b': the Hub takes no such name"),
    ],
)
def test_what_cannot_be_pushed_gives_one_clear_message(push, arguments, message):
    done = push(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_folder_is_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "head").mkdir(parents=True)
    assert fetch("runs/head") == Path("runs/head")
    for name in (Path("you/head"), "./you", "/you/head", "~/head", "runs/tiny/head", "head"):
        assert not is_hub_id(name)
    assert is_hub_id("you/head")
    assert is_hub_id("you/head@refs/pr/1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="you/head is no local folder and the Hub did not give it"):
        fetch("you/head")


def test_without_matplotlib_no_training_curve_is_made(tmp_path, monkeypatch):
    log = tmp_path / "log.jsonl"
    log.write_text('{"kind": "train", "step": 1, "loss": 2.0}\n')
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert curve(log) is None


def test_the_valid_records_of_a_killed_runs_log_are_read(tmp_path):
    log = tmp_path / LOG
    lines = ['{"kind": "train", "step": 1, "loss": 2.0}', "5", "[]", '{"kind": "train"}', "\xff"]
    lines += ['{"kind": "eval", "step": 1}', '{"kind": "train", "step": 2, "lo']
    log.write_text("\n".join(lines))
    assert [*records(log, "train")] == [{"kind": "train", "step": 1, "loss": 2.0}]
    assert [*records(tmp_path / "none.jsonl", "train")] == []
    assert curve(log) is not None


def test_a_card_marks_figures_measured_with_another_tree_than_the_current(runs):
    report = json.loads((runs / "falcon" / "report.json").read_text())
    for run in report["runs"]:
        run["tree"] = "fitted, 7 nodes to depth 6" if run["method"] == "falcon_tree" else None

    def told(nodes: int) -> bool:
        trial = {"nodes": nodes, "depth": 6, "passes": 2, "tokens": 4.0}
        trial |= {"expected": 2.0, "measured": 2.1}
        fit = Fit(weights="w", machine={"cpu": "one"}, rows=1, trials=(trial,))
        text = results([report], fit)
        return "; `falcon_tree` with another tree, fitted, 7 nodes to depth 6:\n" in text

    assert not told(7)
    assert told(11)
    assert "another tree" not in results([report])


@pytest.mark.parametrize("repo", [None, "you/t"])
def test_a_cards_examples_name_the_drafters_repository_or_folder(runs, repo):
    """To fit and to load it: the repository, or else the folder of the card."""
    run = runs / "falcon"
    named = [f"hub.repo_id={repo or 'null'}", f"output.dir={run}", "eval.tree=auto"]
    recipe, place = load_recipe(run / "recipe.yaml", named), repo or run / "falcon"
    config = json.loads((run / "falcon" / "config.json").read_text())
    trial = {"nodes": 7, "depth": 6, "passes": 2, "tokens": 4.0, "expected": 2.0, "measured": 2.1}
    fit = Fit(weights="w", machine={"cpu": "one"}, rows=1, trials=(trial,))
    card = model_card(recipe, CARDS["falcon"], config, [], picture=False, fit=fit)
    assert f"for another machine: `specdraft fit {place}`" in card
    assert f'Speculative(falcon("{place}"))' in card
    assert f'"head": "{place}"' in card


def test_the_recipes_tree_is_saved_with_the_head_locally_and_on_the_hub(runs):
    named, beside = "tiny_coupled_k3", runs / "falcon" / "falcon" / "tree.yaml"
    assert {*load_tree_paths(str(beside))} == {*load_tree_paths(named)}
    recipe = load_recipe(runs / "falcon" / "recipe.yaml", ["hub.repo_id=you/t"])
    files = contents(recipe, CARDS["falcon"])
    pushed = yaml.safe_load(files["tree.yaml"])
    assert {*map(tuple, pushed["paths"])} == {*load_tree_paths(named)}
    assert pushed["block_size"] == 3
    assert 'falcon("you/t")' in files["README.md"].decode()
    assert yaml.safe_load(files["recipe.yaml"])["eval"]["tree"] == named


def test_a_users_own_tree_is_pushed_with_the_head(runs, tmp_path):
    tree = tmp_path / "mine.yaml"
    tree.write_text("name: of my own\npaths: [[0], [1], [0, 0]]\n")
    recipe = load_recipe(
        runs / "falcon" / "recipe.yaml", [f"eval.tree={tree}", "hub.repo_id=you/t"]
    )
    files = contents(recipe, CARDS["falcon"])
    assert yaml.safe_load(files["tree.yaml"]) == {"paths": [[0], [1], [0, 0]]}
    assert 'falcon("you/t")' in files["README.md"].decode()  # the tree is with the weights
    made = files["custom_generate/generate.py"].decode()
    assert "falcon(source, revision=revision)" in made
    compile(made, "generate.py", "exec")
    assert str(tmp_path) not in files["README.md"].decode() + files["recipe.yaml"].decode()
