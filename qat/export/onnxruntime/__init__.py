"""ONNX Runtime: what it needs beyond the ONNX standard, sessions, and the proof that a file is its model."""
