"""LiteRT (TensorFlow Lite): a frozen model as the integer operators of a .tflite file, and what runs it here.

The way through: `operators.py` marks quantization in the traced graph, `translation.py` walks it, the other files write
one kind of operation each into `file.py`. Nothing here knows ONNX.
"""
