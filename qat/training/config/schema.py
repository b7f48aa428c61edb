"""Schema of a run's YAML file: every field with its type, default and meaning.

Each section of the file is a class. `qat.training.config.file` reads a file into `RunConfig`; this module only defines
what a valid config is. Unknown keys are refused everywhere (`extra="forbid"`).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from qat.targets import profile_of
from qat.text import did_you_mean
from qat.training.config.stages import (
    Bits,
    CalibrationStepConfig,
    Count,
    CountOrZero,
    ModelConfig,
    Positive,
    Probability,
    QATStageConfig,
    Section,
    SpecConfig,
    StageConfig,
)
from qat.training.tasks.known import task_of
from qat.training.tasks.task import Task

DATASETS = (
    "digits", "imagefolder", "cifar10", "cifar100", "mnist", "fashion_mnist", "imagenet", "npz", "fake", "canvases",
    "masks", "voc", "coco", "yolo", "voc_boxes",
)  # fmt: skip
WITHOUT_FILES = {
    "digits": "bundled",
    "fake": "made up",
    "canvases": "made of the bundled digits",
}  # these need no `data.root`, and why


def _dataset_name(name: str) -> str:
    if name not in DATASETS and ":" not in name:
        hint = did_you_mean(name, DATASETS)
        raise ValueError(
            f"expected {', '.join(DATASETS)} or package.module:callable, got {name!r}{hint and f'; {hint}'}"
        )
    return name


DatasetName = Annotated[str, AfterValidator(_dataset_name)]


def _interval(value: object) -> object:
    is_steps = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if not is_steps and not (isinstance(value, str) and re.fullmatch(r"[1-9]\d* ?min", value)):
        raise ValueError(f"expected a number of steps (500) or of minutes (10min), got {value!r}")
    return value


Interval = Annotated[int | str, BeforeValidator(_interval)]


def _for_channels(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"expected three numbers, one for each channel, such as [0.5, 0.5, 0.5], got {value!r}")
    return tuple(value)


ForChannels = BeforeValidator(_for_channels)


class AugmentConfig(Section):
    """Training-time augmentation in the order of its keys (torchvision.transforms.v2).

    For sets in memory, what does not interpolate (crop_padding, horizontal_flip, random_erasing, cutout) is done on
    whole batches.
    """

    random_resized_crop: bool = False
    """Crop a random area (8 to 100 %) and resize it to `data.image_size`; validation resizes and crops the centre."""
    crop_padding: CountOrZero = 0
    """Pad each side by this many pixels, then crop `data.image_size` at random (CIFAR's recipe: 4)."""
    horizontal_flip: Probability = 0.0
    """Probability of mirroring an image."""
    affine: bool = False
    """Small random rotation (10 degrees), shift (10 %) and scale (0.9 to 1.1); for aligned data such as characters."""
    trivial_augment: bool = False
    """TrivialAugmentWide (arXiv:2103.10158)."""
    random_erasing: Probability = 0.0
    """Probability of erasing a random rectangle."""
    cutout: CountOrZero = 0
    """Side of a square, in pixels, that is set to the mean around a random centre of every image (arXiv:1708.04552)."""


class DataConfig(Section):
    """The data set, its preprocessing and its batches."""

    name: DatasetName = "digits"
    """`digits` is bundled; `imagefolder` reads root/train/<class>/ and root/val/<class>/; `npz` reads the arrays
    x_train, y_train, x_val, y_val (uint8 images NHWC or NHW) of one file; `fake` is random and for smoke tests. For
    segmentation, `canvases` are scenes of the bundled digits, `masks` reads root/train/images/, root/train/masks/, the
    same of val and the names in root/classes.txt, and `voc` PASCAL VOC 2012. For detection, `coco` reads root/train/,
    root/val/, root/annotations/train.json and val.json (or COCO 2017's own names), `yolo` root/train/images/,
    root/train/labels/, the same of val and the names in root/classes.txt or root/data.yaml, `voc_boxes` PASCAL VOC
    2012, and `canvases` have boxes too. For a data set of your own `package.module:callable`: it gets this section and
    returns a `qat.training.data.images.Dataset`."""
    root: str | None = None
    """Folder (or .npz file) of the data; not for `digits` and `fake`. A data set of your own may read it."""
    download: bool = False
    """Let torchvision download cifar10, cifar100, mnist, fashion_mnist, voc or voc_boxes into `root`."""
    image_size: Count = 32
    """Side of the square image that the model sees, in pixels."""
    resize_size: Count | None = None
    """Validation: resize the shorter side to this before the centre crop; default: image_size, no crop."""
    mean: Annotated[tuple[float, float, float], ForChannels] | None = None
    """Per-channel mean of the normalisation, of pixels in [0, 1]; default: the data set's own."""
    std: Annotated[tuple[Positive, Positive, Positive], ForChannels] | None = None
    """Per-channel deviation of the normalisation."""
    augment: AugmentConfig = AugmentConfig()
    batch_size: Count = 64
    """Images per training batch, of all ranks together; a step has one, or as many as a stage's `accumulate` says."""
    eval_batch_size: Count | None = None
    """Images per validation step; default: twice batch_size."""
    workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Loader processes of each rank; default: 0 for sets in memory, which on CUDA are augmented on the device; else up
    to 8, at most one a core."""
    limit_train: Count | None = None
    """Use only this many training images (a fixed random choice)."""
    limit_val: Count | None = None
    """Use only this many validation images (a fixed random choice)."""


class OverrideConfig(Section):
    """Changes for the layers that a key of `overrides` matches."""

    weight: SpecConfig = SpecConfig()
    activation: SpecConfig = SpecConfig()
    skip: bool | None = None
    """Leave the layer in float; false undoes the skip of an earlier key."""

    @model_serializer
    def _as_given(self) -> dict[str, object]:
        # A line for each null of each layer would hide what is given.
        specs = {name: getattr(self, name).model_dump(exclude_none=True) for name in ("weight", "activation")}
        return {key: each for key, each in {**specs, "skip": self.skip}.items() if each not in ({}, None)}


class QuantizationConfig(Section):
    """The grids, and the ranges that fine-tuning starts from."""

    target: str = "onnxruntime"
    """The runtime whose integer kernels the model is made for, or a target that a module under `imports` registers. It
    chooses what weight and activation leave out, and refuses what it does not run. See docs/targets.md."""
    weight: SpecConfig = SpecConfig()
    activation: SpecConfig = SpecConfig()
    first_bits: Bits | None = None
    """Bits of weight and input of the first quantized layer in the order of execution; overrides win over it."""
    last_bits: Bits | None = None
    """The same for the last quantized layer."""
    residual_bits: Bits | None = None
    """Bits of what sums, products, averages and float operations read, such as the residual stream; null: at least 8,
    since published low-bit networks have it in float. A layer that reads it gets a grid of its own bits behind it."""
    overrides: dict[str, OverrideConfig] = Field(default_factory=dict)
    """Changes for some layers. A key is a pattern of layer names (`conv1`, `layer1.*`, as in fnmatch), or `type:` and
    the class of the float layer (`type:Linear`). Later keys win."""
    calibration_batches: Count = 8
    """Number of training batches (without augmentation) from which the activation ranges are computed."""
    calibration_steps: tuple[CalibrationStepConfig, ...] = ()
    """Post-training steps on the same batches, such as `[{name: adaround}]`: what calibration makes of the weights
    before QAT, or with `qat.epochs: 0` without it. See docs/low_bits.md."""


class ExportConfig(Section):
    """Files that are written and checked at the end of a run."""

    onnx: bool = True
    """Write model.onnx, run it in ONNX Runtime over the whole validation split, and compare."""
    weights: Literal["best", "last"] = "last"
    """The epoch of QAT whose weights are exported and reported as QAT: the last one, or the one with the best
    validation accuracy (best.pt), which is then no accuracy on unseen images."""
    exact_sums: Literal["auto", "always", "never"] = "auto"
    """Residual sums in float32, as torch adds them, in place of ONNX Runtime's faster integer sum, which rounds
    near-ties its own way. `auto`: if integer sums change a prediction; those that end on fewer than 8 bits always."""
    end_to_end: bool = False
    """For detection: also write end_to_end.onnx, which answers with boxes: decoding and non-maximum suppression are
    inside. Its mAP is counted too."""
    packed: bool = True
    """Weights of at most 4 bits take 4 in the file; ONNX Runtime is as fast with it. false: 8 bits, for a runtime that
    does not read INT4."""
    opset: Annotated[int, Field(ge=13, le=25)] = 21
    """Of model.onnx; an older runtime does not read the file (TensorRT 8: 13 to 17). 4 bits need 21, 2 bits 25."""
    dynamic: tuple[Literal["batch", "height", "width"], ...] = ("batch",)
    """Axes of model.onnx whose sizes are free; with height or width the file is compared with the model at others."""

    @model_validator(mode="after")
    def _effective(self) -> "ExportConfig":
        if self.end_to_end and (self.opset < 18 or len(self.dynamic) > 1 or not self.onnx):
            raise ValueError("end_to_end: needs onnx: true, opset: 18 or more, and no free height and width")
        return self


class RunConfig(Section):
    """A whole run."""

    name: str = "run"
    """Name of the run; default: the config file's name."""
    run_dir: str | None = None
    """Run folder; default: the first of runs/<name>, runs/<name>-2, -3 ... that does not exist. A folder given here
    must be new or empty, or hold only what a start left that trained nothing, unless the run resumes from it."""
    resume: Literal["never", "auto"] = "never"
    """`auto`: continue from last.pt in run_dir (default: the newest runs/<name>*), or start a new run if there is none.
    For a finished run of the same config, the command says so and returns its exit status; with a larger `qat.epochs`
    it trains on, with another `export` it exports again."""
    imports: list[str] = Field(default_factory=list)
    """Modules of your own that register rules (`qat.register_quantizer`) or targets (`qat.targets.register_target`),
    found from the current folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    device: str = "auto"
    """`auto` (CUDA if available), `cpu`, `cuda`, `cuda:1` ...; under torchrun `cuda` is each rank's own."""
    amp: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision of the training steps; fp16 with a gradient scaler (CUDA only)."""
    channels_last: bool = True
    """Memory format of images and convolutions; faster on current CPUs and tensor cores."""
    integer_forward: Literal["auto", "off"] = "auto"
    """`auto`: the training forward multiplies integers where the processor does so exactly and faster (CPUs with VNNI;
    see docs/speed.md). `off`: it multiplies floats on the same grids, as on all other devices."""
    compile: bool = False
    """Train through torch.compile. The first step takes a minute or more."""
    cuda_graphs: Literal["auto"] | bool = "auto"
    """Run steps and evaluations as CUDA graphs, which take a second to record, where a step needs no more of the host
    than that: one rank, no `accumulate`, no `qat.quant_noise`, no features for distillation."""
    sync_batch_norm: bool = False
    """On many ranks: BatchNorm normalises with the statistics of the whole batch, and not of each rank's share."""
    checkpoint_every: Interval | None = None
    """Also write last.pt within an epoch: after so many training steps (500) or minutes (10min). SIGTERM and SIGUSR1
    write it after the step in any case."""
    log_every: Count = 10
    """Training steps between two points of the curves. The host waits for the device only at these points."""
    watch: Literal["off", "scales", "all"] = "all"
    """What is drawn of the quantizers: nothing; what they learn; or also what they clip and lose, weights that turn
    round, and the pictures of the report. See docs/curves.md."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    float: StageConfig = StageConfig(epochs=0)
    """Training of the float baseline; with epochs: 0 the loaded weights are the baseline."""
    qat: QATStageConfig = QATStageConfig()
    float_finetune: bool = False
    """Also fine-tune the float model with QAT's epochs and settings, for a fair comparison."""
    quantization: QuantizationConfig = QuantizationConfig()
    export: ExportConfig = ExportConfig()

    @property
    def task(self) -> Task:
        """What the run learns."""
        return task_of(self.model.name, self.model.task)

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if self.cuda_graphs is True and self.compile:
            raise ValueError("cuda_graphs: true records the model as it is; leave compile: true out, or cuda_graphs")
        if self.compile and self.qat.distillation is not None and self.qat.distillation.features:
            raise ValueError(
                "qat.distillation.features: compiled code does not return them; leave them out, or compile: true"
            )
        if self.compile and self.qat.quant_noise is not None:
            raise ValueError("qat.quant_noise: compiled code does not follow its hooks; leave it out, or compile: true")
        if not self.imports:  # else a module may still register the target; `build_recipe` checks it after the imports
            try:
                profile_of(self.quantization.target)
            except ValueError as error:
                raise ValueError(f"quantization.target: {error}") from None
        if self.data.augment.cutout >= self.data.image_size:
            raise ValueError(
                f"data.augment.cutout: {self.data.augment.cutout} leaves little or nothing of images of"
                f" data.image_size: {self.data.image_size}; use less"
            )
        if self.data.resize_size is not None and self.data.resize_size < self.data.image_size:
            raise ValueError(
                f"data.resize_size: {self.data.resize_size} is smaller than data.image_size: {self.data.image_size},"
                " which is cropped from it"
            )
        for name, stage in (("float", self.float), ("qat", self.qat)):
            if 0 < stage.epochs < stage.warmup_epochs:
                raise ValueError(
                    f"{name}.warmup_epochs: {stage.warmup_epochs:g} is longer than {name}.epochs: {stage.epochs}"
                )
            for key, alpha in (("mixup_alpha", stage.mixup_alpha), ("cutmix_alpha", stage.cutmix_alpha)):
                if alpha and self.data.batch_size == 1:
                    raise ValueError(f"{name}.{key}: {alpha:g} mixes images of a batch, data.batch_size is 1; use 0")
        return self
