"""The types that a run computes in. Losses and metrics are float32; what travels is `compression`'s choice."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from echelon.config.schema import TrainingConfig
from echelon.core.errors import UserError
from echelon.models.base import ModelInput
from echelon.models.trial import call_blank
from echelon.parallel.precision import computing_in

FP8_CAPABILITY = (8, 9)  # of the first GPUs with 8-bit matrix units
FP8_MULTIPLE = 16  # both sides of a matrix must be multiples of it


@dataclass(frozen=True)
class Precision:
    """What a `--precision` means.

    Attributes:
        autocast: type that autocast gives to matrix products and the like.
        parameters: type of the copies that the forward pass uses in place of the float32 parameters.
    """

    autocast: torch.dtype | None = None
    parameters: torch.dtype | None = None


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(autocast=torch.bfloat16),
    "bf16-params": Precision(parameters=torch.bfloat16),
    "fp16": Precision(autocast=torch.float16),
    "fp8": Precision(autocast=torch.bfloat16),
}


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which matrix products and the like compute in a type; None: as their inputs are."""
    if dtype is None and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # entering torch's takes as long as a small layer
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def build_scaler(precision: str, device: torch.device, model_group: dist.ProcessGroup | None) -> torch.amp.GradScaler:
    """Return what scales float16 losses; an overflow in any piece of a replica skips the step on all its ranks.

    Between replicas a sum of gradients carries it; replicas that step by themselves skip by themselves.

    Args:
        model_group: the ranks that step on parts of one update, those of a replica that is split or of a divided
            optimizer; None otherwise.
    """
    enabled = precision == "fp16"
    if model_group is None or not enabled:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler(device.type, process_group=model_group)
    scaler.scale(torch.zeros((), device=device))  # makes the scale, where a pipeline's first stages see no loss
    return scaler


def set_numerics(training: TrainingConfig) -> None:
    """Set what holds for the whole process: TF32, and kernels that repeat their bits, or else the fastest ones.

    cuDNN tries its convolutions when a shape comes first; which is the fastest may differ from run to run.
    """
    torch.backends.cudnn.benchmark = not training.deterministic
    if training.tf32 != "auto":
        torch.set_float32_matmul_precision("high" if training.tf32 == "on" else "highest")
        torch.backends.cudnn.allow_tf32 = training.tf32 == "on"
    if training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)


def check_narrow(model: nn.Module, data: ModelInput, precision: str) -> None:
    """Refuse narrow parameters for a model that computes with them and what stays wide, such as buffers, in one layer.

    Raises:
        UserError: says what its forward raised.
    """
    dtype = PRECISIONS[precision].parameters
    if dtype is None:
        return
    try:
        call_blank(model, data)
    except Exception:  # noqa: BLE001  the caller's code may raise any, of zeros: that says nothing of types
        return
    try:
        with computing_in(model, dtype):
            call_blank(model, data, dtype)
    except torch.OutOfMemoryError:  # that says nothing of types: training may take its model in pieces
        return
    except RuntimeError as error:
        raise UserError(
            f"--precision {precision} casts parameters and inputs of {type(model).__name__}, not its buffers, and its "
            f"forward raised {str(error).splitlines()[0]}: cast buffers where they are used, as in "
            "x + self.table.to(x.dtype), or use --precision bf16"
        ) from error


def check_fp8(device: torch.device) -> None:
    """Refuse 8-bit floats where the device or the library has none.

    Raises:
        UserError: names what is missing.
    """
    if device.type != "cuda":
        raise UserError(
            f"--precision fp8 needs a GPU with 8-bit matrix units (compute capability 8.9 or more), this is a "
            f"{device.type.upper()}: use --precision bf16"
        )
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise UserError(
            f"--precision fp8: {torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}, "
            "8-bit matrix units came with 8.9: use --precision bf16"
        )


def to_fp8(model: nn.Module, device: torch.device) -> nn.Module:
    """Make linear layers multiply in 8-bit floats, in place: torchao, scales per tensor, found at each step.

    Layers whose sides are no multiples of 16, and the last one (the logits), stay as they are. The gradient of a weight
    is a product over the rows of a batch, which must be a multiple of 16 too: `pad_inner_dim` fills up those of a last
    batch, or of a part of one, that are not.

    Raises:
        UserError: the device or the library has no 8-bit floats, or no layer fits.
    """
    check_fp8(device)
    try:
        float8 = importlib.import_module("torchao.float8")
    except ModuleNotFoundError:
        raise UserError("--precision fp8 needs torchao: install it (pip install torchao), or use bf16") from None
    fitting = fp8_layers(model)
    if not fitting:
        raise UserError(
            "--precision fp8: the model has no linear layer but the last whose sides are multiples of 16: use bf16"
        )
    converted: nn.Module = float8.convert_to_float8_training(
        model,
        module_filter_fn=lambda _, name: name in fitting,
        config=float8.Float8LinearConfig(pad_inner_dim=True),
    )
    return converted


def fp8_layers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that compute in 8-bit floats."""
    linear = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for last in list(linear)[-1:]:
        del linear[last]
    return {
        name for name, m in linear.items() if m.in_features % FP8_MULTIPLE == 0 and m.out_features % FP8_MULTIPLE == 0
    }
