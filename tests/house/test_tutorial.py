"""The tutorial is true: its code runs in order, prints what it shows, and its files drive `train.py`."""

import ast
import contextlib
import gc
import io
import json
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import qat.testing
from qat.quantizer import registry
from qat.training import script as train

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "custom_function.md"
TEXT = TUTORIAL.read_text()


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the output shown below it ('' if none is)."""

    line: int
    language: str
    code: str
    shown: str

    @property
    def file(self) -> str | None:
        """The file that the block is a part of, as its first line says."""
        first = re.match(r"# (\w+\.(?:py|yaml))\n", self.code)
        return first[1] if first else None


def blocks() -> list[Block]:
    found: list[Block] = []
    end = 0
    for fence in re.finditer(r"^```(\w+)\n(.*?)^```\n", TEXT, re.DOTALL | re.MULTILINE):
        language, code = fence[1], fence[2]
        if language == "text":
            assert TEXT[end : fence.start()].strip() == "", f"an output stands alone: {code!r}"
            found[-1] = Block(found[-1].line, found[-1].language, found[-1].code, code)
        else:
            found.append(Block(TEXT.count("\n", 0, fence.end(1)) + 1, language, code, ""))
        end = fence.end()
    return found


BLOCKS = blocks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the tutorial's files, where the tests stand; the rule that they register is gone afterwards."""
    place = tmp_path_factory.mktemp("tutorial")
    for block in BLOCKS:
        if block.file:
            with (place / block.file).open("a") as file:
                file.write(block.code)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        patch.setattr(registry, "_QUANTIZERS", dict(registry._QUANTIZERS))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield place
        torch.set_num_threads(threads)
        for module in ("my_rules", "tutorial"):
            sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def names(folder: Path) -> dict[str, object]:
    """What the tutorial's session has defined at its end, every block run and every output compared."""
    module = types.ModuleType("tutorial")
    sys.modules["tutorial"] = module  # the compiler of torch 2.11 imports the module whose code it traces
    session = vars(module)
    for block in BLOCKS:
        if block.file:
            continue
        printed = io.StringIO()
        if block.language == "bash":
            command, *arguments = block.code.split()[1:]
            assert command == "train.py"
            with contextlib.redirect_stdout(printed):
                assert train.main(arguments) == 0, printed.getvalue()
            continue
        assert block.language == "python"
        code = compile("\n" * (block.line - 1) + block.code, str(TUTORIAL), "exec")
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            # torch 2.11's own, from its compiler
            warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
            exec(code, session)
        assert printed.getvalue() == block.shown, f"custom_function.md:{block.line}"
    return session


def test_code_runs_and_prints_what_is_shown(names: dict[str, object], folder: Path) -> None:
    assert {block.language for block in BLOCKS} == {"python", "bash", "yaml"}
    assert {path.name for path in folder.iterdir()} >= {"my_rules.py", "my_run.yaml", "stripes.onnx", "runs"}
    assert json.loads((folder / "runs" / "my_run" / "summary.json").read_text())["onnx"]["agreement"] >= 0.995


