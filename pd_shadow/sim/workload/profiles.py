"""The paper's routed workloads (Tables 1 and 5), as parameters of a session generator.

The parameters are fits: with them the generator meets the mean and the 99th percentile of the prompt lengths that the
paper reports (table1.py compares). Calls per session are what the paper's switches per session and switch rate imply.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pd_shadow.sim.workload.distributions import LogNormal

GAP_MEDIAN_SECONDS = 2.0
"""Tool time between two calls (paper appendix D.1)."""
GAP_SIGMA = 1.15
"""The paper does not say; this is the spread of 50 tool times (reading files, searching, editing, building) of the
GitHub Copilot coding-agent trace of 2026 (Azure/AzurePublicDataset, CC-BY 4.0), whose own median is 0.6 s."""
GAP = LogNormal(GAP_MEDIAN_SECONDS, GAP_SIGMA)

KNOWLEDGE_TASKS = (
    "arc_challenge",
    "commonsense_qa",
    "gpqa",
    "mmlu",
    "natural_qa",
    "openbook_qa",
    "trivia_qa",
)
CODING_TASKS = ("human_eval", "mbpp")
"""What the paper's GHCP-coding sessions take their routing decisions from (section 2.1)."""
ALL_TASKS = (
    *KNOWLEDGE_TASKS,
    *CODING_TASKS,
    "agentverse-logicgrid",
    "agentverse-mgsm",
    "commongen",
    "gsm8k",
    "math",
)


@dataclass(frozen=True)
class SessionProfile:
    """How the sessions of one trace grow (paper sections 2.1 and 4).

    A call appends its input and its output to the history, the tool that runs after it a result. `step_scale_sigma`
    spreads inputs and tool results between sessions: all of a session's are multiplied by one factor of mean 1.
    """

    name: str
    tasks: tuple[str, ...]
    # Share of calls, first ones included, that go to another model than the session's call before.
    switch_rate: float
    mean_calls: float
    # Calls per session, before they are rounded up and cut to `most_calls`.
    calls: LogNormal
    most_calls: int
    # Prompt of the first call; None: an input like the others.
    first: LogNormal | None
    input: LogNormal
    tool: LogNormal
    output: LogNormal
    step_scale_sigma: float = 0.0
    gap: LogNormal = GAP


X_ROUTE_BENCH = SessionProfile(
    name="xRouteBench",
    tasks=ALL_TASKS,
    switch_rate=0.19,
    mean_calls=12.1,
    calls=LogNormal.of_mean(11.6, 0.6),
    most_calls=100,
    first=None,
    input=LogNormal(100, 0.8),
    tool=LogNormal(1_000, 1.5),
    # Assumed; FusionBench's, the only benchmark with published outputs, are 52 to 97.
    output=LogNormal.of_mean(100, 0.8),
    step_scale_sigma=0.8,
)
FUSION_BENCH = SessionProfile(
    name="FusionBench",
    tasks=ALL_TASKS,
    switch_rate=0.26,
    mean_calls=11.9,
    calls=LogNormal.of_mean(11.4, 0.6),
    most_calls=100,
    first=None,
    input=LogNormal(300, 0.8),
    tool=LogNormal(1_000, 0.5),
    # Between the means of the testbed's two pairs, 52 and 97 (Table 5).
    output=LogNormal.of_mean(75, 0.8),
)
ROUTER_R1 = SessionProfile(
    name="Router-R1",
    tasks=KNOWLEDGE_TASKS,
    switch_rate=0.33,
    mean_calls=12.4,
    calls=LogNormal.of_mean(11.9, 0.2),
    most_calls=100,
    first=None,
    input=LogNormal(100, 0.8),
    tool=LogNormal(1_000, 0.8),
    # Assumed.
    output=LogNormal.of_mean(150, 0.8),
    step_scale_sigma=0.5,
)
GHCP_CODING = SessionProfile(
    name="GHCP-coding",
    tasks=CODING_TASKS,
    switch_rate=0.26,
    mean_calls=7.7,
    calls=LogNormal.of_mean(7.15, 0.9),
    # One user turn of up to 60 agent calls (section 2.1).
    most_calls=60,
    first=LogNormal(62_000, 0.6),
    input=LogNormal(300, 0.8),
    tool=LogNormal(650, 1.4),
    # 4.91 billion completion tokens of 9.31 million calls (dataset card).
    output=LogNormal.of_mean(528, 0.8),
)
SWE_S7_S32 = SessionProfile(
    name="SWE-bench S7/S32",
    tasks=CODING_TASKS,
    switch_rate=0.43,
    mean_calls=35.8,
    calls=LogNormal.of_mean(35.3, 0.22),
    # The agent's limit (appendix D.3).
    most_calls=75,
    first=LogNormal(9_000, 0.3),
    input=LogNormal(100, 0.8),
    tool=LogNormal(830, 1.0),
    output=LogNormal.of_mean(175, 0.8),
)
SWE_S7_Q72 = SessionProfile(
    name="SWE-bench S7/Q72",
    tasks=CODING_TASKS,
    switch_rate=0.13,
    mean_calls=48.5,
    calls=LogNormal.of_mean(48, 0.2),
    most_calls=75,
    first=LogNormal(9_000, 0.3),
    input=LogNormal(100, 0.8),
    tool=LogNormal(330, 1.0),
    output=LogNormal.of_mean(249, 0.8),
)

PROFILES: Mapping[str, SessionProfile] = {
    profile.name: profile for profile in (X_ROUTE_BENCH, FUSION_BENCH, ROUTER_R1, GHCP_CODING, SWE_S7_S32, SWE_S7_Q72)
}
