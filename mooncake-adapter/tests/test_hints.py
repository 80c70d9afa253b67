"""Hints in a process without a daemon: what is refused, what is counted, and that nothing is ever lost."""

import math
import os
import threading
import time

import pytest

import laxity
from laxity import Stage


@pytest.fixture(autouse=True)
def counted():
    """What was counted since the test began."""
    before = laxity.stats()
    return lambda name: laxity.stats()[name] - before[name]


def unique():
    unique.last += 1
    return f"request-{unique.last}"


unique.last = 0


def test_ids_are_numbers_or_texts_and_the_same_everywhere():
    # FNV-1a of 64 bits, by its published test vectors.
    assert laxity.number("a") == 0xAF63DC4C8601EC8C
    assert laxity.number("foobar") == 0x85944171F73967E8
    assert laxity.number(17) == 17
    assert laxity.number(2**64 - 1) == 2**64 - 1
    assert laxity.request_begin(unique()) != laxity.request_begin(unique())
    for bad in (0, -1, 2**64):
        with pytest.raises(laxity.HintError, match=str(bad)):
            laxity.request_begin(bad)
    for bad in (None, 1.5, b"r"):
        with pytest.raises(TypeError, match="str or an int"):
            laxity.request_begin(bad)


def test_a_request_that_ended_cannot_end_again(counted):
    request = unique()
    laxity.request_begin(request, slo_ttft_s=1)
    laxity.request_end(request)
    with pytest.raises(laxity.RequestEnded, match="ended before"):
        laxity.request_end(request)
    with pytest.raises(laxity.RequestEnded):
        laxity.batch_join("some batch", request)
    laxity.request_begin(request)
    laxity.request_end(request)
    assert counted("requests_ended_twice") == 1


def test_what_was_begun_elsewhere_is_counted_and_no_error(counted):
    laxity.request_end(unique())
    laxity.layer_begin("a batch of another process", 3)
    laxity.batch_end("a batch of another process")
    assert counted("requests_unknown") == 1
    assert counted("batches_unknown") == 2


def test_a_deadline_has_to_be_in_the_future(counted):
    request = unique()
    for name in ("deadline_s", "slo_ttft_s"):
        with pytest.raises(laxity.DeadlinePassed, match="ago"):
            laxity.request_begin(request, **{name: -0.5})
    with pytest.raises(laxity.DeadlinePassed):
        laxity.request_begin(request, deadline_s=0)
    with pytest.raises(laxity.HintError, match="NaN"):
        laxity.request_begin(request, deadline_s=math.nan)
    assert laxity.request_deadline_s(request) is None
    laxity.request_begin(request, deadline_s=1e300)
    assert laxity.request_deadline_s(request) > 1e9


def test_an_explicit_deadline_goes_before_the_objective():
    request = unique()
    laxity.request_begin(request, deadline_s=5, slo_ttft_s=50)
    assert 4 < laxity.request_deadline_s(request) <= 5
    laxity.request_end(request)
    assert laxity.request_deadline_s(request) is None


def test_a_layer_has_to_be_one_of_the_batch(counted):
    laxity.batch_begin("b", layers=4, layer_time_s=0.001)
    laxity.layer_begin("b", 3)
    for bad in (4, 65535, 1 << 40, -1):
        with pytest.raises(laxity.UnknownLayer, match=str(bad)):
            laxity.layer_begin("b", bad)
    for bad in (0, -3, 65536):
        with pytest.raises(laxity.UnknownLayer):
            laxity.batch_begin("c", layers=bad)
    laxity.layer_begin("b", 1)
    assert counted("layers_backwards") == 1
    laxity.compute_end("b")
    laxity.batch_queued("d", "b")
    laxity.batch_end("b")


def test_memory_of_one_layer_is_not_anothers():
    base = 0x7000_0000_0000
    laxity.memory_layer(base, 4096, 0, Stage.P2D)
    laxity.memory_layer(base, 4096, 0)  # again
    with pytest.raises(laxity.RegionOverlap, match="layer 0"):
        laxity.memory_layer(base + 4000, 4096, 1)
    with pytest.raises(laxity.HintError, match="0 bytes"):
        laxity.memory_layer(base + 8192, 0, 1)
    laxity.memory_forget(base, 4096)
    laxity.memory_layer(base + 4000, 4096, 1)
    laxity.memory_owner(base + 4000, 64, request="r", deadline_s=1)
    laxity.memory_owner(base + 4000, 64, request="another")  # blocks are used again
    laxity.memory_forget(base, 1 << 20)


