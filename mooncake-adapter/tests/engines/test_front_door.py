"""The front door of the vLLM lab (tools/rig), before servers that answer as vLLM's prefill and decode processes do."""

import asyncio
import importlib.util
import json
import pathlib

import pytest

pytest.importorskip("aiohttp", reason="the front door needs aiohttp")

from aiohttp import ClientSession, web  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

PROGRAM = pathlib.Path(__file__).parents[3] / "tools/rig/src/vllm/front_door.py"
specification = importlib.util.spec_from_file_location("front_door", PROGRAM)
front_door = importlib.util.module_from_spec(specification)
specification.loader.exec_module(front_door)

THERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "laxity": {"slo_ttft_ms": 150.0, "handed_on": True}}


class Process:
    """One process of vLLM: what it was asked, and how it answers."""

    def __init__(self):
        self.asked = []
        self.refuses = None
        self.gone = asyncio.Event()
        self.waits = False
        self.engine = "engine-0"

    async def complete(self, request):
        body = await request.json()
        self.asked.append((dict(request.headers), body))
        if self.refuses:
            return web.Response(status=self.refuses, text=json.dumps({"error": {"message": "no"}}))
        if not body.get("stream"):
            return web.json_response({"choices": [{"token_ids": [7]}], "kv_transfer_params": THERE})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices":[{"token_ids":[5]}]}\n\n')
        try:
            while self.waits:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.gone.set()
            raise
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def there(self, _):
        return web.Response(text="ok")

    async def query(self, _):
        return web.json_response({"0": {"engine_id": self.engine, "worker_addr": {"0": {"0": "tcp://x"}}}})

    async def start(self):
        app = web.Application()
        app.router.add_get("/query", self.query)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/health", self.there)
        self.server = TestServer(app)
        await self.server.start_server()
        return f"http://{self.server.host}:{self.server.port}"


def served(test, prefills=2, mooncake=False):
    """Runs a test with a front door, its decode process and its prefill processes."""

    async def run():
        decode, prefill = Process(), [Process() for _ in range(prefills)]
        urls = [await process.start() for process in prefill]
        door = front_door.FrontDoor(await decode.start(), urls, urls if mooncake else [])
        server = TestServer(front_door.application(door))
        await server.start_server()
        try:
            async with ClientSession(f"http://{server.host}:{server.port}") as session:
                await asyncio.wait_for(test(session, door, decode, prefill), 20)
        finally:
            for started in (server, decode.server, *(process.server for process in prefill)):
                await started.close()

    asyncio.run(run())


ASK = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
OBJECTIVE = {"x-llm-d-slo-ttft-ms": "200", "x-request-id": "r-1"}


def test_prefill_computes_one_token_and_decode_gets_the_place_of_its_cache():
    async def test(session, door, decode, prefill):
        said = {**ASK, "kv_transfer_params": {"laxity": {"tenant": "gold"}}}
        async with session.post("/v1/completions", json=said, headers={**OBJECTIVE, front_door.PLACE: "1"}) as answer:
            assert answer.status == 200
            assert await answer.text() == 'data: {"choices":[{"token_ids":[5]}]}\n\ndata: [DONE]\n\n'
        assert not prefill[0].asked
        headers, body = prefill[1].asked[0]
        assert (body["max_tokens"], body["stream"], body["prompt"]) == (1, False, [1, 2, 3])
        assert "stream_options" not in body
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        assert body["kv_transfer_params"]["laxity"] == {"tenant": "gold"}
        for headers in (headers, decode.asked[0][0]):
            assert {name.lower(): value for name, value in headers.items()}.items() >= OBJECTIVE.items()
        assert decode.asked[0][1] == {**ASK, "kv_transfer_params": THERE}
        assert door.open == [0, 0]

    served(test)


def test_with_mooncake_both_processes_are_told_the_transfers_name():
    async def test(session, door, decode, prefill):
        prefill[1].engine = "engine-1"
        said = {**ASK, "kv_transfer_params": {"laxity": {"tenant": "gold"}}}
        for _ in range(2):
            async with session.post("/v1/completions", json=said, headers={front_door.PLACE: "1"}) as answer:
                assert answer.status == 200
        (_, here), (_, there) = prefill[1].asked[0], decode.asked[0]
        here, there = here["kv_transfer_params"], there["kv_transfer_params"]
        assert here["do_remote_decode"] and not there["do_remote_decode"] and there["do_remote_prefill"]
        assert here["transfer_id"] == there["transfer_id"]
        assert there["remote_engine_id"] == "engine-1"
        assert there["remote_bootstrap_addr"] == door.bootstrap[1]
        assert here["laxity"] == there["laxity"] == {"tenant": "gold"}
        names = {body["kv_transfer_params"]["transfer_id"] for _, body in decode.asked}
        assert len(names) == 2

    served(test, mooncake=True)


def test_the_prefill_process_with_the_fewest_open_requests_is_next():
    async def test(session, door, decode, prefill):
        decode.waits = True
        async with session.post("/v1/completions", json=ASK) as first:
            await first.content.readany()
            async with session.post("/v1/completions", json=ASK) as second:
                await second.content.readany()
                assert door.open == [1, 1]
        assert [len(process.asked) for process in prefill] == [1, 1]

    served(test)


def test_a_local_request_is_computed_by_decode_alone():
    async def test(session, door, decode, prefill):
        async with session.post("/v1/completions", json=ASK, headers={front_door.PLACE: "local"}) as answer:
            assert answer.status == 200
        assert decode.asked[0][1] == ASK
        assert not any(process.asked for process in prefill)

    served(test)


def test_what_a_process_refuses_is_the_clients_answer():
    async def test(session, door, decode, prefill):
        prefill[0].refuses = 400
        async with session.post("/v1/completions", json=ASK, headers={front_door.PLACE: "0"}) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "no"
        assert not decode.asked
        assert door.open == [0, 0]
        for wrong in ("7", "-1", "x"):
            async with session.post("/v1/completions", json=ASK, headers={front_door.PLACE: wrong}) as answer:
                assert answer.status == 400

    served(test)


def test_a_client_that_goes_away_ends_its_request_at_decode():
    async def test(session, door, decode, prefill):
        decode.waits = True
        answer = await session.post("/v1/completions", json=ASK)
        await answer.content.readany()
        answer.close()
        await asyncio.wait_for(decode.gone.wait(), 10)
        while door.open != [0, 0]:
            await asyncio.sleep(0.01)

    served(test)


def test_it_is_healthy_when_all_processes_are():
    async def test(session, door, decode, prefill):
        async with session.get("/health") as answer:
            assert answer.status == 200
        await prefill[1].server.close()
        async with session.get("/health") as answer:
            assert answer.status == 503
        async with session.post("/v1/completions", json=ASK, headers={front_door.PLACE: "1"}) as answer:
            assert answer.status == 503

    served(test)
