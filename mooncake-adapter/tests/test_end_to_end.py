"""The end-to-end program (`mooncake-adapter/end_to_end`), short: that it serves every request, moves every byte
right, and that the daemons know what the variant says they know. How fast it is, is no matter here."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import binary

pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine is not installed")

PROGRAM = pathlib.Path(__file__).parent.parent / "end_to_end"
REQUESTS, LAYERS = 8, 4
#: Its exit status where there can be no namespaces.
CANNOT = 75


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """One round of all variants, and what it left: figures, and the traces by variant and host."""
    folder = tmp_path_factory.mktemp("end-to-end")
    command = [
        sys.executable, PROGRAM, "--bin", binary("laxityd").parent, "--rounds", "1", "--attempts", "1", "--load", "0.5",
        "--requests", str(REQUESTS), "--layers", str(LAYERS), "--json", folder / "all.json", "--trace", folder,
    ]
    binary("laxity")
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if done.returncode == CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "all.json").read_text())
    traces = {
        (variant, role): json.loads((folder / f"{variant}.{role}.json").read_text())
        for variant in ("off", "on")
        for role in ("prefill", "decode")
    }
    return done.stdout, found, traces


def with_cat(trace, cat):
    return [event for event in trace["traceEvents"] if event.get("cat") == cat]


def rows(trace):
    return {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_all_variants_serve_every_request_with_the_right_bytes(played):
    said, found, _ = played
    assert [run["variant"] for run in found["runs"]] == ["none", "off", "on"]
    for run in found["runs"] + found["traced"]:
        assert run["figures"]["done"] == REQUESTS and run["figures"]["wrong"] == []
        assert run["decode"]["wrong_collectives"] == 0
        assert run["decode"]["collectives"] >= REQUESTS * LAYERS
        for request in run["prefill"]["requests"]:
            assert request["ttft_s"] > 0 and len(request["collective_s"]) == LAYERS
    for name in "no Laxity", "hints off", "hints on":
        assert f"| {name}" in said


def test_the_daemons_permit_what_the_requests_need_and_nothing_passes_them_by(played):
    _, found, _ = played
    none, *under = found["runs"] + found["traced"]
    assert none["permitted_bytes"] == {} and none["prefill"]["stats"] == {}
    first = under[0]["permitted_bytes"]
    assert first["prefill"]["egress"]["p2d"] > 0
    assert first["prefill"]["ingress"]["kv_reuse"] > 0
    assert first["prefill"]["egress"]["collective"] == first["decode"]["egress"]["collective"] > 0
    for run in under:
        assert run["permitted_bytes"] == first, "the same bytes in all variants"
        for role in "prefill", "decode":
            assert run[role]["stats"]["bypassed_bytes"] == 0
            assert run[role]["stats"]["refused"] == ""


def test_with_hints_the_daemon_knows_deadlines_and_layers_and_without_it_does_not(played):
    _, found, traces = played
    stats = {run["variant"]: run["prefill"]["stats"] for run in found["runs"]}
    assert stats["on"]["hints"] > REQUESTS * LAYERS and stats["off"]["hints"] == 0
    for role in "prefill", "decode":
        off, on = traces["off", role], traces["on", role]
        assert with_cat(off, "hint") == []
        due = {
            event["name"] for event in with_cat(on, "hint") if "deadline_us" in event["args"]
        }
        assert due, "requests are in their batches, with deadlines"
        assert not any("deadline_us" in event["args"] for event in with_cat(off, "flow"))
    moved = [event for event in with_cat(traces["on", "prefill"], "flow") if event["args"]["request"]]
    assert {event["args"]["request"] for event in moved} == set(range(1, REQUESTS + 1))
    assert all("deadline_us" in event["args"] for event in moved)
    parts = traces["on", "prefill"]["otherData"]["requests"]
    assert set(parts) == {str(request) for request in range(1, REQUESTS + 1)}
    assert all(part["compute"] > 0 for part in parts.values()), parts
    for waited in "kv_reuse_network", "collective_network", "p2d_network":
        assert any(part[waited] > 0 for part in parts.values()), (waited, parts)


def test_the_trace_has_a_row_for_each_stage_and_layer(played):
    _, _, traces = played
    prefill = rows(traces["on", "prefill"])
    for stage in "kv_reuse", "collective", "p2d":
        for layer in range(LAYERS):
            assert any(row.startswith(f"{stage} · layer {layer} ") for row in prefill), (stage, layer)
    for trace in traces.values():
        assert trace["otherData"]["lost_events"] == 0
        assert with_cat(trace, "permit")
