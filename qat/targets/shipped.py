"""The shipped target profiles, with reasons and sources, and their registry.

docs/targets.md is made from this file (`python -m benchmarks.document`).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qat.spec import default_activation_spec, default_weight_spec
from qat.targets.profile import GridLimits, Reason, TargetProfile
from qat.text import did_you_mean

_TORCH = "https://github.com/pytorch/pytorch/blob/main/torch/ao/quantization"
_TRT_TABLE = f"{_TORCH}/backend_config/tensorrt.py"
_QNNPACK_TABLE = f"{_TORCH}/backend_config/qnnpack.py"
_ORT = "https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html"
_TRT = "https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html"
_TRT_QUANTIZE = "https://docs.nvidia.com/deeplearning/tensorrt/operators/docs/Quantize.html"
_TRT_ONNX = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md"
_NNCF = (
    "https://github.com/openvinotoolkit/nncf/blob/033300cb355c2501d108f4186fb9360dbebf8cd0/"
    "nncf/common/hardware/configs/cpu.json"
)
_NNCF_SCHEME = (
    "https://github.com/openvinotoolkit/nncf/blob/2c84e7b5b79ce44d7e8e604bbe044dfab110f514/"
    "docs/usage/training_time_compression/other_algorithms/LegacyQuantization.md"
)
_LPT = (
    "https://docs.openvino.ai/2025/documentation/openvino-extensibility/openvino-plugin-library/advanced-guides/"
    "low-precision-transformations/step2-markup.html"
)
_POT = "https://docs.openvino.ai/latest/pot_compression_algorithms_quantization_default_README.html"
_XNNPACK_QUANTIZER = "https://github.com/pytorch/executorch/blob/main/backends/xnnpack/quantizer/xnnpack_quantizer.py"
_XNNPACK = "https://docs.pytorch.org/executorch/stable/backends/xnnpack/xnnpack-quantization.html"
_TFLITE = "https://www.tensorflow.org/lite/performance/quantization_spec"
_MEASURED = "measured: ONNX Runtime 1.31.1 on x86, the optimised graph of one operation between two grids"

_INT8_WEIGHT = default_weight_spec()
_UINT8_AFFINE = default_activation_spec()
_INT8_AFFINE = replace(_UINT8_AFFINE, signed=True)
_INT8_SYMMETRIC = replace(_UINT8_AFFINE, signed=True, symmetric=True)

_NO_FOLDING = Reason("BatchNorm folds into the scale of the weight, which is exact without a zero point only")
_ZERO_POINT_COSTS = Reason("a weight's zero point would be multiplied with every activation at run time", _TFLITE)

_ANY = (True, False)


def _int8_weight_limits(lowest: int) -> GridLimits:
    # Signed, symmetric, per tensor or channel: all runtimes but ONNX Runtime, which accepts more, require this.
    return GridLimits(8, lowest, signed=(True,), symmetric=(True,), granularities=("tensor", "channel"))


def _int8_activation_limits(signed: tuple[bool, ...], symmetric: tuple[bool, ...]) -> GridLimits:
    return GridLimits(8, -128, signed=signed, symmetric=symmetric, granularities=("tensor",))


_ONNXRUNTIME = TargetProfile(
    name="onnxruntime",
    weight=_INT8_WEIGHT,
    activation=_UINT8_AFFINE,
    weight_limits=GridLimits(16, -(2**15), _ANY, (True,), ("tensor", "channel", "group")),
    activation_limits=GridLimits(16, -(2**15), _ANY, _ANY, ("tensor",)),
    shared_grids=frozenset({"max_pool"}),
    float_operations=frozenset({
        "div", "elu", "gelu", "group_norm", "hardsigmoid", "hardswish", "instance_norm", "interpolate", "layer_norm",
        "log_softmax", "maximum", "mean", "minimum", "mish", "prelu", "silu", "sub", "tanh",
    }),
    split_operations=frozenset({"silu"}),
    quantizes_outputs=False,
    reasons={
        "weight": Reason(
            "U8S8 runs on the CPU, and narrow range lets a BatchNorm with gamma < 0 negate it exactly; x86 without VNNI"
            " adds in 16 bits, which 8-bit weights may saturate and 7-bit ones do not",
            _ORT,
        ),
        "weight.symmetric": _NO_FOLDING,
        "weight.most_bits": Reason("more than 8 bits train, and go to QONNX alone: integer kernels take 8"),
        "weight.granularities": Reason("groups train, but export_onnx refuses them: integer kernels lack them"),
        "activation": Reason("with symmetric signed ones half of ResNet-18's convolutions run in float", "README.md"),
        "activation.most_bits": Reason("as for weights"),
        "activation.granularities": Reason("a scale per channel could not be taken out of the sum over channels"),
        "shared_grids": Reason("ONNX's MaxPool has no scales, QLinearConcat and the others requantize", _MEASURED),
        "float_operations": Reason("they stay between DequantizeLinear and QuantizeLinear", _MEASURED),
        "split_operations": Reason(
            "QLinearSigmoid and QLinearMul take 0.7 of the time of a SiLU in float, over the whole of EfficientNet-B0",
            "measured: ONNX Runtime 1.32.0 on a processor with AVX2 alone, 112 px, batch 8",
        ),
    },
)  # fmt: skip

_NO_SATURATION = Reason(
    "kernels for x86 without VNNI add two products of uint8 by int8 in 16 bits, and 255 * (64 + 64) just fits",
    "measured: ONNX Runtime 1.31.1 on a processor with AVX2 alone, emulated",
)

_ONNXRUNTIME_X86 = replace(
    _ONNXRUNTIME,
    name="onnxruntime_x86",
    weight=replace(_INT8_WEIGHT, max_magnitude=64),
    weight_limits=GridLimits(8, -64, (True,), (True,), ("tensor", "channel")),
    activation_limits=GridLimits(8, 0, (False,), (False,), ("tensor",)),
    reasons={
        **_ONNXRUNTIME.reasons,
        "weight": _NO_SATURATION,
        "weight.signed": Reason("unsigned weights reach 255 where signed ones reach 127"),
        "weight.lowest": _NO_SATURATION,
        "weight.most_bits": Reason("integer kernels take 8"),
        "weight.granularities": Reason("integer kernels lack groups"),
        "activation.signed": Reason("the second factor of a product of activations has to be uint8 as well"),
        "activation.symmetric": Reason("attention needs negative values, and signed ones would be an int8 factor"),
        "activation.most_bits": Reason("integer kernels take 8"),
    },
)

_TENSORRT = TargetProfile(
    name="tensorrt",
    weight=_INT8_WEIGHT,
    activation=_INT8_SYMMETRIC,
    weight_limits=_int8_weight_limits(lowest=-128),
    activation_limits=_int8_activation_limits(signed=(True,), symmetric=(True,)),
    shared_grids=frozenset({"cat", "max_pool"}),
    float_operations=frozenset({
        "div", "elu", "gelu", "group_norm", "hardsigmoid", "hardswish", "instance_norm", "layer_norm", "leaky_relu",
        "log_softmax", "maximum", "minimum", "mish", "prelu", "sigmoid", "silu", "softmax", "sub", "tanh",
    }),
    quantizes_outputs=False,
    reasons={
        "weight": Reason("signed INT8, symmetric, a scale per channel", _TRT),
        "weight.signed": Reason("its INT8 is signed", _TRT),
        "weight.symmetric": Reason("its zero points must all be 0", _TRT_QUANTIZE),
        "weight.most_bits": Reason("its widest quantized integers are INT8", _TRT_QUANTIZE),
        "weight.lowest": Reason("INT8 is clamped to -128 .. 127", _TRT_QUANTIZE),
        "weight.granularities": Reason("blocks of inputs are for INT4 only", _TRT_QUANTIZE),
        "activation": Reason("signed and symmetric is the only INT8 that it has", _TRT),
        "activation.signed": Reason("its INT8 is signed", _TRT),
        "activation.symmetric": Reason("its zero points must all be 0", _TRT_QUANTIZE),
        "activation.most_bits": Reason("its widest quantized integers are INT8", _TRT_QUANTIZE),
        "activation.granularities": Reason(
            "per channel is for weights, per tensor for activations", "https://github.com/NVIDIA/TensorRT/issues/2392"
        ),
        "shared_grids": Reason("torch's table of this backend observes them with their input", _TRT_TABLE),
        "float_operations": Reason(
            "torch's table of this backend has no INT8 entry for them; normalisation usually runs in FP32 or FP16"
            " (https://github.com/NVIDIA/TensorRT/issues/4084)",
            _TRT_TABLE,
        ),
        "float_biases": Reason("its DequantizeLinear takes INT8, FP8 and INT4, and no int32", _TRT_ONNX),
    },
    float_biases=True,
)  # fmt: skip

_OPENVINO = TargetProfile(
    name="openvino",
    weight=_INT8_WEIGHT,
    activation=_UINT8_AFFINE,
    weight_limits=_int8_weight_limits(lowest=-128),
    activation_limits=_int8_activation_limits(signed=_ANY, symmetric=_ANY),
    shared_grids=frozenset({"cat", "max_pool"}),
    float_operations=frozenset({
        "elu", "gelu", "group_norm", "hardsigmoid", "hardswish", "leaky_relu", "log_softmax", "mish", "prelu",
        "sigmoid", "silu", "softmax", "tanh",
    }),
    quantizes_outputs=False,
    reasons={
        "weight": Reason(
            "symmetric, narrow range; x86 without VNNI adds in 16 bits, where 7-bit weights do not overflow",
            _NNCF_SCHEME,
        ),
        "weight.signed": Reason("its convolutions take i8 weights", _LPT),
        "weight.symmetric": _NO_FOLDING,
        "weight.most_bits": Reason("NNCF's table of the CPU has 8 bits", _NNCF),
        "weight.lowest": Reason("NNCF's table of the CPU goes down to -128", _NNCF),
        "weight.granularities": Reason("NNCF's table of the CPU has tensors and channels", _NNCF),
        "activation": Reason("the preset 'mixed' has asymmetric ones, and convolutions take u8", _POT),
        "activation.most_bits": Reason("NNCF's table of the CPU has 8 bits", _NNCF),
        "activation.granularities": Reason("convolutions require per-tensor quantization of their input", _LPT),
        "shared_grids": Reason("NNCF unifies the scales of a concatenation; max pooling has none of its own", _NNCF),
        "float_operations": Reason("NNCF's table of the CPU does not quantize their inputs", _NNCF),
    },
)  # fmt: skip

_QNNPACK = TargetProfile(
    name="qnnpack",
    weight=_INT8_WEIGHT,
    activation=_UINT8_AFFINE,
    weight_limits=_int8_weight_limits(lowest=-127),
    activation_limits=_int8_activation_limits(signed=_ANY, symmetric=_ANY),
    shared_grids=frozenset({"avg_pool", "cat", "interpolate", "max_pool", "mean", "stack"}),
    float_operations=frozenset({
        "div", "gelu", "layer_norm", "log_softmax", "maximum", "minimum", "mish", "silu", "sub",
    }),
    quantizes_outputs=False,
    reasons={
        "weight": Reason("qint8, symmetric, -127 to 127, a scale per channel", f"{_TORCH}/qconfig.py"),
        "weight.signed": Reason("its weights are qint8", _QNNPACK_TABLE),
        "weight.symmetric": _NO_FOLDING,
        "weight.most_bits": Reason("its integers have 8 bits", _QNNPACK_TABLE),
        "weight.lowest": Reason("XNNPACK's kernels take -127 to 127", _QNNPACK_TABLE),
        "weight.granularities": Reason("per tensor or per channel", _XNNPACK),
        "activation": Reason(
            "quint8 with a zero point is torch's default of this backend; XNNPACK under ExecuTorch takes signed=True",
            f"{_TORCH}/qconfig.py",
        ),
        "activation.most_bits": Reason("its integers have 8 bits", _QNNPACK_TABLE),
        "activation.granularities": Reason("its activations have one scale and zero point", _XNNPACK_QUANTIZER),
        "shared_grids": Reason(
            "torch's table of this backend observes them with their input",
            f"{_TORCH}/backend_config/_common_operator_config_utils.py",
        ),
        "float_operations": Reason("torch's table of this backend has no quantized entry for them", _QNNPACK_TABLE),
    },
)  # fmt: skip

_INTEGER_ONLY = TargetProfile(
    name="integer_only",
    weight=_INT8_WEIGHT,
    activation=_INT8_AFFINE,
    weight_limits=_int8_weight_limits(lowest=-127),
    activation_limits=_int8_activation_limits(signed=(True,), symmetric=_ANY),
    shared_grids=frozenset({"avg_pool", "cat", "interpolate", "max_pool", "maximum", "minimum"}),
    float_operations=frozenset(),
    quantizes_outputs=True,
    reasons={
        "weight": Reason("int8 from -127 to 127 with zero point 0, per axis for convolutions", _TFLITE),
        "weight.signed": Reason("weights are int8", _TFLITE),
        "weight.symmetric": _ZERO_POINT_COSTS,
        "weight.most_bits": Reason("weights are int8", _TFLITE),
        "weight.lowest": Reason("weights are in the range -127 to 127", _TFLITE),
        "weight.granularities": Reason("per tensor or per axis", _TFLITE),
        "activation": Reason("int8 with a zero point anywhere in -128 to 127, per tensor", _TFLITE),
        "activation.signed": Reason("activations are int8", _TFLITE),
        "activation.most_bits": Reason("activations are int8", _TFLITE),
        "activation.granularities": Reason("activations have one scale and zero point", _TFLITE),
        "shared_grids": Reason("inputs and outputs must all have the same scale and zero point", _TFLITE),
        "float_operations": Reason("there is no float arithmetic to fall back to"),
        "quantizes_outputs": Reason("there is no float arithmetic to fall back to"),
    },
)

_PROBABILITY = (1 / 256, -128)

_LITERT = replace(
    _INTEGER_ONLY,
    name="litert",
    activation_limits=_int8_activation_limits(signed=_ANY, symmetric=_ANY),
    fixed_grids={
        "sigmoid": _PROBABILITY, "softmax": _PROBABILITY, "hardsigmoid": _PROBABILITY, "tanh": (1 / 128, 0),
    },
    split_operations=frozenset({"silu"}),
    ties={"avg_pool": "away", "interpolate": "up", "add": "up", "sub": "up"},
    file="tflite",
    reasons={
        **_INTEGER_ONLY.reasons,
        "fixed_grids": Reason("the kernels of LOGISTIC, SOFTMAX and TANH check the grid of their result", _TFLITE),
        "ties": Reason("AVERAGE_POOL_2D rounds a half away from 0, XNNPACK's sums and bilinear images up", _TFLITE),
        "split_operations": Reason("it has no operator for SiLU, but LOGISTIC and MUL"),
    },
)  # fmt: skip

SHIPPED = (_ONNXRUNTIME, _ONNXRUNTIME_X86, _TENSORRT, _OPENVINO, _QNNPACK, _INTEGER_ONLY, _LITERT)

_profiles: dict[str, TargetProfile] = {profile.name: profile for profile in SHIPPED}

PROFILES: Mapping[str, TargetProfile] = MappingProxyType(_profiles)
"""All targets by name."""


def register_target(profile: TargetProfile) -> TargetProfile:
    """Register a runtime for `QuantRecipe(target=name)` and `quantization.target`.

    Args:
        profile: the profile; `dataclasses.replace` makes one from a shipped one.

    Raises:
        ValueError: if another profile has the same name.

    >>> from dataclasses import replace
    >>> chip = replace(profile_of("tensorrt"), name="my_chip", quantizes_outputs=True)
    >>> register_target(profile_of("tensorrt")).name  # register_target(chip) would return chip
    'tensorrt'
    """
    if not isinstance(profile, TargetProfile):
        raise TypeError(f"register_target: expected a TargetProfile, got {profile!r}")
    known = _profiles.setdefault(profile.name, profile)
    if known != profile:
        raise ValueError(f"target {profile.name!r} is registered already; give the profile another name")
    return profile


def profile_of(target: str) -> TargetProfile:
    """Return the profile of a target.

    Raises:
        ValueError: for an unknown name.

    >>> sorted(profile_of("openvino").shared_grids)
    ['cat', 'max_pool']
    """
    if target not in tuple(PROFILES):  # a tuple: what the user gives may be unhashable
        own = "import the module of one of your own first (in a config: imports)"
        hint = did_you_mean(str(target), PROFILES) or own
        raise ValueError(f"unknown target {target!r}; registered: {', '.join(PROFILES)}; {hint}")
    return PROFILES[target]
