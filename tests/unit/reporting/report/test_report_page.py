from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from echelon.core.figure import ReportPicture, ReportSection, safe
from echelon.reporting.report import write_report, write_shared_script
from echelon.reporting.report.page import SHARED_SCRIPT, script_json, with_specs, with_words
from echelon.tasks.classification_report import error_words, most_confused
from tests.unit.reporting.report.fixtures import LiveState, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = ["</script><script>document.title='owned'</script>", "<img src=x onerror=alert(1)>", "a & b", "q\"uote'"]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--window-size=1280,2400",
    "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom",
]  # fmt: skip


class Outline(HTMLParser):
    """Elements with their attributes, as a browser would first see them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page_of(folder: Path, story: LiveState | None = None) -> str:
    write_report(make_run(folder, story))
    return (folder / "report.html").read_text()


def outline(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Outline()
    parser.feed(page)
    return parser.found


def figures(page: str) -> dict:
    return json.loads(re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)[0])


def test_page_fetches_nothing_and_forbids_it(tmp_path: Path) -> None:
    found = outline(page_of(tmp_path))
    assert not [tag for tag, attrs in found if tag in ("link", "img", "iframe") or attrs.get("src")]
    assert all((attrs.get("href") or "#").startswith("#") for tag, attrs in found if tag == "a")
    policy = next(a["content"] for t, a in found if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")


def test_every_chart_has_a_place_a_heading_and_a_label(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    found = outline(page)
    plots = {a["id"]: a for _, a in found if a.get("class") == "plot"}
    assert plots.keys() == figures(page).keys()
    expected = {"loss", "accuracy", "lr", "confusion", "roc", "phases", "steptime", "bytes", "groups", "timeline"}
    assert plots.keys() == expected | {"waterfall"}
    assert all(a["role"] == "img" and a["aria-label"] for a in plots.values())
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in found if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page = page_of(tmp_path, LiveState(epochs=1, classes=HOSTILE))
    found = outline(page)
    assert len([tag for tag, _ in found if tag == "script"]) == 3
    assert not [tag for tag, attrs in found if tag == "img" or "onerror" in attrs]
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_the_page_has_contents_terms_and_a_bounded_size(tmp_path: Path) -> None:
    page = page_of(tmp_path)
    assert len(page) < 1_300_000
    found = outline(page)
    places = {a["id"] for tag, a in found if tag == "h2"}
    linked = {(a["href"] or "").removeprefix("#") for tag, a in found if tag == "a"}
    assert places and places <= linked
    assert 'title="Training samples of all ranks per second of step time' in page


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("use local(period=8, overlap=2), then", "local(period=8, overlap=2)"),
        ("compression=topk(0.01)+huffman.", "compression=topk(0.01)+huffman"),
        ("a larger --eval-every: so", "--eval-every"),
        ("1.60x (1.57 to 1.65)", None),
    ],
)
def test_a_line_does_not_end_within_a_spec(text: str, whole: str | None) -> None:
    shown = str(with_specs(f"<b> {text}"))
    assert shown.startswith("&lt;b&gt; ")
    assert re.findall(r'<span class="spec">(.*?)</span>', shown) == ([whole] if whole else [])


def test_a_command_breaks_between_its_words_and_a_long_word_where_it_has_joints() -> None:
    given = "echelon train digits --sync 'ps(mode=async, x=1)' --run runs/a --seed=3 --on <b>"
    shown = str(with_words(given))
    words = [html.unescape(word) for word in re.findall(r'<span class="spec">(.*?)</span>', shown)]
    assert words[:3] == ["echelon", "train", "digits"]
    assert words[3:] == ["--sync", "'ps(mode=async, x=1)'", "--run", "runs/a", "--seed=3", "--on", "<b>"]
    assert html.unescape(re.sub("<.*?>", "", shown)) == given
    assert "correction=<wbr>false" in str(with_specs("servers (momentum_correction=false: as given)"))
    assert "<wbr>" not in str(with_specs("lr=0.1 and a/b"))


def test_script_json_cannot_leave_its_element() -> None:
    value = {"x": "</script><!--", "nan": float("nan")}
    text = script_json(value)
    assert "<" not in text and ">" not in text
    assert json.loads(text) == {"x": "</script><!--", "nan": None}


def test_lone_surrogates_do_not_stop_the_page(tmp_path: Path) -> None:
    assert "torn" not in page_of(tmp_path, LiveState(epochs=1, classes=["a\ud800", "b"]))


def test_chart_labels_are_escaped_and_short() -> None:
    assert safe("<b>x</b>") == "&lt;b&gt;x&lt;/b&gt;"
    assert len(safe("n" * 100)) == 28


def test_a_thousand_classes_show_the_most_confused_and_fold_the_table(tmp_path: Path) -> None:
    page = page_of(tmp_path, LiveState(epochs=1, classes=[f"class {i}" for i in range(1000)]))
    drawn = figures(page)
    assert 28 <= len(drawn["confusion"]["traces"][0]["z"]) <= 30
    assert len(drawn["roc"]["traces"]) <= 32
    assert re.search(r"The (29|30) most confused of 1000 classes.", page)
    assert "<details><summary>Per class, the weakest first (1000 classes)" in page
    assert len(page) < 1_300_000


def test_most_confused_classes_and_pairs() -> None:
    matrix = [[9, 1, 0], [0, 10, 0], [0, 4, 6]]
    assert most_confused(matrix, 2) == [1, 2]
    assert error_words(matrix, ["a", "b", "c"]) == "Most frequent errors: c as b (4)."  # what was made once is not
    assert error_words([[9, 1, 0], [0, 10, 1], [0, 0, 6]], ["a", "b", "c"]) == "No two errors are alike."


def dump(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Open a page in a headless browser: the DOM after its scripts ran, and what the console said."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
@pytest.mark.parametrize(
    ("scheme", "stroke"), [(1, "rgb(31, 95, 168)"), (0, "rgb(125, 180, 242)")], ids=["light", "dark"]
)
def test_browser_draws_every_chart_in_its_theme(tmp_path: Path, scheme: int, stroke: str) -> None:
    page = page_of(tmp_path / "run", LiveState(epochs=4, death_at=150, classes=HOSTILE))
    flag = f"--blink-settings=preferredColorScheme={scheme}"
    dom, console = dump(tmp_path / "run" / "report.html", tmp_path / "profile", flag)
    assert console == []
    assert f'data-charts="{len(figures(page))}"' in dom
    assert dom.count("js-plotly-plot") >= len(figures(page))
    assert stroke in dom
    assert "<title>run · Echelon</title>" in dom


@pytest.fixture
def run_of_a_study(tmp_path: Path) -> Path:
    """The folder of a run of a study, whose page shares the study's script."""
    write_shared_script(tmp_path)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    page_of(folder)
    return folder


