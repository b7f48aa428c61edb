"""QuantLSTM and QuantGRU: recurrent layers on integer grids."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from qat.layers.function import QuantFunction
from qat.layers.twins import ActivationSpec, CompositeTwin, register_twin, share_parameters
from qat.spec import QuantSpec
from qat.torch_internals import parameters_of, weight_names_of

State = tuple[Tensor, ...]  # between steps: (hidden,), or (hidden, cell) for an LSTM; each (N, H)
Cell = Callable[[Tensor, Tensor, State], State]  # (input's product, hidden state's product, old state) to new state


class StepProduct(QuantFunction):
    """`QuantFunction` that quantizes its weight once for all time steps.

    A module that replaces it (an exporter's frozen integers) needs no `bind`: it is called at every step.
    """

    def bind(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Return this product as a function of the input alone, for one forward pass."""
        if self.calibrating:
            self.fit_weight(weight)
        input_quantizer = self.input_quantizer
        if input_quantizer is not None and not self.training and self._runs_on_integers(input_quantizer):
            integers, step = self.integers(input_quantizer, None, weight, bias), input_quantizer.grid()[0]
            return lambda x: self.integer_forward(input_quantizer(x), integers, step)
        quantized = self.quantized(weight)
        return lambda x: self.operate(x if input_quantizer is None else input_quantizer(x), quantized, bias)


def lstm_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """Compute c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(c').

    The gates i, f, g, o are in torch's order. from_input is W_ih x + b_ih, from_hidden W_hh h + b_hh, both (N, 4 H).
    """
    # The hidden state state[0] is in from_hidden already.
    ingate, forget, candidate, outgate = (from_input + from_hidden).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(ingate) * torch.tanh(candidate)
    return torch.sigmoid(outgate) * torch.tanh(cell), cell


def gru_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """Compute h' = (1 - z) n + z h, with n = tanh(from_input_n + r from_hidden_n).

    r, z = sigmoid(sums). from_input is W_ih x + b_ih, from_hidden W_hh h + b_hh, both (N, 3 H), the gates r, z, n in
    torch's order.
    """
    reset_input, update_input, new_input = from_input.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = from_hidden.chunk(3, -1)
    update = torch.sigmoid(update_input + update_hidden)
    new = torch.tanh(new_input + torch.sigmoid(reset_input + reset_hidden) * new_hidden)
    return ((1 - update) * new + update * state[0],)


# The arithmetic of one step, by torch's `mode` of the layer.
CELLS: dict[str, Cell] = {
    "LSTM": lstm_cell,
    "GRU": gru_cell,
}


def run_steps(
    steps: Sequence[Tensor], state: State, step: Callable[[Tensor, State], State], reverse: bool, packed: bool
) -> tuple[list[Tensor], State]:
    """Return the hidden states in the order of the steps, and the last state.

    If packed, the products of the input at the steps have (N_t, gates), N_t decreasing. Sequences that have ended keep
    their state; in reverse, sequences that have not begun keep the initial state.
    """
    outputs = []
    for from_input in reversed(steps) if reverse else steps:
        if packed:
            running = from_input.shape[0]
            new = step(from_input, tuple(part[:running] for part in state))
            state = tuple(torch.cat([part, rest[running:]]) for part, rest in zip(new, state, strict=True))
        else:
            new = state = step(from_input, state)
        outputs.append(new[0])
    return outputs[::-1] if reverse else outputs, state


class QuantRecurrent(CompositeTwin, nn.RNNBase):
    """Base of the recurrent twins: a product for each weight, and the loops.

    Evaluation computes the products on integers, with biases rounded to int32. The number of steps is part of an
    exported graph. As for torch's own layers, `torch.compile` needs `torch._dynamo.config.allow_rnn = True`.

    The weights stay parameters of this layer, under torch's names. `weight_ih_l0` has a `product_ih_l0`, a
    `QuantFunction` that holds the quantizers of the weight and of the tensor that it multiplies: the layer's input (all
    steps at once), the hidden state (one grid for all steps), or the hidden state before its projection. Biases,
    gates and cell state are float. So are outputs: the next step or layer quantizes what it reads.

    Arguments as of torch's layer, and those of `QuantLayer`: activation_spec is the grid of inputs and hidden states.
    """

    state_size: ClassVar[int] = 1  # tensors in the state: 2 for an LSTM

    def __init__(
        self,
        *args: Any,
        weight_spec: QuantSpec | None = None,
        activation_spec: ActivationSpec = "default",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.add_quantizers(weight_spec, activation_spec)

    def add_quantizers(self, weight_spec: QuantSpec | None, activation_spec: ActivationSpec) -> None:
        for name, (weight, _) in self.inner_weights().items():
            make = QuantFunction if name.startswith("product_ih") else StepProduct
            product = make(F.linear, tuple(weight.shape), None, weight_spec, activation_spec, weight.device)
            setattr(self, name, product)
            if not weight.is_meta:
                product.fit_weight(weight)

    def inner_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for names in weight_names_of(self):
            for name in names:
                if name.startswith("weight"):
                    bias = name.replace("weight", "bias")
                    found[name.replace("weight", "product")] = getattr(self, name), getattr(self, bias, None)
        return found

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.hidden_size)
        for name in chain.from_iterable(weight_names_of(self)):
            nn.init.uniform_(getattr(self, name), -bound, bound)

    @staticmethod
    def share(source: Any, target: Any) -> None:
        share_parameters(source, target)
        target.dropout = source.dropout
        for name, parameter in parameters_of(target).items():
            setattr(target, name, parameter)  # torch's own list of parameters follows

    @staticmethod
    def constructor_arguments(layer: Any) -> dict[str, Any]:
        # Without the dropout, about which torch would warn once more for a single layer.
        names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional"]
        if isinstance(layer, nn.LSTM):
            names.append("proj_size")
        return {name: getattr(layer, name) for name in names} | {"dtype": layer.weight_ih_l0.dtype}

    def forward(
        self, input: Tensor | PackedSequence, hx: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Any, Any]:
        """Run the sequence, with the arguments and results of torch's layer.

        An LSTM's hx that is no pair is a TypeError; wrong shapes, or an empty sequence, are a ValueError.
        """
        if isinstance(input, PackedSequence):
            sizes = [int(size) for size in input.batch_sizes]
            state = self.first_state(input.data, hx, sizes[0], True)
            if input.sorted_indices is not None:
                state = tuple(part.index_select(1, input.sorted_indices) for part in state)
            output, state = self.run_layers(input.data, state, sizes)
            if input.unsorted_indices is not None:
                state = tuple(part.index_select(1, input.unsorted_indices) for part in state)
            packed = PackedSequence(output, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
            return packed, state if self.state_size == 2 else state[0]  # no tuple from a GRU
        self.check_sequence(input)
        batched = input.dim() == 3
        swaps = batched and self.batch_first  # inside, steps stand first
        x = input.transpose(0, 1) if swaps else input if batched else input.unsqueeze(1)
        output, state = self.run_layers(x, self.first_state(x, hx, x.shape[1], batched), None)
        if not batched:
            output, state = output.squeeze(1), tuple(part.squeeze(1) for part in state)
        return output.transpose(0, 1) if swaps else output, state if self.state_size == 2 else state[0]

    def check_sequence(self, x: Tensor) -> None:
        """Refuse an input of the wrong shape, or without a step."""
        wanted = "(N, L, {0}) or (L, {0})" if self.batch_first else "(L, N, {0}) or (L, {0})"
        if x.dim() not in (2, 3) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__}: input must have shape {wanted.format(self.input_size)}, got {tuple(x.shape)}"
            )
        if x.shape[1 if x.dim() == 3 and self.batch_first else 0] == 0:
            raise ValueError(
                f"{type(self).__name__}: the sequence must have at least one step, got shape {tuple(x.shape)}"
            )

    def first_state(self, x: Tensor, hx: Any, samples: int, batched: bool) -> State:
        """Return the given state as (layers * directions, N, H) tensors, or zeros."""
        rows = self.num_layers * (2 if self.bidirectional else 1)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.state_size]
        if hx is None:
            return tuple(torch.zeros(rows, samples, width, dtype=x.dtype, device=x.device) for width in widths)
        if self.state_size == 2 and not (isinstance(hx, (tuple, list)) and len(hx) == 2):
            raise TypeError(f"{type(self).__name__}: hx must be a pair (h_0, c_0), got {type(hx).__name__}")
        given: State = tuple(hx) if self.state_size == 2 else (hx,)
        for part, width, name in zip(given, widths, ("h_0", "c_0"), strict=False):
            wanted = (rows, samples, width) if batched else (rows, width)
            if tuple(part.shape) != wanted:
                raise ValueError(f"{type(self).__name__}: {name} must have shape {wanted}, got {tuple(part.shape)}")
        return given if batched else tuple(part.unsqueeze(1) for part in given)

    def run_layers(self, x: Tensor, state: State, sizes: list[int] | None) -> tuple[Tensor, State]:
        """Run all layers, with dropout between them.

        x is (L, N, ...), packed (sum of sizes, ...); state as in forward.
        """
        ends: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for suffix in (f"l{layer}", f"l{layer}_reverse")[: 2 if self.bidirectional else 1]:
                output, end = self.run_direction(suffix, x, tuple(part[len(ends)] for part in state), sizes)
                outputs.append(output)
                ends.append(end)
            x = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
            if self.dropout > 0 and layer < self.num_layers - 1:
                x = F.dropout(x, self.dropout, self.training)
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))

    def run_direction(self, suffix: str, x: Tensor, state: State, sizes: list[int] | None) -> tuple[Tensor, State]:
        """Run one layer in one direction."""
        # The input is multiplied for all steps at once, the hidden state step by step.
        # Samples first, since quantizers expect the batch on the first axis.
        first = x.transpose(0, 1) if sizes is None else x
        from_input = self.get_submodule(f"product_ih_{suffix}")(first, *self._operands("ih", suffix))
        hidden_product, cell = self._bound("hh", suffix), CELLS[self.mode]
        projection = self._bound("hr", suffix) if self.proj_size else None

        def step(from_input: Tensor, state: State) -> State:
            new = cell(from_input, hidden_product(state[0]), state)
            return new if projection is None else (projection(new[0]), *new[1:])

        # int() makes torch.export fix the number of steps and say so, where it would silently assume it.
        length = int(from_input.shape[1]) if sizes is None else len(sizes)
        steps = from_input.unbind(1)[:length] if sizes is None else from_input.split(sizes)
        outputs, end = run_steps(steps, state, step, suffix.endswith("reverse"), sizes is not None)
        return torch.stack(outputs) if sizes is None else torch.cat(outputs), end

    def _operands(self, kind: str, suffix: str) -> tuple[Tensor, Tensor | None]:
        return getattr(self, f"weight_{kind}_{suffix}"), getattr(self, f"bias_{kind}_{suffix}", None)

    def _bound(self, kind: str, suffix: str) -> Callable[[Tensor], Tensor]:
        product, operands = self.get_submodule(f"product_{kind}_{suffix}"), self._operands(kind, suffix)
        return product.bind(*operands) if isinstance(product, StepProduct) else lambda x: product(x, *operands)


