"""A caller's objects travel by value: whatever class they are of, and into memory of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.models.trial import own_copy
from echelon.run.parcel import Parcel
from echelon.trainer.assemble import UserObjects


def _local_class() -> nn.Module:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.act: Callable[[Tensor], Tensor] = lambda x: x * 3

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.layer(x))

    return Local()


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "local class and lambda": _local_class,
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.ReLU()),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "weight_norm as a hook": lambda: torch.nn.utils.weight_norm(nn.Linear(4, 4)),
    "tied weights": _tied,
}


def _sent(model: nn.Module) -> nn.Module:
    opened = Parcel.of(UserObjects(model=model)).open().model
    assert opened is not None
    return opened


def test_code_keeps_the_file_that_errors_name() -> None:
    loss = Parcel.of(UserObjects(loss=lambda outputs, targets: outputs - targets)).open().loss
    assert loss is not None and loss.__code__.co_filename == __file__  # type: ignore[union-attr]


COPIES = {"sent": _sent, "in this process": own_copy}


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_computes_the_same_from_memory_of_its_own(name: str, copies: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    copied = COPIES[copies](model)
    x = torch.randn(3, 4)
    assert torch.equal(model(x), copied(x))
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in copied.named_parameters()]
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in copied.parameters()}
    copied(x).sum().backward()
    torch.optim.SGD(copied.parameters(), lr=1.0).step()
    assert not torch.equal(model(x), copied(x))


def test_a_parametrised_copy_can_be_parametrised_and_sent_again() -> None:
    copied = _sent(_sent(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))))
    nn.utils.parametrize.remove_parametrizations(copied, "weight")
    assert type(copied) is nn.Linear and isinstance(copied.weight, nn.Parameter)


class _Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_sent_is_refused_in_one_line_that_names_it() -> None:
    with pytest.raises(UserError, match=r"^model of your own cannot be copied: .*lock.*$"):
        own_copy(_Locked())
    with pytest.raises(UserError, match=r"^model of your own cannot be sent to the workers: .*lock.*$"):
        Parcel.of(UserObjects(model=_Locked()))


@pytest.mark.long
def test_a_class_of_a_script_opens_where_the_script_is_not(tmp_path: Path) -> None:
    script = (
        "from torch import nn\n"
        "from echelon.run.parcel import Parcel\nfrom echelon.trainer.assemble import UserObjects\n"
        "class Net(nn.Linear):\n    scale = 2\n"
        "import pickle\nopen('parcel', 'wb').write(pickle.dumps(Parcel.of(UserObjects(model=Net(2, 3)))))\n"
    )
    (tmp_path / "script.py").write_text(script)
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True, timeout=60)
    opened = "import pickle; print(pickle.load(open('parcel', 'rb')).open().model.scale)"
    done = subprocess.run([sys.executable, "-c", opened], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n", done.stderr
