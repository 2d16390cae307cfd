from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.models import ModelInput, auto_name, build_model, builtin_names, parameter_count

CIFAR = ModelInput(classes=10, channels=3, image_size=32)
DIGITS = ModelInput(classes=10, channels=1, image_size=8)


def build(name: str, data: ModelInput = CIFAR) -> nn.Module:
    return build_model(ModelConfig(name=name), data)


@pytest.mark.parametrize("name", builtin_names())
@pytest.mark.parametrize("data", [DIGITS, ModelInput(47, 1, 28), CIFAR], ids=lambda d: f"{d.channels}x{d.image_size}")
def test_built_ins_fit_the_data_and_every_parameter_gets_a_gradient(name: str, data: ModelInput) -> None:
    model = build(name, data)
    logits = model(torch.randn(3, data.channels, data.image_size, data.image_size))
    assert logits.shape == (3, data.classes)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", builtin_names())
def test_a_rank_without_samples_still_runs_forward_and_backward(name: str) -> None:
    model = build(name)
    model(torch.empty(0, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["small_cnn", "bench_cnn", "mlp", "small_vit"])
def test_models_without_batchnorm_do_not_depend_on_the_cut_of_a_batch(name: str) -> None:
    model = build(name).double()
    images = torch.randn(6, 3, 32, 32, dtype=torch.float64)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    torch.testing.assert_close(torch.cat([model(images[:1]), model(images[1:])]), model(images), rtol=0, atol=1e-12)


def test_parameter_counts() -> None:
    assert parameter_count(build("resnet20")) == 269_722  # He et al. 2016, table 6: 0.27 M
    for data in (CIFAR, ModelInput(10, 1, 28)):
        assert parameter_count(build("bench_cnn", data)) == pytest.approx(1.2e6, rel=0.01)


def test_resnet20_blocks_start_as_the_identity() -> None:
    block = build("resnet20").get_submodule("blocks.0").eval()
    x = torch.rand(2, 16, 8, 8)
    torch.testing.assert_close(block(x), x)


@pytest.mark.parametrize(
    ("image_size", "name"), [(4, "mlp"), (8, "small_cnn"), (28, "small_cnn"), (32, "resnet20"), (224, "timm/resnet50")]
)
def test_auto_goes_by_image_size(image_size: int, name: str) -> None:
    assert auto_name(ModelInput(10, 3, image_size)) == name


def test_names_are_known_without_importing_any_model() -> None:
    code = (
        "import sys; from echelon.models import builtin_names; print(*builtin_names());"
        "sys.exit(any(m in sys.modules for m in ('timm', 'torchvision', 'echelon.models.builtin.mlp')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["bench_cnn", "mlp", "resnet20", "small_cnn", "small_vit"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("timm/resnet18", ModelInput(7, 1, 28)),
        ("timm/vit_tiny_patch16_224", ModelInput(7, 3, 32)),
        ("torchvision/squeezenet1_1", ModelInput(7, 3, 32)),
    ],
)
def test_library_models_take_classes_channels_and_size_from_the_data(name: str, data: ModelInput) -> None:
    model = build(name, data)
    assert model.training
    assert model(torch.randn(2, data.channels, data.image_size, data.image_size)).shape == (2, 7)


def test_timm_residual_branches_start_at_zero() -> None:
    assert not build("timm/resnet18").get_parameter("layer1.0.bn2.weight").any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnt20", ["did you mean resnet20?", "small_cnn", "timm/NAME"]),
        ("resnet50", ["did you mean timm/resnet50 or torchvision/resnet50?"]),
        ("efficientnet_b00", ["did you mean timm/efficientnet_b0?"]),
        ("tim/resnet50", ["did you mean timm?", "timm/resnet50"]),
        ("timm/resnet5", ["did you mean resnet50?"]),
        ("torchvision/renset18", ["did you mean resnet18?"]),
        ("torchvision/inception_v3", ["3-channel images of 32x32, 10 classes", "--image-size"]),
        ("no_such_module:build", ["no module 'no_such_module'"]),
        ("json:dmps", ["json has no 'dmps'", "did you mean dumps?"]),
        ("json:dump", ["needs obj, fp"]),
        ("json:loads", ["needs s"]),
        ("os:sep", ["is a str"]),
    ],
)
def test_refused_in_one_line(name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        build(name)
    assert "\n" not in str(refusal.value)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_torchvision_refuses_other_than_three_channels() -> None:
    with pytest.raises(UserError, match="takes 3-channel images, the data has 1"):
        build("torchvision/resnet18", DIGITS)


def test_a_users_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def whole(data):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(data.channels * data.image_size**2, data.classes))\n"
        "def some(classes, width=8): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))\n"
        "def any_name(**options): return some(options['classes'])\n"
        "def number(data): return 5\n"
        "def wrong_head(data): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))\n"
        "def wrong_input(data): return nn.Linear(5, 10)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("whole", "some", "any_name"):
        assert parameter_count(build(f"own_models:{name}")) == 30_730
    for name, words in {
        "number": "must return a torch.nn.Module; it returned int",
        "wrong_head": r"logits of shape \(batch, 10\).* it returned \[2, 2\]",
        "wrong_input": "cannot take 3-channel images of 32x32",
        "hole": "did you mean whole",
    }.items():
        with pytest.raises(UserError, match=words):
            build(f"own_models:{name}")


def test_a_users_own_function_for_inputs_that_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_readers.py").write_text(
        "from types import SimpleNamespace\n"
        "from torch import nn\n"
        "def reader(data): return nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(4 * 8, data.classes))\n"
        "class Record(nn.Module):\n"
        "    def __init__(self, data):\n"
        "        super().__init__()\n"
        "        self.whole = reader(data)\n"
        "    def forward(self, x): return SimpleNamespace(logits=self.whole(x))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    tokens = ModelInput(3, 8, 1, (8,), "int64")
    for name in ("own_readers:reader", "own_readers:Record"):  # transformers' models give a record
        assert build_model(ModelConfig(name), tokens)(tokens.blank(5)).shape == (5, 3)
    with pytest.raises(UserError, match=r"inputs of shape \(8,\) and type int64, 3 classes .*: choose another model$"):
        build_model(ModelConfig("mlp"), tokens)
