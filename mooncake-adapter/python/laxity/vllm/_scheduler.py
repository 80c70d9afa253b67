"""The scheduler's side: collects the members of each step and the deadlines of its requests.

vLLM's scheduler and workers are separate processes, possibly on several hosts. The workers give all hints, because
they make the transfers. The scheduler adds what they need to the connector's own metadata, as the attribute
:data:`ATTRIBUTE` of plain values, which is pickled with it. Deadlines travel as remaining time.

A step with prefill is a batch. Its members are the requests without a first token. For Laxity a request ends with its
first token. If its KV cache goes to a decode instance, it ends when the cache has arrived there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Optional

from .. import _measured
from .._telling import Teller
from ..objectives import KEY, LATE_S, Objective, ObjectiveError, Objectives

#: The attribute of the connector's metadata that holds the step.
ATTRIBUTE = "_laxity_step"

#: Version of the step's layout. A worker ignores steps of other versions.
VERSION = 1

#: Maximum number of requests that are remembered, so that an engine that never finishes them can't exhaust memory.
REQUESTS_MAX = 1 << 16

#: Number of requests whose time of computing is remembered. The shortest counts: a longer one, such as that of the
#: first request, must not make the transfers of others late.
COMPUTED_REMEMBERED = 16

#: Part of a request's objective that its transfer to a decode instance leaves for that instance's step, at most. This
#: instance can't see how long the step takes, and its own steps take much longer if all its prompts are long.
DECODE_SHARE_MAX = 0.1

#: A longer time since a request's arrival is ignored, because the clocks of two hosts probably differ.
AGE_MAX_S = 3600.0

Runs = list[list[tuple[int, int]]]


@dataclasses.dataclass
class _Known:
    objective: Objective
    due: Optional[float]
    prompt_tokens: int
    #: Whether its KV cache goes to a decode instance.
    sends: bool
    #: The W3C header of its trace, if its engine has one.
    traceparent: str = ""
    #: Whether workers were told of it.
    announced: bool = False
    #: When it arrived, when its KV cache was first asked for elsewhere, and when its first step began; 0 before.
    arrived: float = 0.0
    asked: float = 0.0
    began: float = 0.0

    def has_first_token(self) -> Optional[float]:
        """Notes the parts of its time to the first token. Returns the time of computing."""
        if not self.began:
            return None
        waited_until = self.asked or self.began
        compute_s = time.monotonic() - self.began
        _measured.requests.add(waited_until - self.arrived, self.began - waited_until, compute_s)
        self.began = 0.0
        return compute_s


class SchedulerHints:
    """Follows one scheduler. Safe from any thread."""

    def __init__(self, objectives: Objectives, model: Optional[str], engine: str, tell: Teller) -> None:
        self._objectives = objectives
        self._model = model
        self._tell = tell
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, _Known] = OrderedDict()
        #: Requests that have their first token here. One that is preempted is computed again, and is no new request.
        self._decoding: OrderedDict[str, None] = OrderedDict()
        self._steps = itertools.count(1)
        # Batch ids differ between engines: 40 bits come from the engine, 23 from the step.
        self._base = int.from_bytes(hashlib.blake2b(engine.encode(), digest_size=5).digest(), "big") << 23
        self._ended: list[str] = []
        self._owned: list[tuple[str, Runs]] = []
        self._loading: dict[str, None] = {}
        #: Times of computing a first token, of requests whose KV cache was loaded and of all others. A transfer is due
        #: the shortest of them before its request.
        self._after_loads_s: deque[float] = deque(maxlen=COMPUTED_REMEMBERED)
        self._computed_s: deque[float] = deque(maxlen=COMPUTED_REMEMBERED)

    def saw(self, request: Any) -> None:
        """Takes in a request."""
        with self._lock:
            if request.request_id not in self._decoding:
                self._know(request)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Takes in the blocks of a request. The connector fetches ``external_tokens`` of its tokens."""
        with self._lock:
            if request.request_id in self._decoding:
                return
            known = self._know(request)
            if external_tokens > 0:
                known.asked = known.asked or time.monotonic()
                self._loading[request.request_id] = None
                block_ids = getattr(blocks, "get_block_ids", None)
                if block_ids is not None:
                    self._own(request.request_id, block_ids())

    def step(self, output: Any) -> Optional[dict[str, Any]]:
        """What the workers are to be told of this step; ``None`` if nothing."""
        scheduled: Mapping[str, int] = getattr(output, "num_scheduled_tokens", None) or {}
        with self._lock:
            members = []
            for request_id, computed, prompt in _progress(output):
                known = self._requests.get(request_id)
                prompt = prompt or (known.prompt_tokens if known else 0)
                if request_id not in scheduled or request_id in self._decoding:
                    continue
                if computed < prompt:
                    members.append(request_id)
                    if known is not None and known.arrived:
                        known.began = known.began or time.monotonic()
                elif known is not None and not known.sends:
                    # The request decodes, so it has its first token.
                    self._first_token(known)
                    self._forget(request_id)
                    self._decoding[request_id] = None
                    if len(self._decoding) > REQUESTS_MAX:
                        self._decoding.popitem(last=False)
            told = [*members, *self._loading]
            traces = {
                request_id: new.traceparent
                for request_id in told
                if (new := self._requests.get(request_id)) and new.traceparent and not new.announced
            }
            requests = [self._announcement(request_id) for request_id in dict.fromkeys(told)]
            ended, self._ended = self._ended, []
            owned, self._owned = self._owned, []
            self._loading = {}
        if not (members or requests or ended or owned):
            return None
        return {
            "version": VERSION,
            "batch": (self._base | (next(self._steps) & 0x7FFFFF)) or 1 if members else 0,
            "members": members,
            "requests": [request for request in requests if request is not None],
            # Beside the requests, so that workers of an earlier release understand these.
            "traces": traces,
            "ended": ended,
            "owned": owned,
        }

    def finished(self, request: Any, block_ids: Any, sends: bool) -> Optional[Objective]:
        """Finishes a request. If it ``sends`` its KV cache, workers report the end of that. Returns its objective with
        the remaining time, for the instance that goes on with it."""
        with self._lock:
            self._decoding.pop(request.request_id, None)
            known = self._know(request) if sends else self._requests.get(request.request_id)
            if known is None:
                return None
            if getattr(request, "num_output_tokens", 0):
                self._first_token(known)
            if sends and known.announced:
                self._requests.pop(request.request_id, None)
                self._own(request.request_id, block_ids)
            else:
                self._forget(request.request_id)
            if known.due is None:
                return None if known.objective == Objective() else known.objective
            return known.objective.remaining(known.due - time.monotonic())

    def _first_token(self, known: _Known) -> None:
        compute_s = known.has_first_token()
        if compute_s is not None:
            (self._after_loads_s if known.asked else self._computed_s).append(compute_s)

    def _after_transfer_s(self, known: _Known) -> float:
        """Seconds that a request still needs for its first token when its KV cache has been transferred."""
        if not (known.asked or known.sends):
            return 0.0
        step_s = min(self._after_loads_s if known.asked else self._computed_s, default=0.0)
        if not known.sends:
            return step_s
        # The decode instance computes the last token of the prompt again, which is assumed to take no longer than the
        # shortest prompt here.
        return min(step_s, (known.objective.slo_ttft_s or 0.0) * DECODE_SHARE_MAX)

    def _announcement(self, request_id: str) -> Optional[tuple[str, Optional[float], str, int, int]]:
        """What workers are told of a request, once: id, remaining seconds, tenant, priority, tokens of KV cache that it
        will send."""
        known = self._requests.get(request_id)
        if known is None:
            # This connector has no method that shows requests, so the default objective holds from now on.
            objective = self._objectives.find(model=self._model)
            slo = objective.slo_ttft_s
            known = _Known(objective, None if slo is None else time.monotonic() + slo, 0, False)
            self._remember(request_id, known)
        if known.announced:
            return None
        known.announced = True
        due = known.due
        after_s = self._after_transfer_s(known)
        remains = None if due is None else max(due - after_s - time.monotonic(), LATE_S)
        tokens = known.prompt_tokens if known.sends else 0
        return (request_id, remains, known.objective.tenant, known.objective.priority or 0, tokens)

    def _know(self, request: Any) -> _Known:
        request_id = request.request_id
        known = self._requests.get(request_id)
        if known is not None:
            return known
        params = getattr(request, "kv_transfer_params", None)
        said = Objective()
        try:
            said = Objective.carried_by(params) or said
        except ObjectiveError as wrong:
            self._tell.count("objective of a request", str(wrong))
        objective = said.over(self._objectives.find(model=self._model, tenant=said.tenant))
        if objective.priority is None:
            # In vLLM the smaller priority goes first.
            objective = dataclasses.replace(objective, priority=-int(getattr(request, "priority", 0) or 0))
        age = time.time() - float(getattr(request, "arrival_time", None) or time.time())
        arrived = time.monotonic() - (age if 0 < age < AGE_MAX_S else 0.0)
        due = None if objective.slo_ttft_s is None else arrived + objective.slo_ttft_s
        sends = isinstance(params, Mapping) and bool(params.get("do_remote_decode"))
        headers = getattr(request, "trace_headers", None)
        trace = str(headers.get("traceparent") or "") if isinstance(headers, Mapping) else ""
        tokens = int(getattr(request, "num_prompt_tokens", 0) or 0)
        known = _Known(objective, due, tokens, sends, traceparent=trace, arrived=arrived)
        self._remember(request_id, known)
        return known

    def _remember(self, request_id: str, known: _Known) -> None:
        self._requests[request_id] = known
        while len(self._requests) > REQUESTS_MAX:
            oldest, dropped = self._requests.popitem(last=False)
            self._tell.count("requests that were never finished", oldest)
            if dropped.announced:
                self._ended.append(oldest)

    def _forget(self, request_id: str) -> None:
        known = self._requests.pop(request_id, None)
        if known is not None and known.announced:
            self._ended.append(request_id)

    def _own(self, request_id: str, block_ids: Any) -> None:
        self._owned.append((request_id, [_runs(group) for group in _groups(block_ids)]))
        # Bounds the list in case an engine allocates blocks without taking steps.
        del self._owned[:-REQUESTS_MAX]


