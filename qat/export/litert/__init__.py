"""LiteRT (TensorFlow Lite): a frozen model as integer operators of a .tflite file.

The way through: `translation.py` marks quantization in the traced graph and walks it, `products.py` and `operations.py`
write one kind of operation each into `file.py`. Nothing here knows ONNX.
"""
