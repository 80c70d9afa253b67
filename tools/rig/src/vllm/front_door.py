"""The front door of the vLLM lab: takes OpenAI requests, and has a prefill and a decode process answer each.

    front_door.py --listen 127.0.0.1:8000 --decode http://127.0.0.1:8001 --prefill http://10.78.0.1:8000 …

It is the part of a disaggregating router (llm-d, Dynamo, vLLM's own example proxy) that a request passes: headers go on
unchanged, the prefill process computes the prompt, and the decode process gets the place of the KV cache. With NIXL
that is in the `kv_transfer_params` of the prefill process's answer, which go to the decode process as they are. With
Mooncake (`--bootstrap`) the front door names the transfer, and asks each prefill process for its
engine's name, once, and again after an error.

The header `x-laxity-prefill` names a prefill process by its number. With `local` the decode process computes all of it.
Without the header, the prefill process with the fewest open requests is next.
"""

import argparse
import json
import sys
import uuid

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

#: Headers that belong to one connection.
HOP_BY_HOP = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "accept-encoding", "te"}
PLACE = "x-laxity-prefill"
PATHS = ("/v1/completions", "/v1/chat/completions")


class Refused(Exception):
    """A process refused a request. The client gets the same answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


def prefill_body(body: dict, params: dict) -> dict:
    """The request of the prefill process: the same prompt and one token, which nobody reads."""
    one = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": {**carried(body), **params}}
    if "max_completion_tokens" in one:
        one["max_completion_tokens"] = 1
    for key in ("stream_options", "min_tokens"):
        one.pop(key, None)
    return one


def carried(body: dict) -> dict:
    """What the client itself wrote into `kv_transfer_params`, such as an objective."""
    params = body.get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


class FrontDoor:
    def __init__(self, decode: str, prefill: list[str], bootstrap: list[str]) -> None:
        self.decode = decode
        self.prefill = prefill
        self.bootstrap = bootstrap
        self.engines: dict[int, str] = {}
        self.open = [0] * len(prefill)
        self.session: aiohttp.ClientSession

    async def run(self, app: web.Application):
        limit = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with aiohttp.ClientSession(connector=limit, timeout=timeout) as self.session:
            yield

    def place(self, headers) -> int | None:
        """The prefill process of a request, or `None` if the decode process computes the prompt."""
        said = headers.get(PLACE)
        if said == "local":
            return None
        if said is not None:
            if not said.isdecimal() or int(said) >= len(self.prefill):
                raise Refused(400, f"{PLACE}: there is no prefill process {said!r:.40}".encode())
            return int(said)
        return min(range(len(self.prefill)), key=lambda number: self.open[number])

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = request.headers.copy()  # names in any case
        for name in HOP_BY_HOP:
            headers.popall(name, None)
        headers.setdefault("X-Request-Id", uuid.uuid4().hex)
        try:
            body = await request.json()
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            return web.Response(status=400, text="the body is no JSON object")
        try:
            place = self.place(request.headers)
            if place is None:
                return await self.decoded(request, headers, body)
            self.open[place] += 1
            try:
                return await self.one_after_the_other(request, headers, body, place)
            finally:
                self.open[place] -= 1
        except Refused as refused:
            return web.Response(status=refused.status, body=refused.body, content_type="application/json")
        except aiohttp.ClientError as broken:
            # A process that was restarted has another engine.
            self.engines.clear()
            return web.Response(status=503, text=f"{type(broken).__name__}: {broken}")

    async def one_after_the_other(self, request, headers, body, place) -> web.StreamResponse:
        if self.bootstrap:
            here, there = await self.named(place)
            await self.prefilled(request.path, headers, prefill_body(body, here), place)
            return await self.decoded(request, headers, {**body, "kv_transfer_params": {**carried(body), **there}})
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        said = await self.prefilled(request.path, headers, prefill_body(body, params), place)
        there = said.get("kv_transfer_params")
        if there:
            body = {**body, "kv_transfer_params": there}
        return await self.decoded(request, headers, body)

    async def named(self, place: int) -> tuple[dict, dict]:
        """What the prefill and the decode process are told of a transfer by Mooncake."""
        if place not in self.engines:
            async with self.session.get(self.bootstrap[place] + "/query") as response:
                ranks = await response.json()
            if not ranks:
                raise Refused(503, f"{self.bootstrap[place]} knows no engine yet".encode())
            self.engines[place] = next(iter(ranks.values()))["engine_id"]
        name = uuid.uuid4().hex
        here = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        there = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_engine_id": self.engines[place],
            "remote_bootstrap_addr": self.bootstrap[place],
        }
        return here, there

    async def prefilled(self, path: str, headers: CIMultiDict, body: dict, place: int) -> dict:
        async with self.session.post(self.prefill[place] + path, json=body, headers=headers) as response:
            said = await response.read()
            if response.status != 200:
                raise Refused(response.status, said)
            return json.loads(said)

    async def decoded(self, request: web.Request, headers: CIMultiDict, body: dict) -> web.StreamResponse:
        async with self.session.post(self.decode + request.path, json=body, headers=headers) as response:
            if response.status != 200:
                raise Refused(response.status, await response.read())
            answer = web.StreamResponse(headers={"Content-Type": response.content_type})
            await answer.prepare(request)
            async for part in response.content.iter_any():
                await answer.write(part)
            await answer.write_eof()
            return answer

    async def health(self, _: web.Request) -> web.Response:
        for process in (self.decode, *self.prefill):
            try:
                async with self.session.get(process + "/health") as response:
                    if response.status != 200:
                        return web.Response(status=503, text=process)
            except (aiohttp.ClientError, OSError):
                return web.Response(status=503, text=process)
        return web.Response(text="ok")

    async def metrics(self, _: web.Request) -> web.Response:
        async with self.session.get(self.decode + "/metrics") as response:
            return web.Response(status=response.status, body=await response.read(), content_type="text/plain")


def application(door: FrontDoor) -> web.Application:
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(door.run)
    for path in PATHS:
        app.router.add_post(path, door.answer)
    app.router.add_get("/health", door.health)
    app.router.add_get("/metrics", door.metrics)
    return app


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--listen", default="127.0.0.1:8000", metavar="ADDRESS:PORT")
    arguments.add_argument("--decode", required=True, metavar="URL")
    arguments.add_argument("--prefill", required=True, nargs="+", metavar="URL")
    arguments.add_argument("--bootstrap", default=[], nargs="+", metavar="URL", help="Mooncake's bootstrap server of each prefill process")
    said = arguments.parse_args()
    address, _, port = said.listen.rpartition(":")
    door = FrontDoor(said.decode, said.prefill, said.bootstrap)
    # A client that goes away ends its handler, and with that the requests to both processes.
    web.run_app(application(door), host=address, port=int(port), handler_cancellation=True, print=None)


if __name__ == "__main__":
    sys.exit(main())
