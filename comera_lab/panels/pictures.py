"""Pictures that lessons show beside their text: numbers in, go.Figure out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from comera_lab.panels.figures import INK, TEMPLATE

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
