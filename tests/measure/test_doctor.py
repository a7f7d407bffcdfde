"""The doctor: a healthy run passes every line, and a planted fault fails the line about it."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import safetensors.torch
import torch
from commands import ROOT, run_here
from random_models import random_head, random_target
from shallow import shallow_target
from transformers import AutoTokenizer

from specdraft.data.sealed import read_sealed, write_sealed
from specdraft.data.sources import bundled_file
from specdraft.data.store import storage
from specdraft.eval.checkup import drafters as drafter_checkup
from specdraft.eval.checkup.served import check_served
from specdraft.eval.drafters.falcon import FalconDrafter
from specdraft.eval.methods.trained import Trained
from specdraft.models.maxgram import MaxGramConfig, MaxGramTable
from specdraft.models.target import Target
from specdraft.models.target_files import bundled_target_dir
from specdraft.models.weights.checksums import write_sums
from specdraft.recipes.load import load_recipe

SMALL = ["train.steps=2", "train.batch_size=2", "train.threads=1", "data.limit=12"]
SMALL += ["eval.limit=1", "eval.validation=1", "eval.max_new_tokens=12"]
SMALL += ["eval.methods=[plain,prompt_lookup,falcon_tree]", "eval.tree=tiny_coupled_k3"]
SMALL += ["data.feature_layers=[1]"]
CACHE = ["tokens", "tokenizer", "template", "mask"]
CACHE += ["shards", "target of the features", "features", "scale", "shift"]
HEAD = ["head files", "head's target", "head shape"]
METHODS = ["prompt_lookup = plain", "falcon_tree = plain"]
ENGINE = "in an engine"  # no comparison was made


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    places = [f"output.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
    places.append(f"target.model={shallow_target(folder / 'target')}")
    done = run_here("train/falcon.py", "recipes/tiny.yaml", *SMALL, *places)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture
def ill(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the run and its caches, to be damaged."""
    return Path(shutil.copytree(healthy, tmp_path / "ill"))


@pytest.fixture
def doctor(monkeypatch, capsys):
    """Run the command; return its exit code, {line: outcome}, {line: remedy} and its output."""

    def examine(folder: Path, *overrides: str):
        places = [f"output.dir={folder / 'run'}", f"data.cache_dir={folder / 'cache'}"]
        command = ["doctor.py", str(folder / "run" / "recipe.yaml"), *places, *overrides]
        monkeypatch.setattr(sys, "argv", [*command, "--prompts", "2"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "eval" / "doctor.py"), run_name="__main__")
        text = capsys.readouterr().out
        outcomes, remedies, last = {}, {}, None
        for line in text.splitlines():
            if match := re.match(r"(pass|fail|skipped) +(.+?)  ", line):
                last = match[2]
                if last != ENGINE:
                    outcomes[last] = match[1]
            elif match := re.match(r" +-> (.+)", line):
                remedies[last] = match[1]
        return end.value.code, outcomes, remedies, text

    return examine


def failing(outcomes: dict[str, str]) -> list[str]:
    return [line for line, outcome in outcomes.items() if outcome == "fail"]


def test_a_healthy_run_passes_every_line_and_shows_its_loss_mask(doctor, healthy):
    code, outcomes, remedies, text = doctor(healthy)
    assert code == 0
    assert outcomes == dict.fromkeys([*CACHE, *HEAD, *METHODS], "pass")
    assert [*remedies] == [ENGINE]
    assert "eval/parity.py" in remedies[ENGINE]
    assert "<|assistant|>«" in text.partition("text between « and » is trained on:\n")[2]
    assert f"{len(outcomes)} pass, 0 fail, 1 skipped" in text


def flip_a_byte(folder: Path) -> None:
    (shard,) = folder.glob("cache/features-*/shard-*.safetensors")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)


def cut_the_manifest(folder: Path) -> None:
    (path,) = folder.glob(f"cache/features-*/{storage.MANIFEST}")
    path.write_bytes(path.read_bytes()[:50])


def rewrite_features(folder: Path, change) -> None:
    """Change every row's features and their checksum, as if they had been computed so."""
    (path,) = folder.glob(f"cache/features-*/{storage.MANIFEST}")
    manifest = json.loads(path.read_text())
    (entry,) = manifest["shards"].values()
    tensors = safetensors.torch.load((path.parent / entry["file"]).read_bytes())
    start = 0
    for row in entry["rows"]:
        end = start + manifest["lengths"][row]
        tensors["features"][start:end] = change(tensors["features"][start:end].clone())
        start = end
    entry |= storage.write_shard(path.parent, entry["file"], tensors)
    write_sealed(path, manifest)


def lose_digits(folder: Path) -> None:
    rewrite_features(folder, lambda features: features.bfloat16().float())


def shift_forth(folder: Path) -> None:
    rewrite_features(folder, lambda features: features.roll(1, 0))


def shift_back(folder: Path) -> None:
    rewrite_features(folder, lambda features: features.roll(-1, 0))


def enlarge(folder: Path) -> None:
    """All features scaled, which makes their values wrong as well: two lines fail."""
    rewrite_features(folder, lambda features: features * 3)


