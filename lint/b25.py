import warnings

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert not gradcheck(LegendreP3.apply, (u.detach().float().requires_grad_(),), raise_exception=False)
assert "is not a double precision floating point" in str(told[0].message)
