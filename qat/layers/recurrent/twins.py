"""QuantLSTM, QuantGRU and QuantRNN: recurrent layers whose matrix products run on integer grids."""

from torch import nn

from qat.layers.recurrent.base import QuantRecurrent
from qat.layers.recurrent.cells import Cell, gru_cell, lstm_cell, relu_cell, tanh_cell
from qat.layers.twins import register_twin


@register_twin(nn.LSTM)
class QuantLSTM(QuantRecurrent, nn.LSTM):
    """`torch.nn.LSTM` with quantized weights, inputs and hidden states; see `QuantRecurrent` for its arguments.

    At every step, with Q for a quantizer of learned scale, and the gates in float:
    i, f, g, o = split(Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh);  c' = sigmoid(f) c + sigmoid(i) tanh(g);
    h' = sigmoid(o) tanh(c'), with proj_size h' = Q(W_hr) Q(sigmoid(o) tanh(c')).

    >>> import torch
    >>> layer = QuantLSTM(4, 6, activation_spec=None)
    >>> output, (h, c) = layer(torch.randn(5, 2, 4))
    >>> output.shape, c.shape
    (torch.Size([5, 2, 6]), torch.Size([1, 2, 6]))
    """

    state_size = 2

    def cell(self) -> Cell:
        """The LSTM's gates."""
        return lstm_cell


@register_twin(nn.GRU)
class QuantGRU(QuantRecurrent, nn.GRU):
    """`torch.nn.GRU` with quantized weights, inputs and hidden states; see `QuantRecurrent` for its arguments.

    At every step, with Q for a quantizer of learned scale, and the gates in float:
    r, z = sigmoid of their shares of Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh;
    n = tanh(Q(W_in) Q(x) + b_in + r (Q(W_hn) Q(h) + b_hn));  h' = (1 - z) n + z h, with h before quantization.

    >>> import torch
    >>> output, h = QuantGRU(4, 6, batch_first=True, activation_spec=None)(torch.randn(2, 5, 4))
    >>> output.shape, h.shape
    (torch.Size([2, 5, 6]), torch.Size([1, 2, 6]))
    """

    def cell(self) -> Cell:
        """The GRU's gates."""
        return gru_cell


@register_twin(nn.RNN)
class QuantRNN(QuantRecurrent, nn.RNN):
    """`torch.nn.RNN` with quantized weights, inputs and hidden states; see `QuantRecurrent` for its arguments.

    h' = nonlinearity(Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh), with Q for a quantizer of learned scale.

    >>> import torch
    >>> output, h = QuantRNN(4, 6, 2, nonlinearity="relu", activation_spec=None)(torch.randn(5, 2, 4))
    >>> output.shape, h.shape
    (torch.Size([5, 2, 6]), torch.Size([2, 2, 6]))
    """

    def cell(self) -> Cell:
        """tanh or relu."""
        return tanh_cell if self.nonlinearity == "tanh" else relu_cell
