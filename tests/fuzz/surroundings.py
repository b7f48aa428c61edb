"""Changes of a model besides its forward: hooks, frozen layers, memory formats, changes after `prepare`."""

import random
import re
from dataclasses import replace

from tests.fuzz.program import CONTEXTS, Program

RECIPES = (
    "None", "None", "None", "None", "None", "None",
    "QuantRecipe(activation=QuantSpec(bits=4, signed=False, symmetric=False))",
    "QuantRecipe(weight=QuantSpec(bits=4, granularity='channel'))",
    "QuantRecipe(weight=QuantSpec(granularity='tensor'))",
    "QuantRecipe(target='tensorrt')",
    "QuantRecipe(activation=QuantSpec(bits=8, symmetric=False, grad_scale='relative'))",
)  # fmt: skip

HOOKS = (
    "register_forward_hook(lambda module, args, output: seen.append(float(output.double().mean())))",
    "register_forward_hook(lambda module, args, output: output * 0.5)",
    "register_forward_hook(lambda module, args, output: (output.mul_(0.5), None)[1])",
    "register_forward_pre_hook(lambda module, args: seen.append(float(args[0].double().mean())))",
    "register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))",
    "register_full_backward_hook(lambda module, before, after: seen.append(float(after[0].double().sum())))",
    "register_full_backward_hook(lambda module, before, after: tuple(g if g is None else g * 0.5 for g in before))",
)  # fmt: skip

REPLACEMENTS = ("nn.Identity()", "nn.ReLU()", "nn.SiLU()", "nn.Hardtanh(-0.3, 0.3)", "nn.GELU()", "nn.LeakyReLU(0.2)")

ATTRIBUTES = {
    "nn.ReLU6": ("max_val = 1.0",), "nn.Hardtanh": ("max_val = 0.25", "min_val = -0.1"),
    "nn.LeakyReLU": ("negative_slope = 0.5",), "nn.GELU": ("approximate = 'tanh'", "approximate = 'none'"),
    "nn.ReLU(": ("inplace = True", "forward = torch.neg"), "nn.SiLU": ("inplace = True",),
    "nn.MaxPool2d": ("stride = 1", "ceil_mode = True"), "nn.Dropout": ("p = 0.5", "p = 0.0"),
    "nn.BatchNorm": ("eps = 0.5", "momentum = 0.9", "training = False"), "nn.Softmax": ("dim = -2",),
}  # fmt: skip
"""How the expression of a module begins, and the attributes that may be changed."""

LAYERS = ("nn.Conv", "nn.Linear", "nn.BatchNorm", "nn.Embedding")

SIMPLE = (
    "nn.ReLU", "nn.Hardtanh", "nn.SiLU", "nn.Hardswish", "nn.GELU", "nn.LeakyReLU", "nn.Sigmoid", "nn.Tanh",
    "nn.MaxPool", "nn.AvgPool", "nn.Dropout", "nn.Identity", "nn.BatchNorm", "nn.ELU", "nn.Mish",
)  # fmt: skip
"""Modules that may be replaced by another one."""


OWN = re.compile(r"nn\.((?:Conv|Linear)\w*)\((.*)\)")
"""A layer that may be written as a quantized one of one's own."""

SPECS = (
    "", "", "weight_spec=QuantSpec(bits=4)", "activation_spec=QuantSpec(bits=6)", "activation_spec=None",
    "activation_spec=QuantSpec(signed=True, symmetric=True)",
)  # fmt: skip


def written_by_hand(program: Program, rng: random.Random) -> Program:
    """The program with quantized layers of one's own in the place of some of torch's; most programs get none."""
    if rng.random() < 0.75:
        return program
    modules = dict(program.modules)
    for name, made in modules.items():
        layer = OWN.fullmatch(made)
        stays = not any(line.startswith(f"model.{name} = ") for line in program.after)  # its quantizer would go with it
        if layer is not None and rng.random() < 0.7 and stays:
            modules[name] = f"qat.Quant{layer[1]}({', '.join(filter(None, [layer[2], rng.choice(SPECS)]))})"
    return replace(program, modules=modules)


def surrounded(program: Program, rng: random.Random) -> Program:
    """The program with a few of these changes; most programs get none."""
    modules = list(program.used().items())
    before: list[str] = []
    after: list[str] = []
    if rng.random() < 0.15:
        before.append("model = model.to(memory_format=torch.channels_last)")
    layers = [name for name, made in modules if made.startswith(LAYERS)]
    if layers and rng.random() < 0.12:
        before.append(f"model.{rng.choice(layers)}.eval()")
    if layers and rng.random() < 0.12:
        before.append(f"model.{rng.choice(layers)}.requires_grad_(False)")
    callables = [name for name, made in modules if not made.startswith("nn.Buffer")]
    if callables and rng.random() < 0.12:
        after.append(f"model.{_part(rng, program, callables)}.{rng.choice(HOOKS)}")
    if rng.random() < 0.15:
        after += _change(rng, modules)
    if rng.random() < 0.05:
        after.append("model.lock = threading.Lock()")  # an attribute that cannot be copied
    return replace(
        program,
        before=tuple(before),
        after=tuple(after),
        recipe=rng.choice(RECIPES),
        context=rng.choices(list(CONTEXTS), (11, 3, 5, 1))[0],
        needs_x="randint" not in program.x and rng.random() < 0.4,
    )


def _part(rng: random.Random, program: Program, names: list[str]) -> str:
    name = rng.choice(names)
    inside = program.modules[name].startswith("nn.Sequential") and rng.random() < 0.6
    return f"get_submodule('{name}.{rng.choice((0, 1, 2))}')" if inside else name


def _change(rng: random.Random, modules: list[tuple[str, str]]) -> list[str]:
    """One change of a prepared model."""
    choices = [
        f"model.{name}.{change}"
        for name, made in modules
        for begin, changes in ATTRIBUTES.items()
        if made.startswith(begin)
        for change in changes
    ]
    choices += [f"model.{name} = {rng.choice(REPLACEMENTS)}" for name, made in modules if made.startswith(SIMPLE)] * 2
    choices += [f"model.{name} = {made}" for name, made in modules if made.startswith("nn.Linear")]
    choices += [f"model.{name}.eval()" for name, made in modules if made.startswith(LAYERS)]
    choices += [f"model.{name}.requires_grad_(False)" for name, made in modules if made.startswith(LAYERS)]
    return [rng.choice(choices)] if choices else []
