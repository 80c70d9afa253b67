"""vLLM's KV connectors under Laxity, without a change to vLLM or to the connector.

vLLM loads the package as a plugin (entry point ``vllm.general_plugins``), so connectors are named as always.
``LAXITY_VLLM=off`` switches the plugin off. Where plugins are restricted (``VLLM_PLUGINS``), allow ``laxity``, or name
this module as the connector's module path::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "laxity.vllm",
        "kv_role": "kv_both"}'

``laxity.vllm.NixlConnector`` is a subclass of vLLM's own class. It inherits every method, those of newer releases too,
and ``isinstance`` holds. These methods also give hints:

=============================================  ==========================================================
``register_kv_caches``                         which memory is which layer's
``on_new_request``, ``request_finished``, …    requests, their deadlines from ``kv_transfer_params.laxity``
``build_connector_meta``                       the step as a batch, its members
``wait_for_layer_load``, ``save_kv_layer``     the layer that is computed
the calls that load and save                   the stage of what is transferred meanwhile
=============================================  ==========================================================

vLLM before 0.20 looks up its own names before a module path. Write ``LaxityNixlConnector`` there. Later releases
accept that name, too, but compare names of connectors in some places.

Names are looked up in vLLM's registry. ``"package.module:Class"`` names a connector outside vLLM, such as
``"lmcache.integration.vllm.lmcache_connector_v1:LMCacheConnectorV1Dynamic"``. Children of a ``MultiConnector`` are
wrapped with it. Options are in ``kv_connector_extra_config.laxity``, see :class:`laxity.vllm._options.Options`.
"""

from __future__ import annotations

from typing import Any

from ._wrap import under_laxity

__all__ = ["under_laxity"]


def __getattr__(name: str) -> Any:
    # vLLM gets the connector's class by getattr(module, kv_connector). Tools that ask modules for private names must
    # not cause an import of vLLM.
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ._wrap import by_name

    return by_name(name)
