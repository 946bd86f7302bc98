"""Reading a D instance's NIXL counters."""

import pytest

from pd_shadow.demo.models import SMALL
from pd_shadow.demo.received import Reading, parse, tokens_between

PAGE = """\
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0"} 0.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 3.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.572864e+06
vllm:nixl_bytes_transferred_created{engine="0"} 1.7e+09
"""


def test_totals_are_read_and_default_to_zero() -> None:
    assert parse(PAGE) == Reading(3, 1572864.0)
    assert parse("") == Reading(0, 0.0)


@pytest.mark.parametrize(("transfers", "tokens"), [(0, 0), (1, 256), (2, None)])
def test_only_a_single_transfer_is_the_calls_own(transfers: int, tokens: int | None) -> None:
    moved = 0 if tokens == 0 else 256 * SMALL.kv_bytes_per_token
    assert tokens_between(Reading(5, 10.0), Reading(5 + transfers, 10.0 + moved), SMALL.kv_bytes_per_token) == tokens
