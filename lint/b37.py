import my_rules  # registers the rule
import qat

spec = qat.QuantSpec(
    rule="soft_edge", options={"softness": 0.5}, bits=4, granularity="channel", narrow_range=True, init="mse"
)
layer = qat.QuantConv2d(3, 8, 3, padding=1, weight_spec=spec)
print(layer.weight_quantizer)
print([name for name, _ in layer.named_parameters()])
