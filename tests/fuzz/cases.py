"""Programs on which results once differed: found and shrunk by the fuzzer, or reported by users."""

import re

from tests.fuzz.program import Program

IMAGES = "torch.randn(4, 4, 8, 8)"
FEW = "torch.randn(2, 4, 5, 6)"
SAME = "nn.Conv2d(4, 4, 3, padding=1)"
LOOK = "register_forward_hook(lambda module, args, output: seen.append(float(output.double().mean())))"


def case(x: str, modules: str, lines: str, result: str = "", **rest: object) -> Program:
    """A program from modules and lines separated by semicolons; it returns the last variable by default."""
    made = dict(enumerate(part.strip() for part in modules.split(";")))
    steps = tuple(re.sub(r"\bm(\d+)", r"self.m\1", line.strip()) for line in lines.split(";"))
    defined = [line.split(" = ")[0] for line in steps if re.match(r"v\d+ = ", line)]
    return Program(3, x, {f"m{n}": m for n, m in made.items()}, steps, result or defined[-1], **rest)  # type: ignore[arg-type]


def _in_place(modules: str, call: str) -> dict[str, Program]:
    """An activation that writes into a tensor which an earlier or later line or the caller reads too."""
    named = f"{modules}; " if modules else ""
    number = 1 if modules else 0
    layer, second = f"m{number}", f"m{number + 1}"
    return {
        "residual unit": case(IMAGES, f"{named}{SAME}; {SAME}",
            f"v1 = {call.format(x='v0')}; v2 = {layer}(v1); v3 = {second}(v2); v4 = v3 + v0"),
        "behind a layer": case(IMAGES, f"{named}{SAME}; {SAME}",
            f"v1 = {layer}(v0); v2 = {call.format(x='v1')}; v3 = {second}(v2); v4 = v3 + v1"),
        "behind a norm": case(IMAGES, f"{named}{SAME}; {SAME}; nn.BatchNorm2d(4)",
            f"v1 = {layer}(v0); v2 = m{number + 2}(v1); v3 = {call.format(x='v2')}; v4 = {second}(v3); v5 = v4 + v2"),
        "seen by the caller": case(IMAGES, f"{named}{SAME}", f"v1 = {call.format(x='v0')}; v2 = {layer}(v1)", "v2, v0"),
    }  # fmt: skip


MODULES = ("nn.ReLU", "nn.ReLU6", "nn.SiLU", "nn.Hardswish", "nn.Hardtanh")
WRITING = {
    **{name: (f"{name}(inplace=True)", "m0({x})") for name in MODULES},
    **{name: ("", f"{name}({{x}}, inplace=True)") for name in ("F.relu", "F.silu", "F.hardswish", "F.relu6")},
    "F.relu, True": ("", "F.relu({x}, True)"),
    "relu_": ("", "{x}.relu_()"),
    "torch.relu_": ("", "torch.relu_({x})"),
}
CASES: dict[str, Program] = {
    f"in place: {name}, {place}": program
    for name, (modules, call) in WRITING.items()
    for place, program in _in_place(modules, call).items()
}

CASES |= {
    "views: the network of PyTorch's CIFAR-10 tutorial": case("torch.randn(4, 3, 32, 32)",
        "nn.Conv2d(3, 6, 5); nn.MaxPool2d(2, 2); nn.Conv2d(6, 16, 5); nn.Linear(400, 10)",
        "v1 = m1(F.relu(m0(v0))); v2 = m1(F.relu(m2(v1))); v3 = v2.view(-1, 400); v4 = m3(v3)"),
    "views: of a convolution": case("torch.randn(2, 4, 13, 12)", "nn.Conv2d(4, 2, 3, padding=(1, 0), bias=False)",
        "v1 = m0(v0); v2 = v1.view(-1, 260)"),
    "views: of a grouped convolution": case("torch.randn(2, 8, 1, 8)", "nn.Conv2d(8, 8, 1, groups=4)",
        "v1 = m0(v0); v2 = v1.view(-1, 64)", context="small_integers"),
    "views: a write through one": case(IMAGES, "nn.Conv2d(4, 4, 3, padding=1, groups=4)",
        "v1 = m0(v0); v1.flatten(1).clamp_(min=0)", context="small_integers"),
    "layout: a norm behind one image": case("torch.randn(1, 2, 13, 12)",
        "nn.Conv2d(2, 2, 3, groups=2, stride=2); nn.BatchNorm2d(2)", "v1 = m0(v0); v2 = m1(v1)",
        context="small_integers"),
    "layout: an image of one pixel": case("torch.randn(3, 8, 1, 1).to(memory_format=torch.channels_last)",
        "nn.Conv2d(8, 4, (3, 1), groups=4, padding=3); nn.Dropout(0.3)", "v1 = m0(v0); v2 = m1(v1)"),
    "layout: a norm behind one large image": case("torch.randn(1, 3, 32, 32)", "nn.Conv2d(3, 6, 3); nn.BatchNorm2d(6)",
        "v1 = m0(v0); v2 = m1(v1)"),
    "layout: a dropout's mask": case("torch.randn(3, 16, 9, 3)", "nn.Conv2d(16, 8, 1)",
        "v1 = m0(v0); v2 = F.dropout(v1, 0.3, self.training)", context="small_integers"),
    "layout: a dropout's mask behind a transposed input": case("torch.randn(4, 3, 8, 8).transpose(2, 3)",
        "nn.Conv2d(3, 3, 3, padding=1); nn.Dropout(0.3)", "v1 = m0(v0); v2 = m1(v1)"),
}  # fmt: skip

