"""`pd-shadow admin` against a real controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from controller.core.cluster import Cluster
from controller.core.session import SessionKey
from pd_shadow.cli.main import main
from tests.pd_shadow.cli.admin.conftest import Running

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def session(controller: Running) -> None:
    """One session with a call on a and a shadow job on b; its name looks like markup."""
    key = SessionKey("", "[red]s1")
    controller.turn(lambda cluster, now: cluster.begin_call(now, "gw", key, "a", prompt_tokens=1000, task="math"))


def answer(result: Result) -> dict[str, object]:
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    ("command", "shows"),
    [
        ("models list", ["MODEL", "a", "b"]),
        ("models get a", ["a"]),
        ("instances list --role decode", ["a-d0", "b-d0", "ready"]),
        ("instances get a-p0", ["a-p0", "1,000"]),
        ("sessions list --model a", ["[red]s1", "math"]),
        ("sessions get [red]s1", ["[red]s1"]),
        ("jobs list --reason rendering", ["[red]s1", "rendering"]),
        ("jobs get [red]s1 b", ["rendering"]),
        ("links list --model a", ["a-d0", "open"]),
        ("links get b-d0", ["b-d0"]),
        ("events --kind instance_state --subject a-p0", ["instance_state", "a-p0", "ready"]),
        ("ledger", ["in_flight.pending_prefill_tokens", "1,000"]),
        ("stats", ["placements a decode first_call", "1"]),
        ("shadow policy", ["approach", "harvest-slo"]),
        ("top --once", ["a-p0", "LINK TO", "[red]s1", "1 in flight"]),
    ],
)
def test_a_command_shows_a_table_and_the_same_as_json(run: Run, command: str, shows: list[str]) -> None:
    result = run(*command.split())
    assert result.exit_code == 0, result.output
    for text in shows:
        assert text in result.stdout
    if not command.startswith("top"):
        assert answer(run(*command.split(), "--json"))


def test_lists_come_whole_over_pages_or_say_that_there_is_more(run: Run) -> None:
    result = run("instances", "list", "--limit", "3", "--json")
    assert [i["endpoint"]["ref"]["name"] for i in json.loads(result.stdout)["instances"]] == ["a-d0", "a-p0", "b-d0"]
    assert "more than 3" in result.stderr
    assert "more than" not in run("instances", "list", "--limit", "4").stderr


def test_a_link_in_quarantine_is_named_with_its_prefill_instance(controller: Running, run: Run) -> None:
    def fail(cluster: Cluster, now: float) -> None:
        prefill, decode = (cluster.registry.named(name) for name in ("a-p0", "a-d0"))
        assert prefill is not None
        assert decode is not None
        for _ in range(cluster.config.links.quarantine_after_failures):
            cluster.links.failed(now, prefill, decode, user=None)

    assert "a-p0" not in run("links", "list").stdout
    controller.turn(fail)
    assert "a-p0 (quarantined)" in run("links", "list").stdout
    assert json.loads(run("links", "get", "a-d0", "--json").stdout)["failing"][0]["failures"] == 3


def test_an_instance_is_drained_and_undrained(run: Run) -> None:
    result = run("instances", "drain", "a-d0")
    assert (result.exit_code, result.stdout) == (0, "a-d0 drains; 1 calls in flight.\n")
    assert result.stderr == "warning: no other decode instance of a takes calls\n"
    assert "draining" in run("instances", "list", "--state", "draining").stdout
    assert answer(run("config"))["drained_instances"] == ["a-d0"]
    assert run("instances", "undrain", "a-d0").exit_code == 0
    assert answer(run("instances", "list", "--state", "draining", "--json")) == {"instances": []}


def test_a_session_is_rebound_and_forgotten(run: Run) -> None:
    assert run("sessions", "rebind", "[red]s1", "--model", "b", "--prefill", "b-p0").exit_code == 0
    bindings = answer(run("sessions", "get", "[red]s1", "--json"))["bindings"]
    assert "b-p0" in json.dumps(bindings)
    assert run("sessions", "forget", "[red]s1").stdout == "[red]s1 is forgotten.\n"
    assert run("sessions", "get", "[red]s1").exit_code == 1


def test_shadow_work_is_paused_and_resumed(run: Run) -> None:
    run("shadow", "pause", "--model", "b")
    result = run("shadow", "pause", "--cluster")
    assert result.stdout == "Shadow work is paused for: the cluster, model b.\n"
    assert run("shadow", "resume", "--cluster").stdout == "Shadow work is paused for: model b.\n"
    assert run("shadow", "resume", "--model", "b").stdout == "Shadow work is paused nowhere.\n"
    assert answer(run("shadow", "policy", "--disabled", "--top-k", "1", "--json"))["enabled"] is False


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("instances get a-p", 1, "not_found: no instance 'a-p'; did you mean 'a-p0'?"),
        ("shadow policy --approach harvest-sol", 1, "did you mean 'harvest-slo'?"),
        ("sessions rebind [red]s1 --model a --decode a-p0", 1, "a-p0 is a prefill instance"),
        ("instances list --role router", 2, "'router' is not one of"),
        ("sessions rebind [red]s1 --model a", 2, "give --prefill, --decode or both"),
        ("shadow pause", 2, "give one of --cluster, --model and --instance"),
        ("shadow pause --cluster --model a", 2, "give one of"),
        ("shadow policy --gate 2", 2, "--gate"),
        ("instances lst", 2, "No such command"),
        ("instancs list", 2, "No such command 'instancs'; did you mean 'instances'?"),
        ("qqq", 2, "No such command 'qqq'."),
        ("--instances", 2, "No such option"),
        ("top --interval 0", 2, "--interval"),
    ],
)
def test_exit_codes_tell_a_refusal_from_wrong_usage(run: Run, command: str, code: int, says: str) -> None:
    result = run(*command.split())
    assert result.exit_code == code
    assert says in result.stderr


@pytest.mark.parametrize("command", ["instances list", "top", "events --watch", "instances list --watch"])
def test_a_controller_out_of_reach_is_said_so(command: str, controller: Running) -> None:
    result = CliRunner().invoke(main, ["admin", "--address", "127.0.0.1:1", "--timeout", "5", *command.split()])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot reach the controller at 127.0.0.1:1")


@pytest.mark.parametrize("command", ["instances list --watch --json", "events --watch --json --after 0", "top"])
def test_a_watch_goes_on_until_it_is_interrupted(controller: Running, command: str) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            # Whoever runs the tests in the background may have them ignore Ctrl-C. Not set by preexec_fn: with the
            # controller's threads inside gRPC, a fork that runs Python dies now and then.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from pd_shadow.cli.main import main; main()",
            *("admin", "--address", controller.address, *command.split()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert "a-d0" in first or "a-p0" in first or controller.address in first
        if "instances" in command:
            controller.turn(lambda cluster, now: cluster.operators.drain(now, "a-d0"))
            while "INSTANCE_STATE_DRAINING" not in process.stdout.readline():
                pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def _help(command: click.Command, path: tuple[str, ...]) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [path]
    ctx = click.Context(command)
    found = []
    for name in command.list_commands(ctx):
        child = command.get_command(ctx, name)
        assert child is not None
        found += _help(child, (*path, name))
    return found


def test_every_command_has_help_with_an_example(run: Run) -> None:
    from pd_shadow.cli.admin.admin import admin

    commands = _help(admin, ())
    assert len(commands) > 20
    for path in commands:
        result = run(*path, "--help")
        assert result.exit_code == 0
        assert f"pd-shadow admin {path[0]}" in result.stdout, path


def test_names_are_completed_from_the_controller(run: Run, controller: Running) -> None:
    complete = ShellComplete(main, {}, "pd-shadow", "_PD_SHADOW_COMPLETE")
    at = ["admin", "--address", controller.address]
    assert [c.value for c in complete.get_completions([*at, "instances", "drain"], "a-")] == ["a-d0", "a-p0"]
    assert [c.value for c in complete.get_completions([*at, "jobs", "list", "--model"], "")] == ["a", "b"]
    assert complete.get_completions(["admin", "--address", "127.0.0.1:1", "instances", "get"], "") == []
    assert "_PD_SHADOW_COMPLETE=bash_complete" in run("completion", "bash").stdout
