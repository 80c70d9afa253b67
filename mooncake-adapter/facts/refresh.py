"""Writes down what the wrappers rely on in released packages, or compares.

    python facts/refresh.py                    reads the recorded versions anew
    python facts/refresh.py --newest           and the newest one
    python facts/refresh.py --add vllm 0.34.0  and this one
    python facts/refresh.py --check            changes nothing; 1 if a file would change

One JSON file a package: version → class → method → parameters as they are written in the source, without their
types. Facts about an interface, not text of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import released  # noqa: E402

CONNECTORS = "vllm/distributed/kv_transfer/kv_connector/"
VLLM = (
    CONNECTORS + "v1/base.py",
    CONNECTORS + "v1/multi_connector.py",
    CONNECTORS + "factory.py",
    "vllm/v1/core/sched/output.py",
)
DISAGGREGATION = "sglang/srt/disaggregation/"
SGLANG = (
    DISAGGREGATION + "mooncake/",
    DISAGGREGATION + "nixl/",
    DISAGGREGATION + "common/",
    DISAGGREGATION + "base/",
    DISAGGREGATION + "prefill.py",
    DISAGGREGATION + "utils.py",
)
NIXL = ("nixl_cu12/_api.py",)
LMCACHE_CONNECTORS = "lmcache/v1/storage_backend/connector/"
LMCACHE = (
    LMCACHE_CONNECTORS + "base_connector.py",
    LMCACHE_CONNECTORS + "lm_connector.py",
    LMCACHE_CONNECTORS + "redis_connector.py",
    "lmcache/v1/cache_engine.py",
    "lmcache/utils.py",
    # The tests run a server of the release.
    "lmcache/v1/protocol.py",
    "lmcache/v1/server/",
)

Facts = dict[str, Any]


def vllm(root: pathlib.Path) -> Facts:
    base = _tree(root / VLLM[0])
    output = _tree(root / VLLM[3])
    factory = _class(_tree(root / VLLM[2]), "KVConnectorFactory")
    multi = _class(_tree(root / VLLM[1]), "MultiConnector")
    return {
        "KVConnectorBase_V1": _methods(_class(base, "KVConnectorBase_V1")),
        "SupportsHMA": _methods(_class(base, "SupportsHMA")),
        "KVConnectorFactory": {
            name: said
            for name, said in _methods(factory).items()
            if name in ("get_connector_class", "register_connector")
        },
        "factory_has_registry": "_registry" in _fields(factory),
        # Whether a module path holds for names of vLLM's own connectors, too.
        "module_path_first": _module_path_first(factory),
        "MultiConnector": {
            name: said for name, said in _methods(multi).items() if name == "_get_connector_classes_and_configs"
        },
        "SchedulerOutput": _fields(_class(output, "SchedulerOutput")),
        "NewRequestData": _fields(_class(output, "NewRequestData")),
        "CachedRequestData": _fields(_class(output, "CachedRequestData")),
    }


def sglang(root: pathlib.Path) -> Facts:
    at = root / DISAGGREGATION
    utils = _tree(at / "common/utils.py")
    facts: Facts = {"FastQueue": _methods(_class(utils, "FastQueue"))}
    for backend, manager in (("mooncake", "MooncakeKVManager"), ("nixl", "NixlKVManager")):
        tree = _tree(at / backend / "conn.py")
        methods = _methods(_class(tree, manager))
        common = _methods(_class(_tree(at / "common/conn.py"), "CommonKVManager"))
        chunk = _class(tree, "TransferKVChunk") or _class(utils, "TransferKVChunk")
        facts[manager] = {
            "transfer_worker": methods.get("transfer_worker"),
            "update_status": methods.get("update_status") or common.get("update_status"),
            "TransferKVChunk": _fields(chunk),
        }
    queue = _methods(_class(_tree(at / "prefill.py"), "PrefillBootstrapQueue"))
    facts["PrefillBootstrapQueue"] = {name: queue[name] for name in ("add", "create_sender") if name in queue}
    facts["KVArgs"] = _fields(_class(_tree(at / "base/conn.py"), "KVArgs"))
    return facts


def nixl(root: pathlib.Path) -> Facts:
    tree = _tree(root / NIXL[0])
    return {
        "nixl_agent": {
            name: said
            for name, said in _methods(_class(tree, "nixl_agent")).items()
            if not name.startswith("_") or name == "__init__"
        },
        "calls": sorted(_calls_of_agent(tree)),
    }


def lmcache(root: pathlib.Path) -> Facts:
    base = _class(_tree(root / LMCACHE[0]), "RemoteConnector")
    facts: Facts = {
        "RemoteConnector": {"__init__": _methods(base).get("__init__"), "attributes": [*_fields(base), *_attributes(base)]}
    }
    moves = ("get", "put", "batched_get", "batched_put", "batched_get_non_blocking")
    for file in LMCACHE[1:3]:
        for node in _tree(root / file).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Connector"):
                facts[node.name] = {name: said for name, said in _methods(node).items() if name in moves}
    engine = _methods(_class(_tree(root / LMCACHE[3]), "LMCacheEngine"))
    facts["LMCacheEngine"] = {name: engine.get(name) for name in ("retrieve", "async_lookup_and_prefetch")}
    key = _class(_tree(root / LMCACHE[4]), "LayerCacheEngineKey")
    facts["LayerCacheEngineKey"] = _fields(key)
    return facts


PACKAGES: dict[str, tuple[str, tuple[str, ...], Callable[[pathlib.Path], Facts]]] = {
    "vllm": ("vllm", VLLM, vllm),
    "sglang": ("sglang", SGLANG, sglang),
    "nixl": ("nixl-cu12", NIXL, nixl),
    "lmcache": ("lmcache", LMCACHE, lmcache),
}


def read(package: str, version: str) -> Facts:
    """The facts of a release. Raises :class:`released.Unreachable`."""
    name, prefixes, extract = PACKAGES[package]
    return extract(released.files(name, version, prefixes))


def recorded(package: str) -> dict[str, Facts]:
    path = HERE / f"{package}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8")) if path.exists() else ast.Module([], [])


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _methods(node: ast.ClassDef | None) -> dict[str, str]:
    return {
        child.name: _said(child)
        for child in (node.body if node else [])
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def _said(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Parameters without types, and what kind of method it is."""
    arguments = node.args
    for argument in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    kinds = {"abstractmethod", "classmethod", "staticmethod", "property"}
    marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name) and mark.id in kinds]
    return " ".join([*marks, f"({ast.unparse(arguments)})"])


