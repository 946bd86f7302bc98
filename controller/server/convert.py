"""Core objects to messages."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from controller.core.cluster import ShadowTarget
from controller.core.effects import (
    CancelLeg,
    DropResident,
    DropSession,
    EngineEffect,
    GatewayEffect,
    LimitEngine,
    PauseEngine,
    StartLeg,
)
from controller.core.instance import Instance, InstanceRef
from controller.core.placement import Placed
from controller.core.session import SessionKey
from controller.core.shadow_policy import ShadowPolicy
from pd_shadow.api.v1 import admin_pb2 as admin
from pd_shadow.api.v1 import common_pb2 as common
from pd_shadow.api.v1 import engine_pb2 as engine
from pd_shadow.api.v1 import placement_pb2 as pb
from pd_shadow.common.reasons import label


def ref(value: InstanceRef | None) -> common.InstanceRef | None:
    return common.InstanceRef(name=value.name, incarnation=value.incarnation) if value else None


def endpoint(instance: Instance) -> common.InstanceEndpoint:
    return common.InstanceEndpoint(ref=ref(instance.ref), url=instance.url)


def session_key(key: SessionKey) -> common.SessionKey:
    return common.SessionKey(tenant=key.tenant, session_id=key.session_id)


def placement(placed: Placed | None) -> pb.Placement | None:
    if placed is None:
        return None
    return pb.Placement(instance=endpoint(placed.instance), reason=placed.reason, role=placed.instance.role)


def shadow_policy(policy: ShadowPolicy) -> admin.ShadowPolicy:
    return admin.ShadowPolicy(
        approach=policy.approach,
        gate_probability=policy.gate_probability,
        top_k=policy.top_k or 0,
        enabled=policy.enabled,
        engine_controller=policy.traits.controller,
        host_tier=policy.traits.host_tier,
        stale_seconds=policy.traits.stale_seconds,
    )


def shadow_target(target: ShadowTarget) -> pb.ShadowTarget:
    return pb.ShadowTarget(
        model=target.model,
        switch_probability=target.probability,
        renderer=endpoint(target.renderer),
        block_size=target.renderer.facts.block_size,
        max_context_tokens=target.renderer.facts.max_context_tokens,
    )


def cluster_instance(instance: Instance) -> pb.ClusterInstance:
    return pb.ClusterInstance(
        endpoint=endpoint(instance),
        role=instance.role,
        model=instance.model,
        state=instance.shown_state,
        block_size=instance.facts.block_size,
        max_context_tokens=instance.facts.max_context_tokens,
    )


def work(effect: GatewayEffect) -> pb.WatchShadowWorkResponse:
    match effect:
        case StartLeg():
            return pb.WatchShadowWorkResponse(
                leg_start=pb.LegStart(
                    leg_id=effect.leg_id,
                    session=session_key(effect.session),
                    model=effect.model,
                    kind=effect.kind,
                    instance=endpoint(effect.instance),
                    revision=effect.revision,
                    upto_tokens=effect.upto_tokens,
                    deadline_seconds=effect.deadline_seconds,
                    normal_priority=effect.normal_priority,
                    switch_probability=effect.switch_probability,
                )
            )
        case CancelLeg():
            return pb.WatchShadowWorkResponse(leg_cancel=pb.LegCancel(leg_id=effect.leg_id, reason=effect.reason))
        case DropSession():
            return pb.WatchShadowWorkResponse(
                session_dropped=pb.SessionDropped(session=session_key(effect.session), reason=effect.reason)
            )


def directive(effect: EngineEffect) -> engine.AttachResponse:
    match effect:
        case PauseEngine(paused=True):
            return engine.AttachResponse(pause_shadow=engine.PauseShadow())
        case PauseEngine():
            return engine.AttachResponse(resume_shadow=engine.ResumeShadow())
        case LimitEngine():
            return engine.AttachResponse(set_limits=engine.SetLimits(**effect.limits.given()))
        case DropResident():
            return engine.AttachResponse(drop_session=engine.DropSession(session=session_key(effect.session)))


def plugin(instance: Instance) -> admin.Plugin | None:
    if instance.request_level:
        return None
    return admin.Plugin(
        version=instance.facts.plugin_version,
        vllm_version=instance.facts.vllm_version,
        attached=bool(instance.stream),
        load=instance.load.plugin,
    )


def timestamp(seconds: float) -> Timestamp:
    whole = int(seconds // 1)
    return Timestamp(seconds=whole, nanos=int((seconds - whole) * 1e9))


def event_name(kind: int) -> str:
    return label(admin.EventKind.DESCRIPTOR, kind)
