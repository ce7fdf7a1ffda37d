"""The report of a sweep: its pictures, the page, the card."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from matplotlib.figure import Figure
from test_report import swept, trial
from tiny import mlp_task, space

import jaxpack as jp
from jaxpack import report
from jaxpack.types import HParams
from jaxpack.worker import Stats

VOID = {"meta", "input", "br", "link", "img"}
NAMES = ["curves", "hparams", "parallel", "rungs", "work"]


def summary(scheduler, **more):
    """A sweep of which some trials fail, with a name that needs escaping."""
    dims = jp.Space(
        learning_rate=jp.log_uniform(1e-4, 1e-1),
        width=jp.integer(8, 64, log=True),
        depth=jp.integer(1, 4),
        activation=jp.choice("relu", "<tanh>"),
        constant=3,
    )
    hparams = dims.sample(scheduler.num_trials, 0)
    nan = float("nan")
    trials = [
        dataclasses.replace(t, hparams=hparams[t.trial_id])
        for t in swept(
            scheduler, lambda i, r: nan if i == 2 else 0.9 - 1 / (r + 1 + i % 7)
        )
    ]
    stats = Stats(
        compile_seconds=1.0,
        train_seconds=4.0,
        wall_seconds=3.0,
        workers=2,
        packs=({"static": {"activation": "<tanh>"}, "engine": "solo", "lanes": 1},),
        timeline={
            "bin_seconds": 1.0,
            "train_seconds": [1.0, 2.0, 1.0],
            "compile_seconds": [1.0],
            "lane_steps": [0.0, 10.0, 10.0],
            "computed": [0.0, 10.0, 20.0],
        },
    )
    known = {"metric": "accuracy", "mode": "max", "unit": "epochs"}
    known |= {"name": "a <b> & c", "trials": trials, "dims": dims.dims, "stats": stats}
    return report.Summary(**(known | more))


class Page(HTMLParser):
    """Checks that elements are closed, and gathers what matters."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module", params=[3, 81])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "new"
    made = summary(jp.Hyperband(request.param))
    assert report.write(made, folder) == folder / "index.html"
    return made, folder


def test_the_page_stands_alone(page):
    made, folder = page
    text = (folder / "index.html").read_text()
    parsed = Page(text)
    assert parsed.tags.count("svg") == len(NAMES) and "img" not in parsed.tags
    assert all(link.startswith("#") for link in parsed.links)
    assert {link[1:] for link in parsed.links} <= set(parsed.ids)
    # Nothing is fetched: what looks like an address names a vocabulary only.
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+[^\s\"'<)]*", text))
    assert all(address.startswith("http://www.w3.org/") for address in addresses)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert parsed.tags.count("tr") == 1 + len(made.trials) + 2
    assert "prefers-color-scheme:dark" in text
    # Drawn in the colours of the page, light or dark.
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "#000000" not in drawn and "var(--c-1f5fa8" in drawn


def test_names_are_escaped(page):
    text = (page[1] / "index.html").read_text()
    assert "<title>a &lt;b&gt; &amp; c</title>" in text
    assert "<tanh>" not in text and "&lt;tanh&gt;" in text


def test_pictures_are_files(page):
    _, folder = page
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["index.html", *(f"{name}.png" for name in NAMES)]
    )
    for name in NAMES:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
