"""Charts over time as SVG text. Colours, fonts and themes are the page's business: shapes carry classes only.

Each chart names itself and says its figures in words (`<title>`, `<desc>`), and series differ in dash and mark as
well as in colour.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 900, 250
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 26, 34
_NUMBER_WIDTH = 26  # of a label of moments
MAX_SERIES = 4  # of which the page's style sheet has a look

Point = tuple[float, float | None]  # seconds, value; None breaks a line


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    kind: str = "line"  # "line", "step" (holds until the next point) or "dots"
    style: int = 0  # 0 to MAX_SERIES - 1: which look
    is_named: bool = True  # has a line in the legend


@dataclass(frozen=True)
class Mark:
    """A moment that all charts show."""

    at_s: float
    name: str


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    series: Sequence[Series]
    limit: float | None = None  # a horizontal line
    limit_name: str = ""
    top: float | None = None  # the axis ends there, else at the data


def render(chart: Chart, marks: Sequence[Mark], end_s: float) -> str:
    """The chart from 0 to `end_s` seconds, as one `<svg>` element."""
    values = [y for one in chart.series for _, y in one.points if y is not None]
    highest = chart.top if chart.top is not None else max([*values, chart.limit or 0.0], default=0.0)
    ticks = _ticks(highest)
    frame = _Frame(max(end_s, 1.0), ticks[-1])
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title, quote=True)}">',
        f"<title>{escape(chart.title)}</title><desc>{escape(_in_words(chart))}</desc>",
        *_axes(frame, ticks, chart.unit),
        *_moments(frame, marks),
    ]
    if chart.limit is not None:
        y = frame.y(chart.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT + 4}" y="{y - 4:.1f}">{escape(chart.limit_name)}</text>')
    for one in chart.series:
        parts += _draw(frame, one)
    parts += _legend([one for one in chart.series if one.is_named])
    return "\n".join([*parts, "</svg>"])


class _Frame:
    def __init__(self, end_s: float, highest: float) -> None:
        self.end_s, self.highest = end_s, highest

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s / self.end_s, 0.0), 1.0)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(value / self.highest, 0.0), 1.0)


def _ticks(highest: float) -> list[float]:
    """0 up to at least `highest`, in at most six steps of 1, 2 or 5 times a power of ten."""
    if not highest > 1e-300:  # nothing, or too little to be divided
        return [0.0, 1.0]
    step = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(step * factor for factor in (1, 2, 5, 10) if highest / (step * factor) <= 5.0001)
    return [i * step for i in range(math.ceil(highest / step - 1e-6) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _axes(frame: _Frame, ticks: Sequence[float], unit: str) -> list[str]:
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 8}" y="{y + 4:.1f}">{_number(tick)}</text>')
    minutes = _ticks(frame.end_s / 60)
    for tick in minutes:
        if tick * 60 <= frame.end_s:
            x = frame.x(tick * 60)
            label = f"{_number(tick)} min" if tick == 0 else _number(tick)
            parts.append(f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - 14}">{label}</text>')
    parts.append(f'<text class="small" x="2" y="14">{escape(unit)}</text>')
    return parts


def _moments(frame: _Frame, marks: Sequence[Mark]) -> list[str]:
    """Vertical lines, numbered: the page explains the numbers once, below the charts. Numbers that would touch are
    written as one, like 3-5."""
    parts, groups = [], list[tuple[float, list[int]]]()
    for number, mark in enumerate(marks, start=1):
        x = frame.x(mark.at_s)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        if groups and x - groups[-1][0] < _NUMBER_WIDTH:
            groups[-1][1].append(number)
        else:
            groups.append((x, [number]))
    for x, numbers in groups:
        label = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        parts.append(f'<text class="number" text-anchor="middle" x="{x:.1f}" y="{TOP - 3}">{label}</text>')
    return parts


def _draw(frame: _Frame, series: Series) -> list[str]:
    look = f"s{series.style % MAX_SERIES}"
    known = [(x, y) for x, y in series.points if y is not None]
    if series.kind == "dots":
        return [f'<circle class="{look} dot" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6"/>' for x, y in known]
    path = ""
    pen: tuple[float, float] | None = None
    for at_s, value in series.points:
        if value is None:
            pen = None
            continue
        x, y = frame.x(at_s), frame.y(value)
        if pen is None:
            path += f"M{x:.1f} {y:.1f}"
        elif series.kind == "step":
            path += f"H{x:.1f}V{y:.1f}"
        else:
            path += f"L{x:.1f} {y:.1f}"
        pen = (x, y)
    return [f'<path class="{look} line" d="{path}"/>'] if path else []


def _legend(series: Sequence[Series]) -> list[str]:
    """Top right, from right to left."""
    parts = []
    x = float(WIDTH - RIGHT)
    for one in reversed(series):
        look = f"s{one.style % MAX_SERIES}"
        x -= 7.0 * len(one.name)
        parts.append(f'<text class="small" x="{x:.1f}" y="14">{escape(one.name)}</text>')
        x -= 28
        if one.kind == "dots":
            parts.append(f'<circle class="{look} dot" cx="{x + 13:.1f}" cy="10" r="3.5"/>')
        else:
            parts.append(f'<path class="{look} line" d="M{x:.1f} 10H{x + 22:.1f}"/>')
        x -= 14
    return parts


def _in_words(chart: Chart) -> str:
    said = []
    for one in chart.series:
        known = [y for _, y in one.points if y is not None]
        if known:
            said.append(
                f"{one.name}: from {known[0]:.4g} to {known[-1]:.4g}, least {min(known):.4g}, most {max(known):.4g}"
            )
    return f"{chart.unit}. " + ("; ".join(said) if said else "no data") + "."
