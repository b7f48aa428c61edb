"""One time step of LSTM, GRU and RNN, the loop over the steps, and the product of each step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qat.layers.function import QuantFunction

State = tuple[Tensor, ...]
"""The state between steps: (hidden,), or (hidden, cell) for an LSTM; each (N, H)."""

Cell = Callable[[Tensor, Tensor, State], State]
"""A step: (product of the input, product of the hidden state, old state) to the new state."""


class StepProduct(QuantFunction):
    """A `QuantFunction` that quantizes its weight once and multiplies with it at every time step.

    A module that replaces it (an exporter's frozen integers) needs no `bind`: it is called at every step.
    """

    def bind(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """This product with this weight and bias, as a function of the input alone.

        It chooses between integers and fake quantization as `QuantLayer.compute` does; valid for one forward pass.
        """
        if self.calibrating:
            self.fit_weight(weight)
        input_quantizer = self.input_quantizer
        if input_quantizer is not None and not self.training and self._runs_on_integers(input_quantizer):
            integers = self.integers(input_quantizer, None, weight, bias)
            return lambda x: self._integer_forward(input_quantizer(x), integers, input_quantizer)
        quantized = self.quantized(weight)
        return lambda x: self.operate(x if input_quantizer is None else input_quantizer(x), quantized, bias)


def lstm_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """c' = sigmoid(f) c + sigmoid(i) tanh(g);  h' = sigmoid(o) tanh(c'), the gates i, f, g, o in torch's order.

    Args:
        from_input: W_ih x + b_ih, shape (N, 4 H).
        from_hidden: W_hh h + b_hh, shape (N, 4 H).
        state: (h, c); h is not read.
    """
    ingate, forget, candidate, outgate = (from_input + from_hidden).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(ingate) * torch.tanh(candidate)
    return torch.sigmoid(outgate) * torch.tanh(cell), cell


def gru_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """h' = (1 - z) n + z h with r, z = sigmoid(sums), n = tanh(from_input_n + r from_hidden_n).

    Args:
        from_input: W_ih x + b_ih, shape (N, 3 H), the gates r, z, n in torch's order.
        from_hidden: W_hh h + b_hh, shape (N, 3 H).
        state: (h,), the float result of the last step.
    """
    reset_input, update_input, new_input = from_input.chunk(3, -1)
    reset_hidden, update_hidden, new_hidden = from_hidden.chunk(3, -1)
    update = torch.sigmoid(update_input + update_hidden)
    new = torch.tanh(new_input + torch.sigmoid(reset_input + reset_hidden) * new_hidden)
    return ((1 - update) * new + update * state[0],)


def tanh_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """h' = tanh(from_input + from_hidden), shapes (N, H)."""
    return (torch.tanh(from_input + from_hidden),)


def relu_cell(from_input: Tensor, from_hidden: Tensor, state: State) -> State:
    """h' = relu(from_input + from_hidden), shapes (N, H)."""
    return (torch.relu(from_input + from_hidden),)


def run_steps(
    steps: Sequence[Tensor], state: State, step: Callable[[Tensor, State], State], reverse: bool, packed: bool
) -> tuple[list[Tensor], State]:
    """Carry the state over the time steps.

    Args:
        steps: the product of the input at every step, (N, gates) each; if packed (N_t, gates), N_t decreasing.
        state: the state before the first step, (N, ...) each.
        step: one step.
        reverse: whether to go from the last step to the first.
        packed: whether N_t differs between steps. Sequences that have ended keep their state; in reverse, sequences
            that have not begun keep the initial state.

    Returns:
        The hidden states in the order of the steps, and the state at the end.
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
