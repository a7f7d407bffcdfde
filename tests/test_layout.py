"""The layout of the repository: floors, rooms, names, imports, sizes, packaging lists."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Imports only point down: from a folder to those before it, inside a folder from a floor to those
# before it, never to another room of the same floor. A floor lists rooms, or modules at the top of
# the folder; "." is all other modules there. Entries are the roof: they may import any floor.
FLOORS = {
    "recipes": [
        "interrupt credentials terminal",
        "errors fields static_trees yaml_file",
        "sections",
        ".",
    ],
    "models": ["families weights", "sar", "hub portable", "cards", ".", "enlarged passes"],
    "data": ["world .", "store"],
    "eval": [
        "families",
        "engine",
        "lookup pricing",
        "drafters page",
        "methods",
        "measure",
        "costing publishing",
        "generation papers checkup comparing serve",
        ".",
    ],
    "train": ["fit", "objectives", "counting curves", "."],
}
RESULTS = ROOT / "eval" / "results"  # only in the repository, not in the wheel
MOST_LINES, MOST_FILES = 400, 20  # per file, except recipes/; per folder
MODULES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))
TEXTS = (".py", ".md", ".yaml", ".json", ".toml", ".txt", ".jinja")
# Real packages that a file of ours would shadow (`python train/x.py` puts train/ first on
# sys.path), whether or not they are installed here.
HIDDEN = {"datasets", "evaluate", "logging", "tokenizers", "trl", "code", "queue", "token", "peft"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "core"}

NAMED_IN_THE_DESIGN = """recipes/schema.py
recipes/load.py recipes/errors.py recipes/static_trees.py models/target.py
models/falcon.py data/cache.py data/chat.py data/store/tokens.py data/store/features.py
data/prompts.py data/regenerate.py data/tiny.py eval/engine/tree.py eval/engine/kv.py
eval/engine/packed.py eval/engine/accept.py eval/engine/decoder.py eval/measure/report.py
eval/bench.py eval/generate.py train/fit/loop.py train/objectives/losses.py
train/objectives/glance.py train/fit/checkpoint.py train/falcon.py pyproject.toml constraints.txt
README.md LICENSE .gitignore .ci/run"""


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def dotted(path: Path) -> str:
    name = short(path).removesuffix(".py").replace("/", ".")
    return "specdraft." + name.removesuffix(".__init__")


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def is_entry(path: Path) -> bool:
    """Whether a file is a script that a user runs: it has `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.If) and "__name__ == '__main__'" in ast.unparse(node.test)
        for node in syntax(path).body
    )


PATHS = {dotted(path): path for path in MODULES}


@cache
def imported(path: Path) -> frozenset[Path]:
    """The modules of the package that a file imports, anywhere in it, also only for types."""
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from specdraft.train import loop` imports the module loop.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & PATHS.keys() or {node.module}
    return frozenset(PATHS[name] for name in found & PATHS.keys())


@cache
def place(path: Path) -> tuple[int, int, str]:
    """A module's place in the table: the folder's floor, the floor inside it, and the room."""
    folder, *rooms = path.relative_to(ROOT).with_suffix("").parts
    named = {name: n for n, floor in enumerate(FLOORS[folder]) for name in floor.split()}
    inner = rooms[0] if rooms[0] in named else "."
    room = short(path.parent)
    assert len(rooms) == 1 or inner != ".", f"{short(path)} lies in a room that has no floor"
    return [*FLOORS].index(folder), named[inner], room


def points_down(path: Path, other: Path) -> bool:
    """Whether one module may import another."""
    here, there = place(path), place(other)
    return here[:2] > there[:2] or here == there


def none(offenders: Iterator[str] | list[str], rule: str) -> None:
    """Fail with everything that breaks a rule, a line each."""
    lines = sorted(offenders)
    assert not lines, "\n".join([f"{rule}; {len(lines)} do not:", *lines])


def test_imports_only_point_down():
    offenders = (
        f"{short(path)} imports {short(other)}"
        for path in MODULES
        if not is_entry(path)
        for other in imported(path)
        if not points_down(path, other)
    )
    none(offenders, "imports point down the floors of FLOORS, and never to a room beside")


def test_every_floor_in_the_table_exists():
    for folder, floors in FLOORS.items():
        for name in " ".join(floors).split():
            there = (ROOT / folder / name).is_dir() or (ROOT / folder / f"{name}.py").is_file()
            assert there, f"{folder}/{name}"


def test_everything_is_printed_through_one_module():
    # There foreign text is shown, and never obeyed.
    printing = re.compile(r"noqa: T201|\bConsole\(|\bstd(out|err)\.write\(")
    offenders = (
        f"{short(path)}:{number}"
        for path in MODULES
        if short(path) != "recipes/terminal.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if printing.search(line)
    )
    none(offenders, "a line is printed by tell, say or a Screen of recipes/terminal.py")


def test_there_is_no_import_cycle():
    graph = {path: imported(path) - {path} for path in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" <- ".join(map(short, error.args[1]))) from None


