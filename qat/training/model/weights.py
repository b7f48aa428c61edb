"""Loads float weights from a file into a model, strictly: all keys and shapes must match."""

import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from qat.collectives import rank
from qat.torch_internals import layer_versions, set_layer_versions
from qat.training.config.imports import reason
from qat.training.errors import UserError, looked_in
from qat.training.ranks.group import share_state
from qat.training.run.checkpoint import load_state, read_archive, read_safetensors

State: TypeAlias = "OrderedDict[str, Tensor]"

FORMATS = ".safetensors, or a dict of tensors written by torch.save"


def load_weights(model: nn.Module, path: str, model_name: str, key: str = "model.checkpoint") -> None:
    """Load the weights in `path` into `model`; errors call the model `model_name` and the file `key`.

    The file is a .safetensors, or a dict of tensors written by torch.save, possibly under the key `state_dict` or
    `model`. Prefixes of DataParallel, torch.compile and Lightning (`model.`) are dropped; step counters of batch norms
    may be missing.
    """
    where = f"{key}: '{path}'"
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise UserError(f"{where} " + ("is a folder" if file.is_dir() else f"does not exist{looked_in(file)}"))
    state = _read(file, where)
    own = model.state_dict()
    _adopt_names(state, own)
    _refuse_other_kinds(state, own, where)
    load_state(model, state, f"{where} is not of {model_name}")


def load_float_weights(model: nn.Module, path: Path, model_name: str) -> None:
    """Load the run's own float weights, which lie on rank 0's disk, on all ranks."""
    if rank() == 0:
        load_weights(model, str(path), model_name, "float weights")
    share_state(model)


def last_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """Name and module of the last linear or 2d convolutional layer, the classifier; without one "" and the model."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    return layers[-1] if layers else ("", model)


def _read(file: Path, where: str) -> State:
    """Read a file's tensors by key, without running code from the file."""
    content: Any
    try:
        content = read_safetensors(file) if file.suffix == ".safetensors" else read_archive(file)
    except Exception as error:  # torch.load raises errors of many types for files that torch.save did not write
        what, held = reason(error), re.search(r"GLOBAL ([\w.]+)", str(error))
        if held:
            what = f"it holds a {held[1]}, which only its code could read: save state_dict()"
        elif isinstance(error, pickle.UnpicklingError):  # a page of advice, with colours
            what = "torch.save did not write it"
        raise UserError(f"{where} cannot be read ({what}); it must be {FORMATS}") from error
    if isinstance(content, dict):
        content = next((content[key] for key in ("state_dict", "model") if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not all(_is_plain(value) for value in content.values()):
        raise UserError(f"{where} holds something else than weights; it must be {FORMATS}")
    if not content:
        raise UserError(f"{where} holds no weights")
    state = OrderedDict(content)
    if hasattr(content, "_metadata"):  # versions of the layers, with which they convert older weights
        state._metadata = content._metadata  # type: ignore[attr-defined]
    return state


def _is_plain(value: Any) -> bool:
    """Whether this is a dense, unquantized tensor with data."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_quantized or value.is_meta)


def _refuse_other_kinds(state: State, own: dict[str, Tensor], where: str) -> None:
    """Refuse weights whose values copying would change silently: integers and 8-bit floats, which need scales.

    Floats may differ in width. Values that are not finite are accepted only where the model has such too (masks).
    """
    for key, value in state.items():
        mine = own.get(key, value)
        kinds = {(each.is_floating_point(), each.is_complex(), each.dtype is torch.bool) for each in (value, mine)}
        if len(kinds) > 1 or value.element_size() < min(2, mine.element_size()):
            raise UserError(f"{where}: {key} is {value.dtype} in the file, {mine.dtype} in the model; convert it")
        if value.shape == mine.shape and not (value.to(mine.dtype).isfinite() | ~mine.cpu().isfinite()).all():
            raise UserError(f"{where}: {key} has values that are not finite ({mine.dtype})")


def _adopt_names(state: State, own: dict[str, Tensor]) -> None:
    """Give a file's weights the names and layer versions of the model, where no information is lost."""
    for prefix in ("model.", "module.", "_orig_mod.", "module."):  # they may be nested either way
        if not any(key.startswith(prefix) for key in own):
            consume_prefix_in_state_dict_if_present(state, prefix)
    if layer_versions(state) is None:
        set_layer_versions(state, layer_versions(own) or {})
    for key in own:
        if key.endswith("num_batches_tracked"):
            state.setdefault(key, own[key])
