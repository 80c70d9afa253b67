"""Makes vLLM's MooncakeConnector run and count on a machine without an accelerator. Python loads it at its start.

* The connector asks for the number of the current device, which torch knows only of accelerators. The processor is 0.
* It collects the bytes that it moved, and exports none of them. They go to the metrics that NIXL's connector has.
"""

import collections
import importlib.abc
import importlib.machinery
import sys

MOONCAKE = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats"


def change(module) -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
    metrics = importlib.import_module(NIXL).NixlPromMetrics

    class Counted(metrics):
        def observe(self, transfer_stats_data, engine_idx=0) -> None:
            # What NIXL counts and Mooncake doesn't is an empty list.
            super().observe(collections.defaultdict(list, transfer_stats_data), engine_idx)

    def build_prom_metrics(cls, *arguments):
        return Counted(*arguments)

    module.MooncakeConnector.build_prom_metrics = classmethod(build_prom_metrics)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != MOONCAKE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            load = spec.loader.exec_module

            def exec_module(module) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
