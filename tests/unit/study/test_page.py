"""The study's page: self-contained, complete, and drawn by a real browser without a complaint."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from echelon.study import Study, write_study
from echelon.study.base import Candidate, Terms
from echelon.study.page.fronts import front
from tests.unit.reporting.report.test_report_page import CHROMIUM, dump, figures, outline
from tests.unit.study.fixtures import Planted, make_study

HOSTILE = "model=</script><img src=x onerror=alert(1)>"
TRUTHS = {
    "sync=allreduce": Planted(),
    "compression=powersgd(2)": Planted(communicate_s=0.001, bytes_per_step=1e5),
    "sync=ps(mode=async)": Planted(communicate_s=0.004, staleness={"0": 9, "1": 21, "2": 5}),
    "compression=topk(0.01)": Planted(communicate_s=0.002, bytes_per_step=1e5, density=0.01),
    HOSTILE: Planted(final=0.9),
    "lr=1": Planted(status="refused", message="<b>no</b>"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    terms = (Terms("link=100mbit", {"launch.link": "100mbit"}), Terms("link=10mbit", {"launch.link": "10mbit"}))
    candidates = tuple(Candidate(name, {"strategy.sync": str(i)}) for i, name in enumerate(TRUTHS))
    study = Study({"data.source": "digits"}, candidates, terms)
    folder = tmp_path_factory.mktemp("page") / "s"
    folder.mkdir()
    report = _labelled(folder, study)
    assert report.exists()
    return folder


def _labelled(folder: Path, study: Study) -> Path:
    """Write the page of a study whose labels are hostile, past the file, which would refuse them."""
    from echelon.study.base import COMPLETED
    from echelon.study.compare import set_targets
    from echelon.study.grid import planned_runs
    from echelon.study.page.render import render_study
    from echelon.study.report import report_of
    from echelon.study.rows import rows_of
    from echelon.study.tables import RunRow
    from tests.unit.study.fixtures import write_run

    runs, points = [], []
    for run in planned_runs(study):
        truth = TRUTHS[run.candidate]
        if truth.status != COMPLETED:
            runs.append(RunRow(run.name, run.candidate, run.terms, run.seed, truth.status, truth.message))
            continue
        write_run(folder / run.name, run, truth)
        row, own = rows_of(run, folder / run.name, COMPLETED, "")
        runs.append(row)
        points += own
    report = report_of("a study", study, set_targets(study, runs, points), points, {"cpu": "2 cores"})
    page = folder / "report.html"
    page.write_text(render_study(report, "base: {}", {row.run for row in runs if row.status == COMPLETED}))
    return page


def test_the_page_fetches_nothing_and_is_well_formed(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    found = outline(page)
    assert not [tag for tag, attrs in found if tag in ("link", "img", "iframe") or attrs.get("src")]
    assert len([tag for tag, _ in found if tag == "script"]) == 3
    plots = {a["id"]: a for _, a in found if a.get("class") == "plot"}
    assert plots.keys() == figures(page).keys()
    assert all(a["role"] == "img" and a["aria-label"] for a in plots.values())
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(ids) == len(set(ids))
    levels = [int(tag[1]) for tag, _ in found if tag in ("h1", "h2", "h3", "h4")]
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))


def test_rows_lead_to_the_pages_of_runs_that_have_one(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    links = [a["href"] or "" for tag, a in outline(page) if tag == "a" and not (a["href"] or "").startswith("#")]
    refused = sum(truth.status == "refused" for truth in TRUTHS.values())
    assert len(links) == (len(TRUTHS) - refused) * 2 * 3
    assert all(re.fullmatch(r"runs/[^/]+/report\.html", link) for link in links)
    assert len(page) < 1_300_000


def test_each_column_has_a_name_of_its_own(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    heads = [re.findall(r'<th scope="col"[^>]*>(?:<abbr[^>]*>)?([^<]+)', row) for row in page.split("<thead>")[1:]]
    assert len(heads) > 2 and all(len(names) == len(set(names)) for names in heads)
    assert heads[0][:3] == ["candidate", "verdict", "times as fast to the end"]


def test_the_front_says_what_its_shapes_are(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    for name, drawn in figures(page).items():
        if name.startswith("front-"):
            shapes = {trace["marker"]["symbol"] for trace in drawn["traces"] if "marker" in trace}
            joined = any(trace["mode"] == "lines" for trace in drawn["traces"])
            caption = page.split(f'id="{name}"')[1].split("<figcaption>")[1].split("</figcaption>")[0]
            assert ("squares are" in caption) is (joined and "square" in shapes)
            assert ("which the line joins" in caption) is joined and "ircle" in caption


def test_each_set_of_terms_has_all_charts(folder: Path) -> None:
    drawn = figures((folder / "report.html").read_text())
    kinds = {"seconds", "wire_bytes", "samples", "front-end_s", "front-wire_bytes", "target_s", "target_bytes"}
    kinds |= {"phases", "memory_bytes", "density", "staleness"}
    assert drawn.keys() == {f"{kind}-{place}" for kind in kinds for place in (0, 1)}


def test_a_phase_has_the_name_that_the_terminal_gives_it(folder: Path) -> None:
    drawn = figures((folder / "report.html").read_text())["phases-0"]["traces"]
    assert [trace["name"] for trace in drawn] == ["data", "forward", "backward", "communication", "update", "other"]


def test_density_is_of_the_sparse_codecs_alone(folder: Path) -> None:
    (trace,) = figures((folder / "report.html").read_text())["density-0"]["traces"]
    # A sixth of the steps, the first epoch, sent twice as much.
    assert trace["x"] == [pytest.approx(0.01 * 7 / 6)]


def test_what_was_refused_is_on_the_page(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "What did not go as planned" in page and "&lt;b&gt;no&lt;/b&gt;" in page


def test_an_empty_study_has_a_page(tmp_path: Path) -> None:
    from echelon.study import from_tries

    write_study(make_study(tmp_path / "s", from_tries({}, ["sync=allreduce", "lr=1"], "2"), {}))
    assert figures((tmp_path / "s" / "report.html").read_text()) == {}


def test_one_that_no_other_beats_is_joined_to_nothing(tmp_path: Path) -> None:
    from echelon.study import from_tries

    truths = {"sync=allreduce": Planted(), "compression=int8": Planted(communicate_s=0.001, bytes_per_step=1e5)}
    write_study(make_study(tmp_path / "s", from_tries({}, list(truths), "3"), truths))
    page = (tmp_path / "s" / "report.html").read_text()
    drawn = figures(page)["front-wire_bytes-0"]["traces"]
    assert [trace["mode"] for trace in drawn] == ["markers+text"] * 2
    assert "The circle beats or equals each of the others in both." in page


def test_bytes_inside_a_replica_are_not_taken_for_none(tmp_path: Path) -> None:
    from echelon.study import from_tries

    sharded = Planted(compute_s=0.05, bytes_per_step=0.0, layout={"fsdp": 2})
    truths = {"sync=allreduce": Planted(layout={"dp": 2}), "parallel=fsdp=2": sharded}
    write_study(make_study(tmp_path / "s", from_tries({}, list(truths), "3"), truths))
    page = (tmp_path / "s" / "report.html").read_text()
    assert "inside a replica (fsdp, tp, pp) is not counted" in page
    assert "is shorter than one of" not in page and "front-wire_bytes-0" not in figures(page)


def test_the_front_is_what_no_other_beats() -> None:
    assert front([3, 1, 2, 2], [0.9, 0.5, 0.4, 0.7]) == [1, 3, 0]
    assert front([1, 1], [0.5, 0.5]) == [0]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
@pytest.mark.parametrize(
    ("scheme", "stroke"), [(1, "rgb(31, 95, 168)"), (0, "rgb(125, 180, 242)")], ids=["light", "dark"]
)
def test_browser_draws_every_chart_in_its_theme(folder: Path, tmp_path: Path, scheme: int, stroke: str) -> None:
    page = folder / "report.html"
    dom, console = dump(page, tmp_path / "profile", f"--blink-settings=preferredColorScheme={scheme}")
    assert console == []
    assert f'data-charts="{len(figures(page.read_text()))}"' in dom
    assert stroke in dom
    assert "<title>a study · Echelon</title>" in dom


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_what_is_folded_on_the_screen_is_printed_open(folder: Path, tmp_path: Path) -> None:
    page, printed = (folder / "report.html").read_text(), tmp_path / "printed.html"
    assert "<details><summary>study.yaml" in page
    printed.write_text(page.replace("</body>", '<script>dispatchEvent(new Event("beforeprint"))</script></body>'))
    dom, console = dump(printed, tmp_path / "profile")
    assert console == []
    assert "<details>" not in dom and '<details open=""><summary>study.yaml' in dom
