"""What the tests of the wrappers share: the package, with or without its compiled part, and a record of what was
said."""

import importlib
import pathlib
import sys
import threading

import pytest

HERE = pathlib.Path(__file__).parent

#: Whether the compiled part is not built, and stood in for.
FAKE = False

try:
    import laxity
except ImportError:
    from . import fake_laxity

    FAKE = True
    for name in [name for name in sys.modules if name.split(".")[0] == "laxity"]:
        del sys.modules[name]
    fake_laxity.install()
    sys.path.insert(0, str(HERE.parent.parent / "python"))
    laxity = importlib.import_module("laxity")

from laxity import nixl  # noqa: E402

from . import leaving  # noqa: E402

HINTS = (
    "request_begin",
    "request_end",
    "batch_begin",
    "batch_join",
    "batch_queued",
    "layer_begin",
    "compute_end",
    "batch_end",
    "memory_layer",
    "memory_owner",
    "memory_forget",
)


class Record:
    """Hints in the order in which they were said, and the scope that is open in this thread."""

    def __init__(self):
        self.calls = []
        self.refused = []
        self._scopes = threading.local()

    @property
    def scope(self):
        """What the open scopes of this thread say together."""
        together = {}
        for scope in getattr(self._scopes, "open", []):
            together.update({key: value for key, value in scope.items() if value is not None})
        return together

    def names(self):
        return [name for name, _, _ in self.calls]

    def of(self, name):
        return [(args, named) for said, args, named in self.calls if said == name]

    def clear(self):
        self.calls.clear()

    def hint(self, name, original):
        def said(*args, **named):
            self.calls.append((name, args, named))
            try:
                return original(*args, **named)
            except laxity.HintError as error:
                self.refused.append((name, args, error))
                raise

        said.__name__ = name
        return said

    def scoped(self, original):
        record = self

        class Scope:
            def __init__(self, **what):
                self._what = what
                self._scope = original(**what)

            def __enter__(self):
                self._scope.__enter__()
                if not hasattr(record._scopes, "open"):
                    record._scopes.open = []
                record._scopes.open.append(self._what)
                return self

            def __exit__(self, *exception):
                record._scopes.open.pop()
                return self._scope.__exit__(*exception)

        return Scope


@pytest.fixture
def said(monkeypatch):
    """A :class:`Record`; the hints themselves are said, too."""
    if FAKE:
        # The stand-in keeps what earlier tests said, too. Their memory may be at the same addresses.
        fake_laxity._layers.clear()
    record = Record()
    for name in HINTS:
        monkeypatch.setattr(laxity, name, record.hint(name, getattr(laxity, name)))
    monkeypatch.setattr(laxity, "scope", record.scoped(laxity.scope))
    return record


class Held:
    """A ticket that is granted when the test says so."""

    def __init__(self, number, stage, nbytes, said, any_news):
        self.number = number
        self.stage = stage
        self.nbytes = nbytes
        self.said = said
        self.granted = 0
        self.level = 0
        self.completed = 0
        self.cancelled = False
        self._news = threading.Event()
        self._any_news = any_news

    @property
    def done(self):
        return self.granted == self.nbytes

    def grant(self, level=1):
        self.level = level
        self._news.set()
        self._any_news.set()

    def poll(self):
        if self._news.is_set() and not self.done:
            self.granted = self.nbytes
            return Permit(self.nbytes, self.level)
        return Permit(0, self.level) if self.done else None

    def wait(self, timeout_s=None):
        self._news.wait(timeout_s)
        return self.poll()

    def complete(self, nbytes):
        assert self.completed + nbytes <= self.granted, "more was complete than was granted"
        self.completed += nbytes

    def cancel(self):
        self.cancelled = True


class Permit:
    dscp = 0
    last = True
    bypassed = False

    def __init__(self, nbytes, level):
        self.bytes = nbytes
        self.level = level


class Permits:
    """Every ticket that was asked for; ``at_once`` grants new ones."""

    def __init__(self):
        self.tickets = []
        self.at_once = False
        self.any_news = threading.Event()

    def submit(self, stage, nbytes, **said):
        ticket = Held(len(self.tickets), stage, nbytes, said, self.any_news)
        self.tickets.append(ticket)
        if self.at_once:
            ticket.grant()
        return ticket

    def open(self):
        return [ticket for ticket in self.tickets if not ticket.cancelled and ticket.completed < ticket.nbytes]


@pytest.fixture
def permits(monkeypatch):
    """Permits that the test gives by hand."""
    permits = Permits()
    monkeypatch.setattr(laxity, "submit", permits.submit)
    monkeypatch.setattr(nixl, "_transfers", lambda: WithDefault(permits))
    return permits


class WithDefault:
    """Submits transfers of which only a default stage is known."""

    def __init__(self, permits):
        self._permits = permits

    def submit(self, otherwise, nbytes, address, direction, peer, whole=False):
        assert isinstance(address, int)
        named = {"otherwise": otherwise, "address": address, "direction": direction, "whole": whole}
        return self._permits.submit(None, nbytes, **named)

    def wait_any(self, timeout_s):
        self._permits.any_news.wait(timeout_s)
        self._permits.any_news.clear()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    # The agents of these tests are kept, and each has a thread that spins. Whatever ran after them would have to
    # share the processors with ten such threads.
    items.sort(key=lambda item: "real" in getattr(item, "fixturenames", ()))


def pytest_sessionfinish(session, exitstatus):
    leaving.status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    leaving.now()
