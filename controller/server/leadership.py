"""A controller that does not lead refuses the services of gateways and engines; operators may read it all the same."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from controller.core.rejection import RejectedError
from controller.server.errors import abort
from controller.server.plane import Plane
from pd_shadow.api.v1 import common_pb2 as pb
from pd_shadow.api.v1 import engine_pb2, placement_pb2

# Answered by the leader alone.
LED_SERVICES = tuple(
    descriptor.services_by_name[name].full_name
    for descriptor, name in (
        (placement_pb2.DESCRIPTOR, "PlacementService"),
        (engine_pb2.DESCRIPTOR, "EngineService"),
    )
)


# By whether requests and responses are streams.
_HANDLERS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class LeadershipInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """UNAVAILABLE with RetryInfo for every RPC of LED_SERVICES while another controller leads."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.strip("/").partition("/")[0]
        # None: no such method.
        if self._plane.leading() or service not in LED_SERVICES or handler is None:
            return handler
        return _HANDLERS[bool(handler.request_streaming), bool(handler.response_streaming)](_refuse)


async def _refuse(_: Any, context: Any) -> None:
    reason = pb.REJECTION_REASON_NOT_LEADER
    await abort(context, RejectedError(reason, "this controller does not lead; try again or try another"))
