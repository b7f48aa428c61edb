"""Recipe and prepared model from the `quantization` section, with early checks."""

import copy
import sys
import warnings

import torch
from torch import nn

import qat
from qat.contexts import evaluating
from qat.export.checks import check_exportable, sample_for
from qat.export.litert.exporter import UnwritableWarning
from qat.inputs import model_device
from qat.quantizer.registry import quantizer_class
from qat.ranges import require_finite
from qat.recipe import QuantRecipe
from qat.spec import QuantSpec
from qat.targets import profile_of
from qat.training.config.imports import place, reason
from qat.training.config.schema import QuantizationConfig, RunConfig
from qat.training.config.stages import SpecConfig
from qat.training.errors import UserError, value_errors_reported
from qat.training.loop.evaluation import split_output


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
    """Call `qat.prepare` with the config's recipe."""
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


def check_forward(model: nn.Module, config: RunConfig, image_shape: tuple[int, int, int], classes: int) -> None:
    """Run two black images through the float model, so that errors show early."""
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
