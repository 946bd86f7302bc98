"""Published trace files: normal requests (Azure, Mooncake) and agent sessions (TraceLab), read line by line."""

import math
from array import array
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

import orjson

from pd_shadow.sim.workload.base import NormalRequest
from pd_shadow.sim.workload.prefixes import BLOCK_TOKENS, PrefixContexts
from pd_shadow.sim.workload.sessions import Step, UnroutedSession

MOST_ROWS = 5_000_000
MOST_TOKENS = 10_000_000
"""More than any model's window: a larger length is a damaged row."""
MOST_MILLISECONDS = 1e13
"""Beyond the year 2200, should times count from 1970."""
MOST_LINE_CHARACTERS = 4_000_000
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SESSION_COLUMNS = (
    "session_id",
    "arrival_time",
    "round_idx",
    "prefix_len",
    "input_len",
    "output_len",
    "tool_wait_after_ms",
)


class TraceFormat(StrEnum):
    """Files of normal requests."""

    # CSV with AZURE_COLUMNS: the Azure LLM inference traces of 2023 and 2024.
    AZURE = "azure"
    # JSON lines with timestamp (ms), input_length, output_length, hash_ids: the Mooncake traces.
    MOONCAKE = "mooncake"


class TraceError(ValueError):
    """A trace file cannot be used: names file, line and field, what was found and the fix."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        super().__init__(f"{path}{f', line {line}' if line else ''}: {problem}")


def read_trace(path: str | Path, format: TraceFormat | None = None, most_rows: int = MOST_ROWS) -> list[NormalRequest]:
    """The requests of a trace file in order of arrival, the first at 0; without a format its content tells which.

    Rows may be in any order. Mooncake's blocks become contexts, as `PrefixContexts` says. Raises TraceError.
    """
    lines = _Lines(Path(path), most_rows)
    first = lines.first()
    found = format or _detected(lines, first)
    rows = _azure(lines, first) if found is TraceFormat.AZURE else _mooncake(lines, first)
    return _from_zero(rows)


def read_sessions(path: str | Path, task: str = "mbpp", most_rows: int = MOST_ROWS) -> list[UnroutedSession]:
    """The sessions of a TraceLab replay file (SESSION_COLUMNS, times in ms) in order of arrival, the first at 0.

    `task` is what routers are to know them by. A round's prompt is prefix_len + input_len, and its prefix the beginning
    of the round before, prompt and output. Raises TraceError, also for rounds out of order.
    """
    lines = _Lines(Path(path), most_rows)
    fields = _columns(lines, lines.first(), SESSION_COLUMNS)
    sessions: dict[str, tuple[float, list[Step]]] = {}
    waits: dict[str, float] = {}
    for row in _csv_rows(lines, fields):
        name, arrival, index, prefix, new, output, wait = row
        number = lines.number("arrival_time", arrival, MOST_MILLISECONDS) / 1000
        _, steps = sessions.setdefault(name, (number, []))
        if lines.whole("round_idx", index, 0) != len(steps):
            raise lines.error(f"round_idx is {index}, session {name} is at round {len(steps)}; order rounds from 0")
        shared = lines.whole("prefix_len", prefix, 0)
        prompt = shared + lines.whole("input_len", new, 1)
        tokens = lines.whole("output_len", output, 1)
        if steps and shared > (left := steps[-1].prompt_tokens + steps[-1].output_tokens):
            raise lines.error(f"prefix_len is {shared}, the round before left {left} tokens; it cannot be more")
        step = Step(prompt, shared, tokens, waits[name]) if steps else Step(prompt, 0, tokens, 0.0)
        waits[name] = lines.number("tool_wait_after_ms", wait, MOST_MILLISECONDS) / 1000
        steps.append(step)
    if not sessions:
        raise lines.error("no rows after the header; give a file with at least one", at_line=False)
    start = min(began for began, _ in sessions.values())
    ordered = sorted(sessions.values(), key=lambda session: session[0])
    return [UnroutedSession(task, began - start, tuple(steps)) for began, steps in ordered]


def at_rate(requests: Sequence[NormalRequest], rate_per_second: float) -> list[NormalRequest]:
    """The requests with the time between them stretched so that their mean rate is the given one.

    Raises ValueError for a rate that is not a finite number above 0, and for requests that span no time.
    """
    if not 0 < rate_per_second < math.inf:
        raise ValueError(f"rate_per_second {rate_per_second}: must be a finite number above 0")
    span = requests[-1].arrival - requests[0].arrival if requests else 0.0
    if span <= 0:
        raise ValueError("requests: at least two at different times, in order of arrival, are needed to have a rate")
    factor = (len(requests) - 1) / span / rate_per_second
    start = requests[0].arrival
    return [request._replace(arrival=(request.arrival - start) * factor) for request in requests]


class _Lines:
    """A text file's lines that are not blank, and where it is at, for errors."""

    def __init__(self, path: Path, most_rows: int) -> None:
        self._path = path
        self._most_rows = most_rows
        self._line = 0
        self._iterator = self._read()

    def __iter__(self) -> Iterator[str]:
        return self._iterator

    def first(self) -> str:
        line = next(self._iterator, None)
        if line is None:
            raise self.error("the file is empty; give a trace with a header or at least one record", at_line=False)
        return line

    def error(self, problem: str, *, at_line: bool = True) -> TraceError:
        return TraceError(self._path, self._line if at_line else None, problem)

    def whole(self, field: str, value: object, least: int) -> int:
        """A number of tokens or the like, from text or JSON."""
        number = None
        if isinstance(value, str) and value.strip().isascii() and len(value) <= 30:
            digits = value.strip()
            number = int(digits) if digits.removeprefix("-").isdigit() else None
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        if number is None or not least <= number <= MOST_TOKENS:
            raise self.error(f"{field} is {_shown(value)}; it must be a whole number from {least} to {MOST_TOKENS:,}")
        return number

    def number(self, field: str, value: object, most: float) -> float:
        """A time, from text or JSON."""
        number = math.nan
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            try:
                number = float(value)
            except ValueError:
                number = math.nan
        if not 0 <= number <= most:
            raise self.error(f"{field} is {_shown(value)}; it must be a number from 0 to {most:.0e}")
        return number

    def _read(self) -> Iterator[str]:
        rows: int | None = None
        try:
            with self._path.open(encoding="utf-8-sig") as file:
                while line := file.readline(MOST_LINE_CHARACTERS + 1):
                    self._line += 1
                    if "\0" in line or len(line) > MOST_LINE_CHARACTERS:
                        raise self.error("this is not a line of a text file; unpack the trace if it is compressed")
                    if not line.strip():
                        continue
                    # A CSV's first line is its header.
                    rows = int(line.lstrip().startswith("{")) if rows is None else rows + 1
                    if rows > self._most_rows:
                        raise self.error(
                            f"more than {self._most_rows:,} rows; keep the hours that are needed, for example with head"
                        )
                    yield line
        except UnicodeDecodeError as error:
            raise TraceError(
                self._path, None, "this is not UTF-8 text; unpack the trace if it is compressed"
            ) from error
        except OSError as error:
            raise TraceError(self._path, None, f"cannot be read: {error.strerror}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _detected(lines: _Lines, first: str) -> TraceFormat:
    if first.lstrip().startswith("{"):
        return TraceFormat.MOONCAKE
    names = [name.strip() for name in first.split(",")]
    if "TIMESTAMP" in names:
        return TraceFormat.AZURE
    if "session_id" in names:
        raise lines.error("this is a trace of sessions, not of normal requests; read it as sessions")
    raise lines.error(
        f"the format is not known: found {_shown(first)}; give JSON lines, or the columns {', '.join(AZURE_COLUMNS)}"
    )


def _columns(lines: _Lines, header: str, wanted: Sequence[str]) -> list[int]:
    names = [name.strip() for name in header.split(",")]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise lines.error(f"missing columns: {', '.join(missing)}; the header has {', '.join(names)[:200]}")
    return [names.index(name) for name in wanted]


def _csv_rows(lines: _Lines, columns: Sequence[int]) -> Iterator[list[str]]:
    for line in lines:
        row = line.rstrip("\r\n").split(",")
        if len(row) <= max(columns):
            raise lines.error(f"{len(row)} fields, the header promises at least {max(columns) + 1}; complete the row")
        yield [row[column].strip().strip('"') for column in columns]


def _azure(lines: _Lines, header: str) -> list[NormalRequest]:
    columns = _columns(lines, header, AZURE_COLUMNS)
    requests = []
    for stamp, prompt, output in _csv_rows(lines, columns):
        requests.append(
            NormalRequest(
                _seconds(lines, stamp),
                lines.whole("ContextTokens", prompt, 1),
                lines.whole("GeneratedTokens", output, 1),
            )
        )
    if not requests:
        raise lines.error("no rows after the header; give a file with at least one", at_line=False)
    return sorted(requests, key=lambda request: request.arrival)


def _seconds(lines: _Lines, stamp: str) -> float:
    """2023 writes no time zone and seven decimals, 2024 +00:00 and up to six; no zone means UTC."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        raise lines.error(f"TIMESTAMP is {_shown(stamp)}; write it as 2024-05-10 00:00:00.000000") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _mooncake(lines: _Lines, first: str) -> list[NormalRequest]:
    records = [_mooncake_record(lines, first), *(_mooncake_record(lines, line) for line in lines)]
    records.sort(key=lambda record: record[0])
    contexts = PrefixContexts()
    requests = []
    for arrival, prompt, output, blocks in records:
        context, shared = contexts.place(blocks)
        requests.append(NormalRequest(arrival, prompt, output, context, min(shared * BLOCK_TOKENS, prompt)))
    return requests


def _mooncake_record(lines: _Lines, line: str) -> tuple[float, int, int, "array[int]"]:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise lines.error(f"not a JSON object ({error}); write one per line") from None
    if not isinstance(record, dict):
        raise lines.error(f"found {_shown(record)}; write one JSON object per line")
    missing = [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in record]
    if missing:
        raise lines.error(f"missing fields: {', '.join(missing)}; add them")
    blocks = record["hash_ids"]
    try:
        compact = array("Q", blocks if isinstance(blocks, list) else [None])
    except (TypeError, OverflowError):
        raise lines.error(f"hash_ids is {_shown(blocks)}; it must be a list of whole numbers, 64 bits each") from None
    prompt = lines.whole("input_length", record["input_length"], 1)
    if len(compact) > (most := -(-prompt // BLOCK_TOKENS)):
        raise lines.error(f"hash_ids has {len(compact)} blocks; {prompt} tokens have at most {most} of {BLOCK_TOKENS}")
    return (
        lines.number("timestamp", record["timestamp"], MOST_MILLISECONDS) / 1000,
        prompt,
        lines.whole("output_length", record["output_length"], 1),
        compact,
    )


def _from_zero(requests: list[NormalRequest]) -> list[NormalRequest]:
    start = requests[0].arrival
    return [request._replace(arrival=request.arrival - start) for request in requests]
