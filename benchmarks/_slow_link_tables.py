"""From the raw results of `slow_link` to its tables: the newest result of each measurement counts."""

from __future__ import annotations

import re
from typing import Any

from benchmarks._common import environment_line, markdown_table, median, paired_ratio, spread, update_section

BATCH = 256
LOOPBACK = "loopback"
MARGIN = 0.005
Result = dict[str, Any]


def newest(results: list[Result], kind: str, *keys: str) -> dict[tuple[Any, ...], Result]:
    """Return the last result of a kind for each value of the keys."""
    return {tuple(r.get(key) for key in keys): r for r in results if r["kind"] == kind}


def _curves(results: list[Result], schedule: str) -> dict[tuple[Any, ...], Result]:
    chosen = [r for r in results if r["kind"] == "curve" and r["schedule"] == schedule]
    return newest(chosen, "curve", "candidate", "seed")


def _final(curve: Result) -> float | None:
    """Return the accuracy after the epochs that were asked for."""
    return next((point[2] for point in curve["points"] if point[0] == curve["epochs_step"]), None)


def target(results: list[Result]) -> float | None:
    """Return the accuracy to reach: plain DDP's after the epochs, mean over seeds, minus half a point."""
    reached = [_final(c) for (candidate, _), c in _curves(results, "constant").items() if candidate == "ddp"]
    values = [value for value in reached if value is not None]
    return sum(values) / len(values) - MARGIN if values else None


_PERIOD = re.compile(r"(?:sync:|torch-post)\w+\((?:period=)?(\d+)")


def period(candidate: str) -> int:
    """Return the steps from one agreement of the replicas to the next."""
    return int(found[1]) if (found := _PERIOD.match(candidate)) else 1


_OVERLAP = re.compile(r"overlap=(\d+)")


def overlap(candidate: str) -> int:
    """Return the steps that a mean of the replicas travels behind the computation."""
    return int(found[1]) if (found := _OVERLAP.search(candidate)) else 0


def steps_to(candidate: str, points: list[tuple[int, float, float]], accuracy: float) -> int | None:
    """Return the first evaluated step with at least this accuracy where replicas had agreed.

    Between agreements an evaluation averages replicas first, which takes a link time that steps do not.
    """
    agreed = (point for point in points if point[0] % period(candidate) == 0)
    return next((step for step, _, reached in agreed if reached >= accuracy), None)


def seconds_per_step(results: list[Result], candidate: str, link: str) -> float | None:
    """Return the measured median; over loopback: of the newest measurement beside any link."""
    found = [
        r
        for r in results
        if r["kind"] == "rate" and (r["candidate"], r["place"]) == (candidate, link) and len(r["windows"]) > 0
    ]
    return median(w["seconds"] / w["steps"] for w in found[-1]["windows"]) if found else None


def steps_needed(results: list[Result], candidate: str, seed: int, accuracy: float) -> int | None:
    """Return the steps to the accuracy that the candidate's curve needed; None without one, or where it never came."""
    curve = _curves(results, "constant").get((candidate, seed))
    return steps_to(candidate, curve["points"], accuracy) if curve else None


def derived_seconds(results: list[Result], candidate: str, link: str, seed: int, accuracy: float) -> float | None:
    """Return steps to the accuracy (over loopback) times measured seconds per step; None where one is missing."""
    steps = steps_needed(results, candidate, seed, accuracy)
    pace = seconds_per_step(results, candidate, link)
    return None if steps is None or pace is None else steps * pace


def rate_table(results: list[Result], link: str) -> str:
    """Write samples/s on a link beside plain DDP and beside the same candidate over loopback, and the bytes."""
    placement = newest(results, "rate", "candidate", "link", "place")
    rows = []
    for candidate, result in ((c, r) for (c, shaped, place), r in placement.items() if shaped == place == link):
        mine = _paces(result["windows"])
        if not mine:
            rows.append([f"`{candidate}`", "failed", "", "", "", "", "", _where(result)])
            continue
        windows = result["windows"]
        wire = median(w["wire_bytes"] / w["steps"] for w in windows)
        counted = [w["counted_bytes"] / w["wire_bytes"] for w in windows if w["counted_bytes"]]
        failed = ", then failed" if result["failed"] else ""
        rows.append(
            [
                f"`{candidate}`",
                f"{median(BATCH / p for p in mine):.0f} (±{spread(mine) / 2:.0%}){failed}",
                _number(paired_ratio(_paces(result["ddp_windows"]), mine)),
                _number(paired_ratio(_paces(result["loopback_windows"]), mine)),
                f"{wire / 1e6:.3f}",
                f"{median(counted):.3f}" if counted else "",
                f"{median(w['cpu_s'] / w['steps'] for w in windows) * 1e3:.0f}",
                _where(result),
            ]
        )
    header = ["candidate", "samples/s", "x plain DDP", "x itself on loopback", "MB/step a rank sends (kernel)",
              "counted / kernel", "CPU ms/step", "measured on"]  # fmt: skip
    return markdown_table(header, rows)


def _where(result: Result | None) -> str:
    """Write machine and day: rows of a table are measured on several, between which only ratios compare."""
    if result is None:
        return ""
    where = result["environment"]
    return f"{re.split(r'[( ]', where['processor'])[0]}, {where['date']}"


def _paces(windows: list[dict[str, Any]]) -> list[float]:
    return [window["seconds"] / window["steps"] for window in windows]


