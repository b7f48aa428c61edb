"""QuantLSTM, QuantGRU and QuantRNN: recurrent layers whose matrix products run on integer grids."""

from typing import Literal

import torch
from torch import nn

from qat.layers.base import default_input_spec
from qat.layers.recurrent.base import QuantRecurrent
from qat.layers.recurrent.cells import Cell, gru_cell, lstm_cell, relu_cell, tanh_cell
from qat.layers.twins import register_twin
from qat.spec import QuantSpec


@register_twin(nn.LSTM)
class QuantLSTM(QuantRecurrent, nn.LSTM):
    """`torch.nn.LSTM` with quantized weights, inputs and hidden states.

    At every step, with Q for a quantizer of learned scale, and the gates in float:
    i, f, g, o = split(Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh);  c' = sigmoid(f) c + sigmoid(i) tanh(g);
    h' = sigmoid(o) tanh(c'), with proj_size h' = Q(W_hr) Q(sigmoid(o) tanh(c')).
    Evaluation computes the products on integers, with biases rounded to int32. The number of steps is part of an
    exported graph. As for torch's own layers, `torch.compile` needs `torch._dynamo.config.allow_rnn = True`.

    Args:
        input_size ... dtype: as in `torch.nn.LSTM`, in the same order.
        weight_spec: grid of the weights; default: 8 bits, symmetric, per output channel.
        activation_spec: grid of inputs and hidden states; "default": 8 bits unsigned with a zero point; None: weights
            only. Before the first use call `qat.calibrate(layer, batches)`.

    Shapes: as torch's; see `forward`.

    >>> layer = QuantLSTM(4, 6, activation_spec=None)
    >>> output, (h, c) = layer(torch.randn(5, 2, 4))
    >>> output.shape, c.shape
    (torch.Size([5, 2, 6]), torch.Size([1, 2, 6]))
    """

    state_size = 2

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | Literal["default"] | None = "default",
    ) -> None:
        nn.LSTM.__init__(
            self, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device,
            dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, default_input_spec(activation_spec))

    def cell(self) -> Cell:
        """The LSTM's gates."""
        return lstm_cell


@register_twin(nn.GRU)
class QuantGRU(QuantRecurrent, nn.GRU):
    """`torch.nn.GRU` with quantized weights, inputs and hidden states.

    At every step, with Q for a quantizer of learned scale, and the gates in float:
    r, z = sigmoid of their shares of Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh;
    n = tanh(Q(W_in) Q(x) + b_in + r (Q(W_hn) Q(h) + b_hn));  h' = (1 - z) n + z h, with h before quantization.
    Evaluation computes the products on integers, with biases rounded to int32. The number of steps is part of an
    exported graph. As for torch's own layers, `torch.compile` needs `torch._dynamo.config.allow_rnn = True`.

    Args:
        input_size ... dtype: as in `torch.nn.GRU`, in the same order.
        weight_spec: grid of the weights; default: 8 bits, symmetric, per output channel.
        activation_spec: grid of inputs and hidden states; "default": 8 bits unsigned with a zero point; None: weights
            only. Before the first use call `qat.calibrate(layer, batches)`.

    Shapes: as torch's; see `forward`.

    >>> output, h = QuantGRU(4, 6, batch_first=True, activation_spec=None)(torch.randn(2, 5, 4))
    >>> output.shape, h.shape
    (torch.Size([2, 5, 6]), torch.Size([1, 2, 6]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | Literal["default"] | None = "default",
    ) -> None:
        nn.GRU.__init__(
            self, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, default_input_spec(activation_spec))

    def cell(self) -> Cell:
        """The GRU's gates."""
        return gru_cell


@register_twin(nn.RNN)
class QuantRNN(QuantRecurrent, nn.RNN):
    """`torch.nn.RNN` with quantized weights, inputs and hidden states.

    h' = nonlinearity(Q(W_ih) Q(x) + b_ih + Q(W_hh) Q(h) + b_hh), with Q for a quantizer of learned scale.
    Evaluation computes the products on integers, with biases rounded to int32. The number of steps is part of an
    exported graph. As for torch's own layers, `torch.compile` needs `torch._dynamo.config.allow_rnn = True`.

    Args:
        input_size ... dtype: as in `torch.nn.RNN`, in the same order; nonlinearity "tanh" or "relu".
        weight_spec: grid of the weights; default: 8 bits, symmetric, per output channel.
        activation_spec: grid of inputs and hidden states; "default": 8 bits unsigned with a zero point; None: weights
            only. Before the first use call `qat.calibrate(layer, batches)`.

    Shapes: as torch's; see `forward`.

    >>> output, h = QuantRNN(4, 6, 2, nonlinearity="relu", activation_spec=None)(torch.randn(5, 2, 4))
    >>> output.shape, h.shape
    (torch.Size([5, 2, 6]), torch.Size([2, 2, 6]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_spec: QuantSpec | None = None,
        activation_spec: QuantSpec | Literal["default"] | None = "default",
    ) -> None:
        nn.RNN.__init__(
            self, input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.add_quantizers(weight_spec, default_input_spec(activation_spec))

    def cell(self) -> Cell:
        """tanh or relu."""
        return tanh_cell if self.nonlinearity == "tanh" else relu_cell
