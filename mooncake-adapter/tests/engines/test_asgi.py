"""The middleware, as an ASGI server drives it."""

import asyncio
import json

import pytest

from laxity.asgi import ObjectiveMiddleware
from laxity.objectives import ObjectiveError, Objectives


class Engine:
    """The application behind it."""

    def __init__(self):
        self.scope = None
        self.body = b""
        self.after = []

    async def __call__(self, scope, receive, send):
        self.scope = scope
        while True:
            message = await receive()
            if message["type"] != "http.request":
                self.after.append(message)
                break
            self.body += message.get("body", b"")
            if not message.get("more_body"):
                break
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def post(body, headers=(), path="/v1/chat/completions", pieces=1, engine=None, then=None, **scope):
    """Sends a request through; gives the engine and what came back."""
    engine = engine or Engine()
    options = scope.pop("options", {})
    objectives = scope.pop("objectives", Objectives())
    middleware = ObjectiveMiddleware(engine, objectives, **options)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = max(1, -(-len(raw) // pieces))
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)}
        for index, chunk in enumerate(chunks)
    ]
    messages += then or []
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    full = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(raw)).encode()),
            *[(key.encode(), value.encode()) for key, value in headers],
        ],
        **scope,
    }
    asyncio.run(middleware(full, receive, send))
    return engine, sent


def laxity_of(engine, field="kv_transfer_params"):
    return json.loads(engine.body).get(field, {}).get("laxity")


def length_of(engine):
    return [int(value) for key, value in engine.scope["headers"] if key == b"content-length"]


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_the_header_becomes_a_parameter(pieces):
    body = {"model": "m", "messages": [{"role": "user", "content": "héllo"}], "seed": 12345678901234567890}
    engine, sent = post(body, [("x-slo-ttft-ms", "250")], pieces=pieces)
    assert laxity_of(engine) == {"slo_ttft_ms": 250.0}
    assert length_of(engine) == [len(engine.body)]
    assert sent[0]["status"] == 200
    rest = json.loads(engine.body)
    del rest["kv_transfer_params"]
    assert rest == body


def test_the_clients_own_bytes_stay_as_they_are():
    raw = b'{"temperature": 1.10, "big": 1e400, "model" : "m"}\n'
    engine, _ = post(raw, [("x-slo-ttft-ms", "250")])
    assert engine.body.startswith(b'{"temperature": 1.10, "big": 1e400, "model" : "m"')


def test_an_empty_object_gets_one_too():
    engine, _ = post(b"{}", [("x-slo-ttft-ms", "250")])
    assert json.loads(engine.body) == {"kv_transfer_params": {"laxity": {"slo_ttft_ms": 250.0}}}


def test_the_field_becomes_a_parameter_and_is_removed():
    engine, _ = post({"model": "m", "slo_ttft_ms": 120})
    assert json.loads(engine.body) == {"model": "m", "kv_transfer_params": {"laxity": {"slo_ttft_ms": 120.0}}}


def test_the_header_comes_before_the_field():
    engine, _ = post({"slo_ttft_ms": 120}, [("X-SLO-TTFT-ms".lower(), " 80 ")])
    assert laxity_of(engine) == {"slo_ttft_ms": 80.0}


def test_other_transfer_parameters_are_kept():
    engine, _ = post({"kv_transfer_params": {"do_remote_decode": True}}, [("x-slo-ttft-ms", "80")])
    assert json.loads(engine.body)["kv_transfer_params"] == {
        "do_remote_decode": True,
        "laxity": {"slo_ttft_ms": 80.0},
    }


def test_what_an_engine_handed_on_is_not_set_back_by_the_header():
    params = {"laxity": {"slo_ttft_ms": 33.0, "handed_on": True}, "remote_host": "x"}
    engine, _ = post({"kv_transfer_params": params}, [("x-slo-ttft-ms", "500")])
    assert json.loads(engine.body)["kv_transfer_params"] == params


def test_defaults_hold_by_tenant_and_model():
    objectives = Objectives.from_text('[model.m]\nslo_ttft="300ms"\n[tenant.gold]\npriority=7')
    engine, _ = post({"model": "m"}, [("x-gateway-inference-fairness-id", "gold")], objectives=objectives)
    assert laxity_of(engine) == {"slo_ttft_ms": 300.0, "tenant": "gold", "priority": 7}
    engine, _ = post({"model": "m"}, [("x-laxity-tenant", "iron"), ("x-slo-ttft-ms", "5")], objectives=objectives)
    assert laxity_of(engine) == {"slo_ttft_ms": 5.0, "tenant": "iron"}