PRODUCTS = {
    "a linear layer": ("torch.randn(4, 8)", "nn.Linear(8, 8)", "v1 = m0(v0)"),
    "a linear layer of two": ("torch.randn(4, 8)", "nn.Linear(8, 8); nn.Linear(8, 8)", "v9 = m1(v0); v1 = m0(v9)"),
    "a linear layer over channels": (IMAGES, "nn.Linear(4, 4)", "v9 = v0.permute(0, 2, 3, 1); v1 = m0(v9)"),
    "a convolution": (FEW, "nn.Conv2d(4, 2, 3)", "v1 = m0(v0)"),
    "a convolution in integers": ("torch.randn(4, 4, 16, 16)", "nn.Conv2d(4, 2, 3)", "v1 = m0(v0)"),
    "a product": ("torch.randn(2, 5, 8)", "nn.Linear(8, 8)", "v8 = m0(v0); v1 = v8 @ v0.transpose(-2, -1)"),
}
CHANGES = {
    "mul_": "v1.mul_(2)",
    "+=": "v1 += 1",
    "masked_fill_": "v1.masked_fill_(v1 > 0.5, 0.25)",
    "elu_": "v2 = F.elu_(v1)",
    "leaky_relu": "v2 = F.leaky_relu(v1, 0.1, inplace=True)",
    "relu_": "v2 = v1.relu_()",
    "setitem": "v1[:, 0] = 0",
}
CASES |= {
    f"written: {product}, {change}": case(x, modules, f"{lines}; {line}")
    for product, (x, modules, lines) in PRODUCTS.items()
    for change, line in CHANGES.items()
}

CASES |= {
    "written: LeakyReLU": case("torch.randn(4, 8)", "nn.Linear(8, 8); nn.LeakyReLU(0.1, inplace=True)",
        "v1 = m0(v0); v2 = m1(v1)"),
    "written: an input that a quantizer has read": case(IMAGES, f"{SAME}; nn.SiLU(inplace=True); {SAME}",
        "v1 = v0.roll(1, 2); v2 = m0(v1); v3 = m1(v0); v4 = m2(v3)", "v4, v2"),
    "written: a hook on VGG's first ReLU": case(IMAGES, f"{SAME}; nn.ReLU(inplace=True); {SAME}",
        "v1 = m0(v0); v2 = m1(v1); v3 = m2(v2)", after=(f"model.m1.{LOOK}",)),
    "written: by a hook": case(IMAGES, f"{SAME}; nn.ReLU(); {SAME}", "v1 = m0(v0); v2 = m1(v1); v3 = m2(v2)",
        after=("model.m0.register_forward_hook(lambda module, args, output: (output.mul_(0.5), None)[1])",)),
    "written: F.dropout in place": case("torch.randn(3, 4)", "nn.Linear(4, 4)",
        "v1 = m0(v0); v2 = F.dropout(v1, 0.3, self.training, True); v3 = v2 + v1"),
    "refused: a function in place, then two readers": case(IMAGES, f"{SAME}; {SAME}; nn.Conv2d(4, 4, 1)",
        "v1 = m0(v0); v2 = torch.relu_(v1); v3 = m1(v2); v4 = m2(v1); v5 = v3 + v4"),
    "refused: a write through a view": case("torch.randn(4, 8)", "nn.Linear(8, 8); nn.Linear(8, 3)",
        "v1 = m0(v0); v1.view(-1).mul_(2); v2 = m1(v1)"),
}  # fmt: skip

