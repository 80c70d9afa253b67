"""Another copy of the client library in the process, in front: what is said of threads and memory reaches it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import binary, environment

#: Stands in for liblaxity.so, and says what it hears.
RECORDER = r"""
#include <stdint.h>
#include <stdio.h>
struct scope { uint32_t size; uint16_t layer; uint8_t stage, reserved; uint64_t batch, request, deadline_ns; };
uint32_t lax_abi_version(void) { return VERSION; }
int lax_scope_push(const struct scope *s) {
    printf("push %u layer %u stage %u batch %llu request %llu due %d\n", s->size, s->layer, s->stage,
           (unsigned long long)s->batch, (unsigned long long)s->request, s->deadline_ns != 0);
    return 0;
}
int lax_scope_pop(void) { puts("pop"); return 0; }
int lax_memory_layer(const void *a, uint64_t n, uint16_t layer, uint8_t stage) {
    printf("layer %p %llu %u %u\n", a, (unsigned long long)n, layer, stage);
    return 0;
}
int lax_memory_owner(const void *a, uint64_t n, uint64_t batch, uint64_t request, uint64_t due) {
    printf("owner %p %llu %llu %llu %d\n", a, (unsigned long long)n, (unsigned long long)batch,
           (unsigned long long)request, due != 0);
    return 0;
}
int lax_memory_forget(const void *a, uint64_t n) {
    printf("forget %p %llu\n", a, (unsigned long long)n);
    return 0;
}
void said(void) { fflush(stdout); }
"""

SAYS = """
import ctypes, json, laxity
from laxity import Stage
laxity.request_begin(5, slo_ttft_s=10)
laxity.batch_begin(2, layers=9)
laxity.batch_join(2, 5)
with laxity.scope(stage=Stage.P2D, request=5):
    with laxity.scope(layer=3):
        pass
laxity.memory_layer(0x1000, 64, 4, Stage.P2D)
laxity.memory_owner(0x1000, 64, request=5)
try:
    laxity.memory_layer(0x1020, 64, 5)
except laxity.RegionOverlap:
    pass
laxity.memory_forget(0x1000, 64)
ctypes.CDLL(None).fflush(None)
print(json.dumps(laxity.stats()["preloaded"]))
"""


def run(text, library):
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=environment(LD_PRELOAD=os.fspath(library)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def recorder(folder, version):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "recorder.c"
    source.write_text(RECORDER)
    library = folder / "recorder.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-DVERSION={version}", "-o", library, source], check=True
    )
    return library


def test_the_library_in_front_hears_of_scopes_and_memory(tmp_path):
    assert run(SAYS, recorder(tmp_path, 1)) == [
        "push 32 layer 65535 stage 3 batch 2 request 5 due 1",
        "push 32 layer 3 stage 0 batch 0 request 0 due 0",
        "pop",
        "pop",
        "layer 0x1000 64 4 3",
        "owner 0x1000 64 2 5 1",
        "forget 0x1000 64",
        "true",
    ]


def test_a_library_in_front_of_another_version_hears_nothing(tmp_path):
    assert run(SAYS, recorder(tmp_path, 999)) == ["false"]


def test_the_real_library_in_front_is_recognised(tmp_path):
    assert run(SAYS, binary("liblaxity.so")) == ["true"]


MOONCAKE = """
import ctypes, json, mmap
import laxity
from laxity.mooncake import TransferEngine, _engine
assert [_engine._mode_of(name) for name in ("rdma", "tcp", "nvlink")] == ["hint", "gate", "none"]
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
engine._laxity_mode = _engine.HINT  # as over RDMA, for which there is no device here
memory = mmap.mmap(-1, 8192)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register_memory(address, 8192) == 0
nobody = "127.0.0.1:1"
with laxity.scope(request=5, batch=2):
    found = [engine.batch_transfer_sync_write(nobody, [address, address + 4096], [0, 0], [100, 200])]
found.append(engine.transfer_sync_read(nobody, address, 0, 100))
ctypes.CDLL(None).fflush(None)
print(json.dumps([address, found, laxity.stats()["bypassed_flows"]]))
"""


def test_where_the_library_in_front_schedules_mooncake_hears_all_and_memory_says_whose_it_is(tmp_path):
    pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine is not installed")
    *heard, last = run(MOONCAKE, recorder(tmp_path, 1))
    address, found, flows = json.loads(last)
    assert found == [-1, -1]
    assert flows == 0, "nothing asks for a permit twice"
    owners = [line for line in heard if line.startswith("owner")]
    assert owners == [f"owner {address:#x} 100 2 5 0", f"owner {address + 4096:#x} 200 2 5 0"]
