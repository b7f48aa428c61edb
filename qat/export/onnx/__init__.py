"""The integers spelled as ONNX: operators, initializers and names."""
