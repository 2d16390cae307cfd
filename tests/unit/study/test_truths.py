"""Planted truths: what is known of the candidates is what the study says of them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist, stdev

import pytest

from echelon.core.errors import UserError
from echelon.study import Study, from_tries, write_study
from echelon.study.base import Candidate, Terms
from echelon.study.compare import Comparison, Verdict
from echelon.study.folder import discard, run_folder
from echelon.study.intervals import mean_interval, ratio_interval, reached_at
from echelon.study.metric import UNRECORDED
from echelon.study.report import StudyReport
from echelon.study.words import sentence
from tests.unit.study.fixtures import Planted, make_study

BASE = "sync=allreduce"
TRUTHS = {
    BASE: Planted(),
    "sync=allreduce #2": Planted(),
    "lr=0.01": Planted(compute_s=0.08),
    "compression=powersgd(2)": Planted(communicate_s=0.001, bytes_per_step=1e5),
    "compression=topk(0.01)": Planted(communicate_s=0.001, bytes_per_step=5e4, final=0.92),
    "lr=99": Planted(final=0.101, rate=0.0),
    "lr=1e9": Planted(finite=False, final=0.1),
    "compression=powersdg(2)": Planted(status="refused", message="unknown compression 'powersdg'"),
    "sync=local(8)": Planted(status="failed", message="rank 1 died: SIGKILL"),
}


def studied(folder: Path, truths: dict[str, Planted] | None = None, seeds: int = 3, **more: str) -> StudyReport:
    wanted = truths or TRUTHS
    tries = [name.removesuffix(" #2") for name in wanted]
    return write_study(make_study(folder / "s", from_tries({}, tries, str(seeds)), wanted, **more))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> StudyReport:
    return studied(tmp_path_factory.mktemp("study"))


def of(report: StudyReport, candidate: str) -> Comparison:
    return next(c for c in report.groups[0].comparisons if c.candidate == candidate)


@pytest.mark.parametrize(
    ("candidate", "verdict"),
    [
        (BASE, Verdict.BASELINE),
        ("sync=allreduce #2", Verdict.NO_DIFFERENCE),
        ("lr=0.01", Verdict.NO_BENEFIT),
        ("compression=powersgd(2)", Verdict.BETTER),
        ("compression=topk(0.01)", Verdict.FASTER_AT_A_LOSS),
        ("lr=99", Verdict.NOT_CONVERGED),
        ("lr=1e9", Verdict.NOT_CONVERGED),
        ("compression=powersdg(2)", Verdict.NOT_MEASURED),
        ("sync=local(8)", Verdict.NOT_MEASURED),
    ],
)
def test_verdicts_are_the_planted_ones(report: StudyReport, candidate: str, verdict: Verdict) -> None:
    assert of(report, candidate).verdict is verdict


def test_of_the_baseline_no_comparison_is_said(report: StudyReport) -> None:
    assert sentence(of(report, BASE), UNRECORDED) == "the baseline: the others are compared with it."


def test_twice_as_slow_is_called_slower_by_twice(report: StudyReport) -> None:
    said = next(w for w in report.words if w.startswith("lr=0.01: "))
    found = re.search(r"no benefit here: ([\d.]+)x \(([\d.]+)x to ([\d.]+)x\) as long to the target", said)
    assert found, said
    value, low, high = (float(n) for n in found.groups())
    assert 1.8 <= low <= value <= high <= 2.2


def test_pauses_count_as_steps_do_and_are_said(tmp_path: Path) -> None:
    """Its steps are the same, 1 s an epoch, but each evaluation stops it for as long again."""
    report = studied(tmp_path, {BASE: Planted(), "eval_every=1": Planted(pause_s=1.0)})
    assert of(report, "eval_every=1").verdict is Verdict.NO_BENEFIT
    said = "\n".join(report.words)
    assert re.search(r"eval_every=1: no benefit here: (1\.9|2\.0)\d?x \(.*?\) as long", said), said
    assert re.search(r"from the first step to the end, .*: sync=allreduce 6\.?\d* s \(evaluation 0\.5%\)", said), said
    assert re.search(r"eval_every=1 1[12]\.?\d* s \(evaluation (49|50)\.\d%\)", said), said
    assert "evaluation 50" in (page := (tmp_path / "s" / "report.html").read_text()) or "evaluation 49" in page


def test_what_the_baseline_differs_by_from_itself_is_chance(tmp_path: Path) -> None:
    truths = {
        BASE: Planted(jitter=0.001),
        "sync=allreduce #2": Planted(compute_s=0.0262, jitter=0.001),  # 0.0462 s instead of 0.05 s a step
        "lr=0.01": Planted(compute_s=0.027, jitter=0.001),
        "lr=0.02": Planted(compute_s=0.01, jitter=0.001),
    }
    report = studied(tmp_path, truths)
    assert of(report, "sync=allreduce #2").verdict is Verdict.NO_DIFFERENCE
    assert of(report, "lr=0.01").verdict is Verdict.NO_DIFFERENCE
    assert of(report, "lr=0.02").verdict is Verdict.BETTER
    assert any("not told from chance" in said for said in report.words)


def test_the_words_say_why_not_and_what_else(report: StudyReport) -> None:
    said = "\n".join(report.words)
    assert "21 of 27 runs completed" in said
    assert "Take compression=powersgd(2)." in said
    assert "20.0x fewer bytes" in said
    assert "lr=99: did not converge: its accuracy of 10." in said
    assert "lr=1e9: did not converge: the loss is not finite." in said
    assert "compression=powersdg(2): not measured (refused: unknown compression 'powersdg')." in said
    assert "sync=local(8): not measured (failed: rank 1 died: SIGKILL)." in said
    assert re.search(
        r"If a loss of 2\.\d\d points is acceptable, compression=topk\(0.01\) is 1\.\d\dx as fast", said
    ), said
    assert "over so few they hold the truth in about 75% of studies" in said


def test_one_seed_concludes_nothing_about_accuracy(tmp_path: Path) -> None:
    report = studied(tmp_path, {BASE: Planted(), "compression=int8": Planted(communicate_s=0.0)}, seeds=1)
    assert of(report, "compression=int8").verdict is Verdict.TOO_FEW_SEEDS
    assert "nothing can be concluded about accuracy" in " ".join(report.words)
    assert report.recommended[0].candidate is None


def test_a_baseline_that_failed_compares_with_nothing(tmp_path: Path) -> None:
    report = studied(tmp_path, {BASE: Planted(status="failed", message="it died"), "compression=int8": Planted()})
    assert of(report, "compression=int8").verdict is Verdict.NOT_MEASURED
    assert report.groups[0].target is None
    assert "Nothing is recommended: the baseline sync=allreduce was not measured." in report.words


def test_the_link_below_which_compression_pays(tmp_path: Path) -> None:
    """A step of 30 + 20 ms sends 1 MB a rank; the other's 45 + 1 ms send 50 kB: 8 x 0.95 MB / 14 ms is 540 Mbit/s."""
    base = Planted(communicate_s=0.02, jitter=0.0)
    other = Planted(compute_s=0.045, communicate_s=0.001, bytes_per_step=1e5, jitter=0.0)
    study = from_tries({"launch.link": "400mbit"}, [BASE, "compression=powersgd(2)"], "3")
    report = write_study(make_study(tmp_path / "s", study, {BASE: base, "compression=powersgd(2)": other}))
    assert "shorter than one of sync=allreduce on links below about 5e+02 Mbit/s" not in " ".join(report.words)
    found = re.search(r"on links below about (\d+) Mbit/s", " ".join(report.words))
    assert found and 480 <= int(found[1]) <= 520, report.words


