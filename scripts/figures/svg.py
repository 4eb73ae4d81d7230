"""Draw the pictures of the documentation as SVG, in one style for light and dark pages.

A picture is a function without arguments that returns a `Drawing`; its name is the file's name in docs/images. Text,
lines and arrows use `currentColor`. Areas are translucent, so that text on them can be read on both backgrounds.

    def mesh_2_by_4() -> Drawing:
        drawing = Drawing(640, 200, "Eight GPUs as data 2 × model 4")
        drawing.box(20, 20, 120, 48, "GPU 0", "blue")
        return drawing

`python scripts/make_figures.py` writes the files.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

COLORS = {  # Okabe and Ito's colors, told apart with every kind of color vision: on light pages, on dark pages
    "blue": ("#0072b2", "#58a6ff"),
    "orange": ("#d55e00", "#f0883e"),
    "green": ("#009e73", "#3fb98f"),
    "pink": ("#b8558c", "#e08fbe"),
    "yellow": ("#b98900", "#e3b341"),
    "sky": ("#3a93c9", "#79c0ff"),
    "grey": ("#6e7781", "#8b949e"),
}
OPACITY = {"none": 0.0, "faint": 0.10, "tint": 0.28, "strong": 0.55, "solid": 0.9}
MIN_TEXT_AT_400 = 8.5  # px of the smallest text where the picture is 400 px wide, as on a phone
CHARACTER = 0.56  # mean width of a character in em


def text_width(text: str, size: float = 16, bold: bool = False) -> float:
    """Estimated width of a line of text, in the picture's units."""
    return len(text) * size * CHARACTER * (1.06 if bold else 1.0)


