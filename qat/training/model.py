"""Model of a run: the float one with its weights, and the prepared one.

The float model is of torchvision, timm or the user. Early checks show errors before hours of training.
"""

import copy
import importlib
import inspect
import logging
import os
import pickle
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

import qat
from qat.collectives import rank, take_from_first
from qat.contexts import evaluating
from qat.export.checks import check_exportable, sample_for
from qat.export.litert.exporter import UnwritableWarning
from qat.inputs import model_device
from qat.quantizer import Quantizer
from qat.quantizer.registry import quantizer_class
from qat.ranges import require_finite
from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.switches import disable_fake_quant
from qat.targets import profile_of
from qat.text import did_you_mean
from qat.torch_internals import layer_versions, set_layer_versions
from qat.training.config.imports import place, reason, users_callable
from qat.training.config.schema import QuantizationConfig, RunConfig
from qat.training.config.stages import ModelConfig, SpecConfig
from qat.training.errors import UserError, looked_in, value_errors_reported
from qat.training.run.checkpoint import load_state, read_archive, read_safetensors
from qat.training.run.logging import on_terminal
from qat.training.tasks.known import CLASSIFICATION, SEGMENTATION, TASKS, task_of
from qat.training.tasks.task import Kind

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

logger = logging.getLogger("qat")
LRASPP = "lraspp_mobilenet_v3_large"  # the one segmenter without an auxiliary head
TIMM = "timm/"  # prefix of the names of timm's models


def build_model(config: ModelConfig, num_classes: int, *, with_weights: bool = True) -> nn.Module:
    """Build the float model on the CPU; without weights, none are downloaded."""
    if config.weights is not None and config.checkpoint is not None:
        both = f"model.weights: '{config.weights}' and model.checkpoint: '{config.checkpoint}'"
        raise UserError(f"{both} exclude each other; keep one of them")
    classes = num_classes if config.num_classes is None else config.num_classes
    if classes < num_classes:
        raise UserError(f"model.num_classes: {classes} is fewer than the data set's {num_classes} classes")
    if ":" in config.name:
        model = _users_model(config, classes)
    elif config.name.startswith(TIMM):
        model = _timm_model(config, classes, with_weights)
    else:
        model = _torchvision_model(config, classes, with_weights)
    model = task_of(config.name, config.task).network(model)
    if config.checkpoint is not None and with_weights:
        load_weights(model, config.checkpoint, config.name)
    if any(isinstance(module, Quantizer) for module in model.modules()):
        disable_fake_quant(model)  # the user's own layers: they are float here, and `prepare_model` switches them on
    return model


def _torchvision_model(config: ModelConfig, classes: int, with_weights: bool) -> nn.Module:
    import torchvision  # late, since it takes seconds

    names = [name for task in TASKS for name in task.models()]
    if config.name not in names:
        near, tasks = did_you_mean(config.name, names), " or ".join(task.name for task in TASKS)
        hint = f"; {near}" if near else ", nor timm/name, nor package.module:callable"
        raise UserError(f"model.name: '{config.name}' is not a model of torchvision for {tasks}{hint}")
    weights = None if config.weights is None else _weights(config.name, config.weights)
    if weights is not None and with_weights:
        file = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rsplit("/", 1)[1]
        try:
            weights.get_state_dict(progress=on_terminal(), check_hash=True)
        except Exception as error:  # network, disk, hash and damaged file each raise their own errors
            raise UserError(
                f"model.weights: {config.weights} of {config.name} could not be loaded ({reason(error)}); put a whole"
                f" {file.name} into '{file.parent}', or use model.checkpoint"
            ) from error
    # torchvision loads weights only into a model with their number of classes: its classifier is replaced afterwards.
    built = classes if weights is None else len(weights.meta["categories"])
    task = task_of(config.name, None)
    try:
        with warnings.catch_warnings(), nullcontext() if with_weights else _no_file_read():
            # GoogLeNet and Inception announce a new default of init_weights, which users can set in kwargs.
            warnings.simplefilter("ignore", FutureWarning)
            arguments = {**task.builder_arguments, **config.kwargs}
            model: nn.Module = torchvision.models.get_model(
                config.name, num_classes=built, weights=weights, **arguments
            )
            if weights is not None and built != classes:
                arguments |= _structure(config, weights)
                fresh = torchvision.models.get_model(config.name, num_classes=classes, **arguments)
                names = _take_classifiers(model, fresh)
                if with_weights:
                    said = "model.weights: %s has %d classes; %s is new, with %d"
                    logger.info(said, config.weights, built, ", ".join(names), classes)
    except Exception as error:  # the cause can only be the user's kwargs
        raise UserError(f"model.kwargs: {config.kwargs} do not fit {config.name} ({reason(error)})") from error
    return model


