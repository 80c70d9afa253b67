"""Asynchronous transfers of Mooncake whose pieces fail, with permits that the test gives."""

import pytest

from .conftest import FAKE

if FAKE:
    pytest.skip("needs the compiled part of laxity", allow_module_level=True)

import laxity.mooncake._deferred as _deferred  # noqa: E402
from laxity.mooncake._pieces import Pieces  # noqa: E402

CHUNK = 100


class Grant:
    def __init__(self, nbytes):
        self.bytes = nbytes


class Ticket:
    """Gets the permits that the test gives, a chunk each."""

    def __init__(self, nbytes):
        self.nbytes = nbytes
        self.given = []
        self.granted = self.completed = 0
        #: The bytes that were in flight when it was cancelled.
        self.cancelled = None

    @property
    def done(self):
        return self.cancelled is not None or self.granted == self.nbytes

    def poll(self):
        if not self.given:
            return None
        self.granted += self.given[0]
        return Grant(self.given.pop(0))

    def complete(self, nbytes):
        assert self.cancelled is None, "it was cancelled before"
        self.completed += nbytes

    def cancel(self):
        if self.cancelled is None:
            self.cancelled = self.granted - self.completed


class Transfers:
    def __init__(self):
        self.tickets = []

    def submit(self, _stage, nbytes, *_rest):
        self.tickets.append(Ticket(nbytes))
        return self.tickets[-1]

    def wait_any(self, _timeout):
        pass


@pytest.fixture
def engine(monkeypatch):
    """A deferred engine whose Mooncake says of each piece what ``states`` says, and its only ticket's permits."""
    monkeypatch.setattr(_deferred, "_Transfers", Transfers)
    monkeypatch.setattr(_deferred.Deferred, "_work", lambda _self: None)
    states = {}
    deferred = _deferred.Deferred(lambda number: states[number])

    def start(_lists):
        number = len(states) + 1
        states[number] = _deferred.WAITING
        return number

    blocks = [CHUNK] * 4
    addresses = [CHUNK * block for block in range(len(blocks))]
    number = deferred.submit(True, "host:1", Pieces(addresses, addresses, blocks), start)
    (ticket,) = deferred._transfers.tickets
    return deferred, number, ticket, states


def send(engine, permits):
    """Gives permits one by one, so that each becomes a transfer of its own."""
    deferred, number, ticket, states = engine
    for sent in range(1, permits + 1):
        ticket.given = [CHUNK]
        assert deferred.check(number) == _deferred.WAITING
        assert len(states) == sent


def test_a_ticket_with_all_permits_stays_until_the_last_piece_of_a_failed_transfer_ends(engine):
    deferred, number, ticket, states = engine
    send(engine, 4)
    states[2] = _deferred.FAILED
    assert deferred.check(number) == _deferred.WAITING
    assert ticket.cancelled is None, "three pieces move"
    states[1] = states[3] = _deferred.COMPLETED
    assert deferred.check(number) == _deferred.WAITING
    assert ticket.cancelled is None and ticket.completed == 2 * CHUNK
    states[4] = _deferred.COMPLETED
    assert deferred.check(number) == _deferred.FAILED
    assert ticket.completed == 3 * CHUNK
    assert ticket.cancelled == CHUNK, "the piece that failed"


def test_a_ticket_that_would_get_more_permits_is_cancelled_at_once(engine):
    deferred, number, ticket, states = engine
    send(engine, 2)
    states[2] = _deferred.FAILED
    assert deferred.check(number) == _deferred.WAITING
    assert ticket.cancelled == 2 * CHUNK
    ticket.given = [CHUNK]
    states[1] = _deferred.COMPLETED
    assert deferred.check(number) == _deferred.FAILED
    assert len(states) == 2 and ticket.completed == 0, "nothing more is sent or told"
