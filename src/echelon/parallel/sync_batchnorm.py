"""BatchNorm over the samples of all ranks, on GPUs (torch's own) and on CPUs (here).

Shapes: x (N, C, ...) with N this rank's samples (0 is allowed), n values per channel over all ranks.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.core.errors import UserError
from echelon.core.listeners import closed_afterwards
from echelon.torch_compat import BatchNormBase, same_ranks_group

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class GlooSyncBatchNorm(BatchNormBase):
    """BatchNorm whose batch is that of all ranks of a gloo group, while training; keys of its state as BatchNorm's.

    With mean m and biased variance v over the n values of a channel on all ranks, y = (x - m) / sqrt(v + eps) * w + b
    (Ioffe and Szegedy 2015); running statistics follow as BatchNorm's do. The gradient of x is that of the *sum* of
    all ranks' losses; those of w and b are this rank's part, for data parallelism to sum.

    Every rank must call it equally often in training mode, if need be with 0 samples: the others wait for it.
    torch.nn.SyncBatchNorm is the same for CUDA tensors only, and DistributedDataParallel refuses it on CPUs.
    """

    process_group: dist.ProcessGroup | None = None

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected x (N, C, ...), got {x.ndim} dims")

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (N, C, ...)."""
        group = self.process_group
        if not self.training or group is None:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, var, count = _Normalise.apply(x, self.weight, self.bias, self.eps, group)
        if self.track_running_stats:
            self._track(mean, var, float(count))
        return y

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        if not count:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_((var * count / max(1.0, count - 1)).to(self.running_var), share)


class _Activated(BatchNormBase):
    """The same followed by dropout and activation: timm's BatchNormAct2d, with its names."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (N, C, ...), then apply dropout and activation."""
        return self.act(self.drop(super().forward(x)))


class GlooSyncBatchNormAct(_Activated, GlooSyncBatchNorm):
    """Over gloo, then dropout and activation."""


class SyncBatchNormAct(_Activated, nn.SyncBatchNorm):
    """torch's, then dropout and activation."""


def convert_sync_batchnorm(
    module: nn.Module,
    group: dist.ProcessGroup | None,
    still: Set[str] = frozenset(),
) -> nn.Module:
    """Replace every BatchNorm in a module, in place; parameters and statistics stay the same objects.

    Call it on all ranks of `group`, before DistributedDataParallel. On gloo, the layers get a process group of their
    own, so that their collectives, issued while gradients already travel, never meet those of another rank's.

    Args:
        group: None: this process is alone, and others may join it over gloo (see `regroup_sync_batchnorm`).
        still: names of those whose statistics no batch enters; they stay what they are.

    Returns:
        The module, or its replacement where it is a BatchNorm itself.

    Raises:
        UserError: a layer derives from BatchNorm in a way not known here.
    """
    if not any(isinstance(each, BatchNormBase) for each in module.modules()):
        return module
    return _convert(module, _own_group(group), still, "")


