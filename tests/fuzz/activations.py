"""Moves for tensors of any shape: activations as modules and functions, out of place and in place."""

import math

from tests.fuzz.draft import Draft, Unfit

MODULES = (
    "nn.ReLU()", "nn.ReLU6()", "nn.Hardtanh()", "nn.Hardtanh(-0.5, 2.0)", "nn.LeakyReLU(0.1)", "nn.SiLU()",
    "nn.Hardswish()", "nn.GELU()", "nn.GELU(approximate='tanh')", "nn.Sigmoid()", "nn.Tanh()", "nn.ELU()", "nn.Mish()",
    "nn.PReLU()", "nn.Hardsigmoid()", "nn.Softmax(1)", "nn.Softmax(-1)", "nn.LogSoftmax(1)",
    "nn.Identity()", "nn.Dropout(0.0)", "nn.Dropout(0.3)", "nn.Softplus()",
)  # fmt: skip

MODULES_IN_PLACE = (
    "nn.ReLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.ReLU(inplace=True)", "nn.ReLU6(inplace=True)",
    "nn.Hardtanh(inplace=True)", "nn.LeakyReLU(0.1, inplace=True)", "nn.SiLU(inplace=True)",
    "nn.Hardswish(inplace=True)", "nn.ELU(inplace=True)", "nn.Mish(inplace=True)", "nn.Hardsigmoid(inplace=True)",
    "nn.Dropout(0.0, inplace=True)", "nn.Dropout(0.3, inplace=True)",
)  # fmt: skip

FUNCTIONS = (
    "F.relu({x})", "torch.relu({x})", "{x}.relu()", "F.relu6({x})", "F.hardtanh({x})", "{x}.clamp(min=0)",
    "{x}.clamp(-0.5, 1.0)", "torch.clamp({x}, min=0)", "F.leaky_relu({x}, 0.1)", "F.silu({x})", "F.hardswish({x})",
    "F.gelu({x})", "F.gelu({x}, approximate='tanh')", "torch.sigmoid({x})", "{x}.sigmoid()", "torch.tanh({x})",
    "F.elu({x})", "F.mish({x})", "F.dropout({x}, 0.3, self.training)", "F.softplus({x})", "{x} * 2", "1.5 - {x}",
    "-{x}", "{x} + 1", "{x} / 3", "{x}.abs()", "F.softmax({x}, 1)", "{x}.softmax(-1)",
    "{x}.clone()", "{x}.contiguous()", "{x}.detach()", "{x}.float()",
)  # fmt: skip

FUNCTIONS_IN_PLACE = (
    "F.relu({x}, inplace=True)", "F.relu({x}, True)", "{x}.relu_()", "torch.relu_({x})", "F.relu_({x})",
    "F.relu6({x}, inplace=True)", "F.relu6({x}, True)", "F.hardtanh({x}, -1.0, 1.0, True)", "F.hardtanh_({x})",
    "{x}.clamp_(-1, 1)", "{x}.clamp_(min=0)", "torch.clamp_({x}, min=0)", "F.leaky_relu({x}, 0.1, inplace=True)",
    "F.leaky_relu({x}, 0.1, True)", "F.leaky_relu_({x}, 0.1)", "F.silu({x}, inplace=True)", "F.silu({x}, True)",
    "F.hardswish({x}, inplace=True)", "F.hardswish({x}, True)", "F.elu({x}, inplace=True)", "F.elu_({x})",
    "F.mish({x}, inplace=True)", "F.dropout({x}, 0.3, self.training, True)", "{x}.mul_(2)", "{x}.add_(1)",
    "{x}.sub_(0.5)", "{x}.div_(2)", "{x}.neg_()", "{x}.sigmoid_()", "{x}.tanh_()", "{x}.masked_fill_({x} > 0.5, 0.25)",
    "torch.neg_({x})", "{x}.copy_({x} * 0.5)",
)  # fmt: skip

STATEMENTS_IN_PLACE = (
    "{x} += 1", "{x} *= 2", "{x} -= 0.5", "{x}[:, 0] = 0", "{x}[:, :1].relu_()", "{x}[:, :1] *= 0.5",
    "{x}.view(-1).mul_(2)", "{x}.transpose(0, 1).add_(1)", "F.relu({x}, inplace=True)",
    "{x}.relu_()", "torch.relu_({x})", "self.act({x})",
)  # fmt: skip

VIEWS = (
    "{x}.flatten(1)", "{x}.reshape({x}.shape[0], -1)", "{x}.view({x}.size(0), -1)", "torch.flatten({x}, 1)",
    "{x}.transpose(0, 1)", "{x}.unsqueeze(1)", "{x}.squeeze()", "{x}[:, :1]", "{x}[:1]", "{x}[:, 1:]", "{x}[..., ::2]",
    "{x}[:, 0]", "{x}.transpose(1, -1)", "{x}.narrow(1, 0, 1)",
)  # fmt: skip


