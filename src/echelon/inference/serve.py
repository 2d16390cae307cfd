"""A run's model as a service on this machine: `POST /predict` answers with predictions, `GET /health` with what it is.

It listens on 127.0.0.1 and reads no file of this machine for who asks. Requests wait for each other; a body that is too
large, too many that wait and what takes too long are refused.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import socket
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from echelon.core.errors import UserError
from echelon.core.files import scratch_folder
from echelon.core.json_values import finite
from echelon.inference import Text
from echelon.inference.predict import PredictedRow, predict_samples
from echelon.inference.samples import SampleKind, kind_of
from echelon.reporting.live.server import HOSTS, ImpatientProtocol
from echelon.run.machine import say
from echelon.run.trained import TrainedModel
from echelon.tasks.base import Writing

_MOST_WAITING = 64
_HUNG_UP = 499  # which nobody reads
_GRACE_S = 10
_JSON = "application/json"
_RAW = ("image/", "audio/", "application/octet-stream")
_WANTED = (
    'send JSON, {"texts": [...]}, {"rows": [{column: value}, ...]} or {"files": [base64, ...]}, or one image or sound '
    "as the body, with its Content-Type"
)


@dataclass(frozen=True)
class ServiceLimits:
    """What a request may cost.

    Attributes:
        body_bytes: of its body.
        seconds: until its answer, waiting for others included.
    """

    body_bytes: int = 32 * 10**6
    seconds: float = 30.0


class BadRequest(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, reason: str) -> None:
        """Take the status of HTTP, and why."""
        super().__init__(reason)
        self.status = status


class PredictionService:
    """Answers requests, one at a time by the model."""

    def __init__(self, trained: TrainedModel, device: torch.device, limits: ServiceLimits, writing: Writing) -> None:
        """Take the model, and where it computes."""
        self._trained, self._device, self._limits, self._writing = trained, device, limits, writing
        self._worker = ThreadPoolExecutor(1, "predict")
        self._waiting = 0

    def app(self) -> Starlette:
        """Return the application."""
        routes = [Route("/predict", self._predict, methods=["POST"]), Route("/health", self._health)]
        return Starlette(
            routes=routes,
            exception_handlers={Exception: _failed},
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS))],
        )

    def close(self) -> None:
        """Take no more requests; what is being computed is not waited for."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _health(self, request: Request) -> Response:
        trained = self._trained
        return JSONResponse({
            "status": "ok",
            "run": str(trained.folder),
            "task": trained.task.name,
            "model": type(trained.model).__name__,
            "classes": list(trained.info.classes),
            "waiting": self._waiting,
        })  # fmt: skip

    async def _predict(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(self._limits.seconds):
                rows = await self._answer(await self._body(request), request.headers.get("content-type", ""))
        except TimeoutError:
            reason = f"no answer within {self._limits.seconds:g} s: send fewer samples, or start it with more time"
            return JSONResponse({"error": reason}, 503)
        except BadRequest as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status)
        except ClientDisconnect:
            return Response(status_code=_HUNG_UP)
        return JSONResponse({"predictions": [_plain(i, row) for i, row in enumerate(rows)]})

    async def _body(self, request: Request) -> bytes:
        """Read the body, as far as it may go."""
        most, body = self._limits.body_bytes, bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                text = f"the body has more than {most:,} bytes: send fewer samples, or start it with more --max-body"
                raise BadRequest(413, text)
        return bytes(body)

    async def _answer(self, body: bytes, kind: str) -> list[PredictedRow]:
        if self._waiting >= _MOST_WAITING:
            raise BadRequest(503, f"{self._waiting} requests wait already: ask again later")
        job = _job_of(body, kind.partition(";")[0].strip().lower())
        _check_kind(self._trained, job)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, self._compute, job)
        except UserError as error:
            raise BadRequest(422, str(error)) from error
        finally:
            self._waiting -= 1

    def _compute(self, job: Any) -> list[PredictedRow]:
        """Return predictions of texts or rows, or of files' contents, which are put into files of their own."""
        if not (isinstance(job, list) and job and isinstance(job[0], bytes)):
            return list(predict_samples(self._trained, job, self._writing, self._device))
        with scratch_folder() as folder:
            files = _as_files(folder, job)
            try:
                return list(predict_samples(self._trained, files, self._writing, self._device, skips_bad=True))
            except UserError as error:  # in words of the request, which knows no folder of this machine
                raise UserError(str(error).replace(f"{folder}/", "file ")) from error


