"""What the API server makes of a pod by the admission policy of the chart: evaluates its CEL, and applies the result.

celpy evaluates CEL. It does not know the type `Object` of Kubernetes, so that is here. The result is merged into the
pod as server-side apply does (KEP-3962): objects field by field, and lists by their keys, which the API schema names.
Other lists are replaced. The API server also checks types before it evaluates anything. In place of that, `checked`
compares the name of each constructed type with the field that holds it, and schemas check the pod.
"""

import copy
import json
import pathlib

import celpy
import kubernetes_validate
from celpy import celtypes, json_to_cel

SCHEMAS = pathlib.Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"


class TypeName(celtypes.MessageType):
    """`Object`, or a type of a field, such as `Object.spec.containers`. `{…}` behind it calls it."""

    def __init__(self, path: str):
        super().__init__()
        self.path = path

    def get(self, key, default=None):
        return TypeName(f"{self.path}.{key}")

    def __getitem__(self, key):
        return self.get(key)

    def __contains__(self, key):
        return True

    def __call__(self, fields):
        made = celtypes.MessageType(fields or {})
        made.path = self.path
        return made


def checked(value, path: str = "Object"):
    """Returns an evaluated value as JSON. Fails if an object has the type of another field."""
    if isinstance(value, celtypes.MapType):
        assert getattr(value, "path", None) == path, f"{path} is {getattr(value, 'path', 'a map')}"
        return {str(key): checked(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, celtypes.ListType):
        return [checked(each, path) for each in value]
    if isinstance(value, celtypes.BoolType):
        return bool(value)
    assert isinstance(value, celtypes.StringType), f"{path}: {value!r}"
    return str(value)


class Merge:
    """Server-side apply of the API of a Kubernetes release."""

    def __init__(self, version: str):
        definitions = SCHEMAS / f"v{version}.0-local/_definitions.json"
        self.types = json.loads(definitions.read_text())["$defs"]

    def schema(self, schema: dict) -> dict:
        return self.types[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema

    def applied(self, old, new, schema: dict):
        schema = self.schema(schema)
        if isinstance(new, dict) and isinstance(old, dict):
            fields = {key: self.applied(old.get(key), value, schema["properties"][key]) for key, value in new.items()}
            return {**old, **fields}
        if isinstance(new, list) and schema.get("x-kubernetes-list-type") == "map":
            names = schema["x-kubernetes-list-map-keys"]
            rows = {tuple(row.get(name) for name in names): row for row in old or []}
            assert len(rows) == len(old or []), "two items of a list have the same key"
            for row in new:
                key = tuple(row.get(name) for name in names)
                rows[key] = self.applied(rows.get(key), row, schema["items"])
            # An empty list is no field.
            return list(rows.values()) or old
        return new

    def pod(self, pod: dict, configuration: dict) -> dict:
        merged = self.applied(pod, configuration, {"$ref": "/io.k8s.api.core.v1.Pod"})
        return without_none(merged)


def without_none(value):
    if isinstance(value, dict):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def admitted(policy: dict, pod: dict, version: str = "1.36") -> dict:
    """Returns the pod that the API server stores if somebody creates `pod` under the policy."""
    spec = policy["spec"]
    [rule] = spec["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["resources"], rule["operations"]) == ([""], ["pods"], ["CREATE"])
    wanted = spec["matchConstraints"]["objectSelector"]["matchLabels"]
    if not wanted.items() <= pod["metadata"].get("labels", {}).items():
        return pod
    environment = celpy.Environment()

    def value(expression: str):
        known = {"Object": TypeName("Object"), "object": json_to_cel(pod), "variables": celtypes.MapType(variables)}
        return environment.program(environment.compile(expression)).evaluate(known)

    variables = {}
    for each in spec["variables"]:
        variables[celtypes.StringType(each["name"])] = value(each["expression"])
    seen = copy.deepcopy(pod)
    for mutation in spec["mutations"]:
        assert mutation["patchType"] == "ApplyConfiguration"
        made = value(mutation["applyConfiguration"]["expression"])
        seen = Merge(version).pod(seen, checked(made))
    return seen


PRELOAD = {"name": "LD_PRELOAD", "value": "/opt/laxity/lib/liblaxity.so"}
PROFILE = {"name": "LAXITY_PROFILE", "value": "default"}
MOUNTS = [
    {"name": "laxity-socket", "mountPath": "/run/laxity", "readOnly": True},
    {"name": "laxity-libraries", "mountPath": "/opt/laxity/lib", "readOnly": True},
]
VOLUMES = [
    {"name": "laxity-socket", "hostPath": {"path": "/run/laxity", "type": "DirectoryOrCreate"}},
    {"name": "laxity-libraries", "hostPath": {"path": "/var/lib/laxity/lib", "type": "DirectoryOrCreate"}},
]


def pod_of(labels: dict, **spec) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "job", "labels": labels}, "spec": spec}


def cases():
    """Returns what somebody creates, and the whole pod that has to come of it."""
    label = {"laxity.io/schedule": "enabled", "app": "job"}
    plain = {"name": "a", "image": "a"}
    for other in ({"app": "job"}, {"laxity.io/schedule": "disabled"}):
        yield pod_of(other, containers=[plain]), pod_of(other, containers=[plain])
    given = {**plain, "volumeMounts": MOUNTS, "env": [PRELOAD, PROFILE]}
    # A container's own variables stay, wherever their values come from. Other containers get the policy's.
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    secret = {"name": "LAXITY_PROFILE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "profile"}}}
    own = {"name": "LD_PRELOAD", "value": "/lib/mine.so"}
    scratch, config = {"name": "scratch", "mountPath": "/scratch"}, {"name": "c", "mountPath": "/c", "subPath": "x"}
    volumes = [{"name": "scratch", "emptyDir": {}}, {"name": "c", "configMap": {"name": "c"}}]
    init = {"name": "init", "image": "i", "env": [own], "volumeMounts": [scratch]}
    before = [
        {"name": "b", "image": "b", "env": [node, own], "volumeMounts": [scratch, config]},
        {"name": "c", "image": "c", "env": [secret]},
        {"name": "d", "image": "d", "env": []},
        {"name": "e", "image": "e", "env": [own, secret], "ports": [{"containerPort": 80}]},
    ]
    after = [
        {**before[0], "env": [node, own, PROFILE], "volumeMounts": [scratch, config, *MOUNTS]},
        {**before[1], "env": [secret, PRELOAD], "volumeMounts": MOUNTS},
        {**before[2], "env": [PRELOAD, PROFILE], "volumeMounts": MOUNTS},
        {**before[3], "volumeMounts": MOUNTS},
    ]
    yield pod_of(label, containers=[plain]), pod_of(label, containers=[given], volumes=VOLUMES)
    yield (
        pod_of(label, initContainers=[init], containers=[plain, *before], volumes=volumes, hostNetwork=True),
        pod_of(label, initContainers=[init], containers=[given, *after], volumes=volumes + VOLUMES, hostNetwork=True),
    )


def check_injection(items: list[dict], job: dict, by_hand: dict, validate) -> int:
    """Compares pods before and after the policy, and the two examples. Returns the number of policies."""
    policies = [item for item in items if item["kind"] == "MutatingAdmissionPolicy"]
    for policy in policies:
        for before, expected in cases():
            validate(before)
            seen = admitted(policy, before)
            assert seen == expected, f"{json.dumps(seen)} is not {json.dumps(expected)}"
            validate(seen)
            # The API server evaluates it again if another policy changes the pod (reinvocationPolicy).
            assert admitted(policy, seen) == seen
        seen = admitted(policy, job)
        del seen["metadata"]["labels"]
        assert seen == by_hand, f"job-by-hand.yaml is not {json.dumps(seen)}"
    return len(policies)