def with_objective(result: Any, objective: Optional[Objective]) -> Any:
    """The result of ``request_finished``, with the objective in the parameters for the decode instance."""
    if objective is None or not isinstance(result, tuple) or len(result) != 2:
        return result
    sends, params = result
    said = objective.to_params()
    if not isinstance(params, dict) or not params or not said or KEY in params:
        return result
    return sends, {**params, KEY: {**said, "handed_on": True}}


def _progress(output: Any) -> Iterable[tuple[str, int, int]]:
    """For each request in a step: id, tokens computed before the step, tokens of its prompt (0 if unknown)."""
    for new in getattr(output, "scheduled_new_reqs", None) or ():
        prompt = getattr(new, "prompt_token_ids", None)
        embeds = getattr(new, "prompt_embeds", None)
        length = len(prompt) if prompt is not None else (len(embeds) if embeds is not None else 0)
        # A request that starts on a worker has at least one more token of prompt to compute.
        yield new.req_id, new.num_computed_tokens, length or new.num_computed_tokens + 1
    cached = getattr(output, "scheduled_cached_reqs", None)
    if cached is None:
        return
    if hasattr(cached, "req_ids"):
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens):
            yield request_id, computed, 0
    else:  # a list of requests, before vLLM 0.10
        for request in cached:
            yield request.req_id, request.num_computed_tokens, 0


def _groups(block_ids: Any) -> list[Any]:
    """The blocks of each group of KV caches. Connectors that know only one group pass a plain list."""
    if not block_ids:
        return []
    return [block_ids] if isinstance(block_ids[0], int) else list(block_ids)


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive blocks, each as its first block and its length."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
