"""powersgd: each matrix as the product of two thin ones.

Helps: Slow links and layers with large matrices: a hundredth of the bytes, summed by the backend itself.
Costs: matrix products in each step, and memory for error feedback (`--dry-run` counts it). Check the accuracy.
Needs: matrices; vectors are sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from echelon.compression.base import (
    FusedRounds,
    Meta,
    Payload,
    Rounds,
    State,
    empty,
    refuse_nonfinite_elements,
    refuse_nonfinite_together,
    working_dtype,
)
from echelon.compression.eased import Eased
from echelon.compression.wire import Layout
from echelon.core.bounds import Bounds, check_bounds
from echelon.torch_compat import foreach_copy_, foreach_sub_


@dataclass(frozen=True)
class PowerSgd(Eased):
    """Approximate each gradient matrix M [n, m] by P Q^T of rank r, with one power iteration that starts at the last Q.

        P = orthonormalise(mean(M Q));  Q = mean(M^T P);  error = M - P Q^T

    M is the gradient (of a convolution: [out, rest]) plus the error that was kept; Q [m, r] starts random, from a
    shared seed. The two means are all-reduces of n r and m r numbers and exact (linear). Vectors, and matrices that
    rank r would not make smaller, are sent whole. Without an all-reduce, as with ps, a worker does the same alone.

    32 r (n + m) / (n m) bits per element. Biased: error feedback sends later what a message leaves out. Momentum stays
    with the optimizer.

    Attributes:
        rank: r, the rank of the approximation; more is more exact, and sends more.
        warmup_steps: how many first steps send bf16 instead; 0: none; left out: 5% of the run's steps.
        finish_steps: how many last steps send bf16 instead; 0: none; left out: 2% of the run's steps.

    Paper: Vogels et al. 2019, "PowerSGD", arXiv:1905.13727 (algorithms 1 and 2, warm start).
    """

    name: ClassVar[str] = "powersgd"
    examples: ClassVar[tuple[str, ...]] = ("powersgd", "powersgd(rank=1)", "powersgd(rank=4)")
    linear: ClassVar[bool] = True
    shaped: ClassVar[bool] = True
    rank: Annotated[int, Bounds(least=1)] = 2
    warmup_steps: Annotated[int | None, Bounds(least=0)] = None
    finish_steps: Annotated[int | None, Bounds(least=0)] = None

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def biased(self) -> bool:
        """True: M^ has rank r only."""
        return True

    @property
    def fewest_messages(self) -> int:
        """Return what power iterations on a moving gradient need."""
        return 500

    def layout(self, numel: int) -> Layout:
        """Return P [n r] and Q [m r], or the matrix [n m] and an empty Q; which, follows from the shape."""
        # The matrix, or P and an empty Q, or P and Q: which follows from the shape, the lengths are sent.
        return ((torch.float32, None), (torch.float32, None))

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return a state with the factor "q" [m, r], random and the same on all workers; none where M travels whole."""
        state = State(name, seed, stream)
        _, m, r = self._sizes(tuple(like.shape))
        if r:
            generator = torch.Generator().manual_seed(state.shared_key())
            q = torch.randn(m, r, generator=generator, dtype=torch.float64)
            state.factors["q"] = q.to(like.device, working_dtype(like.dtype))
        return state

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Factor the worker's own tensor, as a matrix [n, m], into P and Q, and keep Q for the next step."""
        refuse_nonfinite_elements(tensor, state)
        matrix = _matrix(tensor)
        if "q" in state.factors:
            p = _orthonormal(_times(matrix, state.factors["q"]))
            state.factors["q"].copy_(_transposed_times(matrix, p))
            tensors = p.float().reshape(-1), state.factors["q"].float().reshape(-1).clone()
        else:
            tensors = matrix.float().reshape(-1).clone(), torch.empty(0, device=tensor.device)
        state.numbers["step"] += 1
        return self.payload(tensors, Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return P Q^T, or the matrix that travelled whole.

        Raises:
            ValueError: the numbers in the message do not fit the shape.
        """
        p, q = payload.tensors
        meta = payload.meta
        n, m, r = self._sizes(meta.shape)
        if (p.numel(), q.numel()) != ((n * r, m * r) if r else (meta.numel, 0)):
            raise ValueError(f"message holds {p.numel()} and {q.numel()} numbers, which do not fit shape {meta.shape}")
        if out is None:
            out = empty(meta.numel, meta.dtype, p.device).view(meta.shape)
        if r and out.dtype == torch.float32:
            torch.mm(p.view(n, r), q.view(m, r).t(), out=out.view(n, m))
        else:
            out.view(-1).copy_((p.view(n, r) @ q.view(m, r).t()).view(-1) if r else p)
        return out

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        """Yield M Q [n r], then M^T P [m r], whose means give the same P Q^T on all workers."""
        refuse_nonfinite_elements(tensor, state)
        matrix = _matrix(tensor)
        state.numbers["step"] += 1
        if "q" not in state.factors:
            mean = yield matrix.reshape(-1).clone()
            return mean.view(tensor.shape).to(tensor.dtype)
        q = state.factors["q"]
        p = _times(matrix, q)
        p = _orthonormal((yield p.reshape(-1)).view(p.shape))
        q.copy_((yield _transposed_times(matrix, p).view(-1)).view_as(q))
        return (p @ q.t()).view(tensor.shape).to(tensor.dtype)

    def reduce_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> FusedRounds:
        """Do what `reduce_rounds` does to each of several tensors: two reductions, and few launches for a matrix."""
        refuse_nonfinite_together(tensors, states)
        matrices = [_matrix(tensor) for tensor in tensors]
        factors = [state.factors.get("q") for state in states]
        for state in states:
            state.numbers["step"] += 1
        products = [m.reshape(-1) if q is None else (m @ q).view(-1) for m, q in zip(matrices, factors, strict=True)]
        means = (yield torch.cat(products)).split([product.numel() for product in products])
        thin = [i for i, q in enumerate(factors) if q is not None]
        if not thin:
            return _shaped(means, tensors)
        bases = orthonormal_together([means[i].view(len(matrices[i]), self.rank) for i in thin])
        products = [(matrices[i].t() @ p).view(-1) for i, p in zip(thin, bases, strict=True)]
        back = (yield torch.cat(products)).split([product.numel() for product in products])
        foreach_copy_([q.view(-1) for q in factors if q is not None], list(back))
        results = list(means)
        for i, p in zip(thin, bases, strict=True):
            results[i] = p @ states[i].factors["q"].t()
        return _shaped(results, tensors)

    def subtract_means_together(
        self, pending: Sequence[Tensor], means: Sequence[Tensor], states: Sequence[State]
    ) -> None:
        """Leave in each of several tensors, [numel] each, what was not sent."""
        foreach_sub_(list(pending), [mean.view(-1) for mean in means])

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """32 r (n + m) / (n m), or 32 where the matrix travels whole; NaN without a state, which holds the shape."""
        if state is None or numel == 0:
            return math.nan
        if "q" not in state.factors:
            return 32.0
        m, r = state.factors["q"].shape
        return 32.0 * r * (numel // m + m) / numel

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return rows, columns and rank of a tensor's matrix; rank 0: it is sent whole."""
        numel = math.prod(shape)
        n = shape[0] if len(shape) > 1 else 1
        m = numel // n if n else 0
        return n, m, self.rank if self.rank * (n + m) < n * m else 0


def _matrix(tensor: Tensor) -> Tensor:
    """View a tensor as [first dimension, rest] in the working dtype; vectors and scalars as one row."""
    values = tensor.detach().to(working_dtype(tensor.dtype))
    return values.reshape(tensor.shape[0] if tensor.dim() > 1 else 1, -1) if tensor.numel() else values.reshape(1, 0)


def _times(matrix: Tensor, q: Tensor) -> Tensor:
    """M Q for few columns, [n, r] contiguous. Written as (Q^T M^T)^T, which CPU libraries do three times as fast."""
    return (q.t().contiguous() @ matrix.t()).t().contiguous()


def _transposed_times(matrix: Tensor, p: Tensor) -> Tensor:
    """M^T P for few columns, [m, r] contiguous; as (P^T M)^T, 25 times as fast on a CPU."""
    return (p.t().contiguous() @ matrix).t().contiguous()


def _orthonormal(p: Tensor) -> Tensor:
    """Orthonormalise the columns of p [n, r]; r < n. Columns that depend on others become arbitrary unit vectors."""
    return torch.linalg.qr(p).Q.contiguous()


def _shaped(results: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    return [result.view(each.shape).to(each.dtype) for result, each in zip(results, like, strict=True)]


def orthonormal_together(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthonormalise the columns of several matrices [n, r], r < n, of different n: Householder's QR of all at once.

    As with LAPACK's, columns that depend on others become unit vectors, and zeros below a matrix change nothing.
    """
    tallest, rank = max(len(p) for p in matrices), matrices[0].shape[1]
    filling = matrices[0].new_zeros(tallest, rank)
    rows = [each for p in matrices for each in (p, filling[: tallest - len(p)])]
    left = torch.cat(rows).view(len(matrices), tallest, rank)
    reflections: list[tuple[Tensor, Tensor]] = []
    for column in range(rank):
        v = left[:, column:, column]
        v = v / v.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
        v[:, 0] += torch.where(v[:, 0] < 0, -1.0, 1.0) * torch.linalg.vector_norm(v, dim=1)
        square = v.square().sum(dim=1)
        weight = torch.where(square > 0, 2 / square, 0.0)  # of a column of zeros: no reflection
        reflections.append((v.unsqueeze(2), weight.view(-1, 1, 1)))
        _reflect(left[:, column:], *reflections[-1])
    basis = torch.eye(tallest, rank, dtype=left.dtype, device=left.device).repeat(len(matrices), 1, 1)
    for column in reversed(range(rank)):
        _reflect(basis[:, column:], *reflections[column])
    return [each[: len(p)] for each, p in zip(basis, matrices, strict=True)]


def _reflect(matrices: Tensor, v: Tensor, weight: Tensor) -> None:
    """Multiply matrices [b, n, r] by I - weight v v^T, in place; v [b, n, 1], weight [b, 1, 1]."""
    matrices.sub_(weight * v * (v * matrices).sum(dim=1, keepdim=True))


CODEC = PowerSgd
