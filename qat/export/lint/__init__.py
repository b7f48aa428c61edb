"""Static checks of quantized ONNX files, from any tool, against rules of one runtime."""
