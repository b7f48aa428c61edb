"""The tree in which a fused step finds the model's modules and tensors."""

import torch
from torch import Tensor, fx, nn

from qat.fused.modules import module_tree


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.shift = nn.Sequential(Inner(), Inner()), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_every_path_of_a_graph_leads_to_what_the_model_has_now() -> None:
    model, graph = Model(), fx.Graph()
    # A module below one that is named itself, a tensor of an unnamed block, one of the model itself.
    paths = ["blocks.0", "blocks.0.layer", "blocks.1.layer", "blocks.1.gain", "shift", "blocks.1.layer.weight"]
    for path in paths:
        graph.get_attr(path)
    tree = module_tree(model, graph)
    for place in (model.blocks[1], model):  # written after the tree was made
        name = "gain" if place is model.blocks[1] else "shift"
        setattr(place, name, nn.Parameter(torch.randn(2)))
    for path in paths:
        found, expected = tree, model
        for step in path.split("."):
            found, expected = getattr(found, step), getattr(expected, step)
        assert found is expected, path
