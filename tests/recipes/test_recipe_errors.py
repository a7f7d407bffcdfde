"""Recipe mistakes: each is reported with its value, what is allowed and the nearest known key."""

import dataclasses
import difflib
import random
import re
import string
from pathlib import Path

import pytest

from specdraft.eval.methods.registry import problems
from specdraft.recipes import schema
from specdraft.recipes.errors import RecipeError
from specdraft.recipes.load import dump, from_dict, load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
SECTIONS = {
    field.name: field.type for field in dataclasses.fields(schema.Recipe) if field.name != "name"
}
SMALLEST = {"name": "x", "data": {"sources": ["tiny"]}, "train": {"steps": 1}}


def complaint(*overrides: str, recipe: Path = RECIPES / "tiny.yaml") -> str:
    """Return the message of a recipe that must be refused, without the recipe's path."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, list(overrides), check=problems)
    return str(caught.value).removeprefix(f"{recipe}: ")


def refused(text: str, folder: Path) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return complaint(recipe=path)


# Overrides


def test_overrides_are_yaml_values():
    recipe = load_recipe(
        RECIPES / "tiny.yaml",
        [
            "optim.lr=1.0e-4",
            "data.sources=[../a.jsonl, owner/name]",
            "glance.enabled=false",
            "train.steps=null",
            "train.epochs=2",
            "target.model=../models/x=y",
            "optim.clip_norm=2",
            "optim.betas=[0.8,0.9]",
            "name=other",
        ],
    )
    assert recipe.optim.lr == 1.0e-4
    assert recipe.data.sources == ("../a.jsonl", "owner/name")
    assert recipe.glance.enabled is False
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2)
    assert recipe.target.model == "../models/x=y"
    assert recipe.optim.clip_norm == 2.0
    assert isinstance(recipe.optim.clip_norm, float)
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.output.dir == "runs/other"
    assert load_recipe(RECIPES / "tiny.yaml", ["output.dir=a/b"]).output.dir == "a/b"


def test_an_override_without_an_assignment_is_refused():
    assert "override 'optim.lr': write it as key=value" in complaint("optim.lr")


def test_an_override_that_is_invalid_yaml_is_refused():
    assert complaint("data.sources=[a").startswith("override 'data.sources=[a': line 1: ")


# Values


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seed=true", "train.seed = True: must be a whole number, not true or false"),
        ("train.seed='3'", "train.seed = '3': must be a whole number, not text; write 3 without"),
        ("train.seed=3.0", "must be a whole number, not a number with a fraction; write 3"),
        ("train.seed=3.5", "must be a whole number, not a number with a fraction"),
        ("train.seed=-1", "train.seed = -1: must be >= 0"),
        ("train.batch_size=0", "train.batch_size = 0: must be >= 1"),
        ("train.batch_size=null", "must be a whole number, not null"),
        ("data.limit=0", "data.limit = 0: must be >= 1 and <= 1000000000 (or null)"),
        ("data.limit=[1]", "data.limit = [1]: must be a whole number, not a list (or null)"),
        ("optim.lr='3e-5'", "optim.lr = '3e-5': must be a number, not text; write 3e-5 without"),
        ("target.model=3e5", "must be text, not a number with a fraction; put it in quotes"),
        ("optim.lr=fast", "optim.lr = 'fast': must be a number, not text"),
        ("optim.lr=true", "optim.lr = True: must be a number, not true or false"),
        ("optim.lr=.nan", "optim.lr = nan: must be a finite number"),
        ("optim.lr=0", "optim.lr = 0: must be > 0"),
        ("optim.warmup=1.5", "optim.warmup = 1.5: must be >= 0 and <= 1"),
        ("optim.betas=0.9", "optim.betas = 0.9: must be a list"),
        ("optim.betas=[0.9]", "must have 2 entries, not 1"),
        ("optim.betas=[0.9,2]", "optim.betas = [0.9, 2]: entry 1 (2) must be >= 0 and <= 1"),
        ("eval.top_p=0", "eval.top_p = 0: must be > 0 and <= 1"),
        ("data.format=sharegtp", "one of auto, sharegpt, messages, alpaca, text, seq2seq; nearest"),
        ("data.format=sharegtp", "nearest is sharegpt"),
        ("head.fusion=false", "head.fusion = False: must be one of lstm, linear"),
        ("train.precision=bf16", "must be one of float32, bfloat16; nearest is bfloat16"),
        ("glance.enabled=1", "glance.enabled = 1: must be true or false, not a whole number"),
        ("glance.enabled='no'", "glance.enabled = 'no': must be true or false, not text"),
        ("target.model=7", "must be text, not a whole number; put it in quotes"),
        ("target.model=null", "target.model = None: must be text, not null"),
        (
            "target.revision=12",
            "must be text, not a whole number; put it in quotes to make it text",
        ),
        ("data.sources=a.jsonl", "data.sources = 'a.jsonl': must be a list, not text: write [a.js"),
        ("data.sources=[1]", "entry 0 (1) must be text, not a whole number"),
        ("drafting.theta_prob=1.2", "drafting.theta_prob = 1.2: must be >= 0 and <= 1"),
        ("drafting.theta_sib=-0.1", "drafting.theta_sib = -0.1: must be >= 0 and <= 1"),
        ("drafting.tau=-1", "drafting.tau = -1: must be >= 0"),
        ("drafting.out_degree=0", "drafting.out_degree = 0: must be >= 1"),
        ("drafting.branching=[2,0]", "drafting.branching = [2, 0]: entry 1 (0) must be >= 1"),
        ("drafting.branching=[]", "drafting.branching = []: give the children by depth"),
        ("drafting.branching=[9,9,9,9]", "makes 7380 nodes, at most 4096; lower some factors"),
        ("drafting.sibling_pruning=no", "must be one of leaf, drop"),
        ("eval.methods=[rsd_s]", "eval.methods: rsd_s drafts with a student"),
        ("eval.methods=[falcon_three]", "entry 0 ('falcon_three') must be one of plain, generate"),
        ("eval.methods=[ssd:pad]", "(most with :padded, :pad_kv, :pad_inputs, :dynamic, too)"),
        ("eval.methods=[falcon_three]", "nearest is falcon_tree"),
        ("optim=3", "optim = 3: must be a mapping of keys to values (name, lr, betas,"),
        ("name=a/b", "name = 'a/b': must be text that can name a folder"),
        ("name=3", "name = 3: must be text that can name a folder"),
    ],
)
def test_a_value_that_is_not_allowed_is_reported_with_what_is(override: str, expected: str):
    assert expected in complaint(override)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.epochs=2"], "train.steps = 1500 and train.epochs = 2: set exactly one"),
        (["train.steps=null"], "train.steps and train.epochs are both null: set exactly one"),
        (["train.accumulation=3"], "train.accumulation = 3: must divide train.batch_size (8)"),
        (["data.sources=[]"], "data.sources = []: name at least one"),
        (
            ["head.block_size=2", "eval.tree=tiny_coupled_k3"],
            "eval.tree = 'tiny_coupled_k3': made for blocks of 3, and head.block_size = 2; take",
        ),
        (
            ["head.block_size=1", "eval.tree=tiny_k1", "head.coupling=none"],
            "head.reads = 'both': needs head.block_size above 1; a block of one slot has own",
        ),
        (
            ["head.block_size=1", "eval.tree=tiny_k1", "head.reads=own"],
            "head.coupling = 'recurrent': needs head.block_size above 1",
        ),
        (
            ["data.answers=target", "data.max_new_tokens=null"],
            "data.max_new_tokens = None: data.answers=target needs the length of an answer",
        ),
        (["data.samples=2"], "data.samples = 2: needs data.answers=target"),
        (["data.samples=2", "data.answers=target"], "set data.temperature above 0"),
        (["data.server=http://a/v1"], "data.server = 'http://a/v1': needs data.answers=target"),
        (
            ["data.server=localhost:8000", "data.answers=target"],
            "data.server = 'localhost:8000': must be a URL, e.g. http://127.0.0.1:8000/v1",
        ),
        *(
            ([f"data.server=http://{host}/v1", "data.answers=target"], "must be a URL, e.g. http")
            for host in ("127.0.0.1:99999", "127.0.0.1:80x", "[::1", ":8000")
        ),
        (
            ["data.server_model=mine", "data.answers=target"],
            "data.server_model = 'mine': needs data.server",
        ),
        (
            ["data.format=text", "data.answers=target"],
            "data.prompt_tokens = None: data.answers=target continues a prompt",
        ),
        (["data.prompt_tokens=512"], "must be below data.max_length (512)"),
        (["head.heads=6", "head.kv_heads=4"], "head.kv_heads = 4: must divide head.heads (6)"),
        (
            ["head.draft_vocab=10", "eval.tree=falcon_k2_depth8_wide"],
            "head.draft_vocab = 10 drafts among as many; raise it, or take another tree",
        ),
        (["loss.feature_weight=0", "loss.distill_weight=0"], "nothing to train on"),
        (
            ["loss.lk_weight=0.5", "loss.soft_weight=0.0"],
            "lk_weight is a share of soft_weight; set it",
        ),
        (["loss.lk_weight=1.5"], "loss.lk_weight = 1.5: must be >= 0 and <= 1"),
        (["loss.depth_decay=0.0"], "loss.depth_decay = 0.0: must be > 0 and <= 1"),
        (["loss.depth_decay=0.8", "loss.pace_smoothing=0.5"], "both weigh by depth; set"),
        (
            [
                *["head.block_size=1", "head.reads=own", "head.coupling=none", "eval.tree=tiny_k1"],
                "train.rollout=1",
                "loss.pace_smoothing=0.5",
            ],
            "loss.pace_smoothing = 0.5: every token is trained at depth 1; set train.rollout",
        ),
        (["optim.betas=[0.9,1]"], "each must be below 1"),
        (["eval.methods=[]"], "eval.methods = []: name at least one"),
        (["eval.prompts=holdout"], "needs rows that training never sees; set data.holdout"),
        (
            ["eval.prompts=holdout", "data.holdout=5", "data.format=text"],
            "eval.prompt_tokens = None: a text has no prompt of its own",
        ),
        (["eval.tree=tinyk2"], "eval.tree = 'tinyk2': unknown tree; nearest is tiny_k2 of eagle"),
        (["data.feature_layers=[4,4]"], "data.feature_layers = [4, 4]: name each layer once"),
        (["data.feature_layers=[0]"], "data.feature_layers = [0]: entry 0 (0) must be >= 1"),
        (["data.feature_layers=[4]", "medusa.heads=4"], "[4]: Medusa heads do not read them"),
        (["data.feature_layers=[4]", "student.layers=1"], "[4]: students do not read them"),
        (["head.start_layer=11", "head.fusion=lstm"], "'lstm': must be linear, to begin"),
        (["head.start_layer=11", "head.heads=2"], "= 2: must be null, the target's, to begin"),
        (["head.start_layer=0"], "head.start_layer = 0: must be >= 1"),
        (["eval.tree=no/tree.yaml"], "no/tree.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_an_impossible_combination_is_refused(overrides: list[str], expected: str):
    assert expected in complaint(*overrides)


def test_a_section_built_in_python_is_checked_too():
    with pytest.raises(RecipeError, match=r"optim\.lr = '3e-5': .* write 3e-5 without quotes"):
        schema.OptimSection(lr="3e-5")
    with pytest.raises(RecipeError, match=r"set data\.holdout"):
        schema.Recipe(
            name="x",
            data=schema.DataSection(sources=["tiny"]),
            train=schema.TrainSection(steps=1),
            eval=schema.EvalSection(prompts="holdout"),
        )


def test_a_checked_recipe_cannot_be_changed():
    recipe = from_dict(SMALLEST)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.train.steps = 2


def test_all_errors_are_reported_at_once():
    message = complaint(
        "optim.lr=3e5000",
        "optim.lrr=1",
        "data.max_length=1",
        "eval.prompts=holdout",
        "nonsense=1",
        "train.epochs=1",
        "broken",
    )
    first, *problems = message.splitlines()
    assert first == "6 errors"
    for start in ("override 'broken'", "optim.lr ", "optim.lrr ", "data.max_length", "nonsense"):
        assert sum(line.startswith(f"  {start}") for line in problems) == 1
    assert sum("set exactly one" in line for line in problems) == 1


# Keys


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_reported_with_the_nearest_known_key(section: str):
    known = [field.name for field in dataclasses.fields(SECTIONS[section])]
    everywhere = {field.name for kind in SECTIONS.values() for field in dataclasses.fields(kind)}
    letters = random.Random(0)
    for key in known:
        place = letters.randrange(len(key))
        mistakes = {
            key[:place] + key[place + 1 :],
            key[:place] + letters.choice(string.ascii_lowercase) + key[place:],
            "".join(letters.choices(string.ascii_lowercase, k=6)),
        }
        for wrong in mistakes - everywhere - {""}:
            best = max(known, key=lambda name: difflib.SequenceMatcher(None, name, wrong).ratio())
            ratio = difflib.SequenceMatcher(None, best, wrong).ratio()
            with pytest.raises(RecipeError) as caught:
                from_dict({**SMALLEST, section: {**SMALLEST.get(section, {}), wrong: 1}})
            message = str(caught.value)
            assert f"{section}.{wrong} is an unknown key; nearest is {section}." in message
            named = re.search(rf"nearest is {section}\.(\w+) \({section} has ", message)[1]
            # Several may be equally near; any of them is fine.
            assert difflib.SequenceMatcher(None, named, wrong).ratio() == pytest.approx(ratio)
            assert message.count(", ") >= len(known) - 1


def test_a_key_in_the_wrong_section_is_reported_with_the_right_one():
    assert "train.lr is an unknown key; nearest is optim.lr" in complaint("train.lr=1.0")
    assert "lr is an unknown key; nearest is optim.lr" in complaint("lr=1.0")
    assert "trian.steps is an unknown key" not in complaint("trian.steps=1")
    assert "trian is an unknown key; nearest is train (a recipe has name, " in complaint(
        "trian.steps=1"
    )


def test_a_missing_key_is_reported(tmp_path: Path):
    assert refused("train: {steps: 1}", tmp_path) == "data.sources is missing"


# Invalid files


def test_a_missing_recipe_is_reported_with_the_known_ones(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"no recipe at .*vicuna7.yaml; nearest is .*vicuna7b"):
        load_recipe(RECIPES / "vicuna7.yaml")
    with pytest.raises(RecipeError, match=r"tiny, .*tinystories, .*vicuna13b, vicuna7b"):
        load_recipe(tmp_path / "tinny.yaml")


def test_a_recipe_is_found_by_its_name_and_by_its_runs_folder(tmp_path: Path):
    assert load_recipe("tiny_eagle") == load_recipe(RECIPES / "tiny_eagle.yaml")
    recipe = load_recipe("tiny", ["train.steps=7"])
    dump(recipe, tmp_path / "run" / "recipe.yaml")
    run = dataclasses.replace(recipe, output=schema.OutputSection(dir=str(tmp_path / "run")))
    assert load_recipe(tmp_path / "run") == run
    (tmp_path / "run" / "head").mkdir()
    (tmp_path / "run" / "head" / "config.json").touch()
    for folder in (tmp_path / "run", tmp_path / "run" / "head"):
        assert load_recipe(folder) == run  # wherever it was moved
    with pytest.raises(RecipeError, match=r"is not the folder of a run.*but run; name a recipe"):
        load_recipe(tmp_path)
    for name in ("../tiny", "tiny\0", "x" * 5000, ""):
        with pytest.raises(RecipeError, match=r"no recipe at|is not the folder of a run"):
            load_recipe(name)


def test_a_run_with_several_kinds_must_be_given_by_the_folder_of_one(tmp_path: Path):
    for name in ("tiny", "tiny_eagle"):
        recipe = load_recipe(name)
        dump(recipe, tmp_path / recipe.kind / "recipe.yaml")
        dump(recipe, tmp_path / "recipe.yaml")
        assert load_recipe(tmp_path / recipe.kind).head == recipe.head
        if name == "tiny":
            dump(load_recipe("tiny_maxgram"), tmp_path / "table" / "recipe.yaml")  # beside it
            assert load_recipe(tmp_path).head == recipe.head
    with pytest.raises(
        RecipeError, match=rf"several kinds, falcon, eagle.*; name .*{tmp_path}/falc"
    ):
        load_recipe(tmp_path)


def test_a_copied_students_recipe_names_the_copy_without_a_revision(tmp_path: Path):
    pinned = ["student.model=you/base", "student.revision=v1", "student.keep_layers=null"]
    dump(load_recipe("tiny_distill", pinned), tmp_path / "recipe.yaml")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    student = load_recipe(tmp_path).student
    assert (student.model, student.revision) == (str(tmp_path), None)


def test_a_recipes_kind_of_drafter_follows_from_its_settings():
    kinds = {"tiny": "falcon", "tiny_eagle": "eagle", "tiny_eagle3": "eagle3"}
    kinds |= {"tiny_medusa": "medusa", "tiny_distill": "student"}
    assert {name: load_recipe(name).kind for name in kinds} == kinds


def test_decimal_numbers_are_accepted_in_any_usual_notation_and_others_refused():
    for text in ("3e-3", "3E-3", "3.0e-3", "3.e-3", "+3e-3", "0.003"):
        assert load_recipe("tiny", [f"optim.lr={text}"]).optim.lr == 0.003
    assert load_recipe("tiny", ["loss.depth_decay=1e0"]).loss.depth_decay == 1.0
    for text in ("0100", "1:40", "-017"):  # YAML makes them 64, 100 and -15
        with pytest.raises(RecipeError, match=rf"{text} is no decimal number; put it in quotes"):
            load_recipe("tiny", [f"train.steps={text}"])


@pytest.mark.parametrize("revision", ["12e4567", "0123456", "1:40", "null", "2020-01-01"])
def test_text_that_looks_like_a_number_survives_a_round_trip(tmp_path: Path, revision: str):
    recipe = load_recipe("tiny", [f'target.revision="{revision}"'])
    dump(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(str(tmp_path / "recipe.yaml")).target.revision == revision


def test_an_empty_section_in_a_partial_recipe_changes_nothing(tmp_path: Path):
    (tmp_path / "part.yaml").write_text("eval:\n  # limit: 4\n")
    assert load_recipe("tiny", [str(tmp_path / "part.yaml")]).eval == load_recipe("tiny").eval


def test_a_null_section_in_a_partial_recipe_resets_it_to_its_defaults(tmp_path: Path):
    (tmp_path / "part.yaml").write_text("glance: null\nloss:\n")
    recipe, whole = load_recipe("tiny", [str(tmp_path / "part.yaml")]), load_recipe("tiny")
    assert recipe.glance != whole.glance
    assert recipe.glance == type(recipe.glance)()
    assert recipe.loss == whole.loss


def test_output_paths_may_start_with_a_tilde(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = load_recipe("tiny", ["output.dir=~/run", "data.cache_dir=~/cache"])
    assert recipe.output.dir == str(tmp_path / "run")
    assert recipe.data.cache_dir == str(tmp_path / "cache")


def test_broken_yaml_is_reported_with_its_line(tmp_path: Path):
    message = refused("name: x\ntrain: {steps: 1\ndata: 3\n", tmp_path)
    assert message.startswith("line 3: while parsing a flow mapping, expected")
    message = refused("optim: {lr: &a 0.1}\nloss: {distill_weight: &a 1.0}\n", tmp_path)
    assert message.startswith("line 2: found duplicate anchor 'a'")
    assert refused("- a\n", tmp_path).startswith("must be a mapping of keys to values, not ['a']")
    assert refused("", tmp_path).startswith("must be a mapping of keys to values, not None")


def test_a_key_given_twice_is_refused(tmp_path: Path):
    message = refused("optim:\n  lr: 0.1\n  warmup: 0.0\n  lr: 0.2\n", tmp_path)
    assert message == "line 4: lr is given twice"


def test_a_recipe_file_that_is_not_utf_8_is_refused(tmp_path: Path):
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert complaint(recipe=path) == "cannot be read (not UTF-8 text)"


# Credentials

PASSWORD = "hunter2pass"
TOKEN = "hf_" + "aB3" * 12


@pytest.mark.parametrize(
    "override",
    [
        f"data.server=http://me:{PASSWORD}@10.0.0.1:8000/v1",
        f"data.server=http://{PASSWORD}@10.0.0.1:8000/v1",
        f"data.server=http://10.0.0.1:8000/v1?api_key={PASSWORD}",
        f"data.server=http://10.0.0.1:8000/v1?key={PASSWORD}&x=1",
        f"data.sources=[https://me:{PASSWORD}@there/chats.jsonl]",
        f"target.model=https://me:{PASSWORD}@huggingface.co/you/model",
        f"data.sources=['hf://datasets/you/chats/{TOKEN}.jsonl']",
        f"data.server_model={TOKEN}",
        f"data.server_model=sk-proj-{PASSWORD}{PASSWORD}{PASSWORD}",
    ],
)
def test_credentials_are_refused_and_not_repeated(override):
    message = complaint("data.answers=target", override)
    assert PASSWORD not in message
    assert TOKEN not in message
    assert "must hold no credentials" in message
    assert "OPENAI_API_KEY" in message
    assert "HF_TOKEN" in message


def test_messages_about_other_errors_show_no_credentials_either():
    for override in (
        f"data.sever=http://me:{PASSWORD}@there/v1",
        f"nonsense http://me:{PASSWORD}@there/v1",
        f"train.steps=http://me:{PASSWORD}@there/v1",
    ):
        assert PASSWORD not in complaint(override)


@pytest.mark.parametrize(
    "override",
    [
        "target.model=you/sk-learn-based-chat-model-of-a-long-name",
        "target.model=/models/hf_mirror/llama",
        "data.sources=['hf://datasets/you/chats@main/rows.jsonl']",
        "target.model=/runs/step=3/key=value",
    ],
)
def test_names_that_merely_resemble_credentials_are_accepted(override):
    load_recipe(RECIPES / "tiny.yaml", [override], check=problems)
