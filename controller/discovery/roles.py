"""Roles as configuration and labels spell them."""

from pd_shadow.api.v1 import common_pb2 as pb

ROLES = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE, "colocated": pb.ROLE_COLOCATED}