async def _failed(request: Request, error: Exception) -> Response:
    """Answer that the service has failed, and say on its terminal at what: a fault of ours, not of the request."""
    said = "".join(traceback.format_exception(error))
    say(f"a request failed, which is a fault of Echelon's:\n{said}")
    return JSONResponse({"error": f"the service failed at this request ({type(error).__name__}: {error})"}, 500)


def _as_files(folder: Path, contents: Sequence[bytes]) -> list[Path]:
    paths = [folder / f"{i}" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def _job_of(body: bytes, kind: str) -> Any:
    """Return what a body holds: texts, rows, or the bytes of files.

    Raises:
        BadRequest: it holds none of these.
    """
    if kind.startswith(_RAW):
        return [body]
    if kind != _JSON:
        raise BadRequest(415, _WANTED)
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict) or len(asked) != 1:
            raise BadRequest(422, _WANTED)
        ((name, values),) = asked.items()
        if not isinstance(values, list):
            raise BadRequest(422, _WANTED)
        if not values:
            raise BadRequest(422, f"{name:.20} is empty")
        if name == "files":
            return [base64.b64decode(each, validate=True) for each in values]
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise BadRequest(422, f"the body is no such JSON ({error}): {_WANTED}") from error
    known = {"texts": str, "rows": dict}
    if name not in known or not all(isinstance(each, known[name]) for each in values):
        raise BadRequest(422, _WANTED)
    return [Text(each) for each in values] if name == "texts" else values


def _check_kind(trained: TrainedModel, job: Sequence[Any]) -> None:
    """Refuse samples of another kind than the run's, in the words of a request.

    Raises:
        BadRequest: says what to send.
    """
    kind, columns = kind_of(trained), trained.info.columns
    rows = f'{{"rows": [{{"{columns[0]}": value{", ..." * (len(columns) > 1)}}}, ...]}}' if columns else ""
    texts = '{"texts": [...]}' + (f" or {rows}" if rows else "")
    files = '{"files": [base64, ...]}, or one as the body with its Content-Type'
    wanted: dict[SampleKind, tuple[tuple[type, ...], str]] = {
        SampleKind.TEXTS: ((str, dict) if columns else (str,), texts),
        SampleKind.ROWS: ((dict,), rows),
        SampleKind.IMAGES: ((bytes,), files),
        SampleKind.SOUNDS: ((bytes,), files),
    }
    if kind not in wanted:
        raise BadRequest(422, "this run's samples are arrays, which no request can hold: use echelon.predict in Python")
    kinds, send = wanted[kind]
    if not isinstance(job[0], kinds):
        raise BadRequest(422, f"this run's samples are {kind}: send {send}")


def _plain(place: int, row: PredictedRow) -> Any:
    """Return a row for JSON; a mask as PNG in base64."""
    values = {**row.plain(), "sample": place}
    if row.prediction.mask is not None:
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(row.prediction.mask).save(file, "PNG")
        values["mask"] = base64.b64encode(file.getvalue()).decode()
    return finite(values)


def serve_predictions(service: PredictionService, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Answer until SIGINT or SIGTERM; requests that are being answered then have 10 s."""
    config = uvicorn.Config(
        service.app(), lifespan="off", log_level="critical", access_log=False, server_header=False,
        limit_concurrency=2 * _MOST_WAITING, timeout_graceful_shutdown=_GRACE_S, ws="none", proxy_headers=False,
        http=ImpatientProtocol,
    )  # fmt: skip
    ready()
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        service.close()
