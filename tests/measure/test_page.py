"""report.html shows the figures of report.json in a real browser, and no injected content."""

import copy
import errno
import importlib.util
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from shallow import shallow_tiny

from specdraft.data.prompts import load_prompts
from specdraft.eval.measure.report import evaluate, write_report
from specdraft.eval.methods.registry import METHODS
from specdraft.eval.methods.trained import Trained
from specdraft.eval.page.canvas import INK, LETTER, WIDTH, Label, Plot, write_png
from specdraft.eval.page.colours import COLOURS, method_colours
from specdraft.eval.page.page import COLUMNS, TIMES, draft_lines, training_plots, write_page
from specdraft.eval.page.plots import bars, node_tree, stacks
from specdraft.eval.page.training import POINTS, training_curve
from specdraft.models.cards.log import LOG
from specdraft.models.falcon import FalconConfig, FalconHead
from specdraft.recipes.errors import CacheError
from specdraft.recipes.load import load_recipe

LATER = ("date", "headline", "training")
NEWER = ("verified_per_step", "acceptance_by_node", "failed", "fallbacks", "failures")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
HOSTILE = (
    "'\"><img src=x onerror='document.body.dataset.owned=1'></textarea></script>"
    "<script>document.body.dataset.owned=1</script>{{ 7 * 7 }}$x$&amp;"
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium: apt-get install chromium")
EMPTY = {"meta", "br", "input", "img", "link"}


class Page(HTMLParser):
    """A page as a flat list of elements: (tag, attributes, text inside, tags around)."""

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        element = {"tag": tag, "attributes": dict(attributes), "text": "", "in": list(self.open)}
        self.elements.append(element)
        if tag not in EMPTY:
            self.open.append(element)

    def handle_endtag(self, tag):
        while self.open and self.open.pop()["tag"] != tag:
            pass

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag: str, within: dict | None = None, **attributes: str) -> list[dict]:
        wanted = attributes.items()
        return [
            e
            for e in self.elements
            if e["tag"] == tag
            and (within is None or any(e is within or around is within for around in e["in"]))
            and all(e["attributes"].get(k.replace("_", "-").strip("-")) == v for k, v in wanted)
        ]


