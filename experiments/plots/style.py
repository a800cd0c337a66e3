"""What all figures share: size, fonts, colours, wrapped text, legend, and rendering.

Colours are those of Okabe and Ito, "Color Universal Design" (2008), which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

DPI = 150
WIDTH_IN, HEIGHT_IN = 10.66, 6.0
FONT_PT, TITLE_PT = 11, 13
# of DejaVu Sans, on average, as a share of the font size
CHARACTER_WIDTH_EM = 0.58

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW, GREY, DARK = "#E69F00", "#56B4E9", "#F0E442", "#8C8C8C", "#333333"
ARM_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, DARK)
# with the size that makes them look equally large
ARM_MARKERS = (("o", 1.0), ("s", 0.85), ("^", 1.0), ("D", 0.75), ("v", 1.0), ("P", 1.0), ("X", 1.0))

Colour = tuple[float, float, float]


def lighter(colour: str, share: float = 0.4) -> Colour:
    """Mixed with white."""
    red, green, blue = (1 - (1 - part) * (1 - share) for part in to_rgb(colour))
    return red, green, blue


def darker(colour: str, share: float = 0.3) -> Colour:
    """Mixed with black: text in a light colour is hard to read."""
    red, green, blue = (part * (1 - share) for part in to_rgb(colour))
    return red, green, blue


class _Wrapper(textwrap.TextWrapper):
    """Arms have names such as `a(b=1,c=2)/d`: these break behind punctuation too."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=[/,(])(?=[^\s]))")


def wrap(text: str, width: int) -> str:
    """At most `width` characters a line; a dollar sign is a dollar sign, not mathematics."""
    wrapper = _Wrapper(width, break_on_hyphens=False)
    lines = (wrapper.fill(line) for line in text.splitlines())
    return "\n".join(lines).replace("$", r"\$")


def characters_in(width_in: float, size_pt: float = FONT_PT) -> int:
    """How many characters of average text fit into a width in inches."""
    return max(8, int(width_in * 72 / (CHARACTER_WIDTH_EM * size_pt)))


def new_axes(title: str, width_in: float = WIDTH_IN, height_in: float = HEIGHT_IN) -> tuple[Figure, Axes]:
    """An empty figure with a light grid behind its data, and room for what stands outside the axes."""
    figure = Figure((width_in, height_in), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    text = wrap(title, characters_in(width_in * 0.94, TITLE_PT))
    figure.suptitle(text, x=0.012, ha="left", fontsize=TITLE_PT, color=DARK)
    return figure, _styled(figure.add_subplot())


def split(figure: Figure, panels: int) -> list[Axes]:
    """Several axes side by side in place of the figure's own, left to right."""
    figure.delaxes(figure.axes[0])
    return [_styled(figure.add_subplot(1, panels, index + 1)) for index in range(panels)]


def _styled(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(which="both", labelsize=FONT_PT, color=GREY, labelcolor=DARK)
    axes.grid(visible=True, color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def label_axes(axes: Axes, x_label: str, y_label: str = "", x_characters: int = 90) -> None:
    axes.set_xlabel(wrap(x_label, x_characters), fontsize=FONT_PT, color=DARK)
    axes.set_ylabel(wrap(y_label, 45), fontsize=FONT_PT, color=DARK)


def legend_below(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Below the axes, where it covers no data; as many columns as fit."""
    width_in = figure.get_figwidth()
    texts = [wrap(label, characters_in(width_in) - 12) for label in labels]
    figure.legend(
        list(handles),
        texts,
        loc="outside lower center",
        ncols=_columns(texts, characters_in(width_in)),
        fontsize=FONT_PT,
        labelcolor=DARK,
        frameon=False,
        handlelength=1.6,
        columnspacing=1.5,
    )


def _columns(texts: Sequence[str], characters: int) -> int:
    """The most columns that fit into a line; a column is as wide as its longest text and its sample."""
    lengths = [max(map(len, text.splitlines()), default=0) + 6 for text in texts]
    for columns in range(len(texts), 1, -1):
        # the split that matplotlib's legend makes
        if sum(max(part) for part in np.array_split(lengths, columns)) <= characters:
            rows = math.ceil(len(texts) / columns)
            return math.ceil(len(texts) / rows)  # even rows
    return 1


def number(value: float) -> str:
    """Four digits, with thousands separators, never an exponent in the ranges of these figures."""
    return f"{float(f'{value:.4g}'):,.12g}"


def fix_layout(figure: Figure) -> None:
    """Lay the figure out and keep it so: from here on a pixel is a pixel, and texts can be placed by measuring."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def text_box(figure: Figure, text: str, size_pt: float = FONT_PT) -> Bbox:
    """The box of a text at the origin, pixels."""
    artist = figure.text(0, 0, text, fontsize=size_pt)
    box = artist.get_window_extent()
    artist.remove()
    return box


def png(figure: Figure) -> bytes:
    """The figure as a PNG of 150 dpi; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()
