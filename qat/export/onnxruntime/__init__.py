"""ONNX Runtime: its needs beyond the standard, sessions, the proof of a file."""