def test_each_set_of_terms_has_a_comparison_of_its_own(tmp_path: Path) -> None:
    terms = (Terms("link=100mbit", {"launch.link": "100mbit"}), Terms("link=10mbit", {"launch.link": "10mbit"}))
    study = Study(
        {}, (Candidate(BASE, {"strategy.sync": "allreduce"}), Candidate("lr=1", {"optimizer.lr": "1"})), terms
    )
    report = write_study(make_study(tmp_path / "s", study, {BASE: Planted(), "lr=1": Planted()}))
    assert [g.terms for g in report.groups] == ["link=100mbit", "link=10mbit"]
    assert sum(w.startswith("[link=10mbit] ") for w in report.words) >= 2


def test_terms_under_which_all_is_excluded_have_no_comparison(tmp_path: Path) -> None:
    study = from_tries({"data.source": "digits"}, [BASE, "lr=1"], "3")
    terms = tuple(Terms(f"link={link}", {"launch.link": link}) for link in ("1gbit", "10gbit"))
    study = replace(study, terms=terms, exclude=({"launch.link": ["10gbit"]},))
    report = write_study(make_study(tmp_path, study, {BASE: Planted(), "lr=1": Planted()}))
    assert [group.terms for group in report.groups] == ["link=1gbit"]


def test_equal_terms_are_checked_and_said(tmp_path: Path) -> None:
    same = studied(tmp_path / "same", {BASE: Planted(), "lr=1": Planted(affinity=("0-1", "0-1", "0-1"))})
    assert "The same for all runs: threads of each worker: 1, cores it may use: 0-1." in same.words
    other = studied(tmp_path / "other", {BASE: Planted(), "lr=1": Planted(affinity=("0", "1"))})
    said = "Not on equal terms: cores it may use differed: 0-1 in 3, 0; 1 in 3 of the runs."
    assert said in other.words and said in (tmp_path / "other" / "s" / "report.html").read_text()
    chosen = studied(tmp_path / "chosen", {BASE: Planted(), "workers=3": Planted(affinity=("0", "1"))})
    assert not [w for w in chosen.words if "equal terms" in w or "The same for all runs" in w]