def test_nothing_imports_an_entry():
    entries = {path for path in MODULES if is_entry(path)}
    offenders = (
        f"{short(path)}: {', '.join(map(short, found))}"
        for path in MODULES
        if (found := imported(path) & entries)
    )
    none(offenders, "an entry may import anything, and nothing imports an entry")


def test_only_entries_handle_signals_while_importing():
    """Importing a library must not change the importer's handlers. ruff sorts this import first."""
    entry, starting = (ROOT / "recipes" / f"{name}.py" for name in ("entry", "starting"))
    offenders = (
        short(path)
        for path in MODULES
        if is_entry(path) != (entry in imported(path))
        or (starting in imported(path) and path != entry)
    )
    none(offenders, "recipes/entry.py is what every entry imports, and nothing else does")


def test_entries_are_at_the_top_of_their_folder():
    entries = [short(path) for path in MODULES if is_entry(path)]
    assert {"train/falcon.py", "train/distill.py", "data/cache.py"} <= set(entries)
    assert {"eval/bench.py", "eval/generate.py"} <= set(entries)
    none((name for name in entries if name.count("/") > 1), "entries are no rooms' business")


def test_files_and_folders_keep_their_size_limits():
    offenders = [
        f"{short(path)}: {lines} lines"
        for path in MODULES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
        and not short(path).startswith("recipes/")
    ]
    for folder in {path.parent for path in MODULES}:
        files = len([*folder.glob("*.py")])
        offenders += [f"{short(folder)}/: {files} files"] if files > MOST_FILES else []
    none(offenders, f"a file has at most {MOST_LINES} lines, a folder {MOST_FILES} files")


def wrong_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom):
            names = [node.module if node.level == 0 else "." * node.level]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            if name.startswith(".") or name.split(".")[0] in FLOORS:
                yield f"{short(path)}:{node.lineno}: {name}"


def test_imports_are_absolute_and_start_with_the_package():
    # `from models.falcon import ..` works by accident in a checkout, and loads each class twice.
    offenders = (line for path in MODULES for line in wrong_imports(path))
    none(offenders, "imports are absolute and start with specdraft")


DEFINITIONS = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)
DEFINITIONS += (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def runs_on_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) not in ("__name__ == '__main__'", "TYPE_CHECKING")
    return not isinstance(node, DEFINITIONS)


def test_nothing_happens_on_import():
    statements = ((path, node) for path in MODULES for node in syntax(path).body)
    offenders = (
        f"{short(path)}:{node.lineno}"
        for path, node in statements
        if runs_on_import(node) and short(path) != "recipes/starting.py"
    )
    none(offenders, "a module only defines")


def test_every_module_has_a_docstring():
    named = (path for path in MODULES if path.name != "__init__.py")
    none((short(p) for p in named if not ast.get_docstring(syntax(p))), "a module has a docstring")


def test_no_file_shadows_a_package_or_has_a_vague_name():
    installed = set(importlib.metadata.packages_distributions())
    taken = sys.stdlib_module_names | installed | HIDDEN | VAGUE | {"specdraft"}
    taken -= {"__init__"}
    none((short(path) for path in MODULES if path.stem in taken), "a name is free and says what")


def test_the_root_is_not_a_package():
    assert not (ROOT / "__init__.py").exists()


def test_files_named_in_the_design_exist():
    missing = [name for name in NAMED_IN_THE_DESIGN.split() if not (ROOT / name).exists()]
    assert missing == []


def setuptools_settings() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_modules_is_a_listed_package():
    folders = {path.parent for path in MODULES}
    assert {dotted(folder) for folder in folders} == set(setuptools_settings()["packages"])
    assert [short(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_package_data_covers_every_data_file():
    patterns = setuptools_settings()["package-data"]
    packages = {path.parent for path in MODULES}
    for path in (path for name in FLOORS for path in (ROOT / name).rglob("*")):
        if (
            not path.is_file()
            or path.suffix in (".py", ".pyc", ".ipynb")
            or RESULTS in path.parents
        ):
            continue
        package = next(parent for parent in path.parents if parent in packages)
        inside = path.relative_to(package)
        covered = any(
            # As setuptools reads them: a star does not cross a folder.
            len(Path(pattern).parts) == len(inside.parts) and fnmatch(str(inside), pattern)
            for pattern in [*patterns["*"], *patterns.get(dotted(package), [])]
        )
        assert covered, f"{short(path)} matches no package-data pattern of {dotted(package)}"


def test_constraints_pin_the_exact_version_of_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in wanted}
    assert names <= pinned
    assert "torch==2.13.0" in pins


def test_no_text_contains_a_local_path():
    folders = [ROOT / name for name in (*FLOORS, "tests", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.glob("*") if path.suffix in TEXTS]
    for path in files:
        if path.suffix in TEXTS or path.name == "run":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"(?<![\w.])/(work|home|Users|root)/", text), short(path)
