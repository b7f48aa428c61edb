"""Moves for images, (N, C, H, W): convolutions, norms, pools, and well-known blocks."""

from tests.fuzz.activations import activation, activation_in_place
from tests.fuzz.draft import Draft, Unfit

POOLS = (
    "nn.MaxPool2d(2)", "nn.MaxPool2d(3, 2, 1)", "nn.MaxPool2d(2, 1, dilation=2)", "nn.MaxPool2d(3, 2, ceil_mode=True)",
    "nn.MaxPool2d((1, 2), stride=1)", "nn.AvgPool2d(2)", "nn.AvgPool2d(3, 1, 1)",
    "nn.AvgPool2d(3, 2, 1, ceil_mode=True)", "nn.AvgPool2d(2, count_include_pad=False)", "nn.AdaptiveAvgPool2d(1)",
    "nn.AdaptiveAvgPool2d((2, 1))", "nn.AdaptiveMaxPool2d(2)", "nn.LPPool2d(2, 2)",
)  # fmt: skip

POOL_FUNCTIONS = (
    "F.max_pool2d({x}, 2)", "F.max_pool2d({x}, 3, 2, 1)", "F.max_pool2d({x}, 2, dilation=2, stride=1)",
    "F.max_pool2d({x}, kernel_size=3, stride=2, ceil_mode=True)", "F.avg_pool2d({x}, 2)",
    "F.avg_pool2d({x}, 3, 2, ceil_mode=True)", "F.avg_pool2d({x}, 3, 2, 1, True, False)",
    "F.adaptive_avg_pool2d({x}, 1)", "{x}.mean((2, 3), keepdim=True)", "F.interpolate({x}, scale_factor=2)",
    "F.pad({x}, (1, 0, 2, 1))", "{x}.amax((2, 3), True)", "F.pad({x}, (1, 1, 1, 1), mode='replicate')",
    "{x}.roll(1, 2)",
)  # fmt: skip


def convolution(draft: Draft, x: str) -> None:
    """Any convolution."""
    channels = draft.shape(x)[1]
    out = draft.pick((1, 2, 3, 4, 5, 8, 8, 12, 16))
    kernel = draft.pick((1, 1, 3, 3, 3, 2, (3, 1), 5))
    options = [f"{channels}, {out}, {kernel}"]
    if draft.chance(0.35) and channels > 1:
        groups = draft.pick([g for g in range(2, channels + 1) if channels % g == 0])
        options = [f"{channels}, {groups * draft.pick((1, 1, 2))}, {kernel}, groups={groups}"]
    options += [f"padding={draft.pick((1, 1, 2, (1, 0), 3, 'same', 'valid'))!r}"] if draft.chance(0.6) else []
    stride = [f"stride={draft.pick((2, 2, (1, 2), 3))}"] if draft.chance(0.25) else []
    # torch 2.15's 1x1 convolutions of few channels, channels last, with a stride write past their memory on AVX2.
    options += stride if (kernel != 1 or channels >= 8) and "padding='same'" not in options else []
    options += ["dilation=2"] if draft.chance(0.1) else []
    options += ["bias=False"] if draft.chance(0.4) else []
    options += [f"padding_mode='{draft.pick(('reflect', 'circular', 'replicate'))}'"] if draft.chance(0.08) else []
    made = ", ".join(options)
    draft.call(f"{'OwnConv2d' if draft.chance(0.04) else 'nn.Conv2d'}({made})", x)


def sized(draft: Draft, x: str) -> None:
    """Operations whose sizes come from tensors, as tuples and as numbers."""
    y = draft.pick([name for name in draft.others(x, same=False) if len(draft.shape(name)) == 4])
    forms = (
        "F.interpolate({x}, size={y}.shape[-2:])", "F.interpolate({x}, {y}.size()[2:], mode='bilinear')",
        "F.adaptive_avg_pool2d({x}, {y}.shape[-2:])", "F.adaptive_max_pool2d({x}, {y}.shape[-2:])",
        "F.avg_pool2d({x}, {x}.size()[2:])", "F.avg_pool2d({x}, ({x}.shape[2], {x}.shape[3]))",
        "F.interpolate({x}, size=({x}.shape[2] * 2, {x}.shape[3]))", "F.layer_norm({x}, {x}.shape[1:])",
        "F.max_pool2d({x}, ({x}.shape[2] // 2, {x}.shape[3]))",
        "F.group_norm(F.pad({x}, (0, 1)), {x}.shape[1])",  # a norm of one value is its rounding error
        "F.interpolate({x}, scale_factor={y}.shape[2] / {x}.shape[2])", "{x}[:, :, :{y}.shape[2], :{y}.shape[3]]",
        "F.pad({x}, (0, {y}.shape[3], {x}.shape[2], 0))", "{x}.reshape({x}.shape[0], -1, {x}.shape[2], {x}.shape[3])",
        "{x} * (1.0 / {x}.shape[2])", "{x}.mean((2, 3), True).expand(-1, -1, {y}.shape[2], {y}.shape[3])",
    )  # fmt: skip
    z = draft.write(forms, x=x, y=y)
    if draft.shape(z) == draft.shape(y) and draft.chance(0.5):
        draft.write(("{z} + {y}", "torch.cat([{y}, {z}], 1)"), y=y, z=z)


def between(draft: Draft, x: str) -> None:
    """What a runtime fuses around quantizers: an activation, softmax or pool between two layers."""
    convolution(draft, x)
    draft.pick((activation, activation, pool))(draft, draft.last)
    convolution(draft, draft.last)


