"""Config sections of the model, of the training stages, and of grids."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from qat.calibration import Step
from qat.post_training import STEPS
from qat.text import unknown_name

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Bits = Annotated[int, Field(ge=1, le=16)]


class Section(BaseModel):
    """A section of the file: strict about keys, immutable after it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


# Both parameters of a Beta distribution. At 1000 its samples are 0.5 to two digits; far above, its computation fails.
Alpha = Annotated[float, Field(ge=0, le=1000)]


class ModelConfig(Section):
    """The float model to quantize, and its weights."""

    name: str = "resnet18"
    """A torchvision builder, which says the task (`resnet18`, `lraspp_mobilenet_v3_large`), a model of timm
    (`timm/mobilenetv4_conv_small`), or `package.module:callable` for a model of your own."""
    task: Literal["classification", "segmentation", "detection"] | None = None
    """What a model of your own learns: a label for each image (default), or for each pixel."""
    weights: str | None = None
    """Pretrained weights by torchvision's or timm's name (`DEFAULT`, `IMAGENET1K_V1`, `a1_in1k`); downloaded once."""
    num_classes: Count | None = None
    """Classes of the last layer; default: those of the data set."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of the builder."""
    checkpoint: str | None = None
    """A file of float weights, .safetensors or a weights-only .pt; relative to the current folder."""


class StageConfig(Section):
    """Training of the float baseline and, with its own values, of QAT."""

    epochs: CountOrZero = 1
    """Passes over the training data; 0 skips the stage."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: Positive = 0.1
    """Peak learning rate, reached after the warm-up."""
    momentum: Probability = 0.9
    """SGD's (Nesterov); AdamW has none."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of weights. Norms and biases: `norm_weight_decay`; quantizers: `quantizer_weight_decay`."""
    norm_weight_decay: NonNegative = 0.0
    """Weight decay of normalisation parameters and biases."""
    warmup_epochs: NonNegative = 0.0
    """Linear warm-up from 1 % of lr, in epochs (fractions allowed)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: cosine to 0 over the remaining steps, or constant."""
    accumulate: Count = 1
    """Batches of one optimizer step: N batches of B images are one of N * B, in the memory of B, but for the statistics
    of BatchNorm. What is left at the end of an epoch is a smaller step."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    mixup_alpha: Alpha = 0.0
    """Above 0: each training image is a mean of two, and so is its label; their shares are drawn from
    Beta(alpha, alpha) for every batch (arXiv:1710.09412). With cutmix_alpha too, each batch gets one of both."""
    cutmix_alpha: Alpha = 0.0
    """Above 0: a random rectangle of each training image is another image's, and the label has its share of the area,
    drawn from Beta(alpha, alpha) (arXiv:1905.04899)."""
    clip_grad_norm: Positive | None = None
    """Clip the gradient's total norm to this."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Keep an exponential moving average of the weights with this decay per step, and evaluate it."""
    bn_reestimate: Literal["auto", "always", "never"] = "auto"
    """Before each evaluation, and so before calibration and export, estimate BatchNorm's running statistics anew from
    5,000 training images, augmented as in training. After a short training, with a small momentum, or of averaged
    weights, they lag behind. `auto`: after training, where a trial clearly lowers the loss, and
    where they have seen too few batches. Frozen ones stay."""


class DistillationConfig(Section):
    """Learning from a float model's answers too: `qat.finetuning.Distillation`."""

    weight: NonNegative = 1.0
    """Of the divergence from the teacher, beside the loss of the labels."""
    temperature: Positive = 1.0
    """Of both models' logits; above 1 wrong classes count more, which costs much at few bits."""
    teacher: ModelConfig | None = None
    """Another float model, with its weights; null: the float model of this run. It costs one of its forwards a step."""
    features: dict[str, NonNegative] = Field(default_factory=dict)
    """Modules of both models whose outputs are compared too, with the weight of each: `{layer3: 0.1}`."""
    amp: Literal["none", "bf16"] = "none"
    """Precision of the teacher's forward; bf16 halves its cost where the processor has it (avx512_bf16, AMX, CUDA)."""

    @model_validator(mode="after")
    def _effective(self) -> "DistillationConfig":
        if not self.weight and not any(self.features.values()):
            raise ValueError("weight: 0 without features has no effect; set one of them, or leave the block out")
        if not self.weight and self.temperature != 1:
            raise ValueError(f"temperature: {self.temperature:g} has no effect with weight: 0; leave it out")
        idle = [name for name, weight in self.features.items() if not weight]
        if idle:
            raise ValueError(f"features: {idle[0]}: 0 has no effect; give it a weight, or leave it out")
        return self


