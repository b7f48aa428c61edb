"""From the `quantization` section of a config to a `QuantRecipe` and a prepared model, with early checks of both."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn

import qat
from qat.evaluating import evaluating
from qat.export.checks import ROUNDS_OTHERWISE
from qat.export.integers.consistency import keeps_to_its_grid, rounds_half_to_even
from qat.export.integers.frozen import CONTAINER_BITS
from qat.inputs import model_device
from qat.layers import QuantFunction
from qat.preparation.report import LEFT_IN_FLOAT, WHOLE_MODEL, noted
from qat.quantizer.registry import quantizer_class
from qat.ranges import NotFiniteError
from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.targets import profile_of
from qat.training.config.imports import place, reason
from qat.training.config.schema import QuantizationConfig, RunConfig
from qat.training.config.stages import SpecConfig
from qat.training.errors import UserError, value_errors_reported
from qat.training.loop.evaluation import split_output


def build_recipe(config: QuantizationConfig) -> QuantRecipe:
    """Build the recipe; fields that the config leaves out keep the target's choice.

    Raises:
        UserError: for an unknown target, or combinations that the library refuses.
    """
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
    """Call `qat.prepare` with the config's recipe. A run calls it before the float training too, to find errors early.

    Code in the model that depends on sizes is traced with `image_shape`, (channels, height, width) of the data.

    Raises:
        UserError: if the model cannot be prepared, or cannot be exported although the config asks for it.
    """
    recipe = build_recipe(config.quantization)
    for tensor, spec in (("weight", recipe.weight), ("activation", recipe.activation)):
        with value_errors_reported(f"quantization.{tensor}.rule: "):
            quantizer_class(spec.rule)
    try:
        prepared = qat.prepare(model, recipe, _example(image_shape))
        qat.enable_fake_quant(prepared)  # layers of one's own computed in float till now
    except ValueError as error:
        where = "quantization" if _is_preparable(model, image_shape) else f"model.name: {config.model.name}"
        raise UserError(f"{where}: {error}") from error
    except Exception as error:  # in a user's model, fx and the placement may meet code that they do not support
        raise UserError(f"model.name: {config.model.name} cannot be prepared ({reason(error)})") from error
    if config.export.onnx and not isinstance(prepared, fx.GraphModule):
        why = noted(prepared, LEFT_IN_FLOAT).get(WHOLE_MODEL, "it has no one graph")
        raise UserError(f"export.onnx: {config.model.name} cannot be written as one file: {why}; use export.onnx=false")
    _try_rules(prepared, config.export.onnx)
    if config.export.onnx:
        for name, module in prepared.named_modules():
            if isinstance(module, qat.Quantizer):
                _check_exportable(name, module)
    return prepared


def _example(image_shape: tuple[int, int, int]) -> Tensor:
    return torch.rand(2, *image_shape, generator=torch.Generator().manual_seed(0))


def _is_preparable(model: nn.Module, image_shape: tuple[int, int, int]) -> bool:
    """Whether a model can be prepared by the plain recipe, so that an error is the config's and not the model's."""
    with suppress(Exception):
        qat.prepare(model, None, _example(image_shape))
        return True
    return False


def ranges_in_words(model: nn.Module) -> str:
    """Where the ranges of weights and of activations begin, by their bits.

    >>> ranges_in_words(qat.QuantLinear(4, 2, weight_spec=qat.QuantSpec(bits=2)))
    'ranges: weights by mse (2 bits); activations by mse (8 bits)'
    """
    bits: dict[str, dict[str, set[int]]] = {"weight": {}, "activation": {}}
    for each in model.modules():
        if isinstance(each, qat.Quantizer):
            own = type(each).fit is not qat.Quantizer.fit
            how = f"as {each.spec.rule} says" if own else f"by {each.spec.init}"
            bits[each.role].setdefault(how, set()).add(each.spec.bits)
    parts = []
    for role, found in bits.items():
        starts = [f"{how} ({' and '.join(map(str, sorted(widths)))} bits)" for how, widths in sorted(found.items())]
        parts.append(f"{'weights' if role == 'weight' else 'activations'} {' and '.join(starts)}" if starts else "")
    return f"ranges: {'; '.join(filter(None, parts))}"


def _try_rules(prepared: nn.Module, exports: bool) -> None:
    """Run a copy of every quantizer once, so that a user's rule fails before the float training and not after it.

    A rule fails too if it computes values off the grid that it exports.
    """
    for name, module in prepared.named_modules():
        if not isinstance(module, qat.Quantizer):
            continue
        quantizer, rule = copy.deepcopy(module).float().cpu().train(), module.spec.rule
        quantizer.mark_calibrated()  # prevents the warning about uncalibrated use
        x = torch.linspace(-1.0, 1.0, 128).reshape(2, 4, 4, 4)
        if quantizer.role == "weight":
            x = _weight_for(quantizer, prepared.get_submodule(name.rpartition(".")[0]))
        try:
            with torch.enable_grad():
                quantizer(x.clone().requires_grad_()).sum().backward()
            written = exports and quantizer.has_integers
            agrees = not written or keeps_to_its_grid(quantizer.eval(), x)
            rounds = not written or rounds_half_to_even(quantizer)
        except Exception as error:  # user code may raise anything
            details = f"{reason(error)}{place(error)}"
            raise UserError(f"quantization: {name}: the rule {rule!r} failed ({details})") from error
        if not agrees:
            raise UserError(
                f"quantization: {name}: the rule {rule!r} computes other values in quantize(x) than its codes(x) and"
                " grid() say; make them agree, or set exportable = False"
            )
        if not rounds:
            raise UserError(f"quantization: {name}: the rule {rule!r} {ROUNDS_OTHERWISE}")


def _weight_for(quantizer: qat.Quantizer, owner: Any) -> Tensor:
    """Return the weight of a quantizer; for a weight that a function reads, numbers in a shape that fits its scales."""
    if not isinstance(owner, QuantFunction):
        weight: Tensor = owner.channels_first(owner.weight.detach().float().cpu())
        return weight
    channels, *rest = quantizer.shape or (4,)
    inputs = rest[0] * quantizer.spec.group_size if quantizer.spec.group_size else 16
    trailing = [1] * (len(rest) - 1 - (quantizer.spec.group_size is not None))
    return torch.linspace(-1.0, 1.0, channels * inputs).reshape(channels, inputs, *trailing)


def _check_exportable(name: str, quantizer: qat.Quantizer) -> None:
    """Refuse before the training what `export_onnx` would refuse after it: no integers, or too wide ones."""
    refusal = quantizer.refusal()
    if refusal is not None:
        raise UserError(f"quantization: {name} {refusal}; choose another, or set export.onnx=false")
    low, high = quantizer.bounds()
    if quantizer.role == "weight" and max(high, -low) > 127:
        spec = quantizer.spec
        narrow = "signed=true and narrow_range=true, " if spec.bits == 8 and low == spec.qmin and high != -low else ""
        raise UserError(
            f"quantization: {name}: integers {low} to {high}, negated where gamma < 0,"
            f" do not fit int8; use {narrow}fewer bits, or export.onnx=false"
        )
    if high - low >= 2**CONTAINER_BITS:
        raise UserError(
            f"quantization: {name} has the integers {low} to {high}, and ONNX Runtime's integer kernels take at most"
            f" {CONTAINER_BITS} bits; use fewer, or set export.onnx=false"
        )


def check_forward(model: nn.Module, config: RunConfig, image_shape: tuple[int, int, int], classes: int) -> None:
    """Run two black images through the float model, so that a misfit shows before anything is written.

    Raises:
        UserError: if the model fails on such images, or has fewer outputs than there are classes.
    """
    device = model_device(model)
    try:
        with evaluating(model), torch.no_grad():
            output = model(torch.zeros(2, *image_shape, device=device))
    except Exception as error:  # user code, or an operation for which the image is too small
        raise UserError(
            f"model: {config.model.name} does not run on 2 images of {image_shape} ({reason(error)});"
            " another data.image_size?"
        ) from error
    if config.export.onnx and not isinstance(output, torch.Tensor):
        raise UserError(
            f"model: {config.model.name} returns {type(output).__name__}, and ONNX export needs a tensor of logits;"
            " return that, or set export.onnx=false"
        )
    logits, _ = split_output(output, 2)
    if logits.shape[1] < classes:
        raise UserError(f"model: {config.model.name} has {logits.shape[1]} outputs, the data set {classes} classes")


def _spec(tensor: str, default: QuantSpec, config: SpecConfig) -> QuantSpec:
    with value_errors_reported(f"quantization.{tensor}: "):
        return QuantSpec(**config.model_dump(exclude_none=True)).resolved(default)


@contextmanager
def calibration_reported(config: RunConfig) -> Iterator[None]:
    """Turn a ValueError of `qat.calibrate` into a UserError; NaN and infinity are of the float model's making."""
    try:
        yield
    except ValueError as error:
        if not isinstance(error.__cause__, NotFiniteError):
            raise UserError(str(error)) from error
        where = f"the float model computes NaN or infinity on training images ({error})"
        if config.float.epochs == 0:
            raise UserError(f"float: {where}; try other weights (model.weights, model.checkpoint)") from error
        clip = "" if config.float.clip_grad_norm else " or float.clip_grad_norm=1"
        raise UserError(
            f"float: the training diverged, {where}; start anew in another run_dir with a lower float.lr (now"
            f" {config.float.lr:g}){clip}"
        ) from error
