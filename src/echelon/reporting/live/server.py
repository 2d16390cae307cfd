"""A local page that shows a run, or the runs of a study, while they go: read-only, for this machine's owner alone.

It listens on 127.0.0.1. Whoever asks must know the token of the address that was printed (then a cookie carries it),
must name this machine in `Host` (else a page of another site could reach it through its own name), and may only GET.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvicorn
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from echelon.core.errors import UserError
from echelon.core.json_values import JsonObject
from echelon.reporting.live.snapshot import look, to_json
from echelon.reporting.live.state import LiveRun

HOST = "127.0.0.1"
HOSTS = (HOST, "localhost")
_TEMPLATES = Path(__file__).parent / "templates"
_REPORT_STYLE = Path(__file__).parents[1] / "report" / "templates" / "page.css"
# Connections that ask nothing are few, and not for long, so that the page's owner finds it free.
_MOST_SILENT = 32
_REQUEST_S = 10.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class Site:
    """What is shown: one run's folder, or a study.

    Attributes:
        title: the run's or the study's name.
        folder: of the run, or of the study.
        overview: of a study: its runs as plain values (see `live.js`); None: it is a run.
        run_folder: of a study: the folder of a run by its name, or None for a name it does not have.
    """

    title: str
    folder: Path
    overview: Callable[[], JsonObject] | None = None
    run_folder: Callable[[str], Path | None] = lambda name: None


def new_token() -> str:
    """Return a fresh token of 256 random bits."""
    return secrets.token_urlsafe(32)


def listen(port: int = 0) -> socket.socket:
    """Listen on a port of 127.0.0.1; 0: any free one.

    Raises:
        UserError: the port is in use or not allowed.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: a port is a number from 1 to 65535, or 0 for any free one")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for any free one") from None
    return listener


def address(listener: socket.socket, token: str) -> str:
    """Return the address to open in a browser."""
    return f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"


def build_app(site: Site, token: str) -> Guard:
    """Build the site. Pages: `/`, of a study also `/run/NAME`; their numbers at `state.json` beside them."""
    views = _Views(site)
    routes = [
        Route("/", views.page),
        Route("/state.json", views.state),
        Route("/run/{name}/", views.run_page),
        Route("/run/{name}/state.json", views.run_state),
    ]
    return Guard(Starlette(routes=routes), token)


def serve(app: ASGIApp, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM."""
    make_server(app).run(sockets=[listener])


def make_server(app: ASGIApp) -> Any:
    """Return the uvicorn server, not started."""
    config = uvicorn.Config(
        app, lifespan="off", log_level="critical", access_log=False, server_header=False, limit_concurrency=64,
        timeout_graceful_shutdown=1, ws="none", interface="asgi3", proxy_headers=False, http=ImpatientProtocol,
    )  # fmt: skip
    return uvicorn.Server(config)


class ImpatientProtocol(H11Protocol):
    """HTTP whose connections must ask something within 10 s; beyond 32 that have not, the oldest one is closed."""

    _opened_s = 0.0
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._opened_s = self.loop.time()
        self._patience = self.loop.call_later(_REQUEST_S, self._close_if_silent)
        silent = [c for c in map(_of_ours, self.connections) if c.cycle is None and not c.transport.is_closing()]
        if len(silent) > _MOST_SILENT:
            min(silent, key=lambda connection: connection._opened_s)._close_if_silent()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.abort()


def _of_ours(connection: object) -> ImpatientProtocol:
    return cast(ImpatientProtocol, connection)


class Guard:
    """Lets only those pass who may: `Host`, method and token, in this order; adds what keeps a page to itself."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()
        # Browsers keep cookies by host, whatever the port: pages of several machines, through tunnels, have one each.
        self._cookie = f"echelon-{hashlib.sha256(self._token).hexdigest()[:12]}"
        self._heard_s = -math.inf

    def heard(self, seconds: float) -> bool:
        """Whether somebody who may asked within the last seconds."""
        return time.monotonic() - self._heard_s <= seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is None:
            self._heard_s = time.monotonic()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if refusal is None and "token" in request.query_params:
                    value = f"{self._cookie}={self._token.decode()}; HttpOnly; SameSite=Strict; Path=/"
                    headers.append("Set-Cookie", value)
            await send(message)

        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if name not in HOSTS:
            return PlainTextResponse(f"This page answers to the names {' and '.join(HOSTS)} only.\n", 403)
        if request.method != "GET":
            return PlainTextResponse("This page is read-only: GET is all that it answers.\n", 405, {"Allow": "GET"})
        authorization = request.headers.get("authorization", "")
        given = [
            request.query_params.get("token", ""), request.cookies.get(self._cookie, ""),
            authorization.removeprefix("Bearer ") if authorization.startswith("Bearer ") else "",
        ]  # fmt: skip
        if not any(hmac.compare_digest(text.encode(), self._token) for text in given):
            words = "This address lacks its token: open the one that the command printed (it ends with ?token=...).\n"
            return PlainTextResponse(words, 403)
        return None


class _Views:
    """Answers in the server's own thread, one request after the other (`async`): only one at a time reads a run."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._runs: dict[Path, LiveRun] = {}

    async def page(self, request: Request) -> Response:
        return _html("study" if self._site.overview else "run", self._site.title, "")

    async def state(self, request: Request) -> Response:
        if self._site.overview is not None:
            return JSONResponse(self._site.overview())
        return self._state_of(self._site.folder)

    async def run_page(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        return _html("run", name, self._site.title) if self._site.run_folder(name) else _absent(name)

    async def run_state(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        folder = self._site.run_folder(name)
        return self._state_of(folder) if folder else _absent(name)

    def _state_of(self, folder: Path) -> Response:
        run = self._runs.setdefault(folder, LiveRun(folder))
        run.refresh()
        return JSONResponse(to_json(run, look(run)))


def _html(kind: str, title: str, parent: str) -> Response:
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(render_live(kind, title, parent, nonce), headers={"Content-Security-Policy": policy})


def _absent(name: str) -> Response:
    return PlainTextResponse(f"No run {name!r} here.\n", 404)


def render_live(kind: str, title: str, parent: str, nonce: str) -> str:
    """Return the page of a run or of a study.

    Args:
        kind: `run` or `study`.
        title: its name, escaped here.
        parent: of a study's run, the study's name; empty otherwise.
        nonce: what the page's style and script carry, so that no other is obeyed.
    """
    environment = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    styles = [_REPORT_STYLE.read_text(encoding="utf-8"), (_TEMPLATES / "live.css").read_text(encoding="utf-8")]
    return environment.get_template("live.html.j2").render(
        kind=kind,
        title=title,
        parent=parent,
        nonce=nonce,
        style=Markup("\n".join(styles)),
        script=Markup((_TEMPLATES / "live.js").read_text(encoding="utf-8")),
    )
