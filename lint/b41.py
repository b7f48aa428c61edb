qat.export_onnx(model, "stripes.onnx", test_images[:2])
found = qat.verify_onnx("stripes.onnx", model, [(test_images, test_labels)])
print(f"{found.samples} samples, agreement {found.agreement}")
assert found.agreement == 1.0
