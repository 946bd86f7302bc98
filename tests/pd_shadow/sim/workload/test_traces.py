import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_shadow.sim.workload.base import NormalRequest
from pd_shadow.sim.workload.sessions import Step
from pd_shadow.sim.workload.traces import TraceError, TraceFormat, at_rate, read_sessions, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
SESSIONS = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
Writer = Callable[[str | bytes], Path]
ROW = "2023-11-16 18:15:46.0,374,44\n"


@pytest.fixture
def trace(tmp_path: Path) -> Writer:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:48.1805900"),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01.509930+00:00"),
        ("2024-05-10 00:00:00+00:00", "2024-05-10 00:00:01.5+00:00"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_timestamps_of_both_years(trace: Writer, first: str, second: str, end: str) -> None:
    path = trace(f"\ufeffTIMESTAMP,ContextTokens,GeneratedTokens\n{first},374,44\n\n{second},10,1\n".replace("\n", end))
    one, other = read_trace(path)
    assert one == NormalRequest(0.0, 374, 44)
    assert other == NormalRequest(other.arrival, 10, 1)
    assert other.arrival == pytest.approx(1.5)


def test_rows_in_any_order_are_sorted(trace: Writer) -> None:
    path = trace(AZURE + "2023-11-16 18:15:47,2,1\n2023-11-16 18:15:46,1,1\n")
    assert read_trace(path) == [(0.0, 1, 1, None, 0), (1.0, 2, 1, None, 0)]


def test_mooncake_conversations_become_contexts(trace: Writer) -> None:
    path = trace(
        '{"timestamp": 1000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 2000, "input_length": 1500, "output_length": 5, "hash_ids": [9, 8, 7]}\n'
        # Extends the first one, whose last block was only partly filled.
        '{"timestamp": 3000, "input_length": 2100, "output_length": 5, "hash_ids": [0, 1, 3, 4, 5]}\n'
        # The same prompt again: no more than the prompt is shared.
        '{"timestamp": 4000, "input_length": 1500, "output_length": 5, "hash_ids": [9, 8, 7]}\n'
    )
    one, other, extension, again = read_trace(path)
    assert one == NormalRequest(0.0, 1500, 5, one.context, 0)
    assert other.context != one.context
    assert extension == NormalRequest(2.0, 2100, 5, one.context, 1024)
    assert again == NormalRequest(3.0, 1500, 5, other.context, 1500)


def test_a_shared_system_prompt_does_not_end_a_conversation(trace: Writer) -> None:
    def line(at: int, blocks: list[int]) -> str:
        return f'{{"timestamp":{at},"input_length":{512 * len(blocks)},"output_length":5,"hash_ids":{blocks}}}\n'

    path = trace(line(0, [*range(8)]) + line(1, [0, 20, 21]) + line(2, [*range(9)]))
    one, other, extension = read_trace(path)
    assert other.context != one.context
    assert (extension.context, extension.shared_tokens) == (one.context, 8 * 512)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "empty"),
        ("\n \n", "empty"),
        (AZURE, "no rows"),
        ("a,b\n1,2\n", "line 1: the format is not known"),
        ("TIMESTAMP,ContextTokens\n", "missing columns: GeneratedTokens"),
        (SESSIONS, "trace of sessions"),
        (AZURE + ROW + "2023-11-16 18:15:46.0,374\n", "line 3: 2 fields"),
        (AZURE + "yesterday,374,44\n", "line 2: TIMESTAMP is 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46.0,-5,44\n", "line 2: ContextTokens is '-5'; it must be a whole number from 1"),
        (AZURE + "2023-11-16 18:15:46.0,5,0\n", "line 2: GeneratedTokens is '0'"),
        (AZURE + "2023-11-16 18:15:46.0,nan,1\n", "ContextTokens is 'nan'"),
        (AZURE + "2023-11-16 18:15:46.0,²,1\n", "ContextTokens is '²'"),
        (AZURE + "2023-11-16 18:15:46.0,1" + "0" * 5000 + ",1\n", "ContextTokens is '1000"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "not UTF-8 text"),
        (b"PK\x00\x01", "line 1: this is not a line of a text file"),
        ("{\n", "line 1: not a JSON object"),
        ('{"timestamp": 0}\n', "missing fields: input_length, output_length, hash_ids"),
        ('{"timestamp": 0}\n[]\n', "missing fields"),
        ('{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp is -1"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1, "hash_ids": []}', "timestamp is True"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1, "hash_ids": []}', "input_length is 1.5"),
        ('{"timestamp": 0, "input_length": NaN, "output_length": 1, "hash_ids": []}', "not a JSON object"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["x"]}', "hash_ids is"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [-1]}', "hash_ids is [-1]"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 3}', "hash_ids is 3"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', "hash_ids has 2 blocks"),
    ],
)
def test_malformed_traces_name_what_is_wrong(trace: Writer, content: str | bytes, message: str) -> None:
    path = trace(content)
    with pytest.raises(TraceError, match=re.escape(message)) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


