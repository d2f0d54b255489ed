"""Choose which pod a request of the kubelet is for, and which device IDs it gets.

The kubelet names no pod. It admits one pod at a time: container by container in order (init first), and for each container
resource by resource in *random* order. So whose turn it is follows from who waits, what they ask for, and what was given since.
This module draws that conclusion and is pure: it knows no gRPC, no clock and no Kubernetes.

Two pods of the same size on different cards cannot be told apart at the first request. Then one is guessed; the pod in flight is
kept until a request does not fit it; a request that shows the guess to be wrong moves what was given to the pod that explains all
of it. What the kubelet may mix up so are pods of equal counts: per card, its books stay right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

from vgpu.contract import uuid_of
from vgpu.errors import Refused
from vgpu.grant import Assignment
from vgpu.inventory import Inventory, Orphan
from vgpu.names import DEFAULT_GUARD, Guard, Names
from vgpu.request import FULL_CORE_PERCENT, Ask

MOST_SLOTS: Final = 8192
"""Of one GPU: 2 TiB in units of 256 MiB, the smallest there are. Guessed; the kubelet takes 4 MiB of IDs, some 90,000 for all GPUs."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A pod of this node that holds an assignment and is not finished."""

    uid: str
    namespace: str
    name: str
    order: tuple[int, str]
    """Pods come to the kubelet in this order, as far as we can know."""
    asks: tuple[Ask, ...]
    """In the order in which the kubelet serves containers."""
    assignment: Assignment
    waiting: bool = True
    """The kubelet has not said yet that it took it (no status.startTime)."""
    leaving: bool = False
    """It is being deleted."""
    guard: Guard = DEFAULT_GUARD
    """What its user wants done when it holds more memory than it was granted."""
    ignored: tuple[str, ...] = ()
    """Why annotations of class and level do not count, in sentences; the assignment has what does."""
    earlier: frozenset[str] = frozenset()
    """Its containers that look for the library where the release before mounted it, too."""

    def __str__(self) -> str:
        return f"pod {self.namespace}/{self.name}"


Given = Mapping[tuple[str, str], Collection[str]]
"""(container, resource) -> device IDs that the kubelet gave."""

Done = Mapping[str, Given]
"""Pod UID -> what it was given."""


@dataclass(frozen=True, slots=True)
class Request:
    """The kubelet wants this many devices of a resource for one container."""

    resource: str
    quantity: int


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was served."""

    request: Request
    ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Flight:
    """The pod that the kubelet is admitting, and all that it was given since its admission began."""

    uid: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """A container that a request may be for."""

    tenant: Tenant
    container: str
    cards: Mapping[str, int]
    """UUID -> devices of the resource that the assignment means there."""
    place: int = -1
    """Of the container among the pod's asks."""
    moves: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """What the flight was given and is this tenant's by this choice, per (container, resource); the pod guessed before loses it."""
    anew: bool = False
    """The kubelet begins this pod again: what our book says of it was another pod's, or was given back."""
    swapped: bool = False
    """The kubelet's devices lie on other cards: it took a pod of the same size for this one."""


