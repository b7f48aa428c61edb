for wrong in ({"options": {"softnes": 0.5}}, {"options": {"softness": -1.0}}, {"symmetric": False}):
    try:
        qat.QuantConv2d(3, 8, 3, weight_spec=qat.QuantSpec(rule="soft_edge", **wrong))
    except ValueError as error:
        print(error)
