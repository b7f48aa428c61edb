"""QuantLSTM, QuantGRU and QuantRNN: recurrent layers whose matrix products run on integer grids."""
