"""Pictures that lessons show beside their text: numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor, nn

from comera_lab.panels.figures import BLUE, GREEN, INK, ORANGE, PURPLE, STATIC_WIDTH, TEMPLATE

IMAGE_PX = 130
# Paper is transparent, so that an image is neither a white nor a black slab on either theme.
INK_SCALE = [[0.0, "rgba(128,128,128,0.06)"], [1.0, INK]]


def image_row(images: Mapping[str, Any], side: int) -> go.Figure:
    """Small square images side by side under their names. Each value has side * side numbers, 0 to 1, any shape."""
    figure = make_subplots(1, len(images), subplot_titles=list(images), horizontal_spacing=0.02)
    for column, image in enumerate(images.values(), start=1):
        pixels = image.detach().reshape(side, side).numpy() if isinstance(image, Tensor) else image
        figure.add_trace(
            go.Heatmap(z=pixels, zmin=0, zmax=1, colorscale=INK_SCALE, showscale=False, hoverinfo="skip"), 1, column
        )
        figure.update_xaxes(visible=False, row=1, col=column, fixedrange=True, constrain="domain")
        figure.update_yaxes(
            visible=False, row=1, col=column, fixedrange=True, autorange="reversed",
            scaleanchor=f"x{column}" if column > 1 else "x", constrain="domain",
        )  # fmt: skip
    width = IMAGE_PX * len(images)
    figure.update_layout(template=TEMPLATE, width=width, height=IMAGE_PX + 40, margin={"l": 8, "r": 8, "t": 34, "b": 6})
    figure.update_annotations(font_size=14)
    return figure


# part, its colour and pattern, and the colour of a label on it
_PARTS = (
    ("word table", BLUE, "", "white"), ("attention", ORANGE, "/", "black"), ("feed-forward", GREEN, "x", "black"),
    ("stays dense", PURPLE, ".", "black"),
)  # fmt: skip
_MATRICES = {"query": 1, "key": 1, "value": 1, "out": 1, "widen": 2, "narrow": 2}


def encoder_parts(model: nn.Module) -> dict[str, int]:
    """Parameters of a `PairEncoder` by part; its pooler, one square layer, counts to attention's."""
    counts = dict.fromkeys((part[0] for part in _PARTS), 0)
    for name, parameter in model.named_parameters():
        owner, place = name.split("."), 3
        if owner[0] == "words":
            place = 0
        elif owner[-1] != "bias" and owner[0] in ("blocks", "pooler"):
            place = 1 if owner[0] == "pooler" else _MATRICES.get(owner[2], 3)
        counts[_PARTS[place][0]] += parameter.numel()
    return counts


def part_bars(models: Mapping[str, nn.Module]) -> go.Figure:
    """A bar of 100 % for each encoder: where its parameters are. Meta tensors will do."""
    figure = go.Figure(layout={"template": TEMPLATE, "barmode": "stack", "bargap": 0.3, "legend_traceorder": "normal"})
    figure.update_layout(width=STATIC_WIDTH, height=90 + 64 * len(models))
    parts = {f"{name}: {sum(counts.values()):,}": counts for name, counts in
             ((name, encoder_parts(model)) for name, model in models.items())}  # fmt: skip
    for part, colour, pattern, ink in _PARTS:
        shares = [100 * counts[part] / sum(counts.values()) for counts in parts.values()]
        figure.add_trace(go.Bar(
            name=part, orientation="h", y=list(parts), x=shares, textposition="inside", insidetextanchor="middle",
            text=[f"{counts[part]:,}" if x > 12 else "" for counts, x in zip(parts.values(), shares, strict=True)],
            textangle=0, insidetextfont={"color": ink, "size": 14},
            hovertemplate="%{x:.1f} % %{fullData.name}<extra></extra>",
            marker={"color": colour, "line": {"width": 0},
                    "pattern": {"shape": pattern, "size": 9, "solidity": 0.15, "fillmode": "overlay",
                                "fgcolor": "rgba(255,255,255,.6)"}},
        ))  # fmt: skip
    figure.update_xaxes(title_text="share of the parameters (%)", range=[0, 100], fixedrange=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, ticks="", ticklabelstandoff=8, fixedrange=True)
    return figure
