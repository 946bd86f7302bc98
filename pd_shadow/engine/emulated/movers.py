"""Which mover a configuration means."""

from pd_shadow.engine.emulated.clock import EngineClock
from pd_shadow.engine.emulated.config import EmulatedEngine
from pd_shadow.engine.emulated.mover import Mover, TimedLink, nixl_name
from pd_shadow.engine.settings import Role


def mover_for(config: EmulatedEngine, clock: EngineClock) -> Mover:
    """Not started."""
    link = TimedLink(clock, config.link_bytes_per_second)
    if not config.moves_bytes:
        return link
    # Only here, so that engines on the timed link need neither NIXL nor numpy.
    from pd_shadow.engine.emulated.nixl_mover import NixlMover

    return NixlMover(
        link,
        clock,
        config.name,
        blocks=config.blocks,
        block_tokens=config.block_size,
        token_bytes=config.kv_bytes_per_token,
        divisor=config.kv_bytes_divisor,
        serves=config.role is not Role.DECODE,
    )


def mover_name(config: EmulatedEngine) -> str:
    """What it will be called."""
    return nixl_name(config.kv_bytes_divisor) if config.moves_bytes else TimedLink.name