def test_a_given_format_is_not_guessed(trace: Writer) -> None:
    with pytest.raises(TraceError, match="not a JSON object"):
        read_trace(trace(AZURE + ROW), TraceFormat.MOONCAKE)


def test_missing_files_and_folders_are_trace_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_more_rows_than_the_cap_are_refused(trace: Writer) -> None:
    path = trace(AZURE + ROW * 3)
    assert len(read_trace(path, most_rows=3)) == 3
    with pytest.raises(TraceError, match="line 4: more than 2 rows"):
        read_trace(path, most_rows=2)


def test_sessions_are_read_without_models(trace: Writer) -> None:
    path = trace(
        SESSIONS + "b,900,0,0,50,7,0\na,117,0,0,2318,200,300\na,117,1,2518,348,131,154\na,117,2,100,812,104,0\n"
    )
    first, second = read_sessions(path, task="math")
    assert (first.task, first.arrival) == ("math", 0.0)
    assert second.arrival == pytest.approx(0.783)
    assert first.steps == (
        Step(2318, 0, 200, 0.0),
        Step(2866, 2518, 131, 0.3),
        # The history was cut: only its first 100 tokens go on.
        Step(912, 100, 104, 0.154),
    )
    assert second.steps == (Step(50, 0, 7, 0.0),)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "no rows"),
        ("a,0,1,0,5,5,0\n", "round_idx is 1, session a is at round 0"),
        ("a,0,0,0,5,5,0\na,0,1,11,5,5,0\n", "line 3: prefix_len is 11, the round before left 10"),
        ("a,0,0,0,5,5,-1\n", "tool_wait_after_ms is '-1'"),
        ("a,inf,0,0,5,5,0\n", "arrival_time is 'inf'"),
        ("a,0,0,0,0,5,0\n", "input_len is '0'"),
    ],
)
def test_malformed_sessions_name_what_is_wrong(trace: Writer, rows: str, message: str) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        read_sessions(trace(SESSIONS + rows))


def test_rescaling_keeps_order_lengths_and_meets_the_rate() -> None:
    requests = [NormalRequest(t, 10, 1) for t in (0.0, 1.0, 4.0)]
    assert [r.arrival for r in at_rate(requests, 4.0)] == pytest.approx([0.0, 0.125, 0.5])


@pytest.mark.parametrize(
    ("arrivals", "rate", "message"),
    [
        ([0.0, 1.0], 0.0, "rate_per_second"),
        ([0.0], 1.0, "at least two"),
        ([], 1.0, "at least two"),
        ([2.0, 2.0], 1.0, "two"),
    ],
)
def test_what_has_no_rate_cannot_be_rescaled(arrivals: list[float], rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        at_rate([NormalRequest(t, 10, 1) for t in arrivals], rate)