def regroup_sync_batchnorm(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let layers of a model measure the samples of other ranks from now on; all ranks of `group` call it together.

    Args:
        group: over gloo; None: this process is alone, and the layers measure its own samples.
    """
    layers = [each for each in module.modules() if isinstance(each, GlooSyncBatchNorm)]
    own = _own_group(group) if layers else None
    for layer in layers:
        layer.process_group = own


def has_sync_batchnorm(module: nn.Module) -> bool:
    """Whether every rank must run this module in training mode in each step, if need be with 0 samples."""
    return any(isinstance(each, (nn.SyncBatchNorm, GlooSyncBatchNorm)) for each in module.modules())


def _own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group of the same ranks that nothing else uses, where it is one of gloo's."""
    if group is None or dist.get_backend(group) != "gloo":
        return group
    with closed_afterwards():
        return same_ranks_group(group, "gloo")


def _convert(module: nn.Module, group: dist.ProcessGroup | None, still: Set[str], path: str) -> nn.Module:
    if isinstance(module, BatchNormBase):
        return module if path in still else _replacement(module, group)
    made: dict[int, nn.Module] = {}
    below = module.named_modules(remove_duplicate=False)  # `named_children` tells once of one that stands twice
    for name, child in [(name, each) for name, each in below if name and "." not in name]:
        if id(child) not in made:
            made[id(child)] = _convert(child, group, still, f"{path}.{name}" if path else name)
        if made[id(child)] is not child:
            setattr(module, name, made[id(child)])
    return module


def _replacement(old: BatchNormBase, group: dist.ProcessGroup | None) -> BatchNormBase:
    children = dict(old.named_children())
    over_gloo = group is None or dist.get_backend(group) == "gloo"
    kind: type[GlooSyncBatchNorm | nn.SyncBatchNorm]
    if type(old) in PLAIN:
        kind = GlooSyncBatchNorm if over_gloo else nn.SyncBatchNorm
    elif set(children) == {"drop", "act"}:
        kind = GlooSyncBatchNormAct if over_gloo else SyncBatchNormAct
    else:
        raise UserError(
            f"--sync-batchnorm: the model has a {type(old).__name__}, whose forward is not plain BatchNorm's: "
            "use another model, or leave --sync-batchnorm away"
        )
    new = kind(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, device="meta")
    new.process_group = group
    new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    for name, child in children.items():
        setattr(new, name, child)
    return new.train(old.training)


class _Normalise(torch.autograd.Function):
    """x, weight, bias -> y, and the mean, biased variance and count over all ranks, which have no gradient.

    With g the gradient of y and h = (x - m) / sqrt(v + eps):
    dx = w / sqrt(v + eps) * (g - (sum g + h sum g h) / n), both sums over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalise x (N, C, ...) by the moments of all ranks; returns y and mean, variance (C,) and count."""
        channels = x.shape[1]
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        if x.numel():
            # Each rank's moments are taken around its own mean; adding them in float64 then loses nothing that matters.
            var, mean = torch.var_mean(_wide(x), dim=_all_but_channels(x), correction=0)
            mean, count = mean.double(), x.numel() // channels
            sums[:channels] = mean * count
            sums[channels:-1] = (var.double() + mean.square()) * count
            sums[-1] = count
        sums = _sum_over_ranks(sums, group)
        total = sums[-1].clamp(min=1)
        mean = sums[:channels] / total
        var = (sums[channels:-1] / total - mean.square()).clamp(min=0)
        dtype = _wide(x).dtype if weight is None else weight.dtype
        mean_, var_ = mean.to(dtype), var.to(dtype)
        y = F.batch_norm(x, mean_, var_, weight, bias, False, 0.0, eps)
        ctx.group, ctx.has_bias = group, bias is not None
        ctx.save_for_backward(x, weight, mean_, (var + eps).rsqrt().to(dtype), total)
        count_ = sums[-1].clone()
        ctx.mark_non_differentiable(mean, var, count_)
        return y, mean, var, count_

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias; those of weight and bias are of this rank's samples."""
        x, weight, mean, inverse_std, total = ctx.saved_tensors
        shape = (1, -1, *[1] * (x.ndim - 2))
        grad_ = grad.to(mean.dtype)
        normal = (x.to(mean.dtype) - mean.view(shape)) * inverse_std.view(shape)
        dims = _all_but_channels(x)
        grad_bias, grad_weight = grad_.sum(dims), (grad_ * normal).sum(dims)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = _sum_over_ranks(torch.cat([grad_bias, grad_weight]).double(), ctx.group)
            of_grad, of_product = (sums / total).to(mean.dtype).view(2, *shape).unbind(0)
            scale = inverse_std if weight is None else inverse_std * weight
            grad_x = (scale.view(shape) * (grad_ - of_grad - normal * of_product)).to(x.dtype)
        return grad_x, grad_weight if weight is not None else None, grad_bias if ctx.has_bias else None, None, None


def _sum_over_ranks(sums: Tensor, group: dist.ProcessGroup) -> Tensor:
    on_host = sums.cpu()
    dist.all_reduce(on_host, group=group)
    return on_host.to(sums.device)


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.ndim)]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
