"""Requests and files that nobody would write on purpose, mutated from a fixed seed, because libFuzzer does not reach
Python's parsers. A request has to be forwarded with the content that it had, or to be refused with a reason."""

import json
import math
import random

from laxity.asgi import SLO_FIELD
from laxity.objectives import KEY, SLO_MAX_S, TENANT_MAX, Objective, ObjectiveError, Objectives

from .test_asgi import post

ROUNDS = 2000
FIELD = "kv_transfer_params"
#: Values that parsers stumble over.
ODD = [
    None, True, False, 0, -1, 1 << 31, -(1 << 31), 1 << 64, 10**400, 0.0, -0.5, 1e-300, 1e300, math.inf, math.nan,
    "", " ", "250", "2_50", "1e3", "0x10", "nan", "inf", "\ud800", "\x00", "é" * 300, [], {}, [[]], [{}], {"": None},
]
KEYS = ["model", FIELD, KEY, SLO_FIELD, "tenant", "priority", "handed_on", "nvext", "agent_hints", "", "\ud800", "é"]
HEADERS = ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-laxity-tenant", "user", "X-SLO-TTFT-MS", "content-encoding"]
SPLICES = [b"{", b"}", b"[", b",", b'"', b"\\u", b"\\ud800", b"\xff", b"\x00", b"\xef\xbb\xbf", b"1e999", b"\x0b", b"-"]
TOML = """
[default]
slo_ttft = "200ms"
[model.m]
slo_ttft = "1.5s"
priority = 3
[tenant.gold]
priority = 7
[tenant.gold.model.m]
slo_ttft = "50ms"
"""


def value(chance, depth=0):
    kind = chance.random()
    if depth < 5 and kind < 0.45:
        return {chance.choice(KEYS): value(chance, depth + 1) for _ in range(chance.randrange(5))}
    if depth < 5 and kind < 0.5:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return chance.choice(ODD)


def mutated(chance, data):
    data = bytearray(data)
    for _ in range(chance.choice([0, 0, 1, 1, 2, 5])):
        at = chance.randrange(len(data) + 1)
        how = chance.randrange(4)
        if how == 0:
            data[at:at] = chance.choice(SPLICES)
        elif how == 1:
            del data[at : at + chance.randrange(4)]
        elif how == 2 and at < len(data):
            data[at] = chance.randrange(256)
        else:
            data[at:at] = data[chance.randrange(len(data) + 1) :][: chance.randrange(20)]
    return bytes(data)


def body(chance):
    request = {"model": "m", **{chance.choice(KEYS): value(chance) for _ in range(chance.randrange(4))}}
    if chance.random() < 0.5:
        # As a client writes it, so that the interesting keys are often in their place.
        request[FIELD] = {KEY: {key: chance.choice(ODD) for key in chance.sample(KEYS, 2)}}
    encoding = chance.choice(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32"])
    text = json.dumps(request, ensure_ascii=chance.random() < 0.7)
    return mutated(chance, text.encode(encoding, "surrogatepass"))


def rest(request):
    """A request without what the middleware changes, as text, because NaN differs from itself."""
    request = json.loads(json.dumps(request))
    request.pop(SLO_FIELD, None)
    params = request.get(FIELD)
    if isinstance(params, dict):
        params.pop(KEY, None)
    if not params and FIELD in request:
        del request[FIELD]
    return json.dumps(request, sort_keys=True)


def is_sound(objective):
    slo, priority = objective.slo_ttft_s, objective.priority
    return (
        (slo is None or 0 < slo <= SLO_MAX_S)
        and len(objective.tenant) <= TENANT_MAX
        and (priority is None or abs(priority) < 1 << 31)
    )


def test_a_request_is_forwarded_with_its_own_content_or_is_refused():
    chance = random.Random(7)
    seen = {"unchanged": 0, "changed": 0, "refused": 0}
    for _ in range(ROUNDS):
        raw = body(chance)
        headers = [(chance.choice(HEADERS), str(chance.choice(ODD + ["250"] * 20))) for _ in range(chance.randrange(3))]
        headers = [(key, "".join(letter for letter in text if ord(letter) < 128)) for key, text in headers]
        engine, sent = post(raw, headers, pieces=chance.choice([1, 3]))
        if engine.scope is None:
            answer = json.loads(sent[1]["body"])
            assert sent[0]["status"] == 400 and answer["error"]["message"], raw
            seen["refused"] += 1
        elif engine.body == raw:
            seen["unchanged"] += 1
        else:
            assert rest(json.loads(engine.body)) == rest(json.loads(raw)), raw
            assert is_sound(Objective.carried_by(json.loads(engine.body).get(FIELD)) or Objective()), raw
            assert [int(v) for k, v in engine.scope["headers"] if k == b"content-length"] == [len(engine.body)]
            seen["changed"] += 1
    assert min(seen.values()) > ROUNDS / 20, seen


def test_a_body_of_any_depth_is_forwarded():
    unchanged = 0
    for depth in [1, 10, 100, *range(900, 1010), 100_000]:
        raw = b'{"slo_ttft_ms":100,"deep":%s%s}' % (b"[" * depth, b"]" * depth)
        engine, sent = post(raw)
        assert sent[0]["status"] == 200
        unchanged += engine.body == raw
        assert engine.body == raw or b'"laxity":{"slo_ttft_ms":100.0}' in engine.body
    assert 0 < unchanged < 113


def test_parameters_of_any_kind_are_read_or_refused_with_a_reason():
    chance = random.Random(11)
    read = refused = 0
    for _ in range(ROUNDS):
        params = value(chance) if chance.random() < 0.5 else {KEY: value(chance)}
        try:
            objective = Objective.carried_by(params)
        except ObjectiveError as wrong:
            assert str(wrong)
            refused += 1
        else:
            assert objective is None or is_sound(objective), params
            read += 1
    assert min(read, refused) > ROUNDS / 20


def test_a_file_of_any_text_is_read_or_refused_with_a_reason():
    chance = random.Random(13)
    read = refused = 0
    for _ in range(ROUNDS):
        text = mutated(chance, TOML.encode()).decode("utf-8", "replace")
        try:
            objectives = Objectives.from_text(text)
        except ObjectiveError as wrong:
            assert str(wrong).startswith("objectives: ")
            refused += 1
        else:
            for tenant in ("", "gold"):
                assert is_sound(objectives.find(model="m", tenant=tenant)), text
            read += 1
    assert min(read, refused) > ROUNDS / 20