@contextmanager
def _no_file_read() -> Iterator[None]:
    # Builders change more than values where weights are given: auxiliary heads, epsilons, frozen BatchNorms.
    from torchvision.models import WeightsEnum

    unread: Any = patch.object(WeightsEnum, "get_state_dict", lambda *args, **kwargs: {})
    with unread, patch.object(nn.Module, "load_state_dict", lambda *args, **kwargs: None):
        yield


def _structure(config: ModelConfig, weights: "WeightsEnum") -> dict[str, Any]:
    # What weights change of a builder's arguments.
    changed: dict[str, Any] = {}
    if config.name in ("googlenet", "inception_v3"):
        changed = {"init_weights": False}
    if config.name.startswith("vit_"):
        changed = {"image_size": weights.meta["min_size"][0]}
    if task_of(config.name, None) is SEGMENTATION and config.name != LRASPP:
        changed = {"aux_loss": True}
    return {name: value for name, value in changed.items() if name not in config.kwargs}


def _take_classifiers(model: nn.Module, fresh: nn.Module) -> list[str]:
    """Take over from a new model what depends on the number of classes; return the layers' names."""
    names = []
    for name, module in model.named_modules():
        other = fresh.get_submodule(name)
        for key, value in vars(other).items():  # out_features, num_classes
            if type(value) is int and vars(module).get(key) != value:
                setattr(module, key, value)
        for key, parameter in list(other.named_parameters(recurse=False)):
            if parameter.shape != getattr(module, key).shape:
                setattr(module, key, parameter)
                names += [name] if name not in names else []
    return names


def _timm_model(config: ModelConfig, classes: int, with_weights: bool) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise UserError(f"model.name: '{config.name}' needs timm, which is not installed; pip install timm") from error
    name, weights = config.name.removeprefix(TIMM), config.weights
    pretrained = weights is not None and with_weights
    full = name if weights in (None, "DEFAULT") else f"{name}.{weights}"
    try:
        model: nn.Module = timm.create_model(full, pretrained=pretrained, num_classes=classes, **config.kwargs)
    except Exception as error:  # the name, the user's kwargs, or the network
        raise UserError(f"model: timm cannot build {full} with {config.kwargs} ({reason(error)})") from error
    if pretrained:
        images: Any = model.pretrained_cfg
        (_, *size), mean, std = (images[key] for key in ("input_size", "mean", "std"))
        logger.info("model.weights: trained with data.mean=%s data.std=%s and images of %s", [*mean], [*std], size)
    return model


def _weights(name: str, wanted: str) -> "WeightsEnum":
    import torchvision

    known = torchvision.models.get_model_weights(name)
    # Weights without categories (vgg16's IMAGENET1K_FEATURES) have a classifier of NaNs.
    usable = [key for key, entry in known.__members__.items() if entry.meta["categories"] is not None]
    key = wanted.removeprefix(f"{known.__name__}.")
    if key not in usable:
        raise UserError(f"model.weights: {name} has no '{wanted}'; it has {', '.join(sorted(usable))}")
    return known[key]


def _users_model(config: ModelConfig, classes: int) -> nn.Module:
    if config.weights is not None:
        raise UserError(
            f"model.weights: '{config.weights}' has no effect with '{config.name}'; torchvision's weights are for its "
            "own models, use model.checkpoint"
        )
    with users_callable("model.name", config.name) as builder:
        arguments = dict(config.kwargs)
        try:
            inspect.signature(builder).bind_partial(num_classes=1)
            takes = True
        except (TypeError, ValueError):  # ValueError: some callables written in C have no signature
            takes = False
        if takes:
            arguments["num_classes"] = classes
        elif config.num_classes is not None:
            raise UserError(f"model.num_classes: {classes} has no effect; '{config.name}' takes no num_classes")
        model = builder(**arguments)
    if not isinstance(model, nn.Module):
        what = type(model).__name__
        raise UserError(f"model.name: '{config.name}' returned {what}; it must return a torch.nn.Module")
    return model.cpu()


State: TypeAlias = "OrderedDict[str, Tensor]"
FORMATS = ".safetensors, or a dict of tensors written by torch.save"


