"""`register_twin`: a user's own layer with a quantized twin, from prepare to export; and what layers refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.layers import QuantLayer, QuantLinear, QuantMultiheadAttention, register_twin
from qat.preparation.report import LEFT_IN_FLOAT, notes_of
from qat.spec import QuantSpec
from tests.references.prepared_case import Plain, draw
from tests.references.rule_specs import plain


class ScaledLinear(nn.Module):
    """y = gain * (x weight^T) with the gain as a buffer; qat does not know it."""

    def __init__(self, width: int, outputs: int, gain: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, width))
        self.register_parameter("bias", None)
        self.register_buffer("gain", torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.gain


@register_twin(ScaledLinear)
class QuantScaledLinear(QuantLayer, ScaledLinear):
    """The quantized twin of `ScaledLinear`; it counts its products, which shows that no fused step skips it."""

    products = 0

    def __init__(
        self, width: int, outputs: int, gain: float, *, weight_spec: Any = None, activation_spec: Any = None
    ) -> None:
        ScaledLinear.__init__(self, width, outputs, gain)
        self.add_quantizers(weight_spec, activation_spec)

    @staticmethod
    def constructor_arguments(layer: Any) -> dict[str, Any]:
        return {"width": layer.weight.shape[1], "outputs": layer.weight.shape[0], "gain": 1.0}

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.products += 1
        y = F.linear(x, weight) * self.gain
        return y if bias is None else y + bias


def float_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), ScaledLinear(8, 5, 0.25), nn.ReLU(), nn.Linear(5, 3))


BATCH = draw(16, 6)


def calibrated(model: nn.Module, recipe: qat.QuantRecipe | None = None) -> nn.Module:
    prepared = qat.prepare(model, recipe, BATCH)
    qat.calibrate(prepared, [BATCH])
    return prepared


def test_prepare_swaps_it_and_summary_lists_it() -> None:
    model = float_model()
    prepared = calibrated(model)
    twin = prepared.get_submodule("2")
    assert type(twin) is QuantScaledLinear and twin.float_type is ScaledLinear
    assert twin.gain.item() == 0.25
    assert notes_of(prepared, LEFT_IN_FLOAT) == {}
    assert "QuantScaledLinear" in qat.summary(prepared)
    assert prepared.load_state_dict(model.state_dict(), strict=False).unexpected_keys == []


def test_it_trains_and_evaluates_on_integers() -> None:
    model = float_model()
    prepared = calibrated(model)
    torch.testing.assert_close(prepared.eval()(BATCH), model(BATCH), rtol=0, atol=0.05)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    losses = []
    twin: Any = prepared.get_submodule("2")
    twin.products = 0
    for _ in range(5):
        optimizer.zero_grad()
        loss = prepared.train()(BATCH).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and twin.products == 5 and twin.weight.grad.abs().sum() > 0
    trained = prepared(BATCH)
    torch.testing.assert_close(prepared.eval()(BATCH), trained, rtol=0, atol=0.02)
    quantizer: Any = prepared.get_submodule("0_quantizer")
    codes = twin.integers(quantizer).codes
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 127


def test_it_is_exported_with_its_integers(tmp_path: Path) -> None:
    prepared = calibrated(float_model())
    qat.export_onnx(prepared, tmp_path / "model.onnx", BATCH)
    assert qat.verify_onnx(tmp_path / "model.onnx", prepared, [BATCH]).agreement == 1.0


def test_a_recipe_speaks_of_it_by_name_and_by_class() -> None:
    four_bits = qat.QuantRecipe(overrides={ScaledLinear: {"weight": {"bits": 4}}})
    assert calibrated(float_model(), four_bits).get_submodule("2").weight_quantizer.spec.bits == 4
    skipping = calibrated(float_model(), qat.QuantRecipe(overrides={"2": {"skip": True}}))
    assert notes_of(skipping, LEFT_IN_FLOAT) == {"2": "skipped by the recipe's pattern '2'"}


def test_it_is_a_layer_of_a_model_that_cannot_be_traced() -> None:
    net = Plain(lambda self, x: self.layer(x) if x.sum() > 0 else -self.layer(x), layer=ScaledLinear(6, 4, 0.5))
    prepared = calibrated(net)
    layer: Any = prepared.get_submodule("layer")
    assert type(layer) is QuantScaledLinear and layer.input_quantizer is not None
    assert prepared.eval()(BATCH).isfinite().all()


def test_what_is_no_twin_is_refused() -> None:
    with pytest.raises(TypeError, match=r"^register_twin\(ScaledLinear\): expected a subclass of QuantLayer, got "):
        register_twin(ScaledLinear)(nn.Linear)  # type: ignore[type-var]
    for wrong in ("Linear", QuantLinear):  # point 34: the latter as a decorator without parentheses gives it
        with pytest.raises(TypeError, match=r"^register_twin: expected a class of float layers, @register_twin"):
            register_twin(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^register_twin\(Linear\): its twin is qat\.layers\.linear\.QuantLinear$"):
        register_twin(nn.Linear)(QuantScaledLinear)


class QuantDoubled(QuantLinear):
    """Scales its bias too, which the integers of a layer do not: evaluation would be another function."""

    def operate(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super().operate(x, weight, bias)


def test_a_twin_that_evaluates_otherwise_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    register_twin(Doubled)(QuantDoubled)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"^calibrate: 0 \(QuantDoubled\) answers up to .* add the bias last and "):
        calibrated(nn.Sequential(Doubled(6, 4), nn.ReLU()))
    calibrated(nn.Sequential(Doubled(6, 4, bias=False), nn.ReLU()))  # nothing to scale wrongly


X, ROWS, APOT = torch.zeros(4, 3, 8), torch.zeros(2, 3, 4), QuantSpec(bits=4, rule="apot")
ONE_BIT = plain(bits=1, signed=False)


def nested_call() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    inner: Any = encoder.layers[0]
    inner.self_attn = QuantMultiheadAttention.from_float(inner.self_attn)
    with torch.no_grad():
        encoder(torch.randn(2, 4, 8), src_key_padding_mask=torch.tensor([[False] * 4, [False, False, True, True]]))


def replaced_out_proj() -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(8, 2)
    layer.out_proj = QuantLinear(8, 8)  # type: ignore[assignment]
    return layer


def attention(*inputs: Any, **options: Any) -> Any:
    return QuantMultiheadAttention(8, 2)(*inputs, **options)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: QuantLinear(2, 2, activation_spec=8), TypeError,  # type: ignore[arg-type]
     "activation_spec must be a QuantSpec, None or 'default', got 8"),
    (lambda: qat.QuantConvTranspose1d(2, 2, 3, activation_spec=None)(torch.zeros(1, 2, 6), [8]), TypeError, "size="),
    (lambda: qat.QuantConvTranspose2d(1, 1, 1, padding_mode="reflect"), ValueError, "QuantConvTranspose2d"),
    # attention
    (lambda: QuantMultiheadAttention.from_float(replaced_out_proj()), TypeError,
     "out_proj must be a Linear, got QuantLinear"),
    (lambda: attention(X, X, X, is_causal=True), ValueError, "is_causal=True"),
    (lambda: attention(X, X, X, attn_mask=torch.zeros(4, 4, dtype=torch.int64)), TypeError, "attn_mask .* torch.int64"),
    (lambda: QuantMultiheadAttention(8, 2, kdim=5)(X, X, X), ValueError,
     r"key must have 3 axes, the last of 5, got \(4, 3, 8\)"),
    (lambda: attention(X[None], X, X), ValueError, r"query must have 2 or 3 axes, the last of 8, got \(1, 4, 3, 8\)"),
    (lambda: QuantMultiheadAttention(8, 2, activation_spec=ONE_BIT), ValueError, "q, k and v: .*got bits=1"),
    (nested_call, ValueError, "query is a nested tensor"),
    # recurrent layers
    (lambda: qat.QuantGRU(4, 6)(torch.zeros(2, 3, 5)), ValueError, r"\(L, N, 4\) or \(L, 4\), got \(2, 3, 5\)"),
    (lambda: qat.QuantGRU(4, 6, batch_first=True)(torch.zeros(4)), ValueError, r"\(N, L, 4\) or \(L, 4\), got \(4,\)"),
    (lambda: qat.QuantGRU(4, 6, batch_first=True)(torch.zeros(2, 0, 4)), ValueError, r"at least one step.*\(2, 0, 4\)"),
    (lambda: qat.QuantGRU(4, 6)(ROWS, torch.zeros(1, 6)), ValueError, r"h_0 must have shape \(1, 3, 6\), got \(1, 6\)"),
    (lambda: qat.QuantLSTM(4, 6)(ROWS[0], (torch.zeros(1, 6), torch.zeros(1, 5))), ValueError,
     r"c_0 must have shape \(1, 6\), got \(1, 5\)"),
    (lambda: qat.QuantLSTM(4, 6)(ROWS, torch.zeros(1, 3, 6)), TypeError, "hx must be a pair.*got Tensor"),
    # tables
    (lambda: qat.QuantEmbedding(3, 2, activation_spec=QuantSpec()), ValueError,  # type: ignore[arg-type]
     "activation_spec must be None"),
    (lambda: qat.QuantEmbedding.from_float(nn.Embedding(3, 2), None, QuantSpec()), ValueError,
     "activation_spec must be None"),
    (lambda: qat.QuantEmbedding(3, 2, sparse=True, weight_spec=QuantSpec(rule="dorefa")), ValueError,
     "sparse=True .*got 'dorefa', 'channel' and 'none'"),
    (lambda: qat.QuantEmbedding(3, 2, weight_spec=APOT).integers(), ValueError, "'apot', whose values lie on no"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(("call", "error", "fact"), MISTAKES, ids=[fact[:40] for _, _, fact in MISTAKES])
def test_a_mistake_is_refused(call: Any, error: type[Exception], fact: str) -> None:
    with pytest.raises(error, match=fact):
        call()