def test_a_transfer_is_never_refused_for_what_is_said_of_it(counted):
    laxity.batch_begin("b", layers=4)
    ticket = laxity.submit(Stage.P2D, 1000, batch="b", layer=9, deadline_s=-1)
    assert counted("layers_unknown") == 1
    assert counted("deadlines_passed") == 1
    grant = ticket.wait()
    assert (grant.bytes, grant.last, grant.bypassed) == (1000, True, True)
    assert repr(grant) == "Grant(bytes=1000, level=0, dscp=0, last=True, bypassed=True)"
    ticket.complete(1000)
    assert laxity.submit(None, 5, layer=1 << 20, peer="no address").wait().bytes == 5
    with pytest.raises(laxity.HintError, match="no stage"):
        laxity.submit(9, 10)
    with pytest.raises(laxity.HintError, match="direction"):
        laxity.submit(Stage.P2D, 10, direction="up")
    with pytest.raises(OverflowError):
        laxity.submit(Stage.P2D, -10)


def test_more_cannot_be_complete_than_was_granted():
    ticket = laxity.submit(Stage.P2D, 10)
    assert ticket.poll().bytes == 10 and ticket.done
    assert (ticket.nbytes, ticket.granted) == (10, 10)
    ticket.complete(4)
    with pytest.raises(laxity.HintError, match="7 bytes cannot be complete"):
        ticket.complete(7)
    ticket.complete(6)
    assert ticket.poll() is None
    assert (ticket.wait().bytes, ticket.wait(0.001).last) == (0, True)


def test_a_dropped_ticket_is_counted_unless_it_is_complete(counted):
    laxity.submit(Stage.P2D, 10)
    assert counted("tickets_dropped") == 1
    ticket = laxity.submit(Stage.P2D, 10)
    ticket.complete(ticket.wait().bytes)
    del ticket
    with laxity.submit(Stage.P2D, 10) as ticket:
        ticket.wait()
    del ticket
    assert counted("tickets_dropped") == 1


def test_a_flow_yields_every_byte_once():
    flow = laxity.Flow(Stage.KV_REUSE, 12345, layer=2, request="r")
    assert sum(grant.bytes for grant in flow.grants()) == 12345
    assert flow.submit().wait().bytes == 12345


def test_scopes_are_of_a_thread_and_survive_being_left_by_another(counted):
    outer = laxity.scope(stage=Stage.P2D, batch="b")
    with outer:
        with outer, laxity.scope(layer=3):
            pass
        other = threading.Thread(target=outer.__exit__, args=(None, None, None))
        other.start()
        other.join()
    assert counted("scopes_crossed") == 1
    with pytest.raises(laxity.UnknownLayer):
        laxity.scope(layer=-1)


def test_hints_from_many_threads_are_all_taken(counted):
    def engine(number):
        for turn in range(200):
            batch, request = f"{number}/{turn}", f"t{number}/{turn}"
            laxity.request_begin(request, slo_ttft_s=10)
            laxity.batch_begin(batch, layers=2)
            laxity.batch_join(batch, request)
            with laxity.scope(batch=batch, request=request):
                for layer in range(2):
                    laxity.layer_begin(batch, layer)
                    assert laxity.submit(Stage.P2D, 8).wait().last
            laxity.request_end(request)
            laxity.batch_end(batch)

    threads = [threading.Thread(target=engine, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted("hints") == 4 * 200 * 7
    assert counted("bypassed_bytes") == 4 * 200 * 2 * 8


def test_an_engine_that_never_ends_anything_is_forgotten_bit_by_bit(counted):
    for number in range(70_000):
        laxity.request_begin(f"forgotten {number}", slo_ttft_s=1000)
    for number in range(5_000):
        laxity.batch_begin(f"forgotten {number}", layers=1)
    stats = laxity.stats()
    assert stats["requests"] <= 65536 and stats["batches"] <= 4096
    assert counted("requests_evicted") >= 70_000 - 65536
    assert counted("batches_evicted") >= 5_000 - 4096
    assert laxity.request_deadline_s("forgotten 0") is None
    assert laxity.request_deadline_s("forgotten 69999") > 0


def test_a_forked_child_begins_anew_and_waits_for_no_lock():
    laxity.request_begin("of the parent", slo_ttft_s=100)
    ticket = laxity.submit(Stage.P2D, 100)
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            laxity.layer_begin("busy", 0)
            laxity.submit(Stage.P2D, 1).wait()

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    assert laxity.request_deadline_s("of the parent") is None
                    assert laxity.stats()["hints"] == 0
                    laxity.request_begin("of the child", slo_ttft_s=100)
                    assert laxity.submit(Stage.P2D, 7).wait().bytes == 7
                    assert ticket.wait().bytes == 100
                    code = 0
                finally:
                    os._exit(code)
            give_up = time.monotonic() + 60
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                assert time.monotonic() < give_up, "the child hangs"
                time.sleep(0.005)
            assert ended[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert ticket.wait().bytes == 100
    ticket.cancel()


def test_there_is_no_daemon_and_nobody_minds():
    assert laxity.attached() is False
    assert laxity.stats()["refused"] == ""
    assert laxity.version() == laxity.__version__