def _fields(node: ast.ClassDef | None) -> list[str]:
    found = []
    for child in node.body if node else []:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.append(child.target.id)
    return found


def _attributes(node: ast.ClassDef | None) -> list[str]:
    """Names that ``__init__`` gives to ``self`` with a type."""
    found = []
    for child in ast.walk(node) if node else []:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Attribute):
            found.append(child.target.attr)
    return found


def _module_path_first(factory: ast.ClassDef | None) -> bool:
    for child in factory.body if factory else []:
        if isinstance(child, ast.FunctionDef) and child.name in (
            "get_connector_class",
            "_get_connector_class_with_compat",
        ):
            text = ast.unparse(child)
            path, registry = text.find("import_module("), text.find("in cls._registry")
            if path >= 0:
                return registry < 0 or path < registry
    return False


def _calls_of_agent(tree: ast.Module) -> set[str]:
    """Methods of the compiled part that the Python class calls, with the number of arguments."""
    calls = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Attribute) and owner.attr in ("agent", "_agent"):
                calls.add(f"{node.func.attr}/{len(node.args)}")
    return calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"{', '.join(PACKAGES)}; by default all")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--add", nargs=2, action="append", default=[], metavar=("PACKAGE", "VERSION"))
    arguments = parser.parse_args()
    unknown = {*arguments.packages, *(package for package, _ in arguments.add)} - set(PACKAGES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PACKAGES)}")
    differs = False
    for package in arguments.packages or PACKAGES:
        before = recorded(package)
        versions = [*before, *(version for name, version in arguments.add if name == package)]
        try:
            if arguments.newest:
                versions.append(released.newest(PACKAGES[package][0]))
            after = {version: read(package, version) for version in dict.fromkeys(versions)}
        except released.Unreachable as why:
            print(f"{package}: {why}", file=sys.stderr)
            return 2
        for version in after:
            if after[version] != before.get(version):
                differs = True
                print(f"{package} {version}: {'new' if version not in before else 'not as recorded'}")
        if not arguments.check:
            ordered = sorted(
                after.items(), key=lambda item: [int(part) for part in item[0].split(".") if part.isdigit()]
            )
            (HERE / f"{package}.json").write_text(json.dumps(dict(ordered), indent=1) + "\n")
    return 1 if differs and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