def test_pages_of_a_study_share_one_script_unless_one_is_asked_for_alone(run_of_a_study: Path) -> None:
    page = run_of_a_study / "report.html"
    shared = page.stat().st_size
    assert shared < 150_000 and f'src="../../{SHARED_SCRIPT}"' in page.read_text()
    write_report(run_of_a_study, alone=True)
    assert 1_300_000 > page.stat().st_size > shared + 500_000 and SHARED_SCRIPT not in page.read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
@pytest.mark.parametrize("there", [True, False])
def test_browser_draws_with_the_shared_script_or_says_that_it_is_missing(run_of_a_study: Path, there: bool) -> None:
    page = run_of_a_study / "report.html"
    if not there:
        (run_of_a_study.parents[1] / SHARED_SCRIPT).unlink()
    dom, console = dump(page, run_of_a_study.parents[1] / "profile")
    assert (f'data-charts="{len(figures(page.read_text()))}"' in dom) == there
    assert (f">No chart: ../../{SHARED_SCRIPT}, which" in dom) == (not there)
    assert not [line for line in console if there or "ERR_FILE_NOT_FOUND" not in line]


def test_pictures_of_a_task_are_shown_and_none_is_fetched(tmp_path: Path) -> None:
    run = make_run(tmp_path, None)
    inside, outside = "data:image/png;base64,AAAA", "https://example.com/x.png"
    pictures = [ReportPicture(source, ("<b>cat", "loss 1")) for source in (inside, outside)]
    evaluation = run / "evaluation.json"
    values = json.loads(evaluation.read_text())
    evaluation.write_text(json.dumps({**values, "sections": [asdict(ReportSection("Worst", pictures=pictures))]}))
    write_report(run)
    page = (run / "report.html").read_text()
    found = outline(page)
    assert "Of the validation data, 10,000 samples, at step 720, the best checkpoint (top-1 0.8" in page
    assert [(a["src"], a["alt"]) for tag, a in found if tag == "img"] == [(inside, "<b>cat; loss 1")]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_browser_opens_the_page_of_a_run_without_steps(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_report(run)
    dom, console = dump(run / "report.html", tmp_path / "profile")
    assert console == []
    assert "record.jsonl is missing" in dom
