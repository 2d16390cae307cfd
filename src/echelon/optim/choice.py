"""The optimizer that a run is described with, and what it may be combined with: timm's, or the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from echelon.core.errors import UserError
from echelon.core.own import OwnCall
from echelon.optim.own import (
    FLAG,
    OptimizerFactory,
    check_factory,
    described,
    import_optimizer,
    is_own,
    takes_weight_decay,
)
from echelon.optim.probe import OwnTraits, probe
from echelon.optim.traits import Reach, draws_numbers, is_split_on_servers, reach_of


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer by name; what is the user's own is imported and tried out when it is first asked for.

    Attributes:
        name: as described.
        user_factory: from Python, in place of what the name would import.
        call: what the name imports; None: it is timm's, or given from Python.
    """

    name: str
    user_factory: OptimizerFactory | None = None
    call: OwnCall | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own."""
        return is_own(self.name)

    @cached_property
    def factory(self) -> OptimizerFactory | None:
        """What builds the user's own; None: timm does.

        Raises:
            UserError: there is no such class, or the run was described with another.
        """
        if self.user_factory is None:
            return None if self.call is None else import_optimizer(self.call, self.name)
        check_factory(self.user_factory, self.name)
        name = described(self.user_factory)
        if name != self.name:
            raise UserError(f"the run's optimizer is {self.name!r}, and the one given from Python is {name!r}")
        return self.user_factory

    @cached_property
    def user_traits(self) -> OwnTraits | None:
        """What is known of the user's own; None: it is timm's.

        Raises:
            UserError: a run cannot be trained with it.
        """
        return None if self.factory is None else probe(self.factory, self.name)

    @property
    def reach(self) -> Reach:
        """What the update of an element depends on."""
        return self.user_traits.reach if self.user_traits else reach_of(self.name)

    @property
    def draws(self) -> bool:
        """Whether its steps draw random numbers."""
        return self.user_traits.draws if self.user_traits else draws_numbers(self.name)

    @property
    def is_split_on_servers(self) -> bool:
        """Whether the keys of a parameter server split tensors that it updates; else each is of one server."""
        return self.user_traits.reach is Reach.ELEMENT if self.user_traits else is_split_on_servers(self.name)

    @property
    def hint(self) -> str:
        """What a refusal for the sake of its reach says beside."""
        if self.user_traits is None:
            return ""
        if self.user_traits.draws:
            return " (its steps draw random numbers, so that pieces and wholes differ)"
        return " (found by steps on small tensors; a class that says elementwise = True is believed)"

    def notes(self, decay: float) -> list[str]:
        """Say, in sentences, which settings are nothing to it."""
        if self.factory is None or not decay or takes_weight_decay(self.factory):
            return []
        return [f"{FLAG} {self.name} takes no weight_decay: --weight-decay {decay:g} is not used"]
