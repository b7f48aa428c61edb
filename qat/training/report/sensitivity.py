"""The figure of `python -m qat sensitivity`: what the grids of each layer cost."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {"weight": "weights", "activation": "activations"}


def sensitivity_figure(result: dict[str, Any]) -> "Figure":
    """A bar for the weights and one for the activations of each layer, from the first that runs down to the last.

    Args:
        result: what sensitivity.json has; a bar is the loss with only this part quantized, less that in float.
    """
    from matplotlib.figure import Figure

    layers, floor = result["layers"], result["float"]["loss"]
    figure = Figure(figsize=(7, 1.2 + 0.26 * len(layers)), layout="constrained")
    axes = figure.subplots()
    for number, (part, words) in enumerate(PARTS.items()):
        rows = [(place, row["only"][part]["loss"]) for place, row in enumerate(layers) if part in row["only"]]
        places, losses = [place + 0.4 * number - 0.2 for place, _ in rows], [loss - floor for _, loss in rows]
        axes.barh(places, losses, height=0.4, label=words)
    axes.set_yticks(range(len(layers)), [row["name"] for row in layers], fontsize=7)
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.set(xlabel=f"loss above float, with only this quantized ({result['images']:,} images)")
    axes.legend(frameon=False, fontsize=8)
    return figure
