"""ASGI middleware that reads a request's objective from a header or a JSON field, and puts it where the engine's
connector finds it. It needs no framework::

    vllm serve MODEL --middleware laxity.asgi.ObjectiveMiddleware

    app = ObjectiveMiddleware(app, field="custom_params")      # SGLang, or any ASGI application

It reads each POST of JSON to one of :data:`PLACES`. The first of these that is present holds:

* an objective in ``kv_transfer_params.laxity`` that another engine handed on: the time that remains;
* the header ``x-llm-d-slo-ttft-ms``, or its older name ``x-slo-ttft-ms``: a number of milliseconds;
* the field ``slo_ttft_ms`` of the body. It is removed, since engines may refuse unknown fields;
* an objective that a client or a proxy wrote into ``kv_transfer_params.laxity``;
* the defaults of :mod:`laxity.objectives` by tenant and model.

The tenant comes from the first of these headers: ``x-laxity-tenant``, ``x-llm-d-inference-fairness-id``, its older name
``x-gateway-inference-fairness-id``, ``user`` (AIBrix). The priority comes from ``nvext.agent_hints.priority`` of the
body (Dynamo), if ``kv_transfer_params.laxity`` has none.

The result is written to ``kv_transfer_params.laxity``. With ``field="custom_params"``, that field takes the place of
``kv_transfer_params`` in all of these rules. A request without any of these passes through unchanged. So
does a body that is no JSON object, or is longer than :data:`BODY_MAX`. An objective that is invalid is answered
with 400 and a text that says why.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Optional

from .objectives import (
    KEY,
    Objective,
    ObjectiveError,
    Objectives,
    handed_on,
    milliseconds,
    priority_number,
    tenant_name,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: For each field that a connector reads: the paths of requests that have it, and the keys that lead to it in the body.
PLACES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # vLLM 0.33.
    "kv_transfer_params": {
        "/v1/chat/completions": (),
        "/v1/completions": (),
        "/v1/responses": (),
        "/v1/messages": (),
        "/cohere/v2/chat": (),
        "/inference/v1/generate": (),
    },
    # SGLang 0.5.23.
    "custom_params": {
        "/v1/chat/completions": (),
        "/v1/completions": (),
        "/generate": ("sampling_params",),
    },
}

#: Longer bodies pass through unread, because they would have to be held in memory.
BODY_MAX = 64 << 20

#: llm-d's header, and the name that it had before. The first one that is present holds.
SLO_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_FIELD = "slo_ttft_ms"
#: Laxity's own, llm-d's, llm-d's before, AIBrix'. The first one that is present holds.
TENANT_HEADERS = (
    "x-laxity-tenant",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    "user",
)
#: Where Dynamo's clients say a priority, larger for more important.
PRIORITY_PLACE = ("nvext", "agent_hints", "priority")


class ObjectiveMiddleware:
    """The middleware that the module describes."""

    def __init__(
        self,
        app: App,
        objectives: Optional[Objectives] = None,
        *,
        field: str = "kv_transfer_params",
        places: Optional[Mapping[str, tuple[str, ...]]] = None,
        tenant_headers: Iterable[str] = TENANT_HEADERS,
        body_max: int = BODY_MAX,
    ) -> None:
        """``places`` are by default those of ``field`` in :data:`PLACES`. ``objectives`` are by default those of
        ``LAXITY_OBJECTIVES``. If that file can't be read, this raises :class:`~laxity.objectives.ObjectiveError`, so
        that the server fails at its start and not with the first request."""
        self._app = app
        self._objectives = Objectives.from_environment() if objectives is None else objectives
        self._field = field
        self._places = PLACES[field] if places is None and field in PLACES else dict(places or {})
        if not self._places:
            raise ValueError(f"requests have no known field {field!r}; name its paths: places={{'/path': ()}}")
        self._tenant_headers = tuple(name.lower().encode("latin-1") for name in tenant_headers)
        self._body_max = body_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _path(scope)
        if not self._reads(scope, path):
            await self._app(scope, receive, send)
            return
        messages, body = await _body(receive, self._body_max)
        if body is not None:
            try:
                changed = self.rewrite(scope.get("headers", ()), body, path)
            except ObjectiveError as wrong:
                await _refuse(send, str(wrong))
                return
            if changed is not None:
                scope = dict(scope)
                scope["headers"] = _with_length(scope.get("headers", ()), len(changed))
                messages = [{"type": "http.request", "body": changed, "more_body": False}]
        await self._app(scope, _replay(messages, receive), send)

    def _reads(self, scope: Scope, path: str) -> bool:
        if scope.get("type") != "http" or scope.get("method") != "POST" or path not in self._places:
            return False
        headers = list(scope.get("headers", ()))
        kind = (_header(headers, b"content-type") or b"application/json").split(b";")[0].strip().lower()
        # Compressed bodies pass through; only the application unpacks them.
        return kind.endswith(b"json") and _header(headers, b"content-encoding") in (None, b"", b"identity")

    def rewrite(self, headers: Iterable[tuple[bytes, bytes]], body: bytes, path: str = "") -> Optional[bytes]:
        """Returns the body with the objective in it, or ``None`` if the body stays as it is. Proxies may call it.

        Raises :class:`~laxity.objectives.ObjectiveError`."""
        try:
            return self._rewrite(list(headers), body, path)
        except RecursionError:
            # A body may be nested so deeply that it can be read, and not be written.
            return None

    def _rewrite(self, headers: list[tuple[bytes, bytes]], body: bytes, path: str) -> Optional[bytes]:
        try:
            request = json.loads(body)
        except ValueError:
            return None
        holder = request
        for key in self._places.get(path, ()):
            # A missing object is created. Any other value is for the engine to refuse, or is a batch of requests.
            holder = holder.setdefault(key, {}) if isinstance(holder, dict) else None
        if not isinstance(request, dict) or not isinstance(holder, dict):
            return None
        params = holder.get(self._field)
        if not (params is None or isinstance(params, dict)):
            return None
        said = self._objective(headers, request, params or {}).to_params()
        before = (params or {}).get(KEY)
        kept = {**before, **said} if isinstance(before, dict) else said
        if SLO_FIELD not in request and kept == (before or {}):
            return None
        is_utf8 = json.detect_encoding(body).startswith("utf-8")
        if is_utf8 and holder is request and self._field not in request and SLO_FIELD not in request:
            # Appends to the body, so that the client's own bytes stay unchanged.
            head = body.rstrip()[:-1].rstrip()
            comma = b"" if head.endswith(b"{") else b","
            return b"%s%s%s:%s}" % (head, comma, _json(self._field), _json({KEY: kept}))
        request.pop(SLO_FIELD, None)
        if kept:
            holder[self._field] = {**(params or {}), KEY: kept}
        return _json(request)

    def _objective(
        self, headers: list[tuple[bytes, bytes]], request: dict[str, Any], params: dict[str, Any]
    ) -> Objective:
        said = Objective.carried_by(params) or Objective()
        if handed_on(params):
            # The remaining time is more accurate than the objective at the beginning.
            return said
        slo_header, slo = _first_header(headers, SLO_HEADERS)
        if slo is not None:
            seconds = milliseconds(slo.decode("latin-1").strip(), f"header {slo_header}")
            said = dataclasses.replace(said, slo_ttft_s=seconds)
        elif request.get(SLO_FIELD) is not None:
            said = dataclasses.replace(said, slo_ttft_s=milliseconds(request[SLO_FIELD], SLO_FIELD))
        for name in self._tenant_headers:
            tenant = _header(headers, name)
            if tenant:
                where = f"header {name.decode('latin-1')}"
                said = dataclasses.replace(said, tenant=tenant_name(tenant.decode("latin-1").strip(), where))
                break
        if said.priority is None:
            said = dataclasses.replace(said, priority=_priority(request))
        model = request.get("model")
        return said.over(self._objectives.find(model=model if isinstance(model, str) else None, tenant=said.tenant))


def _path(scope: Scope) -> str:
    path = str(scope.get("path", ""))
    root = str(scope.get("root_path", ""))
    if root and path.startswith(root):
        path = path[len(root) :]
    return path.rstrip("/")


def _priority(request: Any) -> Optional[int]:
    """Dynamo's priority, or ``None``. A value that is no priority is for Dynamo to refuse."""
    for key in PRIORITY_PLACE:
        request = request.get(key) if isinstance(request, Mapping) else None
    try:
        return None if request is None else priority_number(request, ".".join(PRIORITY_PLACE))
    except ObjectiveError:
        return None


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> Optional[bytes]:
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def _first_header(
    headers: Iterable[tuple[bytes, bytes]], names: Iterable[str]
) -> tuple[str, Optional[bytes]]:
    for name in names:
        value = _header(headers, name.encode())
        if value is not None:
            return name, value
    return "", None


def _with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(key, value) for key, value in headers if key.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", b"%d" % length)]


async def _body(receive: Receive, body_max: int) -> tuple[list[Message], Optional[bytes]]:
    """Returns the received messages, and the body if they have all of it."""
    messages: list[Message] = []
    pieces: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, None
        pieces.append(message.get("body", b""))
        length += len(pieces[-1])
        if length > body_max:
            return messages, None
        if not message.get("more_body", False):
            return messages, b"".join(pieces)


def _replay(messages: list[Message], receive: Receive) -> Receive:
    """A ``receive`` that repeats the received messages, then goes on with new ones."""
    pending = iter(messages)

    async def replayed() -> Message:
        for message in pending:
            return message
        return await receive()

    return replayed


async def _refuse(send: Send, why: str) -> None:
    """Answers 400 in the form of OpenAI's errors, which both engines use."""
    body = _json({"error": {"message": why, "type": "invalid_request_error", "param": KEY, "code": 400}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
