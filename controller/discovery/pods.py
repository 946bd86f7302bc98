"""Which pods there are, from lists and watch events in any order, and which of them are instances; no I/O.

Three rules put the events in order:

- A resourceVersion is the place of a change in the history of its namespace. Of one name, the change with the higher
  one counts, whatever arrives last: at any time one pod at most has the name, so a later pod's first event is an
  earlier one's end. Versions that are not numbers count in the order of arrival.
- A list is the whole truth as of its version.
- An address belongs to the youngest pod that has it: an older one whose end was not told yet is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from controller.core.registry import Declared
from controller.core.rejection import RejectedError, invalid_field
from controller.discovery.roles import ROLES
from pd_shadow.common.address import join_address

ROLE = "pdshadow.dev/role"
MODEL = "pdshadow.dev/model"
PORT = "pdshadow.dev/port"
HARDWARE = "pdshadow.dev/hardware"
DEFAULT_PORT = 8000

_MAX_MODEL = 256
_MAX_HARDWARE = 128
# Deleted names whose version is remembered, against events that come late.
_DELETED_KEPT = 1024

PodKey = tuple[str, str]


class Standing(Enum):
    """What a pod that was taken may be used for."""

    READY = "ready"
    UNREADY = "unready"
    TERMINATING = "terminating"


@dataclass(frozen=True)
class Pod:
    """What discovery reads of a pod."""

    namespace: str
    name: str
    uid: str
    version: str
    created: str
    address: str = ""
    host_network: bool = False
    ready: bool = False
    terminating: bool = False
    # Its containers have ended for good.
    ended: bool = False
    # Of all its containers together.
    restarts: int = 0
    role: str = ""
    model: str = ""
    port: str = ""
    hardware: str = ""

    @property
    def key(self) -> PodKey:
        return self.namespace, self.name

    @property
    def standing(self) -> Standing:
        if self.terminating:
            return Standing.TERMINATING
        return Standing.READY if self.ready else Standing.UNREADY

    def declared(self, name: str) -> Declared:
        """As the instance `name`; raises RejectedError that names the pod, its mistake and the fix."""
        where = f"pod {self.namespace}/{self.name}"
        if self.role not in ROLES:
            raise invalid_field(where, f"label {ROLE} is {self.role!r}; make it prefill, decode or colocated")
        if not self.model:
            raise invalid_field(where, f"it has no model; set the label or, for any name, the annotation {MODEL}")
        if len(self.model) > _MAX_MODEL or not self.model.isprintable():
            raise invalid_field(where, f"annotation {MODEL} must be at most {_MAX_MODEL} printable characters")
        port = int(self.port) if self.port.isascii() and self.port.isdigit() and len(self.port) <= 5 else 0
        if not 1 <= port <= 65535:
            raise invalid_field(where, f"annotation {PORT} is {self.port[:32]!r}; make it a port, 1 to 65535")
        if len(self.hardware) > _MAX_HARDWARE or not self.hardware.isprintable():
            raise invalid_field(where, f"annotation {HARDWARE} must be at most {_MAX_HARDWARE} printable characters")
        return Declared(name, self.model, ROLES[self.role], f"http://{join_address(self.address, port)}", self.hardware)


class Target(NamedTuple):
    """An instance that discovery wants watched."""

    declared: Declared
    namespace: str
    uid: str
    restarts: int
    standing: Standing


class View(NamedTuple):
    """All instances by name, and what is wrong with pods that are none."""

    targets: dict[str, Target]
    mistakes: dict[str, RejectedError]


def read(pod: Any) -> Pod:
    """A pod of the API's JSON; raises ValueError or TypeError when it cannot be one."""
    found = _mapping(pod, "the object")
    meta, spec, status = (_mapping(found.get(part), part) for part in ("metadata", "spec", "status"))
    labels, annotations = _mapping(meta.get("labels"), "labels"), _mapping(meta.get("annotations"), "annotations")
    namespace, name, uid = (meta.get(key) for key in ("namespace", "name", "uid"))
    if not (isinstance(namespace, str) and isinstance(name, str) and isinstance(uid, str) and name and uid):
        raise ValueError("a pod without namespace, name or uid")
    conditions = [c for c in status.get("conditions") or () if isinstance(c, dict)]
    containers = [c for c in status.get("containerStatuses") or () if isinstance(c, dict)]
    return Pod(
        namespace,
        name,
        uid,
        version=str(meta.get("resourceVersion", "")),
        created=str(meta.get("creationTimestamp", "")),
        address=str(status.get("podIP") or ""),
        host_network=spec.get("hostNetwork") is True,
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        terminating=meta.get("deletionTimestamp") is not None,
        ended=status.get("phase") in ("Succeeded", "Failed"),
        restarts=sum(int(c.get("restartCount") or 0) for c in containers),
        role=str(labels.get(ROLE, "")),
        model=str(annotations.get(MODEL) or labels.get(MODEL, "")),
        port=str(annotations.get(PORT, DEFAULT_PORT)),
        hardware=str(annotations.get(HARDWARE, "")),
    )