def test_misspelt_names_end_the_run_with_one_sentence(
    names: dict[str, object], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((folder / "runs").iterdir())
    assert train.main(["--config", "my_run.yaml", "imports=[my_rulez]"]) == 2
    sentence = f"imports[0]: no module 'my_rulez', neither in the current folder '{folder}' nor installed"
    assert capsys.readouterr().err.strip() == sentence
    assert train.main(["--config", "my_run.yaml", "quantization.weight.rule=soft_egde"]) == 2
    told = capsys.readouterr().err.strip()
    assert told.startswith("quantization.weight.rule: unknown quantizer 'soft_egde'; registered: ")
    assert "\n" not in told and "soft_edge" in told
    assert sorted((folder / "runs").iterdir()) == before


def test_links_into_the_page_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert len(links) > 5 and links <= anchors


def test_sections_are_numbered_and_listed_in_order() -> None:
    headings = re.findall(r"^## (\d+)\. (.+)$", TEXT, re.MULTILINE)
    listed = re.findall(r"^(\d+)\. \[(.+)\]\(#", TEXT, re.MULTILINE)
    assert headings == listed and [int(number) for number, _ in headings] == list(range(1, len(headings) + 1))


def test_every_part_of_ctx_that_the_issue_names_is_used() -> None:
    used = {
        node.attr
        for block in BLOCKS
        if block.language == "python"
        for node in ast.walk(ast.parse(block.code))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ctx"
    }
    assert used >= {
        "save_for_backward", "saved_tensors", "needs_input_grad", "mark_dirty", "mark_non_differentiable",
        "set_materialize_grads",
    }  # fmt: skip


# What the text says without showing it.


def function(
    forward: Callable[..., Any],
    backward: Callable[..., Any] = lambda ctx, grad: grad * 2,
    setup_context: Callable[..., None] | None = lambda ctx, inputs, output: None,
) -> type[torch.autograd.Function]:
    """A Function of these; setup_context: None where forward is given ctx."""
    parts = {"forward": forward, "backward": backward, "setup_context": setup_context}
    methods = {name: staticmethod(part) for name, part in parts.items() if part is not None}
    return type("Made", (torch.autograd.Function,), methods)


def test_autograd_is_off_in_forward_and_setup_context() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        return x * 2

    looks = function(forward, setup_context=lambda ctx, inputs, output: seen.append(torch.is_grad_enabled()))
    looks.apply(torch.ones(2, requires_grad=True))
    assert seen == [False, False]


def test_forward_with_ctx_is_refused_by_torch_func() -> None:
    old = function(lambda ctx, x: x * 2, setup_context=None)
    x = torch.ones(2, requires_grad=True)
    old.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
        torch.func.vmap(old.apply)(x.detach())


def test_an_attribute_keeps_memory_and_save_for_backward_does_not(names: dict[str, object]) -> None:
    alive = {}
    gc.disable()
    try:
        for name in ("Exp", "ForgetfulExp"):
            y = names[name].apply(torch.ones(3, requires_grad=True))  # type: ignore[attr-defined]
            seen = weakref.ref(y)
            del y
            alive[name] = seen() is not None
    finally:
        gc.enable()
    assert alive == {"Exp": False, "ForgetfulExp": True}


def test_bias_none_needs_no_gradient_and_data_neither(names: dict[str, object]) -> None:
    linear = names["LinearFunction"]
    asked = []

    class Watched(linear):  # type: ignore[misc, valid-type]
        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            asked.append(ctx.needs_input_grad)
            return linear.backward(ctx, grad)  # type: ignore[attr-defined]

    weight = torch.ones(2, 3, requires_grad=True)
    Watched.apply(torch.ones(5, 3), weight, None).sum().backward()
    assert asked == [(False, True, False)]


def test_a_forgotten_sum_is_repaired_or_refused() -> None:
    lazy = function(
        lambda x, shift: x + (shift if x.dim() == 2 else shift.view(-1, 1)), backward=lambda ctx, grad: (grad, grad)
    )
    shift = torch.zeros(3, requires_grad=True)
    lazy.apply(torch.zeros(5, 3), shift).sum().backward()
    assert shift.grad is not None and shift.grad.tolist() == [5.0, 5.0, 5.0]
    with pytest.raises(RuntimeError, match=r"got \[2, 3, 4\] but expected shape compatible with \[3\]"):
        lazy.apply(torch.zeros(2, 3, 4), shift).sum().backward()


def test_unmarked_float_outputs_require_a_gradient_and_integers_do_not() -> None:
    with_mask = function(lambda x: (x * 2, (x > 0).to(x.dtype), x.argmax()))
    y, mask, position = with_mask.apply(torch.ones(2, requires_grad=True))
    assert mask.requires_grad and not position.requires_grad
    with pytest.raises(TypeError, match="takes 2 positional arguments but 4 were given"):
        y.sum().backward()


def test_gradcheck_fails_at_the_kink_of_the_activation(names: dict[str, object]) -> None:
    activation = names["ChannelSlopeFunction"]
    kink = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    slope = torch.tensor([0.25], dtype=torch.float64)
    assert not torch.autograd.gradcheck(activation.apply, (kink, slope), raise_exception=False)  # type: ignore[attr-defined]


def test_without_the_straight_through_trick_only_second_derivatives_are_wrong(names: dict[str, object]) -> None:
    function, points, scale = names["SoftEdgeFunction"], names["points"], torch.tensor(0.1, dtype=torch.float64)

    class Plain(function):  # type: ignore[misc, valid-type]
        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            x, scale = ctx.saved_tensors
            v = x / scale
            slope = 1 / (1 + ctx.softness * (v - torch.clamp(v, ctx.low, ctx.high)).abs()) ** 2
            level = torch.clamp(torch.round(v), ctx.low, ctx.high)
            return grad * slope, (grad * (level - v * slope)).sum_to_size(scale.shape), None, None, None, None

    def plain(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Plain.apply(x, scale, -8, 7, 0.5, 1.0)
        return result

    report = qat.testing.ste_gradcheck(
        plain,
        names["pretended"],  # type: ignore[arg-type]
        (points, scale),  # type: ignore[arg-type]
        checks=["gradient", "second_order"],
        raise_exception=False,
    )
    assert [result.name for result in report.failures] == ["second_order"]


def test_the_rule_runs_in_bfloat16_on_the_levels_of_float32(names: dict[str, object]) -> None:
    quantize = names["soft_edge_quantize"]
    x = torch.linspace(-1, 1, 2001).bfloat16()
    scale = torch.tensor(0.0071)
    levels = quantize(x.float(), scale, -127, 127)  # type: ignore[operator]
    assert torch.equal(quantize(x, scale, -127, 127), levels.bfloat16())  # type: ignore[operator]
    narrow = torch.clamp(torch.round(x / scale.bfloat16()), -127, 127)
    wrong = narrow != torch.clamp(torch.round(x.float() / scale), -127, 127)
    assert wrong.float().mean() > 0.02  # what the text warns of
