"""The figure of `python -m qat sensitivity`: what the grids of each layer cost."""

from typing import Any

from qat.training.report.drawing import COLOURS, panels

PARTS = {"weight": "weights", "activation": "activations"}


def sensitivity_figure(result: dict[str, Any]) -> Any:
    """A bar for the weights and one for the activations of each layer, from the first that runs down to the last.

    Args:
        result: what sensitivity.json has; a bar is the loss with only this part quantized, less that in float.
    """
    weights = f"{result.get('weights', 'calibrated')} weights"
    layers, floor = result["layers"], result["float"]["loss"]
    figure, [[axes]] = panels(height=1 + 0.22 * len(layers))
    for number, (part, words) in enumerate(PARTS.items()):
        rows = [(place, row["only"][part]["loss"]) for place, row in enumerate(layers) if part in row["only"]]
        places, losses = [place + 0.4 * number - 0.2 for place, _ in rows], [loss - floor for _, loss in rows]
        axes.barh(places, losses, height=0.4, label=words, color=COLOURS[number])
    axes.set_yticks(range(len(layers)), [row["name"] for row in layers])
    axes.set_ylim(len(layers) - 0.4, -0.6)
    axes.set(xlabel=f"loss above float, with only this quantized ({result['images']:,} images; {weights})")
    axes.legend()
    return figure
