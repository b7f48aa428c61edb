"""A differential fuzzer: fused and plain training step, evaluation and ONNX file of random models must agree.

`python -m tests.fuzz --cases 5000 --seed 0 --out fuzz.json` draws models as short programs, compares every way to
compute them, and prints those that differ as short scripts.
"""
