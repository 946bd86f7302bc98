"""Normal traffic: the requests a deployment serves besides routed sessions (paper sections 2.3 and 5.1).

Prompt and output lengths are drawn independently: in the 2023 hour of the Azure traces they correlate by -0.11
(conversation) and 0.00 (code).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pd_shadow.sim.workload.base import NormalRequest
from pd_shadow.sim.workload.distributions import Distribution, LogNormal, Quantiles, whole_tokens

PROMPT_CAP_TOKENS = 8_192
OUTPUT_CAP_TOKENS = 1_024
"""Both caps are the paper's (appendix D.1)."""


class Window(StrEnum):
    """The hours of the week that are simulated (paper section 5.1)."""

    PEAK = "peak"
    MEDIAN = "median"
    TROUGH = "trough"


@dataclass(frozen=True)
class TrafficProfile:
    """What one trace's requests look like.

    `load` is each window's rate relative to the weekly peak. `interarrival_cv` is the coefficient of variation of the
    gaps between arrivals: 1 makes them a Poisson process, as on the paper's testbed (appendix D.1); others are Gamma.
    """

    name: str
    prompt: Distribution
    output: Distribution
    load: Mapping[Window, float]
    interarrival_cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.interarrival_cv < math.inf:
            raise ValueError(f"interarrival_cv {self.interarrival_cv}: must be above 0; 1 is Poisson")


# Quantiles 0.5, 0.9, 0.95, 0.99 and the largest values, as well as the medians of hourly load, are those of the 2024
# week of the Azure LLM inference traces (Azure/AzurePublicDataset, CC-BY 4.0), as computed by a third party's notebook;
# the raw files were not at hand. Outputs end at the cap. Quantiles 0 and 0.25 are assumed, 0.75 makes the mean that of
# the week. Trough loads are read off each weekday's peak to trough: 1.8 to 2.2 for conversation (and weekends at 0.57
# of weekdays), 8.6 to 11.3 for code.
AZURE_CONVERSATION = TrafficProfile(
    name="azure-conversation",
    prompt=Quantiles(((0, 20), (0.25, 450), (0.5, 928), (0.75, 2690), (0.9, 3830), (0.99, 6683), (1, 7999))),
    output=Quantiles(((0, 1), (0.25, 16), (0.5, 41), (0.75, 105), (0.9, 342), (0.95, 455), (0.99, 694), (1, 1024))),
    load={Window.PEAK: 1.0, Window.MEDIAN: 0.62, Window.TROUGH: 0.30},
)
AZURE_CODE = TrafficProfile(
    name="azure-code",
    prompt=Quantiles(((0, 20), (0.25, 800), (0.5, 1930), (0.75, 3835), (0.9, 6251), (0.99, 7685), (1, 7743))),
    output=Quantiles(((0, 1), (0.25, 4), (0.5, 8), (0.75, 12), (0.9, 43), (0.95, 79), (0.99, 271), (1, 1024))),
    load={Window.PEAK: 1.0, Window.MEDIAN: 0.20, Window.TROUGH: 0.10},
)
AZURE_CODE_BURSTY = replace(AZURE_CODE, name="azure-code-bursty", interarrival_cv=13.1)
"""Gaps vary as much as in the hour of November 2023 (8,819 requests of AzureLLMInferenceTrace_code.csv, CC-BY 4.0)."""

# Synthesised: only the means are BurstGPT's (README of HPMLL/BurstGPT, 621 and 126 tokens). The spread is assumed, and
# so are the windows: no hourly loads were at hand, the paper's range for its three traces (3x to 10x within a day,
# section 2.3) begins with conversation's.
BURST_GPT = TrafficProfile(
    name="burstgpt",
    prompt=LogNormal.of_mean(621, 1.0),
    output=LogNormal.of_mean(126, 1.0),
    load=AZURE_CONVERSATION.load,
)

PROFILES: Mapping[str, TrafficProfile] = {
    profile.name: profile for profile in (AZURE_CONVERSATION, AZURE_CODE, AZURE_CODE_BURSTY, BURST_GPT)
}


def generate(
    profile: TrafficProfile, rate_per_second: float, seconds: float, rng: np.random.Generator
) -> list[NormalRequest]:
    """Requests of `seconds` at a mean rate, in order of arrival.

    Raises ValueError for a rate or a duration that is negative or not a finite number.
    """
    for name, value in (("rate_per_second", rate_per_second), ("seconds", seconds)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {value}: must be a finite number, at least 0")
    arrivals = _arrivals(profile.interarrival_cv, rate_per_second, seconds, rng)
    prompts = whole_tokens(profile.prompt.draw(rng, len(arrivals)), PROMPT_CAP_TOKENS)
    outputs = whole_tokens(profile.output.draw(rng, len(arrivals)), OUTPUT_CAP_TOKENS)
    return list(map(NormalRequest, arrivals.tolist(), prompts.tolist(), outputs.tolist()))


def _arrivals(cv: float, rate: float, seconds: float, rng: np.random.Generator) -> NDArray[np.float64]:
    if cv == 1 or not rate:
        return np.asarray(np.sort(rng.random(rng.poisson(rate * seconds))) * seconds)
    shape, scale = cv**-2, cv**2 / rate
    # The run begins at a random moment, inside a gap that is likelier to be a long one; begun at an arrival, bursty
    # traffic would have more requests than its rate.
    parts = [np.array([rng.gamma(shape + 1, scale) * rng.random()])]
    while parts[-1][-1] < seconds:
        gaps = rng.gamma(shape, scale, size=1_024 + int(rate * seconds) // 4)
        parts.append(parts[-1][-1] + np.cumsum(gaps))
    arrivals = np.concatenate(parts)
    return np.asarray(arrivals[arrivals < seconds])
