"""Operators and their options between two integer layers: x and y come from layers, and a layer reads the result."""

import itertools

Shape = tuple[int, ...]

IMAGE, ROW, VOLUME, TOKENS = (2, 4, 7, 9), (2, 4, 11), (2, 4, 5, 6, 7), (2, 6, 8)
"""The shapes of x and y, and what each operator below is tried on."""

CURVES = (
    "F.softmax(x, 1)", "F.softmax(x, -1)", "x.softmax(2)", "F.log_softmax(x, 1)", "F.log_softmax(x, -1)",
    "F.softmin(x, 1)", "F.sigmoid(x)", "torch.tanh(x)", "F.hardsigmoid(x)", "F.hardswish(x)", "F.silu(x)", "F.gelu(x)",
    "F.gelu(x, approximate='tanh')", "F.elu(x)", "F.elu(x, 0.3)", "F.selu(x)", "F.celu(x, 0.5)", "F.mish(x)",
    "F.softplus(x)", "F.softplus(x, beta=3, threshold=2)", "F.softsign(x)", "F.logsigmoid(x)", "F.tanhshrink(x)",
    "F.hardshrink(x, 0.2)", "F.softshrink(x, 0.2)", "F.threshold(x, 0.1, 0.3)", "F.leaky_relu(x)",
    "F.leaky_relu(x, 0.2)", "F.leaky_relu(x, 1.5)", "nn.LeakyReLU(-0.3)", "nn.PReLU()", "nn.PReLU(C)", "F.glu(x, 1)",
    "F.relu(x)", "F.relu6(x)", "F.hardtanh(x, -0.3, 0.4)", "x.clamp(-0.2, 1)", "x.clamp(min=-0.2)",
    "x.clamp(max=0.2)", "torch.clamp(x, y, y + 1)", "F.rrelu(x)",
)  # fmt: skip

JOINS = (
    "x + y", "torch.add(x, y, alpha=2)", "torch.add(x, y, alpha=-0.3)", "x - y", "torch.sub(x, y, alpha=3)",
    "torch.rsub(x, y)", "x * y", "x / (y.abs() + 1)", "torch.div(x, y.abs() + 1, rounding_mode='floor')",
    "torch.div(x, y.abs() + 1, rounding_mode='trunc')", "torch.maximum(x, y)", "torch.minimum(x, y)",
    "torch.fmax(x, y)", "torch.cat([x, y], 1)", "torch.cat([x, y], -1)", "torch.cat([x, y, x], 2)",
    "torch.stack([x, y], 1).flatten(1, 2)", "torch.stack([x, y], -1).flatten(-2)", "torch.where(x > 0, x, y)",
    "torch.lerp(x, y, 0.3)", "torch.addcmul(x, x, y, value=0.5)", "torch.addcdiv(x, x, y.abs() + 1, value=0.5)",
    "torch.atan2(x, y)", "torch.hypot(x, y)", "x.abs() ** y", "torch.remainder(x, 0.7)", "torch.fmod(x, 0.7)",
    "x + 0.3", "x * -0.7", "2 - x", "1 / (x.abs() + 1)", "x / 3", "x * y[:, :1]", "x + y.mean(-1, keepdim=True)",
    "F.cosine_similarity(x, y, dim=1).unsqueeze(1)",
)  # fmt: skip

POINTWISE = (
    "x.abs()", "-x", "x.square()", "x ** 2", "x ** 3", "(x.abs() + 0.1) ** 0.5", "(x.abs() + 0.5) ** -1.5", "2.0 ** x",
    "torch.exp(x)", "torch.expm1(x)", "torch.log(x.abs() + 1)", "torch.log1p(x.abs())", "torch.log2(x.abs() + 1)",
    "torch.sqrt(x.abs())", "torch.rsqrt(x.abs() + 0.3)", "torch.reciprocal(x.abs() + 0.5)", "torch.erf(x)",
    "torch.sin(x)", "torch.cos(x)", "torch.tan(x)", "torch.atan(x)", "torch.asin(x.clamp(-1, 1))", "torch.sinh(x)",
    "torch.cosh(x)", "torch.floor(x * 4)", "torch.ceil(x * 4)", "torch.round(x * 4)", "torch.trunc(x * 4)",
    "torch.frac(x)", "torch.sign(x)", "torch.round(x, decimals=1)", "torch.nan_to_num(x)", "torch.heaviside(x, y)",
    "torch.logaddexp(x, y)", "torch.sinc(x)", "torch.asinh(x)", "torch.exp2(x)", "torch.logit(x.sigmoid(), eps=0.1)",
)  # fmt: skip

