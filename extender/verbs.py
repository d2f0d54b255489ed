"""kube-scheduler's calls: bytes in, bytes out.

Every error is reported in the answer's Error: kube-scheduler treats any HTTP status but 200 as "extender down" and hides the body.
To add a verb: a method here, a struct in `protocol`, a route in `server`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from extender.bind import Binder
from extender.filter import prioritize_nodes, spare_nodes
from extender.filter_answers import FilterAnswers
from extender.gangs import GangKeeper
from extender.metrics import Metrics
from extender.placeholders import Placeholders
from extender.preemption.coordinator import PreemptionCoordinator
from extender.protocol import (
    BindingArgs,
    BindingResult,
    FilterArgs,
    FilterReader,
    FilterResult,
    HostPriority,
    PreemptionArgs,
    PreemptionResult,
)
from extender.reasons import PLACEHOLDER
from extender.snapshot_writer import SnapshotWriter
from extender.state import State
from vgpu.api.errors import TangramError

log = structlog.get_logger("extender")


@dataclass(frozen=True, slots=True)
class VerbResponse:
    """Of one call."""

    body: bytes
    unreadable: bool = False
    """Was the request not a scheduler's call, or was it not read?"""


class Verbs:
    """`not_ready`: what is missing before pods may be placed, or None."""

    def __init__(
        self,
        state: State,
        binder: Binder,
        preemption: PreemptionCoordinator,
        gangs: GangKeeper,
        metrics: Metrics,
        snapshots: SnapshotWriter,
        not_ready: Callable[[], str | None],
        placeholders: Placeholders | None = None,
    ) -> None:
        self._state, self._binder, self._preemption, self._gangs = state, binder, preemption, gangs
        self._metrics, self.snapshots, self._not_ready = metrics, snapshots, not_ready
        self._placeholders = placeholders
        self._filter_args, self._filter_answers = FilterReader(), FilterAnswers()
        self._binding_args = msgspec.json.Decoder(BindingArgs)
        self._preemption_args = msgspec.json.Decoder(PreemptionArgs)
        self._encoder = msgspec.json.Encoder()

    async def filter(self, body: bytes) -> VerbResponse:
        """ExtenderArgs -> ExtenderFilterResult."""
        started, unreadable = time.perf_counter(), False
        try:
            missing = self._not_ready()
            if missing:
                unreadable, result = True, FilterResult(error=missing)
            else:
                args = self._filter_args.read(body)
                result = self._gangs.refuses(args) or await self._placed(args, started)
                self._gangs.answered(args.pod, result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            unreadable, result = True, FilterResult(error=f"filter: the request cannot be read: {error}")
        except Exception as error:
            log.exception("filter failed")
            result = FilterResult(error=f"filter failed: {type(error).__name__}: {error}")
        answer = self._filter_answers.encode(result)
        outcome = "error" if result.error else "fits" if result.node_names else "no_room"
        self._metrics.count("filter", outcome, time.perf_counter() - started)
        return VerbResponse(answer, unreadable)

    async def _placed(self, args: FilterArgs, started: float) -> FilterResult:
        if self._placeholders is not None and self._placeholders.is_placeholder(args.pod):
            return FilterResult(unresolvable={PLACEHOLDER: list(dict.fromkeys(args.node_names or ()))})
        result = await self._found(args, started)
        if self._placeholders is not None and result.node_names:
            self._placeholders.placed(args.pod.uid)
        return result

    async def _found(self, args: FilterArgs, started: float) -> FilterResult:
        self._gangs.next_pod(args.pod)
        result = self._preemption.filter(args)
        if await self._preemption.has_news(args, result, time.perf_counter() - started):
            result = self._preemption.filter(args)
        return result

    def prioritize(self, body: bytes) -> VerbResponse:
        """ExtenderArgs -> HostPriorityList, for a pod that requests a share and whose node kube-scheduler chooses."""

        def rated(args: FilterArgs) -> dict[str, int]:
            with self._preemption.reservations.lifted(args.pod.uid):
                return prioritize_nodes(self._state, args)

        return self._rate("prioritize", body, rated)

    def spare(self, body: bytes) -> VerbResponse:
        """ExtenderArgs -> HostPriorityList, for a pod without a share."""
        return self._rate("spare", body, lambda args: spare_nodes(self._state, args))

    def _rate(self, verb: str, body: bytes, how: Callable[[FilterArgs], dict[str, int]]) -> VerbResponse:
        """HostPriorityList has no Error: after an error no node is rated, and the log shows the reason."""
        started, outcome, rated, unreadable = time.perf_counter(), "error", dict[str, int](), False
        try:
            missing = self._not_ready()
            if missing:
                unreadable = True
                log.warning("no node is rated", reason=missing)
            else:
                rated = how(self._filter_args.read(body))
                outcome = "rated"
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            unreadable = True
            log.warning(f"{verb}: the request cannot be read", error=str(wrong))
        except TangramError as refused:
            log.warning("no node is rated", reason=str(refused))
        except Exception:
            log.exception(f"{verb} failed")
        self._metrics.count(verb, outcome, time.perf_counter() - started)
        return VerbResponse(
            self._encoder.encode([HostPriority(node, score) for node, score in rated.items()]), unreadable
        )

    async def bind(self, body: bytes) -> VerbResponse:
        """ExtenderBindingArgs -> ExtenderBindingResult."""
        started, outcome, error, unreadable = time.perf_counter(), "error", "", False
        try:
            missing = self._not_ready()
            if missing:
                unreadable, error = True, missing
            else:
                args = self._binding_args.decode(body)
                with self._preemption.background.waiting():
                    outcome = (await self._binder.bind(args)).replace(" ", "_")
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            unreadable, error = True, f"bind: the request cannot be read: {wrong}"
        except TangramError as refused:
            log.warning("bind refused", error=str(refused))
            outcome, error = "refused", str(refused)
        except Exception as wrong:
            log.exception("bind failed")
            error = f"bind failed: {type(wrong).__name__}: {wrong}"
        self._metrics.count("bind", outcome, time.perf_counter() - started)
        return VerbResponse(self._encoder.encode(BindingResult(error)), unreadable)

    async def preempt(self, body: bytes) -> VerbResponse:
        """ExtenderPreemptionArgs -> ExtenderPreemptionResult, which has no Error: after an error no pod is evicted, and the log shows the reason."""
        started, result, outcome, unreadable = time.perf_counter(), PreemptionResult(), "error", False
        until_s = self._preemption.verb.deadline()
        try:
            missing = self._not_ready()
            if missing:
                unreadable = self._preemption.verb.missed = True
                log.warning("no pod is evicted", reason=missing)
            else:
                args = self._preemption_args.decode(body)
                with self._gangs.calling(args.pod, until_s):
                    await self._preemption.verb.wait_for_preemptor(args.pod)
                    result = await self._preemption.verb.preempt(args, until_s)
                outcome = "victims" if result.nodes else "no_victims"
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            unreadable = True
            log.warning("preempt: the request cannot be read", error=str(wrong))
        except TangramError as refused:
            log.warning("no pod is evicted", reason=str(refused))
        except Exception:
            log.exception("preempt failed")
        self._metrics.count("preempt", outcome, time.perf_counter() - started)
        return VerbResponse(self._encoder.encode(result), unreadable)

    def count_snapshot(self, outcome: str, seconds: float) -> None:
        """Count a call of GET /snapshot; the outcome is taken, refused or unread."""
        self._metrics.count("snapshot", outcome, seconds)
