"""torch's private names stand in qat/torch_internals.py only, and each one is there and does what it is used for."""

import ast
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from qat import torch_internals as internals

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([ROOT / "train.py", *(ROOT / "qat").rglob("*.py")])
HOME = ROOT / "qat" / "torch_internals.py"
OVERRIDDEN = {"_apply", "_conv_forward", "_load_from_state_dict", "_save_to_state_dict"}
"""Methods that torch means subclasses to override: to call one's own is fair."""

CTYPES = {"_fields_"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_own(node: ast.expr) -> bool:
    """Whether this is the object itself, or its base class: `self`, `cls`, `super()`."""
    return ast.unparse(node) in ("self", "cls", "super()")


def defined_in(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return found


TREES = {path: ast.parse(path.read_text()) for path in SOURCES}
OURS = set().union(*(defined_in(tree) for tree in TREES.values()))
TORCHS = {name for kind in (nn.Module(), nn.LSTM(1, 1), torch.zeros(1), fx.Graph()) for name in dir(kind)}


def private_names(tree: ast.AST) -> list[str]:
    """Private names of torch that a file uses: modules, what it imports from them, and attributes."""
    known = (OURS - TORCHS) | defined_in(tree) | OVERRIDDEN | CTYPES
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [f"{node.module}.{each.name}" for each in node.names if "._" in f"{node.module}.{each.name}"]
        elif isinstance(node, ast.Import):
            found += [each.name for each in node.names if each.name.startswith("torch.") and "._" in each.name]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            found.append(str(node.value))
    return found


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo", "from torch._C import _functorch", "from torch.utils import _pytree as pytree",
        "torch._int_mm(a, b)", "module._buffers", "self._parameters", "buffer._version", "torch.ops.mkldnn._linear(x)",
        "importlib.import_module('torch._dynamo')",
    ],
)  # fmt: skip
def test_the_count_finds_private_names(line: str) -> None:
    assert private_names(ast.parse(line)), f"{line} uses a private name of torch"


def test_private_names_of_torch_stand_in_one_module() -> None:
    others = [path for path in SOURCES if path != HOME]
    found = [f"{path.relative_to(ROOT)}: {name}" for path in others for name in private_names(TREES[path])]
    assert not found, f"give these a name in qat/torch_internals.py: {found}"


def private_paths() -> list[str]:
    """What the one module takes from modules of torch."""
    found = private_names(TREES[HOME])
    dotted = [name for name in found if name.startswith(("torch.", "forward_ad."))]
    return sorted({name.replace("forward_ad.", "torch.autograd.forward_ad.") for name in dotted})


@pytest.mark.parametrize("name", private_paths())
def test_torch_still_has(name: str) -> None:
    found: Any = torch
    done = "torch"
    for step in name.split(".")[1:]:
        if not hasattr(found, step):
            try:
                importlib.import_module(f"{done}.{step}")
            except ImportError:
                pytest.fail(f"torch {torch.__version__} has no {name}, which qat/torch_internals.py uses")
        found, done = getattr(found, step), f"{done}.{step}"


def changed(what: str) -> str:
    return f"torch {torch.__version__} changed {what}; see qat/torch_internals.py"


