"""What the controller must be allowed to do in its cluster: the rules of its Role, as data.

The Helm chart's Role says the same; discovery needs its rules in every namespace it watches, the election in the
Lease's.
"""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """Verbs on one resource; the core API group is the empty string."""

    api_group: str
    resource: str
    verbs: tuple[str, ...]


DISCOVERY_RULES = (Rule("", "pods", ("list", "watch")),)
ELECTION_RULES = (Rule("coordination.k8s.io", "leases", ("create", "get", "update")),)
RULES = (*DISCOVERY_RULES, *ELECTION_RULES)