CHAIN = "v1 = m0(v0); v2 = m1(v1); v3 = m2(v2)"
AFTERWARDS = {
    "an activation replaced": ("nn.ReLU()", "model.m1 = nn.SiLU()"),
    "an activation put in": ("nn.Identity()", "model.m1 = nn.ReLU()"),
    "an activation left out": ("nn.Hardswish()", "model.m1 = nn.Identity()"),
    "a pool left out": ("nn.MaxPool2d(3, 1, 1)", "model.m1 = nn.Identity()"),
    "a pool changed": ("nn.MaxPool2d(3, 1, 1)", "model.m1.stride = 2"),
    "a bound changed": ("nn.ReLU6()", "model.m1.max_val = 1.0"),
    "an approximation changed": ("nn.GELU()", "model.m1.approximate = 'tanh'"),
    "a forward patched": ("nn.ReLU()", "model.m1.forward = torch.neg"),
    "a dropout replaced": ("nn.Dropout(0.0)", "model.m1 = nn.GELU()"),
    "a norm's eps": ("nn.BatchNorm2d(4)", "model.m1.eps = 0.5"),
    "a norm frozen": ("nn.BatchNorm2d(4)", "model.m1.eval()"),
    "a layer frozen": ("nn.ReLU()", "model.m0.eval()"),
    "a layer replaced": ("nn.ReLU()", "model.m2 = nn.Conv2d(4, 2, 1)"),
    "a hook that looks": ("nn.ReLU()", f"model.m0.{LOOK}"),
    "a hook that looks at a norm": ("nn.BatchNorm2d(4)", f"model.m1.{LOOK}"),
    "a hook that looks at a layer before a norm": ("nn.BatchNorm2d(4)", f"model.m0.{LOOK}"),
    "a hook that changes a layer before a norm": ("nn.BatchNorm2d(4)",
        "model.m0.register_forward_hook(lambda module, args, output: output * 0.5)"),
    "a hook that changes": ("nn.ReLU()", "model.m1.register_forward_hook(lambda module, args, output: output * 0.5)"),
}  # fmt: skip
CASES |= {
    f"afterwards: {name}": case(IMAGES, f"{SAME}; {module}; {SAME}", CHAIN, after=(change,))
    for name, (module, change) in AFTERWARDS.items()
}

CASES |= {
    "afterwards: a new head": case("torch.randn(4, 8)", "nn.Linear(8, 8); nn.ReLU(); nn.Linear(8, 5)", CHAIN,
        after=("model.m2 = nn.Linear(8, 3)",)),
    "norms: one value per channel": case("torch.randn(1, 3, 1, 1)",
        "nn.Conv2d(3, 4, 1); nn.BatchNorm2d(4); nn.ReLU(); nn.Conv2d(4, 2, 1)", f"{CHAIN}; v4 = m3(v3)"),
    "norms: one row": case("torch.randn(1, 3)", "nn.Linear(3, 4); nn.BatchNorm1d(4); nn.ReLU(); nn.Linear(4, 2)",
        f"{CHAIN}; v4 = m3(v3)"),
    "norms: the first value far from the others": case(
        "torch.rand(1, 1, 96, 96).round().index_put_((torch.tensor(0),) * 4, torch.tensor(255.0))",
        "nn.Conv2d(1, 4, 1); nn.BatchNorm2d(4); nn.ReLU(); nn.Conv2d(4, 2, 1)", f"{CHAIN}; v4 = m3(v3)"),
    "modes: tokens": case("torch.randint(0, 11, (4, 5))",
        "nn.Embedding(11, 8); nn.Linear(8, 8); nn.ReLU(inplace=True); nn.Linear(8, 8)",
        f"{CHAIN}; v4 = m3(v3); v5 = v4 + v3"),
    "modes: one layer frozen before": case(IMAGES, f"{SAME}; nn.BatchNorm2d(4); nn.ReLU(inplace=True); {SAME}",
        f"{CHAIN}; v4 = m3(v3); v5 = v4 + v0", before=("model.m1.eval()",)),
}  # fmt: skip