#: Requests as the routers' own documentation has them, and the objective that each says.
ROUTERS = {
    "llm-d": (
        {"model": "m", "prompt": "p"},
        [("x-llm-d-slo-ttft-ms", "200"), ("x-llm-d-slo-tpot-ms", "50"), ("x-llm-d-inference-fairness-id", "gold")],
        {"slo_ttft_ms": 200.0, "tenant": "gold"},
    ),
    "llm-d before its router's pull request 1161": (
        {"model": "m", "prompt": "p"},
        [("x-slo-ttft-ms", "200"), ("x-slo-tpot-ms", "50"), ("x-gateway-inference-fairness-id", "gold")],
        {"slo_ttft_ms": 200.0, "tenant": "gold"},
    ),
    "llm-d with both: the canonical name wins": (
        {"model": "m", "prompt": "p"},
        [
            ("x-slo-ttft-ms", "900"),
            ("x-llm-d-slo-ttft-ms", "200"),
            ("x-gateway-inference-fairness-id", "iron"),
            ("x-llm-d-inference-fairness-id", "gold"),
        ],
        {"slo_ttft_ms": 200.0, "tenant": "gold"},
    ),
    "a router that strips headers": (
        {"model": "m", "prompt": "p", "kv_transfer_params": {"laxity": {"slo_ttft_ms": 200, "tenant": "gold"}}},
        [],
        {"slo_ttft_ms": 200, "tenant": "gold"},
    ),
    "Dynamo": (
        {"model": "m", "prompt": "p", "nvext": {"agent_hints": {"priority": 5, "strict_priority": 1, "osl": 1024}}},
        [("x-dynamo-session-id", "research-run-42:researcher")],
        {"priority": 5},
    ),
    "AIBrix": (
        {"model": "m", "prompt": "p"},
        [("user", "gold"), ("routing-strategy", "pd")],
        {"tenant": "gold"},
    ),
}


@pytest.mark.parametrize("router", ROUTERS)
def test_requests_of_routers_say_what_they_mean(router):
    body, headers, wanted = ROUTERS[router]
    engine, sent = post(body, headers)
    assert sent[0]["status"] == 200
    assert laxity_of(engine) == wanted


def test_a_priority_of_dynamo_that_is_none_is_left_to_dynamo():
    for wrong in ("high", True, 2**40, None, {}):
        engine, sent = post({"nvext": {"agent_hints": {"priority": wrong}}}, [("x-slo-ttft-ms", "80")])
        assert sent[0]["status"] == 200
        assert laxity_of(engine) == {"slo_ttft_ms": 80.0}
    engine, _ = post({"nvext": ["no object"]}, [("x-slo-ttft-ms", "80")])
    assert laxity_of(engine) == {"slo_ttft_ms": 80.0}


def test_sglang_gets_it_where_it_looks():
    engine, _ = post({"model": "m"}, [("x-slo-ttft-ms", "80")], options={"field": "custom_params"})
    assert laxity_of(engine, "custom_params") == {"slo_ttft_ms": 80.0}


def test_sglangs_own_requests_carry_it_among_their_sampling_parameters():
    options = {"field": "custom_params"}
    body = {"text": "x", "sampling_params": {"max_new_tokens": 3, "custom_params": {"ours": 1}}}
    engine, _ = post(body, [("x-slo-ttft-ms", "80")], path="/generate", options=options)
    body["sampling_params"]["custom_params"]["laxity"] = {"slo_ttft_ms": 80.0}
    assert json.loads(engine.body) == body
    engine, _ = post({"text": "x"}, [("x-slo-ttft-ms", "80")], path="/generate", options=options)
    expected = {"text": "x", "sampling_params": {"custom_params": {"laxity": {"slo_ttft_ms": 80.0}}}}
    assert json.loads(engine.body) == expected
    several = b'{"text": ["x", "y"], "sampling_params": [{}, {}]}'
    engine, _ = post(several, [("x-slo-ttft-ms", "80")], path="/generate", options=options)
    assert engine.body == several


