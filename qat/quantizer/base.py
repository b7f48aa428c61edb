"""`Quantizer`: a module that owns the learned grid of one tensor."""

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qat.collectives import rank_count
from qat.functional import ewgs_gradient, positive_scale, round_ste, scale_gradient
from qat.functional.tensors import overwrite, require_floating, widened
from qat.inputs import described
from qat.quantizer.granularity import from_groups, to_groups
from qat.quantizer.observer import RangeObserver
from qat.ranges import initial_range, require_in_reach, scale_and_zero_point
from qat.spec import QuantSpec, Role, default_spec
from qat.text import check_types, did_you_mean
from qat.torch_internals import FORWARD_HOOKS, hooks_of, note_in_state

UNCALIBRATED_REACH = 4.0  # end of the range before any data: four deviations of a normalised tensor
DEFAULT_EWGS_DELTA = 1e-3  # the smallest of the paper's (arXiv:2104.00903)
# A learned scale acts as at least this share of its first one: below it ReLUs are dead, and no gradient comes back.
FLOOR_SHARE = 1 / 32
SWITCHES = ("disabled", "frozen")  # keys in the state dict, there only while the switch is set
INTEGERS = "integers"  # a state dict's note beside the version: lowest and highest integer of the spec
# The methods that decide what a quantizer's call computes; see `estimator_of`.
CALL_METHODS = (
    "__call__", "forward", "quantize", "grid", "effective_scale", "positive", "bounds", "gradient_factor", "repair",
    "follow",
)  # fmt: skip


@dataclass(frozen=True)
class NoOptions:
    """Options of a rule that takes none."""


