"""The channels of one process on one GPU, and the calls that suspend and resume them.

The process passes its own descriptor and the client to which every channel of the list belongs. The kernel driver rejects a client
that was not made through that descriptor. So a process can only report its own channels, whatever numbers it sends.

The kernel driver counts disables, and needs as many enables. A channel group that may run has at most one disable outstanding. Of a group that must
not run in any case, because memory of its process is away, the arbiter may not know whether it is suspended: then it is suspended once more, and
resumed as often as it may have been suspended.
"""

from __future__ import annotations

import ctypes
import fcntl
import threading
from enum import Enum
from itertools import count
from typing import Final, NamedTuple

from arbiter.descriptors import Kind, close, kind_of
from vgpu.api.errors import BadDocument
from vgpu.gputime import resource_manager as rm
from vgpu.protocol.wire import Channels

NO_ANSWER: Final = -1
"""Status of a call that the kernel itself refused."""


ENABLES_LIMIT: Final = 16
"""Enables of one resume, and those of a process that came with memory away: each arbiter and each connection since may have suspended it once more. Guessed; an
enable takes 0.3 ms."""


COMPUTE: Final = 1
COPIES: Final = 2
"""The kinds of channels; a call names one kind or both."""


class ChannelState(Enum):
    """The known state of a channel group's channels."""

    ON = "on"
    OFF = "off"
    UNSURE = "unsure"
    """Some may be disabled: an enable must come before anything else. An enable of enabled channels has no effect."""


class Halt(NamedTuple):
    """One suspend of one channel group: after a resume and another suspend it is another one."""

    channel_group: int
    """Its number, which no other group of this arbiter has."""
    suspends: int
    """Of its compute and copy channels so far."""


_numbers = count(1)


class _ChannelList:
    """The channels of one kind of a group. `fresh`: no arbiter has suspended them. `held`: several may have, one after the other."""

    def __init__(self, bit: int, channels: tuple[int, ...], *, fresh: bool, held: bool) -> None:
        self.bit = bit
        """Identifies the kind in a call for several."""
        self.channels = channels
        self.state = ChannelState.ON if fresh or not channels else ChannelState.UNSURE
        self.suspends = 0
        """Number of times that they became suspended."""
        self.disables = 0 if self.state is ChannelState.ON else ENABLES_LIMIT if held else 1
        """How many enables the driver may need."""


