import multiprocessing

from prometheus_client import REGISTRY, generate_latest

from controller.discovery import vllm_metrics
from pd_shadow.engine.incarnation import incarnation

ENGINE = """\
vllm:num_requests_running 0.0
vllm:num_requests_waiting 0.0
vllm:kv_cache_usage_perc 0.0
vllm:cache_config_info{block_size="16"} 1.0
"""


def test_an_engine_core_names_the_life_that_its_servers_metrics_page_shows() -> None:
    page = ENGINE + generate_latest(REGISTRY).decode()
    with multiprocessing.get_context("spawn").Pool(1) as engine_core:
        named = engine_core.apply(incarnation)
    assert named == vllm_metrics.parse(page).process_start
    assert incarnation() == named