class Half(nn.Module):
    """A module with one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("bias", None)
        self.register_buffer("saved", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.child = self.twin = nn.Identity()


def test_dicts_of_modules() -> None:
    half = Half()
    assert set(internals.children_of(half)) == {"child", "twin"}, changed("how a module keeps its children")
    assert set(internals.parameters_of(half)) == {"weight", "bias"}, changed("how a module keeps its parameters")
    assert set(internals.buffers_of(half)) == {"saved", "passing"}, changed("how a module keeps its buffers")
    assert vars(half)[internals.BUFFERS] is internals.buffers_of(half), changed("where a module keeps its buffers")
    assert internals.unsaved_buffers_of(half) == {"passing"}, changed("how a module notes unsaved buffers")
    internals.children_of(half)["child"] = None
    internals.unsaved_buffers_of(half).add("saved")
    assert half.child is None and "saved" not in half.state_dict(), changed("that a module's dicts are live")


HOOKS: list[tuple[str, Callable[[nn.Module], bool]]] = [
    ("register_forward_hook", internals.has_forward_hooks),
    ("register_forward_pre_hook", internals.has_forward_hooks),
    ("register_full_backward_hook", internals.has_backward_hooks),
    ("register_full_backward_pre_hook", internals.has_backward_hooks),
]


@pytest.mark.parametrize(("register", "has"), HOOKS, ids=[name for name, _ in HOOKS])
def test_hooks_of_modules(register: str, has: Callable[[nn.Module], bool]) -> None:
    module = nn.Identity()
    assert not has(module) and not any(internals.hooks_of(module)), changed("the hooks of a fresh module")
    handle = getattr(module, register)(lambda *_: None)
    assert has(module) and any(internals.hooks_of(module)), changed(f"where {register} keeps its hook")
    for hooks in internals.hooks_of(module):
        hooks.clear()
    assert not has(module), changed("that a module's dicts of hooks are live")
    handle.remove()


def test_hooks_on_all_modules() -> None:
    assert not internals.all_modules_are_hooked(), changed("hooks on all modules")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert internals.all_modules_are_hooked(), changed("hooks on all modules")
    finally:
        handle.remove()


def test_layers() -> None:
    recurrent = nn.LSTM(2, 3, bidirectional=True)
    forwards, backwards = internals.weight_names_of(recurrent)
    named = [name for name, _ in recurrent.named_parameters()]
    assert [*forwards, *backwards] == named, changed("how a recurrent layer names its weights")
    layer = nn.ConvTranspose2d(1, 1, 3, stride=2)
    x = torch.zeros(1, 1, 4, 4)
    assert list(internals.output_padding_of(layer, x, [10, 9])) == [1, 0], changed("the padding of outputs")
    assert list(internals.output_padding_of(layer, x, None)) == [0, 0], changed("the padding of outputs")
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm2d)
    assert all(issubclass(kind, internals.AnyBatchNorm) for kind in norms), changed("the base of BatchNorms")
    both = (*norms, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    assert all(issubclass(kind, internals.BatchOrInstanceNorm) for kind in both), changed("the base of norms")
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    assert all(issubclass(kind, internals.AnyConvolution) for kind in kinds), changed("the base of convolutions")


def test_layer_versions() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert internals.layer_versions(state)[""]["version"] == 2, changed("where a state dict keeps layer versions")
    internals.set_layer_versions(state, {"": {"version": 1}})
    del state["num_batches_tracked"]
    nn.BatchNorm1d(2).load_state_dict(state)  # version 1 had no such buffer: with another one this fails
    assert internals.layer_versions({}) is None


def test_tensors() -> None:
    x = torch.zeros(4, device="meta")
    same, other = (internals.storage_id(x) == internals.storage_id(y) for y in (x[1:], torch.zeros(4, device="meta")))
    assert same and not other, changed("the identity of a storage")
    y = torch.zeros(2)
    before = internals.version_of(y)
    y.add_(1)
    assert internals.version_of(y) == before + 1, changed("how a tensor counts its writes")


def test_operators() -> None:
    aten = torch.ops.aten
    writes, reads = map(internals.writes_to_arguments, (aten.add_.Tensor, aten.add.Tensor))
    assert writes and not reads, changed("how an operator says that it writes")
    a, b = torch.randint(-128, 128, (2, 32, 8), dtype=torch.int8)
    assert torch.equal(internals.int8_matmul(a, b.T), (a.int() @ b.int().T)), changed("the product of int8 matrices")
    x, y = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4)
    if torch.backends.mkldnn.is_available():
        assert torch.equal(internals.onednn_matmul(x, y), x @ y.T), changed("oneDNN's product of matrices")


class Doubled(torch.autograd.Function):
    """y = 2 x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


def test_functions() -> None:
    y = Doubled.apply(torch.ones(2, requires_grad=True))
    assert internals.applied_function(y.grad_fn) is Doubled, changed("how a node knows its Function")


class Constant(nn.Module):
    """A forward that makes a tensor."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x + torch.tensor([1.0])]


class OwnTracer(fx.Tracer):
    """A tracer that pickle finds by its name."""


def test_graphs() -> None:
    model = fx.symbolic_trace(Constant())
    names = [name for name in internals.buffers_of(model) if name.startswith(internals.GRAPH_CONSTANT)]
    assert len(names) == 1, changed("the name of a constant in a graph")
    copy = fx.Graph()
    copy.output(copy.graph_copy(model.graph, {}))
    internals.keep_signature(model.graph, copy)
    assert fx.GraphModule(model, copy)(torch.zeros(1)) == [torch.ones(1)], changed("how a graph keeps its signature")
    internals.unpickle_with(OwnTracer, model.graph)
    again = pickle.loads(pickle.dumps(fx.GraphModule(model, model.graph)))
    assert isinstance(again, fx.GraphModule), changed("how a graph module is unpickled")


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_what_watches_operations() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(internals.operations_are_watched())
        return x * 2

    class Watching(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    look(x)
    with torch.device("cpu"):
        look(x)
    assert seen == [False, False], changed("what watches operations: nothing does here")
    seen.clear()
    torch.func.vmap(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    with Watching():
        look(x)
    with torch.device("cpu"), torch.overrides.BaseTorchFunctionMode():
        look(x)
    torch.jit.trace(look, (x,), check_trace=False)
    kinds = ("torch.vmap", "forward mode", "a dispatch mode", "a function mode", "torch.jit.trace")
    missed = [kind for kind, watched in zip(kinds, seen, strict=True) if not watched]
    assert not missed, changed(f"how one finds out that operations are watched by {missed}")


def test_batched_gradients() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(internals.is_batched(x))
        return x

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    assert seen == [False, True], changed("how a tensor under vmap is known")


def test_what_tracing_replaces() -> None:
    calls: list[str] = []
    assert callable(getattr(*internals.CAUSAL_MASK_DETECTION)), changed("how transformers look at masks")
    owner, name = internals.CHECKPOINT_START
    original = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args: calls.append(name) or original(*args))
        torch.utils.checkpoint.checkpoint(torch.relu, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert calls, changed("what a checkpoint of activations calls first")
    internals.load_dynamo()
    tree = {"a": [1, (2, 3)]}
    leaves, shape = internals.pytree.tree_flatten(tree)
    assert leaves == [1, 2, 3] and internals.pytree.tree_unflatten(leaves, shape) == tree, changed("pytree")