class ChannelGroup:
    """Owns `fd`. Raises BadDocument for an unusable descriptor or list; then it has closed the descriptor.

    It can also be suspended with its copy channels; a resume then resumes both. `held`: memory of its process is away, or is about to be, so
    it is never resumed. Only the thread of its GPU suspends it; several threads may resume it.
    """

    def __init__(self, channels: Channels, fd: int, container: str = "", *, held: bool = False) -> None:
        self.channels = channels
        self.number = next(_numbers)
        self.held = held
        self.partial = channels.unlisted
        """There are more channels than fit one list: it is never suspended, because the rest would continue to run."""
        self.owes = False
        """Replaced by a partial list: to be resumed once more before it is closed."""
        self._compute = _ChannelList(COMPUTE, channels.compute, fresh=channels.fresh, held=held)
        self._copies = _ChannelList(COPIES, channels.copy, fresh=channels.fresh, held=held)
        self._fd, self._container = fd, container
        self._lock = threading.Lock()
        """Protects the descriptor from being closed, and its number reused, during a call."""
        try:
            if kind_of(fd) is Kind.FOREIGN:  # an ioctl on another descriptor of a container could wait for ever
                raise BadDocument("packet CHANNELS comes with a descriptor that is no NVIDIA device")
            if not channels.compute:
                raise BadDocument("packet CHANNELS lists no compute channel: 1 to 64")
            both = (*channels.compute, *channels.copy)
            self._fits = len(both) <= rm.CHANNELS_LIMIT
            """Whether one call can name all its channels."""
            lists = {COMPUTE: channels.compute, COPIES: channels.copy, COMPUTE | COPIES: both if self._fits else ()}
            self._parameters = {
                (kinds, disable): ctypes.create_string_buffer(
                    rm.disable_parameters(channels.client, listed, disable=disable), rm.PARAMETERS_BYTES
                )
                for kinds, listed in lists.items()
                if listed
                for disable in (False, True)
            }
        except BadDocument:
            close(fd, container)
            raise
        self._arguments = {
            do: rm.control(channels.client, channels.subdevice, ctypes.addressof(parameters))
            for do, parameters in self._parameters.items()
        }

    @property
    def runs(self) -> ChannelState:
        """Of its compute channels. Unsure: an arbiter before this one may have suspended them."""
        return self._compute.state

    @property
    def stands(self) -> bool:
        """Whether none of its channels runs, copy channels included. Not of a list with as many copy channels as it can name: there may be more."""
        whole = len(self.channels.copy) < rm.CHANNELS_LIMIT and not self.channels.unlisted
        return whole and self.listed_are_off

    @property
    def listed_are_off(self) -> bool:
        """Whether all channels that it names are suspended: there is nothing left to call for."""
        return all(one.state is ChannelState.OFF for one in (self._compute, self._copies) if one.channels)

    @property
    def halt(self) -> Halt:
        """The present suspend, where it `stands`."""
        return Halt(self.number, self._compute.suspends + self._copies.suspends)

    def doubt(self) -> None:
        """What of it is suspended may have been resumed, or is about to be."""
        for one in (self._compute, self._copies):
            if one.state is ChannelState.OFF:
                one.state = ChannelState.UNSURE

    def replace(self, old: ChannelGroup) -> None:
        """The process replaced `old` by this list, whatever it reports: the arbiter may have suspended what the old list names."""
        for one, before in ((self._compute, old._compute), (self._copies, old._copies)):
            if one.channels:
                one.state = ChannelState.UNSURE
                one.disables = max(1, one.disables, before.disables)

    def suspend(self, *, copies: bool = False) -> int:
        """Suspend in mid-kernel, and with `copies` in mid-copy, unless it is suspended; not for a partial list. Returns the driver's status; if that is
        not `rm.OK`, the channels run, or `resume` makes them run. Copy channels that do not fit the same list are suspended only if it is held."""
        lists = [self._compute, *([self._copies] if copies and (self._fits or self.held) else [])]
        for together in self._calls([one for one in lists if one.channels and one.state is not ChannelState.OFF]):
            status = self._issue(together, disable=True)
            for one in together:
                one.state = ChannelState.OFF if status == rm.OK else ChannelState.UNSURE
                one.suspends += 1
                one.disables += 1
            if status != rm.OK:
                self.resume()
                return status
        return rm.OK

    def resume(self) -> int:
        """Resume, unless it is held. Harmless if nothing was suspended. After a status other than `rm.OK` an enable is still needed, which comes with a new
        list."""
        lists = [self._compute, *([self._copies] if self._copies.state is not ChannelState.ON else [])]
        self.doubt()
        # The order matters: whoever sets `held` and then finds the group halted can be sure that no enable follows.
        if self.held:
            return rm.OK
        for together in self._calls(lists):
            for _ in range(min(ENABLES_LIMIT, max(1, *(one.disables for one in together)))):
                status = self._issue(together, disable=False)
                if status != rm.OK:
                    for one in together:
                        one.state = ChannelState.UNSURE
                    return status
            for one in together:
                one.state, one.disables = ChannelState.ON, 0
        return rm.OK

    def _calls(self, lists: list[_ChannelList]) -> list[list[_ChannelList]]:
        """The lists that each call to the driver names."""
        return [lists] if lists and self._fits else [[one] for one in lists]

    def suspends_nobody(self) -> bool:
        """Whether the driver reports that it suspended a channel that does not exist. Then it interprets the call as another one."""
        parameters = ctypes.create_string_buffer(
            rm.disable_parameters(self.channels.client, (rm.NO_CHANNEL,), disable=True), rm.PARAMETERS_BYTES
        )
        argument = rm.control(self.channels.client, self.channels.subdevice, ctypes.addressof(parameters))
        return self._call(argument) == rm.OK

    def close(self) -> None:
        """Close the descriptor: while it is open, the process's memory outlives the process. No call is made after that."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd, self._container)

    def _issue(self, lists: list[_ChannelList], *, disable: bool) -> int:
        return self._call(self._arguments[sum(one.bit for one in lists), disable])

    def _call(self, argument: bytearray) -> int:
        with self._lock:
            if self._fd < 0:
                return NO_ANSWER
            try:
                fcntl.ioctl(self._fd, rm.CONTROL_REQUEST, argument)
            except OSError:
                return NO_ANSWER
            return rm.status(argument)