REDUCED = (
    "x.mean(-1, keepdim=True)", "x.mean(1, keepdim=True)", "x.mean((-2, -1), keepdim=True)", "x.sum(1, keepdim=True)",
    "x.amax(-1, keepdim=True)", "x.amin(1, keepdim=True)", "x.std(-1, keepdim=True)", "x.norm(dim=1, keepdim=True)",
    "x.var(1, unbiased=False, keepdim=True)", "x.logsumexp(1, keepdim=True)", "x.prod(1, keepdim=True)",
    "x.cumsum(1)", "x.max(1, keepdim=True)[0]", "F.normalize(x, dim=1)", "F.normalize(x, p=1.0, dim=-1, eps=0.5)",
    "x.flatten(1).mean(1, keepdim=True)", "x.median(1, keepdim=True)[0]", "x.sort(1)[0]", "x.topk(2, 1)[0]",
)  # fmt: skip

MOVES = (
    "x.flatten(1)", "x.reshape(x.shape[0], -1, 2, x.shape[-1])", "x.transpose(1, -1)", "x.unsqueeze(2).squeeze(2)",
    "x.roll(1, -1)", "x.roll((1, -2), (1, 2))", "x.flip(-1)", "x[:, :, 1:-1]", "x[..., ::2]", "x[:, ::2]",
    "x.repeat_interleave(2, 1)", "x.narrow(1, 1, 2)", "x.select(-1, 1).unsqueeze(-1)",
    "torch.cat(x.chunk(2, 1)[::-1], 1)",
    "x.tile(2)", "x.unfold(2, 3, 2).flatten(2)", "x.index_select(1, torch.tensor([2, 0]))", "x[:, [1, 0]]",
    "torch.tril(x)", "torch.triu(x, 1)", "x.masked_fill(x > 0.3, 0.1)",
)  # fmt: skip

IMAGES_ONLY = (
    "F.pixel_shuffle(x, 2)", "F.channel_shuffle(x, 2)", "F.pixel_unshuffle(F.pad(x, (0, 1, 0, 1)), 2)",
    "F.unfold(x, 3)", "F.unfold(x, (2, 3), dilation=2, padding=1, stride=2)",
    "F.grid_sample(x, y[:, :2].permute(0, 2, 3, 1))",
    "F.softmax(x.flatten(2), -1)", "x.permute(0, 2, 3, 1)", "F.lp_pool2d(x, 2, 2)", "F.local_response_norm(x, 3)",
    "F.dropout(x, 0.5, False)", "F.dropout2d(x, 0.5, False)", "x.rot90(1, (2, 3))",
    "F.grid_sample(x, y[:, :2].permute(0, 2, 3, 1), align_corners=True, padding_mode='border')",
    "F.grid_sample(x, y[:, :2].permute(0, 2, 3, 1), mode='nearest', padding_mode='reflection')",
    "F.grid_sample(x, y[:, :2].permute(0, 2, 3, 1), mode='bicubic')",
)  # fmt: skip

PRODUCTS = (
    "x @ y.transpose(-1, -2)", "torch.matmul(x.transpose(-1, -2), y)", "torch.bmm(x, y.transpose(1, 2))",
    "torch.einsum('bnc,bmc->bnm', x, y)", "F.scaled_dot_product_attention(x, y, x + y)",
    "torch.baddbmm(x @ y.transpose(1, 2), x, y.transpose(1, 2), beta=0.5, alpha=2)", "F.layer_norm(x, (8,))",
    "nn.LayerNorm(8)", "nn.LayerNorm((6, 8), eps=0.1)", "nn.LayerNorm(8, elementwise_affine=False)",
    "nn.LayerNorm(8, bias=False)", "nn.RMSNorm(8)", "nn.RMSNorm(8, eps=0.1)",
    "F.scaled_dot_product_attention(x, y, y, is_causal=True)",
    "F.scaled_dot_product_attention(x, y, y, scale=0.5)", "torch.cdist(x, y)",
    "torch.cross(x[..., :3], y[..., :3], dim=-1)",
)  # fmt: skip


def pools(rank: int) -> list[str]:
    """Pools of so many axes, with every option."""
    options = {"ceil_mode": (False, True), "count_include_pad": (True, False)}
    found = []
    kernels = ("2", "3, 2, 1", "3, 2", *(["4, 3, 2"] if rank < 3 else []), "2, 1, 1")  # in 3-d ONNX's sizes are others
    for kernel, ceil, counted in itertools.product(kernels, *options.values()):
        found.append(f"F.avg_pool{rank}d(x, {kernel}, ceil_mode={ceil}, count_include_pad={counted})")
    others = ("3", "3, 2, 1", "2, ceil_mode=True", "3, 2, 1, ceil_mode=True", "3, 1, 1, dilation=2", "2, 3, dilation=2")
    found += [f"F.max_pool{rank}d(x, {rest})" for rest in others]
    found += [f"F.adaptive_avg_pool{rank}d(x, {size})" for size in (1, 2, 3)]
    found += [f"F.adaptive_max_pool{rank}d(x, {size})" for size in (1, 2)]
    if rank > 1:
        found += [f"F.avg_pool{rank}d(x, 3, 2, {rest}, divisor_override=5)" for rest in ("0, False", "1, True")]
    return found