def test_a_field_that_nobody_knows_needs_its_places():
    with pytest.raises(ValueError, match="requests have no known field 'ours'"):
        ObjectiveMiddleware(Engine(), Objectives(), field="ours")
    places = {"/ours": ("inner",)}
    options = {"field": "ours", "places": places}
    engine, _ = post({}, [("x-slo-ttft-ms", "80")], path="/ours", options=options)
    assert json.loads(engine.body) == {"inner": {"ours": {"laxity": {"slo_ttft_ms": 80.0}}}}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ([("x-slo-ttft-ms", "soon")], {"model": "m"}),
        ([("x-slo-ttft-ms", "")], {"model": "m"}),
        ([], {"slo_ttft_ms": -1}),
        ([], {"kv_transfer_params": {"laxity": {"priority": "high"}}}),
        ([("x-laxity-tenant", "x" * 300)], {"model": "m"}),
    ],
)
def test_an_objective_that_makes_no_sense_is_a_bad_request(headers, body):
    engine, sent = post(body, headers)
    assert engine.scope is None
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "invalid_request_error"
    assert "write" in error["message"]


@pytest.mark.parametrize(
    "how",
    [
        {"path": "/v1/models"},
        {"method": "GET"},
        {"headers": [("content-type", "text/plain")], "body": b"{}"},
    ],
)
def test_what_is_not_for_it_passes_untouched(how):
    body = how.pop("body", b'{ "model":"m"}')
    if "headers" in how:
        engine = Engine()
        middleware = ObjectiveMiddleware(engine, Objectives())
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(b"content-type", b"text/plain"), (b"x-slo-ttft-ms", b"5")],
        }
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            return messages.pop(0)

        async def send(_):
            pass

        asyncio.run(middleware(scope, receive, send))
        assert engine.scope is scope
    else:
        engine, _ = post(body, [("x-slo-ttft-ms", "5")], **how)
    assert engine.body == body


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b'"x"', b"{not json", b'{"kv_transfer_params": 3}', b"\xff\xfe", b"[" * 3000]
)
def test_what_is_no_request_is_the_engines_to_refuse(body):
    engine, sent = post(body, [("x-slo-ttft-ms", "5")])
    assert engine.body == body
    assert sent[0]["status"] == 200


def test_a_request_of_which_nothing_is_known_keeps_its_bytes():
    engine, _ = post(b'{ "model" : "m" }')
    assert engine.body == b'{ "model" : "m" }'


def test_a_body_that_is_too_long_passes_through_in_pieces():
    raw = json.dumps({"prompt": "x" * 1000}).encode()
    engine, _ = post(raw, [("x-slo-ttft-ms", "5")], pieces=10, options={"body_max": 300})
    assert engine.body == raw


def test_a_client_that_leaves_is_seen_to_leave():
    gone = {"type": "http.disconnect"}
    engine = Engine()
    middleware = ObjectiveMiddleware(engine, Objectives())
    messages = [{"type": "http.request", "body": b'{"a"', "more_body": True}, gone]

    async def receive():
        return messages.pop(0)

    async def send(_):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(middleware(scope, receive, send))
    assert engine.after == [gone]


def test_disconnects_after_the_body_reach_the_engine():
    class Streaming(Engine):
        async def __call__(self, scope, receive, send):
            await super().__call__(scope, receive, send)
            self.after.append(await receive())

    gone = {"type": "http.disconnect"}
    engine, _ = post({"model": "m"}, [("x-slo-ttft-ms", "5")], engine=Streaming(), then=[gone])
    assert engine.after == [gone]


def test_websockets_and_lifespan_are_not_its_business():
    seen = []

    async def engine(scope, receive, send):
        seen.append(scope["type"])

    middleware = ObjectiveMiddleware(engine, Objectives())
    for kind in ("lifespan", "websocket"):
        asyncio.run(middleware({"type": kind}, None, None))
    assert seen == ["lifespan", "websocket"]


def test_a_broken_file_of_defaults_is_an_error_when_the_server_starts(monkeypatch, tmp_path):
    path = tmp_path / "o.toml"
    path.write_text("[default]\nslo_ttft = 5")
    monkeypatch.setenv("LAXITY_OBJECTIVES", str(path))
    with pytest.raises(ObjectiveError, match="o.toml"):
        ObjectiveMiddleware(Engine())


def test_it_runs_where_it_is_mounted():
    engine, _ = post({"model": "m"}, [("x-slo-ttft-ms", "5")], path="/api/v1/completions", root_path="/api")
    assert laxity_of(engine) == {"slo_ttft_ms": 5.0}