def test_a_torn_record_is_survived_and_said(tmp_path: Path) -> None:
    report = studied(tmp_path, {BASE: Planted(), "lr=1": Planted()}, torn="0-01-1-s1")
    row = next(r for r in report.runs if r.run == "0-01-1-s1")
    assert row.status == "completed" and "1 torn line" in row.message
    assert "1 torn line" in (tmp_path / "s" / "report.html").read_text()


def test_a_study_of_which_nothing_was_run_yet(tmp_path: Path) -> None:
    report = studied(tmp_path, {BASE: Planted(), "lr=1": Planted()})
    empty = write_study(make_study(tmp_path / "e", report.study, {}))
    assert empty.words[0] == "0 of 6 runs completed (2 candidates, 3 seeds); 6 missing."
    assert "not measured (missing)" in " ".join(empty.words)


def test_a_candidate_that_lacks_a_seed_says_so(tmp_path: Path) -> None:
    truths = {BASE: Planted(), "lr=1": Planted(compute_s=0.1)}
    folder = make_study(tmp_path / "s", from_tries({}, list(truths), "3"), truths)
    discard(run_folder(folder, "0-01-1-s2"))
    report = write_study(folder)
    assert of(report, "lr=1").seeds == 2
    said = next(w for w in report.words if w.startswith("lr=1: "))
    assert said.endswith(", in 2 of 3 seeds.")
    assert report.words[0].endswith("; 1 missing.")


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        write_study(tmp_path)


def test_intervals() -> None:
    for few in ([2.0], [0.56, 0.56], [1.0, 3.0]):  # from one to the other is no interval
        assert (mean_interval(few).low, mean_interval(few).high) == (None, None)
    three = mean_interval([1.0, 2.0, 6.0])
    assert three.value == 3.0 and three.low == pytest.approx(1, abs=0.01) and three.high == pytest.approx(6, abs=0.01)
    many = mean_interval([float(i % 10) for i in range(100)])
    assert many == mean_interval([float(i % 10) for i in range(100)])
    assert many.low is not None and many.high is not None
    assert many.high - many.low == pytest.approx(2 * 1.96 * 2.872 / math.sqrt(99), rel=0.05)
    normal = [NormalDist().inv_cdf((i + 0.5) / 17) for i in range(17)]
    seventeen = mean_interval(normal)  # Student's t of 16 degrees of freedom is 2.120
    assert seventeen.low is not None and seventeen.high is not None
    assert seventeen.high - seventeen.low == pytest.approx(2 * 2.120 * stdev(normal) / math.sqrt(17), rel=0.03)
    ratio = ratio_interval([2, 4, 6], [1, 2, 3])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))


def test_reaching_a_target() -> None:
    assert reached_at([10, 20, 30], [0.5, 0.9, 0.8], 0.7) == pytest.approx(15)
    assert reached_at([10, 20], [0.8, 0.9], 0.7) == 10
    assert reached_at([10, 20], [0.5, None], 0.7) is None
    assert reached_at([], [], 0.7) is None
