"""QuantLSTM and QuantGRU: torch's results on fine grids, a NumPy reference on coarse ones, and the plumbing."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import qat
from qat.layers.recurrent import QuantGRU, QuantLSTM
from qat.spec import QuantSpec
from tests.layers.twin_case import CASES, RECURRENT, Array, activations, fine_twin, grid_product

FINE = QuantSpec(bits=16, signed=False, symmetric=False, init="minmax")
variants = pytest.mark.parametrize("variant", RECURRENT)
kinds = pytest.mark.parametrize("kind", ["lstm", "gru"])


def flat(result: Any) -> list[Tensor]:
    """The tensors of (output, h) or (output, (h, c)), outputs packed or not."""
    output, state = result
    return [getattr(output, "data", output), *(state if isinstance(state, tuple) else (state,))]


def state_for(layer: Any, samples: int | None) -> Any:
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    middle = () if samples is None else (samples,)
    hidden = torch.rand(rows, *middle, layer.proj_size or layer.hidden_size) - 0.5
    return (hidden, torch.randn(rows, *middle, layer.hidden_size)) if isinstance(layer, nn.LSTM) else hidden


@variants
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # torch's own
def test_fine_grids_give_what_torch_gives(variant: str, mode: str) -> None:
    torch.manual_seed(0)
    layer = CASES[variant].float_type(**CASES[variant].arguments).train(mode == "train")
    twin = fine_twin(layer).train(mode == "train")
    inputs: list[tuple[Any, int | None]] = [
        (torch.randn(5, 3, 4), 5 if layer.batch_first else 3),
        (torch.randn(3, 4), None),
        (pack_sequence([torch.randn(n, 4) for n in (2, 5, 1)], enforce_sorted=False), 3),
        (pack_sequence([torch.randn(n, 4) for n in (4, 4, 1)]), 3),
    ]
    for x, samples in inputs:
        for hx in (None, state_for(layer, samples)):
            expected, got = layer(x, hx), twin(x, hx)
            assert type(got[0]) is type(expected[0]) and type(got[1]) is type(expected[1])
            for ours, theirs in zip(flat(got), flat(expected), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
            if isinstance(x, PackedSequence):
                assert torch.equal(got[0].batch_sizes, x.batch_sizes)
                assert got[0].sorted_indices is x.sorted_indices and got[0].unsorted_indices is x.unsorted_indices


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def product(twin: Any, kind: str, suffix: str, x: Array, integers: bool) -> Array:
    name = f"product_{kind}_{suffix}"
    return grid_product(twin.get_submodule(name), x, *twin.inner_weights()[name], integers)


def step_reference(twin: Any, suffix: str, x: Array, h: Array, c: Array, integers: bool) -> tuple[Array, Array]:
    from_input = product(twin, "ih", suffix, x, integers)
    from_hidden = product(twin, "hh", suffix, h, integers)
    if isinstance(twin, nn.GRU):
        (xr, xz, xn), (hr, hz, hn) = (np.split(part, 3, -1) for part in (from_input, from_hidden))
        z = sigmoid(xz + hz)
        return z * h + (1 - z) * np.tanh(xn + sigmoid(xr + hr) * hn), c
    total = from_input + from_hidden
    i, f, g, o = np.split(total, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    h = sigmoid(o) * np.tanh(c)
    return product(twin, "hr", suffix, h, integers) if twin.proj_size else h, c


def reference(twin: Any, x: Array, integers: bool) -> Array:
    """The outputs for x of shape (L, N, inputs), from a zero state."""
    for number in range(twin.num_layers):
        directions = []
        for suffix in [f"l{number}", f"l{number}_reverse"][: 2 if twin.bidirectional else 1]:
            h, c = np.zeros((x.shape[1], twin.proj_size or twin.hidden_size)), np.zeros((x.shape[1], twin.hidden_size))
            outputs = {}
            for t in range(len(x))[:: -1 if "reverse" in suffix else 1]:
                h, c = step_reference(twin, suffix, x[t], h, c, integers)
                outputs[t] = h
            directions.append(np.stack([outputs[t] for t in range(len(x))]))
        x = np.concatenate(directions, -1)
    return x


@variants
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_coarse_grids_give_what_numpy_gives(variant: str, bits: int, mode: str) -> None:
    """In evaluation the reference computes in int64; the layer's bias and unit are float32."""
    torch.manual_seed(1)
    weight, spec = QuantSpec(bits=bits), QuantSpec(bits=bits, signed=False, symmetric=False)
    arguments = {**CASES[variant].arguments, "batch_first": False, "dtype": torch.float64}
    twin = CASES[variant].twin_type(**arguments, weight_spec=weight, activation_spec=spec)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    qat.calibrate(twin, [x])
    twin.train(mode == "train")
    expected = reference(twin, x.numpy(), mode == "eval")
    np.testing.assert_allclose(twin(x)[0].detach().numpy(), expected, rtol=0, atol=1e-9 if mode == "train" else 2e-6)


