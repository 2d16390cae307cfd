"""The local page as a browser and as strangers meet it: a real server on 127.0.0.1, real requests."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from echelon.core.errors import UserError
from echelon.reporting.live.server import Site, address, build_app, listen, make_server, new_token
from echelon.study import from_tries, planned_runs
from echelon.study.folder import run_folder
from echelon.study.serving import site_of
from tests.unit.reporting.live.runs import append, make_live_run
from tests.unit.reporting.report.fixtures import LiveState
from tests.unit.reporting.report.test_report_page import CHROMIUM, FLAGS, HOSTILE
from tests.unit.study.fixtures import Planted, make_study

DEADLINE_S = 10.0
TRUTHS = {"sync=allreduce": Planted(), "compression=int8": Planted(status="refused", message="no")}
Answer = tuple[int, dict[str, str], str]


@contextmanager
def serving(site: Site) -> Iterator[str]:
    """Serve a site; gives the address that a user would open."""
    token = new_token()
    with listen() as listener:
        server = make_server(build_app(site, token))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield address(listener, token)
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def ask(url: str, path: str = "", method: str = "GET", **headers: str) -> Answer:
    """Send one request to the server of an address; without a path, to the address itself."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=DEADLINE_S)
    try:
        connection.request(method, path or f"{parts.path}?{parts.query}", headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def test_only_who_has_the_token_names_this_machine_and_reads_gets_in(tmp_path: Path) -> None:
    with serving(Site("run", make_live_run(tmp_path / "run"))) as url:
        query = urlsplit(url).query
        token = query.removeprefix("token=")
        for path in ("/", "/state.json", "/nowhere", f"/?token={token[:-1]}", f"/?token={token}x", "/?token=%ff%00é"):
            status, _, words = ask(url, path.encode("ascii", "ignore").decode())
            assert status == 403 and "token" in words and token not in words
        name = ask(url)[1]["set-cookie"].partition("=")[0]
        assert ask(url, "/", Cookie=f"{name}=wrong")[0] == 403
        with serving(Site("run", tmp_path / "run")) as other:  # as through a tunnel: cookies do not tell ports apart
            assert ask(other)[1]["set-cookie"].partition("=")[0] != name
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]:80"):
            status, headers, words = ask(url, Host=host)
            assert status in (400, 403) and "set-cookie" not in headers
        assert ask(url, Host=f"localhost:{urlsplit(url).port}")[0] == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"):
            status, headers, _ = ask(url, method=method)
            assert status == 405 and headers["allow"] == "GET" and "set-cookie" not in headers
        assert ask(url, f"/nowhere?{query}")[0] == 404
        assert ask(url, f"/run/..%2f..%2fetc/state.json?{query}")[0] == 404


def test_the_token_becomes_a_cookie_and_the_numbers_are_plain_json(tmp_path: Path) -> None:
    run = make_live_run(tmp_path / "run")
    with serving(site_of(run)) as url:
        status, headers, page = ask(url)
        cookie = headers["set-cookie"]
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert urlsplit(url).query.removeprefix("token=") not in page
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"
        status, headers, text = ask(url, "/state.json", Cookie=cookie.partition(";")[0])
        numbers = json.loads(text)
        assert status == 200 and "set-cookie" not in headers
        assert numbers["status"] == "completed" and numbers["step"] == numbers["total_steps"]
        assert len(numbers["ranks"]) == 2 and numbers["curves"]["cpu"] and len(text) < 100_000
        append(run, {"t": 1.0, "kind": "event", "name": "hello", "message": "more came"})
        text = ask(url, "/state.json", Authorization=f"Bearer {urlsplit(url).query.removeprefix('token=')}")[2]
        assert json.loads(text)["events"][-1]["message"] == "more came"


def test_a_study_lists_its_runs_and_leads_to_each(tmp_path: Path) -> None:
    study = from_tries({}, ["sync=allreduce", "compression=int8"], "1")
    folder = make_study(tmp_path / "s", study, TRUTHS)
    runs = planned_runs(study)
    with serving(site_of(folder)) as url:
        query = urlsplit(url).query
        found = json.loads(ask(url, f"/state.json?{query}")[2])
        assert [r["status"] for r in found["runs"]] == ["completed", "refused"] and found["over"]
        assert found["runs_over"] == 2 and found["runs"][1]["message"] == "no"
        assert 'data-kind="run"' in ask(url, f"/run/{runs[0].name}/?{query}")[2]
        one = json.loads(ask(url, f"/run/{runs[0].name}/state.json?{query}")[2])
        assert one["name"] == run_folder(folder, runs[0].name).name and one["status"] == "completed"
        assert ask(url, f"/run/nothing/state.json?{query}")[0] == 404


def test_a_port_in_use_or_out_of_range_is_said_in_words() -> None:
    with listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; choose another"):
            listen(port)
    for bad in (-1, 65536):
        with pytest.raises(UserError, match="from 1 to 65535"):
            listen(bad)


def test_it_listens_on_this_machine_alone() -> None:
    with listen() as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and listener.family == socket.AF_INET


def opened(url: str, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Open an address in a headless browser: the DOM after its scripts ran, and what the console said."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, "--virtual-time-budget=3000", f"--user-data-dir={profile}", *flags, url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page with")
def test_browser_shows_a_run(tmp_path: Path) -> None:
    run = make_live_run(tmp_path / HOSTILE[1].replace("/", ""), LiveState(epochs=4, death_at=150))
    append(run, {"t": 1e9, "kind": "event", "name": "worker_died", "message": HOSTILE[0]})
    with serving(site_of(run)) as url:
        dom, console = opened(url, tmp_path / "profile")
    assert console == [] and 'data-shown="1"' in dom
    for chart in ("loss", "value", "rate", "cpu", "memory"):
        drawn = dom.partition(f'id="{chart}"')[2].partition("</svg>")[0]
        assert "<svg" in drawn[:600], chart
        labels = [float(label.replace(",", "")) for label in re.findall(r'text-anchor="end">([\d,.]+)<', drawn)]
        grid = [float(y) for y in re.findall(r'class="grid"[^>]* y1="([\d.]+)"', drawn)]
        assert len(labels) >= 3 and len(labels) == len(grid), (chart, labels)
        path = [float(y) for y in re.findall(r"[ML][\d.]+,([\d.]+)", drawn)]
        assert min(grid) - 0.1 <= min(path) and max(path) <= max(grid) + 0.1, chart  # all between two ticks
    assert dom.count('class="bar"') == 2 and "610 MB" in dom
    assert "&lt;/script&gt;&lt;script&gt;" in dom and "<title>owned" not in dom and "<img src" not in dom