class Quantizer(nn.Module):
    """Base class of all rules: owns scale and zero_point of one tensor, and its grid.

    A rule derives from it, implements `quantize(x)` and registers itself; see `register_quantizer`. One that learns
    something else than a scale overrides `add_parameters` (which calls `add_zero_point` in any case), `cover`, and
    `grid` and `compute_codes` if it has a grid. A grid or option that the rule cannot have is a ValueError.

    Args:
        spec: the grid, the rule and its options; what it leaves open is that of the role.
        role: "weight" or "activation"; decides N in LSQ's gradient factor 1/sqrt(N*qmax).
        shape: shape of scale; () per tensor, (64, 1, 1, 1) for 64 channels of a convolution weight; see `scale_shape`.

    Attributes:
        scale: the learned step, a parameter from construction on; it acts through `positive_scale`.
        smallest_scale: what it acts as at least, 1/32 of the scale that calibration found.
        zero_point: the integer (as float) that stands for 0.0; None if the grid is symmetric, where it is 0.
        calibrated: True if the range was set from data; saved with the state.
        is_calibrated: the same as a bool, which can be read without a device synchronisation.
        is_disabled: True if the tensor passes unchanged; see `qat.disable_fake_quant`.
        is_frozen: True if parameters get no gradient and observed ranges stay; see `qat.freeze_scales`.
        is_fixed: True if the grid is that of a runtime's kernel, and frozen for good.
        summed_axis: axis of an activation that the next layer sums over, for rules with blocks; None if unknown.
        exportable: True if the output lies on the integer grid that `grid()` and `codes()` describe.
        uniform: True if values are rounded to multiples of `grid()`'s scale, which EWGS requires.
        integers_from_bits: True if the integers follow from `spec.bits` alone, and `max_magnitude` cannot limit them.
        roles: tensors that the rule can quantize.
        needs_sample: True if `fit` needs all values, whatever `init` says; a min-max range keeps only the extremes.
        drawn: names that `curves` shows besides the parameters of `add_positive`.
        lr_factors: factors on the learning rate, by name, of learned parameters in another unit than x.
        options_type: dataclass of the rule's own options, read from `QuantSpec.options`.
    """

    summed_axis: int | None = None
    exportable: bool = True
    uniform: ClassVar[bool] = True
    integers_from_bits: ClassVar[bool] = False
    roles: ClassVar[tuple[Role, ...]] = ("weight", "activation")
    needs_sample: ClassVar[bool] = False
    drawn: ClassVar[tuple[str, ...]] = ()
    lr_factors: ClassVar[dict[str, float]] = {}
    options_type: ClassVar[type] = NoOptions

    # torch.distributed.checkpoint looks up every key of a state dict as an attribute.
    disabled = property(attrgetter("is_disabled"))
    frozen = property(attrgetter("is_frozen"))

    scale: Tensor
    smallest_scale: Tensor
    zero_point: Tensor | None
    calibrated: Tensor
    ewgs_delta: Tensor

    def __init__(
        self,
        spec: QuantSpec,
        role: Role = "activation",
        shape: tuple[int, ...] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._positive: list[str] = []
        self.is_disabled = self.is_frozen = self.is_fixed = self.is_calibrated = False
        self.spec = spec = spec.resolved(default_spec(role))
        self.role: Role = role
        self.relative_steps = spec.grad_scale == "relative"  # see `positive`
        self.shape = tuple(shape)
        self.options = _read_options(spec.rule, self.options_type, spec.options)
        self.check_spec()
        self.add_parameters(device)
        if spec.grad_scale != "sample" and not list(self.parameters()):  # "sample" is the default, nobody's choice
            raise ValueError(f"rule {spec.rule!r} learns nothing of {role}s: {spec.grad_scale=} has no effect")
        self.fixed_delta = DEFAULT_EWGS_DELTA if spec.ewgs_delta is None else spec.ewgs_delta
        if spec.ewgs == "hessian":
            self.register_buffer("ewgs_delta", torch.zeros((), device=device))
        self.register_buffer("calibrated", torch.tensor(False, device=device))
        self.observer: RangeObserver | None = None
        self.label = type(self).__name__  # in errors; `prepare` gives it its name

    def check_spec(self) -> None:
        """Raise a ValueError for a grid that the rule cannot have."""
        spec = self.spec
        if self.role not in self.roles:
            raise ValueError(f"rule {spec.rule!r} is for {self.roles[0]}s only; choose another for {self.role}s")
        if self.uniform and spec.qmax < 1:
            raise ValueError(
                f"rule {spec.rule!r}: a signed grid needs at least 2 bits, got bits=1; use the rule 'binary' for one"
                " bit, or signed=False"
            )
        if spec.max_magnitude is not None and self.integers_from_bits and 2**spec.bits - 1 > spec.max_magnitude:
            raise ValueError(
                f"rule {spec.rule!r} has the integers of its {spec.bits} bits and cannot keep to"
                f" max_magnitude={spec.max_magnitude}; use the rule 'lsq', or fewer bits"
            )
        if spec.ewgs != "none" and not self.uniform:
            raise ValueError(
                f"rule {spec.rule!r}: ewgs={spec.ewgs!r} corrects the rounding to a uniform grid, which it does not do;"
                " use ewgs='none'"
            )

    def add_parameters(self, device: torch.device | str | None) -> None:
        """Create what the rule learns: scale and zero_point here."""
        spec = self.spec
        low = -UNCALIBRATED_REACH if spec.signed or not spec.symmetric else 0.0  # an affine grid reaches below zero
        scale, zero_point = scale_and_zero_point(torch.tensor(low), torch.tensor(UNCALIBRATED_REACH), spec)
        self.add_positive("scale", scale.expand(self.shape).to(device))
        self.add_zero_point(zero_point.expand(self.shape).to(device))

    def add_positive(self, name: str, start: Tensor) -> None:
        """Register a parameter that acts as positive, at least 1/32 of its first value."""
        setattr(self, name, nn.Parameter(start.clone(memory_format=torch.contiguous_format)))
        self.register_buffer(f"smallest_{name}", start.detach() * FLOOR_SHARE)
        self._positive.append(name)

    def set_positive(self, name: str, values: Tensor) -> None:
        """Set a parameter of `add_positive` in place; a ValueError beyond its limit."""
        getattr(self, name).copy_(require_in_reach(name, values))
        getattr(self, f"smallest_{name}").copy_(getattr(self, name) * FLOOR_SHARE)

    def add_zero_point(self, start: Tensor) -> None:
        """Register the zero point of an affine grid; a symmetric one has None."""
        start = start.clone(memory_format=torch.contiguous_format)
        self.register_buffer("zero_point", None if self.spec.symmetric else start)

    def forward(self, x: Tensor) -> Tensor:
        """Quantize x; return it unchanged if switched off, or while an observer looks."""
        require_floating(x, self.label)
        if self.observer is not None:
            self.observer.update(x)
            return x
        if self.is_disabled:
            return x
        if not self.is_calibrated:
            # Without a name: one text for all quantizers on this grid, which Python then shows once.
            warnings.warn(
                f"a quantizer ({self.spec}) runs on its default range, or on one of other bits; call"
                " qat.calibrate(model, batches) first; qat.summary(model) marks those without a range",
                stacklevel=2,
            )
        grouped = self.spec.granularity == "group"
        if grouped:
            x = to_groups(x, self.spec)
        if self.training:
            self.repair()  # before anything reads the scale: one NaN would spread to every weight
            if not self.is_frozen:
                self.follow(x.detach())
        if self.spec.ewgs != "none":  # a gradient only: the values of x do not change
            delta = self.ewgs_delta if self.spec.ewgs == "hessian" else self.fixed_delta
            # The paper's delta is for a range of length 1, ewgs_gradient's for a step of length 1.
            x = ewgs_gradient(x, self.grid(x)[0].detach(), delta / self.span())
        y = self.quantize(x)
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            raise ValueError(f"{type(self).__name__}.quantize: x is {described(x)}, what it returned {described(y)}")
        return from_groups(y, self.spec) if grouped else y

    def follow(self, x: Tensor) -> None:
        """Hook for rules whose range follows the data: sees a training batch first."""

    def quantize(self, x: Tensor) -> Tensor:
        """Return x (split into its groups) on the grid, with the rule's gradients."""
        raise TypeError(f"{type(self).__name__}: a quantizer must implement quantize(x)")

    def grid(self, x: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (scale, zero_point) in force: scale > 0 and finite, zero_point integer.

        A rule that finds its scale anew at every call (of weights only) needs the tensor itself.
        """
        scale = self.effective_scale()
        return scale, torch.zeros_like(scale, requires_grad=False) if self.zero_point is None else self.zero_point

    def effective_scale(self) -> Tensor:
        """Return the learned scale as it acts: finite, and at least smallest_scale."""
        return self.positive("scale")

    def positive(self, name: str) -> Tensor:
        """Return a parameter of `add_positive` as it acts."""
        value = positive_scale(getattr(self, name), getattr(self, f"smallest_{name}"))
        # A step of the optimizer then multiplies it, as it would with the logarithm as the parameter.
        return scale_gradient(value, value.detach().square()) if self.relative_steps else value

    def learned(self, name: str, x: Tensor) -> Tensor:
        """Return a parameter as it acts, its gradient times `gradient_factor`."""
        return scale_gradient(self.positive(name), self.gradient_factor(x))

    @torch.no_grad()
    def repair(self) -> None:
        """Replace NaN and infinite parameters, which no gradient could bring back."""
        for name in self._positive:
            parameter, floor = getattr(self, name), getattr(self, f"smallest_{name}")
            overwrite(parameter, torch.where(parameter.isfinite(), parameter, floor / FLOOR_SHARE))

    def bounds(self) -> tuple[int, int]:
        """Return the lowest and the highest integer in force."""
        return self.spec.qmin, self.spec.qmax

    def codes(self, x: Tensor) -> Tensor:
        """Return the integers of x as a float tensor of its shape."""
        return from_groups(self.compute_codes(to_groups(x, self.spec)), self.spec)

    def span(self) -> Tensor | int:
        """Return the steps between the ends of the grid, without a device synchronisation."""
        return self.spec.qmax - self.spec.qmin

    def compute_codes(self, x: Tensor) -> Tensor:
        """Return clamp(round(x / scale) + zero_point, qmin, qmax) of the grouped x."""
        scale, zero_point = self.grid(x)
        return torch.clamp(round_ste(widened(x)[0] / scale) + zero_point, *self.bounds())

    @property
    def channel_axis(self) -> int | tuple[int, int] | None:
        """Axes of the (grouped) tensor along which scales differ; None for one scale."""
        return {"tensor": None, "channel": 0, "group": (0, 1)}[self.spec.granularity]

    @property
    def passes(self) -> bool:
        """True if tensors pass unchanged: observed, or switched off."""
        return self.observer is not None or self.is_disabled

    @property
    def has_integers(self) -> bool:
        """True if a layer can compute on the codes: in use, no scales per group."""
        return self.exportable and self.spec.granularity != "group" and not self.passes

    def refusal(self) -> str | None:
        """Return why it cannot be exported, as the end of a sentence, or None."""
        if not self.exportable:
            return f"uses the rule {self.spec.rule!r}, whose values lie on no integer grid"
        if self.spec.granularity == "group":
            return f"has a scale per group of {self.spec.group_size} inputs, which ONNX Runtime's integer kernels lack"
        return None

    def penalty(self) -> Tensor | None:
        """Return a term for the loss (a cost of bits, a decay of a range), or None."""
        return None

    def set_progress(self, progress: float) -> None:
        """Set the training progress, 0 to 1, that annealed rules go by."""

    def gradient_factor(self, x: Tensor) -> float:
        """Return LSQ's 1/sqrt(N*qmax).

        N counts the elements that share a scale, of a weight, or of one sample of an activation; with
        grad_scale="batch", those of the whole batch on all ranks.
        """
        choice = self.spec.grad_scale
        if choice in ("none", "relative") or x.numel() == 0:
            return 1.0
        of_sample = self.role == "activation" and choice == "sample" and x.dim() > 1
        # Without the batch's size, which torch.compile would otherwise have to look at in every step.
        count = math.prod(x.shape[1:] if of_sample else x.shape) // math.prod(self.shape)
        count *= rank_count() if self.role == "activation" and choice == "batch" else 1
        return 1.0 / math.sqrt(max(count, 1) * max(self.spec.qmax, 1))  # one signed bit has a qmax of 0

    def extra_repr(self) -> str:
        """Show the grid in print(model)."""
        return f"{self.spec.rule}, {self.describe()}"

    def describe(self) -> str:
        """Describe the grid in words, for tables."""
        return str(self.spec)

    def fit(self, values: Tensor, elements: int | None = None) -> None:
        """Set the range from values of shape (scales, elements), as `spec.init` says.

        They are all of a weight, or a sample of an activation; `elements` is how many the whole weight, or one sample
        of the activation, has. NaN, infinity, no values, or negative ones on a grid without them are a ValueError.
        """
        low, high = initial_range(values, self.spec)
        if self.spec.symmetric and not self.spec.signed and bool((low < 0).any()):
            raise ValueError(
                f"values down to {values.min():.3g}, which its grid ({self.spec}) cannot hold; use signed=True or"
                " symmetric=False"
            )
        self.set_range(low, high)

    @torch.no_grad()
    def set_range(self, low: Tensor | float, high: Tensor | float) -> None:
        """Cover low .. high (shape of scale, or one value), in place.

        A bound that is NaN or infinite, or a range wider than float32, is a ValueError.
        """
        low, high = (torch.as_tensor(each).detach().to(self.calibrated.device, torch.float32) for each in (low, high))
        if not bool(torch.isfinite(high - low).all()):
            raise ValueError(
                f"set_range: the range must be finite and fit float32, got {low.tolist()}, {high.tolist()}"
            )
        count = math.prod(self.shape)
        low, high = (each.reshape(self.shape) if each.numel() == count else each for each in (low, high))
        self.cover(low.expand(self.shape), high.expand(self.shape))
        self.mark_calibrated()

    def cover(self, low: Tensor, high: Tensor) -> None:
        """Set the parameters for finite bounds in the shape of the scales."""
        scale, zero_point = scale_and_zero_point(low, high, self.spec)
        self.set_positive("scale", scale)
        if self.zero_point is not None:
            self.zero_point.copy_(zero_point)

    def mark_calibrated(self) -> None:
        """Remember that the range comes from data."""
        self.calibrated.fill_(True)
        self.is_calibrated = True

    def freeze(self, frozen: bool = True) -> None:
        """Keep the range as it is; with False, let it learn or follow the data again."""
        self.is_frozen = frozen = frozen or self.is_fixed
        for parameter in self.parameters():
            parameter.requires_grad_(not frozen)
            parameter.grad = None  # else an optimizer would apply the last one again

    def __getstate__(self) -> dict[str, object]:
        # Without the hooks that an aid has put up for a time: in a copy nobody would take them down.
        hooks = {key: hook for key, hook in hooks_of(self)[0].items() if not getattr(hook, "for_a_time", False)}
        return {**self.__dict__, FORWARD_HOOKS: OrderedDict(hooks)}

    def switches(self) -> list[str]:
        """Return the switches that are set, in words."""
        return [word for word, isset in (("switched off", self.is_disabled), ("frozen", self.is_frozen)) if isset]

    def curves(self) -> dict[str, Tensor]:
        """Return the tensors whose means TensorBoard shows, by name."""
        return {name: getattr(self, name) for name in (*self._positive, *self.drawn)}

    def positive_parameters(self) -> list[Tensor]:
        """Return the parameters of `add_positive`."""
        return [getattr(self, name) for name in self._positive]

    def scales_at_minimum(self) -> Tensor | None:
        """Count learned scales below what they act as; None if none is learned."""
        below = [(getattr(self, name) < getattr(self, f"smallest_{name}")).sum() for name in self._positive]
        return torch.stack(below).sum() if below else None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        note_in_state(destination, prefix, INTEGERS, [self.spec.qmin, self.spec.qmax])
        for key, isset in zip(SWITCHES, (self.is_disabled, self.is_frozen), strict=True):
            if isset:
                destination[f"{prefix}{key}"] = torch.tensor(True)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        disabled, frozen = (state_dict.pop(f"{prefix}{key}", None) is not None for key in SWITCHES)
        # Taken out, else torch would call the keys of the switches unexpected.
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if f"{prefix}calibrated" in state_dict:  # a float model's state says nothing about this quantizer
            self.is_disabled = disabled
            if frozen != self.is_frozen:
                self.freeze(frozen)
        integers = [self.spec.qmin, self.spec.qmax]
        if local_metadata.get(INTEGERS, integers) != integers:  # the range was made for other bits
            self.calibrated = torch.zeros_like(self.calibrated)
        if not self.calibrated.is_meta:
            self.is_calibrated = bool(self.calibrated)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # Scales per group of a convolution have 5 axes, and torch would give them a memory format made for images.
        def flat(t: Tensor) -> Tensor:
            return fn(t.flatten()).view(t.shape) if t.dim() == 5 else fn(t)

        return super()._apply(flat, recurse)  # type: ignore[no-untyped-call]


def _read_options(rule: str, options_type: Any, given: Mapping[str, object]) -> Any:
    known = [option.name for option in fields(options_type)]
    for name in given:
        if name not in known:
            hint = did_you_mean(str(name), known) or f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"rule {rule!r}: unknown option {name!r}; {hint}")
    check_types(options_type, given, f"rule {rule!r}")
    try:
        return options_type(**given)
    except ValueError as error:  # its __post_init__ does not know the rule's name
        raise ValueError(f"rule {rule!r}: {error}") from error


@contextmanager
def without_range_warnings(model: nn.Module) -> Iterator[None]:
    """Silence the warnings of quantizers that have no range yet."""
    without = [each for each in model.modules() if isinstance(each, Quantizer) and not each.is_calibrated]
    try:
        for each in without:
            each.is_calibrated = True
        yield
    finally:
        for each in without:
            each.is_calibrated = False