class Drawing:
    """A picture of width × height units, shown at most as wide as its page.

    Args:
      width: Units from left to right; 640 suits text of size 16 and 14.
      height: Units from top to bottom.
      title: One sentence, what the picture shows; read to those who do not see it.
    """

    def __init__(self, width: float, height: float, title: str):
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    # Shapes ------------------------------------------------------------------------------------------------------

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        label: str = "",
        color: str = "grey",
        *,
        fill: str = "tint",
        dashed: bool = False,
        size: float = 16,
        bold: bool = False,
        radius: float = 4,
        hatch: bool = False,
    ) -> None:
        """Draw a box with a centered label; a newline in the label starts a line. `fill`: a name of `OPACITY`."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        paint = 'style="fill:url(#hatch)"' if hatch else f'fill-opacity="{OPACITY[fill]}"'
        self.shapes.append(
            f'<rect class="{_color(color)}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'rx="{_n(radius)}" {paint}{dash}/>'
        )
        lines = label.split("\n") if label else []
        for number, line in enumerate(lines):
            if text_width(line, size, bold) > width + 2:
                raise ValueError(f"{self.title}: {line!r} is wider than its box of {width:g}")
            middle = y + height / 2 + (number - (len(lines) - 1) / 2) * size * 1.2
            self.text(x + width / 2, middle, line, size=size, bold=bold, anchor="middle")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 16,
        bold: bool = False,
        anchor: str = "start",
        color: str = "",
        italic: bool = False,
    ) -> None:
        """Draw one line of text, vertically centered at y. `anchor`: start, middle or end of the line is at x."""
        if size * 400 / self.width < MIN_TEXT_AT_400:
            raise ValueError(f"{self.title}: {text!r} has size {size}, too small to read at a width of 400 px")
        width = text_width(text, size, bold)
        left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
        if left < -2 or left + width > self.width + 2 or not 0 <= y <= self.height:
            raise ValueError(f"{self.title}: {text!r} leaves the picture: {left:.0f} to {left + width:.0f}, y {y:g}")
        style = ('font-weight="600" ' if bold else "") + ('font-style="italic" ' if italic else "")
        kind = f"t {_color(color)}-text" if color else "t"
        self.shapes.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y + size * 0.36)}" font-size="{_n(size)}" '
            f'text-anchor="{anchor}" {style}>{escape(text)}</text>'.replace(" >", ">")
        )

    def line(
        self, points: list[tuple[float, float]], color: str = "", *, width: float = 1.5, dashed: bool = False
    ) -> None:
        """Draw a line through points."""
        self._stroke(points, color, width, dashed)

    def arrow(
        self,
        start: tuple[float, float],
        end: tuple[float, float],
        color: str = "",
        *,
        label: str = "",
        both: bool = False,
        dashed: bool = False,
        width: float = 2,
        size: float = 14,
        via: list[tuple[float, float]] | None = None,
        label_at: tuple[float, float] | None = None,
    ) -> None:
        """Draw an arrow, with heads at both ends if `both`; its label stands above the middle, or at `label_at`."""
        points = [start, *(via or []), end]
        self._stroke(points, color, width, dashed)
        self._head(points[-2], end, color)
        if both:
            self._head(points[1], start, color)
        if label:
            x, y = label_at or ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - size * 0.8)
            self.text(x, y, label, size=size, anchor="middle", color=color)

    def circle(self, x: float, y: float, radius: float, label: str = "", color: str = "grey", *, fill="tint", size=16):
        """Draw a circle with a centered label."""
        self.shapes.append(
            f'<circle class="{_color(color)}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" '
            f'fill-opacity="{OPACITY[fill]}"/>'
        )
        if label:
            self.text(x, y, label, size=size, anchor="middle")

    def polygon(self, points: list[tuple[float, float]], color: str = "grey", *, fill: str = "tint") -> None:
        """Draw a filled polygon."""
        at = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.shapes.append(f'<polygon class="{_color(color)}" points="{at}" fill-opacity="{OPACITY[fill]}"/>')

    def grid(
        self, x: float, y: float, rows: int, columns: int, cell: float, color_of, *, fill: str = "tint", gap: float = 0
    ) -> None:
        """Draw a matrix of cells; `color_of(row, column)` is a color, or None for an empty cell."""
        for row in range(rows):
            for column in range(columns):
                color = color_of(row, column)
                at = (x + column * (cell + gap), y + row * (cell + gap))
                self.box(*at, cell, cell, color=color or "grey", fill=fill if color else "none", radius=1)

    # Output ------------------------------------------------------------------------------------------------------

    def svg(self) -> str:
        """The file's text; the same for the same calls."""
        light, dark = (
            "".join(
                f".{name}{{fill:{value};stroke:{value}}}.{name}-line{{stroke:{value}}}.{name}-text{{fill:{value}}}"
                for name, value in zip(COLORS, values, strict=True)
            )
            for values in zip(*COLORS.values(), strict=True)
        )
        style = (
            "svg{color:#1f2328}.t{fill:currentColor}.l{stroke:currentColor;fill:none}.h{fill:currentColor;stroke:none}"
            f"rect,circle,polygon{{stroke-width:1.5}}{light}@media(prefers-color-scheme:dark){{svg{{color:#e6edf3}}{dark}}}"
        )
        hatch = (
            '<defs><pattern id="hatch" width="8" height="8" patternTransform="rotate(45)" '
            'patternUnits="userSpaceOnUse"><path class="grey-line" d="M0 0V8" stroke-width="2" opacity=".5"/>'
            "</pattern></defs>"
        )
        body = "\n".join(self.shapes)
        font = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'width="{_n(self.width)}" font-family="{font}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n<style>{style}</style>\n'
            f"{hatch if 'url(#hatch)' in body else ''}{body}\n</svg>\n"
        )

    def _stroke(self, points: list[tuple[float, float]], color: str, width: float, dashed: bool) -> None:
        path = "M" + "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        kind = f"l {_color(color)}-line" if color else "l"
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.shapes.append(f'<path class="{kind}" d="{path}" fill="none" stroke-width="{_n(width)}"{dash}/>')

    def _head(self, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
        angle = math.atan2(end[1] - start[1], end[0] - start[0])
        corners = [end]
        for turn in (2.7, -2.7):
            corners.append((end[0] + 9 * math.cos(angle + turn), end[1] + 9 * math.sin(angle + turn)))
        at = " ".join(f"{_n(x)},{_n(y)}" for x, y in corners)
        self.shapes.append(f'<polygon class="{_color(color) if color else "h"}" points="{at}"/>')


def draw_server(drawing: Drawing, top: float, first: int, color: str, axis: str) -> None:
    """Draw four GPUs in a row, each with one of four shards; arrows join neighbors, which talk over `axis`.

    Args:
      top: Upper edge; the row is 122 units high.
      first: Number of the first GPU.
      color: Color of the shards, of the arrows and of the ranks on `axis` below.
    """
    drawing.box(92, top, 540, 122, fill="none", dashed=True, radius=10)
    for rank in range(4):
        left = 110 + rank * 134
        drawing.text(left, top + 18, f"GPU {first + rank}", size=15, bold=True)
        for shard in range(4):
            fill = "strong" if shard == rank else "none"
            drawing.box(left + shard * 24, top + 34, 22, 54, color=color, fill=fill, radius=2)
        drawing.text(left, top + 106, f"{axis} {rank}", size=15, color=color, bold=True)
        if rank < 3:
            drawing.arrow((left + 100, top + 61), (left + 130, top + 61), color, both=True)


def _color(name: str) -> str:
    if name not in COLORS:
        raise ValueError(f"unknown color {name!r}; use {', '.join(COLORS)}")
    return name


def _n(number: float) -> str:
    return f"{round(number, 1):g}"
