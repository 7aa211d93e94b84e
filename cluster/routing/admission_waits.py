"""The asyncio shell around `Admission`: wakes each request that is admitted, refused or late.

Owner: one ingress's event loop; of the futures of queued requests.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from cluster.errors import QueueTimeoutError
from cluster.routing.admission import Supply
from cluster.routing.backlog import PromptEngine
from cluster.routing.helpers import Helper
from cluster.routing.slot_queue import RETRY_AFTER_S, not_ready
from cluster.routing.views import Column

if TYPE_CHECKING:
    from cluster.routing.admission import Admission
    from cluster.routing.demand import Demand
    from cluster.routing.entry import AdmissionEntry
    from cluster.routing.placement import Placement
    from cluster.routing.pools import PoolState


class AdmissionWaits:
    """Waits for admission.

    Args:
        admission: Decides which requests are admitted, and when.
        pools: Source of the capacity that it decides by.
    """

    def __init__(self, admission: Admission, pools: PoolState) -> None:
        self.admission = admission
        self._pools = pools
        self._futures: dict[AdmissionEntry, asyncio.Future[None]] = {}
        self._supply: tuple[int, Supply] | None = None

    def __len__(self) -> int:
        return len(self.admission)

    async def enter(self, demand: Demand) -> Pass:
        """Wait until the request is admitted; the caller must `end` the returned pass.

        Raises:
            NotReadyError: No replica decodes, and discovery is not looking for one.
            SaturatedError: The queue is full.
            OverloadedError: The request would miss its objective.
            QueueTimeoutError: It has no objective, and was not admitted within its deadline.
        """
        if self._pools.is_stranded:
            raise not_ready()
        loop = asyncio.get_running_loop()
        entry = self.admission.arrive(demand, loop.time(), self.supply())
        future: asyncio.Future[None] = loop.create_future()
        self._futures[entry] = future
        timer = loop.call_at(entry.latest_s, self._expire, entry.latest_s)
        if entry.is_spilled:
            begin_s = self.admission.begin_s(loop.time(), self.supply())
            loop.call_at(min(begin_s, entry.latest_s), self.capacity_changed)
        self._drop_gone()
        for over in self.admission.overflow(loop.time()):
            error = self.admission.saturated(loop.time(), self.supply())
            self._futures.pop(over).set_exception(error)
        self.capacity_changed()
        try:
            await future
        except BaseException:
            self.end(entry)
            raise
        finally:
            timer.cancel()
            self._futures.pop(entry, None)
        return Pass(self, entry)

    def capacity_changed(self) -> None:
        """Admit what can be admitted; call it when the pools or admitted requests change."""
        if not self.admission:
            return
        self._drop_gone()
        now_s = asyncio.get_running_loop().time()
        if self._pools.is_stranded:
            for entry in self.admission.clear(now_s):
                self._futures.pop(entry).set_exception(not_ready())
        for entry in self.admission.assign(now_s, self.supply()):
            self._futures.pop(entry).set_result(None)

    def first_token(self, entry: AdmissionEntry) -> None:
        """Record that the first token was delivered."""
        self.admission.first_token(entry, asyncio.get_running_loop().time())
        self.capacity_changed()

    def end(self, entry: AdmissionEntry, num_tokens: int = 0) -> None:
        """Forget a request that has ended, and admit others; see `Admission.end`."""
        self.admission.end(entry, asyncio.get_running_loop().time(), num_tokens)
        self.capacity_changed()

    def supply(self) -> Supply:
        """Return the current capacity; cached until the pools change."""
        if self._supply is None or self._supply[0] != self._pools.num_changes:
            self._supply = self._pools.num_changes, _supply(self._pools)
        return self._supply[1]

    def to_spare(self, entry: AdmissionEntry) -> set[Placement]:
        """Return places to avoid for the request's slot while there is room elsewhere."""
        if entry.helper is None:
            spared = self.admission.helpers.to_spare(entry, self.supply().helpers)
            places = self._pools.decode_views().placements if spared else []
            return {place for place in places if place.incarnation in spared}
        return {place for place in self._pools.decode_views().placements if place != entry.helper}

    def _drop_gone(self) -> None:
        """Remove requests cancelled in this turn of the loop: their tasks have yet to run."""
        now_s = asyncio.get_running_loop().time()
        for entry in [entry for entry, future in self._futures.items() if future.done()]:
            del self._futures[entry]
            self.admission.end(entry, now_s)

    def _expire(self, latest_s: float) -> None:
        self._drop_gone()
        # A timer may come early by the clock's resolution.
        now_s = max(asyncio.get_running_loop().time(), latest_s)
        for entry in self.admission.expire(now_s):
            self._futures.pop(entry).set_exception(self._late(entry, now_s))
        self.capacity_changed()

    def _late(self, entry: AdmissionEntry, now_s: float) -> Exception:
        if not self._pools.may_decode:
            return not_ready()
        if not math.isinf(entry.ttft_s):
            return self.admission.refusal(entry, now_s, self.supply())
        return QueueTimeoutError(
            f"not admitted within {now_s - entry.arrived_s:g} s; retry later",
            retry_after_s=RETRY_AFTER_S,
        )


