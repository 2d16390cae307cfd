"""The update of a step parameter by parameter, behind the next forward pass: each when its sum has come.

A parameter is updated at the latest where the next forward pass reads it, so that what is needed late may arrive late.
Reads are seen by torch itself (`TorchFunctionMode`), not guessed from modules: a weight that is shared, or that a
module uses without calling the layer that holds it, is updated in time too. What torch does not see, such as a scripted
module's reads, was not seen in the first forward pass either: those parameters are updated before any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from echelon.collectives.priority_sums import PrioritySums
from echelon.observe.phases import Phase, PhaseClock
from echelon.optim.some_parameters import Settings, settings_of, step_for


class LayerwiseUpdate:
    """Updates parameters whose sums arrive while the next step already computes.

    Bits are those of an update after all sums: with the step's own rates, and of each parameter by itself.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, sums: PrioritySums, clock: PhaseClock
    ) -> None:
        """Take the module that training goes through, and whose parameters `sums` sums."""
        self._optimizer, self._sums, self._clock = optimizer, sums, clock
        self._settings: Settings = ()
        self._pending: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}  # of them: DDP, which makes its buckets anew, would move those it finds
        self._read: dict[int, Tensor] | None = {}  # in the first forward pass, in order; None: it has ended
        self._unseen: list[Tensor] = []
        self._mode: _Reads | None = None
        self._device_type = sums.parameters[0].device.type if sums.parameters else "cpu"
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)

    def begin(self) -> None:
        """Begin the update of a step, whose backward pass has ended."""
        self.finish()
        self._settings = settings_of(self._optimizer)
        for parameter in self._sums.parameters:
            if parameter.grad is not None:
                self._pending[id(parameter)], self._gradients[id(parameter)] = parameter, parameter.grad
                parameter.grad = None

    def finish(self) -> None:
        """Wait for all sums, and update what is not updated yet."""
        for parameter in [*self._pending.values()]:
            self._complete(parameter)

    def wait(self, parameter: Tensor) -> None:
        """Wait for the sum of a parameter's gradient, of any shape, before it is updated."""
        self._sums.wait(parameter)

    def reads(self, values: Iterable[Any]) -> None:
        """Hear the arguments of an operation of the forward pass: parameters among them must be those of its step."""
        for value in values:
            if id(value) in self._pending:
                self._complete_in_forward(value)
            elif isinstance(value, list | tuple):
                self.reads(value)
            elif self._read is not None and isinstance(value, nn.Parameter):
                self._read.setdefault(id(value), value)

    @property
    def listens(self) -> bool:
        """Whether it has yet to hear what is read."""
        return bool(self._pending) or self._read is not None

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if not self.listens:
            return
        for parameter in self._unseen:
            if id(parameter) in self._pending:
                self._complete_in_forward(parameter)
        self._mode = _Reads(self)
        self._mode.__enter__()

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if output is None:  # it has failed
            return
        for parameter in [*self._pending.values()]:  # what this pass did without
            self._complete_in_forward(parameter)
        if self._read is not None:
            in_order = {id(p): p for p in self._sums.parameters}
            self._unseen = [p for p in self._sums.parameters if id(p) not in self._read]
            self._sums.need([p for number, p in self._read.items() if number in in_order])
            self._read = None

    def _complete_in_forward(self, parameter: Tensor) -> None:
        self._clock.enter(Phase.COMMUNICATE)
        self._sums.wait(parameter)
        self._clock.enter(Phase.UPDATE)
        self._complete(parameter)
        self._clock.enter(Phase.FORWARD)

    def _complete(self, parameter: Tensor) -> None:
        """Update a parameter, once its sum has come, and all others whose sums have come by then."""
        if id(parameter) not in self._pending:
            return
        self._sums.wait(parameter)
        arrived = [p for p in self._pending.values() if self._sums.is_summed(p)]
        for updated in arrived:
            updated.grad = self._gradients.pop(id(updated))
            del self._pending[id(updated)]
        with torch.autocast(self._device_type, enabled=False):
            step_for(self._optimizer, arrived, self._settings)


class _Reads(TorchFunctionMode):
    """Lets parameters be updated before an operation reads them."""

    def __init__(self, update: LayerwiseUpdate) -> None:
        super().__init__()
        self._update = update

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """Call what was called, once its parameters are updated."""
        if self._update.listens:
            self._update.reads(args)
            if kwargs:
                self._update.reads(kwargs.values())
        return func(*args, **(kwargs or {}))
