"""What is read off UCX's log."""

from pathlib import Path

from transfer.bench.ucx_log import UcxLog, lanes

LINE = "[17.2] [vm:1:0]      ucp_worker.c:1997 UCX  INFO    sender {where} cfg#{n} am(tcp/lo {lane})  ka(tcp/lo)\n"
"""As UCX 1.23 writes it."""


def test_the_last_connection_to_another_process_counts() -> None:
    text = LINE.format(where="intra-node", n=1, lane="sysv") + LINE.format(where="intra-node", n=2, lane="cma/memory")
    assert lanes(text) == "am(tcp/lo cma/memory) ka(tcp/lo)"
    assert lanes(text + LINE.format(where="self", n=3, lane="posix")) == "am(tcp/lo cma/memory) ka(tcp/lo)"
    assert lanes(LINE.format(where="inter-node", n=0, lane="rc_mlx5/mlx5_0:1")) != ""


def test_each_connection_is_told_once(tmp_path: Path) -> None:
    log = UcxLog(tmp_path)
    assert log.lanes() == ""
    file = Path(log.environment["UCX_LOG_FILE"])
    file.write_text(LINE.format(where="intra-node", n=1, lane="cma/memory"))
    assert log.lanes() == "am(tcp/lo cma/memory) ka(tcp/lo)"
    assert log.lanes() == ""
