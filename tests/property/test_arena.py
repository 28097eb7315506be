"""An arena against a model of it: slots never overlap, payloads stay whole, stale slots are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from appliance.arena import Arena, ArenaFullError, Slot, StaleSlotError

pytestmark = pytest.mark.property

CAPACITY_BYTES = 4096
HEADER_BYTES = 8


class ArenaMachine(RuleBasedStateMachine):
    """Puts, reads and frees in any order."""

    live = Bundle("live")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena.create(CAPACITY_BYTES)
        self.payloads: dict[Slot, bytes] = {}
        self.generations: set[int] = set()

    @rule(target=live, seed=st.integers(0, 255), length=st.one_of(st.integers(0, 300), st.integers(0, CAPACITY_BYTES)))
    def put(self, seed: int, length: int) -> object:
        payload = bytes((seed + i) % 256 for i in range(length))
        try:
            slot = self.arena.put(payload)
        except ArenaFullError:
            assert not self.has_gap(length + HEADER_BYTES), "a payload that fits was refused"
            return multiple()
        assert slot.generation not in self.generations, "a generation was given twice"
        self.generations.add(slot.generation)
        self.payloads[slot] = payload
        return slot

    @rule(target=dead, slot=consumes(live))
    def free(self, slot: Slot) -> Slot:
        self.arena.free(slot)
        del self.payloads[slot]
        return slot

    @rule(slot=dead)
    def use_after_free(self, slot: Slot) -> None:
        for use in (self.arena.get, self.arena.free):
            with pytest.raises(StaleSlotError):
                use(slot)

    @precondition(lambda self: self.payloads)
    @rule(slot=live, wrong=st.integers(1, 3))
    def use_with_another_generation(self, slot: Slot, wrong: int) -> None:
        forged = Slot(slot.offset, slot.length, slot.generation + wrong)
        for use in (self.arena.get, self.arena.free):
            with pytest.raises(StaleSlotError):
                use(forged)

    @invariant()
    def payloads_are_whole(self) -> None:
        for slot, payload in self.payloads.items():
            assert bytes(self.arena.get(slot)) == payload

    @invariant()
    def slots_do_not_overlap_and_lie_inside(self) -> None:
        spans = self.spans()
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(start >= 0 and end <= CAPACITY_BYTES for start, end in spans)

    @invariant()
    def use_is_counted_within_the_capacity(self) -> None:
        needed_bytes = sum(end - start for start, end in self.spans())
        assert needed_bytes <= self.arena.used_bytes <= CAPACITY_BYTES

    def spans(self) -> list[tuple[int, int]]:
        """Where the live slots lie, headers included."""
        return sorted((slot.offset, slot.offset + HEADER_BYTES + slot.length) for slot in self.payloads)

    def has_gap(self, size: int) -> bool:
        """Whether `size` bytes, rounded up to 64, lie free in one piece."""
        rounded = -(-size // 64) * 64
        at = 0
        for start, end in [*self.spans(), (CAPACITY_BYTES, CAPACITY_BYTES)]:
            if start - at >= rounded:
                return True
            at = -(-end // 64) * 64
        return False

    def teardown(self) -> None:
        for slot in list(self.payloads):
            self.free(slot)
        assert self.arena.used_bytes == 0
        assert self.arena.put(bytes(CAPACITY_BYTES - HEADER_BYTES)).offset == 0, "not everything came back"
        self.arena.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.data())
@settings(max_examples=50)
def test_low_addresses_are_used_again_first_so_untouched_pages_cost_nothing(data: st.DataObject) -> None:
    arena = Arena.create(64 * 1024)
    highest = 0
    for length in data.draw(st.lists(st.integers(0, 2000), max_size=40)):
        slot = arena.put(bytes(length))
        highest = max(highest, slot.offset)
        arena.free(slot)
    arena.close()
    assert highest == 0