def another_owner(folder: Path) -> None:
    path = folder / "run" / "falcon" / "config.json"
    path.write_text(path.read_text().replace('"weights": "', '"weights": "0'))
    write_sums(path.parent)  # as if saved so, not changed later


def other_sizes(folder: Path) -> None:
    path = folder / "run" / "falcon" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 7, "feature_scale": 1.0}))
    write_sums(path.parent)


def flip_a_bit_of_the_head(folder: Path) -> None:
    path = folder / "run" / "falcon" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # a slightly different number
    path.write_bytes(content)


def cut_the_head(folder: Path) -> None:
    path = folder / "run" / "falcon" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_a_weight(folder: Path) -> None:
    path = folder / "run" / "falcon" / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    tensors["layers.0.down.weight"][3, 5] = torch.inf
    path.write_bytes(safetensors.torch.save(tensors))


def supervise_everything(folder: Path) -> None:
    (cache,) = folder.glob("cache/tokens-*")
    rows = datasets.load_from_disk(str(cache))
    masks = [[True] * len(mask) for mask in rows["loss_mask"]]
    kind = rows.features["loss_mask"]
    rows = rows.remove_columns("loss_mask").add_column("loss_mask", masks, feature=kind)
    rows.save_to_disk(str(folder / "rows"))
    meta = read_sealed(cache / "meta.json")
    del meta["files"]  # as if built so, not damaged later
    (folder / "rows" / "meta.json").write_text(json.dumps(meta))
    shutil.rmtree(cache)
    (folder / "rows").rename(cache)


def cut_the_rows(folder: Path) -> None:
    (path,) = folder.glob("cache/tokens-*/meta.json")
    meta = read_sealed(path)
    meta["stats"]["rows"] += 1
    path.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("fault", "lines", "remedy", "unseen"),
    [
        (flip_a_byte, ["shards"], "delete that file and run again", CACHE[-4:]),
        (cut_the_manifest, ["shards"], "delete", CACHE[-4:]),
        (lose_digits, ["features"], "rebuild both caches", []),
        (shift_forth, ["shift"], "the features stand at the wrong tokens", []),
        (shift_back, ["shift"], "the features stand at the wrong tokens", []),
        (enlarge, ["features", "scale"], "rebuild both caches", []),
        (another_owner, ["head's target"], "train a head for this one", METHODS[1:]),
        (other_sizes, ["head shape"], "train one for this target", []),
        (cut_the_head, ["head files"], "delete", ["head's target", *METHODS[1:]]),
        (flip_a_bit_of_the_head, ["head files"], "delete", ["head's target", *METHODS[1:]]),
        (spoil_a_weight, ["head files"], "delete", ["head's target", *METHODS[1:]]),
        (supervise_everything, ["mask"], "mark the answers", []),
        (cut_the_rows, ["tokens"], "delete", []),
    ],
)
def test_a_planted_fault_fails_exactly_its_own_lines(doctor, ill, fault, lines, remedy, unseen):
    fault(ill)
    code, outcomes, remedies, _ = doctor(ill)
    assert code == 1
    assert failing(outcomes) == lines
    for line in lines:
        assert remedy in remedies[line]
    assert [line for line, outcome in outcomes.items() if outcome == "skipped"] == unseen


def test_a_method_that_cannot_draft_fails_with_its_own_remedy(doctor, ill):
    (ill / "run" / "falcon" / "tree.yaml").unlink()
    _, outcomes, remedies, _ = doctor(ill, "eval.tree=auto")
    assert failing(outcomes) == ["falcon_tree = plain"]
    assert remedies["falcon_tree = plain"].startswith("fit one: python eval/fit.py RECIPE")


def test_all_files_of_a_combined_drafter_are_checked_wherever_they_are(doctor, ill, tmp_path):
    table = tmp_path / "elsewhere"
    both = ["eval.methods=[plain,falcon_maxgram]", f"maxgram.table={table}"]
    code, outcomes, remedies, _ = doctor(ill, *both)
    assert (code, outcomes["head and table files"]) == (0, "skipped")
    assert "train/maxgram.py" in remedies["head and table files"]
    counted = MaxGramTable(MaxGramConfig(Target.load("tiny").vocab_size))
    for count in counted.buffers():
        count.fill_(1)
    counted.save_pretrained(table)
    code, *_, text = doctor(ill, *both)
    assert code == 0
    assert f"whole at {ill / 'run' / 'falcon'} and {table}" in text
    (table / "model.safetensors").write_bytes((table / "model.safetensors").read_bytes()[:-4])
    code, outcomes, remedies, _ = doctor(ill, *both)
    assert (code, failing(outcomes)) == (1, ["head and table files"])
    assert remedies["head and table files"] == "take a copy that is whole"  # may be another's file