def assigned(tenant: Tenant, ask: Ask, resource: str, names: Names) -> dict[str, int]:
    """UUID -> devices of `resource` that the container's assignment means. Empty when it does not match the ask."""
    pieces = tenant.assignment.containers.get(ask.container, ())
    quantity = ask.resources(names).get(resource, 0)
    if len(pieces) != ask.cards or quantity % max(1, len(pieces)):
        return {}
    return {piece.uuid: quantity // len(pieces) for piece in pieces}


def contradiction(asks: Iterable[Ask], assignment: Assignment) -> str | None:
    """Why an assignment cannot be what Tangram decided for these asks, or None."""
    for ask in asks:
        pieces = assignment.containers.get(ask.container)
        if pieces is None or len(pieces) != ask.cards:
            found = 0 if pieces is None else len(pieces)
            return f"container {ask.container} is assigned {found} GPUs and asks for {ask.cards}"
        for piece in pieces:
            if piece.kind != ask.kind or piece.profile != ask.profile:
                return f"container {ask.container} is assigned a {piece.kind} {piece.profile} and asks for a {ask.kind} {ask.profile}"
            if ask.kind == "share" and (piece.mib, piece.core_percent) != (ask.mib, ask.core_percent):
                return (
                    f"container {ask.container} is assigned {piece.mib} MiB and {piece.core_percent} percent of {piece.uuid}"
                    f" and asks for {ask.mib} MiB and {ask.core_percent} percent"
                )
    return None


def candidates(
    tenants: Sequence[Tenant], done: Done, flight: Flight, request: Request, names: Names
) -> Iterator[Choice]:
    """Containers that the request may be for, the likeliest first."""
    in_flight = next((t for t in tenants if t.uid == flight.uid), None)
    if in_flight and (choice := _next(in_flight, done.get(flight.uid, {}), request, names)):
        yield choice

    def likelihood(tenant: Tenant) -> tuple[bool, bool, tuple[int, str]]:
        return tenant.leaving, bool(done.get(tenant.uid)), tenant.order

    waiting = sorted((tenant for tenant in tenants if tenant.waiting), key=likelihood)
    others = [tenant for tenant in waiting if tenant.uid != flight.uid]
    if flight.calls and (in_flight is None or in_flight.waiting):
        untouched = (tenant for tenant in others if not done.get(tenant.uid))
        yield from filter(None, (_instead(tenant, flight, request, names) for tenant in untouched))
    yield from filter(None, (_next(tenant, done.get(tenant.uid, {}), request, names) for tenant in others))
    # A waiting pod has devices already, and asks for such again: then they were taken by a twin of it. If the twin is among the
    # admitted that we gave nothing, what is its own is left over for this one; else the twin is gone and has left everything.
    taken_for = [tenant for tenant in waiting if done.get(tenant.uid)]
    again = [choice for tenant in taken_for if (choice := _next(tenant, {}, request, names))]
    if again:
        admitted = (tenant for tenant in tenants if not tenant.waiting)
        twins = sorted((tenant for tenant in admitted if not done.get(tenant.uid)), key=likelihood)
        yield from filter(None, (_next(tenant, {}, request, names) for tenant in twins))
    yield from (replace(choice, anew=True) for choice in again)


def _next(tenant: Tenant, given: Given, request: Request, names: Names) -> Choice | None:
    """The request, if it is one that the kubelet would make next for this pod."""
    for place, ask in enumerate(tenant.asks):
        left = {r: n for r, n in ask.resources(names).items() if (ask.container, r) not in given}
        if left:
            fits = left.get(request.resource) == request.quantity
            cards = assigned(tenant, ask, request.resource, names) if fits else {}
            return Choice(tenant, ask.container, cards, place) if cards else None
    return None


def _instead(tenant: Tenant, flight: Flight, request: Request, names: Names) -> Choice | None:
    """This pod, if everything since the flight began and the request too can have been for it."""
    moves: dict[tuple[str, str], frozenset[str]] = {}
    for call in flight.calls:
        step = _next(tenant, moves, call.request, names)
        if step is None:
            return None
        moves[step.container, call.request.resource] = call.ids
    last = _next(tenant, moves, request, names)
    return replace(last, moves=moves) if last else None


def prefer(choice: Choice, available: Iterable[str], must_include: Collection[str], quantity: int) -> list[str] | None:
    """Device IDs on the choice's cards, `must_include` among them. None when too few are free there."""
    picked = list(must_include)
    wanted = Counter(choice.cards)
    wanted.subtract(Counter(uuid_of(one) for one in picked))
    free = frozenset(available) - frozenset(picked) if picked else frozenset(available)
    for uuid in choice.cards:
        room = min(wanted[uuid], quantity - len(picked))
        picked += islice(_free_on(uuid, free), max(0, room))
    return picked if len(picked) == quantity else None


def _free_on(uuid: str, free: Collection[str]) -> Iterator[str]:
    """Those that lie on this card, the lowest slots first. A few of a thousand are taken: looking up names beats sorting them."""
    if uuid in free:
        yield uuid  # a whole GPU or a MIG instance
    for slot in range(MOST_SLOTS):
        if (one := f"{uuid}-{slot}") in free:
            yield one


def prefer_anywhere(
    available: Iterable[str], must_include: Collection[str], near: Collection[str], quantity: int
) -> list[str]:
    """As many IDs on as few cards as can be: cards in `near` first, then those with most free. For pods that were swapped."""
    picked = list(must_include)
    taken, free = set(picked), dict[str, list[str]]()
    for one in available:
        if one not in taken:
            free.setdefault(uuid_of(one), []).append(one)
    for uuid in sorted(free, key=lambda u: (u not in near or len(free[u]) < quantity, -len(free[u]), u)):
        picked += sorted(free[uuid], key=_slot)[: quantity - len(picked)]
    return picked


def settle(choices: Iterable[Choice], ids: Collection[str], request: Request, *, must_match: bool) -> Choice:
    """Whose devices these are.

    First a container whose cards they lie on in the counts assigned; then one whose pod was assigned these cards (an app container
    reuses any of an init container's devices). Where devices follow the environment and not these IDs (`must_match` is False) a
    pod of the same size will do.

    Raises Refused.
    """
    found = Counter(uuid_of(one) for one in ids)
    listed: list[Choice] = []
    for choice in choices:
        if found == Counter(choice.cards):
            return choice
        listed.append(choice)
    if not listed:
        raise Refused(
            f"no pod that waits on this node was assigned {request.quantity} {request.resource}: pods that ask for GPUs have to be placed by Tangram's scheduler"
        )
    for choice in listed:
        if found.keys() <= _cards_of_pod(choice.tenant):
            return choice
    first = listed[0]
    if must_match:
        raise Refused(
            f"the kubelet chose devices on {', '.join(sorted(found))} for {first.tenant}, which was assigned {', '.join(first.cards)}"
        )
    return replace(first, swapped=True)


def check_room(
    tenants: Iterable[Tenant], cards: Collection[str], inventory: Inventory, orphans: Collection[Orphan] = ()
) -> None:
    """Invariant I1 on these cards: what pods were assigned is at most what the card has. `orphans` are pods that the API lacks
    and whose processes may run on. Raises Refused."""
    mib, percent, whole, instances = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    held = [tenant.assignment.held() for tenant in tenants if _uses_any(tenant, cards)]
    for pieces in (*held, *(orphan.held for orphan in orphans)):
        for piece in pieces:
            if piece.uuid in cards:
                mib[piece.uuid] += piece.mib if piece.kind == "share" else 0
                percent[piece.uuid] += piece.core_percent if piece.kind == "share" else 0
                whole[piece.uuid] += piece.kind == "whole"
                instances[piece.uuid] += piece.kind == "mig"
    for uuid in cards:
        card = inventory.card(uuid)
        if card is None:
            raise Refused(f"{uuid} is no GPU of this node")
        if mib[uuid] > card.mib or percent[uuid] > FULL_CORE_PERCENT:
            raise Refused(
                f"GPU {uuid} has {card.mib} MiB and {FULL_CORE_PERCENT} percent of compute time: pods of this node were assigned {mib[uuid]} MiB and {percent[uuid]} percent of it{_gone(orphans, uuid)}"
            )
        if whole[uuid] + instances[uuid] > 1 or (whole[uuid] and (mib[uuid] or percent[uuid])):
            raise Refused(f"GPU {uuid} was assigned to one container alone and to others as well{_gone(orphans, uuid)}")


def _gone(orphans: Iterable[Orphan], uuid: str) -> str:
    """Who of those that use a card has left the API, as the end of a sentence."""
    names = sorted(orphan.key for orphan in orphans if any(piece.uuid == uuid for piece in orphan.held))
    them = f"pod{'s' if len(names) > 1 else ''} {', '.join(names)}"
    return f", counting {them}, deleted by force, whose processes still run" if names else ""


def _cards_of_pod(tenant: Tenant) -> set[str]:
    return {piece.uuid for pieces in tenant.assignment.containers.values() for piece in pieces}


def _uses_any(tenant: Tenant, cards: Collection[str]) -> bool:
    for pieces in tenant.assignment.containers.values():
        for piece in pieces:
            if piece.uuid in cards:
                return True
    return False


def _slot(device_id: str) -> int:
    tail = device_id.rpartition("-")[2]
    return int(tail) if len(tail) < 8 and tail.isdigit() else 0
