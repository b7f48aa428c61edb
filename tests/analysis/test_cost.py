"""`cost`, against figures by hand."""

import pytest
import torch
import torchvision
from torch import nn

import qat
from qat.analysis.cost import BETWEEN, LayerCost
from tests.references.prepared_case import Plain


def test_resnet18_has_the_macs_of_its_shapes() -> None:
    """7x7 from 3 to 64 channels at 112x112; 3x3 and 1x1 at 56, 28, 14 and 7; the head: 1.814 G."""
    image = torch.zeros(1, 3, 224, 224)
    float_model = torchvision.models.resnet18()
    stem, head = 112 * 112 * 64 * 3 * 49, 512 * 1000
    stages = 4 * 56 * 56 * 64 * 64 * 9  # layer1
    for channels, side in ((128, 28), (256, 14), (512, 7)):
        first, others, shortcut = channels // 2 * 9, 3 * channels * 9, channels // 2
        stages += side * side * channels * (first + others + shortcut)
    model = qat.prepare(float_model, qat.QuantRecipe(weight={"bits": 4}), image[..., :64, :64])
    rows = {row.name: row for row in qat.cost(model, image)}
    assert sum(row.macs for row in rows.values()) == stem + stages + head == 1_814_073_344
    assert len(rows) == 21 and rows["conv1"] == LayerCost("conv1", stem, 4, 8, 64 * 3 * 49 // 2)
    assert rows["conv1"].bops == stem * 4 * 8
    floats = qat.cost(float_model, image)
    assert [(row.name, row.macs) for row in floats][:2] == [("conv1", stem), ("layer1.0.conv1", 56 * 56 * 64 * 64 * 9)]
    assert {(row.weight_bits, row.activation_bits) for row in floats} == {(32, 32)}
    assert sum(row.bops for row in floats) == 1_814_073_344 * 1024


def test_groups_transposed_and_shared_layers() -> None:
    depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    layers = {"depthwise": depthwise, "up": nn.ConvTranspose2d(8, 4, 2, stride=2), "fc": nn.Linear(4, 4)}
    net = Plain(lambda self, x: self.fc(self.fc(self.up(self.depthwise(x)).mean((2, 3)))), **layers)
    x = torch.zeros(1, 8, 5, 5)
    model = qat.prepare(net, qat.QuantRecipe(overrides={"up": {"skip": True}}), x)
    rows = {row.name: row for row in qat.cost(model, x)}
    macs = {"depthwise": 25 * 8 * 9, "up": 25 * 8 * 4 * 4, "fc": 2 * 16}
    assert {name: row.macs for name, row in rows.items()} == macs
    assert rows["up"] == LayerCost("up", 25 * 8 * 4 * 4, 32, 32, 4 * 8 * 4 * 4)
    assert rows["fc"].weight_bytes == 16


def test_products_of_activations_have_a_row_and_switched_off_is_float() -> None:
    x = torch.randn(1, 5, 8)
    model = qat.prepare(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), example_inputs=x)
    *rows, between = qat.cost(model, x)
    assert sum(row.macs for row in rows) == 5 * (4 * 8 * 8 + 2 * 8 * 16)
    assert between == LayerCost(BETWEEN, 2 * 5 * 5 * 8, 8, 8, 0)
    assert sum(row.weight_bytes for row in rows) == 4 * 8 * 8 + 2 * 8 * 16
    with qat.disable_fake_quant(model):
        assert {(row.weight_bits, row.activation_bits) for row in qat.cost(model, x)} == {(32, 32)}
    assert {row.weight_bits for row in qat.cost(model, x)} == {8}
    with pytest.raises(ValueError, match="cost: example_inputs do not fit"):
        qat.cost(model, {"images": x})


def test_a_layer_with_two_names_and_a_model_of_one_layer() -> None:
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(nn.Sequential(shared), nn.Sequential(nn.ReLU(), shared))
    for model, expected in ((twice, ("0.0", 32)), (shared, ("", 16))):
        assert [(row.name, row.macs) for row in qat.cost(model, torch.zeros(1, 4))] == [expected]


def test_the_model_is_left_as_it_was() -> None:
    x = torch.randn(3, 4)
    model = qat.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train(), example_inputs=x)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    qat.cost(model, x)
    assert model.training and all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