def browse(path: Path, *options: str) -> str:
    """The document in Chromium after its scripts have run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=2000"]
    command += [*options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("<!DOCTYPE html>"), done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def report():
    """A report with two batch sizes, repeats, and a tree of an untrained head."""
    tiny, runs = shallow_tiny(), []
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "intermediate_size": 64}
    head = FalconHead(FalconConfig(hidden_size=128, vocab_size=tiny.vocab_size, **shape))
    for size in (1, 2):
        limits = ["eval.limit=3", "eval.max_new_tokens=12", "eval.repeats=2", "train.threads=1"]
        limits += ["eval.tree=tiny_k2"]
        recipe = load_recipe("recipes/tiny.yaml", [*limits, f"eval.batch_size={size}"])
        prompts = load_prompts(recipe, tiny.tokenizer)
        methods = ["plain", "generate", "prompt_lookup", "falcon_tree"]
        made = evaluate(recipe, tiny, Trained(head), prompts, methods)
        runs += made["runs"]
    return made | {"runs": runs}


def shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def check_numbers(page: Page, report: dict) -> None:
    """Every figure of every run is in its table and, if it has one, in its plot."""
    tables = page.all("table", _class="runs")
    rows = [row for table in tables for row in page.all("tr", table) if "data-batch" in
            row["attributes"]]  # fmt: skip
    assert len(rows) == len(report["runs"])
    for run in report["runs"]:
        where = {"data_method": run["method"], "data_batch": str(run["batch_size"])}
        (row,) = page.all("tr", **where)
        cells = {cell["attributes"]["data-key"]: cell["text"] for cell in page.all("td", row)}
        for key, (_, digits) in COLUMNS.items():
            expected = shown(run.get(key), digits)
            assert cells.pop(key, "-") == expected, (run["method"], key)
        assert cells == {"identical": f"{run['identical']}/{run['outputs']}"}
        tag = f"{run['prompt_set']}-t{run['temperature']:g}-b{run['batch_size']}"

        def labels(plot: str, tag: str = tag) -> list[str]:
            (svg,) = page.all("svg", data_plot=f"{plot}-{tag}")
            return [text["text"] for text in page.all("text", svg)]

        for plot, key in (("speedup", "speedup"), ("tokens", "tokens_per_step")):
            texts = labels(plot)
            assert texts[texts.index(run["method"]) + 1] == f"{run[key]:.2f}"
        phases = [run[f"{key}_per_step"] for key in TIMES.values()]
        if None not in phases:
            texts = labels("time")
            assert texts[texts.index(run["method"]) + 1] == f"{sum(phases):.2f}"
        for depth, share in enumerate(run["acceptance_by_depth"], start=1):
            assert f"{run['method']}, depth {depth}: {share}" in page.tips
        if run["method"].endswith("_tree"):
            for node in run.get("acceptance_by_node", []):
                ranks = ".".join(map(str, node["path"]))
                tip = f"ranks {ranks}: accepted {node['accepted']} of {node['drafted']}"
                assert tip in page.tips


def parse(text: str) -> Page:
    page = Page(text)
    page.tips = {title["text"] for title in page.all("title")}
    return page


def check_replay(page: Page, report: dict) -> None:
    """Tokens, kinds and drafts of the samples, step by step."""
    replays = page.all("div", _class="card replay")
    assert len(replays) == len(report["samples"]) > 0
    for place, sample in zip(replays, report["samples"], strict=True):
        steps = [s for s in page.all("span", place) if "data-tokens" in s["attributes"]]
        for span, step in zip(steps, sample["replay"], strict=True):
            assert span["attributes"]["data-tokens"] == str(len(step["tokens"]))
            inside = page.all("span", span)
            classes = [(s["text"], s["attributes"].get("class", "")) for s in inside]
            tokens = [(t, c.split()[1]) for t, c in classes if c.startswith("token ")]
            assert tokens == [tuple(token) for token in step["tokens"]]
            nodes = [line["text"].lstrip(" ") for line in page.all("i", span)]
            texts = step["draft"]["texts"][1:] if step["draft"] else []
            assert sorted(nodes) == sorted(text.lstrip(" ") for text in texts)


@needs_browser
def test_the_page_in_a_browser_shows_the_figures_of_the_json(report, tmp_path):
    write_report(report, tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    page = parse(browse(tmp_path / "report.html"))
    check_numbers(page, report)
    check_replay(page, report)
    # The page's policy lets its own script run: the controls are shown and know the steps.
    first = report["samples"][0]
    assert "hidden" not in page.all("div", _class="controls")[0]["attributes"]
    told = page.all("output")[0]["text"]
    assert told == f"step {first['steps']} of {first['steps']}, {first['tokens']} tokens"
    for run in report["runs"]:
        assert f"{run['method']}, batch size {run['batch_size']}: {run['speedup']}" in page.tips


@needs_browser
def test_an_older_report_without_newer_figures_is_shown(report, tmp_path):
    older = copy.deepcopy(report)
    for key in LATER:
        del older[key]
    for run in older["runs"]:
        for key in NEWER:
            del run[key]
    write_page(older, tmp_path)
    check_numbers(parse(browse(tmp_path / "report.html")), older)


@needs_browser
def test_html_in_model_output_and_prompts_stays_text(report, tmp_path):
    hostile = copy.deepcopy(report)
    hostile["recipe"]["target"]["model"] = hostile["date"] = hostile["headline"] = HOSTILE
    hostile["recipe"]["output"]["dir"] = f"runs/{HOSTILE.replace('/', '')}"
    hostile["environment"]["cpu"] = HOSTILE
    for run in hostile["runs"]:
        run["prompt_set"] = HOSTILE
        run["method"] += HOSTILE
        for entry in run["categories"]:
            entry["category"] += HOSTILE
    for sample in hostile["samples"]:
        sample["method"] = sample["prompt"] = HOSTILE
        for step in sample["replay"]:
            step["tokens"] = [(HOSTILE, kind) for _, kind in step["tokens"]]
            if step["draft"]:
                step["draft"]["texts"] = [HOSTILE for _ in step["draft"]["texts"]]
    write_page(hostile, tmp_path)
    source = (tmp_path / "report.html").read_text()
    for page in (parse(source), parse(browse(tmp_path / "report.html"))):
        assert len(page.all("script")) == 1
        assert page.all("img") == page.all("textarea") == []
        assert not any("onerror" in element["attributes"] for element in page.elements)
        (body,) = page.all("body")
        assert "data-owned" not in body["attributes"]
        assert page.all("h1")[0]["text"] == HOSTILE.replace("/", "")
        check_replay(page, hostile)
        labels = {text["text"] for text in page.all("text")}
        assert {run["method"] for run in hostile["runs"]} <= labels
    assert "49" not in page.all("h1")[0]["text"]
    assert all(path.parent == tmp_path for path in tmp_path.glob("**/*.png"))


@needs_browser
def test_the_page_fits_a_phone(report, tmp_path):
    write_report(report, tmp_path)
    # The widths of cards, and the right edges of the most important figures, unscrolled.
    measure = (
        "[...f.contentDocument.querySelectorAll('.card')].map(c => c.clientWidth), "
        "...[...f.contentDocument.querySelectorAll('[data-key=speedup], [data-key=identical], "
        "[data-headline] div')].map(c => Math.ceil(c.getBoundingClientRect().right))"
    )
    (tmp_path / "phone.html").write_text(
        "<!doctype html><iframe id=f src=report.html style='width:390px;height:800px;border:0'>"
        "</iframe><script>f.onload = () => { document.title = [f.contentDocument.documentElement"
        f".scrollWidth, ...{measure}].join(' ') }}</script>"
    )
    page = parse(browse(tmp_path / "phone.html", "--allow-file-access-from-files"))
    widths = [int(width) for width in page.all("title")[0]["text"].split()]
    assert len(widths) > 1
    assert max(widths) <= 390


def test_the_page_loads_nothing_from_elsewhere(report, tmp_path):
    text = write_page(report, tmp_path).read_text()
    page = Page(text)
    assert not any({"src", "href"} & element["attributes"].keys() for element in page.elements)
    assert "url(" not in text
    assert "@import" not in text
    policy = page.all("meta")[2]["attributes"]["content"]
    assert policy.startswith("default-src 'none'")


def test_plots_are_written_as_png_if_matplotlib_is_installed(report, tmp_path, monkeypatch):
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("no matplotlib: pip install specdraft[plots]")
    text = write_page(report, tmp_path).read_text()
    plots = {svg["attributes"]["data-plot"] for svg in Page(text).all("svg")}
    pictures = list(tmp_path.glob("*.png"))
    assert {picture.stem for picture in pictures} == plots
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    (tmp_path / "bare").mkdir()
    without = write_page(report, tmp_path / "bare")
    assert [path.name for path in without.parent.iterdir()] == ["report.html"]


def test_prompt_files_of_the_same_name_get_separate_plots(report, tmp_path):
    runs = [run | {"prompt_set": f"{place}/x.jsonl"} for place in "ab" for run in report["runs"]]
    page = Page(write_page(report | {"runs": runs}, tmp_path).read_text())
    plots = [svg["attributes"]["data-plot"] for svg in page.all("svg")]
    assert len(plots) == len({*plots})
    assert {name[6] for name in plots if name.startswith("batch-")} == {"a", "b"}


def test_a_disk_too_full_for_a_plot_is_reported_with_the_file(tmp_path, monkeypatch):
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("no matplotlib: pip install specdraft[plots]")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match=rf"out of disk: {tmp_path}/pace.png needs .* KiB"):
        write_png(Plot("pace", "Pace", 80, []), tmp_path)
    assert not list(tmp_path.iterdir())


def test_draft_lines_put_every_node_below_its_parent():
    draft = {"parents": [-1, 0, 0, 1, 2, 1], "texts": ["", *"abcde"], "accepted": [1, 5]}
    lines = [(line["text"], line["depth"], line["accepted"]) for line in draft_lines(draft)]
    assert lines == [
        ("a", 0, True), ("c", 1, False), ("e", 1, True), ("b", 0, False), ("d", 1, False),
    ]  # fmt: skip


def test_no_two_nodes_of_a_drawn_tree_overlap():
    paths = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0]]
    nodes = [{"path": path, "drafted": 4, "accepted": 4 - len(path)} for path in paths]
    tree = node_tree("n", "t", nodes, "#1f77c4")
    dots = [shape for shape in tree.shapes if hasattr(shape, "radius")]
    assert len({(round(dot.x), round(dot.y)) for dot in dots}) == len(paths) + 1
    assert all(dot.x < 360 for dot in dots)


def test_rarely_drafted_nodes_of_a_dynamic_tree_are_not_drawn():
    drafted = {(0,): 100, (1,): 9, (0, 0): 10, (1, 0): 3}
    nodes = [{"path": list(path), "drafted": n, "accepted": 1} for path, n in drafted.items()]
    tips = [getattr(shape, "tip", "") for shape in node_tree("n", "t", nodes, "#1f77c4").shapes]
    assert {tip.split(":")[0] for tip in tips if "accepted 1" in tip} == {"ranks 0", "ranks 0.0"}


def test_the_headline_is_about_the_trained_drafter_even_if_it_is_slower(report, tmp_path):
    for speedup, faster in ((0.5, 1), (2.5, 0)):
        other = copy.deepcopy(report)
        for run in other["runs"]:
            run["speedup"] = speedup if run["method"] == "falcon_tree" else 1.25
        page = Page(write_page(other, tmp_path).read_text())
        (headline,) = page.all("div", data_headline="falcon_tree")
        assert page.all("b", headline)[0]["text"] == f"{speedup:.2f} x"
        assert sum(p["text"].startswith("Faster here: ") for p in page.all("p")) == faster


def test_a_report_states_its_date_and_run(report, tmp_path):
    named = copy.deepcopy(report)
    named["recipe"]["output"]["dir"] = "runs/evening"
    text = write_page(named | {"date": "2031-05-04T03:02:01+00:00"}, tmp_path).read_text()
    page = Page(text)
    assert page.all("title")[0]["text"] == "evening: specdraft report"
    assert page.all("p")[0]["text"].startswith("2031-05-04 · target tiny · device cpu")
    assert report["date"][:2] == "20"


def test_the_training_curve_averages_neighbouring_steps(report, tmp_path):
    lines = [
        {"kind": "train", "step": n, "loss": float(n), "accuracy": [n / 200, 0.5]}
        for n in range(1, 2 * POINTS + 1)
    ]
    lines += [{"kind": "eval", "step": n, "tokens_per_step": n / 10} for n in (7, 2 * POINTS)]
    torn = "\n".join(map(json.dumps, lines)) + '\n{"kind": "tr'
    (tmp_path / LOG).write_text(torn)
    curve = training_curve(tmp_path)
    assert curve[0] == {"step": 2, "loss": 1.5, "accuracy": [0.0075, 0.5]}
    assert curve[3] == {"step": 7, "tokens_per_step": 0.7}
    assert curve[-1]["tokens_per_step"] == 8.0
    assert len(curve) == POINTS + 1
    page = parse(write_page(report | {"training": curve}, tmp_path).read_text())
    assert {"loss, step 2: 1.5", "token 2, step 80: 0.5"} <= page.tips
    assert "validation prompts, step 7: 0.7" in page.tips
    assert training_curve(tmp_path / "nowhere") == []


def test_a_method_has_one_colour_in_every_plot(report, tmp_path):
    page = Page(write_page(report, tmp_path).read_text())
    marks = [e for e in page.elements if e["tag"] in ("rect", "circle")]
    for run in report["runs"]:
        method = run["method"]
        own = [m for m in marks if m["text"].startswith((f"{method}: ", f"{method}, depth"))]
        assert {mark["attributes"]["fill"] for mark in own} == {COLOURS[method]}
    assert method_colours(["ssd", "plain"])["plain"] == method_colours(["plain"])["plain"]
    assert COLOURS.keys() == METHODS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
    ways = method_colours(["maxgram", "maxgram:padded", "maxgram:pad_kv", "new", "newer"])
    assert len(set(ways.values())) == 5


@pytest.mark.parametrize("paper", ["#ffffff", "#1b222a"])
def test_colours_have_enough_contrast_on_light_and_dark(paper):
    def luminance(colour: str) -> float:  # WCAG 2.1
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    for method, colour in COLOURS.items():
        dark, light = sorted((luminance(colour), luminance(paper)))
        assert (light + 0.05) / (dark + 0.05) > 2.2, method


def test_every_colour_of_the_page_has_a_dark_version(report, tmp_path):
    style = Page(write_page(report, tmp_path).read_text()).all("style")[0]["text"]
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    names = [re.findall(r"(--[a-z]+):", part) for part in (light, dark)]
    assert sorted(names[0]) == sorted(names[1])
    rest = style.replace(light, "").replace(dark, "")
    assert re.findall(r"#[0-9a-f]{3,6}\b", rest) == ["#0003"]  # a shadow


def test_figures_and_names_of_bars_fit_the_plot():
    values = {"falcon": 1208.93, "runs/a_very_long_name_of_an_experiment_of_2026/falcon": 107.28}
    colours = dict.fromkeys(values, INK)
    parts = {name: {"draft": value / 2, "verify": value / 2} for name, value in values.items()}
    for plot in (bars("a", "A", values, {}, colours), stacks("b", "B", parts)):
        texts = [shape for shape in plot.shapes if isinstance(shape, Label)]
        assert {"1208.93", "107.28"} <= {label.text for label in texts}
        for label in texts:
            wide = LETTER * len(label.text)
            first = label.x - (wide if label.anchor == "end" else 0)
            assert 0 <= first <= first + wide <= WIDTH


@pytest.mark.parametrize("losses", [(0.0, 0.0), (1e8, 2e8)])
def test_a_zero_loss_and_a_huge_one_are_plotted(losses):
    points = [{"step": n, "loss": loss, "accuracy": [1.0]} for n, loss in enumerate(losses)]
    assert next(plot.name for plot in training_plots({"training": points})) == "training-loss"
