"""`PreparedGraph`: a prepared model as a graph that follows replaced modules."""

import copy
import functools
import logging
import pickle
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import fx, nn

from qat.graph.guards import expect_default
from qat.graph.nodes import Written, read, written
from qat.preparation.replacements import ModuleSnapshot, follow_replacements, module_names
from qat.preparation.report import VERDICTS
from qat.torch_internals import GRAPH_CONSTANT, children_of, hooks_of, pytree, unsaved_buffers_of, version_of

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("qat")

OF_ONE_MODEL = "GraphModuleImpl"
"""Name of the class that torch.fx creates for every model, to find its base class."""

Forward = Callable[..., Any]
"""A function of a prepared model and its inputs."""


class Block(nn.Module):
    """A block or container without its forward: children by index or by name.

    It answers `model.layer1[0]`, `[-1]`, `len` and iteration. A prepared model calls its layers, with their grids, not
    blocks. It has the attributes of the float model's block, and the methods of its class, `float_class`.
    """

    def __len__(self) -> int:
        return 1 + max((int(name) for name in children_of(self) if name.isdigit()), default=-1)

    def __bool__(self) -> bool:
        return True  # also without children, where its length is 0

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, int) and key < 0:
            key += len(self)
        if (child := children_of(self).get(str(key))) is None:
            raise IndexError(f"{type(self).__name__} has no child {key!r}; it has {', '.join(children_of(self))}")
        return child

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # what the class of the float model's module has: a method, a property
            kept = vars(self).get("float_class")
            owners = () if kept is None else kept.__mro__  # getattr_static would find what type has: __name__
            found = next((vars(owner)[name] for owner in owners if name in vars(owner)), None)
            if found is None:
                raise
            return found.__get__(self, kept) if hasattr(found, "__get__") else found


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return a module's attributes that are not torch's own, nor parameters and such."""
    torchs_own = vars(nn.Module()).keys()
    return {
        key: value
        for key, value in vars(module).items()
        if key not in torchs_own and not key.startswith(GRAPH_CONSTANT)
    }


def keep_attributes(attributes: dict[str, object], module: nn.Module) -> None:
    """Set the attributes that a module lacks, since other code may read them."""
    for key, value in attributes.items():
        if not hasattr(module, key):
            setattr(module, key, value)


def keep_class(original: nn.Module, module: nn.Module) -> None:
    """Give a `Block` the original's class again, so that it has the class's methods."""
    if type(module) is Block and not isinstance(original, fx.GraphModule):
        object.__setattr__(module, "__class__", type(original))


class PreparedGraph(Block, fx.GraphModule):
    """A traced model, or a traced part of one, whose layers and weights are quantized.

    The next forward notices modules that were replaced. Attributes (notes on layers in float, `backbone.out_channels`)
    survive copies and pickles. Temporary state is kept on the class, since torch.fx creates one class for every model.
    Methods and attributes begin with an underscore, so that they do not collide with the names of a model's modules.
    """

    _snapshot: ClassVar[ModuleSnapshot | None] = None
    _generated: ClassVar[Forward]
    # When training began, the first value of each parameter, and the versions of gradients that were there already.
    _begun_with: ClassVar[tuple[list[Any], dict[int, int]] | None] = None

    def recompile(self) -> Any:
        """Generate forward from the graph again."""
        code = super().recompile()
        for node in self.graph.nodes:  # torch.export, and whoever reads the tensors of a result, look inside
            known = node.target in pytree.SUPPORTED_NODES
            if isinstance(node.target, type) and is_dataclass(node.target) and not known:
                torch.export.register_dataclass(node.target)
        for block in [module for module in self.modules() if type(module) is nn.Module]:  # torch.fx's own
            block.__class__ = Block
        cls = type(self)
        cls._generated = cls.forward

        @functools.wraps(cls.forward)
        def forward(self: PreparedGraph, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling():  # Dynamo cannot follow replaced modules
                return self._generated(*args, **kwargs)
            self._follow_changes()  # which may generate it anew
            try:
                return self._generated(*args, **kwargs)
            except (AttributeError, TypeError) as error:
                self._name_left_out(error, args, kwargs)
                raise

        setattr(cls, "forward", forward)  # noqa: B010 (a method)
        self._forget()
        return code

    def _name_left_out(self, error: Exception, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        # A ValueError for an error of forward if an argument that the example inputs had is left out
        arguments = [node for node in self.graph.nodes if node.op == "placeholder"]
        names = [str(node.target) for node in arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, node in zip(names, arguments, strict=True):
            read = any(user.target is not expect_default for user in node.users)
            if read and node.args and given.get(name) is None and given.keys() <= set(names):
                raise ValueError(
                    f"the model was prepared with its argument {name!r}, which this call leaves out; give it, or"
                    " prepare the model with example_inputs that leave it out too"
                ) from error

    def _fused_engine(self) -> Any:
        # The model as the engine that trains it faster, and can check and explain that (`qat.codes`); None if there is
        # none.
        return None

    def _forget(self) -> None:
        type(self)._snapshot = None

    def _follow_changes(self) -> bool:
        cls = type(self)
        if cls._snapshot is not None and cls._snapshot.is_unchanged():
            return False
        known = set()
        if cls._snapshot is not None:
            cls._snapshot.warn_of_attributes()
            known = cls._snapshot.silent
        changed = follow_replacements(self)
        if changed:
            self.recompile()
        self._forget()
        cls._snapshot = ModuleSnapshot(self, module_names(self))
        cls._snapshot.warn_of_hooks(known)
        return changed

    def train(self, mode: bool = True) -> "Self":
        """Follow replaced modules now: torch.compile, which may come next, cannot."""
        cls = type(self)
        held = [each for each in self.parameters() if type(each) is nn.Parameter and each.numel() and not each.is_meta]
        firsts = [each.detach().flatten()[0].item() for each in held]  # some optimizers leave no new version
        versions = {id(each.grad): version_of(each.grad) for each in held if each.grad is not None}
        if mode:
            cls._begun_with = firsts, versions
        elif cls._begun_with and cls._begun_with[0] == firsts and versions.items() - cls._begun_with[1].items():
            cls._begun_with = None
            log.warning(
                "%s was given gradients in training, and no parameter has changed: an optimizer that was made before"
                " qat.prepare steps the float model's; make it of the prepared one's", type(self).__name__,
            )  # fmt: skip
        model = super().train(mode)
        if not self._is_meta_only():
            self._follow_changes()
        return model

    def _is_meta_only(self) -> bool:
        return not any(parameter.device.type in ("cpu", "cuda") for parameter in self.parameters())

    def __reduce__(self) -> tuple[object, ...]:
        # torch.fx would trace the generated code again, which not every code allows
        held = {key: value for key, value in vars(self).items() if key not in ("_graph", VERDICTS)}  # of this machine
        return unpickled, (class_of(self), type(self).__name__, held, written(self.graph))

    def __deepcopy__(self, memo: dict[int, object]) -> "PreparedGraph":
        known = dict(memo)
        try:
            twin = cast("PreparedGraph", super().__deepcopy__(memo))
        except TypeError:  # a lock, an open file, a SummaryWriter: copies share what cannot be copied
            memo.clear()  # of what the failed copy left
            memo.update(known)
            for value in [value for each in self.modules() for value in plain_attributes(each).values()]:
                try:
                    copy.deepcopy(value)
                except TypeError:
                    memo[id(value)] = value
            twin = cast("PreparedGraph", super().__deepcopy__(memo))
        type(twin).__name__ = type(self).__name__  # the name that it prints
        for name, module in self.named_modules():
            part = twin.get_submodule(name)
            keep_class(module, part)
            keep_attributes(copy.deepcopy(plain_attributes(module), memo), part)
            unsaved_buffers_of(part).update(unsaved_buffers_of(module))  # torch 2.11 forgets them
        return twin


def keep_all_attributes(prepared: nn.Module, model: nn.Module) -> None:
    """Keep attributes of the model and its blocks, and methods of their classes."""
    parts = dict(prepared.named_modules())
    for name, module in model.named_modules():
        twin = parts.get(name)
        if isinstance(twin, Block):
            own = {} if type(module).__module__.startswith("torch.") else {"float_class": type(module)}
            kept = plain_attributes(module) | own  # torch's containers would append what no graph calls
            keep_attributes({key: value for key, value in kept.items() if _is_storable(value)}, twin)
            if any(hooks_of(module)):
                log.warning("prepare: the graph holds what hooks of %r computed, and they do not run again", name)


def _is_storable(value: object) -> bool:
    try:  # fails for a lambda, a local class, an open file
        pickle.dumps(value)
    except Exception:  # whatever its class raises
        return False
    return True


def class_of(model: PreparedGraph) -> type[PreparedGraph]:
    """Return the class of a model below the one that torch.fx created for it alone."""
    return next(base for base in type(model).__mro__ if base.__qualname__.split(".")[-1] != OF_ONE_MODEL)


def unpickled(cls: type[PreparedGraph], name: str, held: dict[str, object], nodes: Written) -> PreparedGraph:
    """Return the model that `PreparedGraph.__reduce__` pickled."""
    model: PreparedGraph = cls.__new__(cls)
    type(model).__name__ = name  # that it prints
    vars(model).update(held)
    model.graph = read(nodes)
    return model