class OscillationConfig(Section):
    """Weights that jump between two integers: `qat.finetuning.Oscillations`.

    They are counted, in a curve and in the epoch's line where they are many. `{}` only counts; dampening or freezing
    stops them.
    """

    dampen: NonNegative = 0.0
    """Strength at the end of a loss that draws weights to their integers; the paper's is 0.1, 0 is none."""
    freeze: Annotated[float, Field(gt=0, le=1)] | None = None
    """Frequency, at the end, above which a weight is frozen at its mean integer; the paper's is 0.01; null: none is."""
    freeze_from: Annotated[float, Field(gt=0, le=1)] = 0.1
    """The same when freezing begins, from which it falls along a cosine."""
    after: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of the stage's steps before dampening and freezing begin."""
    momentum: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of the newest step in a weight's frequency of oscillation and in its mean integer."""
    most_bits: Bits = 4
    """Weights of wider grids, such as 8-bit first and last layers, are left out: they turn around without harm."""

    @model_validator(mode="after")
    def _effective(self) -> "OscillationConfig":
        usual = {name: field.default for name, field in type(self).model_fields.items()}  # in a run's own file too
        if self.freeze is None and self.freeze_from != usual["freeze_from"]:
            raise ValueError(f"freeze_from: {self.freeze_from:g} has no effect without freeze; set it, such as 0.01")
        if self.freeze is not None and self.freeze > self.freeze_from:
            raise ValueError(f"freeze: {self.freeze:g} must be at most freeze_from: {self.freeze_from:g}")
        if self.after != usual["after"] and self.freeze is None and not self.dampen:
            raise ValueError(f"after: {self.after:g} has no effect without dampen or freeze; set one, or leave it out")
        return self


class QuantNoiseConfig(Section):
    """Weights that are quantized in parts: `qat.finetuning.QuantNoise`.

    Evaluations, and so best.pt, are of the whole model on its grids.
    """

    share: Annotated[float, Field(ge=0, lt=1)]
    """Share of each weight's elements, drawn anew in every step, that is quantized at the start."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the stage's steps after which weights are quantized whole; `share` rises to 1 until then."""


class SpecConfig(Section):
    """One grid, as in `qat.QuantSpec`; fields left out keep the target's choice."""

    bits: Bits | None = None
    signed: bool | None = None
    symmetric: bool | None = None
    granularity: Literal["tensor", "channel", "group"] | None = None
    """One scale for the tensor, one per channel (weights), or one for every `group_size` inputs of a channel."""
    group_size: Count | None = None
    rule: str | None = None
    """Name of a registered quantizer (`lsq`); see docs/rules.md."""
    options: dict[str, Any] | None = None
    """Further options of the rule (`{momentum: 0.05}` for `ema`); see docs/rules.md."""
    narrow_range: bool | None = None
    init: Literal["minmax", "percentile", "mse", "lsq"] | None = None
    """How the first range is found."""
    percentile: Annotated[float, Field(gt=50, le=100)] | None = None
    """With init=percentile: the percentage of values below the upper bound of the range, and above the lower one."""
    grad_scale: Literal["sample", "batch", "none", "relative"] | None = None
    """N in LSQ's gradient factor 1/sqrt(N*qmax): elements per sample, per batch, or no factor; `relative`: scale^2."""
    ewgs: Literal["none", "fixed", "hessian"] | None = None
    """Element-wise gradient scaling (arXiv:2104.00903) on top of a uniform rule: with `ewgs_delta`, or with a delta
    that is computed before every epoch from the trace of the Hessian."""
    ewgs_delta: NonNegative | None = None
    max_magnitude: Count | None = None
    """Largest integer, and the smallest with a minus sign: 64 for weights whose products cannot saturate on x86
    without VNNI."""


class CalibrationStepConfig(Section):
    """A step of calibration that changes weights: a class of `qat.post_training`.

    Its arguments are the other keys; left out, its own defaults.
    """

    name: Literal["cross_layer_equalization", "adaround", "brecq", "qdrop"]
    iterations: Count | None = None
    """Steps of Adam for each layer or block (adaround, brecq, qdrop)."""
    lr: Positive | None = None
    """Adam's rate for the rounding of weights."""
    rounding_weight: Positive | None = None
    """Of the penalty that draws each weight to one of its two levels."""
    drop: Probability | None = None
    """Probability with which an activation passes in float in a step."""
    scale_lr: NonNegative | None = None
    """Adam's rate for the scales of activations; 0: they stay."""
    batch_size: Count | None = None
    """Images in a step."""
    rounds: Count | None = None
    """Passes over all pairs of layers (cross_layer_equalization)."""
    seed: CountOrZero | None = None
    """Of what adaround, brecq and qdrop draw."""

    @model_validator(mode="after")
    def _taken(self) -> "CalibrationStepConfig":
        self.build()
        return self

    def build(self) -> Step:
        """Return the step; ValueError for a key that is not one of its arguments."""
        step, given = STEPS[self.name], self.model_dump(exclude_none=True, exclude={"name"})
        if wrong := unknown_name(given, [field.name for field in fields(step)], "argument"):
            raise ValueError(f"{self.name}: {wrong}")
        built: Step = step(**given)
        return built


