"""FSDP2: ranks that hold a part of every weight train, save, resume and export as one process with whole weights."""

import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qat
from qat.finetuning import EMA, Oscillations
from tests.ranks.parallel_training import MODELS, batch, calibrate, exported, optimizer_of, prepared, train
from tests.runs.tiny_training import on_ranks

SAVED, LAST = 6, 10
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

LAYERS = (nn.Conv2d, nn.Linear, nn.Embedding, nn.MultiheadAttention)


def sharded(name: str, model: nn.Module) -> nn.Module:
    """One group for each layer; for two layers of a block and one for the rest; or a single group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": qat.replicate_quantizers(model)}
    layers = [each for each in model.modules() if isinstance(each, LAYERS)]
    if name in ("cnn", "learned bits"):
        for layer in layers:
            fully_shard(layer, **options)
    elif name == "vit":
        fully_shard([model.block.up, model.block.down], **options)
    fully_shard(model, **options)
    return model


def new(name: str, rank: int = 0, count: int = 1, frozen: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded where there are ranks, and then calibrated; and its optimizer."""
    model = prepared(name, torch.float64, rank)
    qat.freeze_scales(model, frozen)
    if dist.is_initialized():
        sharded(name, model)
    qat.freeze_scales(model, False)
    calibrate(model, name, torch.float64, rank, count)
    return model, optimizer_of(model, torch.optim.AdamW)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in get_model_state_dict(model, options=WHOLE).items()}


def averaged_answer(model: nn.Module, ema: EMA, name: str) -> Tensor:
    """The answer of the averaged weights in evaluation; and the model's own is the same before and behind."""
    x, _ = batch(name, 96, torch.float64)
    with torch.no_grad():
        own = model.eval()(x)
        with ema.swapped(model):
            answer = model(x)
        assert torch.equal(model(x), own)
        assert not torch.equal(answer, own)
    return answer


def trained(name: str, folder: Path | None = None, rank: int = 0, count: int = 1) -> dict[str, Any]:
    """The states before the first step and behind the last; on the way a checkpoint is saved."""
    model, optimizer = new(name, rank, count)
    ema, found = EMA(model, 0.5), {"start": full_state(model)}
    for _ in train(model, optimizer, name, range(SAVED), rank, count):
        ema.update(model)
    if folder is not None:
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder / name)
    list(train(model, optimizer, name, range(SAVED, LAST), rank, count))
    return {**found, "averaged": averaged_answer(model, ema, name), "end": full_state(model)}


def resumed(name: str, folder: Path, rank: int = 0, count: int = 1) -> dict[str, Tensor]:
    """The state behind the last step, from a checkpoint on."""
    model, optimizer = new(name, rank, count)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / name)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    list(train(model, optimizer, name, range(SAVED, LAST), rank, count))
    return full_state(model)


def ewgs_of_sharded_weights(x: Tensor) -> None:
    model = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 3)), qat.QuantRecipe(weight={"bits": 4, "ewgs": "hessian"}), x)
    qat.calibrate(model, [x])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=qat.replicate_quantizers(model))
    model.eval()(x)  # behind which FSDP2 shows whole weights
    qat.update_ewgs(model, lambda model, x: model(x).mean(), [x])


def sentence(call: Any) -> str:
    with pytest.raises(ValueError) as raised:
        call()
    return str(raised.value)


def work(folder: Path, rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    found: dict[str, Any] = {name: trained(name, folder, rank, 2) for name in MODELS}
    found |= {f"{name}, resumed": resumed(name, folder, rank, 2) for name in MODELS}
    model, optimizer = new("cnn", rank, 2, frozen=True)
    qat.freeze_scales(model)
    found["frozen"] = full_state(model)
    qat.freeze_scales(model, False)
    list(train(model, optimizer, "cnn", range(2), rank, 2))
    found["thawed"] = {key: p.detach() for key, p in model.named_parameters() if "quantizer" in key}
    found["explained"] = str(qat.explain(model))
    found["export"] = sentence(lambda: qat.export_onnx(model, folder / "model.onnx", batch("cnn", 0, torch.float64)[0]))
    found["ewgs"] = sentence(lambda: ewgs_of_sharded_weights(batch("cnn", 0, torch.float32)[0]))
    found["oscillations"] = sentence(lambda: Oscillations(model))
    return found


def resume_all(folder: Path, rank: int) -> dict[str, Any]:
    warnings.simplefilter("error")
    return {name: resumed(name, folder, rank, 4) for name in MODELS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(partial(work, checkpoints), tmp_path_factory.mktemp("gloo"))


alone = cache(trained)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-9, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_calibrate_behind_sharding_finds_the_ranges_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    assert_same(ranks[0][name]["start"], alone(name)["start"])


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_train_the_model_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    assert_same(ranks[0][name]["end"], alone(name)["end"])
    for found in ranks:
        torch.testing.assert_close(found[name]["averaged"], alone(name)["averaged"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_resume_bit_by_bit(ranks: list[dict[str, Any]], name: str) -> None:
    for key, value in ranks[0][name]["end"].items():
        assert torch.equal(ranks[0][f"{name}, resumed"][key], value), key


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "name", ["cnn", *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS if each != "cnn")]
)
def test_one_process_resumes_and_exports_the_same_integers(
    ranks: list[dict[str, Any]], name: str, checkpoints: Path, tmp_path: Path
) -> None:
    state = resumed(name, checkpoints)
    assert_same(state, alone(name)["end"])
    assert_same_integers(name, [state, ranks[0][f"{name}, resumed"], alone(name)["end"]], tmp_path)


def assert_same_integers(name: str, states: list[dict[str, Tensor]], folder: Path) -> None:
    first, *others = (exported(state, name, folder) for state in states)
    for other in others:
        assert first.keys() == other.keys()
        assert [key for key in first if not np.array_equal(first[key], other[key])] == []


@pytest.mark.slow
def test_four_ranks_resume(ranks: list[dict[str, Any]], checkpoints: Path, tmp_path: Path) -> None:
    found = on_ranks(partial(resume_all, checkpoints), tmp_path, 4)
    for name in MODELS:
        assert_same(found[0][name], alone(name)["end"])
        assert_same_integers(name, [found[0][name], alone(name)["end"]], tmp_path)


def test_what_needs_whole_weights_says_so(ranks: list[dict[str, Any]]) -> None:
    found = ranks[1]
    assert found["export"].startswith("export_onnx: '0.weight' is sharded over the ranks")
    assert found["ewgs"] == "update_ewgs: the weights are sharded over the ranks; call it before fully_shard"
    assert found["oscillations"].endswith("the weight of '0' is sharded over the ranks")
    assert "kernels do not compute what FSDPQuantConv2d does" in found["explained"]
    assert "trains operation by operation" in found["explained"]


def test_frozen_scales_are_in_the_state(ranks: list[dict[str, Any]]) -> None:
    model = prepared("cnn", torch.float64)
    model.load_state_dict(ranks[0]["frozen"])
    assert all(each.is_frozen for each in model.modules() if isinstance(each, qat.Quantizer))


def test_scales_that_were_frozen_at_sharding_learn_the_same_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (found["thawed"] for found in ranks)
    assert first
    assert [key for key in first if not torch.equal(first[key], second[key])] == []
    assert any(not torch.equal(first[key], ranks[0]["frozen"][key]) for key in first)
