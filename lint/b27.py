try:
    gradcheck(round_ste, (torch.tensor([0.3], dtype=torch.float64, requires_grad=True),))
except RuntimeError as error:
    print(str(error).strip())