def _number(value: float) -> str:
    return "" if value != value else f"{value:.2f}"


def accuracy_table(results: list[Result], links: list[str]) -> str:
    """Write seconds to the accuracy (median over seeds): measured, or derived and marked with `*`."""
    goal = target(results)
    if goal is None:
        return "No accuracy curve of plain DDP yet."
    curves, finals = _curves(results, "constant"), _curves(results, "cosine")
    rows = []
    for candidate in dict.fromkeys(candidate for candidate, _ in curves):
        mine = {seed: c for (name, seed), c in curves.items() if name == candidate}
        steps = [steps_to(candidate, c["points"], goal) for c in mine.values()]
        cells = [_seconds_cell(results, candidate, link, list(mine), goal) for link in [LOOPBACK, *links]]
        last = [_mean_final(curves, candidate), *([_mean_final(finals, candidate)] if finals else [])]
        rate = newest(results, "rate", "candidate", "place").get((candidate, LOOPBACK))
        rows.append(
            [f"`{candidate}`", ", ".join("never" if s is None else str(s) for s in steps), *cells, *last, _where(rate)]
        )
    places = [f"s on {place}" for place in [LOOPBACK, *links]]
    cosine = ["the same, cosine, %"] if finals else []
    header = ["candidate", "steps, by seed", *places, "accuracy after 3 epochs, %", *cosine, "rate of loopback from"]
    return markdown_table(header, rows)


def _mean_final(curves: dict[tuple[Any, ...], Result], candidate: str) -> str:
    """Write the mean over seeds of the accuracy after the same epochs, and of how many seeds."""
    last = [f for (name, _), c in curves.items() if name == candidate and (f := _final(c)) is not None]
    return f"{sum(last) / len(last) * 100:.2f} ({len(last)})" if last else ""


def _seconds_cell(results: list[Result], candidate: str, link: str, seeds: list[int], goal: float) -> str:
    """Write the median over seeds; `*` where a seed's time is derived; the ratio to loopback behind a link's."""
    seconds, derived = _seconds(results, candidate, link, seeds, goal)
    if len(seconds) < len(seeds):
        return "not reached by all seeds" if seconds else ""
    text = f"{median(seconds):.0f}{'*' if derived else ''}"
    if link == LOOPBACK:
        return text
    if derived:  # the same steps on both: the ratio is that of windows that took turns
        rate = newest(results, "rate", "candidate", "link", "place")[candidate, link, link]
        ratio = 1 / paired_ratio(_paces(rate["loopback_windows"]), _paces(rate["windows"]))
        return f"{text} ({ratio:.2f}x)" if ratio == ratio else text
    on_loopback, _ = _seconds(results, candidate, LOOPBACK, seeds, goal)
    return f"{text} ({median(seconds) / median(on_loopback):.2f}x)" if len(on_loopback) == len(seeds) else text


def _seconds(
    results: list[Result], candidate: str, link: str, seeds: list[int], goal: float
) -> tuple[list[float], bool]:
    measured = newest(results, "accuracy", "candidate", "link", "seed")
    seconds: list[float] = []
    derived = False
    for seed in seeds:
        run = measured.get((candidate, link, seed))
        reached = [s for _, s, accuracy in run["points"] if accuracy >= goal] if run else []
        if reached:
            seconds.append(reached[0])
            continue
        expected = derived_seconds(results, candidate, link, seed, goal)
        if expected is not None:
            seconds.append(expected)
            derived = True
    return seconds, derived


def aborts_table(results: list[Result]) -> str:
    """Write how many runs failed."""
    found = newest(results, "aborts", "candidate").values()
    rows = [[f"`{r['candidate']}`", len(r["failures"]), r["runs"], r["steps"]] for r in found]
    table = markdown_table(["candidate", "failed", "runs", "steps each"], rows)
    words = "Short runs of two ranks over loopback, DDP's default buckets: how many ended in an abort or a hang."
    return f"{words}\n\n{table}"


def render(results: list[Result], to_terminal: bool) -> None:
    """Write every table that there are results for."""
    links = list(dict.fromkeys(r["link"] for r in results if r["kind"] == "rate"))
    sections = {
        f"Slow link {link}: samples/s": (
            rate_table(results, link),
            [r for r in results if (r["kind"], r.get("link")) == ("rate", link)],
        )
        for link in links
    }
    goal = target(results)
    if goal is not None:
        title = "Slow links: seconds to accuracy"
        words = (
            f"To {goal:.2%} test accuracy on CIFAR-10 (plain DDP's after its epochs, minus 0.5 points); medians over "
        )
        words += "seeds, evaluation not counted, agreeing on what is evaluated is. `*`: derived, steps to the accuracy "
        words += "x measured seconds per step. In brackets: times the same over loopback, of windows that took turns, "
        words += "or where nothing is derived of the medians; behind an accuracy: of how many seeds it is the mean. "
        words += "Constant learning rate.\n\n"
        sections[title] = (words + accuracy_table(results, links), [r for r in results if r["kind"] == "curve"])
    failures = [r for r in results if r["kind"] == "aborts"]
    if failures:
        sections["Slow links: runs that fail"] = (aborts_table(results), failures)
    for title, (body, sources) in sections.items():
        text = f"{environment_line(sources[-1]['command'], sources[-1]['environment'])}\n\n{body}"
        if to_terminal:
            print(f"## {title}\n\n{text}\n")
        else:
            update_section(title, text)
