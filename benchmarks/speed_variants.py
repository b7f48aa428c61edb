"""The contestants: one float model, made ready for quantization-aware training by this project and by its peers.

Every builder takes a float model of its own and a batch of images, and returns a model in training mode. Peers are
imported only when they are built, and used as their own documentation says, with 8-bit weights per output channel and
8-bit activations per tensor.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Builder = Callable[[nn.Module, Tensor], nn.Module]

COLLECTED = 1
"""Steps in which Brevitas collects statistics before its activation scales are parameters (300 by its default)."""


def float_model(model: nn.Module, images: Tensor) -> nn.Module:
    """As it is."""
    return model.train()


def qat_model(model: nn.Module, images: Tensor) -> nn.Module:
    """This project, with its defaults: every scale and zero point is learned."""
    import qat  # here, so that a fresh process pays for it where it is measured

    prepared = qat.prepare(model, example_inputs=images)
    qat.calibrate(prepared, [images])
    return prepared.train()


def ao_fx_model(model: nn.Module, images: Tensor) -> nn.Module:
    """torch.ao's FX graph mode with the qconfig of the x86 engine: moving averages, no learned scale."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), (images,))
    assert isinstance(prepared, nn.Module)
    return prepared.train()


def pt2e_model(model: nn.Module, images: Tensor) -> nn.Module:
    """torchao's PT2E with the X86InductorQuantizer; strict export, since non-strict ones stumble over shared ReLUs."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    exported = torch.export.export(model.train(), (images,), strict=True).module(check_guards=False)
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(exported, quantizer)
    move_exported_model_to_train(prepared)  # an exported model refuses train()
    return prepared


def brevitas_model(model: nn.Module, images: Tensor) -> nn.Module:
    """Brevitas' layers in place of the float ones, once their activation scales have become parameters."""
    prepared = _with_brevitas_layers(model, COLLECTED).train()
    with torch.no_grad():
        for _ in range(COLLECTED + 1):
            prepared(images)
    return prepared


def brevitas_collecting_model(model: nn.Module, images: Tensor) -> nn.Module:
    """The same in its first 300 steps, when every one takes percentiles of every activation."""
    return _with_brevitas_layers(model, None).train()


BUILDERS: dict[str, Builder] = {
    "float": float_model,
    "qat": qat_model,
    "ao_fx": ao_fx_model,
    "pt2e": pt2e_model,
    "brevitas": brevitas_model,
    "brevitas_collecting": brevitas_collecting_model,
}

TITLES = {
    "float": "float",
    "qat": "qat",
    "ao_fx": "torch.ao FX",
    "pt2e": "torchao PT2E",
    "brevitas": "Brevitas",
    "brevitas_collecting": "Brevitas, collecting",
    "float_compiled": "float, compiled",
    "qat_compiled": "qat, compiled",
    "qat_kept": "qat, caches kept",
    "relu": "relu",
    "plain": "LSQ from tensor operations",
    "fake_quantize": "torch.fake_quantize",
    "learnable": "torch._fake_quantize_learnable",
    "ao_fused": "torch.ao FusedMovingAvg",
    "copy": "copy",
    "forward": "forward",
    "backward": "backward",
}
"""How tables and plots call the variants; their order is that of the columns."""


def _with_brevitas_layers(model: nn.Module, collected: int | None) -> nn.Module:
    from brevitas.quant import Int8ActPerTensorFloat

    activation = (
        Int8ActPerTensorFloat if collected is None else Int8ActPerTensorFloat.let(collect_stats_steps=collected)
    )
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            layer = _brevitas_layer(child, activation)
            if layer is not None:
                setattr(module, name, layer)
    return model


def _brevitas_layer(layer: nn.Module, activation: type) -> nn.Module | None:
    """Its twin of a layer with the same weights; None for what it has no layer for."""
    import brevitas.nn as bnn
    from brevitas.quant import Int8WeightPerChannelFloat

    quantizers = {"weight_quant": Int8WeightPerChannelFloat, "input_quant": activation}
    twin: nn.Module
    if type(layer) is nn.Conv2d:
        twin = bnn.QuantConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            groups=layer.groups,
            bias=layer.bias is not None,
            **quantizers,
        )
    elif type(layer) is nn.Linear:
        twin = bnn.QuantLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, **quantizers)
    elif type(layer) is nn.MultiheadAttention:
        twin = bnn.QuantMultiheadAttention(
            layer.embed_dim,
            layer.num_heads,
            dropout=layer.dropout,
            batch_first=layer.batch_first,
            in_proj_weight_quant=Int8WeightPerChannelFloat,
            out_proj_weight_quant=Int8WeightPerChannelFloat,
            in_proj_bias_quant=None,
            out_proj_bias_quant=None,
            in_proj_input_quant=activation,
            q_scaled_quant=activation,
            k_transposed_quant=activation,
            v_quant=activation,
            out_proj_input_quant=activation,
        )
        return twin  # its weights lie under other names; the time does not depend on them
    else:
        return None
    twin.load_state_dict(layer.state_dict(), strict=False)
    return twin.to(memory_format=torch.channels_last) if _is_channels_last(layer) else twin


def _is_channels_last(layer: nn.Module) -> bool:
    weight = layer.weight
    return isinstance(weight, Tensor) and weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
