"""The lab's changes to modules of vLLM and NIXL, on stand-ins of the same names. It needs neither of them."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

NIXL = """
class Config: pthrDelay = 0
class nixlBind:
    @staticmethod
    def nixlAgent(name, config): return name, config
"""
QUEUE = """
class SpinCondition:
    def __init__(self, is_reader, busy_loop_s=1): self.busy_loop_s = busy_loop_s
"""
ASK_DELAYS = """
from nixl_cu12._api import Config, nixlBind
from vllm.distributed.device_communicators import shm_broadcast as queue
print(nixlBind.nixlAgent('a', Config())[1].pthrDelay, queue.SpinCondition(is_reader=True).busy_loop_s)
"""

STATE = """
done, agent = [], None
class Connector:
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata): done.append('saved')
def ensure_kv_transfer_initialized(config, caches):
    global agent
    agent = agent or Connector()
def has_kv_transfer_group(): return agent is not None
def get_kv_transfer_group(): return agent
"""
SAVE_TWO_LAYERS = """
import json, os, socket, threading, types
from vllm.distributed.kv_transfer import kv_transfer_state as state
path = os.environ.get('LAB_COLLECTIVES')
def answer(listener):
    with listener.accept()[0].makefile('rw') as lines:
        for line in lines:
            exchange = json.loads(line)['exchange']
            state.done.append(f"{exchange['layer']}:{exchange['tokens']}")
            print('{"waited_ns": 1}', file=lines, flush=True)
if path:
    listener = socket.create_server(path, family=socket.AF_UNIX)
    threading.Thread(target=answer, args=[listener], daemon=True).start()
for _ in range(2): state.ensure_kv_transfer_initialized(None, None)
for layer in range(2):
    batch = types.SimpleNamespace(num_actual_tokens=7)
    state.get_kv_transfer_group().save_kv_layer(f'model.layers.{layer}.self_attn.attn', None, batch)
print(*state.done)
"""


class StandIns(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        shutil.copy(pathlib.Path(__file__).with_name("sitecustomize.py"), self.folder)

    def module(self, path, code):
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(code)

    def says(self, code, **variables):
        """Returns what a program prints that starts with the changes and the stand-ins."""
        inherited = {name: value for name, value in os.environ.items() if name != "LAB_COLLECTIVES"}
        environment = {**inherited, "PYTHONPATH": str(self.folder), **variables}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=60
        )
        return run.stdout.strip()

    def test_threads_that_wait_for_work_sleep(self):
        self.module("nixl_cu12/_api.py", NIXL)
        self.module("vllm/distributed/device_communicators/shm_broadcast.py", QUEUE)
        self.assertEqual(self.says(ASK_DELAYS), "1 0.05")

    def test_an_older_vllm_is_left_as_it_is(self):
        self.module("vllm/distributed/device_communicators/shm_broadcast.py", "class SpinTimer: pass\n")
        self.says("from vllm.distributed.device_communicators import shm_broadcast")

    def test_a_worker_waits_after_each_layer_where_the_lab_has_collectives(self):
        """The layer's KV is saved, then the socket is asked once."""
        self.module("vllm/distributed/kv_transfer/kv_transfer_state.py", STATE)
        said = self.says(SAVE_TWO_LAYERS, LAB_COLLECTIVES=str(self.folder / "socket"))
        self.assertEqual(said, "saved 0:7 saved 1:7")
        self.assertEqual(self.says(SAVE_TWO_LAYERS), "saved saved", "hosts without collectives")


if __name__ == "__main__":
    unittest.main()