def pads(rank: int) -> list[str]:
    """Paddings in every mode, symmetric, uneven and negative."""
    even, uneven, less = "1, 1, " * rank, "2, 1, " + "0, 2, " * (rank - 1), "-1, 1, " + "0, 0, " * (rank - 1)
    modes = ("constant", "reflect", "replicate", "circular")
    found = [f"F.pad(x, ({sides}), mode={mode!r})" for sides in (even, uneven) for mode in modes]
    return [*found, f"F.pad(x, ({less}))", f"F.pad(x, ({even}), value=0.3)", "F.pad(x, (0, 1), value=-0.5)"]


def sizes(rank: int) -> list[str]:
    """Interpolations in every mode, up and down."""
    linear = ("linear", "bilinear", "trilinear")[rank - 1]
    area = ["area"] if rank < 3 else []  # torch.onnx has no 3-d adaptive average
    modes = ["nearest", "nearest-exact", *area, linear, *(["bicubic"] if rank == 2 else [])]
    up, down = str(tuple((13, 10, 9)[:rank])), str(tuple((3, 4, 5)[:rank]))
    factors = ["scale_factor=2", "scale_factor=0.6", f"scale_factor={(1.7, 2.3, 1.5)[:rank]}"]
    found = []
    for mode in modes:
        aligned = ("", ", align_corners=True") if "linear" in mode or mode == "bicubic" else ("",)
        for to, align in itertools.product((f"size={up}", f"size={down}", *factors), aligned):
            found.append(f"F.interpolate(x, {to}, mode={mode!r}{align})")
        found.append(f"F.interpolate(x, scale_factor=1.7, mode={mode!r}, recompute_scale_factor=True)")
        if rank == 2 and mode in ("bilinear", "bicubic"):
            found += [f"F.interpolate(x, size={to}, mode={mode!r}, antialias=True)" for to in (up, down)]
            found.append(f"F.interpolate(x, scale_factor=0.6, mode={mode!r}, antialias=True, align_corners=True)")
    return found


def norms(rank: int) -> list[str]:
    return [
        "nn.GroupNorm(2, 4)", "nn.GroupNorm(1, 4, eps=0.1)", "nn.GroupNorm(4, 4, affine=False)", "F.group_norm(x, 2)",
        f"nn.InstanceNorm{rank}d(4)", f"nn.InstanceNorm{rank}d(4, affine=True)", "F.instance_norm(x, eps=0.1)",
        f"nn.BatchNorm{rank}d(4)",
    ]  # fmt: skip


EVERYWHERE = (*CURVES, *JOINS, *POINTWISE, *REDUCED, *MOVES)

OPERATORS = [
    *((IMAGE, each) for each in (*EVERYWHERE, *IMAGES_ONLY, *pools(2), *pads(2), *sizes(2), *norms(2))),
    *((ROW, each) for each in (*pools(1), *pads(1), *sizes(1), *norms(1))),
    *((VOLUME, each) for each in (*pools(3), *pads(3), *sizes(3), *norms(3))),
    *((TOKENS, each) for each in (*PRODUCTS, *CURVES[:14], *JOINS[:16])),
]
"""Each with the shape of its operands."""

REFUSED = {
    "F.rrelu(x)": "torch.onnx cannot export", "torch.fmax(x, y)": "torch.onnx cannot export",
    "torch.hypot(x, y)": "torch.onnx cannot export", "torch.cdist(x, y)": "torch.onnx cannot export",
    "x.median(1, keepdim=True)[0]": "torch.onnx cannot export",
    **{f"F.adaptive_max_pool{rank}d(x, 2)": "torch.onnx cannot export" for rank in (1, 2, 3)},
    **{f"F.adaptive_avg_pool3d(x, {size})": "torch.onnx cannot export" for size in (2, 3)},
    **{source: "torch.onnx loses" for _, source in OPERATORS
       if "divisor_override" in source or ("antialias" in source and "align_corners" in source)},
}  # fmt: skip
"""What `export_onnx` does not write, and a part of the sentence that says so."""

CHOSEN = [(IMAGE, each) for each in (
    "F.softmax(x, 1)", "F.softmax(x, -1)", "F.sigmoid(x)", "F.leaky_relu(x, 0.2)", "x + y", "x * y",
    "torch.cat([x, y], 1)", "torch.atan2(x, y)", "x.mean((-2, -1), keepdim=True)", "x.clamp(-0.2, 1)",
    "F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=True)",
    "F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=True)",
    "F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)",
    "F.interpolate(x, size=(3, 4), mode='bilinear', antialias=True)",
)]  # fmt: skip
"""What every run of the tests looks at: at least what was wrong once."""
