"""Changes four modules of vLLM and NIXL for the lab. Python loads it at its start.

Several vLLM processes share the lab's few processors, so a thread that only looks whether there is work takes the time
of those that have some. With three processes on two processors that was most of the time.

* NIXL's progress thread looks without a pause unless it has a delay. With one, it sleeps until a socket is ready.
* A vLLM worker looks for the next step for one second before it sleeps. Some time is needed, because a message that
  wakes the worker is lost if it follows another at once. Without any, a token takes a second.

vLLM's MooncakeConnector does not run or count on a machine without an accelerator:

* It asks for the number of the current device, which torch knows only of accelerators. The processor is 0.
* It collects the bytes that it moved, and exports none of them. They go to the metrics that NIXL's connector has.

If ``LAB_COLLECTIVES`` names a socket, the worker waits there after the attention of each layer, as a GPU waits for a
collective. It waits where vLLM saves a layer's KV, so only in steps that the connector has, and under every policy.
"""

import collections
import functools
import importlib.abc
import importlib.machinery
import json
import os
import re
import socket
import sys

MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
NIXL_STATS = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats"
MESSAGE_QUEUE = "vllm.distributed.device_communicators.shm_broadcast"
NIXL = ("nixl_cu12._api", "nixl_cu13._api")
TRANSFER_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"
COLLECTIVES = "LAB_COLLECTIVES"
# Longer than the lab's own limit of an exchange, which says what it waited for.
EXCHANGE_WITHIN_S = 60


def let_progress_sleep(module) -> None:
    bindings = module.nixlBind
    make_agent = bindings.nixlAgent

    def nixl_agent(name, config):
        config.pthrDelay = 1
        return make_agent(name, config)

    bindings.nixlAgent = nixl_agent


def let_workers_sleep(module) -> None:
    # vLLM 0.14 and older releases have no such class.
    if hasattr(module, "SpinCondition"):
        module.SpinCondition = functools.partial(module.SpinCondition, busy_loop_s=0.05)


def run_without_accelerator(module) -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
    metrics = importlib.import_module(NIXL_STATS).NixlPromMetrics

    class Counted(metrics):
        def observe(self, transfer_stats_data, engine_idx=0) -> None:
            # What NIXL counts and Mooncake doesn't is an empty list.
            super().observe(collections.defaultdict(list, transfer_stats_data), engine_idx)

    def build_prom_metrics(cls, *arguments):
        return Counted(*arguments)

    module.MooncakeConnector.build_prom_metrics = classmethod(build_prom_metrics)


class Exchanges:
    """The socket of the host's process, which answers each line when the exchange is over."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines = None

    def wait(self, layer_name: str, tokens: int) -> None:
        layer = re.search(r"layers\.(\d+)\.", layer_name)
        ask = {"exchange": {"layer": int(layer[1]) if layer else 0, "tokens": tokens}}
        try:
            if self.lines is None:
                connection = socket.socket(socket.AF_UNIX)
                connection.settimeout(EXCHANGE_WITHIN_S)
                connection.connect(self.path)
                self.lines = connection.makefile("rw")
            self.lines.write(json.dumps(ask) + "\n")
            self.lines.flush()
            answer = self.lines.readline()
        except OSError as error:
            raise RuntimeError(f"{layer_name}: no exchange by {self.path}: {error}") from error
        if not answer:
            raise RuntimeError(f"{layer_name}: the process at {self.path} ended; its log says why")


def exchange_at_each_layer(module) -> None:
    path = os.environ.get(COLLECTIVES)
    if not path:
        return
    initialize = module.ensure_kv_transfer_initialized

    @functools.wraps(initialize)
    def ensure_kv_transfer_initialized(*arguments, **named) -> None:
        initialize(*arguments, **named)
        if not module.has_kv_transfer_group():
            return
        connector = module.get_kv_transfer_group()
        if "save_kv_layer" in vars(connector):
            return
        save, exchanges = connector.save_kv_layer, Exchanges(path)

        @functools.wraps(save)
        def save_kv_layer(layer_name, kv_layer, attn_metadata, **others) -> None:
            save(layer_name, kv_layer, attn_metadata, **others)
            exchanges.wait(layer_name, attn_metadata.num_actual_tokens)

        connector.save_kv_layer = save_kv_layer

    module.ensure_kv_transfer_initialized = ensure_kv_transfer_initialized


CHANGES = {
    MOONCAKE: run_without_accelerator,
    TRANSFER_STATE: exchange_at_each_layer,
    MESSAGE_QUEUE: let_workers_sleep,
    **dict.fromkeys(NIXL, let_progress_sleep),
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        change = CHANGES.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
