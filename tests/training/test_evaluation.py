"""Evaluation: means over images, outputs of all kinds, and a model left as it was."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_training import CPU, Outputs, Returns, TinyBatches, tiny_model

from qat.training.errors import UserError
from qat.training.loop.evaluation import evaluate


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y,
        lambda y: Outputs(None, y),
        lambda y: [y, -y],
        lambda y: {"aux": -y, "logits": y},
        lambda y: {"out": y, "aux": -y},
    ],
)
def test_evaluation_is_the_mean_over_images(wrap: Any) -> None:
    torch.manual_seed(0)
    model, batches = Returns(wrap), TinyBatches(7)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    logits = model.fc(batches.images[order].flatten(1)).detach()
    labels = batches.labels[order]
    result = evaluate(model, batches, CPU)
    assert result.count == 24
    assert torch.equal(result.predictions, logits.argmax(1))
    assert result.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert 0 < result.top1 < 100
    assert result.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


def test_evaluation_leaves_no_trace() -> None:
    model = tiny_model().train()
    model.bn.eval()
    flags = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rng = torch.get_rng_state()
    first = evaluate(model, TinyBatches(), CPU, progress="validation")
    assert torch.equal(evaluate(model, TinyBatches(), CPU).predictions, first.predictions)
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), rng)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def test_evaluation_restores_the_model_after_a_failure() -> None:
    model = Returns(lambda y: y[0]).train()
    with pytest.raises(UserError) as raised:
        evaluate(model, TinyBatches(7), CPU)
    assert str(raised.value) == "model: it must return logits of shape (7, classes), but returned (2,)"
    assert model.training and model.fc.training


@pytest.mark.parametrize(("wrap", "got"), [(lambda y: {"loss": y}, "dict"), (lambda y: [], "list")])
def test_a_model_without_logits_is_a_sentence(wrap: Any, got: str) -> None:
    with pytest.raises(UserError) as raised:
        evaluate(Returns(wrap), TinyBatches(7), CPU)
    assert str(raised.value) == f"model: it must return logits of shape (7, classes), but returned {got}"


def test_an_empty_split_is_a_sentence() -> None:
    with pytest.raises(UserError) as raised:
        evaluate(tiny_model(), [], CPU)
    assert str(raised.value) == "data: the split to evaluate on has no images"
