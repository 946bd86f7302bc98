"""The emulated instance in virtual time: prefix cache, handoff, shadow legs, and that nothing is lost on any path."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_shadow.engine.directives import DropSession, PauseShadow, ResumeShadow, SetLimits
from pd_shadow.engine.settings import PluginSettings, Role
from pd_shadow.policy.prefill_window import WINDOW_SECONDS
from tests.pd_shadow.engine.emulated.rig import BLOCK, EXPORT, Bench, prompt


def cold(tokens, max_tokens=8):  # type: ignore[no-untyped-def]
    """What an instance with an empty cache says."""
    bench = Bench()
    client, _ = bench.send(tokens, max_tokens)
    bench.run()
    return client.tokens


def test_tokens_are_the_same_whatever_was_cached_handed_over_or_shadowed() -> None:
    tokens = prompt(203)
    said = cold(tokens)
    assert len(said) == 8
    bench = Bench()
    for expected in (0, 192):
        client, request = bench.send(tokens, 8)
        bench.run()
        assert (client.tokens, request.cached) == (said, expected)
    assert Bench(Role.DECODE).handed_over(Bench(Role.PREFILL), tokens, 8).tokens == said
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    shadow(p, d, tokens[:128])
    assert d.handed_over(p, tokens, 8).tokens == said


def shadow(p: Bench, d: Bench, tokens) -> None:  # type: ignore[no-untyped-def]
    """The three legs of a chunk."""
    prefill, _ = p.send(tokens, leg="prefill")
    p.run()
    assert prefill.result == {"covered_tokens": len(tokens), "computed_tokens": len(tokens), "end": "done"}
    export, _ = p.send(tokens, leg="export", params=EXPORT)
    p.step()
    fetch, _ = d.send(tokens, leg="fetch", params=export.params)
    d.step()
    d.fetch(p)
    assert fetch.result == {"covered_tokens": len(tokens), "computed_tokens": 0, "end": "done"}


def test_another_model_says_something_else() -> None:
    other = Bench(served_model_name="another")
    client, _ = other.send(prompt(50), 8)
    other.run()
    assert client.tokens != cold(prompt(50))


def test_a_salt_keeps_contexts_apart() -> None:
    bench = Bench()
    for salt in ("one", "two"):
        _, request = bench.send(prompt(100), salt=salt)
        bench.run()
        assert request.cached == 0


def test_kv_that_was_mixed_up_shows_in_the_tokens() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    tokens = prompt(203)
    first, _ = p.send(tokens, params=EXPORT)
    p.run()
    client, _ = d.send(tokens, 8, params=first.params)
    d.step()
    (load,) = d.instance.take_loads()
    contents = p.instance.read(load.source.request_id, load.remote_blocks, p.now)
    assert contents is not None
    d.instance.loaded(load, contents[1:] + contents[:1], d.now)
    d.run()
    assert client.tokens != cold(tokens)


def test_p_holds_blocks_until_they_are_read_and_d_computes_one_token() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    tokens = prompt(203)
    first, _ = p.send(tokens, params=EXPORT)
    p.run()
    assert p.used == 13
    _, request = d.send(tokens, 8, params=first.params)
    assert not d.step()
    assert d.fetch(p)[0].size == 13 * BLOCK * d.config.kv_bytes_per_token
    assert p.used == 0
    d.step()
    assert (request.cached, d.instance.counts["prompt_tokens"]) == (202, 1)


def test_p_gives_up_blocks_that_nobody_reads_when_their_lease_ends() -> None:
    p = Bench(Role.PREFILL, kv_lease_seconds=5)
    p.send(prompt(203), params=EXPORT)
    p.run()
    look = p.instance.next_look(p.now)
    assert look is not None
    assert p.used
    p.now = look
    p.step()
    assert (p.used, p.instance.exports.expired) == (0, 1)


def test_d_reads_only_what_it_lacks() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    shadow(p, d, prompt(203)[:128])
    d.handed_over(p, prompt(203), 1)
    assert d.instance.counts["transferred_bytes"] == 13 * BLOCK * d.config.kv_bytes_per_token


def test_a_d_whose_p_is_gone_computes_the_prompt_and_says_so() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    first, _ = p.send(prompt(203), params=EXPORT)
    p.run()
    client, request = d.send(prompt(203), 8, params=first.params)
    d.step()
    d.fetch(p, lost=True)
    d.run()
    assert client.tokens == cold(prompt(203))
    assert (request.cached, d.instance.counts["failed_transfers"], d.used) == (0, 1, 0)


def test_what_is_aborted_gives_its_blocks_back_wherever_it_is() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    first, _ = p.send(prompt(203), params=EXPORT)
    p.run()
    loading_client, loading = d.send(prompt(203), 8, params=first.params)
    d.step()
    d.instance.abort(loading, d.now)
    # Something may still be written there.
    assert d.used
    d.fetch(p)
    assert (d.used, p.used) == (0, 0)
    running_client, running = d.send(prompt(100, 1), 8)
    d.step()
    d.instance.plan(d.now)
    d.instance.abort(running, d.now)
    d.instance.finish(d.now)
    again, _ = p.send(prompt(203), params=EXPORT)
    p.run()
    _, waiting = d.send(prompt(203), 8, params=again.params)
    d.instance.abort(waiting, d.now)
    d.fetch(p)
    assert (d.used, p.used, d.instance.has_normal_work) == (0, 0, False)
    assert (loading_client.end, running_client.end) == (None, None)


def test_admission_waits_for_room_and_goes_on() -> None:
    bench = Bench(kv_tokens=512)
    clients = [bench.send(prompt(300, seed), 8)[0] for seed in range(4)]
    bench.step()
    assert bench.instance.snapshot(bench.now).waiting == 3
    bench.run()
    assert all(len(client.tokens) == 8 for client in clients)


def test_shadow_work_waits_for_normal_work_and_keeps_its_window() -> None:
    p = Bench(Role.PREFILL, kv_tokens=65_536)
    leg, _ = p.send(prompt(8192), leg="prefill")
    call, _ = p.send(prompt(4000, 1), routed=True)
    while call.end is None:
        step = p.instance.plan(p.now)
        assert step is not None
        assert not step.slices
        p.now += step.seconds
        p.instance.finish(p.now)
    while leg.end is None:
        step = p.instance.plan(p.now)
        assert step is not None
        assert step.slices
        assert step.seconds <= WINDOW_SECONDS
        p.now += step.seconds
        p.instance.finish(p.now)
    assert leg.result["covered_tokens"] == 8192


def test_the_shadow_class_is_capped_and_its_leg_ends_with_what_fits() -> None:
    p = Bench(Role.PREFILL, kv_tokens=4096)
    leg, _ = p.send(prompt(2048), leg="prefill")
    p.run()
    assert (leg.result["end"], leg.result["covered_tokens"]) == ("no_room", 1024)
    assert p.instance.snapshot(p.now).shadow_blocks == 64


def test_likelier_legs_go_first() -> None:
    p = Bench(Role.PREFILL, kv_tokens=65_536)
    late, _ = p.send(prompt(2048, 1), leg="prefill", probability=0.1)
    soon, _ = p.send(prompt(2048, 2), leg="prefill", probability=0.9)
    while soon.end is None:
        assert p.step()
    assert late.end is None


def test_legs_that_cannot_run_say_why() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    not_cached, _ = p.send(prompt(64), leg="export", params=EXPORT)
    not_asked, _ = p.send(prompt(64), leg="export")
    p.step()
    nowhere, _ = d.send(prompt(64), leg="fetch", params={"do_remote_prefill": True})
    on_decode, _ = d.send(prompt(64), leg="prefill")
    d.step()
    ends = [client.result["end"] for client in (not_cached, not_asked, nowhere, on_decode)]
    assert ends == ["not_cached", "not_transferable", "not_transferable", "paused"]


def test_a_failed_fetch_leaves_nothing_behind() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    p.send(prompt(64), leg="prefill")
    p.run()
    export, _ = p.send(prompt(64), leg="export", params=EXPORT)
    p.step()
    fetch, _ = d.send(prompt(64), leg="fetch", params=export.params)
    d.step()
    d.fetch(p, lost=True)
    assert fetch.result == {"covered_tokens": 0, "computed_tokens": 0, "end": "transfer_failed"}
    assert (d.used, d.instance.snapshot(0.0).shadow_blocks) == (0, 0)


def test_a_fetch_waits_while_a_normal_transfer_is_on_the_link() -> None:
    p, d = Bench(Role.PREFILL), Bench(Role.DECODE)
    p.send(prompt(64), leg="prefill")
    p.run()
    export, _ = p.send(prompt(64), leg="export", params=EXPORT)
    call, _ = p.send(prompt(100, 1), params=EXPORT)
    p.run()
    d.send(prompt(100, 1), 4, params=call.params)
    d.send(prompt(64), leg="fetch", params=export.params)
    d.step()
    (normal,) = d.instance.take_loads()
    assert normal.request is not None
    d.step()
    assert d.instance.take_loads() == []
    d.instance.loaded(normal, None, d.now)
    d.step()
    (fetch,) = d.instance.take_loads()
    assert fetch.job is not None


def test_a_stock_engine_takes_legs_for_requests_behind_all_others() -> None:
    stock = Bench(Role.PREFILL, plugin=None)
    leg, _ = stock.send(prompt(64), leg="prefill")
    stock.run()
    assert len(leg.tokens) == 1
    assert leg.end is not None
    assert leg.end.kv_transfer_params is None


def test_directives_are_obeyed() -> None:
    p = Bench(Role.PREFILL)
    obey = p.instance.obey
    obey(PauseShadow())
    paused, _ = p.send(prompt(64), leg="prefill")
    p.step()
    assert paused.result["end"] == "paused"
    obey(ResumeShadow())
    dropped, _ = p.send(prompt(64), leg="prefill")
    obey(DropSession("t/s"))
    assert dropped.result["end"] == "paused"
    obey(SetLimits(cap_share=0.125))
    assert p.instance.snapshot(p.now).shadow_cap_blocks == 32


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_whatever_happens_blocks_are_given_back_and_answers_are_right(data: st.DataObject) -> None:
    plugin = PluginSettings(cold_seconds=0.0)
    p = Bench(Role.PREFILL, kv_tokens=1024, plugin=plugin, kv_lease_seconds=1.0)
    d = Bench(Role.DECODE, port=2, kv_tokens=1024, plugin=plugin)
    exports, calls, live = [], [], []
    for _ in range(data.draw(st.integers(1, 40))):
        tokens = prompt(200, data.draw(st.integers(0, 3)))[: data.draw(st.integers(17, 200))]
        match data.draw(st.sampled_from(["call", "leg", "export", "decode", "fetch", "step", "load", "abort"])):
            case "call":
                client, request = p.send(tokens, params=EXPORT)
                exports.append((client, tokens, "decode"))
                live.append((p, request, client))
            case "leg":
                client, request = p.send(tokens, leg="prefill")
                live.append((p, request, client))
            case "export":
                client, request = p.send(tokens, leg="export", params=EXPORT)
                exports.append((client, tokens, "fetch"))
                live.append((p, request, client))
            case "decode" | "fetch" as kind:
                ready = [one for one in exports if one[0].end is not None and one[2] == kind]
                if ready:
                    one = data.draw(st.sampled_from(ready))
                    exports.remove(one)
                    leg = "fetch" if kind == "fetch" else ""
                    client, request = d.send(one[1], 3, params=one[0].params, leg=leg)
                    live.append((d, request, client))
                    if not leg:
                        calls.append((client, one[1]))
            case "step":
                bench = data.draw(st.sampled_from([p, d]))
                if not bench.step():
                    bench.now += 0.3
            case "load":
                d.fetch(p, lost=data.draw(st.booleans()))
            case "abort":
                going = [one for one in live if one[2].end is None]
                if going:
                    bench, request, _ = one = data.draw(st.sampled_from(going))
                    bench.instance.abort(request, bench.now)
                    live.remove(one)
    for _ in range(100):
        p.run()
        d.run()
        d.fetch(p)
        p.now += 0.1
        d.now += 0.1
    assert (p.used, d.used, len(p.instance.jobs), len(d.instance.jobs)) == (0, 0, 0, 0)
    assert all(client.end is not None for _, _, client in live)
    for client, tokens in calls:
        if client.end is not None:
            assert client.tokens == cold(tokens, 3)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.COLOCATED])
def test_an_idle_instance_says_what_room_it_will_have(role: Role) -> None:
    bench = Bench(role)
    bench.send(prompt(200), 4)
    bench.run()
    assert bench.instance.snapshot(bench.now).shadow_room_tokens == 1024
