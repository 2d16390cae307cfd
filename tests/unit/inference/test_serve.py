"""The service: answers, limits and refusals, by a model that gives the sum of its columns."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient
from torch import Tensor, nn

from echelon.config import build
from echelon.core.errors import UserError
from echelon.data import DataInfo
from echelon.inference.predict import predict_samples, write_table
from echelon.inference.serve import PredictionService, ServiceLimits
from echelon.run.trained import TrainedModel
from echelon.tasks.base import TaskSettings, Writing
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.nest import TensorSpec
from echelon.tasks.regression import Regression


class Total(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        if float(numbers.sum()) > 1000:
            time.sleep(1.0)
        return numbers.sum(1, keepdim=True)


def client(folder: Path, limits: ServiceLimits = ServiceLimits()) -> TestClient:  # noqa: B008
    measured = {name: {"mean": 1.0, "std": 2.0, "known": []} for name in ("a", "b")}
    (folder / "columns.json").write_text(json.dumps(measured))
    info = DataInfo(
        "rows", (), 2, 1, 8, 2, (), shape=(2,), targets=TensorSpec(), task="regression", columns=("a", "b"),
        target_mean=(10.0,), target_std=(1.0,),
    )  # fmt: skip
    task = Regression().fitted(info, TaskSettings())
    config = build(None, {"data.loaders": 0}).config
    trained = TrainedModel(Total(), info, task, config, folder)
    service = PredictionService(trained, torch.device("cpu"), limits, Writing())
    return TestClient(service.app(), base_url="http://127.0.0.1")


def test_rows_are_predicted_in_the_units_of_the_data(tmp_path: Path) -> None:
    answer = client(tmp_path).post("/predict", json={"rows": [{"a": 3, "b": 5}, {"b": None, "a": 1}]})
    assert answer.status_code == 200
    assert [row["prediction"] for row in answer.json()["predictions"]] == [13.0, 10.0]
    assert client(tmp_path).get("/health").json()["task"] == "regression"


def test_rows_of_several_types_are_predicted_and_what_is_no_number_is_refused(tmp_path: Path) -> None:
    service = client(tmp_path)
    answer = service.post("/predict", json={"rows": [{"b": 5}, {"a": "3", "b": 5}, {"a": 3, "b": 5.5}]})
    assert answer.status_code == 200, answer.text
    for value in ("\ud800", [1], {"z": 1}, True, 2**70, "x"):
        refused = service.post("/predict", content=json.dumps({"rows": [{"a": 1, "b": 2}, {"a": value, "b": 2}]}),
                               headers={"content-type": "application/json"})  # fmt: skip
        assert refused.status_code in ((200, 422) if value in (True, 2**70) else (422,)), (value, refused.text)
        assert refused.json()


@pytest.mark.parametrize("body", [{"texts": ["a.csv"]}, {"files": [base64.b64encode(b"x").decode()]}])
def test_samples_of_another_kind_are_refused_in_the_words_of_a_request(tmp_path: Path, body: dict) -> None:
    refused = client(tmp_path).post("/predict", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"] == 'this run\'s samples are rows: send {"rows": [{"a": value, ...}, ...]}'
    images = image_client(tmp_path).post("/predict", json={"rows": [{"a": 1}]})
    assert images.json()["error"].startswith('this run\'s samples are images: send {"files": [base64, ...]}, or one')


def test_a_fault_of_the_service_is_answered_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = TestClient(client(tmp_path).app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    monkeypatch.setattr("echelon.inference.serve.predict_samples", lambda *_: 1 / 0)
    answer = service.post("/predict", json={"rows": [{"a": 3, "b": 5}]})
    assert answer.status_code == 500 and "the service failed at this request" in answer.json()["error"]
    assert "Traceback" in capsys.readouterr().err


def image_model(folder: Path) -> TrainedModel:
    """Serve a model of 4 x 4 images of one channel, whose logits are their sum and its negative."""
    info = DataInfo("images", ("light", "dark"), 1, 4, 8, 2, (4, 4), mean=(0.5,), std=(1.0,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2, bias=False))
    torch.nn.init.constant_(model[1].weight[0], 1.0)
    torch.nn.init.constant_(model[1].weight[1], -1.0)
    task = ImageClassification().fitted(info, TaskSettings())
    trained = TrainedModel(model, info, task, build(None, {"data.loaders": 0}).config, folder)
    return trained


def image_client(folder: Path) -> TestClient:
    service = PredictionService(image_model(folder), torch.device("cpu"), ServiceLimits(), Writing())
    return TestClient(service.app(), base_url="http://127.0.0.1")


def png(mode: str, value: int) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (6, 5), (value,) * 3 if mode == "RGB" else value).save(file, "PNG")
    return file.getvalue()


def test_images_of_any_colours_are_seen_in_the_models_channels(tmp_path: Path) -> None:
    files = [base64.b64encode(png(*image)).decode() for image in (("RGB", 250), ("L", 250), ("L", 3), ("RGB", 3))]
    answer = image_client(tmp_path).post("/predict", json={"files": files})
    assert [row["prediction"] for row in answer.json()["predictions"]] == ["light", "light", "dark", "dark"]
    raw = image_client(tmp_path).post("/predict", content=png("L", 3), headers={"content-type": "image/png"})
    assert raw.json()["predictions"][0]["prediction"] == "dark"


def test_a_file_that_is_no_image_has_an_error_in_its_place_and_the_others_are_answered(tmp_path: Path) -> None:
    files = [base64.b64encode(each).decode() for each in (png("L", 3), b"no image", png("L", 250))]
    answer = image_client(tmp_path).post("/predict", json={"files": files})
    first, second, third = answer.json()["predictions"]
    assert (first["prediction"], third["prediction"]) == ("dark", "light")
    assert set(second) == {"sample", "error"} and second["sample"] == 1 and "/" not in second["error"]
    assert "files is empty" in image_client(tmp_path).post("/predict", json={"files": []}).json()["error"]


def test_an_image_that_cannot_be_read_stops_a_prediction_or_has_a_row_that_says_why(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, content in zip(paths, (png("L", 3), b"no image", png("L", 250)), strict=True):
        path.write_bytes(content)
    trained, cpu = image_model(tmp_path), torch.device("cpu")
    with pytest.raises(UserError, match=r"1\.png: cannot be read .* with --on-bad-image skip its row says so"):
        list(predict_samples(trained, paths, Writing(), cpu))
    rows = list(predict_samples(trained, paths, Writing(), cpu, skips_bad=True))
    assert [row.prediction.value for row in rows] == ["dark", None, "light"] and "error" in rows[1].plain()
    write_table(tmp_path / "rows.csv", rows[1:])
    head, bad, good = (tmp_path / "rows.csv").read_text().splitlines()
    assert head.startswith('"sample","error","prediction"') and "light" in good and "light" not in bad


def test_a_text_never_names_a_file_of_the_machine(tmp_path: Path) -> None:
    file = tmp_path / "secret.png"
    file.write_bytes(png("L", 3))
    answer = image_client(tmp_path).post("/predict", json={"texts": [str(file)]})
    assert answer.status_code == 422 and "this run's samples are images" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"[]", "application/json", 422),
        (b"{", "application/json", 422),
        (b'{"rows": []}', "application/json", 422),
        (b'{"rows": [3]}', "application/json", 422),
        (b'{"texts": ["x"]}', "application/json", 422),
        (b'{"texts": ["/etc/passwd.csv"]}', "application/json", 422),
        (b'{"files": ["?"]}', "application/json", 422),
        (b'{"rows": [{"a": 1}]}', "application/json", 422),
        (b'{"rows": [{"a": 1, "b": 2}]}', "text/plain", 415),
        (b"a" * 3000, "application/json", 413),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(tmp_path: Path, body: bytes, kind: str, status: int) -> None:
    limits = ServiceLimits(body_bytes=2000)
    answer = client(tmp_path, limits).post("/predict", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]


def test_what_takes_too_long_is_refused(tmp_path: Path) -> None:
    answer = client(tmp_path, ServiceLimits(seconds=0.2)).post("/predict", json={"rows": [{"a": 9e6, "b": 0}]})
    assert answer.status_code == 503 and "no answer within 0.2 s" in answer.json()["error"]


def test_other_hosts_and_methods_are_refused(tmp_path: Path) -> None:
    asked = client(tmp_path)
    assert asked.get("/health", headers={"host": "evil.example"}).status_code == 400
    assert asked.get("/predict").status_code == 405


def test_a_client_that_hangs_up_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = iter([{"type": "http.request", "body": b'{"rows": [', "more_body": True}, {"type": "http.disconnect"}])
    statuses = []

    async def receive() -> Any:
        """Return part of a body, and that the client is gone."""
        return next(messages)

    async def send(message: Any) -> None:
        """Note a status."""
        statuses.append(message.get("status"))

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers, "query_string": b""}
    asyncio.run(client(tmp_path).app(scope, receive, send))
    assert statuses[0] == 499 and not capsys.readouterr().err
