"""What all pictures share: colours for light and dark, fonts of the reader, the frame of an SVG."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

_LIGHT: Final = {
    "ground": "#ffffff", "line": "#57606a", "text": "#1b1f24", "soft": "#57606a", "box": "#eef3fa",
    "edge": "#3b6fb6", "ours": "#3b6fb6", "other": "#aab4c0",
    "p0": "#1d4f91", "p1": "#3b6fb6", "p2": "#6d9bd6", "p3": "#a5c3e8", "p4": "#e0a044",
    "p5": "#f0cd97",
}  # fmt: skip
_DARK: Final = {
    "ground": "#181c22", "line": "#9aa4b0", "text": "#e6e9ed", "soft": "#9aa4b0", "box": "#202836",
    "edge": "#6a9ee0", "ours": "#6a9ee0", "other": "#5b6572",
    "p0": "#3f6ca8", "p1": "#6a9ee0", "p2": "#96bdf0", "p3": "#c5daf7", "p4": "#d99528",
    "p5": "#f0c47d",
}  # fmt: skip
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def _rules(colours: dict[str, str]) -> str:
    fills = ("ground", "text", "soft", "ours", "other", *(f"p{n}" for n in range(6)))
    return "".join(
        [
            *(f".{name}{{fill:{colours[name]}}}" for name in fills),
            f".box{{fill:{colours['box']};stroke:{colours['edge']};stroke-width:1.4}}",
            f".line{{stroke:{colours['line']};fill:none}}.head{{fill:{colours['line']}}}",
        ]
    )


def svg(width: float, height: float, says: str, parts: Iterable[str]) -> str:
    """Returns a whole picture on a ground of its own, in the colours that the reader prefers.

    says: What the picture shows, for readers who cannot see it.
    """
    style = f"text{{font:13px {_FONT}}}.small{{font-size:11px}}.bold{{font-weight:600}}"
    style += ".line{stroke-width:1.4}.right{text-anchor:end}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            f' width="{width:g}" height="{height:g}" role="img">',
            f"<title>{escape(says)}</title>",
            f"<style>{style}{_rules(_LIGHT)}",
            f"@media (prefers-color-scheme: dark){{{_rules(_DARK)}}}</style>",
            f'<rect class="ground" width="{width:g}" height="{height:g}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, said: str, kind: str = "text") -> str:
    """Returns a text that begins at a point, or ends there (`right`)."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(said)}</text>'


def bar(x: float, y: float, width: float, height: float, kind: str, says: str = "") -> str:
    """Returns a filled rectangle. says: Its words for who points at it."""
    tag = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"'
    return f"{tag}><title>{escape(says)}</title></rect>" if says else f"{tag}/>"
