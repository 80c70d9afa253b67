"""Objectives: how soon a request's first token is due.

The first of these that says something holds: the request itself (a header or a JSON field, see :mod:`laxity.asgi`), a
file of defaults by tenant and model, the daemon's ``slo_ttft``. ``LAXITY_OBJECTIVES`` names the file, which is TOML::

    [default]
    slo_ttft = "1s"

    [model."meta-llama/Llama-3.1-8B-Instruct"]
    slo_ttft = "300ms"

    [tenant.gold]
    slo_ttft = "200ms"
    priority = 10

    [tenant.gold.model."meta-llama/Llama-3.1-8B-Instruct"]
    slo_ttft = "150ms"

For each key the most special entry holds, in this order: tenant and model, tenant, model, default.

Between processes an objective travels as the key ``laxity`` of the request's ``kv_transfer_params`` (vLLM) or
``custom_params`` (SGLang): ``{"slo_ttft_ms": 200.0, "tenant": "gold", "priority": 10}``. It counts from the moment at
which the reading process received the request. An engine that hands a request on (prefill to decode) writes the
remaining time, with ``"handed_on": true``. No absolute time crosses hosts, so clocks need not agree.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Optional

#: The key under which an objective travels.
KEY = "laxity"

#: The variable that names the file of defaults.
VARIABLE = "LAXITY_OBJECTIVES"

#: Longer objectives are refused, as they are probably a mistake in the unit.
SLO_MAX_S = 24 * 3600.0

#: The remaining time that a late request hands on. It must be positive, and is too short to be met.
LATE_S = 1e-3

#: Longer names of tenants are refused, because each request keeps one in memory.
TENANT_MAX = 256

_PRIORITY_MAX = 2**31 - 1
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ns|us|µs|ms|s|min)\s*")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_KEYS = ("slo_ttft", "priority")


class ObjectiveError(ValueError):
    """An objective or a file of objectives is invalid. The text says what is wrong, where, and what to write."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of one request."""

    #: Seconds to the first token; ``None`` if not given.
    slo_ttft_s: Optional[float] = None
    tenant: str = ""
    #: Larger is more important; ``None`` if not given.
    priority: Optional[int] = None

    def over(self, fallback: "Objective") -> "Objective":
        """This objective, with the values of ``fallback`` where this one has none."""
        return Objective(
            fallback.slo_ttft_s if self.slo_ttft_s is None else self.slo_ttft_s,
            self.tenant or fallback.tenant,
            fallback.priority if self.priority is None else self.priority,
        )

    def remaining(self, seconds: float) -> "Objective":
        """The same objective with this time left, or :data:`LATE_S` if that is more."""
        return dataclasses.replace(self, slo_ttft_s=max(seconds, LATE_S))

    def to_params(self) -> dict[str, Any]:
        """The objective as plain JSON. Empty if it has no value."""
        params: dict[str, Any] = {}
        if self.slo_ttft_s is not None:
            params["slo_ttft_ms"] = self.slo_ttft_s * 1e3
        if self.tenant:
            params["tenant"] = self.tenant
        if self.priority is not None:
            params["priority"] = self.priority
        return params

    @classmethod
    def from_params(cls, params: Any, where: str = KEY) -> "Objective":
        """Reads the result of :meth:`to_params`, or what a client wrote. Unknown keys are ignored, because a newer
        version may have written them.

        Raises :class:`ObjectiveError`."""
        if not isinstance(params, Mapping):
            raise ObjectiveError(f'{where}: {params!r:.80} is no object; write {{"slo_ttft_ms": 200}}')
        slo = params.get("slo_ttft_ms")
        tenant = params.get("tenant")
        priority = params.get("priority")
        return cls(
            None if slo is None else milliseconds(slo, f"{where}.slo_ttft_ms"),
            "" if tenant is None else tenant_name(tenant, f"{where}.tenant"),
            None if priority is None else priority_number(priority, f"{where}.priority"),
        )

    @classmethod
    def carried_by(cls, params: Any) -> Optional["Objective"]:
        """The objective in a request's ``kv_transfer_params`` or ``custom_params``; ``None`` if there is none.

        Raises :class:`ObjectiveError`."""
        if not isinstance(params, Mapping) or params.get(KEY) is None:
            return None
        return cls.from_params(params[KEY])


def handed_on(params: Any) -> bool:
    """Whether another engine wrote the objective in ``kv_transfer_params`` or ``custom_params``."""
    carried = params.get(KEY) if isinstance(params, Mapping) else None
    return isinstance(carried, Mapping) and carried.get("handed_on") is True


def milliseconds(value: Any, where: str) -> float:
    """Converts milliseconds, as a number or its text, to seconds."""
    wanted = f"write milliseconds to the first token, more than 0 and at most {SLO_MAX_S * 1e3:.0f}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ObjectiveError(f"{where}: {value!r:.80} is no number; {wanted}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ObjectiveError(f"{where}: {value!r:.80} is no number; {wanted}") from None
    if not (math.isfinite(number) and 0 < number <= SLO_MAX_S * 1e3):
        raise ObjectiveError(f"{where}: {value!r:.80} is out of range; {wanted}")
    return number / 1e3