def test_an_unreadable_student_fails_the_line_of_its_files(tmp_path):
    student, tiny = tmp_path / "student", Target.load("tiny")
    shutil.copytree(bundled_target_dir(), student)
    alone = ["eval.methods=[ssd]", f"student.model={student}", "student.training=none"]
    recipe = load_recipe(ROOT / "recipes" / "tiny_maxgram.yaml", alone)
    _, (whole, owner) = drafter_checkup.check_drafters(recipe, tiny, None)
    assert (whole.outcome, whole.note, owner.outcome) == ("pass", f"whole at {student}", "pass")
    (student / "model.safetensors").write_bytes(b"damaged")
    _, (whole, owner) = drafter_checkup.check_drafters(recipe, tiny, None)
    assert (whole.outcome, owner.outcome) == ("fail", "skipped")


def test_another_template_and_another_tokenizer_fail_their_lines(doctor, ill, tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text((ill / "target" / "chat_template.jinja").read_text() + "{# other #}")
    code, outcomes, remedies, _ = doctor(ill, f"target.chat_template={template}")
    assert (code, failing(outcomes)) == (1, ["template"])
    assert "rebuild both caches" in remedies["template"]

    target = Path(shutil.copytree(ill / "target", tmp_path / "target"))
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(["<|odd|>"])
    tokenizer.save_pretrained(target)
    prompts = f"eval.prompts={bundled_file('prompts.jsonl')}"  # as a user's own file
    code, outcomes, remedies, _ = doctor(ill, f"target.model={target}", prompts)
    assert (code, failing(outcomes)) == (1, ["tokenizer"])
    assert "rebuild both caches" in remedies["tokenizer"]


def test_other_target_weights_fail_the_old_features_and_heads(doctor, healthy, ill, tmp_path):
    target = Path(shutil.copytree(ill / "target", tmp_path / "target"))
    path = target / "model.safetensors"
    tensors = safetensors.torch.load(path.read_bytes())
    tensors = {name: t * 1.01 for name, t in tensors.items()}
    path.write_bytes(safetensors.torch.save(tensors, {"format": "pt"}))
    code, outcomes, _, text = doctor(ill, f"target.model={target}")
    assert code == 1
    assert failing(outcomes) == ["target of the features", "head's target"]
    assert f"made by {healthy / 'target'}" in text
    assert outcomes["features"] == outcomes["falcon_tree = plain"] == "skipped"


def test_missing_parts_are_skipped_with_the_command_that_makes_them(doctor, ill):
    shutil.rmtree(ill / "cache")
    shutil.rmtree(ill / "run" / "falcon")
    code, outcomes, remedies, _ = doctor(ill)
    assert code == 0
    there = ["prompt_lookup = plain"]
    assert [line for line, outcome in outcomes.items() if outcome == "pass"] == there
    assert "data/cache.py" in remedies["tokens"]
    assert "make one with" in remedies["head files"]


def test_the_cache_of_another_recipe_is_skipped(doctor, ill):
    code, outcomes, _, _ = doctor(ill, "data.max_length=100")
    assert code == 0
    assert {outcomes[line] for line in CACHE} == {"skipped"}


def test_a_method_that_changes_one_token_fails(doctor, ill, monkeypatch):
    measure = drafter_checkup.measure

    def spoilt(recipe, target, trained, prompts, methods):
        done = measure(recipe, target, trained, prompts, methods)
        if methods == ["falcon_tree"]:
            done.outcomes["falcon_tree"][1].completions[0].tokens[4] += 1
        return done

    monkeypatch.setattr(drafter_checkup, "measure", spoilt)
    code, outcomes, remedies, text = doctor(ill)
    assert (code, failing(outcomes)) == (1, ["falcon_tree = plain"])
    assert "1 of 2 answers are identical" in text
    assert "report it" in remedies["falcon_tree = plain"]


def test_a_drafter_that_raises_fails_although_every_answer_is_right(doctor, ill, monkeypatch):
    def broken(self, rows):
        raise RuntimeError("no draft today")

    monkeypatch.setattr(FalconDrafter, "grow", broken)
    with pytest.warns(RuntimeWarning, match="no draft today"):
        code, outcomes, remedies, text = doctor(ill)
    assert (code, failing(outcomes)) == (1, ["falcon_tree = plain"])
    assert "its drafter failed: RuntimeError: no draft today" in text
    assert "report it" in remedies["falcon_tree = plain"]


@pytest.mark.parametrize(
    ("weights", "passed", "outcome", "note"),
    [
        (None, True, "pass", "falcon_chain as here"),
        (None, False, "fail", "falcon_chain not as here"),
        (["of another head"], True, "skipped", "other weights"),
    ],
)
def test_an_engine_comparison_needs_the_same_weights(weights, passed, outcome, note, tmp_path):
    trained = Trained(head=random_head(random_target()))
    report = {"method": "falcon_chain", "engine": "vllm 0.32.0", "passed": passed}
    report["weights"] = weights or trained.weights()
    (tmp_path / "parity.json").write_text(json.dumps({"methods": [report]}))
    recipe = load_recipe(ROOT / "recipes" / "tiny.yaml", [f"output.dir={tmp_path}"])
    (finding,) = check_served(recipe, {"falcon_chain": trained, "plain": Trained()})
    assert finding.line == ENGINE
    assert finding.outcome == outcome
    assert note in finding.note