class ProgressiveConfig(Section):
    """A stage of QAT before the last, on other grids, which hands its weights on."""

    bits: Bits | None = None
    """Bits of weights and activations; of layers that first_bits, last_bits or overrides name, those stay."""
    weight: SpecConfig = SpecConfig()
    """Further changes of the grid of weights (`{rule: lsq}`)."""
    activation: SpecConfig = SpecConfig()
    epochs: Count = 1
    lr: Positive | None = None
    """Peak learning rate; left out: qat.lr, or by the stage's own bits if that is left out too."""

    @model_validator(mode="after")
    def _effective(self) -> "ProgressiveConfig":
        if self.bits is None and self.lr is None and self.weight == self.activation == SpecConfig():
            raise ValueError("it trains as the last stage does; set bits, or raise qat.epochs")
        return self


class QATStageConfig(StageConfig):
    """Fine-tuning with quantization."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Left out: adamw where weights or activations have at most 4 bits, else sgd."""
    lr: Positive = 0.01
    """Peak learning rate. Left out: 0.01 of sgd; of adamw by the fewest bits, 0.0005 at 4, 0.001 at 3, 0.002 at 2."""
    quantizer_lr_factor: Positive | None = None
    """Learning rate of quantizer parameters (scales), as a factor of lr; null: by each quantizer's bits, 0.1 from 8
    bits on, 1.0 up to 4. At 8 bits, where a scale is a hundredth of the values it rounds, 1.0 lets scales collapse (50
    of MobileNetV2's, measured); at 4 bits and fewer 1.0 is LSQ's own."""
    quantizer_lr: Positive | None = None
    """Learning rate of quantizer parameters, whatever lr is; in place of quantizer_lr_factor."""
    quantizer_optimizer: Literal["sgd", "adamw"] | None = None
    """Optimizer of quantizer parameters; null: the weights'. Another one needs a rate: EWGS trains scales with Adam at
    1e-5 beside SGD (arXiv:2104.00903). With `schedule`, both rates fall alike."""
    quantizer_weight_decay: NonNegative = 0.0
    """Weight decay of quantizer parameters; a scale that decays shrinks its range."""
    weight_decay_by_bits: bool = False
    """Weights on 3 bits get half of weight_decay, on 2 and 1 a quarter, as in LSQ (arXiv:1902.08153)."""
    distillation: DistillationConfig | None = None
    """Learn from a float model too; {} does so with the run's own."""
    oscillation: OscillationConfig | None = None
    """Count, dampen or freeze the weights that oscillate, in the last stage; {} counts."""
    quant_noise: QuantNoiseConfig | None = None
    """Quantize a growing share of each weight, in each stage of QAT."""
    progressive: tuple[ProgressiveConfig, ...] = ()
    """Stages before the last, one after the other, such as `[{bits: 8}, {bits: 4, epochs: 2}]` before 2 bits: each
    starts from the weights of the one before, with ranges found anew. All else is as in the last one."""
    freeze_bn_epoch: CountOrZero | None = None
    """From this epoch on (0 is the first), batch-norm statistics are frozen."""
    freeze_scales_epoch: CountOrZero | None = None
    """From this epoch on, the ranges of all quantizers are frozen: scales stay, weights learn."""

    @model_validator(mode="after")
    def _one_rate_of_scales(self) -> "QATStageConfig":
        if self.quantizer_lr is not None and self.quantizer_lr_factor is not None:
            raise ValueError(
                f"quantizer_lr: {self.quantizer_lr:g} and quantizer_lr_factor: {self.quantizer_lr_factor:g} are two"
                " rates for the same parameters; leave one out"
            )
        own = self.quantizer_optimizer or self.optimizer
        if own != self.optimizer and self.quantizer_lr is None and self.quantizer_lr_factor is None:
            raise ValueError(
                f"quantizer_optimizer: {own!r} beside {self.optimizer!r} needs a rate of its own; set quantizer_lr,"
                f" such as {'1e-5' if own == 'adamw' else '0.001'}"
            )
        return self