@kinds
def test_one_layer_with_dropout_warns_no_second_time(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = CASES[kind].float_type(4, 6, dropout=0.5)
    twin = CASES[kind].twin_type.from_float(layer)
    assert twin.dropout == 0.5 and twin.to_float().dropout == 0.5


@kinds
def test_a_weight_is_quantized_once_for_all_steps(kind: str) -> None:
    twin, x = CASES[kind].twin_type(4, 6), torch.randn(9, 2, 4)
    qat.calibrate(twin, [x])
    calls: list[str] = []
    for name in ("input_quantizer", "weight_quantizer"):
        quantizer = twin.get_submodule(f"product_hh_l0.{name}")
        quantizer.register_forward_hook(lambda *_, name=name: calls.append(name))
    twin.train()(x)
    assert sorted(calls) == ["input_quantizer"] * 9 + ["weight_quantizer"]


def test_calibration_sees_inputs_and_hidden_states() -> None:
    torch.manual_seed(0)
    twin = QuantLSTM(4, 6, 2, bidirectional=True, activation_spec=FINE)
    x = 3 * torch.randn(5, 8, 4)
    qat.calibrate(nn.Sequential(twin), [x])
    assert all(quantizer.is_calibrated for quantizer in activations(twin))
    by_name: Any = dict(twin.named_modules())
    step = by_name["product_ih_l0"].input_quantizer.scale.item()
    assert step == pytest.approx(float(x.max() - x.min()) / 65535, rel=1e-3)
    for suffix in ("l0", "l0_reverse", "l1", "l1_reverse"):
        step = by_name[f"product_hh_{suffix}"].input_quantizer.scale.item()
        assert 0.1 / 65535 < step < 2 / 65535, "hidden states stay within -1 and 1"


def test_calibration_sees_weights_that_changed() -> None:
    twin = QuantGRU(4, 6)
    before = {name: twin.get_submodule(name).weight_quantizer.scale.clone() for name in twin.inner_weights()}
    with torch.no_grad():
        for weight, _ in twin.inner_weights().values():
            weight.mul_(2)
    qat.calibrate(twin, [torch.randn(5, 2, 4)])
    for name, scale in before.items():
        torch.testing.assert_close(twin.get_submodule(name).weight_quantizer.scale, 2 * scale)


def test_reset_parameters_leaves_the_quantizers() -> None:
    layer, twin = nn.GRU(4, 6), QuantGRU(4, 6)
    grids = {name: value.clone() for name, value in twin.state_dict().items() if "product" in name}
    for module in (layer, twin):
        torch.manual_seed(5)
        module.reset_parameters()
    state = twin.state_dict()
    assert all(torch.equal(state[name], value) for name, value in layer.state_dict().items())
    assert all(torch.equal(state[name], value) for name, value in grids.items())


def test_a_module_in_place_of_a_product_is_called_at_every_step() -> None:
    """As an exporter does: frozen integers in modules that have only forward."""

    class Frozen(nn.Module):
        calls = 0

        def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            self.calls += 1
            return nn.functional.linear(x, weight, bias)

    torch.manual_seed(0)
    layer = nn.LSTM(4, 6, proj_size=2)
    twin = QuantLSTM.from_float(layer, activation_spec=None)
    for name in twin.inner_weights():
        twin.set_submodule(name, Frozen())
    x = torch.randn(5, 2, 4)
    torch.testing.assert_close(twin(x)[0], layer(x)[0])
    assert [twin.get_submodule(name).calls for name in twin.inner_weights()] == [1, 5, 5]
