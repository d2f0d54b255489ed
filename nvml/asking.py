"""NVML's answers, through whatever carries a request: a supervisor in this process, or the door of another one."""

from __future__ import annotations

from typing import Protocol, TypeVar

from nvml.errors import NvmlAway
from nvml.messages import (
    Answers,
    AnyReply,
    AnyRequest,
    Busy,
    CardAt,
    Computed,
    Computes,
    Count,
    Counted,
    Failed,
    Health,
    Held,
    OneCard,
    Processes,
    ProcessUsage,
    Xids,
    XidsSeen,
)
from vgpu.inventory import Card

R = TypeVar("R", bound=AnyReply)


class Carrier(Protocol):
    """Carries a request to a child."""

    def ask(self, request: AnyRequest) -> AnyReply:
        """Never waits for long. Raises NvmlAway, NvmlHung."""


class Nvml:
    """Every method raises NvmlError; NvmlHung where this GPU does not answer; NvmlAway where nobody does."""

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def count(self) -> Counted:
        """How many GPUs there are, and the driver's version."""
        return self._ask(Count(), Counted)

    def card_at(self, index: int, uuid: str = "") -> Card:
        """The card with this index; its links by the PCI bus of the peer. `uuid`: of the card that was there before."""
        return self._ask(CardAt(index, uuid), OneCard).card

    def answers(self, uuid: str) -> str | None:
        """None when the card answers and asks for no reset; else why it does not, for a person."""
        return self._ask(Answers(uuid), Health).trouble

    def processes(self, uuid: str) -> tuple[ProcessUsage, ...]:
        """Every process with a context on the card, by host pid."""
        return self._ask(Processes(uuid), Held).processes

    def busy(self, uuid: str, since_us: int, until_us: int) -> Busy:
        """Who computed on a card after `since_us`, 0 = in all that the driver remembers. Samples of after `until_us` are left out."""
        return self._ask(Computes(uuid, since_us, until_us), Computed).busy

    def xids(self, uuids: tuple[str, ...]) -> XidsSeen:
        """XID events since this was asked last."""
        return self._ask(Xids(uuids), XidsSeen)

    def _ask(self, request: AnyRequest, kind: type[R]) -> R:
        reply = self._carrier.ask(request)
        if isinstance(reply, Failed):
            raise reply.error
        if not isinstance(reply, kind):
            raise NvmlAway(f"the answer to {type(request).__name__} is {type(reply).__name__}: must be {kind.__name__}")
        return reply
