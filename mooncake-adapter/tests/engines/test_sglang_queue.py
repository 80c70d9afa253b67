"""The queue that stands in for SGLang's."""

import threading
import time
import types

import pytest

import laxity
from laxity.sglang import _queue
from laxity.sglang._queue import PermitQueue


def chunk(room, pages=1, last=False):
    return types.SimpleNamespace(room=room, prefill_kv_indices=list(range(pages)), is_last_chunk=last)


@pytest.fixture
def queue():
    made = PermitQueue()
    made.bind(lambda item: 100 * len(item.prefill_kv_indices), scheduled_beneath=False)
    return made


class Worker:
    """Gets, in a thread of its own, when told to."""

    def __init__(self, queue):
        self.queue = queue
        self.got = []
        self._go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while True:
            self._go.acquire()
            item = self.queue.get()
            self.got.append(item)
            if item is None:
                return

    def next(self, within_s=5.0):
        """What it gets next, or ``"nothing"``."""
        count = len(self.got)
        self._go.release()
        end = time.monotonic() + within_s
        while len(self.got) == count:
            if time.monotonic() > end:
                return "nothing"
            time.sleep(0.0005)
        return self.got[-1]


def test_without_a_daemon_it_is_first_in_first_out(queue):
    chunks = [chunk(number % 3) for number in range(30)]
    for item in chunks:
        queue.put(item)
    assert [queue.get() for _ in chunks] == chunks
    assert queue.waiting() == 0


def test_before_a_manager_is_bound_it_is_first_in_first_out(permits):
    queue = PermitQueue()
    chunks = [chunk(number) for number in range(5)]
    for item in chunks:
        queue.put(item)
    assert [queue.get() for _ in chunks] == chunks
    assert permits.tickets == []


def test_the_order_is_that_of_the_permits(queue, permits):
    worker = Worker(queue)
    loose, tight = chunk(1, 5), chunk(2, 3)
    queue.put(loose)
    queue.put(tight)
    assert [ticket.nbytes for ticket in permits.tickets] == [500, 300]
    assert all(ticket.stage is laxity.Stage.P2D and ticket.said["whole"] for ticket in permits.tickets)
    permits.tickets[1].grant()
    assert worker.next() is tight
    permits.tickets[0].grant()
    assert worker.next() is loose


def test_of_those_that_were_permitted_the_better_level_goes_first(queue, permits):
    for room in (1, 2, 3):
        queue.put(chunk(room))
    for ticket, level in zip(permits.tickets, (4, 2, 255)):
        ticket.grant(level)
    assert [queue.get().room for _ in range(3)] == [2, 1, 3]


def test_chunks_of_one_room_keep_their_order(queue, permits):
    permits.at_once = True
    chunks = [chunk(7, 1), chunk(7, 2), chunk(7, 3, last=True)]
    for item in chunks:
        queue.put(item)
    assert len(permits.tickets) == 1, "only the first of a room asks"
    assert [queue.get() for _ in chunks] == chunks
    assert len(permits.tickets) == 3


def test_a_chunk_is_complete_when_the_worker_comes_back(queue, permits):
    permits.at_once = True
    queue.put(chunk(1, 4))
    queue.put(chunk(2, 1))
    queue.get()
    assert permits.tickets[0].completed == 0
    queue.get()
    assert permits.tickets[0].completed == 400
    assert permits.tickets[1].completed == 0


def test_one_that_comes_back_since_its_receiver_is_not_ready_lets_others_go_first(queue, permits):
    permits.at_once = True
    deferred, other = chunk(1), chunk(2)
    queue.put(deferred)
    assert queue.get() is deferred
    queue.put(deferred)
    queue.put(other)
    assert queue.get() is other
    assert queue.get() is deferred
    queue.put(None)
    assert queue.get() is None
    assert permits.open() == []


def test_the_end_comes_after_all_that_was_put_before_and_nothing_after_it(queue, permits):
    worker = Worker(queue)
    before, after = chunk(1), chunk(2)
    queue.put(before)
    queue.put(None)
    queue.put(after)
    permits.tickets[1].grant()
    assert worker.next(0.05) == "nothing"
    permits.tickets[0].grant()
    time.sleep(0.05)
    assert worker.got == [before]
    assert worker.next() is None
    assert permits.tickets[1].cancelled


def test_put_wakes_a_worker_that_sleeps(queue):
    worker = Worker(queue)
    assert worker.next(0.05) == "nothing"
    item = chunk(1)
    queue.put(item)
    deadline = time.monotonic() + 5
    while not worker.got:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert worker.got == [item]


def test_a_more_urgent_one_that_comes_later_overtakes_one_that_waits(queue, permits):
    worker = Worker(queue)
    first = chunk(1)
    queue.put(first)
    assert worker.next(0.05) == "nothing"
    urgent = chunk(2)
    queue.put(urgent)
    permits.tickets[1].grant()
    deadline = time.monotonic() + 5
    while not worker.got:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert worker.got == [urgent]


def test_a_daemon_that_never_answers_does_not_hold_a_chunk_for_ever(queue, permits, monkeypatch):
    monkeypatch.setattr(_queue, "PATIENCE_S", 0.05)
    item = chunk(1)
    queue.put(item)
    assert queue.get() is item
    queue.put(None)
    assert queue.get() is None
    assert permits.tickets[0].cancelled


def test_the_worker_is_in_the_scope_of_what_it_sends(queue, said):
    queue.put(chunk(5))
    queue.put(None)
    queue.get()
    assert said.scope == {"stage": laxity.Stage.P2D, "request": "sglang-room-5"}
    queue.get()
    assert said.scope == {}


@pytest.mark.parametrize(("attached", "order"), [(True, [3, 1, 4, 2]), (False, [1, 2, 3, 4])])
def test_where_the_bytes_are_scheduled_below_the_order_is_by_deadline_and_no_permit_is_held(
    queue, permits, monkeypatch, attached, order
):
    due = {"sglang-room-1": 5.0, "sglang-room-2": -1.0, "sglang-room-3": 0.1, "sglang-room-4": 9.0}
    monkeypatch.setattr(laxity, "attached", lambda: attached)
    monkeypatch.setattr(laxity, "request_deadline_s", due.get)
    queue.bind(lambda item: 100, scheduled_beneath=True)
    for room in (1, 2, 3, 4):
        queue.put(chunk(room))
    assert permits.tickets == []
    assert [queue.get().room for _ in range(4)] == order


def test_a_broken_laxity_does_not_lose_a_chunk(queue, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("out of order")

    monkeypatch.setattr(laxity, "submit", broken)
    monkeypatch.setattr(laxity, "scope", broken)
    chunks = [chunk(number) for number in range(5)]
    for item in chunks:
        queue.put(item)
    assert [queue.get() for _ in chunks] == chunks


def test_a_size_that_cannot_be_told_is_no_reason_to_wait(queue, permits):
    queue.bind(lambda item: 1 // 0, scheduled_beneath=False)
    item = chunk(1)
    queue.put(item)
    assert queue.get() is item


def test_many_producers_lose_nothing_and_keep_each_rooms_order(queue):
    """With the package's own tickets, which nobody schedules here."""

    def produce(base):
        for number in range(300):
            item = chunk(base + number % 5)
            item.number = number
            queue.put(item)

    threads = [threading.Thread(target=produce, args=(base,)) for base in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    got = [queue.get() for _ in range(1200)]
    for thread in threads:
        thread.join()
    assert len({id(item) for item in got}) == 1200
    seen = {}
    for item in got:
        assert seen.get(item.room, -1) < item.number
        seen[item.room] = item.number
    assert queue.waiting() == 0
