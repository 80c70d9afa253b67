"""Which memory is which layer's, and whose blocks lie where."""

import pytest

from laxity._telling import Teller
from laxity.vllm import _memory
from laxity.vllm._worker import WorkerHints


class Tensor:
    def __init__(self, address, shape, strides, size=2):
        self.address, self.shape, self._strides, self._size = address, shape, strides, size

    def data_ptr(self):
        return self.address

    def stride(self):
        return self._strides

    def element_size(self):
        return self._size


def dense(address, *shape):
    strides, step = [], 1
    for count in reversed(shape):
        strides.insert(0, step)
        step *= count
    return Tensor(address, shape, tuple(strides))


def worker(**said):
    defaults = {
        "layers": 0,
        "layer_time_s": 0.0,
        "load": None,
        "save": None,
        "owner_ranges": 100,
        "num_blocks": 4,
        "block_size": 8,
    }
    return WorkerHints(Teller("test"), **{**defaults, **said})


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.attn", 12),
        ("transformer.h.3.attn", 3),
        ("layers.0.attn", 0),
        ("model.decoder.7.attn.1", 7),
        ("attn", None),
        ("model.layers.70000.attn", None),
    ],
)
def test_a_layers_number_is_in_its_name(name, layer):
    assert _memory.layer_index(name) == layer


def test_a_tensor_is_a_region_of_its_layer(said):
    hints = worker()
    hints.register({"layers.0.attn": dense(0x1000, 4, 10), "layers.1.attn": dense(0x2000, 4, 10)})
    assert [args for args, _ in said.of("memory_layer")] == [(0x1000, 80, 0), (0x2000, 80, 1)]


def test_layers_that_lie_side_by_side_have_no_region_but_owners(said):
    """Four blocks of two layers: a block has 10 elements of each."""
    hints = worker()
    tensors = {f"layers.{layer}.attn": Tensor(0x1000 + layer * 20, (4, 10), (20, 1)) for layer in range(2)}
    hints.register(tensors)
    assert said.of("memory_layer") == []
    assert hints._tell.counts == {"layers that share memory": 1}
    hints.bind(
        {
            "version": 1,
            "batch": 0,
            "members": [],
            "requests": [("r", None, "", 0, 16)],
            "ended": [],
            "owned": [("r", [[(1, 2)]])],
        }
    )
    assert [args for args, _ in said.of("memory_owner")] == [
        (0x1000 + 40, 20),
        (0x1000 + 80, 20),
        (0x1014 + 40, 20),
        (0x1014 + 80, 20),
    ]
    # 40 bytes a block of 8 tokens, 5 bytes a token.
    assert said.of("request_begin")[0][1]["bytes"] == 80


def test_one_tensor_under_the_names_of_two_layers_is_neithers(said):
    hints = worker()
    shared = dense(0x1000, 4, 10)
    hints.register({"layers.0.attn": shared, "layers.1.attn": shared, "layers.2.attn": dense(0x2000, 4, 10)})
    assert [args for args, _ in said.of("memory_layer")] == [(0x2000, 80, 2)]


def test_several_tensors_of_one_layer_are_regions_of_it(said):
    hints = worker()
    hints.register({"layers.5.mixer": [dense(0x1000, 4, 10), (dense(0x2000, 4, 6),)], "other": "no tensor"})
    assert [args for args, _ in said.of("memory_layer")] == [(0x1000, 80, 5), (0x2000, 48, 5)]


def test_layers_without_a_number_count_from_the_first(said):
    hints = worker()
    hints.register({"first": dense(0x1000, 4, 10), "second": dense(0x2000, 4, 10)})
    assert [args[2] for args, _ in said.of("memory_layer")] == [0, 1]


def test_blocks_of_a_group_are_those_of_its_layers(said):
    hints = worker(groups=[frozenset({"layers.0.attn"}), frozenset({"layers.1.attn"})])
    hints.register({"layers.0.attn": dense(0x1000, 4, 10), "layers.1.attn": dense(0x2000, 4, 10)})
    step = {"version": 1, "batch": 0, "members": [], "requests": [("r", None, "", 0, 0)], "ended": []}
    hints.bind({**step, "owned": [("r", [[(0, 1)], [(2, 2)]])]})
    assert [args for args, _ in said.of("memory_owner")] == [(0x1000, 20), (0x2000 + 40, 40)]


def test_a_request_in_many_pieces_is_known_by_its_first(said):
    hints = worker(owner_ranges=3)
    hints.register({f"layers.{layer}.attn": dense(0x1000 * (layer + 1), 4, 10) for layer in range(4)})
    step = {"version": 1, "batch": 0, "members": [], "requests": [("r", None, "", 0, 0)], "ended": []}
    hints.bind({**step, "owned": [("r", [[(0, 1), (2, 1)]])]})
    assert len(said.of("memory_owner")) == 3
    assert hints._tell.counts == {"requests in more pieces of memory than owner_ranges": 1}
    hints.bind({**step, "requests": [], "ended": ["r"], "owned": []})
    assert [named for _, named in said.of("memory_owner")[3:]] == [{}] * 3


def test_blocks_of_a_request_that_is_not_known_are_nobodys(said):
    hints = worker()
    hints.register({"layers.0.attn": dense(0x1000, 4, 10)})
    hints.bind({"version": 1, "batch": 0, "members": [], "requests": [], "ended": [], "owned": [("r", [[(0, 1)]])]})
    assert said.of("memory_owner") == []


def test_a_step_of_another_version_is_left_alone_and_counted(said):
    hints = worker()
    hints.bind({"version": 2, "something": "else"})
    hints.bind("nonsense")
    assert said.calls == []
    assert hints._tell.counts == {"steps of another version of laxity": 2}


def test_registering_again_forgets_what_was_before(said):
    hints = worker()
    hints.register({"layers.0.attn": dense(0x1000, 4, 10)})
    hints.register({"layers.1.attn": dense(0x1000, 4, 10)})
    assert said.refused == []
    assert said.of("memory_forget") == [((0x1000, 80), {})]
    hints.close()
    assert len(said.of("memory_forget")) == 2
