"""A link between machines, as described: its rate and its delay."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.errors import UserError
from echelon.core.units import parse_bits_per_s, parse_seconds

BURST_S = 2.1e-3
MIN_BURST_BYTES = 2 * 1514


@dataclass(frozen=True)
class Link:
    """A link's rate in each direction, and how long each packet is under way in one direction."""

    rate_bits_per_s: float
    delay_s: float = 0.0

    @property
    def burst_bytes(self) -> int:
        """Size of the shaper's token bucket: 2.1 ms of the link, and at least two full Ethernet frames.

        After a pause a bucketful passes at memory speed. A bucket of constant *time* makes that free ride worth 2.1 ms
        on any link; a constant size would carry whole compressed gradients for nothing at 10 Mbit/s, or, if chosen for
        that rate, drop packets at 1 Gbit/s, where this rule gives 256 KiB.
        """
        return max(round(self.rate_bits_per_s / 8 * BURST_S), MIN_BURST_BYTES)


def parse_link(text: str) -> Link:
    """Read a link such as `100mbit`, `1gbit` or `10mbit,20ms`.

    >>> parse_link("10mbit,20ms")
    Link(rate_bits_per_s=10000000.0, delay_s=0.02)

    Raises:
        UserError: the text is not a link.
    """
    rate, comma, delay = text.partition(",")
    try:
        link = Link(parse_bits_per_s(rate), parse_seconds(delay) if comma else 0.0)
    except UserError as error:
        raise UserError(f"link {text!r}: {error} (a link is RATE or RATE,DELAY: 100mbit or 10mbit,20ms)") from error
    if link.rate_bits_per_s < 1e4:
        raise UserError(f"link {text!r}: the rate must be at least 10kbit")
    return link