def activation(draft: Draft, x: str) -> None:
    """An activation that makes a new tensor."""
    if draft.chance(0.5):
        draft.call(draft.pick(MODULES), x)
    else:
        draft.write(FUNCTIONS, x=x)


def activation_in_place(draft: Draft, x: str) -> None:
    """An activation that writes into its operand; later lines may read either name."""
    if draft.chance(0.5):
        draft.call(draft.pick(MODULES_IN_PLACE), x, shared=0.4)
    elif draft.chance(0.7):
        draft.write(FUNCTIONS_IN_PLACE, x=x)
    else:
        line = draft.pick(STATEMENTS_IN_PLACE).format(x=x)
        if "self.act" in line:
            line = line.replace("self.act", draft.module(draft.pick(MODULES_IN_PLACE), shared=0.4))
        draft.do(line)


def in_place_while_read(draft: Draft, x: str) -> None:
    """y = relu_(x), then an operation on both."""
    activation_in_place(draft, x)
    y = draft.last
    draft.write(("{y} + {x}", "{x} + {y}", "{y} * {x}", "torch.cat([{x}, {y}], 1)"), x=x, y=y)


def join(draft: Draft, x: str) -> None:
    """A sum, product or concatenation with an earlier tensor."""
    forms = ("{x} + {y}", "{y} + {x}", "torch.add({x}, {y})", "{x} * {y}", "{x} - {y}", "{x}.add({y})", "{x}.mul({y})")
    other = draft.pick(draft.others(x))
    if draft.chance(0.2):
        draft.let(f"torch.cat([{x}, {other}], {draft.pick((0, 1, 1, 1, -1))})")
    elif draft.chance(0.25):
        writes = ("{x} += {y}", "{x} *= {y}", "{x}.add_({y})", "{x} -= {y}", "{x}.mul_({y})")
        draft.do(draft.pick(writes).format(x=x, y=other))
    else:
        draft.write(forms, x=x, y=other)


def join_and_clip(draft: Draft, x: str) -> None:
    """The end of a residual block: relu(x + y)."""
    others = [name for name in draft.others(x) if name != x]
    if not others:
        join(draft, x)
        return
    y = draft.let(f"{x} + {draft.pick(others)}")
    if draft.chance(0.5):
        draft.call(draft.pick(("nn.ReLU()", "nn.ReLU(inplace=True)", "nn.ReLU6()")), y, shared=0.5)
    else:
        draft.write(("F.relu({x})", "F.relu({x}, inplace=True)", "{x}.relu_()", "F.relu6({x})"), x=y)


def view(draft: Draft, x: str) -> None:
    """A view of the same values."""
    shape = draft.shape(x)
    forms = [*VIEWS, f"torch.permute({{x}}, {tuple(reversed(range(len(shape))))})"]
    if len(shape) > 1 and shape[1] == 1:
        forms += [f"{{x}}.expand(-1, 3{', -1' * (len(shape) - 2)})"] * 3
    if len(shape) == 4:
        forms += [
            "{x}.flatten(2).transpose(1, 2)",
            "{x}.permute(0, 2, 3, 1)",
            f"{{x}}.view(-1, {math.prod(shape[1:])})",
        ]
    draft.write(forms, x=x)


def slices(draft: Draft, x: str) -> None:
    """Slices of what a split gives, joined again."""
    count = draft.shape(x)[1] if len(draft.shape(x)) > 1 else 0
    if count < 2:
        raise Unfit("one")
    forms = (
        "torch.cat({x}.chunk(2, 1)[::-1], 1)", "torch.cat([*{x}.chunk(2, 1)[1:], {x}], 1)",
        "torch.cat({x}.split(1, 1)[1:], 1)", "torch.stack({x}.chunk(2, 0)[-1:], 0)[0]",
        "torch.cat(torch.split({x}, 1, dim=1)[:2], dim=1)", "torch.cat(list({x}.chunk(2, 1)), 1)",
    )  # fmt: skip
    draft.write(forms, x=x)


def parts(draft: Draft, x: str) -> None:
    """Two halves that are treated differently and joined again."""
    count = draft.shape(x)[1] if len(draft.shape(x)) > 1 else 0
    if count < 2 or count % 2:
        view(draft, x)
        return
    half = count // 2
    halves = (
        f"{x}.chunk(2, 1)",
        f"torch.chunk({x}, 2, dim=1)",
        f"{x}.split({half}, 1)",
        f"{x}[:, :{half}], {x}[:, {half}:]",
    )
    a, b = draft.several(draft.pick(halves), 2)
    if draft.chance(0.7):
        draft.attempt(draft.pick((activation, activation_in_place)), draft.pick((a, b)))
    b = draft.last
    draft.write(("torch.cat([{a}, {b}], 1)", "torch.cat([{b}, {a}], 1)", "{a} + {b}", "{a} * {b}"), a=a, b=b)
