"""Objectives: who says them, and what is wrong with them."""

import pytest

from laxity.objectives import LATE_S, Objective, ObjectiveError, Objectives, duration, handed_on, milliseconds

TEXT = """
[default]
slo_ttft = "1s"

[model."org/big"]
slo_ttft = "300ms"

[tenant.gold]
slo_ttft = "200ms"
priority = 10

[tenant.gold.model."org/big"]
slo_ttft = "150ms"
"""


@pytest.mark.parametrize(
    ("model", "tenant", "slo_s", "priority"),
    [
        (None, "", 1.0, None),
        ("org/big", "", 0.3, None),
        ("org/small", "gold", 0.2, 10),
        ("org/big", "gold", 0.15, 10),
        ("org/big", "iron", 0.3, None),
    ],
)
def test_the_more_special_entry_wins_key_by_key(model, tenant, slo_s, priority):
    found = Objectives.from_text(TEXT).find(model=model, tenant=tenant)
    assert found == Objective(pytest.approx(slo_s), tenant, priority)


def test_without_a_file_nothing_is_said(monkeypatch):
    monkeypatch.delenv("LAXITY_OBJECTIVES", raising=False)
    assert Objectives.from_environment().find(model="m", tenant="t") == Objective(tenant="t")


def test_the_file_is_the_one_that_the_environment_names(monkeypatch, tmp_path):
    path = tmp_path / "objectives.toml"
    path.write_text(TEXT)
    monkeypatch.setenv("LAXITY_OBJECTIVES", str(path))
    assert Objectives.from_environment().find().slo_ttft_s == 1.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[default]\nslo_tftt = '1s'", "slo_tftt"),
        ("[default]\nslo_ttft = 200", "write a number with ns, us, ms, s or min"),
        ("[default]\nslo_ttft = '0ms'", "out of range"),
        ("[default]\nslo_ttft = '2'", "not a duration"),
        ("[default]\npriority = 'high'", "write an integer"),
        ("[default]\npriority = true", "write an integer"),
        ("model = 3", "[model]"),
        ("[model]\nbig = 3", "big"),
        ("[tenant.gold.model.x]\nmodel = 3", "'model'"),
        ("[defaults]", "'defaults'"),
        ("not toml", "objectives"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(text, says):
    with pytest.raises(ObjectiveError, match="^objectives: ") as refused:
        Objectives.from_text(text)
    assert says in str(refused.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ObjectiveError, match="nowhere.toml: can't be read"):
        Objectives.load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("value", ["", "abc", "nan", "inf", "-5", "0", 0, -1, 1e12, True, [], {}, "1" * 5000])
def test_milliseconds_that_are_none_are_refused(value):
    with pytest.raises(ObjectiveError, match="x-slo-ttft-ms"):
        milliseconds(value, "x-slo-ttft-ms")


def test_durations_are_those_of_the_other_files():
    assert [duration(text, "d") for text in ("500us", "20ms", "2s", "1.5s", "1min", "100ns")] == pytest.approx(
        [500e-6, 20e-3, 2, 1.5, 60, 1e-7]
    )


def test_an_objective_travels_as_plain_json():
    objective = Objective(0.2, "gold", 3)
    params = objective.to_params()
    assert params == {"slo_ttft_ms": 200.0, "tenant": "gold", "priority": 3}
    assert Objective.carried_by({"laxity": params, "do_remote_decode": True}) == objective
    assert Objective().to_params() == {}
    assert Objective.carried_by({"other": 1}) is None
    assert Objective.carried_by(None) is None


def test_unknown_keys_of_a_newer_version_are_left_alone():
    assert Objective.from_params({"slo_ttft_ms": 5, "slo_tpot_ms": 7}) == Objective(0.005)


@pytest.mark.parametrize(
    "params", [3, "x", {"tenant": 3}, {"tenant": "x" * 300}, {"priority": 1.5}, {"slo_ttft_ms": "soon"}]
)
def test_what_a_client_wrote_wrongly_is_refused(params):
    with pytest.raises(ObjectiveError, match="^laxity"):
        Objective.from_params(params)


def test_a_request_that_is_late_stays_late():
    assert Objective(0.2).remaining(-3.0).slo_ttft_s == LATE_S


def test_only_an_engine_hands_on():
    assert handed_on({"laxity": {"handed_on": True}})
    assert not handed_on({"laxity": {"handed_on": "yes"}})
    assert not handed_on({"laxity": 3})
    assert not handed_on(None)
