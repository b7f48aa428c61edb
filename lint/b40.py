model = qat.prepare(float_model, qat.QuantRecipe(weight=spec))
qat.calibrate(model, [batch(64)[0] for _ in range(4)])
before = {name: value.detach().clone() for name, value in model.named_parameters()}
train(model, steps=50, lr=0.01)

assert accuracy(model) > 0.95
learned = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
assert any(name.endswith("weight_quantizer.scale") for name in learned)  # the scales learn, like PReLU's slopes
print(qat.summary(model))