def same_convolution(draft: Draft, x: str) -> None:
    """A convolution that keeps the shape, so that sums fit; sometimes one that exists already."""
    channels = draft.shape(x)[1]
    kinds = ("3, padding=1", "3, padding=1, bias=False", "1", "1, bias=False", f"3, padding=1, groups={channels}")
    draft.call(f"nn.Conv2d({channels}, {channels}, {draft.pick(kinds)})", x)


def transposed(draft: Draft, x: str) -> None:
    """A transposed convolution."""
    options = f"{draft.shape(x)[1]}, {draft.pick((2, 3, 4))}, {draft.pick((2, 3))}, stride={draft.pick((1, 2))}"
    draft.call(f"nn.ConvTranspose2d({options})", x)


def norm(draft: Draft, x: str) -> None:
    """A norm over images."""
    channels = draft.shape(x)[1]
    kinds = (f"nn.BatchNorm2d({channels})",) * 4 + (
        f"nn.BatchNorm2d({channels}, affine=False)", f"nn.BatchNorm2d({channels}, momentum=None)",
        f"nn.BatchNorm2d({channels}, track_running_stats=False)", f"nn.GroupNorm(1, {channels})",
        f"nn.InstanceNorm2d({channels})",
    )  # fmt: skip
    draft.call(draft.pick(kinds), x)


def pool(draft: Draft, x: str) -> None:
    """A pool, as module or function."""
    if draft.chance(0.6):
        draft.call(draft.pick(POOLS), x)
    else:
        draft.write(POOL_FUNCTIONS, x=x)


def layer_and_act(draft: Draft, x: str) -> None:
    """Convolution, sometimes a norm, and an activation, which are fused."""
    draft.pick((convolution, same_convolution))(draft, x)
    if draft.chance(0.6):
        norm(draft, draft.last)
    draft.pick((activation, activation_in_place, activation_in_place))(draft, draft.last)


def sequential(draft: Draft, x: str) -> None:
    """A container, to which hooks may be attached."""
    channels = draft.shape(x)[1]
    acts = ("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU6(inplace=True)", "nn.SiLU(inplace=True)", "nn.GELU()")
    layers = f"nn.Conv2d({channels}, {channels}, 3, padding=1), nn.BatchNorm2d({channels}), {draft.pick(acts)}"
    draft.call(f"nn.Sequential({layers})", x)


def residual(draft: Draft, x: str) -> None:
    """A residual unit that begins with its activation, as in MiDaS and pre-activation ResNets."""
    acts = ("nn.ReLU(inplace=True)", "nn.ReLU()", "nn.ReLU6(inplace=True)", "nn.SiLU(inplace=True)")
    act = draft.module(draft.pick(acts))
    y = draft.let(f"{act}({x})")
    for _ in range(draft.pick((1, 2))):
        same_convolution(draft, y)
        y = draft.last
        if draft.chance(0.5):
            y = draft.let(f"{act}({y})")
    draft.write(("{y} + {x}", "{x} + {y}", "torch.add({y}, {x})"), x=x, y=y)


def excitation(draft: Draft, x: str) -> None:
    """Squeeze and excitation."""
    channels = draft.shape(x)[1]
    s = draft.write(
        (
            "F.avg_pool2d({x}, 3, 2, ceil_mode=True)",
            "F.avg_pool2d({x}, 3, 2, 1, True, False)",
            "F.adaptive_avg_pool2d({x}, 1)",
            "{x}.mean((2, 3), keepdim=True)",
        ),
        x=x,
    )
    s = draft.call(f"nn.Conv2d({channels}, {channels}, 1)", s)
    s = draft.write(("torch.sigmoid({s})", "F.hardsigmoid({s})", "{s}.sigmoid()", "{s}.sigmoid_()"), s=s)
    draft.write(("{s} * {x}", "{x} * {s}"), s=s, x=x)


def channels_last_linear(draft: Draft, x: str) -> None:
    """A linear layer over the channels, as in ConvNeXt."""
    channels = draft.shape(x)[1]
    y = draft.let(f"{x}.permute(0, 2, 3, 1)")
    y = draft.call(f"nn.Linear({channels}, {channels})", y)
    if draft.chance(0.5):
        activation_in_place(draft, y)
        y = draft.last
    draft.let(f"{y}.permute(0, 3, 1, 2)")


def head(draft: Draft, x: str) -> None:
    """Flatten and classify."""
    channels, height, width = draft.shape(x)[1:]
    if channels * height * width > 1600:
        raise Unfit("too wide")
    flat = ("{x}.flatten(1)", "torch.flatten({x}, 1)", "{x}.view({x}.size(0), -1)", "{x}.reshape({x}.shape[0], -1)",
            f"{{x}}.view(-1, {channels * height * width})")  # fmt: skip
    y = draft.write(flat, x=x)
    draft.call(f"nn.Linear({channels * height * width}, {draft.pick((3, 5, 10))})", y)


def shuffle(draft: Draft, x: str) -> None:
    """Channels in another order, as in ShuffleNet."""
    batch, channels, height, width = draft.shape(x)
    if channels % 2:
        raise Unfit("odd")
    y = draft.let(f"{x}.{draft.pick(('view', 'reshape'))}({batch}, 2, {channels // 2}, {height}, {width})")
    y = draft.let(draft.pick((f"torch.transpose({y}, 1, 2)", f"{y}.transpose(1, 2).contiguous()")))
    draft.let(f"{y}.{draft.pick(('view', 'reshape'))}({batch}, -1, {height}, {width})")


MOVES = (
    (convolution, 5), (same_convolution, 3), (norm, 3), (pool, 3), (layer_and_act, 5), (sequential, 1), (residual, 3),
    (excitation, 1), (channels_last_linear, 1), (head, 1), (shuffle, 1), (transposed, 1),
    (sized, 3), (between, 2),
)  # fmt: skip
