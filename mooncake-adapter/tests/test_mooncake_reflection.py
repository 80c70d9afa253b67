"""``laxity.mooncake`` against the Mooncake that is installed: the same methods, with the same arguments."""

import inspect
import re

import pytest

engine = pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine is not installed")
store = pytest.importorskip("mooncake.store", reason="Mooncake's store is not installed")

import laxity.mooncake  # noqa: E402


def arguments_of(real, name):
    """The names of a pybind11 method's arguments, from its first signature."""
    first = next(line for line in getattr(real, name).__doc__.splitlines() if name + "(" in line)
    inside = first[first.index("(") + 1 : first.rindex(")")]
    depth, names = 0, [""]
    for letter in inside:
        depth += letter in "[(<"
        depth -= letter in "])>"
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    return [re.split(r"[:=]", name)[0].strip() for name in names][1:]


def public(of):
    return {name for name in dir(of) if not name.startswith("_")}


def test_the_engine_has_the_same_methods():
    ours, theirs = laxity.mooncake.TransferEngine, engine.TransferEngine
    assert public(ours) - public(theirs) == {"laxity_mode"}
    assert public(theirs) <= public(ours)
    assert issubclass(ours, theirs)


def overridden(ours, theirs):
    return [name for name in sorted(public(theirs)) if getattr(ours, name) is not getattr(theirs, name)]


def test_the_engines_methods_take_the_same_arguments():
    ours, theirs = laxity.mooncake.TransferEngine, engine.TransferEngine
    for name in overridden(ours, theirs):
        wanted = arguments_of(theirs, name)
        parameters = list(inspect.signature(getattr(ours, name)).parameters.values())[1:]
        named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        takes_rest = {p.kind for p in parameters} >= {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        assert named == wanted[: len(named)], name
        assert takes_rest or named == wanted, name


#: What moves bytes is gated. A release that brings more of it has to be looked at.
NOT_TRANSFERS = {
    "allocate_managed_buffer",
    "batch_register_memory",
    "batch_unregister_memory",
    "free_managed_buffer",
    "get_engine",
    "get_engine_ptr",
    "get_first_buffer_address",
    "get_local_topology",
    "get_notifies",
    "get_rpc_port",
    "read_bytes_from_buffer",
    "register_memory",
    "send_probe",
    "unregister_memory",
    "warmup_efa_segment",
    "write_bytes_to_buffer",
}


def test_every_transfer_of_the_engine_is_gated():
    ours, theirs = laxity.mooncake.TransferEngine, engine.TransferEngine
    opcode = {"TransferOpcode"}
    assert public(theirs) - set(overridden(ours, theirs)) - opcode == NOT_TRANSFERS


def test_the_store_has_the_same_methods_and_gates_what_moves_objects():
    from laxity.mooncake import _store

    ours, theirs = laxity.mooncake.MooncakeDistributedStore, store.MooncakeDistributedStore
    assert public(ours) - public(theirs) == {"laxity_mode"}
    assert issubclass(ours, theirs)
    gated = set(overridden(ours, theirs)) - {"setup"}
    moves = re.compile(r"^(batch_)?(get|put|upsert|pub)(_|$)|_pub_")
    # Session calls, sizes and descriptions move no object.
    still = re.compile(r"size|desc|session|hostname|count")
    assert gated == {name for name in public(theirs) if moves.search(name) and not still.search(name)}
    assert gated <= set(_store.GETS) | set(_store.PUTS)


def test_the_sizes_are_taken_from_arguments_that_there_are():
    from laxity.mooncake import _store

    theirs = store.MooncakeDistributedStore

    class Spy(_store._Arguments):
        def get(self, place, name):
            seen.append((place, name))
            return 0

    for name, size in {**_store.GETS, **_store.PUTS}.items():
        if not hasattr(theirs, name):
            continue
        seen = []
        try:
            size(None, Spy((), {}))
        except TypeError:
            pass  # 0 is no list; what was asked for is seen by then
        wanted = arguments_of(theirs, name)
        for place, argument in seen:
            assert wanted[place] == argument, name


def test_what_is_not_wrapped_comes_from_mooncake():
    assert laxity.mooncake.TransferOpcode is engine.TransferOpcode
    assert laxity.mooncake.ReplicateConfig is store.ReplicateConfig
    with pytest.raises(AttributeError, match="nonsense"):
        laxity.mooncake.nonsense