def load_weights(model: nn.Module, path: str, model_name: str, key: str = "model.checkpoint") -> None:
    """Load the weights in `path` strictly.

    The file is a .safetensors, or a dict of tensors written by torch.save, possibly under the key `state_dict` or
    `model`. Prefixes of DataParallel, torch.compile and Lightning (`model.`) are dropped; step counters of batch norms
    may be missing. Errors name the model `model_name` and the file `key`.
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
    """Load the run's float weights from rank 0's disk, and share them with all ranks."""
    if rank() == 0:
        load_weights(model, str(path), model_name, "float weights")
    take_from_first(model)


def _read(file: Path, where: str) -> State:
    content: object
    try:
        content = read_safetensors(file) if file.suffix == ".safetensors" else read_archive(file)
    except Exception as error:  # torch.load raises errors of many types for files that torch.save did not write
        what, held = reason(error), re.search(r"GLOBAL ([\w.]+)", str(error))
        if held:
            what = f"it holds a {held[1]}, which only its code could read: save state_dict()"
        elif isinstance(error, pickle.UnpicklingError):  # its message is a page of advice, with colours
            what = "torch.save did not write it"
        raise UserError(f"{where} cannot be read ({what}); it must be {FORMATS}") from error
    if isinstance(content, dict):
        content = next((content[key] for key in ("state_dict", "model") if isinstance(content.get(key), dict)), content)
    if not isinstance(content, dict) or not all(map(_is_plain, content.values())):
        raise UserError(f"{where} holds something else than weights; it must be {FORMATS}")
    if not content:
        raise UserError(f"{where} holds no weights")
    state = OrderedDict(content)
    if hasattr(content, "_metadata"):  # versions of the layers, with which they convert older weights
        state._metadata = content._metadata  # type: ignore[attr-defined]
    return state


def _is_plain(value: object) -> bool:  # dense, unquantized, with data
    return isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_quantized or value.is_meta)


def _refuse_other_kinds(state: State, own: dict[str, Tensor], where: str) -> None:
    # Integers and 8-bit floats need scales: copying would change them silently. Floats may differ in width. Values that
    # are not finite are accepted only where the model has such too (masks).
    for key, value in state.items():
        mine = own.get(key, value)
        kinds = {(each.is_floating_point(), each.is_complex(), each.dtype is torch.bool) for each in (value, mine)}
        if len(kinds) > 1 or value.element_size() < min(2, mine.element_size()):
            raise UserError(f"{where}: {key} is {value.dtype} in the file, {mine.dtype} in the model; convert it")
        if value.shape == mine.shape and not (value.to(mine.dtype).isfinite() | ~mine.cpu().isfinite()).all():
            raise UserError(f"{where}: {key} has values that are not finite ({mine.dtype})")


def _adopt_names(state: State, own: dict[str, Tensor]) -> None:
    for prefix in ("model.", "module.", "_orig_mod.", "module."):  # module. may be inside or outside of _orig_mod.
        if not any(key.startswith(prefix) for key in own):
            consume_prefix_in_state_dict_if_present(state, prefix)
    if layer_versions(state) is None:  # else layers would convert the weights from their oldest version
        set_layer_versions(state, layer_versions(own) or {})
    for key in own:
        if key.endswith("num_batches_tracked"):
            state.setdefault(key, own[key])


def build_recipe(config: QuantizationConfig) -> QuantRecipe:
    """Build the recipe; fields that the config leaves out keep the target's choice."""
    with value_errors_reported("quantization.target: "):
        profile = profile_of(config.target)
    with value_errors_reported("quantization: "):
        return QuantRecipe(
            weight=_spec("weight", profile.weight, config.weight),
            activation=_spec("activation", profile.activation, config.activation),
            overrides={key: override.model_dump(exclude_none=True) for key, override in config.overrides.items()},
            target=config.target,
            first_bits=config.first_bits,
            last_bits=config.last_bits,
            residual_bits=config.residual_bits,
        )