def tenant_name(value: Any, where: str) -> str:
    """Checks the name of a tenant and returns it."""
    if not isinstance(value, str) or len(value) > TENANT_MAX:
        raise ObjectiveError(
            f"{where}: {value!r:.80} is no name of a tenant; write a string of at most {TENANT_MAX} characters"
        )
    return value


def priority_number(value: Any, where: str) -> int:
    """Checks a priority and returns it."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _PRIORITY_MAX:
        raise ObjectiveError(
            f"{where}: {value!r:.80} is no priority; write an integer of 32 bits, larger for more important"
        )
    return value


def duration(value: Any, where: str) -> float:
    """Converts a duration as in Laxity's files, such as ``"200ms"``, to seconds."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ObjectiveError(
            f'{where}: {value!r:.80} is not a duration; write a number with ns, us, ms, s or min, as in "200ms"'
        )
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if not 0 < seconds <= SLO_MAX_S:
        raise ObjectiveError(
            f"{where}: {value!r:.80} is out of range; write more than 0 and at most {SLO_MAX_S:.0f}s"
        )
    return seconds


class Objectives:
    """Defaults by tenant and model."""

    def __init__(
        self,
        default: Objective = Objective(),
        models: Optional[Mapping[str, Objective]] = None,
        tenants: Optional[Mapping[str, Objective]] = None,
        tenants_models: Optional[Mapping[tuple[str, str], Objective]] = None,
    ) -> None:
        self._default = default
        self._models = dict(models or {})
        self._tenants = dict(tenants or {})
        self._tenants_models = dict(tenants_models or {})

    def find(self, *, model: Optional[str] = None, tenant: str = "") -> Objective:
        """The default objective for a model and a tenant."""
        found = Objective(tenant=tenant)
        for special in (
            self._tenants_models.get((tenant, model or "")),
            self._tenants.get(tenant),
            self._models.get(model or ""),
            self._default,
        ):
            if special is not None:
                found = found.over(special)
        return found

    @classmethod
    def from_text(cls, text: str, where: str = "objectives") -> "Objectives":
        """Reads TOML. Raises :class:`ObjectiveError`."""
        try:
            tree = _toml(text)
        except ValueError as broken:
            raise ObjectiveError(f"{where}: {broken}") from None
        _only(tree, ("default", "model", "tenant"), where)
        default = _entry(_table(tree, "default", where), f"{where}: [default]")
        models = {name: _entry(entry, f"{where}: [model.{name!r}]") for name, entry in _tables(tree, "model", where)}
        tenants = {}
        tenants_models = {}
        for tenant, entry in _tables(tree, "tenant", where):
            there = f"{where}: [tenant.{tenant!r}"
            tenants[tenant_name(tenant, where)] = _entry(entry, f"{there}]", "model")
            for model, special in _tables(entry, "model", f"{there}]"):
                tenants_models[tenant, model] = _entry(special, f"{there}.model.{model!r}]")
        return cls(default, models, tenants, tenants_models)

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "Objectives":
        """Reads a file. Raises :class:`ObjectiveError`."""
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as unreadable:
            raise ObjectiveError(f"{os.fspath(path)}: can't be read: {unreadable}") from None
        return cls.from_text(text, os.fspath(path))

    @classmethod
    def from_environment(cls) -> "Objectives":
        """Reads the file that ``LAXITY_OBJECTIVES`` names. Without it there are no defaults. Raises
        :class:`ObjectiveError`."""
        path = os.environ.get(VARIABLE)
        return cls.load(path) if path else cls()


def _toml(text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # before Python 3.11
        try:
            import tomli as tomllib  # type: ignore[no-redef, import-not-found, unused-ignore]
        except ImportError:
            raise ValueError("Python before 3.11 can't read TOML; install the package tomli") from None
    return tomllib.loads(text)


def _only(table: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise ObjectiveError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def _table(tree: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    table = tree.get(key, {})
    if not isinstance(table, Mapping):
        raise ObjectiveError(f"{where}: {key!r} is no table; write [{key}]")
    return table


def _tables(tree: Mapping[str, Any], key: str, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    outer = _table(tree, key, where)
    return [(name, _table(outer, name, f"{where}: {key}")) for name in outer]


def _entry(table: Mapping[str, Any], where: str, *beside: str) -> Objective:
    _only(table, (*_KEYS, *beside), where)
    slo = table.get("slo_ttft")
    priority = table.get("priority")
    return Objective(
        None if slo is None else duration(slo, f"{where}: slo_ttft"),
        "",
        None if priority is None else priority_number(priority, f"{where}: priority"),
    )
