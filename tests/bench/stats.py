"""Figures out of samples: spreads, straight lines, and whether something grows. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95 % of Student's t for 1, 2, ... degrees of freedom; about 2 from there on."""


@dataclass(frozen=True)
class Spread:
    """Samples in short; all fields but `count` in the samples' unit."""

    count: int
    least: float
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True)
class Line:
    """Least squares: y = intercept + slope * x. low, high: 95 % interval of the slope, if the
    residuals were independent (those of a process's memory are not: read it as a hint)."""

    count: int
    slope: float
    intercept: float
    low: float
    high: float


def percentile(samples: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks. share: 0 to 1. Raises ValueError without samples."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= share <= 1:
        raise ValueError(f"share {share} is not between 0 and 1")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(samples: Sequence[float]) -> Spread | None:
    """None without samples."""
    if not samples:
        return None
    return Spread(
        count=len(samples),
        least=min(samples),
        mean=math.fsum(samples) / len(samples),
        p50=percentile(samples, 0.5),
        p95=percentile(samples, 0.95),
        p99=percentile(samples, 0.99),
        most=max(samples),
    )


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line | None:
    """None for fewer than three points or when all x are equal. Raises ValueError when the lengths
    differ."""
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} x for {len(ys)} y")
    count = len(xs)
    if count < 3:
        return None
    mean_x, mean_y = math.fsum(xs) / count, math.fsum(ys) / count
    spread_x = math.fsum((x - mean_x) ** 2 for x in xs)
    if spread_x == 0:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread_x
    intercept = mean_y - slope * mean_x
    residue = math.fsum((y - intercept - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    freedom = count - 2
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 2.0
    half = t * math.sqrt(residue / freedom / spread_x)
    return Line(count, slope, intercept, slope - half, slope + half)


def median_slope(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The median of the slopes between all pairs (Theil-Sen): a few steps or outliers among many
    samples do not move it. None without two different x."""
    if len(xs) != len(ys):
        raise ValueError(f"{len(xs)} x for {len(ys)} y")
    slopes = [
        (ys[j] - ys[i]) / (xs[j] - xs[i])
        for i in range(len(xs))
        for j in range(i + 1, len(xs))
        if xs[j] != xs[i]
    ]
    return percentile(slopes, 0.5) if slopes else None
