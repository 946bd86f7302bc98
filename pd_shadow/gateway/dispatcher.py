"""The shadow dispatcher: follows calls, has their contexts rendered for shadow targets, runs shadow legs."""

from collections.abc import Sequence

from pd_shadow.api.v1 import placement_pb2
from pd_shadow.gateway.call_traces import CallTraces
from pd_shadow.gateway.cluster import ClusterView
from pd_shadow.gateway.config import GatewayConfig
from pd_shadow.gateway.contexts import Contexts, Conversation, SessionId
from pd_shadow.gateway.controller_client import ControllerClient
from pd_shadow.gateway.engine_client import EngineClient
from pd_shadow.gateway.metrics import Metrics
from pd_shadow.gateway.renderings import Renderings
from pd_shadow.gateway.shadow_legs import ShadowLegs

Targets = Sequence[placement_pb2.ShadowTarget]


class Dispatcher:
    """Everything about shadow work that the data path touches; nothing here makes a call wait."""

    def __init__(
        self,
        config: GatewayConfig,
        engines: EngineClient,
        controller: ControllerClient,
        cluster: ClusterView,
        metrics: Metrics,
        traces: CallTraces,
    ) -> None:
        self.contexts = Contexts(config.caps.sessions, config.caps.session_tokens)
        self._metrics = metrics
        self._renderings = Renderings(
            self.contexts,
            engines,
            controller,
            cluster,
            metrics,
            seconds=config.deadlines.render,
            concurrency=config.caps.concurrent_renderings,
        )
        self._legs = ShadowLegs(self.contexts, engines, controller, metrics, traces, config.shadow)

    def follow(self, session: SessionId, conversation: Conversation, targets: Targets, *, begins: bool = False) -> None:
        """A call began, said more, or ended: remember its context and have it rendered for the targets.

        A session that was dropped during a call comes back with its next call only.
        """
        if not begins and self.contexts.conversation(session) is None:
            return
        if not self.contexts.put_conversation(session, conversation):
            return
        self._metrics.sessions.set(len(self.contexts))
        for target in targets:
            self._renderings.request(session, target.model, target.renderer.url)

    def on_work(self, work: placement_pb2.WatchShadowWorkResponse) -> None:
        """Take one directive of the controller."""
        match work.WhichOneof("work"):
            case "leg_start":
                self._legs.start(work.leg_start)
            case "leg_cancel":
                self._legs.cancel(work.leg_cancel.leg_id)
            case "session_dropped":
                dropped = work.session_dropped.session
                session = (dropped.tenant, dropped.session_id)
                self._renderings.cancel(session)
                self._legs.cancel_session(session)
                self.contexts.drop(session)
                self._metrics.sessions.set(len(self.contexts))
            case _:
                # A newer controller may know more kinds of work.
                pass

    def on_work_lost(self) -> None:
        """The controller is away: its legs are taken as lost."""
        self._legs.cancel_all()

    async def close(self) -> None:
        """Stop all shadow work."""
        await self._renderings.close()
        await self._legs.close()