class Pods:
    """The pods of the watched namespaces.

    With `qualified`, instances are named namespace.pod: a namespace has no dot in it, so that no two are the same.
    """

    def __init__(self, *, qualified: bool = False, reserved: Collection[str] = ()) -> None:
        self._qualified = qualified
        # Names of instances that are no pods.
        self._reserved = frozenset(reserved)
        self._pods: dict[PodKey, Pod] = {}
        self._deleted: OrderedDict[PodKey, str] = OrderedDict()
        # The versions of the last lists.
        self._listed: dict[str, str] = {}
        # Uids of pods that were ready once: what is not ready yet is nobody's instance.
        self._taken: set[str] = set()

    def replace(self, namespace: str, pods: Iterable[Pod], version: str) -> None:
        """A list of a namespace as of `version`."""
        for key in [key for key in self._pods if key[0] == namespace]:
            del self._pods[key]
        for key in [key for key in self._deleted if key[0] == namespace]:
            del self._deleted[key]
        self._pods |= {pod.key: pod for pod in pods if pod.namespace == namespace}
        self._listed[namespace] = version

    def put(self, pod: Pod) -> None:
        """A pod was added or changed."""
        if not self._late(pod):
            self._deleted.pop(pod.key, None)
            self._pods[pod.key] = pod

    def remove(self, pod: Pod) -> None:
        """A pod was deleted, or no longer matches the selector."""
        known = self._pods.get(pod.key)
        another = known is not None and known.uid != pod.uid
        if self._late(pod) or (another and not _number(pod.version)):
            return
        self._pods.pop(pod.key, None)
        self._deleted[pod.key] = pod.version
        self._deleted.move_to_end(pod.key)
        while len(self._deleted) > _DELETED_KEPT:
            self._deleted.popitem(last=False)

    def view(self) -> View:
        """The instances among them, as of now."""
        self._taken &= {pod.uid for pod in self._pods.values()}
        targets: dict[str, Target] = {}
        mistakes: dict[str, RejectedError] = {}
        for pod in self._holders():
            name = f"{pod.namespace}.{pod.name}" if self._qualified else pod.name
            try:
                if name in self._reserved:
                    raise invalid_field(
                        f"pod {pod.namespace}/{pod.name}", "discovery.static has an instance of this name; rename one"
                    )
                declared = pod.declared(name)
            except RejectedError as error:
                mistakes[name] = error
                continue
            if pod.address and pod.standing is Standing.READY:
                self._taken.add(pod.uid)
            if pod.address and pod.uid in self._taken:
                targets[name] = Target(declared, pod.namespace, pod.uid, pod.restarts, pod.standing)
        return View(targets, mistakes)

    def _late(self, pod: Pod) -> bool:
        """Whether something newer is known of this name."""
        known = self._pods.get(pod.key)
        newest = (
            known.version if known is not None else "",
            self._deleted.get(pod.key, ""),
            self._listed.get(pod.namespace, ""),
        )
        return any(_before(pod.version, version) for version in newest)

    def _holders(self) -> list[Pod]:
        """Pods that have not ended and whose address is theirs."""
        holders: dict[tuple[str, str], Pod] = {}
        without: list[Pod] = []
        for pod in self._pods.values():
            if pod.ended:
                continue
            if not pod.address:
                without.append(pod)
                continue
            # On the host's network, pods share an address and differ by port.
            place = (pod.address, pod.port if pod.host_network else "")
            holder = holders.get(place)
            if holder is None or _youth(holder) < _youth(pod):
                holders[place] = pod
        return [*holders.values(), *without]


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TypeError(f"{what} of a pod must be an object, not {type(value).__name__}")
    return value


def _youth(pod: Pod) -> tuple[str, int]:
    """Sorts pods by creation, in whole seconds; of one second, the pod that changed last is the younger."""
    return pod.created, int(pod.version) if _number(pod.version) else 0


def _number(version: str) -> bool:
    return version.isascii() and version.isdigit()


def _before(one: str, other: str) -> bool:
    """Whether a resourceVersion is older; Kubernetes 1.35 made comparing them as numbers part of the API."""
    return _number(one) and _number(other) and int(one) < int(other)
