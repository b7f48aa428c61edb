"""Transformers trained on codes: softmax and its quantizer, products of two quantized tensors, activation curves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.codes.operators.quantize import DecodeFunction
from qat.kernels.cpu import compiler
from tests.references.cases_fused import assert_same, images, prepared, results, two_threads
from tests.references.prepared_case import Plain

__all__ = ["two_threads"]  # a fixture

pytestmark = pytest.mark.skipif(compiler.library() is None, reason="no C compiler here")


class Transformer(nn.Module):
    """Patches, one block as ViT has it, a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, dropout, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return self.head((x + self.mlp(self.other(x))).mean(1))  # type: ignore[no-any-return]


def test_a_transformer_step_is_that_of_the_plain_operations(counted: list[str]) -> None:
    assert_same(prepared(Transformer(), images()), images())
    ran = {name: counted.count(name) for name in set(counted)}
    steps = ran["QuantizeCurveFunction"]
    assert ran["MatmulFunction"] == 2 * steps and ran["QuantizeSoftmaxFunction"] == steps
    assert ran["CodesProductFunction"] == 8 * steps


def test_active_dropout_takes_probabilities_off_their_grid(counted: list[str]) -> None:
    model = prepared(Transformer(0.2), images())
    assert torch.isfinite(results(model, images(), plain=False)["y"]).all()
    assert counted.count("MatmulFunction") == counted.count("QuantizeSoftmaxFunction") == 1


CURVES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "gelu": nn.GELU,
    "gelu by tanh as a function": lambda: lambda x: F.gelu(x, approximate="tanh"),
    "silu in place": lambda: nn.SiLU(inplace=True),  # with 4 bits, for which it is not split
    "hardswish as a function": lambda: lambda x: F.hardswish(x, inplace=True),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", CURVES)
def test_curves(name: str, channels_last: bool, counted: list[str]) -> None:
    x = images(channels_last)
    layers = {"conv": nn.Conv2d(3, 16, 3, bias=False), "norm": nn.BatchNorm2d(16), "last": nn.Conv2d(16, 5, 3)}
    net = Plain(lambda self, x: self.last(self.act(self.norm(self.conv(x)))), **layers, act=CURVES[name]())
    recipe = qat.QuantRecipe(activation=qat.QuantSpec(bits=4 if "silu" in name else 8))
    assert_same(prepared(net, x, recipe), x)
    assert counted.count("QuantizeCurveFunction") == counted.count("CodesProductFunction") / 2 > 0


def on_rows(forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> nn.Module:
    """A model that sees 3 rows of 16 numbers of an image."""
    return Plain(lambda self, x: forward(self, x.flatten(2)[:, :, :16]), **layers)


def scores(between: Callable[[Tensor], Tensor]) -> nn.Module:
    """Two projections, their product, something, softmax, another product."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), self.b(x)
        return self.last(self.between(a @ b.transpose(-2, -1)) @ b)  # type: ignore[no-any-return]

    return on_rows(forward, a=nn.Linear(16, 24), b=nn.Linear(16, 24), last=nn.Linear(24, 5), between=between)


MASK = torch.full((3, 3), -1e4).triu(1)

SOFTMAXES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "as a layer": (nn.Softmax(-1), True),
    "as a method, multiplied from the left": (lambda s: (0.3 * s).softmax(dim=-1), True),
    "last axis by its number": (lambda s: torch.softmax(torch.mul(s, 0.3), 2), True),
    "divided, masked": (lambda s: F.softmax(s / 4 + MASK, dim=-1), True),
    "over another axis": (lambda s: torch.softmax(s * 0.3, 1), False),
    "with a type": (lambda s: torch.softmax(s, -1, dtype=torch.float32), False),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax(name: str, counted: list[str]) -> None:
    between, fused = SOFTMAXES[name]
    assert_same(prepared(scores(between), images()), images())
    assert counted.count("MatmulFunction") > 0
    assert counted.count("QuantizeSoftmaxFunction") == (counted.count("MatmulFunction") / 2 if fused else 0)


def test_layers_named_like_functions_are_what_they_are(counted: list[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), F.relu(self.b(x))
        others = self.c(a).mean() + self.c(b).mean()  # for which a and b are quantized
        return self.last(F.relu(self.softmax(self.matmul(a, b)))) + others  # type: ignore[no-any-return]

    layers = {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "c": nn.Linear(16, 1), "last": nn.Linear(3, 5)}
    net = on_rows(forward, **layers, softmax=nn.Softmin(-1), matmul=nn.CosineSimilarity(-1))
    assert_same(prepared(net, images()), images())
    assert {"MatmulFunction", "QuantizeSoftmaxFunction"}.isdisjoint(counted) and "CodesProductFunction" in counted


def test_scores_that_somebody_else_reads_are_there() -> None:
    def between(found: Tensor) -> Tensor:
        scaled = found * 0.3
        return torch.softmax(scaled, -1) + scaled.mean()

    assert_same(prepared(scores(between), images()), images())


def test_a_row_without_a_finite_score_is_nan_as_ever() -> None:
    model = prepared(scores(lambda s: torch.softmax(s + MASK, -1)), images())
    (mask,) = (buffer for buffer in model.buffers() if buffer.shape == MASK.shape)
    mask[0] = -math.inf
    for plain in (True, False):
        y = results(model, images(), plain)["y"]
        assert y[:, 0].isnan().all()


def test_products_of_other_shapes_are_torchs(counted: list[str]) -> None:
    """Of matrices without a batch, and of a batch with a single matrix: torch.matmul of what the codes stand for."""

    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), F.relu(self.b(x[0]))
        return self.c(a @ (b.T @ b))  # type: ignore[no-any-return]

    net = on_rows(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 16), c=nn.Linear(16, 5))
    assert_same(prepared(net, images()), images())
    assert "MatmulFunction" not in counted and "CodesProductFunction" in counted


def test_a_tensor_times_itself(counted: list[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(torch.bmm(x, x.mT))  # type: ignore[no-any-return]

    assert_same(prepared(on_rows(forward, a=nn.Linear(16, 16), b=nn.Linear(3, 5)), images()), images())
    assert "MatmulFunction" in counted


def test_nothing_is_decoded_between_projections_and_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepared(Transformer(), images())
    decoded: list[int] = []
    original = DecodeFunction.apply
    monkeypatch.setattr(DecodeFunction, "apply", lambda *inputs: decoded.append(1) or original(*inputs))
    model(images())
    assert not decoded
