"""Forwards that compute with sizes in Python answer at other sizes as the float model does, or refuse them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.graph.modes import trace
from qat.graph.side_effects import CaptureError
from qat.inputs import bind_inputs
from qat.preparation.prepared_graph import PreparedGraph
from tests.references.prepared_case import Plain, refused

SIZES = """
x * max(h, w, 14)
x * max(h, 14)
x * max([h, w, 14])
x * max(h, w, 14, key=lambda s: s % 5)
x * max(h, w, key=lambda s: -s)
x * max([h, 14], default=3)
x * max([], default=h)
x * max(s for s in x.shape)
x * max(map(int, x.shape[2:]))
x * max(x.shape)
x * max(*x.shape[1:], 14)
x * max(max(h, w), 14, max(w, 13))
x * max(min(h, w, 20), 14)
x * min(h, w, 14)
x * min(n, 4, 100)
x[:, :, : min(h, w, 14)]
x[:, :, : min(h, 14), : min(w, 10)]
x[: min(n, 4, 6)]
x[:, :, max(h - 8, w - 8, 2) :]
x * sorted([h, w, 14])[0]
x * sorted((h, w), reverse=True)[0]
x * sorted([h, w, 14], key=lambda s: abs(s - 13))[0]
x * (h // 5) + w % 4
x * (2 if h > 13 else 3)
x * (2 if h > w else 3)
x * (2 if h == w else 3)
x * (2 if 12 <= h < 16 else 3)
x * (2 if h > 13 and w > 13 or n > 4 else 3)
x * (2 if n > 4 else 3)
x * (2 if n * h * w > 900 else 3)
x * (2 if x.numel() > 900 else 3)
x * (2 if x.shape[2:] == (12, 12) else 3)
x * (2 if x.size() == (2, 3, 12, 12) else 3)
x * (2 if x.shape[-1] in (12, 14) else 3)
x * (2 if x.shape > (2, 3, 13) else 3)
x * all(s > 11 for s in x.shape[2:])
x * any(s > 13 for s in x.shape[2:])
x * len([s for s in x.shape if s > 12])
x * len(list(filter(lambda s: s > 12, x.shape)))
x * (h > 13) + (w > 13)
(x if x.is_contiguous() else x.contiguous()) * 2
x * [2, 3, 5][min(2, h // 13, w // 12)]
x * {12: 2}.get(h, 3)
x * math.sqrt(h) + math.ceil(w / 5) + math.floor(h / 7)
x * math.prod(x.shape[2:])
F.pad(x, (0, max(0, 16 - w, 16 - h)))
F.pad(x, (0, -w % 4, 0, -h % 4))
F.interpolate(x, size=(max(h // 2, w // 3, 5), w))
F.adaptive_avg_pool2d(x, (min(h, w, 7), 7))
F.avg_pool2d(x, min(h, w, 3))
torch.cat([x[:, :, i :: 2] for i in range(2)], 2)
torch.stack([x.roll(i, 2) for i in range(min(h, w, 3))])
torch.cat([piece.mean(2, keepdim=True) for piece in x.chunk(min(3, h // 4), 2)], 2)
x * np.maximum(h, 14)
x * int(np.max([h, w, 14]))
x.reshape(n, c, max(h * w, 0, 1))
x.reshape(max(n, 1, 0), -1)
""".strip().splitlines()


def by_sizes(self: Any, x: Tensor) -> Tensor:
    import math

    import numpy as np

    n, c, h, w = x.shape
    known = {"x": x, "n": n, "c": c, "h": h, "w": w, "math": math, "np": np, "F": F, "torch": torch}
    y: Tensor = eval(self.body, known)
    return self.a(y) if y.dim() == 4 else self.a(x) + y.sum() / 100  # type: ignore[no-any-return]


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("body", SIZES)
def test_sizes_in_python_are_followed_or_refused(body: str, training: bool) -> None:
    """Point 63: min and max of three or more, or with key= or default=, froze in silence."""
    model = Plain(by_sizes, a=nn.Conv2d(3, 4, 3, padding=1), body=body).train(training)
    example = torch.randn(2, 3, 12, 12)
    graph = trace(model, bind_inputs("prepare", model, example), PreparedGraph).train(training)
    answered = 0
    for shape in ((2, 12, 12), (2, 16, 20), (5, 12, 12), (1, 24, 13), (3, 13, 24), (6, 11, 9)):
        x = torch.randn(shape[0], 3, *shape[1:])
        for given in (x, x.contiguous(memory_format=torch.channels_last)):
            try:
                found = graph(given)
            except ValueError as error:
                assert "the model was prepared for inputs" in str(error)
                continue
            assert torch.allclose(found, model(given), 1e-4, 1e-5), (body, shape)
            answered += 1
    assert answered


@pytest.mark.parametrize(
    "body", ["x.is_contiguous()", "x.is_contiguous(memory_format=torch.channels_last)", "x.stride()[1] == 1"]
)
def test_a_way_that_the_layout_decides_is_no_graph(body: str) -> None:
    model = Plain(by_sizes, a=nn.Conv2d(3, 4, 3), body=f"x * (2 if {body} else 3)").eval()
    with refused("forward asks a tensor for its layout in memory, which a graph does not keep", CaptureError):
        trace(model, bind_inputs("prepare", model, torch.randn(2, 3, 12, 12)), PreparedGraph)