def prepare_model(model: nn.Module, config: RunConfig, image_shape: tuple[int, int, int]) -> nn.Module:
    try:
        recipe = build_recipe(config.quantization)
        for tensor, spec in (("weight", recipe.weight), ("activation", recipe.activation)):
            with value_errors_reported(f"quantization.{tensor}.rule: "):
                quantizer_class(spec.rule)
        example = torch.rand(2, *image_shape, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnwritableWarning)  # else hours of training would end without a file
            prepared = qat.prepare(model, recipe, example)
        qat.enable_fake_quant(prepared)  # layers of one's own computed in float till now
    except Exception as error:  # a user's model may have code that fx and the placement do not support
        said = f"model.name: {config.model.name} cannot be prepared ({reason(error)})"
        if isinstance(error, UserError | ValueError | UnwritableWarning):
            said = str(error) if isinstance(error, UserError) else f"{config.model.name}: {error}"
        if absent := [name for name in config.imports if name not in sys.modules]:
            said += (
                f"; the run imported {', '.join(absent)}: import that first (python -m qat VERB RUN --import"
                f" {' --import '.join(absent)}), for no code is imported because a file names it"
            )
        raise UserError(said) from error
    return prepared


def rehearse(prepared: nn.Module, exports: bool) -> None:
    """Try each quantizer and what the export needs, so that errors show early."""
    copied = copy.deepcopy(prepared).float().cpu()
    quantizers = {name: each for name, each in copied.named_modules() if isinstance(each, qat.Quantizer)}
    for name, quantizer in quantizers.items():
        quantizer.mark_calibrated()  # no range is needed to try it
        try:
            with torch.enable_grad():
                y = quantizer.train()(sample_for(copied, name, quantizer).requires_grad_())
                y.sum().backward()
            require_finite(y)
        except Exception as error:  # user code may raise anything
            details = f"{reason(error)}{place(error)}"
            raise UserError(f"quantization: {name}: the rule {quantizer.spec.rule!r} failed ({details})") from error
    if exports:
        try:
            check_exportable(copied)
            for name, quantizer in quantizers.items():
                low, high = quantizer.bounds()
                if quantizer.role == "weight" and max(high, -low) > 127:  # int8, negated where gamma < 0
                    narrow = "signed=true and narrow_range=true, " if high - low < 256 and high != -low else ""
                    what = f"{low} to {high}, negated where gamma < 0, do not fit int8"
                    raise ValueError(f"{name!r}: integers {what}; use {narrow}fewer bits")
        except ValueError as error:
            sentence = str(error).removeprefix("export_onnx: ")
            raise UserError(f"quantization: {sentence}; or set export.onnx=false") from error


def check_forward(
    model: nn.Module, config: RunConfig, image_shape: tuple[int, int, int], classes: int, kind: Kind = "labels"
) -> None:
    """Run two black images through the float model, so that errors show early."""
    device, task = model_device(model), config.task
    try:
        with evaluating(model), torch.no_grad():
            output = model(images := torch.zeros(2, *image_shape, device=device))
    except Exception as error:  # user code, or an operation for which the image is too small
        raise UserError(
            f"model: {config.model.name} does not run on 2 images of {image_shape} ({reason(error)});"
            " another data.image_size?"
        ) from error
    if kind != task.kind:
        what = {"labels": "a class for each image", "masks": "a class for each pixel", "boxes": "boxes"}[kind]
        raise UserError(
            f"data.name: {config.data.name} has {what}, and {config.model.name} is for {task.name}; choose another data"
            " set or model (model.task says what one of your own learns)"
        )
    if config.export.end_to_end and kind != "boxes":
        raise UserError(f"export.end_to_end: is for detection; leave it out for {task.name}")
    for key, stage in (("float", config.float), ("qat", config.qat)):
        given = [name for name in ("mixup_alpha", "cutmix_alpha", "distillation") if getattr(stage, name, None)]
        if task is not CLASSIFICATION and given:
            raise UserError(f"{key}.{given[0]}: is for classification; leave it out for {task.name}")
    if config.export.onnx and hasattr(model, "roi_heads"):
        raise UserError(
            f"export.onnx: {config.model.name} decides on boxes between its parts, and no file holds both; set"
            " export.onnx=false, and docs/detection.md exports the parts"
        )
    if config.export.onnx and task is CLASSIFICATION and not isinstance(output, torch.Tensor):
        raise UserError(
            f"model: {config.model.name} returns {type(output).__name__}, and ONNX export needs a tensor of logits;"
            " return that, or set export.onnx=false"
        )
    outputs = task.bound(model).class_count(task.answers(output, images))
    if outputs < classes:
        raise UserError(f"model: {config.model.name} has {outputs} outputs, the data set {classes} classes")


def _spec(tensor: str, default: QuantSpec, config: SpecConfig) -> QuantSpec:
    with value_errors_reported(f"quantization.{tensor}: "):
        return QuantSpec(**config.model_dump(exclude_none=True)).resolved(default)