@register_twin(nn.LSTM)
class QuantLSTM(QuantRecurrent, nn.LSTM):
    """`torch.nn.LSTM` with quantized weights, inputs and hidden states.

    Arguments: see `QuantRecurrent`. At every step, with Q for a quantizer of learned scale, and the gates in float:
    i, f, g, o = split(Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh);  c' = sigmoid(f) c + sigmoid(i) tanh(g);
    h' = sigmoid(o) tanh(c'), with proj_size h' = Q(W_hr) Q(sigmoid(o) tanh(c')).

    >>> layer = QuantLSTM(4, 6, activation_spec=None)
    >>> output, (h, c) = layer(torch.randn(5, 2, 4))
    >>> output.shape, c.shape
    (torch.Size([5, 2, 6]), torch.Size([1, 2, 6]))
    """

    state_size = 2


@register_twin(nn.GRU)
class QuantGRU(QuantRecurrent, nn.GRU):
    """`torch.nn.GRU` with quantized weights, inputs and hidden states.

    Arguments: see `QuantRecurrent`. At every step, with Q for a quantizer of learned scale, and the gates in float:
    r, z = sigmoid of their shares of Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh;
    n = tanh(Q(W_in) Q(x) + b_in + r (Q(W_hn) Q(h) + b_hn));  h' = (1 - z) n + z h, with h before quantization.

    >>> output, h = QuantGRU(4, 6, batch_first=True, activation_spec=None)(torch.randn(2, 5, 4))
    >>> output.shape, h.shape
    (torch.Size([2, 5, 6]), torch.Size([1, 2, 6]))
    """
