"""Static checks of quantized ONNX files of any tool against one runtime's rules."""