CHECK = """
<script>
const head = name => [...document.querySelectorAll("#trials th")]
  .find(th => th.textContent === name);
const cells = i => [...document.querySelectorAll("#trials tbody tr")]
  .filter(row => !row.hidden).map(row => row.cells[i].textContent);
const ids = () => cells(0).map(Number).join();
const best = ids();
head("trial").click();
const up = ids();
head("trial").click();
const down = ids();
const field = document.getElementById("filter");
field.value = "failed";
field.dispatchEvent(new Event("input"));
const shown = cells(2).join();
const size = [...document.querySelectorAll("svg")]
  .every(svg => svg.getBoundingClientRect().width > 300);
document.title = JSON.stringify({best, up, down, shown, size});
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_shows_and_sorts_it(page, tmp_path):
    made, folder = page
    text = (folder / "index.html").read_text()
    copy = tmp_path / "index.html"
    copy.write_text(text.replace("</body>", CHECK + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    home = f"--user-data-dir={tmp_path / 'home'}"
    done = subprocess.run(
        [BROWSER, *options, home, copy.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)
    found = json.loads(html.unescape(title))
    order = [t.trial_id for t in report.ranked(made.trials, "accuracy", "max")]
    ids = sorted(t.trial_id for t in made.trials)
    rest = [i for i in ids if i not in order]
    assert found["best"] == ",".join(map(str, [*order, *rest]))
    assert found["up"] == ",".join(map(str, ids))
    assert found["down"] == ",".join(map(str, reversed(ids)))
    assert found["shown"] == "FAILED" and found["size"]


@pytest.mark.parametrize(
    "more",
    [
        {"trials": []},
        {"trials": [trial(0, status="RUNNING", bracket=None, rung=None)]},
        {"trials": [trial(0, float("nan"), status="FAILED")], "dims": {}},
        {"trials": [trial(0, 0.5)], "dims": {}, "stopped": "target"},
        {"ended": False, "stats": Stats(), "test_metrics": {"accuracy": 0.25}},
        {"unit": "steps"},
    ],
)
def test_a_report_of_little(tmp_path, more):
    page = report.write(summary(jp.Hyperband(3), **more), tmp_path)
    parsed = Page(page.read_text())
    assert parsed.tags.count("svg") >= 2


def test_hparams_are_drawn_on_their_own_scales():
    made = summary(jp.Hyperband(9))
    figure = report.hparams_figure(made.trials, "accuracy", "max", made.dims)
    axes = {a.get_xlabel(): a for a in figure.axes if a.get_visible()}
    assert list(axes) == ["learning_rate", "width", "depth", "activation"]
    scales = [a.get_xscale() for a in axes.values()]
    assert scales == ["log", "log", "linear", "linear"]
    low, high = axes["learning_rate"].get_xlim()
    assert 5e-5 < low < 1e-4 and 1e-1 < high < 2e-1
    labels = [text.get_text() for text in axes["activation"].get_xticklabels()]
    assert labels == ["relu", "<tanh>"]
    points = sum(
        len(x.get_xdata()) for x in axes["depth"].lines if x.get_marker() == "."
    )
    assert points == len(made.trials) - 1  # One failed.


def test_trials_need_not_have_the_same_hparams():
    hparams = [
        {"model": "a", "x": 1},
        {"model": "b", "y": 0.5},
        {"model": "a", "x": 2},
        {"model": "b", "y": 0.25},
    ]
    trials = [
        dataclasses.replace(trial(i, 0.1 * i), hparams=HParams(own))
        for i, own in enumerate(hparams)
    ]
    ranks = trials, "accuracy", "max"
    figure = report.hparams_figure(*ranks, {})
    shown = {a.get_xlabel(): a for a in figure.axes if a.get_visible()}
    assert list(shown) == ["model", "x", "y"]
    for name, count in (("model", 4), ("x", 2), ("y", 2)):
        dots = [x for x in shown[name].lines if x.get_marker() == "."]
        assert sum(len(line.get_xdata()) for line in dots) == count
    (axes,) = report.parallel_figure(*ranks, {}).axes
    assert [t.get_text() for t in axes.get_xticklabels()] == [*shown, "accuracy"]
    # Trials of one choice lie apart, the better ones higher.
    lines = [line for one in axes.collections for line in one.get_segments()]
    ends = sorted((line[-1][1], line[0][1]) for line in lines if len(line) == 3)
    starts = [start for end, start in ends if start < 0.5]
    assert starts == sorted(starts) and len(set(starts)) == 2


def test_learning_curves_have_a_panel_a_metric():
    made = summary(jp.Hyperband(9))
    figure = report.curves_figure(made.trials, "accuracy", "max")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["accuracy", "validation loss", "training loss"]
    # Read at the rungs only, 1, 3 and 9.
    assert {axes.get_xscale() for axes in figure.axes} == {"log"}
    figure = report.curves_figure(made.trials, "loss", "min")
    assert len(figure.axes) == 2
    best = [x for x in figure.axes[0].lines if x.get_linewidth() == 2.0]
    assert len(best) == 1


def test_a_metric_equal_to_the_loss_is_drawn_once():
    made = summary(jp.Hyperband(3)).trials
    for row in (row for one in made for row in one.history if "loss" in row):
        row["mse"] = row["loss"]
    figure = report.curves_figure(made, "mse", "min")
    assert [axes.get_title() for axes in figure.axes] == ["mse", "training loss"]


def test_curves_between_rungs_are_on_a_linear_scale():
    made = summary(jp.Hyperband(3)).trials
    del made[0].history[0]["rung"]
    figure = report.curves_figure(made, "accuracy", "max")
    assert {axes.get_xscale() for axes in figure.axes} == {"linear"}


def test_names_of_columns_of_numbers_stand_over_them(tmp_path):
    page = report.write(summary(jp.Hyperband(3)), tmp_path).read_text()
    assert '<th scope="col" class="number">trial</th>' in page
    assert '<th scope="col">status</th>' in page


def test_the_time_split_is_drawn():
    stats = summary(jp.Hyperband(3)).stats
    split = report.time_split(stats)
    assert split == {"compile": 1, "train": 4, "evaluate": 0, "swap": 0, "idle": 1}
    total, over_time, occupancy = report.work_figure(stats).axes
    widths = [bar.get_width() for bar in total.patches]
    assert widths == list(split.values())
    top = max(patch.get_data().values.max() for patch in over_time.patches)
    assert top == 1.0
    share = occupancy.patches[-1].get_data().values
    assert list(share[1:]) == [1.0, 0.5] and share[0] != share[0]
    assert len(report.work_figure(Stats(train_seconds=1.0, wall_seconds=2)).axes) == 1


def test_the_card_is_compact():
    made = summary(jp.Hyperband(27))
    card = Page(report.card(made))
    assert card.tags.count("svg") == 1 and card.tags.count("tr") == 11
    assert "script" not in card.tags and "style" not in card.tags[:5]


def test_two_pictures_in_a_page_share_no_id():
    figures = [Figure((2, 2)), Figure((2, 2))]
    for i, figure in enumerate(figures):
        figure.subplots().plot([0, i])
    ids = [set(Page(report.to_svg(figure)).ids) for figure in figures]
    assert ids[0] and not ids[0] & ids[1]


def test_a_sweep_writes_its_report(swept_directory):
    directory, result = swept_directory
    page = Page((directory / "report" / "index.html").read_text())
    assert page.tags.count("svg") == len(NAMES)
    assert Page(result._repr_html_()).tags.count("svg") == 1


def test_a_report_needs_a_place(swept_directory, tmp_path):
    result = dataclasses.replace(swept_directory[1], directory=None)
    with pytest.raises(ValueError, match="path is None, and the sweep was given no"):
        result.report()
    assert result.report(tmp_path / "x") == tmp_path / "x" / "index.html"


def test_a_sweep_outlives_its_report(tiny_dataset, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("no space left")

    monkeypatch.setattr(report, "write", broken)
    with pytest.warns(UserWarning, match="the report was not written: OSError: no spa"):
        result = jp.sweep(
            mlp_task(tiny_dataset),
            space(),
            jp.RandomSearch(2, max_resource=1),
            directory=tmp_path / "sweep",
            engine="solo",
            progress=False,
        )
    assert result.best_score > 0 and jp.load(tmp_path / "sweep").ended
