"""Options of a wrapped connector, and the stages of its loads and saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

import laxity

from ..objectives import Objectives

#: The key in ``kv_connector_extra_config``.
KEY = "laxity"

#: Connectors between a prefill and a decode instance. All of their transfers are P2D, whichever side starts them.
PREFILL_TO_DECODE = frozenset(
    {
        "NixlBaseConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "P2pNcclConnector",
    }
)

#: Connectors to a store of KV cache. Loads are KV_REUSE. Saves are BACKGROUND, because no request waits for them.
STORES = frozenset(
    {
        "MooncakeStoreConnector",
        "LMCacheConnectorV1",
        "LMCacheConnectorV1Dynamic",
        "LMCacheMPConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "UMBPConnector",
        "HiSparseConnector",
        "SharedStorageConnector",
        "ExampleConnector",
    }
)


class OptionError(ValueError):
    """An option in ``kv_connector_extra_config.laxity`` is invalid. The text says which and why."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in ``kv_connector_extra_config.laxity``."""

    #: Stage of loads: ``kv_reuse``, ``p2d``, ``background``, …. The default depends on the connector's class.
    load_stage: Optional[laxity.Stage] = None
    #: Stage of saves.
    save_stage: Optional[laxity.Stage] = None
    #: Expected time of a layer without contention, milliseconds; 0 if unknown.
    layer_time_ms: float = 0.0
    #: Maximum number of memory ranges that are registered for one request; 0 for none.
    owner_ranges: int = 1024
    #: Whether the connector gives hints. Without, transfers wait for permits and say only what they move.
    hints: bool = True
    #: Whether transfers of NIXL wait for permits (see :mod:`laxity.nixl`).
    gate_nixl: bool = True
    #: Whether transfers of Mooncake's engine and store wait for permits, if no library below does (see
    #: :mod:`laxity.mooncake`).
    gate_mooncake: bool = True
    #: File of objectives. The default is ``LAXITY_OBJECTIVES``.
    objectives: Optional[str] = None

    @classmethod
    def of(cls, vllm_config: Any) -> "Options":
        """Reads the options. Raises :class:`OptionError`."""
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None) or {}
        said = extra.get(KEY, {}) if isinstance(extra, Mapping) else {}
        where = f"kv_connector_extra_config.{KEY}"
        if not isinstance(said, Mapping):
            raise OptionError(f"{where}: {said!r:.80} is no object")
        known = {field.name for field in dataclasses.fields(cls)}
        for key in said:
            if key not in known:
                raise OptionError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
        values = dict(said)
        for key in ("load_stage", "save_stage"):
            if key in values:
                values[key] = _stage(values[key], f"{where}.{key}")
        for key, kinds, wanted in (
            ("layer_time_ms", (int, float), "a number of milliseconds, 0 or more"),
            ("owner_ranges", (int,), "a number, 0 or more"),
        ):
            value = values.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= 0:
                raise OptionError(f"{where}.{key}: {value!r:.80} is not {wanted}")
        for key in ("hints", "gate_nixl", "gate_mooncake"):
            if not isinstance(values.get(key, True), bool):
                raise OptionError(f"{where}.{key}: {values[key]!r:.80} is not true or false")
        if not isinstance(values.get("objectives", ""), str):
            raise OptionError(f"{where}.objectives: {values['objectives']!r:.80} is no path")
        return cls(**values)

    def load_objectives(self) -> Objectives:
        """Reads the file of objectives. Raises :class:`~laxity.objectives.ObjectiveError`."""
        return Objectives.load(self.objectives) if self.objectives else Objectives.from_environment()

    def stages(self, connector: type, vllm_config: Any) -> tuple[laxity.Stage, laxity.Stage]:
        """The stages of loads and of saves."""
        load, save = _by_class(connector, getattr(vllm_config, "kv_transfer_config", None))
        return self.load_stage or load, self.save_stage or save


def _by_class(connector: type, transfer: Any) -> tuple[laxity.Stage, laxity.Stage]:
    names = {base.__name__ for base in connector.__mro__}
    if names & PREFILL_TO_DECODE:
        return laxity.Stage.P2D, laxity.Stage.P2D
    if names & STORES:
        return laxity.Stage.KV_REUSE, laxity.Stage.BACKGROUND
    # For an unknown connector the role of the instance decides.
    role = getattr(transfer, "kv_role", None)
    load = laxity.Stage.P2D if role == "kv_consumer" else laxity.Stage.KV_REUSE
    return load, laxity.Stage.P2D


def _stage(value: Any, where: str) -> laxity.Stage:
    names = {stage.name.lower(): stage for stage in laxity.Stage}
    if not isinstance(value, str) or value.lower() not in names:
        raise OptionError(f"{where}: {value!r:.80} is no stage; write one of {', '.join(names)}")
    return names[value.lower()]