class Pass:
    """An admitted request's handle to admission. Owner: the request's `Run`.

    Args:
        waits: The part that admitted it.
        entry: Its record there.
    """

    def __init__(self, waits: AdmissionWaits, entry: AdmissionEntry) -> None:
        self._waits = waits
        self._entry = entry

    @property
    def helper(self) -> Placement | None:
        """The DP group of a decode engine that is to compute the prompt; None for prefill."""
        return self._entry.helper

    def to_spare(self) -> set[Placement]:
        """Return places to avoid for its slot while there is room elsewhere."""
        return self._waits.to_spare(self._entry)

    def placed(self) -> None:
        """Record that the pools hold its slot and count it from now on."""
        self._waits.admission.placed(self._entry)

    def asked(self, engine: str) -> None:
        """Record that this engine, and no other any more, was asked to compute the prompt."""
        now_s = asyncio.get_running_loop().time()
        self._waits.admission.asked(self._entry, engine, now_s)

    def saw_token(self) -> None:
        """Record that a token was delivered; only the first one counts."""
        if self._entry.first_s is None:
            self._waits.first_token(self._entry)

    def end(self, num_tokens: int) -> None:
        """Record that the request has ended; see `Admission.end`."""
        self._waits.end(self._entry, num_tokens)


def _supply(pools: PoolState) -> Supply:
    decode = pools.decode_views()
    num_slots = 0
    for incarnation in decode.engines:
        member = pools.member(incarnation)
        assert member is not None, incarnation
        num_slots += member.description.dp_groups * member.description.slots_per_group
    prompts = {}
    asked = pools.prefill_views() or decode
    num_queued_tokens = asked.column(Column.QUEUED_TOKENS)
    for incarnation, index in asked.engines.items():
        member = pools.member(incarnation)
        assert member is not None, incarnation
        step_tokens = member.description.max_num_batched_tokens
        prompts[incarnation] = PromptEngine(int(num_queued_tokens[index]), step_tokens)
    num_empty_slots = int(decode.column(Column.EMPTY_SLOTS).sum())
    return Supply(prompts, num_slots, num_empty_slots, _helpers(pools))


def _helpers(pools: PoolState) -> dict[str, Helper]:
    """Return the decode engines that could compute prompts, if prefill engines exist too."""
    if not pools.can_prefill:
        return {}
    decode = pools.decode_views()
    num_empty_slots, num_rows = decode.column(Column.EMPTY_SLOTS), decode.column(Column.ROWS)
    helpers: dict[str, Helper] = {}
    for incarnation, first in decode.engines.items():
        member, snapshot = pools.member(incarnation), pools.snapshot(incarnation)
        assert member is not None, incarnation
        assert snapshot is not None, incarnation
        num_empty = num_empty_slots[first : first + len(snapshot.groups)].tolist()
        helpers[incarnation] = Helper(
            tuple(lane for lane, count in enumerate(num_empty) if count),
            member.description.max_num_batched_tokens,
            int(num_rows[first]),
            math.ceil(max(group.num_prompts for group in snapshot.groups)),
            snapshot.step_s,
        )
    return helpers
