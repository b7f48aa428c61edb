assert gradcheck(FlatCube.apply, (u,))
assert not gradgradcheck(FlatCube.apply, (u,), raise_exception=False)
