"""What a runtime would make of any ONNX file with quantizers, found without running it: facts, and who minds them."""
